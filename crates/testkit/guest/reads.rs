//! A program that reads a file from its beginning to its end again and again, and remembers how much it had read
//! when.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes of a read.
const PIECE: usize = 64 << 10;
/// It remembers how far it is at most so often, in milliseconds.
const EVERY_MS: u64 = 100;

/// Milliseconds since 1970, and bytes that were read by then.
pub type Log = Arc<Mutex<Vec<(u64, u64)>>>;

/// Begins to read.
pub fn start(path: &str, log: Log) -> Result<String, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        let (mut bytes, mut at, mut noted) = (0, 0, 0);
        while let Ok(count) = file.read_at(&mut piece, at) {
            std::hint::black_box(&piece);
            at = if count == 0 { 0 } else { at + count as u64 };
            bytes += count as u64;
            let now = now_ms();
            if now >= noted + EVERY_MS {
                log.lock().expect("lock").push((now, bytes));
                noted = now;
            }
        }
    });
    Ok(String::new())
}

/// What it remembers: `MS:BYTES` and so on.
pub fn remembered(log: &Log) -> Result<String, String> {
    let noted = log.lock().expect("lock");
    let words: Vec<String> = noted.iter().map(|(ms, bytes)| format!("{ms}:{bytes}")).collect();
    Ok(words.join(" "))
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
