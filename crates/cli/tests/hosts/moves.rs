//! Moves over links of all kinds.

use crate::host::{Disk, Hosts, end_of};

/// By ssh as it stands there, pages over connections of their own, the disk on NFS.
#[test]
fn a_guest_moves_there_and_back() {
    let mut hosts = Hosts::new(Disk::Shared);
    let moved = hosts.a.run("dewar migrate g hostb --max-downtime 5s --json").done();
    println!("there: {}", moved.stdout.trim());
    assert!(!moved.stderr.contains("tunnel"), "{}", moved.stderr);
    hosts.assert_on(hosts.b, "there");
    let moved = hosts.b.run("dewar migrate g hosta --postcopy --json").done();
    println!("back, post-copy: {}", moved.stdout.trim());
    hosts.assert_on(hosts.a, "back");
}

/// Disks that nobody shares are copied.
#[test]
fn a_guest_moves_with_its_disk() {
    let mut hosts = Hosts::new(Disk::Own);
    hosts.a.run("dewar migrate g hostb").failed(4, &["/root/g.qcow2", "is not on this host"]);
    let moved = hosts.a.run("dewar migrate g hostb --with-disks --max-downtime 5s --json").done();
    println!("there: {}", moved.stdout.trim());
    hosts.assert_on(hosts.b, "there");
}

/// A link of one megabyte a second on which an answer takes 200 ms, and one that loses each twentieth packet.
#[test]
fn a_guest_moves_over_a_slow_link_and_one_that_loses_packets() {
    let mut hosts = Hosts::new(Disk::Shared);
    for (like, line) in [
        ("delay 100ms rate 8mbit limit 2000", "a hostb --max-downtime 8s"),
        ("delay 10ms loss 5% limit 2000", "b hosta --postcopy"),
    ] {
        for host in [hosts.a, hosts.b] {
            host.link_is(like);
        }
        let (from, words) = line.split_once(' ').expect("words");
        let (from, to) = if from == "a" { (hosts.a, hosts.b) } else { (hosts.b, hosts.a) };
        let moved = from.run(&format!("dewar migrate g {words} --json")).done();
        println!("{like}: {}", moved.stdout.trim());
        hosts.assert_on(to, like);
    }
}

/// The cable is pulled while memory is sent: the guest goes on where it is, and moves when it is in again.
#[test]
fn a_cable_that_is_pulled_in_pre_copy_leaves_it_where_it_is() {
    let mut hosts = Hosts::new(Disk::Shared);
    hosts.a.link_is("rate 8mbit limit 2000");
    let moving = hosts.a.start("dewar migrate g hostb --max-downtime 8s");
    hosts.wait_until_it_arrives();
    hosts.b.cable(false);
    end_of(moving).failed(1, &["has said nothing for", "the guest is running"]);
    hosts.b.cable(true);
    hosts.a.link_is("");
    hosts.a.run("dewar migrate g hostb --max-downtime 5s").done();
    hosts.assert_on(hosts.b, "plugged in again");
}

/// The cable is pulled when the guest runs at the other host and most of its memory is still to come.
#[test]
fn a_cable_that_is_pulled_in_post_copy_loses_no_page() {
    let mut hosts = Hosts::with(Disk::Shared, 8000);
    // What is on its way arrives: little is.
    for host in [hosts.a, hosts.b] {
        host.socket_buffers("4096 16384 65536", "4096 16384 65536");
    }
    hosts.a.link_is("rate 8mbit limit 20");
    let held = "env DEWAR_TEST_SIGNAL='serving:stop' dewar migrate g hostb --postcopy";
    let moving = hosts.a.start(held);
    hosts.a.wait_until_it_stands("serving", "dewar migrate");
    hosts.b.cable(false);
    hosts.a.run("pkill -CONT -f 'dewar migrate'").done();
    let ran = end_of(moving).failed(5, &["--resume"]);
    println!("{}", ran.stderr.trim());
    hosts.b.cable(true);
    hosts.a.link_is("");
    hosts.a.run("dewar migrate g --resume").done();
    hosts.assert_on(hosts.b, "all has come");
    for host in [hosts.a, hosts.b] {
        // As the kernel has them by itself.
        host.socket_buffers("4096 131072 6291456", "4096 16384 4194304");
    }
}
