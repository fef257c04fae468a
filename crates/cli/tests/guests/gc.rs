//! Chains of images with deletions and collections in between: killed at every
//! step, beside running checkpoints, and fifty long. No surviving image ever
//! changes.

use crate::common::{self, HeldCheckpoint, page_hashes, ram_now};
use dewar_image::{ImageId, Location, Store};
use dewar_testkit::{GuestSpec, Lab, RedisServer, TestGuest, rounds, stride, wait_until};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn guest(lab: &Lab, name: &str) -> TestGuest {
    let spec = GuestSpec { memory_mib: 128, ..GuestSpec::default() };
    let mut guest = lab.run(name, &spec).expect("guest");
    guest.console.ask("fill 16 noise").expect("fill");
    guest.console.ask("check 4000 1 disk").expect("check");
    guest
}

fn id(told: &Value) -> ImageId {
    ImageId(told["checkpoint"].as_str().expect("id").to_owned())
}

/// As random as a fixed seed makes it.
struct Random(u32);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (self.0 >> 16) as usize % bound
    }
}

fn open(folder: &Path) -> Store {
    Store::open(&Location::Folder(folder.to_owned())).expect("store")
}

fn verify_all(store: &Store, images: &[ImageId], when: &str) {
    for image in images {
        dewar_image::verify(store, image, &mut |_, _| {})
            .unwrap_or_else(|error| panic!("{image} {when}: {error}"));
    }
}

#[test]
#[ignore = "long: make test-long"]
fn killed_at_every_step_it_harms_nothing() {
    let lab = common::lab();
    let mut guest = guest(&lab, "g");
    let mut images: Vec<ImageId> = (0..6)
        .map(|_| {
            // What the images before have of these pages is needed by no other then.
            let mut steps = || guest.console.ask_number("count").expect("alive");
            let enough = steps() + 8000;
            wait_until("new pages", Duration::from_secs(60), || steps() > enough);
            id(&lab.dewar(&["checkpoint", "g"]).done().json())
        })
        .collect();
    for gone in [0, 1, 2] {
        lab.dewar(&["delete", &images.remove(gone).0]).done();
    }
    // The store alone is needed from here on.
    lab.crash("g");
    let copy = lab.path().join("copy");
    let url = format!("file:{}", copy.display());
    let lease = copy.join("writers/c00000000000e.lease");
    let prepare = || {
        let _ = std::fs::remove_dir_all(&copy);
        let copied = Command::new("cp").arg("-a").arg(lab.store()).arg(&copy).status();
        assert!(copied.expect("cp").success());
        // Nobody needs the first; a writer that was killed left the second.
        let any = common::files(&copy.join("segments")).remove(0);
        for number in ["ffe", "fff"] {
            let name = format!("segments/0000000000000{number}.seg");
            std::fs::copy(&any, copy.join(name)).expect("copy");
        }
        std::fs::write(copy.join("disks/c00000000000f-0.qcow2"), "nobody's").expect("write");
        std::fs::write(&lease, "segments/0000000000000ffe.seg\n").expect("write");
    };
    let objects = || -> Vec<(PathBuf, u64)> {
        let files = ["segments", "disks"].map(|folder| common::files(&copy.join(folder)));
        let size = |file: &PathBuf| file.metadata().expect("stat").len();
        files.concat().into_iter().map(|file| (file.clone(), size(&file))).collect()
    };
    prepare();
    let before = objects();
    let mut told = lab.dewar(&["gc", "--dry-run", "--store", &url]).done().json();
    assert_eq!(objects(), before, "it only tells");
    told["dry_run"] = false.into();
    let whole = lab.dewar(&["gc", "--store", &url]).done().json();
    assert_eq!(told, whole, "what it would do, and did");
    assert!(whole["segments_compacted"].as_u64() > Some(0), "{whole}");
    assert_eq!([&whole["segments_removed"], &whole["disks_removed"]], [2, 1]);
    let clean = objects();
    let bytes = |files: &[(PathBuf, u64)]| files.iter().map(|(_, bytes)| bytes).sum::<u64>();
    assert_eq!(whole["bytes_freed"], bytes(&before) - bytes(&clean));
    assert!(!lease.exists());

    let mut random = Random(7);
    let stride = stride("steps of gc", 7);
    let mut step = 0;
    for round in 0.. {
        prepare();
        let mut command = lab.command(&["gc", "--store", &url]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let by_step = round % 4 != 3;
        if by_step {
            command.env("DEWAR_TEST_SIGNAL", format!("gc-{step}:kill"));
            step += stride;
        }
        let mut child = command.spawn().expect("dewar");
        if !by_step {
            std::thread::sleep(Duration::from_micros(random.below(40_000) as u64));
            dewar_testkit::kill(child.id() as i32, rustix::process::Signal::KILL);
        }
        let ended = child.wait().expect("wait");
        let when = format!("after a gc killed in round {round}");
        verify_all(&open(&copy), &images, &when);
        lab.dewar(&["gc", "--store", &url]).done();
        verify_all(&open(&copy), &images, &when);
        assert_eq!(objects(), clean, "{when}");
        assert!(!lease.exists(), "{when}");
        if by_step && ended.success() {
            println!("{round} rounds, {step} steps");
            assert!(step > stride + 6, "so few steps");
            break;
        }
    }
}

#[test]
#[ignore = "long: make test-long"]
fn two_guests_and_a_collector_share_a_folder() {
    let lab = common::lab();
    two_guests_and_a_collector_share(&lab, &format!("file:{}", lab.store().display()), &[]);
}

#[test]
#[ignore = "long: make test-long"]
fn two_guests_and_a_collector_share_a_server() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    two_guests_and_a_collector_share(&lab, &server.url(), &[]);
}

