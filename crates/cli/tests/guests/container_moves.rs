//! Containers that move to another host and back: two hosts on this machine, with namespaces, control groups and
//! folders of the runtime of their own.

use crate::common::{self, HeldCheckpoint};
use crate::containers::{Adopted, adopted_in};
use crate::migrate::{Hosts, words};
use dewar_testkit::{
    Bundle, Lab, Ran, SecondRuntime, container_tools, is_alive, kill, rounds, wait_until,
    wait_while_alive,
};
use rustix::process::Signal;
use serde_json::json;
use std::ffi::OsStr;
use std::fs;
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A container on the first of two hosts.
struct Pair {
    a: Adopted,
    b: Lab,
    /// What leads to each, for `--via`.
    via_a: String,
    via_b: String,
    _there: SecondRuntime,
}

impl Pair {
    /// `None`, said by name, where this machine has not what it takes.
    fn new(test: &str, change: impl FnOnce(Bundle) -> Bundle) -> Option<Self> {
        let path = match container_tools("runc") {
            Ok(path) => path,
            Err(why) => {
                println!("SKIPPED container_moves::{test}: {why}");
                return None;
            }
        };
        let lab = common::lab();
        // What it mounts both hosts have.
        let bundle = change(Bundle::new(&lab.path().join("bundle")).expect("bundle"));
        let lab = lab.as_host().expect("first host");
        let b = lab.second_host(&[]).expect("second host");
        let via_a = lab.via();
        let a = adopted_in(lab, "runc", path, bundle);
        let there = SecondRuntime::new(&b, &a.container).expect("a runtime there");
        let via_b = there.via();
        Some(Self { a, b, via_a, via_b, _there: there })
    }

    fn there(&self, more: &[&str]) -> Command {
        let line = Hosts::line_of("c", &self.via_b, &self.b, more);
        self.a.command(&words(&line))
    }

    fn migrate(&self, more: &[&str]) -> Ran {
        Ran::of(&self.there(more).output().expect("dewar starts"))
    }

    /// The same over a connection of one's own.
    fn migrate_via(&self, via: &str, more: &[&str]) -> Ran {
        let line = Hosts::line_of("c", via, &self.b, more);
        Ran::of(&self.a.command(&words(&line)).output().expect("dewar starts"))
    }

    fn back(&self, more: &[&str]) -> Ran {
        let line = Hosts::line_of("c", &self.via_a, &self.a.lab, more);
        self.on_b(&words(&line))
    }

    fn on_b(&self, words: &[&str]) -> Ran {
        let mut command = self.b.command(words);
        command.env("PATH", &self.a.path);
        Ran::of(&command.output().expect("dewar starts"))
    }

    /// What `ps` says of it on each host, once no guardian or command has it.
    fn states(&self) -> [Option<String>; 2] {
        let mut told = [None, None];
        wait_until("nobody is at work on it", Duration::from_secs(60), || {
            told = self.states_now();
            !told.iter().flatten().any(|state| state == "busy")
        });
        told
    }

    fn states_now(&self) -> [Option<String>; 2] {
        let state = |ran: Ran| {
            let listed = ran.done().json();
            listed["guests"][0]["state"].as_str().map(str::to_owned)
        };
        [state(self.a.dewar(&["ps"])), state(self.on_b(&["ps"]))]
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = self.b.command(&["stop", "c", "--now"]).env("PATH", &self.a.path).output();
    }
}

/// The CPU time that a process has used.
fn used(pid: i32) -> Vec<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.split(' ').skip(13).take(2).map(str::to_owned).collect()
}

/// That a container that works stands still.
fn stands_still(pid: i32) {
    let before = used(pid);
    assert_eq!(before.len(), 2, "it has ended");
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(used(pid), before);
}

const GIVEN: [Option<&str>; 2] = [Some("given away"), Some("arriving")];
const GONE: [Option<&str>; 2] = [None, Some("running")];
const HERE: [Option<&str>; 2] = [Some("running"), None];

fn are(states: &[Option<String>; 2]) -> [Option<&str>; 2] {
    [states[0].as_deref(), states[1].as_deref()]
}

