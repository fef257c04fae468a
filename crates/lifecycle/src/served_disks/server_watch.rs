//! The server as its supervisor has it: started again whenever it has died.
//!
//! A thread of its own looks after it. QEMU waits for its disks before it answers, so what waits for QEMU cannot.

use super::disks::{READY_WITHIN, start};
use super::server::{Aside, ENDED, MEMORY};
use crate::failure::{Code, Failure};
use crate::helper::Helper;
use dewar_registry::GuestFolder;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How often it is looked whether the server is there; and how long it is waited, at least and at most, where one does not
/// start.
const TICK: Duration = Duration::from_millis(200);
const AGAIN: [Duration; 2] = [TICK, Duration::from_secs(5)];

/// The server.
#[derive(Debug)]
pub(super) struct ServerWatch {
    /// Nothing when it is to end.
    server: Mutex<Option<Helper>>,
}

impl ServerWatch {
    /// Starts the server, and one after it as often as it dies.
    pub(super) fn start(folder: &GuestFolder) -> Result<Arc<Self>, Failure> {
        let server = Mutex::new(Some(start_server(folder)?));
        let (this, folder) = (Arc::new(Self { server }), folder.clone());
        let watching = this.clone();
        std::thread::spawn(move || watching.watch(&folder));
        Ok(this)
    }

    fn watch(&self, folder: &GuestFolder) {
        let mut again = AGAIN[0];
        loop {
            std::thread::sleep(again);
            let mut server = self.server();
            let Some(running) = server.as_mut() else { return };
            again = AGAIN[0];
            if matches!(running.process().try_wait(), Ok(None)) {
                continue;
            }
            match start_server(folder) {
                Ok(started) => *running = started,
                Err(_) => again = (again * 2).min(AGAIN[1]),
            }
        }
    }

    /// Gives it the memory of before a reset. A server that is gone has no index to search with.
    pub(super) fn hand_over(&self, files: &[File], aside: &Aside) {
        let Some(server) = &mut *self.server() else { return };
        let sent = server.send_as(MEMORY, aside);
        let _ = sent.and_then(|()| files.iter().try_for_each(|file| server.pass(file.as_fd())));
    }

    /// Ends it.
    pub(super) fn end(&self) {
        if let Some(mut server) = self.server().take() {
            server.say(ENDED);
        }
    }

    fn server(&self) -> MutexGuard<'_, Option<Helper>> {
        self.server.lock().unwrap_or_else(|broken| broken.into_inner())
    }
}

fn start_server(folder: &GuestFolder) -> Result<Helper, Failure> {
    let mut server = start(folder.root(), "__disk-server", folder.name())?;
    match server.wait_ready(Some(READY_WITHIN)) {
        Ok(()) => Ok(server),
        Err(why) => {
            let _ = server.process().kill();
            server.wait();
            Err(Failure::new(Code::Failed, why.to_string()))
        }
    }
}
