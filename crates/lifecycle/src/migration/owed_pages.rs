//! Which pages a guest that came by post-copy lacks: a file in its folder, from before it is loaded until its
//! memory needs no service any more. Those of them that have no storage in its RAM files are missing still.
//!
//! Where the file is there, touches of *any* page without storage wait for a process that serves them, also
//! when none of the noted pages is missing any more.

use crate::failure::{Code, Failure};
use dewar_memory::Ram;
use dewar_registry::{GuestFolder, GuestRecord};
use dewar_units::PageSet;
use std::fs::File;
use std::io::ErrorKind;

/// A bit for each page, as [`PageSet::to_bytes`] has them.
const FILE: &str = "owed.pages";

/// Notes them, in one step. The file need not outlive the machine: its RAM files do not.
pub(crate) fn note(folder: &GuestFolder, owed: &PageSet) -> Result<(), Failure> {
    let (path, new) = (folder.file(FILE), folder.file("owed.new"));
    let written = std::fs::write(&new, owed.to_bytes()).and_then(|()| std::fs::rename(&new, &path));
    written.map_err(|error| Failure::new(Code::Failed, format!("{}: {error}", path.display())))
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

/// Whether a guest's memory is to be served by what the host that it left has.
pub(crate) fn is_partial(folder: &GuestFolder, record: &GuestRecord) -> bool {
    folder.file(FILE).exists() && record.process.is_alive()
}

/// A guest's RAM by its files alone: its process may have ended.
pub(crate) fn ram_of_files(record: &GuestRecord) -> Result<Ram, Failure> {
    let failed = |why: &str| {
        let what = format!("what was kept of the memory of '{}' is gone: {why}", record.name);
        Failure::new(Code::Failed, what)
    };
    if !record.process.is_of_this_boot() {
        return Err(failed("this host was started anew"));
    }
    let mut ram = Ram::default();
    for (index, file) in record.ram.iter().enumerate() {
        let path = file.path.display();
        let opened = File::open(&file.path).map_err(|error| failed(&format!("{path}: {error}")))?;
        if !opened.metadata().is_ok_and(|data| data.len() == file.bytes) {
            return Err(failed(&format!("{path} has another size")));
        }
        ram.add(index.to_string(), opened, file.bytes, 0).map_err(memory)?;
    }
    Ok(ram)
}

fn memory(error: dewar_memory::KernelError) -> Failure {
    Failure::new(Code::Failed, error.to_string())
}
