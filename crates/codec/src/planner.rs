//! How much each frame is compressed, so that the cores and what takes the bytes finish together.
//!
//! Threads encode frames into pieces (a store's segments, a link's messages) and hand each to a *sink*
//! that writes or sends one after the other. Compressed less than they could be, the pieces keep the sink
//! busy for longer than needed; compressed more, the sink waits for the cores. Between the two lies a
//! mixture that keeps both busy to the end, and it is found frame by frame.
//!
//! For a codec `c` let `cost(c)` be the seconds that a thread needs for a byte of pages, finding and
//! copying it included, and `ratio(c)` the bytes that come out of one, those of pages that no codec
//! shrinks and that are found meanwhile included. `left` are the bytes that are
//! left of the thread's piece. The sink has something to do for
//!
//! ```text
//!   T = bytes that it was given and has not taken / bytes that it takes a second
//! ```
//!
//! A frame gets the codec that compresses most of those with which the piece is there before the sink
//! has nothing to do:
//!
//! ```text
//!   left / ratio(c) * cost(c) <= T
//! ```
//!
//! and is stored raw where that is none. Two cases come first, in which it gets the codec that compresses
//! most: all threads together keep the sink busy by that alone (`threads * ratio(c) / cost(c)` is more
//! than what it takes a second), or the sink has nearly as much before it as it may be given.
//!
//! So a slow sink gets everything compressed most; a fast one gets everything raw, as fast as memory is
//! copied; in between the sink is never idle, and the cores compress in the time that this leaves. All
//! terms are measured while it runs: cost and ratio on the frames before, the sink's speed over what it
//! took last while it had something to do.
//!
//! Before all of this: where few pages come ([`SMALL_JOB_BYTES`]) each gets the codec that compresses most. The cores
//! need a moment for them, and an incremental checkpoint is kept for long.
//!
//! A GPU is one more way to encode pages, and the same inequality decides on it: its `cost` is what a thread that feeds it
//! needs for a byte, copies and waiting included, its `ratio` what comes back. So it is used where no core's codec
//! that leaves less is done in time: where the link outruns the cores. It takes pages in batches, so it is
//! asked for at the beginning of each.
//!
//! There is no clock in here: `tests/planner.rs` runs it on simulated hosts and compares it with the best
//! mixture that there is on each.

use crate::Codec;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// A way to encode pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Core(Codec),
    Gpu,
}

/// Those that are chosen from; those of a core come first.
const WAYS: [Way; 4] =
    [Way::Core(Codec::Zstd), Way::Core(Codec::Lz4), Way::Core(Codec::Raw), Way::Gpu];
const OF_A_CORE: usize = 3;
const GPU: usize = 3;
/// Nothing is divided by less.
const LEAST_RATIO: f64 = 1e-3;
/// The share of a sink's room from which on it has enough.
const NEARLY_FULL: f64 = 0.6;
/// So much faster than the sink the threads must be that it surely does not wait for them.
const MARGIN: f64 = 1.1;
/// A thread that spent so long on a frame's pages was waiting for something.
const IDLE: Duration = Duration::from_millis(2);
/// What a sink is taken to take in a second until it is measured.
const UNKNOWN_SPEED: f64 = 1e9;
/// A sink's speed is that of about so many bytes.
const SPEED_OVER: f64 = 64e6;
/// The share of one frame in what is known of a codec.
const WEIGHT: f64 = 1.0 / 16.0;
/// How many threads there are is what they worked in at least so many seconds; and the share of one such
/// time in that.
const THREADS_OVER: f64 = 0.005;
const THREADS_WEIGHT: f64 = 0.25;
/// A codec that was not used for so many frames is tried: it may be another on these pages.
const TRY_AFTER: u32 = 512;
/// A codec that was never used is tried after so many.
const FIRST_TRY_AFTER: u32 = 8;
/// A GPU, whose batches are larger, is tried again when it was asked for so often; after each trial, twice as often, up
/// to so many times twice.
const TRY_GPU_AFTER: u32 = 1024;
const MOST_TWICE: u32 = 6;
/// When so many frames were left raw for want of time, a GPU may help.
const MANY_RAW: u32 = 256;
/// A codec that leaves less than this of pages would have been of use.
const OF_USE: f64 = 0.95;
/// Threads that may feed a GPU at once.
pub const MOST_GPU_THREADS: usize = 4;
/// Up to so many bytes of pages are all compressed most: at 1 GB/s a core, two cores need some 30 ms for them.
pub const SMALL_JOB_BYTES: u64 = 64 << 20;
/// Of an unmeasured sink a piece is full with so many bytes: so it is soon known.
const FIRST_PIECE_BYTES: u64 = 512 << 10;

