//! Many moves, slow and bad links, and several moves at once.

use crate::common::{self, HeldCheckpoint};
use crate::migrate::{Hosts, end, words};
use dewar_testkit::{Console, GuestSpec, Lab, Ran, rounds, wait_until};
use std::fs::DirEntry;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A guest that writes as fast as it can moves there and back, by each way and each codec; then nothing is
/// left on either host but the guest.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_under_full_fire_moves_again_and_again() {
    let mut hosts = Hosts::new(&GuestSpec { memory_mib: 256, ..GuestSpec::default() });
    hosts.guest.console.ask("fill 64 noise").expect("fill");
    hosts.guest.console.ask("check 6000 2 disk hard").expect("check");
    let addresses = [hosts.b.address(), hosts.a.address()];
    let ways: [&[&str]; 5] = [
        &["--tunnel", "--max-downtime", "5s"],
        &["--tunnel", "--postcopy"],
        &["--max-downtime", "5s", "--codec", "lz4"],
        &["--postcopy", "--codec", "zstd"],
        &["--postcopy=auto", "--codec", "raw"],
    ];
    let rounds = rounds("moves under full fire", 20, 3);
    for round in 0..2 * rounds {
        let at_b = round % 2 == 1;
        let (from, to) = if at_b { (&hosts.b, &hosts.a) } else { (&hosts.a, &hosts.b) };
        let way = ways[round % ways.len()];
        let direct = ["--address", &addresses[usize::from(at_b)]];
        let direct = if way.contains(&"--tunnel") { &[][..] } else { &direct[..] };
        let moved = Hosts::migrate(from, to, &[way, direct].concat()).done();
        println!("round {round}: {}", moved.stdout.trim());
        assert_eq!(hosts.assert_on_one(&format!("round {round}, {way:?}")), !at_b);
    }
    assert_eq!(hosts.records(), Vec::<PathBuf>::new(), "nothing is to be remembered");
    assert_eq!(common::files(&hosts.b.root().join("guests")), Vec::<PathBuf>::new());
}

/// Pages that are like others, and that change a little: they go as what they have in common, while
/// they are written, and each is what it was.
#[test]
#[ignore = "long: make test-long"]
fn pages_that_refer_to_others_arrive_as_they_are() {
    let mut hosts = Hosts::new(&GuestSpec { memory_mib: 256, ..GuestSpec::default() });
    hosts.guest.console.ask("fill 64 equal").expect("fill");
    hosts.guest.console.ask("check 2000 2 disk").expect("check");
    let mut deltas = 0;
    for round in 0..4 {
        let at_b = round % 2 == 1;
        let (from, to) = if at_b { (&hosts.b, &hosts.a) } else { (&hosts.a, &hosts.b) };
        let codec = if round < 2 { "zstd" } else { "auto" };
        let line = ["--tunnel", "--max-downtime", "5s", "--codec", codec];
        let moved = Hosts::migrate(from, to, &line).done();
        println!("round {round}: {}", moved.stdout.trim());
        hosts.assert_on_one(&format!("round {round}"));
        hosts.guest.console.ask("filled").expect("what was filled");
        let number = |name: &str| moved.json()[name].as_u64().expect("number");
        // 16,384 pages of 32 contents, which both threads and connections come to know.
        assert!(number("same_pages") > 16_000, "{}", moved.stdout);
        assert!(codec == "auto" || number("bytes") < 50_000_000, "{}", moved.stdout);
        deltas += number("delta_pages");
    }
    assert!(deltas > 0, "the writers write into pages that were sent");
}

/// Pages that a GPU encodes, here one that OpenCL's driver computes, arrive as they are; a machine without one says so
/// before anything is done.
#[test]
#[ignore = "long: make test-long"]
fn pages_that_a_gpu_encodes_arrive_as_they_are() {
    let mut hosts = Hosts::new(&GuestSpec { memory_mib: 256, ..GuestSpec::default() });
    hosts.guest.console.ask("fill 64 noise").expect("fill");
    hosts.guest.console.ask("check 2000 2 disk").expect("check");
    let way = ["--tunnel", "--max-downtime", "5s", "--gpu", "always"];
    let mut without = hosts.a.command(&words(&Hosts::line(&hosts.b, &way)));
    let refused = without.env("OCL_ICD_VENDORS", "/nonexistent").output().expect("dewar");
    Ran::of(&refused).failed(4, &["no GPU", "the guest was not touched"]);
    assert!(!hosts.assert_on_one("without a GPU"));
    for round in 0..2 {
        let at_b = round % 2 == 1;
        let (from, to) = if at_b { (&hosts.b, &hosts.a) } else { (&hosts.a, &hosts.b) };
        let moved = Hosts::migrate(from, to, &way).done();
        println!("round {round}: {}", moved.stdout.trim());
        hosts.assert_on_one(&format!("round {round}"));
        hosts.guest.console.ask("filled").expect("what was filled");
        let told = moved.json();
        assert!(told["gpu"]["pages"].as_u64() > Some(8_000), "{}", moved.stdout);
        assert!(told["gpu"]["failure"].is_null(), "{}", moved.stdout);
    }
}

