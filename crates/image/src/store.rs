mod delete;

pub use delete::{Deleted, Deletion};

use crate::lease::{self, WriterLease};
use crate::record::MOST_RECORD_BYTES;
use crate::segment::{SegmentFile, segment_name};
use crate::{
    ImageError, ImageId, ImageOptions, ImageReader, ImageWriter, Record, SegmentId, StoreError,
    dirty,
};
use dewar_store::Folder;
use dewar_store::Location;
use dewar_store::Redis;
use dewar_store::{Backend, Lock, LockAttempt, LockKind};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

const FORMAT: &str = "dewar-store";
const VERSION: u32 = 1;
const STORE_FILE: &str = "store.json";
const RECORD_SUFFIX: &str = ".json";

/// Where images are kept.
///
/// An image of two pages, written and read back:
///
/// ```
/// use dewar_codec::{Codec, Compression};
/// use dewar_image::{
///     Dedup, FrameCache, ImageOptions, Location, MemoryRecord, Record, RegionRecord, Store,
/// };
/// use dewar_units::{PAGE_BYTES, PageNumber};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// let store = Store::open_or_create(&Location::Folder(folder.path().join("store")))?;
/// let options = ImageOptions {
///     pages: 2,
///     compression: Compression::Only(Codec::Lz4),
///     level: 1,
///     dedup: Dedup::Off,
/// };
/// let writer = store.begin(options, None)?;
/// let mut sink = writer.sink()?;
/// sink.put(PageNumber(0), &[0; PAGE_BYTES])?;
/// sink.put(PageNumber(1), &[7; PAGE_BYTES])?;
/// sink.finish()?;
///
/// let (root, counts) = writer.finish_memory(0)?;
/// let regions = vec![RegionRecord { name: "ram".into(), pages: 2 }];
/// let memory = MemoryRecord { pages: 2, root, regions, counts };
/// let device_state = writer.put_blob(b"as the hypervisor saved it")?;
/// let hot_pages = writer.put_blob(&[])?;
/// // Until here there is no image; a writer that is dropped leaves nothing behind.
/// let record = writer.commit(Record::new("web", memory, device_state, hot_pages), vec![])?;
///
/// let image = store.open_image(&record.id)?;
/// let (entries, mut cache) = (image.entries()?, FrameCache::new()?);
/// assert_eq!(image.page(PageNumber(0), entries[0], &mut cache)?, None, "zeros");
/// assert_eq!(image.page(PageNumber(1), entries[1], &mut cache)?, Some(&[7; PAGE_BYTES][..]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Store {
    backend: Arc<dyn Backend>,
    id: [u8; 16],
}

#[derive(Serialize, Deserialize)]
struct StoreFile {
    format: String,
    version: u32,
    id: String,
}

impl Store {
    /// Opens a store, and makes it where there is none.
    ///
    /// # Errors
    /// Where it cannot be reached or made, is not a store, or is a newer one.
    pub fn open_or_create(location: &Location) -> Result<Self, ImageError> {
        let backend = match location {
            Location::Folder(root) => {
                let folder = Folder::new(root);
                if folder.size(STORE_FILE)?.is_none() {
                    folder.make()?;
                }
                Arc::new(folder) as Arc<dyn Backend>
            }
            Location::Redis(place) => {
                let redis = Redis::connect(place)?;
                redis.require_no_eviction()?;
                Arc::new(redis)
            }
        };
        if backend.size(STORE_FILE)?.is_none() {
            let mut id = [0; 16];
            let random = Path::new("/dev/urandom");
            File::open(random)
                .and_then(|mut file| file.read_exact(&mut id))
                .map_err(ImageError::io("read", random))?;
            let text = serde_json::json!({"format": FORMAT, "version": VERSION, "id": hex(&id)});
            // Of two who make it at once, the second must not win.
            backend.create(STORE_FILE, format!("{text}\n").as_bytes())?;
        }
        Self::with(backend)
    }

    /// Opens a store.
    ///
    /// # Errors
    /// [`ImageError::NoStore`] where there is none; where it cannot be reached,
    /// or is a newer one.
    pub fn open(location: &Location) -> Result<Self, ImageError> {
        match location {
            Location::Folder(root) => Self::with(Arc::new(Folder::new(root))),
            Location::Redis(place) => Self::with(Arc::new(Redis::connect(place)?)),
        }
    }

    fn with(backend: Arc<dyn Backend>) -> Result<Self, ImageError> {
        let url = backend.url();
        let Some(bytes) = backend.get(STORE_FILE)? else {
            return Err(ImageError::NoStore { url });
        };
        let place = || format!("{STORE_FILE} of {url}");
        let damaged = |problem: String| ImageError::damaged(place(), problem);
        let file: StoreFile =
            serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        if file.format != FORMAT {
            return Err(damaged(format!("it calls itself '{}'", file.format)));
        }
        if file.version != VERSION {
            let problem = format!("store version {}", file.version);
            return Err(ImageError::TooNew { place: place(), problem });
        }
        let id = u128::from_str_radix(&file.id, 16)
            .ok()
            .filter(|_| file.id.len() == 32)
            .ok_or_else(|| damaged("its id is not 32 hexadecimal digits".to_owned()))?;
        Ok(Self { backend, id: id.to_be_bytes() })
    }

