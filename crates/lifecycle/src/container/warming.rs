//! The pages of files that a container uses are read while it comes.

use crate::failure::{Code, Failure};
use crate::page_cache::{Warmed, files_of_container, warm};
use crate::reporter::Reporter;
use dewar_guest_oci::Container;
use dewar_kernel::available_memory;
use dewar_pagecache::Manifest;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// The share of the memory that is free which is filled so.
const WARM_SHARE: u64 = 2;

/// A thread that reads them. Dropped, it stops.
pub(crate) struct Warming {
    manifest: Manifest,
    thread: Option<JoinHandle<Warmed>>,
    stop: Arc<AtomicBool>,
}

impl Warming {
    /// Begins, where it is known which they are.
    pub(crate) fn start(
        container: &Container,
        known: Result<Option<Manifest>, Failure>,
        reporter: &dyn Reporter,
    ) -> Option<Self> {
        let begun = || -> Result<Option<Self>, Failure> {
            let Some(manifest) = known? else { return Ok(None) };
            let trees = files_of_container(container, &container.config()?)?;
            let most = available_memory().map_or(0, |free| free / WARM_SHARE);
            let (read, stop) = (manifest.clone(), Arc::new(AtomicBool::new(false)));
            let asked = Arc::clone(&stop);
            let thread = std::thread::Builder::new()
                .spawn(move || warm(&trees, &read, most, &asked, &|_| {}))
                .map_err(|error| Failure::new(Code::Failed, error.to_string()))?;
            Ok(Some(Self { manifest, thread: Some(thread), stop }))
        };
        begun().unwrap_or_else(|failure| {
            reporter.warn(&format!("what it uses is not read before: {}", failure.whole()));
            None
        })
    }

    /// Which pages these are.
    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether all are read.
    pub(crate) fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until all are read.
    pub(crate) fn finish(mut self) {
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Warming {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
