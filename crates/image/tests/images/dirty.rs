//! Images whose dirty pages lie one by one in a real Redis.

use crate::common::{PAGES, commit, content, options, read_back};
use dewar_image::{
    DirtyStore, Entry, FrameCache, ImageError, ImageId, ImageReader, ImageWriter, Location, Place,
    Record, Store, StoreError, collect, verify,
};
use dewar_testkit::{RedisCluster, RedisServer, wait_until};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use std::path::Path;
use std::time::Duration;

fn open(folder: &Path) -> Store {
    Store::open_or_create(&Location::Folder(folder.to_owned())).expect("store")
}

fn dirty(url: &str) -> Result<DirtyStore, ImageError> {
    DirtyStore::open(&Location::parse(url)?)
}

/// Begins an image with a dirty store.
fn begin_split<'s>(
    store: &'s Store,
    url: &str,
    parent: Option<&'s ImageReader>,
) -> ImageWriter<'s> {
    let mut writer = store.begin(options(), parent).expect("begin");
    writer.use_dirty_store(dirty(url).expect("dirty")).expect("dirty");
    writer
}

/// Puts one page into the dirty store.
fn put_dirty(writer: &ImageWriter<'_>, page: u64, version: u64) {
    let mut sink = writer.keyed_sink().expect("sink").expect("a dirty store");
    sink.put(PageNumber(page), &content(page, version)).expect("put");
    sink.flush().expect("flush");
}

/// The image of [`crate::common::write_image`], its last 500 pages in a dirty store; the
/// bulk pass, which comes late with all of them, gives way.
fn write_split(store: &Store, url: &str) -> Result<Record, ImageError> {
    let mut writer = store.begin(options(), None)?;
    writer.use_dirty_store(dirty(url)?)?;
    writer.put_holes(PageRange::new(0, 100));
    let mut last = PageSet::new(PAGES);
    last.insert_range(PageRange::new(PAGES - 500, PAGES));
    writer.claim(&last);
    for version in [2, 1] {
        let mut sink = writer.keyed_sink()?.expect("a dirty store");
        for page in last.iter() {
            sink.put(page, &content(page.0, version))?;
        }
        sink.flush()?;
    }
    let mut bulk = writer.yielding_sink()?;
    for page in 100..PAGES {
        bulk.put(PageNumber(page), &content(page, 0))?;
    }
    bulk.finish()?;
    Ok(commit(writer, Some("disk content")))
}

fn page(image: &ImageReader, entries: &[Entry], page: u64) -> Result<Vec<u8>, ImageError> {
    let mut cache = FrameCache::new()?;
    let found = image.page(PageNumber(page), entries[page as usize], &mut cache)?;
    Ok(found.unwrap_or(&[0; PAGE_BYTES]).to_vec())
}

/// Keys of pages on a server.
fn keys(server: &RedisServer) -> usize {
    let keys = server.ask(&["--scan", "--pattern", "dewar:pages/*"]).expect("scan");
    keys.lines().filter(|key| !key.is_empty()).count()
}

/// Deletes an image. A server that another test starts has our locks, too, from
/// its fork to its exec.
fn delete(store: &Store, id: &ImageId) {
    wait_until("the locks are ours alone", Duration::from_secs(5), || match store.delete(id) {
        Err(ImageError::InUse { .. }) => false,
        other => {
            other.expect("delete");
            true
        }
    });
}