#[test]
fn a_container_moves_and_comes_back() {
    let Some(mut pair) = Pair::new("a_container_moves_and_comes_back", |it| it) else { return };
    pair.a.ask("check 2000 2 none");
    let first = pair.a.container.pid();
    let before = pair.a.count();
    let moved = pair.migrate(&["--max-downtime", "2s"]).done().json();
    println!("{moved}");
    assert!(pair.a.count() > before);
    pair.a.is_well();
    assert_eq!(are(&pair.states()), GONE);
    assert!(!is_alive(first));
    let moved = pair.back(&["--max-downtime", "2s"]).done().json();
    println!("{moved}");
    pair.a.is_well();
    assert_eq!(are(&pair.states()), HERE);
    pair.a.is_clean();
}

/// What `--dry-run` tells, it tells of a container that runs on.
#[test]
fn a_trial_moves_no_container() {
    let Some(mut pair) = Pair::new("a_trial_moves_no_container", |it| it) else { return };
    pair.a.ask("fill 64 noise");
    pair.a.ask("check 500 2 none");
    pair.a.ask("words 2000");
    let pid = pair.a.container.pid();
    let told = pair.migrate(&["--dry-run"]).done().json();
    println!("{told}");
    let number = |name: &str| told[name].as_f64().expect("number");
    assert!(number("memory_bytes") > 64e6 && number("sent_bytes") > 40e6, "{told}");
    assert!(number("bytes_per_second") > 1e5 && number("written_per_second") > 1e5, "{told}");
    assert_eq!(are(&pair.states()), HERE);
    assert_eq!(pair.a.container.pid(), pid);
    pair.a.is_well();
    pair.a.is_clean();
    assert_eq!(common::files(&pair.b.root().join("guests")), [] as [std::path::PathBuf; 0]);
    pair.migrate(&["--dry-run", "--postcopy"]).failed(2, &["'--postcopy' is for virtual machines"]);
    assert_eq!(are(&pair.states()), HERE);
}

/// The image in which CRIU describes a processor, of one that can do all that there is.
fn processor_that_can_all(image: &mut [u8]) {
    // Two magic numbers, the message's length; then its one field, the length of that, and in it numbers: those
    // of field 6 are the capabilities, 32 of them in each (CRIU's images/cpuinfo.proto).
    let mut at = 14;
    while image.get(at).is_some_and(|tag| tag & 7 == 0) {
        let is_capability = image[at] >> 3 == 6;
        for length in 1.. {
            at += 1;
            let is_last = image[at] & 0x80 == 0;
            if is_capability {
                image[at] |= if length == 5 { 0x0f } else { 0x7f };
            }
            if is_last {
                break;
            }
        }
        at += 1;
    }
}

/// Where the other host's processor lacks what that of this one has, nothing is touched.
#[test]
fn a_host_with_a_lesser_processor_is_refused() {
    let test = "a_host_with_a_lesser_processor_is_refused";
    let Some(mut pair) = Pair::new(test, |it| it) else { return };
    pair.a.ask("check 500 1 none");
    let folder = pair.a.lab.path().join("processor");
    fs::create_dir(&folder).expect("folder");
    let image = folder.join("cpuinfo.img");
    let mut dump = Command::new("sh");
    dump.args(["-c", "criu cpuinfo dump --cpu-cap=fpu,ins -D \"$0\""]).arg(&folder);
    assert!(dump.env("PATH", &pair.a.path).status().expect("criu").success());
    let mut bytes = fs::read(&image).expect("image");
    processor_that_can_all(&mut bytes);
    fs::write(&image, bytes).expect("image");
    // A CRIU that describes this host so.
    let script = format!(
        "#!/bin/sh\nif [ \"$1 $2\" = 'cpuinfo dump' ]; then exec cp {} \"$5\"; fi\nPATH={} exec criu \"$@\"\n",
        image.display(),
        pair.a.path
    );
    let program = folder.join("criu");
    fs::write(&program, script).expect("script");
    fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("mode");
    let pid = pair.a.container.pid();
    let path = std::mem::take(&mut pair.a.path);
    pair.a.path = format!("{}:{path}", folder.display());
    for more in [&["--dry-run"][..], &[]] {
        pair.migrate(more).failed(4, &["the processor of this host lacks"]);
    }
    let saved = pair.a.dewar(&["checkpoint", "c"]).done().json();
    pair.a.path = path;
    assert_eq!(are(&pair.states()), HERE);
    assert_eq!(pair.a.container.pid(), pid);
    pair.a.is_well();
    // Nor is a checkpoint of it brought back, or anything ended for that.
    let id = saved["checkpoint"].as_str().expect("id");
    pair.a.dewar(&["restore", id, "--replace"]).failed(4, &["the processor of this host lacks"]);
    assert_eq!(pair.a.container.pid(), pid);
    pair.a.is_well();
}

