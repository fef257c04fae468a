//! A guest that this command works on: it has the guest's lock.

use crate::container_process;
use crate::failure::{Code, Failure};
use crate::hot_pages::HOT_PAGES;
use crate::migration::is_elsewhere;
use crate::page_server::{ServerState, server_alive, what_brings_the_rest};
use crate::process::{await_page_server, end_qemu};
use crate::ram_dir::usual_dirs;
use crate::recovery::{self, recover};
use crate::reporter::Reporter;
use crate::served_disks;
use dewar_guest_qemu::handover;
use dewar_guest_qemu::launch::kill;
use dewar_guest_qemu::{END_WITHIN, Qmp};
use dewar_registry::{GuestFolder, GuestLock, GuestRecord, Kept, Phase, RegistryError};
use serde_json::json;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// What was told of a guest with which something could not be finished.
pub(crate) const TROUBLE: &str = "trouble.json";
/// How long a store may be away before a command stops waiting for a guest's pages.
const AWAY: Duration = Duration::from_secs(5);

/// A guest that is ours to work on.
#[derive(Debug)]
pub struct LockedGuest {
    /// Its folder.
    pub folder: GuestFolder,
    /// Its record.
    pub record: GuestRecord,
    /// Its lock.
    pub lock: GuestLock,
}

/// What could not be finished with a guest when it was last tried.
pub fn trouble(folder: &GuestFolder) -> Option<String> {
    folder.read(TROUBLE).ok().flatten()
}

impl LockedGuest {
    /// Ends all processes of the guest, whatever state it and they are in, and then finishes
    /// without them what a dead command left.
    ///
    /// # Errors
    /// Where a process does not end, or something cannot be finished.
    pub fn end(&mut self) -> Result<(), Failure> {
        if is_elsewhere(&self.record) {
            // One that a killed command was about to move is this host's.
            self.record = recovery::migration::recover(&self.folder, self.record.clone())?;
        }
        self.require_here()?;
        if self.record.container.is_some() {
            container_process::end(&self.folder, &self.record)?;
            let _ = self.folder.remove(TROUBLE);
            return Ok(());
        }
        for process in handover::processes(&self.folder) {
            kill(&process);
        }
        end_qemu(&self.record)?;
        await_page_server(&self.record);
        self.record = recover(&self.folder, self.folder.record()?)?;
        // A hand-over may have moved it meanwhile.
        end_qemu(&self.record)?;
        let _ = self.folder.remove(TROUBLE);
        Ok(())
    }

    /// Makes a guest that is frozen one that has ended.
    ///
    /// # Errors
    /// Where its QEMU does not end, or its files cannot be removed.
    pub fn give_up_frozen(&mut self) -> Result<(), Failure> {
        // A QEMU that was to thaw it, or to end when it was frozen.
        self.end()?;
        self.record.phase = Phase::Running;
        self.record.frozen = None;
        self.record.start_pending = false;
        self.folder.set_record(&self.record)?;
        self.folder.remove_kept(&self.record.ram);
        Ok(self.folder.remove_ram(&self.record).map(drop)?)
    }

    /// That it is this host's: not on its way from or to another.
    ///
    /// # Errors
    /// Where it is not.
    pub fn require_here(&self) -> Result<(), Failure> {
        match is_elsewhere(&self.record) {
            true => Err(moves(&self.record)),
            false => Ok(()),
        }
    }

    /// That its QEMU runs.
    ///
    /// # Errors
    /// Where the guest is frozen or has ended.
    pub fn require_alive(&self) -> Result<(), Failure> {
        self.require_here()?;
        if self.record.process.is_alive() {
            return Ok(());
        }
        let name = &self.record.name;
        if self.record.phase == Phase::Frozen {
            return Err(Failure::new(Code::Failed, format!("guest '{name}' is frozen"))
                .advice(format!("'dewar thaw {name}' lets it go on")));
        }
        Err(Failure::new(Code::Failed, format!("guest '{name}' has ended"))
            .advice(format!("'dewar restore {name}' brings back its newest checkpoint")))
    }

