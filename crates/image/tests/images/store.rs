//! Images written to a real folder and read back; every byte of every file
//! altered once in a while.

use crate::common::{PAGES, commit, content, new_store, options, read_back, write_image, write_on};
use dewar_image::{
    Collected, FrameCache, ImageError, ImageId, ImageWriter, Record, Store, collect, diff, verify,
};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

fn root(store: &Store) -> &Path {
    store.folder().expect("a folder")
}

fn files(root: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(root).expect("list").flatten() {
        match entry.path() {
            path if path.is_dir() => found.extend(files(&path)),
            path => found.push(path),
        }
    }
    found.sort();
    found
}

#[test]
fn an_image_comes_back_page_by_page() {
    let (_folder, store) = new_store();
    let record = write_image(&store);
    let counts = record.memory.counts;
    assert_eq!(counts.hole, 100);
    assert_eq!(counts.hole + counts.zero + counts.compressed + counts.raw, PAGES);
    assert_eq!(
        counts.raw,
        (100..PAGES).filter(|page| page % 4 == 3 || (*page >= PAGES - 500 && page % 4 == 0)).count()
            as u64
    );
    read_back(&store, &record.id).expect("read");
    let verified = verify(&store, &record.id, &mut |_, _| {}).expect("verify");
    assert_eq!((verified.pages, verified.disks), (PAGES, 1));
    for name in [&record.id.0[..], "t", "g", "g:t", &record.id.0[..5]] {
        assert_eq!(store.find(name).expect("find"), record.id);
    }
    assert!(matches!(store.find("nothing"), Err(ImageError::NotFound { .. })));
}

#[test]
fn files_are_private() {
    let (_folder, store) = new_store();
    write_image(&store);
    for path in files(root(&store)) {
        // The disk was made by the test itself.
        if !path.to_string_lossy().contains("/disks/") {
            assert_eq!(
                fs::metadata(&path).expect("stat").permissions().mode() & 0o777,
                0o600,
                "{}",
                path.display()
            );
        }
    }
    for folder in ["", "segments", "images", "disks", "writers"] {
        let mode = fs::metadata(root(&store).join(folder)).expect("stat").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
}

#[test]
fn a_writer_that_gives_up_or_dies_leaves_nothing() {
    let (_folder, store) = new_store();
    let before = files(root(&store));
    let put = |writer: &ImageWriter<'_>| {
        let mut sink = writer.sink().expect("sink");
        for page in 0..PAGES {
            sink.put(PageNumber(page), &content(page, 3)).expect("put");
        }
        sink.finish().expect("finish");
        writer.sync().expect("sync");
    };
    let without_counter = || {
        let mut found = files(root(&store));
        found.retain(|path| !path.ends_with("next-segment"));
        found
    };
    let writer = store.begin(options(), None).expect("begin");
    put(&writer);
    assert!(without_counter().len() > before.len());
    drop(writer);
    assert_eq!(without_counter(), before);

    // A writer that is killed drops nothing; its lock goes with it. The lease
    // is remade here as a process that died leaves it.
    let writer = store.begin(options(), None).expect("begin");
    put(&writer);
    let lease = files(&root(&store).join("writers")).remove(0);
    let text = fs::read(&lease).expect("read");
    store.sweep().expect("sweep");
    assert!(lease.exists(), "a living writer is left alone");
    let segment = files(&root(&store).join("segments")).remove(0);
    let content = fs::read(&segment).expect("read");
    drop(writer);
    fs::write(&lease, text).expect("write");
    fs::write(&segment, content).expect("write");
    store.sweep().expect("sweep");
    assert_eq!(without_counter(), before);
    assert_eq!(store.ids().expect("ids"), []);
}

#[test]
fn a_page_that_was_never_put_is_not_a_zero_page() {
    let (_folder, store) = new_store();
    let writer = store.begin(options(), None).expect("begin");
    writer.put_holes(PageRange::new(0, 1234));
    writer.put_holes(PageRange::new(1235, PAGES));
    assert!(matches!(writer.finish_memory(0), Err(ImageError::Incomplete { page: 1234 })));
}

