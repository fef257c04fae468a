//! What a command and its guardian say to each other.

use std::time::Duration;

/// The guest is as it should be: the guardian may go.
pub const ALL_WELL: u8 = b'w';
/// A pause begins; its limit in milliseconds follows, in 8 bytes, little-endian.
pub const PAUSE: u8 = b'p';
/// The command is at work, while its guest stands still.
pub const BEAT: u8 = b'b';
/// The guest runs again.
pub const RESUMED: u8 = b'r';
/// The guest is to be slowed down: for how many hundredths of the time its vCPUs are to stand still, in one byte (0
/// ends it); how many threads that are, in 2; of which process, in 4; and their numbers, in 4 each, all little-endian.
pub const THROTTLE: u8 = b't';
/// For tests that hold a command in the pause: the limit of a pause, and of silence, in seconds.
const TEST_LIMIT: &str = "DEWAR_TEST_PAUSE_LIMIT";

/// The limit that a test wants.
pub fn test_limit() -> Option<Duration> {
    std::env::var(TEST_LIMIT).ok()?.parse().ok().map(Duration::from_secs)
}
