//! `restore --as NAME --new-identity`: the copy's network cards get new addresses.
//!
//! The addresses are put on the command line of the copy's QEMU, for the next boot. The guest
//! itself still has the old ones: it is let run with its cables out, its agent sets the new
//! ones, and only then are the cables plugged in.

use crate::failure::{Code, Failure};
use dewar_guest_qemu::identity::{NewAddress, cards, renew_addresses, set_links};
use dewar_guest_qemu::registry::GuestRecord;
use dewar_guest_qemu::{Agent, Qmp, QmpError};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// How long the agent may take: the guest's memory may still be arriving.
const WITHIN: Duration = Duration::from_secs(30);

/// The addresses of a copy; none where they stay as they are.
#[derive(Default)]
pub struct NewIdentity {
    addresses: Vec<NewAddress>,
    /// QEMU's names for the cards that get them.
    cards: Vec<String>,
}

impl NewIdentity {
    /// Chooses addresses, and puts them on the saved machine's command line.
    pub fn choose(machine: &mut Value) -> Result<Self, Failure> {
        let addresses = renew_addresses(machine)
            .map_err(|error| Failure::new(Code::Failed, format!("random addresses: {error}")))?;
        Ok(Self { addresses, cards: Vec::new() })
    }

    /// That the guest can be told of them: it will run, and has an agent.
    pub fn require(&self, runs: bool, line: &[String], folder: &Path) -> Result<(), Failure> {
        let why = match (self.addresses.is_empty(), runs) {
            (true, _) => return Ok(()),
            (false, false) => "nothing in a guest that does not run can set its new addresses",
            (false, true) if Agent::is_on(line, folder) => return Ok(()),
            (false, true) => "the guest has no guest agent that could set its new addresses",
        };
        let advice = "leave out '--new-identity', and set them before the guest meets the first";
        Err(Failure::new(Code::Unsupported, why).advice(advice))
    }

    /// Finds the cards of a QEMU that has nothing loaded yet.
    pub fn find_cards(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        self.cards = cards(qmp, &self.addresses)?;
        Ok(())
    }

    /// Pulls the cables, of a guest that is loaded and does not run yet.
    pub fn pull_cables(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        set_links(qmp, &self.cards, false)
    }

    /// Has the running guest take its addresses, and plugs the cables in.
    pub fn hand_over(&self, record: &GuestRecord) -> Result<(), Failure> {
        if self.addresses.is_empty() {
            return Ok(());
        }
        let agent = Agent::of(&record.arguments, &record.folder, WITHIN);
        let agent = agent.unwrap_or(Err(dewar_guest_qemu::AgentError::Gone));
        agent
            .and_then(|mut agent| agent.set_addresses(&self.addresses))
            .map_err(|error| error.to_string())
            .and_then(|()| {
                let mut qmp = Qmp::connect_to(&record.qmp, &record.process)
                    .map_err(|error| error.to_string())?;
                set_links(&mut qmp, &self.cards, true).map_err(|error| error.to_string())
            })
            .map_err(|why| {
                let what = format!("the new addresses of '{}' were not set: {why}", record.name);
                let state = format!(
                    "the guest runs, with the cables of its network cards ({}) out",
                    self.cards.join(", ")
                );
                let advice = "set them by hand, then plug each in with QMP 'set_link'";
                Failure::new(Code::Attention, what).state(state).advice(advice)
            })
    }

    /// For programs: the new address of each old one.
    pub fn told(&self) -> Value {
        self.addresses
            .iter()
            .map(|it| (it.old.clone(), json!(it.new)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }
}
