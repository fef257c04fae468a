//! What the kernel does with threads that are held.

use super::*;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Threads that wait, to be promised what is left.
struct Others(Vec<Task>);

impl Others {
    /// Promises them all that can be had, in ever smaller parts.
    fn take_all(&self) {
        let period = Duration::from_millis(100);
        let mut share = 0.9;
        for task in &self.0 {
            let runtime = |share: f64| period.mul_f64(share);
            let reserve = |runtime| task.reserve(Reservation { runtime, period, reclaim: false });
            while share > 0.001 && reserve(runtime(share)).is_err() {
                share /= 2.0;
            }
        }
    }

    fn release(&self) {
        self.0.iter().for_each(|task| {
            task.schedule(Scheduling::ordinary(0)).expect("ordinary");
        });
    }
}

fn own_task() -> Task {
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    Task { process: std::process::id() as i32, thread }
}

/// Runs `test` with a thread that always wants to run, and some that wait.
fn beside(test: impl FnOnce(Task, &Others)) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let spawn = |busy: bool| {
            let (sender, receiver) = std::sync::mpsc::channel();
            let stop = &stop;
            scope.spawn(move || {
                sender.send(own_task()).expect("told");
                while !stop.load(Ordering::Relaxed) {
                    match busy {
                        true => std::hint::spin_loop(),
                        false => std::thread::sleep(Duration::from_millis(1)),
                    }
                }
            });
            receiver.recv().expect("a thread")
        };
        let busy = spawn(true);
        let cpus = std::thread::available_parallelism().map_or(1, |count| count.get());
        let others = Others((0..24 + 2 * cpus).map(|_| spawn(false)).collect());
        let tested = std::panic::catch_unwind(AssertUnwindSafe(|| test(busy, &others)));
        stop.store(true, Ordering::Relaxed);
        // It must be able to end, whatever was tested.
        let _ = busy.schedule(Scheduling::ordinary(0));
        tested.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

const MEANS: Mechanism = Mechanism::Deadline { reclaim: false };

fn promise() -> Promise {
    Promise { rate: 10.0, miss: 0.001, min: 0.05, max: 0.8, threads: 1 }
}

/// A hold on a thread, or a word that the test is skipped.
fn take(test: &str, task: Task) -> Option<Reservations> {
    match Reservations::take(&[task], &[], &promise(), MEANS, None) {
        Err(QosError::NoDeadlines(why)) => {
            println!("SKIPPED {test}: {why}");
            None
        }
        held => Some(held.expect("held")),
    }
}

/// What can be promised is one for the whole machine: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(|locked| locked.into_inner())
}

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

#[test]
fn a_rescue_ends_also_where_there_is_no_room_to_come_back() {
    let _alone = alone();
    beside(|busy, others| {
        let test = "a_rescue_ends_also_where_there_is_no_room_to_come_back";
        let Some(mut hold) = take(test, busy) else { return };
        hold.set(0, ms(30)).expect("set");
        let began = Instant::now();
        assert!(hold.rescue(0, began, Duration::ZERO, began + ms(50)));
        assert_eq!(busy.scheduling().expect("how"), Scheduling::ahead(RESCUE_PRIORITY));
        // Its bandwidth is somebody else's when the kernel has it back.
        std::thread::sleep(ms(250));
        others.take_all();
        hold.tend(Instant::now()).expect("tended");
        let how = busy.scheduling().expect("how");
        assert_eq!(how, Scheduling::ordinary(HELPERS_NICE), "it does not stay ahead of all");
        others.release();
        std::thread::sleep(ms(250));
        hold.tend(Instant::now()).expect("tended");
        assert!(busy.scheduling().expect("how").reservation.is_some(), "it is promised again");
        busy.schedule(Scheduling::ordinary(0)).expect("ordinary");
    });
}

#[test]
fn a_thread_with_the_number_of_one_that_ended_is_left_alone() {
    let _alone = alone();
    beside(|busy, _| {
        let test = "a_thread_with_the_number_of_one_that_ended_is_left_alone";
        let Some(mut hold) = take(test, busy) else { return };
        busy.schedule(Scheduling::ordinary(0)).expect("ordinary");
        // As if another had it when the hold began.
        hold.threads[0].started = busy.started().map(|ticks| ticks - 1);
        let now = Instant::now();
        assert_eq!(hold.ran(0), None);
        assert!(!hold.rescue(0, now, Duration::ZERO, now + ms(50)));
        hold.threads[0].wait(now, OUTSIDE_NICE);
        hold.tend(now + ms(300)).expect("tended");
        assert_eq!(hold.set(0, ms(30)).expect("set"), Answer::Gone);
        assert_eq!(busy.scheduling().expect("how"), Scheduling::ordinary(0));
    });
}

