//! The experiment of the work on page-cache prefetch: a process in a container reads a file again and again from the
//! storage that two hosts share, and is moved in the middle. How much it has read after a fixed time says how warm the
//! other host was. Runs between the small machines that `scripts/hosts-lab.sh` makes.

use anyhow::{Context, Result, ensure};
use dewar_bench::median;
use dewar_testkit::{LabContainer, LabHost, lab_disks};
use serde_json::{Value, json};
use std::process::Child;
use std::time::{Duration, Instant};

/// The file, in MiB, and the container's memory.
const FILE: u32 = 48;
const MEMORY: u32 = 24;
/// The link to the storage, and that between the hosts, in Mbit/s: the paper's, scaled as the file is.
const LINK: u32 = 40;
/// From when it is measured until it is moved, and in all.
const BEFORE: Duration = Duration::from_secs(5);
const RUN: Duration = Duration::from_secs(45);
/// What is told of each run: how much was read so many seconds after it read again.
const MOMENTS: [u64; 5] = [1, 2, 5, 10, 20];

/// Where its file is, in the container and on each host.
const MOUNT: &str = r#"{"destination": "/data", "type": "bind", "source": "/mnt/disks/data", "options": ["bind"]},"#;

/// How the file comes into the other host's page cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// It is not moved.
    Stays,
    /// It is moved, and reads what it needs.
    Nothing,
    /// All active pages of its open files, which are all of this one, are read from when it is stopped on.
    FromTheStop,
    /// As `dewar migrate` does it for one that was watched.
    Dewar,
}

impl Way {
    const ALL: [Self; 4] = [Self::Stays, Self::Nothing, Self::FromTheStop, Self::Dewar];

    fn name(self) -> &'static str {
        match self {
            Self::Stays => "not moved",
            Self::Nothing => "no prefetch",
            Self::FromTheStop => "from the stop",
            Self::Dewar => "dewar",
        }
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("usage: dewar-bench-prefetch OUT.json [REPEATS]")?;
    let repeats: usize = arguments.next().map_or(Ok(5), |it| it.parse())?;
    let hosts = Hosts::boot()?;
    hosts.prove()?;
    println!("way\tgap s\tshare of before in the first second\tMB after {MOMENTS:?} s\tMB in all");
    let mut rows = Vec::new();
    for _ in 0..repeats {
        for way in Way::ALL {
            rows.push(hosts.run(way)?.row(way));
            let all =
                json!({"repeats": repeats, "link_mbit": LINK, "file_mib": FILE, "rows": rows});
            std::fs::write(&path, serde_json::to_vec_pretty(&all)?)?;
        }
    }
    for way in Way::ALL {
        let of = |key: &str| {
            let of_way = rows.iter().filter(|row| row["way"] == way.name());
            median(of_way.filter_map(|row| row[key].as_f64()).collect())
        };
        println!("{}: {:.0} MB in all (median)", way.name(), of("mb_in_all"));
    }
    Ok(())
}

struct Hosts {
    a: LabHost,
    b: LabHost,
    server: LabHost,
}

impl Hosts {
    fn boot() -> Result<Self> {
        // A disk of the lab's machines that only its tests use.
        std::fs::write(lab_disks().join("booted.qcow2"), [0; 512])?;
        let hosts = Self { a: LabHost::new("a"), b: LabHost::new("b"), server: LabHost::new("s") };
        for host in [&hosts.server, &hosts.a, &hosts.b] {
            host.boot();
        }
        let Self { a, b, server } = &hosts;
        server
            .run(&format!(
                "mkdir /srv/disks/data; head -c {FILE}M /dev/urandom > /srv/disks/data/file"
            ))
            .done();
        let like = format!("rate {LINK}mbit limit 2000");
        server.run(&format!("tc qdisc add dev eth0 root netem {like}")).done();
        [a, b].iter().for_each(|host| host.link_is(&like));
        // A way to the other host that is there when it is wanted.
        a.run("mkfifo /run/never; ssh -o ControlMaster=yes -S /run/way -fN hostb </dev/null >/dev/null 2>&1").done();
        Ok(hosts)
    }

    /// That a cold read takes as long as the link allows, and a warm one does not.
    fn prove(&self) -> Result<()> {
        let read =
            "s=$(date +%s%3N); cat /mnt/disks/data/file > /dev/null; echo $(($(date +%s%3N) - s))";
        let seconds =
            || -> Result<f64> { Ok(self.b.run(read).done().stdout.trim().parse::<f64>()? / 1e3) };
        let (cold, warm) = (seconds()?, seconds()?);
        let least = f64::from(FILE << 20) * 8.0 / f64::from(LINK) / 1e6;
        println!("the file: {cold:.1} s cold ({least:.1} by the link), {warm:.2} s warm");
        ensure!(cold > least * 0.95 && cold < least * 1.5, "the link is not what it should be");
        ensure!(warm < cold / 10.0, "a page cache makes no difference");
        Ok(())
    }

