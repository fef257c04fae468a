//! How much each frame is compressed, so that the cores and what takes the bytes finish together.
//!
//! Threads encode frames into pieces (a store's segments, a link's messages) and hand each to a *sink*
//! that writes or sends one after the other. Compressed less than they could be, the pieces keep the sink
//! busy for longer than needed; compressed more, the sink waits for the cores. Between the two lies a
//! mixture, and it is found frame by frame with one question: **will my piece be there before the sink
//! has nothing to do?**
//!
//! ```text
//!   left of the piece, in bytes                    bytes that the sink has not taken
//!   --------------------------- * seconds a byte  <=  ---------------------------------
//!      bytes out a byte in           in                    bytes that it takes a second
//! ```
//!
//! A frame gets the codec that compresses most of those for which this holds, and is stored raw where it
//! holds for none. All terms but the first are measured while it runs: cost and ratio of each codec on
//! the frames before, the sink's speed over what it took last while it had something to do.
//!
//! - A slow sink has much before it at all times: everything is compressed most.
//! - A fast one is soon done with what it has: everything is stored raw, as fast as memory is copied.
//! - In between the sink is never idle, and the cores compress in the time that this leaves.
//!
//! There is no clock in here: a simulated host tests it.

use crate::Codec;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// From the one that compresses most to the one that does not.
const CODECS: [Codec; 3] = [Codec::Zstd, Codec::Lz4, Codec::Raw];
/// What a sink is taken to take in a second until it is measured.
const UNKNOWN_SPEED: f64 = 1e9;
/// A sink's speed is that of about so many bytes.
const SPEED_OVER: f64 = 64e6;
/// The share of one frame in what is known of a codec.
const WEIGHT: f64 = 1.0 / 16.0;
/// A codec that was not used for so many frames is tried: it may be another on these pages.
const TRY_AFTER: u32 = 128;
/// Of an unmeasured sink a piece is full with so many bytes: so it is soon known.
pub const FIRST_PIECE_BYTES: u64 = 1 << 20;

/// What is known of a codec.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// Seconds for a byte of pages.
    cost: f64,
    /// Bytes that come out of one.
    ratio: f64,
    /// Frames since it was last used.
    unused: u32,
}

#[derive(Debug)]
struct State {
    codecs: [Known; CODECS.len()],
    /// Seconds that a thread needs for a byte of pages beside encoding.
    other: f64,
    /// Bytes that the sink was given and has not taken.
    backlog: u64,
    /// Since when it has had something to do, or was last asked how long.
    busy_since: Duration,
    /// Bytes that it took, and the seconds in which it did.
    taken: (f64, f64),
}

/// Chooses codecs for the threads that feed one sink.
#[derive(Debug)]
pub struct Planner {
    state: Mutex<State>,
}

impl Default for Planner {
    fn default() -> Self {
        Self::new()
    }
}

impl Planner {
    /// A planner that knows nothing of its sink.
    pub fn new() -> Self {
        // As on guests' pages on a slow core; the first frames correct it.
        let known = |cost, ratio| Known { cost, ratio, unused: 0 };
        let codecs = [known(1.5e-9, 0.4), known(1.2e-9, 0.5), known(0.1e-9, 1.0)];
        let state = State {
            codecs,
            other: 0.3e-9,
            backlog: 0,
            busy_since: Duration::ZERO,
            taken: (0.0, 0.0),
        };
        Self { state: Mutex::new(state) }
    }

    /// The codec for a thread's next frame, when so many bytes are left of its piece.
    pub fn choose(&self, left: u64) -> Codec {
        let mut state = self.lock();
        state.codecs.iter_mut().for_each(|known| known.unused += 1);
        let untried = CODECS.iter().zip(&state.codecs).find(|(_, it)| it.unused > TRY_AFTER);
        if let Some((codec, _)) = untried {
            return *codec;
        }
        // At the beginning the sink waits for the first piece, which is short.
        if !state.is_measured() {
            return CODECS[0];
        }
        let time = state.backlog as f64 / state.speed();
        let is_there = |known: &&Known| {
            left as f64 / known.ratio.max(1e-3) * (known.cost + state.other) <= time
        };
        let place = state.codecs.iter().position(|known| is_there(&known));
        CODECS[place.unwrap_or(CODECS.len() - 1)]
    }

    /// How many bytes make a piece full, of so many at most.
    pub fn piece_bytes(&self, most: u64) -> u64 {
        if self.lock().is_measured() { most } else { most.min(FIRST_PIECE_BYTES) }
    }

    /// Says what a codec made of a frame: bytes in, bytes out, and the time that it took. `other` is
    /// what the thread spent on these pages before.
    pub fn learn(&self, codec: Codec, read: u64, made: u64, took: Duration, other: Duration) {
        let mut state = self.lock();
        let per_byte = |time: Duration| time.as_secs_f64() / read.max(1) as f64;
        let blend = |old: f64, new: f64| old + (new - old) * WEIGHT;
        state.other = blend(state.other, per_byte(other));
        let Some(place) = CODECS.iter().position(|it| *it == codec) else { return };
        let known = &mut state.codecs[place];
        known.cost = blend(known.cost, per_byte(took));
        known.ratio = blend(known.ratio, made as f64 / read.max(1) as f64);
        known.unused = 0;
    }

    /// Says that the sink was given a piece of so many bytes.
    pub fn given(&self, bytes: u64, now: Duration) {
        let mut state = self.lock();
        state.count_busy(now);
        state.backlog += bytes;
    }

    /// Says that the sink has taken a piece.
    pub fn taken(&self, bytes: u64, now: Duration) {
        let mut state = self.lock();
        state.count_busy(now);
        state.backlog = state.backlog.saturating_sub(bytes);
        state.taken.0 += bytes as f64;
        if state.taken.0 > SPEED_OVER {
            let (bytes, seconds) = state.taken;
            state.taken = (bytes / 2.0, seconds / 2.0);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|locked| locked.into_inner())
    }
}

impl State {
    fn is_measured(&self) -> bool {
        self.taken.0 > 0.0
    }

    /// Bytes that the sink takes a second.
    fn speed(&self) -> f64 {
        let (bytes, seconds) = self.taken;
        if self.is_measured() && seconds > 0.0 { bytes / seconds } else { UNKNOWN_SPEED }
    }

    fn count_busy(&mut self, now: Duration) {
        if self.backlog > 0 {
            self.taken.1 += now.saturating_sub(self.busy_since).as_secs_f64();
        }
        self.busy_since = now;
    }
}