    /// Waits until all memory of a restored guest has arrived: before, its process does not have
    /// it, and no other process can.
    ///
    /// # Errors
    /// Where it does not arrive.
    pub fn wait_for_memory(&self, reporter: &dyn Reporter) -> Result<(), Failure> {
        let mut in_trouble = None;
        loop {
            let state = ServerState::of(&self.folder, &self.record);
            if state.complete {
                return Ok(());
            }
            let name = &self.record.name;
            let unfinished = |why: &str| {
                let what = format!("the memory of '{name}' has not all arrived: {why}");
                Failure::new(Code::Failed, what).state("the guest runs on")
            };
            // A store that is away for a moment is no trouble.
            match state.problem {
                None => in_trouble = None,
                Some(problem) if in_trouble.get_or_insert_with(Instant::now).elapsed() > AWAY => {
                    return Err(unfinished(&problem));
                }
                Some(_) => {}
            }
            let is_served = server_alive(&self.record);
            if !is_served && !ServerState::of(&self.folder, &self.record).complete {
                return Err(unfinished("its page server is gone")
                    .advice(what_brings_the_rest(&self.record)));
            }
            reporter.stage("waiting for memory");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// That a guest moves from one host to another, and only that may touch it.
pub fn moves(record: &GuestRecord) -> Failure {
    let name = &record.name;
    let failure = match record.phase {
        Phase::Arriving => Failure::new(
            Code::Failed,
            format!("'{name}' is another host's, and on its way here"),
        )
        .advice(format!(
            "'dewar migrate {name} --abort' refuses it, if it was not given to this host yet"
        )),
        _ => Failure::new(Code::Failed, format!("'{name}' was given to another host"))
            .advice(format!("'dewar migrate {name} --resume' asks what became of it")),
    };
    failure.state("it stays as it is")
}

/// What is lost with a frozen guest that is given up.
pub fn loss(record: &GuestRecord) -> String {
    match record.frozen.as_ref().map(|frozen| &frozen.kept) {
        Some(Kept::InStore { image, .. }) => {
            format!("nothing: checkpoint {image} has all of it, and stays")
        }
        _ => "its memory as it was when it was frozen, and what it did since its last checkpoint"
            .to_owned(),
    }
}

/// That a guest is frozen, and what would be lost with it.
pub fn would_lose(record: &GuestRecord) -> Failure {
    let what = format!("guest '{}' is frozen; what would be lost is {}", record.name, loss(record));
    Failure::new(Code::Failed, what).state("it stays as it is")
}

/// Why the guest that has a name stands in the way of a new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextGuest {
    /// The new guest is another one: a frozen guest would be lost.
    Another,
    /// The new guest is the frozen one, thawed from a store.
    Thawed,
}

/// That no guest by this name runs or is frozen; what a dead command left with it is finished. Returns its record,
/// where there is one.
///
/// # Errors
/// Where one does.
pub fn require_ended(
    folder: &GuestFolder,
    next: NextGuest,
) -> Result<Option<GuestRecord>, Failure> {
    let exists = || RegistryError::Exists(folder.name().to_owned());
    let Some(record) = folder.record_if_any()? else { return Ok(None) };
    // A QEMU that was just killed takes a moment: its memory is freed.
    let ends = record.process.is_ending() && record.process.ends_within(END_WITHIN);
    if record.process.is_alive() && !ends {
        return Err(exists().into());
    }
    let record = recover(folder, record)?;
    if is_elsewhere(&record) {
        return Err(moves(&record));
    }
    if record.process.is_alive() {
        return Err(exists().into());
    }
    if record.frozen.is_some() && next == NextGuest::Another {
        let name = &record.name;
        return Err(would_lose(&record).advice(format!(
            "'dewar thaw {name}' lets it go on; 'dewar stop {name} --yes', or 'dewar restore' \
             with --yes, gives it up"
        )));
    }
    Ok(Some(record))
}

/// That no guest by this name stands in the way of a new one, whose RAM shall be in `ram_dir`, if it
/// is to have any of ours. A dead guest's memory is freed when what is returned is dropped.
///
/// # Errors
/// Where a guest runs or is frozen under that name.
pub fn clear_predecessor(
    folder: &GuestFolder,
    ram_dir: Option<&Path>,
    next: NextGuest,
) -> Result<Vec<File>, Failure> {
    let unnamed = match require_ended(folder, next)? {
        None => Vec::new(),
        Some(record) => {
            container_process::unmount_files(folder)?;
            // Another guest uses other pages.
            folder.remove(HOT_PAGES)?;
            folder.remove_ram(&record)?
        }
    };
    if next == NextGuest::Another {
        served_disks::forget(folder)?;
    }
    // A QEMU whose starter died before it could note it.
    if let Ok(mut qmp) = Qmp::connect(&folder.file("qmp.sock")) {
        let _ = qmp.execute("quit", json!({}));
    }
    usual_dirs().into_iter().chain(ram_dir).try_for_each(|it| folder.sweep_ram(it))?;
    Ok(unnamed)
}
