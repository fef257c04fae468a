//! userfaultfd(2): write protection that the kernel resolves by itself
//! (`WP_ASYNC`), and page faults that we fill (`MISSING`).
//!
//! One descriptor does both jobs, so every handshake asks for the same
//! [`FEATURES`]; a descriptor left in a guest by an earlier command is known
//! again by them.

use crate::{KernelError, Pid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

const UFFD_API: u64 = 0xAA;
const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;
const UFFDIO_REGISTER: libc::c_ulong = 0xC020_AA00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_AA01;
const UFFDIO_WAKE: libc::c_ulong = 0x8010_AA02;
const UFFDIO_COPY: libc::c_ulong = 0xC028_AA03;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xC020_AA04;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xC018_AA06;
pub(crate) const USERFAULTFD_IOC_NEW: u64 = 0xAA00;
/// `O_CLOEXEC | O_NONBLOCK`
pub(crate) const NEW_FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;
/// `UFFD_USER_MODE_ONLY`: no right is needed. It bounds which faults are told; those that the kernel resolves by
/// itself it resolves all the same, the kernel's own among them.
pub(crate) const USER_MODE_ONLY: u64 = 1;
const UFFD_EVENT_PAGEFAULT: u8 = 0x12;

const PAGEFAULT_FLAG_WP: u64 = 1;
const MISSING_HUGETLBFS: u64 = 1 << 4;
const MISSING_SHMEM: u64 = 1 << 5;
const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const WP_UNPOPULATED: u64 = 1 << 13;
const WP_ASYNC: u64 = 1 << 15;

/// What every Dewar userfaultfd is made with. `WP_UNPOPULATED`, or pages that
/// were never touched would be missed.
pub const FEATURES: u64 = PAGEFAULT_FLAG_WP
    | MISSING_HUGETLBFS
    | MISSING_SHMEM
    | WP_HUGETLBFS_SHMEM
    | WP_UNPOPULATED
    | WP_ASYNC;

/// What faults of a range mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterMode {
    /// First touches are told to us and wait for a page.
    Missing,
    /// Writes to protected pages are noted by the kernel and go on.
    WriteProtect,
}

/// A touch of a page that is not there yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The address touched, in the guest's process.
    pub address: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct UffdRange {
    start: u64,
    len: u64,
}

impl From<&Range<u64>> for UffdRange {
    fn from(range: &Range<u64>) -> Self {
        Self { start: range.start, len: range.end - range.start }
    }
}

