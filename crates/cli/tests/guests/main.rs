//! Tests of `dewar` with real QEMU guests. One program has all of them: it is linked once, and
//! no core waits for the last test of one file before the first of the next.

#[path = "../common/mod.rs"]
mod common;

mod adopt;
mod apart;
mod attention;
mod consistent;
mod container_moves;
mod containers;
mod copied_disks;
mod debian_guest;
mod dedup;
mod defaults;
mod direct_io;
mod dirty_store;
mod disks;
mod exact;
mod failures;
mod faults;
mod freeze;
mod gc;
mod host_reboot;
mod huge_pages;
mod incremental;
mod interference;
mod killed;
mod lazy;
mod migrate;
mod moves;
mod podman;
mod post_copy;
mod redis;
mod replaced;
mod report;
mod reuse;
mod served_guest;
mod spellings;
mod ssh;
mod unusual;
mod upgrade;
mod upgrade_devices;
mod upgrade_refused;
mod verbs;
mod warm_checkpoint;
mod warm_reboot;
mod warm_unusual;
