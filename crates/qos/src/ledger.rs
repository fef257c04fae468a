//! The CPU time that was promised to each guest, in files: one for each guest, and a lock.
//!
//! **The rule of admission.** A guest is admitted where what it may get at most
//! (`max`, for each of its threads) fits beside what all others may get at most. So
//! a guest that was admitted is never refused later. `overcommit` admits one
//! nevertheless: from then on the guest that asks the kernel first gets what there is, and
//! the others, admitted before or not, may be refused a raise.
//!
//! An entry names how each thread was scheduled before. It is written before a
//! thread is touched and removed when all are as they were. A command that finds an entry
//! whose controller is dead gives its threads back. While an entry cannot be read no guest
//! is admitted, since what it promises is not known. An entry from before the machine was
//! restarted means nothing.
//!
//! **One ledger for a host.** CPUs are the host's, whatever roots its guests are under: all
//! share one folder, and an entry's *scope* tells guests of one name apart. A thread that is
//! in the class already is refused: its reservation would be taken for how it was scheduled
//! before, and the thread be left there at the end.

use crate::entry::{BY_WEIGHT, Entry, SavedTask};
use crate::{QosError, release};
use dewar_kernel::{Task, deadline_limit, reserved_tasks};
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The entries.
#[derive(Debug, Clone)]
pub struct Ledger {
    folder: PathBuf,
    scope: String,
}

/// The right to change who is promised what.
struct Lock {
    _file: File,
}

