//! The control connection: messages both ways, and a beat each second, so that a side knows that the
//! other is there while it has nothing to say.
//!
//! It begins with a greeting each way. The source's says which migration it is about.

use crate::MigrateError;
use crate::frames::{FrameReader, FrameWriter};
use dewar_wire::control::{CONTROL, STATE_FRAME_BYTES};
use dewar_wire::frame::{Kind, Side};
use dewar_wire::hello::{Agreement, Features, Hello};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{Read, Write};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How often a side says that it is at work.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// A side that has said nothing for so long is gone.
const SILENT_FOR: Duration = Duration::from_secs(20);

type Writer = FrameWriter<Box<dyn Write + Send>>;

/// What is heard on the control connection.
#[derive(Debug)]
pub enum Heard<R> {
    /// A message.
    Message(R),
    /// A piece of device state.
    State(Vec<u8>),
    /// The other side is at work.
    Beat,
}

/// What takes pages that come beside messages.
type PageTaker = dyn Fn(&[u8]) -> Result<(), MigrateError> + Send + Sync;

/// One side's end: it sends messages `S` and receives messages `R`. Dropped, it says nothing more.
pub struct Control<S, R> {
    session: u64,
    writer: Arc<Mutex<Writer>>,
    heard: Mutex<Receiver<Result<Heard<R>, MigrateError>>>,
    reading: Arc<Reading>,
    agreement: Agreement,
    sends: PhantomData<fn(S)>,
}

/// What the thread that reads shares with the others.
struct Reading {
    /// When something was heard last.
    last: Mutex<Instant>,
    has_ended: AtomicBool,
    pages: OnceLock<Box<PageTaker>>,
}

impl Reading {
    fn is_silent(&self) -> bool {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).elapsed() > SILENT_FOR
    }
}

/// What this code can.
fn ours() -> Hello {
    let codecs = Features::LZ4.union(Features::ZSTD);
    Hello::ours(codecs.union(Features::POST_COPY).union(Features::REFERENCES))
}

