//! Reading memory that another process is writing.
//!
//! A guest's RAM changes under our hands, so no Rust reference to it may ever
//! exist. Pages leave a [`SharedMapping`] only as copies made by machine
//! instructions that the compiler cannot look into: a copy may
//! be torn, never undefined. A thread that copies a page while the guest runs learns
//! from write tracking whether to copy it again.

use crate::KernelError;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use rustix::fs::{
    AtFlags, FallocateFlags, SeekFrom, StatxAttributes, StatxFlags, fallocate, seek, statx,
};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

/// `f_type` of hugetlbfs (statfs(2)).
const HUGETLBFS: rustix::fs::FsWord = 0x9584_58f6;
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

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
        Self::map(file, bytes, ProtFlags::READ)
    }

    fn map(file: impl AsFd, bytes: usize, access: ProtFlags) -> Result<Self, KernelError> {
        let shared = MapFlags::SHARED;
        // SAFETY: a fresh mapping at an address that the kernel chooses
        // replaces nothing.
        let address = unsafe { mmap(ptr::null_mut(), bytes, access, shared, file.as_fd(), 0) };
        let address =
            address.map_err(|cause| KernelError::new("mmap", "a guest's RAM file", cause))?;
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
        // Not `rep movsb`, which into memory that is not aligned to 32 bytes takes four
        // times as long (AMD Zen 4): the heap's begins at 16.
        // SAFETY: the assertions keep both sides in bounds, the source is aligned as
        // `movdqa` wants it (to a page), the target is ours alone, and the copy is
        // opaque to the compiler, so writers on the source side cannot make it undefined.
        unsafe {
            let source = self.address.as_ptr().cast::<u8>().add(page.index() * PAGE_BYTES);
            std::arch::asm!(
                "2:",
                "movdqa {a}, [{from}]",
                "movdqa {b}, [{from} + 16]",
                "movdqa {c}, [{from} + 32]",
                "movdqa {d}, [{from} + 48]",
                "movdqu [{to}], {a}",
                "movdqu [{to} + 16], {b}",
                "movdqu [{to} + 32], {c}",
                "movdqu [{to} + 48], {d}",
                "add {from}, 64",
                "add {to}, 64",
                "dec {left}",
                "jnz 2b",
                from = inout(reg) source => _,
                to = inout(reg) into.as_mut_ptr() => _,
                left = inout(reg) PAGE_BYTES / 64 => _,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack)
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

/// A shared mapping of a whole file that nobody else uses yet, to be filled.
#[derive(Debug)]
pub struct WritableMapping(SharedMapping);

impl WritableMapping {
    /// Maps the first `bytes` of `file`; on hugetlbfs this takes their huge
    /// pages from the pool.
    ///
    /// # Errors
    /// Where the kernel refuses: ENOMEM where the pool has too few.
    pub fn new(file: impl AsFd, bytes: usize) -> Result<Self, KernelError> {
        SharedMapping::map(file, bytes, ProtFlags::READ | ProtFlags::WRITE).map(Self)
    }

    /// Writes at a distance from the start.
    ///
    /// # Panics
    /// Where that lies outside.
    pub fn write_at(&self, bytes: &[u8], offset: u64) {
        let end = offset.checked_add(bytes.len() as u64);
        assert!(end.is_some_and(|end| end <= self.0.bytes as u64), "a write past the mapping");
        // SAFETY: the assertion keeps the target in bounds, the mapping is
        // writable, and the copy is opaque to the compiler, so that two threads
        // writing the same place could tear it, never make it undefined. DF is
        // clear by the ABI.
        unsafe {
            let target = self.0.address.as_ptr().cast::<u8>().add(offset as usize);
            std::arch::asm!(
                "rep movsb",
                inout("rcx") bytes.len() => _,
                inout("rsi") bytes.as_ptr() => _,
                inout("rdi") target => _,
                options(nostack, preserves_flags)
            );
        }
    }
}

/// The size of the pages that a file on hugetlbfs is made of; `None` where it
/// lies elsewhere.
///
/// # Errors
/// Where the file cannot be asked.
pub fn huge_page_bytes(file: impl AsFd) -> Result<Option<u64>, KernelError> {
    let state = rustix::fs::fstatfs(file)
        .map_err(|cause| KernelError::new("fstatfs", "a guest's RAM file", cause))?;
    Ok((state.f_type == HUGETLBFS).then_some(state.f_bsize as u64))
}

/// Whether a file's pages are those of persistent memory itself, and of no page cache (DAX).
///
/// # Errors
/// Where the file cannot be asked.
pub fn is_dax(file: impl AsFd) -> Result<bool, KernelError> {
    let report = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::empty())
        .map_err(|cause| KernelError::new("statx", "a guest's RAM file", cause))?;
    Ok(report.stx_attributes.contains(StatxAttributes::DAX))
}

/// The huge pages of `range`, of `step` pages each, that are not zeros all over.
/// hugetlbfs does not tell holes from data, and reading a hole through a mapping
/// takes a page from the pool; read(2) does not.
///
/// # Errors
/// Where the file cannot be read.
pub fn nonzero_ranges(
    file: impl AsFd,
    range: PageRange,
    step: u64,
) -> Result<Vec<PageRange>, KernelError> {
    let mut found = Vec::new();
    let mut page = vec![0; PAGE_BYTES];
    for piece in range.pieces(step) {
        for at in piece.pages() {
            let count = rustix::io::pread(&file, &mut page[..], at.byte_offset())
                .map_err(|cause| KernelError::new("pread", "a guest's RAM file", cause))?;
            if page[..count].iter().any(|byte| *byte != 0) {
                found.push(piece);
                break;
            }
        }
    }
    Ok(found)
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

/// Makes a hole in a file (fallocate(2)), which keeps its length.
///
/// # Errors
/// Where the file cannot be changed.
pub fn punch_hole(file: impl AsFd, offset: u64, bytes: u64) -> Result<(), KernelError> {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, how, offset, bytes)
        .map_err(|cause| KernelError::new("fallocate", "a guest's RAM file", cause))
}

/// What is free where a file lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Free {
    /// Bytes of its file system, or of its pool of huge pages.
    pub file_system: u64,
    /// Bytes of memory and swap, where its pages are memory and no pool keeps them.
    pub memory: Option<u64>,
}

