//! Reboots of guests with served disks in places and at times that are not the usual ones.

use crate::common::{self, HeldCheckpoint, assert_exact};
use crate::huge_pages::HugePages;
use crate::served_guest::{How, Warm, is_warm, ours};
use dewar_testkit::{GuestSpec, guest_files, kill, rounds, sample, signal_stop, wait_until};
use rustix::process::Signal;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What a reset leaves of a guest whose firmware may have reset it just before is not kept.
const FIRMWARE: Duration = Duration::from_millis(3200);

#[test]
#[ignore = "long: make test-long"]
fn twenty_reboots_in_a_row_are_warm() {
    let mut warm = Warm::new("cache=warm");
    for held in 1..=rounds("reboots in a row", 20, 2) as u64 {
        warm.ask("run dd if=/dev/urandom of=/mnt/written bs=64k count=16 conv=fsync");
        let written = warm.read("written");
        warm.reboot();
        assert_eq!(warm.read("written"), written);
        is_warm(&mut warm, held);
        std::thread::sleep(FIRMWARE);
    }
}

/// A program without rights in the guest reads a file past the page cache, or writes one of its own, and changes the
/// transfer's memory meanwhile.
#[test]
fn a_program_in_the_guest_plants_nothing_in_a_file() {
    let mut warm = Warm::new("cache=warm");
    let sums = warm.sums.clone();
    warm.ask("run busybox chmod 777 /mnt");
    let plant =
        |way: &str, file: &str| format!("as 65534 dewar-guest plant {way} /mnt/{file} 3000");
    let count = |told: String| told.parse::<u64>().expect("a number");
    assert!(count(warm.ask(&plant("read", "file0"))) > 10);
    assert!(count(warm.ask(&plant("write", "planted"))) > 10);
    warm.ask("run sync");
    warm.reboot();
    let found = warm.searched(1);
    assert!(found["search"]["kept"].as_u64() > Some(12_000), "{found}");
    // First from memory, then from the disk.
    let first = (warm.read_all(), warm.read("planted"));
    assert_eq!(first.0, sums, "foreign bytes");
    warm.ask("append /proc/sys/vm/drop_caches 3");
    let then = (warm.read_all(), warm.read("planted"));
    assert_eq!(first, then);
}

#[test]
#[ignore = "long: make test-long"]
fn memory_of_two_regions_is_searched_whole() {
    let objects = [
        "-object",
        "memory-backend-ram,id=b,size=128M",
        "-numa",
        "node,memdev=b,cpus=0",
        "-object",
        "memory-backend-memfd,id=a,size=128M",
        "-numa",
        "node,memdev=a,cpus=1",
    ];
    let extra = objects.map(str::to_owned).to_vec();
    let spec = GuestSpec { memory_mib: 256, vcpus: 2, extra, ..GuestSpec::default() };
    let mut warm = Warm::started(&How { spec, disk: "cache=warm", ..How::default() });
    warm.reboot();
    is_warm(&mut warm, 1);
    assert_exact(&warm.lab, &mut warm.guest, "after the reboot");
}

/// Where there is no room for a second memory nothing is kept, and the guest boots.
#[test]
#[ignore = "long: make test-long"]
fn a_full_folder_of_memory_keeps_nobody_from_booting() {
    let folder = tempfile::tempdir().expect("folder");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=300m", "none"]).arg(folder.path());
    assert!(mount.status().expect("mount").success());
    let place = folder.path().display().to_string();
    let words = ["--ram-dir", &place, "--overcommit"];
    let how = How { disk: "cache=warm", words: &words, ..How::default() };
    let mut warm = Warm::started(&how);
    warm.reboot();
    let sums = warm.sums.clone();
    assert_eq!(warm.read_all(), sums);
    let told = warm.told();
    assert!(told["last_reset"]["cold"].as_str().is_some_and(|it| it.contains("memory")), "{told}");
    assert_eq!(std::fs::read_dir(&place).expect("folder").count(), 1, "nothing lies about");
    warm.lab.dewar(&["stop", "g", "--now"]).done();
    let mut umount = Command::new("umount");
    assert!(umount.arg("-l").arg(folder.path()).status().expect("umount").success());
}

#[test]
#[ignore = "long: make test-long"]
fn memory_of_a_pool_of_huge_pages_is_copied() {
    let lab = common::lab();
    let Some(huge) = HugePages::of_pool(&lab) else {
        println!("SKIPPED memory_of_a_pool_of_huge_pages_is_copied: this host gives none");
        return;
    };
    let words = ["--ram-dir", huge.path()];
    let mut warm = Warm::started(&How { disk: "cache=warm", words: &words, ..How::default() });
    warm.reboot();
    is_warm(&mut warm, 1);
    assert!(warm.told()["last_reset"]["copied"].is_string(), "{}", warm.told());
}

