//! Checkpoints in Redis and in a Cluster, of real guests, with servers that go
//! away in the middle.

use crate::common::{self, HeldCheckpoint};
use dewar_testkit::{
    Certificates, Console, GuestSpec, Lab, Ran, RedisCluster, RedisServer, SlowWay, TestGuest,
    kill, wait_until,
};
use rustix::process::Signal;
use std::time::{Duration, Instant};

fn small_guest(lab: &Lab) -> TestGuest {
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    guest.console.ask("check 6000 1 disk").expect("check");
    guest
}

/// One with memory that takes its time.
fn guest(lab: &Lab) -> TestGuest {
    let mut guest = small_guest(lab);
    guest.console.ask("fill 64 noise").expect("fill");
    guest
}

/// Whether all memory of the restored guest has arrived.
fn is_complete(lab: &Lab) -> bool {
    lab.ps("g").expect("listed")["lazy_restore"]["complete"] != false
}

#[test]
#[ignore = "long: make test-long"]
fn a_slow_store_keeps_no_running_guest_waiting() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    let way = SlowWay::to(server.port(), Duration::from_millis(100)).expect("way");
    let mut guest = guest(&lab);
    let told = lab.dewar(&["checkpoint", "g", "--store", &way.url()]).done().json();
    let [pause, total] = ["pause_ms", "total_ms"].map(|key| told[key].as_f64().expect("ms"));
    assert!(pause * 4.0 < total, "{told}");
    guest.console.ask("verify").expect("consistent");
    lab.crash("g");
    lab.restore(&mut guest, &["g", "--store", &way.url()]).expect("restore");
    guest.console.ask("verify").expect("it waits for its own pages");
    lab.wait_for_memory("g");
}

