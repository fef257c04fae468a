//! What only one QEMU can have, before and after another one took over: disks,
//! ports, sockets, taps, pid files, logs.

use crate::common::{self, HeldCheckpoint, free_port};
use dewar_guest_qemu::Qmp;
use dewar_testkit::{
    Console, GuestSpec, Lab, Network, TestGuest, kill, next_qemu, rounds, web_load,
};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The other QEMU; where there is none, the same one serves.
fn other() -> String {
    next_qemu().map_or_else(dewar_testkit::qemu, |program| program.display().to_string())
}

fn spec(extra: &[&str]) -> GuestSpec {
    let machine = ["-machine", "pc-q35-7.2"];
    let extra = machine.iter().chain(extra).map(|word| (*word).to_owned()).collect();
    GuestSpec { extra, ..GuestSpec::default() }
}

/// The same of a machine without anything to boot.
fn machine(extra: &[&str]) -> GuestSpec {
    GuestSpec { boots: false, memory_mib: 64, ..spec(extra) }
}

fn upgrade(lab: &Lab, guest: &mut TestGuest, more: &[&str]) -> Value {
    upgrade_to(lab, guest, &other(), more)
}

fn upgrade_to(lab: &Lab, guest: &mut TestGuest, program: &str, more: &[&str]) -> Value {
    let line = [&["upgrade", &guest.name, "--qemu", program], more].concat();
    let told = lab.dewar(&line).done().json();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    told
}

/// The inode of a path, and whether a process has a socket that listens there.
fn answers(path: &Path) -> bool {
    UnixStream::connect(path).is_ok()
}

#[test]
#[ignore = "long: make test-long"]
fn what_users_hold_by_path_or_port_works_after_as_before() {
    let lab = common::lab();
    let at = |name: &str| lab.path().join(name).display().to_string();
    let (pid_file, log, user, monitor) = (at("pid"), at("log"), at("user.qmp"), at("monitor"));
    let (forward, tcp, vnc) = (free_port(), free_port(), free_port().max(5901));
    let spec = spec(&[
        "-pidfile",
        &pid_file,
        "-serial",
        &format!("file:{log}"),
        "-qmp",
        &format!("unix:{user},server=on,wait=off"),
        "-monitor",
        &format!("unix:{monitor},server,nowait"),
        "-chardev",
        &format!("socket,id=t,host=127.0.0.1,port={tcp},server=on,wait=off"),
        "-device",
        "virtio-serial",
        "-device",
        "virtconsole,chardev=t",
        "-vnc",
        &format!("127.0.0.1:{}", vnc - 5900),
        "-netdev",
        &format!("user,id=n0,hostfwd=tcp:127.0.0.1:{forward}-:7"),
        "-device",
        "virtio-net-pci,netdev=n0",
    ]);
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("net 10.0.2.15/24").expect("net");
    guest.console.ask("listen").expect("listen");
    fs::write(&log, "what was logged before\n").expect("log");
    // Somebody lets others use them.
    for path in [&user, &pid_file] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o646)).expect("rights");
        std::os::unix::fs::chown(path, Some(1234), Some(4321)).expect("owner");
    }
    // Without a word nobody's connections end.
    let other = other();
    lab.dewar(&["upgrade", "g", "--qemu", &other])
        .failed(1, &["user-mode networking", "was not touched", "--yes"]);
    let first = lab.pid("g").expect("pid");
    for round in 0..2 {
        let told = upgrade(&lab, &mut guest, &["--yes"]);
        assert_eq!(told["not_handed_over"], json!([]), "{told}");
        let pid = lab.pid("g").expect("pid");
        assert_ne!(pid, first);
        assert_eq!(fs::read_to_string(&pid_file).expect("pid file").trim(), pid.to_string());
        for path in [&user, &pid_file] {
            let data = fs::metadata(path).expect("there");
            assert_eq!(
                (data.mode() & 0o777, data.uid(), data.gid()),
                (0o646, 1234, 4321),
                "{path}"
            );
        }
        for socket in [&user, &monitor] {
            assert!(answers(Path::new(socket)), "{socket} in round {round}");
            assert!(!Path::new(&format!("{socket}~")).exists());
        }
        let mut qmp = Qmp::connect(Path::new(&user)).expect("the user's QMP");
        assert_eq!(qmp.peer_pid().expect("pid"), pid);
        assert_eq!(qmp.execute("query-status", json!({})).expect("status")["running"], true);
        TcpStream::connect(("127.0.0.1", tcp)).expect("the TCP console");
        let mut greeting = [0; 4];
        let mut screen = TcpStream::connect(("127.0.0.1", vnc)).expect("VNC");
        screen.read_exact(&mut greeting).expect("VNC");
        assert_eq!(&greeting, b"RFB ");
        echo_once(SocketAddr::from(([127, 0, 0, 1], forward)));
        // The migration settings are the user's own again.
        let set = qmp.execute("query-migrate-capabilities", json!({})).expect("capabilities");
        let ignores = set.as_array().expect("list").iter();
        assert!(
            ignores
                .filter(|it| it["capability"] == "x-ignore-shared")
                .all(|it| it["state"] == false)
        );
    }
    assert!(fs::read_to_string(&log).expect("log").starts_with("what was logged before\n"));
    lab.dewar(&["stop", "g", "--now"]).done();
}

