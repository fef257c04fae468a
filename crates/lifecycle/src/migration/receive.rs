//! `receive`: the destination's part, over its standard input and output.

use super::destination::Place;
use super::destination_side::{DestinationSide, ToTheSource};
use super::moving_machine::MovingState;
use super::record::{MigrationRecord, SideRecord};
use super::resume::answer;
use crate::failure::{Code, Failure};
use crate::frozen_state::unloadable;
use crate::host::Host;
use crate::reporter::Reporter;
use dewar_migrate::{Control, Heard, MigrateError, PageReceiver, TunnelWriter, take_apart};
use dewar_registry::{GuestFolder, Migrations};
use dewar_wire::control::{CONTROL, MOST_STATE_BYTES, Offer, Stopped, ToDestination, ToSource};
use dewar_wire::ownership::{Destination, DestinationEvent, DestinationRecord, FromSource};
use std::io::{Read, Write};
use std::sync::Arc;

/// Takes part in the migration that the source speaks of on `from`, and answers on `to`, until there
/// is nothing more to say. Where the connection is lost, what is on disk stays for the next.
///
/// # Errors
/// Where the guest does not come to run here; the source is told why.
pub fn receive(
    host: &Host,
    from: impl Read + Send + 'static,
    to: impl Write + Send + 'static,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    let [control, pages] = take_apart(from, &[CONTROL, 0])
        .try_into()
        .map_err(|_| Failure::new(Code::Failed, "no connection"))?;
    let (control, _) = Control::accept(control, TunnelWriter::new(to))?;
    let control = Arc::new(control);
    match control.message()? {
        ToDestination::Offer(offer) => arrive(host, &control, &offer, pages, reporter),
        ToDestination::Resume { guest } => answer(host, &control, &guest, false, reporter),
        ToDestination::GiveUp { guest } => answer(host, &control, &guest, true, reporter),
        _ => Err(MigrateError::Unexpected(CONTROL).into()),
    }
}

/// A guest comes.
fn arrive(
    host: &Host,
    control: &Arc<ToTheSource>,
    offer: &Offer,
    pages: impl Read + Send + 'static,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    let session = control.session();
    let made = match offer.connections {
        1 => Place::make(host, offer, session, reporter),
        count => Err(Failure::new(Code::Unsupported, format!("{count} connections"))),
    };
    let place = match made {
        Ok(place) => place,
        Err(failure) => {
            let _ = control.send(&ToSource::Declined { why: failure.whole() });
            return Err(failure.state("nothing is left of it here"));
        }
    };
    let Place { folder, incoming, memory, lock: _lock } = place;
    let receiver = Arc::new(PageReceiver::start(vec![pages], session, &memory));
    let mut side = DestinationSide {
        machine: Destination::new(),
        session,
        record: MigrationRecord {
            guest: offer.guest.clone(),
            other: offer.from.clone(),
            peer: None,
            instance: offer.instance.clone(),
            side: SideRecord::Destination(DestinationRecord::Loaded),
        },
        folder: &folder,
        guest: None,
        incoming: Some(incoming),
        control: Some(control),
        unforwarded: Vec::new(),
        reached: &|step| reporter.reached(step),
    };
    Migrations::new(folder.root()).make()?;
    reporter.stage("receiving memory");
    // Lost, it is heard of below.
    let _ = control.send(&ToSource::Accepted);
    acknowledge(control, &receiver);
    take_part(&mut side, control, &receiver, reporter)
}

/// Says of each epoch when it is there; on a thread that ends with the connection.
fn acknowledge(control: &Arc<ToTheSource>, receiver: &Arc<PageReceiver>) {
    let (control, receiver) = (Arc::clone(control), Arc::clone(receiver));
    std::thread::spawn(move || {
        let arrived = |epoch: &u32| receiver.wait(*epoch);
        for epoch in (1..).take_while(arrived) {
            if control.send(&ToSource::Arrived { epoch }).is_err() {
                return;
            }
        }
        if let Some(why) = receiver.failure() {
            let _ = control.send(&ToSource::Failed { why });
        }
    });
}

