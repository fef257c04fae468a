//! Tests of `dewar qos`. They have the machine to themselves: how much CPU time can be promised
//! is one number for all of it, and whether it comes in time is measured.

#[path = "../common/mod.rs"]
mod common;

mod beside;
mod qos;