    /// What it is called, without anything secret: the text that
    /// [`Location::parse`] takes.
    pub fn url(&self) -> String {
        self.backend.url()
    }

    /// Why what is kept there may not last, if so: a server that was told since to forget what
    /// it has no memory for.
    pub fn warning(&self) -> Option<String> {
        self.backend.warning()
    }

    /// Its folder, where it is one.
    pub fn folder(&self) -> Option<&Path> {
        self.backend.folder()
    }

    /// The store's own name, in hexadecimal.
    pub fn id(&self) -> String {
        hex(&self.id)
    }

    /// Begins an image, on top of `parent` where there is one; first removes
    /// what writers that died left behind.
    ///
    /// # Errors
    /// Where the store cannot be written, or the parent's page table not read.
    pub fn begin<'s>(
        &'s self,
        options: ImageOptions,
        parent: Option<&'s ImageReader>,
    ) -> Result<ImageWriter<'s>, ImageError> {
        self.sweep()?;
        let id = ImageId::fresh(&self.id);
        let lease = WriterLease::take(self.backend(), &id)?;
        ImageWriter::new(self, id, lease, options, parent)
    }

    /// Removes the files of images whose writers died.
    ///
    /// # Errors
    /// Where the store cannot be read or written.
    pub fn sweep(&self) -> Result<(), ImageError> {
        lease::sweep(self, false)
    }

    /// The same without what is in dirty stores that do not answer: what was left there
    /// stays, for ones that are gone for good.
    ///
    /// # Errors
    /// As [`Store::sweep`].
    pub fn sweep_only_here(&self) -> Result<(), ImageError> {
        lease::sweep(self, true)
    }

    /// The ids of all images. Damaged ones are among them.
    ///
    /// # Errors
    /// Where the store cannot be read.
    pub fn ids(&self) -> Result<Vec<ImageId>, ImageError> {
        let mut ids: Vec<_> = self
            .backend
            .list("images")?
            .into_iter()
            .filter_map(|(name, _)| Some(ImageId(name.strip_suffix(RECORD_SUFFIX)?.to_owned())))
            .collect();
        ids.sort();
        Ok(ids)
    }

    /// Whether an image has a record, whatever is in it.
    ///
    /// # Errors
    /// Where the store cannot be read.
    pub fn has_record(&self, id: &ImageId) -> Result<bool, ImageError> {
        Ok(self.backend.size(&record_name(id))?.is_some())
    }

    /// Reads and checks the record of an image.
    ///
    /// # Errors
    /// Where it is missing or damaged.
    pub fn record(&self, id: &ImageId) -> Result<Record, ImageError> {
        let name = record_name(id);
        // A server's answers are bounded anyway.
        let is_folder = self.backend.folder().is_some();
        if is_folder && self.backend.size(&name)?.is_some_and(|it| it > MOST_RECORD_BYTES) {
            let problem = "it is larger than any record".to_owned();
            return Err(ImageError::BrokenRecord { id: id.0.clone(), problem });
        }
        let bytes = self.backend.get(&name)?.ok_or_else(|| self.not_found(&id.0))?;
        Record::parse(&bytes, id, &self.id())
    }

    /// All images that can be read, oldest first, and the problems of the
    /// others.
    ///
    /// # Errors
    /// Where the store cannot be read.
    pub fn records(&self) -> Result<(Vec<Record>, Vec<ImageError>), ImageError> {
        let (mut records, mut problems) = (Vec::new(), Vec::new());
        for id in self.ids()? {
            match self.record(&id) {
                Ok(record) => records.push(record),
                // It does not answer, and would not the next time.
                Err(problem) if problem.is_server_failure() => return Err(problem),
                // Deleted meanwhile.
                Err(ImageError::NotFound { .. }) if !self.ids()?.contains(&id) => {}
                Err(problem) => problems.push(problem),
            }
        }
        records.sort_by_key(|record| record.created_ms);
        Ok((records, problems))
    }

    /// Finds an image by its id, the beginning of it, its tag, `GUEST:TAG`, or
    /// the name of its guest (then the newest). A newer image wins where
    /// several have a tag.
    ///
    /// # Errors
    /// Where none fits, or several ids do; for a name also where a record cannot be
    /// read, since that may be the one, or the newer.
    pub fn find(&self, reference: &str) -> Result<ImageId, ImageError> {
        let ids = self.ids()?;
        if let Some(id) = ids.iter().find(|id| id.0 == reference) {
            return Ok(id.clone());
        }
        let (records, mut problems) = self.records()?;
        // One that is listed and not there is lost, and none.
        problems.retain(|problem| !matches!(problem, ImageError::NotFound { .. }));
        let newest = |fits: &dyn Fn(&Record) -> bool| {
            records.iter().rev().find(|record| fits(record)).map(|record| record.id.clone())
        };
        let tagged = newest(&|record| record.tag.as_deref() == Some(reference));
        let of_guest = || newest(&|record| record.guest == reference);
        let pair = || {
            let (guest, tag) = reference.split_once(':')?;
            newest(&|record| record.guest == guest && record.tag.as_deref() == Some(tag))
        };
        let named = tagged.or_else(of_guest).or_else(pair);
        let unsure = |found: Option<ImageId>| {
            let (reference, problem) = (reference.to_owned(), problems.first()?.to_string());
            Some(ImageError::Unsure { reference, found: found.map(|id| id.0), problem })
        };
        if let Some(id) = named {
            return unsure(Some(id.clone())).map_or(Ok(id), Err);
        }
        let begin: Vec<_> = ids.iter().filter(|id| id.0.starts_with(reference)).collect();
        // A short one may be a guest's name.
        let enough = reference.len() >= if problems.is_empty() { 3 } else { 8 };
        match begin.as_slice() {
            [id] if enough => Ok((*id).clone()),
            [_, _, ..] if enough => Err(ImageError::Ambiguous {
                reference: reference.to_owned(),
                candidates: begin.iter().map(|id| id.0.clone()).collect(),
            }),
            _ => Err(unsure(None).unwrap_or_else(|| self.not_found(reference))),
        }
    }

    /// Opens an image for reading; until the reader is dropped it cannot be
    /// deleted.
    ///
    /// # Errors
    /// Where its record is missing or damaged.
    pub fn open_image(&self, id: &ImageId) -> Result<ImageReader, ImageError> {
        let lock = self.lock_record(id, LockKind::Shared)?;
        Ok(ImageReader::new(self.clone(), self.record(id)?, lock))
    }

    /// The records of all images; where one cannot be read it is not known what
    /// it needs.
    pub(crate) fn each_record(&self) -> Result<Vec<Record>, ImageError> {
        let record = |id: &ImageId| match self.record(id) {
            // Deleted meanwhile.
            Err(ImageError::NotFound { .. }) => None,
            other => Some(other),
        };
        self.ids()?.iter().filter_map(record).collect()
    }

    /// The objects that an image needs.
    fn objects(&self, record: &Record) -> impl Iterator<Item = String> {
        let disks = record.disks.iter().flat_map(|disk| self.disk_objects(disk));
        record.all_segments().map(segment_name).chain(disks)
    }

    /// The same, and the lines that a lease has for its pages in dirty stores.
    pub(crate) fn needs(&self, record: &Record) -> Vec<String> {
        let pages = record.keyed.values().map(|source| dirty::lease_line(source, &self.id()));
        self.objects(record).chain(pages).collect()
    }

    /// Who deletes or collects is alone.
    pub(crate) fn lock_deletions(&self) -> Result<Box<dyn Lock>, ImageError> {
        match self.backend.lock(STORE_FILE, LockKind::AloneAfterAll)? {
            LockAttempt::Locked(held) => Ok(held),
            LockAttempt::Taken | LockAttempt::Missing => {
                Err(ImageError::NoStore { url: self.url() })
            }
        }
    }

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(crate) fn shared_backend(&self) -> Arc<dyn Backend> {
        Arc::clone(&self.backend)
    }

    pub(crate) fn raw_id(&self) -> [u8; 16] {
        self.id
    }

    /// Hands out at most `count` segment numbers, and at least one, which nobody
    /// else is given. Numbers that are taken are passed over: the counter may be
    /// older than the segments are.
    pub(crate) fn allocate_segments(&self, count: u64) -> Result<VecDeque<u64>, ImageError> {
        loop {
            let first = self.backend.count("next-segment", count)?;
            let is_free = |number: &u64| match self.backend.size(&segment_name(*number)) {
                Ok(Some(_)) => None,
                Ok(None) => Some(Ok(*number)),
                Err(error) => Some(Err(error)),
            };
            let free = (first..first + count).filter_map(|number| is_free(&number));
            let free = free.collect::<Result<VecDeque<u64>, StoreError>>()?;
            if !free.is_empty() {
                return Ok(free);
            }
        }
    }

    /// Opens a segment, which is to have this id, where one is known.
    pub(crate) fn segment(
        &self,
        number: u64,
        expected: Option<SegmentId>,
    ) -> Result<SegmentFile, ImageError> {
        SegmentFile::open(self.backend(), self.id, number, expected)
    }

    fn lock_record(&self, id: &ImageId, how: LockKind) -> Result<Box<dyn Lock>, ImageError> {
        match self.backend.lock(&record_name(id), how)? {
            LockAttempt::Locked(held) => Ok(held),
            LockAttempt::Taken => Err(ImageError::InUse { id: id.0.clone() }),
            LockAttempt::Missing => Err(self.not_found(&id.0)),
        }
    }

    fn not_found(&self, reference: &str) -> ImageError {
        ImageError::NotFound { reference: reference.to_owned(), store: self.url() }
    }
}

pub(crate) fn record_name(id: &ImageId) -> String {
    format!("images/{id}{RECORD_SUFFIX}")
}

fn hex(bytes: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*bytes))
}
