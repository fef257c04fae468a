//! The checks of `doctor`, a function for each.

use super::finding::Finding;
use super::kvm;
use crate::context::Context;
use crate::output::percent;
use crate::render::guest::why_ended;
use dewar_guest_oci::Preconditions;
use dewar_guest_qemu::launch::without_ours;
use dewar_kernel::{
    Reservation, Task, deadline_limit, is_tracking_supported, open_userfaultfd_device,
};
use dewar_lifecycle::host_reboot;
use dewar_lifecycle::ram_dir;
use dewar_lifecycle::{Code, Failure};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What each host has or lacks.
pub fn look(context: &Context) -> Vec<Finding> {
    let required = |name, needed_for, result| Finding { name, needed_for, result, required: true };
    let optional = |name, needed_for, result| Finding { name, needed_for, result, required: false };
    vec![
        required("write tracking", "checkpoint", tracking()),
        required("root", "tracing a guest", root()),
        required("qemu-img", "guests with disks", version_of("qemu-img")),
        optional("qemu-system-x86_64", "running guests", version_of("qemu-system-x86_64")),
        optional("CRIU", "containers of runc and crun", criu()),
        optional("/dev/kvm", "guests at full speed", kvm::runs()),
        optional(
            "/dev/userfaultfd",
            "guests that run as another user, or under a filter of system calls",
            open_userfaultfd_device()
                .map(|_| "present".to_owned())
                .map_err(|error| error.to_string()),
        ),
        optional("SCHED_DEADLINE", "qos by deadlines", deadlines()),
        optional("room in memory", "RAM files", room(context, ram_dir::ram_dir_now())),
        optional("memory over a kexec", "host-reboot", host_reboot::kept_memory()),
        optional("huge pages", "guests' full speed", ram_dir::huge_pages()),
    ]
}

/// That this kernel can track writes, or exit 4.
pub fn require_tracking() -> Result<(), Failure> {
    tracking()
        .map(drop)
        .map_err(|why| Failure::new(Code::Unsupported, why).advice("see 'dewar doctor'"))
}

fn tracking() -> Result<String, String> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    match is_tracking_supported() {
        Ok(true) => Ok(format!("Linux {release}")),
        Ok(false) => Err(format!(
            "Linux {release} has no asynchronous write tracking (userfaultfd WP_ASYNC): 6.7 is needed"
        )),
        Err(error) => Err(format!("no userfaultfd can be made: {error}")),
    }
}

fn root() -> Result<String, String> {
    if rustix::process::geteuid().is_root() {
        Ok("yes".to_owned())
    } else {
        Err("run as root: guests' memory is read and traced".to_owned())
    }
}

/// What containers need of the host.
fn criu() -> Result<String, String> {
    let missing = Preconditions::of_host().missing;
    match missing.is_empty() {
        true => version_of("criu"),
        false => Err(missing.join("; ")),
    }
}

fn version_of(program: &str) -> Result<String, String> {
    let output = without_ours(Command::new(program).arg("--version")).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// Whether threads can be promised CPU time here, and how much.
fn deadlines() -> Result<String, String> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    let task = Task { process: own, thread: own };
    let before = task.scheduling().map_err(|error| error.to_string())?;
    let (runtime, period) = (Duration::from_millis(1), Duration::from_millis(100));
    let reservation = Reservation { runtime, period, reclaim: false };
    task.reserve(reservation).map_err(|error| error.to_string())?;
    task.schedule(before).map_err(|error| error.to_string())?;
    Ok(format!("{} of a CPU can be promised", percent(deadline_limit())))
}

fn room(context: &Context, path: &Path) -> Result<String, String> {
    let room = context.ram_room("", path, false).map_err(|error| error.to_string())?;
    let what = format!("in {}: {room}", path.display());
    if room.left() == 0 && room.promised > 0 { Err(what) } else { Ok(what) }
}

/// Guests that ended by themselves, where it can be told why.
pub fn ended(context: &Context) -> Option<Result<String, String>> {
    let guests = context.guests().ok()?;
    let report = guests.iter().filter_map(|(folder, record)| {
        let is_over = !record.process.is_alive() && record.frozen.is_none();
        Some(format!("{}: {}", record.name, why_ended(folder, record).filter(|_| is_over)?))
    });
    let report: Vec<String> = report.collect();
    (!report.is_empty()).then(|| Err(report.join("; ")))
}
