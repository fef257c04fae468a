//! A migration whose connection was lost after the guest was given away: who runs the guest is asked
//! for again, or a person says.

use super::offered::LEVEL;
use super::owed::{OwedService, hear};
use super::serving::Serving;
use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::locked_guest::LockedGuest;
use crate::migration::owed_pages::{is_partial, ram_of_files};
use crate::migration::{DestinationSide, ToTheSource};
use crate::migration::{MigrationRecord, is_elsewhere, migration_of};
use crate::migration::{Peer, SourceSide, hands_by_record};
use crate::recovery::migration::{arriving_side, is_given, recover_lost, refuse};
use crate::reporter::Reporter;
use dewar_codec::Compression;
use dewar_guest_qemu::Qmp;
use dewar_migrate::{FrameWriter, Heard, MigrateError, PageSender};
use dewar_registry::{Migrations, Phase};
use dewar_units::PAGE_BYTES;
use dewar_wire::control::{CONTROL, ToDestination, ToSource};
use dewar_wire::frame::Side;
use dewar_wire::ownership::{
    Destination, DestinationEvent, DestinationRecord, FromSource, Source, SourceEvent, SourceRecord,
};
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

/// How long a `receive` that has lost its connection may take to see that.
const SEES_WITHIN: Duration = Duration::from_secs(30);

/// What a person wants to become of a guest that was given away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// That it goes on, at the other host if that has it.
    Forward,
    /// That it stays, if the other host has not let it run.
    Back,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resumed {
    /// It runs at the other host, and nothing is left of it here.
    Gone,
    /// It goes on here.
    Back,
}

/// Asks the other host about a guest that was given to it.
///
/// # Errors
/// Where the guest is in no such migration, or the other host is not reached or cannot say; the guest
/// is as before then.
pub fn resume(
    host: &Host,
    name: &str,
    ending: Ending,
    reporter: &dyn Reporter,
) -> Result<Resumed, Failure> {
    let LockedGuest { folder, record, lock: _lock } = host.lock(name)?;
    let (session, on_disk) = given(&folder, &record)?;
    if ending == Ending::Back {
        require_qemu(&record)?;
    }
    let other = on_disk.other.clone();
    let known = on_disk.source();
    if ending == Ending::Back && known == Some(SourceRecord::Serving) {
        return Err(ran_on(name, &other));
    }
    let stays = |failure: Failure| still_given(failure, name, &other, known);
    let Some(peer) = on_disk.peer.clone() else {
        return Err(stays(Failure::new(Code::Failed, "it is not known how to reach it")));
    };
    reporter.stage("asking the other host");
    let Peer { process: _process, control, pages, .. } = peer.connect(session).map_err(stays)?;
    let guest = name.to_owned();
    let question = match ending {
        Ending::Forward => ToDestination::Resume { guest },
        Ending::Back => ToDestination::GiveUp { guest },
    };
    control.send(&question).map_err(|error| stays(error.into()))?;
    // The other host may lack some of its memory; its process may have ended.
    let ram = ram_of_files(&record);
    let pages_in_all = record.ram.iter().map(|file| file.bytes / PAGE_BYTES as u64).sum();
    let tunnel = vec![FrameWriter::new(pages, session, 0, Side::Source)];
    let sender = PageSender::start(tunnel, Compression::Auto, LEVEL);
    let (machine, _) = Source::recover(given_as(&on_disk));
    let back = dewar_registry::GuestRecord { phase: Phase::Running, ..record.clone() };
    let hands = &mut *hands_by_record(&folder, &back, || Qmp::of(&back));
    let reached = |step: &str| reporter.reached(step);
    let mut side = SourceSide {
        machine,
        session,
        record: on_disk,
        folder: &folder,
        guest: record.clone(),
        control: Some(&control),
        reached: &reached,
    };
    if ending == Ending::Forward {
        side.on(SourceEvent::LinkBack, hands)?;
    }
    let serving = Serving {
        control: &control,
        ram: ram.as_ref().map_err(Failure::whole),
        pages: pages_in_all,
        sender: &sender,
        reporter,
    };
    let decided = serving.until_decided(&mut side, hands, &mut |_, _| Ok(()));
    let known = side.machine.record();
    decided.map_err(|failure| still_given(failure, name, &other, known))?;
    Ok(match side.machine.record() {
        Some(SourceRecord::Gone) => Resumed::Gone,
        _ => Resumed::Back,
    })
}

