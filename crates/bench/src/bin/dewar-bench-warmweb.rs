//! A web server in a Debian guest that reboots while it is asked without rest: how much slower it is in the first twenty
//! seconds after it is up, with its file cache kept, without, and with all files read into the cache at the start. Beside
//! them: a disk that is as fast as memory, for what a guest that boots is slower by itself.
//!
//! The disk is a file that is read no faster than it is told, the same for all but that. All files of the server are in the guest's
//! cache before each reboot; which file is asked for is random.

use anyhow::{Context, Result, ensure};
use dewar_bench::median;
use dewar_testkit::{GuestSpec, Lab, Ran, SlowFile, TestGuest};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What the disk gives: bytes and requests a second.
const DISK: (&str, u64, u64) = ("10 MB/s, 200/s", 10_000_000, 200);
/// The server's files, as `scripts/debian-guest.sh` makes them, and the bytes of each.
const FILES: u64 = 1600;
const FILE_BYTES: usize = 64 << 10;
/// Connections at a time.
const CLIENTS: u64 = 4;
/// How long it is asked before and after.
const BEFORE: Duration = Duration::from_secs(20);
const AFTER: Duration = Duration::from_secs(60);
const BOOTS_WITHIN: Duration = Duration::from_secs(180);

/// How the guest has its disk, and what it does with it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Warm,
    Plain,
    Prefetch,
    Cached,
}

impl Way {
    const ALL: [Self; 4] = [Self::Warm, Self::Plain, Self::Prefetch, Self::Cached];

    fn name(self) -> &'static str {
        match self {
            Self::Warm => "dewar, cache=warm",
            Self::Plain => "virtio-blk, cache=none",
            Self::Prefetch => "virtio-blk, all files read at the start",
            Self::Cached => "virtio-blk, all in the host's page cache",
        }
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: dewar-bench-warmweb DEWAR OUT.json DEBIAN [REPEATS [WAY]]";
    let dewar = PathBuf::from(arguments.next().context(usage)?).canonicalize()?;
    let path = arguments.next().context(usage)?;
    let debian = PathBuf::from(arguments.next().context(usage)?).canonicalize()?;
    let repeats: usize = arguments.next().map_or(Ok(5), |it| it.parse())?;
    let only = arguments.next();
    let mut rows = Vec::new();
    println!("how\tbefore, files/s\tfirst 20 s\tloss\t20 s to 60 s\tdown s");
    for way in Way::ALL.into_iter().filter(|way| only.as_ref().is_none_or(|it| it == way.name())) {
        let of_way = measure(&dewar, &debian, way, repeats)?;
        let of = |key: &str| median(of_way.iter().filter_map(|it| it[key].as_f64()).collect());
        println!(
            "{}\t{:.0}\t{:.0}\t{:.3}\t{:.0}\t{:.1}",
            way.name(),
            of("before_s"),
            of("first_s"),
            of("loss"),
            of("later_s"),
            of("down_s"),
        );
        rows.extend(of_way);
        let all = json!({
            "repeats": repeats, "disk": DISK.0, "files": FILES, "file_kib": FILE_BYTES >> 10, "clients": CLIENTS, "rows": rows,
        });
        std::fs::write(&path, serde_json::to_vec_pretty(&all)?)?;
    }
    Ok(())
}

fn measure(dewar: &Path, debian: &Path, way: Way, repeats: usize) -> Result<Vec<Value>> {
    let lab = Lab::new(dewar)?;
    let backing = lab.path().join("debian.img");
    let copied = Command::new("cp")
        .arg("--sparse=always")
        .args([&debian.join("disk.img"), &backing])
        .status()?;
    ensure!(copied.success(), "cp");
    let slow = match way {
        Way::Cached => None,
        _ => Some(SlowFile::new(lab.path(), &backing, DISK.1, DISK.2, 0)?),
    };
    let disk = slow.as_ref().map_or(backing.as_path(), SlowFile::path);
    let port = free_port()?;
    let mut guest = start(&lab, debian, disk, way, port)?;
    let mut rows = Vec::new();
    for _ in 0..repeats {
        guest.console.ask("run readweb")?;
        let load = Load::default();
        let row = std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let load = &load;
                scope.spawn(move || load.ask(port, client));
            }
            let row = once(&mut guest, way, &load);
            load.ends.store(true, Relaxed);
            row
        })?;
        rows.push(row);
    }
    lab.dewar(&["stop", "g", "--now"]);
    Ok(rows)
}