fn lives(store: &Store, url: &str) {
    let first = write_split(store, url).expect("write");
    assert_eq!(first.memory.counts.keyed, 500);
    assert_eq!(first.keyed.len(), 1);
    assert_eq!(verify(store, &first.id, &mut |_, _| {}).expect("verify").keyed, 500);
    read_back(store, &first.id).expect("read back");

    // An image on top of it shares most, and replaces one page of each kind.
    let parent = store.open_image(&first.id).expect("open");
    let writer = begin_split(store, url, Some(&parent));
    let mut sink = writer.keyed_sink().expect("sink").expect("a dirty store");
    for page in [200, PAGES - 1] {
        sink.put(PageNumber(page), &content(page, 3)).expect("put");
    }
    // One that was put there and then elsewhere is given back.
    sink.put(PageNumber(300), &content(300, 3)).expect("put");
    sink.flush().expect("flush");
    let mut packed = writer.sink().expect("sink");
    for page in [300, PAGES - 2] {
        packed.put(PageNumber(page), &content(page, 3)).expect("put");
    }
    packed.finish().expect("finish");
    let second = commit(writer, None);
    drop(parent);
    assert_eq!((second.keyed.len(), second.memory.counts.keyed), (2, 2));

    // Whichever goes first, the other one is whole.
    delete(store, &first.id);
    collect(store, false, &mut |_, _| {}).expect("gc");
    verify(store, &second.id, &mut |_, _| {}).expect("verify");
    let image = store.open_image(&second.id).expect("open");
    let entries = image.entries().expect("entries");
    for number in [101, 200, 300, PAGES - 300, PAGES - 2, PAGES - 1] {
        let version = match number {
            200 | 300 => 3,
            _ if number >= PAGES - 2 => 3,
            _ => u64::from(number >= PAGES - 500),
        };
        assert_eq!(page(&image, &entries, number).expect("page"), content(number, version));
    }
    let source = |page: u64| match entries[page as usize].place() {
        Ok(Place::Keyed(at)) => Some(at.source),
        _ => None,
    };
    assert_eq!([source(200), source(300), source(PAGES - 300)], [Some(1), None, Some(0)]);
    drop(image);
    delete(store, &second.id);
}

#[test]
fn an_image_spans_two_stores() {
    let server = RedisServer::start(&[]).expect("redis");
    let folder = tempfile::tempdir().expect("tempdir");
    lives(&open(folder.path()), &server.url());
    assert_eq!(keys(&server), 0);
}

#[test]
fn an_image_spans_a_folder_and_a_cluster() {
    let cluster = RedisCluster::start().expect("cluster");
    let folder = tempfile::tempdir().expect("tempdir");
    let store = open(folder.path());
    lives(&store, &cluster.url());
    assert_eq!(cluster.nodes.iter().map(keys).sum::<usize>(), 0);
}

#[test]
fn a_writer_that_gives_up_leaves_nothing() {
    let server = RedisServer::start(&[]).expect("redis");
    let folder = tempfile::tempdir().expect("tempdir");
    let store = open(folder.path());
    let writer = begin_split(&store, &server.url(), None);
    put_dirty(&writer, 7, 0);
    // Somebody collects beside it, with a reason to look there.
    let other = write_split(&store, &server.url()).expect("write");
    collect(&store, false, &mut |_, _| {}).expect("gc");
    assert_eq!(keys(&server), 1 + 2, "leaf nodes of the one and of the other");
    drop(writer);
    delete(&store, &other.id);
    assert_eq!(keys(&server), 0);
}

#[test]
fn a_dirty_store_that_is_away_is_named() {
    let folder = tempfile::tempdir().expect("tempdir");
    let store = open(folder.path());
    let mut server = RedisServer::start(&[]).expect("redis");
    let url = format!("{}?retry=300ms", server.url());
    let image = write_split(&store, &url).expect("write");
    let writer = begin_split(&store, &url, None);
    server.kill().expect("kill");
    let named = |result: Result<(), ImageError>| {
        let told = result.expect_err("it is away").to_string();
        assert!(told.contains(&server.url()), "{told}");
    };
    named(read_back(&store, &image.id));
    named(verify(&store, &image.id, &mut |_, _| {}).map(drop));
    named(store.delete(&image.id).map(drop));
    let told =
        collect(&store, false, &mut |_, _| {}).expect("gc").dirty_problem.expect("a problem");
    assert!(told.contains(&server.url()), "{told}");
    assert_eq!(store.ids().expect("ids"), std::slice::from_ref(&image.id));
    // The writer's death does not keep others from writing.
    drop(writer);
    let left = || std::fs::read_dir(folder.path().join("writers")).expect("list").count();
    assert_eq!(left(), 1, "who comes when it is back has to remove its pages");
    crate::common::write_image(&store);
    assert_eq!(left(), 1);
    server.start_again().expect("restart");
    collect(&store, false, &mut |_, _| {}).expect("gc");
    assert_eq!(left(), 0);
    read_back(&store, &image.id).expect("it kept them");
    server.ask(&["FLUSHALL"]).expect("flush");
    let told = read_back(&store, &image.id).expect_err("lost").to_string();
    assert!(told.contains("page 25") && told.contains("not there any more"), "{told}");
    delete(&store, &image.id);
}

