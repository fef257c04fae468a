//! A controller in the background: the same command again, as a helper.

use crate::failure::{Code, Failure};
use crate::helper::{Helper, HelperError, Output, Parent};
use dewar_registry::ProcessId;
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// A controller that serves in the background.
#[derive(Debug)]
pub struct Started {
    /// Its process.
    pub process: ProcessId,
    /// What it said until it was ready.
    pub said: String,
}

/// A controller that did not start.
#[derive(Debug)]
pub struct NotStarted {
    /// Why.
    pub failure: Failure,
    /// What it printed for programs, if it did.
    pub printed: String,
}

/// Starts this command again with these arguments, and waits until it serves.
///
/// # Errors
/// Where it does not.
pub fn start(arguments: impl Iterator<Item = OsString>) -> Result<Started, NotStarted> {
    let failed = |error: std::io::Error| NotStarted {
        failure: Failure::new(Code::Failed, format!("the controller did not start: {error}")),
        printed: String::new(),
    };
    let mut helper = Helper::start_again(arguments, Output::Piped).map_err(failed)?;
    let is_ready = helper.wait_ready(None);
    // Both end when the controller is ready, or has ended.
    let (mut printed, mut said) = (String::new(), String::new());
    let process = helper.process();
    let _ = process.stderr.take().map(|mut stderr| stderr.read_to_string(&mut said));
    let _ = process.stdout.take().map(|mut stdout| stdout.read_to_string(&mut printed));
    match is_ready {
        Ok(()) => Ok(Started { process: helper.id(), said }),
        Err(HelperError::Failed(_) | HelperError::Io(_)) => {
            let code = match helper.process().wait().map_err(failed)?.code() {
                Some(2) => Code::Usage,
                Some(3) => Code::NotFound,
                Some(4) => Code::Unsupported,
                Some(5) => Code::Attention,
                _ => Code::Failed,
            };
            let what = said.trim().trim_start_matches("dewar: ").to_owned();
            Err(NotStarted { failure: Failure::new(code, what), printed })
        }
    }
}

/// This process, if it is a controller in the background.
#[derive(Debug)]
pub struct Background {
    parent: Option<Parent>,
    is_waited_for: bool,
    log: PathBuf,
}

impl Background {
    /// Of this process; its log is this file.
    pub fn of_this_process(log: PathBuf) -> Self {
        let parent = Parent::if_any();
        let is_waited_for = parent.is_some();
        Self { parent, is_waited_for, log }
    }

    /// Says, where a command waits for it, that the guest is served; what this process prints
    /// after that is in its log.
    pub fn say_ready(&mut self) {
        if !std::mem::take(&mut self.is_waited_for) {
            return;
        }
        let _ = self.parent.as_mut().map(Parent::ready);
        let mut options = File::options();
        options.create(true).write(true).truncate(true).mode(0o600);
        let to_log = options.open(&self.log);
        let file = to_log.or_else(|_| File::options().write(true).open("/dev/null"));
        if let Ok(file) = file {
            let _ = rustix::stdio::dup2_stdout(file.as_fd());
            let _ = rustix::stdio::dup2_stderr(file.as_fd());
        }
    }

    /// Removes the log of a controller in the background that has nothing more to say.
    pub fn remove_log(&self) {
        if self.parent.is_some() {
            let _ = std::fs::remove_file(&self.log);
        }
    }
}

/// Asks a controller to end; one that has ended needs no asking.
pub fn ask_to_end(controller: ProcessId) {
    if let Some(pid) = Pid::from_raw(controller.pid).filter(|_| controller.is_seen()) {
        let _ = kill_process(pid, Signal::TERM);
        // A controller that was stopped (SIGSTOP) hears of it only then.
        let _ = kill_process(pid, Signal::CONT);
    }
}
