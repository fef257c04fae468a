//! Pages into and out of stores: `file:` beside a plain sequential write, synced,
//! and a plain read of the same bytes; `redis://` beside `redis-benchmark` with
//! values of the same size and as many connections. Pages are noise, stored raw,
//! so that no codec is measured.

use crate::REPEATS;
use anyhow::{Context, Result, bail};
use dewar_bench::median;
use dewar_codec::{Codec, Compression};
use dewar_image::{
    Dedup, FrameCache, ImageId, ImageOptions, Location, MemoryRecord, Place, Record, RegionRecord,
    Store,
};
use dewar_testkit::RedisServer;
use dewar_units::{PAGE_BYTES, PageNumber};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// 1 GiB into files, and into a server that holds it in memory.
const FILE_PAGES: u64 = 1 << 18;
const REDIS_PAGES: u64 = 1 << 18;
const THREADS: u64 = 2;
/// What a store sends and asks for at a time.
const SEGMENT: usize = 8 << 20;
const FRAME: usize = 64 * PAGE_BYTES;
const CONNECTIONS: &str = "3";
/// [`REDIS_PAGES`] in values of a frame, named as `redis-benchmark` names them.
const FRAMES: &str = "4096";
const FILL: &str = "for n = 0, ARGV[1] - 1 do
    redis.call('SET', string.format('key:%012d', n), string.rep('x', ARGV[2]))
end";

pub fn measure() -> Result<Value> {
    println!("\nthroughput, MB/s ({REPEATS} repeats)");
    let noise = noise();
    let file = file(&noise)?;
    let redis = redis(&noise)?;
    Ok(json!({"file": file, "redis": redis}))
}

fn file(noise: &[u8]) -> Result<Value> {
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let bytes = FILE_PAGES as usize * PAGE_BYTES;
    let [mut into, mut out, mut plain_in, mut plain_out] = [const { Vec::new() }; 4];
    for _ in 0..REPEATS {
        let path = folder.path().join("plain");
        plain_in.push(rate(bytes, || plain_write(&path, noise, bytes))?);
        forget(folder.path())?;
        plain_out.push(rate(bytes, || plain_read(&path))?);
        std::fs::remove_file(&path)?;
        let store = Store::open_or_create(&Location::Folder(folder.path().join("store")))?;
        let mut id = None;
        into.push(rate(bytes, || {
            id = Some(write(&store, FILE_PAGES, noise)?);
            Ok(())
        })?);
        let id = id.context("an image")?;
        forget(folder.path())?;
        out.push(rate(bytes, || read(&store, &id))?);
        store.delete(&id)?;
    }
    Ok(report("file:", "a plain write, synced", [into, plain_in], "a plain read", [out, plain_out]))
}

fn redis(noise: &[u8]) -> Result<Value> {
    let server = RedisServer::start(&["--appendonly", "no"])?;
    let store = Store::open_or_create(&Location::parse(&server.url())?)?;
    let bytes = REDIS_PAGES as usize * PAGE_BYTES;
    let [mut into, mut out, mut plain_in, mut plain_out] = [const { Vec::new() }; 4];
    for _ in 0..REPEATS {
        let size = SEGMENT.to_string();
        let line = ["-t", "set", "-d", &size, "-r", "64", "-n", "64", "-c", CONNECTIONS];
        plain_in.push(benchmark(&server, &line, SEGMENT)?);
        let line = ["-n", "8192", "-c", "2", "-r", FRAMES, "get", "key:__rand_int__"];
        forget_keys(&server)?;
        // All of them: nothing is faster than what is not there.
        server.ask(&["eval", FILL, "0", FRAMES, &FRAME.to_string()])?;
        plain_out.push(benchmark(&server, &line, FRAME)?);
        forget_keys(&server)?;
        let mut id = None;
        into.push(rate(bytes, || {
            id = Some(write(&store, REDIS_PAGES, noise)?);
            Ok(())
        })?);
        let id = id.context("an image")?;
        out.push(rate(bytes, || read(&store, &id))?);
        store.delete(&id)?;
    }
    let beside = "redis-benchmark SET, 8 MiB";
    Ok(report(
        "redis://",
        beside,
        [into, plain_in],
        "redis-benchmark GET, 256 KiB of as much",
        [out, plain_out],
    ))
}

fn forget_keys(server: &RedisServer) -> Result<()> {
    let each = "for _, k in ipairs(redis.call('KEYS', 'key:*')) do redis.call('DEL', k) end";
    server.ask(&["eval", each, "0"])?;
    Ok(())
}

