//! `migrate`: the source's part.

use super::accepted::{Accepted, MigrateOptions, PostCopy};
use super::disks::DiskCopies;
use super::flow::FlowMeter;
use super::moving::{LiveHands, Migrated, Moving, Stages, at_step, is_given};
use super::moving_machine::MovingState;
use super::offered::{LEVEL, instance};
use super::serving::{Serving, wait_for_epoch, why_not_sent};
use super::slow_down;
use crate::attached_guest::AttachedGuest;
use crate::failure::{Code, Failure};
use crate::guardian::Guardian;
use crate::migration::MigrationRecord;
use crate::migration::ToTheDestination;
use crate::migration::{Hands, SourceSide};
use crate::reporter::Reporter;
use crate::served_disks;
use crate::tracking::Tracking;
use dewar_capture::{CaptureStep, Convergence, Epochs, converge, cores};
use dewar_guest::{Guest, Health};
use dewar_guest_qemu::QemuGuest;
use dewar_guest_qemu::freeze::{end_process, forwarded, stop_and_save};
use dewar_memory::{Ram, WriteTracker};
use dewar_migrate::{GpuHelp, MigrateError, PageSender, Precopy};
use dewar_registry::{GuestFolder, GuestRecord, Migrations};
use dewar_units::format_duration;
use dewar_wire::control::{Stopped, ToDestination};
use dewar_wire::hello::Features;
use dewar_wire::ownership::{Source, SourceEvent};
use std::path::Path;
use std::time::{Duration, Instant};

/// What a gap has beside the last pages: the device state is saved, sent and loaded, and three records are
/// written to disk.
const FIXED_GAP: Duration = Duration::from_millis(20);

/// Moves a guest to another host.
///
/// # Errors
/// Where it does not run there; the failure says where it is.
pub fn migrate(
    root: &Path,
    attached: AttachedGuest,
    options: &MigrateOptions,
    reporter: &dyn Reporter,
) -> Result<Migrated, Failure> {
    let began = Instant::now();
    let AttachedGuest { mut guest, folder, lock } = attached;
    let untouched = |failure: Failure| failure.state("the guest was not touched");
    let gpu = GpuHelp::new(options.gpu).map_err(|error| untouched(error.into()))?;
    let accepted = Accepted::reach(&mut guest, &folder, options, false, reporter);
    let Accepted { process: _process, control, links, disks, tunnel, checked } =
        accepted.map_err(untouched)?;
    let (session, reached) = (control.session(), began.elapsed());
    let guardian = Guardian::start(root, folder.name(), None, Some(guest.qmp()), &lock)?;
    let pauses = guardian.pauses()?;
    Migrations::new(root).make().map_err(|error| untouched(error.into()))?;
    reporter.stage("guarded");
    let mut sender = PageSender::start(links, options.compression, LEVEL).with_gpu(gpu);
    if control.can(Features::REFERENCES) {
        sender = sender.with_references(guest.ram().pages());
    }
    let at_step = |step: &str| at_step(step, &pauses, reporter);
    let side = SourceSide {
        machine: Source::new(),
        session,
        record: MigrationRecord::leaving(folder.name(), &options.peer, instance(&checked)),
        folder: &folder,
        // Not as `checked` says: it may stay, and its own command line is its user's.
        guest: GuestRecord { ram: checked.ram.clone(), ..guest.record().clone() },
        control: Some(&control),
        reached: &at_step,
    };
    let mut moving = Moving { began, reached, side, folder: &folder, pauses: &pauses, reporter };
    let copies = match options.disks.copy {
        true => DiskCopies::begin(&mut guest, &folder, disks, &tunnel, session).map(Some),
        false => Ok(None),
    };
    let moved = copies.and_then(|copies| {
        let way = PagesWay { sender: &sender, control: &control, copies: copies.as_ref() };
        let moved = moving.run(&mut guest, &checked, &way, options);
        // Where it failed, what QEMU has under way there is not waited for.
        drop(copies);
        moved
    });
    let end = moving.end(&mut Live { guest: &mut guest, last: None }, moved);
    if is_given(&moving.side) || !matches!(guest.health(), Health::Unknown(_)) {
        guardian.dismiss();
    }
    let mut moved = end?;
    (moved.total, moved.bytes) = (began.elapsed(), sender.bytes());
    Ok(moved)
}

