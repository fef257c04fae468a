//! The memory of a container, copied while it runs.
//!
//! **What is tracked.** Private anonymous memory: what CRIU leaves out of its images. Each process gets a
//! userfaultfd that write-protects asynchronously (`crates/memory/src/track.rs` tells the contract), and keeps no
//! copy of it: CRIU refuses a process with one open. It ends with this.
//!
//! **Rounds.** A round takes the pages that were written since the last, all that have memory in the first, and
//! copies them. Before each, processes and mappings that are new are tracked, too.
//!
//! **In the pause** it is looked once more. A page is as its copy if it lies in a mapping that the kernel says was
//! tracked all the while, was not written since the round that copied it, and could be read then. Everything else
//! is copied now: of a process that forked, called exec, or mapped other memory at the same place, the kernel refuses
//! to tell (EPERM), since that memory is not tracked.
//!
//! **Left out**, and copied as a whole in the pause: processes that have a file open for direct I/O, which writes to
//! memory without being seen; those into which no call can be injected.

use crate::criu_images::{PRESENT, Pagemap};
use crate::error::OciError;
use crate::folder::staging_file;
use crate::processes::Processes;
use crate::staged_images::{StagingIndex, assemble, lazy_maps};
use crate::staging::{Staged, Staging};
use dewar_kernel::{
    Pagemap as TrackedPages, Pid, ProcessHandle, RegisterMode, Userfaultfd, passing_userfaultfd_of,
};
use dewar_units::PAGE_BYTES;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// `O_DIRECT` of open(2) on x86-64.
const DIRECT: u32 = 0o40000;

/// Copies of a container's memory.
#[derive(Debug)]
pub struct PreCopy {
    first: i32,
    staging: Staging,
    /// By the container's numbers.
    tasks: BTreeMap<i32, Task>,
    /// Processes that are not tracked, by the host's numbers.
    left_out: Vec<i32>,
    /// Pages that were copied in the pause.
    stopped: u64,
}

/// A process.
#[derive(Debug, Default)]
struct Task {
    tracking: Option<Tracking>,
    staged: Staged,
}

#[derive(Debug)]
struct Tracking {
    uffd: Userfaultfd,
    pagemap: TrackedPages,
    memory: File,
    /// What is tracked, in order.
    spans: Vec<Range<u64>>,
}

impl PreCopy {
    /// Of the container whose first process this is; the copies go into a folder in memory.
    ///
    /// # Errors
    /// Where they have no room.
    pub fn new(first: i32, folder: &Path) -> Result<Self, OciError> {
        let staging = Staging::new(staging_file(folder))?;
        Ok(Self { first, staging, tasks: BTreeMap::new(), left_out: Vec::new(), stopped: 0 })
    }

    /// The same, of which the copies go to another host: into a file that is so long from the start, and never longer.
    ///
    /// # Errors
    /// As [`PreCopy::new`].
    pub fn with_room(first: i32, folder: &Path, bytes: u64) -> Result<Self, OciError> {
        let staging = Staging::new(staging_file(folder))?.with_room(bytes)?;
        Ok(Self { first, staging, tasks: BTreeMap::new(), left_out: Vec::new(), stopped: 0 })
    }

    /// Where copies were written since that was last asked, in bytes of the file.
    pub fn take_written(&mut self) -> Vec<Range<u64>> {
        self.staging.take_written()
    }

    /// Copies what was written since the last round, or all in the first. Returns how many pages that were.
    ///
    /// # Errors
    /// Where there is no room for them, or the container has ended.
    pub fn round(&mut self) -> Result<u64, OciError> {
        self.track_new()?;
        self.round_of_tracked()
    }