/// Takes a guest back that was given away, without asking: the user is sure that the other host will never
/// run it.
///
/// # Errors
/// Where the guest is in no such migration, or does not go on.
pub fn take_back(host: &Host, name: &str) -> Result<(), Failure> {
    let LockedGuest { folder, record, lock: _lock } = host.lock_to_end(name)?;
    if record.phase == Phase::Leaving {
        require_qemu(&record)?;
    }
    if let Some((_, None)) = migration_of(&folder, &record)?.filter(|_| is_elsewhere(&record)) {
        // What was on disk of the migration is lost, and the user decides.
        return recover_lost(&folder, &record);
    }
    let (session, on_disk) = given(&folder, &record)?;
    match on_disk.source() {
        Some(SourceRecord::Serving) => return Err(ran_on(name, &on_disk.other)),
        Some(SourceRecord::Gone) => {
            let what = format!("'{name}' runs at {}", on_disk.other);
            return Err(Failure::new(Code::Failed, what)
                .state("what is left of it here is old")
                .advice("'dewar ps' removes it"));
        }
        _ => {}
    }
    let (machine, _) = Source::recover(given_as(&on_disk));
    let back = dewar_registry::GuestRecord { phase: Phase::Running, ..record.clone() };
    let mut side = SourceSide {
        machine,
        session,
        record: on_disk,
        folder: &folder,
        guest: record,
        control: None,
        reached: &|_| {},
    };
    let hands = &mut *hands_by_record(&folder, &back, || Qmp::of(&back));
    side.on(SourceEvent::TakeBack, hands)
}

/// Refuses a guest that waits here for the word of the other host; nothing is left of it here.
///
/// # Errors
/// Where there is no such guest, or it was given to this host already.
pub fn abort_here(host: &Host, name: &str) -> Result<(), Failure> {
    let LockedGuest { folder, record, lock: _lock } = host.lock(name)?;
    let on_disk = migration_of(&folder, &record)?.and_then(|(_, on_disk)| on_disk);
    let known = on_disk.as_ref().and_then(MigrationRecord::destination);
    if record.phase != Phase::Arriving || known != Some(DestinationRecord::Loaded) {
        let what = match known {
            Some(DestinationRecord::Owned) => {
                format!("'{name}' was given to this host: it cannot be refused any more")
            }
            _ => format!("'{name}' does not wait here for the word of another host"),
        };
        return Err(Failure::new(Code::Failed, what).state("it stays as it is"));
    }
    refuse(&folder, record)
}

/// How far a source is that asks about a guest: one that is gone is only to be heard of again.
fn given_as(on_disk: &MigrationRecord) -> Option<SourceRecord> {
    match on_disk.source() {
        Some(SourceRecord::Serving) => Some(SourceRecord::Serving),
        _ => Some(SourceRecord::Given),
    }
}

/// That a guest ran at the other host, and what is here is old.
fn ran_on(name: &str, other: &str) -> Failure {
    let what = format!("'{name}' ran at {other}, and changed its memory and disks since it left");
    Failure::new(Code::Attention, what)
        .state("what is kept of it here is only the memory that it still lacks there")
        .advice(format!(
            "'dewar migrate {name} --resume' brings it; 'dewar rm {name} --force' gives it up"
        ))
}

/// That what a guest needs to go on here is here: its process, which stands still.
fn require_qemu(record: &dewar_registry::GuestRecord) -> Result<(), Failure> {
    if record.process.is_alive() {
        return Ok(());
    }
    let name = &record.name;
    let what = match record.container {
        Some(_) => format!("the processes of '{name}' on this host have ended"),
        None => format!("the QEMU that '{name}' was in on this host has ended"),
    };
    Err(Failure::new(Code::Attention, what)
        .state("all that there is of it may be at the other host")
        .advice(format!("'dewar migrate {name} --resume' lets it go on there")))
}

/// The migration of a guest that was given away.
fn given(
    folder: &dewar_registry::GuestFolder,
    record: &dewar_registry::GuestRecord,
) -> Result<(u64, MigrationRecord), Failure> {
    let found = migration_of(folder, record)?;
    match found {
        Some((session, on_disk)) if record.phase == Phase::Leaving && is_given(&on_disk) => {
            on_disk.map(|on_disk| (session, on_disk)).ok_or_else(|| not_moving(&record.name))
        }
        _ => Err(not_moving(&record.name)),
    }
}

fn not_moving(name: &str) -> Failure {
    let what = format!("'{name}' was not given to another host");
    Failure::new(Code::Failed, what).state("it stays as it is")
}

