mod ids;
mod keyed;
mod options;
mod shared;

pub use options::ImageOptions;

use crate::dedup::{Dedup, Fingerprints};
use crate::dirty::KeyedPages;
use crate::flush::{Flusher, Narrowly, ON_THEIR_WAY};
use crate::lease::WriterLease;
use crate::reader::ImageReader;
use crate::record::{Blob, DiskLayer, DiskRecord, ImageId, PageCounts, Record};
use crate::segment::{SEGMENT_BYTES, segment_name};
use crate::segment_id::SegmentIds;
use crate::sink::PageSink;
use crate::store::record_name;
use crate::table::{self, Table};
use crate::{Entry, FileDigest, ImageError, PageAddress, Store, disks};
use dewar_codec::Feed;
use dewar_store::AlignedBytes;
use dewar_units::{PAGE_BYTES, PageNumber, PageRange, PageSet};
use shared::Shared;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Segment numbers taken from the store at a time.
const BATCH: u64 = 16;

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
    ids: SegmentIds,
    /// What the store takes, and how the frames are compressed for it.
    feed: Arc<Feed>,
    /// `None` once the queue was closed.
    flusher: Mutex<Option<Flusher>>,
    committed: bool,
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
        let compression = options.compression_in(store);
        let feed = Arc::new(Feed::new(compression, ON_THEIR_WAY * SEGMENT_BYTES));
        Ok(Self {
            store,
            id,
            fingerprints: Fingerprints::new(store, options.dedup, parent.as_ref().map(|it| it.0))?,
            options,
            parent,
            entries,
            keyed: None,
            shared: Mutex::new(Shared::new(lease, options.pages)),
            ids: SegmentIds::new()?,
            flusher: Mutex::new(Some(Flusher::start(&store.shared_backend(), &feed))),
            feed,
            committed: false,
        })
    }

    /// The name that the image will have.
    pub fn id(&self) -> &ImageId {
        &self.id
    }

    /// How frames are compressed.
    pub(crate) fn feed(&self) -> &Feed {
        &self.feed
    }

    /// A way in for one thread.
    ///
    /// # Errors
    /// Where the codec cannot be set up.
    pub fn sink(&self) -> Result<PageSink<'_, 's>, ImageError> {
        PageSink::new(self, self.options.level, false)
    }

    /// A way in for one thread whose pages give way to any that are decided
    /// otherwise ([`ImageWriter::claim`]).
    ///
    /// # Errors
    /// Where the codec cannot be set up.
    pub fn yielding_sink(&self) -> Result<PageSink<'_, 's>, ImageError> {
        PageSink::new(self, self.options.level, true)
    }

    /// Says that these pages will be put, and no others but in their place: whatever was known of them is not
    /// what they are.
    pub fn expect(&self, pages: &PageSet) {
        self.feed.expect(pages.count() * PAGE_BYTES as u64);
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
        let parent = self.parent.as_ref().map(|(parent, _)| parent.record());
        parent.map_or_else(Vec::new, |it| disks::to_stand_on(it, name, virtual_bytes))
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
        let parents = self.parent.as_ref().map_or(&[][..], |(_, table)| table.entries());
        let mut counts = self.lock().count(&entries, parents, own);
        let prints = self.fingerprints.as_ref().map(|prints| prints.to_bytes(&entries));
        counts.hole = holes.min(counts.zero);
        counts.zero -= counts.hole;
        let mut sink = self.sink()?;
        let table = self.parent.as_ref().map(|(_, table)| table);
        let built = table::build(entries, table, &mut |nodes| sink.put_unnumbered(nodes))?;
        sink.finish()?;
        self.lock().inherit(&built.reused);
        if let Some(prints) = prints {
            let blob = self.put_blob(&prints)?;
            self.lock().prints = Some(blob);
        }
        Ok((built.root, counts))
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
        Ok(self.store.backend().sync_folder("segments")?)
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
        let prints = self.lock().prints.take();
        record.findable = prints.is_some();
        match self.fingerprints.as_ref().map(Fingerprints::mode) {
            Some(Dedup::Store) => record.fingerprints = prints,
            Some(Dedup::Known) => record.known = prints,
            _ => record.candidates = prints,
        }
        record.segments = std::mem::take(&mut self.lock().used);
        record.segments.sort_unstable();
        record.inherited_segments = self.lock().inherited.iter().copied().collect();
        record.segment_ids = self.segment_ids(&record)?;
        // Where the lease was lost, its objects may have been swept: that is told first.
        self.lock().note(&[])?;
        self.require(record.segments.iter().map(|number| segment_name(*number)))?;
        let inherited = record.inherited_segments.iter().map(|number| segment_name(*number));
        record.summary.inherited_bytes = self.require(inherited)?;
        self.require(record.disks.iter().flat_map(|disk| self.store.disk_objects(disk)))?;
        record.keyed = self.sources();
        self.require_keyed()?;
        let below = record.disks.iter().flat_map(|disk| &disk.below);
        record.summary.inherited_bytes += below.map(|layer| layer.digest.bytes).sum::<u64>();
        record.parent = self.parent.as_ref().map(|(parent, _)| parent.record().id.clone());
        let name = record_name(&self.id);
        let bytes = record.to_bytes().map_err(|error| {
            ImageError::io("write", Path::new(&name))(std::io::Error::other(error))
        })?;
        self.store.backend().sync_folder("disks")?;
        if let Some(lease) = &mut self.lock().lease {
            lease.commit(&name, &bytes)?;
        }
        self.committed = true;
        let lease = self.lock().lease.take();
        // A lease that cannot be removed harms nothing: the image exists.
        let _ = lease.map(WriterLease::release);
        Ok(record)
    }

    /// That objects are there still, and their bytes: a server that came back
    /// without what it had taken says nothing of it.
    fn require(&self, objects: impl Iterator<Item = String>) -> Result<u64, ImageError> {
        let mut bytes = 0;
        for name in objects {
            bytes += self.store.backend().size(&name)?.ok_or_else(|| {
                let place = format!("{name} in {}", self.store.url());
                ImageError::damaged(place, "the store has lost it")
            })?;
        }
        Ok(bytes)
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

    /// Until it is dropped segments go to the store one after the other, and none waits: who
    /// fills them feels how slow it is.
    pub fn narrowly(&self) -> Narrowly {
        let flusher = self.flusher.lock().unwrap_or_else(|locked| locked.into_inner());
        Narrowly::through(flusher.as_ref().map(|flusher| flusher.queue().1))
    }

    /// Bounds how long what fails in the store is tried again, from now on.
    pub fn set_patience(&self, patience: Duration) {
        self.store.backend().set_patience(patience);
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
            shared.note(&batch.iter().copied().map(segment_name).collect::<Vec<_>>())?;
            shared.free = batch;
        }
        let number = shared.free.pop_front().unwrap_or_default();
        shared.used.push(number);
        Ok(number)
    }

    /// Memory for a new segment.
    pub(crate) fn segment_buffer(&self) -> AlignedBytes {
        let flusher = self.flusher.lock().unwrap_or_else(|locked| locked.into_inner());
        flusher.as_ref().map(Flusher::spare_buffer).unwrap_or_default()
    }

    /// Hands a finished segment to the store.
    pub(crate) fn submit(&self, number: u64, bytes: AlignedBytes) -> Result<(), ImageError> {
        self.lock().stored_bytes += bytes.len() as u64;
        let flusher = self.flusher.lock().unwrap_or_else(|locked| locked.into_inner());
        let way = flusher.as_ref().map(Flusher::queue);
        drop(flusher);
        if let Some((queue, gate)) = way {
            // What waits at the gate is before the store, too.
            self.feed.given(bytes.len());
            gate.pass();
            if queue.send((number, bytes)).is_ok() {
                return Ok(());
            }
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
                let _ = lease.abandon(self.store);
            }
        }
    }
}
