//! Containers of real podman, which must know how they are whatever is done with them.

use crate::common;
use dewar_testkit::{Lab, Podman, PodmanContainer, Ran, podman_tools, wait_until};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

/// A container of podman's, adopted under the name `c`.
struct Adopted {
    // Ended before the lab's folder is removed.
    podman: Podman,
    container: PodmanContainer,
    lab: Lab,
    path: String,
}

/// Starts one with options of `podman run`; `None`, said by name, where this host has not what it takes.
fn adopted(test: &str, options: &[&str]) -> Option<Adopted> {
    let path = match podman_tools() {
        Ok(path) => path,
        Err(why) => {
            println!("SKIPPED podman::{test}: {why}");
            return None;
        }
    };
    let lab = common::lab();
    let folder = lab.path().join("p");
    std::fs::create_dir(&folder).expect("folder");
    let podman = Podman::new(&folder).expect("podman");
    let mut words = vec!["--network", "none"];
    words.extend(options);
    let container = podman.start("web", &words).expect("container");
    let adopted = Adopted { podman, container, lab, path };
    adopted.adopt("c", "web").done();
    Some(adopted)
}

impl Adopted {
    fn command(&self, words: &[&str]) -> Command {
        let mut command = self.lab.command(words);
        command.env("PATH", &self.path);
        command
    }

    fn dewar(&self, words: &[&str]) -> Ran {
        Ran::of(&self.command(words).output().expect("dewar starts"))
    }

    fn adopt(&self, guest: &str, container: &str) -> Ran {
        let podman = self.podman.program.display().to_string();
        self.dewar(&["adopt", guest, "--container", container, "--runtime", &podman])
    }

    fn ask(&mut self, command: &str) -> String {
        self.container.ask(command).expect("answer")
    }

    /// That it works on, everything in it is as it should be, and podman says that it runs.
    fn is_well(&mut self) {
        let count = |this: &mut Self| this.ask("count").parse::<u64>().expect("number");
        let before = count(self);
        wait_until("work", Duration::from_secs(20), || count(self) > before);
        self.ask("verify");
        assert_eq!(self.podman.status("web").as_deref(), Some("running"));
    }

    /// A path of its root file system, as the host sees it.
    fn inside(&self, path: &str) -> PathBuf {
        format!("/proc/{}/root/{path}", self.podman.pid("web")).into()
    }

    fn sh(&self, script: &str) {
        self.podman.run(&["exec", "web", "/bin/sh", "-c", script]).expect("exec");
    }
}

#[test]
fn one_of_podman_goes_on_and_podman_knows() {
    let Some(mut c) = adopted("one_of_podman_goes_on_and_podman_knows", &[]) else { return };
    let id = c.podman.inspect("web").expect("known")["Id"].clone();
    // podman's own filter of system calls is over it.
    c.ask("fill 32 noise");
    c.ask("check 2000 2 none");
    let taken = c.dewar(&["checkpoint", "c"]).done().json();
    assert!(taken["captured"]["stopped"].as_u64() < Some(6000), "{taken}");
    c.is_well();
    let second = c.dewar(&["checkpoint", "c"]).done().json();
    assert!(second["stored_bytes"].as_u64() < taken["stored_bytes"].as_u64().map(|it| it / 2));
    c.dewar(&["stop", "c", "--now"]).done();
    assert_eq!(c.podman.status("web").as_deref(), Some("exited"));
    c.dewar(&["restore", "c"]).done();
    c.is_well();
    assert_eq!(c.podman.inspect("web").expect("known")["Id"], id);
    // podman goes on to look after it: it sees it end, and takes down what it had put up.
    c.podman.run(&["kill", "web"]).expect("kill");
    wait_until("podman's clean-up", Duration::from_secs(20), || {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let merged = c.lab.path().display().to_string();
        !mounts.lines().any(|line| line.contains(&merged) && line.contains("/merged"))
    });
    assert_eq!(c.podman.status("web").as_deref(), Some("exited"));
    // And brings it back where podman has forgotten it.
    c.podman.run(&["rm", "web"]).expect("rm");
    c.dewar(&["restore", "c"]).done();
    c.is_well();
    c.dewar(&["restore", "c", "--replace"]).done();
    c.is_well();
    assert_eq!(c.lab.ram_files("c"), [] as [PathBuf; 0]);
}

#[test]
#[ignore = "long: make test-long"]
fn what_one_of_podman_wrote_comes_back() {
    let Some(mut c) = adopted("what_one_of_podman_wrote_comes_back", &[]) else { return };
    c.ask("check 500 2 none");
    c.sh(
        "echo new > /data/new; echo after > /data/changed; mkdir -p /a/b; echo x > '/a/b/a file'; \
          /bin/busybox rm /gone; /bin/busybox ln -s new /data/link; echo shared > /dev/shm/it; \
          /bin/busybox chmod 600 /data/changed",
    );
    c.dewar(&["checkpoint", "c"]).done();
    c.sh(
        "/bin/busybox rm -r /data; mkdir /data; echo later > /data/later; echo other > /dev/shm/it",
    );
    c.dewar(&["checkpoint", "c", "--tag", "emptied"]).done();
    let first = c.dewar(&["ls"]).done().json()["checkpoints"][0]["checkpoint"].clone();
    c.dewar(&["restore", first.as_str().expect("id"), "--replace"]).done();
    c.is_well();
    let read = |c: &Adopted, path: &str| std::fs::read_to_string(c.inside(path)).ok();
    let text = |text: &str| Some(format!("{text}\n"));
    assert_eq!(read(&c, "data/link"), text("new"));
    assert_eq!(read(&c, "data/changed"), text("after"));
    assert_eq!(read(&c, "data/old").as_deref(), Some("old"));
    assert_eq!(read(&c, "a/b/a file"), text("x"));
    assert_eq!(read(&c, "dev/shm/it"), text("shared"));
    assert_eq!(read(&c, "gone"), None);
    assert_eq!(read(&c, "data/later"), None);
    c.dewar(&["restore", "emptied", "--replace"]).done();
    c.is_well();
    assert_eq!(read(&c, "data/old"), None);
    assert_eq!(read(&c, "data/link"), None);
    assert_eq!(read(&c, "data/later"), text("later"));
    assert_eq!(read(&c, "gone"), None);
    assert_eq!(read(&c, "dev/shm/it"), text("other"));
    c.dewar(&["verify", "emptied"]).done();
}

