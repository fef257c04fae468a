//! A store in a real Redis server and in a real Cluster of three.

use crate::common::{PAGES, commit, content, options, read_back, write_image, write_on};
use dewar_image::{FrameCache, ImageError, ImageId, Location, Store, collect, verify};
use dewar_testkit::{RedisCluster, RedisServer, SlowWay, wait_until};
use dewar_units::{PageNumber, PageRange};
use std::time::{Duration, Instant};

fn open(url: &str) -> Result<Store, ImageError> {
    Store::open_or_create(&Location::parse(url)?)
}

/// The image that [`write_image`] makes, on top of `parent`, with one more page.
fn write_child(store: &Store, parent: &ImageId) -> Result<ImageId, ImageError> {
    let parent = store.open_image(parent)?;
    let writer = store.begin(options(), Some(&parent))?;
    let mut sink = writer.sink()?;
    sink.put(PageNumber(7), &content(7, 3))?;
    sink.finish()?;
    Ok(commit(writer, None).id)
}

/// Keys of large objects, on any node.
fn large_keys(server: &RedisServer) -> usize {
    let keys = server.ask(&["--scan", "--pattern", "dewar:*"]).expect("scan");
    keys.lines().filter(|key| !key.is_empty()).count()
}

fn lives(store: &Store) {
    let first = write_image(store);
    read_back(store, &first.id).expect("read back");
    verify(store, &first.id, &mut |_, _| {}).expect("verify");
    let second = write_child(store, &first.id).expect("child");
    assert!(store.record(&second).expect("record").summary.inherited_bytes > 0);
    assert_eq!(store.ids().expect("ids").len(), 2);
    store.delete(&first.id).expect("delete");
    let image = store.open_image(&second).expect("open");
    let entries = image.entries().expect("entries");
    let mut cache = dewar_image::FrameCache::new().expect("cache");
    for page in [7, 101, 1501, PAGES - 1] {
        let expected = content(page, if page == 7 { 3 } else { u64::from(page >= PAGES - 500) });
        let found = image.page(PageNumber(page), entries[page as usize], &mut cache).expect("page");
        assert_eq!(found.expect("not zeros"), expected);
    }
    // A segment of which one frame is needed is made small under our eyes.
    let freed = collect(store, false, &mut |_, _| {}).expect("gc");
    let again = image.page(PageNumber(101), entries[101], &mut cache).expect("page");
    assert_eq!(again.expect("not zeros"), content(101, 0));
    assert!(matches!(store.delete(&second), Err(ImageError::InUse { .. })), "{freed:?}");
    drop(image);
    verify(store, &second, &mut |_, _| {}).expect("verify");
    store.delete(&second).expect("delete");
    assert_eq!(store.ids().expect("ids"), []);
}

#[test]
fn images_live_in_a_server() {
    let server = RedisServer::start(&[]).expect("redis");
    let store = open(&server.url()).expect("store");
    lives(&store);
    assert_eq!(large_keys(&server), 0);
    // Another store in the same server is another store.
    let other = open(&format!("{}?prefix=other", server.url())).expect("store");
    assert_ne!(other.id(), store.id());
    let missing =
        Store::open(&Location::parse(&format!("{}?prefix=no", server.url())).expect("url"));
    assert!(matches!(missing, Err(ImageError::NoStore { .. })), "{missing:?}");
}

#[test]
fn images_live_in_a_cluster() {
    let cluster = RedisCluster::start().expect("cluster");
    let store = open(&cluster.url()).expect("store");
    let image = write_image(&store);
    let spread: Vec<usize> = cluster.nodes.iter().map(large_keys).collect();
    assert!(spread.iter().filter(|keys| **keys > 0).count() >= 2, "{spread:?}");
    store.delete(&image.id).expect("delete");
    lives(&store);
    assert_eq!(cluster.nodes.iter().map(large_keys).sum::<usize>(), 0);
}

