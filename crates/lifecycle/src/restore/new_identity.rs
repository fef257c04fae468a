//! `restore --as NAME --new-identity`: the copy's network cards get new addresses.
//!
//! The addresses are put on the command line of the copy's QEMU, for the next boot. The guest
//! itself still has the old ones: it is let run with its cables out, its agent sets the new
//! ones, and only then are the cables plugged in.

use crate::failure::{Code, Failure};
use crate::text::foreign;
use dewar_guest_qemu::identity::{NewAddress, cards, renew_addresses, set_links};
use dewar_guest_qemu::start_from_state::{Machine, StartError};
use dewar_guest_qemu::{Agent, Qmp, QmpError, RunState};
use dewar_registry::GuestRecord;
use serde_json::{Value, json};
use std::time::Duration;

/// How long the agent may take: the guest's memory may still be arriving.
const WITHIN: Duration = Duration::from_secs(30);

/// The addresses of a copy; none where they stay as they are.
#[derive(Default)]
pub struct NewIdentity {
    asked: bool,
    addresses: Vec<NewAddress>,
    /// QEMU's names for the cards that get them.
    cards: Vec<String>,
}

impl NewIdentity {
    /// Chooses addresses and puts them on the saved machine's command line, if the guest can be
    /// told of them: it will run, and has an agent.
    pub fn choose(machine: &mut Value, run: bool) -> Result<Self, Failure> {
        let addresses = renew_addresses(machine).map_err(|error| refused(error.to_string()))?;
        let saved: Machine = serde_json::from_value(machine.clone())
            .map_err(|error| Failure::from(StartError::Machine(error)))?;
        let why = match (addresses.is_empty(), run || saved.was_running()) {
            (true, _) => None,
            (_, false) => Some("nothing in a guest that does not run can set its new addresses"),
            _ if Agent::is_on(&saved.arguments, &saved.folder) => None,
            _ => Some("the guest has no guest agent that could set its new addresses"),
        };
        match why {
            Some(why) => Err(refused(why.to_owned())),
            None => Ok(Self { asked: true, addresses, cards: Vec::new() }),
        }
    }

    /// Finds the cards of a QEMU that has nothing loaded yet.
    pub fn find_cards(&mut self, qmp: &mut Qmp) -> Result<(), QmpError> {
        if self.asked {
            self.cards = cards(qmp, &self.addresses)?;
        }
        Ok(())
    }

    /// Pulls the cables, of a guest that is loaded and does not run yet.
    pub fn pull_cables(&self, qmp: &mut Qmp) -> Result<(), QmpError> {
        set_links(qmp, &self.cards, false)
    }

    /// Has the guest take its addresses, and plugs the cables in.
    pub fn hand_over(&self, record: &GuestRecord, state: &RunState) -> Result<(), Failure> {
        if self.addresses.is_empty() {
            return Ok(());
        }
        let name = &record.name;
        let agent = match state.is_running() {
            true => Agent::of(&record.arguments, &record.folder, WITHIN),
            false => None,
        };
        let set = match agent {
            None => Err("it does not run".to_owned()),
            Some(agent) => agent
                .and_then(|mut agent| agent.set_addresses(&self.addresses))
                .map_err(|error| error.to_string()),
        };
        set.map_err(|why| {
            let what = format!("the new addresses of '{name}' were not set: {}", foreign(&why));
            let advice = "set them by hand, then plug each card in with QMP 'set_link'";
            self.unplugged(record, what).advice(advice)
        })?;
        let plug =
            || set_links(&mut Qmp::connect_to(&record.qmp, &record.process)?, &self.cards, true);
        plug().map_err(|error| {
            let what = format!("'{name}' has its new addresses, but not all its cables: {error}");
            self.unplugged(record, what).advice("plug each card in with QMP 'set_link'")
        })
    }

    fn unplugged(&self, record: &GuestRecord, what: String) -> Failure {
        let cards = self.cards.join(", ");
        let state = match record.process.is_alive() {
            true => {
                format!("the guest is there, and cables of its network cards ({cards}) are out")
            }
            false => "the guest has ended".to_owned(),
        };
        Failure::new(Code::Attention, what).state(state)
    }

    /// For programs: the new address of each old one.
    pub fn report(&self) -> Value {
        self.addresses
            .iter()
            .map(|it| (it.old.clone(), json!(it.new)))
            .collect::<serde_json::Map<_, _>>()
            .into()
    }
}

fn refused(why: String) -> Failure {
    let advice = "leave out '--new-identity', and set them before the guest meets the first";
    Failure::new(Code::Unsupported, why).state("no guest was started").advice(advice)
}
