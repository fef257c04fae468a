//! The way to a server: TCP, or TLS over it.
//!
//! A server must not hold a command for ever. A timeout of the kernel does not see to that, as
//! it begins anew with each byte; nor does one above TLS, since a server could let the bytes of
//! a single record drip for days. So [`Socket`], below TLS, keeps the time: what is sent for a
//! command, and the answer to it, may each take as long as the server may take to begin, and
//! then [`SLOWEST`].

use redis::{ErrorKind, RedisError, RedisResult};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes a second, at least.
const SLOWEST: u64 = 64 << 10;
/// Names a file with the certificate (PEM) of the authority that signed the server's, where the
/// system does not know it.
const AUTHORITY: &str = "DEWAR_REDIS_CA_FILE";

/// Bytes of the protocol, both ways.
pub(super) enum Wire {
    Plain(Socket),
    Tls(Box<StreamOwned<ClientConnection, Socket>>),
}

/// A TCP connection on which everything ends in time.
pub(super) struct Socket {
    stream: TcpStream,
    /// How long the server may take to begin.
    patience: Cell<Duration>,
    began: Instant,
    /// Bytes that went either way since then.
    moved: u64,
}

impl Wire {
    /// Connects to `address`, where `host` is; over TLS if it is given.
    pub(super) fn connect(
        address: &SocketAddr,
        host: &str,
        tls: Option<&Arc<ClientConfig>>,
        patience: Duration,
    ) -> RedisResult<Self> {
        let stream = TcpStream::connect_timeout(address, patience)?;
        stream.set_nodelay(true)?;
        let patience = Cell::new(patience);
        let socket = Socket { stream, patience, began: Instant::now(), moved: 0 };
        socket.set_read_timeout(socket.patience.get())?;
        socket.set_write_timeout(socket.patience.get())?;
        let Some(tls) = tls else { return Ok(Self::Plain(socket)) };
        let name = ServerName::try_from(host.to_owned()).map_err(unfit)?;
        let client = ClientConnection::new(Arc::clone(tls), name).map_err(unfit)?;
        let mut tls = StreamOwned::new(client, socket);
        // The handshake: an unknown certificate is told here.
        while tls.conn.is_handshaking() {
            tls.conn.complete_io(&mut tls.sock)?;
        }
        Ok(Self::Tls(Box::new(tls)))
    }

    pub(super) fn socket(&self) -> &Socket {
        match self {
            Self::Plain(socket) => socket,
            Self::Tls(tls) => &tls.sock,
        }
    }

    /// The time of a command, or of its answer, begins.
    pub(super) fn begin(&mut self) {
        let socket = match self {
            Self::Plain(socket) => socket,
            Self::Tls(tls) => &mut tls.sock,
        };
        (socket.began, socket.moved) = (Instant::now(), 0);
    }
}

impl Read for Wire {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.read(buffer),
            Self::Tls(tls) => tls.read(buffer),
        }
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::Plain(socket) => socket.write(bytes),
            Self::Tls(tls) => tls.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match self {
            Self::Plain(socket) => socket.flush(),
            Self::Tls(tls) => tls.flush(),
        }
    }
}

impl Socket {
    /// How long an answer may take to begin.
    pub(super) fn set_read_timeout(&self, time: Duration) -> std::io::Result<()> {
        self.patience.set(time);
        self.stream.set_read_timeout(Some(time))
    }

    /// How long the server may take nothing.
    pub(super) fn set_write_timeout(&self, time: Duration) -> std::io::Result<()> {
        self.stream.set_write_timeout(Some(time))
    }

    /// Whether nobody has reported an error of it yet.
    pub(super) fn is_well(&self) -> bool {
        self.stream.take_error().is_ok_and(|error| error.is_none())
    }

    fn count(&mut self, bytes: usize) -> std::io::Result<usize> {
        self.moved += bytes as u64;
        let allowed = self.patience.get() + Duration::from_secs(self.moved / SLOWEST);
        match self.began.elapsed() > allowed {
            true => Err(std::io::ErrorKind::TimedOut.into()),
            false => Ok(bytes),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let bytes = self.stream.read(buffer)?;
        self.count(bytes)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.stream.write(bytes)?;
        self.count(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.flush()
    }
}

/// TLS with servers whose certificate was signed by the authority that the environment names,
/// or else by one that the system trusts.
pub(super) fn tls_of_environment() -> RedisResult<Arc<ClientConfig>> {
    let mut roots = RootCertStore::empty();
    let file = std::env::var_os(AUTHORITY).filter(|file| !file.is_empty()).map(PathBuf::from);
    match file {
        Some(file) => {
            let unfit = |why: &dyn std::fmt::Display| {
                unfit(format!("{AUTHORITY}, {}: {why}", file.display()))
            };
            let pem = std::fs::read(&file).map_err(|error| unfit(&error))?;
            for certificate in CertificateDer::pem_slice_iter(&pem) {
                let certificate = certificate.map_err(|error| unfit(&error))?;
                roots.add(certificate).map_err(|error| unfit(&error))?;
            }
            if roots.is_empty() {
                return Err(unfit(&"there is no certificate in it"));
            }
        }
        // Without those that are of no use; the handshake tells where none fits.
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(unfit)?;
    Ok(Arc::new(config.with_root_certificates(roots).with_no_client_auth()))
}

/// What does not get better by trying again.
fn unfit(why: impl std::fmt::Display) -> RedisError {
    (ErrorKind::InvalidClientConfig, "TLS is not possible", why.to_string()).into()
}
