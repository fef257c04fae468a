//! Every order in which a migration's two sides can act, hear, be killed and lose their link.
//!
//! A state of the world is both sides, what they have on disk, what they have still to do, which messages
//! were ever sent, and what runs. A message that was sent may arrive at any time later, and again. From
//! each state that can be reached: never do both run; and once the link is back and both processes are
//! started again, exactly one does. Where the destination's QEMU ended in the moment in which the guest
//! was let run, none does, and the source has all of it still.

use dewar_wire::ownership::{
    Destination, DestinationAction, DestinationEvent, DestinationRecord, FromDestination,
    FromSource, Source, SourceAction, SourceEvent, SourceRecord,
};
use std::collections::{BTreeSet, HashSet, VecDeque};

/// Kills and cuts of the link in one history.
const MISHAPS: u8 = 5;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    source: Option<Source>,
    source_disk: Option<SourceRecord>,
    source_todo: VecDeque<SourceAction>,
    source_runs: bool,
    source_freed: bool,
    /// Everything is on the other host that it needs.
    state_sent: bool,
    destination: Option<Destination>,
    destination_disk: Option<DestinationRecord>,
    destination_todo: VecDeque<DestinationAction>,
    destination_runs: bool,
    /// Its QEMU lives and has loaded the guest.
    loaded: bool,
    /// Part of its memory is still at the source.
    partial: bool,
    /// The guest has run there: what the source has of it is old.
    has_run: bool,
    /// QEMU ended after the guest was on record as running there: a guest's end like any other.
    ended: bool,
    /// Nothing will ever happen there again.
    fenced: bool,
    link: bool,
    to_source: BTreeSet<FromDestination>,
    to_destination: BTreeSet<FromSource>,
    mishaps: u8,
}

impl World {
    fn new() -> Self {
        Self {
            source: Some(Source::new()),
            source_disk: None,
            source_todo: VecDeque::new(),
            source_runs: true,
            source_freed: false,
            state_sent: false,
            destination: Some(Destination::new()),
            destination_disk: None,
            destination_todo: VecDeque::new(),
            destination_runs: false,
            loaded: false,
            partial: false,
            has_run: false,
            ended: false,
            fenced: false,
            link: true,
            to_source: BTreeSet::new(),
            to_destination: BTreeSet::new(),
            mishaps: MISHAPS,
        }
    }

    fn source_event(&mut self, event: SourceEvent) {
        let actions = self.source.as_mut().map(|it| it.on(event)).unwrap_or_default();
        self.source_todo.extend(actions);
    }

    fn destination_event(&mut self, event: DestinationEvent) {
        let actions = self.destination.as_mut().map(|it| it.on(event)).unwrap_or_default();
        self.destination_todo.extend(actions);
    }

    /// Whether the destination is one to which pages still come.
    fn is_receiving(&self) -> bool {
        self.destination == Some(Destination::new())
    }

    /// Whether the rest of its memory is to come, and the source has it.
    fn memory_can_arrive(&self) -> bool {
        self.partial && self.loaded && self.destination.is_some() && !self.source_freed
    }

    fn memory_arrives(&mut self) {
        self.partial = false;
        self.destination_event(DestinationEvent::Complete);
    }

    fn source_acts(&mut self) {
        match self.source_todo.pop_front() {
            Some(SourceAction::Record(record)) => self.source_disk = record,
            Some(SourceAction::Send(message)) if self.link => {
                self.to_destination.insert(message);
            }
            Some(SourceAction::Stop) => self.source_runs = false,
            Some(SourceAction::Resume) => {
                assert!(!self.source_freed, "there is nothing to run any more: {self:?}");
                let is_old = self.has_run && !self.fenced;
                assert!(!is_old, "it goes on from before it ran elsewhere: {self:?}");
                self.source_runs = true;
            }
            Some(SourceAction::Free) => {
                assert!(!self.source_runs, "the running guest is freed: {self:?}");
                let is_owed = self.partial && self.destination_runs;
                assert!(!is_owed, "memory that the guest needs is freed: {self:?}");
                self.source_freed = true;
            }
            Some(SourceAction::Send(_)) | None => {}
        }
    }

    fn destination_acts(&mut self) {
        match self.destination_todo.pop_front() {
            Some(DestinationAction::Record(record)) => self.destination_disk = Some(record),
            Some(DestinationAction::Forget) => self.destination_disk = None,
            Some(DestinationAction::Send(message)) if self.link => {
                self.to_source.insert(message);
            }
            Some(DestinationAction::Run) => {
                assert!(self.loaded, "there is nothing to run: {self:?}");
                (self.destination_runs, self.has_run) = (true, true);
            }
            Some(DestinationAction::Discard) => {
                assert!(!self.destination_runs, "the running guest is discarded: {self:?}");
                self.loaded = false;
            }
            Some(DestinationAction::Send(_)) | None => {}
        }
    }

