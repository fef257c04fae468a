//! Memory that is kept as the files of a DAX file system.
//!
//! The kernel takes RAM for persistent memory where its command line says so (`memmap=`, Documentation/admin-guide/
//! kernel-parameters.rst), or where the firmware does. A file system on it that is mounted with `dax` has no page
//! cache: who maps a file maps that memory (Documentation/filesystems/dax.rst). The memory survives a kexec where
//! the next kernel sets the same part aside; its contents are lost with the power, unless it really is persistent.

use crate::{CommandLine, HostRebootError, Reservation};
use procfs::process::{MountInfo, Process};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const GIB: u64 = 1 << 30;
const DEVICES: &str = "/sys/bus/nd/devices";
/// The driver of persistent memory that is the kernel's word, or the firmware's, for RAM.
const LEGACY: &str = "e820";
/// How long a device may take to appear after boot.
const APPEARS_WITHIN: Duration = Duration::from_secs(10);

/// A file system whose files are memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaxMount {
    /// Where it is mounted.
    pub point: PathBuf,
    /// Its type.
    pub file_system: String,
    /// Its device, as it was called.
    pub device: PathBuf,
    /// The physical memory of the device's region.
    pub memory: Reservation,
    /// Whether the kernel's command line alone makes it persistent memory: the next one must say the same.
    pub by_command_line: bool,
}

/// Why a file system is not mounted.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct MountError {
    what: String,
    /// Whether what was on it is lost: the memory was used for something else, or has lost its power.
    pub is_lost: bool,
}

/// Whether a file's pages are those of the memory itself.
pub fn is_dax(path: &Path) -> bool {
    fs::File::open(path).is_ok_and(|file| dewar_kernel::is_dax(&file).unwrap_or(false))
}

/// Where file systems are mounted whose files are memory.
pub fn mounts() -> Vec<PathBuf> {
    let mounts = Process::myself().and_then(|it| it.mountinfo());
    let mounts = mounts.map(|mounts| mounts.0).unwrap_or_default();
    mounts.into_iter().filter(is_always).map(|mount| mount.mount_point).collect()
}

/// What to say on this kernel's command line to have half of its largest piece of RAM set aside, in whole GiB, at the
/// end of that piece.
pub fn suggestion() -> String {
    let text = fs::read_to_string("/proc/iomem").unwrap_or_default();
    largest_ram(&text)
        .map_or_else(|| "memmap=SIZE!START".to_owned(), |ram| half_of(ram).to_string())
}

fn largest_ram(iomem: &str) -> Option<Reservation> {
    let range = |line: &str| {
        let (range, _) = line.split_once(" : System RAM").filter(|_| !line.starts_with(' '))?;
        let (start, last) = range.split_once('-')?;
        let (start, last) =
            (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(last, 16).ok()?);
        Some(Reservation { start, bytes: last.checked_sub(start)?.checked_add(1)? })
    };
    // What is not root's to see is all zeros.
    iomem.lines().filter_map(range).filter(|ram| ram.bytes > GIB).max_by_key(|ram| ram.bytes)
}

fn half_of(ram: Reservation) -> Reservation {
    let bytes = (ram.bytes / 2 / GIB).max(1) * GIB;
    let start = (ram.start + ram.bytes - bytes) / GIB * GIB;
    Reservation { start, bytes }
}

fn is_always(mount: &MountInfo) -> bool {
    match mount.super_options.get("dax") {
        Some(value) => value.as_deref().is_none_or(|value| value == "always"),
        None => false,
    }
}

