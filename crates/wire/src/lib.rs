//! The migration protocol, as pure values: frames on a connection, what both sides can, pages, and who
//! runs the guest. There are no sockets and no clocks in here, so that tests can walk through every order of
//! events. `docs/wire-format.md` has it to the byte.
#![forbid(unsafe_code)]

pub mod control;
pub mod frame;
pub mod hello;
pub mod ownership;
pub mod pages;