/// One port on two addresses, each with a socket of its own.
#[test]
fn sockets_on_one_port_keep_their_addresses() {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        println!("SKIPPED sockets_on_one_port_keep_their_addresses: ::1: {error}");
        return;
    }
    let lab = common::lab();
    let port = free_port();
    let of = |id, host| format!("socket,id={id},host={host},port={port},server=on,wait=off");
    let spec = machine(&[
        "-chardev",
        &of("six", "::1"),
        "-chardev",
        &of("four", "127.0.0.1"),
        "-mon",
        "chardev=six,mode=control",
        "-mon",
        "chardev=four,mode=readline",
    ]);
    let mut guest = lab.run("g", &spec).expect("guest");
    for round in 0..2 {
        let greets = |address: &str| {
            let mut stream = TcpStream::connect((address, port)).expect("connect");
            stream.set_read_timeout(Some(Duration::from_secs(5))).expect("timeout");
            let mut first = [0; 8];
            stream.read_exact(&mut first).expect("a greeting");
            first.contains(&b'{')
        };
        assert!(greets("::1") && !greets("127.0.0.1"), "round {round}");
        if round == 0 {
            upgrade(&lab, &mut guest, &[]);
        }
    }
}

/// As libvirt starts its QEMUs.
#[test]
fn a_listener_that_came_as_a_descriptor_goes_along() {
    let lab = common::lab();
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("port");
    let address = listener.local_addr().expect("address");
    let spec = machine(&[
        "-chardev",
        "socket,id=t,fd=9,server=on,wait=off",
        "-device",
        "virtio-serial",
        "-device",
        "virtconsole,chardev=t",
    ]);
    let line = spec.command(&lab.guest_folder("g").expect("folder")).expect("line");
    let run = lab.command(&[&["run", "g", "--"][..], &words(&line)].concat());
    let mut shell = Command::new("sh");
    shell
        .current_dir(lab.path())
        .args(["-c", "exec \"$@\" 9<&0 0</dev/null", "sh"])
        .arg(run.get_program());
    let status = shell.args(run.get_args()).stdin(OwnedFd::from(listener)).status();
    assert!(status.expect("run").success());
    let mut guest = lab.attach("g").expect("guest");
    for round in 0..rounds("upgrades with a listener's descriptor", 3, 2) {
        TcpStream::connect(address).unwrap_or_else(|error| panic!("round {round}: {error}"));
        let told = upgrade(&lab, &mut guest, &[]);
        assert_eq!(told["not_handed_over"], json!([]), "{told}");
    }
    TcpStream::connect(address).expect("after all");
    lab.dewar(&["stop", "g", "--now"]).done();
}

fn words(line: &[String]) -> Vec<&str> {
    line.iter().map(String::as_str).collect()
}

fn echo_once(address: SocketAddr) {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
    say(&mut stream, "hello");
}

fn say(stream: &mut TcpStream, word: &str) {
    stream.write_all(word.as_bytes()).expect("write");
    let mut answer = vec![0; word.len()];
    stream.read_exact(&mut answer).expect("echo");
    assert_eq!(answer, word.as_bytes());
}

