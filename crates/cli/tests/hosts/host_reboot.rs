//! Another kernel under a host while guests keep their memory.

use crate::kvm_host::{KEPT, Keeper, KvmHost};
use dewar_testkit::wait_until;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

fn state<'t>(told: &'t Value, guest: &str) -> &'t str {
    let guests = told["guests"].as_array().expect("guests");
    let found = guests.iter().find(|it| it["name"] == guest).expect("the guest");
    found["state"].as_str().expect("a state")
}

/// A test for each of the two that keep memory.
macro_rules! with_both {
    ($($name:ident: $test:ident),*) => {
        $(mod $name {
            use crate::kvm_host::Keeper;

            #[test]
            fn on_dax() {
                super::$test(Keeper::Dax);
            }

            #[test]
            fn by_the_kernel() {
                if Keeper::Luo.is_here() {
                    super::$test(Keeper::Luo);
                }
            }
        })*
    };
}

with_both! {
    guests_keep_their_memory_under_three_kernels: three_kernels,
    a_command_that_dies_leaves_its_guests_running: dying_command,
    lost_power_brings_back_the_checkpoints: lost_power
}

/// Guests that write all the while go on, each page as they left it, under one kernel after another; and checkpoints
/// that are taken then have it, too.
fn three_kernels(keeper: Keeper) {
    let host = KvmHost::with(keeper, &["g1", "g2"]);
    for time in 1..=3 {
        let told = host.reboot("--fallback none");
        println!("{time}: {told}");
        assert_eq!([state(&told, "g1"), state(&told, "g2")], ["back", "back"], "{told}");
        assert_eq!(host.states(), ["running", "running"]);
        host.assert_all_exact(&format!("kernel {time}"));
    }
    let said = host.host.run("dewar ps").done().stdout;
    assert!(said.contains("kept across the host's reboot"), "{said}");
    host.host.run("dewar freeze g2 && dewar thaw g2").done();
    host.assert_exact("g2", "frozen and thawed");
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
    let host = KvmHost::with(Keeper::Dax, &["g1", "g2"]);
    let flip = format!(
        "mount -o dax /dev/pmem0 {KEPT}; f=$(ls {KEPT}/*g1@dewar-ram); \
         dd if=$f of=/root/byte bs=1 skip=71000000 count=1; \
         tr '\\000-\\377' '\\001-\\377\\000' < /root/byte | dd of=$f bs=1 seek=71000000 conv=notrunc; sync"
    );
    assert_refused(&host, &flip);
    let right =
        format!("dd if=/root/byte of=$(ls {KEPT}/*g1@dewar-ram) bs=1 seek=71000000 conv=notrunc");
    host.host.run(&right).done();
    host.host.run("dewar thaw g1").done();
    host.assert_exact("g1", "its memory is right again");
}

/// The same where the kernel keeps it, and nothing can alter it in between: the sums are altered.
#[test]
fn memory_that_is_refused_stays_where_the_kernel_kept_it() {
    if !Keeper::Luo.is_here() {
        return;
    }
    let host = KvmHost::with(Keeper::Luo, &["g1", "g2"]);
    let sums = "/var/lib/dewar/guests/g1/sums.json";
    assert_refused(&host, &format!("cp {sums} /root/sums; sed -i 's/\"./\"x/9' {sums}"));
    host.host.run("dewar thaw g1").failed(1, &["was changed while it was frozen"]);
    host.host.run(&format!("cp /root/sums {sums}; dewar thaw g1")).done();
    host.assert_exact("g1", "its sums are right again");
}

/// Has something happen between the kernels, for which the first guest is refused, and the other not.
fn assert_refused(host: &KvmHost, in_between: &str) {
    host.host.run(&format!("cat > /root/before-thaw <<'END'\n{in_between}\nEND")).done();
    let told = host.reboot("--fallback none");
    println!("{told}");
    host.host.run("rm /root/before-thaw").done();
    assert_eq!([state(&told, "g1"), state(&told, "g2")], ["failed", "back"], "{told}");
    let why = told["guests"][0]["why"].as_str().expect("why");
    assert!(why.contains("was changed while it was frozen") && why.contains("bytes 0x"), "{why}");
    assert_eq!(host.states(), ["frozen", "running"]);
    host.assert_exact("g2", "its neighbour was refused");
}

