//! `migrate` and `receive`: a guest that runs goes on at another host.
//!
//! ```text
//!  source: dewar migrate                     destination: dewar receive, started by the source
//!  look the guest over, offer it  ------->   look whether it can run here; make its RAM files; start
//!                                            a QEMU on them that waits
//!  pages, epoch by epoch          ------->   fill the RAM files
//!  Intent on disk, stop, last pages,
//!  device state                   ------->   load it; Loaded on disk
//!  Given on disk                  <- ready
//!  commit                         ------->   Owned on disk, let it run, Running on disk
//!  Gone on disk, end QEMU, free   <- running
//! ```
//!
//! **Who runs the guest** is decided by two state machines ([`dewar_wire::ownership`]) and by what they have
//! on disk ([`MigrationRecord`](crate::migration::MigrationRecord)). This module carries out what they say, and nothing else stops, lets run or ends a
//! guest that moves. The guest's own record says `leaving` or `arriving` meanwhile, so that other
//! commands leave it alone. What a killed command left is finished by [`recovery`](crate::recovery).

mod accepted;
mod container_place;
mod container_source;
mod container_trial;
mod disk_marks;
mod disks;
mod flow;
mod listening;
mod moving;
mod moving_machine;
mod offered;
mod owed;
mod place;
mod receive;
mod resume;
mod serving;
mod slow_down;
mod source;
mod trial;

pub use accepted::{MigrateOptions, PostCopy};
pub use container_source::migrate_container;
pub use container_trial::predict_container;
pub use dewar_migrate::{GpuUse, GpuUsed};
pub use moving::{Migrated, Stages};
pub use moving_machine::MovingDisks;
pub use offered::Way;
pub use receive::receive;
pub use resume::{Ending, Resumed, abort_here, resume, take_back};
pub use source::migrate;
pub use trial::{Prediction, predict};
