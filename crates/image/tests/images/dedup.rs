//! Pages with one content, stored once; and what that must never change.

use crate::common::{PAGES, commit, content, new_store, options};
use dewar_image::{Dedup, FrameCache, ImageId, ImageOptions, Record, Store, collect, verify};
use dewar_units::{PAGE_BYTES, PageNumber};

/// 3,000 pages with 500 contents; the first 500 all differ, then they repeat in
/// runs of 50 at other places.
fn repeated(page: u64) -> Vec<u8> {
    let number = if page < 500 { page } else { (page / 50 * 7 % 10) * 50 + page % 50 };
    content(number, 1)
}

fn write(store: &Store, dedup: Dedup, threads: u64, of: impl Fn(u64) -> Vec<u8> + Sync) -> Record {
    let writer = store.begin(ImageOptions { dedup, ..options() }, None).expect("begin");
    std::thread::scope(|scope| {
        for nth in 0..threads {
            let (writer, of) = (&writer, &of);
            scope.spawn(move || {
                let mut sink = writer.sink().expect("sink");
                for page in nth * PAGES / threads..(nth + 1) * PAGES / threads {
                    sink.put(PageNumber(page), &of(page)).expect("put");
                }
                sink.finish().expect("finish");
            });
        }
    });
    commit(writer, None)
}

fn assert_reads_back(store: &Store, id: &ImageId, of: impl Fn(u64) -> Vec<u8>) {
    verify(store, id, &mut |_, _| {}).expect("verify");
    let image = store.open_image(id).expect("open");
    let mut cache = FrameCache::new().expect("cache");
    for (page, entry) in image.entries().expect("entries").into_iter().enumerate() {
        let found = image.page(PageNumber(page as u64), entry, &mut cache).expect("page");
        assert_eq!(found.unwrap_or(&[0; PAGE_BYTES]), of(page as u64), "page {page}");
    }
}

fn bytes(store: &Store) -> u64 {
    let folder = store.folder().expect("folder").join("segments");
    let files = std::fs::read_dir(folder).expect("list").flatten();
    files.map(|file| file.metadata().expect("stat").len()).sum()
}

#[test]
fn within_an_image_copies_are_found_and_compared() {
    let (_folder, store) = new_store();
    let plain = write(&store, Dedup::Off, 1, repeated);
    let whole = bytes(&store);
    store.delete(&plain.id).expect("delete");
    for threads in [1, 2] {
        let record = write(&store, Dedup::Image, threads, repeated);
        let all = record.summary.duplicate_pages;
        println!("{threads} threads: {} of {whole}, {all} duplicates", bytes(&store));
        assert!(bytes(&store) < whole / 2, "{} of {whole}", bytes(&store));
        assert!(record.fingerprints.is_none());
        assert_reads_back(&store, &record.id, repeated);
        collect(&store, false, &mut |_, _| {}).expect("gc");
        assert_reads_back(&store, &record.id, repeated);
        store.delete(&record.id).expect("delete");
    }
}

#[test]
fn across_a_store_an_image_outlives_the_one_it_shares_with() {
    let (_folder, store) = new_store();
    // Half of the second is the first's, at other places.
    let second = |page: u64| match page % 2 {
        0 => repeated((page + 1100) % PAGES),
        _ => content(page, 9),
    };
    let first = write(&store, Dedup::Store, 2, repeated);
    let before = bytes(&store);
    let other = write(&store, Dedup::Store, 2, second);
    let added = bytes(&store) - before;
    let alone = {
        let (_folder, store) = new_store();
        write(&store, Dedup::Store, 2, second);
        bytes(&store)
    };
    assert!(added < alone, "{added} in place of {alone}");
    assert!(other.memory.counts.shared > 1300, "{:?}", other.memory.counts);
    assert!(!other.inherited_segments.is_empty());
    // One that was not taken so takes part in nothing.
    let apart = write(&store, Dedup::Image, 1, repeated);
    assert!(apart.inherited_segments.is_empty());
    store.delete(&first.id).expect("delete");
    assert_reads_back(&store, &other.id, second);
    collect(&store, false, &mut |_, _| {}).expect("gc");
    assert_reads_back(&store, &other.id, second);
    assert_reads_back(&store, &apart.id, repeated);
    store.delete(&other.id).expect("delete");
    store.delete(&apart.id).expect("delete");
    assert_eq!(bytes(&store), 0);
}

#[test]
fn an_image_that_is_shared_from_cannot_go_meanwhile() {
    let (_folder, store) = new_store();
    let first = write(&store, Dedup::Store, 1, repeated);
    let writer =
        store.begin(ImageOptions { dedup: Dedup::Store, ..options() }, None).expect("begin");
    assert!(store.delete(&first.id).is_err());
    drop(writer);
    store.delete(&first.id).expect("delete");
}

