//! What the guest says, bounded: a guest that writes nonsense, or too much, is not
//! listened to for a while, and harms no other guest.

use crate::QosError;
use dewar_beat::{Line, MAX_LINE};
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, fstat, open, renameat_with};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::fs::{self, Permissions};
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt, lchown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Most programs that may be connected at a time.
const MOST_CLIENTS: usize = 8;
/// Read from one at a time.
const READ_BYTES: usize = 4096;
/// How long a guest that says too much is not listened to.
const MUTE: Duration = Duration::from_millis(100);
/// How often a socket that is not there is looked for again.
const AGAIN: Duration = Duration::from_millis(100);
/// So many times the lines that the target makes are read.
const GENEROSITY: f64 = 4.0;
/// The least number of lines that may come at once.
const LEAST_BURST: f64 = 16.0;

/// Where heartbeats come from.
#[derive(Debug)]
pub enum Port {
    /// A socket on which QEMU listens for us: a VM's serial port.
    Connect(PathBuf),
    /// A socket on which we listen, for processes; it is removed in the end.
    Listen {
        /// Where it is.
        path: PathBuf,
        /// Whose it is.
        user: u32,
    },
}

/// A guest's heartbeats.
#[derive(Debug)]
pub struct Heartbeats {
    port: Port,
    listener: Option<UnixListener>,
    clients: Vec<Client>,
    tried: Option<Instant>,
    rate: f64,
    allowance: Allowance,
    /// How often somebody may connect.
    comers: Allowance,
    closed_until: Option<Instant>,
    ignored: u64,
}

#[derive(Debug)]
struct Client {
    socket: UnixStream,
    /// The beginning of a line.
    line: Vec<u8>,
    /// Whether the present line is too long, and passed over.
    too_long: bool,
    mute_until: Option<Instant>,
    /// How often it may be read.
    reads: Allowance,
}

/// A bucket of lines that may be taken, or of reads.
#[derive(Debug)]
struct Allowance {
    rate: f64,
    left: f64,
    filled: Instant,
}

impl Heartbeats {
    /// Of a guest that is to do `rate` jobs a second. A socket that is listened on is
    /// made for that user; a dead one by its name is replaced.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn new(port: Port, rate: f64) -> Result<Self, QosError> {
        let listener = match &port {
            Port::Connect(_) => None,
            Port::Listen { path, user } => Some(listen(path, *user)?),
        };
        let allowance = Allowance::new(rate);
        let clients = Vec::new();
        let mut heartbeats = Self {
            port,
            listener,
            clients,
            tried: None,
            rate,
            allowance,
            comers: Allowance::new(rate),
            closed_until: None,
            ignored: 0,
        };
        heartbeats.reconnect();
        Ok(heartbeats)
    }

    /// Whether somebody could say something.
    pub fn is_connected(&self) -> bool {
        !self.clients.is_empty()
    }

    /// Lines, or parts of them, that were passed over.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// What to wait for.
    pub fn sources(&self) -> Vec<BorrowedFd<'_>> {
        let now = Instant::now();
        let heard = self.clients.iter().filter(|client| !client.is_mute(now));
        let listener = self.listener.iter().filter(|_| !self.is_closed()).map(AsFd::as_fd);
        listener.chain(heard.map(|client| client.socket.as_fd())).collect()
    }

    /// Whether nobody is let in, since too many came.
    fn is_closed(&self) -> bool {
        self.closed_until.is_some_and(|until| Instant::now() < until)
    }

    /// The lines that have come; never waits.
    pub fn read(&mut self) -> Vec<Line> {
        self.reconnect();
        let now = Instant::now();
        let mut lines = Vec::new();
        let (allowance, ignored) = (&mut self.allowance, &mut self.ignored);
        self.clients.retain_mut(|client| {
            if client.is_mute(now) {
                return true;
            }
            let mut bytes = [0; READ_BYTES];
            match client.socket.read(&mut bytes) {
                Ok(0) => false,
                Ok(count) => {
                    let (before, known) = (*ignored, lines.len());
                    client.take(&bytes[..count], allowance, &mut lines, ignored);
                    let is_much = count == READ_BYTES || !client.reads.take();
                    if is_much || *ignored - before > (lines.len() - known + 4) as u64 {
                        client.mute_until = Some(now + MUTE);
                    }
                    true
                }
                Err(error) => {
                    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
                }
            }
        });
        lines
    }

    fn reconnect(&mut self) {
        if let Some(listener) = self.listener.as_ref().filter(|_| !self.is_closed()) {
            // Not without end: more may come while we look.
            for _ in 0..MOST_CLIENTS {
                let Ok((socket, _)) = listener.accept() else { break };
                if !self.comers.take() {
                    // Who comes again and again is not let in for a while.
                    self.closed_until = Some(Instant::now() + MUTE);
                    break;
                }
                if self.clients.len() < MOST_CLIENTS && socket.set_nonblocking(true).is_ok() {
                    self.clients.push(Client::new(socket, self.rate));
                }
            }
        }
        let Port::Connect(path) = &self.port else { return };
        if !self.clients.is_empty() || self.tried.is_some_and(|tried| tried.elapsed() < AGAIN) {
            return;
        }
        self.tried = Some(Instant::now());
        self.clients.extend(connect_at_once(path).ok().map(|it| Client::new(it, self.rate)));
    }
}

