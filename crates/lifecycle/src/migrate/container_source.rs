//! `migrate` of a container: the source's part.
//!
//! Its memory is copied here while it runs, into a file whose pages are sent as those of a virtual machine are. What
//! was written since is copied and sent again, until what is left fits the pause. Then CRIU freezes it and saves what
//! its processes are, the last copies and CRIU's images go there, and it is restored there up to its last step. Until
//! then it is this host's, frozen and silent; who runs it is decided as for a virtual machine.

use super::accepted::{Accepted, MigrateOptions, PostCopy};
use super::container_place::MovingContainer;
use super::moving::{LiveHands, Migrated, Moving, Stages, at_step, is_given};
use super::offered::{LEVEL, instance};
use super::serving::{Serving, wait_for_epoch, why_not_sent};
use crate::container::arriving::programs;
use crate::container::{ContainerGuest, preconditions};
use crate::failure::{Code, Failure};
use crate::guardian::Guardian;
use crate::hot_pages::{self, HOT_PAGES};
use crate::locked_guest::LockedGuest;
use crate::migration::{Hands, MigrationRecord, SourceSide, ToTheDestination};
use crate::reporter::Reporter;
use dewar_guest::{Health, ProcessGuest};
use dewar_guest_oci::{Container, Network, has_own_network};
use dewar_memory::Ram;
use dewar_migrate::{GpuHelp, PageSender, Precopy};
use dewar_registry::{GuestFolder, GuestRecord, Migrations, ProcessId};
use dewar_units::{PAGE_BYTES, format_duration};
use dewar_wire::control::{Stopped, ToDestination};
use dewar_wire::hello::Features;
use dewar_wire::ownership::{Source, SourceEvent};
use serde_json::Value;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long a container stands still at most, as a rule: CRIU saves it, and restores it there, which takes longer the more
/// memory it has. The guardian looks after it when it took twenty times as long.
const LONGEST_PAUSE: Duration = Duration::from_secs(15);
const BYTES_A_SECOND: u64 = 100 << 20;
/// Rounds in which what is written is sent, at most.
const MOST_ROUNDS: usize = 12;
/// Most bytes of hot pages that are told before the container comes.
const MOST_TOLD_BYTES: usize = 1 << 20;

/// Moves a container to another host.
///
/// # Errors
/// Where it does not run there; the failure says where it is.
pub fn migrate_container(
    root: &Path,
    locked: LockedGuest,
    options: &MigrateOptions,
    reporter: &dyn Reporter,
) -> Result<Migrated, Failure> {
    let began = Instant::now();
    let untouched = |failure: Failure| failure.state("the container was not touched");
    require_possible(options).map_err(untouched)?;
    locked.require_alive()?;
    let LockedGuest { folder, record, lock } = locked;
    let gpu = GpuHelp::new(options.gpu).map_err(|error| untouched(error.into()))?;
    let (mut guest, machine, copies) = look_over(&folder, &record, reporter).map_err(untouched)?;
    let accepted = Accepted::offer(record.clone(), &copies, &machine, options, false, reporter);
    let Accepted { process: _process, control, links, checked, .. } =
        accepted.map_err(untouched)?;
    let (session, reached) = (control.session(), began.elapsed());
    let guardian = Guardian::start(root, folder.name(), None, None, &lock)?;
    let pauses = guardian.pauses()?;
    Migrations::new(root).make().map_err(|error| untouched(error.into()))?;
    reporter.stage("guarded");
    let mut sender = PageSender::start(links, options.compression, LEVEL).with_gpu(gpu);
    if control.can(Features::REFERENCES) {
        sender = sender.with_references(machine.memory_bytes / PAGE_BYTES as u64);
    }
    let at_step = |step: &str| at_step(step, &pauses, reporter);
    let side = SourceSide {
        machine: Source::new(),
        session,
        record: MigrationRecord::leaving(folder.name(), &options.peer, instance(&checked)),
        folder: &folder,
        guest: checked,
        control: Some(&control),
        reached: &at_step,
    };
    let mut moving = Moving { began, reached, side, folder: &folder, pauses: &pauses, reporter };
    let moved = run(&mut moving, &mut guest, (&sender, &control), &copies, options);
    let end = moving.end(&mut Live { guest: &mut guest, last: None }, moved);
    if is_given(&moving.side) || !matches!(guest.health(), Health::Unknown(_)) {
        guardian.dismiss();
    }
    let mut moved = end?;
    (moved.total, moved.bytes) = (began.elapsed(), sender.bytes());
    Ok(moved)
}