#[test]
fn deleting_one_image_leaves_the_other_whole() {
    let (_folder, store) = new_store();
    let (first, second) = (write_image(&store), write_image(&store));
    assert!(first.segments.iter().all(|number| !second.segments.contains(number)));
    let reader = store.open_image(&first.id).expect("open");
    assert!(matches!(store.delete(&first.id), Err(ImageError::InUse { .. })));
    drop(reader);
    store.delete(&first.id).expect("delete");
    assert!(matches!(store.delete(&first.id), Err(ImageError::NotFound { .. })));
    verify(&store, &second.id, &mut |_, _| {}).expect("verify");
    let third = write_image(&store);
    assert!(
        third.segments.iter().all(|number| *number > *second.segments.last().expect("segments"))
    );
}

#[test]
fn an_image_on_top_of_another_shares_what_did_not_change() {
    let (_folder, store) = new_store();
    let first = write_image(&store);
    let second = write_on(&store, &first.id, &[200, 201, 1000]);
    assert_eq!(second.parent.as_ref(), Some(&first.id));
    assert_eq!(second.inherited_segments, first.segments[..second.inherited_segments.len()]);
    let third = write_on(&store, &second.id, &[1000, 2000]);
    let page = |id: &ImageId, page: u64| {
        let image = store.open_image(id).expect("open");
        let entry = image.entries().expect("entries")[page as usize];
        let mut cache = FrameCache::new().expect("cache");
        let found = image.page(PageNumber(page), entry, &mut cache).expect("page");
        found.map_or_else(|| vec![0; PAGE_BYTES], <[u8]>::to_vec)
    };
    // Whatever goes, the others are whole.
    store.delete(&first.id).expect("delete");
    for (id, own, others) in [(&second.id, 200, 1500), (&third.id, 201, 1500)] {
        verify(&store, id, &mut |_, _| {}).expect("verify");
        assert_eq!(page(id, own), content(own, 7));
        assert_eq!(page(id, others), content(others, 0));
    }
    assert_eq!(page(&second.id, 2000), content(2000, 0));
    assert_eq!(page(&third.id, 2000), content(2000, 7));
    store.delete(&third.id).expect("delete");
    verify(&store, &second.id, &mut |_, _| {}).expect("verify");
    // Damage in what it inherited is found.
    let inherited = second.inherited_segments[0];
    let segment = root(&store).join(format!("segments/{inherited:016x}.seg"));
    let whole = fs::read(&segment).expect("read");
    let mut damaged = whole.clone();
    damaged.iter_mut().skip(200).step_by(4096).for_each(|byte| *byte ^= 1);
    fs::write(&segment, damaged).expect("write");
    verify(&store, &second.id, &mut |_, _| {}).expect_err("damaged");
    fs::write(&segment, whole).expect("write");
    store.delete(&second.id).expect("delete");
    let left = files(&root(&store).join("segments"));
    assert!(left.is_empty(), "{left:?}");
}

/// Bytes of all segments.
fn segment_bytes(store: &Store) -> u64 {
    let segments = files(&root(store).join("segments"));
    segments.iter().map(|path| fs::metadata(path).expect("stat").len()).sum()
}