/// The step at which the command is killed, and whether the container is here afterwards, or given away.
const SOURCE_STEPS: [(&str, bool); 6] = [
    ("stopping", true),
    ("intent", true),
    ("captured", true),
    ("sent", true),
    ("given", false),
    ("gone", false),
];

#[test]
fn a_source_that_dies_at_any_step_leaves_one() {
    let test = "a_source_that_dies_at_any_step_leaves_one";
    let Some(mut pair) = Pair::new(test, |it| it) else { return };
    pair.a.ask("check 500 2 none");
    for (step, stays) in SOURCE_STEPS {
        let first = pair.a.container.pid();
        let mut command = pair.there(&["--max-downtime", "2s"]);
        command.env("DEWAR_TEST_SIGNAL", format!("{step}:kill"));
        let ran = command.output().expect("dewar starts");
        assert!(!ran.status.success(), "{step}: {ran:?}");
        if stays {
            // The guardian lets it run, and the other side sees the end of the connection. If that had loaded it
            // already it waits for a word, which comes with the next try.
            let waits = [Some("running"), Some("arriving")];
            wait_until(&format!("{step}: it is here"), Duration::from_secs(60), || {
                let states = pair.states();
                are(&states) == HERE || step == "sent" && are(&states) == waits
            });
            assert_eq!(pair.a.container.pid(), first, "{step}");
            pair.a.is_well();
            pair.a.is_clean();
            continue;
        }
        if step == "given" {
            assert_eq!(are(&pair.states()), GIVEN, "{step}");
            stands_still(first);
            pair.a.dewar(&["migrate", "c", "--resume"]).done();
        }
        assert!(!is_alive(first) || step == "gone", "{step}");
        wait_until(&format!("{step}: it is there"), Duration::from_secs(30), || {
            are(&pair.states()) == GONE
        });
        assert!(!is_alive(first), "{step}");
        pair.a.is_well();
        pair.back(&["--max-downtime", "2s"]).done();
        pair.a.is_well();
        assert_eq!(are(&pair.states()), HERE, "{step}");
    }
}

#[test]
fn a_destination_that_dies_at_any_step_leaves_one() {
    let test = "a_destination_that_dies_at_any_step_leaves_one";
    let Some(mut pair) = Pair::new(test, |it| it) else { return };
    pair.a.ask("check 500 2 none");
    for step in ["loaded", "owned", "committed", "running"] {
        let first = pair.a.container.pid();
        let mut command = pair.there(&["--max-downtime", "2s"]);
        command.env("DEWAR_TEST_SIGNAL", format!("{step}:kill"));
        let ran = Ran::of(&command.output().expect("dewar starts"));
        if step == "loaded" {
            ran.failed(1, &["the guest is running"]);
            pair.a.is_well();
            // It waits there for a word; the next try says it.
            assert_eq!(are(&pair.states()), [Some("running"), Some("arriving")]);
            continue;
        }
        ran.failed(5, &["'dewar migrate c --resume' asks again"]);
        stands_still(first);
        pair.a.dewar(&["migrate", "c", "--resume"]).done();
        assert_eq!(are(&pair.states()), GONE, "{step}");
        assert!(!is_alive(first), "{step}");
        pair.a.is_well();
        pair.back(&["--max-downtime", "2s"]).done();
        pair.a.is_well();
    }
}

/// Gives it away, and kills the command then.
fn give_away(pair: &Pair) -> i32 {
    let first = pair.a.container.pid();
    let mut command = pair.there(&["--max-downtime", "2s"]);
    command.env("DEWAR_TEST_SIGNAL", "given:kill");
    assert!(!command.output().expect("dewar starts").status.success());
    first
}

#[test]
#[ignore = "long: make test-long"]
fn one_that_was_given_away_comes_back_if_the_other_host_has_not_got_it() {
    let test = "one_that_was_given_away_comes_back_if_the_other_host_has_not_got_it";
    let Some(mut pair) = Pair::new(test, |it| it) else { return };
    pair.a.ask("check 500 2 none");
    for way in ["--abort", "--resume", "refused", "--take-back"] {
        let first = give_away(&pair);
        assert_eq!(are(&pair.states()), GIVEN, "{way}");
        stands_still(first);
        let there = crate::containers::first_process(&pair.b);
        match way {
            // It is killed there before it has run.
            "--resume" => {
                kill(there, Signal::KILL);
                wait_while_alive(there);
            }
            "refused" => drop(pair.on_b(&["migrate", "c", "--abort"]).done()),
            _ => {}
        }
        let word = if way == "refused" { "--resume" } else { way };
        pair.a.dewar(&["migrate", "c", word]).done();
        assert_eq!(pair.a.container.pid(), first, "{way}");
        pair.a.is_well();
        pair.a.is_clean();
        let waits = if way == "--take-back" { Some("arriving") } else { None };
        assert_eq!(are(&pair.states()), [Some("running"), waits], "{way}");
    }
    // What was taken back without asking is refused there, when it is offered anew.
    pair.on_b(&["migrate", "c", "--abort"]).done();
    pair.migrate(&["--max-downtime", "2s"]).done();
    pair.a.is_well();
}

