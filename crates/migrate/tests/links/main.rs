//! Memory over connections: every byte arrives, or nothing is believed.

mod fuzz;

use dewar_capture::{PIECE, Pieces};
use dewar_codec::{Codec, Compression, Feed, WordBase};
use dewar_memory::{NewRam, Ram};
use dewar_migrate::{
    ComesAgain, FrameReader, FrameWriter, MigrateError, NewMemory, PageReceiver, PageSender,
    Received, SentMemory,
};
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use dewar_wire::frame::{FrameError, HEADER_BYTES, Kind, Side};
use dewar_wire::pages::{Form, put_pages, put_same, put_zeros};
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

const SESSION: u64 = 0x5e55_1011;
/// The pages of the guest's two regions.
const REGIONS: [u64; 2] = [5 * PIECE + 77, PIECE];
const PAGES: u64 = REGIONS[0] + REGIONS[1];

/// A byte stream that no codec shrinks.
fn noise(seed: u64) -> impl Iterator<Item = u8> {
    let mut state = seed | 1;
    std::iter::repeat_with(move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    })
}

/// What page `page` has in it after `round` rounds of writing: zeros, text or noise of its own; noise that many
/// pages share; noise of which one word is written each time; one word again and again.
fn content(page: u64, round: u64) -> Vec<u8> {
    let kind = page / 7 % 8;
    // Some change from one kind to another.
    match if page % 3 == 0 { (kind + round) % 8 } else { kind } {
        0 => vec![0; PAGE_BYTES],
        1 | 2 => {
            let line = format!("page {page} as it is in round {round}; ");
            line.bytes().cycle().take(PAGE_BYTES).collect()
        }
        3 => noise(page * 31 + round).take(PAGE_BYTES).collect(),
        4 | 5 => noise(page % 11 * 31 + round / 2).take(PAGE_BYTES).collect(),
        6 => {
            let mut bytes: Vec<u8> = noise(page * 31).take(PAGE_BYTES).collect();
            bytes[page as usize % 500 * 8..][..8].copy_from_slice(&round.to_le_bytes());
            bytes
        }
        _ => (page * 31 + round).to_le_bytes().repeat(PAGE_BYTES / 8),
    }
}

/// The source's memory; its files are written as a guest would write them.
struct Guest {
    files: Vec<File>,
    ram: Ram,
}

impl Guest {
    fn new() -> Self {
        let (mut files, mut ram) = (Vec::new(), Ram::default());
        for (number, pages) in REGIONS.iter().enumerate() {
            let file = tempfile::tempfile().expect("file");
            file.set_len(pages * PAGE_BYTES as u64).expect("length");
            let ours = file.try_clone().expect("file");
            ram.add(format!("ram{number}"), ours, pages * PAGE_BYTES as u64, 0).expect("region");
            files.push(file);
        }
        Self { files, ram }
    }

    fn write(&self, page: u64, bytes: &[u8]) {
        let (file, page) = match page.checked_sub(REGIONS[0]) {
            None => (&self.files[0], page),
            Some(page) => (&self.files[1], page),
        };
        file.write_all_at(bytes, page * PAGE_BYTES as u64).expect("write");
    }
}

/// Nobody writes it while it is sent.
impl SentMemory for Guest {
    fn was_sent_as(&self, page: PageNumber, bytes: &[u8]) -> bool {
        let mut now = [0; PAGE_BYTES];
        self.ram.copy_page(page, &mut now);
        now == bytes
    }

    fn comes_again(&self, _feed: &Feed) -> ComesAgain {
        ComesAgain::Likely
    }
}

/// The destination's memory, and its files to look into.
fn new_memory() -> (Arc<NewMemory>, Vec<File>) {
    let (mut memory, mut files) = (NewMemory::default(), Vec::new());
    for pages in REGIONS {
        let file = tempfile::tempfile().expect("file");
        let bytes = pages * PAGE_BYTES as u64;
        file.set_len(bytes).expect("length");
        memory.add(NewRam::new(file.try_clone().expect("file"), bytes).expect("RAM"), pages);
        files.push(file);
    }
    (Arc::new(memory), files)
}

fn assert_equal(guest: &Guest, files: &[File]) {
    let whole = |files: &[File]| -> Vec<Vec<u8>> {
        let read = |(file, pages): (&File, u64)| {
            let mut bytes = vec![0; pages as usize * PAGE_BYTES];
            file.read_exact_at(&mut bytes, 0).expect("read");
            bytes
        };
        files.iter().zip(REGIONS).map(read).collect()
    };
    let (ours, theirs) = (whole(&guest.files), whole(files));
    for (region, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        let differs = ours
            .chunks(PAGE_BYTES)
            .zip(theirs.chunks(PAGE_BYTES))
            .position(|(ours, theirs)| ours != theirs);
        assert_eq!(differs, None, "a page of region {region} is another");
    }
}

