//! A GPU that helps the threads which send pages: looked for when the cores are short, used where it pays
//! ([`Feed::gpu_pays`](dewar_codec::Feed::gpu_pays)).

use crate::MigrateError;
use dewar_codec::MOST_GPU_THREADS;
use dewar_codec_gpu::{Devices, Gpu, GpuError};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// For so long the end of a migration waits for a driver that is being loaded.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether a GPU encodes pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuUse {
    /// None does, and none is looked for.
    Never,
    /// One does where it pays. It is looked for when the connections outrun the cores.
    Auto,
    /// One does, be it one that a driver only computes.
    Always,
}

/// A GPU for a sender, or the promise to look for one.
#[derive(Clone)]
pub struct GpuHelp(pub(crate) Option<Arc<SharedGpu>>);

impl std::fmt::Debug for GpuHelp {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_tuple("GpuHelp").field(&self.0.as_ref().map(|gpu| gpu.how)).finish()
    }
}

impl GpuHelp {
    /// One that is to be used so.
    ///
    /// # Errors
    /// Where one is to be used always, and there is none that works.
    pub fn new(how: GpuUse) -> Result<Self, MigrateError> {
        let shared = (how != GpuUse::Never).then(|| SharedGpu::new(how));
        Ok(Self(shared.transpose()?))
    }
}

/// What became of that.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuUsed {
    /// Its name, if one was found.
    pub name: Option<String>,
    /// Pages that it encoded.
    pub pages: u64,
    /// Why it was left, if it failed. Its pages were encoded by cores.
    pub failure: Option<String>,
}

/// The GPU of a sender.
pub(crate) struct SharedGpu {
    how: GpuUse,
    found: OnceLock<Option<Gpu>>,
    /// Ends when nobody looks for it any more.
    looking: Mutex<Option<Receiver<()>>>,
    is_looked_for: AtomicBool,
    threads: AtomicUsize,
    pages: AtomicU64,
    failure: Mutex<Option<String>>,
    has_failed: AtomicBool,
}

impl SharedGpu {
    fn new(how: GpuUse) -> Result<Arc<Self>, MigrateError> {
        let shared = Self {
            how,
            found: OnceLock::new(),
            looking: Mutex::default(),
            is_looked_for: AtomicBool::new(false),
            threads: AtomicUsize::new(0),
            pages: AtomicU64::new(0),
            failure: Mutex::default(),
            has_failed: AtomicBool::new(false),
        };
        if how == GpuUse::Always {
            let found = Gpu::find(Devices::Any)?.ok_or(MigrateError::NoGpu)?;
            let _ = shared.found.set(Some(found));
        }
        Ok(Arc::new(shared))
    }

    /// Whether it is used wherever there is one.
    pub(crate) fn is_always_used(&self) -> bool {
        self.how == GpuUse::Always
    }

    /// It, if it was found and works.
    pub(crate) fn get(&self) -> Option<&Gpu> {
        match self.has_failed.load(Ordering::Relaxed) {
            true => None,
            false => self.found.get()?.as_ref(),
        }
    }

    /// Begins to look for one, if nobody has. Loading a driver takes up to seconds.
    pub(crate) fn look(self: &Arc<Self>) {
        if self.how != GpuUse::Auto || self.is_looked_for.swap(true, Ordering::Relaxed) {
            return;
        }
        let shared = Arc::clone(self);
        let (done, looking) = sync_channel::<()>(0);
        let look = move || {
            let _done = done;
            let found = Gpu::find(Devices::Gpus).unwrap_or_else(|error| {
                shared.failed(&error);
                None
            });
            let _ = shared.found.set(found);
        };
        *self.looking.lock().unwrap_or_else(PoisonError::into_inner) = Some(looking);
        std::thread::spawn(look);
    }

    /// Waits for the thread that looks: a process should not end while a driver is being loaded.
    pub(crate) fn stop_looking(&self) {
        let looking = self.looking.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _ = looking.map(|looking| looking.recv_timeout(PATIENCE));
    }

    /// Whether one more thread may feed it. If so, that one says when it ends.
    pub(crate) fn enter(&self) -> bool {
        let entered = self.threads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |threads| {
            (threads < MOST_GPU_THREADS).then_some(threads + 1)
        });
        entered.is_ok()
    }

    /// Says whether no thread feeds it any more.
    pub(crate) fn leave(&self) -> bool {
        self.threads.fetch_sub(1, Ordering::Relaxed) == 1
    }

    pub(crate) fn encoded(&self, pages: usize) {
        self.pages.fetch_add(pages as u64, Ordering::Relaxed);
    }

    /// It is used no more.
    pub(crate) fn failed(&self, error: &GpuError) {
        self.has_failed.store(true, Ordering::Relaxed);
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert_with(|| error.to_string());
    }

    pub(crate) fn used(&self) -> GpuUsed {
        let name =
            self.found.get().and_then(|found| found.as_ref().map(|gpu| gpu.name().to_owned()));
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone();
        GpuUsed { name, pages: self.pages.load(Ordering::Relaxed), failure }
    }
}
