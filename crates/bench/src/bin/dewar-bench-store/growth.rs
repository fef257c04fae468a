//! `ls`, `gc` and `verify` as a store grows to 1,000 images.

use crate::REPEATS;
use anyhow::{Context, Result};
use dewar_bench::median;
use dewar_codec::{Codec, Compression};
use dewar_image::{
    Dedup, ImageId, ImageOptions, Location, MemoryRecord, Record, RegionRecord, Store,
};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SIZES: [usize; 3] = [10, 100, 1000];
/// RAM of 64 MiB, of which each image writes a part.
const PAGES: u64 = 16_384;
const WRITTEN: u64 = 200;

pub fn measure(dewar: &Path) -> Result<Value> {
    println!("\ngrowth: images of 64 MiB, each on top of the one before");
    let folder = tempfile::tempdir()?;
    let root = folder.path().join("root");
    let store = Store::open_or_create(&Location::Folder(root.join("store")))?;
    let mut rows = Vec::new();
    let mut newest: Option<ImageId> = None;
    let mut made = 0;
    for size in SIZES {
        while made < size {
            newest = Some(write(&store, newest.as_ref(), made as u64)?);
            made += 1;
        }
        let id = newest.as_ref().context("an image")?.0.clone();
        let mut row = json!({"images": size});
        print!("  {size:>5} images:");
        for (name, line) in
            [("ls", vec!["ls"]), ("gc", vec!["gc", "--dry-run"]), ("verify", vec!["verify", &id])]
        {
            let runs: Vec<Cost> =
                (0..REPEATS).map(|_| run(dewar, &root, &line)).collect::<Result<_>>()?;
            let ms = median(runs.iter().map(|it| it.ms).collect());
            let mib = median(runs.iter().map(|it| it.mib).collect());
            print!("  {name} {ms:.0} ms, {mib:.0} MiB;");
            row[name] = json!({"ms": ms, "peak_mib": mib});
        }
        println!();
        rows.push(row);
    }
    Ok(json!(rows))
}

struct Cost {
    ms: f64,
    mib: f64,
}

fn run(dewar: &Path, root: &Path, line: &[&str]) -> Result<Cost> {
    let began = Instant::now();
    let mut child = Command::new(dewar)
        .args(["--json", "--root"])
        .arg(root)
        .args(line)
        .stdout(Stdio::null())
        .spawn()?;
    let mut mib: f64 = 0.0;
    loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()));
        let peak = status.unwrap_or_default().lines().find_map(|line| {
            line.strip_prefix("VmHWM:")?.trim().trim_end_matches(" kB").parse::<f64>().ok()
        });
        mib = peak.map_or(mib, |kib| kib / 1024.0);
        if let Some(ended) = child.try_wait()? {
            anyhow::ensure!(ended.success(), "{line:?} failed");
            return Ok(Cost { ms: began.elapsed().as_secs_f64() * 1e3, mib });
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn write(store: &Store, parent: Option<&ImageId>, number: u64) -> Result<ImageId> {
    let parent = parent.map(|id| store.open_image(id)).transpose()?;
    let options = ImageOptions {
        pages: PAGES,
        compression: Compression::Only(Codec::Zstd),
        level: -1,
        dedup: Dedup::Off,
    };
    let writer = store.begin(options, parent.as_ref())?;
    if parent.is_none() {
        writer.put_holes(PageRange::new(0, PAGES));
    }
    let mut sink = writer.sink()?;
    for nth in 0..WRITTEN {
        let page = (number * 7919 + nth * 61) % PAGES;
        let text = format!("image {number} page {page}; ");
        let bytes: Vec<u8> = text.bytes().cycle().take(PAGE_BYTES).collect();
        sink.put(PageNumber(page), &bytes)?;
    }
    sink.finish()?;
    let (root, counts) = writer.finish_memory(0)?;
    let device_state = writer.put_blob(&[1; 1000])?;
    let hot_pages = writer.put_blob(&[])?;
    let regions = vec![RegionRecord { name: "ram".to_owned(), pages: PAGES }];
    let memory = MemoryRecord { pages: PAGES, root, regions, counts };
    let record = Record::new(&format!("g{}", number % 10), memory, device_state, hot_pages);
    let record = Record { created_ms: number, ..record };
    Ok(writer.commit(record, Vec::new())?.id)
}
