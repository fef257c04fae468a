//! Containers of real runc, saved and restored by real CRIU.

use crate::common;
use dewar_testkit::{
    Bundle, Lab, Ran, RunningContainer, SmallDisk, container_tools, is_alive, kill, wait_until,
    wait_while_alive,
};
use rustix::process::Signal;
use serde_json::json;
use std::fs::Permissions;
use std::io::BufRead;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A container in a lab, adopted under the name `c`.
pub(crate) struct Adopted {
    // Ended before the lab's folder is removed, in which its runtime knows of it.
    pub container: RunningContainer,
    pub lab: Lab,
    pub path: String,
}

/// Starts one; `None`, said by name, where this host has not what it takes.
fn adopted(test: &str, change: impl FnOnce(Bundle) -> Bundle) -> Option<Adopted> {
    adopted_from("runc", test, change)
}

/// The same with another runtime.
fn adopted_from(
    runtime: &str,
    test: &str,
    change: impl FnOnce(Bundle) -> Bundle,
) -> Option<Adopted> {
    let path = match container_tools(runtime) {
        Ok(path) => path,
        Err(why) => {
            println!("SKIPPED containers::{test}: {why}");
            return None;
        }
    };
    let lab = common::lab();
    let bundle = change(Bundle::new(&lab.path().join("bundle")).expect("bundle"));
    Some(adopted_in(lab, runtime, path, bundle))
}

/// The same of a bundle in a lab.
pub(crate) fn adopted_in(lab: Lab, runtime: &str, path: String, bundle: Bundle) -> Adopted {
    let id = format!("dewar-{}", lab.path().file_name().expect("name").to_string_lossy());
    let container = RunningContainer::start_with(runtime, bundle, &id).expect("container");
    let adopted = Adopted { lab, container, path };
    let state = adopted.container.state.display().to_string();
    let words = ["adopt", "c", "--container", &id, "--runtime", runtime, "--runtime-root", &state];
    adopted.dewar(&words).done();
    adopted
}

impl Adopted {
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = self.lab.command(words);
        command.env("PATH", &self.path);
        command
    }

    pub(crate) fn dewar(&self, words: &[&str]) -> Ran {
        Ran::of(&self.command(words).output().expect("dewar starts"))
    }

    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.container.ask(command).expect("answer")
    }

    pub(crate) fn count(&mut self) -> u64 {
        self.ask("count").parse().expect("number")
    }

    /// That it works on, and everything in it is as it should be.
    pub(crate) fn is_well(&mut self) {
        let before = self.count();
        wait_until("work", Duration::from_secs(20), || self.count() > before);
        self.ask("verify");
    }

    pub(crate) fn state(&self) -> String {
        let listed = self.dewar(&["ps"]).done().json();
        listed["guests"][0]["state"].as_str().expect("state").to_owned()
    }

    /// That nothing of a dump is left anywhere.
    pub(crate) fn is_clean(&self) {
        assert_eq!(self.lab.ram_files("c"), [] as [std::path::PathBuf; 0]);
        assert!(!self.lab.root().join("guests/c/dump.json").exists());
        let rules = self.rules();
        assert!(!rules.contains("CRIU"), "{rules}");
        let pid = self.container.pid();
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
        assert!(!maps.contains("CRIU"), "{maps}");
    }

    /// What keeps packets out of its network.
    pub(crate) fn rules(&self) -> String {
        let pid = self.container.pid().to_string();
        let rules = |program: &str| {
            let command = ["--target", &pid, "--net", program, "-S"];
            let output = Command::new("nsenter").args(command).output().expect("nsenter");
            assert!(output.status.success(), "{output:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        rules("iptables") + &rules("ip6tables")
    }
}

#[test]
fn a_container_goes_on_where_it_was_saved() {
    let Some(mut c) = adopted("a_container_goes_on_where_it_was_saved", |it| it) else { return };
    c.ask("check 2000 3 none hard");
    wait_until("all its pages", Duration::from_secs(60), || c.count() > 60_000);
    let first = c.dewar(&["checkpoint", "c", "--tag", "first"]).done().json();
    assert!(first["pages"]["stored"].as_u64().expect("pages") > 6000, "{first}");
    c.is_well();
    let count = c.count();
    let second = c.dewar(&["checkpoint", "c"]).done().json();
    assert_eq!(second["parent"], first["checkpoint"]);
    c.is_clean();
    c.dewar(&["stop", "c", "--now"]).done();
    assert_eq!(c.state(), "ended");
    assert!(c.container.runtime_state().is_none());

    let restored = c.dewar(&["restore", "c"]).done().json();
    assert_eq!(restored["checkpoint"], second["checkpoint"]);
    assert!(c.count() >= count, "it begins where it was saved");
    c.is_well();
    assert_eq!(c.state(), "running");
    // And again from a restored one, and from an earlier one in its place.
    c.dewar(&["checkpoint", "c"]).done();
    c.dewar(&["restore", "first"]).failed(1, &["is a guest 'c' already"]);
    c.dewar(&["restore", "first", "--replace"]).done();
    c.is_well();
    c.dewar(&["verify", "first"]).done();
    c.is_clean();
}

#[test]
#[ignore = "long: make test-long"]
fn mappings_that_come_and_go_meanwhile_are_exact() {
    let name = "mappings_that_come_and_go_meanwhile_are_exact";
    let Some(mut c) = adopted(name, |it| it) else { return };
    c.ask("storm");
    c.ask("check 3000 1 none");
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(700));
        c.dewar(&["checkpoint", "c"]).done();
        c.is_well();
        c.dewar(&["restore", "c", "--replace"]).done();
        c.is_well();
    }
}

