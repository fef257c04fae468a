//! An instance of the kernel's tracing of its own (Documentation/trace/ftrace.rst, "Instances"): what others trace is not
//! disturbed. It is in a mount that only this process sees, and goes with it: one that a killed process left is removed
//! by the next.

use crate::PageCacheError;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// What instances of ours are called: this, the process, and a number.
const NAME: &str = "dewar-";

/// An instance of our own.
pub(crate) struct Tracing {
    mount: OwnedFd,
    name: String,
}

impl Tracing {
    pub(crate) fn new() -> Result<Self, PageCacheError> {
        let mount =
            mount().map_err(|cause| PageCacheError::Tracing { operation: "reach", cause })?;
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let tracing = Self { mount, name: format!("{NAME}{}-{number}", std::process::id()) };
        tracing.remove_those_left();
        fs::create_dir(tracing.instance()).map_err(PageCacheError::tracing("begin"))?;
        Ok(tracing)
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
        let _ = self.set("tracing_on", "0");
        let _ = fs::remove_dir(self.instance());
    }
}

fn mount() -> io::Result<OwnedFd> {
    let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?)
}
