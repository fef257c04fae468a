use crate::dirty::{self, KeyedPages};
use crate::frame::FRAME_HEADER_BYTES;
use crate::segment::SegmentFile;
use crate::table::{self, Table};
use crate::{Blob, Entry, ImageError, PageAddress, Place, Record, Store, StoreError};
use dewar_codec::FrameDecoder;
use dewar_store::Lock;
use dewar_units::{PAGE_BYTES, PageNumber};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Segment files kept open at a time.
const OPEN_SEGMENTS: usize = 128;
/// Nodes below which another thread is not worth while.
const NODES_A_THREAD: usize = 256;
/// One part in so many of this machine's memory is the most that a page table, or a blob, may
/// take.
const MEMORY_SHARE: u64 = 8;

/// An image, open for reading by any number of threads. While it lives the
/// image cannot be deleted.
#[derive(Debug)]
pub struct ImageReader {
    store: Store,
    record: Record,
    segments: Mutex<FxHashMap<u64, Arc<SegmentFile>>>,
    /// Dirty stores that were needed so far.
    keyed: Mutex<HashMap<u32, Arc<KeyedPages>>>,
    /// The page table, where it was read before it is needed.
    table: Mutex<Option<Table>>,
    /// How long what fails in a dirty store is tried again.
    patience: Mutex<Duration>,
    /// While it is held the image cannot be deleted.
    _lock: Box<dyn Lock>,
}

/// One thread's working memory for reading: a decoder and the last frame.
pub struct FrameCache {
    decoder: FrameDecoder,
    /// The frame as it is stored, header and payload.
    stored: Vec<u8>,
    /// Its pages, or those of a dirty store.
    pages: Vec<u8>,
    /// Whether the payload is the pages, and they were not copied.
    is_payload: bool,
    holds: Option<(u64, u16)>,
}

impl FrameCache {
    /// An empty one.
    ///
    /// # Errors
    /// Where the codecs cannot be set up.
    pub fn new() -> Result<Self, ImageError> {
        Ok(Self {
            decoder: FrameDecoder::new()?,
            stored: Vec::new(),
            pages: Vec::new(),
            is_payload: false,
            holds: None,
        })
    }

    /// The pages of the last frame.
    fn pages(&self) -> &[u8] {
        match self.is_payload {
            true => &self.stored[FRAME_HEADER_BYTES..],
            false => &self.pages,
        }
    }
}

impl ImageReader {
    pub(crate) fn new(store: Store, record: Record, lock: Box<dyn Lock>) -> Self {
        Self {
            store,
            record,
            segments: Mutex::default(),
            keyed: Mutex::default(),
            table: Mutex::default(),
            patience: Mutex::new(Duration::MAX),
            _lock: lock,
        }
    }

    /// The image's record.
    pub fn record(&self) -> &Record {
        &self.record
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The whole page table: one entry a page of RAM.
    ///
    /// # Errors
    /// Where a node is damaged.
    pub fn entries(&self) -> Result<Vec<Entry>, ImageError> {
        Ok(self.table()?.into_entries())
    }

    /// Reads the page table now, for the thread that asks for it next.
    ///
    /// # Errors
    /// Where a node is damaged.
    pub fn read_table_ahead(&self) -> Result<(), ImageError> {
        let table = self.table()?;
        *self.table_ahead() = Some(table);
        Ok(())
    }

    fn table_ahead(&self) -> MutexGuard<'_, Option<Table>> {
        self.table.lock().unwrap_or_else(|locked| locked.into_inner())
    }

    /// The page table with the nodes above it.
    pub(crate) fn table(&self) -> Result<Table, ImageError> {
        let ahead = self.table_ahead().take();
        if let Some(table) = ahead {
            return Ok(table);
        }
        self.refuse_too_large()?;
        let memory = &self.record.memory;
        table::read(memory.root, memory.pages, &mut |nodes| self.nodes(nodes))
    }

    fn too_large(&self, what: String) -> ImageError {
        ImageError::TooLarge { id: self.record.id.0.clone(), what }
    }

    /// A record may claim what it likes.
    fn refuse_too_large(&self) -> Result<(), ImageError> {
        let memory = &self.record.memory;
        if memory.pages > memory_share() / size_of::<Entry>() as u64 {
            return Err(self.too_large(format!("{} pages of RAM", memory.pages)));
        }
        Ok(())
    }

    /// How many threads read it best: where a server is asked for each frame some wait for
    /// it while the others work.
    pub fn readers(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        if self.store.folder().is_some() { cores } else { 2 * cores }
    }

    /// Tells `visit` the entries of the page table and of the nodes above it, but for
    /// what is below nodes that were `seen`.
    pub(crate) fn visit_entries(
        &self,
        seen: &mut FxHashSet<(u32, Entry)>,
        visit: &mut dyn FnMut(&[Entry]),
    ) -> Result<(), ImageError> {
        self.refuse_too_large()?;
        let memory = &self.record.memory;
        table::visit(memory.root, memory.pages, seen, &mut |nodes| self.nodes(nodes), visit)
    }

