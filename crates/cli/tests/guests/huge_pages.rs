//! Guests whose RAM is huge pages of 2 MiB: those of a pool, and those that the
//! kernel makes and splits as it likes.

use crate::common::{self, assert_exact};
use dewar_testkit::{Console, GuestSpec, Lab};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

const POOL: &str = "/proc/sys/vm/nr_hugepages";
/// For a guest of 256 MiB, another beside it, and some to spare.
const WANTED: u64 = 300;

/// A mount of huge pages, and a pool for them where it needs one; both are put
/// back.
pub(crate) struct HugePages {
    mount: PathBuf,
    pool_before: Option<u64>,
    /// The pool is one for the host.
    _alone: Option<MutexGuard<'static, ()>>,
}

impl HugePages {
    /// Of a pool; nothing where this host does not give any.
    pub(crate) fn of_pool(lab: &Lab) -> Option<Self> {
        static POOL_IS_OURS: Mutex<()> = Mutex::new(());
        let alone = POOL_IS_OURS.lock().unwrap_or_else(PoisonError::into_inner);
        let before = pool()?;
        std::fs::write(POOL, (before + WANTED).to_string()).ok()?;
        let mut this = Self::mount(lab, Some(before), &["-t", "hugetlbfs", "-o", "pagesize=2M"])?;
        this._alone = Some(alone);
        pool().is_some_and(|now| now >= before + WANTED).then_some(this)
    }

    /// As the kernel finds them.
    fn transparent(lab: &Lab) -> Option<Self> {
        Self::mount(lab, None, &["-t", "tmpfs", "-o", "huge=always"])
    }

    fn mount(lab: &Lab, pool_before: Option<u64>, how: &[&str]) -> Option<Self> {
        let mount = lab.path().join("huge");
        std::fs::create_dir(&mount).expect("folder");
        let this = Self { mount, pool_before, _alone: None };
        let mounted = Command::new("mount").args(how).arg("none").arg(&this.mount).status();
        mounted.is_ok_and(|it| it.success()).then_some(this)
    }

    pub(crate) fn path(&self) -> &str {
        self.mount.to_str().expect("text")
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.mount).status();
        if let Some(before) = self.pool_before {
            let _ = std::fs::write(POOL, before.to_string());
        }
    }
}

fn pool() -> Option<u64> {
    std::fs::read_to_string(POOL).ok()?.trim().parse().ok()
}

fn is_in(folder: &Path) -> usize {
    std::fs::read_dir(folder).expect("list").count()
}