#[test]
#[ignore = "long: make test-long"]
fn a_store_that_goes_in_the_pause_keeps_nobody_standing() {
    let lab = common::lab();
    let mut server = RedisServer::start(&[]).expect("redis");
    let spec = GuestSpec { memory_mib: 256, ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("check 20000 1 disk hard").expect("check");
    let url = format!("{}?retry=15s", server.url());
    // What is left in the pause has no room in it.
    let more = ["--buffer", "1M", "--max-pause", "1s", "--codec", "raw"];
    let line = [&["checkpoint", "g", "--store", &url][..], &more].concat();
    let held = HeldCheckpoint::at_with(&lab, &line, "stopped");
    server.kill().expect("kill");
    let began = Instant::now();
    kill(held.pid, Signal::CONT);
    guest.console.ask("count").expect("it runs on");
    // It had to wait, but not for as long as it is tried again while the guest runs.
    let waited = began.elapsed();
    assert!((1..13).contains(&waited.as_secs()), "{waited:?}");
    let (code, _, said) = held.go_on();
    assert!(code == 1 && said.contains("the guest is running"), "{code}: {said}");
    guest.console.ask("verify").expect("consistent");
    server.start_again().expect("start");
    lab.dewar(&["checkpoint", "g", "--store", &url]).done();
}

#[test]
fn a_guest_lives_in_redis() {
    let lab = common::lab();
    let mut server = RedisServer::start(&[]).expect("redis");
    let url = server.url();
    let mut guest = guest(&lab);
    let first = lab.dewar(&["checkpoint", "g", "--store", &url, "--tag", "one"]).done().json();
    let second = lab.dewar(&["checkpoint", "g", "--store", &url, "--tag", "two"]).done().json();
    assert_eq!(second["parent"], first["checkpoint"]);
    assert_eq!(second["disks"], 1);
    lab.dewar(&["verify", "two", "--store", &url]).done();
    assert_eq!(
        lab.dewar(&["ls", "--store", &url]).done().json()["checkpoints"].as_array().map(Vec::len),
        Some(2)
    );
    lab.dewar(&["delete", "one", "--store", &url]).done();
    lab.dewar(&["gc", "--store", &url]).done();
    for how in [&["--eager"][..], &[]] {
        lab.crash("g");
        let arguments = [&["two", "--store", &url], how].concat();
        lab.restore(&mut guest, &arguments).expect("restore");
        guest.console.ask("verify").expect("consistent");
    }
    // The server dies while pages arrive: the guest waits, and goes on.
    let way = SlowWay::to(server.port(), Duration::from_millis(50)).expect("way");
    let cut_short = (0..8).any(|_| {
        lab.crash("g");
        lab.restore(&mut guest, &["two", "--store", &way.url()]).expect("restore");
        server.kill().expect("kill");
        std::thread::sleep(Duration::from_millis(500));
        let was_short = !is_complete(&lab);
        server.start_again().expect("start");
        guest.console.ask("verify").expect("consistent");
        was_short
    });
    assert!(cut_short, "its memory comes too soon");
    lab.wait_for_memory("g");
    // A restore that cannot read its disks leaves those of the dead guest.
    let bases = || -> Vec<(std::path::PathBuf, Vec<u8>)> {
        let mut files = common::files(&lab.root().join("guests/g"));
        files.retain(|it| it.to_string_lossy().contains("/base/"));
        files.into_iter().map(|it| (it.clone(), std::fs::read(it).expect("read"))).collect()
    };
    let before = bases();
    let three = lab.dewar(&["checkpoint", "g", "--store", &url, "--tag", "three"]).done().json();
    for id in [&second["checkpoint"], &three["checkpoint"]] {
        let piece = format!("dewar:disks/{}-0.qcow2/00000000", id.as_str().expect("id"));
        assert_eq!(server.ask(&["del", &piece]).expect("del"), "1");
    }
    lab.crash("g");
    lab.dewar(&["restore", "three", "--store", &url]).failed(1, &["is missing"]);
    assert_eq!(bases(), before, "the dead guest's disk");
    // What it stands on is here already.
    lab.restore(&mut guest, &["two", "--store", &url]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    lab.wait_for_memory("g");
    lab.dewar(&["delete", "three", "--store", &url]).done();
    // Its disks are its own: the checkpoint may go, when the place of a reader that ended while
    // Redis was away has run out.
    wait_until("two to be let go", Duration::from_secs(40), || {
        lab.dewar(&["delete", "two", "--store", &url]).code == 0
    });
    guest.console.ask("verify").expect("consistent");
    let left = common::files(&lab.root().join("guests/g"));
    // Its copy, and the one that it stands on.
    let disks = left.iter().filter(|it| it.to_string_lossy().contains("/base/")).count();
    assert_eq!(disks, 2, "{left:?}");
    lab.dewar(&["rm", "g", "--force"]).done();
    assert!(common::files(&lab.root().join("guests")).is_empty());
}

#[test]
#[ignore = "long: make test-long"]
fn a_cluster_node_dies_in_a_checkpoint_and_in_a_restore() {
    let lab = common::lab();
    let mut cluster = RedisCluster::start().expect("cluster");
    // Longer than the others take to find out.
    let url = format!("{}/?retry=5s", cluster.url());
    let mut guest = guest(&lab);
    lab.dewar(&["checkpoint", "g", "--store", &url, "--tag", "whole"]).done();
    let held =
        HeldCheckpoint::at_with(&lab, &["checkpoint", "g", "--full", "--store", &url], "armed");
    cluster.nodes[2].kill().expect("kill");
    let (code, _, said) = held.go_on();
    assert_eq!(code, 1, "{said}");
    for words in ["redis://", "no checkpoint was made", "the guest is running"] {
        assert!(said.contains(words), "'{words}' is not in: {said}");
    }
    guest.console.ask("verify").expect("the guest runs on");
    cluster.nodes[2].start_again().expect("start");
    cluster.wait_whole();
    lab.dewar(&["checkpoint", "g", "--store", &url, "--tag", "after"]).done();
    // Now while its memory arrives; it waits for its own pages only.
    let mut cut_short = 0;
    for round in 0..9 {
        if round > 2 && cut_short > 0 {
            break;
        }
        let node = round % 3;
        lab.crash("g");
        lab.restore(&mut guest, &["after", "--store", &url]).expect("restore");
        cluster.nodes[node].kill().expect("kill");
        std::thread::sleep(Duration::from_millis(200));
        cut_short += u32::from(!is_complete(&lab));
        cluster.nodes[node].start_again().expect("start");
        cluster.wait_whole();
        guest.console.ask("verify").expect("consistent");
    }
    assert!(cut_short > 0, "its memory comes too soon");
    // Where a node is away, a restore fails and starts nothing.
    lab.crash("g");
    cluster.nodes[0].kill().expect("kill");
    let ran = lab.dewar(&["restore", "after", "--eager", "--store", &url]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stderr.contains("redis://"), "{}", ran.stderr);
    cluster.nodes[0].start_again().expect("start");
    cluster.wait_whole();
    lab.restore(&mut guest, &["after", "--eager", "--store", &url]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}

#[test]
fn secrets_come_from_the_environment_alone() {
    let lab = common::lab();
    let server = RedisServer::start(&["--requirepass", "s3cret"]).expect("redis");
    let _guest = small_guest(&lab);
    let url = server.url();
    let told = lab.dewar(&["checkpoint", "g", "--store", &url]);
    let told = told.failed(1, &["refused the credentials", "DEWAR_REDIS_PASSWORD"]);
    assert!(!told.stderr.contains("s3cret"));
    let on_line = format!("redis://:s3cret@127.0.0.1:{}", server.port());
    let told = lab.dewar(&["checkpoint", "g", "--store", &on_line]).failed(4, &["command line"]);
    assert!(!told.stderr.contains("s3cret"), "{}", told.stderr);
    let open = RedisServer::start(&[]).expect("redis");
    for store in [&url, &open.url()] {
        let mut command = lab.command(&["checkpoint", "g", "--store", store]);
        let wrong = command.env("DEWAR_REDIS_PASSWORD", "wr0ng").output().expect("dewar");
        let told = Ran::of(&wrong).failed(1, &["refused the credentials"]);
        assert!(!told.stderr.contains("wr0ng"), "{told:?}");
    }
    let file = lab.path().join("password");
    std::fs::write(&file, "s3cret\n").expect("write");
    for (variable, value) in [
        ("DEWAR_REDIS_PASSWORD", "s3cret".to_owned()),
        ("DEWAR_REDIS_PASSWORD_FILE", file.display().to_string()),
    ] {
        let mut command = lab.command(&["checkpoint", "g", "--store", &url]);
        let output = command.env(variable, value).output().expect("dewar");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(!String::from_utf8_lossy(&output.stdout).contains("s3cret"));
    }
    lab.crash("g");
    let mut command = lab.command(&["restore", "g", "--store", &url]);
    let restored = command.env("DEWAR_REDIS_PASSWORD", "s3cret").output().expect("dewar");
    assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
    let mut files = common::files(&lab.root());
    // Nor does the guest's QEMU have them.
    files.push(format!("/proc/{}/environ", lab.pid("g").expect("pid")).into());
    for file in files {
        let text = std::fs::read(&file).unwrap_or_default();
        assert!(!text.windows(6).any(|it| it == b"s3cret"), "{}", file.display());
    }
}

#[test]
fn a_frozen_guest_keeps_its_checkpoint_by_whatever_name() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    let mut guest = small_guest(&lab);
    let store = server.url();
    lab.dewar(&["freeze", "g", &format!("--to-store={store}")]).done();
    for url in [format!("{store}?retry=5s"), format!("redis://localhost:{}", server.port())] {
        let listed = lab.dewar(&["ls", "--store", &url]).json();
        let id = listed["checkpoints"][0]["checkpoint"].as_str().expect("id").to_owned();
        lab.dewar(&["delete", &id, "--store", &url])
            .failed(1, &["all that there is of frozen guest 'g'", "nothing was removed"]);
    }
    lab.dewar(&["thaw", "g"]).done();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
}

#[test]
fn a_full_server_fails_the_checkpoint_alone() {
    let lab = common::lab();
    let server = RedisServer::start(&["--maxmemory", "30mb"]).expect("redis");
    let mut guest = guest(&lab);
    let url = server.url();
    let told = lab.dewar(&["checkpoint", "g", "--store", &url]);
    told.failed(1, &["it is full", "no checkpoint was made; the guest is running"]);
    guest.console.ask("verify").expect("the guest runs on");
    assert_eq!(lab.dewar(&["ls", "--store", &url]).json()["checkpoints"], serde_json::json!([]));
    server.ask(&["config", "set", "maxmemory", "0"]).expect("config");
    lab.dewar(&["checkpoint", "g", "--store", &url]).done();
}

#[test]
#[ignore = "long: make test-long"]
fn killed_with_a_remote_store_nothing_stays() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    let url = server.url();
    let mut guest = small_guest(&lab);
    for step in ["bulk-done", "resumed", "disks-copied", "synced"] {
        let held = HeldCheckpoint::at_with(&lab, &["checkpoint", "g", "--store", &url], step);
        let guardian = held.guardian().expect("a guardian");
        held.kill();
        dewar_testkit::wait_while_alive(guardian);
        guest.console.ask("verify").unwrap_or_else(|error| panic!("after {step}: {error:#}"));
        assert_eq!(
            lab.dewar(&["ls", "--store", &url]).json()["checkpoints"],
            serde_json::json!([])
        );
    }
    // The dead one's place in the store runs out.
    std::thread::sleep(Duration::from_secs(21));
    let told = lab.dewar(&["checkpoint", "g", "--store", &url]).done().json();
    let segments = server.ask(&["--scan", "--pattern", "dewar:segments/*"]).expect("scan");
    lab.dewar(&["verify", told["checkpoint"].as_str().expect("id"), "--store", &url]).done();
    lab.dewar(&["gc", "--store", &url]).done();
    let after = server.ask(&["--scan", "--pattern", "dewar:segments/*"]).expect("scan");
    assert_eq!(segments.lines().count(), after.lines().count());
    assert!(!lab.root().join("guests/g/scratch").exists());
}

#[test]
#[ignore = "long: make test-long"]
fn a_cluster_is_encrypted_and_locked() {
    let lab = common::lab();
    let certificates = Certificates::make().expect("certificates");
    let cluster = RedisCluster::start_locked(&certificates, "s3cret").expect("cluster");
    let url = cluster.url();
    let mut guest = guest(&lab);
    let dewar = |arguments: &[&str], password: &str| {
        let mut command = lab.command(arguments);
        command.args(["--store", &url]).env("DEWAR_REDIS_CA_FILE", certificates.authority());
        Ran::of(&command.env("DEWAR_REDIS_PASSWORD", password).output().expect("dewar starts"))
    };
    dewar(&["checkpoint", "g"], "wr0ng").failed(1, &["refused the credentials"]);
    dewar(&["checkpoint", "g"], "s3cret").done();
    let keys = |node: &RedisServer| node.ask(&["dbsize"]).expect("dbsize").parse::<u64>();
    assert!(cluster.nodes.iter().all(|node| keys(node).expect("a number") > 0), "spread over all");
    dewar(&["verify", "g"], "s3cret").done();
    lab.crash("g");
    dewar(&["restore", "g"], "s3cret").done();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
}

#[test]
fn a_connection_is_encrypted_and_its_server_known() {
    let lab = common::lab();
    let certificates = Certificates::make().expect("certificates");
    let (_server, url) = RedisServer::start_tls(&certificates).expect("redis");
    let mut guest = small_guest(&lab);
    let dewar = |arguments: &[&str], authority: Option<&std::path::Path>| {
        let mut command = lab.command(arguments);
        if let Some(authority) = authority {
            command.env("DEWAR_REDIS_CA_FILE", authority);
        }
        command.output().expect("dewar starts")
    };
    let line = ["checkpoint", "g", "--store", &url];
    let (ours, others) = (certificates.authority(), Certificates::make().expect("certificates"));
    for unknown in [None, Some(others.authority())] {
        let told = dewar(&line, unknown.as_deref());
        let said = String::from_utf8_lossy(&told.stderr).into_owned();
        assert_eq!(told.status.code(), Some(1), "{said}");
        assert!(said.contains("certificate") && said.contains("was not touched"), "{said}");
    }
    let missing = lab.path().join("missing.pem");
    let told = dewar(&line, Some(&missing));
    let said = String::from_utf8_lossy(&told.stderr).into_owned();
    assert_eq!(told.status.code(), Some(1), "{said}");
    assert!(said.contains("missing.pem") && said.contains("DEWAR_REDIS_CA_FILE"), "{said}");
    assert!(dewar(&line, Some(&ours)).status.success());
    assert!(dewar(&["verify", "g", "--store", &url], Some(&ours)).status.success());
    lab.crash("g");
    let restored = dewar(&["restore", "g", "--eager", "--store", &url], Some(&ours));
    assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
}

/// A server that was told to forget after checkpoints were put there: every command that looks says so.
#[test]
fn a_server_that_may_forget_is_told_of() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    let url = server.url();
    dewar_image::Store::open_or_create(&dewar_image::Location::parse(&url).expect("url"))
        .expect("store");
    let quiet = lab.dewar(&["ls", "--store", &url]).done();
    assert_eq!(quiet.stderr, "");
    server.ask(&["config", "set", "maxmemory-policy", "allkeys-lru"]).expect("config");
    for verb in ["ls", "gc"] {
        let told = lab.dewar(&[verb, "--store", &url]).done();
        assert!(told.stderr.contains("may lose checkpoints"), "{verb}: {told:?}");
    }
    let told = lab.dewar(&["verify", "c0", "--store", &url]).failed(3, &["no checkpoint"]);
    assert!(told.stderr.contains("may lose checkpoints"), "{told:?}");
}
