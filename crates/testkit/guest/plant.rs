//! A program without rights that tries to plant bytes in files: it reads one past the page cache, or writes one of its own
//! so, and changes the memory of the transfer all the while. A host that took the content of a block from there, when the
//! transfer is done, would believe it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// As Linux has it on x86.
const O_DIRECT: i32 = 0o40000;
const PAGE: usize = 4096;
/// Bytes of a transfer.
const PIECE: usize = 16 * PAGE;
/// What is planted.
const FOREIGN: u8 = 0xee;

/// Reads, or with `writes` makes and writes, the file for so long; says how many transfers that were.
pub fn plant(path: &str, writes: bool, time: Duration) -> io::Result<u64> {
    let mut options = OpenOptions::new();
    let file = options.read(true).write(writes).create(writes).custom_flags(O_DIRECT).open(path)?;
    let mut memory = vec![0; PIECE + PAGE];
    let skipped = memory.as_ptr().align_offset(PAGE);
    let piece = &mut memory[skipped..skipped + PIECE];
    let address = piece.as_ptr() as u64;
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        // Past what this program may do to its memory while another thread has it: as a device would.
        scope.spawn(|| {
            let own = File::options().read(true).write(true).open("/proc/self/mem")?;
            while !ends.load(Relaxed) {
                for page in 0..(PIECE / PAGE) as u64 {
                    own.write_all_at(&[FOREIGN; PAGE], address + page * PAGE as u64)?;
                }
            }
            io::Result::Ok(())
        });
        let done = transfers(&file, piece, writes, time);
        ends.store(true, Relaxed);
        done
    })
}

fn transfers(file: &File, piece: &mut [u8], writes: bool, time: Duration) -> io::Result<u64> {
    let began = Instant::now();
    let (mut count, mut at) = (0, 0);
    while began.elapsed() < time {
        if writes {
            piece.fill(count as u8);
            file.write_all_at(piece, at % (4 << 20))?;
        } else if file.read_at(piece, at)? < PIECE {
            at = 0;
            continue;
        }
        at += PIECE as u64;
        count += 1;
    }
    Ok(count)
}
