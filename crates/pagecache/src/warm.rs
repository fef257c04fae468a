//! Reading what is hot into the page cache, and looking how much of it is there.

use crate::manifest::{FileIdentity, HotFile, HotRange, Manifest};
use crate::tree::FileTree;
use dewar_kernel::{cached_pages, read_when_idle};
use dewar_units::PAGE_BYTES;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Reads under way at once.
const THREADS: usize = 4;
/// Bytes of a read.
const PIECE: u64 = 1 << 20;
/// Where all work on the machine waited for memory for so many hundredths of the last ten seconds, it has none to spare
/// (Documentation/accounting/psi.rst, `full avg10`).
const MOST_PRESSURE: f64 = 5.0;

/// What was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Warmed {
    /// Pages that were read.
    pub read: u64,
    /// Hot pages that were cached already.
    pub cached: u64,
    /// Files that are gone, are others now, or cannot be read.
    pub skipped: Vec<PathBuf>,
    /// Whether it ended before all was read: at the limit, or as memory is short.
    pub stopped: Option<&'static str>,
}

/// How much of a file is cached, in pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileCached {
    /// Where the guest has it.
    pub path: PathBuf,
    /// Its pages.
    pub pages: u64,
    /// Those that are cached.
    pub cached: u64,
    /// Those that are hot.
    pub hot: u64,
    /// Those that are hot and not cached.
    pub missing: u64,
}

/// The file as it is now, if it is still the one that was looked at.
fn open(trees: &[FileTree], hot: &HotFile) -> Option<File> {
    // The last that the guest mounted over a place is what it sees there.
    let file = trees.iter().rev().find_map(|tree| tree.open(&hot.path)?.ok())?;
    let metadata = file.metadata().ok()?;
    (metadata.is_file() && FileIdentity::of(&metadata) == hot.identity).then_some(file)
}

fn cached_of(file: &File, range: &HotRange) -> Result<u64, dewar_kernel::KernelError> {
    let page = PAGE_BYTES as u64;
    cached_pages(file, range.start * page, (range.end - range.start) * page)
}

/// Reads what is hot and not cached, the most used first, at most so many bytes; `progress` is told the pages that were
/// looked at.
pub fn warm(
    trees: &[FileTree],
    manifest: &Manifest,
    most_bytes: u64,
    progress: &(dyn Fn(u64) + Sync),
) -> Warmed {
    let files: Vec<Option<File>> = manifest.files.iter().map(|it| open(trees, it)).collect();
    let mut ranges: Vec<(usize, HotRange)> = Vec::new();
    let mut skipped: Vec<PathBuf> = Vec::new();
    for (index, file) in files.iter().enumerate() {
        match file {
            Some(_) => ranges.extend(manifest.files[index].hot.iter().map(|it| (index, *it))),
            None => skipped.push(manifest.files[index].path.clone()),
        }
    }
    ranges.sort_by_key(|(index, range)| (std::cmp::Reverse(range.uses), *index, range.start));
    let work = Work {
        files: &files,
        ranges: &ranges,
        next: AtomicUsize::new(0),
        left: AtomicU64::new(most_bytes / PAGE_BYTES as u64),
        read: AtomicU64::new(0),
        cached: AtomicU64::new(0),
        failed: Mutex::default(),
        is_full: AtomicBool::new(false),
        is_short: AtomicBool::new(false),
    };
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| work.run(progress));
        }
    });
    let failed = work.failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    skipped.extend(failed.into_iter().map(|index| manifest.files[index].path.clone()));
    skipped.sort();
    skipped.dedup();
    let stopped = match (work.is_short.into_inner(), work.is_full.into_inner()) {
        (true, _) => Some("memory is short"),
        (false, true) => Some("the limit was reached"),
        (false, false) => None,
    };
    let (read, cached) = (work.read.into_inner(), work.cached.into_inner());
    Warmed { read, cached, skipped, stopped }
}

/// What threads share.
struct Work<'w> {
    files: &'w [Option<File>],
    ranges: &'w [(usize, HotRange)],
    next: AtomicUsize,
    /// Pages that may be read.
    left: AtomicU64,
    read: AtomicU64,
    cached: AtomicU64,
    failed: Mutex<Vec<usize>>,
    is_full: AtomicBool,
    is_short: AtomicBool,
}

