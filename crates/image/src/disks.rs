//! Copies of disks. In a folder each is a file, which QEMU writes and opens in
//! place; elsewhere it is many objects, made of a file that QEMU wrote and made
//! a file again before QEMU opens it. Either way one may stand on others.

use crate::{DiskLayer, DiskRecord, FileDigest, ImageError, Record, Store};
use dewar_store::{Backend, LARGEST_OBJECT};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// Most files that a disk copy stands on. Each costs its reader a look, and
/// keeps bytes that later ones replaced.
const MOST_BELOW: usize = 16;

/// Bytes of a disk copy in one object.
const PIECE: u64 = LARGEST_OBJECT as u64 / 2;

/// The names of the objects that hold a disk copy of so many bytes.
pub(crate) fn objects(backend: &dyn Backend, file: &str, bytes: u64) -> Vec<String> {
    if backend.folder().is_some() {
        return vec![format!("disks/{file}")];
    }
    (0..bytes.div_ceil(PIECE)).map(|piece| format!("disks/{file}/{piece:08x}")).collect()
}

/// The files on which a new copy of a disk can stand: those of the same disk in
/// an earlier image, unless they are many or hold more changes than disk.
pub(crate) fn to_stand_on(record: &Record, name: &str, virtual_bytes: u64) -> Vec<DiskLayer> {
    let same = |disk: &&DiskRecord| {
        disk.name == name && disk.virtual_bytes == virtual_bytes && disk.format == "qcow2"
    };
    let Some(disk) = record.disks.iter().find(same) else { return Vec::new() };
    let layers: Vec<DiskLayer> = disk.layers().collect();
    let (whole, changes) = layers.split_last().map_or((0, 0), |(last, changes)| {
        (last.digest.bytes, changes.iter().map(|layer| layer.digest.bytes).sum::<u64>())
    });
    if layers.len() > MOST_BELOW || changes > whole {
        return Vec::new();
    }
    layers
}

/// Puts a disk copy that lies in a file, whose objects a lease names, into a
/// store.
pub(crate) fn put(backend: &dyn Backend, path: &Path, names: &[String]) -> Result<(), ImageError> {
    let failed = |cause| ImageError::io("read", path)(cause);
    let mut file = File::open(path).map_err(failed)?;
    let mut piece = Vec::with_capacity(PIECE as usize);
    for name in names {
        piece.clear();
        Read::by_ref(&mut file).take(PIECE).read_to_end(&mut piece).map_err(failed)?;
        backend.put_new(name, &piece)?;
    }
    Ok(())
}

impl Store {
    /// Checks the copies of an image's disks.
    ///
    /// # Errors
    /// Where one is missing or altered.
    pub fn check_disks(&self, record: &Record) -> Result<(), ImageError> {
        record.disks.iter().try_for_each(|disk| self.check_disk(disk))
    }

    fn check_disk(&self, disk: &DiskRecord) -> Result<(), ImageError> {
        for layer in disk.layers() {
            let digest = match self.folder() {
                Some(folder) => FileDigest::of(&folder.join("disks").join(&layer.file))?,
                None => self.read_layer(&layer, |_| Ok(()))?,
            };
            self.require_same(disk, &layer, &digest)?;
        }
        Ok(())
    }

    /// A disk copy, checked, as a file, and the files that it stands on: of the store, where
    /// that is a folder, otherwise made in `folder`, by the names under which they stand on
    /// one another. Adds to `made` those that were not there.
    ///
    /// # Errors
    /// Where one cannot be read or written, or is not what it was.
    pub fn disk_file(
        &self,
        disk: &DiskRecord,
        folder: &Path,
        made: &mut Vec<PathBuf>,
    ) -> Result<(PathBuf, Vec<PathBuf>), ImageError> {
        let folder = match self.folder() {
            Some(store) => {
                self.check_disk(disk)?;
                let disks = store.join("disks");
                fs::canonicalize(&disks).unwrap_or(disks)
            }
            None => {
                let mut layers = disk.layers();
                layers.try_for_each(|layer| self.bring_layer(disk, &layer, folder, made))?;
                folder.to_owned()
            }
        };
        let below = disk.below.iter().map(|layer| folder.join(&layer.file)).collect();
        Ok((folder.join(&disk.file), below))
    }

    fn bring_layer(
        &self,
        disk: &DiskRecord,
        layer: &DiskLayer,
        folder: &Path,
        made: &mut Vec<PathBuf>,
    ) -> Result<(), ImageError> {
        let path = folder.join(&layer.file);
        let is_there = path.exists();
        // It stays: the disk of a guest that has ended may stand on it, and be wanted again
        // if this restore fails.
        if is_there && FileDigest::of(&path)? == layer.digest {
            return Ok(());
        }
        let part = path.with_extension("part");
        self.fetch_layer(disk, layer, &part)
            .and_then(|()| fs::rename(&part, &path).map_err(ImageError::io("write", &path)))
            .inspect_err(|_| drop(dewar_store::remove(&part)))?;
        made.extend((!is_there).then_some(path));
        Ok(())
    }

    fn fetch_layer(
        &self,
        disk: &DiskRecord,
        layer: &DiskLayer,
        path: &Path,
    ) -> Result<(), ImageError> {
        let failed = |cause| ImageError::io("write", path)(cause);
        let mut options = dewar_store::private_options();
        let mut file =
            options.write(true).create(true).truncate(true).open(path).map_err(failed)?;
        let digest = self.read_layer(layer, |piece| file.write_all(piece).map_err(failed))?;
        self.require_same(disk, layer, &digest)?;
        file.sync_all().map_err(failed)
    }

    /// The objects that a disk copy is made of, those that it stands on
    /// included.
    pub(crate) fn disk_objects(&self, disk: &DiskRecord) -> Vec<String> {
        let of = |it: DiskLayer| objects(self.backend(), &it.file, it.digest.bytes);
        disk.layers().flat_map(of).collect()
    }

    fn read_layer(
        &self,
        layer: &DiskLayer,
        mut each: impl FnMut(&[u8]) -> Result<(), ImageError>,
    ) -> Result<FileDigest, ImageError> {
        let (mut hasher, mut bytes) = (blake3::Hasher::new(), 0);
        for name in objects(self.backend(), &layer.file, layer.digest.bytes) {
            let piece = self.backend().get(&name)?.ok_or_else(|| {
                ImageError::damaged(format!("{name} of {}", self.url()), "it is missing")
            })?;
            hasher.update(&piece);
            bytes += piece.len() as u64;
            each(&piece)?;
        }
        Ok(FileDigest { bytes, blake3: hasher.finalize().to_hex().to_string() })
    }

    fn require_same(
        &self,
        disk: &DiskRecord,
        layer: &DiskLayer,
        found: &FileDigest,
    ) -> Result<(), ImageError> {
        if *found == layer.digest {
            return Ok(());
        }
        let place = format!("{} in {} (disk '{}')", layer.file, self.url(), disk.name);
        Err(ImageError::damaged(place, "its content changed since the checkpoint"))
    }
}
