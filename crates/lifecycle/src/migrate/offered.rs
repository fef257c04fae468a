//! The first words with the other host: may the guest come, and which way do its pages go?

use super::moving_machine::regions;
use crate::failure::{Code, Failure};
use crate::migration::ToTheDestination;
use crate::reporter::Reporter;
use dewar_capture::cores;
use dewar_memory::Ram;
use dewar_migrate::{FrameWriter, Identity, MigrateError, TunnelWriter, connect};
use dewar_registry::GuestRecord;
use dewar_wire::control::{CONTROL, Listening, Offer, ToDestination, ToSource};
use dewar_wire::frame::Side;
use serde::Serialize;
use std::io::Write;
use std::process::ChildStdin;

/// Zstandard's level, where there is time for it: less goes over the link than by the level of checkpoints.
pub(super) const LEVEL: i32 = 1;
/// Connections of pages, at most: one a core.
const MOST_CONNECTIONS: usize = 4;

/// How pages go to the other host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// Beside the messages, through the command that reaches it.
    Tunnel,
    /// Over TLS connections of their own to this address; without one, to the one by which ssh came
    /// there, and where that cannot be, as through a tunnel.
    Direct(Option<String>),
}

/// Tells a guest's QEMU from all others.
pub(super) fn instance(record: &GuestRecord) -> String {
    let process = record.process;
    format!("{:x}-{}-{}", process.boot, process.pid, process.started)
}

/// A guest that is offered to the other host.
pub(super) struct Offered<'o> {
    pub control: &'o ToTheDestination,
    pub checked: &'o GuestRecord,
    pub ram: &'o Ram,
    pub to: &'o str,
    pub identity: Identity,
    /// Whether it may run there before all of its memory has arrived.
    pub post_copy: bool,
    /// Whether it only is to be known whether it may come.
    pub trial: bool,
}

/// A connection of pages.
pub(super) type PageLink = FrameWriter<Box<dyn Write + Send>>;

impl Offered<'_> {
    /// Asks the other host whether the guest may come; says where it listens for pages.
    pub fn offer(&self, machine: &impl Serialize, way: &Way) -> Result<Option<Listening>, Failure> {
        let machine = serde_json::to_value(machine)
            .map_err(|error| Failure::new(Code::Failed, error.to_string()))?;
        let is_direct = *way != Way::Tunnel;
        self.control.send(&ToDestination::Offer(Box::new(Offer {
            guest: self.checked.name.clone(),
            from: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            instance: instance(self.checked),
            machine,
            regions: regions(self.ram),
            connections: cores().clamp(1, MOST_CONNECTIONS) as u16,
            certificate: is_direct.then(|| self.identity.certificate()),
            post_copy: self.post_copy,
            trial: self.trial,
        })))?;
        match self.control.message()? {
            ToSource::Accepted { listening } => Ok(listening.filter(|_| is_direct)),
            ToSource::Declined { why } => {
                let what = format!("{} does not take '{}': {why}", self.to, self.checked.name);
                Err(Failure::new(Code::Unsupported, what))
            }
            _ => Err(MigrateError::Unexpected(CONTROL).into()),
        }
    }

    /// Makes the connections of pages, and says that they begin.
    pub fn links(
        &self,
        tunnel: TunnelWriter<ChildStdin>,
        listening: Option<Listening>,
        way: &Way,
        reporter: &dyn Reporter,
    ) -> Result<Vec<PageLink>, Failure> {
        let asked = match way {
            Way::Direct(asked) => asked.clone(),
            Way::Tunnel => None,
        };
        let session = self.control.session();
        let direct = listening.and_then(|listening| {
            // By the address that the user named, or the one that ssh came by.
            let host = asked.clone().or(listening.address)?;
            let addresses = [(host, listening.port)];
            let count = cores().clamp(1, MOST_CONNECTIONS) as u16;
            let made = connect(&addresses, &self.identity, &listening.certificate, session, count);
            Some(made.map_err(|error| (addresses, error)))
        });
        match direct {
            Some(Ok(links)) => {
                self.control.send(&ToDestination::Begin { direct: true })?;
                Ok(links.into_iter().map(FrameWriter::boxed).collect())
            }
            Some(Err(([(host, port)], error))) if asked.is_some() => {
                let what = format!("no direct connection to {host}, port {port}: {error}");
                Err(Failure::new(Code::Failed, what).advice("'--tunnel' does without"))
            }
            other => {
                if let Some(Err((_, error))) = other {
                    reporter.warn(&format!("pages go through the tunnel: {error}"));
                }
                self.control.send(&ToDestination::Begin { direct: false })?;
                Ok(vec![FrameWriter::new(tunnel, session, 0, Side::Source).boxed()])
            }
        }
    }
}