impl<S: Serialize, R: DeserializeOwned + Send + 'static> Control<S, R> {
    /// The source's end of a migration's control connection.
    ///
    /// # Errors
    /// Where the other side does not answer, or speaks no version of the protocol that this one does.
    pub fn greet(
        from: impl Read + Send + 'static,
        to: impl Write + Send + 'static,
        session: u64,
    ) -> Result<Self, MigrateError> {
        let mut writer =
            FrameWriter::new(Box::new(to) as Box<dyn Write + Send>, session, CONTROL, Side::Source);
        writer.send(Kind::Hello, &ours().bytes())?;
        let mut reader = FrameReader::new(from, session, CONTROL, Side::Destination);
        let agreement = match reader.receive()? {
            Some((Kind::Hello, bytes)) => ours().agree(&Hello::parse(bytes)?)?,
            Some(_) => return Err(MigrateError::Unexpected(CONTROL)),
            None => return Err(MigrateError::NoAnswer),
        };
        Ok(Self::begin(session, writer, reader, agreement))
    }

    /// The destination's end: which migration it is about, the source says.
    ///
    /// # Errors
    /// As [`Control::greet`].
    pub fn accept(
        from: impl Read + Send + 'static,
        to: impl Write + Send + 'static,
    ) -> Result<Self, MigrateError> {
        let (reader, hello) = FrameReader::greeted(from, Side::Source)?;
        let session = reader.session();
        let to = Box::new(to) as Box<dyn Write + Send>;
        let mut writer = FrameWriter::new(to, session, CONTROL, Side::Destination);
        writer.send(Kind::Hello, &ours().bytes())?;
        let agreement = ours().agree(&hello)?;
        if reader.shard() != CONTROL {
            return Err(MigrateError::Unexpected(reader.shard()));
        }
        Ok(Self::begin(session, writer, reader, agreement))
    }

    fn begin(
        session: u64,
        writer: Writer,
        mut reader: FrameReader<impl Read + Send + 'static>,
        agreement: Agreement,
    ) -> Self {
        let writer = Arc::new(Mutex::new(writer));
        let (sender, heard) = channel();
        let reading = Arc::new(Reading {
            last: Mutex::new(Instant::now()),
            has_ended: AtomicBool::new(false),
            pages: OnceLock::new(),
        });
        let shared = Arc::clone(&reading);
        std::thread::spawn(move || {
            read_all(&mut reader, &sender, &shared);
            shared.has_ended.store(true, Ordering::Relaxed);
        });
        let beating = Arc::downgrade(&writer);
        std::thread::spawn(move || beat(&beating));
        let heard = Mutex::new(heard);
        Self { session, writer, heard, reading, agreement, sends: PhantomData }
    }

    /// Which migration it is about.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// Whether both sides can do this.
    pub fn can(&self, features: Features) -> bool {
        self.agreement.features.has(features)
    }

    /// Gives pages that come beside messages to this, at once, on the thread that reads; before, none may
    /// come.
    pub fn take_pages(
        &self,
        taker: impl Fn(&[u8]) -> Result<(), MigrateError> + Send + Sync + 'static,
    ) {
        let _ = self.reading.pages.set(Box::new(taker));
    }

    /// Sends pages, by the connection's own way.
    ///
    /// # Errors
    /// Where the connection fails.
    pub fn send_pages(&self, payload: &[u8]) -> Result<(), MigrateError> {
        lock(&self.writer).send(Kind::Pages, payload)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// Where the connection fails.
    pub fn send(&self, message: &S) -> Result<(), MigrateError> {
        let text = serde_json::to_vec(message).map_err(MigrateError::Message)?;
        lock(&self.writer).send(Kind::Control, &text)
    }

    /// Sends device state; its length was said before.
    ///
    /// # Errors
    /// Where the connection fails.
    pub fn send_state(&self, state: &[u8]) -> Result<(), MigrateError> {
        let mut writer = lock(&self.writer);
        state.chunks(STATE_FRAME_BYTES).try_for_each(|piece| writer.send(Kind::State, piece))
    }

    /// What is said next.
    ///
    /// # Errors
    /// Where the connection fails or has ended, or the other side is silent for too long.
    pub fn hear(&self) -> Result<Heard<R>, MigrateError> {
        let silent = Err(MigrateError::Silent(SILENT_FOR));
        self.hear_within(SILENT_FOR)?.map_or(silent, Ok)
    }

    /// The same within so long; `None` where nothing was said. A beat is nothing, but begins the time
    /// again.
    ///
    /// # Errors
    /// As [`Control::hear`].
    pub fn hear_within(&self, time: Duration) -> Result<Option<Heard<R>>, MigrateError> {
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match self.next(&heard, time)? {
                Some(Heard::Beat) => {}
                other => return Ok(other),
            }
        }
    }

    /// The same until a moment, which a beat does not put off.
    ///
    /// # Errors
    /// As [`Control::hear`].
    pub fn hear_until(&self, deadline: Instant) -> Result<Option<Heard<R>>, MigrateError> {
        let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match self.next(&heard, deadline.saturating_duration_since(Instant::now()))? {
                Some(Heard::Beat) if Instant::now() < deadline => {}
                Some(Heard::Beat) => return Ok(None),
                other => return Ok(other),
            }
        }
    }

    fn next(
        &self,
        heard: &Receiver<Result<Heard<R>, MigrateError>>,
        time: Duration,
    ) -> Result<Option<Heard<R>>, MigrateError> {
        match heard.recv_timeout(time) {
            Ok(heard) => heard.map(Some),
            Err(RecvTimeoutError::Timeout) if self.is_silent() => {
                Err(MigrateError::Silent(SILENT_FOR))
            }
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(MigrateError::Ended(CONTROL)),
        }
    }

    /// Whether the other side has said nothing for too long, or the connection has ended for as long.
    pub fn is_silent(&self) -> bool {
        self.reading.is_silent()
    }

    /// Does this when the other side has said nothing for too long, while this value is there: a thread that sends
    /// to a side that does not read would wait without end.
    pub fn when_silent(&self, act: impl FnOnce() + Send + 'static) {
        let reading = Arc::downgrade(&self.reading);
        std::thread::spawn(move || {
            while let Some(reading) = reading.upgrade() {
                if reading.is_silent() {
                    return act();
                }
                drop(reading);
                std::thread::sleep(BEAT_EVERY);
            }
        });
    }

    /// Whether nothing more will be heard.
    pub fn is_lost(&self) -> bool {
        self.reading.has_ended.load(Ordering::Relaxed) || self.is_silent()
    }

    /// The next message.
    ///
    /// # Errors
    /// As [`Control::hear`], or where device state comes that is not due.
    pub fn message(&self) -> Result<R, MigrateError> {
        match self.hear()? {
            Heard::Message(message) => Ok(message),
            _ => Err(MigrateError::Unexpected(CONTROL)),
        }
    }
}

fn lock(writer: &Mutex<Writer>) -> MutexGuard<'_, Writer> {
    writer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads frames until the connection ends or somebody has heard enough.
fn read_all<R: DeserializeOwned>(
    reader: &mut FrameReader<impl Read>,
    sender: &Sender<Result<Heard<R>, MigrateError>>,
    reading: &Reading,
) {
    loop {
        let received = reader.receive();
        if matches!(received, Ok(Some(_))) {
            *reading.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        }
        let heard = match received {
            // What carries it is ended on purpose when it has been silent for too long.
            Ok(None) | Err(_) if reading.is_silent() => Err(MigrateError::Silent(SILENT_FOR)),
            Ok(None) => return,
            Ok(Some((Kind::Control, text))) => {
                serde_json::from_slice(text).map(Heard::Message).map_err(MigrateError::Message)
            }
            Ok(Some((Kind::State, bytes))) => Ok(Heard::State(bytes.to_vec())),
            Ok(Some((Kind::Beat, _))) => Ok(Heard::Beat),
            Ok(Some((Kind::Pages, payload))) => match reading.pages.get().map(|it| it(payload)) {
                Some(Ok(())) => continue,
                Some(Err(error)) => Err(error),
                None => Err(MigrateError::Unexpected(CONTROL)),
            },
            Ok(Some(_)) => Err(MigrateError::Unexpected(CONTROL)),
            Err(error) => Err(error),
        };
        let is_over = heard.is_err();
        if sender.send(heard).is_err() || is_over {
            return;
        }
    }
}

/// Says that this side is at work, as long as there is a connection.
fn beat(writer: &Weak<Mutex<Writer>>) {
    loop {
        std::thread::sleep(BEAT_EVERY);
        let Some(writer) = writer.upgrade() else { return };
        if lock(&writer).send(Kind::Beat, &[]).is_err() {
            return;
        }
    }
}
