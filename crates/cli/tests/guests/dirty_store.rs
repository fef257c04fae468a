//! Checkpoints of real guests whose dirty pages go to a real Redis beside the
//! store.

use crate::common::{self, HeldCheckpoint, assert_exact_with};
use dewar_testkit::{Console, GuestSpec, Lab, RedisServer, SmallDisk, TestGuest, kill, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use std::time::Duration;

fn guest(lab: &Lab) -> TestGuest {
    let spec = GuestSpec { memory_mib: 256, ..GuestSpec::default() };
    let mut guest = lab.run("g", &spec).expect("guest");
    guest.console.ask("fill 64 noise").expect("fill");
    guest
}

/// How many pages' keys a server has.
fn keys(server: &RedisServer) -> usize {
    let keys = server.ask(&["--scan", "--pattern", "dewar:pages/*"]).expect("scan");
    keys.lines().filter(|key| !key.is_empty()).count()
}

/// Lets the server take so many bytes more: fewer than any epoch of a busy guest.
fn leave_room(server: &RedisServer, bytes: u64) {
    let told = server.ask(&["info", "memory"]).expect("info");
    let used = told.lines().find_map(|line| line.strip_prefix("used_memory:"));
    let used: u64 = used.expect("used").trim().parse().expect("number");
    let set = ["config", "set", "maxmemory", &(used + bytes).to_string()];
    assert_eq!(server.ask(&set).expect("config").trim(), "OK");
}

#[test]
fn every_page_is_as_it_was() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    let mut guest = guest(&lab);
    guest.console.ask("words 30000").expect("load");
    let split = ["--dirty-store", &server.url(), "--epoch", "10ms"];
    for (load, more) in
        [("epochs", &[][..]), ("overflow", &["--buffer", "2M", "--full"]), ("on top", &[])]
    {
        let told = assert_exact_with(&lab, &mut guest, load, &[&split, more].concat());
        let captured = &told["captured"];
        println!("{load}: {captured}, {}", told["pages"]);
        // The bulk pass of the third is over soon, perhaps before an epoch.
        if load != "on top" {
            assert!(captured["dirty_store"].as_u64() > Some(0), "{load}: {captured}");
            assert!(captured["skipped"].as_u64() > Some(0), "{load}: {captured}");
        }
    }
}

/// Pages that stand still may go to the dirty store, too, as many as are allowed; a page that
/// is written after it was sent is as it was at the stop.
#[test]
#[ignore = "long: make test-long"]
fn what_stands_still_is_spread_over_two_stores() {
    let lab = common::lab();
    let mut server = RedisServer::start(&[]).expect("redis");
    let mut guest = guest(&lab);
    guest.console.ask("words 30000").expect("load");
    let url = server.url();
    let split = ["--dirty-store", &url, "--epoch", "10ms", "--spread"];
    // All of them; what was written as the pause came waits in the buffer, and is spread, too.
    for (size, most, more) in
        [("16M", 4096, &["--full"][..]), ("4G", 1 << 20, &["--full"]), ("4G", 1 << 20, &[])]
    {
        let told = assert_exact_with(&lab, &mut guest, size, &[&split[..], &[size], more].concat());
        let (spread, pages) = (told["captured"]["spread"].as_u64(), &told["pages"]);
        println!("{size} {more:?}: {}, {pages}", told["captured"]);
        assert!(spread > Some(0) && spread <= Some(most), "{told}");
        assert!(pages["dirty_store"].as_u64() > Some(0), "{told}");
    }
    guest.console.ask("words 0").expect("no load");
    guest.console.ask("check 12000 1 disk").expect("check");
    let line = [&["checkpoint", "g", "--full", "--tag", "spread"], &split[..], &["4G"]].concat();
    lab.dewar(&line).done();
    lab.dewar(&["verify", "spread"]).done();
    for how in [&["spread", "--eager"][..], &["spread"]] {
        lab.crash("g");
        lab.restore(&mut guest, how).expect("restore");
        guest.console.ask("verify").expect("consistent");
        lab.wait_for_memory("g");
    }

    // A store that is full while segments go there one by one: nobody waits for the next.
    let disk = SmallDisk::mount(&lab.path().join("small"), "24m").expect("tmpfs");
    let small = format!("file:{}", disk.path().join("store").display());
    let line = ["checkpoint", "g", "--store", &small, "--dirty-store", &url, "--spread", "4G"];
    lab.dewar(&line).failed(1, &["No space left", "no checkpoint was made", "is running"]);

    // A server that dies or is full, or a command that does: nothing is left.
    let soon = format!("{url}?retry=500ms");
    let line =
        ["checkpoint", "g", "--full", "--dirty-store", &soon, "--epoch", "1s", "--spread", "4G"];
    let before = keys(&server);
    let held = HeldCheckpoint::at_with(&lab, &line, "captured");
    assert!(keys(&server) > before);
    held.kill();
    wait_until("the guest runs on", Duration::from_secs(20), || {
        lab.ps("g").is_some_and(|it| it["state"] == "running")
    });
    lab.dewar(&["gc"]).done();
    assert_eq!(keys(&server), before);
    leave_room(&server, 512 << 10);
    let ran = lab.dewar(&line);
    ran.failed(1, &[&server.url(), "full", "no checkpoint was made", "the guest is running"]);
    let held = HeldCheckpoint::at_with(&lab, &line, "armed");
    server.kill().expect("kill");
    let (code, _, said) = held.go_on();
    assert!(code == 1 && said.contains("the guest is running"), "{code}: {said}");
    guest.console.ask("verify").expect("the guest runs on");
    lab.dewar(&["checkpoint", "g", "--spread", "1G"]).failed(2, &["--dirty-store"]);
}

