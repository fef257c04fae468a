//! Threads that write finished segments and wait for the disk, so that the
//! threads that encode need not.

use crate::ImageError;
use crate::direct::DirectWriter;
use crate::store::segment_name;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;

/// Segments on their way to the disk at a time.
const FLUSHERS: usize = 3;

/// A segment's number and bytes.
type Finished = (u64, Vec<u8>);

pub(crate) struct Flusher {
    queue: mpsc::SyncSender<Finished>,
    threads: Vec<JoinHandle<Result<(), ImageError>>>,
    /// Memory of segments that are written. Fresh memory would cost as much as
    /// writing to it does.
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Flusher {
    pub(crate) fn start(root: &Path) -> Self {
        let (queue, segments) = mpsc::sync_channel::<Finished>(FLUSHERS);
        let segments = Arc::new(Mutex::new(segments));
        let spare = Arc::default();
        let threads = (0..FLUSHERS)
            .map(|_| {
                let (root, segments) = (root.to_owned(), Arc::clone(&segments));
                let spare = Arc::clone(&spare);
                std::thread::spawn(move || write_all(&root, &segments, &spare))
            })
            .collect();
        Self { queue, threads, spare }
    }

    /// The way in.
    pub(crate) fn queue(&self) -> mpsc::SyncSender<Finished> {
        self.queue.clone()
    }

    /// An empty buffer, used before if there is one.
    pub(crate) fn spare_buffer(&self) -> Vec<u8> {
        lock(&self.spare).pop().unwrap_or_default()
    }

    /// Waits until everything is on disk; the first error wins.
    pub(crate) fn finish(self) -> Result<(), ImageError> {
        drop(self.queue);
        self.threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .fold(Ok(()), Result::and)
    }
}

fn write_all(
    root: &Path,
    segments: &Mutex<mpsc::Receiver<Finished>>,
    spare: &Mutex<Vec<Vec<u8>>>,
) -> Result<(), ImageError> {
    let mut writer = DirectWriter::default();
    loop {
        let next = lock(segments).recv();
        let Ok((number, mut bytes)) = next else { return Ok(()) };
        writer.write(&root.join(segment_name(number)), &bytes)?;
        bytes.clear();
        lock(spare).push(bytes);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|locked| locked.into_inner())
}