#[test]
fn a_server_that_restarts_is_waited_for() {
    let mut server = RedisServer::start(&[]).expect("redis");
    let store = open(&server.url()).expect("store");
    let first = write_image(&store);
    let writer = store.begin(options(), None).expect("begin");
    server.kill().expect("kill");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(600));
            server.start_again().expect("start");
        });
        writer.put_holes(PageRange::new(0, 100));
        let mut sink = writer.sink().expect("sink");
        for page in 100..PAGES {
            sink.put(PageNumber(page), &content(page, u64::from(page >= PAGES - 500)))
                .expect("put");
        }
        sink.finish().expect("finish");
    });
    let second = commit(writer, Some("disk content"));
    read_back(&store, &second.id).expect("read back");
    read_back(&store, &first.id).expect("read back");
}

#[test]
fn a_node_that_comes_back_is_waited_for() {
    let mut cluster = RedisCluster::start().expect("cluster");
    let store = open(&cluster.url()).expect("store");
    let first = write_image(&store);
    let second = std::thread::scope(|scope| {
        let node = &mut cluster.nodes[1];
        node.kill().expect("kill");
        scope.spawn(|| {
            // Long enough for the others to miss it.
            std::thread::sleep(Duration::from_secs(2));
            node.start_again().expect("start");
        });
        write_image(&store)
    });
    cluster.wait_whole();
    for image in [first, second] {
        read_back(&store, &image.id).expect("read back");
        verify(&store, &image.id, &mut |_, _| {}).expect("verify");
    }
}

#[test]
fn who_let_go_after_a_restart_holds_nothing() {
    let mut server = RedisServer::start(&[]).expect("redis");
    let store = open(&server.url()).expect("open");
    let other = open(&server.url()).expect("open");
    let id = write_image(&store).id;
    let image = store.open_image(&id).expect("open");
    // Several connections, which the restart breaks.
    read_back(&store, &id).expect("read back");
    server.kill().expect("kill");
    server.start_again().expect("start");
    drop(image);
    other.delete(&id).expect("delete");
}

#[test]
fn a_node_that_stays_away_fails_the_image() {
    let mut cluster = RedisCluster::start().expect("cluster");
    let store = open(&format!("{}/?retry=1s", cluster.url())).expect("store");
    let first = write_image(&store);
    cluster.nodes[1].kill().expect("kill");
    cluster.wait_broken(0);
    let began = Instant::now();
    let failed = write(&store).expect_err("a third of the slots is gone");
    assert!(failed.is_server_failure() || matches!(failed, ImageError::Earlier(_)), "{failed:?}");
    assert!(failed.to_string().contains("redis://"), "{failed}");
    let read = read_back(&store, &first.id);
    assert!(read.is_err(), "a segment of the dead node was read");
    assert!(began.elapsed() < Duration::from_secs(300), "{:?}", began.elapsed());
    cluster.nodes[1].start_again().expect("start");
    cluster.wait_whole();
    read_back(&store, &first.id).expect("read back");
    // What the failed one left goes when its lease has run out.
    std::thread::sleep(Duration::from_secs(21));
    store.sweep().expect("sweep");
    store.delete(&first.id).expect("delete");
    assert_eq!(cluster.nodes.iter().map(large_keys).sum::<usize>(), 0);
}

/// As [`write_image`], with errors told.
fn write(store: &Store) -> Result<(), ImageError> {
    let writer = store.begin(options(), None)?;
    let mut sink = writer.sink()?;
    for page in 0..PAGES {
        sink.put(PageNumber(page), &content(page, 1))?;
    }
    sink.finish()?;
    writer.sync()
}