#[test]
fn what_was_given_away_stands_still_when_all_have_died() {
    let test = "what_was_given_away_stands_still_when_all_have_died";
    let Some(mut pair) = Pair::new(test, |it| it) else { return };
    pair.a.ask("check 500 2 none");
    let first = pair.a.container.pid();
    let line = Hosts::line_of("c", &pair.via_b, &pair.b, &["--max-downtime", "2s"]);
    let mut held = HeldCheckpoint::at_command(pair.a.command(&words(&line)), "given");
    let given = || are(&pair.states()) == GIVEN;
    let criu = crate::containers::tracer(first);
    let guardian = common::started(held.pid, "__guardian").expect("a guardian");
    [guardian, held.pid, criu].iter().for_each(|pid| kill(*pid, Signal::KILL));
    held.child.wait().expect("wait");
    wait_until("it is known", Duration::from_secs(30), given);
    stands_still(first);
    assert_eq!(crate::containers::tracer(first), 0);
    pair.a.dewar(&["migrate", "c", "--resume"]).done();
    assert_eq!(are(&pair.states()), GONE);
    pair.a.is_well();
}

#[test]
fn what_cannot_come_is_refused_before_it_is_touched() {
    let test = "what_cannot_come_is_refused_before_it_is_touched";
    let Some(mut pair) = Pair::new(test, |it| it) else { return };
    pair.a.ask("check 500 2 none");
    for option in ["--postcopy", "--throttle", "--with-disks"] {
        pair.migrate(&[option]).failed(2, &["is for virtual machines", "not touched"]);
    }
    // The other host has a container by that id, and then another configuration.
    let state = &pair.a.container.state;
    let on_b = |line: &str| {
        let line = format!("exec {} sh -c '{line}'", pair.b.via());
        let mut command = Command::new("sh");
        assert!(
            command.args(["-c", &line]).env("PATH", &pair.a.path).status().expect("sh").success()
        );
    };
    let config = pair.a.container.bundle.folder.join("config.json");
    let other = pair.a.lab.path().join("other.json");
    let text = fs::read_to_string(&config).expect("config").replace("\"test\"", "\"other\"");
    fs::write(&other, text).expect("config");
    on_b(&format!("mount --bind {} {}", other.display(), config.display()));
    pair.migrate(&[]).failed(4, &["config.json is another one", "not touched"]);
    on_b(&format!("umount {}", config.display()));
    let bundle = pair.a.container.bundle.folder.display().to_string();
    on_b(&format!("mount -t tmpfs none {bundle}"));
    pair.migrate(&[]).failed(4, &["config.json is missing", "not touched"]);
    on_b(&format!("umount {bundle}"));
    assert!(state.is_dir());
    assert_eq!(are(&pair.states()), HERE);
    pair.a.is_well();
    pair.a.is_clean();
    pair.migrate(&["--max-downtime", "2s"]).done();
    pair.a.is_well();
}

#[test]
#[ignore = "long: make test-long"]
fn what_it_wrote_to_its_root_file_system_moves_with_it() {
    let test = "what_it_wrote_to_its_root_file_system_moves_with_it";
    let Some(mut pair) = Pair::new(test, |it| it.overlaid().expect("overlay")) else { return };
    pair.a.ask("check 500 2 none");
    let writes = "exec 3>>/tmp/open; while sleep 0.01; do echo line >&3; done";
    fs::write(pair.a.container.bundle.folder.join("volume/writes"), writes).expect("script");
    pair.a.ask("spawn sh /run/writes");
    pair.a.ask("append /tmp/log one");
    for round in 0..2 {
        pair.migrate(&["--max-downtime", "2s"]).done();
        pair.a.is_well();
        pair.a.ask("append /tmp/log there");
        pair.back(&["--max-downtime", "2s"]).done();
        pair.a.is_well();
        pair.a.ask("append /tmp/log here");
        let shown = pair.a.ask("show /tmp/log");
        assert_eq!(shown, format!("one{}", ";there;here".repeat(round + 1)));
    }
    // Nothing of it is left at the other host, and the user's own is as it was when it first left.
    assert_eq!(are(&pair.states()), HERE);
    assert!(!pair.b.root().join("guests/c").exists());
    let own = fs::read_to_string(pair.a.container.bundle.folder.join("upper/tmp/log"));
    assert_eq!(own.expect("log"), "one\n");
}