/// Looks whether a container could leave this host. Returns it, what the other host must know of it, and where the copies
/// of its memory will be.
pub(super) fn look_over<'f>(
    folder: &'f GuestFolder,
    record: &GuestRecord,
    reporter: &dyn Reporter,
) -> Result<(ContainerGuest<'f>, MovingContainer, Ram), Failure> {
    if let Some(container) = &record.container.as_ref().map(Container::of) {
        preconditions(record)?.require(container)?;
        require_no_restart(container)?;
        require_own_network(container, record)?;
    }
    let (guest, container, copies) = ContainerGuest::leaving(folder, record)?;
    let machine = MovingContainer {
        container,
        memory_bytes: crate::container_process::memory_bytes(record),
        hot_pages: hot_pages(&folder.file(HOT_PAGES), reporter),
    };
    Ok((guest, machine, copies))
}

/// That podman would not start it again when it has ended here.
fn require_no_restart(container: &Container) -> Result<(), Failure> {
    let Some(podman) = &container.podman else { return Ok(()) };
    let Some(policy) = podman.restart_policy(&container.id)? else { return Ok(()) };
    let what = format!(
        "podman would start it again here when it has gone: its restart policy is '{policy}'"
    );
    Err(Failure::new(Code::Unsupported, what).advice("'podman update --restart no' changes that"))
}

pub(super) fn require_possible(options: &MigrateOptions) -> Result<(), Failure> {
    let asked = [
        ("--postcopy", options.post_copy != PostCopy::Never),
        ("--throttle", options.throttle.is_some()),
        ("--with-disks", options.disks.copy),
        ("--disk-map", !options.disks.map.is_empty()),
    ];
    match asked.iter().find(|(_, is_asked)| *is_asked) {
        Some((option, _)) => {
            Err(Failure::new(Code::Usage, format!("'{option}' is for virtual machines")))
        }
        None => Ok(()),
    }
}

/// That nobody else has its network, which is closed while it moves, and stays so here.
fn require_own_network(container: &Container, record: &GuestRecord) -> Result<(), Failure> {
    if !has_own_network(&container.config()?) {
        return Ok(());
    }
    let mut others = Network::of(record.process.pid).users();
    // Looked at last: it may have started one meanwhile. One that has ended is no hindrance.
    let own = container.pids()?;
    others.retain(|pid| !own.contains(pid) && ProcessId::of(*pid).is_some());
    if others.is_empty() {
        return Ok(());
    }
    let what = format!("its network is that of other processes, too: {}", programs(&others));
    Err(Failure::new(Code::Unsupported, what).advice("containers of a pod do not move one by one"))
}

/// What is known of the pages of files that it uses, if that is short enough to be told before.
fn hot_pages(path: &Path, reporter: &dyn Reporter) -> Option<Value> {
    let known = hot_pages::read(path).unwrap_or_else(|failure| {
        reporter.warn(&failure.whole());
        None
    });
    let known = serde_json::to_value(known?).ok()?;
    (known.to_string().len() <= MOST_TOLD_BYTES).then_some(known)
}

