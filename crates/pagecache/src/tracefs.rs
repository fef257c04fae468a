//! An instance of the kernel's tracing of its own (Documentation/trace/ftrace.rst, "Instances"): what others trace is not
//! disturbed. It is reached by a mount that only this process sees. One that a killed process left goes on until the next
//! removes it.

use crate::PageCacheError;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// What instances of ours are called: this, the process, and a number.
const NAME: &str = "dewar-";

/// Instances of one process at most.
const MOST: u32 = 64;

/// An instance of our own.
pub(crate) struct Tracing {
    mount: OwnedFd,
    name: String,
}

impl Tracing {
    pub(crate) fn new() -> Result<Self, PageCacheError> {
        let mount =
            mount().map_err(|cause| PageCacheError::Tracing { operation: "reach", cause })?;
        let mut tracing = Self { mount, name: String::new() };
        tracing.remove_those_left();
        for number in 0..MOST {
            tracing.name = format!("{NAME}{}-{number}", std::process::id());
            match fs::create_dir(tracing.instance()) {
                // Another of this process, or of one with the same number in another PID namespace.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made.map(|()| tracing).map_err(PageCacheError::tracing("begin")),
            }
        }
        let cause = io::Error::other("too many look at it already");
        Err(PageCacheError::Tracing { operation: "begin", cause })
    }

    fn instances(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/instances", self.mount.as_raw_fd()))
    }

    fn instance(&self) -> PathBuf {
        self.instances().join(&self.name)
    }

    fn remove_those_left(&self) {
        for entry in fs::read_dir(self.instances()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let of = name.strip_prefix(NAME).and_then(|name| name.split('-').next()?.parse().ok());
            let is_gone = |pid: u32| !PathBuf::from(format!("/proc/{pid}")).exists();
            if of.is_some_and(is_gone) {
                // One that is read by a process of another PID namespace stays: it is busy.
                let _ = fs::remove_dir(entry.path());
            }
        }
    }

    pub(crate) fn set(&self, file: &str, value: &str) -> Result<(), PageCacheError> {
        let written = fs::write(self.instance().join(file), value);
        written.map_err(PageCacheError::tracing("set up"))
    }

    /// What it tells, as text; a read that finds nothing does not wait.
    pub(crate) fn pipe(&self) -> Result<File, PageCacheError> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32);
        let opened = options.open(self.instance().join("trace_pipe"));
        opened.map_err(PageCacheError::tracing("read"))
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        if self.name.is_empty() {
            return;
        }
        let _ = self.set("tracing_on", "0");
        let _ = fs::remove_dir(self.instance());
    }
}

fn mount() -> io::Result<OwnedFd> {
    let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}
