//! The program `dewar-beat`, and a port at which nobody listens.

use dewar_beat::{Beat, End, Line, Pace};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

struct Port {
    folder: tempfile::TempDir,
    listener: UnixListener,
}

impl Port {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("tempdir");
        let listener = UnixListener::bind(folder.path().join("port")).expect("bind");
        Self { folder, listener }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dewar-beat"));
        command.args(words).env("DEWAR_BEAT", self.folder.path().join("port"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        command
    }

    /// What was said on the next connection, until its end.
    fn heard(&self) -> Vec<Line> {
        let mut text = String::new();
        let (mut socket, _) = self.listener.accept().expect("accept");
        socket.read_to_string(&mut text).expect("read");
        let known = |line: &str| Line::parse(line.as_bytes()).unwrap_or_else(|| panic!("{line:?}"));
        text.lines().map(known).collect()
    }
}

fn ends(lines: &[Line]) -> Vec<End> {
    assert_eq!(lines[..2], [Line::Hello { version: 1 }, Line::Rate(5.0)]);
    let numbered = lines[2..].iter().zip(0..).map(|(line, nth)| match line {
        Line::Job { number, end } if *number == nth => *end,
        other => panic!("{other} in place {nth}"),
    });
    numbered.collect()
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

#[test]
fn each_line_of_a_command_is_a_job_and_passed_on() {
    let port = Port::new();
    let shell = "echo one; echo missed; echo three; sleep 1.5; echo late; exit 7";
    let output = port.command(&["--rate", "5", "--", "sh", "-c", shell]).output().expect("run");
    assert_eq!(code(&output), Some(7));
    assert_eq!(output.stdout, b"one\nmissed\nthree\nlate\n");
    let ends = ends(&port.heard());
    assert!(matches!(ends[0], End::Met(_)), "{ends:?}");
    assert_eq!(ends[1], End::Missed(None));
    assert!(matches!(ends[2], End::Met(_)), "{ends:?}");
    // Due 800 ms after the first, at most.
    assert!(matches!(ends[3], End::Missed(Some(_))), "{ends:?}");
    assert_eq!(ends.len(), 4);
}

/// Five lines a second, but for a moment.
#[test]
fn who_stood_still_once_missed_once() {
    let port = Port::new();
    let shell = "echo one; sleep 0.9; for job in 1 2 3 4 5; do echo job; sleep 0.15; done";
    let output = port.command(&["--rate", "5", "--", "sh", "-c", shell]).output().expect("run");
    assert_eq!(code(&output), Some(0));
    let ends = ends(&port.heard());
    assert!(matches!(ends[1], End::Missed(Some(_))), "{ends:?}");
    let missed = ends.iter().filter(|end| matches!(end, End::Missed(_))).count();
    // A machine that has much to do may hold one up once more.
    assert!(missed <= 2 && ends.len() == 6, "{ends:?}");
}

#[test]
fn so_is_each_line_that_it_is_fed() {
    let port = Port::new();
    let mut child = port.command(&["--rate", "5"]).spawn().expect("run");
    let mut stdin = child.stdin.take().expect("stdin");
    stdin.write_all(b"frame\nframe\n").expect("feed");
    drop(stdin);
    let output = child.wait_with_output().expect("end");
    assert_eq!((code(&output), output.stdout.as_slice()), (Some(0), &b"frame\nframe\n"[..]));
    assert_eq!(ends(&port.heard()).len(), 2);
    for wrong in [&["--rate", "0"][..], &[], &["--rate"], &["--speed", "3"]] {
        let output = port.command(wrong).output().expect("run");
        assert_eq!(code(&output), Some(2), "{wrong:?}");
    }
}

#[test]
fn a_port_without_a_reader_delays_no_program() {
    let port = Port::new();
    let path = port.folder.path().join("port");
    let began = Instant::now();
    // Connected to, and never read.
    let mut beat = Beat::open_at(&path);
    assert!(beat.is_connected());
    let line = Line::Job { number: 1, end: End::Missed(None) };
    (0..100_000).for_each(|_| beat.say(&line));
    assert!(beat.lost() > 0);
    // Not there at all.
    let mut pace = Pace::new(Beat::open_at(port.folder.path().join("none")), 1000.0);
    for _ in 0..10 {
        pace.wait();
        pace.done();
    }
    assert_eq!(pace.counts().0, 10);
    assert!(began.elapsed() < Duration::from_secs(20));
}