impl DaxMount {
    /// The one that a file of it is on; nothing where the file is on no memory.
    ///
    /// # Errors
    /// Where the kernel does not tell of its mounts or of the memory.
    pub fn of(file: &Path) -> Result<Option<Self>, HostRebootError> {
        // A file without a name, to which the path is a link, is in no mount.
        if !is_dax(file) {
            return Ok(None);
        }
        let failed = HostRebootError::file("look at the file system of", file);
        let Some(found) = mount_of(file).map_err(failed)? else { return Ok(None) };
        let sysfs = Path::new("/sys/dev/block").join(&found.majmin);
        let sysfs = sysfs.canonicalize().map_err(HostRebootError::file("look at", &sysfs))?;
        let failed = HostRebootError::file("look for the memory of", &sysfs);
        let region =
            ancestor(&sysfs, "region").ok_or(io::ErrorKind::NotFound.into()).map_err(failed)?;
        let memory = memory_of(&region).map_err(HostRebootError::file("look at", &region))?;
        let provider =
            ancestor(&sysfs, "ndbus").and_then(|bus| fs::read_to_string(bus.join("provider")).ok());
        let is_legacy = provider.is_some_and(|provider| provider.trim() == LEGACY);
        let said =
            CommandLine::present().map_err(HostRebootError::file("read", "/proc/cmdline"))?;
        Ok(Some(Self {
            device: PathBuf::from("/dev").join(sysfs.file_name().unwrap_or_default()),
            point: found.mount_point,
            file_system: found.fs_type,
            memory,
            // Where neither is seen to say so, the next one must say it, too.
            by_command_line: is_legacy && (says(&said, memory) || !is_firmwares(memory)),
        }))
    }

    /// That a kernel with this command line leaves the memory as it is, and finds the file system there.
    ///
    /// # Errors
    /// The words that are missing.
    pub fn check(&self, line: &CommandLine) -> Result<(), String> {
        // Of another size, or joined with a neighbour, it would be another device.
        if !self.by_command_line || line.reservations().contains(&self.memory) {
            return Ok(());
        }
        Err(format!(
            "the new kernel's command line does not set the memory of {} aside: add {}",
            self.point.display(),
            self.memory
        ))
    }

    /// Whether it is mounted.
    pub fn is_mounted(&self) -> bool {
        let here = mount_of(&self.point).ok().flatten();
        here.is_some_and(|it| it.mount_point == self.point && it.fs_type == self.file_system)
    }

    /// Mounts it again, after the kernel was replaced.
    ///
    /// # Errors
    /// Where it cannot be; the error says whether its content is lost.
    pub fn mount_again(&self) -> Result<(), MountError> {
        if self.is_mounted() {
            return Ok(());
        }
        let failed = |what: String, is_lost: bool| MountError { what, is_lost };
        let named = |what: &str, path: &Path, error: &dyn std::fmt::Display| {
            format!("{what} {}: {error}", path.display())
        };
        let device = self.find_device().map_err(|error| {
            // A kernel that was not told to set the memory aside has used it.
            let line = CommandLine::present();
            let is_lost = line.is_ok_and(|line| self.check(&line).is_err());
            failed(named("find", &self.device, &error), is_lost)
        })?;
        fs::create_dir_all(&self.point)
            .map_err(|error| failed(named("create", &self.point, &error), false))?;
        let options = CString::from(c"dax");
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount(&device, &self.point, self.file_system.as_str(), flags, options.as_c_str()).map_err(
            |error| {
                // EINVAL: there is no file system of this type, or this kernel cannot use it so (mount(2)).
                let is_lost = error == Errno::INVAL && !may_hold(&device, &self.file_system);
                failed(named("mount", &device, &error), is_lost)
            },
        )
    }

