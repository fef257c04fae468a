//! What the ways into a reservation and out of it have in common.

use std::time::Duration;

/// What a guest's other threads (disks, network, timers) run at meanwhile, so that
/// a reserved guest does not wait for its own disk behind a hog.
pub(super) const HELPERS_NICE: i32 = -10;
/// What a thread runs at that has used up its promise while its job is not done: as
/// a real-time thread. An ordinary one of the highest weight may wait for long where
/// it comes from another class (seen on 6.18).
pub(super) const RESCUE_PRIORITY: u32 = 1;
/// How often a thread that waits for room is tried again.
pub(super) const ROOM_AGAIN: Duration = Duration::from_millis(2);
/// For so long nobody is promised less because of a thread that left the class just
/// before, and keeps its bandwidth until its deadline.
pub(super) const LEAVES_WITHIN: Duration = Duration::from_millis(200);
