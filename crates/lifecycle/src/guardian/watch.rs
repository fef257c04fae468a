//! The guardian's own life: it waits for the end of its command, and brings the guest back if that died.

use super::throttle::{Share, Throttle};
use super::words::{ALL_WELL, PAUSE, RESUMED, THROTTLE, test_limit};
use crate::container_process;
use crate::failure::{Code, Failure};
use crate::helper::Parent;
use crate::recovery::migration::recover_source;
use dewar_guest_qemu::{Qmp, QmpError, recover};
use dewar_image::{Location, Store};
use dewar_kernel::{ProcessHandle, WakeTimer};
use dewar_registry::{GuestFolder, GuestLock, GuestRecord, Phase, Registry};
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// How often it tries to put the guest back, a second or more apart.
const TRIES: u32 = 120;
/// A command that has said nothing for so long, while its guest stands still, does nothing.
const SILENT_FOR: Duration = Duration::from_secs(3);
/// One that has said nothing for so long, while its guest is slowed down, may be stopped.
const THROTTLE_SILENT_FOR: Duration = Duration::from_secs(2);
/// A guardian that had no CPU itself has words before it that it has not heard: it listens so long once more.
const LAST_LOOK: Duration = Duration::from_millis(300);
/// How often the kernel lets a stopped guardian go on.
const WAKE_EVERY: Duration = Duration::from_secs(1);
/// How long a killed command may take to be gone.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// How a command ended that was watched.
#[derive(PartialEq, Eq)]
enum End {
    /// All is as it should be.
    Well,
    /// It died.
    Died,
    /// It lets its guest stand still.
    Hangs,
}

/// Waits for a command's end, or for a pause that is too long.
fn wait_for_end(socket: &mut UnixStream) -> End {
    let silent_for = test_limit().unwrap_or(SILENT_FOR);
    let mut pause: Option<(Instant, u64)> = None;
    let mut heard = Instant::now();
    let mut throttle = Throttle::default();
    let mut is_over_since: Option<Instant> = None;
    loop {
        // A command that is stopped must not leave a slow guest.
        let speeds_up =
            throttle.is_on().then(|| THROTTLE_SILENT_FOR.saturating_sub(heard.elapsed()));
        if speeds_up.is_some_and(|left| left.is_zero()) {
            throttle.rest();
        }
        // Our own timer interrupts us: what is left is counted from the last word.
        let left = pause.map(|(since, limit)| {
            let left = Duration::from_millis(limit).saturating_sub(since.elapsed());
            left.min(silent_for.saturating_sub(heard.elapsed()))
        });
        let left = match left {
            Some(left) if left.is_zero() => {
                let since = is_over_since.get_or_insert_with(Instant::now).elapsed();
                match LAST_LOOK.saturating_sub(since) {
                    left if left.is_zero() => return End::Hangs,
                    left => Some(left),
                }
            }
            left => {
                is_over_since = None;
                left
            }
        };
        let left = left.into_iter().chain(speeds_up.filter(|left| !left.is_zero())).min();
        if socket.set_read_timeout(left).is_err() {
            return End::Died;
        }
        let mut word = [0];
        match socket.read(&mut word) {
            Ok(0) => return End::Died,
            Ok(_) => {
                heard = Instant::now();
                throttle.again();
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                continue;
            }
            Err(_) => return End::Died,
        }
        match word[0] {
            ALL_WELL => return End::Well,
            PAUSE => {
                let mut limit = [0; 8];
                let report = socket.read_exact(&mut limit);
                // Of one that died in the middle of a word it is heard next.
                pause = report.ok().map(|()| (Instant::now(), u64::from_le_bytes(limit)));
            }
            RESUMED => pause = None,
            THROTTLE => match read_share(socket) {
                Ok(share) => throttle.set(share),
                // It died in the middle of a word, or does nothing more there.
                Err(_) => return End::Hangs,
            },
            _ => {}
        }
    }
}

fn read_share(socket: &mut UnixStream) -> std::io::Result<Share> {
    // The word comes in one piece: nothing of it is waited for, unless the command died in its middle.
    socket.set_read_timeout(Some(SILENT_FOR))?;
    let mut head = [0; 7];
    socket.read_exact(&mut head)?;
    let number = |bytes: &[u8]| i32::from_le_bytes(std::array::from_fn(|index| bytes[index]));
    let count = u16::from_le_bytes([head[1], head[2]]);
    let mut threads = vec![0; usize::from(count) * 4];
    socket.read_exact(&mut threads)?;
    Ok(Share {
        percent: head[0],
        process: number(&head[3..]),
        threads: threads.chunks_exact(4).map(number).collect(),
    })
}

/// Puts a guest back. One that was given to another host is left as it is.
fn roll_back(
    connect: impl FnMut() -> Result<Qmp, QmpError>,
    folder: &GuestFolder,
    record: &GuestRecord,
) -> Result<(), Failure> {
    if record.phase != Phase::Leaving {
        return match record.container {
            Some(_) => container_process::let_run(folder, record),
            None => Ok(recover(connect, folder, record)?),
        };
    }
    let same = |now: &GuestRecord| now.process.is_same(&record.process);
    // Read each time: a try that failed may have come far. Nothing is left of a guest that is gone, and
    // what has its name now is another.
    let Some(now) = folder.record_if_any()?.filter(same) else { return Ok(()) };
    match recover_source(connect, folder, &now) {
        Err(_) if folder.record_if_any()?.is_none() => Ok(()),
        result => result.map(drop),
    }
}

/// The guardian's own life.
///
/// # Errors
/// Where the command cannot be reached, or the guest not be brought back.
pub fn watch(
    registry: &Registry,
    name: &str,
    store: Option<&str>,
    is_container: bool,
) -> Result<(), Failure> {
    let broken = |error: std::io::Error| Failure::new(Code::Failed, format!("guardian: {error}"));
    let mut parent = Parent::of_this_process().map_err(broken)?;
    let mut inherited = match is_container {
        true => None,
        false => Some(parent.receive_fd().map_err(broken)?),
    };
    let lock = GuestLock::inherit(parent.receive_fd().map_err(broken)?);
    let command = ProcessHandle::from_pidfd(parent.receive_fd().map_err(broken)?);
    // Without it a guardian that is stopped waits until it is let go on.
    let _awake = WakeTimer::every(WAKE_EVERY);
    parent.ready().map_err(broken)?;
    match wait_for_end(parent.socket()) {
        End::Well => return Ok(()),
        End::Died => {}
        End::Hangs => {
            // It must not go on while the guest is put back.
            let _ = command.kill();
            command.ends_within(ENDS_WITHIN);
        }
    }
    let folder = registry.guest(name)?;
    let record = folder.record()?;
    let mut result: Result<(), Failure> = Ok(());
    for _ in 0..TRIES {
        let connect = || match inherited.take() {
            Some(fd) => Ok(Qmp::take_over(fd)),
            None => Qmp::of(&record),
        };
        result = roll_back(connect, &folder, &record);
        if result.is_ok() {
            break;
        }
        // A QEMU that hangs with its disk may come back.
        std::thread::sleep(Duration::from_secs(1));
    }
    // The dead command's half image goes too; whatever stays, the next writer removes. The kernel closes
    // a dead process's files one after the other: its socket, then, perhaps much later, the lease.
    command.ends_within(ENDS_WITHIN);
    if let Some(Ok(location)) = store.map(Location::parse) {
        let _ = Store::open(&location).and_then(|store| store.sweep());
    }
    drop(lock);
    result
}
