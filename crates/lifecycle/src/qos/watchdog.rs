//! The watchdog beside a controller: it gives the guest's threads back if the controller was killed.

use crate::failure::{Code, Failure};
use crate::helper::{Helper, Parent};
use crate::host::Host;
use crate::qos::priority::go_ahead;
use dewar_qos::{Entry, end_rescues};
use dewar_registry::ProcessId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::Read;
use std::os::fd::AsFd;
use std::time::Duration;

const ALL_WELL: u8 = b'w';
const ALIVE: u8 = b'a';
/// A message follows: how the threads were.
const ENTRY: u8 = b'e';
/// A controller that has said nothing for so long does nothing.
const SILENT_FOR: Timespec = Timespec { tv_sec: 3, tv_nsec: 0 };
/// How often, and how far apart, the watchdog looks whether the controller is gone.
const TRIES: u32 = 200;
const APART: Duration = Duration::from_millis(10);

/// A process that waits for our end.
#[derive(Debug)]
pub struct Watchdog {
    helper: Helper,
    /// How many threads it was told of, for which process.
    sent: Option<(usize, ProcessId)>,
}

impl Watchdog {
    /// Starts one for the guest, or process, that goes by this name.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start(host: &Host, name: &str) -> Result<Self, Failure> {
        let helper = Helper::start(host.registry.root(), "__qos-watchdog", [name]);
        let helper = helper.map_err(|error| {
            Failure::new(Code::Failed, format!("the watchdog process did not start: {error}"))
        })?;
        Ok(Self { helper, sent: None })
    }

    /// Tells it how the threads were that we hold, where it does not know: should we be
    /// killed, it needs no other process to give them back.
    pub fn hold(&mut self, entry: &Entry) {
        let now = (entry.saved.len(), entry.process);
        if self.sent == Some(now) {
            return;
        }
        if self.helper.send_as(ENTRY, entry).is_ok() {
            self.sent = Some(now);
        }
    }

    /// Says that we are at work; to be said each second.
    pub fn beat(&mut self) {
        self.helper.say(ALIVE);
    }

    /// Says that the guest is as it was.
    pub fn dismiss(mut self) {
        self.helper.say(ALL_WELL);
        self.helper.wait();
    }
}

/// The watchdog's own life.
///
/// # Errors
/// Where the controller cannot be reached.
pub fn watch(host: &Host, name: &str) -> Result<(), Failure> {
    go_ahead();
    let broken = |error: std::io::Error| Failure::new(Code::Failed, format!("watchdog: {error}"));
    let mut parent = Parent::of_this_process().map_err(broken)?;
    let ledger = host.qos_ledger();
    let mut held: Option<Entry> = None;
    loop {
        let mut word = [0];
        if !is_heard(&mut parent, SILENT_FOR) {
            // Stopped, the controller would hold what it rescued without end.
            let entry = ledger.entry(name).or_else(|| held.clone());
            entry.iter().for_each(end_rescues);
            continue;
        }
        let said = parent.socket().read(&mut word).is_ok_and(|count| count == 1);
        match word[0] {
            ALL_WELL if said => return Ok(()),
            ALIVE if said => {}
            ENTRY if said => held = parent.receive().or(held),
            _ => break,
        }
    }
    // Its files are closed a moment before it is gone.
    let is_alive = || held.as_ref().is_some_and(|entry| entry.controller.is_alive());
    for _ in 0..TRIES {
        ledger.recover();
        if ledger.entry(name).is_none() && !is_alive() {
            break;
        }
        std::thread::sleep(APART);
    }
    // Its entry may be lost or unreadable: what we were told is as good.
    if let Some(entry) = held.filter(|entry| !entry.controller.is_alive()) {
        ledger.release_entry(&entry);
    }
    Ok(())
}

/// Waits until the controller says something, or ends.
fn is_heard(parent: &mut Parent, within: Timespec) -> bool {
    let socket = parent.socket();
    let mut asked = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)];
    poll(&mut asked, Some(&within)).is_ok_and(|count| count > 0)
}
