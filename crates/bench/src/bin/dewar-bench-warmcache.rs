//! What a guest reads first after it has rebooted: from a disk that Dewar serves, with a warm cache and without, and from
//! QEMU's own virtio-blk beside them, past the host's page cache and with all of it there.
//!
//! The disk is a file that is read no faster than it is told, the same for all. A file of noise in the guest is read once,
//! the guest reboots, and reads it again: that is timed in the guest, and each run is checked by the file's sum.

use anyhow::{Context, Result, ensure};
use dewar_bench::median;
use dewar_testkit::{GuestSpec, Lab, Ran, SlowFile, TestGuest};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The guest's memory, and the file in it, in MiB.
const MEMORY: u64 = 448;
const FILE: u64 = 96;
/// What the disk gives: bytes and requests a second; 0 for as many as there are. Requests stand for its latency: the guest
/// reads ahead with one or two at a time.
const DISKS: [(&str, u64, u64); 3] = [
    ("60 MB/s, 2000/s", 60_000_000, 2000),
    ("10 MB/s, 200/s", 10_000_000, 200),
    ("as it is", 0, 0),
];

/// How the guest has its disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Warm,
    Served,
    Direct,
    Cached,
}

impl Way {
    const ALL: [Self; 4] = [Self::Warm, Self::Served, Self::Direct, Self::Cached];

    fn name(self) -> &'static str {
        match self {
            Self::Warm => "dewar, cache=warm",
            Self::Served => "dewar, no cache",
            Self::Direct => "virtio-blk, cache=none",
            Self::Cached => "virtio-blk, all in the host's page cache",
        }
    }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: dewar-bench-warmcache DEWAR OUT.json [REPEATS [DISK]]";
    let dewar = PathBuf::from(arguments.next().context(usage)?).canonicalize()?;
    let path = arguments.next().context(usage)?;
    let repeats: usize = arguments.next().map_or(Ok(5), |it| it.parse())?;
    let only = arguments.next();
    let mut rows = Vec::new();
    println!("disk\thow\tfirst read MiB/s\tagain MiB/s\tboots s\theld ms\tread from memory");
    for disk in DISKS.into_iter().filter(|disk| only.as_ref().is_none_or(|it| it == disk.0)) {
        for way in Way::ALL {
            // What is in the page cache is as fast whatever the disk is: it is measured once.
            if way == Way::Cached && disk.1 != 0 {
                continue;
            }
            let of_way = measure(&dewar, disk, way, repeats)?;
            let of = |key: &str| median(of_way.iter().filter_map(|it| it[key].as_f64()).collect());
            println!(
                "{}\t{}\t{:.1}\t{:.1}\t{:.2}\t{:.1}\t{:.4}",
                disk.0,
                way.name(),
                of("first_mib_s"),
                of("again_mib_s"),
                of("boots_s"),
                of("held_ms"),
                of("from_memory"),
            );
            rows.extend(of_way);
            let all =
                json!({"repeats": repeats, "memory_mib": MEMORY, "file_mib": FILE, "rows": rows});
            std::fs::write(&path, serde_json::to_vec_pretty(&all)?)?;
        }
    }
    Ok(())
}

