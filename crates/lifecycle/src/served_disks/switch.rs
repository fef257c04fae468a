//! `cache`: whether what is known of a guest's served disks outlives a reboot, changed while the guest runs.
//!
//! The supervisor is ended by force, as if it had died. Another one reads what is wanted now, and starts another server: the
//! guest's I/O waits for that, some hundred milliseconds, and what was known so far is forgotten.

use super::disks::{FILE, READY_WITHIN, ServedDisk, ServedDisks, start_supervisor, supervisor_of};
use crate::failure::{Code, Failure};
use crate::locked_guest::LockedGuest;
use dewar_kernel::{Pid, ProcessHandle};

/// What is wanted of a guest's served disks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheSwitch {
    /// One disk, by its id; all where nothing is said.
    pub disk: Option<String>,
    /// Whether it is to stay warm over a reboot.
    pub is_warm: bool,
    /// Most bytes that are kept of it, where that is to be another number.
    pub cache_bytes: Option<u64>,
}

/// Changes what is kept of a guest's served disks over a reboot. Returns all of them as they are then.
///
/// # Errors
/// Where it has no such disk, or the processes do not start again.
pub fn switch_cache(guest: &LockedGuest, wanted: &CacheSwitch) -> Result<Vec<ServedDisk>, Failure> {
    let folder = &guest.folder;
    let name = folder.name();
    let mut served = ServedDisks::of(folder)?.ok_or_else(|| {
        Failure::new(Code::Unsupported, format!("'{name}' has no disk that Dewar serves"))
            .state("nothing was changed")
            .advice("'dewar run --disk PATH,cache=warm' serves one")
    })?;
    let is_meant = |disk: &&mut ServedDisk| wanted.disk.as_ref().is_none_or(|id| *id == disk.id);
    let mut meant = 0;
    let before = served.clone();
    for disk in served.disks.iter_mut().filter(is_meant) {
        disk.is_warm = wanted.is_warm;
        disk.cache_bytes = wanted.cache_bytes.or(disk.cache_bytes);
        meant += 1;
    }
    if meant == 0 {
        let ids: Vec<&str> = served.disks.iter().map(|disk| disk.id.as_str()).collect();
        let what = format!("'{name}' has no such served disk: it has {}", ids.join(", "));
        return Err(Failure::new(Code::Usage, what).state("nothing was changed"));
    }
    if served == before {
        return Ok(served.disks);
    }
    folder.write(FILE, &served)?;
    if guest.record.process.is_alive() {
        if let Some(supervisor) = supervisor_of(folder) {
            let pinned = ProcessHandle::open(Pid(supervisor.pid)).ok();
            if let Some(pinned) = pinned.filter(|_| supervisor.is_alive()) {
                let _ = pinned.kill();
            }
            let _ = supervisor.ends_within(READY_WITHIN);
        }
        start_supervisor(folder)?;
    }
    Ok(served.disks)
}
