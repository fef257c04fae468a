//! A running QEMU as a description: with which command line it could be started as it is now.
//!
//! A guest's own command line is what it was started with. Since then its user may have plugged
//! devices in and out, taken snapshots, changed media, forwarded ports; and QEMU itself chose addresses
//! and gave the machine devices that no option names. [`command_line::current_line`] asks QEMU for all
//! that.

mod bus_addresses;
pub(crate) mod command_line;
mod defaults;
pub(crate) mod disks;
mod ejected_media;
pub(crate) mod error;
pub(crate) mod forwards;
mod hotplug;
mod qom;
mod roms;