#[test]
#[ignore = "long: make test-long"]
fn a_restore_by_podman_killed_at_any_time_is_done_again() {
    let name = "a_restore_by_podman_killed_at_any_time_is_done_again";
    let Some(mut c) = adopted(name, &[]) else { return };
    c.ask("check 500 2 none");
    c.dewar(&["checkpoint", "c"]).done();
    let began = Instant::now();
    c.dewar(&["restore", "c", "--replace"]).done();
    let whole = began.elapsed();
    for part in 1..=6 {
        c.dewar(&["stop", "c", "--now"]).done();
        let mut restore = c.command(&["restore", "c"]).spawn().expect("dewar starts");
        std::thread::sleep(whole * part / 7);
        restore.kill().expect("kill");
        restore.wait().expect("wait");
        let listed = c.dewar(&["ps"]).done().json();
        let state = listed["guests"][0]["state"].as_str().expect("state").to_owned();
        // Whatever came of it, there is one of it at most, and both say the same.
        let known = c.podman.status("web");
        println!("killed after {part}/7: {state}, podman: {known:?}");
        assert_eq!(state == "running", known.as_deref() == Some("running"), "{state} {known:?}");
        if state == "running" {
            c.is_well();
        } else {
            c.dewar(&["restore", "c"]).done();
            c.is_well();
        }
    }
}

#[test]
#[ignore = "long: make test-long"]
fn one_that_its_user_started_anew_is_left_alone() {
    let Some(mut c) = adopted("one_that_its_user_started_anew_is_left_alone", &[]) else { return };
    c.ask("check 100 2 none");
    c.dewar(&["checkpoint", "c"]).done();
    c.dewar(&["stop", "c", "--now"]).done();
    // A command that died in the middle of a restore has left this record.
    let path = c.lab.root().join("guests/c/guest.json");
    let text = std::fs::read_to_string(&path).expect("record");
    std::fs::write(&path, text.replace("\"running\"", "\"restoring\"")).expect("record");
    c.podman.run(&["start", "web"]).expect("start");
    let pid = c.podman.pid("web");
    c.dewar(&["ps"]).done();
    assert_eq!(c.podman.pid("web"), pid);
    c.dewar(&["restore", "c"]).failed(1, &["is running", "--replace"]);
    c.dewar(&["restore", "c", "--replace"]).done();
    c.is_well();
}

#[test]
#[ignore = "long: make test-long"]
fn what_podman_cannot_bring_back_is_told_before() {
    let name = "what_podman_cannot_bring_back_is_told_before";
    let Some(mut c) = adopted(name, &[]) else { return };
    c.adopt("d", "nobody").failed(3, &["knows no container 'nobody'"]);
    c.adopt("d", "web").failed(1, &["is guest 'c' already"]);
    let shared = ["--network", "container:web"];
    let _other = c.podman.start("second", &shared).expect("container");
    c.adopt("d", "second").failed(4, &["shares namespaces of another container"]);
    c.podman.run(&["rm", "--force", "--time", "0", "second"]).expect("rm");
    let again = ["--network", "none", "--restart", "always"];
    let _other = c.podman.start("second", &again).expect("container");
    c.adopt("d", "second").done();
    c.dewar(&["migrate", "d", "--dry-run", "nowhere"]).failed(4, &["restart policy is 'always'"]);
    c.dewar(&["rm", "d"]).done();
    c.podman.run(&["rm", "--force", "--time", "0", "second"]).expect("rm");
    for (options, why) in [
        (["--label", "PODMAN_SYSTEMD_UNIT=web.service"].as_slice(), "unit of systemd"),
        (["--rm", "--volume", "data:/data"].as_slice(), "removes its volumes"),
    ] {
        let options = ["--network", "none"].iter().chain(options).copied().collect::<Vec<_>>();
        let _other = c.podman.start("second", &options).expect("container");
        c.adopt("d", "second").failed(4, &[why]);
        c.podman.run(&["rm", "--force", "--time", "0", "second"]).expect("rm");
    }
    c.ask("check 100 2 none");
    c.dewar(&["checkpoint", "c"]).done();
    c.dewar(&["stop", "c", "--now"]).done();
    c.podman.run(&["rename", "web", "old"]).expect("rename");
    let other = c.podman.start("web", &["--network", "none"]).expect("container");
    c.dewar(&["restore", "c"]).failed(4, &["another container here has its name, web"]);
    assert_eq!(c.podman.status("old").as_deref(), Some("exited"));
    drop(other);
    c.podman.run(&["rm", "--force", "--time", "0", "web", "old"]).expect("rm");
    c.podman.run(&["rmi", "localhost/dewar-guest:1"]).expect("rmi");
    c.dewar(&["restore", "c"]).failed(4, &["localhost/dewar-guest:1", "podman load"]);
}
