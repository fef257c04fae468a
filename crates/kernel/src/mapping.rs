//! Reading memory that somebody else is writing.
//!
//! A guest's RAM changes under our hands, so no Rust reference to it may ever
//! exist. Pages leave a [`SharedMapping`] only as copies made by one machine
//! instruction (`rep movsb`), which the compiler cannot look into: a copy may
//! be torn, never undefined. Whoever copies a page while the guest runs learns
//! from write tracking whether to copy it again.

use crate::KernelError;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

/// A read-only shared mapping of a whole file.
#[derive(Debug)]
pub struct SharedMapping {
    address: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: the mapping is only read, by volatile copies, and lives until drop;
// reading it from several threads is what it is for.
unsafe impl Send for SharedMapping {}
// SAFETY: as above.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps the first `bytes` of `file`.
    ///
    /// # Errors
    /// Where the kernel refuses, or `bytes` is 0.
    pub fn new(file: impl AsFd, bytes: usize) -> Result<Self, KernelError> {
        // SAFETY: a fresh mapping at an address that the kernel chooses
        // replaces nothing.
        let address = unsafe {
            mmap(ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file.as_fd(), 0)
        }
        .map_err(|cause| KernelError::new("mmap", "a guest's RAM file", cause))?;
        let address = NonNull::new(address)
            .ok_or_else(|| KernelError::new("mmap", "a guest's RAM file", Errno::FAULT))?;
        Ok(Self { address, bytes })
    }

    /// How many whole pages it has.
    pub fn pages(&self) -> u64 {
        (self.bytes / PAGE_BYTES) as u64
    }

    /// Copies a page as it is at some moment during the call.
    ///
    /// On tmpfs, copying a page that was never written allocates it: ask
    /// [`data_ranges`] first.
    ///
    /// # Panics
    /// Where `page` lies outside, or `into` is not one page long.
    pub fn copy_page(&self, page: PageNumber, into: &mut [u8]) {
        assert!(page.0 < self.pages(), "page {page} of {}", self.pages());
        assert_eq!(into.len(), PAGE_BYTES);
        // SAFETY: the assertions keep both sides in bounds, the target is ours
        // alone, and the copy is opaque to the compiler, so writers on the
        // source side cannot make it undefined. DF is clear by the ABI.
        unsafe {
            let source = self.address.as_ptr().cast::<u8>().add(page.index() * PAGE_BYTES);
            std::arch::asm!(
                "rep movsb",
                inout("rcx") PAGE_BYTES => _,
                inout("rsi") source => _,
                inout("rdi") into.as_mut_ptr() => _,
                options(nostack, preserves_flags)
            );
        }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing borrowed from it outlives it.
        // A failure would leave the mapping in place, which harms nobody.
        let _ = unsafe { munmap(self.address.as_ptr(), self.bytes) };
    }
}

/// The pages of `range` that have storage in `file`; all others read as zeros
/// (lseek(2), `SEEK_DATA`). A file system that cannot tell says all have.
///
/// # Errors
/// Where the file cannot be asked.
pub fn data_ranges(file: impl AsFd, range: PageRange) -> Result<Vec<PageRange>, KernelError> {
    let file = file.as_fd();
    let failed = |cause| KernelError::new("lseek", "a guest's RAM file", cause);
    let mut found = Vec::new();
    let mut at = range.start.byte_offset();
    let end = range.end.byte_offset();
    while at < end {
        let start = match seek(file, SeekFrom::Data(at)) {
            Ok(start) if start < end => start,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(cause) => return Err(failed(cause)),
        };
        let stop = seek(file, SeekFrom::Hole(start)).map_err(failed)?.min(end);
        let first = PageNumber::containing(start).0;
        found.push(PageRange::new(first, stop.div_ceil(PAGE_BYTES as u64)));
        at = stop;
    }
    Ok(found)
}

/// Bytes that can still be written to the file system that holds `path`.
///
/// # Errors
/// Where it cannot be asked.
pub fn free_bytes(path: &std::path::Path) -> Result<u64, KernelError> {
    let state = rustix::fs::statvfs(path)
        .map_err(|cause| KernelError::new("statvfs", path.display().to_string(), cause))?;
    Ok(state.f_bavail * state.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::os::unix::fs::FileExt;

    #[test]
    fn holes_are_told_from_data_and_pages_are_copied() {
        let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("memfd");
        let file = std::fs::File::from(fd);
        file.set_len(16 * PAGE_BYTES as u64).expect("set_len");
        file.write_all_at(&[7; PAGE_BYTES], 5 * PAGE_BYTES as u64).expect("write");
        let all = PageRange::new(0, 16);
        assert_eq!(data_ranges(&file, all).expect("seek"), [PageRange::new(5, 6)]);
        assert_eq!(data_ranges(&file, PageRange::new(6, 16)).expect("seek"), []);

        let mapping = SharedMapping::new(&file, 16 * PAGE_BYTES).expect("map");
        let mut page = [0; PAGE_BYTES];
        mapping.copy_page(PageNumber(5), &mut page);
        assert_eq!(page, [7; PAGE_BYTES]);
    }
}
