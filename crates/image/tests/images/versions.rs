//! Stores that each version of the format wrote stay readable for ever. Of version 1 `data/v1`
//! is one with a single image, the worked example of `docs/image-format.md`; `data/v1-chain`
//! has an image whose parent was deleted, and whose segments were compacted;
//! `data/v1-zstd` one by Zstandard, with fingerprints, on a disk copy that stands on
//! another; and `data/v1.resp` is the same in Redis, as the commands that put it there.
//! `data/v1-keyed` has pages in a dirty store, which `data/v1-keyed.resp` is, and the lists
//! of fingerprints that are proof. Of version 2 there are the same.
//!
//! They were written by this test, of that version, with `DEWAR_WRITE_FIXTURE=DIR`,
//! `DEWAR_WRITE_CHAIN=DIR`, `DEWAR_WRITE_ZSTD=DIR`, `DEWAR_WRITE_REDIS=FILE` and
//! `DEWAR_WRITE_KEYED=DIR` (with the server's commands beside it) set.

use dewar_codec::{Codec, Compression};
use dewar_image::{
    Dedup, DirtyStore, DiskRecord, FrameCache, ImageError, ImageOptions, ImageWriter, Location,
    MemoryRecord, Record, RegionRecord, Store, collect, verify,
};
use dewar_testkit::RedisServer;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

const VERSIONS: [&str; 2] = ["v1", "v2"];
const PAGES: u64 = 600;
const OPTIONS: ImageOptions = ImageOptions {
    pages: PAGES,
    compression: Compression::Only(Codec::Lz4),
    level: 1,
    dedup: Dedup::Off,
};

/// Pages 0-9 were never touched; 10 is zeros; 11 and 599 are text; 12 is noise.
fn content(page: u64) -> Vec<u8> {
    match page {
        11 | 599 => text(page),
        12 => noise(1),
        _ => vec![0; PAGE_BYTES],
    }
}

fn text(page: u64) -> Vec<u8> {
    let text = format!("page {page} of the worked example; ");
    text.into_bytes().into_iter().cycle().take(PAGE_BYTES).collect()
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
    commit(writer, 596, "worked", vec![])
}

fn commit(
    writer: ImageWriter<'_>,
    holes: u64,
    tag: &str,
    disks: Vec<DiskRecord>,
) -> Result<Record, ImageError> {
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
    writer.commit(record, disks)
}

#[test]
fn a_store_of_each_version_is_read() {
    if let Some(folder) = std::env::var_os("DEWAR_WRITE_FIXTURE") {
        let record = write(Path::new(&folder)).expect("write");
        println!("{}", record.id);
        return;
    }
    for version in VERSIONS {
        let folder = copy_of(version);
        let record = read(&open(folder.path()), "worked", content);
        assert_eq!(record.memory.regions[0].name, "ram");
    }
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
        images.push(commit(writer, 0, "chain", vec![])?);
    }
    store.delete(&images[0].id)?;
    collect(&store, false, &mut |_, _| {})?;
    Ok(images.remove(1))
}

#[test]
fn a_chain_of_each_version_is_read() {
    if let Some(folder) = std::env::var_os("DEWAR_WRITE_CHAIN") {
        println!("{}", write_chain(Path::new(&folder)).expect("write").id);
        return;
    }
    for version in VERSIONS {
        let folder = copy_of(&format!("{version}-chain"));
        let store = open(folder.path());
        let record = read(&store, "chain", chain_content);
        assert!(record.parent.is_some_and(|parent| store.record(&parent).is_err()));
        assert_eq!(record.inherited_segments, [1, 2]);
    }
}

const ZSTD: ImageOptions = ImageOptions {
    pages: PAGES,
    compression: Compression::Only(Codec::Zstd),
    level: -1,
    dedup: Dedup::Image,
};

/// What the second image by Zstandard holds: from 300 on it has what the first one
/// has from 200 on; what it has from 400 on is new.
fn zstd_content(page: u64) -> Vec<u8> {
    match page {
        12 => noise(2),
        200..264 | 400..464 => text(page),
        300..364 => text(page - 100),
        _ => content(page),
    }
}

/// An image, and one on top of it; the first is deleted.
fn write_zstd(store: &Store) -> Result<Record, ImageError> {
    let mut images: Vec<Record> = Vec::new();
    for version in 0..2 {
        let parent = images.last().map(|last| store.open_image(&last.id)).transpose()?;
        let writer = store.begin(ZSTD, parent.as_ref())?;
        let mut sink = writer.sink()?;
        if version == 0 {
            for page in 0..PAGES {
                let is_later = page == 12 || (300..464).contains(&page);
                let bytes = if is_later { content(page) } else { zstd_content(page) };
                sink.put(PageNumber(page), &bytes)?;
            }
        } else {
            for page in (300..464).chain([12]) {
                sink.put(PageNumber(page), &zstd_content(page))?;
            }
        }
        sink.finish()?;
        let scratch = tempfile::tempdir().expect("tempdir");
        let below = writer.disk_below("d", 1 << 20);
        let path = writer.reserve_disk(0, "qcow2", scratch.path())?;
        std::fs::write(&path, format!("disk of version {version}")).expect("disk");
        let disk = DiskRecord {
            name: "d".into(),
            file: path.file_name().expect("name").to_string_lossy().into_owned(),
            format: "qcow2".into(),
            virtual_bytes: 1 << 20,
            digest: writer.put_disk(&path)?,
            below,
        };
        images.push(commit(writer, 0, "zstd", vec![disk])?);
    }
    store.delete(&images[0].id)?;
    Ok(images.remove(1))
}