/// What would lose a guest is refused before any is touched, all of it at once.
#[test]
fn what_would_lose_a_guest_is_refused_before_any_is_touched() {
    let host = KvmHost::with(Keeper::Dax, &["g1", "other"]);
    let refused = |words: &str, why: &[&str]| assert_untouched(&host, words, 4, why);
    let failed = |words: &str, why: &str| {
        assert_untouched(&host, &format!("--now --others store {words}"), 1, &[why]);
    };
    let kernel = host.keeper.kernel();
    let now = format!("--now {kernel}");
    refused(&now, &["'other' cannot be kept", "--others store", "no guest was touched"]);
    for line in ["quiet", "memmap=1G!4G", "memmap=2G!5G", "memmap=2G$4G"] {
        let words = format!("{now} --others store --append '{line}'");
        refused(&words, &["does not set the memory of /mnt/keep aside: add memmap=2G!0x100000000"]);
    }
    refused(&format!("{kernel} --others store"), &["is not systemd", "--now"]);
    failed("--kernel /lab/initrd", "is no Linux kernel");
    failed("--kernel /lab/none", "/lab/none");
    failed("--kernel /lab/vmlinuz --initrd /lab/none", "/lab/none");
    // One that was cut off: the running one would load it.
    host.host.run("head -c 8000000 /lab/vmlinuz > /root/cut").done();
    failed("--kernel /root/cut", "shorter than its header says");
    // One that is broken elsewhere: only the running one sees that.
    host.host.run("cp /lab/vmlinuz /root/old; printf '\\0\\0' | dd of=/root/old bs=1 seek=518 conv=notrunc").done();
    failed("--kernel /root/old", "kexec_file_load");
    host.assert_all_exact("all was refused");
    // One that has no memory that could be kept goes through the store.
    let told = host.reboot("--others store --fallback none");
    assert_eq!(state(&told, "g1"), "back", "{told}");
    wait_until("it is back", Duration::from_secs(60), || host.states() == ["running", "running"]);
    host.assert_all_exact("one was in the store");
}

/// Where one of those that are to be shut down is not, the command says which is, and the others run on.
#[test]
fn one_that_cannot_be_shut_down_runs_on_and_nothing_else_is_said() {
    let host = KvmHost::with(Keeper::Dax, &["g1", "other1", "other2"]);
    let hold = "flock /var/lib/dewar/guests/other2/lock sleep 100 > /dev/null 2>&1 & echo $!";
    let holder = host.host.run(hold).done().stdout;
    let words = format!("--now {} --others stop --fallback none", host.keeper.kernel());
    let why = "other1 was shut down, all others run on";
    host.host.run(&format!("dewar host-reboot {words}")).failed(1, &[why]);
    host.host.run(&format!("kill {}", holder.trim())).done();
    assert_eq!(host.states(), ["running", "ended", "running"]);
    assert_eq!(host.host.run("cat /sys/kernel/kexec_loaded").done().stdout.trim(), "0");
    ["g1", "other2"].iter().for_each(|name| host.assert_exact(name, "it was not shut down"));
}

/// A kernel that would lose what this one hands over.
#[test]
fn a_kernel_that_is_not_told_to_take_memory_over_is_refused() {
    if !Keeper::Luo.is_here() {
        return;
    }
    let host = KvmHost::with(Keeper::Luo, &["g1"]);
    let now = format!("--now {}", host.keeper.kernel());
    let refused = |words: &str, why: &str| assert_untouched(&host, words, 4, &[why]);
    refused(&format!("{now} --append 'liveupdate=on'"), "does not say kho=on");
    refused(
        &format!("{now} --append 'kho=on liveupdate=on liveupdate=off'"),
        "does not say liveupdate=on",
    );
    host.assert_all_exact("all was refused");
}

