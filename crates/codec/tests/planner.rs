//! The planner on a simulated host: threads that encode, a sink that takes one piece after the other.

use dewar_codec::{Codec, Frame, Planner, SMALL_JOB_BYTES};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use std::collections::VecDeque;
use std::time::Duration;

const FRAME: f64 = 65_536.0;
const PIECE: u64 = 8 << 20;
/// Pieces that wait, or are being taken.
const ROOM: usize = 6;
/// As many as a guest of 1 GiB has.
const FRAMES: usize = 12_000;

/// What a codec does to the pages of this host.
#[derive(Debug, Clone, Copy)]
struct Speed {
    /// Bytes a second.
    per_second: f64,
    /// Bytes out for a byte in.
    ratio: f64,
}

#[derive(Debug, Clone, Copy)]
struct Host {
    threads: usize,
    /// Bytes that the sink takes a second.
    sink: f64,
    /// Finding and copying pages, bytes a second.
    copy: f64,
    zstd: Speed,
    lz4: Speed,
    /// What a thread does with a GPU, copies included.
    gpu: Option<Speed>,
}

/// Frames of a batch for a GPU.
const BATCH: usize = 32;

impl Host {
    fn of(&self, codec: Codec) -> Speed {
        match codec {
            Codec::Zstd => self.zstd,
            Codec::Lz4 => self.lz4,
            Codec::Raw => Speed { per_second: 10e9, ratio: 1.0 },
        }
    }
}

/// What came of one run: seconds until all is taken, and bytes that were.
struct Outcome {
    seconds: f64,
    bytes: f64,
}

/// How frames get their codec.
enum Way {
    Planned,
    Only(Codec),
}

/// Runs frames through a host, by events in virtual time.
fn simulate(host: &Host, way: &Way) -> Outcome {
    let planner = Planner::new(ROOM as u64 * PIECE);
    let at = Duration::from_secs_f64;
    // When each thread is free, and what it has of its piece.
    let mut threads = vec![(0.0_f64, 0.0_f64); host.threads];
    // When the sink is done with each piece that it has, and its bytes.
    let mut sink: VecDeque<(f64, f64)> = VecDeque::new();
    let (mut sink_free, mut bytes, mut left) = (0.0_f64, 0.0, FRAMES);
    loop {
        let next = (0..threads.len()).min_by(|a, b| threads[*a].0.total_cmp(&threads[*b].0));
        let index = next.expect("threads");
        let (now, filled) = threads[index];
        while let Some((done, size)) = sink.front().copied().filter(|it| it.0 <= now) {
            planner.taken(size as u64, at(done));
            sink.pop_front();
        }
        let full = match way {
            Way::Planned => planner.piece_bytes(PIECE),
            Way::Only(_) => PIECE,
        };
        if filled >= full as f64 || left == 0 && filled > 0.0 {
            if sink.len() >= ROOM {
                // It waits for room.
                threads[index].0 = sink[sink.len() - ROOM].0;
                continue;
            }
            planner.given(filled as u64, at(now));
            sink_free = sink_free.max(now) + filled / host.sink;
            sink.push_back((sink_free, filled));
            bytes += filled;
            threads[index].1 = 0.0;
        } else if left == 0 {
            if threads.iter().all(|thread| thread.1 == 0.0) {
                return Outcome { seconds: sink_free, bytes };
            }
            threads[index].0 = f64::MAX;
        } else {
            let room = full.saturating_sub(filled as u64);
            let gpu = host.gpu.filter(|_| matches!(way, Way::Planned));
            let read = BATCH.min(left) as f64 * FRAME;
            let pays = |_: &Speed| planner.gpu_pays(room, read as u64);
            if let Some(Speed { per_second, ratio }) = gpu.filter(pays) {
                left -= BATCH.min(left);
                let (took, made) = (read / per_second, read * ratio);
                let (read, sent) = (read as u64, made as u64);
                let other = Duration::ZERO;
                planner.learn_gpu(&Frame { read, made: sent, took: at(took), other, beside: 0 });
                threads[index] = (now + took, filled + made);
                continue;
            }
            left -= 1;
            let codec = match way {
                Way::Planned => planner.choose(room),
                Way::Only(codec) => *codec,
            };
            let Speed { per_second, ratio } = host.of(codec);
            let (other, took, made) = (FRAME / host.copy, FRAME / per_second, FRAME * ratio);
            let frame = Frame {
                read: FRAME as u64,
                made: made as u64,
                took: at(took),
                other: at(other),
                beside: 0,
            };
            planner.learn(codec, &frame);
            threads[index] = (now + other + took, filled + made);
        }
    }
}

