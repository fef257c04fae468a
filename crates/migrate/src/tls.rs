//! Direct connections between the two hosts: TLS 1.3, each side known to the other by the very certificate
//! that it named on the control connection.
//!
//! Both sides make a key and a certificate for one migration, and forget them with it. The destination
//! listens from the offer until all connections have come, and takes only those that prove the source's key
//! and greet with the migration's session.

use crate::MigrateError;
use crate::frames::{FrameReader, FrameWriter};
use dewar_wire::frame::{Kind, Side};
use dewar_wire::hello::{Features, Hello};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use rustix::net::sockopt;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, DistinguishedName, ServerConfig,
    ServerConnection, SignatureScheme, StreamOwned,
};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// The name in the certificates; nobody looks at it.
const NAME: &str = "dewar";
/// How long a connection may take until its greeting is heard.
const GREETS_WITHIN: Duration = Duration::from_secs(10);
/// When a connection counts as lost on which nothing is acknowledged.
const GONE_AFTER: Duration = Duration::from_secs(20);
/// Strangers that are heard at once, at most.
const MOST_STRANGERS: usize = 16;
const POLL: Duration = Duration::from_millis(10);

/// What a side proves its identity by, for one migration.
pub struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivatePkcs8KeyDer<'static>,
}

impl Identity {
    /// A new one.
    ///
    /// # Errors
    /// Where no key can be made.
    pub fn new() -> Result<Self, MigrateError> {
        let CertifiedKey { cert, key_pair } = generate_simple_self_signed([NAME.to_owned()])
            .map_err(|error| MigrateError::Tls(error.to_string()))?;
        let key = PrivatePkcs8KeyDer::from(key_pair.serialize_der());
        Ok(Self { certificate: cert.der().clone(), key })
    }

