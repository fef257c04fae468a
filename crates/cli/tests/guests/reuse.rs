//! A restore takes what it can from the memory that a crashed QEMU left, and
//! nothing from it that the checkpoint does not have.

use crate::common::{self, image_hashes, page_hashes, ram_now};
use dewar_image::ImageId;
use dewar_testkit::{GuestSpec, Lab};
use std::os::unix::fs::FileExt;

/// Pages of the 64 MiB that the guest leaves alone.
const STILL: u64 = 64 << 8;

/// The RAM file that the guest by this name has, or left.
fn ram_file(lab: &Lab, name: &str) -> std::fs::File {
    let path = lab.record(name)["ram"][0]["path"].as_str().expect("path").to_owned();
    std::fs::File::options().read(true).write(true).open(path).expect("RAM file")
}

/// Restores the guest paused and returns how many pages were taken from the
/// memory that was left; all must be as in the checkpoint.
fn restored(lab: &Lab, id: &str, how: &[&str]) -> u64 {
    let line = [&["restore", id, "--paused"], how].concat();
    let told = lab.dewar(&line).done().json();
    lab.wait_for_memory("g");
    let ram = page_hashes(&ram_now(lab, "g"));
    let saved = image_hashes(lab, &ImageId(id.to_owned()));
    let different: Vec<usize> = (0..ram.len()).filter(|page| saved[*page] != ram[*page]).collect();
    assert!(different.is_empty(), "{different:?}: pages that are not the checkpoint's");
    let lazy = lab.ps("g").expect("listed")["lazy_restore"]["pages_reused"].as_u64();
    lazy.or(told["pages_reused"].as_u64()).expect("pages_reused")
}

#[test]
fn after_a_crash_only_what_changed_is_read() {
    let lab = common::lab();
    let spec = GuestSpec { memory_mib: 256, ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("fill 64 noise").expect("fill");
    let take = |more: &[&str]| {
        let line = [&["checkpoint", "g"], more].concat();
        let told = lab.dewar(&line).done().json();
        told["checkpoint"].as_str().expect("id").to_owned()
    };
    let without = take(&[]);
    let first = take(&["--hashes", "--full"]);
    let second = take(&["--hashes"]);
    guest.console.ask("check 6000 2 disk").expect("check");
    std::thread::sleep(std::time::Duration::from_secs(1));

    lab.crash("g");
    let reused = restored(&lab, &second, &[]);
    println!("lazily: {reused} pages reused");
    assert!(reused > STILL, "{reused}");
    // Now all of it is there, but for what is damaged then.
    lab.crash("g");
    let all = restored(&lab, &second, &["--eager"]);
    assert!(all > reused, "{all} after {reused}");
    lab.crash("g");
    let ram = ram_file(&lab, "g");
    (0..256).for_each(|mib: u64| {
        let mut byte = [0];
        ram.read_exact_at(&mut byte, mib << 20).expect("read");
        ram.write_all_at(&[!byte[0]], mib << 20).expect("write");
    });
    let after = restored(&lab, &second, &[]);
    println!("with 256 pages damaged: {after} of {all}");
    assert!((all - 256..=all - 64).contains(&after), "{after} of {all}");
    // Nobody knows the pages of this one.
    lab.crash("g");
    assert_eq!(restored(&lab, &without, &[]), 0);
    // Without the image that stored most of them, nothing is known of those.
    lab.dewar(&["delete", &first]).done();
    lab.crash("g");
    let few = restored(&lab, &second, &[]);
    assert!(few < STILL / 2, "{few}");
}