#[test]
fn what_its_user_does_with_it_is_left_so() {
    let test = "what_its_user_does_with_it_is_left_so";
    let Some(mut pair) = Pair::new(test, |it| it) else { return };
    pair.a.ask("check 500 2 none");
    let id = pair.a.container.id.clone();
    let runc = |words: &[&str]| {
        assert!(pair.a.container.command(words).status().expect("runc").success(), "{words:?}");
    };
    runc(&["pause", &id]);
    pair.migrate(&[]).failed(1, &["is paused, not running", "not touched"]);
    let state = pair.a.container.runtime_state().expect("state");
    assert_eq!(state["status"], "paused");
    runc(&["resume", &id]);
    // Its network is in use by another process.
    let target = pair.a.container.pid().to_string();
    let mut command = Command::new("nsenter");
    let mut other =
        command.args(["--target", &target, "--net", "sleep", "1000"]).spawn().expect("sleep");
    wait_until("another in its network", Duration::from_secs(20), || {
        fs::read_to_string(format!("/proc/{}/comm", other.id())).is_ok_and(|it| it == "sleep\n")
    });
    pair.migrate(&[]).failed(4, &["that of other processes, too: sleep", "not touched"]);
    other.kill().expect("kill");
    other.wait().expect("wait");
    // Paused when its memory is about to be copied for the last time.
    let line = Hosts::line_of("c", &pair.via_b, &pair.b, &["--max-downtime", "2s"]);
    let held = common::HeldCheckpoint::at_command(pair.a.command(&words(&line)), "intent");
    runc(&["pause", &id]);
    let (code, _, said) = held.go_on();
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("is paused, not running; the guest was not moved"), "{said}");
    let state = pair.a.container.runtime_state().expect("state");
    assert_eq!(state["status"], "paused");
    runc(&["resume", &id]);
    pair.a.is_well();
    pair.a.is_clean();
}

