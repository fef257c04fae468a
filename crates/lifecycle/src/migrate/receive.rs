//! `receive`: the destination's part, over its standard input and output.

use super::disks::connect;
use super::moving_machine::MovingState;
use super::owed::{OwedService, hear};
use super::place::Place;
use super::resume::answer;
use crate::failure::{Code, Failure};
use crate::frozen_state::unloadable;
use crate::host::Host;
use crate::migration::{DestinationSide, ToTheSource, shards};
use crate::migration::{MigrationRecord, SideRecord};
use crate::process::unless_hopeless;
use crate::reporter::Reporter;
use dewar_guest_qemu::end_exports;
use dewar_migrate::{
    Control, DirectListener, FrameReader, Heard, Identity, MigrateError, NewMemory, PageReceiver,
    TunnelReader, TunnelWriter, take_apart,
};
use dewar_registry::{GuestFolder, Migrations};
use dewar_units::PageSet;
use dewar_wire::control::{
    CONTROL, Listening, MOST_STATE_BYTES, Offer, Stopped, ToDestination, ToSource,
};
use dewar_wire::frame::Side;
use dewar_wire::ownership::{Destination, DestinationEvent, DestinationRecord, FromSource};
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

/// Connections of pages that are listened for, at most.
const MOST_CONNECTIONS: u16 = 16;

/// How often it is looked whether the source is there while its last pages are waited for.
const LOOK: Duration = Duration::from_millis(500);

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
    let mut disks = take_apart(from, &shards(&[CONTROL, 0]));
    let (control, pages) = (disks.remove(0), disks.remove(0));
    let tunnel = TunnelWriter::new(to);
    let control = Control::accept(control, tunnel.another())?;
    let control = Arc::new(control);
    match control.message()? {
        ToDestination::Offer(offer) => {
            arrive(host, &control, &offer, Tunnel { pages, disks, back: tunnel }, reporter)
        }
        ToDestination::Resume { guest } => answer(host, &control, pages, &guest, false, reporter),
        ToDestination::GiveUp { guest } => answer(host, &control, pages, &guest, true, reporter),
        _ => Err(MigrateError::Unexpected(CONTROL).into()),
    }
}

/// What there is in the tunnel beside messages.
struct Tunnel<W> {
    pages: TunnelReader,
    disks: Vec<TunnelReader>,
    /// The way back.
    back: TunnelWriter<W>,
}

/// A guest comes.
fn arrive(
    host: &Host,
    control: &Arc<ToTheSource>,
    offer: &Offer,
    tunnel: Tunnel<impl Write + Send + 'static>,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    let session = control.session();
    let place = match Place::make(host, offer, session, reporter) {
        Ok(place) => place,
        Err(failure) => {
            let _ = control.send(&ToSource::Declined { why: failure.whole() });
            return Err(failure.state("nothing is left of it here"));
        }
    };
    let Place { folder, incoming, memory, copied, lock: _lock } = place;
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
    // QEMU's NBD server does not wait for long for a client's first word: when the source is about to say it.
    let begun = begin(control, offer, tunnel.pages, &memory).and_then(|receiver| {
        connect(&folder, copied, tunnel.disks, &tunnel.back, session)?;
        Ok(receiver)
    });
    let receiver = match begun {
        Ok(receiver) => Arc::new(receiver),
        Err(failure) => return give_up(&mut side, control, failure),
    };
    reporter.stage("receiving memory");
    acknowledge(control, &receiver);
    let coming =
        Coming { control, receiver: &receiver, memory: &memory, copied, trial: offer.trial };
    take_part(&mut side, &coming, reporter)
}

/// Accepts the guest, and begins to receive its pages on connections of their own, or in the tunnel.
fn begin(
    control: &ToTheSource,
    offer: &Offer,
    tunnel: impl Read + Send + 'static,
    memory: &Arc<NewMemory>,
) -> Result<PageReceiver, Failure> {
    let session = control.session();
    let ours = Identity::new()?;
    let certificate =
        offer.certificate.as_deref().filter(|_| offer.connections <= MOST_CONNECTIONS);
    // Without a port there is the tunnel.
    let listener = certificate.and_then(|it| DirectListener::new(&ours, it, session).ok());
    let listening = listener.as_ref().map(|listener| Listening {
        port: listener.port(),
        address: own_address(),
        certificate: ours.certificate(),
    });
    control.send(&ToSource::Accepted { listening })?;
    match (control.message()?, listener) {
        (ToDestination::Begin { direct: true }, Some(listener)) => {
            Ok(PageReceiver::start(listener.connections(offer.connections)?, memory))
        }
        (ToDestination::Begin { direct: false }, _) => {
            let reader = FrameReader::new(tunnel, session, 0, Side::Source);
            Ok(PageReceiver::start(vec![reader], memory))
        }
        (ToDestination::Ownership(FromSource::Abort), _) => {
            Err(MigrateError::Failed("it keeps the guest".to_owned()).into())
        }
        _ => Err(MigrateError::Unexpected(CONTROL).into()),
    }
}