/// Connects where that needs no waiting: QEMU takes one client at a time, and the loop must
/// not stand still behind others.
fn connect_at_once(path: &Path) -> rustix::io::Result<UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

fn listen(path: &Path, user: u32) -> Result<UnixListener, QosError> {
    // Only what nobody can lose: a socket.
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        let _ = fs::remove_file(path);
    }
    let listener = bind_for(path, user).map_err(QosError::file(path))?;
    listener.set_nonblocking(true).map_err(QosError::file(path))?;
    Ok(listener)
}

/// Makes a socket that is this user's, in a folder that may be this user's too. What the user puts in its
/// place while we change its owner must not become the user's. So it is made in a folder of ours, known by
/// its descriptor, and moved into its place when it is done.
fn bind_for(path: &Path, user: u32) -> std::io::Result<UnixListener> {
    let mut own = path.as_os_str().to_owned();
    own.push(format!(".{}", std::process::id()));
    let own = PathBuf::from(own);
    fs::DirBuilder::new().mode(0o700).create(&own)?;
    let bind = || -> std::io::Result<UnixListener> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = open(&own, flags, Mode::empty())?;
        let found = fstat(&folder)?;
        if found.st_uid != rustix::process::geteuid().as_raw() || found.st_mode & 0o077 != 0 {
            return Err(std::io::Error::other("somebody put another folder in its place"));
        }
        let inside = PathBuf::from(format!("/proc/self/fd/{}/s", folder.as_raw_fd()));
        let listener = UnixListener::bind(&inside)?;
        fs::set_permissions(&inside, Permissions::from_mode(0o600))?;
        lchown(&inside, Some(user), None)?;
        // Over nothing that is there.
        renameat_with(&folder, "s", CWD, path, RenameFlags::NOREPLACE)
            .inspect_err(|_| drop(fs::remove_file(&inside)))?;
        Ok(listener)
    };
    let bound = bind();
    // Empty, of any guest.
    let _ = fs::remove_dir(&own);
    bound
}

impl Drop for Heartbeats {
    fn drop(&mut self) {
        if let Port::Listen { path, .. } = &self.port {
            let _ = fs::remove_file(path);
        }
    }
}

impl Client {
    fn new(socket: UnixStream, rate: f64) -> Self {
        let reads = Allowance::new(rate);
        Self { socket, line: Vec::new(), too_long: false, mute_until: None, reads }
    }

    fn is_mute(&self, now: Instant) -> bool {
        self.mute_until.is_some_and(|until| now < until)
    }

    fn take(
        &mut self,
        bytes: &[u8],
        allowance: &mut Allowance,
        lines: &mut Vec<Line>,
        ignored: &mut u64,
    ) {
        for byte in bytes {
            if *byte != b'\n' {
                self.too_long |= self.line.len() >= MAX_LINE;
                if !self.too_long {
                    self.line.push(*byte);
                }
                continue;
            }
            let known = (!self.too_long).then(|| Line::parse(&self.line)).flatten();
            match known.filter(|_| allowance.take()) {
                Some(line) => lines.push(line),
                None => *ignored += 1,
            }
            self.line.clear();
            self.too_long = false;
        }
    }
}

