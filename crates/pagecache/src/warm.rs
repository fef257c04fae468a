//! Reading what is hot into the page cache, and looking how much of it is there.

use crate::manifest::{FileIdentity, HotFile, HotRange, Manifest};
use crate::tree::{FileTree, Found};
use dewar_kernel::{cached_pages, read_when_idle};
use dewar_units::PAGE_BYTES;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

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

/// A file that the guest has at a path, by the last that was mounted over it.
fn open(trees: &[FileTree], path: &Path) -> Option<(File, FileIdentity)> {
    let (file, metadata) = trees.iter().rev().find_map(|tree| tree.open(path)?.ok())?;
    Some((file, FileIdentity::of(&metadata)))
}

/// The same, if it is still the one that was looked at.
fn open_hot(trees: &[FileTree], hot: &HotFile) -> Option<File> {
    open(trees, &hot.path).filter(|(_, identity)| *identity == hot.identity).map(|(file, _)| file)
}

fn cached_of(file: &File, range: &HotRange) -> Result<u64, dewar_kernel::KernelError> {
    let page = PAGE_BYTES as u64;
    cached_pages(file, range.start * page, (range.end - range.start) * page)
}

/// Reads what is hot and not cached, the most used first, at most so many bytes and until `stop` is set; `progress` is told the
/// pages that were looked at.
pub fn warm(
    trees: &[FileTree],
    manifest: &Manifest,
    most_bytes: u64,
    stop: &AtomicBool,
    progress: &(dyn Fn(u64) + Sync),
) -> Warmed {
    let ranges = |(index, file): (usize, &HotFile)| -> Vec<(usize, HotRange)> {
        file.hot.iter().map(|range| (index, *range)).collect()
    };
    let mut ranges: Vec<_> = manifest.files.iter().enumerate().flat_map(ranges).collect();
    ranges.sort_by_key(|(index, range)| (std::cmp::Reverse(range.uses), *index, range.start));
    let work = Work {
        trees,
        manifest,
        ranges,
        stop,
        next: AtomicUsize::new(0),
        left: AtomicU64::new(most_bytes / PAGE_BYTES as u64),
        read: AtomicU64::new(0),
        cached: AtomicU64::new(0),
        skipped: Mutex::default(),
        why: OnceLock::new(),
    };
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| work.run(progress));
        }
    });
    let skipped = work.skipped.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut skipped: Vec<PathBuf> =
        skipped.into_iter().map(|index| manifest.files[index].path.clone()).collect();
    skipped.sort();
    let (read, cached) = (work.read.into_inner(), work.cached.into_inner());
    Warmed { read, cached, skipped, stopped: work.why.into_inner() }
}

/// What threads share.
struct Work<'w> {
    trees: &'w [FileTree],
    manifest: &'w Manifest,
    ranges: Vec<(usize, HotRange)>,
    stop: &'w AtomicBool,
    next: AtomicUsize,
    /// Pages that may be read.
    left: AtomicU64,
    read: AtomicU64,
    cached: AtomicU64,
    /// Files that are others now, or cannot be read.
    skipped: Mutex<HashSet<usize>>,
    /// Why it ends early.
    why: OnceLock<&'static str>,
}

