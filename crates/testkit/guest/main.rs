//! The program that runs inside test guests. Standard library only: it is
//! linked statically and runs on a bare initramfs.
//!
//! `heartbeat` prints a byte every millisecond, or every `$beat_ms`. `serve TTY` obeys lines on a
//! serial port, one answer line each; `serve FIFO FIFO`, in a container, has two pipes for it. `plant read|write FILE MS`
//! tries to plant bytes in a file ([`plant`]). The lines:
//!
//! - `fill MIB MIX`: takes MIB of memory and fills it; MIX is `mixed` (a
//!   quarter each zeros, text, programs, noise, from the second disk; no two pages equal),
//!   `noise`, `zeros` (touched), or `equal` (32 pages of noise again and again).
//! - `words RATE`: writes one word in each of RATE random pages a second, over
//!   the first half of what was filled. `words 0` stops.
//! - `colour RATE`: the same with whole pages, each of one word again and again.
//! - `check PAGES THREADS DISK PACE`: starts checkable writers: THREADS threads
//!   with PAGES pages each; DISK is `disk` (each writes blocks of the first
//!   disk, past the page cache), `reads` (and reads others into its pages), or
//!   `none`. With PACE `hard` they never rest; without it they rest most of the time,
//!   so that a guest leaves its host's cores to the test.
//! - `files DISK`: mounts a disk that has a file system, and starts a program that
//!   writes, renames and removes files there.
//! - `storm`: starts a program that takes, grows and gives back memory, and starts others.
//! - `filled`: whether what was filled with `noise` or `equal` is what it was.
//! - `verify`: every writer checks everything it knows. `ok STEPS` or `bad WHY`.
//! - `count`: steps, or words, done so far.
//! - `reads FILE`: reads a file again and again; `have-read` says how many bytes it had read when.
//! - `net ADDRESS`: gives the first network card an address, such as 10.9.0.2/24.
//! - `listen`: answers on TCP: on port 80 with a web page, on port 7 with what it
//!   is sent.
//! - `spawn PROGRAM ARGUMENT...`: starts a program in the background.
//! - `run PROGRAM ARGUMENT...`: runs a program to its end; what it said. `as UID PROGRAM ARGUMENT...`: the same as that user.
//! - `sum FILE`: reads a file to its end; a number that tells its content, its bytes, and how many ms it took.
//! - `append FILE WORD...`: adds the words to a file, a line each: a line of the serial
//!   port has at most 4,095 bytes.
//! - `show FILE`: the file's lines, with `;` between.
//! - `time`: the guest's clock, in seconds since 1970.
//! - `settle`: drops the file cache, and clears all memory that is free: what boot left in it.
//! - `quit`: powers the guest down.

mod files;
mod net;
mod plant;
mod reads;
mod storm;
mod writer;

use files::Files;
use net::{echo, listen, network, web};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use storm::Storm;
use writer::Writer;

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
/// What noise begins with.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("heartbeat") => heartbeat(),
        Some("serve") => serve(&arguments[2], arguments.get(3)),
        Some("plant") => {
            let time = Duration::from_millis(arguments[4].parse().expect("milliseconds"));
            let done = plant::plant(&arguments[3], arguments[2] == "write", time);
            println!("{}", done.expect("it may do that"));
        }
        _ => std::process::exit(2),
    }
}

fn heartbeat() {
    let mut out = std::io::stdout();
    let mut next = Instant::now();
    // What the kernel's command line says and it does not know itself, it hands to init.
    let asked = std::env::var("beat_ms").ok().and_then(|word| word.parse().ok());
    let period = Duration::from_millis(asked.unwrap_or(1));
    loop {
        let _ = out.write_all(b".").and_then(|()| out.flush());
        next += period;
        let now = Instant::now();
        if next > now {
            thread::sleep(next - now);
        } else {
            // After a pause the beat goes on from here.
            next = now;
        }
    }
}

/// A program that knows what it did.
trait Checked: Send + 'static {
    fn step(&mut self) -> Result<(), String>;
    /// Returns the number of its steps, where all is as it was left.
    fn verify(&mut self) -> Result<u64, String>;
}

/// What the rest of the program asks of a writer.
enum Ask {
    Verify(mpsc::Sender<Result<u64, String>>),
}