/// Reads it, and goes on from it.
fn read_zstd(store: &Store) -> Record {
    let record = read(store, "zstd", zstd_content);
    store.check_disks(&record).expect("disks");
    let parent = store.open_image(&record.id).expect("open");
    let writer = store.begin(ZSTD, Some(&parent)).expect("begin");
    let mut sink = writer.sink().expect("sink");
    for page in 500..564 {
        sink.put(PageNumber(page), &text(page - 100)).expect("put");
    }
    sink.finish().expect("finish");
    assert!(writer.duplicate_pages() > 0, "its fingerprints are known");
    record
}

#[test]
fn zstandard_fingerprints_and_disks_of_each_version_are_read() {
    if let Some(folder) = std::env::var_os("DEWAR_WRITE_ZSTD") {
        let store = Store::open_or_create(&Location::Folder(folder.into())).expect("store");
        println!("{}", write_zstd(&store).expect("write").id);
        return;
    }
    for version in VERSIONS {
        let name = format!("{version}-zstd");
        let folder = copy_of(&name);
        let record = read_zstd(&open(folder.path()));
        assert_eq!(record.disks[0].below.len(), 1);
        let segment = data(&name).join("segments/0000000000000001.seg");
        let segment = std::fs::read(segment).expect("segment");
        let magic = [0x28, 0xb5, 0x2f, 0xfd];
        assert!(segment.windows(4).any(|bytes| bytes == magic), "a Zstandard frame (RFC 8878)");
    }
}

#[test]
fn a_store_of_each_version_in_redis_is_read() {
    let server = RedisServer::start(&[]).expect("redis");
    let place = Location::parse(&server.url()).expect("url");
    if let Some(file) = std::env::var_os("DEWAR_WRITE_REDIS") {
        let store = Store::open_or_create(&place).expect("store");
        println!("{}", write_zstd(&store).expect("write").id);
        std::fs::write(file, all_of(&server.url()).expect("dump")).expect("write");
        return;
    }
    for version in VERSIONS {
        server.ask(&["flushall"]).expect("an empty server");
        load(&server, &format!("{version}.resp"));
        read_zstd(&Store::open(&place).expect("store"));
    }
}

/// Puts into a server what a file in `data` has commands for.
fn load(server: &RedisServer, name: &str) {
    let port = server.port().to_string();
    let loaded = Command::new("redis-cli")
        .args(["-h", "127.0.0.1", "-p", &port, "--pipe"])
        .stdin(File::open(data(name)).expect("open"))
        .output()
        .expect("redis-cli");
    assert!(loaded.status.success(), "{loaded:?}");
}

/// What the second image with a dirty store holds: the pages from 100 on lie there, those
/// from 110 on as the second image put them, and those from 200 on are new in a segment.
fn keyed_content(page: u64) -> Vec<u8> {
    match page {
        100..110 => text(page),
        110..130 => text(page + 1000),
        200..210 => text(page + 2000),
        _ => content(page),
    }
}

/// An image, and one on top of it, both with pages in a dirty store.
fn write_keyed(store: &Store, url: &str) -> Result<Record, ImageError> {
    let mut images: Vec<Record> = Vec::new();
    for dedup in [Dedup::Known, Dedup::Store] {
        let parent = images.last().map(|last| store.open_image(&last.id)).transpose()?;
        let options = ImageOptions { dedup, ..OPTIONS };
        let mut writer = store.begin(options, parent.as_ref())?;
        writer.use_dirty_store(DirtyStore::open(&Location::parse(url)?)?)?;
        let (keyed, packed) = match parent {
            None => (100..120, (0..100).chain(120..PAGES).collect::<Vec<u64>>()),
            Some(_) => (110..130, (200..210).collect()),
        };
        let mut claimed = PageSet::new(PAGES);
        claimed.insert_range(PageRange::new(keyed.start, keyed.end));
        writer.claim(&claimed);
        let mut sink = writer.keyed_sink()?.expect("a dirty store");
        for page in keyed {
            let is_first = parent.is_none();
            let bytes = if is_first { text(page) } else { keyed_content(page) };
            sink.put(PageNumber(page), &bytes)?;
        }
        sink.flush()?;
        let mut sink = writer.sink()?;
        for page in packed {
            let bytes = if parent.is_none() { content(page) } else { keyed_content(page) };
            sink.put(PageNumber(page), &bytes)?;
        }
        sink.finish()?;
        let tag = if parent.is_none() { "first" } else { "keyed" };
        images.push(commit(writer, 0, tag, vec![])?);
    }
    Ok(images.remove(1))
}

