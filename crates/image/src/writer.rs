use crate::dedup::{Dedup, Fingerprints};
use crate::dirty::{self, DirtyStore, KeyedPages, KeyedSink};
use crate::flush::Flusher;
use crate::lease::WriterLease;
use crate::reader::ImageReader;
use crate::record::{Blob, DiskLayer, DiskRecord, ImageId, PageCounts, Record};
use crate::sink::PageSink;
use crate::store::{record_name, segment_name};
use crate::table::{self, Table};
use crate::{Entry, FileDigest, ImageError, KeyedSource, PageAddress, Place, Store, disks};
use dewar_codec::Codec;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Segment numbers taken from the store at a time.
const BATCH: u64 = 16;

/// What an image is made of.
#[derive(Debug, Clone, Copy)]
pub struct ImageOptions {
    /// Pages of RAM.
    pub pages: u64,
    /// For pages that are worth it.
    pub codec: Codec,
    /// Its level, where it has levels.
    pub level: i32,
    /// Where the content of pages is looked for before they are stored.
    pub dedup: Dedup,
}

/// An image that is being written. Dropped before [`ImageWriter::commit`], it
/// leaves nothing behind.
///
/// One with a parent begins as a copy of it: every page that is not put again
/// stays where the parent has it. Say [`ImageWriter::expect`] of pages that
/// must be put: until they are, the image cannot be finished.
pub struct ImageWriter<'s> {
    store: &'s Store,
    id: ImageId,
    options: ImageOptions,
    /// While we hold the reader, nobody deletes the parent.
    parent: Option<(&'s ImageReader, Table)>,
    entries: Vec<AtomicU64>,
    fingerprints: Option<Fingerprints>,
    /// Where dirty pages go, and the number of that source.
    keyed: Option<(KeyedPages, u32)>,
    shared: Mutex<Shared>,
    /// `None` once the queue was closed.
    flusher: Mutex<Option<Flusher>>,
    committed: bool,
}

struct Shared {
    lease: Option<WriterLease>,
    free: std::ops::Range<u64>,
    used: Vec<u64>,
    /// Segments of other images that the page table leads to.
    inherited: BTreeSet<u64>,
    /// Pages that were put into the dirty store, perhaps replaced since.
    keyed: PageSet,
    /// The sources that the page table leads to.
    sources: BTreeSet<u32>,
    /// Segments and frames that are stored as they are.
    raw: HashSet<(u64, u16)>,
    stored_bytes: u64,
    /// The fingerprints, stored for later images.
    fingerprints: Option<Blob>,
    /// Why a segment could not be written.
    failure: Option<Arc<ImageError>>,
}

impl<'s> ImageWriter<'s> {
    pub(crate) fn new(
        store: &'s Store,
        id: ImageId,
        lease: WriterLease,
        options: ImageOptions,
        parent: Option<&'s ImageReader>,
    ) -> Result<Self, ImageError> {
        let parent = match parent {
            Some(parent) => Some((parent, parent.table()?)),
            None => None,
        };
        let known = parent.as_ref().map_or(&[][..], |(_, table)| table.entries());
        let entries = (0..options.pages as usize)
            .map(|page| AtomicU64::new(known.get(page).unwrap_or(&Entry::UNSET).0))
            .collect();
        let shared = Shared {
            lease: Some(lease),
            free: 0..0,
            used: Vec::new(),
            inherited: BTreeSet::new(),
            keyed: PageSet::new(options.pages),
            sources: BTreeSet::new(),
            raw: HashSet::new(),
            stored_bytes: 0,
            fingerprints: None,
            failure: None,
        };
        Ok(Self {
            store,
            id,
            fingerprints: Fingerprints::new(store, options.dedup)?,
            options,
            parent,
            entries,
            keyed: None,
            shared: Mutex::new(shared),
            flusher: Mutex::new(Some(Flusher::start(&store.shared_backend()))),
            committed: false,
        })
    }

    /// The name that the image will have.
    pub fn id(&self) -> &ImageId {
        &self.id
    }