#[test]
fn collecting_frees_what_no_image_needs() {
    let (_folder, store) = new_store();
    let first = write_image(&store);
    // Most pages anew; some stay in the first image's segments.
    let changed: Vec<u64> = (300..PAGES).collect();
    let second = write_on(&store, &first.id, &changed);
    let whole = collect(&store, false, &mut |_, _| {}).expect("collect");
    assert_eq!(whole, Collected::default(), "both images need it all");
    store.delete(&first.id).expect("delete");
    let before = segment_bytes(&store);

    // What a collection that was killed leaves, and a segment of nobody.
    let stray = root(&store).join("segments/00000000000fffff.seg");
    fs::copy(files(&root(&store).join("segments")).remove(0), &stray).expect("copy");
    let part = root(&store).join("segments/0000000000000001.seg.9.part");
    fs::write(&part, "half").expect("write");
    let told = collect(&store, true, &mut |_, _| {}).expect("dry run");
    assert_eq!((told.segments_removed, told.segments_compacted > 0), (1, true));
    assert!(stray.exists() && part.exists(), "a dry run removes nothing");

    // A writer beside it, and a reader that has the old segments open.
    let reader = store.open_image(&second.id).expect("open");
    let entries = reader.entries().expect("entries");
    let mut cache = FrameCache::new().expect("cache");
    reader.page(PageNumber(150), entries[150], &mut cache).expect("page");
    let base = store.open_image(&second.id).expect("open");
    let count = || files(&root(&store).join("segments")).len();
    let count_before = count();
    let writer = store.begin(options(), Some(&base)).expect("begin");
    let mut sink = writer.sink().expect("sink");
    for page in 400..500 {
        sink.put(PageNumber(page), &content(page, 9)).expect("put");
    }
    sink.finish().expect("finish");
    while count() == count_before {
        std::thread::yield_now();
    }
    let freed = collect(&store, false, &mut |_, _| {}).expect("collect");
    assert_eq!(freed.segments_removed, 1);
    assert!(freed.segments_compacted > 0 && freed.bytes_freed > before / 10, "{freed:?}");
    assert!(!stray.exists() && !part.exists());
    assert!(segment_bytes(&store) < before);
    let third = commit(writer, None);
    drop(base);
    let expected = |page: u64, image: &Record| match page {
        0..100 => vec![0; PAGE_BYTES],
        100..300 => content(page, 0),
        400..500 if image.id == third.id => content(page, 9),
        _ => content(page, 7),
    };
    for image in [&second, &third] {
        verify(&store, &image.id, &mut |_, _| {}).expect("verify");
        let reader = store.open_image(&image.id).expect("open");
        for (page, entry) in reader.entries().expect("entries").into_iter().enumerate() {
            let number = PageNumber(page as u64);
            let found = reader.page(number, entry, &mut cache).expect("page");
            assert_eq!(found.unwrap_or(&[0; PAGE_BYTES]), expected(page as u64, image));
        }
    }
    // The reader from before goes on.
    reader
        .page(PageNumber(200), entries[200], &mut FrameCache::new().expect("cache"))
        .expect("page");
    let again = collect(&store, false, &mut |_, _| {}).expect("collect");
    assert_eq!(again, Collected::default());
    let (a, b) = (reader, store.open_image(&third.id).expect("open"));
    let differing = diff(&a, &b).expect("diff");
    assert_eq!(differing.ranges().collect::<Vec<_>>(), [PageRange::new(400, 500)]);
}

/// A segment that cannot be made smaller keeps nothing else from being freed.
#[test]
fn what_cannot_be_compacted_is_told_and_stays() {
    let (_folder, store) = new_store();
    let first = write_image(&store);
    let second = write_on(&store, &first.id, &(300..PAGES).collect::<Vec<u64>>());
    store.delete(&first.id).expect("delete");
    let segment = |number: u64| root(&store).join(format!("segments/{number:016x}.seg"));
    // Of nobody, and behind all others.
    let stray = segment(0xf_ffff);
    fs::copy(segment(second.segments[0]), &stray).expect("copy");
    let shared: Vec<PathBuf> = second.inherited_segments.iter().copied().map(segment).collect();
    let whole: Vec<Vec<u8>> = shared.iter().map(|path| fs::read(path).expect("read")).collect();
    for (path, bytes) in shared.iter().zip(&whole) {
        let mut bytes = bytes.clone();
        bytes.iter_mut().skip(200).step_by(512).for_each(|byte| *byte ^= 1);
        fs::write(path, bytes).expect("write");
    }
    let freed = collect(&store, false, &mut |_, _| {}).expect("collect");
    assert!(freed.compact_problem.is_some() && freed.segments_compacted == 0, "{freed:?}");
    assert!(freed.segments_removed == 1 && !stray.exists(), "{freed:?}");
    for (path, bytes) in shared.iter().zip(&whole) {
        fs::write(path, bytes).expect("write");
    }
    let freed = collect(&store, false, &mut |_, _| {}).expect("collect");
    assert!(freed.compact_problem.is_none() && freed.segments_compacted > 0, "{freed:?}");
    verify(&store, &second.id, &mut |_, _| {}).expect("verify");
}