#[test]
fn another_container_with_its_id_is_left_alone() {
    let test = "another_container_with_its_id_is_left_alone";
    let Some(mut pair) = Pair::new(test, |it| it) else { return };
    pair.a.ask("check 500 2 none");
    let (id, state) = (pair.a.container.id.clone(), pair.a.container.state.clone());
    let other = Bundle::new(&pair.a.lab.path().join("other")).expect("bundle");
    let other = other.running(&["/bin/sleep", "1000"]);
    other.write().expect("config");
    let (via, path) = (pair.via_b.clone(), pair.a.path.clone());
    let on_b = |words: &[&str]| {
        let mut command = Command::new(&via);
        command.arg("runc").arg("--root").arg(&state).args(words).env("PATH", &path);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let output = command.output().expect("runc");
        assert!(output.status.success(), "{words:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let first = give_away(&pair);
    // What keeps it waiting there is killed: CRIU ends what it has restored, and the runtime forgets it.
    let there = crate::containers::first_process(&pair.b);
    kill(relay_of(&pair.b), Signal::KILL);
    wait_while_alive(there);
    let bundle = other.folder.display().to_string();
    let line = format!(
        "exec {} runc --root {} run --detach --bundle {bundle} {id} < /dev/null > /dev/null 2>&1",
        pair.via_b,
        state.display()
    );
    wait_until("another container by its id", Duration::from_secs(20), || {
        let mut command = Command::new("sh");
        command.args(["-c", &line]).env("PATH", &pair.a.path).status().expect("sh").success()
    });
    pair.a.dewar(&["migrate", "c", "--resume"]).done();
    assert_eq!(pair.a.container.pid(), first);
    pair.a.is_well();
    assert_eq!(are(&pair.states()), HERE);
    assert!(on_b(&["state", &id]).contains("running"));
    // Nor is it when one comes whose place it has.
    pair.migrate(&[]).failed(4, &["is running", "not touched"]);
    assert!(on_b(&["state", &id]).contains("running"));
    on_b(&["delete", "--force", &id]);
}

#[test]
fn a_program_that_is_replaced_meanwhile_keeps_it_waiting_all_the_same() {
    let test = "a_program_that_is_replaced_meanwhile_keeps_it_waiting_all_the_same";
    let Some(mut pair) = Pair::new(test, |it| it) else { return };
    pair.a.ask("check 500 2 none");
    let program = pair.a.lab.path().join("dewar-b");
    common::copy_program(pair.b.program(), &program);
    let mut line = Hosts::line_of("c", &pair.via_b, &pair.b, &["--max-downtime", "2s"]);
    let place = line.iter().position(|it| it == "--remote-dewar").expect("option");
    line[place + 1] = program.display().to_string();
    let held = common::HeldCheckpoint::at_command(pair.a.command(&words(&line)), "stopping");
    fs::remove_file(&program).expect("remove");
    let (code, _, said) = held.go_on();
    assert_eq!(code, 0, "{said}");
    assert_eq!(are(&pair.states()), GONE);
    pair.a.is_well();
}

#[test]
fn a_host_that_cannot_take_it_leaves_it_where_it_is() {
    let test = "a_host_that_cannot_take_it_leaves_it_where_it_is";
    let Some(mut pair) = Pair::new(test, |it| it) else { return };
    pair.a.ask("fill 32 noise");
    pair.a.ask("check 500 2 none");
    let via = pair.via_b.clone();
    // Nobody there has its CRIU.
    let usual = "env PATH=/usr/sbin:/usr/bin:/sbin:/bin";
    pair.migrate_via(&format!("{usual} {via}"), &[])
        .failed(4, &["criu is not installed", "not touched"]);
    // No room for its memory.
    let small = "mount -t tmpfs -o size=8m,huge=always none";
    let line = format!("exec {} sh -c '{small} /run/dewar/ram; {small} /dev/shm'", pair.b.via());
    run(&line);
    pair.migrate(&["--max-downtime", "2s"]).failed(1, &["No space left", "the guest is running"]);
    run(&format!("exec {} sh -c 'umount /run/dewar/ram; umount /dev/shm'", pair.b.via()));
    assert_eq!(are(&pair.states()), HERE);
    pair.a.ask("filled");
    pair.a.is_well();
    // The link is cut while its memory is sent.
    let link = pair.b.program().with_file_name("dewar-link");
    let slow = format!("{} 20 0 {via}", link.display());
    let line = Hosts::line_of("c", &slow, &pair.b, &["--max-downtime", "2s"]);
    let moving = pair.a.command(&words(&line)).stderr(Stdio::piped()).spawn().expect("dewar");
    let mut cut = None;
    wait_until("pages on their way", Duration::from_secs(30), || {
        cut = common::started(moving.id() as i32, "dewar-link");
        cut.is_some() && !pair.b.ram_files("c").is_empty()
    });
    std::thread::sleep(Duration::from_secs(1));
    kill(cut.expect("a link"), Signal::KILL);
    let ran = Ran::of(&moving.wait_with_output().expect("dewar"));
    ran.failed(1, &["the guest is running"]);
    wait_until("it is here alone", Duration::from_secs(30), || are(&pair.states()) == HERE);
    pair.a.ask("filled");
    pair.a.is_well();
    pair.a.is_clean();
    pair.migrate(&["--max-downtime", "2s"]).done();
    pair.a.ask("filled");
    pair.a.is_well();
}

/// A network with a client in it, and a place for the container's interface in it at each host, behind one path.
struct Network {
    name: String,
    client: String,
}

impl Network {
    fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("dw{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let this = Self { client: format!("{name}k"), name };
        let Self { name, client } = &this;
        run(&format!(
            "ip netns add {name} && ip netns add {client} && ip -n {client} link set lo up && \
             ip -n {client} link add br0 type bridge && ip -n {client} addr add 10.88.0.1/24 dev br0 && \
             ip -n {client} link set br0 up && {} && ip -n {name} link set eth0 up",
            this.plug(1)
        ));
        this
    }

    /// Gives a container this network, by the path.
    fn given_to(&self, mut bundle: Bundle) -> Bundle {
        let namespaces = bundle.config["linux"]["namespaces"].as_array_mut().expect("namespaces");
        let path = format!("/run/netns/{}", self.name);
        for it in namespaces.iter_mut().filter(|it| it["type"] == "network") {
            it["path"] = json!(path);
        }
        bundle
    }

    /// A command of the client.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.client)).arg(program);
        command
    }

    /// The line that plugs an interface into what has the namespace's path for the one that runs it.
    fn plug(&self, port: u8) -> String {
        let Self { name, client } = self;
        format!(
            "ip -n {client} link add p{port} type veth peer name eth0 netns {name} && \
             ip -n {client} link set p{port} master br0 up && \
             ip -n {name} addr add 10.88.0.2/24 dev eth0"
        )
    }

    /// Makes the second host's namespace, behind the same path. Its interface waits, switched off.
    fn make_there(&self, b: &Lab) {
        let path = format!("/run/netns/{}", self.name);
        let line = format!("unshare --net={path} ip link set lo up && {}", self.plug(2));
        run(&format!("exec {} sh -c '{line}'", b.via()));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in [&self.name, &self.client] {
            let _ = Command::new("ip").args(["netns", "delete", name]).status();
        }
    }
}

fn run(line: &str) {
    assert!(Command::new("sh").args(["-c", line]).status().expect("sh").success(), "{line}");
}

/// The process that keeps a container waiting on a host.
fn relay_of(host: &Lab) -> i32 {
    let folder = &host.ram_files("c")[0];
    let wanted = format!("DEWAR_CRIU_FOLDER={}", folder.display());
    let is_its = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&environment).split('\0').any(|it| it == wanted)
    };
    let relays = common::processes(|words| words[0].starts_with("criu-relay"));
    relays.into_iter().find(is_its).expect("a relay")
}

