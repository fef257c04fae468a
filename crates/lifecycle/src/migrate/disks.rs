//! Disks that go along: QEMU copies them into the QEMU that waits at the other host, over connections in the
//! tunnel.
//!
//! ```text
//!  QEMU --mirror job, NBD--> socket of ours --frames--> receive --> socket of QEMU's NBD server
//! ```
//!
//! The destination's files are made for this ([`made_disks`](crate::migration::made_disks)). The source's
//! are not changed, and stay.

use crate::failure::{Code, Failure};
use crate::migrate::moving_machine::CopiedDisk;
use crate::migration::ToTheDestination;
use crate::reporter::Reporter;
use dewar_guest_qemu::{
    MirrorProgress, QemuGuest, Qmp, begin_mirrors, export_disks, mirror_progress,
};
use dewar_migrate::{
    FrameReader, FrameWriter, MigrateError, TunnelReader, TunnelWriter, carry_disk, cut_disk,
};
use dewar_registry::GuestFolder;
use dewar_wire::control::{CONTROL, FIRST_DISK};
use dewar_wire::frame::Side;
use std::fs;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often it is looked how far the copies are.
const LOOK: Duration = Duration::from_millis(100);
/// How long a disk may be written faster than it is copied before it is said so.
const PATIENCE: Duration = Duration::from_secs(60);
/// Less is copied in a moment, whatever the speed.
const LITTLE: u64 = 1 << 20;
/// The socket of the NBD server, in the guest's folder.
const SERVER: &str = "nbd.sock";

/// The source's copies.
pub(super) struct DiskCopies {
    sockets: Vec<PathBuf>,
    open: Arc<Mutex<Vec<UnixStream>>>,
    began: Instant,
}

impl DiskCopies {
    /// Begins to copy each disk of a guest.
    pub fn begin<W: Write + Send + 'static>(
        guest: &mut QemuGuest,
        folder: &GuestFolder,
        readers: Vec<TunnelReader>,
        tunnel: &TunnelWriter<W>,
        session: u64,
    ) -> Result<Self, Failure> {
        let open = Arc::new(Mutex::new(Vec::new()));
        let mut copies = Self { sockets: Vec::new(), open, began: Instant::now() };
        let count = guest.found().disks.len();
        for (shard, reader) in (FIRST_DISK..).zip(readers).take(count) {
            let from = FrameReader::new(reader, session, shard, Side::Destination);
            let to = FrameWriter::new(tunnel.another(), session, shard, Side::Source);
            copies.listen(folder, from, to)?;
        }
        begin_mirrors(guest, &copies.sockets).map_err(failed)?;
        Ok(copies)
    }

    /// Waits for QEMU at a socket of its own for a disk.
    fn listen<W: Write + Send + 'static>(
        &mut self,
        folder: &GuestFolder,
        from: FrameReader<TunnelReader>,
        to: FrameWriter<TunnelWriter<W>>,
    ) -> Result<(), Failure> {
        let path = folder.file(&format!("disk-{}.sock", self.sockets.len()));
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path).map_err(|error| at(&path, &error))?;
        self.sockets.push(path);
        let open = Arc::clone(&self.open);
        std::thread::spawn(move || {
            let Ok((socket, _)) = listener.accept() else { return };
            if let Ok(ours) = socket.try_clone() {
                open.lock().unwrap_or_else(PoisonError::into_inner).push(ours);
                let _ = carry_disk(socket, from, to);
            }
        });
        Ok(())
    }

    /// Waits until what is left of the disks is copied within so long.
    pub fn converge(
        &self,
        guest: &mut QemuGuest,
        within: Duration,
        control: &ToTheDestination,
        reporter: &dyn Reporter,
    ) -> Result<(), Failure> {
        let (mut least, mut since) = (u64::MAX, Instant::now());
        loop {
            let now = mirror_progress(guest, self.sockets.len()).map_err(failed)?;
            reporter.progress(now.of - now.left, now.of);
            if now.has_begun && now.left <= self.fitting(&now, within) {
                return Ok(());
            }
            if control.is_lost() {
                return Err(MigrateError::Ended(CONTROL).into());
            }
            if now.left < least {
                (least, since) = (now.left, Instant::now());
            }
            if since.elapsed() > PATIENCE {
                let what = "its disks are written faster than they are copied";
                return Err(Failure::new(Code::Failed, what).advice(
                    "try when the guest has less to do, or with a longer '--max-downtime'",
                ));
            }
            std::thread::sleep(LOOK);
        }
    }

    /// How many bytes are copied in that time, by what was until now.
    fn fitting(&self, now: &MirrorProgress, within: Duration) -> u64 {
        let speed = (now.of - now.left) as f64 / self.began.elapsed().as_secs_f64();
        (speed * within.as_secs_f64()).max(LITTLE as f64) as u64
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.sockets.len()
    }

    /// Ends their connections: what QEMU has still under way there fails, and is not waited for.
    pub fn cut(&self) {
        for socket in self.open.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            cut_disk(socket);
        }
    }
}

impl Drop for DiskCopies {
    fn drop(&mut self) {
        self.cut();
        for path in &self.sockets {
            let _ = fs::remove_file(path);
        }
    }
}

/// Lets the QEMU that waits take copies of its disks.
pub(super) fn export(
    folder: &GuestFolder,
    qmp: &mut Qmp,
    disks: &[CopiedDisk],
) -> Result<(), Failure> {
    let files: Vec<PathBuf> = disks.iter().map(|disk| disk.path.clone()).collect();
    export_disks(qmp, &folder.file(SERVER), &files).map_err(failed)
}

/// Connects the disks' connections with that QEMU.
pub(super) fn connect<W: Write + Send + 'static>(
    folder: &GuestFolder,
    count: usize,
    readers: Vec<TunnelReader>,
    tunnel: &TunnelWriter<W>,
    session: u64,
) -> Result<(), Failure> {
    let path = folder.file(SERVER);
    for (shard, reader) in (FIRST_DISK..).zip(readers).take(count) {
        let socket = UnixStream::connect(&path).map_err(|error| at(&path, &error))?;
        let from = FrameReader::new(reader, session, shard, Side::Source);
        let to = FrameWriter::new(tunnel.another(), session, shard, Side::Destination);
        carry_disk(socket, from, to).map_err(|error| at(&path, &error))?;
    }
    Ok(())
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Failed, format!("copying its disks: {error}"))
}

fn at(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(Code::Failed, format!("{}: {error}", path.display()))
}
