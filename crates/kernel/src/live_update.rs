//! Files that outlive a kexec: the Live Update Orchestrator (include/uapi/linux/liveupdate.h, Linux 6.19).
//!
//! A *session* has files, each under a number (*token*) that its maker chooses. The next kernel gives both back, the
//! session by its name. A session ends with its descriptor: then nothing is kept.

use crate::KernelError;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

const DEVICE: &str = "/dev/liveupdate";
/// `LIVEUPDATE_IOCTL_TYPE`, as the upper byte of each number; `_IO` adds nothing else.
const TYPE: libc::c_ulong = 0xba << 8;
const CREATE_SESSION: libc::c_ulong = TYPE;
const RETRIEVE_SESSION: libc::c_ulong = TYPE | 0x01;
const PRESERVE_FD: libc::c_ulong = TYPE | 0x40;
const RETRIEVE_FD: libc::c_ulong = TYPE | 0x41;
const FINISH: libc::c_ulong = TYPE | 0x42;
/// `LIVEUPDATE_SESSION_NAME_LENGTH`, the zero byte included.
const NAME_BYTES: usize = 64;

/// `struct liveupdate_ioctl_create_session`, and that of `retrieve_session`, which is the same.
#[repr(C)]
struct NamedSession {
    size: u32,
    fd: i32,
    name: [u8; NAME_BYTES],
}

/// `struct liveupdate_session_preserve_fd`, and that of `retrieve_fd`, which is the same.
#[repr(C)]
struct TokenFile {
    size: u32,
    fd: i32,
    token: u64,
}

/// `struct liveupdate_session_finish`.
#[repr(C)]
struct Finish {
    size: u32,
    reserved: u32,
}

/// The kernel's orchestrator, which one process has at a time.
#[derive(Debug)]
pub struct LiveUpdate(File);

/// Files that are kept together.
#[derive(Debug)]
pub struct LiveSession(OwnedFd);

impl LiveUpdate {
    /// Opens it.
    ///
    /// # Errors
    /// ENOENT where this kernel has none, or it is not switched on (`liveupdate=on kho=on`); EBUSY where another
    /// process has it.
    pub fn open() -> Result<Self, KernelError> {
        let opened = File::options().read(true).write(true).open(DEVICE);
        opened.map(Self).map_err(|error| KernelError::new("open", DEVICE, error))
    }

    /// Makes a session of this name.
    ///
    /// # Errors
    /// EEXIST where there is one.
    pub fn create(&self, name: &str) -> Result<LiveSession, KernelError> {
        self.session(CREATE_SESSION, name)
    }

    /// The session that the kernel before had by this name.
    ///
    /// # Errors
    /// ENOENT where it had none.
    pub fn retrieve(&self, name: &str) -> Result<LiveSession, KernelError> {
        self.session(RETRIEVE_SESSION, name)
    }

    fn session(&self, request: libc::c_ulong, name: &str) -> Result<LiveSession, KernelError> {
        let size = size_of::<NamedSession>() as u32;
        let mut wanted = NamedSession { size, fd: -1, name: [0; NAME_BYTES] };
        let bytes = name.as_bytes();
        if bytes.len() >= NAME_BYTES {
            let cause = std::io::Error::from(std::io::ErrorKind::InvalidInput);
            return Err(KernelError::new("ioctl", format!("live update session '{name}'"), cause));
        }
        wanted.name[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: the kernel reads and writes the struct of the size that it says, which lives during the call.
        let done = unsafe { call(&self.0, request, (&raw mut wanted).cast()) };
        done.map_err(|cause| {
            KernelError::new("ioctl", format!("live update session '{name}'"), cause)
        })?;
        // SAFETY: the kernel made this descriptor for us just now, and nobody else knows it.
        Ok(LiveSession(unsafe { OwnedFd::from_raw_fd(wanted.fd) }))
    }
}

impl LiveSession {
    /// Has the kernel keep a file under a token. Of kinds of files it takes memory (memfd, tmpfs) without a name. Holes
    /// in it are filled; it may be written until the last.
    ///
    /// # Errors
    /// ENOENT where it does not take such a file.
    pub fn preserve(&self, file: impl AsFd, token: u64) -> Result<(), KernelError> {
        let fd = file.as_fd().as_raw_fd();
        self.file_call(PRESERVE_FD, fd, token).map(drop)
    }

    /// The file that was kept under a token.
    ///
    /// # Errors
    /// ENOENT where none was; and each later time where it failed once.
    pub fn retrieve(&self, token: u64) -> Result<OwnedFd, KernelError> {
        let fd = self.file_call(RETRIEVE_FD, -1, token)?;
        // SAFETY: the kernel made this descriptor for us just now, and nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn file_call(&self, request: libc::c_ulong, fd: i32, token: u64) -> Result<i32, KernelError> {
        let mut wanted = TokenFile { size: size_of::<TokenFile>() as u32, fd, token };
        // SAFETY: the kernel reads and writes the struct of the size that it says, which lives during the call.
        let done = unsafe { call(&self.0, request, (&raw mut wanted).cast()) };
        done.map_err(|cause| KernelError::new("ioctl", format!("kept file {token}"), cause))?;
        Ok(wanted.fd)
    }

    /// Says that all that is wanted of it was retrieved: the rest is given up.
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn finish(&self) -> Result<(), KernelError> {
        let mut wanted = Finish { size: size_of::<Finish>() as u32, reserved: 0 };
        // SAFETY: as above.
        let done = unsafe { call(&self.0, FINISH, (&raw mut wanted).cast()) };
        done.map_err(|cause| KernelError::new("ioctl", "a live update session", cause))
    }
}

/// # Safety
/// `argument` points to the struct of this request, whose first field is its size.
unsafe fn call(
    file: impl AsFd,
    request: libc::c_ulong,
    argument: *mut libc::c_void,
) -> std::io::Result<()> {
    // SAFETY: as this function's own contract says.
    let result = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), request, argument) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}