/// What is known of a codec.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// Seconds for a byte of pages.
    cost: f64,
    /// Bytes that come out of one.
    ratio: f64,
    /// Frames since it was last used.
    unused: u32,
    /// How often it was used.
    uses: u32,
}

impl Known {
    /// Whether it is to be tried, to know more of it: one that was used, after so many frames without it.
    fn is_due(&self, after: u32) -> bool {
        self.unused > if self.uses == 0 { FIRST_TRY_AFTER } else { after }
    }

    /// Learns what a frame took, in seconds a byte, and what it became.
    fn learn(&mut self, cost: f64, ratio: f64) {
        // What was believed before counts for nothing.
        let weight = WEIGHT.max(1.0 / f64::from(self.uses + 1));
        self.cost += (cost - self.cost) * weight;
        self.ratio += (ratio - self.ratio) * weight;
        (self.unused, self.uses) = (0, self.uses.saturating_add(1));
    }
}

#[derive(Debug)]
struct State {
    /// Whether few pages come, as far as is known.
    is_small: bool,
    ways: [Known; WAYS.len()],
    /// Frames that were left raw for want of time.
    left_raw: u32,
    /// Seconds that a thread needs for a byte of pages beside encoding.
    other: f64,
    /// Bytes that go into its piece meanwhile, for a byte of pages: of pages that no codec shrinks.
    beside: f64,
    /// How many threads encode at a time.
    threads: f64,
    /// Seconds that threads worked since the sink was given something.
    worked: f64,
    given_at: Duration,
    /// Bytes that the sink was given and has not taken.
    backlog: u64,
    /// Since when it has had something to do, or was last asked how long.
    busy_since: Duration,
    /// Bytes that it took, and the seconds in which it did.
    taken: (f64, f64),
}

/// A frame that was encoded.
#[derive(Debug, Clone, Copy)]
pub struct Frame {
    /// Bytes of pages.
    pub read: u64,
    /// Bytes that the codec made of them.
    pub made: u64,
    /// The time that it took.
    pub took: Duration,
    /// The time that the thread spent on finding and copying pages since the frame before.
    pub other: Duration,
    /// Bytes that it put into its piece since then of pages that no codec shrinks.
    pub beside: u64,
}

/// Chooses codecs for the threads that feed one sink.
#[derive(Debug)]
pub struct Planner {
    /// Bytes that the sink may be given before it has taken any.
    room: u64,
    state: Mutex<State>,
}

impl Planner {
    /// A planner that knows of its sink only how many bytes it may be given before it has taken any.
    pub fn new(room: u64) -> Self {
        // As on guests' pages on a slow core; the first frames correct it.
        let known = |cost, ratio| Known { cost, ratio, unused: 0, uses: 0 };
        let ways = [known(1.5e-9, 0.4), known(1.2e-9, 0.5), known(0.1e-9, 1.0), known(0.1e-9, 0.6)];
        let state = State {
            is_small: false,
            ways,
            left_raw: 0,
            other: 0.3e-9,
            beside: 0.0,
            threads: 1.0,
            worked: 0.0,
            given_at: Duration::ZERO,
            backlog: 0,
            busy_since: Duration::ZERO,
            taken: (0.0, 0.0),
        };
        Self { room, state: Mutex::new(state) }
    }

    /// Says how many bytes of pages come, in all.
    pub fn expect(&self, bytes: u64) {
        self.lock().is_small = bytes <= SMALL_JOB_BYTES;
    }

    /// The codec for a thread's next frame, when so many bytes are left of its piece.
    pub fn choose(&self, left: u64) -> Codec {
        let mut state = self.lock();
        if state.is_small {
            return Codec::Zstd;
        }
        let of_a_core = &mut state.ways[..OF_A_CORE];
        of_a_core.iter_mut().for_each(|known| known.unused += 1);
        let untried = WAYS.iter().zip(of_a_core).find(|(_, it)| it.is_due(TRY_AFTER));
        if let Some((Way::Core(codec), _)) = untried {
            return *codec;
        }
        // At the beginning the sink waits for the first piece, which is short.
        if !state.is_measured() {
            return Codec::Lz4;
        }
        match state.best(OF_A_CORE, left, self.room) {
            Some(Way::Core(codec)) if codec != Codec::Raw => codec,
            _ => {
                let had_no_time = state.ways[..OF_A_CORE].iter().any(|it| it.ratio < OF_USE);
                state.left_raw = state.left_raw.saturating_add(u32::from(had_no_time));
                Codec::Raw
            }
        }
    }

    /// Whether the sink outruns the cores so much that a GPU may be of use.
    pub fn cores_are_short(&self) -> bool {
        self.lock().left_raw >= MANY_RAW
    }