#[repr(C)]
struct ApiArgument {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RegisterArgument {
    range: UffdRange,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct CopyArgument {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

#[repr(C)]
struct ZeroArgument {
    range: UffdRange,
    mode: u64,
    zeroed: i64,
}

#[repr(C)]
struct ProtectArgument {
    range: UffdRange,
    mode: u64,
}

/// Opens `/dev/userfaultfd`, whose holder may make userfaultfds whatever the
/// rights of its process.
///
/// # Errors
/// Where the device is missing or not ours to open.
pub fn open_userfaultfd_device() -> Result<File, KernelError> {
    let path = "/dev/userfaultfd";
    File::options()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|cause| KernelError::new("open", path, cause))
}

/// Whether this kernel can track writes asynchronously (Linux 6.7 or later).
///
/// # Errors
/// Where no userfaultfd can be made at all.
pub fn is_tracking_supported() -> Result<bool, KernelError> {
    // SAFETY: the call takes one integer; a result >= 0 is a new descriptor
    // that nobody else owns.
    let fd = unsafe {
        use std::os::fd::FromRawFd;
        let number = libc::syscall(libc::SYS_userfaultfd, NEW_FLAGS);
        if number < 0 {
            return Err(KernelError::last("userfaultfd", "this process"));
        }
        OwnedFd::from_raw_fd(number as i32)
    };
    match Userfaultfd::handshake(fd, Pid(std::process::id() as i32)) {
        Ok(_) => Ok(true),
        Err(error) if error.errno() == Some(libc::EINVAL) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A userfaultfd that acts on some process's memory.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    pid: Pid,
}

impl Userfaultfd {
    /// Agrees with the kernel on our features for a descriptor just made in
    /// `pid`.
    ///
    /// # Errors
    /// EINVAL where the kernel lacks a feature.
    pub fn handshake(fd: OwnedFd, pid: Pid) -> Result<Self, KernelError> {
        let this = Self { fd, pid };
        let mut argument = ApiArgument { api: UFFD_API, features: FEATURES, ioctls: 0 };
        this.ioctl("UFFDIO_API", UFFDIO_API, &mut argument)?;
        Ok(this)
    }

    /// Takes up a descriptor that an earlier [`Userfaultfd::handshake`]
    /// prepared in `pid`.
    pub fn resume(fd: OwnedFd, pid: Pid) -> Self {
        Self { fd, pid }
    }

    /// A number that no other userfaultfd of this boot has: each has an inode
    /// of its own (`anon_inode_create_getfd` in fs/userfaultfd.c).
    ///
    /// # Errors
    /// Where the descriptor cannot be asked.
    pub fn identity(&self) -> Result<u64, KernelError> {
        rustix::fs::fstat(&self.fd)
            .map(|stat| stat.st_ino)
            .map_err(|cause| KernelError::new("fstat", self.describe(), cause))
    }

    /// Registers addresses of the process.
    ///
    /// # Errors
    /// EBUSY where another userfaultfd has them, EINVAL where their kind of
    /// memory cannot be registered.
    pub fn register(&self, range: &Range<u64>, mode: RegisterMode) -> Result<(), KernelError> {
        let mode = match mode {
            RegisterMode::Missing => 1,
            RegisterMode::WriteProtect => 2,
        };
        let mut argument = RegisterArgument { range: range.into(), mode, ioctls: 0 };
        self.ioctl("UFFDIO_REGISTER", UFFDIO_REGISTER, &mut argument)
    }

    /// Ends a registration; faults go the ordinary way again, and those that
    /// wait go on.
    ///
    /// The kernel wakes who waits *before* it ends the registration
    /// (`userfaultfd_unregister` in fs/userfaultfd.c). Since Linux 6.7 faults are handled
    /// under the lock of their mapping alone, so one can begin to wait in between, and
    /// nobody would wake it any more. To end it the kernel waits for that lock: who
    /// began to wait has by then, and is woken here.
    ///
    /// # Errors
    /// Where the range is not mapped.
    pub fn unregister(&self, range: &Range<u64>) -> Result<(), KernelError> {
        self.ioctl("UFFDIO_UNREGISTER", UFFDIO_UNREGISTER, &mut UffdRange::from(range))?;
        self.wake(range)
    }

    /// Protects every page of the range, populated or not.
    ///
    /// # Errors
    /// Where the range is not registered for it.
    pub fn protect(&self, range: &Range<u64>) -> Result<(), KernelError> {
        let mut argument = ProtectArgument { range: range.into(), mode: 1 };
        self.ioctl("UFFDIO_WRITEPROTECT", UFFDIO_WRITEPROTECT, &mut argument)
    }

    /// Puts whole pages in place at `address` and wakes who waits for them.
    /// Returns how many bytes from the start are there now; fewer than asked
    /// where a page was there already (see [`Userfaultfd::fill`]).
    ///
    /// # Errors
    /// EEXIST where the first page is there already.
    pub fn copy(&self, address: u64, pages: &[u8]) -> Result<u64, KernelError> {
        let mut argument = CopyArgument {
            dst: address,
            src: pages.as_ptr() as u64,
            len: pages.len() as u64,
            mode: 0,
            copied: 0,
        };
        self.partial("UFFDIO_COPY", UFFDIO_COPY, &mut argument, |argument| argument.copied)
    }

    /// Puts zero pages in place, as [`Userfaultfd::copy`] does.
    ///
    /// # Errors
    /// As there.
    pub fn zero(&self, range: &Range<u64>) -> Result<u64, KernelError> {
        let mut argument = ZeroArgument { range: range.into(), mode: 0, zeroed: 0 };
        self.partial("UFFDIO_ZEROPAGE", UFFDIO_ZEROPAGE, &mut argument, |argument| argument.zeroed)
    }

    /// Puts `pages` in place from `address` on, leaving alone those that are
    /// there already; `step` bytes is the size of the pages there. Returns how
    /// many bytes it placed.
    ///
    /// # Errors
    /// ENOSPC or ENOMEM where there is no room, ESRCH where the process ended.
    pub fn fill(&self, address: u64, pages: &[u8], step: usize) -> Result<u64, KernelError> {
        let mut placed = 0;
        let mut at = 0;
        while at < pages.len() {
            let start = address + at as u64;
            match self.copy(start, &pages[at..]) {
                Ok(bytes) => {
                    placed += bytes;
                    at += bytes as usize;
                }
                Err(error) if error.errno() == Some(libc::EEXIST) => {
                    self.wake(&(start..start + step as u64))?;
                    at += step;
                }
                Err(error) if error.errno() == Some(libc::EAGAIN) => std::thread::yield_now(),
                Err(error) => return Err(error),
            }
        }
        Ok(placed)
    }

    /// Lets every thread that waits in the range try again.
    ///
    /// # Errors
    /// Where the range is not valid.
    pub fn wake(&self, range: &Range<u64>) -> Result<(), KernelError> {
        self.ioctl("UFFDIO_WAKE", UFFDIO_WAKE, &mut UffdRange::from(range))
    }

    /// Waits up to `timeout_ms` for faults and returns those that came. An
    /// empty answer is a time-out; `None` says that the process has ended.
    ///
    /// # Errors
    /// Where the descriptor cannot be read.
    pub fn wait_faults(
        &self,
        process: BorrowedFd<'_>,
        timeout_ms: u32,
    ) -> Result<Option<Vec<Fault>>, KernelError> {
        let failed = |cause: io::Error| KernelError::new("read", self.describe(), cause);
        let timeout = Timespec {
            tv_sec: i64::from(timeout_ms / 1000),
            tv_nsec: i64::from(timeout_ms % 1000) * 1_000_000,
        };
        let mut polled = [
            PollFd::new(&self.fd, PollFlags::IN),
            PollFd::from_borrowed_fd(process, PollFlags::IN),
        ];
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Some(Vec::new())),
            Err(cause) => return Err(failed(cause.into())),
        }
        if polled[1].revents().contains(PollFlags::IN) {
            return Ok(None);
        }
        if !polled[0].revents().contains(PollFlags::IN) {
            return Ok(Some(Vec::new()));
        }
        const MESSAGE: usize = 32;
        let mut buffer = [0u8; MESSAGE * 64];
        let bytes = match rustix::io::read(&self.fd, &mut buffer) {
            Ok(bytes) => bytes,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(cause) => return Err(failed(cause.into())),
        };
        Ok(Some(buffer[..bytes].chunks_exact(MESSAGE).filter_map(parse_message).collect()))
    }