/// The address by which an ssh client came to this host (ssh(1), SSH_CONNECTION).
fn own_address() -> Option<String> {
    let words = std::env::var("SSH_CONNECTION").ok()?;
    words.split(' ').nth(2).map(str::to_owned)
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
    coming: &Coming<'_>,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    let Coming { control, memory, .. } = coming;
    let mut stands: Option<(Stopped, Vec<u8>)> = None;
    let mut service = None;
    loop {
        let event = match hear(side, control, &mut service) {
            Ok(Heard::Message(ToDestination::Stopped(stopped))) => {
                reporter.stage("loading the devices");
                stands = Some((*stopped, Vec::new()));
                continue;
            }
            Ok(Heard::State(bytes)) => {
                let Some((stopped, state)) = &mut stands else {
                    return give_up(side, control, MigrateError::Unexpected(CONTROL).into());
                };
                state.extend_from_slice(&bytes);
                let most = MOST_STATE_BYTES + memory.pages().div_ceil(8);
                let wanted = stopped.state_bytes.saturating_add(stopped.owed_bytes);
                if (state.len() as u64) < wanted.min(most) {
                    continue;
                }
                match coming.load(side, stopped, std::mem::take(state)) {
                    Ok(None) => DestinationEvent::Loaded,
                    Ok(serving) => {
                        service = serving;
                        DestinationEvent::LoadedInPart
                    }
                    Err(failure) => return give_up(side, control, failure),
                }
            }
            Ok(Heard::Message(ToDestination::Ownership(word))) => {
                side.on(DestinationEvent::Heard(word))?;
                match word {
                    FromSource::Commit => continue,
                    FromSource::Gone => return Ok(()),
                    FromSource::Abort => {
                        // What was refused for it need not be remembered: the source will not ask.
                        side.on(DestinationEvent::Heard(word))?;
                        if coming.trial {
                            return Ok(());
                        }
                        let what = format!("'{}' stays where it was", side.folder.name());
                        return Err(Failure::new(Code::Failed, what));
                    }
                }
            }
            Ok(_) => return give_up(side, control, MigrateError::Unexpected(CONTROL).into()),
            Err(failure) => {
                side.on(DestinationEvent::LinkLost)?;
                return side.left_behind(failure);
            }
        };
        side.on(event)?;
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

/// Where a guest comes from, and what it comes into.
struct Coming<'c> {
    control: &'c Arc<ToTheSource>,
    receiver: &'c Arc<PageReceiver>,
    memory: &'c NewMemory,
    /// How many of its disks are copied.
    copied: usize,
    /// Whether it only is to be known whether it could come.
    trial: bool,
}

impl Coming<'_> {
    /// Loads a guest that stands still at the source: what was sent of its memory must be there, and its
    /// record says how it is to go on. What serves the rest of its memory, if the source still has some, is
    /// returned.
    fn load(
        &self,
        side: &mut DestinationSide<'_>,
        stopped: &Stopped,
        mut state: Vec<u8>,
    ) -> Result<Option<OwedService>, Failure> {
        let Self { control, receiver, memory, copied, .. } = self;
        let folder: &GuestFolder = side.folder;
        let lost = || Failure::new(Code::Failed, "its memory has not all arrived");
        let Some(incoming) = &mut side.incoming else { return Err(lost()) };
        if stopped.state_bytes > MOST_STATE_BYTES {
            let what = format!("{} bytes of device state are too many", stopped.state_bytes);
            return Err(Failure::new(Code::Unsupported, what));
        }
        let owed = state.split_off((stopped.state_bytes as usize).min(state.len()));
        let moving: MovingState = serde_json::from_value(stopped.machine.clone())
            .map_err(|error| Failure::new(Code::Failed, format!("how it stands: {error}")))?;
        let record = incoming.record_mut();
        record.start_pending = stopped.was_running;
        if let Some(frozen) = &mut record.frozen {
            frozen.was_running = stopped.was_running;
            frozen.forwards = Some(moving.forwards.unwrap_or_default());
        }
        incoming.save()?;
        if *copied > 0 {
            // All of them have come: the source's QEMU has flushed them, and ended its connections.
            end_exports(incoming.qmp())
                .map_err(|error| Failure::new(Code::Failed, format!("its disks: {error}")))?;
        }
        loop {
            match receiver.wait_within(stopped.epoch, LOOK) {
                Some(true) => break,
                Some(false) => return Err(lost()),
                // A connection of pages may be lost and not say so.
                None if control.is_silent() => return Err(lost()),
                None => {}
            }
        }
        let service = match stopped.owed_bytes {
            0 => None,
            _ => {
                let owed = PageSet::from_bytes(&owed, memory.pages()).ok_or_else(|| {
                    Failure::new(Code::Failed, "the set of its missing pages is none")
                })?;
                Some(OwedService::begin(control, folder, incoming, memory, receiver, owed)?)
            }
        };
        let process = incoming.record().process;
        let load = || match stopped.was_running {
            // The host that it leaves lets a guest that stood still stand, and needs no disks for that. Here
            // they would stay inactive until it is let run, and QEMU could not save it before.
            true => incoming.load_to_be_given(state),
            false => incoming.load(state),
        };
        let loaded = match &service {
            Some(service) => {
                let is_hopeless = || control.is_lost() || service.has_failed();
                unless_hopeless(&process, is_hopeless, load)
            }
            None => load(),
        };
        loaded.map_err(|error| unloadable(folder, &error))?;
        Ok(service)
    }
}
