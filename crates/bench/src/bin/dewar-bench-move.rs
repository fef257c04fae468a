//! Measures moves of a container to another host beside the runtime's own way: checkpoint, copy, restore. The container
//! writes to a file every two milliseconds; the longest that it does not is its gap. Both ways go over the same link.

use anyhow::{Context, Result, ensure};
use dewar_bench::median;
use dewar_testkit::{Bundle, Lab, RunningContainer, SecondRuntime, container_tools};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The container's memory, in MiB, how many of its pages a word is written to each second, and what is in it.
const LOADS: [(u64, u64, &str); 3] = [(64, 2000, "noise"), (512, 0, "noise"), (512, 2000, "noise")];
/// The link, in Mbit/s.
const LINK: u32 = 1000;
/// For how long the container is stopped whose gap is known.
const KNOWN_GAP: Duration = Duration::from_millis(200);
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// How long it may write nothing before it is taken for dead.
const DEAD_AFTER: Duration = Duration::from_secs(60);
/// What writes in it.
const BEATER: &str = "exec 3>>/run/beat; while sleep 0.002; do echo >&3; done";

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: dewar-bench-move DEWAR OUT.json [REPEATS]";
    let dewar = PathBuf::from(arguments.next().context(usage)?).canonicalize()?;
    let path = arguments.next().context(usage)?;
    let repeats: usize = arguments.next().map_or(Ok(5), |it| it.parse())?;
    let tools = container_tools("runc").map_err(anyhow::Error::msg)?;
    println!("memory MiB\tof\twords/s\tmethod\tgap ms\ttotal ms\tMB sent");
    let mut rows = Vec::new();
    for load in LOADS {
        rows.extend(Bench::start(&dewar, &tools, load)?.measure(repeats)?);
        // Each load is kept as soon as it is measured.
        let all = json!({"repeats": repeats, "link_mbit": LINK, "rows": rows});
        std::fs::write(&path, serde_json::to_vec_pretty(&all)?)?;
    }
    Ok(())
}

struct Bench {
    load: (u64, u64, &'static str),
    tools: String,
    container: RunningContainer,
    there: SecondRuntime,
    b: Lab,
    a: Lab,
}

/// One move.
struct Moved {
    gap: Duration,
    total: Duration,
    bytes: u64,
}

impl Bench {
    fn start(dewar: &Path, tools: &str, load: (u64, u64, &'static str)) -> Result<Self> {
        let lab = Lab::new(dewar)?;
        let bundle = Bundle::new(&lab.path().join("bundle"))?;
        let a = lab.as_host()?;
        let b = a.second_host(&[])?;
        let id = format!("dewar-{}", a.path().file_name().context("name")?.to_string_lossy());
        let mut container = RunningContainer::start(bundle, &id)?;
        let (memory, rate, content) = load;
        container.ask(&format!("fill {memory} {content}"))?;
        container.ask(&format!("words {rate}"))?;
        std::fs::write(container.bundle.folder.join("rootfs/run/beater"), BEATER)?;
        container.ask("spawn sh /run/beater")?;
        let there = SecondRuntime::new(&b, &container)?;
        let mut bench = Self { load, tools: tools.to_owned(), container, there, b, a };
        bench.prove()?;
        bench.adopt()?;
        Ok(bench)
    }

    fn adopt(&self) -> Result<()> {
        let (id, state) = (&self.container.id, self.container.state.display().to_string());
        let words = ["adopt", "c", "--container", id, "--runtime-root", &state];
        self.ran(self.a.command(&words)).map(drop)
    }

    /// That a gap that is known is measured as it is.
    fn prove(&mut self) -> Result<()> {
        let id = self.container.id.clone();
        let [mut pause, mut resume] =
            ["pause", "resume"].map(|it| self.container.command(&[it, &id]));
        let began = Instant::now();
        let (gap, ()) = self.gap_during(|| {
            ensure!(pause.status()?.success(), "pause");
            std::thread::sleep(KNOWN_GAP);
            ensure!(resume.status()?.success(), "resume");
            Ok(())
        })?;
        let most = began.elapsed();
        ensure!(
            gap > KNOWN_GAP && gap < most,
            "a gap of {KNOWN_GAP:?} to {most:?} is measured as {gap:?}"
        );
        Ok(())
    }

    /// There and back by each, one after the other.
    fn measure(mut self, repeats: usize) -> Result<Vec<Value>> {
        let (mut ours, mut stock) = (Vec::new(), Vec::new());
        for _ in 0..repeats {
            ours.push(self.by_dewar(true)?);
            ours.push(self.by_dewar(false)?);
            stock.push(self.by_runc(true)?);
            stock.push(self.by_runc(false)?);
            // The runtime has another process for it now.
            self.ran(self.a.command(&["rm", "c"]))?;
            self.adopt()?;
        }
        let rows = vec![self.row("dewar", &ours), self.row("runc and tar", &stock)];
        Ok(rows)
    }

    fn by_dewar(&mut self, is_there: bool) -> Result<Moved> {
        let link = std::env::current_exe()?.with_file_name("dewar-link");
        let (from, to, via) = match is_there {
            true => (&self.a, &self.b, self.there.via()),
            false => (&self.b, &self.a, self.a.via()),
        };
        let via = format!("{} {LINK} 0 {via}", link.display());
        let (root, program) = (to.root().display().to_string(), to.program().display().to_string());
        let mut command = from.command(&[
            "migrate",
            "c",
            "--via",
            &via,
            "--remote-root",
            &root,
            "--remote-dewar",
            &program,
            "--max-downtime",
            "300ms",
        ]);
        command.env("PATH", &self.tools);
        let began = Instant::now();
        let (gap, output) = self.gap_during(|| Ok(command.output()?))?;
        let total = began.elapsed();
        let report: Value = serde_json::from_slice(&done(output)?)?;
        Ok(Moved { gap, total, bytes: report["bytes"].as_u64().context("bytes")? })
    }

    /// The runtime's own checkpoint into memory, sent by `tar`, restored from memory.
    fn by_runc(&mut self, is_there: bool) -> Result<Moved> {
        let link = std::env::current_exe()?.with_file_name("dewar-link");
        let folder = tempfile::Builder::new().prefix("dewar-bench").tempdir_in("/dev/shm")?;
        let images = |name: &str| folder.path().join(name).display().to_string();
        let (from, to) = (images("from"), images("to"));
        [&from, &to].iter().try_for_each(std::fs::create_dir)?;
        let (here, there) = match is_there {
            true => (String::new(), self.there.via()),
            false => (self.there.via(), String::new()),
        };
        let (state, id) = (self.container.state.display(), &self.container.id);
        let bundle = self.container.bundle.folder.display();
        let work = self.a.path().display();
        let line = format!(
            "set -e\n\
             {here} runc --root {state} checkpoint --tcp-established --file-locks --image-path {from} --work-path {work} {id}\n\
             tar -C {from} -c . | {} {LINK} 0 tar -C {to} -x\n\
             {there} runc --root {state} restore --detach --tcp-established --file-locks --image-path {to} \
             --work-path {work} --bundle {bundle} {id} </dev/null >/dev/null 2>{work}/restore.err\n",
            link.display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &line]).env("PATH", &self.tools).stdin(Stdio::null());
        let began = Instant::now();
        let (gap, output) = self.gap_during(|| Ok(command.output()?))?;
        let total = began.elapsed();
        done(output).with_context(|| {
            std::fs::read_to_string(self.a.path().join("restore.err")).unwrap_or_default()
        })?;
        let bytes = std::fs::read_dir(&from)?.flatten().filter_map(|it| it.metadata().ok());
        Ok(Moved { gap, total, bytes: bytes.map(|it| it.len()).sum() })
    }

