//! What is hot is found by this kernel's telling, and warmed.

use dewar_pagecache::{FileTree, HotFile, Manifest, ReadWatch, cached, warm};
use rustix::fs::{Advice, fadvise};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const PAGE: usize = 4096;
const PAGES: u64 = 2048;
/// Every eighth piece of these many pages is hot.
const HOT: u64 = 16;

static GO_ON: AtomicBool = AtomicBool::new(false);

/// A folder with a file in it, on a disk. (A tmpfs is nothing but cache.)
fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("folder");
    let path = folder.path().join("data");
    fs::write(&path, vec![7; PAGES as usize * PAGE]).expect("write");
    forget(&path);
    (folder, path)
}

/// Takes a file out of the page cache.
fn forget(path: &Path) {
    let file = File::open(path).expect("open");
    file.sync_all().expect("sync");
    fadvise(&file, 0, None, Advice::DontNeed).expect("fadvise");
}

fn trees(folder: &Path) -> [FileTree; 1] {
    [FileTree { host: folder.to_owned(), inside: "/srv".into() }]
}

fn is_hot(page: u64) -> bool {
    page / HOT % 8 == 3
}

/// Reads all once, in pieces of a megabyte, and what is hot four times more.
fn use_it(path: &Path) {
    let file = File::open(path).expect("open");
    fadvise(&file, 0, None, Advice::Random).expect("fadvise");
    let mut piece = vec![0; 256 * PAGE];
    for start in (0..PAGES).step_by(256) {
        file.read_exact_at(&mut piece, start * PAGE as u64).expect("read");
    }
    for _ in 0..4 {
        for page in (0..PAGES).filter(|page| is_hot(*page)) {
            file.read_exact_at(&mut piece[..PAGE], page * PAGE as u64).expect("read");
        }
    }
}

fn watch(folder: &Path, path: &Path) -> Option<Manifest> {
    let trees = trees(folder);
    let own = rustix::thread::gettid().as_raw_nonzero().get();
    let mut watch = match ReadWatch::start(&trees, &[own]) {
        Ok(watch) => watch,
        Err(error) => {
            println!("SKIPPED pagecache: {error}");
            return None;
        }
    };
    use_it(path);
    watch.run(Duration::from_millis(50), || false).expect("watch");
    Some(watch.finish().expect("watched").manifest(&trees))
}

fn hot_pages(file: &HotFile) -> Vec<u64> {
    file.hot.iter().flat_map(|range| range.start..range.end).collect()
}

#[test]
fn what_is_used_again_is_hot_and_a_scan_is_not() {
    let (folder, path) = folder();
    let Some(manifest) = watch(folder.path(), &path) else { return };
    assert_eq!(manifest.lost, 0);
    let file = manifest.file(Path::new("/srv/data")).expect("it was read");
    let expected: Vec<u64> = (0..PAGES).filter(|page| is_hot(*page)).collect();
    assert_eq!(hot_pages(file), expected);
    assert!(file.hot.iter().all(|range| range.uses >= 4), "{:?}", file.hot);
    // Nothing is left of it in the kernel.
    let again = watch(folder.path(), &path).expect("again");
    assert_eq!(again.pages(), manifest.pages());
}

#[test]
fn what_is_hot_is_cached_when_it_was_warmed() {
    let (folder, path) = folder();
    let Some(manifest) = watch(folder.path(), &path) else { return };
    let trees = trees(folder.path());
    let hot = manifest.pages();
    forget(&path);
    let [before] = &cached(&trees, Some(&manifest))[..] else { panic!("one file") };
    assert_eq!((before.hot, before.missing, before.cached), (hot, hot, 0));
    // A limit is kept.
    let some = warm(&trees, &manifest, 64 * PAGE as u64, &GO_ON, &|_| {});
    assert_eq!((some.read, some.stopped), (64, Some("the limit was reached")));
    let all = warm(&trees, &manifest, u64::MAX, &GO_ON, &|_| {});
    assert_eq!((all.read + all.cached, all.stopped), (hot, None));
    assert!(all.cached >= 64, "{all:?}");
    let [after] = &cached(&trees, Some(&manifest))[..] else { panic!("one file") };
    assert_eq!((after.hot, after.missing), (hot, 0));
    // A file that changed is another one.
    fs::write(&path, vec![8; PAGES as usize * PAGE]).expect("write");
    let other = warm(&trees, &manifest, u64::MAX, &GO_ON, &|_| {});
    assert_eq!((other.read, other.skipped), (0, vec![PathBuf::from("/srv/data")]));
    // One that is a device now is not opened at all.
    fs::rename(&path, folder.path().join("kept")).expect("rename");
    assert!(Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
    assert_eq!(warm(&trees, &manifest, u64::MAX, &GO_ON, &|_| {}).skipped.len(), 1);
    fs::rename(folder.path().join("kept"), &path).expect("rename");
    // So is one that is gone, and one behind a link.
    fs::rename(&path, folder.path().join("moved")).expect("rename");
    std::os::unix::fs::symlink(folder.path().join("moved"), &path).expect("link");
    assert_eq!(warm(&trees, &manifest, u64::MAX, &GO_ON, &|_| {}).skipped.len(), 1);
}
