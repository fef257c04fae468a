//! Frames on a connection: one direction of it.

use crate::MigrateError;
use dewar_wire::control::CONTROL;
use dewar_wire::frame::{HEADER_BYTES, Header, Kind, Place, Side};
use dewar_wire::hello::Hello;
use std::io::{self, ErrorKind, IoSlice, Read, Write};

/// The sending end.
#[derive(Debug)]
pub struct FrameWriter<W> {
    out: W,
    /// The frame that comes next.
    place: Place,
}

impl<W: Write> FrameWriter<W> {
    /// One for a connection on which that side has sent nothing.
    pub fn new(out: W, session: u64, shard: u16, from: Side) -> Self {
        Self { out, place: Place::first(session, shard, from) }
    }

    /// The same, whatever it writes to.
    pub fn boxed(self) -> FrameWriter<Box<dyn Write + Send>>
    where
        W: Send + 'static,
    {
        FrameWriter { out: Box::new(self.out), place: self.place }
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// Where the connection fails.
    pub fn send(&mut self, kind: Kind, payload: &[u8]) -> Result<(), MigrateError> {
        let header = Header::of(kind, self.place, payload).bytes();
        let shard = self.place.shard;
        self.place = self.place.next();
        write_both(&mut self.out, &header, payload).map_err(|cause| MigrateError::Link {
            operation: "sending on",
            shard,
            cause,
        })
    }
}

/// Both in one call, if the connection takes them.
fn write_both(out: &mut impl Write, header: &[u8], payload: &[u8]) -> io::Result<()> {
    let written = loop {
        match out.write_vectored(&[IoSlice::new(header), IoSlice::new(payload)]) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    out.write_all(&header[written.min(header.len())..])?;
    out.write_all(&payload[written.saturating_sub(header.len())..])?;
    out.flush()
}

/// The receiving end.
#[derive(Debug)]
pub struct FrameReader<R> {
    from: R,
    /// The frame that is due.
    place: Place,
    payload: Vec<u8>,
}

impl<R: Read> FrameReader<R> {
    /// One for a connection on which that side has sent nothing.
    pub fn new(from: R, session: u64, shard: u16, sender: Side) -> Self {
        Self { from, place: Place::first(session, shard, sender), payload: Vec::new() }
    }

    /// One for a connection of which it is not known which it is, and its greeting, which tells.
    ///
    /// # Errors
    /// Where it does not begin with a greeting.
    pub fn greeted(mut from: R, sender: Side) -> Result<(Self, Hello), MigrateError> {
        let mut header = [0; HEADER_BYTES];
        from.read_exact(&mut header).map_err(|cause| link(cause, CONTROL))?;
        let header = Header::parse_first(&header, sender)?;
        let mut payload = vec![0; header.length as usize];
        from.read_exact(&mut payload).map_err(|cause| link(cause, header.place.shard))?;
        header.check(&payload)?;
        let hello = Hello::parse(&payload)?;
        Ok((Self { from, place: header.place.next(), payload }, hello))
    }

    /// What it reads from.
    pub(crate) fn inner(&self) -> &R {
        &self.from
    }

    /// Which connection it is.
    pub fn shard(&self) -> u16 {
        self.place.shard
    }

    /// Which migration it is of.
    pub fn session(&self) -> u64 {
        self.place.session
    }

    /// The next frame; `None` where the connection has ended between two.
    ///
    /// # Errors
    /// Where the connection fails or ends in a frame, or what arrives is not the frame that is due.
    pub fn receive(&mut self) -> Result<Option<(Kind, &[u8])>, MigrateError> {
        let shard = self.place.shard;
        let link = |cause: io::Error| link(cause, shard);
        let mut header = [0; HEADER_BYTES];
        let first = loop {
            match self.from.read(&mut header) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => break other.map_err(link)?,
            }
        };
        if first == 0 {
            return Ok(None);
        }
        self.from.read_exact(&mut header[first..]).map_err(link)?;
        let header = Header::parse(&header, self.place)?;
        self.payload.resize(header.length as usize, 0);
        self.from.read_exact(&mut self.payload).map_err(link)?;
        header.check(&self.payload)?;
        self.place = self.place.next();
        Ok(Some((header.kind, &self.payload)))
    }
}

/// The error of a connection that is read.
fn link(cause: io::Error, shard: u16) -> MigrateError {
    match cause.kind() {
        ErrorKind::UnexpectedEof => MigrateError::Ended(shard),
        _ => MigrateError::Link { operation: "receiving on", shard, cause },
    }
}
