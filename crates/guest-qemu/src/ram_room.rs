//! Room for the RAM of guests.
//!
//! RAM files are sparse: a guest takes its memory as it touches it. So what is free now was
//! promised to others in part, and a guest that finds a tmpfs full is killed (SIGBUS). What
//! RAM files may still grow by is their length less what they hold (`st_blocks`, stat(2));
//! it is counted before another guest is admitted. A file on hugetlbfs is not counted: the
//! kernel reserves its pages when it is mapped.

use dewar_kernel::{Free, KernelError, free, huge_page_bytes};
use dewar_registry::RAM_PREFIX;
use dewar_units::ByteSize;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What there is for RAM files in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RamRoom {
    /// Free bytes: of the file system, or of the host's memory where that is less.
    pub free: u64,
    /// How many of them were promised to guests.
    pub promised: u64,
}

impl RamRoom {
    /// Looks at `folder`. The files of guests that are `ended` do not grow any more; RAM
    /// files in the `others`' folders take the same memory.
    ///
    /// # Errors
    /// Where the kernel does not tell.
    pub fn look(
        folder: &Path,
        others: &[&Path],
        ended: &BTreeSet<PathBuf>,
    ) -> Result<Self, KernelError> {
        let Free { file_system, memory } = free(folder)?;
        let here = Self { free: file_system, promised: promised(folder, ended) };
        let Some(memory) = memory else { return Ok(here) };
        let place = |folder: &Path| fs::metadata(folder).map(|data| data.dev()).ok();
        let mut seen = vec![place(folder)];
        let mut all = here.promised;
        for other in others {
            if !seen.contains(&place(other)) {
                seen.push(place(other));
                all += promised(other, ended);
            }
        }
        let whole = Self { free: memory, promised: all };
        Ok(if whole.left() < here.left() { whole } else { here })
    }

    /// What nobody was promised.
    pub fn left(&self) -> u64 {
        self.free.saturating_sub(self.promised)
    }
}

impl std::fmt::Display for RamRoom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (free, left) = (ByteSize(self.free), ByteSize(self.left()));
        match self.promised {
            0 => write!(f, "{free} free"),
            promised => write!(
                f,
                "{left} free: {free} less {} promised to guests that have not touched it yet",
                ByteSize(promised)
            ),
        }
    }
}

/// Bytes that the RAM files in a folder may still take there.
fn promised(folder: &Path, ended: &BTreeSet<PathBuf>) -> u64 {
    let is_huge =
        File::open(folder).is_ok_and(|it| huge_page_bytes(&it).is_ok_and(|it| it.is_some()));
    if is_huge {
        return 0;
    }
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let ours = files.filter(|file| {
        file.file_name().to_string_lossy().starts_with(RAM_PREFIX) && !ended.contains(&file.path())
    });
    let grows = |file: fs::DirEntry| {
        // `st_blocks` is in units of 512 bytes.
        let data = file.metadata().ok()?;
        Some(data.len().saturating_sub(data.blocks() * 512))
    };
    ours.filter_map(grows).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_has_not_taken_yet_is_promised() {
        let folder = tempfile::tempdir().expect("tempdir");
        let path = |name: &str| folder.path().join(name);
        let file = File::create(path("dewar-a@b@ram")).expect("create");
        file.set_len(8 << 20).expect("size");
        fs::write(path("dewar-c@d@ram"), vec![1; 1 << 20]).expect("write");
        File::create(path("another")).and_then(|it| it.set_len(1 << 30)).expect("create");
        assert_eq!(promised(folder.path(), &BTreeSet::new()), 8 << 20);
        assert_eq!(promised(folder.path(), &BTreeSet::from([path("dewar-a@b@ram")])), 0);
    }
}
