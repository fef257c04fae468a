//! Images for tests: pages that differ from each other, and their records.

use dewar_codec::{Codec, Compression};
use dewar_image::{
    Blob, Dedup, DiskRecord, Entry, FrameCache, ImageError, ImageId, ImageOptions, ImageWriter,
    Location, MemoryRecord, PageCounts, Record, RegionRecord, Store,
};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use std::fs;

pub const PAGES: u64 = 3000;

/// A page that is zeros, text, or noise, and differs from every other.
pub fn content(page: u64, version: u64) -> Vec<u8> {
    let mut state = page * 1_000_003 + version + 1;
    match page % 4 {
        0 if version == 0 => vec![0; PAGE_BYTES],
        1 | 2 => format!("page {page} version {version}; ")
            .into_bytes()
            .into_iter()
            .cycle()
            .take(PAGE_BYTES)
            .collect(),
        _ => (0..PAGE_BYTES)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect(),
    }
}

pub fn options() -> ImageOptions {
    ImageOptions {
        pages: PAGES,
        compression: Compression::Only(Codec::Zstd),
        level: 1,
        dedup: Dedup::Off,
    }
}

pub fn commit(writer: ImageWriter<'_>, disk: Option<&str>) -> Record {
    let (root, counts) = writer.finish_memory(100).expect("table");
    let device_state = writer.put_blob(b"device state").expect("blob");
    let hot_pages = writer.put_blob(&[]).expect("blob");
    let disks = disk.map(|content| {
        let scratch = tempfile::tempdir().expect("tempdir");
        let file = writer.reserve_disk(0, "raw", scratch.path()).expect("reserve");
        fs::write(&file, content).expect("disk");
        let digest = writer.put_disk(&file).expect("digest");
        DiskRecord {
            name: "d".into(),
            file: file.file_name().expect("name").to_string_lossy().into_owned(),
            format: "raw".into(),
            virtual_bytes: 1,
            digest,
            below: vec![],
        }
    });
    let record = record(root, counts, device_state, hot_pages);
    writer.commit(record, disks.into_iter().collect()).expect("commit")
}

pub fn record(root: Entry, counts: PageCounts, device_state: Blob, hot_pages: Blob) -> Record {
    let regions = vec![RegionRecord { name: "ram".into(), pages: PAGES }];
    let memory = MemoryRecord { pages: PAGES, root, regions, counts };
    let record = Record::new("g", memory, device_state, hot_pages);
    Record { tag: Some("t".into()), created_ms: 1, ..record }
}

/// An empty store in a folder of its own.
pub fn new_store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().expect("tempdir");
    let store =
        Store::open_or_create(&Location::Folder(folder.path().join("store"))).expect("store");
    (folder, store)
}

/// Writes an image by two threads; the last 500 pages twice.
pub fn write_image(store: &Store) -> Record {
    let writer = store.begin(options(), None).expect("begin");
    writer.put_holes(PageRange::new(0, 100));
    std::thread::scope(|scope| {
        for pages in [100..1500, 1500..PAGES] {
            let writer = &writer;
            scope.spawn(move || {
                let mut sink = writer.sink().expect("sink");
                for page in pages {
                    sink.put(PageNumber(page), &content(page, 0)).expect("put");
                }
                sink.flush().expect("flush");
                sink.finish().expect("finish");
            });
        }
    });
    let mut sink = writer.sink().expect("sink");
    for page in PAGES - 500..PAGES {
        sink.put(PageNumber(page), &content(page, 1)).expect("put");
    }
    sink.finish().expect("finish");
    commit(writer, Some("disk content"))
}

/// An image on top of `parent` in which `changed` pages are new; their content
/// is `content(page, 7)`.
pub fn write_on(store: &Store, parent: &ImageId, changed: &[u64]) -> Record {
    let reader = store.open_image(parent).expect("parent");
    let writer = store.begin(options(), Some(&reader)).expect("begin");
    let mut expected = PageSet::new(PAGES);
    for page in changed {
        expected.insert(PageNumber(*page));
    }
    writer.expect(&expected);
    let unfinished = writer.finish_memory(0);
    assert!(matches!(unfinished, Err(ImageError::Incomplete { .. })), "{unfinished:?}");
    let mut sink = writer.sink().expect("sink");
    for page in changed {
        sink.put(PageNumber(*page), &content(*page, 7)).expect("put");
    }
    sink.finish().expect("finish");
    assert!(matches!(store.delete(parent), Err(ImageError::InUse { .. })));
    commit(writer, None)
}

/// Whether every page comes back exactly.
pub fn read_back(store: &Store, id: &ImageId) -> Result<(), ImageError> {
    let image = store.open_image(id)?;
    let mut cache = FrameCache::new()?;
    for (page, entry) in image.entries()?.into_iter().enumerate() {
        let page = page as u64;
        let expected = match page {
            0..100 => vec![0; PAGE_BYTES],
            _ => content(page, u64::from(page >= PAGES - 500)),
        };
        let found = image.page(PageNumber(page), entry, &mut cache)?;
        assert_eq!(found.unwrap_or(&[0; PAGE_BYTES]), expected, "page {page}");
    }
    assert_eq!(image.blob("device state", &image.record().device_state)?, b"device state");
    store.check_disks(image.record())
}
