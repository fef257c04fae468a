//! What is known of the content of an image's pages without reading them.

use crate::dedup::{Fingerprint, ROW_BYTES, proof, row};
use crate::{Entry, ImageError, ImageReader};
use std::collections::HashSet;

/// The fingerprints of an image's pages, as far as the images that stored them
/// are still there and remember them. Those are 192 bits of BLAKE3: a guest that
/// looks for another page with the print of one of its own finds none.
#[derive(Debug, Default)]
pub struct KnownPages {
    /// In the order of the entries.
    rows: Vec<(u64, Fingerprint)>,
}

impl KnownPages {
    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Whether a page with this entry is known to have this content.
    pub fn is(&self, entry: Entry, content: &[u8]) -> bool {
        self.print(entry).is_some_and(|print| *print == proof(content))
    }

    /// Whether the content of a page with this entry is known.
    pub fn knows(&self, entry: Entry) -> bool {
        self.print(entry).is_some()
    }

    fn print(&self, entry: Entry) -> Option<&Fingerprint> {
        let row = self.rows.binary_search_by_key(&entry.0, |(entry, _)| *entry).ok()?;
        Some(&self.rows[row].1)
    }
}

impl ImageReader {
    /// What is known of this image's pages. An image that cannot be read is as
    /// good as not there.
    ///
    /// # Errors
    /// Where the store cannot be listed.
    pub fn known_pages(&self) -> Result<KnownPages, ImageError> {
        let ours: HashSet<u64> = self.record().all_segments().collect();
        let mut rows = Vec::new();
        for record in self.store().records()?.0 {
            // One of another time, or of a copy of the store, may only have its number.
            let is_ours =
                |segment: u64| ours.contains(&segment) && record.shares(segment, self.record());
            if !record.segments.iter().any(|segment| is_ours(*segment)) {
                continue;
            }
            let Some(blob) = record.prints() else { continue };
            let read = || self.store().open_image(&record.id)?.blob("list of fingerprints", blob);
            let Ok(bytes) = read() else { continue };
            let known = bytes.chunks_exact(ROW_BYTES).map(row);
            let needed =
                known.filter(|(_, entry)| entry.packed_at().is_some_and(|at| is_ours(at.segment)));
            rows.extend(needed.map(|(print, entry)| (entry.0, print)));
        }
        rows.sort_unstable();
        Ok(KnownPages { rows })
    }
}
