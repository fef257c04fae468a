//! The processes of a container, seen from the host.

use crate::error::OciError;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The processes in a container's control groups.
#[derive(Debug, Clone)]
pub struct Processes {
    /// The host's number of each, by the one that it has in the container.
    by_number: BTreeMap<i32, i32>,
}

impl Processes {
    /// Those that are in the control groups of a first process, or below.
    ///
    /// # Errors
    /// Where that process has ended.
    pub fn of(first: i32) -> Result<Self, OciError> {
        let own = control_groups(first)?;
        let level = numbers(first)?.len() - 1;
        let mut by_number = BTreeMap::new();
        for entry in fs::read_dir("/proc").map_err(OciError::io("list", Path::new("/proc")))? {
            let Ok(entry) = entry else { continue };
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<i32>() else { continue };
            // One that ends meanwhile is none of it.
            let (Ok(groups), Ok(numbers)) = (control_groups(pid), numbers(pid)) else { continue };
            if is_within(&groups, &own) {
                by_number.extend(numbers.get(level).map(|number| (*number, pid)));
            }
        }
        Ok(Self { by_number })
    }

    /// The host's number of one, by the container's.
    pub fn on_host(&self, number: i32) -> Option<i32> {
        self.by_number.get(&number).copied()
    }

    /// The container's number and the host's of each.
    pub fn all(&self) -> impl Iterator<Item = (i32, i32)> + '_ {
        self.by_number.iter().map(|(number, pid)| (*number, *pid))
    }

    /// The host's numbers.
    pub fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.by_number.values().copied()
    }

    /// Who traces each: the same process for as long as they stand still. 0 is nobody.
    pub fn tracers(&self) -> Vec<i32> {
        self.pids().map(tracer).collect()
    }

    /// Bytes of memory that they have for themselves, those of files left out.
    pub fn anonymous_bytes(&self) -> u64 {
        let kilobytes = |pid: i32| -> u64 {
            let number = |name| field(pid, name).map_or(0, |it| it[0]);
            (number("RssAnon:") + number("RssShmem:") + number("VmSwap:")).max(0) as u64
        };
        self.pids().map(kilobytes).sum::<u64>() * 1024
    }
}

/// Who traces a process; 0 is nobody.
pub fn tracer(pid: i32) -> i32 {
    field(pid, "TracerPid:").map_or(0, |it| it[0])
}

/// The control group of each hierarchy, as in cgroups(7).
fn control_groups(pid: i32) -> Result<BTreeMap<String, String>, OciError> {
    let path = format!("/proc/{pid}/cgroup");
    let text = fs::read_to_string(&path).map_err(OciError::io("read", Path::new(&path)))?;
    let part = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1).map(str::to_owned);
        Some((parts.next()?, parts.next()?))
    };
    Ok(text.lines().filter_map(part).collect())
}

/// Whether every hierarchy in which the container is not at the root has the process in the same group, or below.
fn is_within(groups: &BTreeMap<String, String>, container: &BTreeMap<String, String>) -> bool {
    let mut own = container.iter().filter(|(_, path)| *path != "/").peekable();
    own.peek().is_some()
        && own.all(|(hierarchy, path)| {
            groups.get(hierarchy).is_some_and(|it| Path::new(it).starts_with(path))
        })
}

/// The numbers that a process has, from the host's namespace down to its own (proc_pid_status(5)).
fn numbers(pid: i32) -> Result<Vec<i32>, OciError> {
    field(pid, "NSpid:").ok_or_else(|| OciError::Io {
        operation: "read",
        path: format!("/proc/{pid}/status").into(),
        cause: std::io::ErrorKind::NotFound.into(),
    })
}

/// The numbers of a line of `/proc/PID/status`; at least one.
pub fn field(pid: i32, name: &str) -> Option<Vec<i32>> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let numbers: Vec<i32> = line.split_whitespace().filter_map(|it| it.parse().ok()).collect();
    (!numbers.is_empty()).then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(of: &[(&str, &str)]) -> BTreeMap<String, String> {
        of.iter().map(|(name, path)| ((*name).to_owned(), (*path).to_owned())).collect()
    }

    #[test]
    fn a_process_is_of_the_container_in_all_its_control_groups() {
        let container = groups(&[("pids", "/web"), ("memory", "/web"), ("cpu", "/")]);
        let of = |pids, memory| groups(&[("pids", pids), ("memory", memory), ("cpu", "/")]);
        assert!(is_within(&of("/web", "/web/worker"), &container));
        assert!(!is_within(&of("/web2", "/web"), &container));
        assert!(!is_within(&of("/", "/"), &container));
        // At the root of all it would be every process of the host.
        assert!(!is_within(&of("/", "/"), &groups(&[("pids", "/")])));
    }

    #[test]
    fn our_own_numbers_are_found() {
        let own = std::process::id() as i32;
        assert_eq!(numbers(own).expect("numbers")[0], own);
        assert!(field(own, "RssAnon:").expect("size")[0] > 0);
    }
}
