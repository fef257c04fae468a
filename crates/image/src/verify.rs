use crate::{Entry, FrameCache, ImageError, ImageId, ImageReader, PageAddress, Place, Store};
use dewar_units::PageNumber;
use std::collections::{BTreeMap, HashMap};

/// What [`verify`] read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verified {
    /// Segments.
    pub segments: u64,
    /// Frames, all expanded.
    pub frames: u64,
    /// Pages of RAM whose place was checked.
    pub pages: u64,
    /// Pages that were read from dirty stores.
    pub keyed: u64,
    /// Disks, read whole.
    pub disks: u64,
}

/// Pages that are asked for together.
const KEYED_BATCH: usize = 512;

/// Reads every byte of an image: record, segments, frames, page table, device
/// state, disks. `progress` is told of each step as (done, of).
///
/// # Errors
/// The first damage found, with the page or file named.
pub fn verify(
    store: &Store,
    id: &ImageId,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Verified, ImageError> {
    let image = store.open_image(id)?;
    let record = image.record();
    let mut verified = Verified::default();
    let mut cache = FrameCache::new()?;
    let steps = (record.segments.len() + record.inherited_segments.len()) as u64 + 1;

    // Which pages lie in which frame, to name the page that a damage hits.
    let entries = image.entries()?;
    let mut first_page: HashMap<(u64, u16), (u64, PageAddress)> = HashMap::new();
    let mut keyed: BTreeMap<u32, Vec<(PageNumber, u64)>> = BTreeMap::new();
    for (page, entry) in entries.iter().enumerate() {
        let damaged = |problem: &str| ImageError::damaged(format!("page {page}"), problem);
        match entry.place() {
            Ok(Place::Zeros) => {}
            Ok(Place::Packed(at)) => {
                if !record.has_segment(at.segment) {
                    let place = format!("page {page} ({at})");
                    return Err(ImageError::damaged(place, "its segment is not the image's"));
                }
                let known = first_page.entry((at.segment, at.frame)).or_insert((page as u64, at));
                known.1.index = known.1.index.max(at.index);
            }
            Ok(Place::Keyed(at)) => {
                let page = PageNumber(page as u64);
                keyed.entry(at.source).or_default().push((page, at.seal));
            }
            Err(entry) => return Err(damaged(&format!("entry {:#x} is unknown", entry.0))),
        }
    }
    verified.pages = entries.len() as u64;

    for (done, number) in record.all_segments().enumerate() {
        progress(done as u64, steps);
        image.read_ahead(number);
        let is_own = done < record.segments.len();
        for frame in 0..image.segment(number)?.frames() {
            let at = PageAddress { segment: number, frame, index: 0 };
            match first_page.get(&(number, frame)) {
                Some((page, last)) => {
                    let entry = Entry::packed(*last);
                    image.page(PageNumber(*page), entry, &mut cache)?;
                }
                None if image.segment(number)?.frame_bytes(frame) > 0 => {
                    match image.frame_only(at, &mut cache) {
                        // Dropped meanwhile: no image needs it.
                        Err(ImageError::Damaged { .. })
                            if image.segment(number)?.frame_bytes(frame) == 0 =>
                        {
                            continue;
                        }
                        Err(ImageError::Damaged { place, problem }) if !is_own => {
                            let problem = format!("{problem} (no page of this image lies there)");
                            return Err(ImageError::damaged(place, problem));
                        }
                        read => read?,
                    }
                }
                // Dropped: no image needs it.
                None => continue,
            }
            verified.frames += 1;
        }
        verified.segments += 1;
    }
    verified.keyed = read_keyed(&image, &keyed, &mut cache)?;
    image.blob("device state", &record.device_state)?;
    image.blob("list of hot pages", &record.hot_pages)?;
    for blob in record.print_lists() {
        image.blob("list of fingerprints", blob)?;
    }
    store.check_disks(record)?;
    verified.disks = record.disks.len() as u64;
    progress(steps, steps);
    Ok(verified)
}

/// Reads pages from dirty stores; returns how many.
fn read_keyed(
    image: &ImageReader,
    keyed: &BTreeMap<u32, Vec<(PageNumber, u64)>>,
    cache: &mut FrameCache,
) -> Result<u64, ImageError> {
    let mut read = 0;
    for (source, pages) in keyed {
        for some in pages.chunks(KEYED_BATCH) {
            image.keyed(*source, some, cache)?;
            read += some.len() as u64;
        }
    }
    Ok(read)
}