/// The seconds that the best mixture of two codecs takes where nothing ever waits but for the threads
/// all together, or for the sink.
fn optimum(host: &Host) -> f64 {
    // Seconds of a thread for a byte, and bytes out.
    let mut ways = [Codec::Raw, Codec::Lz4, Codec::Zstd]
        .map(|codec| host.of(codec))
        .map(|it| (1.0 / host.copy + 1.0 / it.per_second, it.ratio))
        .to_vec();
    ways.extend(host.gpu.map(|it| (1.0 / it.per_second, it.ratio)));
    let seconds = |one: (f64, f64), other: (f64, f64), share: f64| {
        let mix = |one: f64, other: f64| one * share + other * (1.0 - share);
        (mix(one.0, other.0) / host.threads as f64).max(mix(one.1, other.1) / host.sink)
    };
    let mut least = f64::MAX;
    for one in &ways {
        for other in &ways {
            let shares = (0..=100).map(|percent| seconds(*one, *other, f64::from(percent) / 100.0));
            least = shares.fold(least, f64::min);
        }
    }
    least * FRAME * FRAMES as f64
}

/// What a host may need beyond the optimum: the last piece of each thread waits for the sink, and the
/// sink for the first; and a GPU is tried a few times.
fn slack(host: &Host) -> f64 {
    let slowest = host.zstd.per_second.min(host.lz4.per_second).min(host.copy);
    let tried = host.gpu.map_or(0.0, |gpu| 3.0 * BATCH as f64 * FRAME / gpu.per_second);
    host.threads as f64 * PIECE as f64 / host.sink + 4e6 / slowest + 0.02 + tried
}

fn usual(sink: f64) -> Host {
    Host {
        threads: 2,
        sink,
        copy: 3e9,
        zstd: Speed { per_second: 0.9e9, ratio: 0.33 },
        lz4: Speed { per_second: 1.1e9, ratio: 0.5 },
        gpu: None,
    }
}

#[test]
fn a_slow_sink_gets_as_little_as_zstd_leaves() {
    for sink in [50e6, 200e6] {
        let planned = simulate(&usual(sink), &Way::Planned);
        let zstd = simulate(&usual(sink), &Way::Only(Codec::Zstd));
        assert!(planned.bytes < zstd.bytes * 1.05, "{} of {}", planned.bytes, zstd.bytes);
        assert!(planned.seconds < zstd.seconds * 1.05);
    }
}

#[test]
fn few_pages_are_compressed_most_whatever_takes_them() {
    let chosen = |bytes: u64| {
        let planner = Planner::new(ROOM as u64 * PIECE);
        planner.expect(bytes);
        let chosen = (0..100).map(|frame| {
            // A sink that takes all at once.
            planner.given(PIECE, Duration::from_millis(frame));
            planner.taken(PIECE, Duration::from_millis(frame));
            planner.choose(PIECE)
        });
        chosen.collect::<Vec<_>>()
    };
    assert!(chosen(SMALL_JOB_BYTES).iter().all(|codec| *codec == Codec::Zstd));
    assert!(chosen(SMALL_JOB_BYTES + 1).contains(&Codec::Raw));
}