/// What a guest is promised here it is promised there.
#[test]
#[ignore = "long: make test-long"]
fn a_reservation_of_cpu_time_moves_along() {
    let mut hosts = Hosts::new(&GuestSpec { qos: true, ..GuestSpec::default() });
    hosts.guest.console.ask("check 500 1 disk").expect("check");
    let line = ["qos", "g", "--target", "25/s", "--miss", "2.5%", "--max", "20%", "--detach"];
    hosts.a.dewar(&line).done();
    // CPUs are those of the whole machine, and both hosts see what is promised.
    let promise = |host: &Lab, pid: i32| {
        let told = host.dewar(&["qos", "--status"]).json();
        let found = told["reservations"].as_array()?.iter().find(|it| it["pid"] == pid).cloned();
        found.map(|it| ["target_per_s", "miss", "min", "max"].map(|name| it[name].clone()))
    };
    let pid = hosts.a.pid("g").expect("its QEMU");
    let before = promise(&hosts.a, pid);
    assert!(before.is_some());
    let way = ["--tunnel", "--max-downtime", "1s"];
    let moved = Hosts::migrate(&hosts.a, &hosts.b, &way).done();
    let pid_there = hosts.b.pid("g").expect("its QEMU");
    assert_eq!(promise(&hosts.b, pid_there), before, "{}", moved.stderr);
    assert!(hosts.assert_on_one("with a reservation"));
    wait_until("its end at A", Duration::from_secs(20), || promise(&hosts.a, pid).is_none());
    // What the other host does not promise is said, with what to do there; the guest is there.
    let dewar = hosts.a.path().join("dewar");
    let script = "#!/bin/sh\ncase \"$*\" in *' qos '*) echo no room >&2; exit 1;; esac\nexec \"$DEWAR\" \"$@\"\n";
    std::fs::write(&dewar, script.replace("$DEWAR", &hosts.a.program().display().to_string()))
        .and_then(|()| std::fs::set_permissions(&dewar, PermissionsExt::from_mode(0o755)))
        .expect("script");
    let mut back = Hosts::line(&hosts.a, &way);
    let program = back.iter().position(|word| word == "--remote-dewar").expect("option") + 1;
    back[program] = dewar.display().to_string();
    let moved = hosts.b.dewar(&words(&back)).done();
    for said in ["did not come along", "no room", "qos g --detach --target 25/s"] {
        assert!(moved.stderr.contains(said), "{}", moved.stderr);
    }
    assert!(!hosts.assert_on_one("without it"));
}

/// One megabyte a second, and 200 ms until an answer comes: it takes its time, and arrives whole.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_moves_over_a_slow_and_far_link() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 500 1 disk").expect("check");
    let link = hosts.a.program().with_file_name("dewar-link");
    let via = format!("{} 8 100 {}", link.display(), hosts.b.via());
    let ways = [&["--postcopy"][..], &["--max-downtime", "5s"]];
    let rounds = rounds("moves over a slow link", ways.len(), 1);
    for (round, way) in ways.iter().take(rounds).enumerate() {
        let line = Hosts::line_via(&via, &hosts.b, &[&["--tunnel"], *way].concat());
        let moved = hosts.a.dewar(&words(&line)).done();
        println!("round {round}: {}", moved.stdout.trim());
        hosts.bring_back(&format!("round {round}"));
    }
}

