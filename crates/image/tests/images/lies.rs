//! Records and segments that are not what they say: a reader takes none for another, does
//! nothing without bound, and one bad record hides no other.

use crate::common::{content, new_store, options, write_image};
use dewar_image::{
    Dedup, Entry, FrameCache, ImageError, ImageId, ImageOptions, ImageReader, Location, Record,
    Store, diff, verify,
};
use dewar_units::{PageNumber, PageSet};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

fn record_path(store: &Store, id: &ImageId) -> PathBuf {
    store.folder().expect("a folder").join(format!("images/{id}.json"))
}

/// Changes an image's record, and makes its checksum fit.
fn forge(store: &Store, id: &ImageId, change: impl FnOnce(&mut Value)) {
    let path = record_path(store, id);
    let whole: Value = serde_json::from_slice(&fs::read(&path).expect("read")).expect("JSON");
    let mut record = whole["record"].clone();
    change(&mut record);
    let body = record.to_string();
    let blake3 = blake3_of(&body);
    let version = &whole["version"];
    let text = format!(
        "{{\"format\":\"dewar-record\",\"version\":{version},\"blake3\":\"{blake3}\",\"record\":{body}}}\n"
    );
    fs::write(path, text).expect("write");
}

fn blake3_of(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").arg(from).arg(to).status().expect("cp");
    assert!(copied.success());
}

fn open(folder: &Path) -> Store {
    Store::open(&Location::Folder(folder.to_owned())).expect("store")
}

/// Writes an image on top of another, with other content in some pages.
fn write_on(store: &Store, parent: &ImageReader, pages: &[u64], version: u64) -> Record {
    let writer = store.begin(options(), Some(parent)).expect("begin");
    let mut set = PageSet::new(crate::common::PAGES);
    for page in pages {
        set.insert(PageNumber(*page));
    }
    writer.expect(&set);
    let mut sink = writer.sink().expect("sink");
    for page in pages {
        sink.put(PageNumber(*page), &content(*page, version)).expect("put");
    }
    sink.finish().expect("finish");
    crate::common::commit(writer, None)
}

/// Two timelines of one store: a copy that went its own way. A segment of the one in the
/// place of its namesake of the other is noticed by every reader.
#[test]
fn a_segment_of_another_timeline_is_not_taken_for_ours() {
    let (folder, store) = new_store();
    let first = write_image(&store);
    let other_folder = folder.path().join("copy");
    copy(store.folder().expect("a folder"), &other_folder);
    let other = open(&other_folder);
    let parent = |store: &Store| store.open_image(&first.id).expect("open");
    let ours = write_on(&store, &parent(&store), &[1, 2, 3], 7);
    let theirs = write_on(&other, &parent(&other), &[1, 2, 3], 8);
    assert_eq!(ours.segments, theirs.segments, "namesakes");
    for number in &ours.segments {
        let name = format!("segments/{number:016x}.seg");
        let (mine, foreign) =
            (store.folder().expect("a folder").join(&name), other_folder.join(&name));
        let before = fs::read(&mine).expect("read");
        fs::copy(foreign, &mine).expect("copy");
        let failed = verify(&store, &ours.id, &mut |_, _| {}).expect_err("another's").to_string();
        assert!(failed.contains("another segment with that number"), "{failed}");
        let image = store.open_image(&ours.id).expect("open");
        image.require_segments().expect_err("another's");
        drop(image);
        fs::write(&mine, before).expect("write");
    }
    verify(&store, &ours.id, &mut |_, _| {}).expect("whole again");

    // A record of theirs beside ours: nothing is taken for shared that is not.
    let copied = format!("images/{}.json", theirs.id);
    fs::copy(other_folder.join(&copied), store.folder().expect("a folder").join(&copied))
        .expect("copy");
    let (a, b) = (store.open_image(&ours.id).expect("a"), store.open_image(&theirs.id).expect("b"));
    diff(&a, &b).expect_err("the other's segments are not here");
    verify(&store, &theirs.id, &mut |_, _| {}).expect_err("the other's segments are not here");
}

/// Fingerprints of an image whose segments are not there lead nowhere.
#[test]
fn a_page_is_not_found_in_a_segment_that_is_another() {
    let (folder, store) = new_store();
    let options = ImageOptions { dedup: Dedup::Store, ..options() };
    let write = |store: &Store, pages: std::ops::Range<u64>| {
        let writer = store.begin(options, None).expect("begin");
        let mut sink = writer.sink().expect("sink");
        for page in 0..crate::common::PAGES {
            let version = if pages.contains(&page) { 1 } else { 5 };
            sink.put(PageNumber(page), &content(page, version)).expect("put");
        }
        sink.finish().expect("finish");
        crate::common::commit(writer, None)
    };
    let other_folder = folder.path().join("copy");
    copy(store.folder().expect("a folder"), &other_folder);
    let theirs = write(&open(&other_folder), 0..0);
    let ours = write(&store, 0..crate::common::PAGES);
    let record = format!("images/{}.json", theirs.id);
    fs::copy(other_folder.join(&record), store.folder().expect("a folder").join(&record))
        .expect("copy");
    let next = write(&store, 0..10);
    assert!(
        next.inherited_segments.is_empty() || ours.segments.contains(&next.inherited_segments[0])
    );
    verify(&store, &next.id, &mut |_, _| {}).expect("whole");
    let image = store.open_image(&next.id).expect("open");
    let entries = image.entries().expect("entries");
    let mut cache = FrameCache::new().expect("cache");
    for (page, entry) in (0..).zip(entries) {
        let read = image.page(PageNumber(page), entry, &mut cache).expect("page");
        let wanted = content(page, if page < 10 { 1 } else { 5 });
        assert!(read.unwrap_or(&[0; 4096]) == wanted, "page {page}");
    }
}

