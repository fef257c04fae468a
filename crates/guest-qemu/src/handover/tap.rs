//! The headers of packets on a tap.
//!
//! The length of the header before each packet belongs to the tap, not to the process
//! that has it open (`TUNSETVNETHDRSZ`). A QEMU that starts sets it to the
//! shortest, until it has loaded what the guest negotiated. A guest that runs in
//! another QEMU meanwhile would find its packets out of place. So the command sets the length
//! back: again and again while the new QEMU starts, and once more when that waits. From then on
//! the new QEMU does not change it until it loads the guest.
//!
//! (A starting QEMU also turns offloads off. There is no call that tells which were on. Without
//! them packets arrive right, a little slower. The QEMU that gets the guest turns them on again.)

use dewar_kernel::{Pid, ProcessHandle, set_tap_header_bytes, tap_header_bytes};
use dewar_registry::ProcessId;
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const EVERY: Duration = Duration::from_micros(200);

/// A tap of a QEMU, and how long its headers were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TapHeader {
    /// The descriptor's number in that QEMU.
    pub(super) fd: i32,
    pub(super) bytes: i32,
}

/// Notes how long the headers are now; `taps` are copies of the same ones.
pub(super) fn look_again(headers: &mut [TapHeader], taps: &[OwnedFd]) {
    for (header, tap) in headers.iter_mut().zip(taps) {
        header.bytes = tap_header_bytes(tap).unwrap_or(header.bytes);
    }
}

/// Keeps headers as they are while it lives.
#[derive(Debug)]
pub(super) struct TapKeeper {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TapKeeper {
    /// Keeps those of these taps.
    pub(super) fn start(taps: Vec<OwnedFd>) -> Self {
        let known = |tap: OwnedFd| Some((tap_header_bytes(&tap).ok()?, tap));
        let taps: Vec<(i32, OwnedFd)> = taps.into_iter().filter_map(known).collect();
        let stop = Arc::new(AtomicBool::new(taps.is_empty()));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for (bytes, tap) in &taps {
                    if tap_header_bytes(tap).is_ok_and(|now| now != *bytes) {
                        let _ = set_tap_header_bytes(tap, *bytes);
                    }
                }
                std::thread::sleep(EVERY);
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for TapKeeper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sets the headers of a QEMU's taps as they were.
pub(super) fn restore(process: &ProcessId, taps: &[TapHeader]) {
    let Ok(handle) = ProcessHandle::open(Pid(process.pid)) else { return };
    for tap in taps.iter().filter(|_| process.is_seen()) {
        let _ = handle.fetch_fd(tap.fd).and_then(|file| set_tap_header_bytes(&file, tap.bytes));
    }
}
