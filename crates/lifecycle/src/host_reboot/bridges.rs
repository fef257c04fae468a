//! Bridges that the taps of a guest are in. A QEMU makes its taps again by itself; into their bridges it does not put them.

use dewar_kernel::{Pid, list_fds};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A tap in a bridge.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BridgedTap {
    /// The tap.
    pub tap: String,
    /// The bridge.
    pub bridge: String,
}

fn master(tap: &str) -> Option<String> {
    let link = fs::read_link(format!("/sys/class/net/{tap}/master")).ok()?;
    Some(link.file_name()?.to_str()?.to_owned())
}

/// The taps of a process that are in bridges (`tun_chr_show_fdinfo`, drivers/net/tun.c).
pub fn bridged_taps(pid: i32) -> Vec<BridgedTap> {
    let fds = list_fds(Pid(pid)).unwrap_or_default();
    let taps = fds.iter().filter(|fd| fd.target == Path::new("/dev/net/tun")).filter_map(|fd| {
        let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", fd.number)).ok()?;
        let tap = text.lines().find_map(|line| line.strip_prefix("iff:"))?.trim().to_owned();
        Some(BridgedTap { bridge: master(&tap)?, tap })
    });
    // A queue each.
    taps.collect::<BTreeSet<_>>().into_iter().collect()
}

/// Puts taps into their bridges again, where nobody did. Returns what failed.
pub fn join_bridges(taps: &[BridgedTap]) -> Vec<String> {
    let failed = |BridgedTap { tap, bridge }: &BridgedTap| {
        if master(tap).is_some() {
            return None;
        }
        let words = ["link", "set", "dev", tap, "master", bridge, "up"];
        let said = match Command::new("ip").args(words).output() {
            Ok(output) if output.status.success() => return None,
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        Some(format!("{tap} is not in bridge {bridge}, where it was: {said}"))
    };
    taps.iter().filter_map(failed).collect()
}