    /// The nodes that the entries lead to; many are read by several threads.
    fn nodes(&self, entries: &[Entry]) -> Result<Vec<Vec<u8>>, ImageError> {
        let read = |entries: &[Entry]| -> Result<Vec<Vec<u8>>, ImageError> {
            let mut cache = FrameCache::new()?;
            let node = |entry: &Entry| {
                Ok(self.stored_page(*entry, &mut cache)?.unwrap_or(&[0; PAGE_BYTES]).to_vec())
            };
            entries.iter().map(node).collect()
        };
        let share = entries.len().div_ceil(self.readers()).max(NODES_A_THREAD);
        std::thread::scope(|scope| {
            let mut parts = entries.chunks(share);
            let first = parts.next().unwrap_or_default();
            let others: Vec<_> = parts.map(|part| scope.spawn(move || read(part))).collect();
            let mut nodes = read(first)?;
            for part in others {
                let part = part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                nodes.extend(part?);
            }
            Ok(nodes)
        })
    }

    /// The content of page `page` of RAM, whose entry is `entry`; `None` for
    /// zeros.
    ///
    /// # Errors
    /// Names the page where it cannot be read back exactly as it was.
    pub fn page<'c>(
        &self,
        page: PageNumber,
        entry: Entry,
        cache: &'c mut FrameCache,
    ) -> Result<Option<&'c [u8]>, ImageError> {
        if let Ok(Place::Keyed(at)) = entry.place() {
            return self.keyed(at.source, &[(page, at.seal)], cache).map(Some);
        }
        self.stored_page(entry, cache).map_err(|error| name_page(page, error))
    }

    /// The frame that holds page `page`: all its pages, one after the other.
    ///
    /// # Errors
    /// As [`ImageReader::page`].
    pub fn frame<'c>(
        &self,
        page: PageNumber,
        at: PageAddress,
        cache: &'c mut FrameCache,
    ) -> Result<&'c [u8], ImageError> {
        self.load(at.segment, at.frame, cache).map_err(|error| name_page(page, error))?;
        Ok(cache.pages())
    }

    /// That each segment of the image is there, and is the one that was written for it.
    ///
    /// # Errors
    /// Names the first that is not.
    pub fn require_segments(&self) -> Result<(), ImageError> {
        let mut numbers = self.record.all_segments();
        numbers.try_for_each(|number| self.segment(number).map(drop))
    }

    /// Whether a dirty store that answers has lost pages of the image.
    pub fn has_lost_pages(&self) -> bool {
        let mut needed: BTreeMap<u32, Vec<(PageNumber, u64)>> = BTreeMap::new();
        let entries = match self.record.keyed.is_empty() {
            true => Vec::new(),
            false => self.entries().unwrap_or_default(),
        };
        for (page, entry) in entries.iter().enumerate() {
            if let Ok(Place::Keyed(at)) = entry.place() {
                needed.entry(at.source).or_default().push((PageNumber(page as u64), at.seal));
            }
        }
        needed.iter().any(|(source, pages)| {
            let known = self.record.keyed.get(source);
            known.is_some_and(|it| dirty::first_lost(it, &self.store.id(), pages).is_some())
        })
    }

    /// Bounds how long what fails in its stores is tried again, for a caller
    /// that comes back to it by itself.
    pub fn set_patience(&self, patience: Duration) {
        *self.patience() = patience;
        self.store.backend().set_patience(patience);
    }

    /// Pages that lie in a dirty store, with their seals, in ascending order of
    /// their numbers: one after the other.
    ///
    /// # Errors
    /// Names the page that cannot be read back exactly, or the store that does
    /// not answer.
    pub fn keyed<'c>(
        &self,
        source: u32,
        pages: &[(PageNumber, u64)],
        cache: &'c mut FrameCache,
    ) -> Result<&'c [u8], ImageError> {
        cache.holds = None;
        self.keyed_pages(source)?.get(pages, &mut cache.decoder, &mut cache.pages)?;
        Ok(&cache.pages)
    }

    fn keyed_pages(&self, source: u32) -> Result<Arc<KeyedPages>, ImageError> {
        let open = || self.keyed.lock().unwrap_or_else(|locked| locked.into_inner());
        if let Some(pages) = open().get(&source) {
            return Ok(pages.clone());
        }
        let known = self.record.keyed.get(&source).ok_or_else(|| {
            let problem = format!("the record has no source {source} of pages");
            ImageError::damaged("the page table", problem)
        })?;
        // Without the lock: the store may be away.
        let patience = *self.patience();
        let pages = Arc::new(KeyedPages::open(known, &self.store.id(), patience)?);
        open().insert(source, pages.clone());
        Ok(pages)
    }

    /// Says that most of a segment will be wanted soon. Damage is told when it
    /// is read.
    pub fn read_ahead(&self, segment: u64) {
        if let Ok(segment) = self.segment(segment) {
            segment.read_ahead();
        }
    }

    /// Reads and checks a frame, whatever it holds.
    pub(crate) fn frame_only(
        &self,
        at: PageAddress,
        cache: &mut FrameCache,
    ) -> Result<(), ImageError> {
        self.load(at.segment, at.frame, cache)
    }

    /// The bytes of a blob.
    ///
    /// # Errors
    /// Where it is damaged; `name` says which.
    pub fn blob(&self, name: &str, blob: &Blob) -> Result<Vec<u8>, ImageError> {
        let mut cache = FrameCache::new()?;
        let damaged = |problem| Err(ImageError::damaged(format!("the {name}"), problem));
        if blob.bytes.div_ceil(PAGE_BYTES as u64) != blob.entries.len() as u64 {
            return damaged("its length does not fit");
        }
        // A record may name one page as often as it likes.
        if blob.bytes > memory_share() {
            return Err(self.too_large(format!("{} bytes of {name}", blob.bytes)));
        }
        let mut bytes = Vec::with_capacity(blob.entries.len() * PAGE_BYTES);
        for entry in &blob.entries {
            let page = self.stored_page(*entry, &mut cache).map_err(|error| match error {
                ImageError::Damaged { place, problem } => {
                    ImageError::damaged(format!("the {name} ({place})"), problem)
                }
                other => other,
            })?;
            bytes.extend_from_slice(page.unwrap_or(&[0; PAGE_BYTES]));
        }
        bytes.truncate(blob.bytes as usize);
        let hash = blake3::hash(&bytes).to_hex();
        if bytes.len() as u64 != blob.bytes || hash.as_str() != blob.blake3 {
            return Err(ImageError::damaged(format!("the {name}"), "its checksum does not fit"));
        }
        Ok(bytes)
    }

    pub(crate) fn segment(&self, number: u64) -> Result<Arc<SegmentFile>, ImageError> {
        if let Some(segment) = self.segments().get(&number) {
            return Ok(segment.clone());
        }
        // Without the lock: a store may be far away.
        let expected = Some(self.record.segment_id(number));
        let segment = Arc::new(self.store.segment(number, expected)?);
        let mut open = self.segments();
        if open.len() >= OPEN_SEGMENTS {
            open.clear();
        }
        open.insert(number, segment.clone());
        Ok(segment)
    }

    fn patience(&self) -> MutexGuard<'_, Duration> {
        self.patience.lock().unwrap_or_else(|locked| locked.into_inner())
    }

    fn segments(&self) -> MutexGuard<'_, FxHashMap<u64, Arc<SegmentFile>>> {
        self.segments.lock().unwrap_or_else(|locked| locked.into_inner())
    }

    fn stored_page<'c>(
        &self,
        entry: Entry,
        cache: &'c mut FrameCache,
    ) -> Result<Option<&'c [u8]>, ImageError> {
        let unknown = |entry: Entry| {
            ImageError::damaged("the page table", format!("entry {:#x} is unknown", entry.0))
        };
        let at = match entry.place().map_err(unknown)? {
            Place::Zeros => return Ok(None),
            Place::Packed(at) => at,
            // Nodes and blobs never are; who asks for a page knows its number.
            Place::Keyed(_) => return Err(unknown(entry)),
        };
        self.load(at.segment, at.frame, cache)?;
        let start = usize::from(at.index) * PAGE_BYTES;
        cache.pages().get(start..start + PAGE_BYTES).map(Some).ok_or_else(|| {
            ImageError::damaged(at.to_string(), "its frame holds fewer pages".to_owned())
        })
    }

    fn load(&self, segment: u64, frame: u16, cache: &mut FrameCache) -> Result<(), ImageError> {
        if cache.holds == Some((segment, frame)) {
            return Ok(());
        }
        cache.holds = None;
        let read = |cache: &mut FrameCache| {
            let file = self.segment(segment)?;
            let (header, payload) = file.read_frame(frame, &mut cache.stored)?;
            cache.is_payload = header.is_pages(payload);
            if cache.is_payload {
                return Ok(());
            }
            header.expand(payload, &mut cache.decoder, &mut cache.pages)
        };
        read(cache).or_else(|error| match error {
            // A collection may have replaced it since we opened it, also on another host.
            ImageError::Damaged { .. } | ImageError::Store(StoreError::Io { .. }) => {
                self.segments().remove(&segment);
                read(cache)
            }
            error => Err(error),
        })?;
        cache.holds = Some((segment, frame));
        Ok(())
    }
}

/// The most bytes that anything may take here because a record says so.
fn memory_share() -> u64 {
    let here = rustix::system::sysinfo();
    here.totalram * u64::from(here.mem_unit) / MEMORY_SHARE
}

fn name_page(page: PageNumber, error: ImageError) -> ImageError {
    match error {
        ImageError::Damaged { place, problem } => {
            ImageError::damaged(format!("page {page} ({place})"), problem)
        }
        other => other,
    }
}
