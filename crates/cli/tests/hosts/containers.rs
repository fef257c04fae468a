//! Containers on a Debian 13 as it comes: its kernel, runc, crun and CRIU.

use crate::host::{OneHost, TwoHosts};
use dewar_testkit::LabContainer;

#[test]
fn one_of_runc_comes_back_with_its_files() {
    comes_back_with_its_files("runc");
}

#[test]
fn one_of_crun_comes_back_with_its_files() {
    comes_back_with_its_files("crun");
}

fn comes_back_with_its_files(runtime: &'static str) {
    let one = OneHost::new();
    let c = LabContainer::start(one.host, runtime, true);
    // Huge pages are how Debian comes; what is written is told page by page all the same.
    one.host.run("echo always > /sys/kernel/mm/transparent_hugepage/enabled").done();
    c.ask("fill 48 noise");
    c.ask("words 200");
    c.ask("check 300 2 none");
    c.ask("append /tmp/log one");
    c.is_well();
    c.dewar("checkpoint c");
    c.ask("append /tmp/log two");
    let again = one.host.run("dewar --json checkpoint c").done().json();
    let (stopped, all) = (&again["captured"]["stopped"], &again["pages"]["total"]);
    assert!(stopped.as_u64() < all.as_u64().map(|all| all / 10), "{again}");
    assert!(again["stored_bytes"].as_u64() < all.as_u64().map(|all| all * 4096 / 5), "{again}");
    c.ask("append /tmp/log three");
    c.crash();
    c.dewar("restore c");
    c.is_well();
    assert_eq!(c.ask("show /tmp/log"), "one;two");
    c.ask("verify");
}

#[test]
fn one_of_runc_moves_there_and_back() {
    moves_there_and_back("runc");
}

#[test]
fn one_of_crun_moves_there_and_back() {
    moves_there_and_back("crun");
}

/// By ssh as it stands there, with its files and what it uses in the page cache, and under control groups of version 2.
fn moves_there_and_back(runtime: &'static str) {
    let two = TwoHosts::new();
    let a = LabContainer::start(two.a, runtime, true);
    let b = LabContainer::place(two.b, runtime, true, "");
    let states = || [two.a, two.b].map(|host| host.state("c"));
    a.ask("fill 16 noise");
    a.ask("check 300 2 none");
    a.ask("append /tmp/log one");
    let moved = two.a.run("dewar --json migrate c hostb --max-downtime 5s").done();
    println!("there: {}", moved.stdout.trim());
    b.is_well();
    assert_eq!(states(), ["-", "running"]);
    b.ask("append /tmp/log two");
    let moved = two.b.run("dewar --json migrate c hosta --max-downtime 5s").done();
    println!("back: {}", moved.stdout.trim());
    a.is_well();
    assert_eq!(a.ask("show /tmp/log"), "one;two");
    assert_eq!(states(), ["running", "-"]);
    // Given away, and all that gave it away is dead: it stands still.
    let pids = "cat /sys/fs/cgroup/c/cgroup.procs";
    let used =
        || two.a.run(&format!("for p in $({pids}); do cut -d' ' -f14,15 /proc/$p/stat; done"));
    two.a.run(
        "DEWAR_TEST_SIGNAL=given:kill dewar migrate c hostb --max-downtime 5s; pkill -KILL criu",
    );
    let before = used().done().stdout;
    two.a.run("sleep 2").done();
    assert!(!before.trim().is_empty());
    assert_eq!(used().done().stdout, before);
    assert_eq!(states(), ["given away", "arriving"]);
    two.a.run("dewar migrate c --resume").done();
    b.is_well();
    assert_eq!(states(), ["-", "running"]);
}

/// podman knows it on the host where it is, and on no other. crun is podman's runtime here where none is named.
#[test]
fn one_of_podman_moves_there_and_back() {
    let two = TwoHosts::new();
    let a = LabContainer::start_by_podman(two.a, "crun");
    let b = LabContainer::place_for_podman(two.b);
    let states = || [two.a, two.b].map(|host| host.state("c"));
    let known = || {
        let list = "podman ps --all --format '{{.Names}} {{.State}}'";
        [two.a, two.b].map(|host| host.run(list).done().stdout.trim().to_owned())
    };
    a.ask("fill 16 noise");
    a.ask("check 300 2 none");
    a.ask("append /log one");
    a.ask("append /dev/shm/log one");
    for round in 1..=2 {
        let moved = two.a.run("dewar --json migrate c hostb --max-downtime 5s").done();
        println!("there: {}", moved.stdout.trim());
        b.is_well();
        assert_eq!(states(), ["-", "running"]);
        assert_eq!(known(), ["", "c running"]);
        b.ask(&format!("append /log b{round}"));
        let moved = two.b.run("dewar --json migrate c hosta --max-downtime 5s").done();
        println!("back: {}", moved.stdout.trim());
        a.is_well();
        assert_eq!(known(), ["c running", ""]);
    }
    assert_eq!(a.ask("show /log"), "one;b1;b2");
    assert_eq!(a.ask("show /dev/shm/log"), "one");
    // Not moved, and nothing of it is left there.
    two.a.run("DEWAR_TEST_SIGNAL=sent:kill dewar migrate c hostb --max-downtime 5s");
    a.is_well();
    two.b.run("dewar ps").done();
    assert_eq!(states(), ["running", "-"]);
    assert_eq!(known(), ["c running", ""]);
    // Given away, and all that gave it away is dead.
    two.a.run(
        "DEWAR_TEST_SIGNAL=given:kill dewar migrate c hostb --max-downtime 5s; pkill -KILL criu",
    );
    assert_eq!(states(), ["given away", "arriving"]);
    two.a.run("dewar migrate c --resume").done();
    b.is_well();
    assert_eq!(states(), ["-", "running"]);
    assert_eq!(known(), ["", "c running"]);
    b.dewar("checkpoint c");
    b.dewar("restore c --replace");
    b.is_well();
}