    fn describe(&self) -> String {
        format!("the userfaultfd of {}", self.pid)
    }

    fn ioctl<T>(
        &self,
        name: &'static str,
        request: libc::c_ulong,
        argument: &mut T,
    ) -> Result<(), KernelError> {
        // SAFETY: each caller passes the argument type whose layout and size the
        // request number encodes; it outlives the call. Memory that an argument
        // names is read only (COPY's source, borrowed by the caller) or lies in
        // the process that the descriptor acts on.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, argument as *mut T) };
        if result != 0 { Err(KernelError::last(name, self.describe())) } else { Ok(()) }
    }

    /// An ioctl that may do only the first part of its work: then it fails with
    /// EAGAIN and says in its argument how far it came.
    fn partial<T>(
        &self,
        name: &'static str,
        request: libc::c_ulong,
        argument: &mut T,
        done: impl Fn(&T) -> i64,
    ) -> Result<u64, KernelError> {
        match self.ioctl(name, request, argument) {
            Ok(()) => Ok(done(argument) as u64),
            Err(error) if error.errno() == Some(libc::EAGAIN) && done(argument) > 0 => {
                Ok(done(argument) as u64)
            }
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn parse_message(message: &[u8]) -> Option<Fault> {
    let address = u64::from_ne_bytes(message[16..24].try_into().ok()?);
    (message[0] == UFFD_EVENT_PAGEFAULT).then_some(Fault { address })
}