/// Somebody died between making a lease and giving it its name.
#[test]
fn a_lease_without_its_name_is_in_nobodys_way() {
    let (_folder, store) = new_store();
    let image = write_image(&store);
    let part = root(&store).join(format!("writers/{}.lease.part", image.id));
    fs::write(&part, "").expect("write");
    store.delete(&image.id).expect("delete");
    assert!(!part.exists());
    assert_eq!(store.ids().expect("ids"), []);
}

#[test]
fn collecting_removes_nothing_where_images_cannot_be_listed() {
    let (folder, store) = new_store();
    write_image(&store);
    let before = files(root(&store));
    // Names can be read, and nothing behind them: as on a network that fails.
    let nobody = 65534;
    let chown = |path: &Path| std::os::unix::fs::chown(path, Some(nobody), Some(nobody));
    let folders = ["", "segments", "images", "disks", "writers"].map(|it| root(&store).join(it));
    let all = before.iter().chain(&folders);
    all.map(PathBuf::as_path).chain([folder.path()]).for_each(|it| chown(it).expect("chown"));
    let images = root(&store).join("images");
    fs::set_permissions(&images, fs::Permissions::from_mode(0o400)).expect("chmod");
    let collected = std::thread::scope(|scope| {
        let as_nobody = || {
            let user = rustix::process::Uid::from_raw(nobody);
            rustix::thread::set_thread_res_uid(user, user, user).expect("setresuid");
            collect(&store, false, &mut |_, _| {})
        };
        scope.spawn(as_nobody).join().expect("thread")
    });
    collected.expect_err("images that cannot be looked at");
    fs::set_permissions(&images, fs::Permissions::from_mode(0o700)).expect("chmod");
    assert_eq!(files(root(&store)), before);
}

#[test]
fn segments_of_other_images_stay_where_their_numbers_come_again() {
    let (_folder, store) = new_store();
    let first = write_image(&store);
    let counter = root(&store).join("next-segment");
    // As in a copy of a store that was written to while it was copied.
    fs::write(&counter, "1\n").expect("write");
    let second = write_image(&store);
    assert!(first.segments.iter().all(|number| !second.segments.contains(number)));
    fs::remove_file(&counter).expect("remove");
    let writer = store.begin(options(), None).expect("begin");
    let mut sink = writer.sink().expect("sink");
    sink.put(PageNumber(0), &content(0, 3)).expect("put");
    sink.finish().expect("finish");
    drop(writer);
    for record in [&first, &second] {
        verify(&store, &record.id, &mut |_, _| {}).expect("verify");
    }
    // A writer that died had been given the numbers, too.
    let names = |record: &Record| -> String {
        record.segments.iter().map(|it| format!("segments/{it:016x}.seg\n")).collect()
    };
    let lease = root(&store).join("writers/c-dead.lease");
    fs::write(&lease, names(&first) + "disks/../images/x\n").expect("write");
    store.sweep().expect("sweep");
    assert!(!lease.exists());
    verify(&store, &first.id, &mut |_, _| {}).expect("verify");
}