/// One reboot under load.
fn once(guest: &mut TestGuest, way: Way, load: &Load) -> Result<Value> {
    std::thread::sleep(BEFORE);
    let reset = Instant::now();
    guest.console.send("spawn systemctl reboot")?;
    guest.console.wait_ready(BOOTS_WITHIN)?;
    if way == Way::Prefetch {
        guest.console.ask("spawn readweb")?;
    }
    let up = load.first_after(reset, BOOTS_WITHIN)?;
    std::thread::sleep(AFTER.saturating_sub(up.elapsed()));
    let rate =
        |from: Instant, to: Instant| load.between(from, to) as f64 / (to - from).as_secs_f64();
    let twenty = Duration::from_secs(20);
    let (before, first) = (rate(reset - BEFORE, reset), rate(up, up + twenty));
    ensure!(before > 1.0, "the server did not answer before");
    Ok(json!({
        "way": way.name(), "before_s": before, "first_s": first, "loss": 1.0 - first / before,
        "later_s": rate(up + twenty, up + AFTER), "down_s": (up - load.last_before(up)).as_secs_f64(),
    }))
}

/// Clients without rest.
#[derive(Default)]
struct Load {
    ends: AtomicBool,
    /// When each file had come.
    came: Mutex<Vec<Instant>>,
}

impl Load {
    fn ask(&self, port: u16, client: u64) {
        let mut state = 0x9e37_79b9_7f4a_7c15 ^ client;
        while !self.ends.load(Relaxed) {
            let _ = self.ask_one_server(port, &mut state);
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Asks over one connection, as long as that holds.
    fn ask_one_server(&self, port: u16, state: &mut u64) -> Result<()> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(3)))?;
        let (mut to, mut from) = (stream.try_clone()?, BufReader::with_capacity(256 << 10, stream));
        let mut body = vec![0; FILE_BYTES];
        while !self.ends.load(Relaxed) {
            *state ^= *state << 13;
            *state ^= *state >> 7;
            *state ^= *state << 17;
            write!(to, "GET /f{:04} HTTP/1.1\r\nHost: guest\r\n\r\n", *state % FILES)?;
            let mut line = String::new();
            from.read_line(&mut line)?;
            ensure!(line.starts_with("HTTP/1.1 200"), "{line}");
            while line.trim() != "" {
                line.clear();
                from.read_line(&mut line)?;
            }
            from.read_exact(&mut body)?;
            self.came().push(Instant::now());
        }
        Ok(())
    }

    fn came(&self) -> std::sync::MutexGuard<'_, Vec<Instant>> {
        self.came.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    fn between(&self, from: Instant, to: Instant) -> usize {
        self.came().iter().filter(|at| (from..to).contains(*at)).count()
    }

    /// The first answer after the longest silence since `reset`.
    fn first_after(&self, reset: Instant, within: Duration) -> Result<Instant> {
        loop {
            let mut after: Vec<Instant> =
                self.came().iter().copied().filter(|at| *at > reset).collect();
            after.sort_unstable();
            let silence = |pair: &&[Instant]| pair[1] - pair[0] > Duration::from_secs(3);
            if let Some(pair) = after.windows(2).find(silence) {
                return Ok(pair[1]);
            }
            ensure!(reset.elapsed() < within, "the server does not answer again");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn last_before(&self, up: Instant) -> Instant {
        self.came().iter().copied().filter(|at| *at < up).max().unwrap_or(up)
    }
}

fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

fn start(lab: &Lab, debian: &Path, disk: &Path, way: Way, port: u16) -> Result<TestGuest> {
    let forwarded = format!("user,id=net,hostfwd=tcp:127.0.0.1:{port}-:80");
    let card = ["-netdev", &forwarded, "-device", "virtio-net-pci,netdev=net"];
    let spec = GuestSpec::debian(debian, &card);
    let mut line = spec.command(&lab.guest_folder("g")?)?;
    let mut command = lab.command(&["run", "g"]);
    match way {
        Way::Warm => drop(command.arg("--disk").arg(format!("{},cache=warm", disk.display()))),
        _ => {
            let cache = if way == Way::Cached { "writeback" } else { "none" };
            let drive = format!("file={},format=raw,if=virtio,cache={cache}", disk.display());
            line.extend(["-drive".to_owned(), drive]);
        }
    }
    command.arg("--").args(line);
    Ran::of(&command.output()?).done();
    lab.reach("g")
}