#[test]
fn a_fast_sink_waits_for_no_codec() {
    let host = usual(20e9);
    let planned = simulate(&host, &Way::Planned);
    let raw = simulate(&host, &Way::Only(Codec::Raw));
    assert!(planned.seconds < raw.seconds * 1.15, "{} of {}", planned.seconds, raw.seconds);
}

#[test]
fn between_them_cores_and_sink_finish_together() {
    for sink in [0.8e9, 1.2e9, 2e9] {
        let host = usual(sink);
        let (planned, optimum) = (simulate(&host, &Way::Planned).seconds, optimum(&host));
        let alone = [Codec::Raw, Codec::Lz4, Codec::Zstd].map(|codec| {
            let seconds = simulate(&host, &Way::Only(codec)).seconds;
            assert!(planned < seconds, "{codec:?} alone: {seconds}");
            seconds
        });
        println!("{sink:.1e}: {planned:.3} s, optimum {optimum:.3}, alone {alone:.3?}");
        assert!(planned < optimum * 1.1, "{planned} of {optimum}");
    }
}

#[test]
fn a_gpu_is_used_where_the_link_outruns_the_cores() {
    // As measured: a thread that feeds an H200, beside two slow cores.
    let with = |sink: f64, per_second: f64| Host {
        lz4: Speed { per_second: 0.44e9, ratio: 0.58 },
        gpu: Some(Speed { per_second, ratio: 0.6 }),
        ..usual(sink)
    };
    let seconds = |host: &Host| simulate(host, &Way::Planned).seconds;
    let gain = |sink: f64, per_second: f64| {
        let host = with(sink, per_second);
        let gain = seconds(&Host { gpu: None, ..host }) / seconds(&host);
        println!("{sink:.2e} B/s, GPU {per_second:.1e} B/s: {gain:.2} times as fast");
        gain
    };
    assert!(gain(3e9, 5e9) > 1.3, "it is of use");
    assert!(gain(0.125e9, 5e9) > 0.98, "zstd keeps a slow link busy");
    // One that is slow is tried, and left.
    for sink in [0.125e9, 1e9, 3e9] {
        assert!(gain(sink, 0.3e9) > 0.9);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..ProptestConfig::default()
    })]

    /// Whatever the host: it is near the best mixture, or as good as the best codec alone where pieces
    /// are too long for a mixture; and it never makes more than the plain pages.
    #[test]
    fn it_is_near_the_best_mixture_on_any_host(
        threads in 1_usize..9,
        sink in 7.7_f64..10.3,
        copy in 9.0_f64..10.0,
        zstd in (8.6_f64..9.3, 0.05_f64..0.9),
        lz4 in (8.7_f64..9.6, 1.0_f64..2.0),
        gpu in prop::option::of((8.0_f64..10.0, 1.0_f64..3.0)),
    ) {
        let speed = |(exponent, ratio): (f64, f64)| {
            Speed { per_second: 10_f64.powf(exponent), ratio }
        };
        let host = Host {
            threads,
            sink: 10_f64.powf(sink),
            copy: 10_f64.powf(copy),
            zstd: speed(zstd),
            // It leaves up to twice as much, and never more than there was.
            lz4: speed((lz4.0, (zstd.1 * lz4.1).min(1.0))),
            // Its thread copies pages, too.
            gpu: gpu.map(|gpu| speed((gpu.0.min(copy), (zstd.1 * gpu.1).min(1.0)))),
        };
        let planned = simulate(&host, &Way::Planned);
        let optimum = optimum(&host);
        prop_assert!(planned.bytes <= FRAME * FRAMES as f64 + 1.0);
        let alone = [Codec::Raw, Codec::Lz4, Codec::Zstd];
        let alone = alone.map(|codec| simulate(&host, &Way::Only(codec)).seconds);
        let best = alone.into_iter().fold(f64::MAX, f64::min);
                let most = (optimum * 1.5 + slack(&host)).max(best * 1.1);
        prop_assert!(
            planned.seconds <= most,
            "{:.3} s, optimum {optimum:.3}, alone {alone:.3?}", planned.seconds
        );
    }
}