/// Waits in vfork(2) for a child that waits for a file. It does not stop while the child is frozen.
const VFORKS: &str = "
if (syscall(58) == 0) { select(undef, undef, undef, 0.01) until -e '/run/over'; syscall(60, 0) }
sleep 600;
";

#[test]
fn one_that_waits_in_vfork_is_saved_when_its_child_has_ended() {
    let with_perl = |it: Bundle| {
        it.with_host_programs()
            .and_then(|it| it.with_file("vforks", VFORKS.as_bytes()))
            .expect("bundle")
    };
    let name = "one_that_waits_in_vfork_is_saved_when_its_child_has_ended";
    let Some(mut c) = adopted(name, with_perl) else { return };
    c.ask("check 1000 1 none");
    let held =
        common::HeldCheckpoint::at_command(c.command(&["checkpoint", "c", "--json"]), "stopping");
    c.ask("spawn /usr/bin/perl /vforks");
    // Nothing wakes it but its child's end.
    let is = |state: char| {
        let perls = common::processes(|words| words.contains(&"/vforks"));
        perls.len() == 2 && perls.into_iter().any(|it| dewar_testkit::state(it) == Some(state))
    };
    wait_until("it to wait for its child", Duration::from_secs(20), || is('D'));
    kill(held.pid, Signal::CONT);
    // CRIU has stopped the child, which sees the file when CRIU has given up and let it go.
    wait_until("a first try", Duration::from_secs(20), || is('t'));
    std::fs::write(c.container.bundle.folder.join("rootfs/run/over"), "").expect("over");
    let (code, said, errors) = held.go_on();
    assert_eq!(code, 0, "{errors}");
    let taken: serde_json::Value = serde_json::from_str(&said).expect("json");
    // What it stood still in the try that failed is told, too.
    assert!(taken["pause_ms"].as_f64() > Some(1000.0), "its child had ended before: {taken}");
    c.is_well();
    c.dewar(&["restore", "c", "--replace"]).done();
    c.is_well();
}

#[test]
fn one_under_a_filter_of_system_calls_is_copied_while_it_runs() {
    let filtered = |mut it: Bundle| {
        // Each would end it: the call that tracks writes, and the return from a signal.
        it.config["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW",
            "syscalls": [{"names": ["userfaultfd", "rt_sigreturn"], "action": "SCMP_ACT_KILL_PROCESS"}],
        });
        it
    };
    let name = "one_under_a_filter_of_system_calls_is_copied_while_it_runs";
    let Some(mut c) = adopted(name, filtered) else { return };
    c.ask("fill 32 noise");
    c.ask("check 1000 2 none");
    let taken = c.dewar(&["checkpoint", "c"]).done().json();
    assert!(taken["captured"]["stopped"].as_u64() < Some(6000), "{taken}");
    c.is_well();
    c.dewar(&["restore", "c", "--replace"]).done();
    c.is_well();
    // The filter is over what was restored, too.
    c.dewar(&["checkpoint", "c"]).done();
    c.is_well();
}

#[test]
fn one_of_crun_goes_on_too() {
    let Some(mut c) = adopted_from("crun", "one_of_crun_goes_on_too", |it| it) else { return };
    c.ask("check 2000 3 none hard");
    c.dewar(&["checkpoint", "c"]).done();
    c.is_well();
    c.is_clean();
    c.container.crash();
    c.dewar(&["restore", "c"]).done();
    c.is_well();
    let held = common::HeldCheckpoint::at_command(c.command(&["checkpoint", "c"]), "captured");
    held.kill();
    c.is_well();
    c.dewar(&["checkpoint", "c"]).done();
    c.dewar(&["restore", "c", "--replace"]).done();
    c.is_well();
    c.dewar(&["stop", "c", "--now"]).done();
    assert!(c.container.runtime_state().is_none());
}

