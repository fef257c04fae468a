//! `receive`: the destination's part, over its standard input and output.

use super::container_place::{MovingContainer, arrive_container};
use super::disks::connect;
use super::listening::{
    Talk, acknowledge, begin, give_up, not_arrived, require_short, wait_for_pages,
};
use super::moving_machine::MovingState;
use super::owed::OwedService;
use super::place::Place;
use super::resume::answer;
use crate::failure::{Code, Failure};
use crate::frozen_state::unloadable;
use crate::host::Host;
use crate::migration::MigrationRecord;
use crate::migration::{DestinationSide, ToTheSource, shards};
use crate::process::unless_hopeless;
use crate::reporter::Reporter;
use dewar_guest_qemu::end_exports;
use dewar_migrate::{
    Control, MigrateError, NewMemory, PageReceiver, TunnelReader, TunnelWriter, take_apart,
};
use dewar_registry::{GuestFolder, Migrations};
use dewar_units::PageSet;
use dewar_wire::control::{CONTROL, Offer, Stopped, ToDestination, ToSource};
use dewar_wire::ownership::Destination;
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
    let mut disks = take_apart(from, &shards(&[CONTROL, 0]));
    let (control, pages) = (disks.remove(0), disks.remove(0));
    let tunnel = TunnelWriter::new(to);
    let control = Control::accept(control, tunnel.another())?;
    let control = Arc::new(control);
    match control.message()? {
        ToDestination::Offer(offer) if MovingContainer::is_one(&offer.machine) => {
            arrive_container(host, &control, &offer, pages, reporter)
        }
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
        record: MigrationRecord::arriving(offer),
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
    let coming = Coming { control, receiver: &receiver, memory: &memory, copied };
    let talk = Talk { control, pages: memory.pages(), trial: offer.trial };
    talk.hear_out(
        &mut side,
        &mut |side, stopped, state| coming.load(side, stopped, state),
        reporter,
    )
}

/// Where a guest comes from, and what it comes into.
struct Coming<'c> {
    control: &'c Arc<ToTheSource>,
    receiver: &'c Arc<PageReceiver>,
    memory: &'c NewMemory,
    /// How many of its disks are copied.
    copied: usize,
}

impl Coming<'_> {
    /// As [`Load`] says.
    fn load(
        &self,
        side: &mut DestinationSide<'_>,
        stopped: &Stopped,
        mut state: Vec<u8>,
    ) -> Result<Option<OwedService>, Failure> {
        let Self { control, receiver, memory, copied, .. } = self;
        let folder: &GuestFolder = side.folder;
        let Some(incoming) = &mut side.incoming else { return Err(not_arrived()) };
        require_short(stopped)?;
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
        wait_for_pages(receiver, control, stopped.epoch)?;
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
