//! The file, or block device, that a disk is.

use crate::buffer::Buffer;
use crate::disk_lock::DiskLock;
use crate::error::BlockError;
use dewar_units::PAGE_BYTES;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes of a sector, the least that can be asked for.
const SECTOR: u32 = 512;
/// Most zeros that are written at once, where the file system cannot do it.
const ZEROS: usize = 1 << 20;

/// How a disk is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskOptions {
    /// The file, or block device.
    pub path: PathBuf,
    /// Whether nobody may write it.
    pub is_read_only: bool,
    /// Whether it is a qcow2 file, which grows: it is served as if it were as large as it may become.
    pub is_qcow2: bool,
    /// Whether it is read and written past the host's page cache, where that can be: what the guest caches is not to be in
    /// memory twice.
    pub is_direct: bool,
    /// Whether its locks are left to another until it is used.
    pub locks_later: bool,
}

/// The file, or block device, that a disk is, with the locks on it that QEMU takes.
#[derive(Debug)]
pub struct DiskFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    is_read_only: bool,
    least: u32,
    lock: DiskLock,
}

impl DiskFile {
    /// Opens and locks it.
    ///
    /// # Errors
    /// [`BlockError::InUse`] where another program has it; where it cannot be opened.
    pub fn open(options: &DiskOptions) -> Result<Self, BlockError> {
        let DiskOptions { path, is_read_only, is_qcow2, is_direct, locks_later } = options;
        let opened = |flags: OFlags| {
            let mut how = OpenOptions::new();
            how.read(true).write(!is_read_only).custom_flags(flags.bits() as i32).open(path)
        };
        let mut file = opened(OFlags::empty()).map_err(BlockError::file("open", path))?;
        let bytes = size(&mut file).map_err(BlockError::file("measure", path))?;
        let served = if *is_qcow2 { bytes.max(most_of_qcow2(&file)) } else { bytes };
        if served % u64::from(SECTOR) != 0 {
            return Err(BlockError::Odd { path: path.clone(), bytes });
        }
        let mut least = SECTOR;
        if *is_direct {
            // Where it cannot be so, it goes through the page cache.
            if let Ok(direct) = opened(OFlags::DIRECT) {
                if let Some(of_direct) = least_of(&direct, bytes) {
                    (file, least) = (direct, of_direct);
                }
            }
        }
        let lock = match locks_later {
            true => DiskLock::later(path, *is_read_only),
            false => DiskLock::take(&file, path, *is_read_only)?,
        };
        let (path, is_read_only) = (path.clone(), *is_read_only);
        Ok(Self { path, file, bytes: served, is_read_only, least, lock })
    }

    /// Gives up the locks on it, when what is being written is done. Who uses it takes them again. One that nobody may write
    /// keeps them.
    pub(crate) fn release_locks(&self) {
        if !self.is_read_only {
            self.lock.release(&self.file);
        }
    }

    /// Whether it has them.
    pub(crate) fn has_locks(&self) -> bool {
        self.lock.is_held()
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nobody may write it.
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// The least that can be read or written, and to what all must be aligned.
    pub fn least(&self) -> u32 {
        self.least
    }

    /// Reads a part. What lies behind the end of a file that grows is zeros.
    pub(crate) fn read(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        self.lock.try_again(&self.file);
        let mut done = 0;
        while done < into.len() {
            match self.file.read_at(&mut into[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        into[done..].fill(0);
        Ok(())
    }

    pub(crate) fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let _held = self.lock.to_write(&self.file)?;
        self.file.write_all_at(bytes, offset)
    }

    /// That what was written is on the disk.
    pub(crate) fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Makes zeros of a part; `keeps` says that its place is to stay its own.
    pub(crate) fn zero(&self, offset: u64, bytes: u64, keeps: bool) -> io::Result<()> {
        let how = match keeps {
            true => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
            false => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        };
        match self.allocate(how, offset, bytes) {
            Err(error) if is_impossible(&error) => {}
            result => return result,
        }
        let zeros = Buffer::new(ZEROS.min(bytes as usize));
        let mut done = 0;
        while done < bytes {
            let piece = (bytes - done).min(ZEROS as u64);
            self.write(&zeros.bytes()[..piece as usize], offset + done)?;
            done += piece;
        }
        Ok(())
    }

    /// Gives the place of a part back, where the file system can. It reads as zeros then, or as before.
    pub(crate) fn trim(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match self.allocate(how, offset, bytes) {
            Err(error) if is_impossible(&error) => Ok(()),
            result => result,
        }
    }

    fn allocate(&self, how: FallocateFlags, offset: u64, bytes: u64) -> io::Result<()> {
        let _held = self.lock.to_write(&self.file)?;
        Ok(fallocate(&self.file, how, offset, bytes)?)
    }
}

/// Whether a file, or its file system, cannot do something.
fn is_impossible(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::OPNOTSUPP | Errno::NODEV | Errno::NOSYS | Errno::INVAL))
}

fn size(file: &mut File) -> io::Result<u64> {
    // A block device's metadata does not tell.
    file.seek(SeekFrom::End(0))
}

/// How large a qcow2 file may become: its clusters, once more for snapshots, and what tells where they are (the size that
/// the guest sees is at byte 24 of its header; docs/interop/qcow2 in QEMU's sources).
fn most_of_qcow2(file: &File) -> u64 {
    let mut header = [0; 32];
    if file.read_exact_at(&mut header, 0).is_err() || !header.starts_with(b"QFI\xfb") {
        // QEMU says what is wrong with it.
        return 0;
    }
    let (_, size) = header.split_at(24);
    let size = size.first_chunk::<8>().map_or(0, |bytes| u64::from_be_bytes(*bytes));
    let most = size.saturating_mul(2).saturating_add(1 << 30).min(1 << 62);
    most.next_multiple_of(1 << 20)
}

/// The least that can be read of a file past the page cache; nothing where that cannot be.
fn least_of(file: &File, bytes: u64) -> Option<u32> {
    let mut buffer = Buffer::new(PAGE_BYTES);
    let mut reads = |least: u32| {
        let whole = bytes % u64::from(least) == 0 && bytes >= u64::from(least);
        let at = if bytes >= 2 * u64::from(least) { u64::from(least) } else { 0 };
        whole && file.read_exact_at(&mut buffer.bytes_mut()[..least as usize], at).is_ok()
    };
    [SECTOR, PAGE_BYTES as u32].into_iter().find(|least| reads(*least))
}