#[derive(Default)]
struct Guest {
    filled: Option<Arc<Mutex<Vec<u8>>>>,
    /// Whether it was filled with equal pages.
    is_equal: bool,
    /// Whether whole pages are written, not words.
    whole_pages: Arc<AtomicBool>,
    rate: Arc<AtomicU64>,
    count: Arc<AtomicU64>,
    reads: reads::Log,
    writers: Vec<mpsc::Sender<Ask>>,
}

fn serve(commands: &str, answers: Option<&String>) {
    let open = |path: &str| OpenOptions::new().read(true).write(true).open(path).expect("port");
    let port = open(commands);
    let mut answers = answers.map_or_else(|| port.try_clone().expect("port"), |path| open(path));
    let mut guest = Guest::default();
    let _ = writeln!(answers, "dewar-guest ready");
    for line in BufReader::new(port).lines() {
        let Ok(line) = line else { continue };
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(command) = words.first() else { continue };
        let number =
            |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        let answer = match *command {
            "fill" => fill(&mut guest, number(1), words.get(2).copied().unwrap_or("mixed")),
            "words" => write(&guest, number(1), false),
            "colour" => write(&guest, number(1), true),
            "check" => {
                let disk = words.get(3).copied().unwrap_or("none");
                check(&mut guest, number(1), number(2), disk, words.get(4) == Some(&"hard"))
            }
            "files" => Files::mount(words.get(1).copied().unwrap_or_default())
                .map(|files| start(&mut guest, files, Arc::default())),
            "storm" => Ok(start(&mut guest, Storm::new(), Arc::default())),
            "filled" => filled(&guest),
            "verify" => verify(&guest),
            "count" => Ok(guest.count.load(Relaxed).to_string()),
            "reads" => reads::start(words.get(1).copied().unwrap_or_default(), guest.reads.clone()),
            "have-read" => reads::remembered(&guest.reads),
            "net" => network(words.get(1).copied().unwrap_or_default()),
            "listen" => listen(80, web).and_then(|_| listen(7, echo)),
            "spawn" => spawn(&words[1..]),
            "run" => run(None, &words[1..]),
            "as" => run(words.get(1).and_then(|uid| uid.parse().ok()), words.get(2..).unwrap_or(&[])),
            "sum" => sum(words.get(1).copied().unwrap_or_default()),
            "append" => append(&words[1..]),
            "show" => std::fs::read_to_string(words.get(1).copied().unwrap_or_default())
                .map(|text| text.trim().replace('\n', ";"))
                .map_err(|error| error.to_string()),
            "time" => std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map(|since| since.as_secs().to_string())
                .map_err(|error| error.to_string()),
            "settle" => settle(),
            "quit" => {
                let _ = std::process::Command::new("poweroff").arg("-f").status();
                Ok(String::new())
            }
            other => Err(format!("unknown command {other}")),
        };
        let text = match answer {
            Ok(text) => format!("ok {text}"),
            Err(text) => format!("bad {text}"),
        };
        let _ = writeln!(answers, "\n@{text}");
    }
}

fn settle() -> Result<String, String> {
    std::fs::write("/proc/sys/vm/drop_caches", "3").map_err(|error| error.to_string())?;
    let told = std::fs::read_to_string("/proc/meminfo").map_err(|error| error.to_string())?;
    let line = told.lines().find(|line| line.starts_with("MemFree:")).ok_or("no MemFree")?;
    let free = line.split_whitespace().nth(1).and_then(|it| it.parse::<usize>().ok());
    let free = free.ok_or("MemFree is no number")?;
    // The kernel clears each page that is written to first, and needs some for itself.
    let mut all = vec![0_u8; (free * 960).saturating_sub(8 << 20)];
    all.iter_mut().step_by(PAGE).for_each(|byte| *std::hint::black_box(byte) = 0);
    Ok((all.len() >> 20).to_string())
}

fn spawn(words: &[&str]) -> Result<String, String> {
    let (program, arguments) = words.split_first().ok_or("which program?")?;
    let mut command = std::process::Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().map_err(|error| error.to_string())?;
    Ok(child.id().to_string())
}

/// Runs a program to its end, perhaps as another user.
fn run(user: Option<u32>, words: &[&str]) -> Result<String, String> {
    let (program, arguments) = words.split_first().ok_or("which program?")?;
    let mut command = std::process::Command::new(program);
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    let output = command.args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| error.to_string())?;
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).trim().replace('\n', ";");
    if output.status.success() { Ok(said) } else { Err(said) }
}