/// Sends pages by as many threads as there are connections.
fn send(sender: &PageSender, guest: &Guest, pages: &PageSet) -> Result<(), MigrateError> {
    let pieces = Pieces::striped(PageRange::new(0, PAGES), PIECE, 4);
    let work = || {
        let mut sink = sender.sink_of(guest);
        let mut bytes = vec![0; PAGE_BYTES];
        while let Some(piece) = pieces.take() {
            for page in piece.pages().filter(|page| pages.contains(*page)) {
                guest.ram.copy_page(page, &mut bytes);
                sink.put(page, &bytes)?;
            }
        }
        sink.flush()
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|it| it.join().expect("thread")).fold(Ok(()), Result::and)
    })
}

fn writers<W: Write>(links: Vec<W>) -> Vec<FrameWriter<W>> {
    let writer = |(shard, link)| FrameWriter::new(link, SESSION, shard, Side::Source);
    (0..).zip(links).map(writer).collect()
}

fn readers<R: Read>(links: Vec<R>) -> Vec<FrameReader<R>> {
    let reader = |(shard, link)| FrameReader::new(link, SESSION, shard, Side::Source);
    (0..).zip(links).map(reader).collect()
}

fn pairs(count: usize) -> (Vec<UnixStream>, Vec<UnixStream>) {
    (0..count).map(|_| UnixStream::pair().expect("sockets")).unzip()
}

/// Writes the pages of a round, and sends them as an epoch.
fn send_round(sender: &PageSender, guest: &Guest, round: u64) {
    let mut dirty = PageSet::new(PAGES);
    for page in (0..PAGES).filter(|page| is_written(*page, round)) {
        guest.write(page, &content(page, round));
        dirty.insert(PageNumber(page));
    }
    send(sender, guest, &dirty).expect("sent");
    sender.end_epoch(round as u32 + 1).expect("sent");
}

/// Moves a guest that writes some of its pages between five epochs. Returns also how many pages went as the
/// same as another, and as words that differ.
fn move_guest(compression: Compression, connections: usize) -> (Received, u64, u64) {
    let guest = Guest::new();
    let (memory, files) = new_memory();
    let (ours, theirs) = pairs(connections);
    let receiver = PageReceiver::start(readers(theirs), &memory);
    let sender = PageSender::start(writers(ours), compression, -1).with_references(PAGES);
    for round in 0..ROUNDS {
        send_round(&sender, &guest, round);
        assert!(receiver.wait(round as u32 + 1), "epoch {round} did not arrive");
        assert_equal(&guest, &files);
    }
    let (same, deltas) = (sender.same_pages(), sender.delta_pages());
    sender.finish().expect("sent");
    (receiver.finish().expect("received"), same, deltas)
}

const ROUNDS: u64 = 5;

fn is_written(page: u64, round: u64) -> bool {
    round == 0 || (page + round) % 5 < 3
}

#[test]
fn every_byte_arrives_however_it_is_sent() {
    let sent_pages: u64 = (0..ROUNDS)
        .map(|round| (0..PAGES).filter(|page| is_written(*page, round)).count() as u64)
        .sum();
    let all = sent_pages * PAGE_BYTES as u64;
    for codec in [Codec::Raw, Codec::Lz4, Codec::Zstd] {
        let (received, same, deltas) = move_guest(Compression::Only(codec), 2);
        assert_eq!(received.pages, sent_pages);
        let bytes = received.bytes;
        if codec == Codec::Raw {
            assert!(same + deltas == 0 && bytes > all / 2, "{bytes} of {all}, {same}, {deltas}");
        } else {
            assert!(bytes < all / 3, "{bytes} of {all}");
            // A quarter of the pages are eleven contents, an eighth has one word of each version written.
            let (least_same, least_deltas) = (sent_pages / 8, sent_pages / 32);
            assert!(same > least_same && deltas > least_deltas, "{same}, {deltas} of {sent_pages}");
        }
    }
    for connections in [1, 5] {
        move_guest(Compression::Auto, connections);
    }
}

