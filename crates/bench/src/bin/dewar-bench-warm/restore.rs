//! A container whose files lie on a slow disk is brought back with none of them cached: with and without what was learnt of
//! the pages that it uses.

use anyhow::{Context, Result, ensure};
use dewar_bench::median;
use dewar_testkit::{Bundle, RunningContainer, SlowDisk, container_tools};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The disk: bytes and requests a second.
const BYTES_A_SECOND: u64 = 20_000_000;
const REQUESTS_A_SECOND: u64 = 200;
/// The file, and what of it is used: the first MiB of every eight.
const FILE_MIB: usize = 256;
/// What is told: how much was read so long after the container ran again.
const MOMENTS: [u64; 4] = [1, 2, 5, 10];
/// Bytes of a read.
const READ: u64 = 16_384;

/// Reads 16 KiB of what is used, anywhere, with 100 us of work for each, and counts.
const PROGRAM: &str = "
import os, random, time
data = os.open('/data/file', os.O_RDONLY)
os.posix_fadvise(data, 0, 0, os.POSIX_FADV_RANDOM)
told = os.open('/told/count', os.O_RDWR | os.O_CREAT)
choose, count = random.Random(7), 0
while True:
    for _ in range(16):
        place = choose.randrange(32 * 64)
        os.pread(data, 16384, (place // 64 * 8 << 20) + place % 64 * 16384)
        until = time.perf_counter() + 1e-4
        while time.perf_counter() < until:
            pass
    count += 16
    os.pwrite(told, b'%20d' % count, 0)
";

/// What one restore gave: MB read by each moment, and how long it took until it ran.
struct Run {
    megabytes: Vec<f64>,
    began_after: f64,
}

pub fn measure(dewar: &Path, repeats: usize) -> Result<Vec<Value>> {
    let folder = tempfile::Builder::new().prefix("dw").tempdir_in("/tmp")?;
    let bench = Bench::start(folder.path(), dewar)?;
    let before = bench.megabytes_a_second(Duration::from_secs(5))?;
    println!("before: {before:.0} MB/s");
    // In this order: the first checkpoint knows nothing of what it uses.
    bench.dewar(&["checkpoint", "c", "--tag", "cold"])?;
    bench.dewar(&["warm", "c", "--learn=10s"])?;
    bench.dewar(&["checkpoint", "c", "--tag", "warm"])?;
    println!("restore\tran after s\tMB read after {MOMENTS:?} s");
    let mut runs: [Vec<Run>; 2] = [Vec::new(), Vec::new()];
    for _ in 0..repeats {
        for (runs, tag) in runs.iter_mut().zip(["cold", "warm"]) {
            runs.push(bench.restore(tag)?);
        }
    }
    let row = |(runs, name): (&Vec<Run>, &str)| {
        let at = |moment: usize| median(runs.iter().map(|run| run.megabytes[moment]).collect());
        let read: Vec<f64> = (0..MOMENTS.len()).map(at).collect();
        let ran = median(runs.iter().map(|run| run.began_after).collect());
        println!("{name}\t{ran:.2}\t{read:.0?}");
        let mut row = json!({"restore": name, "ran_after_s": ran, "before_mb_a_second": before});
        for (moment, read) in MOMENTS.iter().zip(read) {
            row[format!("mb_after_{moment}_s")] = json!(read);
        }
        row
    };
    Ok(runs.iter().zip(["without", "with what it uses"]).map(row).collect())
}

struct Bench<'b> {
    folder: &'b Path,
    dewar: &'b Path,
    tools: String,
    // Ended before the disk that it has files on.
    _container: RunningContainer,
    _disk: SlowDisk,
}

impl<'b> Bench<'b> {
    fn start(folder: &'b Path, dewar: &'b Path) -> Result<Self> {
        let tools = container_tools("runc").map_err(anyhow::Error::msg)?;
        let disk = SlowDisk::with_requests(folder, 1, BYTES_A_SECOND, REQUESTS_A_SECOND)?;
        fs::write(disk.path().join("file"), vec![7; FILE_MIB << 20])?;
        let told = folder.join("told");
        fs::create_dir(&told)?;
        let mut bundle = Bundle::new(&folder.join("bundle"))?.with_host_programs()?;
        let mounts = bundle.config["mounts"].as_array_mut().context("mounts")?;
        for (inside, host) in [("/data", disk.path()), ("/told", &told)] {
            mounts.push(json!({
                "destination": inside, "type": "bind", "source": host, "options": ["bind"],
            }));
        }
        let bundle = bundle.running(&["/usr/bin/python3", "-c", PROGRAM]);
        let id = format!("dewar-{}", folder.file_name().context("name")?.to_string_lossy());
        let container = RunningContainer::start(bundle, &id)?;
        let state = container.state.display().to_string();
        let bench = Self { folder, dewar, tools, _container: container, _disk: disk };
        bench.dewar(&["adopt", "c", "--container", &id, "--runtime-root", &state])?;
        Ok(bench)
    }

    fn count(&self) -> Result<u64> {
        let text = fs::read_to_string(self.folder.join("told/count")).unwrap_or_default();
        Ok(text.trim().parse().unwrap_or(0))
    }

    /// When all that it uses is cached.
    fn megabytes_a_second(&self, window: Duration) -> Result<f64> {
        let mut last = 0.0;
        loop {
            let before = self.count()?;
            std::thread::sleep(window);
            let now = (self.count()? - before) as f64 * READ as f64 / 1e6 / window.as_secs_f64();
            if now < last * 1.05 {
                return Ok(now);
            }
            last = now;
        }
    }

    fn restore(&self, tag: &str) -> Result<Run> {
        self.dewar(&["stop", "c", "--now"])?;
        fs::write(self.folder.join("told/count"), format!("{:20}", 0))?;
        rustix::fs::sync();
        fs::write("/proc/sys/vm/drop_caches", "3")?;
        let began = Instant::now();
        let mut restoring =
            self.command(&["restore", tag]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        while self.count()? == 0 {
            ensure!(began.elapsed() < Duration::from_secs(60), "it does not run");
            std::thread::sleep(Duration::from_millis(5));
        }
        let (ran, first) = (Instant::now(), self.count()?);
        let mut megabytes = Vec::new();
        for moment in MOMENTS {
            std::thread::sleep(Duration::from_secs(moment).saturating_sub(ran.elapsed()));
            megabytes.push((self.count()? - first) as f64 * READ as f64 / 1e6);
        }
        ensure!(restoring.wait()?.success(), "dewar restore");
        Ok(Run { megabytes, began_after: (ran - began).as_secs_f64() })
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.dewar);
        command.args(["--json", "--root"]).arg(self.root()).args(words);
        command.env("PATH", &self.tools).stdin(Stdio::null());
        command
    }

    fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    fn dewar(&self, words: &[&str]) -> Result<()> {
        let output = self.command(words).output()?;
        ensure!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }
}
