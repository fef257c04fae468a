//! Another kernel under a host while guests keep their memory.

use crate::kvm_host::{KEPT, KERNEL, KvmHost};
use dewar_testkit::wait_until;
use std::time::Duration;

fn state<'t>(told: &'t serde_json::Value, guest: &str) -> &'t str {
    let guests = told["guests"].as_array().expect("guests");
    let found = guests.iter().find(|it| it["name"] == guest).expect("the guest");
    found["state"].as_str().expect("a state")
}

/// Guests that write all the while go on, each page as they left it, under one kernel after another; and checkpoints
/// that are taken then have it, too.
#[test]
fn guests_keep_their_memory_under_three_kernels() {
    let host = KvmHost::with(&["g1", "g2"]);
    for time in 1..=3 {
        let told = host.reboot("--fallback none");
        println!("{time}: {told}");
        assert_eq!([state(&told, "g1"), state(&told, "g2")], ["back", "back"], "{told}");
        assert_eq!(host.states(), ["running", "running"]);
        host.assert_all_exact(&format!("kernel {time}"));
    }
    let said = host.host.run("dewar ps").done().stdout;
    assert!(said.contains("kept across the host's reboot"), "{said}");
    for _ in 0..2 {
        host.host.run("dewar checkpoint g1").done();
    }
    host.host.run("dewar verify g1").done();
    host.host.run("dewar restore g1 --replace --eager").done();
    host.assert_exact("g1", "its checkpoint");
    host.host.run("dewar thaw g1").failed(1, &["is not frozen"]);
}

/// A guest whose memory is not what it was is refused, with the place; it holds nobody up, and goes on when its memory is
/// right again.
#[test]
fn altered_memory_is_refused_and_holds_nobody_up() {
    let host = KvmHost::with(&["g1", "g2"]);
    let flip = format!(
        "mount -o dax /dev/pmem0 {KEPT}; f=$(ls {KEPT}/*g1@dewar-ram); \
         dd if=$f of=/root/byte bs=1 skip=71000000 count=1; \
         tr '\\000-\\377' '\\001-\\377\\000' < /root/byte | dd of=$f bs=1 seek=71000000 conv=notrunc; sync"
    );
    host.host.run(&format!("cat > /root/before-thaw <<'END'\n{flip}\nEND")).done();
    let told = host.reboot("--fallback none");
    println!("{told}");
    assert_eq!([state(&told, "g1"), state(&told, "g2")], ["failed", "back"], "{told}");
    let why = told["guests"][0]["why"].as_str().expect("why");
    assert!(why.contains("was changed while it was frozen") && why.contains("bytes 0x"), "{why}");
    assert_eq!(host.states(), ["frozen", "running"]);
    host.assert_exact("g2", "its neighbour was refused");
    let right =
        format!("dd if=/root/byte of=$(ls {KEPT}/*g1@dewar-ram) bs=1 seek=71000000 conv=notrunc");
    host.host.run(&right).done();
    host.host.run("dewar thaw g1").done();
    host.assert_exact("g1", "its memory is right again");
}

/// What would lose a guest is refused before any is touched, all of it at once.
#[test]
fn what_would_lose_a_guest_is_refused_before_any_is_touched() {
    let host = KvmHost::with(&["g1", "other"]);
    let refused = |words: &str, why: &[&str]| {
        host.host.run(&format!("dewar host-reboot {words}")).failed(4, why);
        assert_eq!(host.states(), ["running", "running"], "{words}");
        assert_eq!(host.host.run("cat /sys/kernel/kexec_loaded").done().stdout.trim(), "0");
    };
    let now = format!("--now {KERNEL}");
    refused(&now, &["'other' cannot be kept", "--others store", "no guest was touched"]);
    for line in ["quiet", "memmap=512M!4G", "memmap=1G!5G", "memmap=1G$4G"] {
        let words = format!("{now} --others store --append '{line}'");
        refused(&words, &["does not set the memory of /mnt/keep aside: add memmap=1G!0x100000000"]);
    }
    refused(&format!("{KERNEL} --others store"), &["is not systemd", "--now"]);
    let failed = |words: &str, why: &str| {
        host.host.run(&format!("dewar host-reboot --now --others store {words}")).failed(1, &[why]);
    };
    failed("--kernel /lab/initrd", "is no Linux kernel");
    failed("--kernel /lab/none", "/lab/none");
    failed("--kernel /lab/vmlinuz --initrd /lab/none", "/lab/none");
    // One that its header does not tell from a kernel: the running one refuses it.
    host.host.run("head -c 70000 /lab/vmlinuz > /root/cut").done();
    failed("--kernel /root/cut", "kexec_file_load");
    host.assert_all_exact("all was refused");
    // One that has no memory that could be kept goes through the store.
    let told = host.reboot("--others store --fallback none");
    assert_eq!(state(&told, "g1"), "back", "{told}");
    wait_until("it is back", Duration::from_secs(60), || host.states() == ["running", "running"]);
    host.assert_all_exact("one was in the store");
}

/// A command that is killed before the new kernel starts leaves all guests running: its watcher lets them go on, or,
/// where that was killed too, the next command does.
#[test]
fn a_command_that_dies_leaves_its_guests_running() {
    let host = KvmHost::with(&["g1", "g2"]);
    for step in ["loaded", "noted", "freezing", "kept", "on record", "frozen", "leaving"] {
        host.die_at(step);
        wait_until(&format!("they run after '{step}'"), Duration::from_secs(20), || {
            host.states() == ["running", "running"]
        });
        host.assert_all_exact(step);
    }
    host.host.make_dewar_that_stands_at("leaving");
    let line = format!("/root/held host-reboot --now {KERNEL} --fallback none");
    let child = host.host.start(&line);
    host.host.wait_until_it_stands("leaving", "host-reboot --now");
    host.host.run("pkill -KILL -f __host-reboot-[w]atcher; pkill -KILL -f 'host-reboot[ ]--now'");
    drop(child.wait_with_output());
    wait_until("they run", Duration::from_secs(20), || host.states() == ["running", "running"]);
    host.assert_all_exact("both died");
}

/// Where the power goes in between, guests go on from the checkpoint that was taken for this; one of which none was taken
/// is told lost.
#[test]
fn lost_power_brings_back_the_checkpoints() {
    let mut host = KvmHost::with(&["g1"]);
    // From its first checkpoint on there is a default store.
    host.host.run("dewar checkpoint g1; sync").done();
    host.host.make_dewar_that_stands_at("leaving");
    let child = host.host.start(&format!("/root/held host-reboot --now {KERNEL}"));
    host.host.wait_until_it_stands("leaving", "host-reboot --now");
    host.host.lose_power();
    drop(child.wait_with_output());
    host.host.boot();
    let told = host.wait_until_it_is_back();
    println!("{told}");
    assert_eq!(state(&told, "g1"), "restored", "{told}");
    host.assert_exact("g1", "its checkpoint");
    host.make_memory();
    host.start_guest("g2");
    let child = host
        .host
        .start(&format!("/root/held host-reboot --now {KERNEL} --others stop --fallback none"));
    host.host.wait_until_it_stands("leaving", "host-reboot --now");
    host.host.lose_power();
    drop(child.wait_with_output());
    host.host.boot();
    let told = host.wait_until_it_is_back();
    assert_eq!(state(&told, "g2"), "failed", "{told}");
    assert!(
        told["guests"][0]["why"].as_str().is_some_and(|why| why.contains("its memory is lost")),
        "{told}"
    );
    host.make_memory();
}
