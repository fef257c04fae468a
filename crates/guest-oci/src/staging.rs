//! A file in memory with copies of pages of processes, and an index of which page lies where.

use crate::error::OciError;
use dewar_units::PAGE_BYTES;
use rustix::fs::{FallocateFlags, fallocate};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes that are copied at a time.
const STEP: u64 = 1 << 20;

/// A file in memory with copies of pages, in the order in which they were first copied.
#[derive(Debug)]
pub struct Staging {
    path: PathBuf,
    file: File,
    /// Its end, in bytes.
    end: u64,
    /// Where it must end, at most.
    room: u64,
    /// Where pages were written since that was last asked.
    written: Vec<Range<u64>>,
}

/// Which addresses of a process are in a staging file, and where. Neighbours there need not be neighbours here.
#[derive(Debug, Default)]
pub struct Staged {
    /// By the first address of a run: its end, and the offset of its first byte.
    runs: BTreeMap<u64, (u64, u64)>,
}

/// Bytes to copy: from addresses of a process to an offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// From where.
    pub addresses: Range<u64>,
    /// To where, or where they are.
    pub offset: u64,
}

impl Staged {
    /// Finds a place for a range of addresses: that of before, or a new one at the end of the file.
    fn place(&mut self, range: Range<u64>, end: &mut u64) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let here = self.runs.range(..=at).next_back().filter(|(_, (end, _))| at < *end);
            if let Some((start, (run_end, offset))) = here {
                let upto = range.end.min(*run_end);
                pieces.push(Piece { addresses: at..upto, offset: offset + (at - start) });
                at = upto;
                continue;
            }
            let next = self.runs.range(at..).next().map_or(range.end, |(start, _)| *start);
            let upto = range.end.min(next);
            self.runs.insert(at, (upto, *end));
            pieces.push(Piece { addresses: at..upto, offset: *end });
            *end += upto - at;
            at = upto;
        }
        pieces
    }

    /// Says that a range is not there.
    pub fn forget(&mut self, range: &Range<u64>) {
        let reach = |(start, (end, offset)): (&u64, &(u64, u64))| {
            (*start < range.end && range.start < *end).then_some((*start, *end, *offset))
        };
        // Runs do not overlap: from the end, until one ends before the range.
        while let Some((start, end, offset)) =
            self.runs.range(..range.end).next_back().and_then(reach)
        {
            self.runs.remove(&start);
            if start < range.start {
                self.runs.insert(start, (range.start, offset));
            }
            if range.end < end {
                self.runs.insert(range.end, (end, offset + (range.end - start)));
            }
        }
    }

    /// All runs: the first address, the end, and the offset of the first byte.
    pub fn runs(&self) -> Vec<(u64, u64, u64)> {
        self.runs.iter().map(|(start, (end, offset))| (*start, *end, *offset)).collect()
    }

    /// Those of another host. What is not as [`Staged::runs`] says it is refused: `None`.
    pub fn of_runs(runs: Vec<(u64, u64, u64)>) -> Option<Self> {
        let page = |it: u64| it % PAGE_BYTES as u64 == 0;
        let is_one = |(start, end, offset): &(u64, u64, u64)| {
            start < end
                && page(*start)
                && page(*end)
                && page(*offset)
                && offset.checked_add(end - start).is_some()
        };
        let in_order = runs.windows(2).all(|it| it[0].1 <= it[1].0);
        let is_right = in_order && runs.iter().all(is_one);
        let runs = runs.into_iter().map(|(start, end, offset)| (start, (end, offset)));
        is_right.then(|| Self { runs: runs.collect() })
    }

    /// Where a range lies that is there as a whole.
    pub fn find(&self, range: Range<u64>) -> Option<Vec<Piece>> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (start, (end, offset)) = self.runs.range(..=at).next_back()?;
            if at >= *end {
                return None;
            }
            let upto = range.end.min(*end);
            pieces.push(Piece { addresses: at..upto, offset: offset + (at - start) });
            at = upto;
        }
        Some(pieces)
    }

    /// The parts of a range that are not there.
    pub fn missing(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut at = range.start;
        while at < range.end {
            match self.runs.range(..=at).next_back().filter(|(_, (end, _))| at < *end) {
                Some((_, (end, _))) => at = *end,
                None => {
                    let next = self.runs.range(at..).next().map_or(range.end, |(start, _)| *start);
                    missing.push(at..range.end.min(next));
                    at = next;
                }
            }
        }
        missing
    }
}