/// A whole life of a guest there; `filled` is told when it has filled its
/// memory for the first time.
fn lives(lab: &Lab, huge: &HugePages, filled: impl Fn(&Lab)) {
    let folder = lab.guest_folder("g").expect("folder");
    let line = GuestSpec::default().command(&folder).expect("line");
    let mut arguments = vec!["run", "g", "--ram-dir", huge.path(), "--"];
    arguments.extend(line.iter().map(String::as_str));
    lab.dewar(&arguments).done();
    assert_eq!(is_in(&huge.mount), 1);
    let mut guest = lab.reach("g").expect("guest");
    guest.console.ask("fill 64 noise").expect("fill");
    filled(lab);
    assert_exact(lab, &mut guest, "idle");
    guest.console.ask("check 3000 1 disk").expect("check");
    let told = assert_exact(lab, &mut guest, "on top");
    assert!(told["pages"]["unchanged"].as_u64() > Some(10_000), "{told}");
    for how in [&["--eager"][..], &[]] {
        lab.crash("g");
        lab.restore(&mut guest, &[&["g", "--ram-dir", huge.path()], how].concat())
            .expect("restore");
        guest.console.ask("verify").expect("consistent");
        lab.wait_for_memory("g");
        guest.console.ask("verify").expect("consistent");
        assert_eq!(is_in(&huge.mount), 1);
    }
    assert_exact(lab, &mut guest, "restored");
    lab.dewar(&["freeze", "g"]).done();
    lab.dewar(&["thaw", "g"]).done();
    guest.console = Console::connect(&guest.folder.join("console")).expect("console");
    guest.console.ask("verify").expect("consistent");
    assert_exact(lab, &mut guest, "thawed");
    // To ordinary memory and back.
    lab.crash("g");
    lab.restore(&mut guest, &["g", "--ram-dir", "/dev/shm"]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    lab.wait_for_memory("g");
    lab.dewar(&["checkpoint", "g", "--tag", "plain"]).done();
    lab.crash("g");
    lab.restore(&mut guest, &["plain", "--ram-dir", huge.path()]).expect("restore");
    guest.console.ask("verify").expect("consistent");
    lab.dewar(&["rm", "g", "--force"]).done();
}

#[test]
#[ignore = "long: make test-long"]
fn guests_live_on_a_pool() {
    let lab = common::lab();
    let Some(huge) = HugePages::of_pool(&lab) else {
        println!("SKIPPED guests_live_on_a_pool: this host gives no {WANTED} huge pages");
        return;
    };
    lives(&lab, &huge, |_| {});
    // More than the pool has is refused before anything is touched.
    let big = GuestSpec { memory_mib: 4096, ..GuestSpec::default() };
    let line = big.command(&lab.guest_folder("big").expect("folder")).expect("line");
    let mut arguments = vec!["run", "big", "--ram-dir", huge.path(), "--"];
    arguments.extend(line.iter().map(String::as_str));
    lab.dewar(&arguments).failed(4, &["room"]);
}

#[test]
#[ignore = "long: make test-long"]
fn guests_live_on_transparent_huge_pages() {
    let lab = common::lab();
    let Some(huge) = HugePages::transparent(&lab) else {
        println!("SKIPPED guests_live_on_transparent_huge_pages: this host mounts none");
        return;
    };
    lives(&lab, &huge, |lab| {
        let pid = lab.ps("g").expect("listed")["pid"].clone();
        let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("smaps");
        let mapped = maps.lines().filter_map(|line| line.strip_prefix("ShmemPmdMapped:"));
        assert!(mapped.clone().any(|kib| kib.trim() != "0 kB"), "no huge page: {maps}");
    });
}

/// Three at once find the folder of RAM files with huge pages not mounted yet.
#[test]
fn two_mounts_at_once_hide_no_memory() {
    let lab = common::lab();
    if HugePages::transparent(&lab).is_none() {
        println!("SKIPPED two_mounts_at_once_hide_no_memory: this host mounts none");
        return;
    }
    let script = format!(
        "mkdir -p /run/dewar/ram; exec 9>/run/dewar/lock; flock 9
        for name in a b c; do
            {dewar} run $name -- qemu-system-x86_64 -m 64M -display none >&2 9>&- &
        done
        sleep 1; flock -u 9; wait
        grep -c ' /run/dewar/ram ' /proc/self/mountinfo
        ls /run/dewar/ram /dev/shm
        for name in a b c; do {dewar} rm $name --force >&2; done",
        dewar = dewar_in(&lab)
    );
    let told = on_a_host_without_it(&script);
    assert_eq!(told.lines().next(), Some("1"), "{told}");
    for name in ["a", "b", "c"] {
        assert!(told.contains(&lab.ram_prefix(name)), "{name}: {told}");
    }
}

#[test]
fn a_folder_of_its_own_that_cannot_be_written_is_left_alone() {
    let lab = common::lab();
    if HugePages::transparent(&lab).is_none() {
        println!(
            "SKIPPED a_folder_of_its_own_that_cannot_be_written_is_left_alone: this host mounts none"
        );
        return;
    }
    let script = format!(
        "mkdir -p /run/dewar/ram; mount -t tmpfs -o huge=advise,ro dewar /run/dewar/ram
        {dewar} run a -- qemu-system-x86_64 -m 64M -display none >&2
        ls /dev/shm
        {dewar} rm a --force >&2",
        dewar = dewar_in(&lab)
    );
    let told = on_a_host_without_it(&script);
    assert!(told.contains(&lab.ram_prefix("a")), "{told}");
}

fn dewar_in(lab: &Lab) -> String {
    format!("{} --root {}", env!("CARGO_BIN_EXE_dewar"), lab.root().display())
}

/// What a script prints where nothing is mounted on the folder of RAM files. Its first
/// process has the same mounts, as the host's has.
fn on_a_host_without_it(script: &str) -> String {
    let script = format!("umount -l /run/dewar/ram 2>/dev/null\n{script}");
    let ran = Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", &script])
        .output()
        .expect("unshare");
    print!("{}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8_lossy(&ran.stdout).into_owned()
}
