//! How far a lazy restore is: `server.json` in the guest's folder, which its page server writes.

use dewar_registry::{GuestFolder, GuestRecord, Phase};
use serde::{Deserialize, Serialize};

const FILE: &str = "server.json";

/// How far a lazy restore is, as its server last said.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ServerState {
    /// Pages that have arrived.
    pub arrived: u64,
    /// Pages that must arrive.
    pub of: u64,
    /// Those of them that lay in the memory of the guest before.
    #[serde(default)]
    pub reused: u64,
    /// Whether all is there, and no server needed.
    pub complete: bool,
    /// Why some pages cannot be read, if so.
    pub problem: Option<String>,
    /// Whether some are damaged.
    #[serde(default)]
    pub damaged: bool,
}

impl ServerState {
    /// What the last server of a guest said; a guest that never had one is
    /// complete.
    pub fn of(folder: &GuestFolder, record: &GuestRecord) -> Self {
        match (&record.server, folder.read(FILE)) {
            (None, _) => Self { complete: true, ..Self::default() },
            (Some(_), Ok(Some(state))) => state,
            (Some(_), _) => Self::default(),
        }
    }

    /// Notes it. It only tells how far the server is: if it cannot be written, the next one will be.
    pub(crate) fn save(&self, folder: &GuestFolder) {
        let _ = folder.write_for_now(FILE, self);
    }
}

/// Whether a guest's page server is there and serves: one that was stopped (SIGSTOP) does not.
pub fn server_alive(record: &GuestRecord) -> bool {
    record.server.is_some_and(|server| server.is_alive() && !server.is_halted())
}

/// What brings the rest of a guest's memory when its server is gone.
pub fn what_brings_the_rest(record: &GuestRecord) -> String {
    let name = &record.name;
    match record.migration {
        Some(_) => format!("'dewar migrate {name} --resume' at the host that it left goes on"),
        None => format!("'dewar restore {name}' goes on"),
    }
}

/// Whether a guest's memory has not all arrived and no page server brings it.
pub fn lacks_server(folder: &GuestFolder, record: &GuestRecord) -> bool {
    record.process.is_alive()
        && record.phase == Phase::Running
        && !ServerState::of(folder, record).complete
        && !server_alive(record)
}