#[test]
fn what_a_server_refuses_is_told_at_once() {
    let began = Instant::now();
    let full = RedisServer::start(&["--maxmemory", "6mb"]).expect("redis");
    let store = open(&full.url()).expect("store");
    let failed = write(&store).expect_err("full").to_string();
    assert!(failed.contains("it is full"), "{failed}");
    store.sweep().expect("sweep");
    assert_eq!(large_keys(&full), 0, "a failed image leaves nothing");

    for policy in ["allkeys-lru", "volatile-ttl"] {
        let forgets = RedisServer::start(&["--maxmemory-policy", policy]).expect("redis");
        let failed = open(&forgets.url()).expect_err("it evicts").to_string();
        assert!(failed.contains("noeviction"), "{failed}");
    }

    let locked = RedisServer::start(&["--requirepass", "s3cret"]).expect("redis");
    let failed = open(&locked.url()).expect_err("no password").to_string();
    assert!(failed.contains("credentials") && !failed.contains("s3cret"), "{failed}");

    let master = full.port().to_string();
    let replica =
        RedisServer::start(&["--replicaof", &format!("127.0.0.1 {master}")]).expect("redis");
    dewar_testkit::wait_until("the replica", Duration::from_secs(20), || {
        replica.ask(&["dbsize"]).is_ok_and(|keys| keys == full.ask(&["dbsize"]).expect("dbsize"))
    });
    let failed = Store::open(&Location::parse(&replica.url()).expect("url"))
        .and_then(|store| write(&store))
        .expect_err("read-only")
        .to_string();
    assert!(failed.contains("read-only"), "{failed}");
    assert!(began.elapsed() < Duration::from_secs(300), "{:?}", began.elapsed());
}

#[test]
fn an_image_whose_segments_a_server_lost_is_not_made() {
    let server = RedisServer::start(&[]).expect("redis");
    let store = open(&server.url()).expect("store");
    let first = write_image(&store);
    let segments = || server.ask(&["--scan", "--pattern", "dewar:segments/*"]).expect("scan");
    let before = segments();
    let is_new = |key: &&str| !before.contains(key);
    let parent = store.open_image(&first.id).expect("open");
    let writer = store.begin(options(), Some(&parent)).expect("begin");
    let mut sink = writer.sink().expect("sink");
    sink.put(PageNumber(7), &content(7, 3)).expect("put");
    sink.finish().expect("finish");
    let (root, counts) = writer.finish_memory(0).expect("table");
    let device_state = writer.put_blob(b"state").expect("blob");
    let hot_pages = writer.put_blob(&[]).expect("blob");
    writer.sync().expect("sync");
    // As a replica that has not heard of the last seconds.
    let after = segments();
    let lost = after.lines().find(is_new).expect("a segment of its own");
    server.ask(&["unlink", lost]).expect("unlink");
    let record = crate::common::record(root, counts, device_state, hot_pages);
    let failed = writer.commit(record, vec![]).expect_err("lost").to_string();
    assert!(failed.contains("the store has lost it"), "{failed}");
    drop(parent);
    assert_eq!(store.ids().expect("ids"), std::slice::from_ref(&first.id));
    verify(&store, &first.id, &mut |_, _| {}).expect("verify");
}

#[test]
fn a_replacement_that_was_cut_off_harms_no_image() {
    let server = RedisServer::start(&[]).expect("redis");
    let store = open(&server.url()).expect("store");
    let first = write_image(&store);
    // The index was told of a shorter segment, which never came.
    for number in &first.segments {
        let field = format!("{number:016x}.seg");
        server.ask(&["hset", "{dewar}:index:segments", &field, "5"]).expect("hset");
    }
    verify(&store, &first.id, &mut |_, _| {}).expect("verify");
    collect(&store, false, &mut |_, _| {}).expect("gc");
    // Whose record is gone from the index or from its place is no image.
    let second = write_image(&store);
    server.ask(&["unlink", &format!("{{dewar}}:images/{}.json", first.id)]).expect("unlink");
    collect(&store, false, &mut |_, _| {}).expect("gc");
    verify(&store, &second.id, &mut |_, _| {}).expect("verify");
    store.delete(&second.id).expect("delete");
    collect(&store, false, &mut |_, _| {}).expect("gc");
    let left = server.ask(&["--scan", "--pattern", "dewar:segments/*"]).expect("scan");
    assert_eq!(left, "");
}

