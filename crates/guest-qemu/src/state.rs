//! Device state, through QEMU's own migration: with `x-ignore-shared` it is
//! everything but the shared RAM.

use crate::qmp::{Qmp, QmpError};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const CHANNEL: &str = "dewar-state";
const BITMAPS: &str = "dirty-bitmaps";
const LATE_ACTIVATION: &str = "late-block-activate";
const POLL: Duration = Duration::from_micros(300);
/// More bytes a second than any host has: what is to move in the pause is not to wait.
const UNLIMITED: u64 = 1 << 40;
/// No device state takes this long.
const WITHIN: Duration = Duration::from_secs(60);

/// Capabilities that must have these values while state is saved or loaded.
/// Those that a QEMU does not know are left out.
const NEEDED: [(&str, bool); 17] = [
    ("x-ignore-shared", true),
    ("xbzrle", false),
    ("rdma-pin-all", false),
    ("auto-converge", false),
    ("postcopy-ram", false),
    ("postcopy-preempt", false),
    ("x-colo", false),
    ("compress", false),
    ("pause-before-switchover", false),
    ("block", false),
    ("return-path", false),
    ("switchover-ack", false),
    ("multifd", false),
    ("zero-copy-send", false),
    (BITMAPS, false),
    ("background-snapshot", false),
    ("mapped-ram", false),
];

/// What can go wrong with device state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StateError {
    /// QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The migration did not succeed.
    #[error("QEMU's migration ended as '{status}': {reason}")]
    Migration {
        /// Its status.
        status: String,
        /// In QEMU's words.
        reason: String,
    },
    /// The channel to QEMU.
    #[error("the channel for device state: {0}")]
    Channel(#[from] std::io::Error),
}

/// Capabilities whose values must be changed, with the present ones; `bitmaps`
/// says that dirty bitmaps of disks shall go along.
pub(crate) fn capabilities_to_change(
    qmp: &mut Qmp,
    bitmaps: bool,
) -> Result<Vec<(String, bool)>, QmpError> {
    let known = qmp.execute("query-migrate-capabilities", json!({}))?;
    let now = |name: &str| {
        let mut all = known.as_array().into_iter().flatten();
        all.find(|it| it["capability"] == name)?["state"].as_bool()
    };
    Ok(NEEDED
        .iter()
        .filter_map(|(name, needed)| {
            let needed = *needed || (bitmaps && *name == BITMAPS);
            now(name).filter(|now| *now != needed).map(|now| ((*name).to_owned(), now))
        })
        .collect())
}

/// The migration's TLS credentials, where they are set.
pub(crate) fn tls_creds(qmp: &mut Qmp) -> Result<Option<String>, QmpError> {
    let parameters = qmp.execute("query-migrate-parameters", json!({}))?;
    Ok(parameters["tls-creds"].as_str().filter(|id| !id.is_empty()).map(str::to_owned))
}

/// The most bytes a second that a migration may send, where that is a limit.
pub(crate) fn bandwidth(qmp: &mut Qmp) -> Result<Option<u64>, QmpError> {
    let parameters = qmp.execute("query-migrate-parameters", json!({}))?;
    Ok(parameters["max-bandwidth"].as_u64().filter(|limit| *limit < UNLIMITED))
}

/// Sets that; without `limit` there is none.
pub(crate) fn set_bandwidth(qmp: &mut Qmp, limit: Option<u64>) -> Result<(), QmpError> {
    let limit = limit.unwrap_or(UNLIMITED);
    qmp.execute("migrate-set-parameters", json!({"max-bandwidth": limit})).map(drop)
}

pub(crate) fn set_capabilities(
    qmp: &mut Qmp,
    values: impl IntoIterator<Item = (String, bool)>,
) -> Result<(), QmpError> {
    let list: Vec<Value> = values
        .into_iter()
        .map(|(name, state)| json!({"capability": name, "state": state}))
        .collect();
    if list.is_empty() {
        return Ok(());
    }
    qmp.execute("migrate-set-capabilities", json!({"capabilities": list})).map(drop)
}

pub(crate) fn set_tls_creds(qmp: &mut Qmp, id: &str) -> Result<(), QmpError> {
    qmp.execute("migrate-set-parameters", json!({"tls-creds": id})).map(drop)
}

/// A way out for device state, made ready before the pause.
#[derive(Debug)]
pub(crate) struct StateChannel {
    reader: JoinHandle<std::io::Result<Vec<u8>>>,
}