    /// The same, but what is new is not tracked: of a container that may be frozen at any moment no process must
    /// be held by us.
    ///
    /// # Errors
    /// As [`PreCopy::round`].
    pub(crate) fn round_of_tracked(&mut self) -> Result<u64, OciError> {
        let mut bytes = 0;
        for task in self.tasks.values_mut() {
            let Some(tracking) = &mut task.tracking else { continue };
            let (written, lost) = tracking.take();
            lost.iter().for_each(|span| task.staged.forget(span));
            bytes += written.iter().map(|it| it.end - it.start).sum::<u64>();
            // What cannot be read is gone, or is found in the pause.
            self.staging.copy(&tracking.memory, &mut task.staged, &written)?;
        }
        Ok(bytes / PAGE_BYTES as u64)
    }

    /// Tracks processes and mappings that are not tracked yet.
    fn track_new(&mut self) -> Result<(), OciError> {
        for (number, pid) in Processes::of(self.first)?.all() {
            if self.left_out.contains(&pid) {
                continue;
            }
            let task = self.tasks.entry(number).or_default();
            // Copies are relied on only where the tracking that they were made under goes on.
            match &mut task.tracking {
                Some(_) if has_direct_io(pid) => {
                    *task = Task::default();
                    self.left_out.push(pid);
                }
                Some(tracking) if tracking.is_of(pid) => {
                    let fresh = tracking.track_new(pid);
                    fresh.iter().for_each(|part| task.staged.forget(part));
                }
                _ => {
                    // Dropped first: what one userfaultfd tracks another cannot.
                    *task = Task::default();
                    task.tracking = Tracking::begin(pid);
                    if task.tracking.is_none() {
                        self.left_out.push(pid);
                    }
                }
            }
        }
        Ok(())
    }

    /// Copies what is not copied yet of the pages that CRIU left out; the container stands still.
    ///
    /// # Errors
    /// Where it cannot be read, or there is no room.
    pub fn finish(&mut self, folder: &Path, processes: &Processes) -> Result<(), OciError> {
        for map in lazy_maps(folder)? {
            let number = map.task().and_then(|task| Some((task, processes.on_host(task)?)));
            let Some((number, pid)) = number else {
                let problem = "it is of no process of the container".to_owned();
                return Err(OciError::Image { path: map.path, problem });
            };
            let task = self.tasks.entry(number).or_default();
            let mut ranges = Vec::new();
            let tracking = task.tracking.as_ref().filter(|_| !has_direct_io(pid));
            let clean = tracking.map_or_else(Vec::new, |it| it.clean(pid));
            for run in lazy_runs(&map) {
                let as_copied = intersect(&run, &clean);
                ranges.extend(subtract(&run, &as_copied));
                ranges.extend(as_copied.into_iter().flat_map(|part| task.staged.missing(part)));
            }
            let path = PathBuf::from(format!("/proc/{pid}/mem"));
            let memory = File::open(&path).map_err(OciError::io("open", &path))?;
            self.stopped += ranges.iter().map(|it| it.end - it.start).sum::<u64>();
            let unreadable = self.staging.copy(&memory, &mut task.staged, &ranges)?;
            if let Some(range) = unreadable.first() {
                let problem =
                    format!("{:#x} has no memory behind it in process {pid}", range.start);
                return Err(OciError::Image { path: map.path, problem });
            }
        }
        Ok(())
    }

    /// Pages that were copied in the pause.
    pub fn stopped_pages(&self) -> u64 {
        self.stopped / PAGE_BYTES as u64
    }

    /// Puts all pages into the images: nothing is missing of them then. The container may run.
    ///
    /// # Errors
    /// Where there is no room.
    pub fn assemble(self, folder: &Path) -> Result<(), OciError> {
        let tasks = self.tasks;
        assemble(&self.staging, folder, |number| tasks.get(&number).map(|it| &it.staged))
    }

    /// Puts whole files behind the copies, and says where all is.
    ///
    /// # Errors
    /// Where there is no room.
    pub fn index(&mut self, files: &[(String, PathBuf)]) -> Result<StagingIndex, OciError> {
        let mut index = StagingIndex::default();
        for (number, task) in &self.tasks {
            index.tasks.insert(*number, task.staged.runs());
        }
        for (name, path) in files {
            let lies = self.staging.append(path)?;
            index.files.push((name.clone(), lies.start, lies.end - lies.start));
        }
        Ok(index)
    }
}

