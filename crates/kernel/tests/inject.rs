//! Injection into a real process: it must notice nothing.

use dewar_kernel::{Pid, inject_past_filter, inject_syscall};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A shell that computes without end and can be asked for its sums.
fn victim(program: &str) -> Child {
    Command::new("perl")
        .args(["-e", program])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("perl")
}

#[test]
fn a_call_is_made_in_the_other_process_hundreds_of_times() {
    // Floating point in registers, system calls and signals all the while: the
    // sum is exact only if every register came back every time.
    let mut child = victim(
        "$SIG{ALRM}=sub{$n++; Time::HiRes::alarm(0.0007)}; use Time::HiRes; $|=1; \
         Time::HiRes::alarm(0.0007); my $bad=0; \
         while(1){ my $s=0.0; for my $i (1..2000){$s+=$i*0.5; getppid() if $i%100==0} \
         if($s!=1000500){print \"bad $s\\n\"; exit 1} \
         if(!$told++){print \"go\\n\"} }",
    );
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().expect("stdout")).read_line(&mut line).expect("read");
    assert_eq!(line, "go\n");
    let pid = Pid(child.id() as i32);
    for _ in 0..300 {
        let done = inject_syscall(pid, libc::SYS_getpid as u64, [0; 3]).expect("inject");
        assert_eq!(done.result, i64::from(child.id()));
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(child.try_wait().expect("wait").is_none(), "the process survives");
    child.kill().expect("kill");
    child.wait().expect("wait");
}

#[test]
fn a_blocking_read_is_resumed() {
    let mut child = victim("$|=1; print \"up\\n\"; while(my $l=<STDIN>){print \"got $l\"}");
    let mut lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
    let mut next = || lines.next().expect("a line").expect("read");
    // Its libraries are there from now on.
    assert_eq!(next(), "up");
    std::thread::sleep(Duration::from_millis(100));
    let pid = Pid(child.id() as i32);
    for _ in 0..20 {
        inject_syscall(pid, libc::SYS_getppid as u64, [0; 3]).expect("inject");
    }
    let mut stdin = child.stdin.take().expect("stdin");
    stdin.write_all(b"hello\n").expect("write");
    assert_eq!(next(), "got hello");
    drop(stdin);
    assert!(child.wait().expect("wait").success());
}

/// Ends a process for getpid(2), and for the return from a signal (seccomp(2)).
const STRICT: &str = "syscall(157, 38, 1, 0, 0, 0) and die;
my $rules = pack('SCCL' x 5, 0x20,0,0,0, 0x15,2,0,39, 0x15,1,0,15, 6,0,0,0x7fff0000, 6,0,0,0x80000000);
my $filter = pack('S x6 P', 5, $rules);
syscall(157, 22, 2, $filter, 0, 0) and die;
$| = 1; print \"up\\n\";
while (1) { my $s = 0.0; for my $i (1..2000) { $s += $i * 0.5; getppid() if $i % 100 == 0 } exit 1 if $s != 1000500 }";

#[test]
fn a_filter_of_system_calls_has_no_say() {
    let name = "a_filter_of_system_calls_has_no_say";
    let status = std::fs::read_to_string("/proc/self/status").expect("status");
    if !rustix::process::geteuid().is_root() || !status.contains("Seccomp:\t0") {
        eprintln!("skipped {name}: a filter is lifted only by root that is under none");
        return;
    }
    let mut child = victim(STRICT);
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().expect("stdout")).read_line(&mut line).expect("read");
    assert_eq!(line, "up\n");
    let pid = Pid(child.id() as i32);
    for _ in 0..100 {
        let done = inject_past_filter(pid, libc::SYS_getpid as u64, [0; 3]).expect("inject");
        assert_eq!(done.result, i64::from(child.id()));
    }
    std::thread::sleep(Duration::from_millis(100));
    assert!(child.try_wait().expect("wait").is_none(), "the process survives");
    // It is over it all the same.
    let _ = inject_syscall(pid, libc::SYS_getpid as u64, [0; 3]);
    assert!(!child.wait().expect("wait").success());
}

#[test]
fn a_process_that_is_gone_is_an_error() {
    let mut child = victim("");
    let pid = Pid(child.id() as i32);
    child.wait().expect("wait");
    assert!(inject_syscall(pid, libc::SYS_getpid as u64, [0; 3]).is_err());
}

/// Not a test of its own: the tracer that the next test kills.
#[test]
fn tracer_until_killed() {
    let Ok(pid) = std::env::var("DEWAR_TEST_TRACE") else { return };
    let pid = Pid(pid.parse().expect("pid"));
    println!("tracing");
    loop {
        let _ = inject_syscall(pid, libc::SYS_getpid as u64, [0; 3]);
    }
}

#[test]
fn a_tracer_killed_at_any_instant_harms_nothing() {
    // As above, the sums tell of any register that did not come back.
    let mut child = victim(
        "$|=1; while(1){ my $s=0.0; for my $i (1..2000){$s+=$i*0.5; getppid() if $i%100==0} \
         if($s!=1000500){print \"bad $s\\n\"; exit 1} }",
    );
    for round in 0..60u64 {
        let mut tracer = Command::new(std::env::current_exe().expect("exe"))
            .args(["--exact", "tracer_until_killed", "--nocapture"])
            .env("DEWAR_TEST_TRACE", child.id().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("tracer");
        let mut lines = BufReader::new(tracer.stdout.take().expect("stdout")).lines();
        while !lines.next().expect("a line").expect("text").contains("tracing") {}
        std::thread::sleep(Duration::from_micros(200 + round * 137 % 3000));
        tracer.kill().expect("kill");
        tracer.wait().expect("wait");
        assert!(child.try_wait().expect("wait").is_none(), "round {round}: it survives");
    }
    std::thread::sleep(Duration::from_millis(200));
    assert!(child.try_wait().expect("wait").is_none(), "it survives");
    child.kill().expect("kill");
    child.wait().expect("wait");
}
