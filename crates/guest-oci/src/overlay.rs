//! A root file system that is an overlay: what the container wrote lies in its upper folder
//! (Documentation/filesystems/overlayfs.rst).
//!
//! The upper folder is saved while the container stands still. A restore does not touch the user's own: it mounts
//! another overlay, with the same lower folders, over an upper folder of Dewar's.

use crate::error::OciError;
use crate::runtime::option;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::ffi::CString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A mounted overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overlay {
    /// The folders below, as mount(8) takes them.
    pub lower: String,
    /// What was written.
    pub upper: PathBuf,
    /// The kernel's own folder beside that.
    pub work: PathBuf,
    /// All other options.
    pub options: Vec<String>,
}

impl Overlay {
    /// The one that is mounted on a folder, by the last that was mounted there; `None` where it is none.
    ///
    /// # Errors
    /// Where the mounts cannot be read.
    pub fn mounted_on(folder: &Path) -> Result<Option<Self>, OciError> {
        let folder = fs::canonicalize(folder).map_err(OciError::io("look at", folder))?;
        let path = Path::new("/proc/self/mountinfo");
        let mounts = fs::read(path).map_err(OciError::io("read", path))?;
        let mounts = String::from_utf8_lossy(&mounts).into_owned();
        let last = mounts.lines().rfind(|line| {
            line.split(' ').nth(4).is_some_and(|it| Path::new(&unescape(it)) == folder)
        });
        Ok(last.and_then(Self::parse))
    }

    /// Whether it was mounted with whole paths: by others the kernel's list of mounts does not tell where it lies.
    pub fn has_whole_paths(&self) -> bool {
        let mut lower = self.lower.split(':').filter(|it| !it.is_empty());
        self.upper.is_absolute() && self.work.is_absolute() && lower.all(|it| it.starts_with('/'))
    }

    /// All that are mounted, and where; the last first.
    ///
    /// # Errors
    /// Where the mounts cannot be read.
    pub fn all() -> Result<Vec<(PathBuf, Self)>, OciError> {
        let path = Path::new("/proc/self/mountinfo");
        let mounts = fs::read(path).map_err(OciError::io("read", path))?;
        let mounts = String::from_utf8_lossy(&mounts).into_owned();
        let one = |line: &str| {
            Some((PathBuf::from(unescape(line.split(' ').nth(4)?)), Self::parse(line)?))
        };
        Ok(mounts.lines().rev().filter_map(one).collect())
    }

    /// All that are the root of some process of the host, as of a container. Copies of a mount that other mount
    /// namespaces have got are not: nothing runs there.
    pub fn roots() -> Vec<Self> {
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let is_new = fs::read_link(entry.path().join("ns/mnt")).is_ok_and(|it| seen.insert(it));
            let mounts = is_new.then(|| fs::read(entry.path().join("mountinfo")).ok()).flatten();
            let mounts = String::from_utf8_lossy(&mounts.unwrap_or_default()).into_owned();
            let is_root = |line: &&str| line.split(' ').nth(4) == Some("/");
            found.extend(mounts.lines().filter(is_root).filter_map(Self::parse));
        }
        found
    }

    /// From a line of proc_pid_mountinfo(5).
    fn parse(line: &str) -> Option<Self> {
        let (_, after) = line.split_once(" - ")?;
        let mut fields = after.split(' ');
        if fields.next()? != "overlay" {
            return None;
        }
        let (mut lower, mut upper, mut work, mut options) = (None, None, None, Vec::new());
        for option in fields.nth(1)?.split(',') {
            match option.split_once('=') {
                Some(("lowerdir", value)) => lower = Some(unescape(value)),
                Some(("upperdir", value)) => upper = Some(PathBuf::from(unescape(value))),
                Some(("workdir", value)) => work = Some(PathBuf::from(unescape(value))),
                _ if ["rw", "ro", "uuid=on"].contains(&option) => {}
                _ => options.push(option.to_owned()),
            }
        }
        Some(Self { lower: lower?, upper: upper?, work: work?, options })
    }

    /// Writes all that is in the upper folder to an archive.
    ///
    /// # Errors
    /// Where it cannot be read, or there is no room.
    pub fn save(&self, archive: &Path) -> Result<(), OciError> {
        let mut command = Command::new("tar");
        command.args(["--create", "--one-file-system", "--sparse"]);
        command
            .args(WHOLE)
            .args(option("--file", archive))
            .args(option("--directory", &self.upper));
        run_tar(command.arg("."), "save", &self.upper)
    }

    /// The same lower folders, under an upper folder that has what an archive says. `folder` is emptied.
    ///
    /// # Errors
    /// Where it cannot be unpacked.
    pub fn unpack(&self, archive: &Path, folder: &Path) -> Result<Self, OciError> {
        let (upper, work) = (folder.join("upper"), folder.join("work"));
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(OciError::io("empty", folder)(error));
            }
            _ => {}
        }
        for path in [&upper, &work] {
            fs::create_dir_all(path).map_err(OciError::io("create", path))?;
        }
        let mut command = Command::new("tar");
        command.args(["--extract", "--same-owner", "--same-permissions"]);
        command.args(WHOLE).args(option("--file", archive)).args(option("--directory", &upper));
        run_tar(&mut command, "unpack", archive)?;
        Ok(Self { upper, work, ..self.clone() })
    }

    /// Mounts it on a folder.
    ///
    /// # Errors
    /// Where the kernel does not take it.
    pub fn mount_on(&self, folder: &Path) -> Result<(), OciError> {
        let (upper, work) = (self.upper.display(), self.work.display());
        let mut options = format!("lowerdir={},upperdir={upper},workdir={work}", self.lower);
        for option in &self.options {
            options.push(',');
            options.push_str(option);
        }
        let options = CString::new(options).map_err(io::Error::other);
        let options = options.map_err(OciError::io("mount an overlay on", folder))?;
        mount("overlay", folder, "overlay", MountFlags::empty(), options.as_c_str())
            .map_err(|errno| OciError::io("mount an overlay on", folder)(errno.into()))
    }
}

