//! Where RAM files go when nobody says.
//!
//! QEMU's own RAM is made of transparent huge pages. A file in a tmpfs has them
//! only where the tmpfs was mounted so, and no distribution mounts `/dev/shm`
//! so: a guest there runs about 5 % slower. So root's guests get a tmpfs of
//! Dewar's own, mounted once with `huge=advise` (tmpfs(5)), which QEMU's
//! `madvise` answers. It stays until the host restarts; empty it costs nothing.
//!
//! In a mount namespace of somebody's own (a service's, a container's) nothing is
//! mounted: a later command from outside would not find the RAM files there.
//! What is mounted already and seen is used everywhere.

use rustix::fs::{FlockOperation, flock};
use rustix::mount::{MountFlags, mount};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Where everybody may make shared memory.
pub const COMMON: &str = "/dev/shm";
/// Dewar's own tmpfs, and who mounts it waits for others who do.
const OWN: &str = "/run/dewar/ram";
const OWN_LOCK: &str = "/run/dewar/lock";
/// The kernel's default is half of memory; guests may want more.
const OPTIONS: &std::ffi::CStr = c"huge=advise,size=90%,mode=0755";

/// The folder that was asked for, or else the best one that this host has.
pub fn ram_dir(asked: Option<PathBuf>) -> PathBuf {
    asked.unwrap_or_else(|| match gives_huge_pages(Path::new(COMMON)) || !can_be_ours() {
        true => COMMON.into(),
        false => OWN.into(),
    })
}

/// The folders in which RAM files may be that no guest's record tells of.
pub fn usual_dirs() -> [&'static Path; 2] {
    [Path::new(COMMON), Path::new(OWN)]
}

/// Where RAM files have huge pages, or will have; or what would give them some.
pub fn huge_pages() -> Result<String, String> {
    match [COMMON, OWN].into_iter().find(|it| gives_huge_pages(Path::new(it))) {
        Some(folder) => Ok(format!("in {folder}")),
        None if may_mount() => Ok(format!("'dewar run' mounts {OWN} with them")),
        None => Err(format!("no: 'mount -o remount,huge=advise {COMMON}' allows them")),
    }
}

/// Whether a tmpfs gives huge pages to those who ask, as QEMU does.
fn gives_huge_pages(path: &Path) -> bool {
    huge_option(&mounts(), &path.to_string_lossy()).is_some_and(|option| option != "never")
}

/// Whether our tmpfs is there; it is mounted where it can be.
fn can_be_ours() -> bool {
    let own = Path::new(OWN);
    gives_huge_pages(own) || (may_mount() && mount_own(own).is_ok())
}

fn mount_own(own: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(own)?;
    let lock = File::create(OWN_LOCK)?;
    flock(&lock, FlockOperation::LockExclusive)?;
    // Another command may have mounted it meanwhile; a second one would hide it.
    if gives_huge_pages(own) {
        return Ok(());
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(mount("dewar", own, "tmpfs", flags, OPTIONS)?)
}

/// Whether we are root, and what we mount is seen by the rest of the host.
fn may_mount() -> bool {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt"));
    let is_the_hosts = match (namespace("self"), namespace("1")) {
        (Ok(ours), Ok(first)) => ours == first,
        // The first process hides it; a service's namespace hangs on the host's.
        _ => {
            !mounts().lines().any(|it| it.split(' ').nth(4) == Some("/") && it.contains(" master:"))
        }
    };
    is_the_hosts && rustix::process::geteuid().is_root()
}

fn mounts() -> String {
    fs::read_to_string("/proc/self/mountinfo").unwrap_or_default()
}

/// The `huge=` option of the last mount on `path`, as in proc_pid_mountinfo(5).
fn huge_option<'m>(mounts: &'m str, path: &str) -> Option<&'m str> {
    let fields = |line: &'m str| line.split(' ').collect::<Vec<_>>();
    let last = mounts.lines().map(fields).rfind(|fields| fields.get(4) == Some(&path))?;
    last.last()?.split(',').find_map(|option| option.strip_prefix("huge="))
}

#[cfg(test)]
mod tests {
    use super::huge_option;

    #[test]
    fn the_last_mount_tells() {
        let mounts = "25 1 0:23 / /dev/shm rw,nosuid - tmpfs tmpfs rw,huge=always\n\
                      40 1 0:39 / /dev/shm rw - tmpfs tmpfs rw,size=1g,huge=advise,inode64\n\
                      41 1 0:40 / /dev rw - tmpfs tmpfs rw\n";
        assert_eq!(huge_option(mounts, "/dev/shm"), Some("advise"));
        assert_eq!(huge_option(mounts, "/dev"), None);
        assert_eq!(huge_option(mounts, "/run"), None);
    }
}