#[test]
fn a_reader_that_lost_its_lock_takes_it_again() {
    let server = RedisServer::start(&[]).expect("redis");
    let store = open(&server.url()).expect("store");
    let id = write_image(&store).id;
    let _reader = store.open_image(&id).expect("open");
    // As if it had been away for longer than a hold lasts.
    let hold = format!("{{dewar}}:hold:images/{id}.json");
    server.ask(&["del", &hold]).expect("del");
    let is_held = || server.ask(&["exists", &hold]).expect("exists") == "1";
    wait_until("a hold", Duration::from_secs(10), is_held);
    let other = open(&server.url()).expect("store");
    assert!(matches!(other.delete(&id), Err(ImageError::InUse { .. })));
}

#[test]
fn a_wrong_host_is_told_soon() {
    let began = Instant::now();
    let failed = open("redis://127.0.0.1:1").expect_err("nobody there").to_string();
    assert!(failed.contains("redis://127.0.0.1:1"), "{failed}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}

/// Each would have checkpoints of its own, and whichever answers be taken for the store.
#[test]
fn several_servers_are_no_store() {
    let servers = [(); 2].map(|()| RedisServer::start(&[]).expect("redis"));
    let [a, b] = servers.each_ref().map(RedisServer::port);
    let refused = open(&format!("redis://127.0.0.1:{a},127.0.0.1:{b}")).expect_err("two stores");
    assert!(refused.to_string().contains("no Cluster"), "{refused}");
}

/// A segment is replaced by a smaller one under a reader and a look at all of it.
#[test]
fn a_segment_that_is_made_smaller_is_read_on() {
    let server = RedisServer::start(&[]).expect("redis");
    let store = open(&server.url()).expect("store");
    let first = write_image(&store);
    let second = write_on(&store, &first.id, &(300..PAGES).collect::<Vec<u64>>());
    store.delete(&first.id).expect("delete");
    let image = store.open_image(&second.id).expect("open");
    let entries = image.entries().expect("entries");
    let mut cache = FrameCache::new().expect("cache");
    let mut read = |page: u64| {
        let found = image.page(PageNumber(page), entries[page as usize], &mut cache);
        assert_eq!(found.expect("page").expect("not zeros"), content(page, 0), "{page}");
    };
    read(101);
    let freed = collect(&store, false, &mut |_, _| {}).expect("gc");
    assert!(freed.segments_compacted > 0, "{freed:?}");
    (102..300).filter(|page| page % 4 != 0).for_each(&mut read);
    verify(&store, &second.id, &mut |_, _| {}).expect("verify");
}

#[test]
fn a_slow_server_is_only_slow() {
    let server = RedisServer::start(&[]).expect("redis");
    let way = SlowWay::to(server.port(), Duration::from_millis(100)).expect("way");
    let store = open(&way.url()).expect("store");
    let image = write_image(&store);
    read_back(&open(&server.url()).expect("store"), &image.id).expect("read back");
    verify(&store, &image.id, &mut |_, _| {}).expect("verify");
}

#[test]
fn a_writer_that_lost_its_lock_makes_no_image() {
    let server = RedisServer::start(&[]).expect("redis");
    let store = open(&server.url()).expect("store");
    let writer = store.begin(options(), None).expect("begin");
    writer.put_holes(PageRange::new(0, PAGES));
    let (root, counts) = writer.finish_memory(PAGES).expect("table");
    let device_state = writer.put_blob(b"state").expect("blob");
    let hot_pages = writer.put_blob(&[]).expect("blob");
    // As if it had been stopped for longer than its lease lasts.
    server.ask(&["del", &format!("{{dewar}}:hold:writers/{}.lease", writer.id())]).expect("del");
    store.sweep().expect("sweep");
    let record = crate::common::record(root, counts, device_state, hot_pages);
    let failed = writer.commit(record, vec![]).expect_err("its segments are gone").to_string();
    assert!(failed.contains("given our place away"), "{failed}");
    assert_eq!(store.ids().expect("ids"), []);
}
