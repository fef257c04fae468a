//! Measures what it costs a program to be watched, and how well what it uses is found and warmed: a program reads pages of a
//! cached file, of which an eighth is used again and again, and all of it once. And what a container has of that which is
//! brought back ([`restore`]).

mod restore;

use anyhow::{Context, Result, ensure};
use dewar_bench::median;
use dewar_pagecache::{FileTree, Manifest, ReadWatch, warm};
use dewar_units::PAGE_BYTES;
use rustix::fs::{Advice, fadvise};
use serde_json::json;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pages of the file, and of the pieces of which every eighth is used.
const PAGES: u64 = 65_536;
const PIECE: u64 = 64;
/// For how long is read each time.
const WINDOW: Duration = Duration::from_secs(2);
/// A program that does something with what it reads: so long for each page.
const WORK: [Duration; 3] = [Duration::ZERO, Duration::from_micros(10), Duration::from_micros(50)];

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: dewar-bench-warm DEWAR OUT.json [REPEATS]";
    let dewar = fs::canonicalize(arguments.next().context(usage)?)?;
    let path = arguments.next().context(usage)?;
    let repeats: usize = arguments.next().map_or(Ok(5), |it| it.parse())?;
    let folder = tempfile::tempdir_in(Path::new(&path).parent().context("a folder")?)?;
    let data = folder.path().join("data");
    fs::write(&data, vec![7; PAGES as usize * PAGE_BYTES])?;
    let file = File::open(&data)?;
    file.sync_all()?;
    fadvise(&file, 0, None, Advice::Random)?;
    let trees = [FileTree { host: folder.path().to_owned(), inside: "/".into() }];
    println!("work us\treads/s\twatched\tslower by %\tlost %");
    let mut rows = Vec::new();
    for work in WORK {
        let mut runs = Vec::new();
        for _ in 0..repeats {
            let plain = reads(&file, work)?;
            let (watched, manifest) = watched(&file, work, &trees)?;
            let found = Found::of(&manifest);
            if manifest.lost == 0 {
                ensure!(found.precision == 1.0 && found.recall == 1.0, "{found:?}");
            }
            let slower = (plain / watched - 1.0) * 100.0;
            let lost = manifest.lost as f64 / (watched * WINDOW.as_secs_f64()) * 100.0;
            runs.push([plain, watched, slower, lost, found.precision, found.recall]);
        }
        let of = |index: usize| median(runs.iter().map(|run| run[index]).collect());
        let us = work.as_micros();
        println!("{us}\t{:.0}\t{:.0}\t{:.1}\t{:.1}", of(0), of(1), of(2), of(3));
        rows.push(json!({
            "work_us": us.to_string(), "reads_per_second": of(0), "watched_per_second": of(1),
            "slower_percent": of(2), "lost_percent": of(3), "precision": of(4), "recall": of(5),
        }));
    }
    let (_, manifest) = watched(&file, WORK[1], &trees)?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    let began = Instant::now();
    let warmed = warm(&trees, &manifest, u64::MAX, &AtomicBool::new(false), &|_| {});
    let seconds = began.elapsed().as_secs_f64();
    let megabytes = warmed.read as f64 * PAGE_BYTES as f64 / 1e6;
    println!("{megabytes:.0} MB warmed in {seconds:.2} s");
    let restores = restore::measure(&dewar, repeats)?;
    let all = json!({
        "rows": rows, "warmed_megabytes": megabytes, "warmed_seconds": seconds,
        "restores": restores,
    });
    fs::write(&path, serde_json::to_vec_pretty(&all)?)?;
    Ok(())
}

fn is_used(page: u64) -> bool {
    page / PIECE % 8 == 3
}

/// Reads for so long: all pages once, and then those that are used. Returns reads a second.
fn reads(file: &File, work: Duration) -> Result<f64> {
    let mut page = vec![0; PAGE_BYTES];
    let (began, mut count) = (Instant::now(), 0_u64);
    let used: Vec<u64> = (0..PAGES).filter(|page| is_used(*page)).collect();
    for number in (0..PAGES).chain(used.iter().copied().cycle()) {
        let until = Instant::now() + work;
        file.read_exact_at(&mut page, number * PAGE_BYTES as u64)?;
        std::hint::black_box(&page);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        count += 1;
        // The clock is not asked for each.
        if count % 64 == 0 && count > PAGES + 3 * used.len() as u64 && began.elapsed() > WINDOW {
            break;
        }
    }
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

/// The same while it is watched from another thread.
fn watched(file: &File, work: Duration, trees: &[FileTree]) -> Result<(f64, Manifest)> {
    let own = rustix::thread::gettid().as_raw_nonzero().get();
    let mut watch = ReadWatch::start(trees, &[own])?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            watch.run(Duration::from_secs(3600), || is_over.load(Ordering::Relaxed))?;
            watch.finish()
        });
        let speed = reads(file, work);
        is_over.store(true, Ordering::Relaxed);
        let watched = watching.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok((speed?, watched.manifest(trees)))
    })
}

/// How well what is used was found.
#[derive(Debug)]
struct Found {
    precision: f64,
    recall: f64,
}

impl Found {
    fn of(manifest: &Manifest) -> Self {
        let ranges = manifest.files.iter().flat_map(|file| &file.hot);
        let hot: Vec<u64> = ranges.flat_map(|range| range.start..range.end).collect();
        let right = hot.iter().filter(|page| is_used(**page)).count() as f64;
        let used = (0..PAGES).filter(|page| is_used(*page)).count() as f64;
        Self { precision: right / (hot.len() as f64).max(1.0), recall: right / used }
    }
}
