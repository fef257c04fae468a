//! Threads that write finished segments and wait for the store, so that the
//! threads that encode need not.

use crate::ImageError;
use crate::aligned::AlignedBytes;
use crate::backend::Backend;
use crate::store::segment_name;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;

/// Segments on their way to the store at a time.
const FLUSHERS: usize = 3;

/// A segment's number and bytes.
type Finished = (u64, AlignedBytes);

pub(crate) struct Flusher {
    queue: mpsc::SyncSender<Finished>,
    threads: Vec<JoinHandle<Result<(), ImageError>>>,
    /// Memory of segments that are written. Fresh memory would cost as much as
    /// writing to it does.
    spare: Arc<Mutex<Vec<AlignedBytes>>>,
}

impl Flusher {
    /// As fast as the store takes them, with some more in wait.
    pub(crate) fn start(backend: &Arc<dyn Backend>) -> Self {
        Self::with(backend, FLUSHERS, FLUSHERS)
    }

    /// One after the other, and none in wait: who has one feels how slow the store is.
    pub(crate) fn start_narrow(backend: &Arc<dyn Backend>) -> Self {
        Self::with(backend, 1, 0)
    }

    fn with(backend: &Arc<dyn Backend>, threads: usize, in_wait: usize) -> Self {
        let (queue, segments) = mpsc::sync_channel::<Finished>(in_wait);
        let segments = Arc::new(Mutex::new(segments));
        let spare = Arc::default();
        let threads = (0..threads)
            .map(|_| {
                let (backend, segments) = (Arc::clone(backend), Arc::clone(&segments));
                let spare = Arc::clone(&spare);
                std::thread::spawn(move || write_all(&*backend, &segments, &spare))
            })
            .collect();
        Self { queue, threads, spare }
    }

    /// The way in.
    pub(crate) fn queue(&self) -> mpsc::SyncSender<Finished> {
        self.queue.clone()
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
) -> Result<(), ImageError> {
    loop {
        let next = lock(segments).recv();
        let Ok((number, mut bytes)) = next else { return Ok(()) };
        backend.put_new(&segment_name(number), &bytes)?;
        bytes.clear();
        lock(spare).push(bytes);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|locked| locked.into_inner())
}
