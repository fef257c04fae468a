//! A network of a test's own: a namespace with a tap in it, and clients there.

use anyhow::{Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The host's address in a [`Network`], with its prefix; guests have others.
pub const HOST_ADDRESS: &str = "10.9.0.1/24";
/// How long a client waits for one answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Requests that may be under way at a time.
const CLIENTS: usize = 16;

/// A network namespace, removed with all that is in it.
#[derive(Debug)]
pub struct Network {
    name: String,
}

impl Network {
    /// Makes one with a persistent tap `tap0`.
    ///
    /// # Errors
    /// Where the rights are missing.
    pub fn new() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("dewar-{}-{number}", std::process::id());
        ip(&["netns", "add", &name])?;
        let network = Self { name };
        let within = |words: &[&str]| ip(&[&["-n", network.name.as_str()], words].concat());
        within(&["link", "set", "lo", "up"])?;
        within(&["tuntap", "add", "tap0", "mode", "tap"])?;
        within(&["addr", "add", HOST_ADDRESS, "dev", "tap0"])?;
        within(&["link", "set", "tap0", "up"])?;
        Ok(network)
    }

    /// Does something in the namespace; processes that it starts live there.
    ///
    /// # Panics
    /// Where the namespace is gone, or `work` panics.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let path = format!("/run/netns/{}", self.name);
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                let space = File::open(path).expect("the namespace");
                move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("setns");
                work()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = ip(&["netns", "del", &self.name]);
    }
}

fn ip(words: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(words).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {}: {said}", words.join(" "));
    Ok(())
}

/// What clients of a web server saw.
#[derive(Debug, Clone, Default)]
pub struct WebLoad {
    /// Requests that were answered.
    pub answered: u64,
    /// Why others were not.
    pub failed: Vec<String>,
    /// The longest time to an answer.
    pub slowest: Duration,
}

/// Sends `rate` requests a second, each over a connection of its own, until told
/// to stop; call it [`Network::within`].
pub fn web_load(address: SocketAddr, rate: u32, stop: &AtomicBool) -> WebLoad {
    let load = Mutex::new(WebLoad::default());
    let (tickets, wanted) = mpsc::channel::<()>();
    let wanted = Mutex::new(wanted);
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                // The lock is held only until there is one.
                while let Ok(()) = { wanted.lock().expect("lock").recv() } {
                    let began = Instant::now();
                    let answer = request(address);
                    let mut load = load.lock().expect("lock");
                    match answer {
                        Ok(()) => load.answered += 1,
                        Err(error) => load.failed.push(error.to_string()),
                    }
                    load.slowest = load.slowest.max(began.elapsed());
                }
            });
        }
        let began = Instant::now();
        let mut sent = 0;
        while !stop.load(Ordering::Relaxed) {
            let due = (began.elapsed().as_secs_f64() * f64::from(rate)) as u64;
            for _ in sent..due {
                let _ = tickets.send(());
            }
            sent = sent.max(due);
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(tickets);
    });
    load.into_inner().expect("lock")
}

fn request(address: SocketAddr) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let whole = answer.ends_with("warm\n");
    whole.then_some(()).ok_or_else(|| std::io::Error::other(format!("half an answer: {answer}")))
}
