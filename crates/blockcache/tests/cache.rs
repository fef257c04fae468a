//! Disks that are read, written, trimmed and zeroed by several at once, while their old memory is searched: never a wrong
//! byte, and what is intact comes from memory.

use dewar_blockcache::{
    DiskFile, DiskOptions, Export, Hasher, KeptMemory, find, release_locks, serve,
};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

const PAGE: usize = 4096;

/// A disk of so many blocks, each with a content of its own, and a client of it.
struct Served {
    folder: tempfile::TempDir,
    hasher: Arc<Hasher>,
    export: Arc<Export>,
}

fn content(block: u64, version: u64) -> Vec<u8> {
    let mut state = block << 20 ^ version << 1 ^ 0x9e37_79b9;
    let words = (0..PAGE / 8).flat_map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.collect()
}

impl Served {
    fn new(blocks: u64, is_direct: bool) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("disk");
        let bytes: Vec<u8> = (0..blocks).flat_map(|block| content(block, 0)).collect();
        fs::write(&path, bytes).expect("disk");
        Self::with(path, folder, is_direct)
    }

    /// A disk that is there, in a folder of its own.
    fn with(path: PathBuf, folder: tempfile::TempDir, is_direct: bool) -> Self {
        let hasher = Arc::new(Hasher::new().expect("key"));
        let options = DiskOptions {
            path,
            is_read_only: false,
            is_qcow2: false,
            is_direct,
            locks_later: false,
        };
        let disk = DiskFile::open(&options).expect("open");
        let export = Arc::new(Export::new(disk, hasher.clone(), 1 << 16));
        let listener = UnixListener::bind(folder.path().join("socket")).expect("socket");
        let exports = [("0".to_owned(), export.clone())];
        std::thread::spawn(move || serve(&listener, &exports));
        Self { folder, hasher, export }
    }

    fn socket(&self) -> String {
        self.folder.path().join("socket").display().to_string()
    }

    fn client(&self) -> Client {
        Client::new(&self.folder.path().join("socket"))
    }

    /// A guest's memory that holds these blocks, and others.
    fn memory(&self, blocks: impl Iterator<Item = (u64, Vec<u8>)>) -> File {
        let path = self.folder.path().join("memory");
        let file = File::options().create(true).truncate(true).read(true).write(true).open(&path);
        let file = file.expect("memory");
        fs::remove_file(&path).expect("unnamed");
        file.set_len(64 << 20).expect("size");
        for (at, (_, bytes)) in (3u64..).step_by(2).zip(blocks) {
            file.write_all_at(&bytes, at * PAGE as u64).expect("memory");
            file.write_all_at(&content(at, 77), (at + 1) * PAGE as u64).expect("other memory");
        }
        file
    }
}

/// One that speaks NBD.
struct Client {
    stream: UnixStream,
    handle: u64,
}

impl Client {
    fn new(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).expect("connect");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("greeting");
        stream.write_all(&3u32.to_be_bytes()).expect("flags");
        stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\x010").expect("option");
        let mut export = [0; 10];
        stream.read_exact(&mut export).expect("export");
        Self { stream, handle: 0 }
    }

    fn ask(&mut self, kind: u16, flags: u16, offset: u64, bytes: u32, data: &[u8]) -> u32 {
        self.handle += 1;
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(self.handle.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(bytes.to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request).expect("request");
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).expect("reply");
        assert_eq!(reply[8..], self.handle.to_be_bytes());
        u32::from_be_bytes(reply[4..8].try_into().expect("four bytes"))
    }

    fn read(&mut self, offset: u64, bytes: usize) -> Vec<u8> {
        assert_eq!(self.ask(0, 0, offset, bytes as u32, &[]), 0);
        let mut data = vec![0; bytes];
        self.stream.read_exact(&mut data).expect("data");
        data
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        assert_eq!(self.ask(1, 0, offset, data.len() as u32, data), 0);
    }

    fn block(&mut self, block: u64) -> Vec<u8> {
        self.read(block * PAGE as u64, PAGE)
    }
}