    /// Lets pages be put one by one into a dirty store ([`ImageWriter::keyed_sink`]).
    ///
    /// # Errors
    /// Where one of the stores cannot be written.
    pub fn use_dirty_store(&mut self, store: DirtyStore) -> Result<(), ImageError> {
        let pages = KeyedPages::new(store, &self.store.id(), &self.id);
        self.lock().note(&[dirty::lease_line(&pages.source(&self.id), &self.store.id())])?;
        pages.begin(self.options.pages)?;
        let known = self.parent.as_ref().map(|(parent, _)| &parent.record().keyed);
        let last = known.and_then(|known| known.last_key_value()).map(|(source, _)| *source);
        self.keyed = Some((pages, last.map_or(0, |last| last + 1)));
        Ok(())
    }

    /// A way in for one thread.
    ///
    /// # Errors
    /// Where the codec cannot be set up.
    pub fn sink(&self) -> Result<PageSink<'_, 's>, ImageError> {
        PageSink::new(self, self.options.codec, self.options.level, false)
    }

    /// A way in for one thread whose pages give way to any that are decided
    /// otherwise ([`ImageWriter::claim`]).
    ///
    /// # Errors
    /// Where the codec cannot be set up.
    pub fn yielding_sink(&self) -> Result<PageSink<'_, 's>, ImageError> {
        PageSink::new(self, self.options.codec, self.options.level, true)
    }

    /// A way into the dirty store for one thread, where there is one.
    ///
    /// # Errors
    /// Where the codec cannot be set up.
    pub fn keyed_sink(&self) -> Result<Option<KeyedSink<'_, 's>>, ImageError> {
        let keyed = self.keyed.as_ref();
        keyed.map(|(pages, source)| KeyedSink::new(self, pages, *source)).transpose()
    }

    /// Says that these pages will be put: whatever was known of them is not
    /// what they are.
    pub fn expect(&self, pages: &PageSet) {
        for page in pages.iter() {
            self.set(page.index(), Entry::UNSET);
        }
    }

    /// Says that these pages will be put, and not by a yielding sink.
    pub fn claim(&self, pages: &PageSet) {
        for page in pages.iter() {
            self.set(page.index(), Entry::CLAIMED);
        }
    }

    /// Whether a page is still to be put, by whomever.
    pub fn is_open(&self, page: PageNumber) -> bool {
        self.entries[page.index()].load(Ordering::Acquire) == Entry::UNSET.0
    }

    /// Says that a page is as the parent has it; it gives way to any that was
    /// put or claimed.
    pub fn keep(&self, page: PageNumber) {
        let known = self.parent.as_ref().and_then(|(_, table)| table.entries().get(page.index()));
        if let Some(entry) = known {
            self.set_if_open(page.index(), *entry);
        }
    }

    /// The parent and its entries, one a page.
    pub fn parent(&self) -> Option<(&'s ImageReader, &[Entry])> {
        self.parent.as_ref().map(|(parent, table)| (*parent, table.entries()))
    }

    /// Says that pages were never touched by the guest; they give way to any
    /// that were put or claimed.
    pub fn put_holes(&self, range: PageRange) {
        for page in range.pages() {
            self.set_if_open(page.index(), Entry::ZERO);
        }
    }

    /// Stores bytes other than RAM.
    ///
    /// # Errors
    /// Where the store cannot be written.
    pub fn put_blob(&self, bytes: &[u8]) -> Result<Blob, ImageError> {
        let mut padded = bytes.to_vec();
        padded.resize(bytes.len().next_multiple_of(PAGE_BYTES), 0);
        let mut sink = self.sink()?;
        let pages: Vec<Vec<u8>> = padded.chunks(PAGE_BYTES).map(<[u8]>::to_vec).collect();
        let entries = sink.put_unnumbered(&pages)?;
        sink.finish()?;
        let blake3 = blake3::hash(bytes).to_hex().to_string();
        Ok(Blob { bytes: bytes.len() as u64, entries, blake3 })
    }