#[test]
#[ignore = "long: make test-long"]
fn a_guest_lives_in_two_stores() {
    let lab = common::lab();
    let mut server = RedisServer::start(&[]).expect("redis");
    let mut guest = guest(&lab);
    guest.console.ask("check 12000 1 disk").expect("check");
    let split = ["--dirty-store", &server.url(), "--epoch", "30ms"];
    let mut ids = Vec::new();
    for tag in ["one", "two", "three"] {
        let line = [&["checkpoint", "g", "--buffer", "1M", "--tag", tag], &split[..]].concat();
        let told = lab.dewar(&line).done().json();
        assert!(told["pages"]["dirty_store"].as_u64() > Some(0), "{told}");
        ids.push(told["checkpoint"].as_str().expect("id").to_owned());
    }
    let told = lab.dewar(&["verify", "three"]).done().json();
    assert!(told["keyed"].as_u64() > Some(0), "{told}");
    let listed = lab.dewar(&["ls"]).done().json();
    assert_eq!(
        listed["checkpoints"][2]["dirty_stores"],
        serde_json::json!([format!("{}/0", server.url())])
    );
    lab.dewar(&["delete", "one"]).done();
    lab.dewar(&["gc"]).done();
    for how in [&["two", "--eager"][..], &["three"], &["three", "--eager"], &["two"]] {
        lab.crash("g");
        lab.restore(&mut guest, how).expect("restore");
        guest.console.ask("verify").expect("consistent");
    }
    // The dirty store dies while pages arrive: the guest waits for them alone.
    lab.wait_for_memory("g");
    lab.crash("g");
    lab.restore(&mut guest, &["two"]).expect("restore");
    server.kill().expect("kill");
    std::thread::sleep(Duration::from_millis(500));
    server.start_again().expect("start");
    guest.console.ask("verify").expect("consistent");
    lab.wait_for_memory("g");
    // Without it nothing is started, and it is named.
    lab.crash("g");
    server.kill().expect("kill");
    let ran = lab.dewar(&["restore", "two", "--eager"]);
    ran.failed(1, &[&server.url(), "no guest was started"]);
    lab.dewar(&["verify", "two"]).failed(1, &[&server.url()]);
    lab.dewar(&["delete", "three"]).failed(1, &[&server.url()]);
    server.start_again().expect("start");
    lab.restore(&mut guest, &["two"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    lab.wait_for_memory("g");
    lab.dewar(&["rm", "g", "--force"]).done();
    for id in &ids[1..] {
        lab.dewar(&["delete", id]).done();
    }
    assert_eq!(keys(&server), 0);
    // One whose dirty store is gone for good can be got rid of.
    let mut guest = lab.run("h", &GuestSpec::default()).expect("guest");
    guest.console.ask("fill 48 noise").expect("fill");
    guest.console.ask("words 20000").expect("load");
    let line = [&["checkpoint", "h", "--buffer", "1M", "--tag", "lost"], &split[..]].concat();
    lab.dewar(&line).done();
    server.kill().expect("kill");
    lab.dewar(&["delete", "lost"]).failed(1, &[&server.url(), "--only-here"]);
    let left = lab.dewar(&["gc"]);
    assert_eq!(left.json()["exit_code"], 1);
    left.failed(1, &[&server.url(), "gc --only-here"]);
    lab.dewar(&["delete", "lost", "--only-here"]).done();
    lab.dewar(&["gc"]).done();
}

#[test]
fn a_death_in_the_middle_leaves_nothing() {
    let lab = common::lab();
    let mut server = RedisServer::start(&[]).expect("redis");
    let mut guest = guest(&lab);
    guest.console.ask("check 12000 1 disk").expect("check");
    let url = format!("{}?retry=500ms", server.url());
    // However long the pause would be: what matters is what was sent before.
    let line = [
        &["checkpoint", "g", "--full", "--buffer", "1M", "--max-pause", "30s"][..],
        &["--dirty-store", &url, "--epoch", "30ms"],
    ]
    .concat();
    // The command, with pages sent.
    let held = HeldCheckpoint::at_with(&lab, &line, "captured");
    assert!(keys(&server) > 0);
    held.kill();
    wait_until("the guest runs on", Duration::from_secs(20), || {
        lab.ps("g").is_some_and(|it| it["state"] == "running")
    });
    guest.console.ask("verify").expect("the guest runs on");
    let told = lab.dewar(&["checkpoint", "g"]).done().json();
    assert_eq!(keys(&server), 0, "the next writer removes them");
    // The server.
    let held = HeldCheckpoint::at_with(&lab, &line, "armed");
    server.kill().expect("kill");
    let (code, _, said) = held.go_on();
    assert_eq!(code, 1, "{said}");
    for words in [&server.url(), "no checkpoint was made", "the guest is running"] {
        assert!(said.contains(words), "'{words}' is not in: {said}");
    }
    guest.console.ask("verify").expect("the guest runs on");
    lab.dewar(&line).failed(1, &[&server.url(), "the guest was not touched"]);
    server.start_again().expect("start");
    let after = lab.dewar(&line).done().json();
    lab.dewar(&["verify", after["checkpoint"].as_str().expect("id")]).done();
    lab.dewar(&["delete", told["checkpoint"].as_str().expect("id")]).done();
    lab.crash("g");
    lab.restore(&mut guest, &["g"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
}

/// A server that comes back without what it had taken is noticed before a checkpoint is
/// made that lacks it, also where an earlier checkpoint had put it there.
#[test]
#[ignore = "long: make test-long"]
fn a_dirty_store_that_forgot_is_noticed() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    let mut guest = guest(&lab);
    guest.console.ask("words 30000").expect("load");
    let url = server.url();
    let split = ["checkpoint", "g", "--full", "--dirty-store", &url, "--epoch", "30ms"];
    let forget = || {
        assert!(keys(&server) > 0);
        assert_eq!(server.ask(&["flushall"]).expect("flush").trim(), "OK");
    };
    let held = HeldCheckpoint::at_with(&lab, &split, "captured");
    forget();
    let (code, _, said) = held.go_on();
    assert!(code == 1 && said.contains("the store has lost it"), "{code}: {said}");
    assert!(said.contains("no checkpoint was made; the guest is running"), "{said}");
    assert_eq!(keys(&server), 0, "nothing is left of it");

    // Of which the next one would share what was not written since.
    let held = HeldCheckpoint::at_with(&lab, &split, "captured");
    guest.console.send("words 0").expect("no more load");
    assert_eq!(held.go_on().0, 0);
    guest.console.ask("count").expect("it took that");
    let held = HeldCheckpoint::at(&lab, "g", "captured");
    forget();
    let (code, _, said) = held.go_on();
    assert!(
        code == 1 && said.contains("since an earlier checkpoint put it there"),
        "{code}: {said}"
    );
    assert!(said.contains("the guest is running"), "{said}");
    lab.dewar(&["checkpoint", "g", "--tag", "whole"]).done();
    lab.dewar(&["verify", "whole"]).done();
    guest.console.ask("count").expect("the guest goes on");
}

/// While a dirty store is away, pages of the other store arrive.
#[test]
#[ignore = "long: make test-long"]
fn a_lazy_guest_waits_for_the_pages_of_the_store_alone_that_is_away() {
    let lab = common::lab();
    let mut server = RedisServer::start(&[]).expect("redis");
    let mut guest = guest(&lab);
    guest.console.ask("words 30000").expect("load");
    let split = ["--dirty-store", &server.url(), "--epoch", "30ms"];
    let told = lab.dewar(&[&["checkpoint", "g"], &split[..]].concat()).done().json();
    // Any number will do: fewer pages that are away make the bound below sharper.
    let keyed = told["pages"]["dirty_store"].as_u64().expect("pages");
    assert!(keyed > 0, "{told}");
    lab.crash("g");
    let held = HeldCheckpoint::at_with(&lab, &["restore", "g"], "starting the page server");
    server.kill().expect("kill");
    kill(held.pid, Signal::CONT);
    let state = lab.root().join("guests/g/server.json");
    let number = |state: &Value, key: &str| state[key].as_u64().unwrap_or(0);
    wait_until("the other store's pages", Duration::from_secs(20), || {
        let state = std::fs::read(&state).unwrap_or_default();
        let state: Value = serde_json::from_slice(&state).unwrap_or_default();
        number(&state, "of") > 0 && number(&state, "arrived") + keyed >= number(&state, "of")
    });
    server.start_again().expect("start");
    let (code, _, said) = held.go_on();
    assert_eq!(code, 0, "{said}");
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("count").expect("the guest goes on");
    lab.wait_for_memory("g");
}

/// What a killed checkpoint left in a server that never comes back.
#[test]
#[ignore = "long: make test-long"]
fn a_dirty_store_that_is_gone_for_good_is_given_up() {
    let lab = common::lab();
    let mut server = RedisServer::start(&[]).expect("redis");
    let mut guest = guest(&lab);
    guest.console.ask("words 30000").expect("load");
    let url = server.url();
    let line = ["checkpoint", "g", "--dirty-store", &url, "--epoch", "30ms"];
    let held = HeldCheckpoint::at_with(&lab, &line, "captured");
    server.kill().expect("kill");
    held.kill();
    wait_until("the guest runs on", Duration::from_secs(20), || {
        lab.ps("g").is_some_and(|it| it["state"] == "running")
    });
    let left = lab.dewar(&["gc"]);
    assert_eq!(left.json()["dirty_removed"], 0, "what was done is told");
    left.failed(1, &[&url, "gc --only-here"]);
    lab.dewar(&["gc", "--only-here"]).done();
    lab.dewar(&["gc"]).done();
    guest.console.ask("count").expect("the guest goes on");
}

#[test]
fn a_full_dirty_store_fails_the_checkpoint_alone() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    leave_room(&server, 512 << 10);
    let mut guest = guest(&lab);
    guest.console.ask("words 30000").expect("load");
    let split = ["checkpoint", "g", "--dirty-store", &server.url(), "--epoch", "30ms"];
    let ran = lab.dewar(&split);
    ran.failed(1, &[&server.url(), "full", "no checkpoint was made", "the guest is running"]);
    assert_eq!(keys(&server), 0);
    lab.dewar(&["checkpoint", "g"]).done();
    lab.dewar(&["checkpoint", "g", "--epoch", "1s"]).failed(2, &["--dirty-store"]);
    let told = lab.dewar(&["checkpoint", "g", "--dirty-store", "file:/tmp/x"]);
    told.failed(4, &["redis://", "the guest was not touched"]);
    guest.console.ask("count").expect("the guest goes on");
}