impl StateChannel {
    pub(crate) fn open(qmp: &mut Qmp) -> Result<Self, StateError> {
        let (mut ours, theirs) = UnixStream::pair()?;
        qmp.execute_with_fd("getfd", json!({"fdname": CHANNEL}), theirs.as_fd())?;
        let reader = std::thread::spawn(move || {
            let mut state = Vec::with_capacity(4 << 20);
            ours.read_to_end(&mut state).map(|_| state)
        });
        Ok(Self { reader })
    }

    /// Saves the state of a stopped guest.
    pub(crate) fn save(self, qmp: &mut Qmp) -> Result<Vec<u8>, StateError> {
        begin(qmp)?;
        wait_migration(qmp)?;
        let state = self.reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(state)
    }
}

/// When a QEMU takes the disks of the guest that it loads, and their locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activation {
    /// When it is loaded.
    Now,
    /// When it is let run.
    WhenItRuns,
}

/// Loads device state into a QEMU that waits for it.
pub(crate) fn load(
    qmp: &mut Qmp,
    state: Vec<u8>,
    activation: Activation,
) -> Result<(), StateError> {
    let mut changes = capabilities_to_change(qmp, false)?;
    if activation == Activation::WhenItRuns {
        changes.push((LATE_ACTIVATION.to_owned(), false));
    }
    set_capabilities(qmp, changes.iter().map(|(name, now)| (name.clone(), !now)))?;
    let (mut ours, theirs) = UnixStream::pair()?;
    qmp.execute_with_fd("getfd", json!({"fdname": CHANNEL}), theirs.as_fd())?;
    drop(theirs);
    let writer = std::thread::spawn(move || ours.write_all(&state));
    qmp.execute("migrate-incoming", json!({"uri": format!("fd:{CHANNEL}")}))?;
    wait_migration(qmp)?;
    writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    set_capabilities(qmp, changes)?;
    Ok(())
}

/// Gives two QEMUs a socket of their own for a migration; one waits for it.
pub(crate) fn connect(from: &mut Qmp, to: &mut Qmp) -> Result<(), StateError> {
    let (ours, theirs) = UnixStream::pair()?;
    from.execute_with_fd("getfd", json!({"fdname": CHANNEL}), ours.as_fd())?;
    to.execute_with_fd("getfd", json!({"fdname": CHANNEL}), theirs.as_fd())?;
    drop((ours, theirs));
    to.execute("migrate-incoming", json!({"uri": format!("fd:{CHANNEL}")}))?;
    Ok(())
}

/// Begins that migration: from here on the two need nobody else.
pub(crate) fn begin(from: &mut Qmp) -> Result<(), StateError> {
    from.execute("migrate", json!({"uri": format!("fd:{CHANNEL}")}))?;
    Ok(())
}

/// Whether a migration is under way, or a snapshot or what else QEMU makes by one.
pub(crate) fn is_migrating(qmp: &mut Qmp) -> Result<bool, QmpError> {
    Ok(is_under_way(&status(qmp)?))
}

/// Stops a migration that is under way, if one is.
pub(crate) fn cancel_migration(qmp: &mut Qmp) -> Result<(), StateError> {
    let deadline = Instant::now() + WITHIN;
    let mut asked = false;
    while is_under_way(&status(qmp)?) && Instant::now() < deadline {
        if !asked {
            // Refused where it ends this very moment.
            let _ = qmp.execute("migrate_cancel", json!({}));
            asked = true;
        }
        std::thread::sleep(POLL);
    }
    // Left over where the migration never began.
    let _ = qmp.execute("closefd", json!({"fdname": CHANNEL}));
    Ok(())
}

fn wait_migration(qmp: &mut Qmp) -> Result<(), StateError> {
    let deadline = Instant::now() + WITHIN;
    loop {
        let answer = status(qmp)?;
        let text = answer["status"].as_str().unwrap_or("none");
        if text == "completed" {
            return Ok(());
        }
        if !is_under_way(&answer) && text != "none" || Instant::now() > deadline {
            let reason = answer["error-desc"].as_str().unwrap_or("no reason given").to_owned();
            return Err(StateError::Migration { status: text.to_owned(), reason });
        }
        std::thread::sleep(POLL);
    }
}

fn status(qmp: &mut Qmp) -> Result<Value, QmpError> {
    qmp.execute("query-migrate", json!({}))
}

fn is_under_way(answer: &Value) -> bool {
    !matches!(answer["status"].as_str(), None | Some("none" | "completed" | "failed" | "cancelled"))
}
