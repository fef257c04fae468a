//! What a killed command left of a migration.

use crate::container::arriving;
use crate::failure::{Code, Failure};
use crate::migration::{
    DestinationSide, MigrationRecord, SideRecord, SourceSide, hands_by_record, migration_of,
    owed_pages,
};
use dewar_guest_qemu::{Qmp, QmpError};
use dewar_registry::{GuestFolder, GuestRecord, Phase};
use dewar_wire::ownership::{
    Destination, DestinationAction, DestinationEvent, DestinationRecord, Source, SourceRecord,
};

/// Finishes what can be finished without the other host: a guest that was not given away goes on here, one
/// that is gone is removed, one that never arrived is thrown away, one that was given to this host runs.
///
/// # Errors
/// Where it cannot be finished, or nothing of the guest is left here.
pub fn recover(folder: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    match record.phase {
        Phase::Leaving => recover_source(|| Qmp::of(&record), folder, &record),
        Phase::Arriving => recover_destination(folder, record),
        _ if record.migration.is_some() => note_running(folder, record),
        _ => Ok(record),
    }
}

/// The same for a guest that leaves, over any connection to its QEMU. One that was given away
/// is left as it is.
///
/// # Errors
/// As [`recover`].
pub fn recover_source(
    connect: impl FnMut() -> Result<Qmp, QmpError>,
    folder: &GuestFolder,
    record: &GuestRecord,
) -> Result<GuestRecord, Failure> {
    let Some((session, on_disk)) = migration_of(folder, record)? else {
        return Err(unknown(record));
    };
    // Its own record says so only while the migration's is on disk: that was lost.
    let Some(on_disk) = on_disk else { return Err(unknown(record)) };
    let mut side = SourceSide {
        machine: Source::new(),
        session,
        record: on_disk,
        folder,
        guest: record.clone(),
        control: None,
        reached: &|_| {},
    };
    let back = GuestRecord { phase: Phase::Running, ..record.clone() };
    side.begin_again(&mut *hands_by_record(folder, &back, connect))?;
    Ok(folder.record()?)
}

/// Lets a guest go on that leaves, and of whose migration nothing is on disk: its user says that no
/// other host will ever run it.
pub(crate) fn recover_lost(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    let back = GuestRecord { phase: Phase::Running, migration: None, ..record.clone() };
    hands_by_record(folder, &back, || Qmp::of(&back)).resume()?;
    Ok(folder.set_record(&back)?)
}

/// The guest that arrives, as a side that no connection leads to.
pub(crate) fn arriving_side(
    folder: &GuestFolder,
    record: GuestRecord,
    session: u64,
    on_disk: Option<MigrationRecord>,
) -> Result<(DestinationSide<'_>, Vec<DestinationAction>), Failure> {
    let known = on_disk.as_ref().and_then(MigrationRecord::destination);
    let lives = match record.container {
        Some(_) => arriving::lives(folder, &record),
        None => record.process.is_alive(),
    };
    let partial = owed_pages::is_partial(folder, &record);
    let (machine, now) = Destination::recover(known, lives, partial);
    let side = DestinationSide {
        machine,
        session,
        record: on_disk.unwrap_or_else(|| MigrationRecord::refused(&record.name)),
        folder,
        guest: Some(record),
        incoming: None,
        control: None,
        unforwarded: Vec::new(),
        reached: &|_| {},
    };
    Ok((side, now))
}

fn recover_destination(folder: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    let Some((session, on_disk)) = migration_of(folder, &record)? else {
        return Err(unknown(&record));
    };
    let never_arrived = on_disk.is_none();
    if !never_arrived && owed_pages::is_partial(folder, &record) {
        // Its QEMU may wait for a page, and not answer: it goes on with the host that has the page.
        return Ok(record);
    }
    let (mut side, now) = arriving_side(folder, record, session, on_disk)?;
    match never_arrived {
        // What a killed process had received can never be loaded.
        true => side.carry_out(vec![DestinationAction::Discard])?,
        false => side.carry_out(now)?,
    }
    Ok(folder.record()?)
}

/// A guest that was given to this host and let run, perhaps by the step before this.
fn note_running(folder: &GuestFolder, record: GuestRecord) -> Result<GuestRecord, Failure> {
    let Some((session, Some(mut on_disk))) = migration_of(folder, &record)? else {
        return Ok(record);
    };
    let owned = SideRecord::Destination(DestinationRecord::Owned);
    if on_disk.side == owned && !record.start_pending && record.process.is_alive() {
        let runs = match owed_pages::is_partial(folder, &record) {
            true => DestinationRecord::Partial,
            false => DestinationRecord::Running,
        };
        on_disk.side = SideRecord::Destination(runs);
        dewar_registry::Migrations::new(folder.root()).write(session, &on_disk)?;
    }
    Ok(record)
}

/// Refuses a guest that arrives, for its user; nothing is left of it then. One that was given to this host
/// already is not refused.
///
/// # Errors
/// Where that cannot be noted.
pub fn refuse(folder: &GuestFolder, record: GuestRecord) -> Result<(), Failure> {
    let Some((session, on_disk)) = migration_of(folder, &record)? else {
        return Err(unknown(&record));
    };
    let (mut side, now) = arriving_side(folder, record, session, on_disk)?;
    side.carry_out(now)?;
    side.on(DestinationEvent::GiveUp)?;
    match side.machine.record() {
        None => side.carry_out(vec![DestinationAction::Discard]),
        _ => Ok(()),
    }
}

/// Refuses a guest that arrives and is offered anew by the process that has it: it was not given away.
///
/// # Errors
/// Where that cannot be noted.
pub(crate) fn refuse_earlier(
    folder: &GuestFolder,
    record: &GuestRecord,
    instance: &str,
) -> Result<(), Failure> {
    let on_disk = migration_of(folder, record)?.and_then(|(_, on_disk)| on_disk);
    let is_same = on_disk.as_ref().is_some_and(|it| it.instance == instance);
    let known = on_disk.as_ref().and_then(MigrationRecord::destination);
    match record.phase == Phase::Arriving && is_same && known == Some(DestinationRecord::Loaded) {
        true => refuse(folder, record.clone()),
        false => Ok(()),
    }
}

/// Whether a guest that leaves was given away.
pub(crate) fn is_given(on_disk: &Option<MigrationRecord>) -> bool {
    let source = on_disk.as_ref().and_then(MigrationRecord::source);
    matches!(source, Some(SourceRecord::Given | SourceRecord::Serving | SourceRecord::Gone))
}

fn unknown(record: &GuestRecord) -> Failure {
    let name = &record.name;
    let what = format!("what was on disk of the migration of '{name}' is lost");
    Failure::new(Code::Attention, what).state("it stands still").advice(format!(
        "if it runs on no other host, and never will, 'dewar migrate {name} --take-back' lets it go \
         on here"
    ))
}