#[test]
#[ignore = "long: make test-long"]
fn a_chain_with_holes_comes_back() {
    let Some(mut c) = adopted("a_chain_with_holes_comes_back", |it| it) else { return };
    c.ask("fill 32 noise");
    c.ask("check 500 2 none");
    let mut ids = Vec::new();
    let mut bytes = Vec::new();
    for _ in 0..4 {
        c.is_well();
        let taken = c.dewar(&["checkpoint", "c"]).done().json();
        ids.push(taken["checkpoint"].as_str().expect("id").to_owned());
        bytes.push(taken["stored_bytes"].as_u64().expect("bytes"));
        // In the pause only what was written since the last look is copied.
        let (stopped, all) = (&taken["captured"]["stopped"], &taken["pages"]["total"]);
        assert!(stopped.as_u64() < all.as_u64().map(|all| all / 4), "{taken}");
    }
    // What the writers own changes; the noise does not, wherever it lies.
    assert!(bytes[1..].iter().all(|it| *it < bytes[0] / 4), "{bytes:?}");
    c.dewar(&["delete", &ids[0]]).done();
    c.dewar(&["delete", &ids[2]]).done();
    c.dewar(&["gc"]).done();
    for id in [&ids[1], &ids[3]] {
        c.dewar(&["restore", id, "--replace"]).done();
        c.is_well();
        c.ask("filled");
    }
}

#[test]
fn its_files_come_back_with_it_and_its_users_own_stay() {
    let name = "its_files_come_back_with_it_and_its_users_own_stay";
    let Some(mut c) = adopted(name, |it| it.overlaid().expect("overlay")) else { return };
    c.ask("check 500 2 none");
    let writes = "exec 3>>/tmp/open; while sleep 0.01; do echo line >&3; done";
    std::fs::write(c.container.bundle.folder.join("volume/writes"), writes).expect("script");
    c.ask("spawn sh /run/writes");
    c.ask("append /tmp/log one");
    c.dewar(&["checkpoint", "c"]).done();
    c.ask("append /tmp/log two");
    c.container.crash();
    c.dewar(&["restore", "c"]).done();
    c.is_well();
    assert_eq!(c.ask("show /tmp/log"), "one");
    c.ask("append /tmp/log three");
    // From a restored one, which has files of ours below it.
    let again = c.dewar(&["checkpoint", "c"]).done().json();
    assert_eq!(again["disks"], 1);
    c.ask("append /tmp/log four");
    c.dewar(&["restore", "c", "--replace"]).done();
    assert_eq!(c.ask("show /tmp/log"), "one;three");
    c.is_well();
    // One that fails leaves the files as they were.
    let config = c.container.bundle.folder.join("config.json");
    let text = std::fs::read_to_string(&config).expect("config");
    c.ask("append /tmp/log five");
    c.dewar(&["stop", "c", "--now"]).done();
    std::fs::write(&config, text.replace("/run", "/elsewhere")).expect("config");
    c.dewar(&["restore", "c"]).failed(1, &["no container was started"]);
    std::fs::write(&config, text).expect("config");
    let shown = std::fs::read_to_string(c.container.bundle.folder.join("rootfs/tmp/log"));
    assert_eq!(shown.expect("log"), "one\nthree\nfive\n");
    c.dewar(&["rm", "c"]).done();
    let own = std::fs::read_to_string(c.container.bundle.folder.join("rootfs/tmp/log"));
    assert_eq!(own.expect("log"), "one\ntwo\n");
}

/// Its user's own container has the id, or the files.
#[test]
fn a_restore_takes_nothing_from_a_container_that_was_started_meanwhile() {
    let name = "a_restore_takes_nothing_from_a_container_that_was_started_meanwhile";
    let Some(mut c) = adopted(name, |it| it.overlaid().expect("overlay")) else { return };
    c.ask("check 500 2 none");
    c.dewar(&["checkpoint", "c"]).done();
    c.container.crash();
    let start = |id: &str| {
        let mut command = c.container.command(&["run", "--detach", "--bundle"]);
        command.arg(&c.container.bundle.folder).arg(id);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        assert!(command.status().expect("runc").success());
    };
    let restore = c.command(&["restore", "c"]);
    let held = common::HeldCheckpoint::at_command(restore, "restoring the processes");
    start(&c.container.id);
    let pid = c.container.pid();
    let (code, _, said) = held.go_on();
    assert!(code == 1 && said.contains("already exists"), "{code}: {said}");
    assert!(c.container.pid() == pid && is_alive(pid), "it was ended");
    c.container.crash();
    c.dewar(&["restore", "c"]).done();
    c.dewar(&["stop", "c", "--now"]).done();
    // On what the restore had mounted there.
    let second = format!("{}-second", c.container.id);
    start(&second);
    c.dewar(&["restore", "c"]).failed(1, &["is in use"]);
    assert!(c.lab.root().join("guests/c/root-a/upper").exists(), "its files are there");
    assert_eq!(c.container.delete(&second), Ok(()));
    c.dewar(&["restore", "c"]).done();
    c.is_well();
}