    /// Its certificate, as the other side is to be told of it: DER in hexadecimal digits.
    pub fn certificate(&self) -> String {
        self.certificate.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// Takes one certificate and no other.
#[derive(Debug)]
struct Pinned {
    certificate: CertificateDer<'static>,
    provider: CryptoProvider,
}

impl Pinned {
    fn new(certificate: &str) -> Result<Self, MigrateError> {
        let digits = certificate.as_bytes();
        let byte = |pair: &[u8]| {
            let text = std::str::from_utf8(pair).ok()?;
            u8::from_str_radix(text, 16).ok().filter(|_| pair.len() == 2)
        };
        let bytes: Option<Vec<u8>> = digits.chunks(2).map(byte).collect();
        let bytes = bytes.ok_or_else(|| MigrateError::Tls("no certificate".to_owned()))?;
        Ok(Self { certificate: bytes.into(), provider: ring::default_provider() })
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        match *certificate == self.certificate {
            true => Ok(()),
            false => Err(rustls::Error::General("it is another than was named".to_owned())),
        }
    }

    fn signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn only_tls13<T>() -> Result<T, rustls::Error> {
    Err(rustls::Error::General("TLS 1.3 only".to_owned()))
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(certificate).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        only_tls13()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for Pinned {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(certificate).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        only_tls13()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

fn tls(error: impl std::fmt::Display) -> MigrateError {
    MigrateError::Tls(error.to_string())
}

/// The source's end of a direct connection. Dropped, it says that it is over.
pub struct DirectWriter(StreamOwned<ClientConnection, TcpStream>);

impl Write for DirectWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Drop for DirectWriter {
    fn drop(&mut self) {
        self.0.conn.send_close_notify();
        let _ = self.0.flush();
    }
}

/// The destination's end of a direct connection.
pub struct DirectReader(StreamOwned<ServerConnection, TcpStream>);

impl Read for DirectReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

/// Makes the connections of a migration to a destination that listens at one of `addresses`.
///
/// # Errors
/// Where it is not reached, or is another than the one that has `certificate`.
pub fn connect(
    addresses: &[(String, u16)],
    ours: &Identity,
    certificate: &str,
    session: u64,
    connections: u16,
) -> Result<Vec<FrameWriter<DirectWriter>>, MigrateError> {
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(tls)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Pinned::new(certificate)?))
        .with_client_auth_cert(vec![ours.certificate.clone()], ours.key.clone_key().into())
        .map_err(tls)?;
    let config = Arc::new(config);
    let one = |shard: u16| -> Result<FrameWriter<DirectWriter>, MigrateError> {
        let failed = |cause| MigrateError::Link { operation: "making", shard, cause };
        let stream = reach(addresses).map_err(failed)?;
        fail_in_time(&stream).map_err(failed)?;
        let name = ServerName::try_from(NAME).map_err(tls)?;
        let mut connection = ClientConnection::new(Arc::clone(&config), name).map_err(tls)?;
        let mut stream = stream;
        within(&stream, GREETS_WITHIN).map_err(failed)?;
        connection.complete_io(&mut stream).map_err(failed)?;
        within(&stream, Duration::ZERO).map_err(failed)?;
        let link = DirectWriter(StreamOwned::new(connection, stream));
        let mut writer = FrameWriter::new(link, session, shard, Side::Source);
        writer.send(Kind::Hello, &Hello::ours(Features::none()).bytes())?;
        Ok(writer)
    };
    (0..connections).map(one).collect()
}

fn reach(addresses: &[(String, u16)]) -> io::Result<TcpStream> {
    let mut last = io::Error::other("it has no address");
    for (host, port) in addresses {
        let found = match (host.as_str(), *port).to_socket_addrs() {
            Ok(found) => found,
            Err(error) => {
                last = error;
                continue;
            }
        };
        for address in found {
            match TcpStream::connect_timeout(&address, GREETS_WITHIN) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = io::Error::new(error.kind(), format!("{address}: {error}")),
            }
        }
    }
    Err(last)
}

/// Makes a connection whose other end is gone, or takes nothing any more, fail in time (tcp(7)).
fn fail_in_time(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_tcp_user_timeout(stream, GONE_AFTER.as_millis() as u32)?;
    sockopt::set_tcp_keepidle(stream, GONE_AFTER / 2)?;
    sockopt::set_tcp_keepintvl(stream, GONE_AFTER / 4)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}

/// How long a call on the stream may take; without end where that is zero.
fn within(stream: &TcpStream, time: Duration) -> io::Result<()> {
    let time = (!time.is_zero()).then_some(time);
    stream.set_read_timeout(time)?;
    stream.set_write_timeout(time)
}

/// A port that is open for one migration, to who has its key. Dropped, it is closed.
pub struct DirectListener {
    port: u16,
    come: Receiver<FrameReader<DirectReader>>,
    is_over: Arc<AtomicBool>,
}

impl DirectListener {
    /// Listens for the source that has `certificate`, for connections of that migration.
    ///
    /// # Errors
    /// Where no port can be had.
    pub fn new(ours: &Identity, certificate: &str, session: u64) -> Result<Self, MigrateError> {
        let failed = |cause| MigrateError::Link { operation: "listening for", shard: 0, cause };
        let provider = Arc::new(ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(tls)?
            .with_client_cert_verifier(Arc::new(Pinned::new(certificate)?))
            .with_single_cert(vec![ours.certificate.clone()], ours.key.clone_key().into())
            .map_err(tls)?;
        let listener = TcpListener::bind("[::]:0")
            .or_else(|_| TcpListener::bind("0.0.0.0:0"))
            .map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        listener.set_nonblocking(true).map_err(failed)?;
        let (sender, come) = channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&is_over);
        let config = Arc::new(config);
        std::thread::spawn(move || accept_all(&listener, &config, session, &sender, &stop));
        Ok(Self { port, come, is_over })
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// All connections, in order; the port is closed then.
    ///
    /// # Errors
    /// Where they have not all come in time.
    pub fn connections(self, count: u16) -> Result<Vec<FrameReader<DirectReader>>, MigrateError> {
        let deadline = Instant::now() + GREETS_WITHIN;
        let mut come: Vec<Option<FrameReader<DirectReader>>> = (0..count).map(|_| None).collect();
        while let Some(missing) = come.iter().position(Option::is_none) {
            match self.come.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(reader) => {
                    let place = come.get_mut(usize::from(reader.shard()));
                    place.filter(|place| place.is_none()).map(|place| place.replace(reader));
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return Err(MigrateError::Ended(missing as u16));
                }
            }
        }
        Ok(come.into_iter().flatten().collect())
    }
}

impl Drop for DirectListener {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// Hears everybody who connects, each on a thread, until the migration has all that it wants.
fn accept_all(
    listener: &TcpListener,
    config: &Arc<ServerConfig>,
    session: u64,
    sender: &Sender<FrameReader<DirectReader>>,
    stop: &AtomicBool,
) {
    let strangers = Arc::new(AtomicUsize::new(0));
    while !stop.load(Ordering::Relaxed) {
        let Ok((stream, _)) = listener.accept() else {
            std::thread::sleep(POLL);
            continue;
        };
        if strangers.load(Ordering::Relaxed) >= MOST_STRANGERS {
            continue;
        }
        strangers.fetch_add(1, Ordering::Relaxed);
        let (config, sender) = (Arc::clone(config), sender.clone());
        let strangers = Arc::clone(&strangers);
        std::thread::spawn(move || {
            // A stranger is not answered.
            if let Ok(reader) = greeted(stream, config) {
                if reader.session() == session {
                    let _ = sender.send(reader);
                }
            }
            strangers.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

fn greeted(
    mut stream: TcpStream,
    config: Arc<ServerConfig>,
) -> Result<FrameReader<DirectReader>, MigrateError> {
    let failed = |cause| MigrateError::Link { operation: "greeting", shard: 0, cause };
    stream.set_nonblocking(false).map_err(failed)?;
    fail_in_time(&stream).map_err(failed)?;
    within(&stream, GREETS_WITHIN).map_err(failed)?;
    let mut connection = ServerConnection::new(config).map_err(tls)?;
    connection.complete_io(&mut stream).map_err(failed)?;
    let link = DirectReader(StreamOwned::new(connection, stream));
    let (reader, _) = FrameReader::greeted(link, Side::Source)?;
    within(&reader.inner().0.sock, Duration::ZERO).map_err(failed)?;
    Ok(reader)
}