    fn run(&self, way: Way) -> Result<Run> {
        let Self { a, b, .. } = self;
        for host in [a, b] {
            host.run("sync; echo 3 > /proc/sys/vm/drop_caches").done();
        }
        let there = LabContainer::place(b, "runc", false, MOUNT);
        let here = LabContainer::start_with(a, "runc", false, MOUNT);
        here.ask(&format!("fill {MEMORY} noise"));
        here.ask("reads /data/file");
        // Until it is warm here.
        std::thread::sleep(Duration::from_secs(13));
        match way {
            Way::Dewar => here.dewar("warm c --learn=8s"),
            _ => std::thread::sleep(Duration::from_secs(8)),
        }
        let began = Instant::now();
        let began_at = clock(a)?;
        let ahead = (way != Way::Stays).then(|| self.how_far_b_is_ahead()).transpose()?;
        let from_the_stop = (way == Way::FromTheStop).then(|| self.prefetch_from_the_stop());
        std::thread::sleep(BEFORE.saturating_sub(began.elapsed()));
        if way != Way::Stays {
            let moved = a.run("dewar --json migrate c hostb --max-downtime 5s").done();
            eprintln!("{}: {}", way.name(), moved.stdout.trim());
        }
        std::thread::sleep((RUN + Duration::from_secs(1)).saturating_sub(began.elapsed()));
        let log = if way == Way::Stays { &here } else { &there }.ask("have-read");
        if let Some(mut prefetch) = from_the_stop {
            ensure!(prefetch.wait()?.success(), "the prefetch from the stop");
        }
        Run::of(&log, began_at, ahead)
    }

    /// What the paper does: when the container is stopped, the other host is told what to read.
    fn prefetch_from_the_stop(&self) -> Child {
        self.a.start(
            "exec 9<>/run/never; frozen=0\n\
             while [ \"$frozen\" != 1 ]; do read -rt 0.05 <&9; read -r frozen </sys/fs/cgroup/c/cgroup.freeze; done\n\
             ssh -S /run/way hostb 'cat /mnt/disks/data/file > /dev/null'",
        )
    }

    /// By how many milliseconds the clock of the second host is ahead.
    fn how_far_b_is_ahead(&self) -> Result<f64> {
        let line = "s=$(date +%s%3N); b=$(ssh -S /run/way hostb date +%s%3N); echo $((b - (s + $(date +%s%3N)) / 2))";
        Ok(self.a.run(line).done().stdout.trim().parse()?)
    }
}

/// Milliseconds since 1970.
fn clock(host: &LabHost) -> Result<f64> {
    Ok(host.run("date +%s%3N").done().stdout.trim().parse()?)
}

/// What one run gave.
struct Run {
    in_all: f64,
    moved: Option<Moved>,
}

/// What it was like to be moved.
struct Moved {
    gap_s: f64,
    first_second: f64,
    megabytes: Vec<f64>,
}

/// What the program remembers: milliseconds by the clock of the host it was on, and megabytes that it had read.
struct Log(Vec<(f64, f64)>);

impl Log {
    fn parse(text: &str) -> Result<Self> {
        let point = |word: &str| -> Option<(f64, f64)> {
            let (ms, bytes) = word.split_once(':')?;
            Some((ms.parse().ok()?, bytes.parse::<f64>().ok()? / 1e6))
        };
        let points: Vec<(f64, f64)> = text.split(' ').filter_map(point).collect();
        ensure!(points.len() > 10, "it remembers nothing: {text}");
        Ok(Self(points))
    }

    fn read_by(&self, ms: f64) -> f64 {
        let points = &self.0;
        let after = points.iter().position(|it| it.0 >= ms).unwrap_or(points.len() - 1).max(1);
        let [from, to] = [points[after - 1], points[after]];
        from.1 + (to.1 - from.1) * ((ms - from.0) / (to.0 - from.0)).clamp(0.0, 1.0)
    }

    /// The longest time without a read after the beginning is that of its move.
    fn moved(&self, began_at: f64, ahead: f64) -> Result<Moved> {
        let points = &self.0;
        let length = |at: &usize| points[*at].0 - points[at - 1].0;
        let since = (1..points.len()).filter(|at| points[at - 1].0 >= began_at);
        let at = since.max_by(|a, b| length(a).total_cmp(&length(b))).context("no reads")?;
        let [stopped, again] = [points[at - 1], points[at]];
        let before = (stopped.1 - self.read_by(stopped.0 - 3000.0)) / 3.0;
        let after = |seconds: &u64| self.read_by(again.0 + *seconds as f64 * 1e3) - again.1;
        let megabytes: Vec<f64> = MOMENTS.iter().map(after).collect();
        let gap_s = (again.0 - ahead - stopped.0) / 1e3;
        Ok(Moved { gap_s, first_second: megabytes[0] / before, megabytes })
    }
}

impl Run {
    fn of(text: &str, began_at: f64, ahead: Option<f64>) -> Result<Self> {
        let log = Log::parse(text)?;
        let end = began_at + ahead.unwrap_or(0.0) + RUN.as_secs_f64() * 1e3;
        let last = log.0.last().map_or(0.0, |it| it.0);
        ensure!(last >= end - 500.0, "it does not read at the end");
        let moved = ahead.map(|ahead| log.moved(began_at, ahead)).transpose()?;
        Ok(Self { in_all: log.read_by(end) - log.read_by(began_at), moved })
    }

    fn row(&self, way: Way) -> Value {
        let mut row = json!({"way": way.name(), "mb_in_all": self.in_all});
        let Some(Moved { gap_s, first_second, megabytes }) = &self.moved else {
            println!("{}\t-\t-\t-\t{:.0}", way.name(), self.in_all);
            return row;
        };
        println!(
            "{}\t{gap_s:.1}\t{first_second:.2}\t{megabytes:.0?}\t{:.0}",
            way.name(),
            self.in_all
        );
        row["gap_s"] = json!(gap_s);
        row["first_second_of_before"] = json!(first_second);
        for (moment, read) in MOMENTS.iter().zip(megabytes) {
            row[format!("mb_after_{moment}_s")] = json!(read);
        }
        row
    }
}