/// The first page is changed after it was sent, and a page that is as it was then or as it is now comes.
#[test]
fn a_page_that_changed_since_it_was_sent_is_referred_to_by_no_other() {
    let guest = Guest::new();
    let (memory, files) = new_memory();
    let (ours, theirs) = pairs(1);
    let receiver = PageReceiver::start(readers(theirs), &memory);
    let auto = Compression::Auto;
    let sender = PageSender::start(writers(ours), auto, -1).with_references(PAGES);
    let bytes = |seed| noise(seed).take(PAGE_BYTES).collect::<Vec<u8>>();
    let mut sink = sender.sink_of(&guest);
    let mut put = |page: u64, seed: u64, flush: bool| {
        guest.write(page, &bytes(seed));
        sink.put(PageNumber(page), &bytes(seed)).expect("sent");
        if flush {
            sink.flush().expect("sent");
        }
    };
    for (first, flush) in [(0, false), (10, true)] {
        put(first, 1 + first, flush);
        guest.write(first, &bytes(2 + first));
        put(first + 1, 1 + first, flush);
        put(first + 2, 2 + first, flush);
        // What was sent and is so still.
        put(first + 3, 2 + first, flush);
    }
    sink.flush().expect("sent");
    assert_eq!(sender.same_pages(), 2);
    sender.end_epoch(1).expect("sent");
    // In the next epoch nothing of this one is referred to.
    let mut sink = sender.sink_of(&guest);
    for page in [0, 10] {
        sink.put(PageNumber(page), &bytes(2 + page)).expect("sent");
    }
    sink.flush().expect("sent");
    assert_eq!((sender.same_pages(), sender.delta_pages()), (2, 0));
    sender.end_epoch(2).expect("sent");
    // Zeros are no version to compare with, nor is what was before them.
    let mut few_words = vec![0; PAGE_BYTES];
    few_words[0..100].fill(7);
    let mut written = bytes(3);
    written[0] ^= 1;
    let versions = [vec![0; PAGE_BYTES], bytes(3), vec![0; PAGE_BYTES], written];
    for (epoch, page) in (3..).zip(versions.into_iter().chain([vec![0; PAGE_BYTES], few_words])) {
        guest.write(0, &page);
        let mut sink = sender.sink_of(&guest);
        sink.put(PageNumber(0), &page).expect("sent");
        sink.flush().expect("sent");
        sender.end_epoch(epoch).expect("sent");
    }
    assert!(receiver.wait(8));
    assert_equal(&guest, &files);
    assert_eq!(sender.delta_pages(), 0);
}