#[test]
fn keyed_pages_and_proofs_of_each_version_are_read() {
    let server = RedisServer::start(&[]).expect("redis");
    if let Some(folder) = std::env::var_os("DEWAR_WRITE_KEYED") {
        let folder = PathBuf::from(folder);
        let store = Store::open_or_create(&Location::Folder(folder.clone())).expect("store");
        println!("{}", write_keyed(&store, &server.url()).expect("write").id);
        let dump = all_of(&server.url()).expect("dump");
        std::fs::write(folder.with_extension("resp"), dump).expect("write");
        return;
    }
    for version in VERSIONS {
        server.ask(&["flushall"]).expect("an empty server");
        load(&server, &format!("{version}-keyed.resp"));
        let folder = copy_of(&format!("{version}-keyed"));
        move_server(folder.path(), &server.url());
        read_keyed(&open(folder.path()));
    }
}

/// Reads it, and goes on from it.
fn read_keyed(store: &Store) {
    let record = read(store, "keyed", keyed_content);
    assert_eq!(record.keyed.len(), 2, "{:?}", record.keyed);
    assert_eq!(record.memory.counts.keyed, 20);
    let first = record.parent.expect("a parent");
    let known = store.open_image(&first).expect("open").known_pages().expect("known");
    assert!(!known.is_empty());
    // A later checkpoint finds the pages that these two stored.
    let options = ImageOptions { dedup: Dedup::Store, ..OPTIONS };
    let writer = store.begin(options, None).expect("begin");
    let mut sink = writer.sink().expect("sink");
    for page in (0..64).map(PageNumber) {
        sink.put(page, &keyed_content(200)).expect("put");
    }
    sink.finish().expect("finish");
    assert_eq!(writer.duplicate_pages(), 64);
}

/// Has the records of a store name another server.
fn move_server(folder: &Path, url: &str) {
    for file in std::fs::read_dir(folder.join("images")).expect("images") {
        let path = file.expect("a record").path();
        let text = std::fs::read_to_string(&path).expect("text");
        let (head, record) = text.split_once("\"record\":").expect("a record");
        let record = record.trim_end().strip_suffix('}').expect("its end");
        let mut parts = record.split("redis://127.0.0.1:");
        let mut moved = parts.next().expect("a beginning").to_owned();
        for part in parts {
            moved += url;
            moved += part.trim_start_matches(|letter: char| letter.is_ascii_digit());
        }
        let sum = |bytes: &str| blake3::hash(bytes.as_bytes()).to_hex().to_string();
        let head = head.replace(&sum(record), &sum(&moved));
        std::fs::write(&path, format!("{head}\"record\":{moved}}}\n")).expect("written");
    }
}

/// The commands that put there what a server holds, but for holds.
fn all_of(url: &str) -> redis::RedisResult<Vec<u8>> {
    let mut server = redis::Client::open(url)?.get_connection()?;
    let mut keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut server)?;
    keys.sort();
    let mut commands = Vec::new();
    for key in keys {
        let kind: String = redis::cmd("TYPE").arg(&key).query(&mut server)?;
        let command = match kind.as_str() {
            "string" => {
                let value: Vec<u8> = redis::cmd("GET").arg(&key).query(&mut server)?;
                redis::cmd("SET").arg(&key).arg(value).take()
            }
            "hash" => {
                let fields: Vec<Vec<u8>> = redis::cmd("HGETALL").arg(&key).query(&mut server)?;
                redis::cmd("HSET").arg(&key).arg(fields).take()
            }
            _ => continue,
        };
        commands.extend(command.get_packed_command());
    }
    Ok(commands)
}

fn open(folder: &Path) -> Store {
    Store::open(&Location::Folder(folder.to_owned())).expect("store")
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// A copy of a store in `data`: locks are taken on its files.
fn copy_of(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("tempdir");
    let data = data(name);
    for sub in ["segments", "images", "disks", "writers"] {
        std::fs::create_dir(folder.path().join(sub)).expect("folder");
    }
    for file in ["store.json", "next-segment"].iter().filter(|file| data.join(file).exists()) {
        std::fs::copy(data.join(file), folder.path().join(file)).expect("copy");
    }
    for sub in ["segments", "images", "disks"] {
        // A version control system keeps no empty folders.
        for entry in std::fs::read_dir(data.join(sub)).into_iter().flatten().flatten() {
            let to = folder.path().join(sub).join(entry.file_name());
            std::fs::copy(entry.path(), to).expect("copy");
        }
    }
    folder
}

/// Reads all of an image.
fn read(store: &Store, tag: &str, content: fn(u64) -> Vec<u8>) -> Record {
    let id = store.find(tag).expect("find");
    verify(store, &id, &mut |_, _| {}).expect("verify");
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