fn report(
    name: &str,
    way_in: &str,
    ins: [Vec<f64>; 2],
    way_out: &str,
    outs: [Vec<f64>; 2],
) -> Value {
    for (what, beside, [ours, theirs]) in [("into", way_in, &ins), ("out of", way_out, &outs)] {
        let (ours, theirs) = (median(ours.clone()), median(theirs.clone()));
        println!(
            "  {what} {name} {ours:.0}; {beside} {theirs:.0}; share {:.2} (to reach: 0.8)",
            ours / theirs
        );
    }
    json!({"into": ins[0], "beside_into": ins[1], "out": outs[0], "beside_out": outs[1]})
}

/// `redis-benchmark`'s requests a second, as MB/s.
fn benchmark(server: &RedisServer, line: &[&str], size: usize) -> Result<f64> {
    let output = Command::new("redis-benchmark")
        .args(["-h", "127.0.0.1", "-p", &server.port().to_string(), "--csv"])
        .args(line)
        .output()
        .context("redis-benchmark")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let row = text.lines().last().context("an answer of redis-benchmark")?;
    let requests = row.split("\",\"").nth(1).context("requests a second")?;
    Ok(requests.trim_matches('"').parse::<f64>()? * size as f64 / 1e6)
}

fn rate(bytes: usize, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let began = Instant::now();
    work()?;
    Ok(bytes as f64 / 1e6 / began.elapsed().as_secs_f64())
}

fn plain_write(path: &Path, noise: &[u8], bytes: usize) -> Result<()> {
    let mut file = File::create(path)?;
    for piece in 0..bytes / (1 << 20) {
        let at = piece * (1 << 20) % (noise.len() - (1 << 20));
        file.write_all(&noise[at..at + (1 << 20)])?;
    }
    Ok(file.sync_all()?)
}

fn plain_read(path: &Path) -> Result<()> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    while file.read(&mut buffer)? > 0 {}
    Ok(())
}

/// Drops files from the page cache.
fn forget(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder)?.flatten() {
        if entry.file_type()?.is_dir() {
            forget(&entry.path())?;
        } else {
            let file = File::open(entry.path())?;
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        }
    }
    Ok(())
}

fn noise() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..(16 << 20) / 8).flat_map(|_| next()).collect()
}

fn write(store: &Store, pages: u64, noise: &[u8]) -> Result<ImageId> {
    let options = ImageOptions {
        pages,
        compression: Compression::Only(Codec::Zstd),
        level: -1,
        dedup: Dedup::Off,
    };
    let writer = store.begin(options, None)?;
    std::thread::scope(|scope| {
        let put = |from: u64| -> Result<()> {
            let mut sink = writer.sink()?;
            for page in from..from + pages / THREADS {
                // No two pages alike.
                let at = page as usize * 61 % (noise.len() - PAGE_BYTES);
                sink.put(PageNumber(page), &noise[at..at + PAGE_BYTES])?;
            }
            Ok(sink.finish()?)
        };
        let threads: Vec<_> =
            (0..THREADS).map(|nth| scope.spawn(move || put(nth * (pages / THREADS)))).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    let (root, counts) = writer.finish_memory(0)?;
    let device_state = writer.put_blob(&[])?;
    let hot_pages = writer.put_blob(&[])?;
    let regions = vec![RegionRecord { name: "ram".to_owned(), pages }];
    let memory = MemoryRecord { pages, root, regions, counts };
    let record = Record::new("bench", memory, device_state, hot_pages);
    writer.sync()?;
    Ok(writer.commit(record, Vec::new())?.id)
}

fn read(store: &Store, id: &ImageId) -> Result<()> {
    let image = store.open_image(id)?;
    let entries = image.entries()?;
    let (image, entries) = (&image, &entries);
    let share = entries.len().div_ceil(image.readers());
    std::thread::scope(|scope| {
        let threads: Vec<_> = entries
            .chunks(share)
            .enumerate()
            .map(|(nth, part)| {
                scope.spawn(move || -> Result<()> {
                    let mut cache = FrameCache::new()?;
                    let first = (nth * share) as u64;
                    let mut last = None;
                    for (page, entry) in (first..).zip(part) {
                        let Ok(Place::Packed(at)) = entry.place() else {
                            bail!("page {page} is in no segment");
                        };
                        // Frame by frame, as a restore reads.
                        if last.replace((at.segment, at.frame)) != Some((at.segment, at.frame)) {
                            image.read_ahead(at.segment);
                            image.frame(PageNumber(page), at, &mut cache)?;
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}