fn measure(
    dewar: &Path,
    (name, bytes, requests): (&str, u64, u64),
    way: Way,
    repeats: usize,
) -> Result<Vec<Value>> {
    let lab = Lab::new(dewar)?;
    let backing = make_disk(lab.path())?;
    let slow = match bytes {
        0 => None,
        _ => Some(SlowFile::new(lab.path(), &backing, bytes, requests, 0)?),
    };
    let disk = slow.as_ref().map_or(backing.as_path(), SlowFile::path);
    let mut guest = start(&lab, disk, way)?;
    mount(&mut guest)?;
    let (first_sum, cold) = read(&mut guest)?;
    prove(name, bytes, way, cold)?;
    let mut rows = Vec::new();
    for _ in 0..repeats {
        // A guest that resets within three seconds is not held.
        std::thread::sleep(Duration::from_secs(4));
        let before = told(&lab);
        let began = Instant::now();
        guest.console.send("spawn reboot -f")?;
        guest.console.wait_ready(Duration::from_secs(120))?;
        let boots = began.elapsed().as_secs_f64();
        mount(&mut guest)?;
        let (sum, first) = read(&mut guest)?;
        ensure!(sum == first_sum, "another sum: {sum}, not {first_sum}");
        let (_, again) = read(&mut guest)?;
        std::thread::sleep(Duration::from_millis(1500));
        let after = told(&lab);
        let count = |key: &str| {
            let of = |told: &Value| told["disks"][0][key].as_u64().unwrap_or(0);
            of(&after).saturating_sub(of(&before)) as f64
        };
        let (hits, misses) = (count("from_memory"), count("from_disk"));
        rows.push(json!({
            "disk": name, "way": way.name(), "first_mib_s": first, "again_mib_s": again, "boots_s": boots,
            "held_ms": after["last_reset"]["held_ms"], "kept": after["search"]["kept"],
            "known": after["search"]["known"], "search_ms": after["search"]["took_ms"],
            "from_memory": if hits > 0.0 { hits / (hits + misses) } else { 0.0 },
        }));
    }
    lab.dewar(&["stop", "g", "--now"]);
    Ok(rows)
}

/// That the disk is as slow as it was told to be, and nobody has it in a cache.
fn prove(name: &str, bytes: u64, way: Way, mib_s: f64) -> Result<()> {
    let most = bytes as f64 / f64::from(1 << 20);
    ensure!(
        bytes == 0 || mib_s < most * 1.1,
        "{name}, {}: {mib_s} MiB/s when it is cold",
        way.name()
    );
    Ok(())
}

fn told(lab: &Lab) -> Value {
    lab.dewar(&["inspect", "g"]).json()["served_disks"].clone()
}

/// A disk with a file system and a file of noise.
fn make_disk(folder: &Path) -> Result<PathBuf> {
    let (files, disk) = (folder.join("files"), folder.join("disk.raw"));
    std::fs::create_dir(&files)?;
    let mut noise = std::io::Read::take(std::fs::File::open("/dev/urandom")?, FILE << 20);
    std::io::copy(&mut noise, &mut std::fs::File::create(files.join("file"))?)?;
    let mut command = Command::new("mkfs.ext4");
    command.args(["-q", "-F", "-b", "4096", "-d"]).arg(&files).arg(&disk).arg("200M");
    ensure!(command.stderr(std::process::Stdio::null()).status()?.success(), "mkfs.ext4");
    Ok(disk)
}

fn start(lab: &Lab, disk: &Path, way: Way) -> Result<TestGuest> {
    let spec = GuestSpec { memory_mib: MEMORY, disks: Vec::new(), ..GuestSpec::measured() };
    let mut line = spec.command(&lab.guest_folder("g")?)?;
    let path = disk.display();
    let mut served = Vec::new();
    let cache = |mode: &str| format!("file={path},format=raw,if=virtio,cache={mode}");
    match way {
        Way::Warm => served = vec!["--disk".to_owned(), format!("{path},cache=warm")],
        Way::Served => served = vec!["--disk".to_owned(), path.to_string()],
        Way::Direct => line.extend(["-drive".to_owned(), cache("none")]),
        Way::Cached => line.extend(["-drive".to_owned(), cache("writeback")]),
    }
    let mut command = lab.command(&["run", "g"]);
    command.args(served).arg("--").args(line);
    Ran::of(&command.output()?).done();
    lab.reach("g")
}

fn mount(guest: &mut TestGuest) -> Result<()> {
    guest.console.ask("run mount -t ext4 /dev/vda /mnt").map(drop)
}

/// Reads the file; its sum, and how fast it came, in MiB/s.
fn read(guest: &mut TestGuest) -> Result<(String, f64)> {
    let told = guest.console.ask("sum /mnt/file")?;
    let words: Vec<&str> = told.split(' ').collect();
    let ms: f64 = words[2].parse()?;
    Ok((words[0].to_owned(), FILE as f64 / (ms / 1e3)))
}