#[test]
fn what_is_intact_comes_from_memory_and_nothing_else_does() {
    let served = Served::new(200, false);
    let mut client = served.client();
    // What passed: all but the last hundred were read, and ten of those written.
    client.read(0, 100 * PAGE);
    for block in 100..110 {
        client.write(block * PAGE as u64, &content(block, 1));
    }
    // In memory: all of that, with five damaged, an old version of one, and blocks that never passed.
    let mut blocks: Vec<(u64, Vec<u8>)> =
        (0..100).map(|block| (block, content(block, 0))).collect();
    blocks.extend((100..110).map(|block| (block, content(block, 1))));
    blocks[20..25].iter_mut().for_each(|(_, bytes)| bytes[4000] ^= 1);
    blocks[105].1 = content(105, 0);
    blocks.extend((150..160).map(|block| (block, content(block, 0))));
    let file = served.memory(blocks.into_iter());
    let memory = Arc::new(KeptMemory::new(file.try_clone().expect("clone")).expect("memory"));
    let found = find(&memory, std::slice::from_ref(&served.export), &served.hasher, 1 << 20)
        .expect("search");
    assert_eq!((found.known, found.kept), (110, 104), "{found:?}");
    // All else was given back at once.
    let held = || std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("file")) / 8;
    assert_eq!(held(), 104);
    // Written since: it comes from the disk. One is damaged after it was accepted.
    client.write(7 * PAGE as u64 + 512, &[7; 512]);
    file.write_all_at(&[1, 2, 3], (3 + 2 * 50) * PAGE as u64 + 9).expect("damage");
    let before = served.export.read_from();
    for block in 0..200 {
        let mut expected = content(block, u64::from((100..110).contains(&block)));
        if block == 7 {
            expected[512..1024].fill(7);
        }
        assert_eq!(client.block(block), expected, "{block}");
    }
    let after = served.export.read_from();
    assert_eq!((after.memory - before.memory, after.wrong), (102, 1));
    assert_eq!(after.disk - before.disk, 98);
    assert_eq!((held(), served.export.known_and_kept().1), (0, 0));
    // Read again, they come from the disk, and are known.
    assert_eq!(client.block(3), content(3, 0));
    assert_eq!(served.export.read_from().memory, after.memory);
}

#[test]
fn too_many_are_not_kept_and_all_can_be_dropped() {
    let served = Served::new(64, false);
    let mut client = served.client();
    client.read(0, 64 * PAGE);
    let file = served.memory((0..64).map(|block| (block, content(block, 0))));
    let memory = Arc::new(KeptMemory::new(file.try_clone().expect("clone")).expect("memory"));
    let found =
        find(&memory, std::slice::from_ref(&served.export), &served.hasher, 40).expect("search");
    assert_eq!((found.kept, found.too_many), (40, 24));
    served.export.release_all();
    drop(memory);
    assert_eq!(std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("file")), 0);
    assert_eq!(client.block(63), content(63, 0));
}

