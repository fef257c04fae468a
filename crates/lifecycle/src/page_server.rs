//! The page server of a lazily restored guest: a process that outlives the
//! `restore` command and ends when all memory has arrived.

mod go;
mod serve;
mod state;

pub use serve::{Source, serve};
pub use state::{ServerState, lacks_server, server_alive, what_brings_the_rest};

use crate::failure::{Code, Failure};
use crate::frozen_state::unloadable;
use crate::helper::Helper;
use crate::process::unless_hopeless;
use dewar_guest_qemu::Incoming;
use dewar_memory::UffdOrigin;
use dewar_registry::{GuestFolder, ProcessId};
use go::Go;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a state that is loaded waits for pages of which some are damaged.
const DAMAGE: Duration = Duration::from_secs(3);

/// A server that reads an image's page table while its guest is being made.
/// Dropped before [`Prepared::attach`], it ends.
#[derive(Debug)]
pub struct Prepared {
    helper: Helper,
    name: String,
}

/// Starts a server for the guest of `folder`, to be restored from this image.
/// `dead` is the RAM of the guest before, if any; to be kept open until the server
/// is attached.
///
/// # Errors
/// Where it does not start.
pub fn prepare(
    root: &Path,
    folder: &GuestFolder,
    store: &str,
    image: &str,
    dead: &[File],
) -> Result<Prepared, Failure> {
    let name = folder.name().to_owned();
    ServerState::default().save(folder);
    let words = [&name, "--store", store, "--image", image].map(str::to_owned);
    let arguments = words.into_iter().chain(dead.iter().map(path_for_others));
    let helper = Helper::start(root, "__serve", arguments);
    let helper = helper.map_err(|error| failed(&name, &error.to_string()))?;
    Ok(Prepared { helper, name })
}

impl Prepared {
    /// Lets it serve this process, which is on record now. Returns when every touch of a
    /// missing page waits for it. `origin` is how the process may make a userfaultfd, if it
    /// has none yet.
    ///
    /// # Errors
    /// Where it does not serve, with what it said.
    pub fn attach(mut self, process: &ProcessId, origin: UffdOrigin) -> Result<ProcessId, Failure> {
        let device = match origin {
            UffdOrigin::Device(number) => Some(number),
            UffdOrigin::Syscall => None,
        };
        let go = Go { process: *process, device };
        // A server that is gone said before why.
        let _ = self.helper.send(&go);
        if let Err(error) = self.helper.wait_ready(None) {
            // While it is there, it may have the guest's RAM.
            self.helper.wait();
            return Err(failed(&self.name, &error.to_string()));
        }
        // Where all had arrived before we looked, it has ended.
        Ok(self.helper.id())
    }
}

/// Where other processes find an open file that has no name any more.
fn path_for_others(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

fn failed(name: &str, why: &str) -> Failure {
    Failure::new(Code::Failed, format!("the page server of '{name}' failed: {why}"))
}

/// Loads the devices of a guest whose pages its server, if it has one, brings. A page that is
/// damaged never comes: a QEMU that waits for one is ended.
///
/// # Errors
/// Where QEMU refuses the state, or a page that it needs is damaged.
pub fn load_served(
    folder: &GuestFolder,
    guest: &mut Incoming,
    device_state: Vec<u8>,
) -> Result<(), Failure> {
    let began = Instant::now();
    let record = &guest.record().clone();
    let is_damaged = || began.elapsed() > DAMAGE && ServerState::of(folder, record).damaged;
    let loaded = unless_hopeless(&record.process, is_damaged, || guest.load(device_state));
    loaded.map_err(|error| match ServerState::of(folder, record).problem {
        Some(problem) => Failure::new(
            Code::Failed,
            format!("loading the device state: it needs a page: {problem}"),
        ),
        None => unloadable(folder, &error),
    })
}