    /// The device that this memory has now: devices are numbered as they are found.
    fn find_device(&self) -> io::Result<PathBuf> {
        let deadline = Instant::now() + APPEARS_WITHIN;
        let name = self.device.file_name().unwrap_or_default().to_string_lossy();
        // `pmem0p1`: its first partition.
        let part =
            name.trim_start_matches("pmem").trim_start_matches(|it: char| it.is_ascii_digit());
        loop {
            if let Some(disk) = disks_of(self.memory)?.into_iter().next() {
                let device = PathBuf::from("/dev").join(format!("{disk}{part}"));
                if device.exists() {
                    return Ok(device);
                }
            }
            if Instant::now() > deadline {
                let what = format!("the kernel has no persistent memory of {}", self.memory);
                return Err(io::Error::new(io::ErrorKind::NotFound, what));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn says(line: &CommandLine, memory: Reservation) -> bool {
    line.reservations().iter().any(|it| it.covers(&memory))
}

/// Whether the firmware itself says that this memory is persistent (Documentation/ABI/testing/sysfs-firmware-memmap).
fn is_firmwares(memory: Reservation) -> bool {
    let entries = fs::read_dir("/sys/firmware/memmap").into_iter().flatten().flatten();
    let covers = |folder: PathBuf| -> Option<bool> {
        let text = |name: &str| fs::read_to_string(folder.join(name)).ok();
        let number =
            |name: &str| u64::from_str_radix(text(name)?.trim().trim_start_matches("0x"), 16).ok();
        let (start, last) = (number("start")?, number("end")?);
        let bytes = last.checked_sub(start)?.checked_add(1)?;
        let is_persistent = text("type")?.to_lowercase().contains("persistent");
        Some(is_persistent && Reservation { start, bytes }.covers(&memory))
    };
    entries.map(|entry| entry.path()).filter_map(covers).any(|it| it)
}

/// The disks that are this memory.
fn disks_of(memory: Reservation) -> io::Result<Vec<String>> {
    let Ok(devices) = fs::read_dir(DEVICES) else { return Ok(Vec::new()) };
    let mut disks = Vec::new();
    for region in devices.flatten().map(|entry| entry.path()) {
        let is_region =
            region.file_name().is_some_and(|it| it.to_string_lossy().starts_with("region"));
        if !is_region || memory_of(&region).ok() != Some(memory) {
            continue;
        }
        for namespace in fs::read_dir(&region)?.flatten() {
            let blocks = fs::read_dir(namespace.path().join("block"));
            let names = blocks.into_iter().flatten().flatten().map(|it| it.file_name());
            disks.extend(names.filter_map(|name| name.into_string().ok()));
        }
    }
    Ok(disks)
}

/// The mount that a path is in: the last one over it.
fn mount_of(path: &Path) -> io::Result<Option<MountInfo>> {
    let path = path.canonicalize()?;
    let mounts = Process::myself().and_then(|it| it.mountinfo()).map_err(io::Error::other)?;
    let over = mounts.0.into_iter().filter(|mount| path.starts_with(&mount.mount_point));
    Ok(over.max_by_key(|mount| mount.mount_point.components().count()))
}

/// The device above one in sysfs that is called so, and a number.
fn ancestor(sysfs: &Path, kind: &str) -> Option<PathBuf> {
    let is_it = |path: &&Path| {
        let name = path.file_name().map(|it| it.to_string_lossy().into_owned()).unwrap_or_default();
        let number = name.strip_prefix(kind).filter(|it| !it.is_empty());
        number.is_some_and(|number| number.chars().all(|digit| digit.is_ascii_digit()))
    };
    sysfs.ancestors().find(is_it).map(Path::to_owned)
}

fn memory_of(region: &Path) -> io::Result<Reservation> {
    let number = |name: &str| {
        let text = fs::read_to_string(region.join(name))?;
        let text = text.trim();
        let parsed = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        parsed.map_err(io::Error::other)
    };
    Ok(Reservation { start: number("resource")?, bytes: number("size")? })
}

/// Whether a file system of this type may begin on a device: it has its magic number, or cannot be read.
fn may_hold(device: &Path, file_system: &str) -> bool {
    let (offset, magic): (u64, &[u8]) = match file_system {
        "ext4" => (1080, &[0x53, 0xef]),
        "xfs" => (0, b"XFSB"),
        _ => return true,
    };
    let mut found = vec![0; magic.len()];
    let read = fs::File::open(device).and_then(|it| it.read_exact_at(&mut found, offset));
    read.is_err() || found == magic
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount() -> DaxMount {
        DaxMount {
            point: "/mnt/guests".into(),
            file_system: "ext4".to_owned(),
            device: "/dev/pmem0".into(),
            memory: Reservation { start: 4 << 30, bytes: 1 << 30 },
            by_command_line: true,
        }
    }

    #[test]
    fn a_command_line_must_set_the_same_memory_aside() {
        let check = |line: &str| mount().check(&CommandLine::new(line));
        assert_eq!(check("quiet memmap=1024M!0x100000000"), Ok(()));
        for line in ["", "memmap=2G!4G", "memmap=1G!5G", "memmap=1G$4G", "memmap=512M!4G"] {
            let why = check(line).expect_err(line);
            assert!(why.ends_with("add memmap=1G!0x100000000"), "{why}");
        }
        let persistent = DaxMount { by_command_line: false, ..mount() };
        assert_eq!(persistent.check(&CommandLine::new("quiet")), Ok(()));
    }

    #[test]
    fn a_device_that_cannot_be_mounted_may_still_hold_the_guests() {
        let device = tempfile::NamedTempFile::new().expect("device");
        let put = |offset: u64, bytes: &[u8]| {
            let file = device.as_file();
            file.set_len(0).and_then(|()| file.set_len(4096)).expect("empty");
            file.write_all_at(bytes, offset).expect("write");
        };
        put(0, b"");
        assert!(!may_hold(device.path(), "ext4") && !may_hold(device.path(), "xfs"));
        put(1080, &[0x53, 0xef]);
        assert!(may_hold(device.path(), "ext4") && !may_hold(device.path(), "xfs"));
        put(0, b"XFSB");
        assert!(may_hold(device.path(), "xfs") && !may_hold(device.path(), "ext4"));
        assert!(may_hold(Path::new("/nonexistent"), "ext4"), "not known to be lost");
    }

    #[test]
    fn what_is_above_a_device_is_found_by_its_name() {
        let sysfs = Path::new(
            "/sys/devices/platform/e820_pmem/ndbus0/region0/namespace0.0/block/pmem0/pmem0p1",
        );
        let region = ancestor(sysfs, "region").expect("a region");
        assert!(region.ends_with("ndbus0/region0"), "{}", region.display());
        assert!(ancestor(sysfs, "ndbus").is_some_and(|it| it.ends_with("ndbus0")));
        assert_eq!(ancestor(sysfs, "nvme"), None);
    }

    #[test]
    fn half_of_the_largest_piece_is_suggested() {
        let iomem = "00001000-0009fbff : System RAM\n00100000-bffdffff : System RAM\n  01000000-01dfffff : Kernel code\n\
                     100000000-63fffffff : System RAM\n640000000-64fffffff : Reserved\n";
        let ram = largest_ram(iomem).expect("RAM");
        assert_eq!(ram, Reservation { start: 4 << 30, bytes: 21 << 30 });
        let half = half_of(ram);
        assert_eq!(half.to_string(), "memmap=10G!0x3c0000000");
        assert!(ram.covers(&half));
        assert_eq!(largest_ram("00000000-00000000 : System RAM\n"), None);
    }

    #[test]
    fn a_region_says_where_it_is() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("resource"), "0x100000000\n").expect("a file");
        fs::write(folder.path().join("size"), "1073741824\n").expect("a file");
        assert_eq!(memory_of(folder.path()).expect("a region"), mount().memory);
        fs::write(folder.path().join("size"), "no\n").expect("a file");
        assert!(memory_of(folder.path()).is_err());
    }

    #[test]
    fn ordinary_files_are_on_no_memory() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(!is_dax(file.path()));
        assert_eq!(DaxMount::of(file.path()).expect("a file system"), None);
    }
}