#[test]
#[ignore = "long: make test-long"]
fn connections_over_a_tap_stay_open() {
    let network = match Network::new() {
        Ok(network) => network,
        Err(error) => {
            println!("SKIPPED connections_over_a_tap_stay_open: {error}");
            return;
        }
    };
    let lab = common::lab();
    let spec = spec(&[
        "-netdev",
        "tap,id=n0,ifname=tap0,script=no,downscript=no",
        "-device",
        "virtio-net-pci,netdev=n0",
    ]);
    let mut guest = network.within(|| lab.run("g", &spec)).expect("guest");
    guest.console.ask("net 10.9.0.2/24").expect("net");
    guest.console.ask("listen").expect("listen");
    let echo = SocketAddr::from(([10, 9, 0, 2], 7));
    let mut stream = network.within(|| TcpStream::connect(echo)).expect("connect");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
    say(&mut stream, "before");
    // Not while another QEMU has the tap open either, nor when it is gone again.
    for killed in ["new", "dewar"] {
        let held = HeldCheckpoint::at_with(&lab, &["upgrade", "g", "--qemu", &other()], "armed");
        for number in 0..50 {
            say(&mut stream, &format!("while the new one waits {number}"));
        }
        match killed {
            "dewar" => held.kill(),
            _ => {
                let path = lab.root().join("guests/g/handover.json");
                let told: Value =
                    serde_json::from_slice(&fs::read(path).expect("hand-over")).expect("JSON");
                kill(told["new"]["pid"].as_i64().expect("pid") as i32, Signal::KILL);
                assert_eq!(held.go_on().0, 1);
            }
        }
        dewar_testkit::wait_until("the guest is put back", Duration::from_secs(30), || {
            lab.ps("g").expect("listed")["state"] == "running"
        });
        say(&mut stream, "after it");
    }
    guest.console.ask("check 4000 1 disk").expect("check");
    let stop = AtomicBool::new(false);
    let load = std::thread::scope(|scope| {
        let clients = scope.spawn(|| {
            network.within(|| web_load(SocketAddr::from(([10, 9, 0, 2], 80)), 50, &stop))
        });
        let ends = EndsLoad(&stop);
        // There and back.
        let programs = [other(), dewar_testkit::qemu()];
        for (round, program) in programs.iter().cycle().take(4).enumerate() {
            std::thread::sleep(Duration::from_millis(700));
            upgrade_to(&lab, &mut guest, program, &[]);
            say(&mut stream, &format!("after {round}"));
            guest.console.ask("verify").expect("consistent");
        }
        std::thread::sleep(Duration::from_millis(700));
        drop(ends);
        clients.join().expect("clients")
    });
    println!("{} answered, the slowest after {:?}", load.answered, load.slowest);
    assert!(load.failed.is_empty(), "{:?}", load.failed);
    assert!(load.answered > 50, "{load:?}");
    // It was upgraded from outside, and is where it was; it would not be after a thaw there.
    assert!(network.within(|| fs::read_link("/proc/thread-self/ns/net").ok()) == network_of(&lab));
    lab.dewar(&["freeze", "g"]).failed(4, &["network namespace", "was not touched"]);
    network.within(|| {
        lab.dewar(&["freeze", "g"]).done();
        lab.dewar(&["thaw", "g"]).done();
    });
    assert!(network.within(|| fs::read_link("/proc/thread-self/ns/net").ok()) == network_of(&lab));
    lab.dewar(&["stop", "g", "--now"]).done();
}

/// The network namespace of the guest's QEMU.
fn network_of(lab: &Lab) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{}/ns/net", lab.pid("g").expect("pid"))).ok()
}

/// Ends the load, also where the test fails.
struct EndsLoad<'s>(&'s AtomicBool);

