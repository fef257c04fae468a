//! A copy of RAM taken inside the pause equals the image, byte for byte.

mod common;

use common::HeldCheckpoint;
use dewar_image::{FileStore, FrameCache, ImageId};
use dewar_testkit::{GuestSpec, Lab, TestGuest};
use dewar_units::{PAGE_BYTES, PageNumber};
use serde_json::Value;

/// The guest's RAM as it is now; it must stand still.
fn ram_now(lab: &Lab, name: &str) -> Vec<u8> {
    let record = std::fs::read(lab.root().join("guests").join(name).join("guest.json"));
    let record: Value = serde_json::from_slice(&record.expect("record")).expect("JSON");
    let files = record["ram"].as_array().expect("RAM");
    files
        .iter()
        .flat_map(|file| std::fs::read(file["path"].as_str().expect("path")).expect("RAM file"))
        .collect()
}

fn assert_exact(lab: &Lab, guest: &mut TestGuest, load: &str) {
    let held = HeldCheckpoint::at(lab, &guest.name, "captured");
    let ram = ram_now(lab, &guest.name);
    let (code, out, said) = held.go_on();
    assert_eq!(code, 0, "{said}");
    let told: Value = serde_json::from_str(&out).expect("JSON");
    let store = FileStore::open(&lab.store()).expect("store");
    let id = ImageId(told["checkpoint"].as_str().expect("id").to_owned());
    let image = store.open_image(&id).expect("image");
    let mut cache = FrameCache::new().expect("cache");
    let entries = image.entries().expect("entries");
    assert_eq!(entries.len() * PAGE_BYTES, ram.len());
    let mut different: Vec<u64> = Vec::new();
    for (number, (entry, page)) in entries.iter().zip(ram.chunks(PAGE_BYTES)).enumerate() {
        let number = PageNumber(number as u64);
        let saved = image.page(number, *entry, &mut cache).expect("page");
        if saved.unwrap_or(&[0; PAGE_BYTES]) != page {
            different.push(number.0);
        }
    }
    assert!(different.is_empty(), "{different:?}: pages that differ under load '{load}'");
    let epochs = told["epochs"].as_array().expect("epochs");
    println!("{load}: {} pages equal, {} epochs", entries.len(), epochs.len());
    guest.console.ask("count").expect("the guest goes on");
}

#[test]
fn every_page_is_that_of_the_pause() {
    let lab = common::lab();
    let spec = GuestSpec { memory_mib: 256, vcpus: 2, ..GuestSpec::default() };
    let mut guest = lab.run("exact", &spec).expect("guest");
    assert_exact(&lab, &mut guest, "idle");
    guest.console.ask("fill 64 noise").expect("fill");
    guest.console.ask("words 2000").expect("words");
    assert_exact(&lab, &mut guest, "slow");
    guest.console.ask("words 0").expect("words");
    guest.console.ask("check 12000 2 disk").expect("check");
    for _ in 0..3 {
        assert_exact(&lab, &mut guest, "violent");
    }
    guest.console.ask("verify").expect("consistent");
}

#[test]
fn two_ram_regions_are_both_exact() {
    let lab = common::lab();
    let mut spec = GuestSpec { memory_mib: 256, vcpus: 2, ..GuestSpec::default() };
    spec.extra = [
        "-object",
        "memory-backend-ram,id=b,size=128M",
        "-numa",
        "node,memdev=b,cpus=0",
        "-object",
        "memory-backend-memfd,id=a,size=128M",
        "-numa",
        "node,memdev=a,cpus=1",
    ]
    .map(str::to_owned)
    .to_vec();
    let mut guest = lab.run("numa", &spec).expect("guest");
    guest.console.ask("check 20000 2 disk").expect("check");
    assert_exact(&lab, &mut guest, "violent");
    lab.crash("numa");
    lab.restore(&mut guest, &["numa"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}