#[test]
fn a_flipped_bit_anywhere_is_refused() {
    let (_folder, store) = new_store();
    let record = write_image(&store);
    let mut flips = 0;
    for path in files(root(&store)) {
        if path.ends_with("next-segment") || path.ends_with("store.json") {
            continue;
        }
        let good = fs::read(&path).expect("read");
        // Headers, directory and trailer whole; the rest in steps.
        let step = (good.len() / 300).max(1);
        let edges = (0..good.len().min(170)).chain(good.len().saturating_sub(60)..good.len());
        for at in (0..good.len()).step_by(step).chain(edges) {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            fs::write(&path, &bad).expect("write");
            let error = verify(&store, &record.id, &mut |_, _| {})
                .expect_err(&format!("byte {at} of {}", path.display()));
            assert!(
                matches!(
                    error,
                    ImageError::Damaged { .. }
                        | ImageError::BrokenRecord { .. }
                        | ImageError::TooNew { .. }
                ),
                "{error}"
            );
            flips += 1;
        }
        for length in [0, 10, good.len() / 2, good.len() - 1] {
            fs::write(&path, &good[..length]).expect("write");
            assert!(
                verify(&store, &record.id, &mut |_, _| {}).is_err(),
                "{} cut to {length}",
                path.display()
            );
        }
        fs::write(&path, &good).expect("write");
    }
    assert!(flips > 1000, "{flips}");
    verify(&store, &record.id, &mut |_, _| {}).expect("whole again");
}

#[test]
fn right_frames_in_wrong_places_are_refused() {
    let (_folder, store) = new_store();
    let (record, other) = (write_image(&store), write_image(&store));
    let path = |number: u64| root(&store).join(format!("segments/{number:016x}.seg"));
    let good = fs::read(path(record.segments[0])).expect("read");

    // A whole segment in another's place.
    fs::copy(path(other.segments[0]), path(record.segments[0])).expect("copy");
    assert!(verify(&store, &record.id, &mut |_, _| {}).is_err());
    assert!(read_back(&store, &record.id).is_err());

    // Two frames of the same length, exchanged: each with a right checksum.
    let word = |at: usize| u32::from_le_bytes(good[at..at + 4].try_into().expect("word")) as usize;
    let trailer = good.len() - 48;
    let (directory, count) = (word(trailer), word(trailer + 4));
    let starts: Vec<usize> =
        (0..count).map(|n| word(directory + 4 * n)).chain([directory]).collect();
    let frames: Vec<_> = starts.windows(2).map(|pair| pair[0]..pair[1]).collect();
    let (a, b) = frames
        .iter()
        .enumerate()
        .find_map(|(n, a)| {
            frames[n + 1..].iter().find(|b| b.len() == a.len()).map(|b| (a.clone(), b.clone()))
        })
        .expect("two raw frames are of one length");
    let mut swapped = good.clone();
    swapped[a.clone()].copy_from_slice(&good[b.clone()]);
    swapped[b].copy_from_slice(&good[a]);
    fs::write(path(record.segments[0]), &swapped).expect("write");
    let error = verify(&store, &record.id, &mut |_, _| {}).expect_err("swapped").to_string();
    assert!(error.contains("page ") && error.contains("wrong place"), "{error}");
    assert!(read_back(&store, &record.id).is_err());

    // A record under another's name.
    fs::write(path(record.segments[0]), &good).expect("write");
    let images = root(&store).join("images");
    fs::copy(images.join(format!("{}.json", other.id)), images.join(format!("{}.json", record.id)))
        .expect("copy");
    assert!(store.open_image(&record.id).is_err());
}

#[test]
fn a_number_that_is_given_out_again_meanwhile_is_not_collected() {
    let (folder, store) = new_store();
    write_image(&store);
    // As in a folder that was copied while it was written to: a lease whose writer is
    // dead, and its segment, of which the counter does not know.
    let root = folder.path().join("store");
    let next = fs::read_to_string(root.join("next-segment")).expect("counter");
    let name = format!("segments/{:016x}.seg", next.trim().parse::<u64>().expect("a number"));
    fs::write(root.join(&name), "half a segment").expect("write");
    fs::write(root.join("writers/c00000000000e.lease"), format!("{name}\n")).expect("write");
    let mut image = None;
    collect(&store, false, &mut |_, _| {
        image.get_or_insert_with(|| write_image(&store));
    })
    .expect("gc");
    let image = image.expect("written");
    assert!(root.join(&name).exists(), "{:?}", image.segments);
    read_back(&store, &image.id).expect("read back");
}
