//! Measures checkpoints of containers beside the own ones of runc and podman: how long the container does not answer, and how long
//! all of it takes. The container is asked again and again, every millisecond; the longest that an answer takes is its
//! gap, as its users see it.

use anyhow::{Context, Result, ensure};
use dewar_bench::median;
use dewar_testkit::{Bundle, Podman, PodmanContainer, RunningContainer, kill, podman_tools};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The container's memory, in MiB, and how many of its pages a word is written to each second.
const LOADS: [(u64, u64); 4] = [(64, 0), (64, 2000), (512, 0), (512, 2000)];
/// The same of those of podman.
const PODMAN_LOADS: [(u64, u64); 2] = [(64, 0), (512, 2000)];
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
    let tools = podman_tools().map_err(anyhow::Error::msg)?;
    println!("memory MiB\twords/s\tmethod\tgap ms\ttotal ms\tMB written");
    let mut rows = Vec::new();
    let of_runc = LOADS.map(|load| (load, Measured::of_runc as fn(&Path) -> Result<Measured>));
    let of_podman = PODMAN_LOADS.map(|load| (load, Measured::of_podman as _));
    for ((memory, rate), start) in of_runc.into_iter().chain(of_podman) {
        let folder = tempfile::Builder::new().prefix("dw").tempdir_in("/tmp")?;
        let container = start(folder.path())?;
        let bench = Bench::start(folder.path(), &dewar, &tools, (memory, rate), container)?;
        rows.extend(bench.measure(repeats)?);
    }
    std::fs::write(&path, serde_json::to_vec_pretty(&json!({"repeats": repeats, "rows": rows}))?)?;
    Ok(())
}

/// The container that is measured, by who has it.
enum Measured {
    Runc(RunningContainer),
    // Ended before podman is.
    Podman(PodmanContainer, Podman),
}

impl Measured {
    fn of_runc(folder: &Path) -> Result<Self> {
        let id = format!("dewar-{}", folder.file_name().context("name")?.to_string_lossy());
        Ok(Self::Runc(RunningContainer::start(Bundle::new(&folder.join("bundle"))?, &id)?))
    }

    fn of_podman(folder: &Path) -> Result<Self> {
        let inside = folder.join("podman");
        std::fs::create_dir(&inside)?;
        let podman = Podman::new(&inside)?;
        Ok(Self::Podman(podman.start("c", &["--network", "none"])?, podman))
    }

    fn ask(&mut self, command: &str) -> Result<String> {
        match self {
            Self::Runc(container) => container.ask(command),
            Self::Podman(container, _) => container.ask(command),
        }
    }

    fn pid(&self) -> i32 {
        match self {
            Self::Runc(container) => container.pid(),
            Self::Podman(container, podman) => podman.pid(&container.name),
        }
    }

    /// By what it is adopted.
    fn known_as(&self) -> [String; 4] {
        let [id, option, value] = match self {
            Self::Runc(it) => {
                [it.id.clone(), "--runtime-root".into(), it.state.display().to_string()]
            }
            Self::Podman(it, podman) => {
                [it.name.clone(), "--runtime".into(), podman.program.display().to_string()]
            }
        };
        ["--container".to_owned(), id, option, value]
    }

    /// What its users have without Dewar.
    fn stock(&self) -> &'static str {
        match self {
            Self::Runc(_) => "runc",
            Self::Podman(..) => "podman",
        }
    }

    /// Its own checkpoint, into a folder in memory: nothing of it is on a disk.
    fn checkpoint(&self, images: &Path, work: &Path) -> Command {
        match self {
            Self::Runc(container) => {
                let mut command = container.command(&["checkpoint", "--leave-running"]);
                command.args(["--tcp-established", "--file-locks"]);
                command.arg("--image-path").arg(images).arg("--work-path").arg(work);
                command.arg(&container.id);
                command
            }
            Self::Podman(container, podman) => {
                let mut command = podman.command(&["container", "checkpoint", "--leave-running"]);
                command.args(["--tcp-established", "--file-locks", "--compress", "none"]);
                command.arg("--export").arg(images.join("checkpoint.tar")).arg(&container.name);
                command
            }
        }
    }
}

struct Bench<'b> {
    folder: &'b Path,
    dewar: &'b str,
    tools: &'b str,
    memory: u64,
    rate: u64,
    container: Measured,
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
        (memory, rate): (u64, u64),
        mut container: Measured,
    ) -> Result<Self> {
        container.ask(&format!("fill {memory} noise"))?;
        container.ask(&format!("words {rate}"))?;
        let mut bench = Self { folder, dewar, tools, memory, rate, container };
        bench.prove()?;
        let known_as = bench.container.known_as();
        let known_as = known_as.iter().map(String::as_str);
        bench.dewar(&["adopt", "c"].into_iter().chain(known_as).collect::<Vec<_>>())?;
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
            stock.push(self.by_itself()?);
        }
        let stock_name = self.container.stock();
        let our_name = if stock_name == "runc" { "dewar" } else { "dewar, of podman" };
        Ok(vec![self.row(our_name, &ours), self.row(stock_name, &stock)])
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

    fn by_itself(&mut self) -> Result<Taken> {
        let images = tempfile::Builder::new().prefix("dewar-bench").tempdir_in("/dev/shm")?;
        let mut command = self.container.checkpoint(images.path(), self.folder);
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