/// Takes away what was mounted last on a folder.
///
/// # Errors
/// Where it is in use.
pub fn unmount_from(folder: &Path) -> Result<(), OciError> {
    unmount(folder, UnmountFlags::empty())
        .map_err(|errno| OciError::io("unmount", folder)(errno.into()))
}

/// What of files is saved beside their content.
pub(crate) const WHOLE: [&str; 4] = ["--numeric-owner", "--acls", "--xattrs", "--xattrs-include=*"];

/// Runs tar(1), which is about a file or folder.
pub(crate) fn run_tar(
    command: &mut Command,
    operation: &'static str,
    path: &Path,
) -> Result<(), OciError> {
    let output =
        command.stdin(Stdio::null()).output().map_err(OciError::io("run", Path::new("tar")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().next().unwrap_or("tar failed").to_owned();
    Err(OciError::io(operation, path)(io::Error::other(line)))
}

/// `\040` is a space, and so on (proc_pid_mountinfo(5)).
fn unescape(text: &str) -> String {
    let mut whole = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| byte == b'\\');
        let number = octal
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match number {
            Some(number) => {
                whole.push(number);
                rest = &after[3..];
            }
            None => {
                whole.push(byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&whole).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlay_is_told_from_other_mounts() {
        let line = "60 29 0:52 / /var/lib/web\\040site/merged rw,relatime shared:30 - overlay overlay \
                    rw,lowerdir=/l/A:/l/B,upperdir=/u\\040x/diff,workdir=/u\\040x/work,metacopy=on,uuid=on";
        let overlay = Overlay::parse(line).expect("an overlay");
        assert_eq!(overlay.lower, "/l/A:/l/B");
        assert_eq!(overlay.upper, Path::new("/u x/diff"));
        assert_eq!(overlay.options, ["metacopy=on"]);
        assert!(overlay.has_whole_paths());
        let relative = Overlay { lower: "/l/A:lower".to_owned(), ..overlay };
        assert!(!relative.has_whole_paths());
        assert_eq!(Overlay::parse("29 1 259:1 / / rw - ext4 /dev/vda rw"), None);
    }

    #[test]
    fn what_was_written_comes_back_whole() {
        let folder = tempfile::tempdir().expect("folder");
        let upper = folder.path().join("upper");
        fs::create_dir_all(upper.join("etc")).expect("folder");
        fs::write(upper.join("etc/motd"), "hello").expect("file");
        std::os::unix::fs::symlink("motd", upper.join("etc/link")).expect("link");
        let overlay = Overlay {
            lower: "/lower".to_owned(),
            upper,
            work: folder.path().join("work"),
            options: Vec::new(),
        };
        let archive = folder.path().join("saved.tar");
        overlay.save(&archive).expect("save");
        let back = overlay.unpack(&archive, &folder.path().join("new")).expect("unpack");
        assert_eq!(fs::read(back.upper.join("etc/link")).expect("read"), b"hello");
        assert_eq!(back.lower, overlay.lower);
    }
}