/// What leads to the other host.
struct PagesWay<'w> {
    sender: &'w PageSender,
    control: &'w ToTheDestination,
    copies: Option<&'w DiskCopies>,
}

impl Moving<'_> {
    /// From the first page to the other host's word that the guest runs there.
    fn run(
        &mut self,
        guest: &mut QemuGuest,
        checked: &GuestRecord,
        way: &PagesWay<'_>,
        options: &MigrateOptions,
    ) -> Result<Migrated, Failure> {
        let PagesWay { sender, control, copies } = *way;
        let ram = guest.ram();
        let tracker = track(guest, self.folder, &ram)?;
        guest.drain()?;
        self.reporter.stage("sending memory");
        let arrived = |epoch| wait_for_epoch(control, epoch);
        let mut precopy = Precopy::new(&ram, &tracker, sender, &arrived);
        let pages = ram.pages();
        let flow = FlowMeter::start(self.reporter, sender, pages);
        let sent = precopy.send_standing(&|done| flow.progress(done));
        sent.map_err(|error| why_not_sent(control, error))?;
        let memory_sent = self.began.elapsed();
        if let Some(copies) = copies {
            self.reporter.stage("copying disks");
            copies.converge(guest, options.max_downtime / 2, control, self.reporter)?;
        }
        let mut epochs = Epochs::new(pages, Instant::now());
        let all_at_once = match options.post_copy {
            PostCopy::Always => false,
            _ => self.converge(&mut epochs, &mut precopy, guest, &tracker, control, options)?,
        };
        if let Some(copies) = copies {
            // It may have written more while its memory was sent.
            copies.converge(guest, options.max_downtime / 2, control, self.reporter)?;
        }
        let mirrors = copies.map_or(0, DiskCopies::count);
        self.reporter.stage("moving the guest");
        let stopping = Instant::now();
        let epochs = epochs.all().iter().map(|epoch| epoch.dirty_pages).collect();
        let mut state_bytes = 0;
        let (pauses, folder) = (self.pauses, self.folder);
        let last = |guest: &mut QemuGuest| {
            let was_running = guest.is_running()?;
            let forwards = forwarded(guest).ok();
            pauses.begin(Some(options.max_downtime));
            // Not before: what is flushed and looked at before it is stopped takes time.
            let state = stop_and_save(guest, checked, mirrors, || pauses.end_throttle())?;
            // Should it stay, its next write takes them again.
            served_disks::release_locks(folder)?;
            let dirty = tracker.look(cores()).map_err(MigrateError::from)?;
            let owed = match all_at_once || dirty.is_empty() {
                true => Vec::new(),
                false => dirty.to_bytes(),
            };
            if owed.is_empty() {
                precopy.send_last(&dirty)?;
            }
            state_bytes = state.len() as u64;
            let machine = serde_json::to_value(MovingState { forwards })
                .map_err(|error| Failure::new(Code::Failed, error.to_string()))?;
            let (epoch, owed_bytes) = (precopy.epoch(), owed.len() as u64);
            let stopped = Stopped { epoch, state_bytes, owed_bytes, was_running, machine };
            control.send(&ToDestination::Stopped(Box::new(stopped)))?;
            control.send_state(&state)?;
            Ok(control.send_state(&owed)?)
        };
        let mut hands = Live { guest, last: Some(Box::new(last)) };
        self.side.on(SourceEvent::Converged, &mut hands)?;
        self.reporter.reached("sent");
        let reporter = self.reporter;
        let serving = Serving { control, ram: Ok(&ram), pages, sender, reporter };
        let (runs_at, post_copy_pages) = self.hand_over(&mut hands, &serving)?;
        drop(hands);
        Ok(Migrated {
            stages: Stages {
                reached: self.reached,
                memory_sent,
                stopped: stopping - self.began,
                runs_there: runs_at - self.began,
            },
            total: Duration::ZERO,
            gap: runs_at - stopping,
            pages: precopy.pages() + post_copy_pages,
            bytes: 0,
            state_bytes,
            epochs,
            post_copy_pages,
            same_pages: sender.same_pages(),
            delta_pages: sender.delta_pages(),
            gpu: sender.gpu_used(),
        })
    }

    /// Sends what the guest writes until what is left fits the pause; says whether it does, or else a
    /// post-copy is to follow.
    fn converge(
        &self,
        epochs: &mut Epochs,
        precopy: &mut Precopy<'_>,
        guest: &mut QemuGuest,
        tracker: &WriteTracker,
        control: &ToTheDestination,
        options: &MigrateOptions,
    ) -> Result<bool, Failure> {
        self.reporter.stage("sending changes");
        let limit = options.max_downtime.saturating_sub(FIXED_GAP);
        let reached = |step: CaptureStep| {
            self.reporter.reached(step.name());
            if let CaptureStep::Epoch { dirty_pages, pause: Some(pause), .. } = step {
                self.reporter.predicted(pause + FIXED_GAP, dirty_pages);
            }
        };
        let mut send_changes = |guest: &mut QemuGuest| {
            let found = converge(epochs, precopy, guest, tracker, limit, &reached);
            found.map_err(|error| why_not_sent(control, error))
        };
        let mut found = send_changes(guest)?;
        for share in slow_down::steps(options.throttle) {
            if found.fits {
                break;
            }
            self.reporter.stage(&format!("slowed down by {share} %"));
            slow_down::slow_down(guest, self.pauses, share)?;
            self.reporter.reached("slowed down");
            found = send_changes(guest)?;
        }
        match found.fits || options.post_copy == PostCopy::Auto {
            true => Ok(found.fits),
            false => Err(does_not_converge(&found, epochs, options)),
        }
    }
}