#[test]
fn a_tree_of_processes_goes_on_pipes_and_deleted_files_too() {
    let name = "a_tree_of_processes_goes_on_pipes_and_deleted_files_too";
    let Some(mut c) = adopted(name, |it| it.overlaid().expect("overlay")) else { return };
    let script = "exec 4<>/tmp/deleted; i=0; while [ $i -lt 50000 ]; do i=$((i+1)); \
                  echo 'a line of a file that is deleted, longer than CRIU takes by itself' >&4; done; \
                  rm /tmp/deleted\n\
                  (i=0; while :; do i=$((i+1)); echo $i; sleep 0.005; done) | \
                  (last=0; while read n; do last=$((last+1)); \
                  [ $n = $last ] || echo $n after $last > /run/broken; \
                  [ -s /proc/self/fd/4 ] || echo empty > /run/broken; echo $n > /tmp/last; done)";
    let volume = c.container.bundle.folder.join("volume");
    std::fs::write(volume.join("tree"), script).expect("script");
    c.ask("spawn sh /run/tree");
    let numbers = c.container.bundle.folder.join("rootfs/tmp/last");
    let last = || {
        assert!(
            !volume.join("broken").exists(),
            "{:?}",
            std::fs::read_to_string(volume.join("broken"))
        );
        let text = std::fs::read_to_string(&numbers).unwrap_or_default();
        text.trim().parse::<u64>().unwrap_or(0)
    };
    // The shell empties the file before it writes the next number.
    let number = || {
        let mut number = 0;
        wait_until("a number", Duration::from_secs(20), || {
            number = last();
            number > 0
        });
        number
    };
    let goes_on = || {
        let before = number();
        wait_until("work", Duration::from_secs(20), || last() > before + 20);
    };
    goes_on();
    c.dewar(&["checkpoint", "c"]).done();
    let saved = number();
    goes_on();
    c.container.crash();
    let restoring = c.command(&["restore", "c", "--json"]);
    let held = common::HeldCheckpoint::at_command(restoring, "restoring the processes");
    assert!(last() <= saved, "what was written since is not there");
    assert_eq!(held.go_on().0, 0);
    goes_on();
    c.dewar(&["checkpoint", "c"]).done();
    goes_on();
}