#[test]
fn a_thread_that_somebody_binds_to_a_cpu_waits_and_comes_back() {
    let _alone = alone();
    beside(|busy, _| {
        let test = "a_thread_that_somebody_binds_to_a_cpu_waits_and_comes_back";
        let Some(mut hold) = take(test, busy) else { return };
        hold.set(0, ms(30)).expect("set");
        let began = Instant::now();
        assert!(hold.rescue(0, began, Duration::ZERO, began + ms(50)));
        let thread = rustix::thread::Pid::from_raw(busy.thread);
        let all = rustix::thread::sched_getaffinity(thread).expect("affinity");
        let mut one = rustix::thread::CpuSet::new();
        one.set((0..).find(|cpu| all.is_set(*cpu)).expect("a CPU"));
        if all.count() < 2 {
            println!("SKIPPED {test}: there is one CPU");
            return;
        }
        rustix::thread::sched_setaffinity(thread, &one).expect("bound");
        std::thread::sleep(ms(250));
        hold.tend(Instant::now()).expect("it goes on");
        let how = busy.scheduling().expect("how");
        assert_eq!(how, Scheduling::ordinary(HELPERS_NICE), "it does not stay ahead of all");
        rustix::thread::sched_setaffinity(thread, &all).expect("free");
        hold.tend(Instant::now()).expect("tended");
        assert!(busy.scheduling().expect("how").reservation.is_some(), "it is promised again");
        busy.schedule(Scheduling::ordinary(0)).expect("ordinary");
    });
}

#[test]
fn a_rescue_that_ends_late_comes_back_later() {
    let _alone = alone();
    beside(|busy, _| {
        let Some(mut hold) = take("a_rescue_that_ends_late_comes_back_later", busy) else { return };
        hold.set(0, ms(30)).expect("set");
        let began = Instant::now();
        let deadline = began + ms(10);
        assert!(hold.rescue(0, began, ms(60), deadline));
        std::thread::sleep(ms(15));
        // The job is done; it overran 30 ms, and perhaps a tick.
        assert_eq!(hold.set(0, ms(40)).expect("set"), Answer::Done);
        assert_eq!(busy.scheduling().expect("how"), Scheduling::ordinary(OUTSIDE_NICE));
        while Instant::now() < deadline + ms(100) {
            hold.tend(Instant::now()).expect("tended");
            assert_eq!(busy.scheduling().expect("how").reservation, None);
            std::thread::sleep(ms(1));
        }
        std::thread::sleep(ms(80));
        hold.tend(Instant::now()).expect("tended");
        let reserved = busy.scheduling().expect("how").reservation.expect("promised");
        assert_eq!(reserved.runtime, ms(40));
        busy.schedule(Scheduling::ordinary(0)).expect("ordinary");
    });
}

#[test]
fn the_bandwidth_of_who_overran_is_waited_for() {
    let _alone = alone();
    beside(|busy, others| {
        let test = "the_bandwidth_of_who_overran_is_waited_for";
        if take(test, busy).is_none() {
            return;
        }
        busy.schedule(Scheduling::ordinary(0)).expect("ordinary");
        std::thread::sleep(ms(250));
        others.take_all();
        let hold = std::thread::scope(|scope| {
            // As much later as one that ran for five of its periods.
            scope.spawn(|| {
                std::thread::sleep(ms(400));
                others.release();
            });
            Reservations::take(&[busy], &[], &promise(), MEANS, None).expect("taken")
        });
        assert!(hold.runtime(0) >= hold.min);
        busy.schedule(Scheduling::ordinary(0)).expect("ordinary");
    });
}

/// The kernel's own fault, made on purpose: see the module.
#[test]
fn a_thread_that_the_kernel_forgot_runs_again() {
    let _alone = alone();
    beside(|busy, _| {
        let Some(mut hold) = take("a_thread_that_the_kernel_forgot_runs_again", busy) else {
            return;
        };
        let reserve = || {
            let (runtime, period) = (ms(10), ms(100));
            busy.reserve(Reservation { runtime, period, reclaim: false }).expect("reserved");
        };
        let ordinary = || busy.schedule(Scheduling::ordinary(0)).expect("ordinary");
        let ran = || busy.ran().expect("it is there");
        let mut forgotten = 0;
        for late in [5, 10, 15, 20] {
            ordinary();
            std::thread::sleep(ms(200));
            // Used up, gone, and back when the timer has come.
            reserve();
            std::thread::sleep(ms(35));
            ordinary();
            std::thread::sleep(ms(65 + late));
            reserve();
            let before = ran();
            std::thread::sleep(ms(220));
            forgotten += u32::from(ran() == before);
            let until = Instant::now() + ms(500);
            while Instant::now() < until {
                hold.tend(Instant::now()).expect("tended");
                std::thread::sleep(ms(5));
            }
            let before = ran();
            std::thread::sleep(ms(220));
            assert!(ran() > before, "it stands still, {late} ms late");
            assert!(busy.scheduling().expect("how").reservation.is_some(), "it is promised");
        }
        println!("the kernel forgot it {forgotten} times of 4");
        ordinary();
    });
}