    fn recover_source(&mut self) {
        let (source, todo) = Source::recover(self.source_disk);
        (self.source, self.source_todo) = (Some(source), todo.into());
    }

    fn recover_destination(&mut self) {
        if self.destination_disk.is_none() && !self.destination_runs {
            // What was arriving is thrown away.
            self.loaded = false;
        }
        let (destination, todo) =
            Destination::recover(self.destination_disk, self.loaded, self.partial);
        (self.destination, self.destination_todo) = (Some(destination), todo.into());
    }

    /// The worlds that may come next.
    fn next(&self) -> Vec<Self> {
        let mut all = Vec::new();
        let mut then = |change: &dyn Fn(&mut Self)| {
            let mut next = self.clone();
            change(&mut next);
            all.push(next);
        };
        if self.source.is_none() {
            then(&Self::recover_source);
        } else if !self.source_todo.is_empty() {
            then(&Self::source_acts);
        } else {
            then(&|world| world.source_event(SourceEvent::Converged));
            then(&|world| world.source_event(SourceEvent::GiveUp));
            then(&|world| world.source_event(SourceEvent::LinkLost));
            if self.link {
                then(&|world| world.source_event(SourceEvent::LinkBack));
            }
            if self.fenced {
                then(&|world| world.source_event(SourceEvent::TakeBack));
            }
            for message in &self.to_source {
                then(&|world| world.source_event(SourceEvent::Heard(*message)));
            }
            let is_sending = self.source_disk == Some(SourceRecord::Intent) && !self.source_runs;
            if self.link && is_sending {
                then(&|world| world.state_sent = true);
            }
        }
        if self.destination.is_none() {
            if !self.fenced {
                then(&Self::recover_destination);
                then(&|world| {
                    (world.fenced, world.destination_runs, world.loaded) = (true, false, false);
                });
            }
        } else if !self.destination_todo.is_empty() {
            then(&Self::destination_acts);
        } else {
            if self.state_sent && self.is_receiving() {
                then(&|world| {
                    world.loaded = true;
                    world.destination_event(DestinationEvent::Loaded);
                });
            }
            if self.state_sent && self.is_receiving() {
                then(&|world| {
                    (world.loaded, world.partial) = (true, true);
                    world.destination_event(DestinationEvent::LoadedInPart);
                });
            }
            if self.memory_can_arrive() && self.link && self.source.is_some() {
                then(&Self::memory_arrives);
            }
            then(&|world| world.destination_event(DestinationEvent::GiveUp));
            then(&|world| world.destination_event(DestinationEvent::LinkLost));
            if self.link {
                then(&|world| world.destination_event(DestinationEvent::LinkBack));
            }
            for message in &self.to_destination {
                then(&|world| world.destination_event(DestinationEvent::Heard(*message)));
            }
        }
        if !self.link {
            then(&|world| world.link = true);
        }
        if self.mishaps > 0 {
            let mut mishap = |change: &dyn Fn(&mut Self)| {
                then(&|world| {
                    world.mishaps -= 1;
                    change(world);
                });
            };
            if self.link {
                mishap(&|world| world.link = false);
            }
            if self.source.is_some() {
                mishap(&|world| {
                    (world.source, world.source_todo) = (None, VecDeque::new());
                });
            }
            if self.destination.is_some() {
                let kill = |world: &mut Self| {
                    (world.destination, world.destination_todo) = (None, VecDeque::new());
                };
                mishap(&kill);
                // With its QEMU.
                mishap(&|world| {
                    kill(world);
                    world.ended |= world.destination_runs
                        && world.destination_disk != Some(DestinationRecord::Owned);
                    (world.loaded, world.destination_runs) = (false, false);
                });
            }
        }
        all
    }

