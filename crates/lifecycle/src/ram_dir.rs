//! Where RAM files go if the user does not say.
//!
//! QEMU's own RAM is made of transparent huge pages. A file in a tmpfs has them
//! only where the tmpfs was mounted so, and no distribution mounts `/dev/shm`
//! so: a guest there runs about 5 % slower. So root's guests get a tmpfs of
//! Dewar's own, mounted once with `huge=advise` (tmpfs(5)), which QEMU's
//! `madvise` answers. It stays until the host restarts; empty it costs nothing.
//!
//! In a mount namespace of a service's own nothing is mounted: a later command from
//! outside would not find the RAM files there. What is mounted already, seen and
//! writable is used everywhere.

use rustix::fs::{Access, FlockOperation, access, flock};
use rustix::mount::{MountFlags, mount};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Where everybody may make shared memory.
const COMMON: &str = "/dev/shm";
/// Dewar's own tmpfs.
pub const OWN: &str = "/run/dewar/ram";
/// Who mounts it waits for others who do.
const OWN_LOCK: &str = "/run/dewar/lock";
/// Nearly all memory: what is promised to guests is counted ([`Host::ram_room`]), and half
/// of the memory, the kernel's default, would be refused to guests while it is free. Guests'
/// names are not everybody's to read.
///
/// [`Host::ram_room`]: crate::host::Host::ram_room
const OPTIONS: &std::ffi::CStr = c"huge=advise,mode=0711,size=95%";
/// How long another command may take to mount it.
const MOUNTED_WITHIN: Duration = Duration::from_secs(5);

/// The folder that was asked for, or else the best one that this host has; from the root,
/// since QEMU and later commands are in other folders.
pub fn ram_dir(asked: Option<PathBuf>) -> PathBuf {
    let whole = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
    asked.map(whole).unwrap_or_else(|| {
        if !gives_huge_pages(COMMON) && !is_ours() && may_mount() {
            // Where it cannot be had, the common one does.
            let _ = mount_own();
        }
        let _ = update_own();
        ram_dir_now().to_owned()
    })
}

/// The same, but nothing is mounted for it.
pub fn ram_dir_now() -> &'static Path {
    match gives_huge_pages(COMMON) || !is_ours() {
        true => Path::new(COMMON),
        false => Path::new(OWN),
    }
}

/// The folders in which RAM files may be that no guest's record tells of.
pub fn usual_dirs() -> [&'static Path; 2] {
    [Path::new(COMMON), Path::new(OWN)]
}

/// Where RAM files have huge pages, or will have; or what would give them some.
pub fn huge_pages() -> Result<String, String> {
    match [COMMON, OWN].map(gives_huge_pages) {
        [true, _] => Ok(format!("in {COMMON}")),
        [_, true] if is_ours() => Ok(format!("in {OWN}")),
        [_, false] if may_mount() => Ok(format!("'dewar run' mounts {OWN} with them")),
        _ => Err(format!("no: 'mount -o remount,huge=advise {COMMON}' allows them")),
    }
}

/// Whether our tmpfs is there, and we can make files in it.
fn is_ours() -> bool {
    gives_huge_pages(OWN) && access(OWN, Access::WRITE_OK).is_ok()
}

fn mount_own() -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(OWN)?;
    let lock = lock()?;
    // Another command may have mounted it meanwhile, or somebody something else:
    // a second mount would hide what is in the first.
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    if options(&mounts()?, OWN).is_none() {
        mount("dewar", OWN, "tmpfs", flags, OPTIONS)?;
    }
    drop(lock);
    Ok(())
}

/// Gives a tmpfs of ours that an older version mounted its size and its rights.
fn update_own() -> io::Result<()> {
    let mounts = mounts()?;
    let is_whole = |options: &str| options.split(',').any(|it| it.starts_with("size="));
    if !is_ours() || options(&mounts, OWN).is_none_or(is_whole) || !may_mount() {
        return Ok(());
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount_remount(OWN, flags, OPTIONS)?;
    fs::set_permissions(OWN, Permissions::from_mode(0o711))
}

/// The right to mount it. Only root's: another user that may open the file could keep it for ever.
fn lock() -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).mode(0o600).open(OWN_LOCK)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    let deadline = Instant::now() + MOUNTED_WITHIN;
    while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if error != rustix::io::Errno::WOULDBLOCK || Instant::now() > deadline {
            return Err(error.into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(file)
}

/// Whether we are root, and what we mount is seen by the rest of the host.
fn may_mount() -> bool {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt"));
    let is_the_hosts = match (namespace("self"), namespace("1")) {
        (Ok(ours), Ok(first)) => ours == first,
        // The first process hides it.
        _ => mounts().is_ok_and(|mounts| !is_below_another(&mounts)),
    };
    is_the_hosts && rustix::process::geteuid().is_root()
}

/// Whether a tmpfs gives huge pages to those who ask, as QEMU does.
fn gives_huge_pages(path: &str) -> bool {
    mounts().is_ok_and(|mounts| has_huge_pages(&mounts, path))
}

/// The mounts that we see, as in proc_pid_mountinfo(5). Paths may have any bytes.
fn mounts() -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read("/proc/self/mountinfo")?).into_owned())
}

/// Whether mounts come into this namespace from another, and not back: that of a service.
fn is_below_another(mounts: &str) -> bool {
    let mut root = mounts.lines().filter(|line| line.split(' ').nth(4) == Some("/"));
    root.any(|line| line.contains(" master:"))
}

fn has_huge_pages(mounts: &str, path: &str) -> bool {
    let mut all = options(mounts, path).unwrap_or_default().split(',');
    all.any(|it| it.strip_prefix("huge=").is_some_and(|huge| huge != "never"))
}

/// The options of the last file system that was mounted on `path`.
fn options<'m>(mounts: &'m str, path: &str) -> Option<&'m str> {
    let fields = |line: &'m str| line.split(' ').collect::<Vec<_>>();
    let last = mounts.lines().map(fields).rfind(|fields| fields.get(4) == Some(&path))?;
    last.last().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mount_tells() {
        let mounts = "25 1 0:23 / /dev/shm rw,nosuid - tmpfs tmpfs rw,huge=always\n\
                      40 1 0:39 / /dev/shm rw - tmpfs tmpfs rw,size=1g,huge=advise,inode64\n\
                      41 1 0:40 / /dev rw - tmpfs tmpfs rw\n";
        assert_eq!(options(mounts, "/dev/shm"), Some("rw,size=1g,huge=advise,inode64"));
        assert!(has_huge_pages(mounts, "/dev/shm"));
        assert!(!has_huge_pages(mounts, "/dev") && !has_huge_pages(mounts, "/run"));
        // It is there, though it gives none: nothing must be mounted over it.
        assert_eq!(options(mounts, "/dev"), Some("rw"));
        assert_eq!(options(mounts, "/run"), None);
    }

    #[test]
    fn a_services_namespace_is_below_the_hosts() {
        assert!(is_below_another("27 1 254:0 / / rw master:1 - ext4 /dev/vda rw\n"));
        assert!(!is_below_another("27 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n"));
    }
}
