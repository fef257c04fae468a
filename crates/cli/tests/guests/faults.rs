//! One call to the kernel goes wrong, another one each time: `dewar` is killed at it, or
//! the disk is full.

use crate::common::{self, HeldCheckpoint, qemus};
use dewar_guest_qemu::Qmp;
use dewar_testkit::{
    CHANGES, Call, Console, Fault, GuestSpec, Lab, NEED_ROOM, RedisServer, TestGuest, calls_of,
    kill, sample, step_of, wait_until, wait_while_alive, with_fault,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

fn busy(lab: &Lab) -> TestGuest {
    let spec = GuestSpec { memory_mib: 128, ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    guest
}

/// A store that can be put back to what it was.
enum Place {
    /// In a folder, and a copy of it.
    Folder(PathBuf, PathBuf),
    /// In a server's first database, and a copy in its second.
    Redis(RedisServer),
}

impl Place {
    fn url(&self) -> String {
        match self {
            Place::Folder(folder, _) => format!("file:{}", folder.display()),
            Place::Redis(server) => server.url(),
        }
    }

    fn keep(&self) {
        match self {
            Place::Folder(folder, copy) => copied(folder, copy),
            Place::Redis(server) => copied_database(server, 0, 1),
        }
    }

    fn reset(&self) {
        match self {
            Place::Folder(folder, copy) => copied(copy, folder),
            Place::Redis(server) => copied_database(server, 1, 0),
        }
    }

    /// Names and lengths of all that lies there.
    fn objects(&self) -> Vec<String> {
        match self {
            Place::Folder(folder, _) => common::files(folder)
                .iter()
                .map(|file| format!("{} {}", file.display(), file.metadata().expect("stat").len()))
                .collect(),
            Place::Redis(server) => {
                let all = "local all = {}
                    for _, key in ipairs(redis.call('keys', '*')) do
                        local kind = redis.call('type', key).ok
                        if kind == 'string' and not string.find(key, ':count:') then
                            all[#all + 1] = key .. ' ' .. redis.call('strlen', key)
                        elseif kind == 'hash' then
                            all[#all + 1] = key .. ' ' .. redis.call('hlen', key)
                        end
                    end
                    table.sort(all)
                    return all";
                server.ask(&["eval", all, "0"]).expect("keys").lines().map(str::to_owned).collect()
            }
        }
    }

    /// What the dead held is theirs no more, as after 20 s.
    fn let_time_pass(&self) {
        if let Place::Redis(server) = self {
            let drop = "for _, key in ipairs(redis.call('keys', '*:hold:*')) do
                redis.call('del', key) end";
            server.ask(&["eval", drop, "0"]).expect("del");
        }
    }
}

fn copied(from: &PathBuf, to: &PathBuf) {
    let _ = std::fs::remove_dir_all(to);
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status();
    assert!(done.expect("cp").success());
}

fn copied_database(server: &RedisServer, from: u8, to: u8) {
    let copy = format!(
        "redis.call('select', {to}) redis.call('flushdb') redis.call('select', {from})
        for _, key in ipairs(redis.call('keys', '*')) do redis.call('copy', key, key, 'db', {to}) end
        redis.call('select', {to}) return redis.call('dbsize')"
    );
    let keys = server.ask(&["eval", &copy, "0"]).expect("copy");
    assert!(keys.parse::<u64>().is_ok_and(|keys| keys > 0), "{keys}");
}

/// Whether a call is one by which something changes; of what is said to a server, where it
/// is no question.
fn is_change(call: &Call) -> bool {
    let changes = ["SET", "DEL", "UNLINK", "EVAL", "INCRBY"];
    !call.text.starts_with("sendto") || changes.iter().any(|word| call.text.contains(word))
}

/// Ends `line` at each of its changes in turn. Whatever that was, the images that it is not
/// about are whole, and once it is run again the store is what it becomes undisturbed.
fn killed_at_each_change(lab: &Lab, place: &Place, line: &[&str], others: &[String]) {
    let url = place.url();
    let dewar = |line: &[&str]| lab.dewar(&[line, &["--store", &url]].concat());
    let finished = |after: &str| {
        place.let_time_pass();
        for image in others {
            let told = dewar(&["verify", image]);
            assert_eq!(told.code, 0, "{image} {after}: {}", told.stderr);
        }
        // What it deletes may be gone.
        let told = dewar(line);
        assert!(told.code == 0 || told.code == 3 && line[0] == "delete", "{after}: {told:?}");
        dewar(&["gc"]).done();
        place.objects()
    };
    place.reset();
    let command = lab.command(&[line, &["--store", &url]].concat());
    let (output, calls) = calls_of(&command, CHANGES).expect("strace");
    assert!(output.status.success(), "{output:?}");
    let clean = finished("undisturbed");
    let changes: Vec<&Call> = calls.iter().filter(|call| is_change(call)).collect();
    println!("{line:?} in {url}: {} changes", changes.len());
    assert!(changes.len() > 5, "{calls:?}");
    for call in sample(&format!("changes of {line:?}"), changes, 5) {
        place.reset();
        let (output, spared) = with_fault(&command, CHANGES, call, Fault::Killed).expect("strace");
        let after = format!("after {line:?} killed at {}", call.text);
        assert!(spared.is_none() || output.status.success(), "{after}: {output:?}");
        assert_eq!(finished(&after), clean, "{after}");
    }
}

fn removals_killed_at_each_change(lab: &Lab, place: &Place) {
    let url = place.url();
    let mut guest = busy(lab);
    guest.console.ask("fill 8 noise").expect("fill");
    let mut images: Vec<String> = (0..6)
        .map(|_| {
            guest.console.ask("count").expect("alive");
            let told = lab.dewar(&["checkpoint", "g", "--store", &url]).done().json();
            told["checkpoint"].as_str().expect("id").to_owned()
        })
        .collect();
    for gone in [0, 1, 2] {
        lab.dewar(&["delete", &images.remove(gone), "--store", &url]).done();
    }
    // Segments that only a dead writer names.
    let line = ["checkpoint", "g", "--full", "--store", &url];
    let held = HeldCheckpoint::at_with(lab, &line, "synced");
    // It would sweep them.
    let guardian = held.guardian().expect("a guardian");
    kill(guardian, Signal::KILL);
    held.kill();
    // It has the guest's lock, until it is gone.
    wait_while_alive(guardian);
    lab.dewar(&["rm", "g", "--force"]).done();
    place.let_time_pass();
    place.keep();
    killed_at_each_change(lab, place, &["gc"], &images);
    let gone = images.remove(1);
    killed_at_each_change(lab, place, &["delete", &gone], &images);
}

#[test]
fn gc_and_delete_killed_at_each_change_of_a_folder() {
    let lab = common::lab();
    let place = Place::Folder(lab.path().join("pages"), lab.path().join("copy"));
    removals_killed_at_each_change(&lab, &place);
}

#[test]
#[ignore = "long: make test-long"]
fn gc_and_delete_killed_at_each_change_of_a_server() {
    let lab = common::lab();
    let place = Place::Redis(RedisServer::start(&[]).expect("redis"));
    removals_killed_at_each_change(&lab, &place);
}

/// That the guest runs, once and whole, or can be thawed, or restored where `may_end`.
fn assert_not_lost(lab: &Lab, guest: &mut TestGuest, may_end: bool, after: &str) {
    let mut told = Value::Null;
    wait_until(&format!("{after}: all is settled"), Duration::from_secs(60), || {
        told = lab.ps("g").expect("listed");
        let state = told["state"].as_str().unwrap_or_default();
        ["running", "frozen"].contains(&state) || may_end && state == "ended"
    });
    let back = match told["state"].as_str() {
        Some("frozen") => Some("thaw"),
        Some("ended") => Some("restore"),
        _ => None,
    };
    if let Some(verb) = back {
        let came = lab.dewar(&[verb, "g"]);
        assert_eq!(came.code, 0, "{after}: {}", came.stderr);
        lab.wait_for_memory("g");
    }
    wait_until(&format!("{after}: one QEMU"), Duration::from_secs(20), || qemus(lab).len() == 1);
    assert_nothing_of_ours(lab, after);
    // It may not have been renamed.
    let names = ["console", "console~", "console~2"].map(|name| guest.folder.join(name));
    let console = names.iter().find_map(|name| Console::connect(name).ok());
    guest.console = console.unwrap_or_else(|| panic!("{after}: no console"));
    guest.console.ask("verify").unwrap_or_else(|error| panic!("{after}: {error}"));
}

/// That QEMU has no job, no file and no node that Dewar added.
fn assert_nothing_of_ours(lab: &Lab, after: &str) {
    let mut qmp = Qmp::connect(&lab.root().join("guests/g/qmp.sock")).expect("QMP");
    let mut ask = |command: &str| qmp.execute(command, json!({})).expect("QMP");
    assert_eq!(ask("query-jobs"), json!([]), "{after}");
    assert_eq!(ask("query-fdsets"), json!([]), "{after}");
    let nodes = ask("query-named-block-nodes");
    let names = nodes.as_array().into_iter().flatten().filter_map(|it| it["node-name"].as_str());
    let ours: Vec<_> = names.filter(|name| name.starts_with("dewar-")).collect();
    assert!(ours.is_empty(), "{after}: {ours:?}");
}

/// About how many calls of each command go wrong.
const TRIED: usize = 4;

/// Lets calls of `line` that need room fail, some of all, each once.
fn without_room(line: &[&str], before: Option<&[&str]>) {
    with_each(line, before, (NEED_ROOM, |_| true), Fault::NoRoom);
}

/// A checkpoint is made by a child of its command, which this makes the command's own
/// process be: strace looks at no children.
fn undivided(command: Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "DEWAR_APART_OF=$PPID exec \"$0\" \"$@\""]);
    shell.arg(command.get_program()).args(command.get_args());
    command.get_current_dir().map(|folder| shell.current_dir(folder));
    command.get_envs().filter_map(|(name, value)| Some((name, value?))).for_each(
        |(name, value)| {
            shell.env(name, value);
        },
    );
    shell
}

/// Lets calls of `line` go wrong that are of these kinds and are wanted, some of all, each
/// once.
fn with_each(
    line: &[&str],
    before: Option<&[&str]>,
    (kinds, is_wanted): (&str, fn(&Call) -> bool),
    fault: Fault,
) {
    let lab = common::lab();
    let mut guest = busy(&lab);
    let may_end = line[0] == "restore";
    if may_end {
        lab.dewar(&["checkpoint", "g"]).done();
    }
    let prepare = || {
        if let Some(before) = before {
            lab.dewar(before).done();
        }
    };
    prepare();
    let command = undivided(lab.command(line));
    let (output, mut calls) = calls_of(&command, kinds).expect("strace");
    calls.retain(is_wanted);
    assert!(output.status.success(), "{output:?}");
    assert_not_lost(&lab, &mut guest, may_end, "undisturbed");
    let mut went_wrong = 0;
    let wanted = sample(&format!("calls of {line:?}"), calls.clone(), TRIED).len();
    let step = step_of(calls.len(), TRIED);
    let (mut next, mut runs) = (0, 0);
    while let Some(call) = calls.get(next).cloned().filter(|_| runs < 2 * wanted) {
        prepare();
        let (output, spared) = with_fault(&command, kinds, &call, fault).expect("strace");
        let said = String::from_utf8_lossy(&output.stderr);
        let code = output.status.code();
        let after = format!("{line:?}, {fault:?} at {}: {code:?} {said}", call.text);
        println!("{after}");
        let was_killed = fault == Fault::Killed && spared.is_none();
        assert!(was_killed || matches!(code, Some(0 | 1 | 3 | 4 | 5)), "{after}");
        assert!(was_killed || code == Some(0) || said.contains("dewar: "), "{after}");
        assert_not_lost(&lab, &mut guest, may_end, &after);
        runs += 1;
        match spared {
            // It went on otherwise this time, with fewer calls before that one.
            Some(made) => calls = made.into_iter().filter(is_wanted).collect(),
            None => (next, went_wrong) = (next + step, went_wrong + 1),
        }
    }
    assert!(went_wrong * 2 > wanted, "{went_wrong} of {wanted}");
    prepare();
    lab.dewar(line).done();
    assert_not_lost(&lab, &mut guest, may_end, "in the end");
}

#[test]
fn a_disk_full_at_any_time_of_a_restore_loses_no_guest() {
    without_room(&["restore", "g", "--eager"], Some(&["stop", "g", "--now"]));
}

/// A process that cannot be looked at is not taken for a dead one.
#[test]
fn who_cannot_look_at_processes_runs_no_guest_twice() {
    let looks = |call: &Call| call.text.contains("/proc/") || call.text.contains("\"stat\"");
    for line in [["upgrade", "g"], ["freeze", "g"]] {
        with_each(&line, None, ("openat", looks), Fault::NoDescriptor);
    }
}

/// Nothing of what a checkpoint adds to QEMU is left, whatever it had come to.
#[test]
fn a_checkpoint_killed_at_any_word_about_disks_leaves_nothing_in_qemu() {
    let about_disks = |call: &Call| {
        ["add-fd", "blockdev", "job"].iter().any(|word| call.text.contains(word))
            && !call.text.contains("query-jobs")
    };
    with_each(&["checkpoint", "g", "--full"], None, ("sendmsg", about_disks), Fault::Killed);
}

#[test]
#[ignore = "long: make test-long"]
fn a_disk_full_at_any_time_of_an_upgrade_loses_no_guest() {
    without_room(&["upgrade", "g"], None);
}

#[test]
fn a_disk_full_at_any_time_of_a_freeze_loses_no_guest() {
    without_room(&["freeze", "g"], None);
}

#[test]
#[ignore = "long: make test-long"]
fn a_disk_full_at_any_time_of_a_thaw_loses_no_guest() {
    without_room(&["thaw", "g"], Some(&["freeze", "g"]));
}

#[test]
fn a_disk_full_at_any_time_of_a_checkpoint_loses_no_guest() {
    without_room(&["checkpoint", "g", "--full"], None);
}

/// Also when the guest has moved, and what is its own is being given to its new QEMU.
#[test]
#[ignore = "long: make test-long"]
fn an_upgrade_killed_at_any_change_loses_no_guest() {
    with_each(&["upgrade", "g"], None, (CHANGES, |_| true), Fault::Killed);
}

#[test]
#[ignore = "long: make test-long"]
fn a_freeze_and_a_thaw_killed_at_any_change_lose_no_guest() {
    with_each(&["freeze", "g"], None, (CHANGES, |_| true), Fault::Killed);
    with_each(&["thaw", "g"], Some(&["freeze", "g"]), (CHANGES, |_| true), Fault::Killed);
}
