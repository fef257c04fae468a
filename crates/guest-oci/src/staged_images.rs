//! CRIU's images, and the copies of pages that belong into them.

use crate::criu_images::{LAZY, PARENT, PRESENT, Pagemap};
use crate::error::OciError;
use crate::folder::{images, staging_file};
use crate::pages::copy_present;
use crate::staging::{Piece, Staged, Staging};
use dewar_units::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::Path;

/// The archive of what a container wrote to its root file system, beside the folder of images.
pub const ROOT_FILES: &str = "root.tar";

/// What lies where in a file of copies, for the host that it goes to.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct StagingIndex {
    /// For each process, by the container's number, the runs of its memory: the first address, the end, and where in
    /// the file the first byte is.
    pub(crate) tasks: BTreeMap<i32, Vec<(u64, u64, u64)>>,
    /// Whole files: the name, where it begins, and its bytes.
    pub(crate) files: Vec<(String, u64, u64)>,
}

impl StagingIndex {
    /// Puts what has come from another host into the images in a folder, of which nothing is missing then. The
    /// file of copies is used up.
    ///
    /// # Errors
    /// Where it does not fit the images, or there is no room.
    pub fn unpack(self, folder: &Path) -> Result<(), OciError> {
        let path = staging_file(folder);
        let staging = Staging::open(path.clone())?;
        let damaged =
            |problem: &str| OciError::Image { path: path.clone(), problem: problem.to_owned() };
        let images = images(folder);
        for (name, offset, bytes) in self.files {
            let target = match name.as_str() {
                ROOT_FILES => folder.join(ROOT_FILES),
                _ if is_pages_file(&name) => images.join(&name),
                _ => return Err(damaged(&format!("'{name}' is no file of a container"))),
            };
            let whole = bytes.checked_next_multiple_of(PAGE_BYTES as u64);
            let whole = whole.filter(|whole| offset.checked_add(*whole).is_some());
            let whole = whole.ok_or_else(|| damaged("a file has no end"))?;
            if offset % PAGE_BYTES as u64 != 0 {
                return Err(damaged("a file begins inside a page"));
            }
            let file = File::create_new(&target).map_err(OciError::io("create", &target))?;
            let piece = Piece { addresses: 0..whole, offset };
            staging.move_to(vec![piece], (&file, &target), 0)?;
            file.set_len(bytes).map_err(OciError::io("shorten", &target))?;
        }
        let mut tasks = BTreeMap::new();
        for (number, runs) in self.tasks {
            let staged =
                Staged::of_runs(runs).ok_or_else(|| damaged("its index is in disorder"))?;
            tasks.insert(number, staged);
        }
        assemble(&staging, &images, |number| tasks.get(&number))?;
        fs::remove_file(&path).map_err(OciError::io("remove", &path))
    }
}

/// Whether a name is one that CRIU gives a file of pages.
pub(crate) fn is_pages_file(name: &str) -> bool {
    let number = name.strip_prefix("pages-").and_then(|it| it.strip_suffix(".img"));
    number.is_some_and(|it| !it.is_empty() && it.bytes().all(|it| it.is_ascii_digit()))
}

/// Puts the copies of pages into the images that lack them.
pub(crate) fn assemble<'s>(
    staging: &Staging,
    folder: &Path,
    staged_of: impl Fn(i32) -> Option<&'s Staged>,
) -> Result<(), OciError> {
    for mut map in lazy_maps(folder)? {
        let staged = map.task().and_then(&staged_of);
        let old = folder.join(map.pages_name());
        let new = folder.join(format!("{}.whole", map.pages_name()));
        let before = File::open(&old).map_err(OciError::io("open", &old))?;
        let file = File::create_new(&new).map_err(OciError::io("create", &new))?;
        let (mut taken, mut put) = (0, 0);
        for run in &map.runs {
            let range = run.addresses();
            let bytes = range.end - range.start;
            if run.flags() & PRESENT != 0 {
                copy_present((&before, &old), taken, (&file, &new), put, bytes)?;
                taken += bytes;
            } else {
                let pieces = staged.and_then(|it| it.find(range)).ok_or_else(|| {
                    let problem = format!("page {:#x} was not copied", run.address);
                    OciError::Image { path: map.path.clone(), problem }
                })?;
                staging.move_to(pieces, (&file, &new), put)?;
            }
            put += bytes;
        }
        fs::rename(&new, &old).map_err(OciError::io("rename", &new))?;
        map.runs = map.runs.into_iter().map(|run| run.into_present()).collect();
        map.write()?;
    }
    Ok(())
}

/// The pagemaps of which pages are missing.
pub(crate) fn lazy_maps(folder: &Path) -> Result<Vec<Pagemap>, OciError> {
    let mut maps = Pagemap::all(folder)?;
    maps.retain(|map| map.runs.iter().any(|run| run.flags() & LAZY != 0));
    match maps.iter().find(|map| map.runs.iter().any(|run| run.flags() & PARENT != 0)) {
        Some(map) => Err(OciError::Image {
            path: map.path.clone(),
            problem: "it stands on another".to_owned(),
        }),
        None => Ok(maps),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_host_says_of_files_is_checked() {
        let unpack = |name: &str, offset: u64, bytes: u64| {
            let folder = tempfile::tempdir().expect("folder");
            fs::create_dir(images(folder.path())).expect("images");
            fs::write(staging_file(folder.path()), vec![7; 3 * PAGE_BYTES]).expect("copies");
            let files = vec![(name.to_owned(), offset, bytes)];
            let unpacked = StagingIndex { files, ..StagingIndex::default() }.unpack(folder.path());
            unpacked.map(|()| fs::metadata(folder.path().join(name)).map(|it| it.len()).ok())
        };
        let page = PAGE_BYTES as u64;
        assert_eq!(unpack(ROOT_FILES, page, page + 5).expect("right"), Some(page + 5));
        for name in ["", "../x", "pages-.img", "pages-1.img/x", "images/core-1.img"] {
            assert!(unpack(name, 0, page).is_err(), "{name}");
        }
        for (offset, bytes) in
            [(1, 5), (page, 3 * page), (0, u64::MAX), (u64::MAX - 4095, page), (u64::MAX, 1)]
        {
            assert!(unpack(ROOT_FILES, offset, bytes).is_err(), "{offset} {bytes}");
        }
        let overlapping = vec![(0, 2 * page, 0), (page, 3 * page, 0)];
        assert!(Staged::of_runs(overlapping).is_none());
        assert!(Staged::of_runs(vec![(0, page, u64::MAX - 4095)]).is_none());
        assert!(Staged::of_runs(vec![(0, page, page)]).is_some());
    }
}
