//! A store without one free byte is made less full by what is there for that.

use crate::common::write_image;
use dewar_image::{Deleted, Location, Store, collect, verify};
use dewar_testkit::{RedisServer, SmallDisk};
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
    let freed = collect(&store, false, |_, _| {}).expect("collect");
    assert!(freed.segments_removed > 0 && freed.bytes_freed > 0, "{freed:?}");
    verify(&store, &images[1], |_, _| {}).expect("the other is whole");
    disk.fill().expect("fill");
    assert_eq!(store.delete(&images[1]).expect("delete"), Deleted::Whole);
    assert_eq!(files(&folder.join("segments")), 0);
    assert_eq!(files(&folder.join("writers")), 0);
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
    let freed = collect(&store, false, |_, _| {}).expect("collect");
    assert!(freed.segments_removed > 0, "{freed:?}");
    verify(&store, &images[1], |_, _| {}).expect("the other is whole");
    assert_eq!(store.delete(&images[1]).expect("delete"), Deleted::Whole);
}
