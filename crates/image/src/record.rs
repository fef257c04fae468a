//! The record: one JSON file whose arrival makes an image exist.

use crate::entry::LAST_SOURCE;
use crate::{Entry, FileDigest, ImageError, KeyedSource, SegmentId};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

const FORMAT: &str = "dewar-record";
/// The version that is written. One before has no ids of segments.
const VERSION: u32 = 2;
const OLDEST: u32 = 1;
/// 4 PiB: x86-64's physical addresses have 52 bits.
const MOST_PAGES: u64 = 1 << 40;

/// No checkpoint takes longer, in milliseconds: 30 years.
const LONGEST_MS: f64 = 1e12;
/// The last millisecond of the year 9999, since 1970.
const LAST_MOMENT_MS: u64 = 253_402_300_799_999;
/// More bytes than any store holds; of a thousand such the sum is still a number.
const MOST_BYTES: u64 = 1 << 53;
/// Most bytes of a record.
pub(crate) const MOST_RECORD_BYTES: u64 = 256 << 20;

/// The name of an image in its store: `c` and twelve hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ImageId(pub String);

impl ImageId {
    /// A name that no image has.
    pub(crate) fn fresh(seed: &[u8]) -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let mut hasher = blake3::Hasher::new();
        hasher.update(seed);
        hasher.update(&now.unwrap_or_default().as_nanos().to_le_bytes());
        hasher.update(&std::process::id().to_le_bytes());
        Self(format!("c{}", &hasher.finalize().to_hex()[..12]))
    }

    /// Whether a text has the form of an id.
    pub(crate) fn is_one(text: &str) -> bool {
        let is_hex = |digits: &str| {
            digits.len() == 12 && digits.bytes().all(|digit| digit.is_ascii_hexdigit())
        };
        text.strip_prefix('c').is_some_and(is_hex)
    }
}

impl fmt::Display for ImageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// What a checkpoint is made of. `docs/image-format.md` describes each field.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// The image's name.
    pub id: ImageId,
    /// The store that it belongs to, in hexadecimal.
    pub store: String,
    /// The guest that it was taken of.
    pub guest: String,
    /// A name that its owner gave it.
    pub tag: Option<String>,
    /// When it became complete, in milliseconds since 1970.
    pub created_ms: u64,
    /// RAM.
    pub memory: MemoryRecord,
    /// Pages that were written last before the pause, as little-endian u64
    /// numbers; a lazy restore fetches them first.
    pub hot_pages: Blob,
    /// The hypervisor's device state.
    pub device_state: Blob,
    /// Fingerprints of the pages that it stored, for later images to find them:
    /// rows of 24 bytes of a BLAKE3 hash and an 8-byte entry, in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprints: Option<Blob>,
    /// The same, but only for images on top of it to find pages by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known: Option<Blob>,
    /// The same with 16 bytes of XXH3-128 and 8 zeros for a hash, which prove nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub candidates: Option<Blob>,
    /// Whether those lists have only pages in frames that the image needs itself, so
    /// that others may refer to them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub findable: bool,
    /// Copies of the writable disks.
    pub disks: Vec<DiskRecord>,
    /// How to start the guest again; only the crate that wrote it reads it.
    pub machine: serde_json::Value,
    /// The numbers of the segments that were written for it.
    pub segments: Vec<u64>,
    /// Those that it shares with images before it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inherited_segments: Vec<u64>,
    /// What tells each of them from others with its number; those of version 1 have nothing.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub segment_ids: BTreeMap<u64, SegmentId>,
    /// Where its keyed pages lie, by the number in their entries.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keyed: BTreeMap<u32, KeyedSource>,
    /// The image that it was taken on top of; it does not need it any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ImageId>,
    /// What taking it cost.
    pub summary: Summary,
}

/// The RAM of an image.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MemoryRecord {
    /// Pages in all.
    pub pages: u64,
    /// The root of the page table.
    pub root: Entry,
    /// RAM files, one after the other.
    pub regions: Vec<RegionRecord>,
    /// Pages by kind.
    pub counts: PageCounts,
}

/// One RAM file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionRecord {
    /// The hypervisor's name for it.
    pub name: String,
    /// Its size in pages.
    pub pages: u64,
}

/// Pages by kind; together all pages of the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageCounts {
    /// Never touched by the guest; in an image whose pages were known by tracking
    /// no more than its parent had, since nobody asked.
    pub hole: u64,
    /// Touched, but zeros.
    pub zero: u64,
    /// Stored in a compressed frame.
    pub compressed: u64,
    /// Stored as they are.
    pub raw: u64,
    /// Stored one by one in a dirty store.
    #[serde(default)]
    pub keyed: u64,
    /// As the parent had them, and stored by an image before.
    #[serde(default)]
    pub inherited: u64,
    /// Stored by an image before, but not for this page of the parent.
    #[serde(default)]
    pub shared: u64,
}

/// Some bytes, stored as pages; the last is filled up with zeros.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Blob {
    /// Length in bytes.
    pub bytes: u64,
    /// Where its pages lie.
    pub entries: Vec<Entry>,
    /// BLAKE3 hash of the bytes.
    pub blake3: String,
}