/// Several clients, each with blocks of its own among those of the others, against what they know; all the while old
/// memory is found again in which half of the pages are out of date.
#[test]
fn reads_writes_trims_and_zeros_race_on_neighbours_and_none_is_wrong() {
    const BLOCKS: u64 = 96;
    let served = Served::new(BLOCKS, true);
    served.client().read(0, (BLOCKS as usize) * PAGE);
    std::thread::scope(|scope| {
        for own in 0..3u64 {
            let mut client = served.client();
            scope.spawn(move || {
                // Of each of our half blocks: its bytes. A half block, so that two clients write one block.
                let half = PAGE as u64 / 2;
                let mut model: Vec<Vec<u8>> = (0..BLOCKS * 2)
                    .map(|at| {
                        content(at / 2, 0)[(at % 2 * half) as usize..][..half as usize].to_vec()
                    })
                    .collect();
                let mut state = own + 11;
                for step in 0..3000u64 {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let at = state % (BLOCKS * 2 / 3) * 3 + own;
                    let offset = at * half;
                    match state >> 32 & 7 {
                        0 | 1 => {
                            let bytes = content(at, step)[..half as usize].to_vec();
                            client.write(offset, &bytes);
                            model[at as usize] = bytes;
                        }
                        2 => {
                            assert_eq!(client.ask(6, 0, offset, half as u32, &[]), 0);
                            model[at as usize] = vec![0; half as usize];
                        }
                        3 => {
                            assert_eq!(client.ask(4, 0, offset, half as u32, &[]), 0);
                            // As much as it likes: zeros, or as before.
                            let now = client.read(offset, half as usize);
                            let is_zero = now.iter().all(|it| *it == 0);
                            assert!(is_zero || now == model[at as usize]);
                            model[at as usize] = now;
                        }
                        _ => {
                            // The whole block, of which the half is ours.
                            let whole = client.read(at / 2 * PAGE as u64, PAGE);
                            let ours = &whole[(at % 2 * half) as usize..][..half as usize];
                            assert_eq!(ours, &model[at as usize][..], "half {at} at {step}");
                        }
                    }
                }
            });
        }
        scope.spawn(|| {
            for round in 0..20 {
                let path = served.folder.path().join("disk");
                let disk = File::open(path).expect("disk");
                let block = |block: u64| {
                    let mut bytes = vec![0; PAGE];
                    disk.read_exact_at(&mut bytes, block * PAGE as u64).expect("read");
                    (block, bytes)
                };
                let file = served.memory((0..BLOCKS).map(block));
                let memory = Arc::new(KeptMemory::new(file).expect("memory"));
                let most = 1 << (round % 8);
                find(&memory, std::slice::from_ref(&served.export), &served.hasher, most)
                    .expect("search");
            }
        });
    });
    let from = served.export.read_from();
    assert!(from.memory > 0 && from.wrong == 0, "{from:?}");
}

#[test]
fn qemu_reads_writes_and_compares() {
    let served = Served::new(512, true);
    let url = format!("nbd+unix:///0?socket={}", served.socket());
    let run = |program: &str, words: &[&str]| {
        let output = Command::new(program).args(words).output().expect(program);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{words:?}: {said} {output:?}");
        said
    };
    let said = run(
        "qemu-io",
        &[
            "-f",
            "raw",
            "-c",
            "write -P 7 4k 64k",
            "-c",
            "write -z 128k 8k",
            "-c",
            "discard 256k 8k",
            "-c",
            "write -f -P 9 512 512",
            "-c",
            "flush",
            "-c",
            "read -P 7 4k 64k",
            "-c",
            "read -P 0 128k 8k",
            "-c",
            "read -P 9 512 512",
            &url,
        ],
    );
    assert!(!said.contains("failed"), "{said}");
    let disk = served.folder.path().join("disk").display().to_string();
    run("qemu-img", &["compare", "--force-share", "-f", "raw", "-F", "raw", &url, &disk]);
    // It is locked as QEMU's own: another one may not write it.
    let second = Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 4k", &disk]).output();
    let said = String::from_utf8_lossy(&second.expect("qemu-io").stderr).into_owned();
    assert!(said.contains("lock"), "{said}");
    let other = DiskOptions {
        path: disk.clone().into(),
        is_read_only: false,
        is_qcow2: false,
        is_direct: false,
        locks_later: false,
    };
    let why = DiskFile::open(&other).expect_err("it is in use").to_string();
    assert!(why.contains("in use by another program"), "{why}");
    let reads = DiskOptions { is_read_only: true, ..other };
    assert!(DiskFile::open(&reads).is_err());
}

