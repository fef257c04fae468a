//! The files with pages in a folder of images.

use crate::criu_images::{LAZY, PARENT, PRESENT, Pagemap};
use crate::error::OciError;
use dewar_units::PAGE_BYTES;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that are copied at a time.
const STEP: u64 = 1 << 20;

/// A file of pages in a folder of images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PagesFile {
    /// Its name.
    pub name: String,
    /// How many pages it has.
    pub pages: u64,
}

/// The files of pages in a folder of images, none of which may want pages of elsewhere.
///
/// # Errors
/// Where one has not all its pages.
pub fn files(folder: &Path) -> Result<Vec<PagesFile>, OciError> {
    let mut files = Vec::new();
    for map in Pagemap::all(folder)? {
        let is_here = |flags: u32| flags & PRESENT != 0 && flags & (LAZY | PARENT) == 0;
        if !map.runs.iter().all(|run| is_here(run.flags())) {
            let problem = "it has pages that are elsewhere".to_owned();
            return Err(OciError::Image { path: map.path, problem });
        }
        let (name, pages) = (map.pages_name(), map.pages());
        let path = folder.join(&name);
        let bytes = fs::metadata(&path).map_err(OciError::io("look at", &path))?.len();
        if bytes != pages * PAGE_BYTES as u64 {
            let problem = format!("it has {bytes} bytes in place of {pages} pages");
            return Err(OciError::Image { path, problem });
        }
        if pages > 0 {
            files.push(PagesFile { name, pages });
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Copies pages that CRIU had in its own file to a new one.
///
/// # Errors
/// Where they are not there, or there is no room.
pub fn copy_present(
    (from, from_path): (&File, &Path),
    at: u64,
    (to, to_path): (&File, &Path),
    offset: u64,
    bytes: u64,
) -> Result<(), OciError> {
    let mut buffer = vec![0; STEP.min(bytes) as usize];
    for start in (0..bytes).step_by(STEP as usize) {
        let part = &mut buffer[..(bytes - start).min(STEP) as usize];
        from.read_exact_at(part, at + start).map_err(OciError::io("read", from_path))?;
        to.write_all_at(part, offset + start).map_err(OciError::io("write", to_path))?;
    }
    Ok(())
}