impl Ledger {
    /// The one in a folder, which need not exist.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), scope: String::new() }
    }

    /// The same for the guests of one root among several.
    pub fn within(self, scope: String) -> Self {
        Self { scope, ..self }
    }

    /// What its guests' entries have for a scope.
    pub fn scope(&self) -> &str {
        &self.scope
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All entries that can be read, by name.
    pub fn entries(&self) -> Vec<Entry> {
        let mut entries: Vec<Entry> =
            self.files().iter().filter_map(|path| read(path).ok().flatten()).collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        entries
    }

    /// The entry of a guest.
    pub fn entry(&self, name: &str) -> Option<Entry> {
        read(&self.path(name)).ok().flatten()
    }

    /// Entries that cannot be read.
    pub fn unreadable(&self) -> Vec<PathBuf> {
        self.files().into_iter().filter(|path| read(path).is_err()).collect()
    }

    fn files(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let paths = files.map(|file| file.path());
        paths.filter(|path| path.extension().is_some_and(|it| it == "json")).collect()
    }

    /// Admits a guest, by the rule above, and enters it with how `tasks` are scheduled
    /// now: the controller before has given them back.
    ///
    /// # Errors
    /// Where there is no room, somebody serves it or one of its threads, or an entry
    /// cannot be read.
    pub fn admit(
        &self,
        entry: &mut Entry,
        tasks: &[Task],
        overcommit: bool,
    ) -> Result<(), QosError> {
        let _lock = self.lock()?;
        self.recover_locked();
        // The place that it kept ([`crate::Controller::keep_place`]).
        let is_named = |other: &Entry| other.name == entry.name && other.scope == entry.scope;
        let is_own = |other: &Entry| is_named(other) && other.controller == entry.controller;
        let (own, others): (Vec<_>, Vec<_>) = self.entries().into_iter().partition(is_own);
        if let Some(path) = self.unreadable().into_iter().next().filter(|_| own.is_empty()) {
            return Err(QosError::Unreadable(path));
        }
        if others.iter().any(|other| is_named(other) || other.has_any(tasks)) {
            return Err(QosError::Held(entry.name.clone()));
        }
        entry.saved = tasks.iter().filter_map(|task| SavedTask::of(*task)).collect();
        if let Some(saved) = entry.saved.iter().find(|saved| saved.has_reservation()) {
            return Err(QosError::Reserved(saved.task()));
        }
        if entry.by == BY_WEIGHT {
            return self.write(entry);
        }
        let others: Vec<Entry> = others.into_iter().filter(|it| it.by != BY_WEIGHT).collect();
        let taken: f64 = others.iter().map(|other| other.promise.most()).sum();
        let (wanted, limit) = (entry.promise.most(), limit_of(own.iter().chain(&others)));
        if taken + wanted > limit + 1e-9 && !overcommit {
            let others = others.iter().map(|it| (it.name.clone(), it.promise.most())).collect();
            return Err(QosError::Full { wanted, limit, others });
        }
        entry.limit = Some(limit);
        self.write(entry)
    }

    /// Writes an entry down.
    ///
    /// # Errors
    /// Where that cannot be done.
    pub fn write(&self, entry: &Entry) -> Result<(), QosError> {
        let path = self.path_of(entry);
        let part = path.with_extension("part");
        let bytes = serde_json::to_vec(entry)
            .map_err(|error| QosError::file(&path)(std::io::Error::other(error)))?;
        fs::write(&part, bytes).map_err(QosError::file(&part))?;
        fs::rename(&part, &path).map_err(QosError::file(&path))
    }

    /// Gives a guest's threads back and forgets it.
    pub fn release(&self, entry: &Entry) {
        // After a restart of the machine they are somebody else's.
        if entry.controller.is_of_this_boot() {
            release(entry);
        }
        if let Some(group) = &entry.group {
            group.dissolve();
        }
        let _ = fs::remove_file(self.path_of(entry));
    }

    /// Releases the guests whose controllers are dead. Returns their names.
    pub fn recover(&self) -> Vec<String> {
        if !self.folder.exists() {
            return Vec::new();
        }
        match self.lock() {
            Ok(_lock) => self.recover_locked(),
            Err(_) => Vec::new(),
        }
    }

    fn recover_locked(&self) -> Vec<String> {
        let lost = |path: &PathBuf| is_from_before_boot(path).unwrap_or(false);
        for path in self.unreadable().into_iter().filter(lost) {
            let _ = fs::remove_file(path);
        }
        let dead = |entry: &Entry| !entry.controller.is_alive();
        let stale: Vec<Entry> = self.entries().into_iter().filter(dead).collect();
        stale.iter().for_each(|entry| self.release(entry));
        stale.into_iter().map(|entry| entry.name).collect()
    }

    /// Threads under a reservation that no entry tells of: of a controller that was killed
    /// and whose entry is lost, or of somebody who has it from elsewhere.
    pub fn unheld(&self) -> Vec<Task> {
        let held: Vec<Task> =
            self.entries().iter().flat_map(|entry| &entry.saved).map(SavedTask::task).collect();
        let all = reserved_tasks().into_iter();
        all.filter(|task| !held.iter().any(|it| it.thread == task.thread)).collect()
    }

    /// Gives back what a controller that is dead held, whether its entry is still there or
    /// not. Not what another controller holds by now.
    pub fn release_entry(&self, entry: &Entry) {
        let Ok(_lock) = self.lock() else { return };
        let tasks: Vec<Task> = entry.saved.iter().map(SavedTask::task).collect();
        let others = self.entries();
        let is_anothers = |other: &Entry| other.controller != entry.controller;
        if others.iter().any(|other| is_anothers(other) && other.has_any(&tasks)) {
            return;
        }
        match read(&self.path_of(entry)) {
            // The guest is another by now, with a controller of its own.
            Ok(Some(now)) if is_anothers(&now) => release(entry),
            _ => self.release(entry),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.file(&self.scope, name)
    }

    fn path_of(&self, entry: &Entry) -> PathBuf {
        self.file(&entry.scope, &entry.name)
    }

    fn file(&self, scope: &str, name: &str) -> PathBuf {
        // '@' is in no name.
        let at = if scope.is_empty() { "" } else { "@" };
        self.folder.join(format!("{scope}{at}{name}.json"))
    }

    fn lock(&self) -> Result<Lock, QosError> {
        let make = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder);
        make.map_err(QosError::file(&self.folder))?;
        let path = self.folder.join("lock");
        let open = OpenOptions::new().create(true).append(true).open(&path);
        let file = open.map_err(QosError::file(&path))?;
        flock(&file, FlockOperation::LockExclusive)
            .map_err(|errno| QosError::file(&path)(errno.into()))?;
        Ok(Lock { _file: file })
    }
}

/// The entry in a file; `None` where it was removed just now.
fn read(path: &Path) -> Result<Option<Entry>, QosError> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(QosError::file(path))?,
    };
    let entry = serde_json::from_slice(&bytes);
    entry.map(Some).map_err(|_| QosError::Unreadable(path.to_owned()))
}

/// How many CPUs' time can be promised, beside these entries. The kernel is asked only where
/// there are none: it builds its scheduling domains anew then, and may lose count of what it
/// has promised.
pub fn limit_of<'e>(entries: impl IntoIterator<Item = &'e Entry>) -> f64 {
    entries.into_iter().find_map(|entry| entry.limit).unwrap_or_else(deadline_limit)
}

/// Whether a file was written before the machine was started.
fn is_from_before_boot(path: &Path) -> Option<bool> {
    let uptime = fs::read_to_string("/proc/uptime").ok()?;
    let uptime: f64 = uptime.split(' ').next()?.parse().ok()?;
    let booted = SystemTime::now().checked_sub(Duration::from_secs_f64(uptime))?;
    Some(fs::metadata(path).ok()?.modified().ok()? < booted)
}