#[test]
fn a_page_in_the_wrong_place_is_refused() {
    let server = RedisServer::start(&[]).expect("redis");
    let folder = tempfile::tempdir().expect("tempdir");
    let store = open(folder.path());
    let image = write_split(&store, &server.url()).expect("write");
    let leaf = |id: &ImageId| format!("dewar:pages/{}/{id}/00000005", store.id());
    let swap = "local a = redis.call('HGET', KEYS[1], ARGV[1])
                redis.call('HSET', KEYS[1], ARGV[2], a) return 1";
    let script = ["EVAL", swap, "1", &leaf(&image.id), "101", "102"];
    assert_eq!(server.ask(&script).expect("swap").trim(), "1");
    let told = verify(&store, &image.id, &mut |_, _| {}).expect_err("swapped").to_string();
    assert!(told.contains(&format!("page {}", 5 * 512 + 102)), "{told}");
    assert!(told.contains("checksum"), "{told}");
}

#[test]
fn what_is_no_dirty_store_is_refused() {
    let told = dirty("file:/tmp/x").expect_err("a folder").to_string();
    assert!(told.contains("redis://"), "{told}");
    let server = RedisServer::start(&["--maxmemory-policy", "allkeys-lru"]).expect("redis");
    assert!(matches!(dirty(&server.url()), Err(ImageError::Store(StoreError::Unfit { .. }))));
}

#[test]
fn an_older_version_of_a_page_is_refused() {
    let server = RedisServer::start(&[]).expect("redis");
    let folder = tempfile::tempdir().expect("tempdir");
    let store = open(folder.path());
    let writer = begin_split(&store, &server.url(), None);
    writer.put_holes(PageRange::new(0, 7));
    writer.put_holes(PageRange::new(8, PAGES));
    let key = format!("dewar:pages/{}/{}/00000000", store.id(), writer.id());
    put_dirty(&writer, 7, 1);
    server.ask(&["COPY", &key, "before"]).expect("copy");
    put_dirty(&writer, 7, 2);
    let id = commit(writer, None).id;
    verify(&store, &id, &mut |_, _| {}).expect("verify");
    // As a server does that lost its last seconds.
    server.ask(&["COPY", "before", &key, "REPLACE"]).expect("copy");
    let told = verify(&store, &id, &mut |_, _| {}).expect_err("stale").to_string();
    assert!(told.contains("page 7") && told.contains("another version"), "{told}");
}

#[test]
fn one_server_by_two_names_loses_nothing() {
    let server = RedisServer::start(&[]).expect("redis");
    let folder = tempfile::tempdir().expect("tempdir");
    let store = open(folder.path());
    let (one, two) = (server.url(), format!("redis://127.1:{}", server.port()));
    let first = write_split(&store, &one).expect("write");
    let parent = store.open_image(&first.id).expect("open");
    let writer = begin_split(&store, &two, Some(&parent));
    put_dirty(&writer, 7, 3);
    let second = commit(writer, None).id;
    drop(parent);
    // A writer by the one name, while a record has the other.
    let writer = begin_split(&store, &one, None);
    put_dirty(&writer, 7, 4);
    delete(&store, &first.id);
    assert_eq!(collect(&store, false, &mut |_, _| {}).expect("gc").dirty_removed, 0);
    verify(&store, &second, &mut |_, _| {}).expect("verify");
    writer.put_holes(PageRange::new(0, 7));
    writer.put_holes(PageRange::new(8, PAGES));
    let third = commit(writer, None).id;
    verify(&store, &third, &mut |_, _| {}).expect("verify");
    for id in [second, third] {
        delete(&store, &id);
    }
    assert_eq!(keys(&server), 0);
}
