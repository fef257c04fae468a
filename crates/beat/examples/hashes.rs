//! A periodic task as in the paper on Co-SEDF: so many MD5 hashes a second, of a
//! block that changes its size, each with a deadline. `make bench-qos` runs it, in
//! guests and as a plain process.
//!
//! usage: hashes RATE LOG STEP...
//!
//! A STEP is SECONDS:BYTES, one job at least, or @FILE with steps in it. For each job a
//! line is written to LOG: its number, the bytes, how long after its release it was done
//! (µs), and the CPU time that it took (µs).

use dewar_beat::{Beat, End, Pace};
use md5::{Digest, Md5};
use rustix::time::{ClockId, clock_gettime};
use std::error::Error;
use std::fs::OpenOptions;
use std::hint::black_box;
use std::io::Write;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [rate, log, steps @ ..] = words.as_slice() else {
        return Err("usage: hashes RATE LOG SECONDS:BYTES|@FILE...".into());
    };
    let rate: f64 = rate.parse()?;
    let period_us = (1e6 / rate) as i128;
    let mut log = OpenOptions::new().create(true).append(true).open(log)?;
    let mut all = Vec::new();
    for step in steps {
        match step.strip_prefix('@') {
            Some(file) => {
                all.extend(std::fs::read_to_string(file)?.split_whitespace().map(str::to_owned))
            }
            None => all.push(step.clone()),
        }
    }
    let mut work = Vec::new();
    for step in &all {
        let (seconds, bytes) = step.split_once(':').ok_or("a step is SECONDS:BYTES")?;
        let jobs = (seconds.parse::<f64>()? * rate).round().max(1.0) as usize;
        work.extend(std::iter::repeat_n(bytes.parse::<usize>()?, jobs));
    }
    let block = vec![0x5a; work.iter().copied().max().unwrap_or(0)];
    black_box(Md5::digest(&block));
    let mut pace = Pace::new(Beat::open(), rate);
    let mut lines = String::new();
    for (number, bytes) in work.iter().enumerate() {
        pace.wait();
        let before = cpu_us();
        black_box(Md5::digest(&block[..*bytes]));
        let after_release = match pace.done() {
            End::Met(left) => period_us - left.as_micros() as i128,
            End::Missed(late) => period_us + late.unwrap_or_default().as_micros() as i128,
        };
        let took = cpu_us().saturating_sub(before);
        lines += &format!("{number} {bytes} {after_release} {took}\n");
        // Once a second: the log is not what is measured.
        if number % rate as usize == 0 || number + 1 == work.len() {
            log.write_all(lines.as_bytes())?;
            lines.clear();
        }
    }
    Ok(())
}

/// The CPU time of this thread.
fn cpu_us() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1000
}