impl Drop for EndsLoad<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// As after an update of their package, or of the QEMU that brings them along.
#[test]
#[ignore = "long: make test-long"]
fn a_rom_whose_file_has_another_size_now_is_no_hindrance() {
    let lab = common::lab();
    let rom = lab.path().join("net.rom");
    let change = |kib: usize| fs::write(&rom, vec![0x5a; kib << 10]).expect("ROM");
    change(300);
    let device = format!("virtio-net-pci,romfile={}", rom.display());
    let mut guest = lab.run("g", &spec(&["-device", &device])).expect("guest");
    guest.console.ask("check 2000 1 disk").expect("check");
    change(20);
    upgrade(&lab, &mut guest, &[]);
    guest.console.ask("count").expect("the guest goes on");
    lab.dewar(&["checkpoint", "g"]).done();
    change(100);
    lab.dewar(&["freeze", "g"]).done();
    change(3);
    lab.dewar(&["thaw", "g"]).done();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
    lab.crash("g");
    lab.restore(&mut guest, &["g"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    lab.wait_for_memory("g");
    change(600);
    // A file that is too large is not looked at, or refused before the guest is touched.
    let ran = lab.dewar(&["upgrade", "g", "--qemu", &dewar_testkit::qemu()]);
    if ran.code != 0 {
        ran.failed(1, &["too large", "is running"]);
    }
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
}

/// The names of what QEMU keeps below a path.
fn names_below(qmp: &mut Qmp, path: &str) -> Vec<String> {
    let all = qmp.execute("qom-list", json!({"path": path})).expect("qom-list");
    let all = all.as_array().expect("list").iter().filter(|it| it["type"] != "string");
    all.filter_map(|it| it["name"].as_str().map(str::to_owned)).collect()
}

/// The names of the guest's devices.
fn devices(qmp: &mut Qmp) -> Vec<String> {
    names_below(qmp, "/machine/peripheral")
}

/// Has the guest let a device go.
pub(crate) fn unplug(qmp: &mut Qmp, id: &str) {
    qmp.execute("device_del", json!({"id": id})).expect("asked");
    dewar_testkit::wait_until("the guest lets it go", Duration::from_secs(60), || {
        !devices(qmp).contains(&id.to_owned())
    });
}

#[test]
#[ignore = "long: make test-long"]
fn what_was_plugged_in_or_out_is_so_afterwards() {
    let lab = common::lab();
    let user = lab.path().join("user.qmp");
    let spec = spec(&[
        "-device",
        "pcie-root-port,id=rp1,chassis=1",
        "-device",
        "pcie-root-port,id=rp2,chassis=2",
        "-device",
        "virtio-rng-pci,id=rng,bus=rp2",
        "-qmp",
        &format!("unix:{},server=on,wait=off", user.display()),
    ]);
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("check 2000 1 disk").expect("check");
    let disk = lab.path().join("plugged,1.qcow2");
    let made = std::process::Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .args([disk.as_os_str(), "32M".as_ref()])
        .status();
    assert!(made.expect("qemu-img").success());
    let mut qmp = Qmp::connect(&user).expect("QMP");
    let mut ask = |command: &str, arguments| {
        qmp.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
    };
    let file = json!({"driver": "file", "filename": disk});
    ask("blockdev-add", json!({"driver": "qcow2", "node-name": "late", "file": file}));
    let device = json!({
        "driver": "virtio-blk-pci", "id": "late-disk", "drive": "late", "bus": "rp1",
        "serial": "LATE",
    });
    ask("device_add", device);
    unplug(&mut qmp, "rng");
    drop(qmp);
    for round in 0..3 {
        match round {
            // A checkpoint knows of it as well.
            0 => {
                lab.dewar(&["checkpoint", "g"]).done();
                lab.crash("g");
                lab.restore(&mut guest, &["g"]).expect("restore");
                lab.wait_for_memory("g");
            }
            _ => drop(upgrade(&lab, &mut guest, &[])),
        }
        let mut qmp = Qmp::connect(&user).expect("QMP");
        let now = devices(&mut qmp);
        assert!(
            now.contains(&"late-disk".to_owned()) && !now.contains(&"rng".to_owned()),
            "{now:?}"
        );
        let serial = json!({"path": "/machine/peripheral/late-disk", "property": "serial"});
        assert_eq!(qmp.execute("qom-get", serial).expect("serial"), "LATE");
        guest.console.ask("verify").expect("consistent");
    }
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).done();
    let mut qmp = Qmp::connect(&user).expect("QMP");
    assert!(devices(&mut qmp).contains(&"late-disk".to_owned()));
    // A disk whose content lies elsewhere now is not opened as it was.
    let blocks = qmp.execute("query-block", json!({})).expect("blocks");
    let first = blocks.as_array().expect("list").iter().find(|it| it["device"] == "virtio0");
    let overlay = lab.path().join("snapshot.qcow2");
    let snapshot = json!({
        "device": first.expect("virtio0")["device"], "snapshot-file": overlay, "format": "qcow2",
    });
    qmp.execute("blockdev-snapshot-sync", snapshot).expect("snapshot");
    drop(qmp);
    let other = other();
    for line in [&["upgrade", "g", "--qemu", &other][..], &["freeze", "g"], &["thaw", "g"]] {
        lab.dewar(line).done();
        if line[0] == "freeze" {
            continue;
        }
        let mut qmp = Qmp::connect(&user).expect("QMP");
        let blocks = qmp.execute("query-block", json!({})).expect("blocks");
        let mut files = blocks.as_array().expect("list").iter().map(|it| &it["inserted"]["file"]);
        assert!(files.any(|file| file == &json!(overlay)), "{line:?}: {blocks}");
        guest.console = Console::connect(&guest.folder.join("console")).expect("console");
        guest.console.ask("verify").expect("consistent");
    }
}

/// A network card and its network, plugged in anew under names of the command line but put
/// together otherwise: it comes back as it is, not as that line says.
#[test]
#[ignore = "long: make test-long"]
fn what_took_the_place_of_another_is_told_from_it() {
    let lab = common::lab();
    let user = lab.path().join("user.qmp");
    let spec = spec(&[
        "-device",
        "pcie-root-port,id=rp1,chassis=1",
        "-netdev",
        "user,id=first",
        "-device",
        "virtio-net-pci,id=card,netdev=first,bus=rp1,mac=52:54:00:00:00:01",
        "-qmp",
        &format!("unix:{},server=on,wait=off", user.display()),
    ]);
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("check 2000 1").expect("check");
    let ask = |command: &str, arguments| {
        let mut qmp = Qmp::connect(&user).expect("QMP");
        qmp.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
    };
    ask("device_del", json!({"id": "card"}));
    dewar_testkit::wait_until("the guest lets it go", Duration::from_secs(60), || {
        !devices(&mut Qmp::connect(&user).expect("QMP")).contains(&"card".to_owned())
    });
    ask("netdev_del", json!({"id": "first"}));
    ask("netdev_add", json!({"type": "user", "id": "second", "restrict": true}));
    let card = json!({
        "driver": "virtio-net-pci", "id": "card", "netdev": "second", "bus": "rp1",
        "mac": "52:54:00:00:00:02",
    });
    ask("device_add", card);
    let is_back = |after: &str| {
        for (property, value) in [("netdev", "second"), ("mac", "52:54:00:00:00:02")] {
            let about = json!({"path": path_of("card"), "property": property});
            assert_eq!(ask("qom-get", about), value, "{after}");
        }
        let told = ask("human-monitor-command", json!({"command-line": "info network"}));
        assert!(told.to_string().contains("restrict=on"), "{after}: {told}");
    };
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).done();
    is_back("thaw");
    upgrade(&lab, &mut guest, &["--yes"]);
    is_back("upgrade");
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
}

