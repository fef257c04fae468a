//! What tells the segments of an image from others with their numbers.

use super::ImageWriter;
use crate::{ImageError, Record, SegmentId};
use std::collections::BTreeMap;

impl ImageWriter<'_> {
    /// The ids of the segments that a record names, as far as they have any.
    pub(super) fn segment_ids(
        &self,
        record: &Record,
    ) -> Result<BTreeMap<u64, SegmentId>, ImageError> {
        let own = record.segments.iter().map(|number| Ok((*number, self.ids.of(*number))));
        let parent = self.parent.as_ref().map(|(parent, _)| parent.record());
        let inherited = record.inherited_segments.iter().map(|number| {
            let known = parent.and_then(|parent| parent.segment_ids.get(number)).copied();
            // Of an image beside ours: it was found to be the right one when it was used.
            let id = known.map_or_else(|| Ok(self.store.segment(*number, None)?.id()), Ok);
            id.map(|id| (*number, id))
        });
        let all: Result<BTreeMap<u64, SegmentId>, ImageError> = own.chain(inherited).collect();
        let mut all = all?;
        all.retain(|_, id| !id.is_none());
        Ok(all)
    }

    pub(crate) fn segment_id(&self, number: u64) -> SegmentId {
        self.ids.of(number)
    }
}