/// Begins to record the guest's writes.
fn track(guest: &mut QemuGuest, folder: &GuestFolder, ram: &Ram) -> Result<WriteTracker, Failure> {
    let known = Tracking::load(folder, guest.record())?;
    if let Some(known) = &known {
        known.invalidate(folder)?;
    }
    let origin = guest.uffd_origin()?;
    let known = known.map(|known| known.tracker);
    let begun = WriteTracker::attach(guest.process(), ram, origin, known).and_then(|tracker| {
        tracker.arm()?;
        let identity = tracker.identity()?;
        Ok((tracker, identity))
    });
    guest.close_uffd_device();
    let (tracker, identity) = begun.map_err(MigrateError::from)?;
    // Should the guest stay, its next checkpoint takes this tracker up.
    let process = guest.record().process;
    let noted = Tracking { process, tracker: identity, since: None, before: Vec::new() };
    noted.save(folder)?;
    Ok(tracker)
}

fn does_not_converge(found: &Convergence, epochs: &Epochs, options: &MigrateOptions) -> Failure {
    let pause = found.pause + FIXED_GAP;
    let what = format!(
        "the guest writes faster than the connection sends: after {} epochs {} pages are left, and it \
         would stand still for {}, where {} are allowed",
        epochs.all().len(),
        found.dirty_pages,
        format_duration(pause),
        format_duration(options.max_downtime),
    );
    let more = (pause.as_secs_f64() * 1.5).max(0.1);
    let slower = match options.throttle {
        Some(_) => "",
        None => " '--throttle' slows it down meanwhile;",
    };
    Failure::new(Code::Failed, what).advice(format!(
        "'--postcopy=auto' lets it run there before all has arrived;{slower} '--max-downtime \
         {more:.1}s' allows it; or try when the guest has less to do"
    ))
}

/// The guest in the hands of the command that moves it.
struct Live<'l> {
    guest: &'l mut QemuGuest,
    /// Stops it and sends the rest, while that may still come.
    last: Option<StopAndSend<'l>>,
}

/// What stops a guest and sends what was written last and its device state.
type StopAndSend<'l> = Box<dyn FnOnce(&mut QemuGuest) -> Result<(), Failure> + 'l>;

impl Hands for Live<'_> {
    fn stop(&mut self) -> Result<(), Failure> {
        self.last.take().map_or(Ok(()), |last| last(self.guest))
    }

    fn ensure_stopped(&mut self) -> Result<(), Failure> {
        Ok(self.guest.ensure_stopped()?)
    }

    fn resume(&mut self) -> Result<(), Failure> {
        Ok(self.guest.rollback()?)
    }

    fn end(&mut self) -> Result<(), Failure> {
        let record = self.guest.record().clone();
        Ok(end_process(self.guest, &record)?)
    }
}

impl LiveHands for Live<'_> {
    fn health(&mut self) -> Health {
        self.guest.health()
    }

    fn hands(&mut self) -> &mut dyn Hands {
        self
    }
}