/// A copy of a writable disk at the instant of the checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DiskRecord {
    /// The hypervisor's name for the disk.
    pub name: String,
    /// The file in the store's `disks` folder.
    pub file: String,
    /// Its image format.
    pub format: String,
    /// The size of the disk that the guest sees, in bytes.
    pub virtual_bytes: u64,
    /// The file's length and hash.
    #[serde(flatten)]
    pub digest: FileDigest,
    /// The files in the same folder that it stands on, nearest first: it holds
    /// only what was written since they were made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub below: Vec<DiskLayer>,
}

/// A file that disk copies of several images share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskLayer {
    /// The file in the store's `disks` folder.
    pub file: String,
    /// Its length and hash.
    #[serde(flatten)]
    pub digest: FileDigest,
}

impl DiskRecord {
    /// The files that hold the disk, its own first.
    pub fn layers(&self) -> impl Iterator<Item = DiskLayer> {
        let own = DiskLayer { file: self.file.clone(), digest: self.digest.clone() };
        std::iter::once(own).chain(self.below.iter().cloned())
    }
}

impl Record {
    /// A record for [`crate::ImageWriter::commit`], which fills in what the
    /// writer knows; the rest is empty.
    pub fn new(guest: &str, memory: MemoryRecord, device_state: Blob, hot_pages: Blob) -> Self {
        Self {
            id: ImageId(String::new()),
            store: String::new(),
            guest: guest.to_owned(),
            tag: None,
            created_ms: 0,
            memory,
            hot_pages,
            device_state,
            fingerprints: None,
            known: None,
            candidates: None,
            findable: false,
            disks: Vec::new(),
            machine: serde_json::Value::Null,
            segments: Vec::new(),
            inherited_segments: Vec::new(),
            segment_ids: BTreeMap::new(),
            keyed: BTreeMap::new(),
            parent: None,
            summary: Summary::default(),
        }
    }

    /// The fingerprints of the pages that it stored, where they are proof.
    pub(crate) fn prints(&self) -> Option<&Blob> {
        self.fingerprints.as_ref().or(self.known.as_ref())
    }

    /// Its lists of fingerprints, proof or not.
    pub(crate) fn print_lists(&self) -> impl Iterator<Item = &Blob> {
        [&self.fingerprints, &self.known, &self.candidates].into_iter().flatten()
    }

    /// The numbers of all segments that it needs: its own first.
    pub(crate) fn all_segments(&self) -> impl Iterator<Item = u64> {
        self.segments.iter().chain(&self.inherited_segments).copied()
    }

    /// The id that a segment of it has to have; of a version 1 one none.
    pub(crate) fn segment_id(&self, number: u64) -> SegmentId {
        self.segment_ids.get(&number).copied().unwrap_or(SegmentId::NONE)
    }

    /// Whether a segment by this number is the same one in both images.
    pub(crate) fn shares(&self, number: u64, other: &Self) -> bool {
        self.segment_id(number) == other.segment_id(number)
    }

    /// Whether the image's pages may lie in this segment.
    pub(crate) fn has_segment(&self, number: u64) -> bool {
        let has = |segments: &[u64]| segments.binary_search(&number).is_ok();
        has(&self.segments) || has(&self.inherited_segments)
    }
}

/// What taking a checkpoint cost.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Summary {
    /// Bytes that its segments and disks take in the store.
    pub stored_bytes: u64,
    /// Bytes of the segments that it shares with images before it, when it was
    /// taken.
    #[serde(default)]
    pub inherited_bytes: u64,
    /// Pages that were not stored because another has their content.
    #[serde(default)]
    pub duplicate_pages: u64,
    /// How long the guest stood still, in milliseconds, as Dewar saw it.
    pub pause_ms: f64,
    /// From the command to the complete image, in milliseconds.
    pub total_ms: f64,
    /// How pages were captured.
    #[serde(default)]
    pub captured: CaptureCounts,
    /// Dirty pages per epoch.
    pub epochs: Vec<EpochRecord>,
    /// When each step was done; empty in images of before this was noted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StageRecord>,
}

/// How pages were captured; a page may be in several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureCounts {
    /// By the bulk pass.
    pub bulk: u64,
    /// Left by it to the epochs, being written or with the dirty store already.
    pub skipped: u64,
    /// Sent to the dirty store for being written meanwhile, counted each time.
    pub dirty_store: u64,
    /// Sent there to spread the work over two stores.
    #[serde(default)]
    pub spread: u64,
    /// Copied while the guest stood still.
    pub stopped: u64,
    /// Found no room in the buffer, counted each time.
    #[serde(default)]
    pub overflowed: u64,
}

/// One step of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageRecord {
    /// Its name.
    pub step: String,
    /// When it was done, in milliseconds from the start.
    pub at_ms: f64,
}

/// One epoch of a checkpoint.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct EpochRecord {
    /// When its dirty set was taken, in milliseconds from the start.
    pub at_ms: f64,
    /// How many pages were in it.
    pub dirty_pages: u64,
}