#[test]
fn an_open_connection_goes_on_where_its_address_moves() {
    let test = "an_open_connection_goes_on_where_its_address_moves";
    let network = Network::new();
    let change = |bundle| network.given_to(bundle);
    let Some(mut pair) = Pair::new(test, change) else { return };
    network.make_there(&pair.b);
    pair.a.ask("check 500 2 none");
    pair.a.ask("spawn nc -l -p 7000 -e /bin/cat");
    let busybox = pair.a.container.bundle.folder.join("rootfs/bin/busybox");
    let as_client = |words: &[&str]| {
        let mut command = network.command(&busybox);
        command.args(words);
        command
    };
    let mut client = as_client(&["nc", "10.88.0.2", "7000"]);
    let mut client = client.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a client");
    let (mut say, heard) = (client.stdin.take().expect("in"), client.stdout.take().expect("out"));
    let mut heard = BufReader::new(heard).lines();
    let mut number = 0;
    let mut talk = |rounds: u32| {
        let began = Instant::now();
        for _ in 0..rounds {
            number += 1;
            writeln!(say, "{number}").expect("the connection is there");
            let line = heard.next().expect("the connection is there").expect("a line");
            assert_eq!(line, number.to_string());
        }
        began.elapsed()
    };
    talk(100);
    for _ in 0..rounds("moves with a connection", 2, 1) {
        pair.migrate(&["--max-downtime", "2s"]).done();
        println!("first answers there: {:?}", talk(100));
        pair.a.is_well();
        pair.back(&["--max-downtime", "2s"]).done();
        println!("first answers here: {:?}", talk(100));
        pair.a.is_well();
    }
    // One that was given away is silent, and so is its address.
    give_away(&pair);
    let ping = |wait: &str| {
        let mut command = as_client(&["ping", "-c", "1", "-W", wait, "10.88.0.2"]);
        command.stdout(Stdio::null()).status().expect("ping").success()
    };
    assert!(!ping("1"));
    pair.a.dewar(&["migrate", "c", "--resume"]).done();
    talk(100);
    assert!(ping("5"));
    drop(say);
    let _ = client.wait();
}