impl Staging {
    /// An empty one.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn new(path: PathBuf) -> Result<Self, OciError> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(OciError::io("create", &path))?;
        Ok(Self { file, path, end: 0, room: u64::MAX, written: Vec::new() })
    }

    /// The same, which is so long from the start, and never longer.
    ///
    /// # Errors
    /// Where the file cannot be so long.
    pub fn with_room(self, bytes: u64) -> Result<Self, OciError> {
        self.file.set_len(bytes).map_err(OciError::io("lengthen", &self.path))?;
        Ok(Self { room: bytes, ..self })
    }

    /// One that has come from elsewhere, to be read.
    ///
    /// # Errors
    /// Where it cannot be opened.
    pub fn open(path: PathBuf) -> Result<Self, OciError> {
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(OciError::io("open", &path))?;
        Ok(Self { file, path, end: 0, room: 0, written: Vec::new() })
    }

    /// Where it was written since that was last asked, in bytes.
    pub fn take_written(&mut self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.written)
    }

    /// Puts a whole file behind all else; returns where it lies.
    ///
    /// # Errors
    /// Where it cannot be read, or there is no room.
    pub fn append(&mut self, path: &Path) -> Result<Range<u64>, OciError> {
        let mut from = File::open(path).map_err(OciError::io("open", path))?;
        let start = self.end;
        let bytes = from.metadata().map_err(OciError::io("look at", path))?.len();
        self.grow(bytes)?;
        let mut to = &self.file;
        to.seek(SeekFrom::Start(start)).map_err(OciError::io("write", &self.path))?;
        let copied = std::io::copy(&mut from.by_ref().take(bytes), &mut to);
        if copied.map_err(OciError::io("copy", path))? != bytes {
            return Err(OciError::io("copy", path)(std::io::ErrorKind::UnexpectedEof.into()));
        }
        self.written.push(start..self.end);
        Ok(start..start + bytes)
    }

    /// Makes room for so many bytes, in whole pages.
    fn grow(&mut self, bytes: u64) -> Result<(), OciError> {
        let end = bytes
            .checked_next_multiple_of(PAGE_BYTES as u64)
            .and_then(|it| it.checked_add(self.end));
        match end.filter(|end| *end <= self.room) {
            Some(end) => {
                self.end = end;
                Ok(())
            }
            None => Err(OciError::Grew { room: self.room }),
        }
    }

    /// Copies ranges of a process's memory, on all cores. Returns those that cannot be read: the process has
    /// unmapped some of each. They are not staged then, whatever they were before.
    ///
    /// # Errors
    /// Where there is no room.
    pub fn copy(
        &mut self,
        memory: &File,
        staged: &mut Staged,
        ranges: &[Range<u64>],
    ) -> Result<Vec<Range<u64>>, OciError> {
        let mut pieces = Vec::new();
        for range in ranges {
            for piece in staged.place(range.clone(), &mut self.end) {
                let bytes = piece.addresses.end - piece.addresses.start;
                self.written.push(piece.offset..piece.offset + bytes);
                pieces.extend(steps(piece));
            }
        }
        if self.end > self.room {
            return Err(OciError::Grew { room: self.room });
        }
        let next = AtomicUsize::new(0);
        let unreadable = Mutex::new(Vec::new());
        let work = || -> Result<(), OciError> {
            let mut buffer = vec![0; STEP as usize];
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                let bytes = &mut buffer[..(piece.addresses.end - piece.addresses.start) as usize];
                if memory.read_exact_at(bytes, piece.addresses.start).is_err() {
                    let mut all = unreadable.lock().unwrap_or_else(PoisonError::into_inner);
                    all.push(piece.addresses.clone());
                    continue;
                }
                let written = self.file.write_all_at(bytes, piece.offset);
                written.map_err(OciError::io("write", &self.path))?;
            }
            Ok(())
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..cores.min(pieces.len())).map(|_| scope.spawn(work)).collect();
            others
                .into_iter()
                .map(|other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .fold(work(), Result::and)
        })?;
        let unreadable = unreadable.into_inner().unwrap_or_else(PoisonError::into_inner);
        unreadable.iter().for_each(|range| staged.forget(range));
        Ok(unreadable)
    }

    /// Moves pieces to another file, one after the other from `at` on: the room that they had is free then.
    ///
    /// # Errors
    /// Where there is no room.
    pub fn move_to(&self, pieces: Vec<Piece>, to: (&File, &Path), at: u64) -> Result<(), OciError> {
        let mut buffer = vec![0; STEP as usize];
        let mut offset = at;
        for piece in pieces.into_iter().flat_map(steps) {
            let bytes = &mut buffer[..(piece.addresses.end - piece.addresses.start) as usize];
            let read = self.file.read_exact_at(bytes, piece.offset);
            read.map_err(OciError::io("read", &self.path))?;
            to.0.write_all_at(bytes, offset).map_err(OciError::io("write", to.1))?;
            offset += bytes.len() as u64;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // Where that is not possible it is free at the end.
            let _ = fallocate(&self.file, flags, piece.offset, bytes.len() as u64);
        }
        Ok(())
    }
}

