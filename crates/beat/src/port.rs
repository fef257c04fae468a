use crate::{Line, VERSION};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The name of the virtio-serial port in a VM.
pub const PORT_NAME: &str = "org.dewar.qos.0";
/// The variable that names a port elsewhere.
const VARIABLE: &str = "DEWAR_BEAT";
/// How often a port that is not there is looked for again.
const AGAIN: Duration = Duration::from_millis(200);
/// `open(2)`, the same on all of Linux that Rust's standard library runs on but
/// MIPS and SPARC.
const O_NONBLOCK: i32 = 0o4000;

/// The way out of a guest. It never blocks and never fails: what cannot be
/// written is lost, and a port that is gone is looked for again.
#[derive(Debug)]
pub struct Beat {
    place: Option<PathBuf>,
    port: Option<Port>,
    tried: Option<Instant>,
    rate: Option<f64>,
    lost: u64,
}

#[derive(Debug)]
enum Port {
    Device(File),
    Socket(UnixStream),
}

impl Beat {
    /// The port that the environment names as `DEWAR_BEAT`, or a VM's
    /// virtio-serial port.
    pub fn open() -> Self {
        Self::new(std::env::var_os(VARIABLE).map(PathBuf::from))
    }

    /// A port by its path: a character device or a unix socket.
    pub fn open_at(path: impl Into<PathBuf>) -> Self {
        Self::new(Some(path.into()))
    }

    fn new(place: Option<PathBuf>) -> Self {
        let mut beat = Self { place, port: None, tried: None, rate: None, lost: 0 };
        beat.connect();
        beat
    }

    /// Whether there is somebody to tell.
    pub fn is_connected(&self) -> bool {
        self.port.is_some()
    }

    /// How many lines were lost.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Tells how many jobs there are in a second.
    pub fn rate(&mut self, rate: f64) {
        self.rate = Some(rate);
        self.say(&Line::Rate(rate));
    }

    /// Tells a line, if it can be done at once.
    pub fn say(&mut self, line: &Line) {
        if self.port.is_none() && self.tried.is_none_or(|tried| tried.elapsed() > AGAIN) {
            self.connect();
        }
        let Some(port) = &mut self.port else {
            self.lost += 1;
            return;
        };
        let text = format!("{line}\n");
        match port.write(text.as_bytes()) {
            Ok(written) if written == text.len() => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.lost += 1,
            // Half a line, or nobody there.
            _ => {
                self.lost += 1;
                self.port = None;
            }
        }
    }

    fn connect(&mut self) {
        self.tried = Some(Instant::now());
        let place = self.place.clone().or_else(virtio_port);
        self.port = place.and_then(|path| Port::open(&path).ok());
        let hello = Line::Hello { version: VERSION }.to_string();
        let rate = self.rate.map(|rate| format!("{}\n", Line::Rate(rate)));
        let greeting = format!("{hello}\n{}", rate.unwrap_or_default());
        let port = self.port.as_mut();
        if port.is_some_and(|port| port.write(greeting.as_bytes()).is_err()) {
            self.port = None;
        }
    }
}

impl Port {
    fn open(path: &Path) -> io::Result<Self> {
        if fs::metadata(path)?.file_type().is_socket() {
            let socket = UnixStream::connect(path)?;
            socket.set_nonblocking(true)?;
            return Ok(Self::Socket(socket));
        }
        let device = OpenOptions::new().write(true).custom_flags(O_NONBLOCK).open(path)?;
        Ok(Self::Device(device))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Device(file) => file.write(bytes),
            Self::Socket(socket) => socket.write(bytes),
        }
    }
}

/// The device of the port by [`PORT_NAME`]: udev makes a link; without udev the
/// kernel tells its number.
fn virtio_port() -> Option<PathBuf> {
    let linked = Path::new("/dev/virtio-ports").join(PORT_NAME);
    if linked.exists() {
        return Some(linked);
    }
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?.flatten();
    let ours = ports.into_iter().find(|port| {
        fs::read_to_string(port.path().join("name")).is_ok_and(|name| name.trim() == PORT_NAME)
    })?;
    Some(Path::new("/dev").join(ours.file_name()))
}