#[test]
fn of_many_images_some_are_held() {
    let (folder, store) = new_store();
    for _ in 0..80 {
        write(&store, Dedup::Store, 1, |page| content(page % 4, 1));
    }
    let open_files = || {
        let all = std::fs::read_dir("/proc/self/fd").expect("list").flatten();
        let paths = all.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        paths.filter(|path| path.starts_with(folder.path())).count()
    };
    let before = open_files();
    let options = ImageOptions { dedup: Dedup::Store, ..options() };
    let writer = store.begin(options, None).expect("begin");
    let held = open_files() - before;
    assert!((60..70).contains(&held), "{held} descriptors");
    drop(writer);
    assert_eq!(open_files(), before);
}

#[test]
fn what_an_image_knows_of_its_pages_is_right_and_helps_no_other() {
    let (_folder, store) = new_store();
    let first = write(&store, Dedup::Known, 2, repeated);
    assert!(first.fingerprints.is_none() && first.known.is_some());
    // Nobody finds its pages by it.
    let other = write(&store, Dedup::Store, 1, repeated);
    assert!(other.inherited_segments.is_empty());

    let changed = |page: u64| if page < 100 { content(page, 3) } else { repeated(page) };
    let parent = store.open_image(&first.id).expect("open");
    let options = ImageOptions { dedup: Dedup::Known, ..options() };
    let writer = store.begin(options, Some(&parent)).expect("begin");
    let mut sink = writer.sink().expect("sink");
    for page in 0..100 {
        sink.put(PageNumber(page), &changed(page)).expect("put");
    }
    sink.finish().expect("finish");
    let second = commit(writer, None);
    drop(parent);

    let known = |id: &ImageId| {
        let image = store.open_image(id).expect("open");
        let known = image.known_pages().expect("known");
        for (page, entry) in (0..).zip(image.entries().expect("entries")) {
            let is_known = known.knows(entry);
            assert!(!known.is(entry, &content(page, 4)), "page {page}");
            assert_eq!(is_known, known.is(entry, &changed(page)), "page {page}");
        }
        let entries = image.entries().expect("entries");
        entries.into_iter().filter(|entry| known.knows(*entry)).count()
    };
    collect(&store, false, &mut |_, _| {}).expect("gc");
    verify(&store, &second.id, &mut |_, _| {}).expect("verify");
    assert_eq!(known(&second.id), 3000);
    // What the first knew goes with it.
    store.delete(&first.id).expect("delete");
    collect(&store, false, &mut |_, _| {}).expect("gc");
    verify(&store, &second.id, &mut |_, _| {}).expect("verify");
    assert_eq!(known(&second.id), 100);
}

/// Writes an image on top of `parent` in which page `page` has the content `of(page)`.
fn write_on_top(
    store: &Store,
    dedup: Dedup,
    parent: &ImageId,
    of: impl Fn(u64) -> Vec<u8>,
) -> Record {
    let parent = store.open_image(parent).expect("open");
    let writer = store.begin(ImageOptions { dedup, ..options() }, Some(&parent)).expect("begin");
    let mut sink = writer.sink().expect("sink");
    for page in 0..PAGES {
        sink.put(PageNumber(page), &of(page)).expect("put");
    }
    sink.finish().expect("finish");
    commit(writer, None)
}

#[test]
fn an_image_finds_what_those_below_it_stored() {
    let moved = |by: u64| move |page: u64| content((page + by) % PAGES, 1);
    for dedup in [Dedup::Image, Dedup::Known] {
        let (_folder, store) = new_store();
        let first = write(&store, dedup, 2, moved(0));
        let before = bytes(&store);
        let second = write_on_top(&store, dedup, &first.id, moved(1000));
        let added = bytes(&store) - before;
        println!("{dedup:?}: {added} on top of {before}");
        assert!(added < before / 3, "{added} on top of {before}");
        // No page is as the parent has it, though all of their contents are there.
        let counts = second.memory.counts;
        assert_eq!((counts.shared, counts.inherited), (PAGES, 0));
        // It stands alone, and a third finds what the first had stored, but only by the first.
        store.delete(&first.id).expect("delete");
        collect(&store, false, &mut |_, _| {}).expect("gc");
        assert_reads_back(&store, &second.id, moved(1000));
        let third = write_on_top(&store, dedup, &second.id, moved(2000));
        store.delete(&second.id).expect("delete");
        collect(&store, false, &mut |_, _| {}).expect("gc");
        assert_reads_back(&store, &third.id, moved(2000));
    }
}

/// The first image stored pages that were replaced before it was complete; the
/// collector drops their frames.
#[test]
fn what_an_image_does_not_need_itself_is_not_found() {
    for dedup in [Dedup::Image, Dedup::Known, Dedup::Store] {
        let (_folder, store) = new_store();
        let writer = store.begin(ImageOptions { dedup, ..options() }, None).expect("begin");
        for version in [5, 6] {
            let mut sink = writer.sink().expect("sink");
            for page in 0..PAGES {
                sink.put(PageNumber(page), &content(page, version)).expect("put");
            }
            sink.finish().expect("finish");
        }
        let first = commit(writer, None);
        assert!(collect(&store, false, &mut |_, _| {}).expect("gc").segments_compacted > 0);
        let second = write_on_top(&store, dedup, &first.id, |page| content(page, 5));
        assert_reads_back(&store, &second.id, |page| content(page, 5));
        assert_reads_back(&store, &first.id, |page| content(page, 6));
    }
}