/// From the first page to the other host's word that the container runs there.
fn run(
    moving: &mut Moving<'_>,
    guest: &mut ContainerGuest<'_>,
    (sender, control): (&PageSender, &ToTheDestination),
    copies: &Ram,
    options: &MigrateOptions,
) -> Result<Migrated, Failure> {
    let (reporter, pauses, pages) = (moving.reporter, moving.pauses, copies.pages());
    let memory_bytes = guest.memory_bytes();
    let arrived = |epoch| wait_for_epoch(control, epoch);
    let mut precopy = Precopy::of_copies(copies, sender, &arrived);
    reporter.stage("sending memory");
    let mut rounds = Rounds { limit: options.max_downtime, sent: Vec::new() };
    let mut memory_sent = Duration::ZERO;
    while !rounds.fit()? {
        let began = Instant::now();
        let written = guest.copy_round(pages)?;
        precopy.send(&written).map_err(|error| why_not_sent(control, error))?;
        rounds.sent.push((written.count(), began.elapsed()));
        if rounds.sent.len() == 1 {
            memory_sent = moving.began.elapsed();
            reporter.stage("sending changes");
        }
        reporter.predicted(began.elapsed(), written.count());
    }
    reporter.stage("moving the container");
    let stopping = Instant::now();
    let mut state_bytes = 0;
    let last = |guest: &mut ContainerGuest<'_>| {
        pauses.begin(Some(LONGEST_PAUSE + Duration::from_secs(memory_bytes / BYTES_A_SECOND)));
        reporter.reached("stopping");
        let last = guest.stop_to_leave(pages)?;
        reporter.reached("captured");
        precopy.send_last(&last.written)?;
        state_bytes = last.archive.len() as u64;
        let epoch = precopy.epoch();
        let machine = Value::Null;
        let stopped = Stopped { epoch, state_bytes, owed_bytes: 0, was_running: true, machine };
        control.send(&ToDestination::Stopped(Box::new(stopped)))?;
        Ok(control.send_state(&last.archive)?)
    };
    let mut hands = Live { guest, last: Some(Box::new(last)) };
    moving.side.on(SourceEvent::Converged, &mut hands)?;
    reporter.reached("sent");
    let serving = Serving { control, ram: Ok(copies), pages, sender, reporter };
    let (runs_at, _) = moving.hand_over(&mut hands, &serving)?;
    drop(hands);
    Ok(Migrated {
        stages: Stages {
            reached: moving.reached,
            memory_sent,
            stopped: stopping - moving.began,
            runs_there: runs_at - moving.began,
        },
        total: Duration::ZERO,
        gap: runs_at - stopping,
        pages: precopy.pages(),
        bytes: 0,
        state_bytes,
        epochs: rounds.sent.iter().skip(1).map(|(pages, _)| *pages).collect(),
        post_copy_pages: 0,
        same_pages: sender.same_pages(),
        delta_pages: sender.delta_pages(),
        gpu: sender.gpu_used(),
    })
}

/// The rounds so far: pages, and how long each took to be copied and sent.
struct Rounds {
    limit: Duration,
    sent: Vec<(u64, Duration)>,
}

impl Rounds {
    /// Whether what a container writes in a round is copied and sent within the limit.
    fn fit(&self) -> Result<bool, Failure> {
        let [_, .., (pages, took)] = self.sent.as_slice() else { return Ok(false) };
        if *took <= self.limit {
            return Ok(true);
        }
        if self.sent.len() < MOST_ROUNDS {
            return Ok(false);
        }
        let what = format!(
            "the container writes faster than the connection sends: after {} rounds {pages} pages are left, which \
             take {}, where {} are allowed",
            self.sent.len(),
            format_duration(*took),
            format_duration(self.limit),
        );
        let more = (took.as_secs_f64() * 1.5).max(0.1);
        Err(Failure::new(Code::Failed, what).advice(format!(
            "'--max-downtime {more:.1}s' allows it; or try when the container has less to do"
        )))
    }
}

/// The container in the hands of the command that moves it.
struct Live<'l, 'f> {
    guest: &'l mut ContainerGuest<'f>,
    /// Stops it and sends the rest, while that may still come.
    last: Option<StopAndSend<'l, 'f>>,
}

/// What stops a container and sends what was written last, and what its processes are.
type StopAndSend<'l, 'f> = Box<dyn FnOnce(&mut ContainerGuest<'f>) -> Result<(), Failure> + 'l>;

impl Hands for Live<'_, '_> {
    fn stop(&mut self) -> Result<(), Failure> {
        self.last.take().map_or(Ok(()), |last| last(self.guest))
    }

    fn ensure_stopped(&mut self) -> Result<(), Failure> {
        self.guest.require_stopped()
    }

    fn resume(&mut self) -> Result<(), Failure> {
        self.guest.stay()
    }

    fn end(&mut self) -> Result<(), Failure> {
        self.guest.leave()
    }
}

impl LiveHands for Live<'_, '_> {
    fn health(&mut self) -> Health {
        self.guest.health()
    }

    fn hands(&mut self) -> &mut dyn Hands {
        self
    }
}