    /// Says where a disk copy shall be written: in the store, or in `scratch`
    /// where the store is no folder.
    ///
    /// # Errors
    /// Where the store cannot be written.
    pub fn reserve_disk(
        &self,
        number: usize,
        format: &str,
        scratch: &Path,
    ) -> Result<PathBuf, ImageError> {
        let file = format!("{}-{number}.{format}", self.id);
        let Some(folder) = self.store.folder() else {
            return Ok(scratch.join(file));
        };
        self.lock().note(&[format!("disks/{file}")])?;
        Ok(folder.join("disks").join(file))
    }

    /// The files on which a copy of a disk can stand that holds only what was
    /// written since the parent was taken, nearest first; none where it must
    /// hold all.
    pub fn disk_below(&self, name: &str, virtual_bytes: u64) -> Vec<DiskLayer> {
        match (&self.parent, self.store.folder()) {
            (Some((parent, _)), Some(_)) => {
                disks::to_stand_on(parent.record(), name, virtual_bytes)
            }
            _ => Vec::new(),
        }
    }

    /// Takes a disk copy that was written where [`ImageWriter::reserve_disk`]
    /// said.
    ///
    /// # Errors
    /// Where it cannot be read, or not be put into the store.
    pub fn put_disk(&self, path: &Path) -> Result<FileDigest, ImageError> {
        let digest = FileDigest::of(path)?;
        if self.store.folder().is_none() {
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            let backend = self.store.shared_backend();
            let names = disks::objects(&*backend, &file, digest.bytes);
            self.lock().note(&names)?;
            disks::put(&*backend, path, &names)?;
        }
        Ok(digest)
    }

    /// Builds the page table. All sinks must be finished.
    ///
    /// # Errors
    /// [`ImageError::Incomplete`] where a page was never put.
    pub fn finish_memory(&self, holes: u64) -> Result<(Entry, PageCounts), ImageError> {
        let entries: Vec<Entry> =
            self.entries.iter().map(|entry| Entry(entry.load(Ordering::Acquire))).collect();
        let is_undecided = |entry: &Entry| [Entry::UNSET, Entry::CLAIMED].contains(entry);
        if let Some(page) = entries.iter().position(is_undecided) {
            return Err(ImageError::Incomplete { page: page as u64 });
        }
        self.forget_replaced(&entries)?;
        let own = self.keyed.as_ref().map(|(_, source)| *source);
        let mut counts = self.lock().count(&entries, own);
        counts.hole = holes.min(counts.zero);
        counts.zero -= counts.hole;
        let mut sink = self.sink()?;
        let table = self.parent.as_ref().map(|(_, table)| table);
        let built = table::build(entries, table, |nodes| sink.put_unnumbered(nodes))?;
        sink.finish()?;
        self.lock().inherit(&built.reused);
        if let Some(prints) = self.fingerprints.as_ref().and_then(Fingerprints::to_bytes) {
            let blob = self.put_blob(&prints)?;
            self.lock().fingerprints = Some(blob);
        }
        Ok((built.root, counts))
    }

    /// Gives back what the dirty store holds of pages that were put elsewhere
    /// since.
    fn forget_replaced(&self, entries: &[Entry]) -> Result<(), ImageError> {
        let Some((pages, source)) = &self.keyed else { return Ok(()) };
        let put = self.lock().keyed.clone();
        let is_needed = |page: &PageNumber| matches!(entries[page.index()].place(), Ok(Place::Keyed(at)) if at.source == *source);
        let (needed, replaced): (Vec<_>, Vec<_>) = put.iter().partition(is_needed);
        match needed.is_empty() {
            true => pages.remove_all(),
            false => pages.forget(&replaced),
        }
    }

    /// Pages that were not stored because another has their content.
    pub fn duplicate_pages(&self) -> u64 {
        self.fingerprints.as_ref().map_or(0, Fingerprints::duplicates)
    }

