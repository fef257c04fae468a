//! The watcher: a process beside `host-reboot`. It has two tasks.
//!
//! - Where the command dies before the host is rebooted, the watcher lets the guests go on that it froze.
//! - It keeps RAM files open that have no name ([`crate::held_ram`]). Such a file lives only as long as a
//!   process has it open: the watcher in the old kernel, another one in the new kernel.
//!
//! It ends when the command says that all is well, or when the command has ended and no guest's memory is held
//! by the watcher alone.

use super::note::Note;
use super::recover::recover;
use crate::failure::{Code, Failure};
use crate::held_ram::leads_to;
use crate::helper::{Helper, HelperError, Parent};
use crate::host::Host;
use crate::reporter::Reporter;
use dewar_registry::GuestRecord;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::time::Duration;

/// What the command says when nothing is left to be seen to.
const ALL_WELL: u8 = b'w';
const READY_WITHIN: Duration = Duration::from_secs(10);
const ENDS_WITHIN: Duration = Duration::from_secs(5);
/// How often it looks whether it is needed.
const LOOK: Duration = Duration::from_secs(2);

/// The watcher, as the command sees it.
#[derive(Debug)]
pub struct Watcher(Helper);

impl Watcher {
    /// Starts it and waits until it watches, with these files open.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start(host: &Host, files: &[&File]) -> Result<Self, Failure> {
        let start = || -> Result<Helper, HelperError> {
            let count = files.len().to_string();
            let mut helper = Helper::start(host.registry.root(), "__host-reboot-watcher", [count])?;
            files.iter().try_for_each(|file| helper.pass(file.as_fd()))?;
            helper.wait_ready(Some(READY_WITHIN))?;
            Ok(helper)
        };
        start().map(Self).map_err(|error| {
            Failure::new(Code::Failed, format!("the watching process did not start: {error}"))
        })
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.0.id().pid
    }

    /// Says that all is as it should be.
    pub fn dismiss(mut self) {
        self.0.say(ALL_WELL);
        self.0.wait();
    }
}

/// Waits for the command's end, as that process, which is given so many files.
///
/// # Errors
/// Where there is no command.
pub fn watch(host: &Host, files: usize, reporter: &dyn Reporter) -> Result<(), Failure> {
    let failed = |error| Failure::new(Code::Failed, format!("no command to watch: {error}"));
    let mut parent = Parent::of_this_process().map_err(failed)?;
    let received = (0..files).map(|_| parent.receive_fd()).collect::<Result<Vec<_>, _>>();
    let _held = received.map_err(failed)?;
    parent.ready().map_err(failed)?;
    let mut word = [0];
    if parent.socket().read(&mut word).is_ok_and(|read| read > 0 && word == [ALL_WELL]) {
        return Ok(());
    }
    // Its descriptors close before it is gone.
    if let Some(note) = Note::load(host)?.filter(Note::is_before_reboot) {
        note.command.ends_within(ENDS_WITHIN);
    }
    loop {
        // What fails is tried again; nobody hears of it here.
        let left = recover(host, reporter).is_err() || is_needed(host);
        if !left {
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
}

/// Whether the memory of a guest is this process's alone.
fn is_needed(host: &Host) -> bool {
    let own = std::process::id() as i32;
    let has_memory = |record: &GuestRecord| record.ram.iter().any(|ram| leads_to(&ram.path, own));
    match host.guests() {
        Ok(guests) => guests.iter().any(|(_, record)| has_memory(record)),
        // Nobody knows.
        Err(_) => true,
    }
}
