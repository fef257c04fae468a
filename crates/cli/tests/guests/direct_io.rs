//! Direct I/O in flight while pages are captured: a page pinned for a read
//! before a scan and filled after it is reported by no later scan. The disks
//! are slowed to 2 MB/s by the host kernel, below the page pinning.

use crate::common;
use dewar_testkit::{DiskSpec, GuestSpec, rounds};
use std::fs;
use std::path::{Path, PathBuf};

const BYTES_PER_SECOND: u64 = 2 << 20;

/// A cgroup whose reads and writes of one device are slow.
struct SlowGroup {
    folder: PathBuf,
}

impl SlowGroup {
    /// Makes it, for the disk that holds `path`; or says why it cannot be.
    fn make(path: &Path, name: &str) -> Result<Self, String> {
        use std::os::unix::fs::MetadataExt;
        let device = fs::metadata(path).map_err(|error| error.to_string())?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        // A partition is throttled by its whole disk.
        let entry = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        if major == 0 || !entry.exists() {
            return Err(format!("{} is not on a block device", path.display()));
        }
        let disk =
            if entry.join("partition").exists() { entry.join("../dev") } else { entry.join("dev") };
        let device = fs::read_to_string(disk).map_err(|error| error.to_string())?;
        let device = device.trim();
        let name = format!("dewar-test-{}-{name}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/blkio");
        let (folder, limits): (PathBuf, Vec<(&str, String)>) = if v1.exists() {
            let limit = format!("{device} {BYTES_PER_SECOND}");
            let files = ["blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device"];
            (v1.join(name), files.into_iter().map(|file| (file, limit.clone())).collect())
        } else {
            let root = Path::new("/sys/fs/cgroup");
            let _ = fs::write(root.join("cgroup.subtree_control"), "+io");
            let limit = format!("{device} rbps={BYTES_PER_SECOND} wbps={BYTES_PER_SECOND}");
            (root.join(name), vec![("io.max", limit)])
        };
        fs::create_dir(&folder).map_err(|error| format!("no cgroup can be made: {error}"))?;
        let group = Self { folder };
        for (file, limit) in limits {
            fs::write(group.folder.join(file), limit)
                .map_err(|error| format!("the kernel does not throttle {device}: {error}"))?;
        }
        Ok(group)
    }

    fn add(&self, pid: i32) {
        fs::write(self.folder.join("cgroup.procs"), pid.to_string()).expect("cgroup.procs");
    }

    fn release(&self, pid: i32) {
        let root = self.folder.parent().expect("parent");
        let _ = fs::write(root.join("cgroup.procs"), pid.to_string());
    }
}

impl Drop for SlowGroup {
    fn drop(&mut self) {
        let root = self.folder.parent().expect("parent");
        for pid in fs::read_to_string(self.folder.join("cgroup.procs")).unwrap_or_default().lines()
        {
            let _ = fs::write(root.join("cgroup.procs"), pid);
        }
        for _ in 0..200 {
            if fs::remove_dir(&self.folder).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

fn in_flight(format: &'static str) {
    let lab = common::lab();
    // /tmp is in memory on some hosts; /var/tmp is on a disk.
    let elsewhere = tempfile::tempdir_in("/var/tmp").expect("/var/tmp");
    let slow = SlowGroup::make(lab.path(), format).or_else(|_| {
        std::os::unix::fs::symlink(elsewhere.path(), lab.path().join("io")).expect("symlink");
        SlowGroup::make(elsewhere.path(), format)
    });
    let slow = match slow {
        Ok(slow) => slow,
        Err(why) => {
            println!("SKIPPED direct I/O in flight ({format}): {why}");
            return;
        }
    };
    let disk = DiskSpec { format, cache: "none", ..DiskSpec::default() };
    let spec = GuestSpec { memory_mib: 192, vcpus: 2, disks: vec![disk], ..GuestSpec::default() };
    let mut guest = lab.run("io", &spec).expect("guest");
    guest.console.ask("check 2000 2 reads hard").expect("check");
    for round in 0..rounds("checkpoints with reads in flight", 4, 2) {
        let pid = lab.pid("io").expect("pid");
        slow.add(pid);
        lab.dewar(&["checkpoint", "io", "--tag", "t"]).done();
        slow.release(pid);
        guest
            .console
            .ask("verify")
            .unwrap_or_else(|error| panic!("{format}, round {round}: {error:#}"));
        lab.crash("io");
        let mode: &[&str] = if round % 2 == 0 { &["--eager"] } else { &[] };
        lab.restore(&mut guest, &[&["t"], mode].concat()).expect("restore");
        guest
            .console
            .ask("verify")
            .unwrap_or_else(|error| panic!("{format}, round {round}, restored: {error:#}"));
    }
}

#[test]
#[ignore = "long: make test-long"]
fn reads_in_flight_on_qcow2_are_not_lost() {
    in_flight("qcow2");
}

#[test]
#[ignore = "long: make test-long"]
fn reads_in_flight_on_raw_are_not_lost() {
    in_flight("raw");
}