/// Each byte of each segment that an image names is read, whether one of its pages lies
/// there or not.
#[test]
fn verify_reads_every_byte_of_every_segment() {
    let (_folder, store) = new_store();
    let first = write_image(&store);
    let parent = store.open_image(&first.id).expect("open");
    let second = write_on(&store, &parent, &[1, 2, 3], 7);
    drop(parent);
    let (mut own, mut inherited) = (0, 0);
    for number in second.segments.iter().chain(&second.inherited_segments) {
        let path = store.folder().expect("a folder").join(format!("segments/{number:016x}.seg"));
        let bytes = fs::read(&path).expect("read");
        let step = (bytes.len() / 60).max(1);
        // The header, the first frame's header, payloads, the directory, the trailer.
        let ends = (0..170).chain(bytes.len().saturating_sub(60)..bytes.len());
        for at in ends.chain((170..bytes.len()).step_by(step)).filter(|at| *at < bytes.len()) {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            fs::write(&path, changed).expect("write");
            let result = verify(&store, &second.id, &mut |_, _| {});
            assert!(result.is_err(), "byte {at} of {} in segment {number}", bytes.len());
        }
        fs::write(&path, bytes).expect("write");
        *if second.segments.contains(number) { &mut own } else { &mut inherited } += 1;
    }
    assert!(own > 0 && inherited > 0);
    verify(&store, &second.id, &mut |_, _| {}).expect("whole again");
}

#[test]
fn numbers_out_of_range_are_told_and_hide_no_other_record() {
    let (_folder, store) = new_store();
    let good = write_image(&store).id;
    let cases: [(&str, Value); 7] = [
        ("/summary/pause_ms", json!(1e40)),
        ("/summary/total_ms", json!(-1.0)),
        ("/created_ms", json!(u64::MAX)),
        ("/memory/counts/zero", json!(u64::MAX)),
        ("/summary/stored_bytes", json!(u64::MAX)),
        ("/summary/captured/bulk", json!(u64::MAX)),
        ("/memory/pages", json!(u64::MAX)),
    ];
    let bad = write_image(&store).id;
    let whole = fs::read(record_path(&store, &bad)).expect("read");
    for (place, value) in cases {
        forge(&store, &bad, |record| *record.pointer_mut(place).expect(place) = value);
        let (records, problems) = store.records().expect("records");
        assert_eq!(records.len(), 1, "{place}");
        assert_eq!(records[0].id, good);
        assert_eq!(problems.len(), 1, "{place}: {problems:?}");
        fs::write(record_path(&store, &bad), &whole).expect("write");
    }
}

#[test]
fn a_blob_of_one_page_many_times_is_refused() {
    let (_folder, store) = new_store();
    let id = write_image(&store).id;
    let times = 3_000_000u64;
    forge(&store, &id, |record| {
        let entry = record["device_state"]["entries"][0].clone();
        record["device_state"]["entries"] = vec![entry; times as usize].into();
        record["device_state"]["bytes"] = json!(times * 4096);
    });
    let began = Instant::now();
    let failed = verify(&store, &id, &mut |_, _| {}).expect_err("a lie");
    // Whether it is one is not looked into; a large guest's lists may be too large, too.
    assert!(matches!(failed, ImageError::TooLarge { .. }), "{failed}");
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

/// A small table that claims to be of a large guest, by leading to one node again and again.
#[test]
fn a_node_in_two_places_is_refused() {
    let (_folder, store) = new_store();
    let record = write_image(&store);
    // A node full of its own entry is made as a page of RAM, whose address is known then.
    let image = store.open_image(&record.id).expect("open");
    let entries = image.entries().expect("entries");
    let stored = entries.iter().find(|entry| **entry != Entry::ZERO).expect("a page");
    let node: Vec<u8> = stored.0.to_le_bytes().into_iter().cycle().take(4096).collect();
    drop(image);
    let writer = store.begin(options(), None).expect("begin");
    writer.put_holes(dewar_units::PageRange::new(0, crate::common::PAGES));
    let mut sink = writer.sink().expect("sink");
    sink.put(PageNumber(0), &node).expect("put");
    sink.finish().expect("finish");
    let liar = crate::common::commit(writer, None);
    let entry = store.open_image(&liar.id).expect("open").entries().expect("entries")[0];
    forge(&store, &liar.id, |record| {
        let pages = 512 * 512;
        record["memory"]["pages"] = json!(pages);
        record["memory"]["regions"][0]["pages"] = json!(pages);
        record["memory"]["root"] = json!(entry);
    });
    let failed = verify(&store, &liar.id, &mut |_, _| {}).expect_err("a lie").to_string();
    assert!(failed.contains("a node is in two places"), "{failed}");
}