/// A piece in parts that are copied at once.
fn steps(piece: Piece) -> impl Iterator<Item = Piece> {
    let Piece { addresses, offset } = piece;
    debug_assert!(addresses.start % PAGE_BYTES as u64 == 0);
    (addresses.start..addresses.end).step_by(STEP as usize).map(move |start| Piece {
        addresses: start..addresses.end.min(start + STEP),
        offset: offset + (start - addresses.start),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_one_place_however_often_it_is_copied() {
        let mut staged = Staged::default();
        let mut end = 0;
        assert_eq!(staged.place(0x3000..0x5000, &mut end).len(), 1);
        assert_eq!(staged.place(0x8000..0x9000, &mut end)[0].offset, 0x2000);
        // Before, in, between, in, behind.
        let pieces = staged.place(0x2000..0xa000, &mut end);
        let offsets: Vec<u64> = pieces.iter().map(|it| it.offset).collect();
        assert_eq!(offsets, [0x3000, 0, 0x4000, 0x2000, 0x7000]);
        assert_eq!(end, 0x8000);
        assert_eq!(staged.find(0x2000..0xa000), Some(pieces));
        assert_eq!(staged.find(0x2000..0xb000), None);
        assert_eq!(staged.missing(0x0000..0xc000), [0x0000..0x2000, 0xa000..0xc000]);
        assert_eq!(staged.missing(0x4000..0x6000), [] as [Range<u64>; 0]);
        staged.forget(&(0x4000..0x9000));
        assert_eq!(
            staged.missing(0x0000..0xb000),
            [0x0000..0x2000, 0x4000..0x9000, 0xa000..0xb000]
        );
        // What stays is where it was.
        assert_eq!(staged.find(0x3000..0x4000).expect("there")[0].offset, 0);
        assert_eq!(staged.find(0x9000..0xa000).expect("there")[0].offset, 0x7000);
    }

    #[test]
    fn our_own_memory_is_copied_and_moved() {
        let folder = tempfile::tempdir().expect("folder");
        let mut staging = Staging::new(folder.path().join("staging")).expect("staging");
        let own = vec![7u8; 16 * PAGE_BYTES];
        let start = (own.as_ptr() as u64).next_multiple_of(PAGE_BYTES as u64);
        let range = start..start + 8 * PAGE_BYTES as u64;
        let memory = File::open("/proc/self/mem").expect("memory");
        let mut staged = Staged::default();
        let nowhere = 0x1000..0x3000;
        let ranges = [range.clone(), nowhere.clone()];
        let unreadable = staging.copy(&memory, &mut staged, &ranges).expect("copy");
        assert_eq!(unreadable, std::slice::from_ref(&nowhere));
        assert_eq!(staged.find(nowhere), None);
        let target = folder.path().join("target");
        let file = File::create_new(&target).expect("file");
        let pieces = staged.find(range).expect("all");
        staging.move_to(pieces, (&file, &target), 100).expect("move");
        let bytes = std::fs::read(&target).expect("read");
        assert_eq!(bytes.len(), 100 + 8 * PAGE_BYTES);
        assert!(bytes[100..].iter().all(|byte| *byte == 7));
    }
}