#[test]
fn redis_keeps_its_data_and_its_client() {
    let server = |bundle: Bundle| {
        let link = bundle.folder.join("rootfs/tmp/redis-server");
        std::os::unix::fs::symlink("/usr/bin/redis-check-rdb", link).expect("link");
        let line = ["/tmp/redis-server", "--save", "", "--enable-debug-command", "yes"];
        bundle.with_host_programs().expect("programs").running(&line)
    };
    let Some(c) = adopted("redis_keeps_its_data_and_its_client", server) else { return };
    let in_its_network = |words: &[&str]| {
        let mut command = Command::new("nsenter");
        let pid = c.container.pid().to_string();
        command.args(["--target", &pid, "--net", "redis-cli"]).args(words);
        command
    };
    let cli = |words: &[&str]| {
        let output = in_its_network(words).output().expect("redis-cli");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    wait_until("redis", Duration::from_secs(20), || cli(&["ping"]) == "PONG");
    cli(&["debug", "populate", "20000", "key", "500"]);
    // One connection that is open all the while; each answer is one more than the one before.
    let mut client = in_its_network(&["-r", "-1", "-i", "0.002", "incr", "count"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("redis-cli");
    let answers = std::io::BufReader::new(client.stdout.take().expect("output"));
    let mut answers =
        answers.lines().map(|line| line.expect("answer").parse::<u64>().expect("number"));
    let mut expected = 1;
    let mut answered = |count: u64| {
        for _ in 0..count {
            assert_eq!(answers.next(), Some(expected), "the client's connection");
            expected += 1;
        }
    };
    answered(20);
    let connections = || {
        cli(&["info", "stats"]).lines().find_map(|line| {
            line.trim()
                .strip_prefix("total_connections_received:")
                .map(|it| it.parse::<u64>().expect("number"))
        })
    };
    let before = connections();
    for _ in 0..3 {
        c.dewar(&["checkpoint", "c"]).done();
        answered(50);
    }
    // Asking is one, too; the client that stays had no need of another.
    assert_eq!(connections(), before.map(|it| it + 1));
    kill(client.id() as i32, Signal::KILL);
    client.wait().expect("wait");
    c.container.crash();
    c.dewar(&["restore", "c"]).done();
    wait_until("redis", Duration::from_secs(20), || cli(&["ping"]) == "PONG");
    assert_eq!(cli(&["dbsize"]), "20001");
    assert!(cli(&["get", "count"]).parse::<u64>().expect("number") >= 120);
    assert_eq!(cli(&["get", "key:19999"]).len(), 500);
}

#[test]
fn what_its_user_starts_under_its_id_is_left_alone() {
    let name = "what_its_user_starts_under_its_id_is_left_alone";
    let Some(mut c) = adopted(name, |it| it.overlaid().expect("overlay")) else { return };
    c.dewar(&["checkpoint", "c"]).done();
    c.dewar(&["restore", "c", "--as", "d"]).failed(1, &["is guest 'c'", "nothing was done"]);
    c.dewar(&["restore", "c", "--replace"]).done();
    c.ask("append /tmp/log ours");
    c.container.crash();
    // Started by hand, on the files of the restored one.
    let mut command = c.container.command(&["run", "--detach", "--bundle"]);
    command.arg(&c.container.bundle.folder).arg(&c.container.id);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(command.status().expect("runc").success());
    assert_eq!(c.state(), "ended");
    c.dewar(&["rm", "c"]).failed(1, &["is in use", "left as it is"]);
    c.dewar(&["stop", "c", "--now"]).failed(1, &["has ended"]);
    c.dewar(&["rm", "c", "--force"]).failed(1, &["is in use", "left as it is"]);
    c.dewar(&["restore", "c"]).failed(1, &["is running", "left as it is"]);
    assert_eq!(c.ask("show /tmp/log"), "ours");
    c.dewar(&["freeze", "--all"]).done();
    c.container.crash();
    c.dewar(&["rm", "c"]).done();
    assert!(!c.container.bundle.folder.join("rootfs/tmp/log").exists(), "the user's own files");
}

#[test]
fn a_full_store_and_a_damaged_checkpoint_harm_nothing() {
    let name = "a_full_store_and_a_damaged_checkpoint_harm_nothing";
    let Some(mut c) = adopted(name, |it| it) else { return };
    c.ask("fill 24 noise");
    c.ask("check 500 1 none");
    let small = SmallDisk::mount(&c.lab.path().join("small"), "12m").expect("mount");
    let url = format!("file:{}", small.path().display());
    c.dewar(&["checkpoint", "c", "--store", &url])
        .failed(1, &["no checkpoint was made", "running"]);
    assert_eq!(common::files(&small.path().join("images")), [] as [std::path::PathBuf; 0]);
    c.is_well();
    c.is_clean();
    // A segment that is damaged is no container.
    c.dewar(&["checkpoint", "c"]).done();
    let segments = common::files(&c.lab.store().join("segments"));
    let whole = std::fs::read(&segments[0]).expect("segment");
    std::fs::write(&segments[0], &whole[..whole.len() / 3]).expect("damage");
    c.dewar(&["restore", "c", "--replace"]).failed(1, &[]);
    std::fs::write(&segments[0], &whole).expect("mend");
    c.dewar(&["restore", "c", "--replace"]).done();
    c.is_well();
    c.ask("filled");
}

#[test]
fn a_restore_that_is_killed_leaves_no_container() {
    let name = "a_restore_that_is_killed_leaves_no_container";
    let Some(mut c) = adopted(name, |it| it) else { return };
    c.ask("check 2000 2 none");
    c.dewar(&["checkpoint", "c"]).done();
    for after in [5, 40, 80, 120, 160] {
        c.container.crash();
        let mut child = c
            .command(&["restore", "c"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("dewar");
        std::thread::sleep(Duration::from_millis(after));
        kill(child.id() as i32, Signal::KILL);
        let is_back = child.wait().expect("wait").success();
        let state = c.state();
        let runs = c.container.runtime_state().is_some_and(|it| it["status"] == "running");
        assert_eq!(runs, state == "running", "{after} ms: {state}");
        assert!(runs || !is_back);
        assert_eq!(c.lab.ram_files("c"), [] as [std::path::PathBuf; 0]);
        if !runs {
            c.dewar(&["restore", "c"]).done();
        }
        c.is_well();
    }
}

#[test]
fn killed_at_any_step_the_container_runs_on() {
    let Some(mut c) = adopted("killed_at_any_step_the_container_runs_on", |it| it) else { return };
    c.ask("check 500 2 none");
    for step in ["stopping", "captured", "resumed", "begun", "synced"] {
        let mut command = c.command(&["checkpoint", "c"]);
        let killed = command.env("DEWAR_TEST_SIGNAL", format!("{step}:kill")).output();
        assert!(!killed.expect("dewar starts").status.success(), "{step}");
        c.is_well();
        // The guardian may still be at work.
        wait_until("a free guest", Duration::from_secs(20), || c.state() == "running");
        c.is_clean();
    }
    // Command and guardian at once, while it stands still: the next command lets it run.
    let held = common::HeldCheckpoint::at_command(c.command(&["checkpoint", "c"]), "captured");
    let guardian = held.guardian().expect("a guardian");
    kill(guardian, Signal::KILL);
    wait_while_alive(guardian);
    held.kill();
    assert_eq!(c.state(), "running");
    c.is_well();
    c.is_clean();
    c.dewar(&["checkpoint", "c"]).done();
    c.dewar(&["restore", "c", "--replace"]).done();
    c.is_well();
}

#[test]
fn a_command_that_stops_does_not_leave_it_frozen() {
    let name = "a_command_that_stops_does_not_leave_it_frozen";
    let Some(mut c) = adopted(name, |it| it) else { return };
    c.ask("check 500 2 none");
    let mut command = c.command(&["checkpoint", "c"]);
    command.env("DEWAR_TEST_SIGNAL", "captured:hang").env("DEWAR_TEST_PAUSE_LIMIT", "2");
    let killed = command.output().expect("dewar starts");
    assert!(!killed.status.success());
    c.is_well();
    wait_until("a free guest", Duration::from_secs(20), || c.state() == "running");
    c.is_clean();
}

#[test]
fn a_criu_that_dies_fails_the_checkpoint_alone() {
    let Some(mut c) = adopted("a_criu_that_dies_fails_the_checkpoint_alone", |it| it) else {
        return;
    };
    c.ask("check 500 2 none");
    let held = common::HeldCheckpoint::at_command(c.command(&["checkpoint", "c"]), "captured");
    let criu = tracer(c.container.pid());
    assert!(is_alive(criu));
    kill(criu, Signal::KILL);
    let (code, _, said) = held.go_on();
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("no checkpoint was made; the guest is running"), "{said}");
    c.is_well();
    c.is_clean();
}

#[test]
fn killed_in_the_middle_of_the_dump_the_container_runs_on() {
    let name = "killed_in_the_middle_of_the_dump_the_container_runs_on";
    let Some(mut c) = adopted(name, |it| it) else { return };
    c.ask("check 500 2 none");
    let lock = HeldNetworkLock::new(&mut c);
    for victims in [&["command"][..], &["command", "guardian"], &["criu"], &["command", "criu"]] {
        lock.hold();
        let mut child = c
            .command(&["checkpoint", "c"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("dewar");
        wait_until("a closed network", Duration::from_secs(60), || lock.is_held());
        assert!(c.rules().contains("CRIU"), "{victims:?}");
        let criu = tracer(c.container.pid());
        assert_ne!(criu, 0, "{victims:?}");
        let guardian = common::started(child.id() as i32, "__guardian").expect("a guardian");
        for victim in victims {
            let pid = match *victim {
                "command" => child.id() as i32,
                "guardian" => guardian,
                _ => criu,
            };
            kill(pid, Signal::KILL);
        }
        lock.let_go();
        assert!(!child.wait().expect("wait").success(), "{victims:?}");
        // The guardian does it, or the next command. A CRIU that goes on comes to its end first.
        wait_until("a free guest", Duration::from_secs(60), || c.state() == "running");
        c.is_well();
        c.is_clean();
    }
    c.dewar(&["checkpoint", "c"]).done();
}

/// Makes CRIU wait where it has just closed the container's network: it holds all processes then, and has not
/// begun to put code into them. (One that is killed while it does that takes the process with it.)
struct HeldNetworkLock {
    hold: PathBuf,
    held: PathBuf,
}

impl HeldNetworkLock {
    /// Puts a program of ours before the `iptables-restore` by which CRIU closes the network.
    fn new(c: &mut Adopted) -> Self {
        let folder = c.lab.path().join("network-lock");
        std::fs::create_dir(&folder).expect("folder");
        let this = Self { hold: folder.join("hold"), held: folder.join("held") };
        let program = folder.join("iptables-restore");
        let script = format!(
            "#!/bin/sh\nPATH={path} iptables-restore \"$@\" || exit 1\n\
             if [ -e {hold} ]; then touch {held}; fi\n\
             while [ -e {hold} ] && grep -qs 'State:.[^Z]' /proc/$PPID/status; do sleep 0.02; done\n",
            path = c.path,
            hold = this.hold.display(),
            held = this.held.display(),
        );
        std::fs::write(&program, script).expect("script");
        std::fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("mode");
        c.path = format!("{}:{}", folder.display(), c.path);
        this
    }

    fn hold(&self) {
        let _ = std::fs::remove_file(&self.held);
        std::fs::write(&self.hold, "").expect("hold");
    }

    fn is_held(&self) -> bool {
        self.held.exists()
    }

    fn let_go(&self) {
        std::fs::remove_file(&self.hold).expect("let go");
    }
}

/// The first process of the container on a host, by what Dewar has on record there.
pub(crate) fn first_process(host: &Lab) -> i32 {
    host.pid_on_record("c", "process")
}

/// Who traces a process.
pub(crate) fn tracer(pid: i32) -> i32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find_map(|line| line.strip_prefix("TracerPid:")).expect("line");
    line.trim().parse().expect("number")
}

#[test]
fn what_cannot_be_saved_is_refused_before_anything_is_touched() {
    let name = "what_cannot_be_saved_is_refused_before_anything_is_touched";
    let Some(c) = adopted(name, |it| it) else { return };
    let id = c.container.id.clone();
    let state = c.container.state.display().to_string();
    let again = ["adopt", "d", "--container", &id, "--runtime-root", &state];
    c.dewar(&again).failed(1, &["is guest 'c' already"]);
    c.dewar(&["adopt", "d", "--container", "nothing", "--runtime-root", &state])
        .failed(3, &["knows no container 'nothing'"]);
    for verb in ["upgrade", "freeze"] {
        c.dewar(&[verb, "c"]).failed(4, &["is a container", "not touched"]);
    }
    c.dewar(&["checkpoint", "c", "--dirty-store", "redis://127.0.0.1"])
        .failed(2, &["for virtual machines"]);
    c.dewar(&["doctor", "--container", "c"]).done();
    let mut exec = c.container.command(&["exec", "--detach", &id, "/bin/sleep", "1000"]);
    exec.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    assert!(exec.status().expect("runc").success());
    c.dewar(&["doctor", "--container", "c"]).failed(4, &["cannot be saved", "not touched"]);
    c.dewar(&["checkpoint", "c"]).failed(4, &["sleep was started in it from outside"]);
    assert_eq!(c.lab.ram_files("c"), [] as [std::path::PathBuf; 0]);
    let log = c.lab.path().join("outside.log");
    let bundle = Bundle::new(&c.lab.path().join("loud")).expect("bundle");
    bundle.write().expect("config");
    let loud = format!("{id}-loud");
    let mut command = c.container.command(&["run", "--detach", "--bundle"]);
    command.arg(&bundle.folder).arg(&loud).stdin(Stdio::null());
    command.stdout(std::fs::File::create(&log).expect("log")).stderr(Stdio::null());
    assert!(command.status().expect("runc").success());
    // Its standard output is a file of the host's: CRIU could not save that.
    c.dewar(&["adopt", "d", "--container", &loud, "--runtime-root", &state])
        .failed(4, &["outside.log", "outside its own mounts", "not touched"]);
    assert_eq!(c.container.delete(&loud), Ok(()));
    let paused = c.container.command(&["pause", &id]).status().expect("runc");
    assert!(paused.success());
    assert_eq!(c.state(), "paused");
    c.dewar(&["checkpoint", "c"]).failed(1, &["is paused, not running", "not touched"]);
    assert!(c.container.command(&["resume", &id]).status().expect("runc").success());
    // By its relative paths nobody finds an overlay.
    let relative = c.lab.path().join("relative");
    let bundle = Bundle::new(&relative).expect("bundle");
    bundle.write().expect("config");
    let mut mount = Command::new("mount");
    mount.current_dir(&relative).args(["-t", "overlay", "overlay", "rootfs", "-o"]);
    for folder in ["upper", "work"] {
        std::fs::create_dir(relative.join(folder)).expect("folder");
    }
    let mounted = mount.arg("lowerdir=rootfs,upperdir=upper,workdir=work").status().expect("mount");
    assert!(mounted.success());
    let id = format!("{id}-relative");
    let mut command = c.container.command(&["run", "--detach", "--bundle"]);
    command
        .arg(&relative)
        .arg(&id)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    assert!(command.status().expect("runc").success());
    c.dewar(&["adopt", "d", "--container", &id, "--runtime-root", &state])
        .failed(4, &["mount it with whole ones", "not touched"]);
    assert_eq!(c.container.delete(&id), Ok(()));
    assert!(
        Command::new("umount").arg(relative.join("rootfs")).status().expect("umount").success()
    );
    c.dewar(&["rm", "c"]).done();
    assert!(c.container.runtime_state().is_some(), "it is only forgotten");
}

/// Takes a file out of the page cache.
fn forget(path: &std::path::Path) {
    let file = std::fs::File::open(path).expect("open");
    file.sync_all().expect("sync");
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("fadvise");
}

/// Which pages a container uses is learnt while it runs; they are cached again before it asks for them, and where it is brought
/// back.
#[test]
fn a_container_finds_the_pages_that_it_uses_in_the_page_cache() {
    const MIB: u64 = 1 << 20;
    let reader = "cat /data/scanned >/dev/null\nwhile [ -e /run/go ]; do cat /data/used >/dev/null; sleep 0.1; done\n: >/run/over\n";
    let name = "a_container_finds_the_pages_that_it_uses_in_the_page_cache";
    let with_files = |it: Bundle| {
        let it = it.with_file("data/used", &vec![1; MIB as usize]).expect("file");
        let it = it.with_file("data/scanned", &vec![2; 8 * MIB as usize]).expect("file");
        let it = it.with_file("bin/reader", reader.as_bytes()).expect("file");
        it.overlaid().expect("overlay")
    };
    let Some(mut c) = adopted(name, with_files) else { return };
    let bundle = c.lab.path().join("bundle");
    let data = |file: &str| bundle.join("lower/data").join(file);
    c.ask("check 500 2 none hard");
    c.dewar(&["warm", "c"]).failed(3, &["it is not known which pages"]);
    std::fs::write(bundle.join("volume/go"), "").expect("go");
    c.ask("spawn sh /bin/reader");
    let learnt =
        c.dewar(&["warm", "c", "--learn=6s", "--save", &format!("{}/hot", bundle.display())]);
    if learnt.code == 4 {
        println!("SKIPPED containers::{name}: {}", learnt.stderr.trim());
        return;
    }
    let learnt = learnt.done().json();
    assert!(learnt["hot_bytes"].as_u64() >= Some(MIB), "{learnt}");
    let told = |c: &Adopted| {
        let told = c.dewar(&["cool-report", "c"]).done().json();
        let files = told["files"].as_array().expect("files").clone();
        assert!(!files.iter().any(|it| it["path"] == "/data/scanned"), "{told}");
        let used = files.iter().find(|it| it["path"] == "/data/used").expect("used").clone();
        assert_eq!(used["hot_bytes"], MIB, "{told}");
        used["missing_bytes"].as_u64().expect("number")
    };
    assert_eq!(told(&c), 0);
    std::fs::remove_file(bundle.join("volume/go")).expect("go");
    let over = bundle.join("volume/over");
    wait_until("its reader's end", Duration::from_secs(20), || over.exists());
    forget(&data("used"));
    assert_eq!(told(&c), MIB);
    let warmed = c.dewar(&["warm", "c"]).done().json();
    assert!(warmed["read_bytes"].as_u64() >= Some(MIB), "{warmed}");
    all_is_read(&|| told(&c));
    // What was written into a file says the same.
    forget(&data("used"));
    let limited = ["warm", "c", "--from", &format!("{}/hot", bundle.display()), "--limit", "512K"];
    let warmed = c.dewar(&limited).done().json();
    assert_eq!(warmed["stopped"], "the limit was reached", "{warmed}");
    // It is in the checkpoint, too.
    c.dewar(&["checkpoint", "c"]).done();
    c.dewar(&["stop", "c", "--now"]).done();
    forget(&data("used"));
    c.dewar(&["restore", "c"]).done();
    c.is_well();
    all_is_read(&|| told(&c));
}

/// The kernel reads ahead: a page may be on its way still.
fn all_is_read(missing: &dyn Fn() -> u64) {
    wait_until("all pages to be there", Duration::from_secs(20), || missing() == 0);
}

/// The kernel's instances of tracing that commands of this process made.
fn tracing_of(pid: u32) -> Vec<String> {
    let folder = tempfile::tempdir().expect("folder");
    let mount = |words: &[&str]| {
        let status = Command::new("sh").args(["-c", &words.join(" ")]).status().expect("sh");
        assert!(status.success(), "{words:?}");
    };
    let path = folder.path().display().to_string();
    mount(&["mount -t tracefs none", &path]);
    let entries = std::fs::read_dir(folder.path().join("instances")).expect("instances");
    let names = entries.flatten().map(|it| it.file_name().to_string_lossy().into_owned());
    let found = names.filter(|name| name.starts_with(&format!("dewar-{pid}-"))).collect();
    mount(&["umount", &path]);
    found
}

/// A command that watches is ended by Ctrl-C with what it has learnt; what a killed one leaves in the kernel the next takes away.
#[test]
fn a_watch_that_is_ended_early_leaves_no_tracing_behind() {
    let name = "a_watch_that_is_ended_early_leaves_no_tracing_behind";
    let Some(c) = adopted(name, |it| it) else { return };
    if c.dewar(&["warm", "c", "--learn=100ms"]).code == 4 {
        println!("SKIPPED containers::{name}: this kernel does not tell of reads");
        return;
    }
    let watching = |signal: Signal| {
        let mut command = c.command(&["warm", "c", "--learn=10m"]);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("dewar");
        let pid = child.id();
        wait_until("it watches", Duration::from_secs(20), || !tracing_of(pid).is_empty());
        kill(pid as i32, signal);
        (pid, Ran::of(&child.wait_with_output().expect("output")))
    };
    let (pid, ended) = watching(Signal::INT);
    assert_eq!(ended.done().json()["name"], "c");
    assert_eq!(tracing_of(pid), [] as [String; 0]);
    let (killed, _) = watching(Signal::KILL);
    assert!(!tracing_of(killed).is_empty(), "nobody could take it away");
    c.dewar(&["warm", "c", "--learn=100ms"]).done();
    assert_eq!(tracing_of(killed), [] as [String; 0]);
}

/// What is cached of a virtual machine's disk is told, and its reads are watched.
#[test]
fn a_virtual_machines_disk_is_looked_at_too() {
    let lab = common::lab();
    let mut guest = lab.run("g", &dewar_testkit::GuestSpec::default()).expect("guest");
    guest.console.ask("check 200 1 disk").expect("check");
    let learnt = lab.dewar(&["warm", "g", "--learn=500ms"]);
    if learnt.code == 4 {
        println!(
            "SKIPPED containers::a_virtual_machines_disk_is_looked_at_too: {}",
            learnt.stderr.trim()
        );
        return;
    }
    learnt.done();
    let told = lab.dewar(&["cool-report", "g", "--all"]).done().json();
    let files = told["files"].as_array().expect("files");
    assert!(files.iter().any(|it| it["cached_bytes"].as_u64() > Some(0)), "{told}");
    guest.console.ask("verify").expect("it works on");
}
