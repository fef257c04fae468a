//! Hosts that lose their power: what was not flushed to their disks is lost.

use crate::host::{Disk, Hosts, end_of};
use std::process::Child;

/// A migration from A to B whose destination stands still at a step.
fn migration_that_stands_at(hosts: &Hosts, step: &str) -> Child {
    hosts.b.make_dewar_that_stands_at(step);
    let moving = hosts.a.start("dewar migrate g hostb --max-downtime 5s --remote-dewar /root/held");
    hosts.b.wait_until_it_stands(step, "dewar receive");
    moving
}

/// The other host is gone before the guest is given away: the guest goes on, and moves when that host is back.
#[test]
fn a_destination_that_loses_power_before_the_commit_takes_nothing_with_it() {
    let mut hosts = Hosts::new(Disk::Shared);
    let moving = migration_that_stands_at(&hosts, "loaded");
    hosts.b.lose_power();
    let ran = end_of(moving).failed(1, &["the guest is running"]);
    println!("{}", ran.stderr.trim());
    hosts.b.boot();
    hosts.assert_on(hosts.a, "without the other host");
    hosts.a.run("dewar migrate g hostb --max-downtime 5s").done();
    hosts.assert_on(hosts.b, "which is back");
}

/// The other host is gone when it has the guest: it ended with that host, and no command lets it run again
/// unasked.
#[test]
fn a_destination_that_loses_power_after_the_commit_takes_the_guest_with_it() {
    let mut hosts = Hosts::new(Disk::Shared);
    let moving = migration_that_stands_at(&hosts, "committed");
    hosts.b.lose_power();
    let ran = end_of(moving).failed(5, &["--resume"]);
    println!("{}", ran.stderr.trim());
    hosts.b.boot();
    // It knows that it had the guest: that was on its disk before it said so.
    println!("{:?}", hosts.states());
    hosts.a.run("dewar migrate g --resume").failed(5, &["not known whether"]);
    hosts.b.run("dewar rm g --force").done();
    hosts.a.run("dewar migrate g --take-back").done();
    hosts.assert_on(hosts.a, "taken back");
}

/// The first host is gone when the other has the guest, which runs on; the first does not let it run again.
#[test]
fn a_source_that_loses_power_after_the_commit_gives_up_what_it_had() {
    let mut hosts = Hosts::new(Disk::Shared);
    let moving = migration_that_stands_at(&hosts, "owned");
    hosts.a.lose_power();
    hosts.b.run("pkill -CONT -f 'dewar receive'").done();
    // Its host cannot say how it ended.
    end_of(moving);
    hosts.a.boot();
    println!("{:?}", hosts.states());
    hosts.a.run("dewar migrate g --resume").done();
    hosts.assert_on(hosts.b, "its first host is back");
}
