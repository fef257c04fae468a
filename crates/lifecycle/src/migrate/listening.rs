//! The destination's receiving side: it takes the guest's pages, and hears from the source what becomes of
//! the guest.

use super::owed::{OwedService, hear};
use crate::failure::{Code, Failure};
use crate::migration::{DestinationSide, ToTheSource};
use crate::reporter::Reporter;
use dewar_migrate::{
    DirectListener, FrameReader, Heard, Identity, MigrateError, NewMemory, PageReceiver,
};
use dewar_wire::control::{
    CONTROL, Listening, MOST_STATE_BYTES, Offer, Stopped, ToDestination, ToSource,
};
use dewar_wire::frame::Side;
use dewar_wire::ownership::{DestinationEvent, FromSource};
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

/// Connections of pages that are listened for, at most.
const MOST_CONNECTIONS: u16 = 16;

/// How often it is looked whether the source is there while its last pages are waited for.
const LOOK: Duration = Duration::from_millis(500);

/// Accepts the guest, and begins to receive its pages on connections of their own, or in the tunnel.
pub(super) fn begin(
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
pub(super) fn acknowledge(control: &Arc<ToTheSource>, receiver: &Arc<PageReceiver>) {
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

/// What is said with the source once pages come.
pub(super) struct Talk<'t> {
    pub control: &'t ToTheSource,
    /// How many pages the guest may have.
    pub pages: u64,
    /// Whether it only is to be known whether it could come.
    pub trial: bool,
}

/// Loads a guest that stands still at the source: what was sent of its memory must be there, and its
/// record says how it is to go on. What serves the rest of its memory, if the source still has some, is
/// returned.
pub(super) type Load<'l> = dyn FnMut(&mut DestinationSide<'_>, &Stopped, Vec<u8>) -> Result<Option<OwedService>, Failure>
    + 'l;

impl Talk<'_> {
    /// Hears the source to the end.
    pub fn hear_out(
        &self,
        side: &mut DestinationSide<'_>,
        load: &mut Load<'_>,
        reporter: &dyn Reporter,
    ) -> Result<(), Failure> {
        let control = self.control;
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
                    let most = MOST_STATE_BYTES + self.pages.div_ceil(8);
                    let wanted = stopped.state_bytes.saturating_add(stopped.owed_bytes);
                    if (state.len() as u64) < wanted.min(most) {
                        continue;
                    }
                    match load(side, stopped, std::mem::take(state)) {
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
                            if self.trial {
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
}

/// Refuses the guest; the source is told why.
pub(super) fn give_up(
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

/// That the state of a guest is not longer than any is.
pub(super) fn require_short(stopped: &Stopped) -> Result<(), Failure> {
    if stopped.state_bytes <= MOST_STATE_BYTES {
        return Ok(());
    }
    let what = format!("{} bytes of device state are too many", stopped.state_bytes);
    Err(Failure::new(Code::Unsupported, what))
}

/// Waits until the last epoch of a guest that stands still has arrived.
pub(super) fn wait_for_pages(
    receiver: &PageReceiver,
    control: &ToTheSource,
    epoch: u32,
) -> Result<(), Failure> {
    loop {
        match receiver.wait_within(epoch, LOOK) {
            Some(true) => return Ok(()),
            Some(false) => return Err(not_arrived()),
            // A connection of pages may be lost and not say so.
            None if control.is_silent() => return Err(not_arrived()),
            None => {}
        }
    }
}

pub(super) fn not_arrived() -> Failure {
    Failure::new(Code::Failed, "its memory has not all arrived")
}
