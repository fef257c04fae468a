//! How the memory of a running guest is captured, wherever its pages go.
//!
//! A checkpoint captures into an image, a migration onto a wire. Both go the same way: record every write,
//! copy the pages that stand still ([`StandingPages`]), take the dirty set and copy its pages until what
//! is left fits the pause ([`converge`]), then stop the guest and look what was written last ([`stop`]).
//! Where the pages go is the caller's ([`DirtySink`]).
#![forbid(unsafe_code)]

mod converge;
mod epochs;
mod pause;
mod pieces;
mod session_nice;
mod standing_pages;
mod step;
mod workers;

pub use converge::{Convergence, DirtySink, converge};
pub use epochs::{Epoch, Epochs};
pub use pause::{Pause, stop};
pub use pieces::Pieces;
pub use session_nice::Presence;
pub use standing_pages::{PIECE, StandingPages};
pub use step::CaptureStep;
pub use workers::{Workers, cores, urgently};
