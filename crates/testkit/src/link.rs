//! A link between two hosts: so many bits a second each way, after a delay. All that crosses it is kept in
//! order; a link that is cut loses what is on its way.

use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes that are taken at a time, at most.
const CHUNK: usize = 16 << 10;
/// A link may be so far behind its rate and catch up.
const SLACK: Duration = Duration::from_millis(2);

/// How fast a link is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkSpeed {
    /// Bytes a second, each way; without it as fast as they come.
    pub bytes_per_second: Option<f64>,
    /// How long each byte is on its way.
    pub delay: Duration,
}

impl LinkSpeed {
    /// So many million bits a second, 0 for as many as come, and milliseconds of delay.
    pub fn new(mbit: f64, delay_ms: f64) -> Self {
        Self {
            bytes_per_second: (mbit > 0.0).then_some(mbit * 1e6 / 8.0),
            delay: Duration::from_secs_f64(delay_ms / 1e3),
        }
    }
}

/// One direction of a link, which all connections over it share.
#[derive(Debug)]
pub struct Lane {
    speed: LinkSpeed,
    /// Until when what was sent before keeps it busy.
    free_at: Mutex<Instant>,
    bytes: AtomicU64,
}

impl Lane {
    /// An idle one.
    pub fn new(speed: LinkSpeed) -> Arc<Self> {
        let (free_at, bytes) = (Mutex::new(Instant::now()), AtomicU64::new(0));
        Arc::new(Self { speed, free_at, bytes })
    }

    /// How many bytes went over it.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// When so many bytes will have been sent that come now.
    fn sent_at(&self, bytes: usize) -> Instant {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let now = Instant::now();
        let takes = self.speed.bytes_per_second.map_or(0.0, |rate| bytes as f64 / rate);
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let from = (*free_at).max(now.checked_sub(SLACK).unwrap_or(now));
        *free_at = from + Duration::from_secs_f64(takes);
        *free_at
    }
}

/// Carries bytes one way until they end, on threads of their own.
pub fn carry(
    from: impl Read + Send + 'static,
    to: impl Write + Send + 'static,
    lane: &Arc<Lane>,
) -> JoinHandle<io::Result<u64>> {
    // What is on its way: the delay's worth, and some chunks that wait for the reader.
    let speed = lane.speed;
    let rate = speed.bytes_per_second.unwrap_or(10e9);
    let waiting = (rate * speed.delay.as_secs_f64() / CHUNK as f64) as usize + 4;
    let (sender, chunks) = sync_channel::<(Instant, Vec<u8>)>(waiting);
    let lane = Arc::clone(lane);
    std::thread::spawn(move || {
        // How it ends, the other end sees.
        let _ = read_all(from, &sender, &lane);
    });
    std::thread::spawn(move || {
        let (mut to, mut bytes) = (to, 0);
        for (due, chunk) in chunks {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            to.write_all(&chunk)?;
            to.flush()?;
            bytes += chunk.len() as u64;
        }
        Ok(bytes)
    })
}

fn read_all(
    mut from: impl Read,
    sender: &SyncSender<(Instant, Vec<u8>)>,
    lane: &Lane,
) -> io::Result<()> {
    loop {
        let mut chunk = vec![0; CHUNK];
        let count = from.read(&mut chunk)?;
        if count == 0 {
            return Ok(());
        }
        chunk.truncate(count);
        let sent_at = lane.sent_at(count);
        std::thread::sleep(sent_at.saturating_duration_since(Instant::now()));
        if sender.send((sent_at + lane.speed.delay, chunk)).is_err() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn bytes_come_in_order_and_no_faster_than_the_link_is() {
        let (mut ours, theirs) = UnixStream::pair().expect("sockets");
        let (far, mut there) = UnixStream::pair().expect("sockets");
        let rate = 20e6;
        let speed = LinkSpeed { bytes_per_second: Some(rate), delay: Duration::from_millis(30) };
        let carried = carry(theirs, far, &Lane::new(speed));
        let sent: Vec<u8> = (0..4_000_000_u32).map(|at| (at * 7 / 5) as u8).collect();
        let began = Instant::now();
        let copy = sent.clone();
        let writer = std::thread::spawn(move || ours.write_all(&copy));
        let mut first = [0];
        there.read_exact(&mut first).expect("first");
        assert!(began.elapsed() >= Duration::from_millis(30));
        let mut rest = Vec::new();
        there.read_to_end(&mut rest).expect("rest");
        let least = Duration::from_secs_f64(sent.len() as f64 / rate) - SLACK;
        assert!(began.elapsed() >= least, "{:?}", began.elapsed());
        writer.join().expect("thread").expect("written");
        assert_eq!(carried.join().expect("thread").expect("carried"), sent.len() as u64);
        assert_eq!(first[0], sent[0]);
        assert!(rest == sent[1..], "other bytes");
    }
}
