//! Guests and processes with deadlines, beside programs that take all CPU time that
//! they can get: what they are promised, and that it is always given back.

use crate::common;
use crate::common::deadlines::{
    FIFO, SOON, Sleeper, alone, bytes_hashed_in_a_ms, controller, hashing_guest, main_thread, qos,
    release, runtime, scheduling, status, vcpus, watchdog_of,
};
use dewar_kernel::{Scheduling, Task, threads_of};
use dewar_testkit::{
    Console, GuestSpec, Hogs, Lab, PeriodicTask, is_alive, kill, next_qemu, wait_until,
    wait_while_alive,
};
use rustix::process::Signal;
use serde_json::Value;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[test]
#[ignore = "long: make test-long"]
fn a_process_is_promised_more_when_it_needs_more_and_less_again() {
    let (_alone, lab) = alone();
    let _hogs = Hogs::start(4).expect("hogs");
    let hashed = bytes_hashed_in_a_ms(&lab);
    // A job has 33 ms, and is promised at most 26.7.
    let (low, high) = (6 * hashed, 17 * hashed);
    let port = lab.root().join("qos/p.sock");
    let steps = [(3.0, low), (5.0, high), (6.0, low)];
    let log = lab.path().join("log");
    let task = PeriodicTask::start(30.0, &steps, &port, &log).expect("task");
    let thread = main_thread(task.pid());
    let before = scheduling(thread);
    qos(&lab, "p", task.pid(), &[]).done();
    let (mut seen, mut demands) = (Vec::<Duration>::new(), Vec::new());
    while let Some(runtime) =
        runtime(thread).or_else(|| is_alive(task.pid()).then_some(Duration::ZERO))
    {
        seen.push(runtime);
        if seen.len() % 10 == 0 {
            demands.extend(status(&lab, "p").and_then(|it| it["demand_cpus"].as_f64()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let jobs = task.finish().expect("jobs");
    wait_until("the controller's end", SOON, || status(&lab, "p").is_none());
    let cpu = |bytes: u64| {
        let mut times: Vec<u64> =
            jobs.iter().filter(|job| job.bytes == bytes).map(|job| job.cpu_us).collect();
        times.sort_unstable();
        Duration::from_micros(times[times.len() / 2])
    };
    let missed = jobs.iter().filter(|job| job.response_us > 33_333).count();
    println!(
        "{missed} of {} jobs missed; hashes take {:?} and {:?}",
        jobs.len(),
        cpu(low),
        cpu(high)
    );
    let near = |need: Duration| {
        let fits = |it: &&Duration| **it >= need && **it < need.mul_f64(1.4);
        seen.iter().filter(fits).count()
    };
    // Each holds for some seconds, looked at 20 times a second.
    assert!(near(cpu(high)) > 20, "{seen:?}");
    assert!(near(cpu(low)) > 40, "{seen:?}");
    for need in [cpu(low), cpu(high)].map(|it| it.as_secs_f64() * 30.0) {
        let tells = demands.iter().filter(|it| (0.95 * need..1.3 * need).contains(*it)).count();
        assert!(tells > 1, "{need}: {demands:?}");
    }
    assert!(seen.iter().all(|it| *it <= Duration::from_micros(26_700)), "beyond --max: {seen:?}");
    assert_eq!(before.reservation, None);
}

/// A shell that waits for a word, and then for a child that is always busy.
struct Family(Child);

impl Family {
    fn new() -> Self {
        let shell = "read go; while :; do :; done & wait";
        let mut command = Command::new("sh");
        Self(command.args(["-c", shell]).stdin(Stdio::piped()).spawn().expect("sh"))
    }

    fn parent(&self) -> Task {
        main_thread(self.0.id() as i32)
    }

    fn child(&self) -> Option<Task> {
        let children = format!("/proc/{0}/task/{0}/children", self.0.id());
        let children = std::fs::read_to_string(children).unwrap_or_default();
        children.split_whitespace().next().and_then(|pid| pid.parse().ok()).map(main_thread)
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        self.child().iter().for_each(|child| kill(child.process, Signal::KILL));
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "long: make test-long"]
fn a_thread_that_has_no_jobs_makes_room_for_one_that_works() {
    let (_alone, lab) = alone();
    let mut family = Family::new();
    let waits = family.parent();
    // Nobody is busy yet.
    qos(&lab, "p", waits.process, &[]).done();
    assert!(runtime(waits).is_some());
    family.0.stdin.take().expect("stdin").write_all(b"go\n").expect("go");
    let works = || family.child().is_some_and(|child| runtime(child).is_some());
    // While no jobs are done nothing changes.
    std::thread::sleep(Duration::from_secs(5));
    assert!(!works() && runtime(waits).is_some());
    let mut port = UnixStream::connect(lab.root().join("qos/p.sock")).expect("port");
    port.write_all(b"dewar 1\n").expect("hello");
    wait_until("the one that works has it", Duration::from_secs(20), || {
        port.write_all(b"job 1 met 20000\n").expect("beat");
        works()
    });
    assert_eq!(scheduling(waits), Scheduling::ordinary(0));
    release(&lab, "p");
    assert!(!works());
}

#[test]
#[ignore = "long: make test-long"]
fn a_job_that_is_larger_than_any_before_is_let_run_on_for_a_while() {
    let (_alone, lab) = alone();
    let _hogs = Hogs::start(4).expect("hogs");
    let port = lab.root().join("qos/p.sock");
    let log = lab.path().join("log");
    let hashed = bytes_hashed_in_a_ms(&lab);
    let steps = [(2.0, 3), (1.0, 8), (1.0, 13), (2.0, 3)].map(|(time, ms)| (time, ms * hashed));
    let task = PeriodicTask::start(30.0, &steps, &port, &log).expect("task");
    let pid = task.pid().to_string();
    let serving = lab
        .command(&["qos", "p", "--pid", &pid, "--target", "30/s"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("qos");
    let mut longest = Duration::ZERO;
    let mut since: Option<Instant> = None;
    while let Ok(how) = main_thread(task.pid()).scheduling() {
        let now = Instant::now();
        since = (how.policy == FIFO).then(|| since.unwrap_or(now));
        longest = longest.max(since.map_or(Duration::ZERO, |since| now - since));
        std::thread::sleep(Duration::from_micros(500));
        if !is_alive(task.pid()) {
            break;
        }
    }
    drop(task.finish().expect("jobs"));
    let told = serving.wait_with_output().expect("end").stdout;
    let told: Value = serde_json::from_slice(&told).expect("one object");
    println!("let run on {} times, for {longest:?} at most", told["rescued"]);
    assert!(told["rescued"].as_u64() >= Some(1), "{told}");
    // 80 % of a period, and what it takes this test and the controller to see the end: they may wait for a CPU.
    assert!(longest < Duration::from_millis(500), "{longest:?}");
}

#[test]
#[ignore = "long: make test-long"]
fn what_runs_while_no_jobs_are_done_is_no_jobs_demand() {
    let (_alone, lab) = alone();
    let busy = Hogs::start(1).expect("a busy program");
    qos(&lab, "p", busy.pids()[0], &[]).done();
    let mut port = UnixStream::connect(lab.root().join("qos/p.sock")).expect("port");
    port.write_all(b"dewar 1\n").expect("hello");
    // What was told while there were jobs.
    let mut beat = || {
        let mut told = Vec::new();
        for number in 0..60 {
            writeln!(port, "job {number} met 20000").expect("beat");
            std::thread::sleep(Duration::from_millis(33));
            if number % 10 == 9 {
                told.extend(status(&lab, "p").and_then(|it| it["demand_cpus"].as_f64()));
            }
        }
        told
    };
    beat();
    std::thread::sleep(Duration::from_secs(3));
    let told = beat();
    assert!(told.iter().any(|demand| *demand > 0.1), "{told:?}");
    assert!(told.iter().all(|demand| *demand < 1.5), "{told:?}");
    release(&lab, "p");
}

#[test]
fn two_reservations_of_one_thread_are_refused() {
    let (_alone, lab) = alone();
    let sleeper = Sleeper::new();
    qos(&lab, "one", sleeper.pid(), &[]).done();
    qos(&lab, "two", sleeper.pid(), &[]).failed(1, &["another 'dewar qos'"]);
    // The first still hears.
    let mut port = UnixStream::connect(lab.root().join("qos/one.sock")).expect("port");
    qos(&lab, "one", sleeper.pid(), &[]).failed(1, &["another 'dewar qos'"]);
    writeln!(port, "job 1 missed 5").expect("tell");
    drop(UnixStream::connect(lab.root().join("qos/one.sock")).expect("still there"));
    wait_until("a heartbeat", SOON, || status(&lab, "one").expect("listed")["jobs"] == 1);
    let log = lab.root().join("qos/one.log");
    assert!(log.exists());
    release(&lab, "one");
    wait_until("the end of its log", SOON, || !log.exists());
    assert_eq!(scheduling(main_thread(sleeper.pid())), Scheduling::ordinary(0));
    lab.dewar(&["qos", "nobody", "--target", "1/s", "--detach"]).failed(3, &["no guest"]);
    let odd = qos(&lab, "p", sleeper.pid(), &["--patience", "3"]);
    odd.failed(2, &["--law stepwise"]);
    qos(&lab, "p", sleeper.pid(), &["--watch"]).failed(2, &["--watch is for --status"]);
    assert_eq!(scheduling(main_thread(sleeper.pid())), Scheduling::ordinary(0));
    assert_eq!(lab.dewar(&["qos", "--status"]).json()["promised_cpus"].to_string(), "0.0");
}

#[test]
fn who_does_not_fit_is_refused_and_told_what_would() {
    let (_alone, lab) = alone();
    let (one, two, three) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
    let limit = lab.dewar(&["qos", "--status"]).json()["limit_cpus"].as_f64().expect("limit");
    // All that can be promised but a quarter of a CPU.
    let share = format!("{:.1}%", (limit - 0.25) * 50.0);
    qos(&lab, "one", one.pid(), &["--max", &share]).done();
    qos(&lab, "two", two.pid(), &["--max", &share]).done();
    let told = lab.dewar(&["qos", "--status"]).json();
    assert_eq!(told["reservations"].as_array().map(Vec::len), Some(2));
    assert!((told["headroom_cpus"].as_f64().expect("headroom") - 0.25).abs() < 0.01, "{told}");
    let refused = qos(&lab, "three", three.pid(), &["--max", "50%"]);
    let refused = refused.failed(1, &["50 % of a CPU cannot be promised", "one", "two"]);
    assert!(refused.stderr.contains("with 50 % of its --max"), "{}", refused.stderr);
    assert_eq!(scheduling(main_thread(three.pid())).reservation, None);
    qos(&lab, "three", three.pid(), &["--max", "20%"]).done();
    assert!(runtime(main_thread(three.pid())).is_some());
    release(&lab, "three");
    assert_eq!(scheduling(main_thread(three.pid())).reservation, None);
    let again = qos(&lab, "one", one.pid(), &[]);
    again.failed(1, &["another 'dewar qos'"]);
    // Admitted beyond the rule it gets what the kernel has left.
    let others = [&one, &two].map(|sleeper| main_thread(sleeper.pid()));
    wait_until("both", SOON, || others.iter().all(|thread| runtime(*thread).is_some()));
    qos(&lab, "three", three.pid(), &["--max", "50%", "--overcommit"]).done();
    let granted = runtime(main_thread(three.pid())).expect("reserved");
    assert!(granted < Duration::from_millis(15), "{granted:?}");
    ["one", "two", "three"].iter().for_each(|name| release(&lab, name));
    for sleeper in [&one, &two, &three] {
        assert_eq!(scheduling(main_thread(sleeper.pid())), Scheduling::ordinary(0));
    }
    lab.dewar(&["qos", "nobody", "--release"]).failed(3, &["no reservation"]);
    lab.dewar(&["qos", "nobody", "--pid", "999999999", "--target", "1/s"]).failed(3, &[]);
}

#[test]
fn a_kill_of_any_process_gives_the_threads_back() {
    let (_alone, lab) = alone();
    let sleeper = Sleeper::new();
    let thread = main_thread(sleeper.pid());
    thread.schedule(Scheduling::ordinary(3)).expect("nice");
    // The controller: its watchdog sees to it.
    qos(&lab, "p", sleeper.pid(), &[]).done();
    assert!(runtime(thread).is_some());
    kill(controller(&lab, "p"), Signal::KILL);
    wait_until("the watchdog", SOON, || runtime(thread).is_none());
    assert_eq!(scheduling(thread), Scheduling::ordinary(3));
    // Both: the next command finds it.
    qos(&lab, "p", sleeper.pid(), &[]).done();
    let pid = controller(&lab, "p");
    let watchdog = watchdog_of(pid);
    kill(watchdog, Signal::KILL);
    kill(pid, Signal::KILL);
    wait_while_alive(pid);
    assert!(runtime(thread).is_some(), "nobody was left");
    lab.dewar(&["ps"]).done();
    assert_eq!(scheduling(thread), Scheduling::ordinary(3));
    // The watchdog alone: the guest is served on.
    qos(&lab, "p", sleeper.pid(), &[]).done();
    kill(watchdog_of(controller(&lab, "p")), Signal::KILL);
    assert!(status(&lab, "p").is_some());
    // The guest.
    let pid = controller(&lab, "p");
    drop(sleeper);
    wait_while_alive(pid);
    assert!(status(&lab, "p").is_none());
}

#[test]
fn a_controller_that_is_stopped_holds_nobody_ahead() {
    let (_alone, lab) = alone();
    let (port, log) = (lab.root().join("qos/p.sock"), lab.path().join("log"));
    // The controller lets the task run on when the task suddenly needs more. It does that sixty times.
    let hashed = bytes_hashed_in_a_ms(&lab);
    let (low, high) = (4 * hashed, 18 * hashed);
    let jumps = [(0.7, high), (1.0, low)].repeat(60);
    let steps = [vec![(2.0, low)], jumps, vec![(60.0, low)]].concat();
    let task = PeriodicTask::start(30.0, &steps, &port, &log).expect("task");
    let thread = main_thread(task.pid());
    qos(&lab, "p", task.pid(), &[]).done();
    let pid = controller(&lab, "p");
    // Of a terminal it takes no notice.
    kill(pid, Signal::TSTP);
    let is_ahead = || scheduling(thread).policy == FIFO;
    let began = Instant::now();
    let stopped = || {
        kill(pid, Signal::STOP);
        wait_until("the stop", SOON, || dewar_testkit::signal_stop(pid));
        is_ahead()
    };
    while !(is_ahead() && stopped()) {
        kill(pid, Signal::CONT);
        assert!(began.elapsed() < Duration::from_secs(90), "it was never let run on");
        std::thread::sleep(Duration::from_micros(200));
    }
    wait_until("the watchdog", Duration::from_secs(10), || !is_ahead());
    release(&lab, "p");
    assert_eq!(scheduling(thread), Scheduling::ordinary(0));
}

#[test]
fn a_guest_that_lies_or_floods_hurts_only_itself() {
    let (_alone, lab) = alone();
    let _hogs = Hogs::start(2).expect("hogs");
    let hashed = bytes_hashed_in_a_ms(&lab);
    // The host may stand still of itself; what a liar costs is there each time.
    assert!(
        (0..3).any(|_| few_are_missed_beside_a_liar(&lab, hashed)),
        "the other misses its deadlines"
    );
}

/// Whether another process meets its deadlines beside one that lies and floods.
fn few_are_missed_beside_a_liar(lab: &Lab, hashed_in_a_ms: u64) -> bool {
    let (victims_port, log) = (lab.root().join("qos/victim.sock"), lab.path().join("log"));
    let steps = [(8.0, 5 * hashed_in_a_ms)];
    let victim = PeriodicTask::start(30.0, &steps, &victims_port, &log);
    let victim = victim.expect("task");
    qos(lab, "victim", victim.pid(), &["--max", "60%"]).done();
    // Busy all the time: it would use whatever it got.
    let hog = Hogs::start(1).expect("hog");
    let thread = main_thread(hog.pids()[0]);
    qos(lab, "p", thread.process, &["--max", "40%", "--min", "10%"]).done();
    let mut port = UnixStream::connect(lab.root().join("qos/p.sock")).expect("port");
    // All is missed, by ages; then nonsense; then far too much.
    for number in 0..30u64 {
        let late = u64::MAX / 2 + number;
        writeln!(port, "job {number} missed {late}").expect("tell");
        std::thread::sleep(Duration::from_millis(20));
    }
    let max = Duration::from_micros(13_334);
    let at_most = |max: Duration| match scheduling(thread).reservation {
        Some(it) => it.runtime <= max,
        // Let run on, within the same bound.
        None => scheduling(thread).policy == FIFO,
    };
    assert!(at_most(max));
    let ran = || thread.ran().expect("running");
    let (before, began) = (ran(), Instant::now());
    for number in 0..60 {
        writeln!(port, "job {number} missed 1").expect("tell");
        std::thread::sleep(Duration::from_millis(33));
    }
    let share = (ran() - before).div_duration_f64(began.elapsed());
    println!("the guest used {:.1} % of a CPU, of 40 at most", share * 100.0);
    assert!(share < 0.45, "{share}");
    writeln!(port, "job 31 met {}", u64::MAX).expect("tell");
    port.write_all(&[0xff; 5000]).expect("tell");
    port.set_nonblocking(true).expect("nonblocking");
    let pid = controller(lab, "p");
    let both = || [thread, main_thread(pid)].map(|task| task.ran().expect("running"));
    let (before, began) = (both(), Instant::now());
    while began.elapsed() < Duration::from_secs(3) {
        let _ = port.write(b"job 1 missed 5\njob 2 met 5\nnonsense\n\xff\xff\n");
    }
    let (after, took) = (both(), began.elapsed());
    let [guests, controllers] = [0, 1].map(|it| (after[it] - before[it]).div_duration_f64(took));
    println!("the guest used {:.1} %, the controller {:.1}", guests * 100.0, controllers * 100.0);
    assert!(guests < 0.45 && controllers < 0.2, "{guests}, {controllers}");
    wait_until("ignored lines", SOON, || {
        status(lab, "p").is_some_and(|told| told["ignored"].as_u64() > Some(100))
    });
    let told = status(lab, "p").expect("listed");
    assert!(told["jobs"].as_u64() < Some(800), "{told}");
    assert!(at_most(max));
    let jobs = victim.finish().expect("jobs");
    // But those of before, and while its demand is learnt.
    let missed = jobs.iter().skip(60).filter(|job| job.response_us > 33_333).count();
    println!("the other missed {missed} of {}", jobs.len());
    assert!(jobs.len() > 200, "{}", jobs.len());
    release(lab, "p");
    assert_eq!(scheduling(thread), Scheduling::ordinary(0));
    missed * 20 < jobs.len()
}

/// Whether a process is in a control group with this in its path.
fn is_in(process: i32, group: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/cgroup")).expect("cgroup").contains(group)
}

/// A control group for CPU time that a test made, below the one that it is in itself.
struct Nested(PathBuf);

impl Nested {
    fn with(process: i32) -> Self {
        let groups = std::fs::read_to_string("/proc/self/cgroup").expect("cgroup");
        let of = |controllers: &str| {
            let mut lines = groups.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>());
            let line = lines.find(|line| line[1].split(',').any(|it| it == controllers));
            line.map(|line| line[2].to_owned())
        };
        let version_1 = of("cpu").map(|own| ("/sys/fs/cgroup/cpu", own));
        let version_2 = || of("").map(|own| ("/sys/fs/cgroup", own));
        let (mount, own) = version_1.or_else(version_2).expect("a group");
        let name = format!("nested-{process}");
        let path = PathBuf::from(format!("{mount}{}/{name}", own.trim_end_matches('/')));
        std::fs::create_dir(&path).expect("a group");
        std::fs::write(path.join("cgroup.procs"), process.to_string()).expect("moved");
        Self(path)
    }

    fn name(&self) -> String {
        format!("/{}", self.0.file_name().expect("name").to_string_lossy())
    }
}

impl Drop for Nested {
    fn drop(&mut self) {
        // A process that was just killed is in it a little longer.
        let began = Instant::now();
        while std::fs::remove_dir(&self.0).is_err() && began.elapsed() < SOON {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn without_deadlines_the_weight_of_a_group_does() {
    let (_alone, lab) = alone();
    let sleeper = Sleeper::new();
    let group = || is_in(sleeper.pid(), "/dewar-weighed");
    let ran = qos(&lab, "weighed", sleeper.pid(), &["--by", "weight"]);
    if ran.code == 4 {
        println!("SKIPPED without_deadlines_the_weight_of_a_group_does: {}", ran.stderr.trim());
        return;
    }
    ran.done();
    assert!(group());
    assert!(weight(sleeper.pid()) > 1.5, "it weighs more than others");
    let mut family = Family::new();
    family.0.stdin.take().expect("stdin").write_all(b"go\n").expect("go");
    wait_until("a child", SOON, || family.child().is_some());
    let child = family.child().expect("a child").process;
    // In a group of its own within the parent's, as of a container in a container.
    let nested = Nested::with(child);
    assert!(!is_in(child, "/dewar-family") && is_in(child, &nested.name()));
    qos(&lab, "family", family.parent().process, &["--by", "weight"]).done();
    assert!(is_in(child, "/dewar-family") && is_in(family.parent().process, "/dewar-family"));
    release(&lab, "family");
    assert!(!is_in(family.parent().process, "/dewar-family") && is_in(child, &nested.name()));
    drop(family);
    assert_eq!(status(&lab, "weighed").expect("listed")["by"], "weight");
    assert_eq!(runtime(main_thread(sleeper.pid())), None);
    release(&lab, "weighed");
    assert!(!group());
    // A thread that may not run everywhere cannot have deadlines.
    let set = Command::new("taskset").args(["-cp", "0", &sleeper.pid().to_string()]).output();
    assert!(set.expect("taskset").status.success());
    let refused = qos(&lab, "weighed", sleeper.pid(), &["--by", "deadline"]);
    refused.failed(4, &["may not run on all CPUs"]);
    qos(&lab, "weighed", sleeper.pid(), &[]).done();
    assert!(group());
    kill(controller(&lab, "weighed"), Signal::KILL);
    wait_until("the watchdog", SOON, || !group());
}

/// What the group of a process weighs, as a multiple of the usual weight.
fn weight(pid: i32) -> f64 {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("groups");
    let paths = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let files = paths.flat_map(|path| {
        [("/cpu", "cpu.shares", 1024.0), ("", "cpu.weight", 100.0)].map(|(mount, file, usual)| {
            (PathBuf::from(format!("/sys/fs/cgroup{mount}{path}/{file}")), usual)
        })
    });
    let ours = |(path, _): &(PathBuf, f64)| path.to_string_lossy().contains("/dewar-");
    let (path, usual) = files.filter(ours).find(|(path, _)| path.exists()).expect("a group");
    let told = std::fs::read_to_string(path).expect("its weight");
    told.trim().parse::<f64>().expect("a number") / usual
}

#[test]
#[ignore = "long: make test-long"]
fn the_vcpus_of_a_guest_and_of_its_next_qemu() {
    let (_alone, lab) = alone();
    let _hogs = Hogs::start(3).expect("hogs");
    let mut guest = hashing_guest(&lab, "g", 2);
    lab.dewar(&["qos", "g", "--target", "10/s", "--max", "70%", "--detach"]).done();
    assert_eq!(vcpus(&lab, "g").len(), 2);
    // What is not a vCPU goes before the hogs.
    let nice = |task: Task| scheduling(task).nice;
    let pid = lab.pid("g").expect("pid");
    assert_eq!(nice(main_thread(pid)), -10);
    wait_until("heartbeats", SOON, || {
        status(&lab, "g").is_some_and(|it| it["heard"] == true && it["jobs"].as_u64() > Some(20))
    });
    // Its disk works meanwhile, and it makes threads.
    guest.console.ask("check 500 1 disk").expect("check");
    guest.console.ask("verify").expect("consistent");
    // A checkpoint, with its guardian and its pause.
    lab.dewar(&["checkpoint", "g"]).done();
    assert_eq!(vcpus(&lab, "g").len(), 2);

    if let Some(next) = next_qemu() {
        lab.dewar(&["upgrade", "g", "--qemu", &next.display().to_string()]).done();
        let next = lab.pid("g").expect("pid");
        assert_ne!(next, pid);
        let its = || status(&lab, "g").filter(|it| it["pid"] == next);
        let is_held = || {
            let log = std::fs::read_to_string(lab.root().join("qos/g.log")).expect("log");
            assert!(log.is_empty(), "the controller has ended: {log}");
            vcpus(&lab, "g").len() == 2
        };
        wait_until("the next QEMU's vCPUs", SOON, is_held);
        wait_until("its heartbeats", SOON, || {
            its().is_some_and(|it| it["jobs"].as_u64() > Some(5))
        });
        guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    } else {
        println!("SKIPPED the next QEMU's vCPUs: there is no second QEMU ('make next-qemu')");
    }
    guest.console.ask("verify").expect("consistent");
    release(&lab, "g");
    let pid = lab.pid("g").expect("pid");
    assert!(threads_of(pid).into_iter().all(|task| scheduling(task) == Scheduling::ordinary(0)));

    lab.dewar(&["qos", "g", "--target", "10/s", "--max", "70%", "--detach"]).done();
    let controller = controller(&lab, "g");
    lab.crash("g");
    wait_while_alive(controller);
    assert!(status(&lab, "g").is_none());
    // Restored under another name it has a port of its own.
    lab.restore(&mut guest, &["g", "--as", "h"]).expect("restored");
    lab.wait_for_memory("h");
    lab.dewar(&["qos", "h", "--target", "10/s", "--max", "70%", "--detach"]).done();
    wait_until("heartbeats", SOON, || status(&lab, "h").is_some_and(|it| it["heard"] == true));
}

#[test]
fn a_guest_without_a_port_is_refused() {
    let (_alone, lab) = alone();
    lab.run("g", &GuestSpec::default()).expect("guest");
    let refused = lab.dewar(&["qos", "g", "--target", "30/s"]);
    refused.failed(4, &["has no port for heartbeats", "dewar run --qos"]);
    lab.dewar(&["qos", "h", "--target", "30/s"]).failed(3, &["no guest"]);
    lab.dewar(&["qos", "g", "--target", "fast"]).failed(2, &["a rate is such as 30/s"]);
}

/// CPUs are the host's: what was promised under another root is promised, and a process has
/// one controller.
#[test]
fn another_root_gives_nothing_twice() {
    let (_alone, lab) = alone();
    let other = common::lab();
    let (one, two, three) = (Sleeper::new(), Sleeper::new(), Sleeper::new());
    let before = scheduling(main_thread(one.pid()));
    qos(&lab, "p", one.pid(), &[]).done();
    qos(&other, "p", one.pid(), &[]).failed(1, &["another 'dewar qos'"]);
    // Guests of one name under two roots are two.
    qos(&other, "p", two.pid(), &[]).done();
    let limit = lab.dewar(&["qos", "--status"]).json()["limit_cpus"].as_f64().expect("limit");
    let fits = (limit - 1.6) / 0.8 >= 1.0;
    if !fits {
        qos(&lab, "q", three.pid(), &[]).failed(1, &["cannot be promised"]);
    }
    lab.dewar(&["qos", "p", "--release"]).done();
    lab.dewar(&["qos", "p", "--release"]).failed(3, &["no reservation"]);
    other.dewar(&["qos", "p", "--release"]).done();
    assert_eq!(scheduling(main_thread(one.pid())), before);
}

/// Nothing but the watchdog knows how the threads were: they are given back all the same.
#[test]
fn a_lost_entry_leaves_no_thread_in_the_class() {
    let (_alone, lab) = alone();
    for garbage in [None, Some("garbage")] {
        let sleeper = Sleeper::new();
        let task = main_thread(sleeper.pid());
        let before = scheduling(task);
        qos(&lab, "p", sleeper.pid(), &[]).done();
        wait_until("it is promised", SOON, || runtime(task).is_some());
        let controller = controller(&lab, "p");
        let tag = dewar_registry::Registry::new(&lab.root()).tag();
        let entry = std::path::PathBuf::from(format!("/run/dewar/qos/{tag}@p.json"));
        // It writes it again each second.
        kill(controller, Signal::STOP);
        match garbage {
            None => std::fs::remove_file(&entry).expect("remove"),
            Some(text) => std::fs::write(&entry, text).expect("write"),
        }
        kill(controller, Signal::KILL);
        wait_until("it is given back", SOON, || scheduling(task) == before);
        wait_until("its entry is gone", SOON, || !entry.exists());
    }
}

#[test]
fn a_thread_with_a_reservation_from_elsewhere_is_told_of_and_left_alone() {
    let (_alone, lab) = alone();
    let sleeper = Sleeper::new();
    let (pid, task) = (sleeper.pid().to_string(), main_thread(sleeper.pid()));
    let (runtime, period) = (Duration::from_millis(1), Duration::from_millis(100));
    let reservation = dewar_kernel::Reservation { runtime, period, reclaim: false };
    // The kernel gives the time of a thread that has ended out again only after its period.
    let deadline = Instant::now() + Duration::from_secs(10);
    while let Err(error) = task.reserve(reservation) {
        assert!(Instant::now() < deadline, "{error}; {}", lab.dewar(&["qos", "--status"]).stdout);
        std::thread::sleep(period);
    }
    qos(&lab, "p", sleeper.pid(), &[]).failed(1, &["SCHED_DEADLINE already", "--release --pid"]);
    let told = lab.dewar(&["qos", "--status"]).done().json();
    let unheld = told["unheld"].as_array().expect("a list");
    assert!(unheld.iter().any(|it| it["pid"] == sleeper.pid()), "{told}");
    assert!(lab.dewar(&["doctor"]).stdout.contains("--release --pid"));
    lab.dewar(&["qos", "--release", "--pid", &pid]).done();
    assert_eq!(scheduling(task).reservation, None);
    lab.dewar(&["qos", "--release", "--pid", &pid]).failed(3, &["nobody holds"]);
    lab.dewar(&["qos", "init", "--pid", "1", "--target", "1/s"]).failed(2, &["process 1"]);
}