impl Work<'_> {
    fn run(&self, progress: &(dyn Fn(u64) + Sync)) {
        // Without it the reads compete with others', which is as right.
        let _ = read_when_idle();
        let mut buffer = vec![0; PIECE as usize];
        while let Some((index, range)) = self.ranges.get(self.next.fetch_add(1, Ordering::Relaxed))
        {
            if self.is_full.load(Ordering::Relaxed) || self.is_short.load(Ordering::Relaxed) {
                return;
            }
            if is_memory_short() {
                self.is_short.store(true, Ordering::Relaxed);
                return;
            }
            let Some(file) = &self.files[*index] else { continue };
            if self.read_range(file, range, &mut buffer).is_none() {
                self.failed.lock().unwrap_or_else(PoisonError::into_inner).push(*index);
            }
            progress(range.end - range.start);
        }
    }

    /// Reads what of a range is not cached; `None` where that fails.
    fn read_range(&self, file: &File, range: &HotRange, buffer: &mut [u8]) -> Option<()> {
        let step = PIECE / PAGE_BYTES as u64;
        for start in (range.start..range.end).step_by(step as usize) {
            let piece = HotRange { start, end: (start + step).min(range.end), ..*range };
            let pages = piece.end - piece.start;
            let cached = cached_of(file, &piece).unwrap_or(0).min(pages);
            self.cached.fetch_add(cached, Ordering::Relaxed);
            if cached == pages {
                continue;
            }
            let take = |left: u64| left.checked_sub(pages);
            if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_err() {
                self.is_full.store(true, Ordering::Relaxed);
                return Some(());
            }
            let bytes = &mut buffer[..(pages * PAGE_BYTES as u64) as usize];
            let mut done = 0;
            while done < bytes.len() {
                let at = piece.start * PAGE_BYTES as u64 + done as u64;
                match file.read_at(&mut bytes[done..], at) {
                    Ok(0) => break,
                    Ok(read) => done += read,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(_) => return None,
                }
            }
            self.read.fetch_add(pages - cached, Ordering::Relaxed);
        }
        Some(())
    }
}

fn is_memory_short() -> bool {
    let pressure = || {
        let text = fs::read_to_string("/proc/pressure/memory").ok()?;
        let full = text.lines().find(|line| line.starts_with("full"))?;
        full.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse::<f64>().ok()
    };
    pressure().is_some_and(|pressure| pressure > MOST_PRESSURE)
}

/// How much of each file is cached: of all that are cached in part or hot. What cannot be looked at is left out.
#[must_use]
pub fn cached(trees: &[FileTree], manifest: Option<&Manifest>) -> Vec<FileCached> {
    let mut found = Vec::new();
    trees.iter().for_each(|tree| tree.find(|_| true, &mut found));
    let mut seen = std::collections::HashSet::new();
    found.retain(|file| seen.insert(file.key));
    let mut all = Vec::new();
    for file in found {
        let Some(opened) = trees.iter().rev().find_map(|it| it.open(&file.inside)?.ok()) else {
            continue;
        };
        let bytes = file.metadata.len();
        let Ok(cached) = cached_pages(&opened, 0, bytes) else { continue };
        let is_same = |hot: &&HotFile| hot.identity == FileIdentity::of(&file.metadata);
        let hot = manifest.and_then(|it| it.file(&file.inside)).filter(is_same);
        let of = |range: &HotRange| cached_of(&opened, range).unwrap_or(0);
        let there: u64 = hot.map_or(0, |hot| hot.hot.iter().map(of).sum());
        let hot = hot.map_or(0, HotFile::pages);
        if cached > 0 || hot > 0 {
            let pages = bytes.div_ceil(PAGE_BYTES as u64);
            let missing = hot.saturating_sub(there);
            all.push(FileCached { path: file.inside, pages, cached, hot, missing });
        }
    }
    all.sort_by(|one, other| {
        (other.hot, other.cached, &one.path).cmp(&(one.hot, one.cached, &other.path))
    });
    all
}