/// What is kept is given up where the host is short of memory, and when its time is over.
#[test]
#[ignore = "long: make test-long"]
fn what_is_kept_is_given_up_for_others_and_after_a_while() {
    let pressure = tempfile::NamedTempFile::new().expect("file");
    let say = |percent: &str| {
        let text = format!("some avg10={percent} avg60=0.00 avg300=0.00 total=0\n");
        std::fs::write(pressure.path(), text).expect("pressure");
    };
    say("0.00");
    let path = pressure.path().display().to_string();
    let environment = [("DEWAR_TEST_PRESSURE", path.as_str()), ("DEWAR_TEST_KEPT_FOR", "20")];
    let how = How { disk: "cache=warm", environment: &environment, ..How::default() };
    let mut warm = Warm::started(&how);
    for (held, why) in [(1, "the host is short of memory"), (2, "nobody asked for it for long")] {
        // What is kept is not asked for before it is given up: its time runs from the reset on.
        warm.guest.console.send("spawn reboot -f").expect("reboot");
        warm.searched(held);
        if held == 1 {
            say("27.50");
        }
        wait_until("it to be given up", Duration::from_secs(60), || {
            let told = warm.told();
            told["released"].as_str().is_some_and(|it| it.contains(why))
                && told["disks"][0]["kept"] == 0
        });
        say("0.00");
        warm.is_up();
        let sums = warm.sums.clone();
        assert_eq!(warm.read_all(), sums);
        std::thread::sleep(FIRMWARE);
    }
}

/// QEMU dies while its guest is held, with its memory half exchanged.
#[test]
fn a_qemu_that_dies_at_its_reset_leaves_nothing_but_its_disk() {
    // 'make test' tries the first alone: it is in the middle of the exchange.
    let steps = ["mapped", "held", "made", "exchanged"];
    for step in sample("QEMUs that die at a reset", steps.to_vec(), 1) {
        let signal = format!("{step}:stop");
        let environment = [("DEWAR_TEST_SIGNAL", signal.as_str())];
        let how = How { disk: "cache=warm", environment: &environment, ..How::default() };
        let mut warm = Warm::started(&how);
        warm.ask("run dd if=/dev/urandom of=/mnt/written bs=64k count=4 conv=fsync");
        let written = warm.read("written");
        let supervisor = ours(&warm.lab, "__disks")[0];
        warm.guest.console.send("spawn reboot -f").expect("reboot");
        wait_until(step, Duration::from_secs(20), || signal_stop(supervisor));
        kill(warm.lab.pid("g").expect("pid"), Signal::KILL);
        kill(supervisor, Signal::CONT);
        wait_until("the end of all", Duration::from_secs(20), || {
            ours(&warm.lab, "__disks").is_empty()
                && ours(&warm.lab, "__disk-server").is_empty()
                && warm.lab.ps("g").is_some_and(|it| it["state"] == "ended")
        });
        warm.lab.dewar(&["rm", "g"]).done();
        assert!(warm.lab.ram_files("g").is_empty(), "{step}");
        warm.run_again();
        assert_eq!(warm.read("written"), written, "{step}");
    }
}

/// The guest is reset while it is about to get another QEMU.
#[test]
#[ignore = "long: make test-long"]
fn a_reset_in_the_middle_of_an_upgrade_is_done_and_the_next_checkpoint_exact() {
    let mut warm = Warm::new("cache=warm");
    assert_exact(&warm.lab, &mut warm.guest, "first");
    let upgrade = warm.lab.command(&["upgrade", "g", "--yes"]);
    let held = HeldCheckpoint::at_command(upgrade, "started");
    warm.reboot();
    let (code, _, said) = held.go_on();
    assert!(code == 0 || said.contains("runs on") || said.contains("running"), "{code}: {said}");
    if code == 0 {
        warm.is_again();
    }
    let sums = warm.sums.clone();
    assert_eq!(warm.read_all(), sums);
    assert_exact(&warm.lab, &mut warm.guest, "after");
    std::thread::sleep(FIRMWARE);
    warm.reboot();
    assert_exact(&warm.lab, &mut warm.guest, "after another reboot");
    assert_eq!(warm.read_all(), sums);
}

/// With UEFI firmware, which uses memory of its own choice before the guest's kernel does.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_with_uefi_firmware_finds_its_cache() {
    const CODE: [&str; 2] = ["/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_CODE.fd"];
    let Some(code) = CODE.into_iter().find(|it| Path::new(it).exists()) else {
        println!("SKIPPED a_guest_with_uefi_firmware_finds_its_cache: there is no OVMF");
        return;
    };
    let variables = tempfile::NamedTempFile::new().expect("file");
    std::fs::copy(code.replace("CODE", "VARS"), variables.path()).expect("variables");
    // It boots no unpacked kernel. What is said last counts.
    let kernel = guest_files().expect("guest").1.with_file_name("vmlinuz");
    let extra = vec![
        "-kernel".to_owned(),
        kernel.display().to_string(),
        "-drive".to_owned(),
        format!("if=pflash,format=raw,readonly=on,file={code}"),
        "-drive".to_owned(),
        format!("if=pflash,format=raw,file={}", variables.path().display()),
    ];
    let spec = GuestSpec { extra, ..GuestSpec::default() };
    let mut warm = Warm::started(&How { spec, disk: "cache=warm", ..How::default() });
    warm.reboot();
    is_warm(&mut warm, 1);
}
