//! A registration that ends while pages are touched: nobody waits for ever.

use dewar_kernel::{
    Pid, ProcessHandle, RegisterMode, SharedMapping, UffdOrigin, WritableMapping, die_with_us,
    userfaultfd_of,
};
use dewar_units::{PAGE_BYTES, PageNumber};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::File;
use std::ops::Range;
use std::process::Command;
use std::time::{Duration, Instant};

const PAGES: u64 = 4096;
const BYTES: u64 = PAGES * PAGE_BYTES as u64;
/// Without the wake after the end some tens were enough.
const ROUNDS: u64 = 10_000;

/// Not a test of its own: a process that touches page after page, and says after each
/// how many it has touched.
#[test]
fn toucher() {
    let Ok(path) = std::env::var("DEWAR_TEST_TOUCH") else { return };
    let open = |path: &str| File::options().read(true).write(true).open(path).expect("file");
    let memory = SharedMapping::new(open(&path), BYTES as usize).expect("mapping");
    let told = WritableMapping::new(open(&told_in(&path)), PAGE_BYTES).expect("mapping");
    let mut page = [0; PAGE_BYTES];
    for touched in 1u64.. {
        memory.copy_page(PageNumber(touched % PAGES), &mut page);
        told.write_at(&touched.to_le_bytes(), 0);
        (0..touched * 7919 % 4000).for_each(|_| std::hint::spin_loop());
    }
}

#[test]
fn nobody_waits_for_a_registration_that_has_ended() {
    let path = format!("/dev/shm/dewar-test-{}", std::process::id());
    let make = |path: &str, bytes: u64| {
        let made = File::options().create(true).truncate(true).read(true).write(true).open(path);
        let file = made.expect("file");
        file.set_len(bytes).expect("size");
        file
    };
    let (file, told) = (make(&path, BYTES), make(&told_in(&path), PAGE_BYTES as u64));
    let told = SharedMapping::new(&told, PAGE_BYTES).expect("mapping");
    let touched = || {
        let mut page = [0; PAGE_BYTES];
        told.copy_page(PageNumber(0), &mut page);
        u64::from_le_bytes(page[..8].try_into().expect("eight"))
    };
    let goes_on = || {
        let (before, began) = (touched(), Instant::now());
        while touched() == before && began.elapsed() < Duration::from_secs(5) {
            std::hint::spin_loop();
        }
        touched() > before
    };
    let mut toucher = Command::new(std::env::current_exe().expect("exe"));
    toucher.args(["--exact", "toucher"]).env("DEWAR_TEST_TOUCH", &path);
    let mut child = die_with_us(&mut toucher).spawn().expect("toucher");
    let begins = goes_on();
    let range = mapped(child.id(), &path);
    [path.clone(), told_in(&path)].iter().for_each(|it| std::fs::remove_file(it).expect("remove"));
    let process = ProcessHandle::open(Pid(child.id() as i32)).expect("process");
    let uffd = match userfaultfd_of(&process, UffdOrigin::Syscall) {
        Err(error) if error.errno() == Some(libc::EPERM) => {
            println!("SKIPPED nobody_waits_for_a_registration_that_has_ended: {error}");
            child.kill().expect("kill");
            child.wait().expect("wait");
            return;
        }
        made => made.expect("userfaultfd"),
    };
    let mut rounds = 0;
    let mut all_well = begins;
    while all_well && rounds < ROUNDS {
        let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, holes, 0, BYTES).expect("holes");
        uffd.register(&range, RegisterMode::Missing).expect("register");
        (0..rounds % 300).for_each(|_| std::hint::spin_loop());
        uffd.unregister(&range).expect("unregister");
        all_well = goes_on();
        rounds += 1;
    }
    child.kill().expect("kill");
    child.wait().expect("wait");
    assert!(all_well, "after {rounds} registrations it waits for ever");
}

/// Where the process says how many pages it has touched.
fn told_in(path: &str) -> String {
    format!("{path}-told")
}

/// Where a process has a file mapped.
fn mapped(pid: u32, path: &str) -> Range<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
    let line = maps.lines().find(|line| line.ends_with(path)).expect("mapped");
    let (start, rest) = line.split_once('-').expect("range");
    let end = rest.split(' ').next().expect("end");
    let number = |text| u64::from_str_radix(text, 16).expect("number");
    number(start)..number(end)
}
