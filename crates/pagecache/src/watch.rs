//! Watching which pages are read (the kernel's events `filemap:mm_filemap_get_pages` and `filemap:mm_filemap_fault`, which
//! Linux 6.12 and 6.18 have).
//!
//! The kernel tells of every read of a page that goes through read(2) and its kin, whether it was cached or not, and
//! of every page fault in a mapped file. Of a page that is mapped already nobody tells. Where this process is in the
//! machine's own PID namespace only the guest's threads, and those that they make, are listened to; in another, all that read
//! the same files.

use crate::PageCacheError;
use crate::manifest::Manifest;
use crate::reads::{Read as ReadOfFile, Reads};
use crate::tracefs::Tracing;
use crate::tree::{FileKey, FileTree};
use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::time::{Duration, Instant};

const EVENTS: [&str; 2] = ["mm_filemap_get_pages", "mm_filemap_fault"];
/// What the kernel may have to tell for each CPU that was not read yet.
const BUFFER_KIB: usize = 8192;
/// And for all of them.
const BUFFERS_KIB: usize = 256 << 10;
/// For so long what is left is taken when the watch is over.
const LAST: Duration = Duration::from_secs(5);
/// How the text must be, whatever others set: an instance begins as the kernel's own tracing is.
const OPTIONS: [(&str, &str); 7] = [
    ("record-tgid", "0"),
    ("context-info", "1"),
    ("latency-format", "0"),
    ("raw", "0"),
    ("hex", "0"),
    ("bin", "0"),
    ("fields", "0"),
];
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The inode of the PID namespace that a machine begins with (include/uapi/linux/nsfs.h).
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// The kernel's telling of reads, while it lives.
pub struct ReadWatch {
    /// Closed before the tracing ends: what is read cannot be removed.
    pipe: File,
    tracing: Tracing,
    /// A line that has not come whole.
    rest: Vec<u8>,
    reads: Reads,
    lost: u64,
    /// Lines that were not understood.
    strange: u64,
    began: Instant,
}

/// What was seen.
#[derive(Debug)]
pub struct Watched {
    reads: Reads,
    lost: u64,
    window: Duration,
}

impl ReadWatch {
    /// Begins to watch reads of the file systems of these trees, by these threads.
    ///
    /// # Errors
    /// Where the kernel cannot tell, or does not let us know.
    pub fn start(trees: &[FileTree], threads: &[i32]) -> Result<Self, PageCacheError> {
        let tracing = Tracing::new()?;
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let buffer = (BUFFERS_KIB / cpus).clamp(512, BUFFER_KIB);
        tracing.set("buffer_size_kb", &buffer.to_string())?;
        for (option, value) in OPTIONS {
            // Not every kernel has each.
            let _ = tracing.set(&format!("options/{option}"), value);
        }
        let devices: HashSet<u64> = trees
            .iter()
            .filter_map(|tree| fs::metadata(&tree.host).ok())
            .map(|it| kernel_device(std::os::unix::fs::MetadataExt::dev(&it)))
            .collect();
        if devices.is_empty() || threads.is_empty() {
            // Without a filter the kernel would tell of everything.
            let cause = std::io::Error::other("there is no file, or no thread, to watch");
            return Err(PageCacheError::tracing("set up")(cause));
        }
        let filter: Vec<String> = devices.iter().map(|it| format!("s_dev == {it}")).collect();
        for event in EVENTS {
            tracing.set(&format!("events/filemap/{event}/filter"), &filter.join(" || "))?;
        }
        if fs::read_link("/proc/self/ns/pid").is_ok_and(|it| it.as_os_str() == FIRST_PID_NAMESPACE)
        {
            let threads: Vec<String> = threads.iter().map(ToString::to_string).collect();
            tracing.set("options/event-fork", "1")?;
            tracing.set("set_event_pid", &threads.join(" "))?;
        }
        let pipe = tracing.pipe()?;
        for event in EVENTS {
            tracing.set(&format!("events/filemap/{event}/enable"), "1")?;
        }
        let (rest, reads, began) = (Vec::new(), Reads::default(), Instant::now());
        Ok(Self { tracing, pipe, rest, reads, lost: 0, strange: 0, began })
    }

    /// Watches for so long; `is_over` may end it before.
    ///
    /// # Errors
    /// Where the kernel's tracing fails.
    pub fn run(
        &mut self,
        window: Duration,
        is_over: impl Fn() -> bool,
    ) -> Result<(), PageCacheError> {
        let until = Instant::now() + window;
        while Instant::now() < until && !is_over() {
            self.take(until.min(Instant::now() + LOOK_EVERY))?;
            std::thread::sleep(LOOK_EVERY / 4);
        }
        Ok(())
    }