    /// Waits until all that was put lasts.
    ///
    /// # Errors
    /// Where any of it could not be written.
    pub fn sync(&self) -> Result<(), ImageError> {
        // The lock is held to the end: who comes meanwhile must hear of a failure.
        let mut flusher = self.flusher.lock().unwrap_or_else(|locked| locked.into_inner());
        if let Some(flusher) = flusher.take() {
            if let Err(error) = flusher.finish() {
                self.lock().failure = Some(Arc::new(error));
            }
        }
        drop(flusher);
        if let Some(failure) = &self.lock().failure {
            return Err(ImageError::Earlier(Arc::clone(failure)));
        }
        self.store.backend().settle("segments")
    }

    /// Bytes put so far, compressed.
    pub fn stored_bytes(&self) -> u64 {
        self.lock().stored_bytes
    }

    /// Makes the image exist: `complete` finishes a record in which the fields
    /// that the writer knows (`id`, `store`, `segments`) are set.
    ///
    /// # Errors
    /// Where not everything could be written; then the image does not exist.
    pub fn commit(
        mut self,
        mut record: Record,
        disks: Vec<DiskRecord>,
    ) -> Result<Record, ImageError> {
        self.sync()?;
        record.id = self.id.clone();
        record.store = self.store.id();
        record.disks = disks;
        record.fingerprints = self.lock().fingerprints.take();
        record.segments = std::mem::take(&mut self.lock().used);
        record.segments.sort_unstable();
        record.inherited_segments = self.lock().inherited.iter().copied().collect();
        let size = |number: &u64| self.store.backend().size(&segment_name(*number));
        record.summary.inherited_bytes = record
            .inherited_segments
            .iter()
            .map(|number| Ok(size(number)?.unwrap_or(0)))
            .sum::<Result<u64, ImageError>>()?;
        record.keyed = self.sources();
        let below = record.disks.iter().flat_map(|disk| &disk.below);
        record.summary.inherited_bytes += below.map(|layer| layer.digest.bytes).sum::<u64>();
        record.parent = self.parent.as_ref().map(|(parent, _)| parent.record().id.clone());
        let name = record_name(&self.id);
        let bytes = record.to_bytes().map_err(|error| {
            ImageError::io("write", Path::new(&name))(std::io::Error::other(error))
        })?;
        self.store.backend().settle("disks")?;
        if let Some(lease) = &mut self.lock().lease {
            lease.commit(&name, &bytes)?;
        }
        self.committed = true;
        let lease = self.lock().lease.take();
        // A lease that cannot be removed harms nothing: the image exists.
        let _ = lease.map(WriterLease::release);
        Ok(record)
    }

    /// The sources that the page table leads to.
    fn sources(&self) -> BTreeMap<u32, KeyedSource> {
        let mut sources = BTreeMap::new();
        for number in &self.lock().sources {
            let own = self.keyed.as_ref().filter(|(_, own)| own == number);
            let parent = self.parent.as_ref().map(|(parent, _)| &parent.record().keyed);
            let known = own
                .map(|(pages, _)| pages.source(&self.id))
                .or_else(|| parent?.get(number).cloned());
            sources.extend(known.map(|source| (*number, source)));
        }
        sources
    }

    pub(crate) fn fingerprints(&self) -> Option<&Fingerprints> {
        self.fingerprints.as_ref()
    }

    pub(crate) fn store(&self) -> &Store {
        self.store
    }

    pub(crate) fn set(&self, page: usize, entry: Entry) {
        self.entries[page].store(entry.0, Ordering::Release);
    }

    /// Sets the entry of a page that nobody has put or claimed.
    pub(crate) fn set_if_open(&self, page: usize, entry: Entry) {
        // Else it gives way, as it should.
        let _ = self.entries[page].compare_exchange(
            Entry::UNSET.0,
            entry.0,
            Ordering::AcqRel,
            Ordering::Acquire,
        );
    }

    pub(crate) fn note_keyed(&self, pages: &[PageNumber]) {
        let mut shared = self.lock();
        for page in pages {
            shared.keyed.insert(*page);
        }
    }

