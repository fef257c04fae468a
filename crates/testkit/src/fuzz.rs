//! Altered input for readers of what others wrote.

use std::time::{Duration, Instant};

/// How long each target runs: `DEWAR_FUZZ_SECONDS`, or one second.
fn time() -> Duration {
    let seconds = std::env::var("DEWAR_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(1))
}

struct Mutator {
    state: u64,
}

impl Mutator {
    fn next(&mut self, below: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % below.max(1) as u64) as usize
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.next(4) {
            let (at, length) = (self.next(bytes.len()), self.next(9) + 1);
            match self.next(6) {
                _ if bytes.is_empty() => bytes.push(1),
                0 => bytes[at] ^= 1 << self.next(8),
                1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][self.next(5)],
                2 => bytes.truncate(at),
                3 => {
                    let end = (at + length).min(bytes.len());
                    let piece = bytes[at..end].to_vec();
                    let to = self.next(bytes.len());
                    bytes.splice(to..to, piece);
                }
                4 => drop(bytes.drain(at..(at + length).min(bytes.len()))),
                _ => {
                    let end = (at + 4).min(bytes.len());
                    bytes[at..end].fill(0xff);
                }
            }
        }
    }
}

/// Runs a target on changed copies of `seeds`, the same ones each time, until the time is up.
///
/// # Panics
/// Where the target does, or is so slow that little was tried.
pub fn fuzz(seeds: &[Vec<u8>], mut target: impl FnMut(Vec<u8>)) {
    let mut mutator = Mutator { state: 0x5eed_0000_0001 };
    let (began, mut rounds) = (Instant::now(), 0u64);
    while began.elapsed() < time() {
        let mut bytes = seeds[mutator.next(seeds.len())].clone();
        mutator.mutate(&mut bytes);
        target(bytes);
        rounds += 1;
    }
    assert!(rounds > 100, "only {rounds} rounds");
}
