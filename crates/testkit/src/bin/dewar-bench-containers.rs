//! Measures checkpoints of containers beside the runtime's own: how long the container does not answer, and how long
//! all of it takes. The container is asked again and again, every millisecond; the longest that an answer takes is its
//! gap, as its users see it.

use anyhow::{Context, Result, ensure};
use dewar_testkit::bench::median;
use dewar_testkit::{Bundle, RunningContainer, container_tools, kill};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The container's memory, in MiB, and how many of its pages a word is written to each second.
const LOADS: [(u64, u64); 4] = [(64, 0), (64, 2000), (512, 0), (512, 2000)];
/// For how long the container is stopped whose gap is known.
const KNOWN_GAP: Duration = Duration::from_millis(200);
/// How often it is asked.
const ASK_EVERY: Duration = Duration::from_millis(1);

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: dewar-bench-containers DEWAR OUT.json [REPEATS]";
    let dewar = arguments.next().context(usage)?;
    let path = arguments.next().context(usage)?;
    let repeats: usize = arguments.next().map_or(Ok(5), |it| it.parse())?;
    let tools = container_tools("runc").map_err(anyhow::Error::msg)?;
    println!("memory MiB\twords/s\tmethod\tgap ms\ttotal ms\tMB written");
    let mut rows = Vec::new();
    for (memory, rate) in LOADS {
        let folder = tempfile::Builder::new().prefix("dw").tempdir_in("/tmp")?;
        let bench = Bench::start(folder.path(), &dewar, &tools, memory, rate)?;
        rows.extend(bench.measure(repeats)?);
    }
    std::fs::write(&path, serde_json::to_vec_pretty(&json!({"repeats": repeats, "rows": rows}))?)?;
    Ok(())
}

struct Bench<'b> {
    folder: &'b Path,
    dewar: &'b str,
    tools: &'b str,
    memory: u64,
    rate: u64,
    container: RunningContainer,
}

/// One checkpoint.
struct Taken {
    gap: Duration,
    total: Duration,
    bytes: u64,
}

impl<'b> Bench<'b> {
    fn start(
        folder: &'b Path,
        dewar: &'b str,
        tools: &'b str,
        memory: u64,
        rate: u64,
    ) -> Result<Self> {
        let id = format!("dewar-{}", folder.file_name().context("name")?.to_string_lossy());
        let mut container = RunningContainer::start(Bundle::new(&folder.join("bundle"))?, &id)?;
        container.ask(&format!("fill {memory} noise"))?;
        container.ask(&format!("words {rate}"))?;
        let mut bench = Self { folder, dewar, tools, memory, rate, container };
        bench.prove()?;
        let state = bench.container.state.display().to_string();
        bench.dewar(&["adopt", "c", "--container", &id, "--runtime-root", &state])?;
        // What follows stores what changed since.
        bench.dewar(&["checkpoint", "c"])?;
        Ok(bench)
    }

    /// That a gap that is known is measured as it is.
    fn prove(&mut self) -> Result<()> {
        let pid = self.container.pid();
        let (gap, _) = self.gap_during(|| {
            kill(pid, Signal::STOP);
            std::thread::sleep(KNOWN_GAP);
            kill(pid, Signal::CONT);
            Ok(())
        })?;
        ensure!(
            gap > KNOWN_GAP - ASK_EVERY * 3 && gap < KNOWN_GAP * 5 / 4,
            "a gap of {KNOWN_GAP:?} is measured as {gap:?}"
        );
        Ok(())
    }

    fn measure(mut self, repeats: usize) -> Result<Vec<Value>> {
        let (mut ours, mut stock) = (Vec::new(), Vec::new());
        for _ in 0..repeats {
            ours.push(self.by_dewar()?);
            stock.push(self.by_runc()?);
        }
        Ok(vec![self.row("dewar", &ours), self.row("runc", &stock)])
    }

    fn by_dewar(&mut self) -> Result<Taken> {
        let mut command = self.dewar_command(&["checkpoint", "c"]);
        let began = Instant::now();
        let (gap, output) = self.gap_during(|| Ok(command.output()?))?;
        let total = began.elapsed();
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout)?;
        Ok(Taken { gap, total, bytes: report["stored_bytes"].as_u64().context("bytes")? })
    }

    /// The runtime's own checkpoint, into memory: nothing of it is on a disk.
    fn by_runc(&mut self) -> Result<Taken> {
        let images = tempfile::Builder::new().prefix("dewar-bench").tempdir_in("/dev/shm")?;
        let mut command = self.container.command(&["checkpoint", "--leave-running"]);
        command.args(["--tcp-established", "--file-locks"]);
        command.arg("--image-path").arg(images.path());
        command.arg("--work-path").arg(self.folder).arg(&self.container.id);
        let began = Instant::now();
        let (gap, output) = self.gap_during(|| Ok(command.output()?))?;
        let total = began.elapsed();
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let files = std::fs::read_dir(images.path())?.flatten();
        let bytes = files.filter_map(|it| it.metadata().ok()).map(|it| it.len()).sum();
        Ok(Taken { gap, total, bytes })
    }

    /// Does something, and returns the longest that the container took to answer meanwhile.
    fn gap_during<T: Send>(
        &mut self,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<(Duration, T)> {
        std::thread::scope(|scope| {
            let working = scope.spawn(work);
            let mut gap = Duration::ZERO;
            while !working.is_finished() {
                let asked = Instant::now();
                self.container.ask("count")?;
                gap = gap.max(asked.elapsed());
                std::thread::sleep(ASK_EVERY);
            }
            let done = working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok((gap, done))
        })
    }

    fn row(&self, method: &str, taken: &[Taken]) -> Value {
        let of = |number: &dyn Fn(&Taken) -> f64| taken.iter().map(number).collect::<Vec<f64>>();
        let gap = of(&|it| it.gap.as_secs_f64() * 1e3);
        let total = of(&|it| it.total.as_secs_f64() * 1e3);
        let written = of(&|it| it.bytes as f64 / 1e6);
        println!(
            "{}\t{}\t{method}\t{:.0}\t{:.0}\t{:.1}",
            self.memory,
            self.rate,
            median(gap.clone()),
            median(total.clone()),
            median(written.clone()),
        );
        json!({
            "memory_mib": self.memory, "pages_per_second": self.rate, "method": method,
            "gap_ms": gap, "total_ms": total, "megabytes_written": written,
        })
    }

    fn dewar_command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.dewar);
        command.args(["--json", "--root"]).arg(self.folder.join("root")).args(words);
        command.env("PATH", self.tools).stdin(Stdio::null());
        command
    }

    fn dewar(&self, words: &[&str]) -> Result<()> {
        let output = self.dewar_command(words).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }
}