/// A guest that writes faster than its pages can be sent is slowed down until they can. Whatever becomes of the
/// command, it is not slow after that, and it never stands still for it.
#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_writes_too_fast_is_slowed_down() {
    let vcpus = 2;
    let mut hosts = Hosts::new(&GuestSpec { vcpus, ..GuestSpec::default() });
    hosts.guest.console.ask("check 6000 2 disk hard").expect("check");
    let link = hosts.a.program().with_file_name("dewar-link");
    // The guest writes faster than this link, on a slow host too.
    let via = format!("{} 400 0 {}", link.display(), hosts.b.via());
    let line = |more: &[&str]| {
        let fixed = ["--tunnel", "--codec", "raw", "--max-downtime", "60ms"];
        Hosts::line_via(&via, &hosts.b, &[&fixed[..], more].concat())
    };
    let (plain, slow) = (line(&[]), line(&["--throttle=99"]));
    hosts.a.dewar(&words(&plain)).failed(1, &["writes faster than", "'--throttle' slows it down"]);
    let qemu = Hosts::qemu_of(&hosts.a);
    let status =
        |it: &std::path::Path| std::fs::read_to_string(it.join("status")).unwrap_or_default();
    let held_threads = || {
        let threads = std::fs::read_dir(format!("/proc/{qemu}/task")).expect("threads");
        let is_held = |thread: &DirEntry| !status(&thread.path()).contains("TracerPid:\t0\n");
        threads.flatten().filter(is_held).count()
    };
    // Of each hundredth of a second a third.
    let runs =
        || (0..200).all(|_| (held_threads() == 0, std::thread::sleep(Duration::from_millis(1))).0);
    let slowed_down = |a: &Lab| {
        let held = HeldCheckpoint::at_with(a, &words(&slow), "slowed down");
        wait_until("all of its vCPUs are slowed down", Duration::from_secs(10), || {
            held_threads() == vcpus as usize
        });
        held
    };
    // A command that stands still, as by SIGSTOP, leaves no slow guest for long; nor one that is killed.
    let held = slowed_down(&hosts.a);
    wait_until("the guest runs as before", Duration::from_secs(10), runs);
    held.kill();
    assert!(!hosts.assert_on_one("the command is killed"));
    // A guardian that is killed slows down nothing, either.
    let held = slowed_down(&hosts.a);
    end(held.guardian().expect("a guardian"));
    assert!(runs(), "nobody slows it down");
    end(held.pid);
    drop(held);
    assert!(!hosts.assert_on_one("killed"));
    assert!(runs(), "nobody slows it down");
    let moved = hosts.a.dewar(&words(&slow)).done();
    println!("{}", moved.stdout.trim());
    assert!(hosts.assert_on_one("slowed down"));
}

