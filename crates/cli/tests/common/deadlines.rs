//! What the tests of `dewar qos` share.

use super::lab;
use dewar_kernel::{Scheduling, Task, threads_of};
use dewar_testkit::{GuestSpec, Lab, PeriodicTask, Ran, TestGuest};
use serde_json::Value;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

pub const SOON: Duration = Duration::from_secs(10);
/// `SCHED_FIFO`, by its number.
pub const FIFO: u32 = 1;

/// What can be promised is one for the whole machine: one test at a time.
pub fn alone() -> (MutexGuard<'static, ()>, Lab) {
    static ONE: Mutex<()> = Mutex::new(());
    (ONE.lock().unwrap_or_else(|locked| locked.into_inner()), lab())
}

pub fn main_thread(pid: i32) -> Task {
    Task { process: pid, thread: pid }
}

pub fn scheduling(task: Task) -> Scheduling {
    task.scheduling().expect("the thread is there")
}

/// How many bytes a periodic task hashes in a millisecond of CPU time here.
pub fn bytes_hashed_in_a_ms(lab: &Lab) -> u64 {
    const TRIED: u64 = 2_000_000;
    let (port, log) = (lab.path().join("nobody.sock"), lab.path().join("tried"));
    // Nobody hears its heartbeats.
    let _nobody = UnixListener::bind(&port).expect("port");
    let task = PeriodicTask::start(30.0, &[(0.7, TRIED)], &port, &log).expect("task");
    let jobs = task.finish().expect("jobs");
    std::fs::remove_file(port).expect("port");
    let mut times: Vec<u64> = jobs.iter().map(|job| job.cpu_us).collect();
    times.sort_unstable();
    TRIED * 1000 / times[times.len() / 2].max(1)
}

pub fn runtime(task: Task) -> Option<Duration> {
    task.scheduling().ok()?.reservation.map(|it| it.runtime)
}

/// A process that waits.
pub struct Sleeper(Child);

impl Sleeper {
    pub fn new() -> Self {
        Self(Command::new("sleep").arg("300").spawn().expect("sleep"))
    }

    pub fn pid(&self) -> i32 {
        self.0.id() as i32
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn qos(lab: &Lab, name: &str, pid: i32, more: &[&str]) -> Ran {
    let pid = pid.to_string();
    lab.dewar(&[&["qos", name, "--pid", &pid, "--target", "30/s", "--detach"], more].concat())
}

pub fn status(lab: &Lab, name: &str) -> Option<Value> {
    let told = lab.dewar(&["qos", "--status"]).json();
    told["reservations"].as_array()?.iter().find(|it| it["name"] == name).cloned()
}

pub fn release(lab: &Lab, name: &str) {
    lab.dewar(&["qos", name, "--release"]).done();
    assert!(status(lab, name).is_none());
}

pub fn controller(lab: &Lab, name: &str) -> i32 {
    status(lab, name).expect("listed")["controller"].as_i64().expect("a process") as i32
}

pub fn watchdog_of(controller: i32) -> i32 {
    let children = format!("/proc/{controller}/task/{controller}/children");
    let children = std::fs::read_to_string(children).expect("children");
    children.split_whitespace().next().and_then(|pid| pid.parse().ok()).expect("a watchdog")
}

/// A guest that hashes ten blocks a second.
pub fn hashing_guest(lab: &Lab, name: &str, vcpus: u32) -> TestGuest {
    // A machine type that both QEMUs know.
    let extra = ["-machine", "pc-q35-7.2"].map(str::to_owned).to_vec();
    let spec = GuestSpec { vcpus, qos: true, extra, ..GuestSpec::default() };
    let mut guest = lab.run(name, &spec).expect("guest");
    guest.console.ask("spawn hashes 10 /log 300:200000").expect("spawn");
    guest
}

pub fn vcpus(lab: &Lab, name: &str) -> Vec<Task> {
    let pid = lab.pid(name).expect("pid");
    let is_held = |task: &Task| {
        task.scheduling().is_ok_and(|how| how.reservation.is_some() || how.policy == FIFO)
    };
    threads_of(pid).into_iter().filter(is_held).collect()
}
