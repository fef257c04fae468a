//! What a container of podman wrote to its files, in the form in which podman takes it back: an archive of what is new
//! or changed in the root file system, a list of what was deleted there, and an archive of `/dev/shm`.
//!
//! What changed is known by the upper folder of the overlay (Documentation/filesystems/overlayfs.rst), and read
//! through the mounted overlay: there a file is whole that has only its owner in the upper folder (`metacopy`), and
//! a folder that was renamed has its content (`redirect`).

use crate::error::OciError;
use crate::overlay::{Overlay, WHOLE, run_tar};
use crate::runtime::option;
use rustix::fs::lgetxattr;
use serde_json::json;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

const ROOT_CHANGES: &str = "rootfs-diff.tar";
const DELETED: &str = "deleted.files";
/// podman's name for an archive of `/dev/shm`.
pub(crate) const SHM_FILES: &str = "devshm-checkpoint.tar";
/// What there may be.
pub(crate) const NAMES: [&str; 3] = [ROOT_CHANGES, DELETED, SHM_FILES];

/// What differs from the folders below.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    changed: Vec<PathBuf>,
    deleted: Vec<PathBuf>,
}

/// Saves the files of a container that stands still into one archive. `bundle` is podman's folder of it, and what is
/// made on the way goes into `scratch`.
///
/// # Errors
/// Where they cannot be read, or there is no room.
pub fn save(
    overlay: &Overlay,
    merged: &Path,
    bundle: &Path,
    scratch: &Path,
    archive: &Path,
) -> Result<(), OciError> {
    let _ = fs::remove_dir_all(scratch);
    fs::create_dir_all(scratch).map_err(OciError::io("create", scratch))?;
    let changes = Changes::of(overlay, merged)?;
    let list = scratch.join("changed");
    let mut names = Vec::new();
    for path in &changes.changed {
        names.extend_from_slice(path.as_os_str().as_bytes());
        names.push(0);
    }
    fs::write(&list, names).map_err(OciError::io("write", &list))?;
    let deleted: Vec<String> =
        changes.deleted.iter().map(|path| format!("/{}", path.display())).collect();
    let parts = scratch.join("parts");
    fs::create_dir(&parts).map_err(OciError::io("create", &parts))?;
    let path = parts.join(DELETED);
    fs::write(&path, json!(deleted).to_string()).map_err(OciError::io("write", &path))?;
    let mut tar = Command::new("tar");
    tar.args(["--create", "--no-recursion", "--null", "--verbatim-files-from", "--sparse"]);
    tar.args(WHOLE)
        .args(option("--file", &parts.join(ROOT_CHANGES)))
        .args(option("--directory", merged))
        .args(option("--files-from", &list));
    run_tar(&mut tar, "save", merged)?;
    let shm = bundle.join("shm");
    if shm.is_dir() {
        let mut tar = Command::new("tar");
        tar.arg("--create").args(WHOLE).args(option("--file", &parts.join(SHM_FILES)));
        run_tar(tar.args(option("--directory", &shm)).arg("."), "save", &shm)?;
    }
    pack(&parts, archive)?;
    let _ = fs::remove_dir_all(scratch);
    Ok(())
}

/// Puts all that is in a folder into an archive.
pub(crate) fn pack(folder: &Path, archive: &Path) -> Result<(), OciError> {
    let mut tar = Command::new("tar");
    tar.arg("--create").args(option("--file", archive)).args(option("--directory", folder));
    run_tar(tar.arg("."), "pack", folder)
}

/// Makes a folder of what is in an archive.
pub(crate) fn unpack(archive: &Path, folder: &Path) -> Result<(), OciError> {
    fs::create_dir_all(folder).map_err(OciError::io("create", folder))?;
    let mut tar = Command::new("tar");
    tar.arg("--extract").args(option("--file", archive)).args(option("--directory", folder));
    run_tar(tar.arg("--no-same-owner"), "unpack", archive)
}

impl Changes {
    fn of(overlay: &Overlay, merged: &Path) -> Result<Self, OciError> {
        let lower: Vec<PathBuf> =
            overlay.lower.split(':').filter(|it| !it.is_empty()).map(PathBuf::from).collect();
        let mut changes = Self::default();
        changes.add(&overlay.upper, &lower, merged, Path::new(""))?;
        Ok(changes)
    }

    /// Those of a folder in the upper one.
    fn add(
        &mut self,
        upper: &Path,
        lower: &[PathBuf],
        merged: &Path,
        inside: &Path,
    ) -> Result<(), OciError> {
        let folder = upper.join(inside);
        for name in names_in(&folder)? {
            let (path, inside) = (folder.join(&name), inside.join(&name));
            let data = fs::symlink_metadata(&path).map_err(OciError::io("look at", &path))?;
            if is_whiteout(&data) {
                self.deleted.push(inside);
                continue;
            }
            self.changed.push(inside.clone());
            if !data.is_dir() {
                continue;
            }
            if has(&path, "trusted.overlay.redirect") {
                // What it had below lies under another name there.
                self.add_all(merged, &inside)?;
                continue;
            }
            if has(&path, "trusted.overlay.opaque") {
                for hidden in lower.iter().map(|it| it.join(&inside)).filter(|it| it.is_dir()) {
                    let gone = names_in(&hidden)?.into_iter().map(|name| inside.join(name));
                    self.deleted
                        .extend(gone.filter(|it| upper.join(it).symlink_metadata().is_err()));
                }
            }
            self.add(upper, lower, merged, &inside)?;
        }
        Ok(())
    }

    /// All that is in a folder.
    fn add_all(&mut self, merged: &Path, inside: &Path) -> Result<(), OciError> {
        for name in names_in(&merged.join(inside))? {
            let inside = inside.join(name);
            let path = merged.join(&inside);
            let data = fs::symlink_metadata(&path).map_err(OciError::io("look at", &path))?;
            self.changed.push(inside.clone());
            if data.is_dir() {
                self.add_all(merged, &inside)?;
            }
        }
        Ok(())
    }
}

fn names_in(folder: &Path) -> Result<Vec<PathBuf>, OciError> {
    let list = || -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().into())).collect()
    };
    list().map_err(OciError::io("list", folder))
}

/// What stands for a file that was deleted.
fn is_whiteout(data: &Metadata) -> bool {
    data.file_type().is_char_device() && data.rdev() == 0
}

fn has(path: &Path, attribute: &str) -> bool {
    lgetxattr(path, OsStr::new(attribute), &mut [0u8; 4096]).is_ok_and(|bytes| bytes > 0)
}