/// A liar's pages refer to what did not come, or to memory that the guest has already.
#[test]
fn what_refers_to_nothing_is_refused() {
    let one = [PageNumber(3)];
    let delta = |payload: &mut Vec<u8>| {
        put_pages(payload, &one, Form::Words(WordBase::PagePresent), &[0]);
    };
    let same = |payload: &mut Vec<u8>| put_same(payload, &[(PageNumber(4), one[0])]);
    let came = |payload: &mut Vec<u8>| {
        put_pages(payload, &one, Form::Frame(Codec::Raw), &[7; PAGE_BYTES]);
    };
    let zeros = |payload: &mut Vec<u8>| put_zeros(payload, PageRange::new(0, 9));
    type Put<'p> = &'p dyn Fn(&mut Vec<u8>);
    let receive = |entries: &[Put<'_>]| {
        let (memory, _files) = new_memory();
        let (ours, theirs) = pairs(1);
        let receiver = PageReceiver::start(readers(theirs), &memory);
        let mut payload = Vec::new();
        entries.iter().for_each(|put| put(&mut payload));
        writers(ours)[0].send(Kind::Pages, &payload).expect("sent");
        receiver.finish()
    };
    for entries in [&[&delta as Put<'_>][..], &[&same], &[&came, &zeros, &delta]] {
        let received = receive(entries);
        assert!(matches!(received, Err(MigrateError::Refers(PageNumber(3)))), "{received:?}");
    }
    receive(&[&came, &delta, &same]).expect("received");
    // Words that are too few, and bytes behind them.
    for bytes in [&[1][..], &[0, 0]] {
        let words = |payload: &mut Vec<u8>| {
            put_pages(payload, &one, Form::Words(WordBase::WordBefore), bytes);
        };
        let received = receive(&[&words]);
        assert!(matches!(received, Err(MigrateError::Codec(_))), "{received:?}");
    }
}

/// Passes on what `from` sends, changed by `change`. That is told how many bytes came before, and says how
/// many of these pass; where they are fewer, both connections are cut after them.
fn relay(mut from: UnixStream, mut to: UnixStream, change: impl Fn(u64, &mut [u8]) -> usize) {
    let mut bytes = vec![0; 64 << 10];
    let mut before = 0;
    loop {
        let count = from.read(&mut bytes).unwrap_or(0);
        let pass = change(before, &mut bytes[..count]);
        if to.write_all(&bytes[..pass]).is_err() || count == 0 || pass < count {
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
        before += count as u64;
    }
}

/// Two connections, of which the second is relayed: ours, theirs, and what relays.
fn relayed(
    change: impl Fn(u64, &mut [u8]) -> usize + Send + 'static,
) -> (Vec<UnixStream>, Vec<UnixStream>, JoinHandle<()>) {
    let (ours, theirs) = pairs(3);
    let [ours0, ours1, relayed_out] = <[_; 3]>::try_from(ours).expect("three");
    let [theirs0, relayed_in, theirs1] = <[_; 3]>::try_from(theirs).expect("three");
    // ours1 -> relayed_in | relayed_out -> theirs1
    let relay = std::thread::spawn(move || relay(relayed_in, relayed_out, change));
    (vec![ours0, ours1], vec![theirs0, theirs1], relay)
}

/// Moves a guest over two connections, of which the second is relayed; returns what both ends say.
fn move_relayed(
    change: impl Fn(u64, &mut [u8]) -> usize + Send + 'static,
) -> (Result<(), MigrateError>, Result<Received, MigrateError>) {
    let guest = Guest::new();
    for page in 0..PAGES {
        guest.write(page, &content(page, 3));
    }
    let (memory, _files) = new_memory();
    let (ours, theirs, relay) = relayed(change);
    let receiver = PageReceiver::start(readers(theirs), &memory);
    let sender = PageSender::start(writers(ours), Compression::Only(Codec::Lz4), -1);
    let sent = send(&sender, &guest, &PageSet::full(PAGES))
        .and_then(|()| sender.end_epoch(1))
        .and(sender.finish());
    let arrived = receiver.wait(1);
    let received = receiver.finish();
    assert!(!arrived || received.is_ok(), "the epoch is believed where {received:?}");
    relay.join().expect("relay");
    (sent, received)
}

#[test]
fn what_is_relayed_unchanged_arrives() {
    let (sent, received) = move_relayed(|_, bytes| bytes.len());
    sent.expect("sent");
    assert_eq!(received.expect("received").pages, PAGES, "all of them");
}

/// Epochs follow one another at once: on one connection pages of an earlier one come when the other has those of
/// later ones already.
#[test]
fn a_connection_that_lags_behind_gives_no_page_an_older_content() {
    let guest = Guest::new();
    let (memory, files) = new_memory();
    let (ours, theirs, relay) = relayed(|_, bytes| {
        std::thread::sleep(Duration::from_millis(2));
        bytes.len()
    });
    let receiver = PageReceiver::start(readers(theirs), &memory);
    let sender = PageSender::start(writers(ours), Compression::Auto, -1).with_references(PAGES);
    for round in 0..ROUNDS {
        send_round(&sender, &guest, round);
    }
    assert!(receiver.wait(ROUNDS as u32), "the last epoch did not arrive");
    sender.finish().expect("sent");
    assert_equal(&guest, &files);
    receiver.finish().expect("received");
    relay.join().expect("relay");
}

#[test]
fn a_flipped_bit_on_the_way_is_found() {
    static SEEN: AtomicU64 = AtomicU64::new(0);
    let (_, received) = move_relayed(|before, bytes| {
        if (before..before + bytes.len() as u64).contains(&300_000) {
            bytes[(300_000 - before) as usize] ^= 4;
            SEEN.store(1, Ordering::Relaxed);
        }
        bytes.len()
    });
    assert_eq!(SEEN.load(Ordering::Relaxed), 1, "nothing was damaged");
    assert!(matches!(received, Err(MigrateError::Frame(FrameError::Damaged(_)))), "{received:?}");
}

#[test]
fn a_link_that_is_cut_anywhere_keeps_nobody_waiting() {
    for cut in [0, 10, HEADER_BYTES as u64, 5_000, 700_000] {
        let (sent, received) =
            move_relayed(move |before, bytes| bytes.len().min((cut - before) as usize));
        // Bytes may be in the socket still when it is cut: then only the receiver knows.
        drop(sent);
        assert!(received.is_err() || cut == 0, "cut after {cut} bytes: {received:?}");
    }
}

#[test]
fn connections_that_are_exchanged_are_found() {
    let guest = Guest::new();
    guest.write(0, &content(1, 0));
    let (memory, _files) = new_memory();
    let (ours, mut theirs) = pairs(2);
    theirs.reverse();
    let receiver = PageReceiver::start(readers(theirs), &memory);
    let sender = PageSender::start(writers(ours), Compression::Auto, -1);
    let _ = send(&sender, &guest, &PageSet::full(PAGES));
    let _ = sender.finish();
    let received = receiver.finish();
    assert!(
        matches!(received, Err(MigrateError::Frame(FrameError::OutOfPlace { .. }))),
        "{received:?}"
    );
}
