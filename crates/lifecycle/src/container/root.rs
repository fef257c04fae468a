//! The root file system of a restored container, where it is an overlay.
//!
//! What the checkpoint has of it is unpacked into the guest's folder, and an overlay over that is mounted on top of
//! what is mounted on the container's root folder: its user's own overlay, whose upper folder nobody touches.

use crate::container_process::{files_in_use, is_ours, remove_folder, root_folders};
use crate::failure::Failure;
use dewar_guest_oci::{Description, Overlay, unmount_from};
use dewar_image::{ImageReader, Store};
use dewar_registry::GuestFolder;
use std::fs;
use std::path::{Path, PathBuf};

/// What was mounted for a container that is being restored.
pub struct RestoredRoot {
    mounted: Option<Mounted>,
}

struct Mounted {
    /// Where.
    rootfs: PathBuf,
    /// What it was unpacked into.
    folder: PathBuf,
    /// What an earlier restore had mounted there, and what that was unpacked into.
    before: Option<(Overlay, PathBuf)>,
}

impl RestoredRoot {
    /// Mounts what the checkpoint has of the files, if anything.
    ///
    /// # Errors
    /// Where it cannot be; all is as it was then.
    pub fn mount(
        store: &Store,
        image: &ImageReader,
        description: &Description,
        folder: &GuestFolder,
    ) -> Result<Self, Failure> {
        let overlay = match &description.overlay {
            // podman mounts its own.
            Some(overlay) if description.podman.is_none() => overlay,
            _ => return Ok(Self { mounted: None }),
        };
        with_archive(store, image, folder, |archive| match archive {
            None => Ok(Self { mounted: None }),
            Some(archive) => {
                let rootfs = description.container().rootfs(&description.config);
                Self::mount_archive(archive, overlay, rootfs, folder)
            }
        })
    }

    /// The same from an archive of them.
    ///
    /// # Errors
    /// As [`RestoredRoot::mount`].
    pub fn mount_archive(
        archive: &Path,
        overlay: &Overlay,
        rootfs: PathBuf,
        folder: &GuestFolder,
    ) -> Result<Self, Failure> {
        let was = Overlay::mounted_on(&rootfs)?.filter(|it| is_ours(folder, it));
        let [one, other] = root_folders(folder);
        let (fresh, before) = match was {
            Some(was) if was.upper.starts_with(&one) => (other, Some((was, one))),
            Some(was) => (one, Some((was, other))),
            None => (one, None),
        };
        if let Some((_, used)) = &before {
            let is_used = |overlay: &Overlay| overlay.upper.starts_with(used);
            if Overlay::roots().iter().any(is_used) {
                return Err(files_in_use(folder));
            }
        }
        let new = overlay.unpack(archive, &fresh).inspect_err(|_| {
            let _ = remove_folder(&fresh);
        })?;
        if before.is_some() {
            unmount_from(&rootfs)?;
        }
        let root = Mounted { rootfs, folder: fresh, before };
        if let Err(error) = new.mount_on(&root.rootfs) {
            root.give_up(false);
            return Err(error.into());
        }
        Ok(Self { mounted: Some(root) })
    }

    /// The container runs on it.
    pub fn keep(self) {
        if let Some((_, folder)) = self.mounted.and_then(|it| it.before) {
            let _ = remove_folder(&folder);
        }
    }

    /// No container runs on it.
    pub fn give_up(self) {
        if let Some(mounted) = self.mounted {
            mounted.give_up(true);
        }
    }
}

/// Does something with the archive of what was written, if the checkpoint has one.
///
/// # Errors
/// Where that fails, or the archive cannot be read.
pub(super) fn with_archive<T>(
    store: &Store,
    image: &ImageReader,
    folder: &GuestFolder,
    work: impl FnOnce(Option<&Path>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    let Some(disk) = image.record().disks.first() else { return work(None) };
    let bases = match store.folder() {
        Some(_) => folder.base_disks(),
        None => folder.make_base_disks()?,
    };
    let mut made = Vec::new();
    let archive = store.disk_file(disk, &bases, &mut made).map(|(path, _)| path);
    let done = archive.map_err(Failure::from).and_then(|archive| work(Some(&archive)));
    made.iter().for_each(|path| drop(fs::remove_file(path)));
    done
}

impl Mounted {
    fn give_up(&self, is_mounted: bool) {
        if is_mounted && unmount_from(&self.rootfs).is_err() {
            // What is in use stays where it is.
            return;
        }
        if let Some((before, _)) = &self.before {
            // Where that fails the next restore unpacks it again.
            let _ = before.mount_on(&self.rootfs);
        }
        let _ = remove_folder(&self.folder);
    }
}