/// Reads a file to its end. Returns a number that is another where a byte is, how many bytes it has, and the
/// milliseconds that it took.
fn sum(path: &str) -> Result<String, String> {
    let mut file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let began = Instant::now();
    let (mut sum, mut bytes) = (0u64, 0);
    let mut piece = vec![0; 128 << 10];
    loop {
        let count = std::io::Read::read(&mut file, &mut piece).map_err(|error| error.to_string())?;
        if count == 0 {
            return Ok(format!("{sum:x} {bytes} {}", began.elapsed().as_millis()));
        }
        for word in piece[..count].chunks(8) {
            let mut whole = [0; 8];
            whole[..word.len()].copy_from_slice(word);
            sum = sum.rotate_left(5).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from_le_bytes(whole);
        }
        bytes += count;
    }
}

fn append(words: &[&str]) -> Result<String, String> {
    let (file, words) = words.split_first().ok_or("to which file?")?;
    let file = OpenOptions::new().create(true).append(true).open(file);
    let written = file.and_then(|mut file| writeln!(file, "{}", words.join("\n")));
    written.map(|()| String::new()).map_err(|error| error.to_string())
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn word_of(step: u64, place: u64, index: u64) -> u64 {
    (step ^ place << 32 ^ index << 52).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ step
}

fn fill(guest: &mut Guest, mib: u64, mix: &str) -> Result<String, String> {
    let bytes = (mib << 20) as usize;
    let mut memory = vec![0u8; bytes];
    let quarter = bytes / 4;
    if mix == "zeros" {
        touch(&mut memory);
    } else if mix == "equal" {
        let (first, rest) = memory.split_at_mut(EQUAL * PAGE);
        noise(first);
        rest.chunks_mut(EQUAL * PAGE).for_each(|it| it.copy_from_slice(&first[..it.len()]));
    } else if mix == "mixed" {
        let mut disk = File::open("/dev/vdb").map_err(|error| error.to_string())?;
        let half = disk.seek(SeekFrom::End(0)).map_err(|error| error.to_string())? / 2;
        // Quarters: zeros (touched), text, programs, noise.
        touch(&mut memory[..quarter]);
        copy_from(&disk, 0, half, &mut memory[quarter..2 * quarter])?;
        copy_from(&disk, half, half, &mut memory[2 * quarter..3 * quarter])?;
        noise(&mut memory[3 * quarter..]);
        // The samples are short, and repeat: each page is another all the same.
        number(&mut memory[quarter..3 * quarter]);
    } else {
        noise_pages(&mut memory);
    }
    guest.filled = Some(Arc::new(Mutex::new(memory)));
    guest.is_equal = mix == "equal";
    Ok(String::new())
}

/// Makes pages of zeros that are there.
fn touch(memory: &mut [u8]) {
    memory.chunks_mut(PAGE).for_each(|page| {
        page[0] = 1;
        page[0] = std::hint::black_box(0);
    });
}

fn copy_from(disk: &File, start: u64, length: u64, into: &mut [u8]) -> Result<(), String> {
    let mut sample = vec![0; length as usize];
    disk.read_exact_at(&mut sample, start).map_err(|error| error.to_string())?;
    for piece in into.chunks_mut(sample.len()) {
        piece.copy_from_slice(&sample[..piece.len()]);
    }
    Ok(())
}

fn noise(memory: &mut [u8]) {
    let mut state = SEED;
    for word in memory.chunks_exact_mut(8) {
        word.copy_from_slice(&random(&mut state).to_le_bytes());
    }
}

/// So much noise is made at most: to make it takes an emulated CPU ten times as long as to copy it.
const NOISE_BLOCK: usize = 1 << 20;
/// Pages of `fill equal` that differ.
const EQUAL: usize = 32;

/// Pages of noise, each another: the same block over and over, and in each page its number. No codec
/// sees the repetition: it lies further apart than a frame of 64 KiB is long.
fn noise_pages(memory: &mut [u8]) {
    let (block, rest) = memory.split_at_mut(NOISE_BLOCK.min(memory.len()));
    noise(block);
    rest.chunks_mut(NOISE_BLOCK).for_each(|piece| piece.copy_from_slice(&block[..piece.len()]));
    number(memory);
}

/// Writes its number into each page.
fn number(memory: &mut [u8]) {
    for (number, page) in memory.chunks_exact_mut(PAGE).enumerate() {
        page[..8].copy_from_slice(&number_of(number));
    }
}

fn number_of(page: usize) -> [u8; 8] {
    (page as u64 ^ SEED).to_le_bytes()
}

fn filled(guest: &Guest) -> Result<String, String> {
    let memory = guest.filled.as_ref().ok_or("fill first")?.lock().expect("lock");
    let mut block = vec![0; if guest.is_equal { EQUAL * PAGE } else { NOISE_BLOCK }];
    noise(&mut block);
    let is_right = |(number, page): (usize, &[u8])| {
        let model = &block[number * PAGE % block.len()..][..PAGE];
        let first = if guest.is_equal { page[..8] == model[..8] } else { page[..8] == number_of(number) };
        first && page[8..] == model[8..]
    };
    match memory.chunks_exact(PAGE).enumerate().position(|page| !is_right(page)) {
        None => Ok(memory.len().to_string()),
        Some(page) => Err(format!("page {page} of what was filled is another")),
    }
}

/// Writes a word, or every word of a page, in so many pages a second.
fn write(guest: &Guest, rate: u64, whole_pages: bool) -> Result<String, String> {
    let memory = guest.filled.clone().ok_or("fill first")?;
    guest.whole_pages.store(whole_pages, Relaxed);
    let whole_pages = guest.whole_pages.clone();
    let idle = guest.rate.swap(rate, Relaxed) == 0;
    let (rate, count) = (guest.rate.clone(), guest.count.clone());
    if idle && rate.load(Relaxed) > 0 {
        thread::spawn(move || {
            let mut memory = memory.lock().expect("lock");
            let pages = memory.len() / PAGE / 2;
            if whole_pages.load(Relaxed) {
                // From the beginning all of them are as they will be.
                memory[..pages * PAGE].chunks_exact_mut(PAGE).zip(1..).for_each(colour);
            }
            let mut state = 88_172_645_463_325_252;
            let mut next = Instant::now();
            loop {
                let per_tick = rate.load(Relaxed) / 200;
                if per_tick == 0 {
                    return;
                }
                for _ in 0..per_tick {
                    let number = random(&mut state);
                    let page = (number as usize >> 8) % pages * PAGE;
                    if whole_pages.load(Relaxed) {
                        colour((&mut memory[page..page + PAGE], number));
                    } else {
                        let at = page + (number as usize % WORDS) * 8;
                        memory[at..at + 8].copy_from_slice(&number.to_le_bytes());
                    }
                }
                count.fetch_add(per_tick, Relaxed);
                next += Duration::from_millis(5);
                let now = Instant::now();
                if next > now {
                    thread::sleep(next - now);
                } else {
                    // What was missed is missed: that is what is measured.
                    next = now;
                }
            }
        });
    }
    Ok(String::new())
}

fn colour((page, word): (&mut [u8], u64)) {
    page.chunks_exact_mut(8).for_each(|place| place.copy_from_slice(&word.to_le_bytes()));
}

fn check(
    guest: &mut Guest,
    pages: u64,
    threads: u64,
    disk: &str,
    hard: bool,
) -> Result<String, String> {
    for id in 0..threads.max(1) {
        let writer = Writer::new(id, pages, disk, hard)?;
        let count = guest.count.clone();
        start(guest, writer, count);
    }
    Ok(String::new())
}

/// Lets a program do one step after the other, and check all that it did when asked.
fn start(guest: &mut Guest, mut program: impl Checked, count: Arc<AtomicU64>) -> String {
    let (asks, asked) = mpsc::channel();
    thread::spawn(move || {
        let mut broken = None;
        loop {
            while let Ok(Ask::Verify(answer)) = asked.try_recv() {
                let _ = answer.send(broken.clone().map_or_else(|| program.verify(), Err));
            }
            if broken.is_some() {
                thread::sleep(Duration::from_millis(10));
            } else if let Err(why) = program.step() {
                broken = Some(why);
            }
            count.fetch_add(1, Relaxed);
        }
    });
    guest.writers.push(asks);
    String::new()
}

fn verify(guest: &Guest) -> Result<String, String> {
    let mut steps = 0;
    for writer in &guest.writers {
        let (answer, answered) = mpsc::channel();
        writer.send(Ask::Verify(answer)).map_err(|_| "a writer is gone".to_owned())?;
        steps += answered.recv().map_err(|_| "a writer is gone".to_owned())??;
    }
    Ok(steps.to_string())
}