/// The addresses that CRIU left out.
fn lazy_runs(map: &Pagemap) -> impl Iterator<Item = Range<u64>> + '_ {
    let left_out = map.runs.iter().filter(|run| run.flags() & PRESENT == 0);
    left_out.map(|run| run.addresses())
}

impl Tracking {
    /// Begins to track a process; `None` where it is left out.
    fn begin(pid: i32) -> Option<Self> {
        if has_direct_io(pid) {
            return None;
        }
        let process = ProcessHandle::open(Pid(pid)).ok()?;
        let uffd = passing_userfaultfd_of(&process).ok()?;
        let pagemap = TrackedPages::open(Pid(pid)).ok()?;
        let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
        let mut begun = Self { uffd, pagemap, memory, spans: Vec::new() };
        begun.track_new(pid);
        Some(begun)
    }

    /// Whether it is of the memory that the process has now: after exec it is of none.
    fn is_of(&self, pid: i32) -> bool {
        !self.clean_and_written(pid).is_empty()
    }

    /// Tracks mappings that are not tracked yet; returns them.
    fn track_new(&mut self, pid: i32) -> Vec<Range<u64>> {
        let mut fresh = Vec::new();
        for mapping in anonymous_mappings(pid) {
            for part in subtract(&mapping, &self.spans) {
                if self.uffd.register(&part, RegisterMode::WriteProtect).is_ok() {
                    fresh.push(part);
                }
            }
        }
        self.spans.extend(fresh.iter().cloned());
        self.spans.sort_by_key(|it| it.start);
        fresh
    }

    /// The pages that were written since they were last taken; and the spans of which the kernel refuses to tell:
    /// they are tracked no more. It may have protected pages of them all the same before it came to refuse, so no
    /// copy from there is to be relied on.
    fn take(&mut self) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        let (mut written, mut lost) = (Vec::new(), Vec::new());
        let pagemap = &self.pagemap;
        self.spans.retain(|span| {
            let note = |range: Range<u64>| written.push(range);
            let is_told = pagemap.written_populated_and_protect(span.clone(), note).is_ok();
            lost.extend((!is_told).then(|| span.clone()));
            is_told
        });
        (written, lost)
    }

    /// What was not written since it was last taken, of the memory that the process has now; in order.
    fn clean(&self, pid: i32) -> Vec<Range<u64>> {
        let parts = self.clean_and_written(pid).into_iter();
        parts.flat_map(|(part, written)| subtract(&part, &written)).collect()
    }

    /// The parts of the memory that the process has now which were tracked all the while, and what was written
    /// in each since it was last taken. Each lies in one mapping: of others the kernel refuses to tell.
    fn clean_and_written(&self, pid: i32) -> Vec<(Range<u64>, Vec<Range<u64>>)> {
        let Ok(now) = TrackedPages::open(Pid(pid)) else { return Vec::new() };
        let mut told = Vec::new();
        for mapping in anonymous_mappings(pid) {
            for part in intersect(&mapping, &self.spans) {
                let mut written = Vec::new();
                if now.written_populated(part.clone(), |range| written.push(range)).is_ok() {
                    told.push((part, written));
                }
            }
        }
        told
    }
}

/// Whether a process has a file open whose reads go past the page cache, straight into memory.
fn has_direct_io(pid: i32) -> bool {
    let all = fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    let flags = |entry: fs::DirEntry| {
        let text = fs::read_to_string(entry.path()).ok()?;
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:"))?.trim().to_owned();
        u32::from_str_radix(&flags, 8).ok()
    };
    all.filter_map(flags).any(|flags| flags & DIRECT != 0)
}

/// The private memory of a process that is of no file (proc_pid_maps(5)).
fn anonymous_mappings(pid: i32) -> Vec<Range<u64>> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    text.lines().filter_map(parse_mapping).collect()
}

