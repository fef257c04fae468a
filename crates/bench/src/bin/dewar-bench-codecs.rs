//! Measures what a core and a GPU make of pages: how fast, how small, and for how much of the host's CPU time.
//! Both do the same with each page: they look whether it is zero, take its XXH3, and encode it. What the GPU
//! takes includes the copies to it and back. LZ4 is a block a page on both sides; what Dewar sends has more pages in
//! a block, and is smaller.

use anyhow::{Context, Result, ensure};
use dewar_bench::{median, sample_file};
use dewar_codec::{encode_words, is_zero};
use dewar_codec_gpu::{Batch, Devices, Encoding, Gpu};
use dewar_units::PAGE_BYTES;
use lz4_flex::block::{compress_into, get_maximum_output_size};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::hint::black_box;
use std::path::Path;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};
use twox_hash::XxHash3_64;

/// Pages of a batch, and batches that are under way at once.
const BATCH: usize = 4096;
const AT_ONCE: usize = 3;
/// Over which content it goes again and again: what a device takes to begin and to end must not count.
const TIMES: usize = 16;
/// More threads are not measured.
const MOST_THREADS: usize = 4;
/// No page is worth more than this, encoded.
const MOST: usize = PAGE_BYTES * 9 / 10;

/// Pages, and the version of each that the reader has.
struct Content {
    name: &'static str,
    pages: Vec<u8>,
    present: Vec<u8>,
}

/// What one way made of some pages.
struct Measured {
    wall: Duration,
    cpu: Duration,
    bytes: usize,
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("usage: dewar-bench-codecs OUT.json [REPEATS]")?;
    let repeats: usize = arguments.next().map_or(Ok(5), |it| it.parse())?;
    let gpus = Gpu::each(Devices::Any).collect::<Result<Vec<_>, _>>()?;
    let cores = std::thread::available_parallelism()?.get();
    println!("{cores} cores");
    println!("content\tencoding\tthreads\twhere\tMB/s\tleft\tCPU s/GB");
    let mut rows = Vec::new();
    for content in contents(Path::new(&path).parent().unwrap_or(Path::new(".")))? {
        for encoding in [Encoding::Runs, Encoding::Deltas, Encoding::Lz4] {
            let case = Case { content: &content, encoding, repeats };
            for threads in [1, cores.min(MOST_THREADS)] {
                let mut workers = vec![|| on_a_core(&content, encoding); threads];
                rows.push(case.row("cores", &mut workers)?);
                for gpu in &gpus {
                    let mut workers = Vec::new();
                    for _ in 0..threads {
                        let batches = (0..AT_ONCE).map(|_| Batch::new(gpu, BATCH));
                        let mut batches = batches.collect::<Result<Vec<_>, _>>()?;
                        let content = &content;
                        workers.push(move || on_gpu(content, encoding, &mut batches));
                    }
                    let place = format!("{} ({})", gpu.name(), gpu.interface());
                    rows.push(case.row(&place, &mut workers)?);
                }
            }
        }
    }
    std::fs::write(
        &path,
        serde_json::to_vec_pretty(
            &json!({ "cores": cores, "megabytes_a_thread": TIMES * 64, "rows": rows }),
        )?,
    )?;
    Ok(())
}

/// What is encoded how, and how often.
struct Case<'c> {
    content: &'c Content,
    encoding: Encoding,
    repeats: usize,
}

impl Case<'_> {
    /// What so many threads do at once, each with the content for itself.
    fn row<W>(&self, place: &str, workers: &mut [W]) -> Result<Value>
    where
        W: FnMut() -> Result<usize> + Send,
    {
        self.measured(workers)?;
        let runs = (0..self.repeats).map(|_| self.measured(workers)).collect::<Result<Vec<_>>>()?;
        let threads = workers.len();
        let bytes = (TIMES * threads * self.content.pages.len()) as f64;
        let of = |number: &dyn Fn(&Measured) -> f64| median(runs.iter().map(number).collect());
        let speed = of(&|run| bytes / run.wall.as_secs_f64() / 1e6);
        let left = of(&|run| run.bytes as f64 / bytes);
        let cpu = of(&|run| run.cpu.as_secs_f64() / bytes * 1e9);
        let (name, encoding) = (self.content.name, self.encoding);
        println!("{name}\t{encoding:?}\t{threads}\t{place}\t{speed:.0}\t{left:.3}\t{cpu:.2}");
        Ok(json!({
            "content": name, "encoding": format!("{encoding:?}").to_lowercase(),
            "threads": threads, "where": place, "megabytes_per_second": speed, "left": left,
            "cpu_seconds_per_gigabyte": cpu,
        }))
    }

    fn measured<W>(&self, workers: &mut [W]) -> Result<Measured>
    where
        W: FnMut() -> Result<usize> + Send,
    {
        let cpu = || Duration::try_from(clock_gettime(ClockId::ProcessCPUTime));
        let (began, began_cpu) = (Instant::now(), cpu()?);
        let bytes = std::thread::scope(|scope| {
            let threads: Vec<_> = workers.iter_mut().map(|worker| scope.spawn(worker)).collect();
            let join = |thread: ScopedJoinHandle<'_, Result<usize>>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).sum::<Result<usize>>()
        })?;
        Ok(Measured { wall: began.elapsed(), cpu: cpu()? - began_cpu, bytes })
    }
}