fn assert_untouched(host: &KvmHost, words: &str, code: i32, why: &[&str]) {
    host.host.run(&format!("dewar host-reboot {words}")).failed(code, why);
    assert!(host.states().iter().all(|state| state == "running"), "{words}");
    assert_eq!(host.host.run("cat /sys/kernel/kexec_loaded").done().stdout.trim(), "0");
}

/// A guest on a bridge is reached again, by a connection that was open all the while: its tap is made anew, and put into the
/// bridge that the host has made by then.
#[test]
fn a_connection_to_a_guest_on_a_bridge_goes_on() {
    let mut host = KvmHost::with(Keeper::Dax, &[]);
    let bridge = "ip link add br0 type bridge; ip link set br0 up; ip addr flush dev eth1; \
                  ip link set eth1 master br0 up";
    host.host.run(&format!("{bridge}; echo '{bridge}' > /root/before-thaw")).done();
    let tap =
        "-netdev tap,id=n0,ifname=tap0,script=no,downscript=no -device virtio-net-pci,netdev=n0";
    host.start_guest_with("g1", tap);
    host.host.run("ip link set tap0 master br0 up").done();
    let mut way = host.way_to("g1");
    way.console().ask("net 10.9.1.77/24").expect("an address");
    way.console().ask("listen").expect("a listener");
    drop(way);
    let here = ["addr", "replace", "10.9.1.254/24", "dev", "net1"];
    assert!(Command::new("ip").args(here).status().expect("ip").success());
    let mut stream = TcpStream::connect(("10.9.1.77", 7)).expect("the guest");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let mut ask = |word: &[u8; 4]| {
        stream.write_all(word).expect("write");
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, word);
    };
    ask(b"once");
    let told = host.reboot("--fallback none");
    assert_eq!(state(&told, "g1"), "back", "{told}");
    ask(b"more");
    host.assert_exact("g1", "it was reached");
}

/// A command that is killed before the new kernel starts leaves all guests running: its watcher lets them go on, or,
/// where that was killed too, the next command does.
fn dying_command(keeper: Keeper) {
    let host = KvmHost::with(keeper, &["g1", "g2"]);
    let all_run = |after: &str| {
        wait_until(&format!("they run after '{after}'"), Duration::from_secs(20), || {
            host.states() == ["running", "running"]
        });
        host.assert_all_exact(after);
    };
    for step in
        ["loaded", "noted", "preserved", "freezing", "kept", "on record", "frozen", "leaving"]
    {
        host.die_at(step);
        all_run(step);
    }
    if keeper == Keeper::Luo {
        // The watcher alone had their memory. Where both die it is lost, as the manual says.
        return;
    }
    let child = host.stand_at_the_end("--fallback none");
    // The shell must not find itself.
    host.host.run("pkill -KILL -f __host-reboot-[w]atcher; pkill -KILL -f 'host-reboot[ ]--now'");
    drop(child.wait_with_output());
    all_run("both died");
}

/// Where the power goes in between, guests go on from the checkpoint that was taken for this; one of which none was taken
/// is told lost.
fn lost_power(keeper: Keeper) {
    let mut host = KvmHost::with(keeper, &["g1"]);
    // From its first checkpoint on there is a default store.
    host.host.run("dewar checkpoint g1; sync").done();
    let lose_power = |host: &KvmHost, words: &str| {
        let child = host.stand_at_the_end(words);
        host.host.lose_power();
        drop(child.wait_with_output());
        host.host.boot();
        let told = host.wait_until_it_is_back();
        println!("{told}");
        told
    };
    let told = lose_power(&host, "");
    assert_eq!(state(&told, "g1"), "restored", "{told}");
    host.assert_exact("g1", "its checkpoint");
    host.make_memory();
    host.start_guest("g2");
    let told = lose_power(&host, "--others stop --fallback none");
    assert_eq!(state(&told, "g2"), "failed", "{told}");
    let guests = told["guests"].as_array().expect("guests");
    let why = guests.iter().find(|it| it["name"] == "g2").and_then(|it| it["why"].as_str());
    assert!(why.is_some_and(|why| why.contains("its memory is lost")), "{told}");
    host.make_memory();
}
