//! What is on disk of a reboot of the host.

use super::bridges::BridgedTap;
use crate::clock::now_ms;
use crate::failure::Failure;
use crate::host::Host;
use dewar_hostreboot::DaxMount;
use dewar_registry::{GuestRecord, Phase, ProcessId};
use dewar_units::format_duration;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const FILE: &str = "host-reboot.json";

/// How far a reboot of the host has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Guests are being frozen.
    Freezing,
    /// All are frozen, and the new kernel is about to start.
    Leaving,
    /// The init system goes on with it, after it has ended all processes.
    HandedOver,
    /// It runs, and each guest was thawed, or it is known why not.
    Back,
}

/// A reboot of the host: what was kept, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The command; its boot is that of the old kernel.
    pub command: ProcessId,
    /// How far it came.
    pub stage: Stage,
    /// Whether the init system starts the new kernel, after it has ended all processes.
    pub by_init: bool,
    /// The new kernel's version.
    pub kernel: String,
    /// The file systems that the guests' memory lies on.
    pub mounts: Vec<DaxMount>,
    /// The guests that are kept.
    pub guests: Vec<KeptGuest>,
    /// Guests that are frozen into the default store, and are to go on.
    #[serde(default)]
    pub others: Vec<String>,
    /// How many thousand times a second the time stamp counter of a guest counted.
    #[serde(default)]
    pub tsc_khz: Option<u32>,
    /// By how many millionths the new kernel found it to count faster.
    #[serde(default)]
    pub tsc_faster_ppm: Option<i64>,
    /// When it came how far.
    #[serde(flatten)]
    pub times: Times,
}

/// When a reboot came how far. Moments are in milliseconds since 1970.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Times {
    /// When the first guest was stopped.
    pub stopped_ms: Option<u64>,
    /// When the old kernel was left.
    pub left_ms: Option<u64>,
    /// When the new kernel's first command of ours began.
    pub arrived_ms: Option<u64>,
    /// How long that kernel had run by then, in milliseconds.
    pub booted_for_ms: Option<u64>,
    /// When the last guest was back.
    pub back_ms: Option<u64>,
}

/// A guest that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptGuest {
    /// Its name.
    pub name: String,
    /// Its RAM files, where the kernel itself keeps them, in the order of its record, and each one's token.
    #[serde(default)]
    pub tokens: Vec<u64>,
    /// Its taps that were in bridges.
    #[serde(default)]
    pub taps: Vec<BridgedTap>,
    /// The checkpoint that was taken of it, for the case that its memory is lost.
    #[serde(default)]
    pub fallback: Option<String>,
    /// What became of it.
    #[serde(default)]
    pub outcome: Option<Outcome>,
}

/// What became of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It goes on where it was, after so long.
    Back {
        /// From its stop to its start, by the host's clock.
        outage_ms: u64,
        /// Its QEMU.
        process: ProcessId,
    },
    /// It was found running, not frozen: another command let it go on, or this one after another had died.
    RunsAlready {
        /// Its QEMU.
        process: ProcessId,
    },
    /// Its memory was lost, and it goes on from a checkpoint.
    Restored {
        /// Why.
        lost: String,
        /// Its QEMU.
        process: ProcessId,
    },
    /// It does not run.
    Failed {
        /// Why, and what to do.
        why: String,
    },
}

impl Outcome {
    /// Whether the guest runs as if nothing had been.
    pub fn is_as_it_was(&self) -> bool {
        match self {
            Self::Back { .. } | Self::RunsAlready { .. } => true,
            Self::Restored { .. } | Self::Failed { .. } => false,
        }
    }

    /// Whether it runs, be it from a checkpoint.
    pub fn runs(&self) -> bool {
        match self {
            Self::Back { .. } | Self::RunsAlready { .. } | Self::Restored { .. } => true,
            Self::Failed { .. } => false,
        }
    }
}

impl Note {
    /// The last one of this host; `None` where there was none.
    ///
    /// # Errors
    /// Where it cannot be read.
    pub fn load(host: &Host) -> Result<Option<Self>, Failure> {
        Ok(host.registry.read(FILE)?)
    }

    /// Writes it, to disk.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn save(&self, host: &Host) -> Result<(), Failure> {
        Ok(host.registry.write(FILE, self)?)
    }

    /// Removes it, for good.
    ///
    /// # Errors
    /// Where it cannot be removed.
    pub fn remove(host: &Host) -> Result<(), Failure> {
        Ok(host.registry.remove(FILE)?)
    }

    /// Whether the kernel that was to be replaced runs still.
    pub fn is_before_reboot(&self) -> bool {
        self.stage != Stage::Back && self.command.is_of_this_boot()
    }
}

/// What is to be told of a guest since the host was last rebooted under it; with how long it was away, where it is
/// as it was then.
pub fn since_reboot(note: &Note, record: &GuestRecord) -> Option<(String, Option<Duration>)> {
    let kept = note.guests.iter().find(|it| it.name == record.name)?;
    match kept.outcome.as_ref()? {
        Outcome::Back { outage_ms, process } if process.is_same(&record.process) => {
            let outage = Duration::from_millis(*outage_ms);
            let away = format_duration(outage);
            Some((format!("kept across the host's reboot, away for {away}"), Some(outage)))
        }
        Outcome::RunsAlready { process } if process.is_same(&record.process) => {
            Some(("found running after the host's reboot".to_owned(), None))
        }
        Outcome::Failed { why } if record.phase == Phase::Frozen => {
            Some((format!("not back since the host's reboot: {why}"), None))
        }
        Outcome::Restored { lost, process } if process.is_same(&record.process) => {
            let text = format!("from its checkpoint since the host's reboot: {lost}");
            Some((text, None))
        }
        Outcome::Back { .. }
        | Outcome::RunsAlready { .. }
        | Outcome::Restored { .. }
        | Outcome::Failed { .. } => None,
    }
}

/// How long ago a moment was that a guest's record tells of.
pub fn since(stopped_ms: Option<u64>) -> u64 {
    stopped_ms.map_or(0, |stopped| now_ms().saturating_sub(stopped))
}