#[test]
fn locks_that_were_given_up_are_taken_again_by_a_write_or_it_fails() {
    let served = Served::new(64, true);
    let mut client = served.client();
    let path = served.folder.path().join("disk");
    let options = DiskOptions {
        path,
        is_read_only: false,
        is_qcow2: false,
        is_direct: false,
        locks_later: false,
    };
    client.write(0, &content(0, 1));
    release_locks(&served.folder.path().join("socket")).expect("released");
    assert_eq!(served.export.known_and_kept(), (0, 0), "others may write it");
    let other = DiskFile::open(&options).expect("it is free");
    assert_eq!(client.block(0), content(0, 1), "who only reads needs none");
    // It waits for the other a while, and then it is an error, and nothing is written.
    assert_eq!(client.ask(1, 0, 4096, 4096, &content(1, 1)), 5);
    assert_eq!(client.block(1), content(1, 0));
    drop(other);
    client.write(4096, &content(1, 1));
    assert!(DiskFile::open(&options).is_err(), "it has them again");
    release_locks(&served.folder.path().join("socket")).expect("released");
    client.block(0);
    assert!(DiskFile::open(&options).is_err(), "a read takes them, too");
    let nobody = served.folder.path().join("nobody");
    assert!(release_locks(&nobody).is_err());
}

#[test]
fn what_is_no_request_harms_nobody() {
    let served = Served::new(8, false);
    let mut well = served.client();
    // Outside, too long, not aligned, unknown, and of nothing.
    for (kind, offset, bytes) in [
        (0, 8 * PAGE as u64, 512),
        (0, 0, 64 << 20),
        (0, 7, 512),
        (9, 0, 512),
        (0, u64::MAX - 511, 512),
        (0, 0, 0),
    ] {
        assert_eq!(well.ask(kind, 0, offset, bytes, &[]), 22, "{kind} {offset} {bytes}");
    }
    for noise in [
        &b"\0\0\0\x03GET / HTTP/1.1\r\n\r\n"[..],
        b"\0\0\0\x03IHAVEOPT\0\0\0\x07\xff\xff\xff\xff",
        b"",
    ] {
        let mut stream = UnixStream::connect(served.socket()).expect("connect");
        stream.write_all(noise).expect("noise");
        stream.shutdown(std::net::Shutdown::Write).expect("end");
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        assert!(said.starts_with(b"NBDMAGICIHAVEOPT"));
    }
    let mut broken = served.client();
    broken.stream.write_all(&[9; 28]).expect("noise");
    assert_eq!(broken.stream.read(&mut [0; 16]).expect("the end"), 0);
    assert_eq!(well.block(2), content(2, 0));
}

/// What a disk does not take is known to nobody: neither what was to be written, nor what was there.
#[test]
fn a_write_that_fails_leaves_nothing_that_would_be_believed() {
    let folder = tempfile::tempdir().expect("folder");
    let small = folder.path().join("small");
    fs::create_dir(&small).expect("folder");
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=128k", "none"]).arg(&small);
    if !mount.status().is_ok_and(|it| it.success()) {
        println!("SKIPPED a_write_that_fails_leaves_nothing_that_would_be_believed: cannot mount");
        return;
    }
    // A megabyte, of which 32 blocks have room.
    let path = small.join("disk");
    File::create(&path).and_then(|it| it.set_len(1 << 20)).expect("disk");
    let served = Served::with(path.clone(), folder, false);
    let mut client = served.client();
    for block in 0..16 {
        client.write(block * PAGE as u64, &content(block, 1));
    }
    assert_eq!(served.export.known_and_kept(), (16, 0));
    // Half of it has room: the write is torn.
    let torn: Vec<u8> = (8..72).flat_map(|block| content(block, 2)).collect();
    assert_eq!(client.ask(1, 0, 8 * PAGE as u64, torn.len() as u32, &torn), 28);
    assert_eq!(served.export.known_and_kept(), (8, 0), "what it touched is not known any more");
    // The guest's memory has what it meant to write. None of it may come back.
    let memory =
        served.memory((0..72).map(|block| (block, content(block, 1 + u64::from(block >= 8)))));
    let memory = Arc::new(KeptMemory::new(memory).expect("memory"));
    let found =
        find(&memory, std::slice::from_ref(&served.export), &served.hasher, 1000).expect("search");
    assert_eq!(found.kept, 8);
    let disk = fs::read(path).expect("disk");
    for block in 0..72 {
        let at = block as usize * PAGE;
        assert_eq!(client.block(block), disk[at..at + PAGE], "{block}");
    }
    let mut umount = Command::new("umount");
    assert!(umount.arg("-l").arg(small).status().expect("umount").success());
}
