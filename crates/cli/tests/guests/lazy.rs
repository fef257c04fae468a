//! Lazy restores: a guest runs before its memory is there, and never on a page that is
//! not its own.

use crate::common::{self, files, image_hashes, page_hashes, ram_now};
use dewar_checkpoint::restore::hot_pages;
use dewar_image::{ImageId, Location, Store};
use dewar_testkit::{GuestSpec, Lab, RedisServer, SlowWay, sample, wait_until};
use dewar_units::{PAGE_BYTES, PageNumber};
use serde_json::Value;
use std::time::Duration;

fn lazy(lab: &Lab) -> Value {
    lab.ps("g").expect("listed")["lazy_restore"].clone()
}

#[test]
fn a_lazy_restore_never_replaces_a_damaged_page() {
    let lab = common::lab();
    let mut guest = lab.run("g", &GuestSpec::default()).expect("guest");
    guest.console.ask("fill 100 noise").expect("fill");
    lab.dewar(&["checkpoint", "g", "--tag", "t"]).done();
    lab.crash("g");
    // Noise lies in raw frames: find a segment's middle.
    let segments = files(&lab.store().join("segments"));
    let largest =
        segments.iter().max_by_key(|path| path.metadata().expect("stat").len()).expect("segment");
    let good = std::fs::read(largest).expect("read");
    let mut bad = good.clone();
    let middle = bad.len() / 2;
    bad[middle] ^= 1;
    std::fs::write(largest, bad).expect("write");
    lab.restore(&mut guest, &["t"]).expect("the guest starts: damage is found when it is read");
    dewar_testkit::wait_until("the server's word", std::time::Duration::from_secs(20), || {
        let lazy = lab.ps("g").expect("listed")["lazy_restore"].clone();
        assert_eq!(lazy["complete"], false, "a damaged page is never given up");
        lazy["problem"].as_str().is_some_and(|problem| problem.contains("page "))
    });
    // The store is mended: the waiting pages arrive.
    std::fs::write(largest, good).expect("write");
    lab.wait_for_memory("g");
    guest.console.ask("count").expect("the guest goes on");
}

/// Whatever is damaged where: the pages that it holds stay away, and all others are there.
#[test]
fn damage_anywhere_keeps_away_its_own_pages_alone() {
    let lab = common::lab();
    let spec = GuestSpec { disks: Vec::new(), ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    for line in ["fill 30 noise", "check 4000 1 none"] {
        guest.console.ask(line).expect("load");
    }
    let told = lab.dewar(&["checkpoint", "g", "--tag", "t"]).done().json();
    let saved = image_hashes(&lab, &ImageId(told["checkpoint"].as_str().expect("id").to_owned()));
    lab.crash("g");
    let nothing = blake3::hash(&[0; PAGE_BYTES]);
    let (mut refused, mut kept_away) = (0, 0);
    let mut segments = files(&lab.store().join("segments"));
    // The page table is written last: damage there is found before a guest starts.
    let last = segments.pop().expect("a segment");
    let sampled = sample("damaged segments", segments, 4);
    for path in sampled.into_iter().chain([last]) {
        let good = std::fs::read(&path).expect("read");
        let all = vec![40, good.len() / 3, good.len() - 20];
        for at in sample("damaged bytes of a segment", all, 2) {
            let place = format!("byte {at} of {}", path.display());
            let mut bad = good.clone();
            bad[at] ^= 0x10;
            std::fs::write(&path, bad).expect("write");
            let restored = lab.dewar(&["restore", "t", "--paused"]);
            if restored.code != 0 {
                restored.code_is_a_refusal(&place);
                assert_eq!(lab.pid("g"), None, "{place}: no guest runs on damage");
                println!("{place} is refused");
                refused += 1;
                continue;
            }
            wait_until("the server's word", Duration::from_secs(30), || {
                let lazy = lazy(&lab);
                lazy["complete"] == true || lazy["problem"].is_string()
            });
            let is_whole = lazy(&lab)["complete"] == true;
            let ram = page_hashes(&ram_now(&lab, "g"));
            let absent = |page: &usize| ram[*page] != saved[*page];
            let wrong: Vec<_> =
                (0..ram.len()).filter(absent).filter(|page| ram[*page] != nothing).collect();
            assert!(wrong.is_empty(), "{place}: {wrong:?} are not the guest's");
            assert_eq!((0..ram.len()).any(|page| absent(&page)), !is_whole, "{place}");
            kept_away += usize::from(!is_whole);
            lab.crash("g");
        }
        std::fs::write(&path, good).expect("write");
    }
    println!("{refused} refused, {kept_away} with pages kept away");
    assert!(refused > 0 && kept_away > 0);
}

/// What the guest wrote last before its checkpoint is there before the rest.
#[test]
#[ignore = "long: make test-long"]
fn the_hottest_pages_come_first() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    let way = SlowWay::to(server.port(), Duration::from_millis(50)).expect("way");
    let spec = GuestSpec { disks: Vec::new(), ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    for line in ["fill 60 noise", "check 2000 1 none"] {
        guest.console.ask(line).expect("load");
    }
    lab.dewar(&["checkpoint", "g", "--tag", "t", "--store", &server.url()]).done();
    lab.crash("g");
    let store = Store::open(&Location::parse(&server.url()).expect("URL")).expect("store");
    let image = store.open_image(&store.find("t").expect("tag")).expect("image");
    let hot = hot_pages(&image).expect("hot pages");
    assert!(hot.len() > 500, "{}", hot.len());

    lab.dewar(&["restore", "t", "--paused", "--store", &way.url()]).done();
    // However late this test looks, little more has come. Frames of noise are as long as their pages.
    way.stop_after((hot.len() * PAGE_BYTES * 3 / 2) as u64);
    let number = |lazy: &Value, key: &str| lazy[key].as_u64().expect("pages") as usize;
    wait_until("as many pages", Duration::from_secs(30), || {
        number(&lazy(&lab), "pages_arrived") >= hot.len()
    });
    let now = lazy(&lab);
    let ram = ram_now(&lab, "g");
    let is_there = |page: &&PageNumber| {
        ram[page.index() * PAGE_BYTES..][..PAGE_BYTES].iter().any(|byte| *byte != 0)
    };
    let there = hot.iter().filter(is_there).count();
    println!("{there} of {} hot pages are there, of all {now}", hot.len());
    assert!(number(&now, "pages_arrived") * 2 < number(&now, "pages"), "not that far: {now}");
    assert!(there * 10 > hot.len() * 9, "{there} of {} hot pages, of all {now}", hot.len());
}