/// A network that was plugged in comes on the new command line before those that QEMU
/// names by itself: each forwarded port leads to its own all the same.
#[test]
fn ports_lead_to_their_own_networks_where_one_was_plugged_in() {
    let lab = common::lab();
    let (first, second) = (free_port(), free_port());
    let user = lab.path().join("user.qmp");
    let spec = machine(&[
        "-nic",
        &format!("user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{first}-:7"),
        "-device",
        "pcie-root-port,id=rp1,chassis=1",
        "-qmp",
        &format!("unix:{},server=on,wait=off", user.display()),
    ]);
    let mut guest = lab.run("g", &spec).expect("guest");
    let ask = |command: &str, arguments| {
        let mut qmp = Qmp::connect(&user).expect("QMP");
        qmp.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
    };
    let forward = json!([{"str": format!("tcp:127.0.0.1:{second}-:7")}]);
    ask("netdev_add", json!({"type": "user", "id": "late", "hostfwd": forward}));
    ask(
        "device_add",
        json!({"driver": "virtio-net-pci", "netdev": "late", "id": "card", "bus": "rp1"}),
    );
    for round in 0..2 {
        let told = ask("human-monitor-command", json!({"command-line": "info usernet"}));
        let told = told.as_str().expect("text");
        let late = told.split("Hub ").find(|it| it.contains("(late)")).expect("the plugged one");
        let is_in = |text: &str, port: u16| text.contains(&format!(" {port} "));
        assert!(is_in(late, second) && !is_in(late, first), "round {round}: {told}");
        assert!(is_in(told, first), "round {round}: {told}");
        let told = upgrade(&lab, &mut guest, &["--yes"]);
        assert_eq!(told["not_handed_over"], json!([]), "{told}");
    }
}