/// Hears the source to the end.
fn take_part(
    side: &mut DestinationSide<'_>,
    control: &ToTheSource,
    receiver: &PageReceiver,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    let mut coming: Option<(Stopped, Vec<u8>)> = None;
    loop {
        let event = match control.hear() {
            Ok(Heard::Message(ToDestination::Stopped(stopped))) => {
                reporter.stage("loading the devices");
                coming = Some((*stopped, Vec::new()));
                continue;
            }
            Ok(Heard::State(bytes)) => {
                let Some((stopped, state)) = &mut coming else {
                    return give_up(side, control, MigrateError::Unexpected(CONTROL).into());
                };
                state.extend_from_slice(&bytes);
                if (state.len() as u64) < stopped.state_bytes.min(MOST_STATE_BYTES) {
                    continue;
                }
                match load(side, receiver, stopped, std::mem::take(state)) {
                    Ok(()) => DestinationEvent::Loaded,
                    Err(failure) => return give_up(side, control, failure),
                }
            }
            Ok(Heard::Message(ToDestination::Ownership(word))) => {
                side.on(DestinationEvent::Heard(word))?;
                match word {
                    FromSource::Commit => continue,
                    FromSource::Gone => return Ok(()),
                    FromSource::Abort => {
                        let what = format!("'{}' stays where it was", side.folder.name());
                        return Err(Failure::new(Code::Failed, what));
                    }
                }
            }
            Ok(_) => return give_up(side, control, MigrateError::Unexpected(CONTROL).into()),
            Err(error) => {
                side.on(DestinationEvent::LinkLost)?;
                return left_behind(side, error);
            }
        };
        side.on(event)?;
    }
}

/// The connection is lost.
fn left_behind(side: &DestinationSide<'_>, error: MigrateError) -> Result<(), Failure> {
    let failure = Failure::from(error);
    let name = side.folder.name();
    match side.machine.record() {
        // The source has only not said its last word.
        Some(DestinationRecord::Running) => Ok(()),
        Some(DestinationRecord::Loaded) => Err(failure
            .attention()
            .state(format!("'{name}' is loaded and waits for the word of the other host"))
            .advice(format!("'dewar migrate {name} --resume' there gives it"))),
        _ => Err(failure.state("nothing is left of it here")),
    }
}

/// Refuses the guest; the source is told why.
fn give_up(
    side: &mut DestinationSide<'_>,
    control: &ToTheSource,
    failure: Failure,
) -> Result<(), Failure> {
    let _ = control.send(&ToSource::Failed { why: failure.whole() });
    side.on(DestinationEvent::GiveUp)?;
    // The source says that it will not ask again.
    while let Ok(heard) = control.hear() {
        if let Heard::Message(ToDestination::Ownership(word)) = heard {
            side.on(DestinationEvent::Heard(word))?;
            if word == FromSource::Abort {
                break;
            }
        }
    }
    Err(failure.state("nothing is left of it here"))
}

/// Loads the guest: its memory must be there, and its record says how it is to go on.
fn load(
    side: &mut DestinationSide<'_>,
    receiver: &PageReceiver,
    stopped: &Stopped,
    state: Vec<u8>,
) -> Result<(), Failure> {
    let folder: &GuestFolder = side.folder;
    let lost = || Failure::new(Code::Failed, "its memory has not all arrived");
    let Some(incoming) = &mut side.incoming else { return Err(lost()) };
    if stopped.state_bytes > MOST_STATE_BYTES {
        let what = format!("{} bytes of device state are too many", stopped.state_bytes);
        return Err(Failure::new(Code::Unsupported, what));
    }
    let moving: MovingState = serde_json::from_value(stopped.machine.clone())
        .map_err(|error| Failure::new(Code::Failed, format!("how the guest stands: {error}")))?;
    let record = incoming.record_mut();
    record.start_pending = stopped.was_running;
    if let Some(frozen) = &mut record.frozen {
        frozen.was_running = stopped.was_running;
        frozen.forwards = Some(moving.forwards.unwrap_or_default());
    }
    incoming.save()?;
    if !receiver.wait(stopped.epoch) {
        return Err(lost());
    }
    incoming.load_to_be_given(state).map_err(|error| unloadable(folder, &error))
}
