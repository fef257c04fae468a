//! `receive` of a container: the destination's part.

use super::listening::{
    Talk, acknowledge, begin, give_up, not_arrived, require_short, wait_for_pages,
};
use super::place::free_name;
use crate::container::Warming;
use crate::container::arriving::{load, make_place, require_place, throw_away};
use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::hot_pages::HOT_PAGES;
use crate::locked_guest::{NextGuest, clear_predecessor};
use crate::migration::{DestinationSide, MigrationRecord, ToTheSource};
use crate::reporter::Reporter;
use dewar_guest_oci::Description;
use dewar_kernel::detach;
use dewar_migrate::{NewMemory, TunnelReader};
use dewar_pagecache::Manifest;
use dewar_registry::{GuestFolder, GuestLock, GuestRecord, Migrations};
use dewar_units::PAGE_BYTES;
use dewar_wire::control::{Offer, ToSource};
use dewar_wire::ownership::Destination;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::sync::Arc;

/// What the destination is told of a container.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MovingContainer {
    /// What it is.
    pub container: Description,
    /// Bytes of memory that its processes have for themselves.
    pub memory_bytes: u64,
    /// The pages of files that it uses, where that is known.
    #[serde(default)]
    pub hot_pages: Option<Value>,
}

impl MovingContainer {
    /// Whether what is offered is a container.
    pub fn is_one(machine: &Value) -> bool {
        machine["container"].is_object()
    }
}

/// A place for a container.
struct Place {
    folder: GuestFolder,
    record: GuestRecord,
    memory: Arc<NewMemory>,
    warming: Option<Warming>,
    _lock: GuestLock,
}

/// A container comes.
pub(super) fn arrive_container(
    host: &Host,
    control: &Arc<ToTheSource>,
    offer: &Offer,
    pages: TunnelReader,
    reporter: &dyn Reporter,
) -> Result<(), Failure> {
    let parsed = serde_json::from_value::<MovingContainer>(offer.machine.clone())
        .map_err(|error| Failure::new(Code::Failed, format!("the offered container: {error}")));
    let made = parsed.and_then(|moving| {
        let place = make(host, offer, &moving, control.session(), reporter)?;
        Ok((moving, place))
    });
    let (moving, place) = match made {
        Ok(made) => made,
        Err(failure) => {
            let _ = control.send(&ToSource::Declined { why: failure.whole() });
            return Err(failure.state("nothing is left of it here"));
        }
    };
    let Place { folder, record, memory, warming, _lock } = place;
    let reached = |step: &str| reporter.reached(step);
    let mut side = DestinationSide {
        machine: Destination::new(),
        session: control.session(),
        record: MigrationRecord::arriving(offer),
        folder: &folder,
        guest: Some(record),
        incoming: None,
        control: Some(control),
        unforwarded: Vec::new(),
        reached: &reached,
    };
    Migrations::new(folder.root()).make()?;
    let receiver = match begin(control, offer, pages, &memory) {
        Ok(receiver) => Arc::new(receiver),
        Err(failure) => return give_up(&mut side, control, failure),
    };
    reporter.stage("receiving memory");
    acknowledge(control, &receiver);
    let talk = Talk { control, pages: memory.pages(), trial: offer.trial };
    talk.hear_out(
        &mut side,
        &mut |side, stopped, archive| {
            require_short(stopped)?;
            wait_for_pages(&receiver, control, stopped.epoch)?;
            let Some(record) = &mut side.guest else { return Err(not_arrived()) };
            reporter.stage("restoring the processes");
            record.process = load(&folder, &moving.container, &archive)?;
            folder.set_record(record)?;
            Ok(None)
        },
        reporter,
    )?;
    if warming.is_some_and(|it| !it.is_finished()) {
        warm_on(&folder, reporter);
    }
    Ok(())
}

/// Makes a place for an offered container. Where that fails nothing is left of it.
fn make(
    host: &Host,
    offer: &Offer,
    moving: &MovingContainer,
    session: u64,
    reporter: &dyn Reporter,
) -> Result<Place, Failure> {
    let description = &moving.container;
    let folder = host.registry.guest(&offer.guest)?;
    let lock = free_name(&folder, &offer.instance)?;
    drop(clear_predecessor(&folder, None, NextGuest::Another)?);
    require_place(host, &offer.guest, description, moving.memory_bytes).inspect_err(|_| {
        let _ = folder.remove_all();
    })?;
    let bytes = match offer.regions.as_slice() {
        [copies] if copies.bytes % PAGE_BYTES as u64 == 0 => copies.bytes,
        _ => return Err(Failure::new(Code::Failed, "the copies of its memory are no whole pages")),
    };
    let (record, copies) = make_place(&folder, description, session, bytes)?;
    let mut memory = NewMemory::default();
    memory.add(copies, bytes / PAGE_BYTES as u64);
    let known = known_hot_pages(moving);
    if let Ok(Some(manifest)) = &known {
        folder.write(HOT_PAGES, manifest).inspect_err(|_| {
            let _ = throw_away(&folder, &record);
        })?;
    }
    // Beside its memory: both wait for what is far away.
    // What podman mounts for it is not there yet.
    let warming = match offer.trial || description.podman.is_some() {
        true => None,
        false => Warming::start(&description.container(), known, reporter),
    };
    Ok(Place { folder, record, memory: Arc::new(memory), warming, _lock: lock })
}

fn known_hot_pages(moving: &MovingContainer) -> Result<Option<Manifest>, Failure> {
    let Some(known) = &moving.hot_pages else { return Ok(None) };
    let bytes =
        serde_json::to_vec(known).map_err(|error| Failure::new(Code::Failed, error.to_string()))?;
    Ok(Some(Manifest::parse(&bytes)?))
}

/// Goes on reading what it uses, in a process of its own: the source waits for this one.
fn warm_on(folder: &GuestFolder, reporter: &dyn Reporter) {
    let begun = std::env::current_exe().and_then(|program| {
        let mut command = Command::new(program);
        command.arg("--root").arg(folder.root()).args(["warm", folder.name()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        detach(&mut command).spawn()
    });
    if let Err(error) = begun {
        reporter.warn(&format!("not all that it uses is read before: {error}"));
    }
}
