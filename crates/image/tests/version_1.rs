//! Stores that version 1 wrote stay readable for ever: `data/v1` is one with a
//! single image, the worked example of `docs/image-format.md`; `data/v1-chain`
//! has an image whose parent was deleted, and whose segments were compacted.
//!
//! They were written by this test with `DEWAR_WRITE_FIXTURE=DIR` and
//! `DEWAR_WRITE_CHAIN=DIR` set.

use dewar_codec::Codec;
use dewar_image::{
    Dedup, FrameCache, ImageError, ImageOptions, ImageWriter, Location, MemoryRecord, Record,
    RegionRecord, Store, collect, verify,
};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::ops::Range;
use std::path::Path;

const PAGES: u64 = 600;
const OPTIONS: ImageOptions =
    ImageOptions { pages: PAGES, codec: Codec::Lz4, level: 1, dedup: Dedup::Off };

/// Pages 0-9 were never touched; 10 is zeros; 11 and 599 are text; 12 is noise.
fn content(page: u64) -> Vec<u8> {
    match page {
        11 | 599 => {
            let text = format!("page {page} of the worked example; ");
            text.into_bytes().into_iter().cycle().take(PAGE_BYTES).collect()
        }
        12 => noise(1),
        _ => vec![0; PAGE_BYTES],
    }
}

fn noise(seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..PAGE_BYTES).map(|_| next()).collect()
}

fn write(root: &Path) -> Result<Record, ImageError> {
    let store = Store::open_or_create(&Location::Folder(root.to_owned()))?;
    let writer = store.begin(OPTIONS, None)?;
    writer.put_holes(PageRange::new(0, 10));
    writer.put_holes(PageRange::new(13, 599));
    let mut sink = writer.sink()?;
    for page in [10, 11, 12, 599] {
        sink.put(PageNumber(page), &content(page))?;
    }
    sink.finish()?;
    commit(writer, 596, "worked")
}

fn commit(writer: ImageWriter<'_>, holes: u64, tag: &str) -> Result<Record, ImageError> {
    let (root, counts) = writer.finish_memory(holes)?;
    let device_state = writer.put_blob(b"device state")?;
    let hot_pages = writer.put_blob(&599u64.to_le_bytes())?;
    let regions = vec![RegionRecord { name: "ram".into(), pages: PAGES }];
    let memory = MemoryRecord { pages: PAGES, root, regions, counts };
    let record = Record {
        tag: Some(tag.to_owned()),
        created_ms: 1_790_000_000_000,
        machine: serde_json::json!({"hypervisor": "none"}),
        ..Record::new("example", memory, device_state, hot_pages)
    };
    writer.commit(record, vec![])
}

#[test]
fn a_store_of_version_1_is_read() {
    if let Some(folder) = std::env::var_os("DEWAR_WRITE_FIXTURE") {
        let record = write(Path::new(&folder)).expect("write");
        println!("{}", record.id);
        return;
    }
    let folder = copy_of("v1");
    let store = Store::open(&Location::Folder(folder.path().to_owned())).expect("store");
    let record = read(&store, "worked", content);
    assert_eq!(record.memory.regions[0].name, "ram");
}

/// Noise of the chain's first image that became zeros in the second: two frames
/// of their own.
const BECAME_ZEROS: Range<u64> = 100..228;

/// What the chain's last image holds: page 11 is the second image's, 420 to 427
/// and 599 are the first one's.
fn chain_content(page: u64) -> Vec<u8> {
    match page {
        11 => content(599),
        420..428 => noise(page),
        599 => content(page),
        _ => vec![0; PAGE_BYTES],
    }
}

/// A first image, and one on top of it; the first is deleted and its segment
/// compacted.
fn write_chain(root: &Path) -> Result<Record, ImageError> {
    let store = Store::open_or_create(&Location::Folder(root.to_owned()))?;
    let mut images: Vec<Record> = Vec::new();
    for version in 0..2 {
        let parent = images.last().map(|last| store.open_image(&last.id)).transpose()?;
        let writer = store.begin(OPTIONS, parent.as_ref())?;
        let mut sink = writer.sink()?;
        if version == 0 {
            for page in 0..PAGES {
                let became_zeros = BECAME_ZEROS.contains(&page);
                let bytes = if became_zeros { noise(page) } else { chain_content(page) };
                sink.put(PageNumber(page), &bytes)?;
            }
        } else {
            for page in BECAME_ZEROS.chain([11]) {
                sink.put(PageNumber(page), &chain_content(page))?;
            }
        }
        sink.finish()?;
        images.push(commit(writer, 0, "chain")?);
    }
    store.delete(&images[0].id)?;
    collect(&store, false, |_, _| {})?;
    Ok(images.remove(1))
}

#[test]
fn a_chain_of_version_1_is_read() {
    if let Some(folder) = std::env::var_os("DEWAR_WRITE_CHAIN") {
        println!("{}", write_chain(Path::new(&folder)).expect("write").id);
        return;
    }
    let folder = copy_of("v1-chain");
    let store = Store::open(&Location::Folder(folder.path().to_owned())).expect("store");
    let record = read(&store, "chain", chain_content);
    assert!(record.parent.is_some_and(|parent| store.record(&parent).is_err()));
    assert_eq!(record.inherited_segments, [1, 2]);
}

/// A copy of a store in `data`: locks are taken on its files.
fn copy_of(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("tempdir");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    for sub in ["segments", "images", "disks", "writers"] {
        std::fs::create_dir(folder.path().join(sub)).expect("folder");
    }
    std::fs::copy(data.join("store.json"), folder.path().join("store.json")).expect("copy");
    for sub in ["segments", "images"] {
        for entry in std::fs::read_dir(data.join(sub)).expect("list").flatten() {
            let to = folder.path().join(sub).join(entry.file_name());
            std::fs::copy(entry.path(), to).expect("copy");
        }
    }
    folder
}

/// Reads all of an image.
fn read(store: &Store, tag: &str, content: fn(u64) -> Vec<u8>) -> Record {
    let id = store.find(tag).expect("find");
    verify(store, &id, |_, _| {}).expect("verify");
    let image = store.open_image(&id).expect("open");
    let mut cache = FrameCache::new().expect("cache");
    for (page, entry) in image.entries().expect("entries").into_iter().enumerate() {
        let found = image.page(PageNumber(page as u64), entry, &mut cache).expect("page");
        assert_eq!(found.unwrap_or(&[0; PAGE_BYTES]), content(page as u64), "page {page}");
    }
    let record = image.record();
    assert_eq!(image.blob("device state", &record.device_state).expect("blob"), b"device state");
    record.clone()
}
