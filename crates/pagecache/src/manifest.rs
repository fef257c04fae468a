//! The manifest of hot pages: which pages of which files are used, and how much. It is small, and JSON:
//!
//! ```text
//! {"version": 1, "window_ms": .., "lost": .., "files": [
//!     {"path": "/var/lib/db/t1", "bytes": .., "modified_ns": .., "hot": [[first page, page behind the last, uses], ..]}, ..]}
//! ```
//!
//! Paths are those that the guest knows. A file of another length or another time of change is not the one that was
//! looked at.

use crate::PageCacheError;
use dewar_units::PAGE_BYTES;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

const VERSION: u32 = 1;
/// A longer one is not read.
pub const MOST_MANIFEST_BYTES: usize = 16 << 20;
/// So many ranges and files of long names fit into that.
const MOST_RANGES: usize = 200_000;
const MOST_FILES: usize = 20_000;

/// What is hot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    version: u32,
    /// For how many milliseconds it was looked.
    pub window_ms: u64,
    /// Reads of which the kernel could not tell.
    pub lost: u64,
    /// The files that have hot pages.
    pub files: Vec<HotFile>,
}

/// A file with hot pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotFile {
    /// Where the guest has it.
    pub path: PathBuf,
    /// Which it was.
    #[serde(flatten)]
    pub identity: FileIdentity,
    /// Its hot pages, in order.
    pub hot: Vec<HotRange>,
}

/// What a file that was not changed keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Its length.
    pub bytes: u64,
    /// When it was last changed, in nanoseconds since 1970.
    pub modified_ns: i64,
}

/// Pages that are used about as much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "(u64, u64, u32)", from = "(u64, u64, u32)")]
pub struct HotRange {
    /// The first page.
    pub start: u64,
    /// The page behind the last.
    pub end: u64,
    /// How often each was read.
    pub uses: u32,
}

impl From<HotRange> for (u64, u64, u32) {
    fn from(range: HotRange) -> Self {
        (range.start, range.end, range.uses)
    }
}

impl From<(u64, u64, u32)> for HotRange {
    fn from((start, end, uses): (u64, u64, u32)) -> Self {
        Self { start, end, uses }
    }
}

impl FileIdentity {
    /// That of a file as it is.
    #[must_use]
    pub fn of(file: &Metadata) -> Self {
        let modified_ns =
            file.mtime().saturating_mul(1_000_000_000).saturating_add(file.mtime_nsec());
        Self { bytes: file.len(), modified_ns }
    }
}

impl HotFile {
    /// How many pages are hot.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.hot.iter().map(|range| range.end - range.start).fold(0, u64::saturating_add)
    }

    /// Whether it is one that a file can have: the path leads nowhere else, the pages are in order and within it.
    fn is_sound(&self) -> bool {
        let mut parts = self.path.components();
        let is_whole = parts.next() == Some(Component::RootDir)
            && parts.all(|part| matches!(part, Component::Normal(_)));
        let all = self.identity.bytes.div_ceil(PAGE_BYTES as u64);
        let mut before = 0;
        let is_next = |range: &HotRange| {
            let is_next = before <= range.start && range.start < range.end && range.end <= all;
            before = range.end;
            is_next
        };
        is_whole && self.hot.iter().all(is_next)
    }
}

impl Manifest {
    /// One of these files, looked at for so long. Where it would be too long, what is used least is left out.
    #[must_use]
    pub fn new(window_ms: u64, lost: u64, mut files: Vec<HotFile>) -> Self {
        let mut least = 2_u32;
        while files.len() > MOST_FILES
            || files.iter().map(|file| file.hot.len()).sum::<usize>() > MOST_RANGES
        {
            files.iter_mut().for_each(|file| file.hot.retain(|range| range.uses > least));
            files.retain(|file| !file.hot.is_empty());
            least = least.saturating_mul(2);
        }
        Self { version: VERSION, window_ms, lost, files }
    }

    /// Reads one.
    ///
    /// # Errors
    /// Where it is none, of a version that is not known, or too long; nothing of it is used then.
    pub fn parse(bytes: &[u8]) -> Result<Self, PageCacheError> {
        let wrong = |what: &str| PageCacheError::Manifest(what.to_owned());
        if bytes.len() > MOST_MANIFEST_BYTES {
            return Err(wrong("it is too long"));
        }
        let read: Self = serde_json::from_slice(bytes)
            .map_err(|error| PageCacheError::Manifest(error.to_string()))?;
        if read.version != VERSION {
            return Err(wrong(&format!("its version is {}, not {VERSION}", read.version)));
        }
        let mut seen = HashSet::new();
        match read.files.iter().find(|file| !file.is_sound() || !seen.insert(&*file.path)) {
            Some(file) => Err(wrong(&format!("what it says of {:?} cannot be", file.path))),
            None => Ok(read),
        }
    }

    /// How many pages are hot.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.files.iter().map(HotFile::pages).fold(0, u64::saturating_add)
    }

    /// What it says of a file.
    #[must_use]
    pub fn file(&self, path: &Path) -> Option<&HotFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(path: &str, bytes: u64, hot: &[(u64, u64, u32)]) -> HotFile {
        let identity = FileIdentity { bytes, modified_ns: -5 };
        HotFile { path: path.into(), identity, hot: hot.iter().map(|it| (*it).into()).collect() }
    }

    #[test]
    fn it_comes_back() {
        let files = vec![file("/a", 8192, &[(0, 1, 3), (1, 2, 2)]), file("/b/c", 1, &[])];
        let manifest = Manifest::new(10_000, 7, files);
        let bytes = serde_json::to_vec(&manifest).expect("JSON");
        assert_eq!(Manifest::parse(&bytes).expect("a manifest"), manifest);
        assert_eq!(manifest.pages(), 2);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let wrong = [
            file("a", 8192, &[]),
            file("/a/../b", 8192, &[]),
            file("/a", 8192, &[(0, 3, 2)]),
            file("/a", 8192, &[(1, 1, 2)]),
            file("/a", 8192, &[(1, 2, 2), (0, 1, 2)]),
        ];
        let refused = |files: Vec<HotFile>| {
            let bytes = serde_json::to_vec(&Manifest::new(1, 0, files)).expect("JSON");
            assert!(Manifest::parse(&bytes).is_err());
        };
        wrong.into_iter().for_each(|wrong| refused(vec![wrong]));
        refused(vec![file("/a", 8192, &[]), file("/a", 8192, &[])]);
        let next = br#"{"version": 2, "window_ms": 1, "lost": 0, "files": []}"#;
        assert!(Manifest::parse(next).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_error_or_a_manifest(
            at in 0_usize..200,
            bytes in prop::collection::vec(any::<u8>(), 0..20),
        ) {
            let _ = Manifest::parse(&bytes);
            let files = vec![file("/a", 8192, &[(0, 1, 3)])];
            let mut good = serde_json::to_vec(&Manifest::new(1, 0, files)).expect("JSON");
            let at = at.min(good.len());
            let end = (at + bytes.len()).min(good.len());
            good.splice(at..end, bytes);
            if let Ok(read) = Manifest::parse(&good) {
                prop_assert!(read.files.iter().all(HotFile::is_sound));
            }
        }
    }
}