/// Two guests change places at the same time.
#[test]
#[ignore = "long: make test-long"]
fn two_guests_move_at_once_in_both_directions() {
    let a = common::lab().as_host().expect("first host");
    let spec = GuestSpec::default();
    let names = ["g", "h"];
    for name in names {
        let mut guest = a.run(name, &spec).expect("guest");
        guest.console.ask("check 2000 1 disk").expect("check");
    }
    let b = a.second_host(&names).expect("second host");
    let more = ["--max-downtime", "2s"];
    a.dewar(&words(&Hosts::line_of("h", &b.via(), &b, &more))).done();
    let start = |from: &Lab, name: &str, to: &Lab| {
        let mut command = from.command(&words(&Hosts::line_of(name, &to.via(), to, &more)));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("dewar")
    };
    let moves = [start(&a, "g", &b), start(&b, "h", &a)];
    for child in moves {
        Ran::of(&child.wait_with_output().expect("wait")).done();
    }
    for (name, here, other) in [("g", &b, &a), ("h", &a, &b)] {
        assert_eq!(here.ps(name).expect("listed")["state"], "running", "{name}");
        assert!(other.ps(name).is_none(), "{name} is known on the other host");
        let folder = here.guest_folder(name).expect("folder");
        let mut console = Console::connect(&folder.join("console")).expect("console");
        console.ask("verify").unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

/// A trial says what a move would be like, and leaves nothing.
#[test]
fn a_trial_moves_nothing() {
    let mut hosts = Hosts::new(&GuestSpec::default());
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    let trial = Hosts::migrate(&hosts.a, &hosts.b, &["--dry-run"]).done();
    println!("{}", trial.stdout.trim());
    let told = trial.json();
    let number = |name: &str| told[name].as_f64().expect("number");
    assert!(number("memory_bytes") > 16e6 && number("bytes_per_second") > 1e6, "{told}");
    assert!(number("written_per_second") > 0.0, "{told}");
    assert!(!hosts.assert_on_one("tried"));
    assert_eq!(hosts.records(), Vec::<PathBuf>::new(), "nothing is to be remembered");
    assert_eq!(common::files(&hosts.b.root().join("guests")), Vec::<PathBuf>::new());
    let disk = hosts.b.guest_folder("g").expect("folder").join("disk0.qcow2");
    std::fs::remove_file(&disk).expect("remove");
    Hosts::migrate(&hosts.a, &hosts.b, &["--dry-run"]).failed(4, &["is not on this host"]);
}

/// A TCP connection over a tap is open all the while: nobody who speaks with the guest sees more than a
/// moment of silence.
#[test]
#[ignore = "long: make test-long"]
fn a_connection_over_a_tap_stays_open() {
    let tap = ["-netdev", "tap,id=n0,ifname=tap0,script=no,downscript=no"];
    let card = ["-device", "virtio-net-pci,netdev=n0,mac=52:54:00:77:00:50"];
    let extra = [tap, card].concat().into_iter().map(str::to_owned).collect();
    let a = common::lab().as_host().expect("first host");
    let make = |host: &Lab, more: &str| {
        let script = format!(
            "ip link add br0 type bridge && ip link set br0 up && ip tuntap add tap0 mode tap && \
             ip link set tap0 master br0 && ip link set tap0 up{more}"
        );
        shell(&format!("{} sh -c '{script}'", host.via()));
    };
    make(&a, "");
    let mut hosts = Hosts::with(a, &GuestSpec { extra, ..GuestSpec::default() });
    // The cable between the hosts is a port of both bridges.
    let cable = " && ip link set c master br0";
    make(&hosts.b, cable);
    let address = " && ip addr flush dev c && ip addr add 10.77.0.1/24 dev br0";
    shell(&format!("{} sh -c 'true{cable}{address}'", hosts.a.via()));
    hosts.guest.console.ask("net 10.77.0.50/24").expect("net");
    hosts.guest.console.ask("listen").expect("listen");
    hosts.guest.console.ask("check 2000 1 disk").expect("check");
    // A client on the first host, which says a number each 20 ms and wants it back.
    let client = "exec 3<>/dev/tcp/10.77.0.50/7 && for i in $(seq 1 500); do echo $i >&3; \
                  read -t 10 x <&3 || exit 1; [ \"$x\" = $i ] || exit 2; sleep 0.02; done; echo whole";
    let client = format!("exec {} bash -c '{client}'", hosts.a.via());
    let client = Command::new("sh").args(["-c", &client]).stdout(Stdio::piped()).spawn();
    let client = client.expect("client");
    for (round, way) in [&["--tunnel"][..], &["--tunnel", "--postcopy"]].into_iter().enumerate() {
        let more = [way, &["--max-downtime", "1s"]].concat();
        Hosts::migrate(&hosts.a, &hosts.b, &more).done();
        assert!(hosts.assert_on_one(&format!("round {round}")));
        Hosts::migrate(&hosts.b, &hosts.a, &more).done();
        assert!(!hosts.assert_on_one(&format!("round {round}, back")));
    }
    let output = client.wait_with_output().expect("client");
    assert!(output.status.success(), "the connection broke: {:?}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "whole");
}

fn shell(line: &str) {
    let status = Command::new("sh").args(["-c", line]).status().expect("sh");
    assert!(status.success(), "{line}");
}

/// What `make test-kvm` runs under real KVM.
#[test]
fn a_guest_moves_again_and_again_under_kvm() {
    if std::env::var("DEWAR_TEST_ACCEL").is_err() {
        println!("SKIPPED a_guest_moves_again_and_again_under_kvm: it runs in 'make test-kvm'");
        return;
    }
    let mut hosts = Hosts::new(&GuestSpec { memory_mib: 192, ..GuestSpec::default() });
    hosts.guest.console.ask("check 4000 1 disk").expect("check");
    for round in 0..20 {
        let way: &[&str] =
            if round % 2 == 0 { &["--max-downtime", "20s"] } else { &["--postcopy"] };
        let moved = Hosts::migrate(&hosts.a, &hosts.b, way).done();
        println!("round {round}: {}", moved.stdout.trim());
        hosts.bring_back(&format!("round {round}"));
    }
    assert_eq!(hosts.records(), Vec::<PathBuf>::new(), "nothing is to be remembered");
}
