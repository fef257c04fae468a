//! Guests that somebody else started, as root and as another user.

use crate::common;
use dewar_guest_qemu::Qmp;
use dewar_testkit::{Console, GuestSpec, Lab, Ran, kill, listens, wait_until, wait_while_alive};
use rustix::process::Signal;
use serde_json::json;
use std::ops::{Deref, DerefMut};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Starts a QEMU by hand; `user` by another user's rights.
fn start(lab: &Lab, name: &str, ram: &[&str], user: Option<&str>) -> (ByHand, std::path::PathBuf) {
    let folder = lab.guest_folder(name).expect("folder");
    let spec = GuestSpec { memory_mib: 192, ..GuestSpec::default() };
    let mut line = spec.command(&folder).expect("command");
    line.extend(ram.iter().map(|word| (*word).to_owned()));
    let qmp = folder.join("qmp");
    line.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", qmp.display())]);
    let mut command = match user {
        Some(user) => {
            // The repository may lie where the user cannot look.
            for option in ["-kernel", "-initrd"] {
                let at = line.iter().position(|word| word == option).expect(option) + 1;
                let copy = folder.join(&option[1..]);
                std::fs::copy(&line[at], &copy).expect("copy");
                // Ubuntu's kernels are root's alone.
                Command::new("chmod").arg("644").arg(&copy).status().expect("chmod");
                line[at] = copy.display().to_string();
            }
            for path in [lab.path(), &folder] {
                Command::new("chmod").arg("777").arg(path).status().expect("chmod");
            }
            Command::new("chmod")
                .arg("666")
                .arg(folder.join("disk0.qcow2"))
                .status()
                .expect("chmod");
            let mut command = Command::new("setpriv");
            command.args([
                "--reuid",
                user,
                "--regid",
                "65534",
                "--clear-groups",
                "--inh-caps=-all",
            ]);
            command.args(&line);
            command
        }
        None => {
            let mut command = Command::new(&line[0]);
            command.args(&line[1..]);
            command
        }
    };
    command.current_dir(&folder).stdin(Stdio::null()).stdout(Stdio::null());
    let child = ByHand(command.spawn().expect("QEMU"));
    wait_until("the QMP socket", Duration::from_secs(20), || listens(&qmp));
    (child, qmp)
}

/// A QEMU that a test started, and that does not outlive it.
struct ByHand(Child);

impl ByHand {
    fn end(mut self) {
        self.0.kill().expect("kill");
        self.0.wait().expect("wait");
    }
}

