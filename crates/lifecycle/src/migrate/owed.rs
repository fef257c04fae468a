//! The destination's part of a post-copy: the guest runs, or is about to, and the source still has part of
//! its memory.
//!
//! ```text
//!  the pages that are owed are noted on disk, and made missing in the RAM files
//!  from now on a touch of a missing page waits (userfaultfd)
//!  Lacks ->                                 the source begins to send
//!  a thread hears of touches, Wants ->      those pages come before all others
//!  all have come: the service ends
//! ```
//!
//! If this process dies the guest waits for what it touches; the next `receive` that the source starts takes
//! it over ([`OwedService::take_over`]).

use crate::failure::{Code, Failure};
use crate::migration::{DestinationSide, ToTheSource, owed_pages};
use crate::page_server::ServerState;
use dewar_guest_qemu::{Incoming, map_ram_files};
use dewar_memory::{Pid, ProcessHandle, UffdOrigin};
use dewar_migrate::{FrameReader, Heard, MigrateError, NewMemory, OwedMemory, PageReceiver};
use dewar_registry::{GuestFolder, GuestRecord, ProcessId};
use dewar_units::PageSet;
use dewar_wire::control::{ToDestination, ToSource};
use dewar_wire::frame::Side;
use dewar_wire::ownership::DestinationEvent;
use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long a touch is waited for at a time.
const TICK_MS: u32 = 100;
/// How often it is looked whether all has come.
const LOOK: Duration = Duration::from_millis(20);
/// How often it is noted how far it is.
const NOTE: Duration = Duration::from_millis(500);

/// What is being done about the pages that a guest lacks.
pub(super) struct OwedService {
    owed: Arc<OwedMemory>,
    /// That the guest's process has ended, or why nobody hears of its touches any more.
    ended: Arc<OnceLock<Result<(), String>>>,
    /// That touches wait no more.
    finished: Arc<AtomicBool>,
    receiver: Arc<PageReceiver>,
    noted: Instant,
}

impl OwedService {
    /// Begins for a guest that is about to be loaded.
    pub fn begin(
        control: &Arc<ToTheSource>,
        folder: &GuestFolder,
        incoming: &mut Incoming,
        memory: &NewMemory,
        receiver: &Arc<PageReceiver>,
        owed: PageSet,
    ) -> Result<Self, Failure> {
        memory.clear(&owed)?;
        owed_pages::note(folder, &owed)?;
        let count = owed.count();
        let (process, ram, origin) = incoming.memory()?;
        let attached = OwedMemory::attach(owed, &process, &ram, origin);
        incoming.close_uffd_device();
        let attached = Arc::new(attached?);
        if attached.left() != count {
            // A page that is there would be taken for what the guest has.
            let there = count - attached.left();
            let what = format!("{there} pages of its memory could not be made ready");
            return Err(Failure::new(Code::Failed, what));
        }
        incoming.record_mut().server = ProcessId::of(std::process::id() as i32);
        incoming.save()?;
        memory.owes(&attached);
        Self::start(control, folder, attached, receiver)
    }

    /// Goes on for a guest of which a process that is gone had begun.
    pub fn take_over(
        control: &Arc<ToTheSource>,
        folder: &GuestFolder,
        record: &GuestRecord,
        tunnel: impl Read + Send + 'static,
    ) -> Result<Self, Failure> {
        let process = ProcessHandle::open(Pid(record.process.pid))
            .map_err(|error| Failure::new(Code::Failed, error.to_string()))?;
        let ram = map_ram_files(&record.name, record.process.pid, &record.ram)?;
        let owed =
            owed_pages::noted(folder, ram.pages())?.unwrap_or_else(|| PageSet::new(ram.pages()));
        // What the first made is still there.
        let owed = Arc::new(OwedMemory::attach(owed, &process, &ram, UffdOrigin::Syscall)?);
        let reader = FrameReader::new(tunnel, control.session(), 0, Side::Source);
        let memory = Arc::new(NewMemory::in_use(Arc::clone(&owed)));
        let receiver = Arc::new(PageReceiver::start(vec![reader], &memory));
        let server = ProcessId::of(std::process::id() as i32);
        folder.set_record(&GuestRecord { server, ..record.clone() })?;
        Self::start(control, folder, owed, &receiver)
    }