#[derive(Serialize, Deserialize)]
struct Envelope {
    format: String,
    version: u32,
    blake3: String,
    record: Box<RawValue>,
}

impl Record {
    /// What of its numbers no checkpoint can have. They are printed, added and multiplied by
    /// the commands that read the record.
    fn out_of_range(&self) -> Option<&'static str> {
        let (pages, counts, summary) = (self.memory.pages, &self.memory.counts, &self.summary);
        let is_time = |ms: f64| (0.0..=LONGEST_MS).contains(&ms);
        let times = summary.epochs.iter().map(|epoch| epoch.at_ms);
        let mut times = times.chain(summary.stages.iter().map(|stage| stage.at_ms));
        let PageCounts { hole, zero, compressed, raw, keyed, inherited, shared } = *counts;
        let kinds = [hole, zero, compressed, raw, keyed, inherited, shared];
        let captured = &summary.captured;
        let captures = [
            captured.bulk,
            captured.skipped,
            captured.dirty_store,
            captured.spread,
            captured.stopped,
            captured.overflowed,
            summary.duplicate_pages,
        ];
        let layers = || self.disks.iter().flat_map(DiskRecord::layers);
        let sizes = [summary.stored_bytes, summary.inherited_bytes].into_iter();
        let sizes = sizes.chain(self.disks.iter().map(|disk| disk.virtual_bytes));
        let mut sizes = sizes.chain(layers().map(|layer| layer.digest.bytes));
        let checks = [
            (self.created_ms <= LAST_MOMENT_MS, "the time at which it was taken"),
            (is_time(summary.pause_ms), "its pause"),
            (is_time(summary.total_ms), "its duration"),
            (times.all(is_time), "the time of a step"),
            (kinds.iter().all(|it| *it <= pages), "a count of pages"),
            (captures.iter().all(|it| *it <= MOST_BYTES), "a count of captured pages"),
            (summary.epochs.iter().all(|it| it.dirty_pages <= pages), "the pages of an epoch"),
            (sizes.all(|it| it <= MOST_BYTES), "a size"),
        ];
        checks.into_iter().find(|(is_right, _)| !is_right).map(|(_, what)| what)
    }

    /// The record as a file's bytes, checksum included.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let record = serde_json::value::to_raw_value(self)?;
        let blake3 = blake3::hash(record.get().as_bytes()).to_hex().to_string();
        let mut bytes = serde_json::to_vec(&Envelope {
            format: FORMAT.to_owned(),
            version: VERSION,
            blake3,
            record,
        })?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Reads and checks a record that should be that of `id` in `store`.
    pub(crate) fn parse(bytes: &[u8], id: &ImageId, store: &str) -> Result<Self, ImageError> {
        let place = || format!("the record of checkpoint {id}");
        let damaged = |problem: String| ImageError::damaged(place(), problem);
        let broken = |problem: String| ImageError::BrokenRecord { id: id.0.clone(), problem };
        // The last byte tells a whole file from a cut one.
        let whole =
            bytes.strip_suffix(b"\n").ok_or_else(|| broken("it is cut short".to_owned()))?;
        let envelope: Envelope =
            serde_json::from_slice(whole).map_err(|error| broken(error.to_string()))?;
        if envelope.format != FORMAT {
            return Err(damaged(format!("it calls itself '{}'", envelope.format)));
        }
        let body = envelope.record.get();
        if blake3::hash(body.as_bytes()).to_hex().as_str() != envelope.blake3 {
            return Err(broken("its checksum does not fit".to_owned()));
        }
        if !(OLDEST..=VERSION).contains(&envelope.version) {
            let problem = format!("record version {}", envelope.version);
            return Err(ImageError::TooNew { place: place(), problem });
        }
        let record: Self =
            serde_json::from_str(body).map_err(|error| damaged(error.to_string()))?;
        let regions = record.memory.regions.iter().map(|region| u128::from(region.pages));
        if regions.sum::<u128>() != u128::from(record.memory.pages) {
            return Err(damaged("its regions are not all of its memory".to_owned()));
        }
        // Files by these names are made where a guest is restored.
        let is_plain = |layer: &DiskLayer| {
            Path::new(&layer.file).file_name().is_some_and(|name| name == layer.file.as_str())
        };
        if !record.disks.iter().flat_map(DiskRecord::layers).all(|layer| is_plain(&layer)) {
            return Err(damaged("a disk's file has no plain name".to_owned()));
        }
        if record.memory.pages > MOST_PAGES {
            return Err(damaged("it has more memory than a machine can have".to_owned()));
        }
        if let Some(what) = record.out_of_range() {
            return Err(damaged(format!("{what} is out of range")));
        }
        if record.keyed.keys().any(|source| *source > LAST_SOURCE) {
            return Err(damaged("it numbers its sources too high".to_owned()));
        }
        if record.id != *id || record.store != store {
            let problem = format!("it is the record of {} in store {}", record.id, record.store);
            return Err(damaged(problem));
        }
        Ok(record)
    }
}
