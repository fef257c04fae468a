//! `make demo`: a guest that rewrites its memory and its disk is checkpointed
//! while it runs, killed, and brought back to the very instant.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use dewar_testkit::{DiskSpec, GuestSpec, Heartbeat, Lab, TestGuest};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const MEMORY_MIB: u64 = 1024;
const WINDOW: Duration = Duration::from_secs(3);

fn main() -> Result<()> {
    let dewar = std::env::args().nth(1).context("usage: dewar-demo PATH-OF-DEWAR")?;
    let dewar = std::fs::canonicalize(dewar)?;
    let lab = Lab::new(dewar)?;
    say("Booting a guest: 1 GiB of RAM, 2 vCPUs, two qcow2 disks; through 'dewar run'");
    let disks = vec![DiskSpec::default(), DiskSpec { file_system: true, ..DiskSpec::default() }];
    let spec =
        GuestSpec { memory_mib: MEMORY_MIB, vcpus: 2, disks, beat_ms: 1, ..GuestSpec::default() };
    let mut guest = lab.run("demo", &spec)?;
    say("In it, a program fills 256 MiB; another rewrites 100 MiB of pages and the first disk, as");
    say("fast as it can; a third the files of an ext4 file system on the second, some hundred a");
    say("second. They can check that all of it is of one instant");
    guest.console.ask("fill 256 noise")?;
    guest.console.ask("check 25600 1 disk hard")?;
    guest.console.ask("files /dev/vdb")?;
    let heart = guest.heartbeat()?;
    let before = speed(&mut guest, WINDOW)?;
    let quiet_from = Instant::now();
    std::thread::sleep(WINDOW);
    let quiet = heart.between(quiet_from, Instant::now()).longest_gap;

    say("\n$ dewar checkpoint demo --tag instant");
    let taken = checkpoint(&lab, &mut guest, &heart)?;
    let after = speed(&mut guest, WINDOW)?;
    guest.console.ask("verify")?;
    drop(heart);

    say("\nKilling the VM with SIGKILL, as a crash would");
    lab.crash("demo");
    say("\n$ dewar restore instant");
    let restored_from = Instant::now();
    let report = lab.restore(&mut guest, &["instant"])?.json();
    let heart = guest.heartbeat()?;
    let first = loop {
        match heart.first_after(restored_from) {
            Some(beat) => break beat - restored_from,
            None if restored_from.elapsed() > Duration::from_secs(20) => {
                anyhow::bail!("the restored guest has no heartbeat")
            }
            None => std::thread::sleep(Duration::from_micros(500)),
        }
    };
    let steps = guest.console.ask_number("verify").context("the restored guest checks itself")?;
    let filled = guest.console.ask_number("filled").context("the restored guest's memory")?;
    say(&format!(
        "{} runs again. It checked {} of pages that stayed, all pages that were rewritten, both \
         disks\nand every file, read from the disk anew: all of one instant, after step {steps}",
        report["name"].as_str().unwrap_or("?"),
        size(filled)
    ));
    let goes_on = guest.console.ask_number("verify")?;
    ensure!(goes_on > steps, "the guest goes on");

    let json = &taken.json;
    let pages = &json["pages"];
    let number = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
    let seen = taken.gap.saturating_sub(quiet);
    println!();
    for (name, value) in [
        ("RAM", size(number(&json["memory_bytes"]))),
        (
            "pages",
            format!(
                "{}: {} never touched, {} zero, {} compressed, {} raw",
                number(&pages["total"]),
                number(&pages["hole"]),
                number(&pages["zero"]) - number(&pages["hole"]),
                number(&pages["compressed"]),
                number(&pages["raw"])
            ),
        ),
        ("stored", size(number(&json["stored_bytes"]))),
        ("epochs", json["epochs"].as_array().map_or(0, Vec::len).to_string()),
        (
            "pause, from outside",
            format!(
                "{:.1} ms (longest heartbeat gap {:.1} ms, without a checkpoint {:.1} ms)",
                ms(seen),
                ms(taken.gap),
                ms(quiet)
            ),
        ),
        ("pause, dewar's own", format!("{:.1} ms", json["pause_ms"].as_f64().unwrap_or(0.0))),
        ("total time", format!("{:.2} s", json["total_ms"].as_f64().unwrap_or(0.0) / 1e3)),
        (
            "guest speed",
            format!("{before:.0} pages/s before, {:.0} during, {after:.0} after", taken.speed),
        ),
        ("restore to first heartbeat", format!("{:.0} ms", ms(first))),
    ] {
        println!("  {name:<28}{value}");
    }
    Ok(())
}

struct Taken {
    json: serde_json::Value,
    gap: Duration,
    speed: f64,
}

fn checkpoint(lab: &Lab, guest: &mut TestGuest, heart: &Heartbeat) -> Result<Taken> {
    let count = guest.console.ask_number("count")?;
    let from = Instant::now();
    // Its progress bar goes to the terminal.
    let output = lab
        .command(&["checkpoint", "demo", "--tag", "instant"])
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "dewar checkpoint failed");
    let to = Instant::now();
    let done = guest.console.ask_number("count")?;
    let json: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let listed =
        Command::new(lab_dewar(lab)).args(["--root"]).arg(lab.root()).arg("ls").output()?;
    print!("{}", String::from_utf8_lossy(&listed.stdout));
    let speed = (done - count) as f64 / from.elapsed().as_secs_f64();
    Ok(Taken { json, gap: heart.between(from, to).longest_gap, speed })
}

fn lab_dewar(lab: &Lab) -> std::path::PathBuf {
    lab.command(&[]).get_program().into()
}

fn speed(guest: &mut TestGuest, window: Duration) -> Result<f64> {
    let from = Instant::now();
    let start = guest.console.ask_number("count")?;
    std::thread::sleep(window);
    let end = guest.console.ask_number("count")?;
    Ok((end - start) as f64 / from.elapsed().as_secs_f64())
}

fn say(text: &str) {
    println!("{text}");
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn size(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}
