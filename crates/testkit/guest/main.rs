//! The program that runs inside test guests. Standard library only: it is
//! linked statically and runs on a bare initramfs.
//!
//! `heartbeat` prints a byte every millisecond, or every `$beat_ms`. `serve TTY` obeys lines on a
//! serial port, one answer line each:
//!
//! - `fill MIB MIX`: takes MIB of memory and fills it; MIX is `mixed` (a
//!   quarter each zeros, text, programs, noise, from the second disk) or
//!   `noise`.
//! - `words RATE`: writes one word in each of RATE random pages a second, over
//!   the first half of what was filled. `words 0` stops.
//! - `check PAGES THREADS DISK`: starts checkable writers: THREADS threads
//!   with PAGES pages each; DISK is `disk` (each writes blocks of the first
//!   disk, past the page cache), `reads` (and reads others into its pages), or
//!   `none`.
//! - `verify`: every writer checks everything it knows. `ok STEPS` or `bad WHY`.
//! - `count`: steps, or words, done so far.
//! - `net ADDRESS`: gives the first network card an address, such as 10.9.0.2/24.
//! - `listen`: answers on TCP: on port 80 with a web page, on port 7 with what it
//!   is sent.
//! - `spawn PROGRAM ARGUMENT...`: starts a program in the background.
//! - `show FILE`: the file's lines, with `;` between.
//! - `quit`: powers the guest down.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
const O_DIRECT: i32 = 0o40000;
/// Blocks of the first disk that each writer owns.
const BLOCKS: u64 = 512;
/// Where blocks with a fixed content begin, and how many there are.
const FIXED_AT: u64 = 4096;
const FIXED: u64 = 1024;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    match arguments.get(1).map(String::as_str) {
        Some("heartbeat") => heartbeat(),
        Some("serve") => serve(&arguments[2]),
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

/// What the rest of the program asks of a writer.
enum Ask {
    Verify(mpsc::Sender<Result<u64, String>>),
}

#[derive(Default)]
struct Guest {
    filled: Option<Arc<Mutex<Vec<u8>>>>,
    rate: Arc<AtomicU64>,
    count: Arc<AtomicU64>,
    writers: Vec<mpsc::Sender<Ask>>,
}

fn serve(tty: &str) {
    let port = OpenOptions::new().read(true).write(true).open(tty).expect("tty");
    let mut answers = port.try_clone().expect("tty");
    let mut guest = Guest::default();
    let _ = writeln!(answers, "dewar-guest ready");
    for line in BufReader::new(port).lines() {
        let Ok(line) = line else { continue };
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(command) = words.first() else { continue };
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        let answer = match *command {
            "fill" => fill(&mut guest, number(1), words.get(2).copied().unwrap_or("mixed")),
            "words" => write_words(&guest, number(1)),
            "check" => check(&mut guest, number(1), number(2), words.get(3).copied().unwrap_or("none")),
            "verify" => verify(&guest),
            "count" => Ok(guest.count.load(Relaxed).to_string()),
            "net" => network(words.get(1).copied().unwrap_or_default()),
            "listen" => listen(80, web).and_then(|_| listen(7, echo)),
            "spawn" => spawn(&words[1..]),
            "show" => std::fs::read_to_string(words.get(1).copied().unwrap_or_default())
                .map(|text| text.trim().replace('\n', ";"))
                .map_err(|error| error.to_string()),
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

fn spawn(words: &[&str]) -> Result<String, String> {
    let (program, arguments) = words.split_first().ok_or("which program?")?;
    let mut command = std::process::Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().map_err(|error| error.to_string())?;
    Ok(child.id().to_string())
}

fn network(address: &str) -> Result<String, String> {
    let ip = |words: &[&str]| {
        let status = std::process::Command::new("ip").args(words).status();
        status.is_ok_and(|it| it.success()).then_some(()).ok_or("ip failed".to_owned())
    };
    ip(&["addr", "add", address, "dev", "eth0"])?;
    ip(&["link", "set", "eth0", "up"])?;
    Ok(String::new())
}

/// Serves each connection to a port with a thread of its own.
fn listen(port: u16, serve: fn(TcpStream) -> std::io::Result<()>) -> Result<String, String> {
    let listener = TcpListener::bind(("0.0.0.0", port)).map_err(|error| error.to_string())?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || serve(stream));
        }
    });
    Ok(String::new())
}

