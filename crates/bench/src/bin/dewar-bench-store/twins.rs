//! Two guests from one disk image in one store: each runs on an overlay over it and has
//! read all of it once. What the second one's checkpoint takes, by `--dedup`.

use crate::REPEATS;
use anyhow::{Context, Result, ensure};
use dewar_bench::{median, sample_file};
use dewar_testkit::{GuestSpec, Lab, TestGuest};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// By then a guest has read its disk.
const READ: Duration = Duration::from_secs(10);

/// A guest on an overlay over `image`, which it has read.
fn twin(lab: &Lab, name: &str, image: &Path) -> Result<TestGuest> {
    let overlay = lab.guest_folder(name)?.join("overlay.qcow2");
    let mut make = Command::new("qemu-img");
    make.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(image).arg(&overlay);
    ensure!(make.status()?.success(), "qemu-img create");
    let drive = format!("file={},format=qcow2,if=virtio", overlay.display());
    let extra = vec!["-drive".to_owned(), drive];
    let spec = GuestSpec {
        memory_mib: 512,
        disks: Vec::new(),
        extra,
        beat_ms: 1,
        ..GuestSpec::measured()
    };
    let mut guest = lab.run(name, &spec)?;
    guest.console.ask("spawn dd if=/dev/vda of=/dev/null bs=1M")?;
    Ok(guest)
}

/// What the disk copies in the default store take.
fn disks(lab: &Lab) -> Result<f64> {
    let mut bytes = 0;
    for file in std::fs::read_dir(lab.root().join("store/disks"))? {
        bytes += file?.metadata()?.len();
    }
    Ok(bytes as f64)
}

pub fn measure(dewar: &Path) -> Result<Value> {
    println!("\ntwins: bytes stored for the second of two guests of 512 MiB on one disk image");
    let lab = Lab::new(dewar)?;
    let image = std::fs::canonicalize(sample_file(Path::new("target/bench"))?)?;
    let _guests = [twin(&lab, "one", &image)?, twin(&lab, "two", &image)?];
    std::thread::sleep(READ);
    let mut results = Map::new();
    for dedup in ["off", "image", "store"] {
        let (mut memory, mut disk, mut times) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..REPEATS {
            let mut ids = Vec::new();
            for name in ["one", "two"] {
                let before = disks(&lab).unwrap_or(0.0);
                let line = ["checkpoint", name, "--full", "--dedup", dedup];
                let report = lab.dewar(&line).done().json();
                ids.push(report["checkpoint"].as_str().context("an id")?.to_owned());
                if name == "two" {
                    disk.push(disks(&lab)? - before);
                    memory.push(
                        report["stored_bytes"].as_f64().context("bytes")? - disk[disk.len() - 1],
                    );
                    times.push(report["total_ms"].as_f64().context("a time")?);
                }
            }
            for id in ids {
                lab.dewar(&["delete", &id]).done();
            }
        }
        println!(
            "  --dedup {dedup:<5} {:6.1} MB of memory, {:.1} MB of the disk, in {:.0} ms",
            median(memory.clone()) / 1e6,
            median(disk.clone()) / 1e6,
            median(times.clone())
        );
        results.insert(dedup.to_owned(), json!({"memory": memory, "disk": disk, "ms": times}));
    }
    Ok(Value::Object(results))
}
