//! `PAGEMAP_SCAN`: which pages of a process were written since they were last
//! write-protected (Linux 6.7, Documentation/admin-guide/mm/pagemap.rst).

use crate::{KernelError, Pid};
use dewar_units::PAGE_BYTES;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
const PM_SCAN_WP_MATCHING: u64 = 1;
const PM_SCAN_CHECK_WPASYNC: u64 = 2;
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// Regions fetched by one call.
const VECTOR: usize = 4096;
/// Bytes looked at by one call. It holds the process's mmap lock: should a
/// thread of the process want to map something meanwhile, all page faults wait
/// behind it until the call is done.
const STEP: u64 = 64 << 20;

#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// Addresses, in the scanned process, of neighbouring written pages.
pub type ScannedRange = Range<u64>;

/// `/proc/PID/pagemap`, opened once. It keeps meaning the process it was
/// opened for.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    pid: Pid,
}

impl Pagemap {
    /// Opens it.
    ///
    /// # Errors
    /// Where the process has ended or we may not look.
    pub fn open(pid: Pid) -> Result<Self, KernelError> {
        let path = format!("/proc/{}/pagemap", pid.0);
        let file = File::open(&path).map_err(|cause| KernelError::new("open", &path, cause))?;
        Ok(Self { file, pid })
    }

    /// Calls `found` with every run of pages written since their last
    /// protection, and leaves them as they are. The range must be registered
    /// with an asynchronously write-protecting userfaultfd.
    ///
    /// # Errors
    /// Where the range is not tracked (EPERM), or the kernel has no such call.
    pub fn written(
        &self,
        range: Range<u64>,
        found: impl FnMut(ScannedRange),
    ) -> Result<(), KernelError> {
        self.scan(range, PM_SCAN_CHECK_WPASYNC, 0, found)
    }

    /// The same, and protects the pages it tells of again, each in one atomic
    /// step: a write is either told of now or found by the next scan.
    ///
    /// KVM drops its mappings of the whole range asked for, so ask only for
    /// ranges that [`Pagemap::written`] named.
    ///
    /// # Errors
    /// As [`Pagemap::written`].
    pub fn written_and_protect(
        &self,
        range: Range<u64>,
        found: impl FnMut(ScannedRange),
    ) -> Result<(), KernelError> {
        self.scan(range, PM_SCAN_CHECK_WPASYNC | PM_SCAN_WP_MATCHING, 0, found)
    }

    /// As [`Pagemap::written`], but told are only pages that have memory, or lie in swap: of private memory, where
    /// pages that were never touched are no concern, and are not to be marked.
    ///
    /// # Errors
    /// As [`Pagemap::written`].
    pub fn written_populated(
        &self,
        range: Range<u64>,
        found: impl FnMut(ScannedRange),
    ) -> Result<(), KernelError> {
        self.scan(range, PM_SCAN_CHECK_WPASYNC, PAGE_IS_PRESENT | PAGE_IS_SWAPPED, found)
    }

    /// As [`Pagemap::written_and_protect`], of those pages only.
    ///
    /// # Errors
    /// As [`Pagemap::written`].
    pub fn written_populated_and_protect(
        &self,
        range: Range<u64>,
        found: impl FnMut(ScannedRange),
    ) -> Result<(), KernelError> {
        let flags = PM_SCAN_CHECK_WPASYNC | PM_SCAN_WP_MATCHING;
        self.scan(range, flags, PAGE_IS_PRESENT | PAGE_IS_SWAPPED, found)
    }

    fn scan(
        &self,
        range: Range<u64>,
        flags: u64,
        any_of: u64,
        mut found: impl FnMut(ScannedRange),
    ) -> Result<(), KernelError> {
        debug_assert!(range.start % PAGE_BYTES as u64 == 0 && range.end % PAGE_BYTES as u64 == 0);
        // Not more than there may be: it is asked of single pages, too.
        let pages = (range.end.saturating_sub(range.start) / PAGE_BYTES as u64) as usize;
        let mut regions = vec![PageRegion::default(); VECTOR.min(pages)];
        let mut start = range.start;
        while start < range.end {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                flags,
                start,
                end: range.end.min(start + STEP),
                vec: regions.as_mut_ptr() as u64,
                vec_len: regions.len() as u64,
                category_mask: PAGE_IS_WRITTEN,
                category_anyof_mask: any_of,
                return_mask: PAGE_IS_WRITTEN,
                ..ScanArgument::default()
            };
            // SAFETY: the argument has the kernel's layout and size; it names a
            // vector that is ours, of the length that it says, and both outlive
            // the call.
            let count = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &mut argument) };
            if count < 0 {
                return Err(KernelError::last("PAGEMAP_SCAN", self.pid.to_string()));
            }
            for region in &regions[..count as usize] {
                found(region.start..region.end);
            }
            if argument.walk_end <= start {
                return Err(KernelError::new(
                    "PAGEMAP_SCAN",
                    self.pid.to_string(),
                    std::io::Error::other("the scan does not advance"),
                ));
            }
            start = argument.walk_end;
        }
        Ok(())
    }
}