fn web(mut stream: TcpStream) -> std::io::Result<()> {
    let mut request = [0; 1024];
    let _ = stream.read(&mut request)?;
    stream.write_all(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nwarm\n")
}

fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    let mut bytes = [0; 1024];
    loop {
        let count = stream.read(&mut bytes)?;
        if count == 0 {
            return Ok(());
        }
        stream.write_all(&bytes[..count])?;
    }
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn fill(guest: &mut Guest, mib: u64, mix: &str) -> Result<String, String> {
    let bytes = (mib << 20) as usize;
    let mut memory = vec![0u8; bytes];
    let quarter = bytes / 4;
    if mix == "mixed" {
        let mut disk = File::open("/dev/vdb").map_err(|error| error.to_string())?;
        let half = disk.seek(SeekFrom::End(0)).map_err(|error| error.to_string())? / 2;
        // Quarters: zeros (touched), text, programs, noise.
        memory[..quarter].chunks_mut(PAGE).for_each(|page| {
            page[0] = 1;
            page[0] = std::hint::black_box(0);
        });
        copy_from(&disk, 0, half, &mut memory[quarter..2 * quarter])?;
        copy_from(&disk, half, half, &mut memory[2 * quarter..3 * quarter])?;
        noise(&mut memory[3 * quarter..]);
    } else {
        noise(&mut memory);
    }
    guest.filled = Some(Arc::new(Mutex::new(memory)));
    Ok(String::new())
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
    let mut state = 0x9e37_79b9_7f4a_7c15;
    for word in memory.chunks_exact_mut(8) {
        word.copy_from_slice(&random(&mut state).to_le_bytes());
    }
}

fn write_words(guest: &Guest, rate: u64) -> Result<String, String> {
    let memory = guest.filled.clone().ok_or("fill first")?;
    let idle = guest.rate.swap(rate, Relaxed) == 0;
    let (rate, count) = (guest.rate.clone(), guest.count.clone());
    if idle && rate.load(Relaxed) > 0 {
        thread::spawn(move || {
            let mut memory = memory.lock().expect("lock");
            let pages = memory.len() / PAGE / 2;
            let mut state = 88_172_645_463_325_252;
            let mut next = Instant::now();
            loop {
                let per_tick = rate.load(Relaxed) / 200;
                if per_tick == 0 {
                    return;
                }
                for _ in 0..per_tick {
                    let number = random(&mut state);
                    let at = (number as usize >> 8) % pages * PAGE + (number as usize % WORDS) * 8;
                    memory[at..at + 8].copy_from_slice(&number.to_le_bytes());
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

/// A program whose memory and disk keep a relation that one step at a time
/// maintains: each page and each block holds what was written at the step that
/// a table remembers for it, and the table's sum is remembered too. A page, a
/// block or a piece of the table from another instant breaks it.
struct Writer {
    id: u64,
    state: u64,
    step: u64,
    pages: Vec<u64>,
    page_steps: Vec<u64>,
    page_sum: u64,
    disk: Option<File>,
    block_steps: Vec<u64>,
    block_sum: u64,
    block: Vec<u8>,
    /// Pages filled by the disk, and which block each holds.
    read_into: Vec<u8>,
    read_blocks: Vec<u64>,
    reads: bool,
}

/// The part of a buffer that direct I/O accepts.
fn aligned(buffer: &mut [u8], bytes: usize) -> &mut [u8] {
    let skip = buffer.as_ptr().align_offset(PAGE);
    &mut buffer[skip..skip + bytes]
}

fn word_of(step: u64, place: u64, index: u64) -> u64 {
    (step ^ place << 32 ^ index << 52).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ step
}

fn fixed_block(block: u64) -> impl Iterator<Item = u64> {
    (0..WORDS as u64).map(move |index| word_of(0xf1ed, block, index))
}

impl Writer {
    fn new(id: u64, pages: u64, disk: &str) -> Result<Self, String> {
        let open = || {
            OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT).open("/dev/vda")
        };
        let disk_file =
            (disk != "none").then(open).transpose().map_err(|error| error.to_string())?;
        let reads = disk == "reads";
        let mut writer = Self {
            id,
            state: 0x1234_5678_9abc_def1 + id,
            step: 0,
            pages: vec![0; pages as usize * WORDS],
            page_steps: vec![0; pages as usize],
            page_sum: 0,
            disk: disk_file,
            block_steps: vec![0; BLOCKS as usize],
            block_sum: 0,
            block: vec![0; 2 * PAGE],
            read_into: vec![0; if reads { (FIXED as usize + 1) * PAGE } else { 0 }],
            read_blocks: vec![0; if reads { FIXED as usize } else { 0 }],
            reads,
        };
        if reads {
            writer.write_fixed(id).map_err(|error| error.to_string())?;
            for slot in 0..FIXED {
                writer.read_fixed(slot, slot).map_err(|error| error.to_string())?;
            }
        }
        Ok(writer)
    }

    fn write_fixed(&mut self, id: u64) -> std::io::Result<()> {
        let Some(disk) = self.disk.as_ref().filter(|_| id == 0) else { return Ok(()) };
        for block in 0..FIXED {
            let buffer = aligned(&mut self.block, PAGE);
            for (bytes, word) in buffer.chunks_exact_mut(8).zip(fixed_block(block)) {
                bytes.copy_from_slice(&word.to_le_bytes());
            }
            disk.write_all_at(buffer, (FIXED_AT + block) * PAGE as u64)?;
        }
        Ok(())
    }

    fn read_fixed(&mut self, slot: u64, block: u64) -> std::io::Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let start = slot as usize * PAGE;
        let page = &mut aligned(&mut self.read_into, FIXED as usize * PAGE)[start..start + PAGE];
        disk.read_exact_at(page, (FIXED_AT + block) * PAGE as u64)?;
        self.read_blocks[slot as usize] = block;
        Ok(())
    }

    fn step(&mut self) -> Result<(), String> {
        self.step += 1;
        let page = random(&mut self.state) % self.page_steps.len() as u64;
        let at = page as usize * WORDS;
        for (index, word) in self.pages[at..at + WORDS].iter_mut().enumerate() {
            *word = word_of(self.step, page, index as u64);
        }
        self.page_sum += self.step - self.page_steps[page as usize];
        self.page_steps[page as usize] = self.step;
        if self.reads && self.step % 8 == 0 {
            let number = random(&mut self.state);
            let result = self.read_fixed(number % FIXED, number >> 20 & (FIXED - 1));
            result.map_err(|error| error.to_string())?;
        }
        let every = if self.reads { 64 } else { 256 };
        if self.disk.is_some() && self.step % every == 0 {
            self.write_block().map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn write_block(&mut self) -> std::io::Result<()> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let block = random(&mut self.state) % BLOCKS;
        let buffer = aligned(&mut self.block, PAGE);
        for (index, bytes) in buffer.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&word_of(self.step, block, index as u64).to_le_bytes());
        }
        disk.write_all_at(buffer, (self.id * BLOCKS + block) * PAGE as u64)?;
        self.block_sum += self.step - self.block_steps[block as usize];
        self.block_steps[block as usize] = self.step;
        Ok(())
    }

    fn verify(&mut self) -> Result<u64, String> {
        for (page, step) in self.page_steps.iter().enumerate() {
            let words = &self.pages[page * WORDS..(page + 1) * WORDS];
            for (index, word) in words.iter().enumerate() {
                let expected = if *step == 0 { 0 } else { word_of(*step, page as u64, index as u64) };
                if *word != expected {
                    return Err(format!("page {page} is not that of step {step}"));
                }
            }
        }
        if self.page_steps.iter().sum::<u64>() != self.page_sum {
            return Err("the table of pages is not of one instant".to_owned());
        }
        if self.block_steps.iter().sum::<u64>() != self.block_sum {
            return Err("the table of blocks is not of one instant".to_owned());
        }
        let blocks: Vec<u64> = self.read_blocks.clone();
        for (slot, block) in blocks.into_iter().enumerate() {
            let pages = aligned(&mut self.read_into, FIXED as usize * PAGE);
            let page = &pages[slot * PAGE..(slot + 1) * PAGE];
            let mut words = page.chunks_exact(8).zip(fixed_block(block));
            if !words.all(|(bytes, word)| bytes == word.to_le_bytes()) {
                return Err(format!("read page {slot} is not block {block}"));
            }
        }
        self.verify_disk()?;
        Ok(self.step)
    }

    fn verify_disk(&mut self) -> Result<(), String> {
        let Some(disk) = &self.disk else { return Ok(()) };
        let mut all = vec![0; (BLOCKS as usize + 1) * PAGE];
        let blocks = aligned(&mut all, BLOCKS as usize * PAGE);
        disk.read_exact_at(blocks, self.id * BLOCKS * PAGE as u64)
            .map_err(|error| error.to_string())?;
        for (block, step) in self.block_steps.iter().enumerate().filter(|(_, step)| **step != 0) {
            let bytes = &blocks[block * PAGE..(block + 1) * PAGE];
            for (index, word) in bytes.chunks_exact(8).enumerate() {
                if word != word_of(*step, block as u64, index as u64).to_le_bytes() {
                    return Err(format!("disk block {block} is not that of step {step}"));
                }
            }
        }
        Ok(())
    }
}

fn check(guest: &mut Guest, pages: u64, threads: u64, disk: &str) -> Result<String, String> {
    for id in 0..threads.max(1) {
        let (asks, asked) = mpsc::channel();
        let mut writer = Writer::new(id, pages, disk)?;
        let count = guest.count.clone();
        thread::spawn(move || {
            let mut broken = None;
            loop {
                while let Ok(Ask::Verify(answer)) = asked.try_recv() {
                    let _ = answer.send(broken.clone().map_or_else(|| writer.verify(), Err));
                }
                if broken.is_some() {
                    thread::sleep(Duration::from_millis(10));
                } else if let Err(why) = writer.step() {
                    broken = Some(why);
                }
                count.fetch_add(1, Relaxed);
            }
        });
        guest.writers.push(asks);
    }
    Ok(String::new())
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
