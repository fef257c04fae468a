//! CRIU's image files, as far as pages are concerned (CRIU's `images/pagemap.proto`, `criu/image.c`).
//!
//! An image is a magic number, a second one, and then protocol buffers, each behind its length. `pagemap-PID.img`
//! begins with the number of the file that holds the pages, `pages-N.img`, and then names runs of them: that file
//! has nothing but the pages of these runs, one after the other.

use crate::error::OciError;
use dewar_units::PAGE_BYTES;
use prost::Message;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The two numbers before the messages.
const MAGIC_BYTES: usize = 8;
/// The pages are in an image before this one.
pub const PARENT: u32 = 1;
/// The pages are fetched when they are needed.
pub const LAZY: u32 = 2;
/// The pages are in the file.
pub const PRESENT: u32 = 4;

#[derive(Clone, PartialEq, Message)]
struct Head {
    #[prost(uint32, required, tag = "1")]
    pages_id: u32,
}

/// A run of pages of a process.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Run {
    /// Where it lies in the process.
    #[prost(uint64, required, tag = "1")]
    pub address: u64,
    #[prost(uint32, required, tag = "2")]
    compat_pages: u32,
    #[prost(bool, optional, tag = "3")]
    in_parent: Option<bool>,
    #[prost(uint32, optional, tag = "4")]
    places: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    nr_pages: Option<u64>,
}

impl Run {
    /// How many pages.
    pub fn pages(&self) -> u64 {
        self.nr_pages.unwrap_or(u64::from(self.compat_pages))
    }

    /// The addresses of its bytes.
    pub fn addresses(&self) -> Range<u64> {
        self.address..self.address + self.pages() * PAGE_BYTES as u64
    }

    /// Where they end; `None` where that is no address.
    fn end(&self) -> Option<u64> {
        self.address.checked_add(self.pages().checked_mul(PAGE_BYTES as u64)?)
    }

    /// Where they are: one of [`PARENT`], [`LAZY`], [`PRESENT`], or several.
    pub fn flags(&self) -> u32 {
        let parent = if self.in_parent == Some(true) { PARENT } else { 0 };
        // Images of before there were flags have pages only.
        self.places.unwrap_or(PRESENT) | parent
    }

    /// The same run, its pages being in the file.
    pub fn into_present(self) -> Self {
        Self { places: Some(PRESENT), in_parent: None, ..self }
    }
}

/// A `pagemap-*.img`.
#[derive(Debug, Clone, PartialEq)]
pub struct Pagemap {
    /// The file.
    pub path: PathBuf,
    magic: [u8; MAGIC_BYTES],
    /// The number of the file with the pages.
    pub pages_id: u32,
    /// What is in it, in order.
    pub runs: Vec<Run>,
}

