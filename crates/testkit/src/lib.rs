//! What tests, benchmarks and the demo share: a real guest with a program that
//! checks itself, the `dewar` binary driven as a person would, and a heartbeat
//! timed from outside.
#![forbid(unsafe_code)]

mod console;
mod container;
mod fault;
mod fuzz;
mod guest;
mod heartbeat;
mod lab;
mod lab_container;
mod lab_host;
mod link;
mod load;
mod network;
mod other_host;
mod pipes;
mod podman;
mod process;
mod redis;
mod second_runtime;
mod silence;
mod slow_disk;
mod small_disk;
mod sweep;
mod warm;

pub use console::Console;
pub use container::{Bundle, RunningContainer, container_tools};
pub use fault::{CHANGES, Call, Fault, NEED_ROOM, calls_of, with_fault};
pub use fuzz::fuzz;
pub use guest::{DiskSpec, GuestSpec, guest_files, next_qemu, qemu};
pub use heartbeat::{Beats, Heartbeat};
pub use lab::{Lab, Ran, TestGuest};
pub use lab_container::LabContainer;
pub use lab_host::{LabHost, lab_disks};
pub use link::{Lane, LinkSpeed, carry};
pub use load::{Hogs, LoggedJob, PeriodicTask, jobs_of, step_words};
pub use network::{HOST_ADDRESS, Network, WebLoad, web_load};
pub use podman::{Podman, PodmanContainer, podman_tools};
pub use process::{
    is_alive, kill, listens, patience, put_before_others, signal_stop, spawn_first, state,
    wait_until, wait_while_alive,
};
pub use redis::{Certificates, RedisCluster, RedisServer, SlowWay, free_port};
pub use second_runtime::SecondRuntime;
pub use slow_disk::{SlowDisk, SlowFile};
pub use small_disk::SmallDisk;
pub use sweep::{rounds, sample, step_of, stride};