    /// Both processes are started again where they were killed, the link is there, and all is said.
    fn repair(mut self) -> Self {
        if self.source.is_none() {
            self.recover_source();
        }
        if self.destination.is_none() && !self.fenced {
            self.recover_destination();
        }
        self.link = true;
        self.finish_todo();
        // What was sent before was lost.
        self.to_source.clear();
        self.to_destination.clear();
        if self.fenced {
            self.source_event(SourceEvent::LinkLost);
            self.source_event(SourceEvent::TakeBack);
        }
        self.source_event(SourceEvent::LinkLost);
        self.destination_event(DestinationEvent::LinkLost);
        self.finish_todo();
        self.source_event(SourceEvent::LinkBack);
        self.destination_event(DestinationEvent::LinkBack);
        for _ in 0..8 {
            self.finish_todo();
            for message in std::mem::take(&mut self.to_destination) {
                self.destination_event(DestinationEvent::Heard(message));
            }
            for message in std::mem::take(&mut self.to_source) {
                self.source_event(SourceEvent::Heard(message));
            }
            self.finish_todo();
            if self.memory_can_arrive() && self.destination_runs {
                self.memory_arrives();
            }
        }
        self
    }

    fn finish_todo(&mut self) {
        while !self.source_todo.is_empty() {
            self.source_acts();
        }
        while !self.destination_todo.is_empty() {
            self.destination_acts();
        }
    }
}

/// All worlds that can be reached.
fn reachable() -> HashSet<World> {
    let mut seen = HashSet::from([World::new()]);
    let mut left = vec![World::new()];
    while let Some(world) = left.pop() {
        for next in world.next() {
            if seen.insert(next.clone()) {
                left.push(next);
            }
        }
    }
    seen
}

#[test]
fn never_do_both_run_and_in_the_end_one_does() {
    let worlds = reachable();
    println!("{} states of the world", worlds.len());
    assert!(worlds.len() > 5_000, "hardly anything was tried");
    let moved = worlds.iter().filter(|world| world.destination_runs && world.source_freed);
    assert!(moved.count() > 0, "no history moves the guest");
    let served = |world: &&World| world.source_disk == Some(SourceRecord::Serving);
    assert!(worlds.iter().filter(served).count() > 0, "no history is a post-copy");
    for world in worlds {
        assert!(!(world.source_runs && world.destination_runs), "both run: {world:?}");
        // It ended where it ran: as a guest ends, or with the host that was fenced, after the source
        // had heard that it ran there.
        let knows = [Some(SourceRecord::Serving), Some(SourceRecord::Gone)];
        let heard = world.source.is_some_and(|it| knows.contains(&it.record()));
        let heard = heard || knows.contains(&world.source_disk) || world.source_freed;
        if world.ended || world.fenced && heard {
            continue;
        }
        let end = world.clone().repair();
        if end.destination.is_some_and(|destination| destination.is_lost()) {
            let is_kept = !end.source_freed && end.source_disk == Some(SourceRecord::Given);
            assert!(is_kept && !end.source_runs, "what may have run is lost or runs: {end:?}");
            continue;
        }
        let lacks = end.destination_runs && end.partial;
        assert!(!lacks, "its memory never comes: {world:?} came to {end:?}");
        assert!(
            end.source_runs != end.destination_runs,
            "not exactly one runs in the end: {world:?} came to {end:?}"
        );
        let is_left = !end.fenced && end.destination_disk == Some(DestinationRecord::Loaded);
        assert!(!is_left, "a guest stands there for ever: {world:?} came to {end:?}");
        let is_known = end.destination_disk.is_some() && !end.fenced;
        assert!(!is_known, "a record is never removed: {world:?} came to {end:?}");
    }
}

#[test]
fn a_guest_moves_when_nothing_goes_wrong() {
    let mut world = World::new();
    world.source_event(SourceEvent::Converged);
    world.finish_todo();
    assert!(!world.source_runs);
    world.loaded = true;
    world.destination_event(DestinationEvent::Loaded);
    for _ in 0..3 {
        world.finish_todo();
        for message in std::mem::take(&mut world.to_source) {
            world.source_event(SourceEvent::Heard(message));
        }
        world.finish_todo();
        for message in std::mem::take(&mut world.to_destination) {
            world.destination_event(DestinationEvent::Heard(message));
        }
    }
    assert!(world.destination_runs && world.source_freed && !world.source_runs);
    assert!(world.source.is_some_and(|source| source.is_decided()));
}

#[test]
fn a_guest_that_was_given_is_not_taken_back_on_its_own() {
    let mut source = Source::new();
    source.on(SourceEvent::Converged);
    source.on(SourceEvent::Heard(FromDestination::Ready));
    assert_eq!(source.record(), Some(SourceRecord::Given));
    for event in [SourceEvent::LinkLost, SourceEvent::GiveUp, SourceEvent::Converged] {
        assert_eq!(source.on(event), Vec::new());
    }
    let (mut source, todo) = Source::recover(source.record());
    assert_eq!(todo, Vec::new());
    assert_eq!(source.on(SourceEvent::LinkBack), [SourceAction::Send(FromSource::Commit)]);
}