impl Allowance {
    fn new(rate: f64) -> Self {
        let rate = rate * GENEROSITY;
        Self { rate, left: rate.max(LEAST_BURST), filled: Instant::now() }
    }

    fn take(&mut self) -> bool {
        let now = Instant::now();
        let new = self.rate * (now - self.filled).as_secs_f64();
        self.filled = now;
        self.left = (self.left + new).min(self.rate.max(LEAST_BURST));
        let may = self.left >= 1.0;
        self.left -= f64::from(u8::from(may));
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dewar_beat::End;
    use proptest::prelude::*;
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;

    fn listening(rate: f64) -> (tempfile::TempDir, Heartbeats, UnixStream) {
        let folder = tempfile::tempdir().expect("tempdir");
        let path = folder.path().join("port");
        let heartbeats =
            Heartbeats::new(Port::Listen { path: path.clone(), user: 0 }, rate).expect("port");
        let socket = UnixStream::connect(&path).expect("connect");
        (folder, heartbeats, socket)
    }

    /// What an allowance gives in that time: it begins with that of a second. The time is measured, since on a
    /// busy machine the last round of a test ends late.
    fn most_taken(rate: f64, took: Duration) -> usize {
        let each_second = rate * GENEROSITY;
        (each_second + each_second * took.as_secs_f64()).ceil() as usize
    }

    fn most_silences(took: Duration) -> usize {
        took.div_duration_f64(MUTE).ceil() as usize
    }

    #[test]
    fn lines_come_in_pieces_and_nonsense_is_passed_over() {
        let (_folder, mut heartbeats, mut socket) = listening(30.0);
        socket.write_all(b"dewar 1\njob 1 m").expect("write");
        assert_eq!(heartbeats.read(), [Line::Hello { version: 1 }]);
        socket.write_all(b"et 5\n\xff\xfe\nhello\n").expect("write");
        socket.write_all(&[b'x'; 300]).expect("write");
        socket.write_all(b"\njob 2 missed\n").expect("write");
        let met = Line::Job { number: 1, end: End::Met(Duration::from_micros(5)) };
        assert_eq!(heartbeats.read(), [met, Line::Job { number: 2, end: End::Missed(None) }]);
        assert_eq!(heartbeats.ignored(), 3);
    }

    #[test]
    fn a_flood_is_not_listened_to() {
        for (flood, times) in
            [(&b"job 1 met 5\njob 2 met 5\n"[..], 1000), (&[0; 1000], 1000), (b"x", 1)]
        {
            let (began, mut heard, mut reads) = (Instant::now(), 0, 0);
            let (_folder, mut heartbeats, mut socket) = listening(30.0);
            socket.set_nonblocking(true).expect("nonblocking");
            while began.elapsed() < Duration::from_secs(1) {
                (0..times).for_each(|_| drop(socket.write(flood)));
                // As the controller does: only where there is something to wait for.
                if heartbeats.sources().len() > 1 || !heartbeats.is_connected() {
                    reads += 1;
                    heard += heartbeats.read().len();
                }
            }
            let took = began.elapsed();
            let (lines, silences) = (most_taken(30.0, took), most_silences(took));
            assert!(heard <= lines, "{heard} lines, not {lines}");
            // As many as lines, and one before each silence.
            let most = lines + silences;
            assert!(reads <= most, "{reads} reads, not {most}");
            assert!(heartbeats.is_connected());
        }
    }

    #[test]
    fn who_connects_again_and_again_is_not_let_in() {
        let (folder, mut heartbeats, mut socket) = listening(30.0);
        let path = folder.path().join("port");
        let ended = std::sync::atomic::AtomicBool::new(false);
        let is_ended = || ended.load(std::sync::atomic::Ordering::Relaxed);
        std::thread::scope(|scope| {
            let comers = [(); 2].map(|()| {
                scope.spawn(|| {
                    while !is_ended() {
                        drop(UnixStream::connect(&path));
                    }
                })
            });
            let (began, mut reads) = (Instant::now(), 0);
            while began.elapsed() < Duration::from_secs(1) {
                let waits = heartbeats.sources();
                let mut asked: Vec<_> = waits
                    .iter()
                    .map(|it| rustix::event::PollFd::new(it, rustix::event::PollFlags::IN))
                    .collect();
                let moment = rustix::event::Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
                let come = rustix::event::poll(&mut asked, Some(&moment)).is_ok_and(|it| it > 0);
                if come {
                    reads += 1;
                    heartbeats.read();
                }
            }
            let took = began.elapsed();
            ended.store(true, std::sync::atomic::Ordering::Relaxed);
            while !comers.iter().all(|comer| comer.is_finished()) {
                heartbeats.read();
            }
            // Each connection, and its end; and one before each silence.
            let most = 2 * most_taken(30.0, took) + most_silences(took);
            assert!(reads <= most, "{reads} reads, not {most}");
        });
        socket.write_all(b"job 1 met 5\n").expect("write");
        std::thread::sleep(MUTE);
        assert!((0..20).any(|_| !heartbeats.read().is_empty()));
    }

    #[test]
    fn a_socket_for_another_user_gives_away_nothing_else() {
        let folder = tempfile::tempdir().expect("tempdir");
        let (path, victim) = (folder.path().join("port"), folder.path().join("victim"));
        fs::write(&victim, "secret").expect("victim");
        fs::set_permissions(&victim, Permissions::from_mode(0o640)).expect("mode");
        let before = fs::metadata(&victim).expect("stat");
        let ended = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            // As soon as it is there it is a link to something else.
            scope.spawn(|| {
                while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                    if fs::symlink_metadata(&path).is_ok_and(|it| it.file_type().is_socket()) {
                        let _ = fs::remove_file(&path);
                        let _ = std::os::unix::fs::symlink(&victim, &path);
                    }
                }
            });
            for _ in 0..2000 {
                let _ = fs::remove_file(&path);
                let _ = listen(&path, 65534);
            }
            ended.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        let after = fs::metadata(&victim).expect("stat");
        let rights = |of: &fs::Metadata| (of.uid(), of.mode());
        assert_eq!(rights(&after), rights(&before));
        let _ = fs::remove_file(&path);
        let _listener = listen(&path, 65534).expect("listen");
        let made = fs::symlink_metadata(&path).expect("stat");
        assert_eq!((made.uid(), made.mode() & 0o777), (65534, 0o600));
        assert_eq!(fs::read_dir(folder.path()).expect("list").count(), 2);
        listen(&victim, 0).expect_err("a file that is no socket");
        assert_eq!(fs::read_to_string(&victim).expect("read"), "secret");
    }

