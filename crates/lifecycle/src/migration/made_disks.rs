//! Files that were made for copies of a guest's disks: noted in its folder until it runs, so that none is left
//! of a guest that does not come.

use crate::failure::{Code, Failure};
use dewar_guest_qemu::make_disk;
use dewar_registry::{GuestFolder, KeptDisk};
use std::fs;
use std::path::Path;

const FILE: &str = "made-disks.json";

/// Makes files of these formats and sizes, empty.
pub(crate) fn make<'d>(
    folder: &GuestFolder,
    disks: impl IntoIterator<Item = (&'d Path, &'d str, u64)>,
) -> Result<(), Failure> {
    let mut made = Vec::new();
    for (path, format, bytes) in disks {
        make_disk(path, format, bytes)
            .map_err(|error| Failure::new(Code::Failed, format!("its disk: {error}")))?;
        made.extend(KeptDisk::of(path));
        folder.write(FILE, &made).inspect_err(|_| {
            let _ = fs::remove_file(path);
        })?;
    }
    Ok(())
}

/// Removes them: the guest does not come. A file that is another by now is left.
pub(crate) fn remove(folder: &GuestFolder) {
    let made: Vec<KeptDisk> = folder.read(FILE).ok().flatten().unwrap_or_default();
    for disk in made.iter().filter(|disk| disk.is_same_file()) {
        let _ = fs::remove_file(&disk.path);
    }
}

/// They are the guest's.
pub(crate) fn keep(folder: &GuestFolder) {
    let _ = folder.remove(FILE);
}
