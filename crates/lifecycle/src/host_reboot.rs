//! `host-reboot`: another kernel under the host, by kexec, while guests keep their memory.
//!
//! ```text
//!  old kernel   plan: nothing is touched; what stands against it is told
//!               load the new kernel · note who is kept · a watcher starts
//!               freeze all at once  -- fails --> thaw them, all run on
//!               kexec               -- fails --> thaw them, all run on
//!  new kernel   mount what they lie on · thaw all at once · note how each fared
//! ```
//!
//! The note ([`Note`]) is a file of the host's root. With the number of the boot in it, it tells the two sides apart:
//! guests that were frozen under the kernel which still runs were frozen by a command that died, and are to go on.
//! Memory that the kernel itself keeps has no name from before the freeze on ([`crate::held_ram`]): the watcher has it,
//! and afterwards each QEMU its own.
//!
//! The watcher, a process beside the command, sees to that at once; where it died too, the next `dewar` command that
//! looks does.
//!
//! Frozen guests are ordinary frozen guests: whatever happens, `dewar thaw` lets them go on.

mod arrive;
mod at_once;
mod bridges;
mod leave;
mod live_memory;
mod note;
mod own_command;
mod plan;
mod recover;
mod watcher;

pub use arrive::{Arrival, arrive};
pub use leave::leave;
pub use note::{KeptGuest, Note, Outcome, Stage, since_reboot};
pub use plan::{Fallback, How, Others, Plan, PlannedGuest, Request, kept_memory, plan};
pub use recover::recover;
pub use watcher::watch;
