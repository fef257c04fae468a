//! A copy of RAM taken inside the pause equals the image, byte for byte.

use crate::common::{self, assert_exact};
use dewar_testkit::{GuestSpec, rounds};

#[test]
fn every_page_is_that_of_the_pause() {
    every_page(2);
}

#[test]
#[ignore = "long: make test-long"]
fn every_page_is_that_of_the_pause_of_one_vcpu() {
    every_page(1);
}

fn every_page(vcpus: u32) {
    let lab = common::lab();
    let spec = GuestSpec { memory_mib: 256, vcpus, ..GuestSpec::default() };
    let mut guest = lab.run("exact", &spec).expect("guest");
    assert_exact(&lab, &mut guest, "idle");
    guest.console.ask("fill 64 noise").expect("fill");
    guest.console.ask("words 2000").expect("words");
    assert_exact(&lab, &mut guest, "slow");
    guest.console.ask("words 0").expect("words");
    guest.console.ask("check 12000 2 disk hard").expect("check");
    for _ in 0..rounds("exact checkpoints under full load", 3, vcpus as usize) {
        assert_exact(&lab, &mut guest, "violent");
    }
    guest.console.ask("verify").expect("consistent");
}

#[test]
#[ignore = "long: make test-long"]
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
    guest.console.ask("check 20000 2 disk hard").expect("check");
    assert_exact(&lab, &mut guest, "violent");
    lab.crash("numa");
    lab.restore(&mut guest, &["numa"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}