/// What is free where `path` lies.
///
/// # Errors
/// Where it cannot be asked.
pub fn free(path: &std::path::Path) -> Result<Free, KernelError> {
    let failed = |cause| KernelError::new("statfs", path.display().to_string(), cause);
    let state = rustix::fs::statfs(path).map_err(failed)?;
    if state.f_type == HUGETLBFS && state.f_blocks == 0 {
        // Mounted without a limit of its own: what the pool has.
        let kib = state.f_bsize as u64 >> 10;
        let number = |name: &str| {
            let path = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/{name}");
            let text = std::fs::read_to_string(&path)
                .map_err(|cause| KernelError::new("read", &path, cause))?;
            Ok::<u64, KernelError>(text.trim().parse().unwrap_or(0))
        };
        let free = number("free_hugepages")?.saturating_sub(number("resv_hugepages")?);
        return Ok(Free { file_system: free * state.f_bsize as u64, memory: None });
    }
    let memory = match state.f_type == TMPFS {
        true => Some(available_memory()? + free_swap()?),
        false => None,
    };
    Ok(Free { file_system: state.f_bavail * state.f_bsize as u64, memory })
}

/// Bytes of memory that programs can still take without swapping: `MemAvailable` of
/// proc_meminfo(5).
///
/// # Errors
/// Where it is not told.
pub fn available_memory() -> Result<u64, KernelError> {
    memory_info("MemAvailable:")
}

fn free_swap() -> Result<u64, KernelError> {
    memory_info("SwapFree:")
}

fn memory_info(name: &str) -> Result<u64, KernelError> {
    let path = "/proc/meminfo";
    let text =
        std::fs::read_to_string(path).map_err(|cause| KernelError::new("read", path, cause))?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_suffix("kB"));
    let kib: Option<u64> = value.and_then(|value| value.trim().parse().ok());
    let missing = || std::io::Error::other(format!("it has no {name}"));
    kib.map(|kib| kib << 10).ok_or_else(|| KernelError::new("read", path, missing()))
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
        let content: Vec<u8> = (0..PAGE_BYTES).map(|at| (at % 251) as u8).collect();
        file.write_all_at(&content, 5 * PAGE_BYTES as u64).expect("write");
        let all = PageRange::new(0, 16);
        assert_eq!(data_ranges(&file, all).expect("seek"), [PageRange::new(5, 6)]);
        assert_eq!(data_ranges(&file, PageRange::new(6, 16)).expect("seek"), []);

        let mapping = SharedMapping::new(&file, 16 * PAGE_BYTES).expect("map");
        // Wherever it goes, and nothing beside it.
        let mut around = vec![9; PAGE_BYTES + 64];
        for at in [0, 1, 16, 63] {
            around.fill(9);
            mapping.copy_page(PageNumber(5), &mut around[at..at + PAGE_BYTES]);
            let (before, rest) = around.split_at(at);
            let (page, after) = rest.split_at(PAGE_BYTES);
            assert!(page == content && before.iter().chain(after).all(|byte| *byte == 9));
        }
    }
}
