//! Which pages a guest that came by post-copy lacked when it was loaded: a file in its folder. Those of them
//! that have no storage in its RAM files are missing still.

use crate::failure::{Code, Failure};
use dewar_memory::{Ram, RamRegion};
use dewar_registry::{GuestFolder, GuestRecord};
use dewar_units::{PageRange, PageSet};
use std::fs::File;
use std::io::ErrorKind;

/// A bit for each page, as [`PageSet::to_bytes`] has them.
const FILE: &str = "owed.pages";

/// Notes them. The file need not outlive the machine: its RAM files do not.
pub(crate) fn note(folder: &GuestFolder, owed: &PageSet) -> Result<(), Failure> {
    let path = folder.file(FILE);
    std::fs::write(&path, owed.to_bytes())
        .map_err(|error| Failure::new(Code::Failed, format!("{}: {error}", path.display())))
}

/// Forgets them: none is missing.
pub(crate) fn forget(folder: &GuestFolder) {
    // What stays behind is of no use, and goes with the guest.
    let _ = folder.remove(FILE);
}

/// Those that were noted, if any were.
pub(crate) fn noted(folder: &GuestFolder, pages: u64) -> Result<Option<PageSet>, Failure> {
    let path = folder.file(FILE);
    let failed = |why: &str| Failure::new(Code::Failed, format!("{}: {why}", path.display()));
    match std::fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(&error.to_string())),
        Ok(bytes) => {
            PageSet::from_bytes(&bytes, pages).map(Some).ok_or_else(|| failed("it is damaged"))
        }
    }
}

/// Whether a guest lacks pages that the host it left still has.
pub(crate) fn is_partial(folder: &GuestFolder, record: &GuestRecord) -> Result<bool, Failure> {
    if !folder.file(FILE).exists() || !record.process.is_alive() {
        return Ok(false);
    }
    let ram = ram_of_files(record)?;
    let Some(mut owed) = noted(folder, ram.pages())? else { return Ok(false) };
    let present = ram.data_ranges(PageRange::new(0, ram.pages())).map_err(memory)?;
    present.into_iter().for_each(|range| owed.remove_range(range));
    Ok(!owed.is_empty())
}

/// A guest's RAM by its files alone: its process may have ended.
pub(crate) fn ram_of_files(record: &GuestRecord) -> Result<Ram, Failure> {
    let mut ram = Ram::default();
    for (index, file) in record.ram.iter().enumerate() {
        let opened = File::open(&file.path).map_err(|error| {
            Failure::new(Code::Failed, format!("{}: {error}", file.path.display()))
        })?;
        ram.add(index.to_string(), opened, file.bytes, 0).map_err(memory)?;
    }
    debug_assert!(ram.regions().iter().all(|region: &RamRegion| region.addresses.start == 0));
    Ok(ram)
}

fn memory(error: dewar_memory::KernelError) -> Failure {
    Failure::new(Code::Failed, error.to_string())
}