#[test]
fn a_display_that_no_option_names_keeps_its_port() {
    let test = "a_display_that_no_option_names_keeps_its_port";
    let lab = common::lab();
    let folder = lab.guest_folder("g").expect("folder");
    let user = folder.join("user.qmp");
    let mut line = machine(&[]).command(&folder).expect("command");
    let at = line.iter().position(|word| word == "-display").expect("-display none");
    line.drain(at..at + 2);
    line.extend(["-qmp".to_owned(), format!("unix:{},server=on,wait=off", user.display())]);
    let ran = lab.dewar(&[&["run", "g", "--"], &words(&line)[..]].concat());
    if ran.code != 0 {
        println!("SKIPPED {test}: this QEMU wants a window: {}", ran.stderr.trim());
        return;
    }
    let mut guest = lab.attach("g").expect("guest");
    let ask = || {
        let mut qmp = Qmp::connect(&user).expect("QMP");
        qmp.execute("query-vnc", json!({})).expect("query-vnc")
    };
    let port = ask()["service"].as_str().map(str::to_owned);
    let Some(port) = port else {
        println!("SKIPPED {test}: this QEMU has no display over VNC by itself");
        return;
    };
    for round in 0..2 {
        upgrade(&lab, &mut guest, &[]);
        assert_eq!(ask()["service"], port.as_str(), "round {round}");
        let address = SocketAddr::from(([127, 0, 0, 1], port.parse().expect("a port")));
        let mut screen = TcpStream::connect(address).expect("VNC");
        let mut greeting = [0; 3];
        screen.read_exact(&mut greeting).expect("a greeting");
        assert_eq!(&greeting, b"RFB");
    }
}

/// Devices without a name, by their paths.
fn nameless(qmp: &mut Qmp) -> Vec<String> {
    let below = "/machine/peripheral-anon";
    names_below(qmp, below).into_iter().map(|name| format!("{below}/{name}")).collect()
}

#[test]
#[ignore = "long: make test-long"]
fn only_a_device_that_could_be_plugged_in_again_goes_along() {
    let lab = common::lab();
    let user = lab.path().join("user.qmp");
    let ports =
        ["rp1", "rp2", "rp3"].map(|id| format!("pcie-root-port,id={id},chassis={}", &id[2..]));
    let devices = ["virtio-rng-pci,bus=rp1", "virtio-rng-pci,id=named,bus=rp2"].map(str::to_owned);
    let mut extra = vec!["-qmp".to_owned(), format!("unix:{},server=on,wait=off", user.display())];
    for device in ports.into_iter().chain(devices) {
        extra.extend(["-device".to_owned(), device]);
    }
    let mut guest = lab.run("g", &spec(&words(&extra))).expect("guest");
    guest.console.ask("check 2000 1").expect("check");
    let ask = |command: &str, arguments| {
        let mut qmp = Qmp::connect(&user).expect("QMP");
        qmp.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
    };
    let unplug = |id: &str| {
        ask("device_del", json!({"id": id}));
        dewar_testkit::wait_until("the guest lets it go", Duration::from_secs(60), || {
            let mut qmp = Qmp::connect(&user).expect("QMP");
            qmp.execute("qom-get", json!({"path": path_of(id), "property": "type"})).is_err()
        });
    };
    let other = other();
    let refused = |why: &[&str]| {
        for verb in
            [&["upgrade", "g", "--qemu", &other][..], &["freeze", "g"], &["checkpoint", "g"]]
        {
            lab.dewar(verb).failed(4, why);
        }
        assert_eq!(lab.ps("g").expect("listed")["state"], "running");
    };
    let given = nameless(&mut Qmp::connect(&user).expect("QMP"));
    ask("device_add", json!({"driver": "virtio-balloon-pci", "bus": "rp3"}));
    refused(&["virtio-balloon-pci", "without an id"]);
    let now = nameless(&mut Qmp::connect(&user).expect("QMP"));
    unplug(now.iter().find(|path| !given.contains(path)).expect("plugged in"));
    // Under a name of the command line, but another.
    unplug("named");
    // What stands on something that only the command line could make again.
    ask("object-add", json!({"qom-type": "can-bus", "id": "late"}));
    let can = json!({"driver": "kvaser_pci", "id": "named", "bus": "rp2", "canbus": "late"});
    ask("device_add", can);
    refused(&["'late'", "added to it since"]);
    unplug("named");
    // The guest knows of that feature: a device without it would not take its state.
    ask(
        "device_add",
        json!({
            "driver": "virtio-balloon-pci", "id": "named", "bus": "rp2", "deflate-on-oom": true,
        }),
    );
    // Nor would one with another maker's number, or with a ROM.
    let card = json!({
        "driver": "e1000e", "id": "card", "bus": "rp3", "subsys_ven": 0x1234, "romfile": "",
        "mac": "52:54:00:12:34:99",
    });
    ask("device_add", card);
    upgrade(&lab, &mut guest, &[]);
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).done();
    let kind = ask("qom-get", json!({"path": path_of("named"), "property": "type"}));
    assert_eq!(kind, "virtio-balloon-pci");
    for (id, property, value) in [
        ("named", "deflate-on-oom", json!(true)),
        ("card", "subsys_ven", json!(0x1234)),
        ("card", "romfile", json!("")),
    ] {
        let about = json!({"path": path_of(id), "property": property});
        assert_eq!(ask("qom-get", about), value, "{property} of {id}");
    }
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
    let rng = given
        .iter()
        .find(|path| ask("qom-get", json!({"path": path, "property": "type"})) == "virtio-rng-pci");
    unplug(rng.expect("given"));
    refused(&["has no id", "unplugged"]);
    guest.console.ask("verify").expect("consistent");
}

