//! Frames and greetings: what was sent arrives, and nothing else passes.

use dewar_wire::frame::{FrameError, HEADER_BYTES, Header, Kind, Place, Side};
use dewar_wire::hello::{Features, Hello, HelloError};
use proptest::prelude::*;

const PLACE: Place =
    Place { session: 0x0123_4567_89ab_cdef, shard: 3, from: Side::Source, sequence: 41 };

fn kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(vec![Kind::Hello, Kind::Control, Kind::Pages, Kind::State, Kind::Barrier])
}

fn place() -> impl Strategy<Value = Place> {
    any::<(u64, u16, bool, u32)>().prop_map(|(session, shard, is_source, sequence)| Place {
        session,
        shard,
        from: if is_source { Side::Source } else { Side::Destination },
        sequence: u64::from(sequence),
    })
}

/// What a receiver does.
fn receive(bytes: &[u8], wanted: Place) -> Result<(Kind, Vec<u8>), FrameError> {
    let (header, payload) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or(FrameError::NoFrame)?;
    let header = Header::parse(header, wanted)?;
    assert!(header.length <= header.kind.most_bytes());
    let payload = payload.get(..header.length as usize).ok_or(FrameError::NoFrame)?;
    header.check(payload)?;
    Ok((header.kind, payload.to_vec()))
}

fn sent(kind: Kind, place: Place, payload: &[u8]) -> Vec<u8> {
    [&Header::of(kind, place, payload).bytes()[..], payload].concat()
}

proptest! {
    #[test]
    fn what_was_sent_arrives(
        kind in kind(),
        place in place(),
        payload in prop::collection::vec(any::<u8>(), 0..16),
    ) {
        prop_assert_eq!(receive(&sent(kind, place, &payload), place), Ok((kind, payload)));
    }

    #[test]
    fn a_frame_of_another_place_does_not_pass(
        frame in place(),
        wanted in place(),
        payload in prop::collection::vec(any::<u8>(), 0..16),
    ) {
        prop_assume!(frame != wanted);
        let found = receive(&sent(Kind::State, frame, &payload), wanted);
        prop_assert_eq!(found, Err(FrameError::OutOfPlace { found: frame, wanted }));
    }

    #[test]
    fn any_bytes_are_a_frame_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..100),
        start in any::<bool>(),
    ) {
        let mut bytes = bytes;
        if start && bytes.len() >= HEADER_BYTES {
            let header = Header::of(Kind::Pages, PLACE, &[]).bytes();
            bytes[..24].copy_from_slice(&header[..24]);
        }
        prop_assert!(receive(&bytes, PLACE).is_err());
        let _ = Hello::parse(&bytes);
    }

    #[test]
    fn both_sides_come_to_the_same_agreement(
        ours in (1..5_u16, 0..5_u16),
        theirs in (1..5_u16, 0..5_u16),
        features in any::<(bool, bool)>(),
    ) {
        let hello = |(first, more): (u16, u16), features| Hello { first, last: first + more, features };
        let some = |has: bool, it| if has { it } else { Features::none() };
        let ours = hello(ours, some(features.0, Features::LZ4).union(Features::ZSTD));
        let theirs = hello(theirs, some(features.1, Features::LZ4));
        match (ours.agree(&theirs), theirs.agree(&ours)) {
            (Ok(one), Ok(other)) => {
                prop_assert_eq!(one, other);
                prop_assert!((ours.first..=ours.last).contains(&one.version));
                prop_assert!((theirs.first..=theirs.last).contains(&one.version));
                prop_assert!(!one.features.has(Features::ZSTD));
                prop_assert_eq!(one.features.has(Features::LZ4), features.0 && features.1);
            }
            (Err(_), Err(_)) => {
                prop_assert!(ours.last < theirs.first || theirs.last < ours.first);
            }
            (one, other) => prop_assert!(false, "{one:?} and {other:?}"),
        }
    }
}

#[test]
fn a_flipped_bit_anywhere_is_found() {
    let bytes = sent(Kind::Pages, PLACE, b"a page's bytes");
    assert!(receive(&bytes, PLACE).is_ok());
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(receive(&damaged, PLACE).is_err(), "bit {bit} was flipped and nobody saw it");
    }
    for length in 0..bytes.len() {
        assert!(receive(&bytes[..length], PLACE).is_err(), "{length} bytes are a whole frame");
    }
}

#[test]
fn a_length_beyond_what_is_allowed_is_refused_before_anything_is_read() {
    let mut header = Header::of(Kind::Hello, PLACE, &[]).bytes();
    header[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = Header::parse(&header, PLACE);
    assert_eq!(error, Err(FrameError::TooLong { length: u32::MAX, most: 64 }));
}

#[test]
fn a_frame_sent_twice_does_not_pass_twice() {
    let frame = sent(Kind::Pages, PLACE, b"once");
    assert!(receive(&frame, PLACE).is_ok());
    assert!(matches!(receive(&frame, PLACE.next()), Err(FrameError::OutOfPlace { .. })));
}

#[test]
fn a_greeting_of_a_later_version_is_understood() {
    let ours = Hello::ours(Features::LZ4);
    assert_eq!(Hello::parse(&ours.bytes()), Ok(ours));
    let longer = [&ours.bytes()[..], b"more"].concat();
    assert_eq!(Hello::parse(&longer), Ok(ours));
    assert_eq!(Hello::parse(&ours.bytes()[..11]), Err(HelloError::NoHello));
    let later = Hello { first: 2, last: 3, ..ours };
    assert!(matches!(ours.agree(&later), Err(HelloError::NoVersion { theirs_first: 2, .. })));
}

#[test]
fn a_frame_that_is_sent_back_does_not_pass() {
    let ours = sent(Kind::Pages, PLACE, b"mine");
    let theirs = Place { from: Side::Destination, ..PLACE };
    assert!(matches!(receive(&ours, theirs), Err(FrameError::OutOfPlace { .. })));
}

#[test]
fn a_connection_says_in_its_first_frame_which_it_is() {
    let first = Place::first(7, 2, Side::Source);
    let greeting = Header::of(Kind::Hello, first, &[]).bytes();
    let header = Header::parse_first(&greeting, Side::Source).expect("a greeting");
    assert_eq!(header.place, first);
    let others = [
        (Kind::Hello, first, Side::Destination),
        (Kind::Hello, first.next(), Side::Source),
        (Kind::Pages, first, Side::Source),
    ];
    for (kind, place, from) in others {
        let bytes = Header::of(kind, place, &[]).bytes();
        assert_eq!(Header::parse_first(&bytes, from), Err(FrameError::NoGreeting));
    }
}
