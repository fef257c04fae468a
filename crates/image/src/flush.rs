//! Threads that write finished segments and wait for the store, so that the
//! threads that encode need not.

use crate::ImageError;
use crate::segment::segment_name;
use dewar_codec::Feed;
use dewar_store::AlignedBytes;
use dewar_store::Backend;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;

/// Segments on their way to the store at a time.
const FLUSHERS: usize = 3;

/// Segments that are written, or wait for it, at most.
pub(crate) const ON_THEIR_WAY: usize = 2 * FLUSHERS;

/// A segment's number and bytes.
type Finished = (u64, AlignedBytes);

pub(crate) struct Flusher {
    queue: mpsc::SyncSender<Finished>,
    threads: Vec<JoinHandle<Result<(), ImageError>>>,
    /// Memory of segments that are written. Fresh memory would cost as much as
    /// writing to it does.
    spare: Arc<Mutex<Vec<AlignedBytes>>>,
    gate: Arc<Gate>,
}

/// Who has a segment waits here while it is narrow and another is on its way.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    narrow: bool,
    on_their_way: usize,
    /// Whether a thread has ended, so that some may never arrive.
    given_up: bool,
}

impl Gate {
    /// Lets one segment after the other go, or all of them.
    pub(crate) fn set_narrow(&self, narrow: bool) {
        lock(&self.state).narrow = narrow;
        self.changed.notify_all();
    }

    /// Before a segment is handed over.
    pub(crate) fn pass(&self) {
        let is_shut =
            |state: &mut GateState| state.narrow && state.on_their_way > 0 && !state.given_up;
        let open = self.changed.wait_while(lock(&self.state), is_shut);
        open.unwrap_or_else(|locked| locked.into_inner()).on_their_way += 1;
    }

    /// After it has arrived.
    fn leave(&self) {
        lock(&self.state).on_their_way -= 1;
        self.changed.notify_all();
    }
}

/// Says that segments go one by one ([`ImageWriter::narrowly`](crate::ImageWriter::narrowly)).
#[must_use]
pub struct Narrowly(Option<Arc<Gate>>);

impl Narrowly {
    /// From now on, through this gate.
    pub(crate) fn through(gate: Option<Arc<Gate>>) -> Self {
        gate.iter().for_each(|gate| gate.set_narrow(true));
        Self(gate)
    }
}

impl Drop for Narrowly {
    fn drop(&mut self) {
        self.0.iter().for_each(|gate| gate.set_narrow(false));
    }
}

/// Opens the gate for good as a thread ends, however it does.
struct GivesUp<'g>(&'g Gate);

impl Drop for GivesUp<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).given_up = true;
        self.0.changed.notify_all();
    }
}

impl Flusher {
    pub(crate) fn start(backend: &Arc<dyn Backend>, feed: &Arc<Feed>) -> Self {
        let (queue, segments) = mpsc::sync_channel::<Finished>(FLUSHERS);
        let segments = Arc::new(Mutex::new(segments));
        let (spare, gate) = (Arc::default(), Arc::<Gate>::default());
        let threads = (0..FLUSHERS)
            .map(|_| {
                let (backend, segments) = (Arc::clone(backend), Arc::clone(&segments));
                let (spare, gate) = (Arc::clone(&spare), Arc::clone(&gate));
                let feed = Arc::clone(feed);
                std::thread::spawn(move || write_all(&*backend, &segments, &spare, &gate, &feed))
            })
            .collect();
        Self { queue, threads, spare, gate }
    }

    /// The way in, and the gate before it.
    pub(crate) fn queue(&self) -> (mpsc::SyncSender<Finished>, Arc<Gate>) {
        (self.queue.clone(), self.gate.clone())
    }

    /// An empty buffer, used before if there is one.
    pub(crate) fn spare_buffer(&self) -> AlignedBytes {
        lock(&self.spare).pop().unwrap_or_default()
    }

    /// Waits until everything is in the store; the first error wins.
    pub(crate) fn finish(self) -> Result<(), ImageError> {
        drop(self.queue);
        self.threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .fold(Ok(()), Result::and)
    }
}

fn write_all(
    backend: &dyn Backend,
    segments: &Mutex<mpsc::Receiver<Finished>>,
    spare: &Mutex<Vec<AlignedBytes>>,
    gate: &Gate,
    feed: &Feed,
) -> Result<(), ImageError> {
    let _gives_up = GivesUp(gate);
    loop {
        let next = lock(segments).recv();
        let Ok((number, mut bytes)) = next else { return Ok(()) };
        backend.put_new(&segment_name(number), &bytes)?;
        feed.taken(bytes.len());
        gate.leave();
        bytes.clear();
        lock(spare).push(bytes);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|locked| locked.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Whether a segment that comes now goes on, and how that is known of a later one.
    fn pass(gate: &Arc<Gate>) -> mpsc::Receiver<()> {
        let (passed, has_passed) = mpsc::channel();
        let gate = gate.clone();
        std::thread::spawn(move || {
            gate.pass();
            let _ = passed.send(());
        });
        has_passed
    }

    #[test]
    fn through_a_narrow_gate_they_go_one_by_one() {
        let gate = Arc::<Gate>::default();
        let (soon, at_last) = (Duration::from_millis(50), Duration::from_secs(20));
        gate.pass();
        pass(&gate).recv_timeout(at_last).expect("as many as come");
        gate.leave();
        gate.set_narrow(true);
        let waits = pass(&gate);
        assert!(waits.recv_timeout(soon).is_err(), "one is on its way");
        gate.leave();
        waits.recv_timeout(at_last).expect("it has arrived");
        let waits = pass(&gate);
        gate.set_narrow(false);
        waits.recv_timeout(at_last).expect("it is wide again");
        gate.set_narrow(true);
        let waits = pass(&gate);
        assert!(waits.recv_timeout(soon).is_err());
        drop(GivesUp(&gate));
        waits.recv_timeout(at_last).expect("what is on its way may never arrive");
    }
}