impl Deref for ByHand {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for ByHand {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "long: make test-long"]
fn an_adopted_guest_moves_and_freezes() {
    let lab = common::lab();
    let ram = format!("/dev/shm/adopt-move-{}", std::process::id());
    let object = format!("memory-backend-file,id=m,size=192M,mem-path={ram},share=on");
    let (mut child, qmp) =
        start(&lab, "a", &["-object", &object, "-machine", "memory-backend=m"], None);
    lab.dewar(&["adopt", "a", "--qmp", &qmp.display().to_string()]).done();
    let reach = || Console::connect(&lab.path().join("a/console")).expect("console");
    let mut console = reach();
    console.wait_ready(Duration::from_secs(120)).expect("boots");
    console.ask("check 4000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "a"]).done();
    lab.dewar(&["upgrade", "a"]).done();
    // Of ours: nobody else waits for its end.
    child.wait().expect("the old one has ended");
    reach().ask("verify").expect("consistent after the upgrade");
    let told = lab.dewar(&["checkpoint", "a"]).done().json();
    assert_eq!(told["tracked"], true, "{told}");
    lab.dewar(&["freeze", "a"]).done();
    lab.dewar(&["thaw", "a"]).done();
    reach().ask("verify").expect("consistent after the thaw");
    lab.dewar(&["stop", "a", "--now"]).done();
    std::fs::remove_file(ram).expect("the user's own file stays");
}

/// From a PID namespace where it has no number: a container beside it.
#[test]
fn a_guest_that_cannot_be_seen_is_not_adopted() {
    let lab = common::lab();
    let _guest = lab.run("g", &GuestSpec::default()).expect("guest");
    let qmp = lab.root().join("guests/g/qmp.sock").display().to_string();
    let adopt = lab.command(&["adopt", "a", "--qmp", &qmp]);
    let mut inside = Command::new("unshare");
    inside.args(["--pid", "--fork", "--mount-proc"]).arg(adopt.get_program());
    let ran = Ran::of(&inside.args(adopt.get_args()).output().expect("unshare"));
    ran.failed(1, &["cannot be seen from this PID namespace"]);
}

fn adopt_and_save(user: Option<&str>) {
    let lab = common::lab();
    let ram = format!("/dev/shm/adopt-test-{}-{}", std::process::id(), user.unwrap_or("root"));
    let object = format!("memory-backend-file,id=m,size=192M,mem-path={ram},share=on");
    let (mut child, qmp) =
        start(&lab, "a", &["-object", &object, "-machine", "memory-backend=m"], user);
    let qmp = qmp.display().to_string();
    lab.dewar(&["adopt", "a", "--qmp", &qmp]).done();
    lab.dewar(&["adopt", "b", "--qmp", &qmp]).failed(1, &["guest 'a' already"]);
    let mut console = Console::connect(&lab.path().join("a/console")).expect("console");
    console.wait_ready(Duration::from_secs(120)).expect("boots");
    console.ask("check 8000 1 disk").expect("check");
    for _ in 0..2 {
        lab.dewar(&["checkpoint", "a"]).done();
        console.ask("verify").expect("consistent");
    }
    if let Some(user) = user {
        // Another QEMU would have root's rights.
        for verb in ["upgrade", "freeze"] {
            lab.dewar(&[verb, "a"]).failed(4, &[&format!("user {user}"), "as user 0"]);
        }
        console.ask("verify").expect("consistent");
    }
    kill(child.id() as i32, Signal::KILL);
    child.wait().expect("wait");
    let _ = std::fs::remove_file(&ram);
    lab.dewar(&["restore", "a"]).done();
    let mut console = Console::connect(&lab.path().join("a/console")).expect("console");
    console.ask("verify").expect("consistent after restore");
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_of_root_is_adopted_saved_and_restored() {
    adopt_and_save(None);
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_of_another_user_is_adopted_saved_and_restored() {
    adopt_and_save(Some("65534"));
}

#[test]
fn what_is_missing_is_said_exactly_and_nothing_is_changed() {
    let lab = common::lab();
    let (child, qmp) = start(&lab, "plain", &[], None);
    let qmp = qmp.display().to_string();
    lab.dewar(&["adopt", "plain", "--qmp", &qmp])
        .failed(4, &["'pc.ram' is not a file", "memory-backend-file", "share=on"]);
    assert_eq!(lab.ps("plain"), None);
    // Again: the first try left nothing behind.
    lab.dewar(&["adopt", "plain", "--qmp", &qmp]).failed(4, &["is not a file"]);
    child.end();

    let object = "memory-backend-file,id=m,size=192M,mem-path=/dev/shm";
    let (child, qmp) =
        start(&lab, "private", &["-object", object, "-machine", "memory-backend=m"], None);
    let qmp = qmp.display().to_string();
    lab.dewar(&["adopt", "private", "--qmp", &qmp]).failed(4, &["lacks share=on"]);
    child.end();
    lab.dewar(&["adopt", "x", "--qmp", "/nowhere"]).failed(1, &["/nowhere"]);
}

/// A guest that is forgotten is as it was found.
#[test]
fn a_guest_that_is_forgotten_is_left_as_it_was() {
    let lab = common::lab();
    let ram = format!("/dev/shm/adopt-test-{}-forgotten", std::process::id());
    let object = format!("memory-backend-file,id=m,size=192M,mem-path={ram},share=on");
    let line = ["-object", &object, "-machine", "memory-backend=m"];
    let (child, qmp) = start(&lab, "a", &line, None);
    lab.dewar(&["adopt", "a", "--qmp", &qmp.display().to_string()]).done();
    lab.dewar(&["checkpoint", "a"]).done();
    let bitmaps = || {
        let mut qmp = Qmp::connect(&qmp).expect("QMP");
        let nodes = qmp.execute("query-named-block-nodes", json!({})).expect("nodes").to_string();
        nodes.matches("\"dewar-").count()
    };
    // `uw`: writes to that mapping are tracked (proc_pid_smaps(5)).
    let is_tracked = || {
        let maps = std::fs::read_to_string(format!("/proc/{}/smaps", child.id())).expect("smaps");
        maps.lines().any(|line| line.starts_with("VmFlags:") && line.contains(" uw"))
    };
    assert!(bitmaps() > 0 && is_tracked());
    lab.dewar(&["rm", "a"]).done();
    let left = (bitmaps(), is_tracked());
    child.end();
    let _ = std::fs::remove_file(&ram);
    assert_eq!(left, (0, false));
}

/// A QEMU that took the socket of another is another guest.
#[test]
fn who_answers_on_a_guests_socket_may_be_another() {
    let lab = common::lab();
    let ram = format!("/dev/shm/adopt-test-{}-twice", std::process::id());
    let object = format!("memory-backend-file,id=m,size=192M,mem-path={ram},share=on");
    let options = ["-object", &object, "-machine", "memory-backend=m"];
    let (first, qmp) = start(&lab, "a", &options, None);
    lab.dewar(&["adopt", "a", "--qmp", &qmp.display().to_string()]).done();
    std::fs::remove_file(&qmp).expect("its name");
    let own = format!("unix:{},server=on,wait=off", qmp.display());
    let (second, _) = start(&lab, "b", &["-qmp", &own], None);
    wait_until("the second's socket", Duration::from_secs(20), || listens(&qmp));
    for words in [&["stop", "a"][..], &["checkpoint", "a"], &["freeze", "a"]] {
        lab.dewar(words).failed(1, &["another process"]);
    }
    for mut child in [first, second] {
        assert!(child.try_wait().expect("wait").is_none(), "it runs on");
        child.end();
    }
    let _ = std::fs::remove_file(&ram);
}

#[test]
fn paths_that_a_qemu_left_behind_are_told() {
    let lab = common::lab();
    let ram = format!("/dev/shm/adopt-test-{}-daemon", std::process::id());
    let object = format!("memory-backend-file,id=m,size=192M,mem-path={ram},share=on");
    let pid_file = lab.path().join("pid");
    let path = pid_file.display().to_string();
    let mut options = vec!["-object", &object, "-machine", "memory-backend=m", "-daemonize"];
    options.extend(["-pidfile", &path, "-serial", "file:here.log"]);
    let (mut child, qmp) = start(&lab, "d", &options, None);
    child.wait().expect("wait");
    lab.dewar(&["adopt", "d", "--qmp", &qmp.display().to_string()])
        .failed(4, &["'here.log'", "cannot be known", "was not touched"]);
    let pid = std::fs::read_to_string(&pid_file).expect("pid").trim().parse().expect("pid");
    kill(pid, Signal::KILL);
    wait_while_alive(pid);
    let _ = std::fs::remove_file(&ram);
}

#[test]
#[ignore = "long: make test-long"]
fn ram_in_a_nameless_file_is_found() {
    let lab = common::lab();
    // The path is a folder: QEMU makes a file in it and removes its name.
    let object = "memory-backend-file,id=m,size=192M,mem-path=/dev/shm,share=on";
    let (mut child, qmp) =
        start(&lab, "n", &["-object", object, "-machine", "memory-backend=m"], None);
    lab.dewar(&["adopt", "n", "--qmp", &qmp.display().to_string()]).done();
    let mut console = Console::connect(&lab.path().join("n/console")).expect("console");
    console.wait_ready(Duration::from_secs(120)).expect("boots");
    console.ask("check 8000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "n"]).done();
    let pid = child.id() as i32;
    kill(pid, Signal::KILL);
    child.wait().expect("wait");
    wait_while_alive(pid);
    lab.dewar(&["restore", "n"]).done();
    let mut console = Console::connect(&lab.path().join("n/console")).expect("console");
    console.ask("verify").expect("consistent after restore");
}