fn scsi_id(qmp: &mut Qmp, path: &str) -> Option<u64> {
    let asked = json!({"path": path, "property": "scsi-id"});
    qmp.execute("qom-get", asked).ok()?.as_u64()
}

/// Of devices on one bus, whose places nobody chose, the first is unplugged; then it comes
/// back to another place.
#[test]
#[ignore = "long: make test-long"]
fn devices_keep_their_places_when_one_before_them_is_gone() {
    let lab = common::lab();
    let user = lab.path().join("user.qmp");
    let mut extra = vec!["-qmp".to_owned(), format!("unix:{},server=on,wait=off", user.display())];
    let mut option = |words: [&str; 2]| extra.extend(words.map(str::to_owned));
    option(["-debugcon", "null"]);
    option(["-device", "qemu-xhci,id=usb"]);
    option(["-device", "usb-kbd,id=keys"]);
    option(["-device", "usb-tablet,id=tablet"]);
    option(["-device", "virtio-scsi-pci,id=hba"]);
    for (number, name) in ["id=first", "id=second", "serial=third"].iter().enumerate() {
        let disk = lab.path().join(format!("disk{number}"));
        fs::write(&disk, [0; 1 << 16]).expect("disk");
        let file = format!("file.driver=file,file.filename={}", disk.display());
        option(["-blockdev", &format!("raw,node-name=disk{number},{file}")]);
        option(["-device", &format!("scsi-hd,drive=disk{number},{name}")]);
    }
    let mut guest = lab.run("g", &spec(&words(&extra))).expect("guest");
    guest.console.ask("check 2000 1").expect("check");
    let ask = |command: &str, arguments| {
        let mut qmp = Qmp::connect(&user).expect("QMP");
        qmp.execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
    };
    // SCSI numbers, that of the nameless disk last, and what is told of USB.
    let places = || {
        let mut qmp = Qmp::connect(&user).expect("QMP");
        let named = ["first", "second"].map(|id| scsi_id(&mut qmp, &path_of(id)));
        let third = nameless(&mut qmp).iter().find_map(|path| scsi_id(&mut qmp, path));
        let usb = json!({"command-line": "info usb"});
        let usb = qmp.execute("human-monitor-command", usb).expect("info usb");
        let ports = usb.as_str().expect("text").lines().filter_map(|line| line.split(", ").nth(1));
        (named, third, ports.map(str::to_owned).collect::<Vec<_>>())
    };
    let moves = |guest: &mut TestGuest, wanted| {
        for round in 0..2 {
            match round {
                0 => {
                    lab.dewar(&["freeze", "g"]).done();
                    lab.dewar(&["thaw", "g"]).done();
                }
                _ => drop(upgrade(&lab, guest, &[])),
            }
            assert_eq!(places(), wanted, "{round}");
        }
        guest.console = Console::connect(&guest.folder.join("console")).expect("console");
        guest.console.ask("verify").expect("consistent");
    };
    let both = ["Port 1", "Port 2"].map(str::to_owned).to_vec();
    assert_eq!(places(), ([Some(0), Some(1)], Some(2), both));
    for id in ["first", "keys"] {
        ask("device_del", json!({"id": id}));
    }
    moves(&mut guest, ([None, Some(1)], Some(2), vec!["Port 2".to_owned()]));
    ask("device_del", json!({"id": "second"}));
    for (id, disk) in [("second", "disk1"), ("first", "disk0")] {
        let device = json!({"driver": "scsi-hd", "id": id, "drive": disk});
        let mut qmp = Qmp::connect(&user).expect("QMP");
        dewar_testkit::wait_until("the disk is let go", Duration::from_secs(60), || {
            qmp.execute("device_add", device.clone()).is_ok()
        });
    }
    moves(&mut guest, ([Some(1), Some(0)], Some(2), vec!["Port 2".to_owned()]));
    // Of that one QEMU does not tell on which disk it stands.
    let stick = lab.path().join("stick");
    fs::write(&stick, [0; 1 << 16]).expect("disk");
    let file = json!({"driver": "file", "filename": stick});
    ask("blockdev-add", json!({"driver": "raw", "node-name": "late", "file": file}));
    ask("device_add", json!({"driver": "usb-storage", "id": "stick", "drive": "late"}));
    for verb in ["freeze", "checkpoint"] {
        lab.dewar(&[verb, "g"]).failed(4, &["'stick'", "usb-storage"]);
    }
}