    #[test]
    fn a_guest_that_comes_back_is_heard() {
        let folder = tempfile::tempdir().expect("tempdir");
        let path = folder.path().join("port");
        let mut heartbeats = Heartbeats::new(Port::Connect(path.clone()), 30.0).expect("port");
        assert!(!heartbeats.is_connected());
        for _ in 0..2 {
            let _ = fs::remove_file(&path);
            let listener = UnixListener::bind(&path).expect("bind");
            std::thread::sleep(AGAIN);
            heartbeats.read();
            let (mut socket, _) = listener.accept().expect("connected");
            socket.write_all(b"job 1 missed\n").expect("write");
            assert_eq!(heartbeats.read().len(), 1);
            drop((socket, listener));
            heartbeats.read();
            assert!(!heartbeats.is_connected());
        }
    }

    // Not in the crate that has the lines: what it needs for tests is built for the test guests too.
    proptest! {
        #[test]
        fn what_is_written_is_read(number: u64, micros in 0..u64::MAX / 1000, kind in 0..3) {
            let time = Duration::from_micros(micros);
            let end = match kind {
                0 => End::Met(time),
                1 => End::Missed(Some(time)),
                _ => End::Missed(None),
            };
            let line = Line::Job { number, end };
            prop_assert!(line.to_string().len() < MAX_LINE);
            prop_assert_eq!(Line::parse(line.to_string().as_bytes()), Some(line));
        }

        #[test]
        fn no_line_makes_it_panic(bytes: Vec<u8>) {
            let _ = Line::parse(&bytes);
        }
    }
}
