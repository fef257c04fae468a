//! Checksums of RAM files whose guest stands still, to tell later whether
//! they were changed.
//!
//! XXH3-128 over each 2 MiB: it finds damage, not the work of an attacker with
//! write access to the files. What was never written counts
//! as zeros, and is not read.

use dewar_kernel::{KernelError, data_ranges, huge_page_bytes};
use dewar_units::{PAGE_BYTES, PageRange};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use twox_hash::XxHash3_128;

/// Bytes under one checksum.
pub const SUM_BYTES: u64 = 2 << 20;

/// The checksum of some bytes.
pub fn sum(bytes: &[u8]) -> u128 {
    XxHash3_128::oneshot(bytes)
}

/// The checksums of the first `bytes` of a RAM file, by `threads` threads.
///
/// # Errors
/// Where it cannot be read.
pub fn sums(file: &File, bytes: u64, threads: usize) -> Result<Vec<u128>, KernelError> {
    let count = bytes.div_ceil(SUM_BYTES);
    // Asked for once: the kernel looks from a place to the next hole, however far.
    let written = &written_parts(file, bytes)?;
    let next = AtomicU64::new(0);
    let work = || -> Result<Vec<(u64, u128)>, KernelError> {
        let (mut done, mut buffer) = (Vec::new(), vec![0; SUM_BYTES as usize]);
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return Ok(done);
            }
            let at = index * SUM_BYTES..bytes.min((index + 1) * SUM_BYTES);
            done.push((index, sum_of(file, written, at, &mut buffer)?));
        }
    };
    let parts: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    let mut all = vec![0; count as usize];
    for part in parts {
        for (index, sum) in part? {
            all[index as usize] = sum;
        }
    }
    Ok(all)
}

/// The parts of a file that are not holes, in order.
fn written_parts(file: &File, bytes: u64) -> Result<Vec<Range<u64>>, KernelError> {
    let pages = PageRange::new(0, bytes.div_ceil(PAGE_BYTES as u64));
    // Holes of hugetlbfs are not told; reading one gives zeros all the same.
    let ranges = match huge_page_bytes(file)? {
        None => data_ranges(file, pages)?,
        Some(_) => vec![pages],
    };
    let part = |range: PageRange| {
        range.start.0 * PAGE_BYTES as u64..(range.end.0 * PAGE_BYTES as u64).min(bytes)
    };
    Ok(ranges.into_iter().map(part).collect())
}

fn sum_of(
    file: &File,
    written: &[Range<u64>],
    at: Range<u64>,
    buffer: &mut [u8],
) -> Result<u128, KernelError> {
    let failed = |cause| KernelError::new("read", "a RAM file", cause);
    let buffer = &mut buffer[..(at.end - at.start) as usize];
    buffer.fill(0);
    let first = written.partition_point(|part| part.end <= at.start);
    for part in written[first..].iter().take_while(|part| part.start < at.end) {
        let (start, end) = (part.start.max(at.start), part.end.min(at.end));
        let part = &mut buffer[(start - at.start) as usize..(end - at.start) as usize];
        file.read_exact_at(part, start).map_err(failed)?;
    }
    Ok(sum(buffer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_counts_as_zeros_and_one_byte_is_found() {
        let file = tempfile::tempfile().expect("file");
        file.set_len(3 * SUM_BYTES + 4096).expect("size");
        file.write_all_at(&[7; 4096], SUM_BYTES + 8192).expect("write");
        let before = sums(&file, 3 * SUM_BYTES + 4096, 2).expect("sums");
        assert_eq!(before.len(), 4);
        file.write_all_at(&[0; 4096], 0).expect("write");
        assert_eq!(sums(&file, 3 * SUM_BYTES + 4096, 1).expect("sums"), before);
        file.write_all_at(&[1], 3 * SUM_BYTES + 4095).expect("write");
        let after = sums(&file, 3 * SUM_BYTES + 4096, 2).expect("sums");
        assert_eq!(after[..3], before[..3]);
        assert_ne!(after[3], before[3]);
    }
}
