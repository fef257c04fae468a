//! The first half of a migration: the guest is looked over, the other host is reached and takes it, and the
//! connections are there. The guest was not touched.

use super::moving_machine::{MovingDisks, MovingMachine};
use super::offered::{Offered, PageLink, Way};
use crate::failure::{Code, Failure};
use crate::migration::{Peer, PeerCommand, Running, ToTheDestination};
use crate::reporter::Reporter;
use crate::served_disks;
use dewar_codec::Compression;
use dewar_guest::Guest;
use dewar_guest_qemu::QemuGuest;
use dewar_guest_qemu::freeze::check;
use dewar_memory::Ram;
use dewar_migrate::{GpuUse, Identity, TunnelReader, TunnelWriter};
use dewar_registry::{GuestFolder, GuestRecord};
use dewar_wire::hello::Features;
use serde::Serialize;
use std::fs::File;
use std::io::Read;
use std::process::ChildStdin;
use std::time::Duration;

/// How a guest shall move.
#[derive(Debug)]
pub struct MigrateOptions {
    /// The other host.
    pub peer: PeerCommand,
    /// The longest that the guest should stand still.
    pub max_downtime: Duration,
    /// How pages are compressed.
    pub compression: Compression,
    /// Whether a GPU encodes pages.
    pub gpu: GpuUse,
    /// How pages go there.
    pub way: Way,
    /// Whether it may run there before all of its memory has arrived.
    pub post_copy: PostCopy,
    /// Whether it may be slowed down where it writes faster than its pages can be sent: for at most how many
    /// hundredths of the time its vCPUs may stand still.
    pub throttle: Option<u8>,
    /// Which disks go along, and where they are there.
    pub disks: MovingDisks,
}

/// When a guest runs at the other host before all of its memory is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostCopy {
    /// Never.
    Never,
    /// Where it writes faster than its pages can be sent.
    Auto,
    /// As soon as every page was sent once.
    Always,
}

/// A guest that the other host takes.
pub(super) struct Accepted {
    pub control: ToTheDestination,
    /// The connections of pages.
    pub links: Vec<PageLink>,
    /// What the disks' connections say.
    pub disks: Vec<TunnelReader>,
    /// Where they are answered.
    pub tunnel: TunnelWriter<ChildStdin>,
    /// The guest's record, as QEMU is now.
    pub checked: GuestRecord,
    /// The command that leads there: dropped after the connections.
    pub process: Running,
}

impl Accepted {
    /// Offers a guest to the other host; in a trial, only to see whether it may come.
    pub fn reach(
        guest: &mut QemuGuest,
        folder: &GuestFolder,
        options: &MigrateOptions,
        trial: bool,
        reporter: &dyn Reporter,
    ) -> Result<Self, Failure> {
        if served_disks::has_some(folder)? {
            reporter.warn(
                "its disks are QEMU's own at the other host: a reboot there finds none of its file \
                 cache again",
            );
        }
        let checked = check(guest)?;
        let mut machine = MovingMachine::of(guest, &checked, &options.disks)?;
        machine.require_shared_disks(folder)?;
        // Until the other host has looked.
        let _marks = machine.mark_disks(new_session()?);
        Self::offer(checked, &guest.ram(), &machine, options, trial, reporter)
    }

    /// The same of a guest that is known by its record, its memory, and what the other host must know of it.
    pub fn offer(
        checked: GuestRecord,
        ram: &Ram,
        machine: &impl Serialize,
        options: &MigrateOptions,
        trial: bool,
        reporter: &dyn Reporter,
    ) -> Result<Self, Failure> {
        reporter.stage("reaching the other host");
        let Peer { process, control, pages, disks } = options.peer.connect(new_session()?)?;
        let tunnel = pages.another();
        let to = options.peer.name.as_str();
        let post_copy = options.post_copy != PostCopy::Never;
        if post_copy && !control.can(Features::POST_COPY) {
            return Err(no_post_copy(to));
        }
        let identity = Identity::new()?;
        let links = {
            let (control, checked) = (&control, &checked);
            let offered = Offered { control, checked, ram, to, identity, post_copy, trial };
            let listening = offered.offer(machine, &options.way)?;
            offered.links(pages, listening, &options.way, reporter)?
        };
        Ok(Self { process, control, links, disks, tunnel, checked })
    }
}

/// A number that no other migration has.
fn new_session() -> Result<u64, Failure> {
    let mut bytes = [0; 8];
    let read = File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut bytes));
    read.map_err(|error| Failure::new(Code::Failed, format!("/dev/urandom: {error}")))?;
    Ok(u64::from_le_bytes(bytes))
}

fn no_post_copy(to: &str) -> Failure {
    let what = format!("the dewar of {to} cannot take a guest by post-copy");
    Failure::new(Code::Unsupported, what).advice("give both hosts the same version of dewar")
}
