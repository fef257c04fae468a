//! Checkpoints of a running guest: what the next one can stand on, a guardian for the pause, and the
//! count of written pages that the one after it goes on with.

use crate::attached_guest::AttachedGuest;
use crate::failure::{Failure, GONE};
use crate::guardian::{Guardian, Pauses};
use crate::own_session::own_session;
use crate::reporter::Reporter;
use crate::served_disks;
use crate::tracking::{self, Tracking};
use dewar_checkpoint::{
    Base, CaptureStep, CheckpointOptions, CheckpointOutcome, DirtyStoreOptions, Observer, Step,
    checkpoint,
};
use dewar_codec::Compression;
use dewar_guest::{Guest, Health};
use dewar_guest_qemu::QemuGuest;
use dewar_image::{Dedup, Store};
use dewar_kernel::available_memory;
use dewar_registry::GuestFolder;
use dewar_units::PAGE_BYTES;
use std::path::Path;
use std::time::Duration;

/// How a checkpoint shall be taken.
#[derive(Debug)]
pub struct CheckpointRequest {
    /// Whether every page is stored, also those that an earlier checkpoint has.
    pub full: bool,
    /// The longest that the guest should stand still.
    pub max_pause: Duration,
    /// Most bytes of captured pages that are not written yet; by default half of the guest's RAM.
    pub buffer: Option<u64>,
    /// How pages are compressed.
    pub compression: Compression,
    /// Where a page's content is looked for before it is stored.
    pub dedup: Dedup,
    /// The second store.
    pub dirty: Option<DirtyStoreOptions>,
    /// A name for the checkpoint.
    pub tag: Option<String>,
}

impl Default for CheckpointRequest {
    fn default() -> Self {
        Self {
            full: false,
            max_pause: Duration::from_millis(25),
            buffer: None,
            compression: Compression::Auto,
            dedup: Dedup::Off,
            dirty: None,
            tag: None,
        }
    }
}

/// Takes a checkpoint of a guest that runs, under a guardian. Returns it and how the guest stands.
///
/// # Errors
/// Where no checkpoint was made; the failure says how the guest is.
pub fn take_guarded(
    root: &Path,
    attached: &mut AttachedGuest,
    store: &Store,
    request: CheckpointRequest,
    reporter: &dyn Reporter,
) -> Result<(CheckpointOutcome, Health), Failure> {
    let AttachedGuest { guest, folder, lock } = attached;
    let mut guardian = None;
    let result = take(guest, folder, store, request, reporter, |guest| {
        let url = store.url();
        let started = Guardian::start(root, folder.name(), Some(&url), Some(guest.qmp()), lock)?;
        let pauses = started.pauses()?;
        guardian = Some(started);
        Ok(Some(pauses))
    });
    let Some(guardian) = guardian else {
        return result.map(|taken| (taken, guest.health()));
    };
    let health = guest.health();
    if result.is_ok() || !matches!(health, Health::Unknown(_)) {
        guardian.dismiss();
    }
    let taken = result.map_err(|error| {
        let is_ours = |guest: &str| guest == folder.name();
        let has_one =
            || store.records().is_ok_and(|(all, _)| all.iter().any(|it| is_ours(&it.guest)));
        explain(error, &health, has_one)
    })?;
    Ok((taken, health))
}

/// Tells a guardian of the pause, and passes everything on.
struct Guarded<'p> {
    reporter: &'p dyn Reporter,
    pauses: Option<Pauses>,
    max_pause: Duration,
}

impl Observer for Guarded<'_> {
    fn step(&self, step: Step) {
        if let (Some(pauses), Step::Capture(step)) = (&self.pauses, step) {
            match step {
                CaptureStep::Stopping => pauses.begin(Some(self.max_pause)),
                CaptureStep::Resumed | CaptureStep::PutBack => pauses.end(),
                _ => {}
            }
        }
        self.reporter.step(step);
    }

    fn progress(&self, done: u64, of: u64) {
        self.reporter.progress(done, of);
    }
}

