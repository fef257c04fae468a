//! A checkpoint of a container.

use super::guest::ContainerGuest;
use crate::failure::{Failure, GONE};
use crate::guardian::{Guardian, Pauses};
use crate::locked_guest::LockedGuest;
use crate::own_session::own_session;
use crate::reporter::Reporter;
use dewar_checkpoint::{CaptureStep, Observer, ProcessCheckpoint, Step, checkpoint_processes};
use dewar_codec::Compression;
use dewar_guest::{Health, ProcessGuest};
use dewar_guest_oci::{Container, is_container};
use dewar_image::{Dedup, ImageReader, Record, Store};
use std::path::Path;
use std::time::Duration;

/// Zstandard's: see [`crate::checkpoint`].
const ZSTD_LEVEL: i32 = -1;
/// How long saving a container takes while it stands still, at most as a rule. The guardian lets it run when it took
/// twenty times as long.
const LONGEST_PAUSE: Duration = Duration::from_secs(6);

/// How a checkpoint of a container shall be taken.
#[derive(Debug)]
pub struct ContainerCheckpoint {
    /// Whether every page is stored, also those that an earlier checkpoint has.
    pub full: bool,
    /// How pages are compressed.
    pub compression: Compression,
    /// Where a page's content is looked for before it is stored.
    pub dedup: Dedup,
    /// A name for the checkpoint.
    pub tag: Option<String>,
}

/// Takes a checkpoint of a container that runs, under a guardian.
///
/// # Errors
/// Where no checkpoint was made; the failure says how the container is.
pub fn take(
    root: &Path,
    guest: &LockedGuest,
    store: &Store,
    request: ContainerCheckpoint,
    reporter: &dyn Reporter,
) -> Result<Record, Failure> {
    let untouched = |failure: Failure| failure.state("the container was not touched");
    let LockedGuest { folder, record, lock } = guest;
    let known = record.container.as_ref().map(Container::of);
    let missing = super::preconditions(record)?;
    if let Some(container) = &known {
        missing.require(container).map_err(|error| untouched(error.into()))?;
    }
    let (mut captured, description) = ContainerGuest::new(folder, record).map_err(untouched)?;
    let base = match request.full {
        true => None,
        false => newest(store, folder.name())?,
    };
    let guardian = Guardian::start(root, folder.name(), Some(&store.url()), None, lock)?;
    let options = ProcessCheckpoint {
        base: base.as_ref(),
        compression: request.compression,
        level: ZSTD_LEVEL,
        dedup: request.dedup,
        session: own_session(),
        tag: request.tag,
        machine: description.to_json(),
        scratch: folder.make_scratch()?,
    };
    let observer = Guarded { reporter, pauses: guardian.pauses()? };
    reporter.stage("guarded");
    let result = checkpoint_processes(&mut captured, store, options, &observer);
    folder.remove_scratch();
    let health = captured.health();
    if result.is_ok() || !matches!(health, Health::Unknown(_)) {
        guardian.dismiss();
    }
    result.map_err(|error| {
        let failure = Failure::from(error).state(format!("no checkpoint was made; {health}"));
        match health {
            Health::Unknown(_) => failure.attention().advice("'dewar ps' tries to put it right"),
            Health::Gone => failure.attention().advice(GONE),
            _ => failure,
        }
    })
}

/// The newest checkpoint of a container, where it is whole.
fn newest(store: &Store, name: &str) -> Result<Option<ImageReader>, Failure> {
    let (records, _) = store.records()?;
    let is_one = |record: &&Record| record.guest == name && is_container(&record.machine);
    let Some(record) = records.iter().rev().find(is_one) else { return Ok(None) };
    // One that cannot be opened is no base; the checkpoint is a full one then.
    let image = store.open_image(&record.id).ok();
    Ok(image.filter(|image| image.require_segments().is_ok()))
}

/// Tells a guardian of the pause, and passes everything on.
struct Guarded<'p> {
    reporter: &'p dyn Reporter,
    pauses: Pauses,
}

impl Observer for Guarded<'_> {
    fn step(&self, step: Step) {
        match step {
            Step::Capture(CaptureStep::Stopping) => self.pauses.begin(Some(LONGEST_PAUSE)),
            Step::Capture(CaptureStep::Resumed | CaptureStep::PutBack) => self.pauses.end(),
            _ => {}
        }
        self.reporter.step(step);
    }

    fn progress(&self, done: u64, of: u64) {
        self.reporter.progress(done, of);
    }
}