    pub(crate) fn raw_store_id(&self) -> [u8; 16] {
        self.store.raw_id()
    }

    pub(crate) fn note_raw(&self, at: PageAddress) {
        self.lock().raw.insert((at.segment, at.frame));
    }

    /// The number of a new segment, noted in the lease.
    pub(crate) fn next_segment(&self) -> Result<u64, ImageError> {
        let mut shared = self.lock();
        if shared.free.is_empty() {
            let batch = self.store.allocate_segments(BATCH)?;
            shared.note(&batch.clone().map(segment_name).collect::<Vec<_>>())?;
            shared.free = batch;
        }
        let number = shared.free.start;
        shared.free.start += 1;
        shared.used.push(number);
        Ok(number)
    }

    /// Memory for a new segment.
    pub(crate) fn segment_buffer(&self) -> Vec<u8> {
        let flusher = self.flusher.lock().unwrap_or_else(|locked| locked.into_inner());
        flusher.as_ref().map(Flusher::spare_buffer).unwrap_or_default()
    }

    /// Hands a finished segment to the store.
    pub(crate) fn submit(&self, number: u64, bytes: Vec<u8>) -> Result<(), ImageError> {
        self.lock().stored_bytes += bytes.len() as u64;
        let flusher = self.flusher.lock().unwrap_or_else(|locked| locked.into_inner());
        let queue = flusher.as_ref().map(Flusher::queue);
        drop(flusher);
        if queue.is_some_and(|queue| queue.send((number, bytes)).is_ok()) {
            return Ok(());
        }
        // The threads stopped at an error: fetch it, or tell again what another
        // thread fetched.
        self.sync()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(|locked| locked.into_inner())
    }
}

impl Drop for ImageWriter<'_> {
    fn drop(&mut self) {
        let flusher = self.flusher.lock().unwrap_or_else(|locked| locked.into_inner()).take();
        // Its error was reported where it mattered; here the files only must
        // not appear any more after they were removed.
        let _ = flusher.map(Flusher::finish);
        if !self.committed {
            if let Some(lease) = self.lock().lease.take() {
                // What cannot be removed now, the next writer's sweep removes.
                let _ = lease.abandon(self.store.backend());
            }
        }
    }
}

impl Shared {
    fn note(&mut self, names: &[String]) -> Result<(), ImageError> {
        self.lease.as_mut().map_or(Ok(()), |lease| lease.note(names))
    }

    /// Counts pages by kind, and notes where those of other images lie;
    /// `own_source` is our own part of the dirty store.
    fn count(&mut self, entries: &[Entry], own_source: Option<u32>) -> PageCounts {
        let own: HashSet<u64> = self.used.iter().copied().collect();
        let mut counts = PageCounts::default();
        // Neighbours mostly lie in one segment.
        let mut last = None;
        for entry in entries {
            let at = match entry.place() {
                Ok(Place::Packed(at)) => at,
                Ok(Place::Keyed(at)) => {
                    self.sources.insert(at.source);
                    match own_source == Some(at.source) {
                        true => counts.keyed += 1,
                        false => counts.inherited += 1,
                    }
                    continue;
                }
                Ok(Place::Zeros) | Err(_) => {
                    counts.zero += 1;
                    continue;
                }
            };
            let is_own = match last {
                Some((segment, is_own)) if segment == at.segment => is_own,
                _ => own.contains(&at.segment),
            };
            if last != Some((at.segment, is_own)) {
                last = Some((at.segment, is_own));
                if !is_own {
                    self.inherited.insert(at.segment);
                }
            }
            match is_own {
                false => counts.inherited += 1,
                true if self.raw.contains(&(at.segment, at.frame)) => counts.raw += 1,
                true => counts.compressed += 1,
            }
        }
        counts
    }

    fn inherit(&mut self, entries: &[Entry]) {
        let segments = entries.iter().filter_map(|entry| Some(entry.packed_at()?.segment));
        self.inherited.extend(segments);
    }
}
