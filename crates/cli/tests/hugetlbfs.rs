//! Guests whose RAM is huge pages of 2 MiB.

mod common;

use common::assert_exact;
use dewar_testkit::{GuestSpec, Lab, wait_until};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const POOL: &str = "/proc/sys/vm/nr_hugepages";
/// For a guest of 256 MiB, another beside it, and some to spare.
const WANTED: u64 = 300;

/// A pool of huge pages and a mount; both are put back.
struct HugePages {
    mount: PathBuf,
    before: u64,
}

impl HugePages {
    /// Nothing where this host does not give any.
    fn get(lab: &Lab) -> Option<Self> {
        let before = pool()?;
        std::fs::write(POOL, (before + WANTED).to_string()).ok()?;
        let mount = lab.path().join("huge");
        std::fs::create_dir(&mount).expect("folder");
        let this = Self { mount, before };
        let mounted = Command::new("mount")
            .args(["-t", "hugetlbfs", "-o", "pagesize=2M", "none"])
            .arg(&this.mount)
            .status();
        (pool()? >= before + WANTED && mounted.is_ok_and(|it| it.success())).then_some(this)
    }

    fn path(&self) -> &str {
        self.mount.to_str().expect("text")
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.mount).status();
        let _ = std::fs::write(POOL, self.before.to_string());
    }
}

fn pool() -> Option<u64> {
    std::fs::read_to_string(POOL).ok()?.trim().parse().ok()
}

fn is_in(folder: &Path) -> usize {
    std::fs::read_dir(folder).expect("list").count()
}

#[test]
fn guests_live_on_huge_pages() {
    let lab = common::lab();
    let Some(huge) = HugePages::get(&lab) else {
        println!("SKIPPED guests_live_on_huge_pages: this host gives no {WANTED} huge pages");
        return;
    };
    let folder = lab.guest_folder("g").expect("folder");
    let line = GuestSpec::default().command(&folder).expect("line");
    let mut arguments = vec!["run", "g", "--ram-dir", huge.path(), "--"];
    arguments.extend(line.iter().map(String::as_str));
    lab.dewar(&arguments).done();
    assert_eq!(is_in(&huge.mount), 1);
    let mut guest = lab.reach("g").expect("guest");
    guest.console.ask("fill 64 noise").expect("fill");
    assert_exact(&lab, &mut guest, "idle");
    guest.console.ask("check 3000 1 disk").expect("check");
    let told = assert_exact(&lab, &mut guest, "on top");
    assert!(told["pages"]["unchanged"].as_u64() > Some(10_000), "{told}");
    for how in [&["--eager"][..], &[]] {
        lab.crash("g");
        lab.restore(&mut guest, &[&["g", "--ram-dir", huge.path()], how].concat())
            .expect("restore");
        guest.console.ask("verify").expect("consistent");
        wait_until("all memory", Duration::from_secs(60), || {
            lab.ps("g").expect("listed")["lazy_restore"]["complete"] != false
        });
        guest.console.ask("verify").expect("consistent");
        assert_eq!(is_in(&huge.mount), 1);
    }
    assert_exact(&lab, &mut guest, "restored");
    // To ordinary memory and back.
    lab.crash("g");
    lab.restore(&mut guest, &["g"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    wait_until("all memory", Duration::from_secs(60), || {
        lab.ps("g").expect("listed")["lazy_restore"]["complete"] != false
    });
    lab.dewar(&["checkpoint", "g", "--tag", "plain"]).done();
    lab.crash("g");
    lab.restore(&mut guest, &["plain", "--ram-dir", huge.path()]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    // More than the pool has is refused before anything is touched.
    let big = GuestSpec { memory_mib: 4096, ..GuestSpec::default() };
    let line = big.command(&lab.guest_folder("big").expect("folder")).expect("line");
    let mut arguments = vec!["run", "big", "--ram-dir", huge.path(), "--"];
    arguments.extend(line.iter().map(String::as_str));
    lab.dewar(&arguments).failed(4, &["room"]);
    lab.dewar(&["rm", "g", "--force"]).done();
}
