//! The source's receiving side: it hears the destination until it is known which host has the guest, and in a
//! post-copy it sends the pages that the destination asks for.

use crate::failure::{Code, Failure};
use crate::migration::{Hands, SourceSide, ToTheDestination};
use crate::reporter::Reporter;
use dewar_capture::cores;
use dewar_memory::Ram;
use dewar_migrate::{Heard, MigrateError, PageSender, Postcopy};
use dewar_units::PageSet;
use dewar_wire::control::{CONTROL, ToSource};
use dewar_wire::ownership::{FromDestination, SourceEvent, SourceRecord};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How often it is looked how far the pages are.
const LOOK: Duration = Duration::from_millis(200);
/// How long the other side may take to say why it takes no pages any more.
const SAYS_WHY_WITHIN: Duration = Duration::from_secs(1);
/// Pages that were asked for are sent so many at a time.
const AT_ONCE: usize = 64;

/// What the other host may still need of a guest that was given to it.
pub(super) struct Serving<'s> {
    pub control: &'s ToTheDestination,
    /// Its memory; or why that is gone, which matters only where some of it is lacking.
    pub ram: Result<&'s Ram, String>,
    /// How many pages it has.
    pub pages: u64,
    pub sender: &'s PageSender,
    pub reporter: &'s dyn Reporter,
}

/// Is told of a word of the destination before it is acted upon.
pub(super) type OnWord<'w> = dyn FnMut(FromDestination, &mut dyn Hands) -> Result<(), Failure> + 'w;

impl Serving<'_> {
    /// Hears the destination until it is known on which side the guest is, and sends what it lacks; says
    /// how many pages that were.
    pub fn until_decided(
        &self,
        side: &mut SourceSide<'_>,
        hands: &mut dyn Hands,
        on_word: &mut OnWord<'_>,
    ) -> Result<u64, Failure> {
        let rest = OnceLock::new();
        let failure = Mutex::new(None);
        std::thread::scope(|scope| {
            let begin = |lacks: PageSet| -> Result<(), Failure> {
                let ram = match &self.ram {
                    Ok(ram) => *ram,
                    Err(_) if lacks.is_empty() => return Ok(()),
                    Err(why) => return Err(Failure::new(Code::Failed, why.clone())),
                };
                let rest: &Postcopy<'_> =
                    rest.get_or_init(|| Postcopy::new(ram, self.sender, lacks));
                for _ in 0..cores() {
                    scope.spawn(|| {
                        let sent = rest.send_rest();
                        let noted = &mut *failure.lock().unwrap_or_else(PoisonError::into_inner);
                        *noted = noted.take().or(sent.err());
                    });
                }
                Ok(())
            };
            let failed = || failure.lock().unwrap_or_else(PoisonError::into_inner).take();
            let heard = self.hear(side, hands, on_word, &rest, &begin, &failed);
            if let Some(rest) = rest.get() {
                rest.stop();
            }
            heard
        })?;
        Ok(rest.get().map_or(0, Postcopy::sent))
    }

    fn hear(
        &self,
        side: &mut SourceSide<'_>,
        hands: &mut dyn Hands,
        on_word: &mut OnWord<'_>,
        rest: &OnceLock<Postcopy<'_>>,
        begin: &dyn Fn(PageSet) -> Result<(), Failure>,
        failed: &dyn Fn() -> Option<MigrateError>,
    ) -> Result<(), Failure> {
        let unexpected = || Failure::from(MigrateError::Unexpected(CONTROL));
        let (mut lacks, mut lacks_bytes) = (Vec::new(), 0);
        let (mut why, mut is_shown) = (None, false);
        let all = self.pages;
        while !side.machine.is_decided() {
            if let Some(error) = failed() {
                return Err(error.into());
            }
            let is_serving = side.machine.record() == Some(SourceRecord::Serving);
            if let Some(rest) = rest.get().filter(|_| is_serving) {
                if !std::mem::replace(&mut is_shown, true) {
                    self.reporter.stage("sending the rest");
                }
                self.reporter.progress(rest.sent(), rest.of());
            }
            let heard = self.control.hear_within(LOOK);
            match heard.map_err(|error| why.take().map_or(error, MigrateError::Failed))? {
                None => {}
                Some(Heard::State(bytes)) if rest.get().is_none() => {
                    lacks.extend_from_slice(&bytes);
                    if lacks.len() as u64 >= lacks_bytes {
                        begin(PageSet::from_bytes(&lacks, all).ok_or_else(unexpected)?)?;
                    }
                }
                Some(Heard::Message(ToSource::Lacks { bytes })) if bytes == all.div_ceil(8) => {
                    lacks_bytes = bytes;
                }
                Some(Heard::Message(ToSource::Wants { pages })) => {
                    let rest = rest.get().ok_or_else(unexpected)?;
                    for some in pages.chunks(AT_ONCE) {
                        let payload = rest.answer(some)?;
                        if !payload.is_empty() {
                            self.control.send_pages(&payload)?;
                        }
                    }
                }
                Some(Heard::Message(ToSource::Ownership(FromDestination::Refused)))
                    if is_serving =>
                {
                    let what = "the other host knows nothing of the guest any more";
                    return Err(Failure::new(Code::Failed, what));
                }
                Some(Heard::Message(ToSource::Ownership(word))) => {
                    on_word(word, hands)?;
                    side.on(SourceEvent::Heard(word), hands)?;
                }
                // What becomes of a guest that was given away follows.
                Some(Heard::Message(ToSource::Failed { why: told }))
                    if side.machine.record() == Some(SourceRecord::Given) =>
                {
                    why = Some(told);
                }
                Some(Heard::Message(ToSource::Failed { why })) => {
                    return Err(MigrateError::Failed(why).into());
                }
                Some(Heard::Message(ToSource::Arrived { .. })) => {}
                Some(_) => return Err(unexpected()),
            }
        }
        Ok(())
    }
}

/// Why pages cannot be sent any more, where a connection failed: what the other side said of it, or that it is
/// silent.
pub(super) fn why_not_sent(control: &ToTheDestination, error: MigrateError) -> MigrateError {
    if !matches!(error, MigrateError::Link { .. } | MigrateError::Ended(_)) {
        return error;
    }
    let deadline = Instant::now() + SAYS_WHY_WITHIN;
    loop {
        match control.hear_until(deadline) {
            Ok(Some(Heard::Message(ToSource::Failed { why }))) => return MigrateError::Failed(why),
            Ok(Some(Heard::Message(ToSource::Ownership(FromDestination::Refused)))) => {
                return MigrateError::Failed("it refused the guest".to_owned());
            }
            Ok(Some(_)) => {}
            Err(silent @ MigrateError::Silent(_)) => return silent,
            Ok(None) | Err(_) => return error,
        }
    }
}

/// Waits until the other side has all pages of an epoch.
pub(super) fn wait_for_epoch(control: &ToTheDestination, wanted: u32) -> Result<(), MigrateError> {
    loop {
        match control.message()? {
            ToSource::Arrived { epoch } if epoch == wanted => return Ok(()),
            ToSource::Arrived { epoch } if epoch < wanted => {}
            ToSource::Failed { why } => return Err(MigrateError::Failed(why)),
            ToSource::Ownership(FromDestination::Refused) => {
                return Err(MigrateError::Failed("it refused the guest".to_owned()));
            }
            _ => return Err(MigrateError::Unexpected(CONTROL)),
        }
    }
}