    /// Whether a thread's next batch of pages, of so many bytes, is best given to the GPU that there is, when so
    /// many are left of its piece.
    pub fn gpu_pays(&self, left: u64, batch: u64) -> bool {
        if !self.cores_are_short() {
            return false;
        }
        let mut state = self.lock();
        state.ways[GPU].unused += 1;
        let is_due = state.ways[GPU].is_due(TRY_GPU_AFTER << state.ways[GPU].uses.min(MOST_TWICE));
        // A batch comes as a whole.
        let made = (batch as f64 * state.made(&state.ways[GPU])) as u64;
        is_due || state.best(WAYS.len(), left.max(made), self.room) == Some(Way::Gpu)
    }

    /// How many bytes make a piece full, of so many at most.
    pub fn piece_bytes(&self, most: u64) -> u64 {
        if self.lock().is_measured() { most } else { most.min(FIRST_PIECE_BYTES) }
    }

    /// Whether the sink has nearly as much before it as it may be given.
    pub fn is_busy(&self) -> bool {
        self.lock().is_busy(self.room)
    }

    /// Says what a codec made of a frame, and what the thread did before.
    pub fn learn(&self, codec: Codec, frame: &Frame) {
        let Frame { read, made, took, other, beside } = *frame;
        let mut state = self.lock();
        let per_byte = |time: Duration| time.as_secs_f64() / read.max(1) as f64;
        let blend = |old: f64, new: f64| old + (new - old) * WEIGHT;
        state.beside = blend(state.beside, beside as f64 / read.max(1) as f64);
        state.worked += took.as_secs_f64();
        if other < IDLE {
            state.other = blend(state.other, per_byte(other));
            state.worked += other.as_secs_f64();
        }
        if let Some(place) = WAYS.iter().position(|it| *it == Way::Core(codec)) {
            state.ways[place].learn(per_byte(took), made as f64 / read.max(1) as f64);
        }
    }

    /// Says what a GPU made of those pages of a batch that it shrank: `took` is their share of all that its thread did
    /// for the batch, and waited for it. Where there were none nothing is known of it, but that it was tried.
    pub fn learn_gpu(&self, frame: &Frame) {
        let mut state = self.lock();
        if frame.read == 0 {
            let known = &mut state.ways[GPU];
            (known.unused, known.uses) = (0, known.uses.saturating_add(1));
            return;
        }
        let read = frame.read as f64;
        state.beside += (frame.beside as f64 / read - state.beside) * WEIGHT;
        // What a core needs beside encoding it needs here, too.
        let cost = frame.took.as_secs_f64() / read - state.other;
        state.ways[GPU].learn(cost.max(0.0), frame.made as f64 / read);
        state.worked += frame.took.as_secs_f64();
    }

    /// Says that the sink was given a piece of so many bytes.
    pub fn given(&self, bytes: u64, now: Duration) {
        let mut state = self.lock();
        state.count_busy(now);
        state.backlog += bytes;
        let elapsed = now.saturating_sub(state.given_at).as_secs_f64();
        if elapsed > THREADS_OVER {
            let threads = state.worked / elapsed;
            state.threads += (threads - state.threads) * THREADS_WEIGHT;
            (state.worked, state.given_at) = (0.0, now);
        }
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
    /// The best of the first so many ways for a frame, where so many bytes are left of its piece; none
    /// where none is done in time.
    fn best(&self, ways: usize, left: u64, room: u64) -> Option<Way> {
        let all = &self.ways[..ways];
        let is_beaten = |known: &Known| {
            all.iter().any(|other| other.cost < known.cost && other.ratio <= known.ratio)
        };
        let ways = WAYS.into_iter().zip(all).filter(|(_, known)| !is_beaten(known));
        let by_ratio =
            |one: &(Way, &Known), other: &(Way, &Known)| one.1.ratio.total_cmp(&other.1.ratio);
        let keeps_up = |way: Way, known: &Known| {
            let most = if way == Way::Gpu { MOST_GPU_THREADS as f64 } else { f64::MAX };
            let made = self.threads.min(most) * self.made(known) / (known.cost + self.other);
            made >= MARGIN * self.speed()
        };
        let hardest = ways.clone().min_by(by_ratio);
        let hardest = hardest.filter(|(way, it)| self.is_busy(room) || keeps_up(*way, it));
        if let Some((way, _)) = hardest {
            return Some(way);
        }
        let time = self.backlog as f64 / self.speed();
        let is_there = |known: &Known| {
            let seconds_a_byte = (known.cost + self.other) / self.made(known);
            left as f64 * seconds_a_byte <= time
        };
        ways.filter(|(_, known)| is_there(known)).min_by(by_ratio).map(|(way, _)| way)
    }

    /// Bytes that go into a piece with a byte of pages.
    fn made(&self, known: &Known) -> f64 {
        (known.ratio + self.beside).max(LEAST_RATIO)
    }

    fn is_busy(&self, room: u64) -> bool {
        self.backlog as f64 >= NEARLY_FULL * room as f64
    }

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
