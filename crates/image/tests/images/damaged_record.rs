//! A record that cannot be read: nobody knows what its image needs or whose it is.

use crate::common::{PAGES, new_store, read_back, write_image};
use dewar_image::{Deleted, ImageError, ImageId, Store, collect, verify};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn damage(store: &Store, id: &ImageId) {
    let path = store.folder().expect("a folder").join(format!("images/{id}.json"));
    let mut record = fs::read(&path).expect("read");
    record[100] ^= 1;
    fs::write(&path, &record).expect("write");
}

/// Writes a record that claims so many pages, and whose checksum fits.
fn forge(store: &Store, id: &ImageId, pages: u64) {
    let path = store.folder().expect("a folder").join(format!("images/{id}.json"));
    let mut whole: Value = serde_json::from_slice(&fs::read(&path).expect("read")).expect("JSON");
    let record = &mut whole["record"];
    record["memory"]["pages"] = pages.into();
    record["memory"]["regions"] = json!([{"name": "ram", "pages": pages}]);
    whole["blake3"] = blake3::hash(record.to_string().as_bytes()).to_hex().as_str().into();
    fs::write(&path, format!("{whole}\n")).expect("write");
}

/// Every file below a folder, and how large it is.
fn files(root: &Path) -> BTreeMap<PathBuf, u64> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(root).expect("list").flatten() {
        match entry.path() {
            path if path.is_dir() => found.extend(files(&path)),
            path => drop(found.insert(path, entry.metadata().expect("stat").len())),
        }
    }
    found
}

#[test]
fn nothing_but_itself_is_removed() {
    let (folder, store) = new_store();
    let (first, second) = (write_image(&store).id, write_image(&store).id);
    damage(&store, &second);
    let before = files(folder.path());
    collect(&store, false, &mut |_, _| {}).expect_err("a damaged record");
    store.delete(&first).expect_err("a damaged record");
    assert_eq!(files(folder.path()), before);

    // Not a disk copy of ours.
    let mine = store.folder().expect("a folder").join("disks/mine.qcow2");
    fs::write(&mine, "mine").expect("write");
    assert_eq!(store.delete(&second).expect("delete"), Deleted::Record);
    let collected = collect(&store, false, &mut |_, _| {}).expect("collect");
    assert!(collected.segments_removed > 0 && collected.disks_removed == 1, "{collected:?}");
    read_back(&store, &first).expect("the other");
    verify(&store, &first, &mut |_, _| {}).expect("its disk, too");
    assert_eq!(store.delete(&first).expect("delete"), Deleted::Whole);
    let left = files(&store.folder().expect("a folder").join("disks"));
    assert_eq!(left.keys().collect::<Vec<_>>(), [&mine]);
}

#[test]
fn one_that_claims_too_much_memory_is_refused() {
    let (_folder, store) = new_store();
    let id = write_image(&store).id;
    forge(&store, &id, PAGES);
    read_back(&store, &id).expect("its checksum fits");
    forge(&store, &id, (1 << 40) + 1);
    let error = read_back(&store, &id).expect_err("more than there can be");
    assert!(error.to_string().contains("than a machine can have"), "{error}");
    forge(&store, &id, 1 << 40);
    let too_large = |error| matches!(error, ImageError::TooLarge { .. });
    assert!(too_large(read_back(&store, &id).expect_err("more than fits")));
    assert!(too_large(verify(&store, &id, &mut |_, _| {}).expect_err("more than fits")));
    assert_eq!(store.delete(&id).expect("delete"), Deleted::Whole);
}

/// As after the loss of `store.json`, where all old records are another store's.
#[test]
fn a_whole_record_of_another_store_is_not_deleted() {
    let ((folder, store), (_other_folder, other)) = (new_store(), new_store());
    let foreign = write_image(&other).id;
    let record = other.folder().expect("a folder").join(format!("images/{foreign}.json"));
    let copy = store.folder().expect("a folder").join(format!("images/{foreign}.json"));
    fs::copy(record, copy).expect("copy");
    let before = files(folder.path());
    let error = store.delete(&foreign).expect_err("not this store's");
    assert!(matches!(error, ImageError::Damaged { .. }), "{error}");
    collect(&store, false, &mut |_, _| {}).expect_err("not known what it needs");
    assert_eq!(files(folder.path()), before);
}

#[test]
fn a_name_does_not_mean_an_older_image_meanwhile() {
    let (_folder, store) = new_store();
    let images = [write_image(&store).id, write_image(&store).id];
    let newest = store.find("g").expect("find");
    let older = images.iter().find(|id| **id != newest).expect("two");
    damage(&store, &newest);
    for name in ["t", "g", "g:t"] {
        match store.find(name) {
            Err(ImageError::Unsure { found: Some(id), .. }) => assert_eq!(id, older.0),
            other => panic!("{other:?}"),
        }
    }
    let none = store.find("nothing");
    assert!(matches!(none, Err(ImageError::Unsure { found: None, .. })), "{none:?}");
    for id in [&older.0, &older.0[..8]] {
        assert_eq!(store.find(id).expect("by its id"), *older);
    }
    store.delete(&newest).expect("delete");
    assert_eq!(store.find("g").expect("find"), *older);
}