/// podman waits four minutes for a container that it brings back. It runs on where it was then.
#[test]
fn a_wait_that_is_too_long_for_podman_ends_at_the_first_host() {
    let two = TwoHosts::new();
    let a = LabContainer::start_by_podman(two.a, "runc");
    let _b = LabContainer::place_for_podman(two.b);
    let states = || [two.a, two.b].map(|host| host.state("c"));
    a.ask("check 300 2 none");
    two.a.run(
        "DEWAR_TEST_SIGNAL=given:kill dewar migrate c hostb --max-downtime 5s; pkill -KILL criu",
    );
    assert_eq!(states(), ["given away", "arriving"]);
    two.a.run("sleep 250").done();
    let told = two.a.run("dewar migrate c --resume").done();
    assert_eq!(told.stdout.trim(), "c goes on here");
    a.is_well();
    assert_eq!(states(), ["running", "-"]);
    let known = "podman ps --all --format '{{.Names}} {{.State}}'";
    assert_eq!(two.b.run(known).done().stdout.trim(), "");
    // And nothing of it is in the way.
    two.a.run("dewar migrate c hostb --max-downtime 5s").done();
    assert_eq!(states(), ["-", "running"]);
}

/// Reads an eighth of two files three times, and all of them once: pieces of 128 pages.
const READER: &str = r#"
for round in 1 2 3; do
    for file in /run/file /data/file; do
        i=3
        while [ $i -lt 32 ]; do
            busybox dd if=$file of=/dev/null bs=512k skip=$i count=1 2>/dev/null
            i=$((i + 8))
        done
    done
done
cat /run/file /data/file >/dev/null
echo >/run/finished
"#;

/// Which pages a container uses is found beside a scan, from a disk and from NFS, whichever way the kernel ages pages (MGLRU
/// on, as Debian has it, and off); and they are cached before it asks for them.
#[test]
fn the_pages_that_one_uses_are_found_and_warmed() {
    let one = OneHost::new();
    let host = one.host;
    let mount = r#"{"destination": "/data", "type": "bind", "source": "/mnt/disks/data", "options": ["bind"]},"#;
    host.run("mkdir -p /mnt/disks/data && head -c 16M /dev/urandom > /mnt/disks/data/file").done();
    let _c = LabContainer::start_with(host, "runc", true, mount);
    host.run(&format!(
        "cp /mnt/disks/data/file /root/b/volume/file && cat > /root/b/volume/reader <<'END'{READER}END"
    ))
    .done();
    for aging in ["y", "n"] {
        host.run(&format!("echo {aging} > /sys/kernel/mm/lru_gen/enabled")).done();
        host.run("rm -f /root/b/volume/finished; sync; echo 3 > /proc/sys/vm/drop_caches").done();
        let learnt = host.run(
            "dewar --json warm c --learn=5m --save /root/hot & watch=$!\n\
             sleep 3; /root/ask spawn sh /run/reader >&2\n\
             for i in $(seq 300); do [ -e /root/b/volume/finished ] && break; sleep 0.2; done\n\
             kill -TERM $watch; wait $watch",
        );
        println!("MGLRU {aging}: {}", learnt.done().stdout.trim());
        let found = host.run("cat /root/hot").done().json();
        for path in ["/run/file", "/data/file"] {
            let (precision, recall) = how_well(&found, path);
            println!("MGLRU {aging}, {path}: precision {precision:.3}, recall {recall:.3}");
            assert!(precision >= 0.9 && recall >= 0.95);
        }
        host.run("sync; echo 3 > /proc/sys/vm/drop_caches").done();
        let warmed = host.run("dewar --json warm c").done().json();
        assert!(warmed["read_bytes"].as_u64() > Some(3 << 20), "{warmed}");
        let told = host.run("dewar --json cool-report c").done().json();
        let missing = |path: &str| {
            let files = told["files"].as_array().expect("files").iter();
            let file = files.clone().find(|it| it["path"] == path).expect("a file");
            file["missing_bytes"].as_u64().expect("a number")
        };
        assert_eq!((missing("/run/file"), missing("/data/file")), (0, 0), "{told}");
    }
    host.run("rm -rf /mnt/disks/data; echo y > /sys/kernel/mm/lru_gen/enabled").done();
}

/// How much of what is said to be hot was used, and how much of what was used is said to be hot.
fn how_well(found: &serde_json::Value, path: &str) -> (f64, f64) {
    let files = found["files"].as_array().expect("files");
    let file = files.iter().find(|it| it["path"] == path).expect("it was read");
    let numbers = |range: &serde_json::Value| {
        let number = |at: usize| range[at].as_u64().expect("a number");
        number(0)..number(1)
    };
    let hot: Vec<u64> = file["hot"].as_array().expect("ranges").iter().flat_map(numbers).collect();
    let is_used = |page: &u64| page / 128 % 8 == 3;
    let right = hot.iter().filter(|page| is_used(page)).count() as f64;
    let used = (0..4096).filter(is_used).count() as f64;
    (right / hot.len() as f64, right / used)
}
