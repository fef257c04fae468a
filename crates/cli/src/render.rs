//! Results, as people and programs are told of them.

pub mod back;
pub mod checkpoint;
pub mod guest;
pub mod host_reboot;
pub mod qos;
