use crate::args::StopArgs;
use crate::context::{Context, LockedGuest, connect, qmp_failure};
use crate::failure::{Code, Failure};
use dewar_guest_qemu::launch::kill;
use dewar_guest_qemu::{Qmp, QmpError, RunState};
use dewar_registry::{GuestRecord, Kept, Phase};
use serde_json::json;
use std::time::{Duration, Instant};

/// How long QEMU itself may take to end, and to answer that it will.
const QUIT_WITHIN: Duration = Duration::from_secs(2);
const SERVER_WITHIN: Duration = Duration::from_secs(3);
/// A guest that has stood still for so long does not hear of its power button.
const STANDS_STILL: Duration = Duration::from_secs(3);
/// How often it is looked whether the guest is off.
const LOOK: Duration = Duration::from_millis(100);

pub fn run(context: &Context, args: StopArgs) -> Result<(), Failure> {
    let mut held = match args.now {
        true => context.hold_to_end(&args.name)?,
        false => context.hold(&args.name)?,
    };
    if held.record.phase == Phase::Frozen && held.record.frozen.is_some() {
        return give_up(context, &mut held, args.yes);
    }
    let by_itself = if args.now {
        false
    } else {
        held.require_alive()?;
        power_down(&held.record, args.timeout)?
    };
    if args.now && !held.record.process.is_alive() {
        // What a dead command left may be all that there is of it.
        held.end()?;
        held.require_alive()?;
    }
    held.end()?;
    if held.record.phase == Phase::Frozen && held.record.frozen.is_some() {
        // Its thaw was cut short: what was kept of it is there, and nobody said to lose it.
        return give_up(context, &mut held, args.yes);
    }
    held.folder.remove_ram(&held.record)?;
    let how = if by_itself { "shut itself down" } else { "was ended" };
    context.print(
        json!({"name": args.name, "shut_itself_down": by_itself}),
        &format!("{} {how}", args.name),
    );
    Ok(())
}

/// Gives up what is kept of a frozen guest, which then is one that has ended.
fn give_up(context: &Context, held: &mut LockedGuest, yes: bool) -> Result<(), Failure> {
    let name = held.record.name.clone();
    if !yes {
        return Err(would_lose(&held.record).advice(format!(
            "'dewar thaw {name}' lets it go on; 'dewar stop {name} --yes' gives it up"
        )));
    }
    let lost = loss(&held.record);
    held.give_up_frozen()?;
    context.print(
        json!({"name": name, "shut_itself_down": false, "lost": lost}),
        &format!("{name} was given up: {lost}"),
    );
    Ok(())
}

impl LockedGuest {
    /// Makes a guest that is frozen one that has ended.
    pub fn give_up_frozen(&mut self) -> Result<(), Failure> {
        // A QEMU that was to thaw it, or to end when it was frozen.
        self.end()?;
        self.record.phase = Phase::Running;
        self.record.frozen = None;
        self.record.start_pending = false;
        self.folder.set_record(&self.record)?;
        self.folder.remove_kept(&self.record.ram);
        Ok(self.folder.remove_ram(&self.record).map(drop)?)
    }
}

/// What is lost with a frozen guest that is given up.
pub fn loss(record: &GuestRecord) -> String {
    match record.frozen.as_ref().map(|frozen| &frozen.kept) {
        Some(Kept::InStore { image, .. }) => {
            format!("nothing: checkpoint {image} has all of it, and stays")
        }
        _ => "its memory as it was when it was frozen, and what it did since its last checkpoint"
            .to_owned(),
    }
}

/// That a guest is frozen, and what would be lost with it.
pub fn would_lose(record: &GuestRecord) -> Failure {
    let what = format!("guest '{}' is frozen; what would be lost is {}", record.name, loss(record));
    Failure::new(Code::Failed, what).state("it stays as it is")
}

/// Presses the power button; says whether the guest obeyed. One that is off already, or
/// that stands still and so cannot hear of it, is not waited for.
fn power_down(record: &GuestRecord, timeout: Duration) -> Result<bool, Failure> {
    let deadline = Instant::now() + timeout;
    let failed = |error: &QmpError| qmp_failure(record, error);
    let mut qmp = connect(record)?;
    if RunState::of(&mut qmp).map_err(|error| failed(&error))?.is_running() {
        qmp.execute("system_powerdown", json!({})).map_err(|error| failed(&error))?;
    }
    let mut still = None;
    loop {
        match RunState::of(&mut qmp) {
            Ok(state) if state.is_off() => return Ok(true),
            Ok(_) if Instant::now() > deadline => return Ok(false),
            Ok(state) if state.is_running() || state.word() == "suspended" => still = None,
            // Somebody may hold it for a moment only, to save it say.
            Ok(_) if still.get_or_insert_with(Instant::now).elapsed() > STANDS_STILL => {
                return Ok(false);
            }
            Ok(_) => {}
            // A QEMU that is ending closes its socket before it is gone.
            Err(_) => {
                let left = deadline.saturating_duration_since(Instant::now());
                return Ok(record.process.ends_within(left));
            }
        }
        if record.process.ends_within(LOOK) {
            return Ok(true);
        }
    }
}

/// Waits for the end of an ended guest's page server, which reads a checkpoint
/// that could not be deleted meanwhile. One that waits for a far store takes
/// longer, and harms nobody else; one that somebody stopped is ended.
pub fn await_server(record: &GuestRecord) {
    if let Some(server) = record.server {
        if server.is_halted() || !server.ends_within(SERVER_WITHIN) && server.is_halted() {
            kill(&server);
        }
    }
}

/// Ends QEMU: by its own command, and by SIGKILL where it does not obey at once.
pub fn end(record: &GuestRecord) -> Result<(), Failure> {
    if !record.process.is_alive() {
        return Ok(());
    }
    let asked = Qmp::connect_to_within(&record.qmp, &record.process, QUIT_WITHIN)
        .and_then(|mut qmp| qmp.quit(QUIT_WITHIN));
    if asked.is_ok() && record.process.ends_within(QUIT_WITHIN) {
        return Ok(());
    }
    if kill(&record.process) {
        return Ok(());
    }
    let what = format!("process {} of '{}' does not end", record.process.pid, record.name);
    Err(Failure::new(Code::Attention, what)
        .state("it was killed, and the kernel still waits for it: for a disk, as a rule")
        .advice("try again when it is gone; its memory and its disks were left alone"))
}