#[test]
#[ignore = "long: make test-long"]
fn redis_moves_again_and_again_with_its_data_and_its_client() {
    let test = "redis_moves_again_and_again_with_its_data_and_its_client";
    let network = Network::new();
    let server = |bundle: Bundle| {
        let link = bundle.folder.join("rootfs/tmp/redis-server");
        std::os::unix::fs::symlink("/usr/bin/redis-check-rdb", link).expect("link");
        let open = ["--bind", "0.0.0.0", "--protected-mode", "no", "--enable-debug-command", "yes"];
        let line = [&["/tmp/redis-server", "--save", ""][..], &open].concat();
        network.given_to(bundle.with_host_programs().expect("programs").running(&line))
    };
    let Some(pair) = Pair::new(test, server) else { return };
    network.make_there(&pair.b);
    let cli = |words: &[&str]| {
        let mut command = network.command("redis-cli");
        let output = command.args(["-h", "10.88.0.2"]).args(words).output().expect("redis-cli");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    wait_until("redis", Duration::from_secs(20), || cli(&["ping"]) == "PONG");
    cli(&["debug", "populate", "20000", "key", "500"]);
    // One connection that is open all the while; each answer is one more than the one before.
    let mut client = network.command("redis-cli");
    client.args(["-h", "10.88.0.2", "-r", "-1", "-i", "0.005", "incr", "count"]);
    let mut client = client.stdout(Stdio::piped()).spawn().expect("redis-cli");
    let answers = BufReader::new(client.stdout.take().expect("output")).lines();
    let answered = AtomicU64::new(0);
    // What it was answered before a move, and not read yet, says nothing of the connection after it.
    let goes_on = || {
        let before = answered.load(Ordering::Relaxed);
        wait_until("the client's connection", Duration::from_secs(20), || {
            answered.load(Ordering::Relaxed) > before + 20
        });
    };
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            for (line, expected) in answers.zip(1..) {
                let number = line.expect("a line").trim().parse::<u64>();
                assert_eq!(number, Ok(expected), "the client's connection");
                answered.store(expected, Ordering::Relaxed);
            }
        });
        let moved = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            goes_on();
            for round in 0..rounds("moves of redis", 5, 2) {
                pair.migrate(&["--max-downtime", "2s"]).done();
                goes_on();
                pair.back(&["--max-downtime", "2s"]).done();
                goes_on();
                assert_eq!(cli(&["dbsize"]), "20001", "{round}");
                assert_eq!(cli(&["get", &format!("key:{}", 19_999 - round)]).len(), 500, "{round}");
            }
        }));
        // The reader ends with it.
        kill(client.id() as i32, Signal::KILL);
        client.wait().expect("wait");
        reader.join().and(moved).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Two processes that hand a number to and fro: through a terminal, a pipe, shared memory and a file that both have
/// mapped. What either finds that is not as the other left it is written down.
const SHARERS: &str = r#"
import mmap, os, pty, struct, sys, time, tty
sys.stderr = open("/run/broken", "a", buffering=1)
SIZE = 1 << 20
mapped = open("/run/mapped", "w+b")
mapped.truncate(SIZE)
in_file, in_memory = mmap.mmap(mapped.fileno(), SIZE), mmap.mmap(-1, SIZE)
master, terminal = pty.openpty()
tty.setraw(terminal)
heard, told = os.pipe()
is_child = os.fork() == 0

def require(found, number, where):
    if found != struct.pack("q", number):
        open("/run/broken", "a").write(f"{number} in {where}: {found}\n")

number = 0
while True:
    number += 1
    at, bytes = number * 4104 % (SIZE - 8), struct.pack("q", number)
    if is_child:
        require(struct.pack("q", int(os.read(terminal, 32))), number, "the terminal")
        require(in_memory[at:at + 8], number, "shared memory")
        in_file[at:at + 8] = bytes
        os.write(told, bytes)
    else:
        in_memory[at:at + 8] = bytes
        os.write(master, str(number).encode())
        require(os.read(heard, 8), number, "the pipe")
        require(in_file[at:at + 8], number, "the mapped file")
        open("/run/number", "w").write(str(number))
        time.sleep(0.002)
"#;

#[test]
#[ignore = "long: make test-long"]
fn shared_memory_a_mapped_file_and_a_terminal_move_again_and_again() {
    let test = "shared_memory_a_mapped_file_and_a_terminal_move_again_and_again";
    let sharers = |bundle: Bundle| {
        fs::write(bundle.folder.join("rootfs/tmp/sharers"), SHARERS).expect("program");
        let bundle = bundle.with_host_programs().expect("programs");
        bundle.running(&["/usr/bin/python3", "/tmp/sharers"])
    };
    let Some(pair) = Pair::new(test, sharers) else { return };
    let shown = pair.a.container.bundle.folder.join("rootfs/run");
    let number = || {
        assert_eq!(fs::read_to_string(shown.join("broken")).unwrap_or_default(), "");
        let text = fs::read_to_string(shown.join("number")).unwrap_or_default();
        text.parse::<u64>().unwrap_or(0)
    };
    let goes_on = || {
        let before = number();
        wait_until("the number to go on", Duration::from_secs(20), || number() > before + 20);
    };
    goes_on();
    for _ in 0..rounds("moves of what is shared", 5, 2) {
        pair.migrate(&["--max-downtime", "2s"]).done();
        goes_on();
        pair.back(&["--max-downtime", "2s"]).done();
        goes_on();
    }
}
