//! A store without one free byte is made less full by what is there for that.

use crate::common::{commit, content, options, write_image};
use dewar_codec::{Codec, Compression};
use dewar_image::{Deleted, ImageOptions, Location, Store, collect, verify};
use dewar_testkit::{RedisServer, SmallDisk};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::fs;
use std::path::Path;

fn open(url: &str) -> Store {
    Store::open_or_create(&Location::parse(url).expect("url")).expect("store")
}

fn files(folder: &Path) -> usize {
    fs::read_dir(folder).expect("list").count()
}

#[test]
fn a_full_folder_is_emptied_by_delete_and_gc() {
    let place = tempfile::tempdir().expect("tempdir");
    let disk = SmallDisk::mount(&place.path().join("small"), "64m").expect("mount");
    let folder = disk.path().join("store");
    let store = open(&folder.display().to_string());
    let images = [(); 3].map(|()| write_image(&store).id);
    // Of this one nobody tells: the collector's.
    fs::remove_file(folder.join(format!("images/{}.json", images[2]))).expect("remove");
    disk.fill().expect("fill");
    assert_eq!(store.delete(&images[0]).expect("delete"), Deleted::Whole);
    disk.fill().expect("fill");
    let freed = collect(&store, false, &mut |_, _| {}).expect("collect");
    assert!(freed.segments_removed > 0 && freed.bytes_freed > 0, "{freed:?}");
    verify(&store, &images[1], &mut |_, _| {}).expect("the other is whole");
    disk.fill().expect("fill");
    assert_eq!(store.delete(&images[1]).expect("delete"), Deleted::Whole);
    assert_eq!(files(&folder.join("segments")), 0);
    assert_eq!(files(&folder.join("writers")), 0);
}

#[test]
fn where_room_is_short_pages_take_as_little_as_they_can() {
    let stored = |url: &str, compression: Compression| {
        let store = open(url);
        let writer = store.begin(ImageOptions { compression, ..options() }, None).expect("begin");
        writer.put_holes(PageRange::new(0, options().pages));
        let mut sink = writer.sink().expect("sink");
        for page in 100..options().pages {
            sink.put(PageNumber(page), &content(page, 0)).expect("put");
        }
        sink.finish().expect("finish");
        let bytes = writer.stored_bytes();
        commit(writer, None);
        bytes
    };
    let place = tempfile::tempdir().expect("tempdir");
    let roomy = place.path().join("roomy").display().to_string();
    let least = stored(&roomy, Compression::Only(Codec::Zstd));
    let all = options().pages * PAGE_BYTES as u64;
    assert!(least < all / 2, "{least} of {all} bytes");
    let size = (all - 1).to_string();
    let disk = SmallDisk::mount(&place.path().join("small"), &size).expect("mount");
    let small = disk.path().join("store").display().to_string();
    assert_eq!(stored(&small, Compression::Auto), least, "in a small folder");
    let server = RedisServer::start(&[]).expect("redis");
    assert_eq!(stored(&server.url(), Compression::Auto), least, "in a server's memory");
}

#[test]
fn a_full_server_is_emptied_by_delete_and_gc() {
    let server = RedisServer::start(&[]).expect("redis");
    let store = open(&server.url());
    let images = [(); 3].map(|()| write_image(&store).id);
    let fill = || server.ask(&["config", "set", "maxmemory", "1"]).expect("config");
    fill();
    let refused = server.ask(&["set", "x", "y"]);
    assert!(refused.is_ok_and(|said| said.contains("OOM")), "it takes no more");
    assert_eq!(store.delete(&images[0]).expect("delete"), Deleted::Whole);
    server.ask(&["del", &format!("{{dewar}}:images/{}.json", images[2])]).expect("del");
    server.ask(&["hdel", "{dewar}:index:images", &format!("{}.json", images[2])]).expect("hdel");
    let freed = collect(&store, false, &mut |_, _| {}).expect("collect");
    assert!(freed.segments_removed > 0, "{freed:?}");
    verify(&store, &images[1], &mut |_, _| {}).expect("the other is whole");
    assert_eq!(store.delete(&images[1]).expect("delete"), Deleted::Whole);
}
