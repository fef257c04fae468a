//! `dewar-beat`: tells the host how a program meets its deadlines, for programs
//! that know nothing of it: each line that they print is a job done.
#![forbid(unsafe_code)]

use dewar_beat::{Beat, Pace};
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};

/// What a program prints of a job that it gave up.
const MISSED: &[u8] = b"missed";

const HELP: &str = "\
Tells the host how a program meets its deadlines.

Usage: dewar-beat --rate N [--port PATH] [-- COMMAND [ARG]...]

Each line that the command prints, or without a command each line on standard
input, is one job done; the lines are passed on. A line that is only 'missed' is a
job that was given up. The command must write each line at once (stdbuf -oL).

  --rate N      Jobs a second
  --port PATH   A port other than $DEWAR_BEAT or the VM's org.dewar.qos.0
  -h, --help    This text
  -V, --version The version

Example:
  dewar-beat --rate 30 -- stdbuf -oL player --print-frames film.mkv
";

struct Wish {
    rate: f64,
    port: Option<String>,
    command: Vec<String>,
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1).peekable();
    match words.peek().map(String::as_str) {
        Some("-h" | "--help") => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Some("-V" | "--version") => {
            println!("dewar-beat {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let wish = match read(words) {
        Ok(wish) => wish,
        Err(why) => {
            eprintln!("dewar-beat: {why}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match run(&wish) {
        Ok(code) => ExitCode::from(code),
        Err(why) => {
            eprintln!("dewar-beat: {why}");
            ExitCode::FAILURE
        }
    }
}

fn read(mut words: impl Iterator<Item = String>) -> Result<Wish, String> {
    let mut wish = Wish { rate: 0.0, port: None, command: Vec::new() };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--rate" => wish.rate = value()?.parse().map_err(|_| "--rate needs a number")?,
            "--port" => wish.port = Some(value()?),
            "--" => {
                wish.command = words.collect();
                break;
            }
            _ => return Err(format!("unknown argument '{word}'")),
        }
    }
    let is_rate = wish.rate.is_finite() && wish.rate > 0.0 && wish.rate <= 10_000.0;
    if is_rate { Ok(wish) } else { Err("--rate must be above 0 and at most 10000".to_owned()) }
}

fn run(wish: &Wish) -> io::Result<u8> {
    let beat = wish.port.as_ref().map_or_else(Beat::open, Beat::open_at);
    if !beat.is_connected() {
        eprintln!("dewar-beat: there is no port yet; going on without");
    }
    let mut pace = Pace::new(beat, wish.rate);
    let Some((program, arguments)) = wish.command.split_first() else {
        pass_on(&mut pace, io::stdin().lock())?;
        return Ok(0);
    };
    let mut child = Command::new(program).args(arguments).stdout(Stdio::piped()).spawn()?;
    if let Some(out) = child.stdout.take() {
        pass_on(&mut pace, BufReader::new(out))?;
    }
    Ok(child.wait()?.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

fn pass_on(pace: &mut Pace, mut input: impl BufRead) -> io::Result<()> {
    let mut out = io::stdout().lock();
    // The beginning of a line, as much as tells it from others: it may never end.
    let mut line = Vec::new();
    loop {
        let bytes = input.fill_buf()?;
        if bytes.is_empty() {
            break;
        }
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            let text = part.strip_suffix(b"\n").unwrap_or(part);
            line.extend(text.iter().take(MISSED.len() + 1 - line.len()));
            if text.len() < part.len() {
                job(pace, &line);
                line.clear();
            }
        }
        out.write_all(bytes)?;
        out.flush()?;
        let count = bytes.len();
        input.consume(count);
    }
    if !line.is_empty() {
        job(pace, &line);
    }
    Ok(())
}

/// A line is a job that is done, or will not be.
fn job(pace: &mut Pace, line: &[u8]) {
    match line == MISSED {
        true => pace.gave_up(),
        false => drop(pace.seen()),
    }
}