/// Zeros, noise, text and programs, and these with up to eight words written in each page.
fn contents(folder: &Path) -> Result<Vec<Content>> {
    let mixed = std::fs::read(sample_file(folder)?)?;
    ensure!(mixed.len() % (PAGE_BYTES * BATCH) == 0, "whole batches");
    let noise: Vec<u8> =
        (0..mixed.len() as u64 / 8).flat_map(|index| mix(index).to_le_bytes()).collect();
    let mut written = mixed.clone();
    for (index, page) in written.chunks_exact_mut(PAGE_BYTES).enumerate() {
        for word in 0..8 {
            let at = mix((index * 8 + word) as u64) as usize % (PAGE_BYTES / 8) * 8;
            page[at] ^= 0xff;
        }
    }
    let zeros = vec![0; mixed.len()];
    Ok(vec![
        Content { name: "zero", pages: zeros.clone(), present: noise.clone() },
        Content { name: "noise", present: zeros.clone(), pages: noise },
        Content { name: "mixed", pages: mixed.clone(), present: zeros },
        Content { name: "written", pages: written, present: mixed },
    ])
}

/// A number that looks random (SplitMix64).
fn mix(index: u64) -> u64 {
    let mut mixed = index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The content in pieces of so many bytes, again and again.
fn again(content: &Content, bytes: usize) -> impl Iterator<Item = (&[u8], &[u8])> {
    let pieces = move || content.pages.chunks_exact(bytes).zip(content.present.chunks_exact(bytes));
    (0..TIMES).flat_map(move |_| pieces())
}

fn on_a_core(content: &Content, encoding: Encoding) -> Result<usize> {
    let (mut out, mut bytes) = (Vec::with_capacity(2 * PAGE_BYTES), 0);
    for (page, present) in again(content, PAGE_BYTES) {
        let is_zero = black_box(is_zero(page));
        black_box(XxHash3_64::oneshot(page));
        out.clear();
        let fits = match encoding {
            Encoding::Runs => encode_words(page, None, MOST, &mut out),
            Encoding::Deltas => encode_words(page, Some(present), MOST, &mut out),
            Encoding::Lz4 => {
                out.resize(get_maximum_output_size(PAGE_BYTES), 0);
                let length = compress_into(page, &mut out)?;
                out.truncate(length);
                length <= MOST
            }
        };
        bytes += match (is_zero, fits) {
            (true, _) => 0,
            (false, true) => black_box(&out).len(),
            (false, false) => PAGE_BYTES,
        };
    }
    Ok(bytes)
}

/// Batches go round: each is filled again as soon as what it made was taken.
fn on_gpu(content: &Content, encoding: Encoding, batches: &mut [Batch<'_>]) -> Result<usize> {
    let (mut bytes, mut begun) = (0, 0);
    for (pages, present) in again(content, BATCH * PAGE_BYTES) {
        let batch = &mut batches[begun % AT_ONCE];
        if begun >= AT_ONCE {
            bytes += taken(batch)?;
        }
        batch.fill()?.copy_from_slice(pages);
        if encoding == Encoding::Deltas {
            batch.fill_present()?.copy_from_slice(present);
        }
        batch.begin(BATCH, encoding, MOST)?;
        begun += 1;
    }
    for number in begun.saturating_sub(AT_ONCE)..begun {
        bytes += taken(&mut batches[number % AT_ONCE])?;
    }
    Ok(bytes)
}

/// The bytes of a batch that would be sent.
fn taken(batch: &mut Batch<'_>) -> Result<usize> {
    let encoded = batch.finish()?;
    let page = |index| match encoded.page(index) {
        _ if encoded.is_zero(index) => 0,
        Some(bytes) => bytes.len(),
        None => PAGE_BYTES,
    };
    Ok((0..encoded.count()).map(page).sum())
}
