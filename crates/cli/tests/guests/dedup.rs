//! Two guests of one kind in one store.

use crate::common;
use dewar_testkit::{GuestSpec, Lab, TestGuest};

fn guest(lab: &Lab, name: &str) -> TestGuest {
    let mut guest = lab.run(name, &GuestSpec::default()).expect("guest");
    guest.console.ask("fill 48 noise").expect("fill");
    guest.console.ask("check 3000 1 disk").expect("check");
    guest
}

#[test]
#[ignore = "long: make test-long"]
fn the_second_guest_costs_what_differs() {
    let lab = common::lab();
    let mut guests = [guest(&lab, "a"), guest(&lab, "b")];
    let stored = |name: &str, dedup: &str| {
        let told = lab.dewar(&["checkpoint", name, "--full", "--dedup", dedup]).done().json();
        println!(
            "{name} {dedup}: {} bytes, {} duplicate",
            told["stored_bytes"], told["pages"]["duplicate"]
        );
        (told["stored_bytes"].as_u64().expect("bytes"), told["checkpoint"].clone())
    };
    let (alone, _) = stored("b", "off");
    let (_, first) = stored("a", "store");
    let (second, image) = stored("b", "store");
    assert!(second < alone / 3, "{second} of {alone}");
    lab.dewar(&["delete", first.as_str().expect("id")]).done();
    lab.dewar(&["gc"]).done();
    lab.crash("b");
    lab.restore(&mut guests[1], &[image.as_str().expect("id")]).expect("restore");
    guests[1].console.ask("verify").expect("consistent");
    // On top of it, and within one image.
    lab.dewar(&["checkpoint", "b", "--dedup", "store"]).done();
    lab.dewar(&["checkpoint", "b", "--full", "--dedup", "image"]).done();
    lab.crash("b");
    lab.restore(&mut guests[1], &["b", "--eager"]).expect("restore");
    guests[1].console.ask("verify").expect("consistent");
}