/// What is said of a guest that was given away and of which the other host has not said that it runs.
pub(super) fn still_given(
    failure: Failure,
    name: &str,
    other: &str,
    known: Option<SourceRecord>,
) -> Failure {
    if known == Some(SourceRecord::Serving) {
        return failure
            .attention()
            .state(format!(
                "'{name}' runs at {other}, and waits there where it needs memory that is still here"
            ))
            .advice(format!("'dewar migrate {name} --resume' brings the rest"));
    }
    failure
        .attention()
        .state(format!(
            "'{name}' was given to {other}, which has not said that it runs there: it stands still \
             here, and all of it is kept"
        ))
        .advice(format!(
            "'dewar migrate {name} --resume' asks again, '--abort' asks to have it back; if {other} \
             will never run it, '--take-back' lets it go on here"
        ))
}

/// Answers a source that asks what became of a guest.
pub(super) fn answer(
    host: &Host,
    control: &Arc<ToTheSource>,
    pages: impl Read + Send + 'static,
    name: &str,
    give_up: bool,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    let session = control.session();
    let folder = host.registry.guest(name)?;
    let is_known = folder.file("").exists();
    let lock = match is_known {
        true => Some(folder.lock_within(SEES_WITHIN)),
        false => None,
    };
    let _lock = lock.transpose().inspect_err(|error| {
        let _ = control.send(&ToSource::Failed { why: error.to_string() });
    })?;
    let on_disk: Option<MigrationRecord> = Migrations::new(folder.root()).read(session)?;
    let ours = folder.record_if_any()?.filter(|record| record.migration == Some(session));
    let known = on_disk.as_ref().and_then(MigrationRecord::destination);
    if ours.is_none() && known.is_none() {
        return Err(of_nothing_known(control, name));
    }
    let reached = |step: &str| reporter.reached(step);
    let mut service = None;
    let (mut side, now) = match ours {
        Some(record) => {
            if is_partial(&folder, &record) && known != Some(DestinationRecord::Refused) {
                // Before its QEMU is asked for anything: it may wait for a page.
                service = Some(OwedService::take_over(control, &folder, &record, pages)?);
            }
            let record = folder.record()?;
            arriving_side(&folder, record, session, on_disk)?
        }
        None => {
            let (machine, _) = Destination::recover(known, false, false);
            let record = on_disk.unwrap_or_else(|| MigrationRecord::refused(name));
            let side = DestinationSide {
                machine,
                session,
                record,
                folder: &folder,
                guest: None,
                incoming: None,
                control: None,
                unforwarded: Vec::new(),
                reached: &reached,
            };
            (side, Vec::new())
        }
    };
    (side.control, side.reached) = (Some(&**control), &reached);
    side.carry_out(now)?;
    if side.machine.is_lost() {
        let why = "its process has ended, and it is not known whether the guest ran in it";
        control.send(&ToSource::Failed { why: why.to_owned() })?;
        return Err(Failure::new(Code::Attention, format!("'{name}': {why}")));
    }
    if give_up {
        side.on(DestinationEvent::GiveUp)?;
        if side.machine.record().is_none() {
            // Nothing is on record, so it will never run here.
            side.on(DestinationEvent::Heard(FromSource::Commit))?;
        } else if runs_here(side.machine.record()) {
            side.on(DestinationEvent::LinkBack)?;
        }
    } else {
        side.on(DestinationEvent::LinkBack)?;
    }
    hear_out(&mut side, control, &mut service)
}

/// Says that nothing is known of a migration. That is no refusal: the source asks only where the guest was loaded, which
/// is on record there, and so this is another host or another root.
fn of_nothing_known(control: &ToTheSource, name: &str) -> Failure {
    let what = format!(
        "no migration of '{name}' is known here: this is another host, or another root folder"
    );
    let _ = control.send(&ToSource::Failed { why: what.clone() });
    Failure::new(Code::Failed, what)
}

/// Whether the guest was let run on this host.
fn runs_here(known: Option<DestinationRecord>) -> bool {
    matches!(known, Some(DestinationRecord::Partial | DestinationRecord::Running))
}

/// Hears the source until it has nothing more to ask.
fn hear_out(
    side: &mut DestinationSide<'_>,
    control: &ToTheSource,
    service: &mut Option<OwedService>,
) -> Result<(), Failure> {
    loop {
        match hear(side, control, service) {
            Ok(Heard::Message(ToDestination::Ownership(word))) => {
                side.on(DestinationEvent::Heard(word))?;
                if word != FromSource::Commit {
                    return Ok(());
                }
            }
            Ok(_) => return Err(MigrateError::Unexpected(CONTROL).into()),
            Err(_) if service.is_none() && control.is_lost() => return Ok(()),
            Err(failure) => return side.left_behind(failure),
        }
    }
}
