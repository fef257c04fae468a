//! A migration's connections against altered frames: whatever the other side sends is an error, or pages of the
//! guest, and never a panic. Headers fit again after each change, so that the code behind them is reached.

use super::{Guest, PAGES, REGIONS, SESSION, content, new_memory, pairs, readers, send, writers};
use dewar_codec::Compression;
use dewar_migrate::{FrameReader, PageReceiver, PageSender};
use dewar_testkit::fuzz;
use dewar_units::{PAGE_BYTES, PageNumber, PageSet};
use dewar_wire::control::{CONTROL, Offer, Region, Stopped, ToDestination};
use dewar_wire::frame::{HEADER_BYTES, Header, Kind, Place, Side};
use dewar_wire::hello::{Features, Hello};
use dewar_wire::ownership::FromSource;
use std::io::{Cursor, Read};

const KINDS: [Kind; 7] =
    [Kind::Hello, Kind::Control, Kind::Pages, Kind::State, Kind::Barrier, Kind::Beat, Kind::Disk];

/// Frames as they are altered: of each its kind, the length of its payload, and the payload.
fn unsealed(frames: &[(Kind, Vec<u8>)]) -> Vec<u8> {
    let frame = |(kind, payload): &(Kind, Vec<u8>)| {
        [&[*kind as u8][..], &(payload.len() as u32).to_le_bytes(), payload].concat()
    };
    frames.iter().flat_map(frame).collect()
}

/// The same as they are sent, each in its place and with its checksum.
fn sealed(mut left: &[u8], shard: u16) -> Vec<u8> {
    let mut place = Place::first(SESSION, shard, Side::Source);
    let mut sent = Vec::new();
    while let Some(([kind, length @ ..], rest)) = left.split_first_chunk::<5>() {
        let kind = KINDS[usize::from(kind.wrapping_sub(1)) % KINDS.len()];
        let length = u32::from_le_bytes(*length).min(kind.most_bytes()) as usize;
        let (payload, rest) = rest.split_at(length.min(rest.len()));
        sent.extend(Header::of(kind, place, payload).bytes());
        sent.extend_from_slice(payload);
        (place, left) = (place.next(), rest);
    }
    sent
}

/// The frames in what a source sent.
fn frames_of(mut sent: &[u8]) -> Vec<(Kind, Vec<u8>)> {
    let mut frames = Vec::new();
    while let Some((header, rest)) = sent.split_first_chunk::<HEADER_BYTES>() {
        let header = Header::parse_any(header).expect("a frame");
        let (payload, rest) = rest.split_at(header.length as usize);
        frames.push((header.kind, payload.to_vec()));
        sent = rest;
    }
    frames
}

/// What a source sends of some pages that are written between two epochs, on each of two connections.
fn real_connections(compression: Compression) -> Vec<Vec<u8>> {
    let guest = Guest::new();
    let (ours, theirs) = pairs(2);
    let record = |mut link: std::os::unix::net::UnixStream| {
        std::thread::spawn(move || {
            let mut sent = Vec::new();
            link.read_to_end(&mut sent).expect("sent");
            unsealed(&frames_of(&sent))
        })
    };
    let recorders: Vec<_> = theirs.into_iter().map(record).collect();
    let sender = PageSender::start(writers(ours), compression, -1).with_references(PAGES);
    for round in 0..2 {
        let mut dirty = PageSet::new(PAGES);
        for page in (0..PAGES).step_by(13) {
            guest.write(page, &content(page, round));
            dirty.insert(PageNumber(page));
        }
        send(&sender, &guest, &dirty).expect("sent");
        sender.end_epoch(round as u32 + 1).expect("sent");
    }
    assert!(sender.same_pages() > 0 && sender.delta_pages() > 0, "all forms are among them");
    sender.finish().expect("sent");
    recorders.into_iter().map(|it| it.join().expect("recorder")).collect()
}

#[test]
fn fuzz_pages() {
    let all = [Compression::Auto, Compression::Only(dewar_codec::Codec::Lz4)];
    let seeds: Vec<Vec<u8>> = all.into_iter().flat_map(real_connections).collect();
    let is_received = |bytes: &[u8]| {
        let (memory, files) = new_memory();
        let links = vec![Cursor::new(sealed(bytes, 0))];
        // It passes on a panic of its threads.
        let received = PageReceiver::start(readers(links), &memory).finish();
        for (file, pages) in files.iter().zip(REGIONS) {
            let length = file.metadata().expect("its length").len();
            assert_eq!(length, pages * PAGE_BYTES as u64, "written beside the guest");
        }
        received.is_ok()
    };
    // The second connection's frames are as good as the first's when they are sealed as such.
    assert!(seeds.iter().all(|seed| is_received(seed)), "as they were sent");
    fuzz(&seeds, |bytes| {
        is_received(&bytes);
    });
}

/// What a source says, up to the guest's end here.
fn real_talk() -> Vec<(Kind, Vec<u8>)> {
    let region = Region { name: "pc.ram".into(), bytes: 64 << 20 };
    let machine = serde_json::json!({ "machine": "pc", "arguments": ["-m", "64"] });
    let offer = Offer {
        guest: "web".into(),
        from: "here".into(),
        instance: "1:2:3".into(),
        machine: machine.clone(),
        regions: vec![region],
        connections: 2,
        certificate: Some("00ff".into()),
        post_copy: true,
        trial: false,
    };
    let stopped = Stopped { epoch: 2, state_bytes: 9, owed_bytes: 3, was_running: true, machine };
    let say = |word: &ToDestination| (Kind::Control, serde_json::to_vec(word).expect("JSON"));
    let hello = Hello::ours(Features::POST_COPY.union(Features::REFERENCES));
    vec![
        (Kind::Hello, hello.bytes().to_vec()),
        say(&ToDestination::Offer(Box::new(offer))),
        (Kind::Beat, Vec::new()),
        say(&ToDestination::Begin { direct: true }),
        say(&ToDestination::Resume { guest: "web".into() }),
        say(&ToDestination::Stopped(Box::new(stopped))),
        (Kind::State, b"state and a set".to_vec()),
        say(&ToDestination::Ownership(FromSource::Commit)),
    ]
}

/// How many messages are understood before the first that is none.
fn heard(bytes: Vec<u8>) -> usize {
    let Ok((mut reader, hello)) = FrameReader::greeted(Cursor::new(bytes), Side::Source) else {
        return 0;
    };
    let ours = Hello::ours(Features::none());
    if let Ok(agreed) = ours.agree(&hello) {
        assert_eq!((agreed.version, agreed.features), (1, Features::none()), "no more than both");
    }
    let mut count = 0;
    while let Ok(Some((kind, payload))) = reader.receive() {
        assert!(payload.len() <= kind.most_bytes() as usize);
        if kind == Kind::Control && serde_json::from_slice::<ToDestination>(payload).is_err() {
            break;
        }
        count += 1;
    }
    count
}

#[test]
fn fuzz_control() {
    let talk = real_talk();
    let seed = unsealed(&talk);
    assert_eq!(heard(sealed(&seed, CONTROL)), talk.len() - 1, "as it is said");
    fuzz(&[seed], |bytes| {
        heard(sealed(&bytes, CONTROL));
    });
}