    /// Does something, and returns the longest that the container wrote nothing meanwhile, and until it writes again.
    fn gap_during<T: Send>(
        &mut self,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<(Duration, T)> {
        let file = self.container.bundle.folder.join("rootfs/run/beat");
        let length = || std::fs::metadata(&file).map(|it| it.len());
        std::thread::scope(|scope| {
            let working = scope.spawn(work);
            let (mut known, mut since, mut gap) = (length()?, Instant::now(), Duration::ZERO);
            let mut is_over = false;
            while !is_over {
                let is_finished = working.is_finished();
                std::thread::sleep(LOOK_EVERY);
                let now = length()?;
                gap = gap.max(since.elapsed());
                if now != known {
                    (known, since) = (now, Instant::now());
                    is_over = is_finished;
                }
                ensure!(since.elapsed() < DEAD_AFTER, "the container does not write");
            }
            let done = working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok((gap, done))
        })
    }

    fn row(&self, method: &str, moved: &[Moved]) -> Value {
        let of = |number: &dyn Fn(&Moved) -> f64| moved.iter().map(number).collect::<Vec<f64>>();
        let gap = of(&|it| it.gap.as_secs_f64() * 1e3);
        let total = of(&|it| it.total.as_secs_f64() * 1e3);
        let sent = of(&|it| it.bytes as f64 / 1e6);
        let (memory, rate, content) = self.load;
        println!(
            "{memory}\t{content}\t{rate}\t{method}\t{:.0}\t{:.0}\t{:.1}",
            median(gap.clone()),
            median(total.clone()),
            median(sent.clone()),
        );
        json!({
            "memory_mib": memory, "content": content, "words_per_second": rate, "method": method,
            "gap_ms": gap, "total_ms": total, "megabytes_sent": sent,
        })
    }

    fn ran(&self, mut command: Command) -> Result<Vec<u8>> {
        done(command.env("PATH", &self.tools).output()?)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Where a move failed it may be there.
        let _ = self.ran(self.b.command(&["stop", "c", "--now"]));
    }
}

fn done(output: Output) -> Result<Vec<u8>> {
    ensure!(
        output.status.success(),
        "{}: {}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr),
        String::from_utf8_lossy(&output.stdout)
    );
    Ok(output.stdout)
}