fn parse_mapping(line: &str) -> Option<Range<u64>> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let is_private = fields.next()?.ends_with('p');
    let name = fields.nth(3).unwrap_or("");
    let is_anonymous = ["", "[heap]", "[stack]"].contains(&name) || name.starts_with("[anon:");
    let address = |text: &str| u64::from_str_radix(text, 16).ok();
    (is_private && is_anonymous).then_some(address(start)?..address(end)?)
}

/// What of a range is in a list of ranges, which is in order and without overlaps.
fn intersect(range: &Range<u64>, list: &[Range<u64>]) -> Vec<Range<u64>> {
    let first = list.partition_point(|it| it.end <= range.start);
    let near = list[first..].iter().take_while(|it| it.start < range.end);
    near.map(|it| it.start.max(range.start)..it.end.min(range.end)).collect()
}

/// What of a range is not in such a list.
fn subtract(range: &Range<u64>, list: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut rest = Vec::new();
    let mut at = range.start;
    for inside in intersect(range, list) {
        rest.extend((at < inside.start).then_some(at..inside.start));
        at = inside.end;
    }
    rest.extend((at < range.end).then_some(at..range.end));
    rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn ranges_are_cut_at_the_edges_of_others() {
        let list = [10..20, 30..40, 40..50];
        assert_eq!(intersect(&(15..45), &list), [15..20, 30..40, 40..45]);
        assert_eq!(subtract(&(5..60), &list), [5..10, 20..30, 50..60]);
        assert_eq!(subtract(&(31..39), &list), [] as [Range<u64>; 0]);
        assert_eq!(intersect(&(20..30), &list), [] as [Range<u64>; 0]);
        assert_eq!(subtract(&(20..55), &list), [20..30, 50..55]);
    }

    #[test]
    fn of_a_process_that_called_exec_nothing_is_clean() {
        // At the same addresses, as far as that goes.
        let mut child = std::process::Command::new("setarch")
            .args(["-R", "sh", "-c", "while read line; do [ $line != go ] || exec sleep 100; done"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("sh");
        let pid = child.id() as i32;
        let mut input = child.stdin.take().expect("input");
        let mut say = |word: &str| writeln!(input, "{word}").expect("a word");
        let program = |name: &str| {
            let comm = || fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            while comm().trim() != name {
                std::thread::yield_now();
            }
        };
        program("sh");
        let mut tracking = loop {
            // It may still be loading its libraries.
            match Tracking::begin(pid) {
                Some(tracking) if !tracking.spans.is_empty() => break tracking,
                _ => std::thread::yield_now(),
            }
        };
        let bytes = |ranges: &[Range<u64>]| ranges.iter().map(|it| it.end - it.start).sum::<u64>();
        assert!(bytes(&tracking.take().0) > 0, "all that has memory is taken first");
        assert!(bytes(&tracking.clean(pid)) > 0);
        say("word");
        while bytes(&tracking.take().0) == 0 {
            std::thread::yield_now();
        }
        say("go");
        program("sleep");
        assert_eq!(tracking.clean(pid), [] as [Range<u64>; 0]);
        assert!(!tracking.is_of(pid));
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn only_private_memory_of_no_file_is_tracked() {
        let range = |line| parse_mapping(line);
        assert_eq!(range("1000-3000 rw-p 00000000 00:00 0 "), Some(0x1000..0x3000));
        assert_eq!(range("1000-3000 rw-p 00000000 00:00 0 [heap]"), Some(0x1000..0x3000));
        assert_eq!(range("1000-3000 ---p 00000000 00:00 0 [anon:arena]"), Some(0x1000..0x3000));
        assert_eq!(range("1000-3000 rw-s 00000000 00:01 7 /dev/zero (deleted)"), None);
        assert_eq!(range("1000-3000 rw-p 00000000 08:01 7 /usr/lib/libc.so.6"), None);
        assert_eq!(range("1000-3000 r-xp 00000000 00:00 0 [vdso]"), None);
    }
}