#[test]
#[ignore = "long: make test-long"]
fn what_cannot_be_told_its_place_is_refused_where_another_s_is_free() {
    let lab = common::lab();
    let user = lab.path().join("user.qmp");
    let spec = spec(&[
        "-machine",
        "pc",
        "-device",
        "virtio-rng-pci,id=before",
        "-qmp",
        &format!("unix:{},server=on,wait=off", user.display()),
    ]);
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("check 2000 1 disk").expect("check");
    let mut qmp = Qmp::connect(&user).expect("QMP");
    unplug(&mut qmp, "before");
    let other = other();
    for verb in [&["upgrade", "g", "--qemu", &other][..], &["freeze", "g"], &["checkpoint", "g"]] {
        lab.dewar(verb).failed(4, &["unplugged", "-drive", "would get its place"]);
    }
    guest.console.ask("verify").expect("consistent");
}

/// Where QEMU keeps a device.
fn path_of(id: &str) -> String {
    if id.starts_with('/') { id.to_owned() } else { format!("/machine/peripheral/{id}") }
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_that_stands_still_stands_still_afterwards() {
    let lab = common::lab();
    let user = lab.path().join("user.qmp");
    // Two RAM files, and a QEMU that puts itself in the background.
    let spec = spec(&[
        "-object",
        "memory-backend-ram,id=m0,size=128M",
        "-object",
        "memory-backend-ram,id=m1,size=128M,prealloc=on",
        "-numa",
        "node,memdev=m0",
        "-numa",
        "node,memdev=m1",
        "-daemonize",
        "-qmp",
        &format!("unix:{},server=on,wait=off", user.display()),
    ]);
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("check 4000 1 disk").expect("check");
    lab.dewar(&["checkpoint", "g"]).done();
    let mut qmp = Qmp::connect(&user).expect("QMP");
    qmp.execute("stop", json!({})).expect("stop");
    drop(qmp);
    let ram = common::ram_now(&lab, "g");
    let verbs: [&[&str]; 2] = [&["upgrade", "g"], &["freeze", "g"]];
    for verb in verbs {
        let program = other();
        let line = match verb[0] {
            "upgrade" => [verb, &["--qemu", &program]].concat(),
            _ => verb.to_vec(),
        };
        lab.dewar(&line).done();
        if verb[0] == "freeze" {
            assert_eq!(lab.dewar(&["thaw", "g"]).done().json()["paused"], true);
        }
        assert_eq!(lab.ps("g").expect("listed")["state"], "paused", "{verb:?}");
        // Neither starting a QEMU nor loading its devices writes to RAM.
        assert!(common::ram_now(&lab, "g") == ram, "RAM changed by {verb:?}");
    }
    let mut qmp = Qmp::connect(&user).expect("QMP");
    qmp.execute("cont", json!({})).expect("cont");
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
    let told = common::assert_exact(&lab, &mut guest, "after both");
    assert_eq!(told["tracked"], true, "{told}");
}
