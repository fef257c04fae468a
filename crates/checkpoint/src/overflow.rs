//! Where captured pages go that the buffer has no room for.

use crate::CheckpointError;
use dewar_image::{ImageWriter, KeyedSink, PageSink};
use dewar_units::PageNumber;

/// One thread's way past the buffer.
pub(crate) enum Overflow<'w, 's> {
    /// Into the image, encoded at once; boxed, being much larger.
    Image(Box<PageSink<'w, 's>>),
    /// Into the dirty store.
    Dirty(KeyedSink<'w, 's>),
}

impl<'w, 's> Overflow<'w, 's> {
    /// Into the dirty store, where there is one.
    pub(crate) fn new(writer: &'w ImageWriter<'s>) -> Result<Self, CheckpointError> {
        match writer.keyed_sink()? {
            Some(sink) => Ok(Self::Dirty(sink)),
            None => Self::image(writer),
        }
    }

    /// Into the image.
    pub(crate) fn image(writer: &'w ImageWriter<'s>) -> Result<Self, CheckpointError> {
        Ok(Self::Image(Box::new(writer.sink()?)))
    }

    /// Says whether the page goes to the dirty store.
    pub(crate) fn put(&mut self, page: PageNumber, bytes: &[u8]) -> Result<bool, CheckpointError> {
        match self {
            Self::Image(sink) => drop(sink.put(page, bytes)?),
            Self::Dirty(sink) => return Ok(sink.put(page, bytes)?),
        }
        Ok(false)
    }

    pub(crate) fn flush(&mut self) -> Result<(), CheckpointError> {
        match self {
            Self::Image(sink) => sink.flush()?,
            Self::Dirty(sink) => sink.flush()?,
        }
        Ok(())
    }

    pub(crate) fn finish(self) -> Result<(), CheckpointError> {
        match self {
            Self::Image(sink) => sink.finish()?,
            Self::Dirty(mut sink) => sink.flush()?,
        }
        Ok(())
    }
}