#[test]
#[ignore = "long: make test-long"]
fn two_guests_and_a_collector_share_a_folder_and_a_dirty_store() {
    let lab = common::lab();
    let server = RedisServer::start(&[]).expect("redis");
    let url = format!("file:{}", lab.store().display());
    let split = ["--dirty-store", &server.url(), "--epoch", "30ms", "--spread", "8M"];
    two_guests_and_a_collector_share(&lab, &url, &split);
    let keys = server.ask(&["--scan", "--pattern", "dewar:pages/*"]).expect("scan");
    assert!(keys.lines().any(|key| !key.is_empty()), "pages of the images that are left");
}

fn two_guests_and_a_collector_share(lab: &Lab, url: &str, more: &[&str]) {
    let mut guests = [guest(lab, "a"), guest(lab, "b")];
    let checkpoint = |name: &str| {
        let line = [&["checkpoint", name, "--store", url], more].concat();
        id(&lab.dewar(&line).done().json())
    };
    checkpoint("a");
    let rounds = rounds("checkpoints beside a collector", 8, 5);
    let done = std::sync::atomic::AtomicBool::new(false);
    let images: Vec<ImageId> = std::thread::scope(|scope| {
        let workers: Vec<_> = ["a", "b"]
            .into_iter()
            .map(|name| {
                let checkpoint = &checkpoint;
                scope.spawn(move || {
                    let mut random = Random(name.len() as u32);
                    let mut images = Vec::new();
                    for _ in 0..rounds {
                        images.push(checkpoint(name));
                        if images.len() > 3 {
                            let gone = images.remove(random.below(3));
                            lab.dewar(&["delete", &gone.0, "--store", url]).done();
                        }
                    }
                    images
                })
            })
            .collect();
        let collector = scope.spawn(|| {
            let mut rounds = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let began = Instant::now();
                lab.dewar(&["gc", "--store", url]).done();
                rounds += 1;
                // As long as it took: the checkpoints get their share of the CPUs.
                std::thread::sleep(began.elapsed());
            }
            rounds
        });
        let images = workers.into_iter().flat_map(|it| it.join().expect("worker")).collect();
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        println!("{} collections", collector.join().expect("collector"));
        images
    });
    lab.dewar(&["gc", "--store", url]).done();
    let store = Store::open(&Location::parse(url).expect("url")).expect("store");
    verify_all(&store, &images, "at the end");
    for (guest, newest) in guests.iter_mut().zip([images[2].clone(), images[5].clone()]) {
        lab.crash(&guest.name);
        let name = guest.name.clone();
        lab.restore(guest, &[&newest.0, "--as", &name, "--store", url]).expect("restore");
        guest.console.ask("verify").expect("consistent");
    }
}

#[test]
#[ignore = "long: make test-long"]
fn of_fifty_each_survivor_is_byte_for_byte_what_it_was() {
    let lab = common::lab();
    let mut guest = guest(&lab, "g");
    let mut random = Random(2026);
    let mut images: Vec<(ImageId, Vec<blake3::Hash>)> = Vec::new();
    for round in 0..rounds("checkpoints of fifty", 50, 11) {
        let held = HeldCheckpoint::at(&lab, "g", "captured");
        let ram = page_hashes(&ram_now(&lab, "g"));
        let (code, out, said) = held.go_on();
        assert_eq!(code, 0, "{said}");
        images.push((id(&serde_json::from_str(&out).expect("JSON")), ram));
        guest.console.ask("verify").expect("consistent");
        if images.len() > 4 && random.below(2) == 0 {
            let (gone, _) = images.remove(random.below(images.len()));
            lab.dewar(&["delete", &gone.0]).done();
        }
        if round % 4 == 3 {
            lab.dewar(&["gc"]).done();
        }
    }
    lab.dewar(&["gc"]).done();
    println!("{} images survive", images.len());
    assert!(images.len() > 5);
    for (image, ram) in &images {
        lab.crash("g");
        lab.dewar(&["restore", &image.0, "--eager", "--paused"]).done();
        assert_eq!(&page_hashes(&ram_now(&lab, "g")), ram, "{image}, restored");
    }
    for (image, _) in images.iter().step_by(6) {
        lab.crash("g");
        lab.restore(&mut guest, &[&image.0]).expect("restore");
        guest.console.ask("verify").expect("consistent");
    }
}