/// Takes a checkpoint and notes what is tracked from it on. `guard` is called
/// before the guest is touched; what it returns is told of the pause.
///
/// # Errors
/// Where no checkpoint was made.
pub fn take(
    guest: &mut QemuGuest,
    folder: &GuestFolder,
    store: &Store,
    request: CheckpointRequest,
    reporter: &dyn Reporter,
    guard: impl FnOnce(&QemuGuest) -> Result<Option<Pauses>, Failure>,
) -> Result<CheckpointOutcome, Failure> {
    let mut machine =
        guest.machine().map_err(|error| Failure::from(error).state("the guest was not touched"))?;
    served_disks::describe(folder, &mut machine)?;
    let tracking = Tracking::load(folder, guest.record())?;
    let unreadable = |why| reporter.warn(&format!("all pages are stored: {why}"));
    let base = if request.full {
        None
    } else {
        tracking::base(store, guest.record(), &guest.ram(), tracking.as_ref(), unreadable)?
    };
    let scratch = folder.make_scratch()?;
    let (is_readable, pauses) = std::thread::scope(|scope| {
        // The guardian takes as long to start as the table to be read.
        let table = scope.spawn(|| match &base {
            Some((image, _)) => image.read_table_ahead(),
            None => Ok(()),
        });
        let pauses = guard(guest)?;
        let table = table.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, Failure>((table, pauses))
    })?;
    let base = match is_readable {
        Ok(()) => base,
        Err(why) => {
            unreadable(why);
            None
        }
    };
    let options = CheckpointOptions {
        base: match &base {
            None => Base::Nothing,
            Some((image, None)) => Base::Compared(image),
            Some((image, Some((tracker, before)))) => Base::Tracked(image, *tracker, before),
        },
        known_tracker: tracking.as_ref().map(|tracking| tracking.tracker),
        max_pause: request.max_pause,
        buffer_bytes: request.buffer.unwrap_or_else(|| default_buffer(guest)),
        compression: request.compression,
        level: ZSTD_LEVEL,
        dedup: request.dedup,
        dirty: request.dirty,
        session: own_session(),
        tag: request.tag,
        machine,
        scratch,
    };
    reporter.stage("guarded");
    if let Some(tracking) = tracking {
        tracking.invalidate(folder)?;
    }
    // One that stood still before may stand still as long as it takes.
    let pauses = pauses.filter(|_| guest.health() == Health::Running);
    let observer = Guarded { reporter, pauses, max_pause: request.max_pause };
    let result = checkpoint(guest, store, options, &observer);
    folder.remove_scratch();
    let taken = result?;
    let since = Some((store.id(), taken.record.id.clone()));
    let process = guest.record().process;
    // Without it the next checkpoint compares; it loses nothing.
    let tracking = Tracking { process, tracker: taken.tracker, since, before: Vec::new() };
    let _ = tracking.save(folder);
    Ok(taken)
}

/// Zstandard's: a fifth faster than level 1, for 6 % more bytes of text and
/// programs.
const ZSTD_LEVEL: i32 = -1;

/// A failed checkpoint, with the state that the guest is in.
fn explain(failure: Failure, health: &Health, has_one: impl FnOnce() -> bool) -> Failure {
    let failure = failure.state(format!("no checkpoint was made; {health}"));
    match health {
        Health::Unknown(_) => failure.attention().advice("'dewar ps' tries to put it right"),
        Health::IoStalled => failure.attention(),
        Health::Gone if has_one() => failure.attention().advice(GONE),
        Health::Gone => failure.attention().advice("there is no checkpoint of it"),
        _ => failure,
    }
}

/// Half of the guest's RAM, but at most half of what the host has free.
fn default_buffer(guest: &QemuGuest) -> u64 {
    let half = guest.ram().pages() * PAGE_BYTES as u64 / 2;
    half.max(64 << 20).min(available_memory().unwrap_or(1 << 30) / 2)
}
