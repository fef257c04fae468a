//! The reader against altered input: whatever the bytes, an error or a right
//! answer, never a panic; what a forged record may claim apart, never memory without
//! bound. Checksums are made to fit again after each change, so that the code behind them
//! is reached.

use crate::frame::{FRAME_HEADER_BYTES, FrameHeader};
use crate::record::{ImageId, Record};
use crate::segment::segment_name;
use crate::segment::{SegmentBuilder, SegmentFile};
use crate::{Entry, SegmentId, table};
use dewar_codec::{Codec, FrameDecoder, FrameEncoder, PageCodec};
use dewar_store::AlignedBytes;
use dewar_store::Folder;
use dewar_testkit::fuzz;
use dewar_units::PAGE_BYTES;
use std::path::Path;
use twox_hash::XxHash3_128;

const STORE: [u8; 16] = [7; 16];

fn id() -> SegmentId {
    SegmentId::from_bytes(&[9; 16])
}

fn pages() -> Vec<u8> {
    b"some text that repeats; ".iter().copied().cycle().take(3 * PAGE_BYTES).collect()
}

#[test]
fn fuzz_frames() {
    let seeds: Vec<Vec<u8>> = [Codec::Raw, Codec::Lz4, Codec::Zstd]
        .into_iter()
        .map(|codec| {
            let mut payload = Vec::new();
            let codec = FrameEncoder::new(codec, 1).encode(&pages(), &mut payload);
            let header = FrameHeader {
                store: STORE,
                segment: 5,
                segment_id: id(),
                frame: 9,
                codec: codec.expect("encode"),
                pages: 3,
                stored_bytes: payload.len() as u32,
            };
            [&header.encode(&payload)[..], &payload].concat()
        })
        .collect();
    let mut decoder = FrameDecoder::new().expect("decoder");
    fuzz(&seeds, |mut bytes| {
        if bytes.len() > FRAME_HEADER_BYTES {
            let length = (bytes.len() - FRAME_HEADER_BYTES) as u32;
            bytes[44..48].copy_from_slice(&length.to_le_bytes());
            let mut hasher = XxHash3_128::new();
            hasher.write(id().bytes());
            hasher.write(&bytes[..80]);
            hasher.write(&bytes[FRAME_HEADER_BYTES..]);
            bytes[80..96].copy_from_slice(&hasher.finish_128().to_le_bytes());
        }
        if let Ok((header, payload)) = FrameHeader::parse(&bytes, STORE, (5, id()), 9) {
            let mut out = Vec::new();
            if header.expand(payload, &mut decoder, &mut out).is_ok() {
                assert_eq!(out.len(), usize::from(header.pages) * PAGE_BYTES);
            }
        }
    });
}

/// Makes the checksum at a segment's end fit, where there is an end.
fn seal(bytes: &mut [u8]) {
    let Some(trailer) = bytes.len().checked_sub(48).filter(|trailer| *trailer >= 64) else {
        return;
    };
    let at = u32::from_le_bytes(bytes[trailer..trailer + 4].try_into().expect("word")) as usize;
    if at < trailer {
        let mut hasher = XxHash3_128::new();
        hasher.write(&bytes[..64]);
        hasher.write(&bytes[at..trailer]);
        hasher.write(&bytes[trailer..trailer + 8]);
        let checksum = hasher.finish_128().to_le_bytes();
        bytes[trailer + 8..trailer + 24].copy_from_slice(&checksum);
    }
}

/// A store in `root` whose segment 5 holds these bytes.
fn segment_five(root: &Path, bytes: &[u8]) -> Folder {
    std::fs::create_dir_all(root.join("segments")).expect("folder");
    std::fs::write(root.join(segment_name(5)), bytes).expect("write");
    Folder::new(root)
}

#[test]
fn a_frame_outside_its_segment_is_refused() {
    let folder = tempfile::tempdir().expect("tempdir");
    for offset in [u32::MAX - 10, u32::MAX, 1 << 30] {
        let mut builder = SegmentBuilder::new(STORE, 5, id(), AlignedBytes::default());
        builder.append(Codec::Raw, 1, &pages()[..PAGE_BYTES]);
        let mut bytes = builder.finish().1.to_vec();
        let directory = bytes.len() - 48 - 4;
        bytes[directory..directory + 4].copy_from_slice(&offset.to_le_bytes());
        seal(&mut bytes);
        let store = segment_five(folder.path(), &bytes);
        let segment = SegmentFile::open(&store, STORE, 5, None).expect("its end fits");
        let read = segment.read_frame(0, &mut Vec::new()).map(|(header, _)| header);
        assert!(matches!(read, Err(crate::ImageError::Damaged { .. })), "{offset}: {read:?}");
    }
}

#[test]
fn fuzz_segments() {
    let mut builder = SegmentBuilder::new(STORE, 5, id(), AlignedBytes::default());
    for _ in 0..4 {
        builder.append(Codec::Raw, 1, &pages()[..PAGE_BYTES]);
    }
    let seed = builder.finish().1.to_vec();
    let folder = tempfile::tempdir().expect("tempdir");
    fuzz(&[seed], |mut bytes| {
        seal(&mut bytes);
        let store = segment_five(folder.path(), &bytes);
        if let Ok(segment) = SegmentFile::open(&store, STORE, 5, None) {
            let mut buffer = Vec::new();
            for frame in 0..segment.frames() {
                let _ = segment.read_frame(frame, &mut buffer).map(|(header, _)| header);
            }
        }
    });
}

#[test]
fn fuzz_records() {
    let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/v1/images");
    let path = std::fs::read_dir(data).expect("list").flatten().next().expect("a record").path();
    let id = ImageId(path.file_stem().expect("name").to_string_lossy().into_owned());
    let seed = std::fs::read(path).expect("read");
    let text = String::from_utf8(seed).expect("text");
    let start = text.find("\"record\":").expect("record") + "\"record\":".len();
    let body = text[start..].trim_end().trim_end_matches('}').to_owned() + "}";
    let body = body.into_bytes();
    fuzz(&[body], |bytes| {
        let blake3 = blake3::hash(&bytes).to_hex();
        let mut file =
            format!(r#"{{"format":"dewar-record","version":1,"blake3":"{blake3}","record":"#)
                .into_bytes();
        file.extend_from_slice(&bytes);
        file.extend_from_slice(b"}\n");
        if let Ok(record) = Record::parse(&file, &id, "69a8008ccfc6f133a9d4f15f1ce28b47") {
            assert_eq!(record.id, id);
        }
    });
}

#[test]
fn fuzz_page_tables() {
    let seed: Vec<u8> = (0..512u64).flat_map(|entry| (entry * 512 + 1).to_le_bytes()).collect();
    fuzz(&[seed], |mut bytes| {
        bytes.resize(PAGE_BYTES, 0);
        let pages = 1 + u64::from(bytes[0]) * 1000;
        let mut reads = 0;
        let _ = table::read(Entry(1), pages, &mut |nodes| {
            reads += nodes.len() as u64;
            Ok(vec![bytes.clone(); nodes.len()])
        });
        // As many nodes as the pages need, whatever they say.
        assert!(reads <= pages.div_ceil(512) + 512 + 1, "{reads} reads for {pages} pages");
    });
}