impl Work<'_> {
    fn run(&self, progress: &(dyn Fn(u64) + Sync)) {
        // Without it the reads compete with others', which is as right.
        let _ = read_when_idle();
        let mut buffer = vec![0; PIECE as usize];
        // Ranges of one file often follow each other.
        let mut opened: Option<(usize, Option<File>)> = None;
        while let Some((index, range)) = self.ranges.get(self.next.fetch_add(1, Ordering::Relaxed))
        {
            if opened.as_ref().is_none_or(|(of, _)| of != index) {
                opened = Some((*index, open_hot(self.trees, &self.manifest.files[*index])));
            }
            let file = opened.as_ref().and_then(|(_, file)| file.as_ref());
            if file.and_then(|file| self.read_range(file, range, &mut buffer)).is_none() {
                self.skipped.lock().unwrap_or_else(PoisonError::into_inner).insert(*index);
            }
            if self.why.get().is_some() {
                return;
            }
            progress(range.end - range.start);
        }
    }

    /// Reads what of a range is not cached; `None` where that fails.
    fn read_range(&self, file: &File, range: &HotRange, buffer: &mut [u8]) -> Option<()> {
        let step = PIECE / PAGE_BYTES as u64;
        let mut start = range.start;
        while start < range.end {
            self.look_whether_to_end();
            if self.why.get().is_some() {
                return Some(());
            }
            let end = (start + step).min(range.end);
            let piece = HotRange { start, end, ..*range };
            let cached = cached_of(file, &piece).unwrap_or(0).min(end - start);
            self.cached.fetch_add(cached, Ordering::Relaxed);
            let missing = end - start - cached;
            if missing > 0 {
                let taken = self.take(missing);
                // Where the rest is too much, as many pages as there may be.
                let last = if taken < missing { (start + taken).min(end) } else { end };
                read(file, start, last, buffer)?;
                self.read.fetch_add(taken, Ordering::Relaxed);
                if taken < missing {
                    let _ = self.why.set("the limit was reached");
                    return Some(());
                }
            }
            start = end;
        }
        Some(())
    }

    /// Takes so many of the pages that may be read, or those that are left.
    fn take(&self, pages: u64) -> u64 {
        let take = |left: u64| Some(left.saturating_sub(pages));
        let before = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        before.unwrap_or(0).min(pages)
    }

    fn look_whether_to_end(&self) {
        if self.stop.load(Ordering::Relaxed) {
            let _ = self.why.set("it was to end");
        } else if is_memory_short() {
            let _ = self.why.set("memory is short");
        }
    }
}

/// Reads pages into the page cache.
fn read(file: &File, start: u64, end: u64, buffer: &mut [u8]) -> Option<()> {
    let bytes = &mut buffer[..((end - start) * PAGE_BYTES as u64) as usize];
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], start * PAGE_BYTES as u64 + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
    Some(())
}

fn is_memory_short() -> bool {
    let pressure = || {
        let text = fs::read_to_string("/proc/pressure/memory").ok()?;
        let full = text.lines().find(|line| line.starts_with("full"))?;
        full.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse::<f64>().ok()
    };
    pressure().is_some_and(|pressure| pressure > MOST_PRESSURE)
}

/// How much of the files of a manifest is cached.
#[must_use]
pub fn cached_hot(trees: &[FileTree], manifest: &Manifest) -> Vec<FileCached> {
    let of = |hot: &HotFile| {
        let (file, identity) = open(trees, &hot.path)?;
        file_cached(&file, identity, &hot.path, Some(hot))
    };
    sorted(manifest.files.iter().filter_map(of).collect())
}

/// How much of each file is cached: of all that are cached in part. What cannot be looked at is left out.
#[must_use]
pub fn cached(trees: &[FileTree], manifest: Option<&Manifest>) -> Vec<FileCached> {
    let mut found = Vec::new();
    trees.iter().for_each(|tree| tree.find(|_| true, &mut found));
    let mut seen = HashSet::new();
    found.retain(|file| file.metadata.len() > 0 && seen.insert(file.key));
    let files = manifest.into_iter().flat_map(|manifest| &manifest.files);
    let hot: HashMap<&Path, &HotFile> = files.map(|file| (&*file.path, file)).collect();
    let of = |file: &Found| {
        let (opened, identity) = open(trees, &file.inside)?;
        file_cached(&opened, identity, &file.inside, hot.get(&*file.inside).copied())
    };
    sorted(found.iter().filter_map(of).filter(|file| file.cached > 0 || file.hot > 0).collect())
}

fn file_cached(
    file: &File,
    identity: FileIdentity,
    path: &Path,
    hot: Option<&HotFile>,
) -> Option<FileCached> {
    let cached = cached_pages(file, 0, identity.bytes).ok()?;
    let hot = hot.filter(|hot| hot.identity == identity);
    let of = |range: &HotRange| cached_of(file, range).unwrap_or(0);
    let there: u64 = hot.map_or(0, |hot| hot.hot.iter().map(of).sum());
    let hot = hot.map_or(0, HotFile::pages);
    let (pages, missing) = (identity.bytes.div_ceil(PAGE_BYTES as u64), hot.saturating_sub(there));
    Some(FileCached { path: path.to_owned(), pages, cached, hot, missing })
}

/// What is used most comes first.
fn sorted(mut files: Vec<FileCached>) -> Vec<FileCached> {
    let order = |it: &FileCached| (std::cmp::Reverse((it.hot, it.cached)), it.path.clone());
    files.sort_by_cached_key(order);
    files
}