    /// Ends it, and gives what was seen.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn finish(mut self) -> Result<Watched, PageCacheError> {
        let window = self.began.elapsed();
        self.tracing.set("tracing_on", "0")?;
        self.take(Instant::now() + LAST)?;
        if self.strange > 0 && self.reads.is_empty() {
            let cause = std::io::Error::other("it tells in words that are not understood");
            return Err(PageCacheError::tracing("understand")(cause));
        }
        Ok(Watched { reads: self.reads, lost: self.lost, window })
    }

    /// Takes what the kernel has to tell, until then: a guest that reads faster than it is listened to makes no end.
    fn take(&mut self, until: Instant) -> Result<(), PageCacheError> {
        let mut bytes = vec![0; 1 << 16];
        while Instant::now() < until {
            let read = match self.pipe.read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(PageCacheError::tracing("read")(error)),
            };
            self.rest.extend_from_slice(&bytes[..read]);
            let whole = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            let lines: Vec<u8> = self.rest.drain(..whole).collect();
            for line in String::from_utf8_lossy(&lines).lines() {
                match Line::parse(line) {
                    Some(Line::Read(read)) => self.lost += u64::from(!self.reads.add(read)),
                    Some(Line::Lost(events)) => self.lost += events,
                    None => self.strange += u64::from(!line.trim().is_empty()),
                }
            }
        }
        Ok(())
    }
}

impl Watched {
    /// What of these trees is hot. Takes as long as a walk through them.
    #[must_use]
    pub fn manifest(&self, trees: &[FileTree]) -> Manifest {
        let mut found = Vec::new();
        trees.iter().for_each(|tree| tree.find(|key| self.reads.has(key), &mut found));
        // A file that has several names, or is in several trees, is itself once.
        let mut seen = HashSet::new();
        found.retain(|file| seen.insert(file.key));
        found.sort_by(|one, other| one.inside.cmp(&other.inside));
        Manifest::new(self.window.as_millis() as u64, self.lost, self.reads.hot(found))
    }
}

/// A device number as the kernel has it within: 12 bits of major number, 20 of minor.
fn kernel_device(device: u64) -> u64 {
    u64::from(rustix::fs::major(device)) << 20 | u64::from(rustix::fs::minor(device))
}

/// A line of the kernel's text.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Read(ReadOfFile),
    Lost(u64),
}

impl Line {
    /// ```text
    ///   redis-server-1234  [001] .....  12.345678: mm_filemap_get_pages: dev=254:1 ino=2f ofs=0-8191
    ///   sh-1235            [000] .....  12.345679: mm_filemap_fault: dev=254:1 ino=2f ofs=4096
    /// CPU:1 [LOST 12 EVENTS]
    /// ```
    fn parse(line: &str) -> Option<Self> {
        if let Some((_, after)) = line.split_once("[LOST ") {
            // Where it does not know how many, some.
            return Some(Self::Lost(after.split(' ').next()?.parse().unwrap_or(1)));
        }
        let (before, event) = line.split_once(": mm_filemap_")?;
        // A program's name may have anything in it.
        let thread = before.rsplit_once('[')?.0.trim_end().rsplit_once('-')?.1.parse().ok()?;
        let mut words = event.split(' ').skip(1).map(|word| word.split_once('='));
        let mut next = |name: &str| words.next().flatten().filter(|it| it.0 == name).map(|it| it.1);
        let (major, minor) = next("dev")?.split_once(':')?;
        let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
        let inode = u64::from_str_radix(next("ino")?, 16).ok()?;
        let places = next("ofs")?;
        let (first, last) = places.split_once('-').unwrap_or((places, places));
        let page =
            |place: &str| place.parse::<u64>().ok().map(|it| it / dewar_units::PAGE_BYTES as u64);
        let (first, last) = (page(first)?, page(last)?);
        let file: FileKey = (device, inode);
        // A read goes no further than a file can.
        (first <= last && last - first < 1 << 20).then_some(Self::Read(ReadOfFile {
            thread,
            file,
            first,
            last,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_understood() {
        let device = rustix::fs::makedev(254, 1);
        let read = |thread, first, last| {
            Some(Line::Read(ReadOfFile { thread, file: (device, 0x2f), first, last }))
        };
        let line =
            "  a [b]-c-1234  [001] ..... 12.34: mm_filemap_get_pages: dev=254:1 ino=2f ofs=0-8191";
        assert_eq!(Line::parse(line), read(1234, 0, 1));
        let line = "  sh-7  [000] ..... 12.34: mm_filemap_fault: dev=254:1 ino=2f ofs=4096";
        assert_eq!(Line::parse(line), read(7, 1, 1));
        assert_eq!(Line::parse("CPU:1 [LOST 12 EVENTS]"), Some(Line::Lost(12)));
        assert_eq!(Line::parse("CPU:1 [LOST EVENTS]"), Some(Line::Lost(1)));
        for wrong in ["", "x", "sh-7 [0]: mm_filemap_fault: dev=1 ino=2f ofs=1"] {
            assert_eq!(Line::parse(wrong), None);
        }
    }
}