    fn start(
        control: &Arc<ToTheSource>,
        folder: &GuestFolder,
        owed: Arc<OwedMemory>,
        receiver: &Arc<PageReceiver>,
    ) -> Result<Self, Failure> {
        let ended = Arc::new(OnceLock::new());
        let receiver = Arc::clone(receiver);
        let finished = Arc::new(AtomicBool::new(false));
        let service = Self { owed, ended, finished, receiver, noted: Instant::now() };
        service.note(folder);
        let taker = Arc::clone(&service.owed);
        control.take_pages(move |payload| taker.take(payload));
        let missing = service.owed.missing().to_bytes();
        control.send(&ToSource::Lacks { bytes: missing.len() as u64 })?;
        control.send_state(&missing)?;
        let (asker, owed) = (Arc::clone(control), Arc::clone(&service.owed));
        let (ended, finished) = (Arc::clone(&service.ended), Arc::clone(&service.finished));
        std::thread::spawn(move || {
            if let Some(end) = ask_for_touched(&asker, &owed, &finished).transpose() {
                let _ = ended.set(end.map_err(|error| error.to_string()));
            }
        });
        Ok(service)
    }

    /// Whether there is nothing more to do; why it cannot go on, if so.
    fn is_over(&self) -> Result<bool, MigrateError> {
        let failure = match self.ended.get() {
            _ if self.owed.left() == 0 => return Ok(true),
            Some(Ok(())) => return Ok(true),
            Some(Err(why)) => Some(why.clone()),
            None => self.receiver.failure(),
        };
        failure.map_or(Ok(false), |why| Err(MigrateError::NoMore(why)))
    }

    /// Whether it cannot go on.
    pub fn has_failed(&self) -> bool {
        self.is_over().is_err()
    }

    /// Ends it. In this order: what is on disk says that touches wait until they do not.
    fn finish(&self, side: &mut DestinationSide<'_>) -> Result<(), Failure> {
        (side.reached)("all has come");
        if self.owed.left() == 0 {
            self.owed.finish()?;
        }
        self.finished.store(true, Ordering::Relaxed);
        side.set_server(None)?;
        owed_pages::forget(side.folder);
        Ok(())
    }

    /// Notes how far it is. The set only gets smaller: a page that came and that the guest gave back is not
    /// asked for again.
    fn note(&self, folder: &GuestFolder) {
        let missing = self.owed.missing();
        let (of, left) = (self.owed.of(), missing.count());
        let arrived = of - left;
        ServerState { arrived, of, ..ServerState::default() }.save(folder);
        let _ = owed_pages::note(folder, &missing);
    }
}

/// Asks for each page that the guest touches, and fills those that were never written, until touches wait no
/// more, or the connection is lost, or the guest's process has ended, which it says.
fn ask_for_touched(
    control: &ToTheSource,
    owed: &OwedMemory,
    finished: &AtomicBool,
) -> Result<Option<()>, MigrateError> {
    while !finished.load(Ordering::Relaxed) && !control.is_lost() {
        let Some(pages) = owed.wanted(TICK_MS)? else { return Ok(Some(())) };
        if !pages.is_empty() {
            let pages = pages.iter().map(|page| page.0).collect();
            // A lost connection is heard of where the next word is waited for.
            let _ = control.send(&ToSource::Wants { pages });
        }
    }
    Ok(None)
}

/// What the source says next; meanwhile the guest's memory comes, if it lacks some.
pub(super) fn hear(
    side: &mut DestinationSide<'_>,
    control: &ToTheSource,
    service: &mut Option<OwedService>,
) -> Result<Heard<ToDestination>, Failure> {
    while let Some(serving) = service {
        let heard = match serving.is_over()? {
            true => Ok(None),
            false => control.hear_within(LOOK),
        };
        // What came last may have come with the end of the connection.
        if serving.is_over()? {
            serving.finish(side)?;
            *service = None;
            side.on(DestinationEvent::Complete)?;
        } else if serving.noted.elapsed() > NOTE {
            serving.note(side.folder);
            serving.noted = Instant::now();
        }
        if let Some(heard) = heard.inspect_err(|_| note_at_the_end(side, service))? {
            return Ok(heard);
        }
    }
    Ok(control.hear()?)
}

/// Notes how far it is where the connection has ended.
fn note_at_the_end(side: &DestinationSide<'_>, service: &Option<OwedService>) {
    if let Some(serving) = service {
        serving.note(side.folder);
    }
}
