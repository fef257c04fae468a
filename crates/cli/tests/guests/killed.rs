//! Killed everywhere: whatever dies at whatever moment, the guest runs as it
//! was configured, no half image is seen, and the next checkpoint works.

use crate::common::{self, HeldCheckpoint, files};
use dewar_guest_qemu::Qmp;
use dewar_testkit::{
    GuestSpec, Lab, TestGuest, is_alive, kill, sample, wait_until, wait_while_alive,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Each step before the checkpoint exists.
const UNCOMMITTED: [&str; 15] = [
    "guarded",
    "begun",
    "prepared",
    "armed",
    "bulk-done",
    "epoch",
    "flushed",
    "stopped",
    "state-saved",
    "captured",
    "resumed",
    "disks-copied",
    "disks-current",
    "written-behind",
    "synced",
];

struct Scene {
    lab: Lab,
    guest: TestGuest,
    capabilities: Value,
    parameters: Value,
}

impl Scene {
    fn new(name: &str) -> Self {
        let lab = common::lab();
        let spec = GuestSpec { memory_mib: 192, ..GuestSpec::default() };
        let mut guest = lab.run(name, &spec).expect("guest");
        guest.console.ask("check 6000 1 disk").expect("check");
        lab.dewar(&["checkpoint", name, "--tag", "first"]).done();
        let mut scene = Self { lab, guest, capabilities: Value::Null, parameters: Value::Null };
        let mut qmp = scene.qmp();
        let mut ask = |command: &str| qmp.execute(command, json!({})).expect("QMP");
        scene.capabilities = ask("query-migrate-capabilities");
        scene.parameters = ask("query-migrate-parameters");
        scene
    }

    fn qmp(&self) -> Qmp {
        let folder = self.lab.root().join("guests").join(&self.guest.name);
        Qmp::connect(&folder.join("qmp.sock")).expect("QMP")
    }

    fn store_files(&self) -> Vec<PathBuf> {
        let mut found = files(&self.lab.store());
        found.retain(|path| !path.ends_with("next-segment"));
        found
    }

    /// What the next writer does first.
    fn sweep(&self) {
        let place = dewar_image::Location::Folder(self.lab.store());
        let store = dewar_image::Store::open(&place).expect("store");
        store.sweep().expect("sweep");
    }

    fn images(&self) -> usize {
        self.lab.dewar(&["ls"]).json()["checkpoints"].as_array().expect("list").len()
    }

    /// The guest is exactly as it was before the checkpoint that died.
    fn assert_as_before(&mut self, what: &str, store_before: &[PathBuf]) {
        let (lab, name) = (&self.lab, self.guest.name.clone());
        let folder = lab.root().join("guests").join(&name);
        assert!(!folder.join("journal.json").exists(), "{what}: the journal is closed");
        let state = lab.ps(&name).expect("listed")["state"].clone();
        assert_eq!(state, "running", "{what}");
        let mut qmp = self.qmp();
        let mut ask = |command: &str| qmp.execute(command, json!({})).expect("QMP");
        assert_eq!(ask("query-migrate-capabilities"), self.capabilities, "{what}");
        assert_eq!(ask("query-migrate-parameters"), self.parameters, "{what}");
        assert_eq!(ask("query-jobs"), json!([]), "{what}");
        assert_eq!(ask("query-fdsets"), json!([]), "{what}");
        let active = ask("query-block")[0]["inserted"]["file"].clone();
        let own = self.guest.folder.join("disk0.qcow2");
        assert_eq!(active, own.display().to_string(), "{what}: the own file is active");
        let nodes = ask("query-named-block-nodes");
        let ours = nodes.as_array().expect("nodes").iter().filter(|node| {
            node["node-name"].as_str().is_some_and(|name| name.starts_with("dewar-"))
        });
        assert_eq!(ours.count(), 0, "{what}: no node of ours is left");
        drop(qmp);
        let overlays = files(&self.guest.folder);
        assert!(!overlays.iter().any(|path| path.to_string_lossy().contains("dewar-overlay")));
        assert_eq!(self.store_files(), store_before, "{what}: the store is clean");
        self.guest.console.ask("verify").unwrap_or_else(|error| panic!("{what}: {error:#}"));
    }

    /// The next checkpoint works, and restores.
    fn assert_works(&mut self) {
        let name = self.guest.name.clone();
        self.lab.dewar(&["checkpoint", &name, "--tag", "after"]).done();
        self.lab.dewar(&["verify", "after"]).done();
        self.lab.crash(&name);
        self.lab.restore(&mut self.guest, &["after"]).expect("restore");
        self.guest.console.ask("verify").expect("consistent");
    }
}

#[test]
fn dewar_killed_at_every_step() {
    let mut scene = Scene::new("steps");
    for step in sample("steps of a checkpoint", UNCOMMITTED.to_vec(), 8) {
        let before = scene.store_files();
        let held = HeldCheckpoint::at(&scene.lab, "steps", step);
        let guardian = held.guardian().expect("a guardian");
        held.kill();
        wait_while_alive(guardian);
        // By the guardian alone: no command has looked yet.
        let status = scene.qmp().execute("query-status", json!({})).expect("QMP");
        assert_eq!(status["running"], true, "killed at {step}");
        scene.assert_as_before(&format!("killed at {step}"), &before);
    }
    assert_eq!(scene.images(), 1);
    // A checkpoint that exists stays, though its command died.
    let held = HeldCheckpoint::at(&scene.lab, "steps", "committed");
    let guardian = held.guardian().expect("a guardian");
    held.kill();
    // Until it has looked, it holds the guest's lock.
    wait_while_alive(guardian);
    assert_eq!(scene.images(), 2);
    scene.assert_works();
}

#[test]
fn dewar_and_its_guardian_killed_at_every_step() {
    let mut scene = Scene::new("both");
    // Where some are tried, those that the test above leaves out.
    let mut all = UNCOMMITTED.to_vec();
    all.rotate_left(1);
    for step in sample("steps of a checkpoint, and its guardian", all, 5) {
        let before = scene.store_files();
        let held = HeldCheckpoint::at(&scene.lab, "both", step);
        let guardian = held.guardian().expect("a guardian");
        kill(guardian, Signal::KILL);
        held.kill();
        wait_while_alive(guardian);
        // The next command that looks at the guest puts it back; the next that
        // writes to the store cleans it.
        scene.lab.dewar(&["ps"]).done();
        scene.sweep();
        scene.assert_as_before(&format!("both killed at {step}"), &before);
    }
    assert_eq!(scene.images(), 1);
    scene.assert_works();
}

#[test]
#[ignore = "long: make test-long"]
fn dewar_killed_at_random_times() {
    let mut scene = Scene::new("random");
    let before = scene.store_files();
    let images = scene.images();
    let (mut cut_short, mut guardians) = (0, 0);
    // All over the time that one takes here, and a little beyond.
    let began = Instant::now();
    let told = scene.lab.dewar(&["checkpoint", "random"]).done().json();
    let took = began.elapsed().mul_f64(1.3);
    scene.lab.dewar(&["delete", told["checkpoint"].as_str().expect("id")]).done();
    let all = sample("times of a kill", (0..14).collect(), 8);
    let count = all.len();
    for round in all {
        let mut child = scene
            .lab
            .command(&["checkpoint", "random"])
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("dewar");
        let pid = child.id() as i32;
        let kills_guardian = round % 4 >= 2;
        let mut before_kill = took * (2 * (round * 5 % 14) + 1) / 28;
        if kills_guardian {
            wait_until("a guardian, or the end", Duration::from_secs(20), || {
                common::started(pid, "__guardian").is_some() || !is_alive(pid)
            });
            before_kill /= 2;
        }
        std::thread::sleep(before_kill);
        let guardian = common::started(pid, "__guardian");
        let _ = child.kill();
        child.wait().expect("wait");
        if let Some(guardian) = guardian.filter(|_| kills_guardian) {
            // While it puts the guest back.
            std::thread::sleep(Duration::from_micros(u64::from(round) * 7_919 % 50_000));
            kill(guardian, Signal::KILL);
            wait_while_alive(guardian);
            guardians += 1;
        }
        // Where both were killed 'ps' puts it back, the next one if QEMU did not answer it.
        wait_until("it is put back", Duration::from_secs(20), || {
            let told = scene.lab.dewar(&["ps"]);
            let state = told.json()["guests"][0]["state"].clone();
            if !["busy", "running"].iter().any(|it| state == *it) {
                println!("round {round}: {state} {}", told.stderr.trim());
            }
            state == "running"
        });
        // It is a writer of the store until it ends: nothing is swept under it.
        guardian.into_iter().for_each(wait_while_alive);
        scene.sweep();
        if scene.images() == images {
            cut_short += 1;
            scene.assert_as_before(&format!("round {round}"), &before);
        } else {
            let id = scene.lab.dewar(&["ls"]).json()["checkpoints"][images]["checkpoint"].clone();
            scene.lab.dewar(&["verify", id.as_str().expect("id")]).done();
            scene.lab.dewar(&["delete", id.as_str().expect("id")]).done();
        }
    }
    println!("{cut_short} of {count} were cut short, {guardians} guardians killed");
    assert!(cut_short * 3 >= count && guardians > 0);
    scene.assert_works();
}

#[test]
fn a_disk_tool_that_lives_on_makes_no_file_again() {
    let mut scene = Scene::new("tool");
    let before = scene.store_files();
    // A qemu-img that is slow, and does not die with dewar, as the shell does: it has begun when it is a process of its own.
    let tools = scene.lab.path().join("tools");
    std::fs::create_dir(&tools).expect("folder");
    let [began, go, done] = ["began", "go", "done"].map(|name| tools.join(name));
    let waits = format!("while [ ! -e {} ]; do sleep 0.1; done", go.display());
    let script = format!(
        "#!/bin/sh\nPATH=${{PATH#*:}}\nexec 3<&0\n(: >{}; {waits}; qemu-img \"$@\" <&3; : >{}) &\nwait\n",
        began.display(),
        done.display()
    );
    std::fs::write(tools.join("qemu-img"), script).expect("script");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(tools.join("qemu-img"), mode).expect("mode");
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").expect("PATH"));
    // The disks of a guest that stands still are copied by qemu-img.
    scene.qmp().execute("stop", json!({})).expect("stop");
    let mut child =
        scene.lab.command(&["checkpoint", "tool"]).env("PATH", path).spawn().expect("dewar");
    wait_until("the tool", Duration::from_secs(20), || began.exists());
    child.kill().expect("kill");
    child.wait().expect("wait");
    std::fs::write(&go, "").expect("go");
    wait_until("the tool's end", Duration::from_secs(20), || done.exists());
    wait_until("the guardian's end", Duration::from_secs(20), || {
        scene.lab.dewar(&["ps"]).json()["guests"][0]["state"] != "busy"
    });
    scene.qmp().execute("cont", json!({})).expect("cont");
    scene.assert_as_before("dewar killed beside a slow qemu-img", &before);
    scene.assert_works();
}

#[test]
#[ignore = "long: make test-long"]
fn a_guardian_tries_again_until_qemu_answers() {
    let mut scene = Scene::new("silent");
    let before = scene.store_files();
    let held = HeldCheckpoint::at(&scene.lab, "silent", "resumed");
    let guardian = held.guardian().expect("a guardian");
    let qemu = qemu_pid(&scene.lab, "silent");
    kill(qemu, Signal::STOP);
    held.kill();
    // Longer than an answer may take (30 s): the first try has failed by then.
    std::thread::sleep(Duration::from_secs(33));
    assert!(is_alive(guardian));
    kill(qemu, Signal::CONT);
    wait_while_alive(guardian);
    scene.assert_as_before("QEMU silent for a while", &before);
    scene.assert_works();
}

#[test]
#[ignore = "long: make test-long"]
fn a_guardian_killed_alone_harms_nothing() {
    let mut scene = Scene::new("alone");
    for step in ["armed", "stopped", "resumed"] {
        let held = HeldCheckpoint::at(&scene.lab, "alone", step);
        kill(held.guardian().expect("a guardian"), Signal::KILL);
        let (code, _, said) = held.go_on();
        assert_eq!(code, 0, "{said}");
        scene.guest.console.ask("verify").expect("consistent");
    }
    scene.assert_works();
}

#[test]
fn qemu_killed_in_a_checkpoint() {
    let mut scene = Scene::new("victim");
    let images = scene.images();
    let all = ["prepared", "armed", "stopped", "epoch", "resumed", "disks-copied", "disks-current"];
    for step in sample("steps of a checkpoint whose QEMU dies", all.to_vec(), 4) {
        let before = scene.store_files();
        let held = HeldCheckpoint::at(&scene.lab, "victim", step);
        let pid = qemu_pid(&scene.lab, "victim");
        kill(pid, Signal::KILL);
        wait_while_alive(pid);
        let (code, out, said) = held.go_on();
        if ["disks-copied", "disks-current"].contains(&step) {
            // All was captured by then: the checkpoint is whole.
            assert_eq!(code, 0, "{said}");
            let told: Value = serde_json::from_str(&out).expect("JSON");
            scene.lab.dewar(&["delete", told["checkpoint"].as_str().expect("id")]).done();
        } else {
            assert_eq!(code, 5, "at {step}: {said}");
            assert!(said.contains("ended"), "at {step}: {said}");
        }
        assert_eq!(scene.images(), images);
        assert_eq!(scene.store_files(), before, "at {step}");
        // The guest's own disk file is the current one.
        let disk = scene.guest.folder.join("disk0.qcow2");
        let check =
            std::process::Command::new("qemu-img").arg("check").arg("-q").arg(&disk).status();
        // Leaked clusters (3) are what a crash may leave; errors (2) are not.
        assert!(matches!(check.expect("qemu-img").code(), Some(0 | 3)), "at {step}");
        let left = files(&scene.guest.folder);
        assert!(!left.iter().any(|path| path.to_string_lossy().contains("overlay")), "{left:?}");
        scene.lab.restore(&mut scene.guest, &["first"]).expect("restore");
        scene.guest.console.ask("verify").expect("consistent");
    }
    scene.assert_works();
}

/// From the record, so that a guest that a command holds is found too.
fn qemu_pid(lab: &Lab, name: &str) -> i32 {
    lab.pid_on_record(name, "process")
}

/// QEMU dies while it makes an overlay, which is no use to anybody then.
#[test]
fn an_overlay_that_was_half_made_is_removed() {
    let scene = Scene::new("half");
    let held = HeldCheckpoint::at(&scene.lab, "half", "prepared");
    let overlay = scene.guest.folder.join("disk0.qcow2.dewar-overlay");
    let pid = qemu_pid(&scene.lab, "half");
    let guardian = held.guardian().expect("guardian");
    [guardian, pid].iter().for_each(|it| kill(*it, Signal::KILL));
    held.kill();
    [guardian, pid].into_iter().for_each(wait_while_alive);
    let made = std::fs::read(&overlay).expect("the overlay");
    std::fs::write(&overlay, &made[..50]).expect("write");
    assert_eq!(scene.lab.ps("half").expect("listed")["state"], "ended");
    assert!(!overlay.exists() && scene.guest.folder.join("disk0.qcow2").exists());
}

#[test]
fn qemu_and_dewar_killed_together_leave_the_newest_disk() {
    let mut scene = Scene::new("gone");
    for step in ["resumed", "disks-copied"] {
        let held = HeldCheckpoint::at(&scene.lab, "gone", step);
        let guardian = held.guardian().expect("a guardian");
        let overlay = scene.guest.folder.join("disk0.qcow2.dewar-overlay");
        assert!(overlay.exists());
        // The guest writes on, into the overlay.
        std::thread::sleep(Duration::from_millis(500));
        let pid = qemu_pid(&scene.lab, "gone");
        kill(guardian, Signal::KILL);
        kill(pid, Signal::KILL);
        held.kill();
        wait_while_alive(pid);
        // What a boot of the stale file would lack.
        let newest = std::process::Command::new("qemu-img")
            .args(["convert", "-f", "qcow2", "-O", "raw"])
            .arg(&overlay)
            .arg(scene.lab.path().join("newest.raw"))
            .status();
        assert!(newest.expect("qemu-img").success());
        scene.lab.dewar(&["ps"]).done();
        assert!(!overlay.exists(), "at {step}: it was written back");
        let same = std::process::Command::new("qemu-img")
            .args(["compare", "-q", "-f", "qcow2", "-F", "raw"])
            .arg(scene.guest.folder.join("disk0.qcow2"))
            .arg(scene.lab.path().join("newest.raw"))
            .status();
        assert!(same.expect("qemu-img").success(), "at {step}: the own file is the newest");
        scene.lab.restore(&mut scene.guest, &["first"]).expect("restore");
        // The restored guest runs on an overlay of its own; go back to one that
        // runs on the user's file.
        scene.lab.dewar(&["rm", "gone", "--force"]).done();
        scene = Scene::new("gone");
    }
}

/// After a crash another program used the disk before Dewar had put the overlay back: what that
/// wrote is not written over.
#[test]
fn a_disk_that_was_used_since_is_not_written_over() {
    let scene = Scene::new("used");
    let held = HeldCheckpoint::at(&scene.lab, "used", "disks-copied");
    let pid = qemu_pid(&scene.lab, "used");
    let guardian = held.guardian().expect("a guardian");
    [guardian, pid].iter().for_each(|it| kill(*it, Signal::KILL));
    held.kill();
    [guardian, pid].into_iter().for_each(wait_while_alive);
    let own = scene.guest.folder.join("disk0.qcow2");
    let overlay = scene.guest.folder.join("disk0.qcow2.dewar-overlay");
    let wrote = std::process::Command::new("qemu-io")
        .args(["-f", "qcow2", "-c", "write -P 171 0 64k"])
        .arg(&own)
        .status();
    assert!(wrote.expect("qemu-io").success());
    let content = std::fs::read(&own).expect("disk");
    for verb in [&["ps"][..], &["restore", "first"]] {
        scene.lab.dewar(verb).failed(5, &["disk0.qcow2 was written by others", "rm "]);
        assert!(overlay.exists(), "{verb:?}");
        assert!(std::fs::read(&own).expect("disk") == content, "{verb:?}");
    }
    // As it was told to do.
    std::fs::remove_file(&overlay).expect("remove");
    scene.lab.dewar(&["ps"]).done();
    assert!(std::fs::read(&own).expect("disk") == content);
    scene.lab.dewar(&["restore", "first"]).done();
}

#[test]
fn a_page_server_killed_makes_the_guest_wait_and_is_replaced() {
    let lab = common::lab();
    let spec = GuestSpec { memory_mib: 512, ..GuestSpec::default() };
    let mut guest = lab.run("lazy", &spec).expect("guest");
    guest.console.ask("fill 300 noise").expect("fill");
    guest.console.ask("check 8000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "lazy"]).done();
    let mut cut_short = 0;
    for round in 0..4 {
        if round > 1 && cut_short > 0 {
            break;
        }
        lab.crash("lazy");
        lab.restore(&mut guest, &["lazy"]).expect("restore");
        let server = lab.pid_on_record("lazy", "server");
        std::thread::sleep(Duration::from_millis(5 * round));
        kill(server, Signal::KILL);
        wait_while_alive(server);
        let listed = lab.ps("lazy").expect("listed");
        if listed["lazy_restore"]["complete"] == false {
            cut_short += 1;
            // It may not be checkpointed: some of its pages are not there.
            lab.dewar(&["checkpoint", "lazy"]).failed(1, &["not all arrived"]);
            // Meanwhile the guest waits where it must; nothing wrong is seen.
            std::thread::sleep(Duration::from_millis(300));
            let again = lab.dewar(&["restore", "lazy"]).done().json();
            assert_eq!(again["resumed"], true);
        }
        guest.console.ask("verify").expect("every page is its own");
        lab.wait_for_memory("lazy");
        guest.console.ask("verify").expect("consistent");
    }
    assert!(cut_short > 0, "no server was killed before all was there");
    lab.dewar(&["checkpoint", "lazy"]).done();
}

#[test]
fn restore_killed_at_every_step_starts_over() {
    let mut scene = Scene::new("again");
    let all =
        ["starting QEMU", "starting the page server", "loaded", "loading the devices", "started"];
    for step in sample("steps of a restore", all.to_vec(), 3) {
        scene.lab.crash("again");
        let mut child = scene
            .lab
            .command(&["restore", "first"])
            .env("DEWAR_TEST_SIGNAL", format!("{step}:kill"))
            .stdout(std::process::Stdio::null())
            .spawn()
            .expect("dewar");
        assert!(!child.wait().expect("wait").success(), "killed at '{step}'");
        match scene.lab.ps("again").map(|guest| guest["state"].clone()) {
            // It had been loaded: it is a guest, and never started over.
            Some(state) if state == "paused" || state == "running" => {
                assert!(["loaded", "started"].contains(&step), "{state} at '{step}'");
                if state == "paused" {
                    scene.qmp().execute("cont", json!({})).expect("QMP");
                }
                scene.guest.console =
                    dewar_testkit::Console::connect(&scene.guest.folder.join("console"))
                        .expect("console");
            }
            _ => drop(scene.lab.restore(&mut scene.guest, &["first"]).expect("restore")),
        }
        scene
            .guest
            .console
            .ask("verify")
            .unwrap_or_else(|error| panic!("after '{step}': {error:#}"));
        let mine = scene.lab.ram_files("again").len();
        assert_eq!(mine, 1, "after '{step}': one RAM file, that of the guest");
    }
}

/// What `make test-kvm` runs under real KVM.
#[test]
fn five_kills_under_kvm() {
    if std::env::var("DEWAR_TEST_ACCEL").is_err() {
        println!("SKIPPED five_kills_under_kvm: it runs in 'make test-kvm'");
        return;
    }
    let mut scene = Scene::new("nested");
    for step in ["armed", "epoch", "stopped", "state-saved", "resumed"] {
        let before = scene.store_files();
        let held = HeldCheckpoint::at(&scene.lab, "nested", step);
        let guardian = held.guardian().expect("a guardian");
        held.kill();
        wait_while_alive(guardian);
        scene.assert_as_before(&format!("killed at {step}"), &before);
    }
    scene.assert_works();
}
