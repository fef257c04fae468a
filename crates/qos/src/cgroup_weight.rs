//! The CPU weight of a process, by a control group of its own beside the one that
//! it is in: version 2 (`cpu.weight`, `cpu.max`), or 1 (`cpu.shares`,
//! `cpu.cfs_quota_us`) where the CPU controller is still there
//! (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/).

use crate::QosError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The time over which a group's limit holds.
const LIMIT_PERIOD_US: u64 = 100_000;
/// The kernel takes no lower limit.
const LEAST_QUOTA_US: u64 = 1_000;
/// How often a group is emptied at most, to be removed.
const EMPTIED: u32 = 20;

/// A control group that was made for a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Its folder.
    pub path: PathBuf,
    /// The folder of the group in which the process was.
    pub home: PathBuf,
    /// Processes below it that were in other groups, and which.
    #[serde(default)]
    pub elsewhere: BTreeMap<i32, PathBuf>,
    /// The process.
    pub process: i32,
    /// Whether it is of version 2.
    pub is_v2: bool,
}

impl Group {
    /// Says where the group for a process, and for `others` with it, would be.
    ///
    /// # Errors
    /// Where there is no CPU controller.
    pub(crate) fn plan(process: i32, others: &[i32], name: &str) -> Result<Self, QosError> {
        let why = |text: &str| QosError::NoGroups(text.to_owned());
        let (mount, is_v2) = controller().ok_or_else(|| why("no CPU controller is mounted"))?;
        let group = |process: i32| group_of(process, is_v2).map(|below| mount.join(below));
        let home = group(process).ok_or_else(|| why("the process has ended"))?;
        // Beside it: a group of version 2 with processes has no groups below.
        let parent = if home == mount { &mount } else { home.parent().unwrap_or(&mount) };
        let path = parent.join(format!("dewar-{name}"));
        let theirs = others.iter().filter_map(|other| Some((*other, group(*other)?)));
        let elsewhere = theirs.filter(|(_, group)| *group != home && *group != path).collect();
        Ok(Self { path, home, elsewhere, process, is_v2 })
    }

    /// Makes it and moves the processes there: a guest's first, and those below it.
    pub(crate) fn make(&self, processes: &[i32]) -> Result<(), QosError> {
        if !self.path.exists() {
            fs::create_dir(&self.path).map_err(refused(&self.path))?;
        }
        let weight = self.file(if self.is_v2 { "cpu.weight" } else { "cpu.shares" });
        if !weight.exists() {
            let _ = fs::remove_dir(&self.path);
            let parent = self.path.parent().unwrap_or(&self.path).display();
            let mut why = format!("{parent} gives its groups no CPU weight");
            if self.is_v2 {
                why += &format!("; 'echo +cpu >{parent}/cgroup.subtree_control' lets it");
            }
            return Err(QosError::NoGroups(why));
        }
        write(&self.file("cgroup.procs"), self.process)?;
        // One that has ended meanwhile needs nothing.
        let moved = |process: &&i32| write(&self.file("cgroup.procs"), process).is_ok();
        processes.iter().filter(moved).count();
        Ok(())
    }

    /// Gives it a weight, as a share of the largest, and at most so many CPUs.
    pub(crate) fn weigh(&mut self, share: f64, cpus: f64) -> Result<(), QosError> {
        let share = share.clamp(0.0, 1.0);
        let quota = ((cpus * LIMIT_PERIOD_US as f64) as u64).max(LEAST_QUOTA_US);
        if self.is_v2 {
            write(&self.file("cpu.weight"), (share * 10_000.0).max(1.0) as u64)?;
            return write(&self.file("cpu.max"), format!("{quota} {LIMIT_PERIOD_US}"));
        }
        write(&self.file("cpu.shares"), (share * 262_144.0).max(2.0) as u64)?;
        write(&self.file("cpu.cfs_period_us"), LIMIT_PERIOD_US)?;
        write(&self.file("cpu.cfs_quota_us"), quota)
    }

    /// Moves whatever is in it back and removes it; processes that began in it, and those whose
    /// own group is gone, go where the first one was. Where that is gone too (a service manager
    /// removes a group that is empty) they stay, and are bounded no more.
    pub(crate) fn dissolve(&self) {
        let usual = match self.is_v2 {
            true => [("cpu.max", "max"), ("cpu.weight", "100")],
            false => [("cpu.cfs_quota_us", "-1"), ("cpu.shares", "1024")],
        };
        for (file, value) in usual {
            let _ = fs::write(self.file(file), value);
        }
        // Those in it may begin others meanwhile.
        for _ in 0..EMPTIED {
            self.move_back();
            match fs::remove_dir(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {}
                _ => break,
            }
        }
    }

    fn move_back(&self) {
        let inside = fs::read_to_string(self.file("cgroup.procs")).unwrap_or_default();
        for process in inside.lines().filter_map(|line| line.parse::<i32>().ok()) {
            let own = self.elsewhere.get(&process);
            let goes =
                |home: &PathBuf| fs::write(home.join("cgroup.procs"), process.to_string()).is_ok();
            if !own.is_some_and(goes) {
                goes(&self.home);
            }
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

fn write(path: &Path, value: impl ToString) -> Result<(), QosError> {
    fs::write(path, value.to_string()).map_err(refused(path))
}

/// Why a file of a group cannot be written: without the right to, groups cannot be used.
fn refused(path: &Path) -> impl FnOnce(io::Error) -> QosError {
    let path = path.to_owned();
    move |error| match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            QosError::NoGroups(format!("{}: {error}", path.display()))
        }
        _ => QosError::File(path, error),
    }
}

/// The group of a process, from where the CPU controller is mounted.
fn group_of(process: i32, is_v2: bool) -> Option<PathBuf> {
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    let line = groups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let fits = match is_v2 {
            true => controllers.is_empty(),
            false => controllers.split(',').any(|it| it == "cpu"),
        };
        fits.then_some(path)
    });
    Some(line.unwrap_or("/").trim_matches('/').into())
}

/// Where the CPU controller is mounted, and whether as version 2.
fn controller() -> Option<(PathBuf, bool)> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mut second = None;
    for line in mounts.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        let [_, place, kind, options, ..] = words.as_slice() else { continue };
        let place = PathBuf::from(place);
        match *kind {
            "cgroup" if options.split(',').any(|it| it == "cpu") => return Some((place, false)),
            "cgroup2" => second = Some(place),
            _ => {}
        }
    }
    let place = second?;
    let has = fs::read_to_string(place.join("cgroup.controllers")).unwrap_or_default();
    has.split_whitespace().any(|it| it == "cpu").then_some((place, true))
}