impl Pagemap {
    /// All of a folder of images, in the order of their names.
    ///
    /// # Errors
    /// Where one is not as it should be.
    pub fn all(folder: &Path) -> Result<Vec<Self>, OciError> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(folder).map_err(OciError::io("list", folder))? {
            let entry = entry.map_err(OciError::io("list", folder))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("pagemap-") && name.ends_with(".img") {
                paths.push(entry.path());
            }
        }
        paths.sort();
        paths.into_iter().map(Self::read).collect()
    }

    fn read(path: PathBuf) -> Result<Self, OciError> {
        let bytes = fs::read(&path).map_err(OciError::io("read", &path))?;
        Self::parse(path, &bytes)
    }

    fn parse(path: PathBuf, bytes: &[u8]) -> Result<Self, OciError> {
        let damaged =
            |problem: &str| OciError::Image { path: path.clone(), problem: problem.to_owned() };
        let (magic, mut rest) =
            bytes.split_first_chunk::<MAGIC_BYTES>().ok_or_else(|| damaged("it is too short"))?;
        let mut messages = Vec::new();
        while !rest.is_empty() {
            let (length, after) =
                rest.split_first_chunk::<4>().ok_or_else(|| damaged("it ends in a length"))?;
            let length = u32::from_le_bytes(*length) as usize;
            if length > after.len() {
                return Err(damaged("it ends in a message"));
            }
            let (message, after) = after.split_at(length);
            messages.push(message);
            rest = after;
        }
        let (head, runs) = messages.split_first().ok_or_else(|| damaged("it is empty"))?;
        let head = Head::decode(*head).map_err(|error| damaged(&error.to_string()))?;
        let run =
            |message: &&[u8]| Run::decode(*message).map_err(|error| damaged(&error.to_string()));
        let runs = runs.iter().map(run).collect::<Result<Vec<_>, _>>()?;
        let mut bytes = 0u64;
        for run in &runs {
            let sum = run.end().and_then(|end| bytes.checked_add(end - run.address));
            bytes = sum.ok_or_else(|| damaged("a run of pages has no end"))?;
        }
        Ok(Self { path, magic: *magic, pages_id: head.pages_id, runs })
    }

    /// Writes it over the file.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write(&self) -> Result<(), OciError> {
        fs::write(&self.path, self.to_bytes()).map_err(OciError::io("write", &self.path))
    }

    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        let mut add = |message: Vec<u8>| {
            bytes.extend((message.len() as u32).to_le_bytes());
            bytes.extend(message);
        };
        add(Head { pages_id: self.pages_id }.encode_to_vec());
        self.runs.iter().for_each(|run| add(run.encode_to_vec()));
        bytes
    }

    /// The name of the file with the pages.
    pub fn pages_name(&self) -> String {
        format!("pages-{}.img", self.pages_id)
    }

    /// Which process it is of, as the container numbers it; `None` where it is shared memory.
    pub fn task(&self) -> Option<i32> {
        let name = self.path.file_name()?.to_str()?;
        name.strip_prefix("pagemap-")?.strip_suffix(".img")?.parse().ok()
    }

    /// How many pages there are in the file of pages, when all are.
    pub fn pages(&self) -> u64 {
        self.runs.iter().map(Run::pages).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(address: u64, pages: u32, flags: u32) -> Run {
        Run { address, compat_pages: pages, in_parent: None, places: Some(flags), nr_pages: None }
    }

    #[test]
    fn an_image_comes_back_and_a_cut_one_does_not() {
        let map = Pagemap {
            path: PathBuf::from("/x/pagemap-17.img"),
            magic: *b"magicmag",
            pages_id: 3,
            runs: vec![run(0x40_0000, 5, PRESENT), run(0x7f00_0000_0000, 70_000, LAZY)],
        };
        let bytes = map.to_bytes();
        assert_eq!(Pagemap::parse(map.path.clone(), &bytes).expect("parse"), map);
        assert_eq!(
            (map.task(), map.pages(), map.pages_name()),
            (Some(17), 70_005, "pages-3.img".into())
        );
        // At the ends of messages it is a shorter one; anywhere else it is none.
        let whole =
            |cut: usize| Pagemap::parse(map.path.clone(), &bytes[..cut]).map(|it| it.runs.len());
        let parsed: Vec<usize> = (0..bytes.len()).filter_map(|cut| whole(cut).ok()).collect();
        assert_eq!(parsed, [0, 1]);
    }

    #[test]
    fn runs_without_an_end_are_refused() {
        let parsed = |runs: Vec<Run>| {
            let path = PathBuf::from("pagemap-1.img");
            let map = Pagemap { path: path.clone(), magic: [0; MAGIC_BYTES], pages_id: 1, runs };
            Pagemap::parse(path, &map.to_bytes()).map(|map| map.pages())
        };
        let many = |pages: u64| Run { nr_pages: Some(pages), ..run(0, 0, PRESENT) };
        assert_eq!(parsed(vec![many(1 << 51)]).expect("they end"), 1 << 51);
        parsed(vec![many(1 << 52)]).expect_err("more than there are addresses");
        parsed(vec![run(u64::MAX - 4095, 1, LAZY)]).expect_err("its end is no number");
        parsed(vec![many(1 << 51), many(1 << 51)]).expect_err("together they are too many");
    }

    #[test]
    fn fuzz_pagemaps() {
        let path = PathBuf::from("pagemap-17.img");
        let runs = vec![run(0x40_0000, 5, PRESENT), run(0x7f00_0000_0000, 70_000, LAZY)];
        let map = Pagemap { path: path.clone(), magic: [0; MAGIC_BYTES], pages_id: 3, runs };
        dewar_testkit::fuzz(&[map.to_bytes()], |bytes| {
            if let Ok(map) = Pagemap::parse(path.clone(), &bytes) {
                let ranges = map.runs.iter().map(|run| run.addresses());
                let bytes: u64 = ranges.map(|range| range.end - range.start).sum();
                assert_eq!(bytes, map.pages() * PAGE_BYTES as u64, "{map:?}");
            }
        });
    }

    #[test]
    fn shared_memory_is_of_no_process() {
        let shared = Pagemap {
            path: PathBuf::from("pagemap-shmem-1234.img"),
            magic: [0; MAGIC_BYTES],
            pages_id: 1,
            runs: vec![run(0, 1, LAZY)],
        };
        assert_eq!(shared.task(), None);
        assert_eq!(shared.runs[0].clone().into_present().flags(), PRESENT);
    }
}
