//! A store that version 1 wrote stays readable for ever: `data/v1` is one.
//!
//! It was written by this test with `DEWAR_WRITE_FIXTURE=DIR` set. Its bytes
//! are the worked example of `docs/image-format.md`.

use dewar_codec::Codec;
use dewar_image::{
    Dedup, FrameCache, ImageError, ImageOptions, Location, MemoryRecord, Record, RegionRecord,
    Store, verify,
};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::path::Path;

const PAGES: u64 = 600;

/// Pages 0-9 were never touched; 10 is zeros; 11 and 599 are text; 12 is noise.
fn content(page: u64) -> Vec<u8> {
    match page {
        11 | 599 => {
            let text = format!("page {page} of the worked example; ");
            text.into_bytes().into_iter().cycle().take(PAGE_BYTES).collect()
        }
        12 => {
            let mut state = 1u64;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            };
            (0..PAGE_BYTES).map(|_| next()).collect()
        }
        _ => vec![0; PAGE_BYTES],
    }
}

fn write(root: &Path) -> Result<Record, ImageError> {
    let store = Store::open_or_create(&Location::Folder(root.to_owned()))?;
    let options = ImageOptions { pages: PAGES, codec: Codec::Lz4, level: 1, dedup: Dedup::Off };
    let writer = store.begin(options, None)?;
    writer.put_holes(PageRange::new(0, 10));
    writer.put_holes(PageRange::new(13, 599));
    let mut sink = writer.sink()?;
    for page in [10, 11, 12, 599] {
        sink.put(PageNumber(page), &content(page))?;
    }
    sink.finish()?;
    let (root, counts) = writer.finish_memory(596)?;
    let device_state = writer.put_blob(b"device state")?;
    let hot_pages = writer.put_blob(&599u64.to_le_bytes())?;
    let regions = vec![RegionRecord { name: "ram".into(), pages: PAGES }];
    let memory = MemoryRecord { pages: PAGES, root, regions, counts };
    let record = Record {
        tag: Some("worked".into()),
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
    // Locks are taken on its files, so a copy is read.
    let folder = tempfile::tempdir().expect("tempdir");
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/v1");
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
    let store = Store::open(&Location::Folder(folder.path().to_owned())).expect("store");
    let id = store.find("worked").expect("find");
    verify(&store, &id, |_, _| {}).expect("verify");
    let image = store.open_image(&id).expect("open");
    let mut cache = FrameCache::new().expect("cache");
    for (page, entry) in image.entries().expect("entries").into_iter().enumerate() {
        let found = image.page(PageNumber(page as u64), entry, &mut cache).expect("page");
        assert_eq!(found.unwrap_or(&[0; PAGE_BYTES]), content(page as u64), "page {page}");
    }
    let record = image.record();
    assert_eq!(image.blob("device state", &record.device_state).expect("blob"), b"device state");
    assert_eq!(record.memory.regions[0].name, "ram");
}
