//! Moving a running guest from one QEMU to another on the same RAM.
//!
//! The new QEMU is started on the RAM files, waiting. QEMU's own migration,
//! with `x-ignore-shared`, carries the rest over a socket whose two ends the
//! two processes hold: once begun it ends well without us. The new one lets
//! the vCPUs run by itself; the old one stops them before it sends the end of
//! the stream, and has given up its disks by then.
//!
//! ```text
//!  Starting   the guest is the old QEMU's; the new one is being started or ended
//!     |  ^
//!     |  '---  the new QEMU is dead, and never ran the guest
//!     v  |
//!  Moving     the stream was begun -- the old QEMU stops, the new one loads --
//!     |       the new QEMU says RESUME: this is the hand-over
//!     v
//!  Moved      what belongs to the guest is given to the new one; the old ends
//! ```
//!
//! **Never both, never none.** A stream without its end is never run, and the
//! old QEMU goes on by itself if it cannot send the end. Once the end is sent,
//! the old QEMU stands still until it is told to run. Dewar tells it so only if
//! the new QEMU is dead and never resumed the guest. It knows that by the events
//! on a connection that was there before the stream began
//! ([`has_resumed`](crate::Qmp::has_resumed)), or by the old QEMU's word that the stream is not
//! complete. (QEMU's return path would have the old one resume on its own when
//! the new one dies; but the new one lets the guest run *before* it answers
//! there, and a guest that wrote to its memory for a moment must not go on
//! from an older state.) So the migration is never cancelled while the new
//! QEMU lives.
//!
//! Which stage was reached is in `handover.json`. If the command dies, the guardian or
//! the next command goes on to the end, or back ([`recover`]). The old QEMU is ended
//! by SIGKILL: asked to quit, it would remove sockets and pid files that are
//! the new one's by then, and run scripts that take the guest's network down.

mod error;
mod finish;
mod inherited_files;
mod outcome;
mod plan;
mod switch;
mod tap;
mod under_way;

pub use error::HandoverError;
pub use finish::Moved;
pub use inherited_files::OpenFilesError;
pub use plan::Plan;
pub(crate) use plan::{
    named_ram, plan_on_its_ram, refuse_all_but_mirrors, refuse_another_user, refuse_other_files,
    refuse_other_network, refuse_what_changed, refuse_what_is_under_way,
};
pub use switch::Waiting;
pub use under_way::{is_under_way, processes};

use dewar_registry::{GuestFolder, GuestRecord};
use finish::{back, forward};
use outcome::{Outcome, outcome};
use under_way::{Handover, Stage};

/// Finishes a hand-over that a dead command left, if there is one: forward
/// where the guest has moved, back where it has not.
///
/// # Errors
/// [`HandoverError::Unknown`] where it cannot be known; both are left as they
/// are then.
pub fn recover(folder: &GuestFolder, record: &GuestRecord) -> Result<(), HandoverError> {
    let Some(handover) = Handover::load(folder)? else { return Ok(()) };
    let mut old = handover.connect_old();
    let outcome = match handover.stage {
        Stage::Starting => Outcome::Stayed,
        Stage::Moved => Outcome::Moved(None),
        Stage::Moving => outcome(&handover, folder, old.as_mut(), None),
    };
    match outcome {
        Outcome::Moved(new) => forward(folder, handover, old.as_mut(), new, &mut || {}).map(drop),
        Outcome::Stayed => back(folder, &handover, old.as_mut()),
        Outcome::Unknown => Err(HandoverError::Unknown(record.name.clone(), handover.old.pid)),
    }
}
