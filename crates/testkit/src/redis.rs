//! Real Redis servers and Clusters, on loopback.

use crate::process::wait_until;
use anyhow::{Context, Result, ensure};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A server with a folder of its own; ended and removed when dropped.
#[derive(Debug)]
pub struct RedisServer {
    _folder: tempfile::TempDir,
    port: u16,
    arguments: Vec<String>,
    /// What `redis-cli` needs to be let in.
    asking: Vec<String>,
    process: Child,
}

impl RedisServer {
    /// Starts one that keeps what it is given on disk. `arguments` are its own.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start(arguments: &[&str]) -> Result<Self> {
        let port = free_port()?;
        let listening = ["--port".to_owned(), port.to_string()];
        Self::start_at(port, listening.into_iter().chain(owned(arguments)), Vec::new())
    }

    fn start_at(
        port: u16,
        arguments: impl Iterator<Item = String>,
        asking: Vec<String>,
    ) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("dwr").tempdir_in("/tmp")?;
        let lasting = ["--appendonly", "yes", "--appendfsync", "always"];
        let mut all: Vec<String> = owned(&["--bind", "127.0.0.1", "--save", ""]).collect();
        all.extend(owned(&lasting));
        all.extend(["--dir".to_owned(), folder.path().display().to_string()]);
        all.extend(arguments);
        let process = spawn(&all)?;
        let server = Self { _folder: folder, port, arguments: all, asking, process };
        server.wait_ready();
        Ok(server)
    }

    /// Starts one that also speaks TLS; returns the store in it,
    /// too.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start_tls(certificates: &Certificates) -> Result<(Self, String)> {
        let port = free_port()?;
        let serving = certificates.serving(port);
        let serving: Vec<&str> = serving.iter().map(String::as_str).collect();
        Ok((Self::start(&serving)?, format!("rediss://127.0.0.1:{port}")))
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The store in it.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Ends it as a crash would.
    ///
    /// # Errors
    /// Where it cannot be ended.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    /// Starts it again, with what it had on disk.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start_again(&mut self) -> Result<()> {
        self.process = spawn(&self.arguments)?;
        self.wait_ready();
        Ok(())
    }

    /// Asks it something with `redis-cli`.
    ///
    /// # Errors
    /// Where there is no such program.
    pub fn ask(&self, words: &[&str]) -> Result<String> {
        let port = self.port.to_string();
        let output = Command::new("redis-cli")
            .args(["-h", "127.0.0.1", "-p", &port])
            .args(&self.asking)
            .args(words)
            .output()
            .context("redis-cli")?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn wait_ready(&self) {
        wait_until("a Redis server", Duration::from_secs(20), || {
            // One that wants a password is ready too.
            let said = self.ask(&["ping"]).unwrap_or_default();
            said == "PONG" || said.contains("NOAUTH")
        });
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// A certificate for a server on loopback, and the authority that signed it.
#[derive(Debug)]
pub struct Certificates {
    folder: tempfile::TempDir,
}

impl Certificates {
    /// Makes fresh ones.
    ///
    /// # Errors
    /// Where they cannot be written.
    pub fn make() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("dwc").tempdir_in("/tmp")?;
        let authority_key = KeyPair::generate()?;
        let mut authority = CertificateParams::new(Vec::new())?;
        authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // By the name that both would have OpenSSL takes the other for signed by itself.
        authority.distinguished_name.push(DnType::CommonName, "authority");
        let authority = authority.self_signed(&authority_key)?;
        let key = KeyPair::generate()?;
        let names = vec!["127.0.0.1".to_owned()];
        let server = CertificateParams::new(names)?.signed_by(&key, &authority, &authority_key)?;
        let put = |name: &str, text: String| std::fs::write(folder.path().join(name), text);
        put("authority.pem", authority.pem())?;
        put("server.pem", server.pem())?;
        put("server.key", key.serialize_pem())?;
        Ok(Self { folder })
    }

    /// The authority's certificate (PEM).
    pub fn authority(&self) -> std::path::PathBuf {
        self.folder.path().join("authority.pem")
    }

    /// How a server is told of them.
    fn serving(&self, port: u16) -> Vec<String> {
        let file = |name: &str| self.folder.path().join(name).display().to_string();
        let [certificate, key, authority] = ["server.pem", "server.key", "authority.pem"].map(file);
        let mut words: Vec<String> =
            owned(&["--tls-auth-clients", "no", "--tls-cert-file", &certificate]).collect();
        words.extend(owned(&["--tls-key-file", &key, "--tls-ca-cert-file", &authority]));
        words.extend(["--tls-port".to_owned(), port.to_string()]);
        words
    }
}

/// A Cluster of three masters, without replicas.
#[derive(Debug)]
pub struct RedisCluster {
    /// Its nodes.
    pub nodes: Vec<RedisServer>,
    scheme: &'static str,
}

const NODE: [&str; 4] = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"];

impl RedisCluster {
    /// Starts one.
    ///
    /// # Errors
    /// Where it does not become one.
    pub fn start() -> Result<Self> {
        Self::join("redis", || RedisServer::start(&NODE))
    }

    /// Starts one that speaks only TLS, also among its nodes, and wants a password.
    ///
    /// # Errors
    /// Where it does not become one.
    pub fn start_locked(certificates: &Certificates, password: &str) -> Result<Self> {
        let authority = certificates.authority().display().to_string();
        Self::join("rediss", || {
            let port = free_port()?;
            let alone = ["--port", "0", "--tls-cluster", "yes", "--requirepass", password];
            let arguments = owned(&NODE).chain(owned(&alone)).chain(certificates.serving(port));
            let asking = ["--tls", "--cacert", &authority, "-a", password, "--no-auth-warning"];
            RedisServer::start_at(port, arguments, owned(&asking).collect())
        })
    }

    fn join(scheme: &'static str, start: impl Fn() -> Result<RedisServer>) -> Result<Self> {
        let nodes = (0..3).map(|_| start()).collect::<Result<Vec<_>>>()?;
        let made = Command::new("redis-cli")
            .args(&nodes[0].asking)
            .args(["--cluster", "create"])
            .args(nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)))
            .arg("--cluster-yes")
            .stdin(Stdio::null())
            .output()
            .context("redis-cli")?;
        ensure!(made.status.success(), "redis-cli: {}", String::from_utf8_lossy(&made.stdout));
        let cluster = Self { nodes, scheme };
        cluster.wait_whole();
        Ok(cluster)
    }

    /// The store in it.
    pub fn url(&self) -> String {
        let hosts: Vec<_> =
            self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("{}://{}", self.scheme, hosts.join(","))
    }

    /// Waits until a node knows that another is away.
    pub fn wait_broken(&self, node: usize) {
        wait_until("a broken Cluster", Duration::from_secs(30), || {
            let info = self.nodes[node].ask(&["cluster", "info"]).unwrap_or_default();
            info.contains("cluster_state:fail")
        });
    }

    /// Waits until every node thinks that all is well.
    pub fn wait_whole(&self) {
        wait_until("a whole Cluster", Duration::from_secs(30), || {
            self.nodes.iter().all(|node| {
                node.ask(&["cluster", "info"]).unwrap_or_default().contains("cluster_state:ok")
            })
        });
    }
}

/// A way to a server on which every answer begins late, and that can stop.
#[derive(Debug)]
pub struct SlowWay {
    port: u16,
    /// How many bytes of answers it still lets through.
    left: Arc<AtomicU64>,
}

impl SlowWay {
    /// A way to `port`; it lasts as long as the test's process.
    ///
    /// # Errors
    /// Where no port is free.
    pub fn to(port: u16, late: Duration) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let own = listener.local_addr()?.port();
        let left = Arc::new(AtomicU64::new(u64::MAX));
        let way = Self { port: own, left: left.clone() };
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let (Ok(from), Ok(to)) = (server.try_clone(), client.try_clone()) else { continue };
                let left = left.clone();
                let all = AtomicU64::new(u64::MAX);
                std::thread::spawn(move || copy(client, server, Duration::ZERO, &all));
                std::thread::spawn(move || copy(from, to, late, &left));
            }
        });
        Ok(way)
    }

    /// Lets so many more bytes of answers through, and then none.
    pub fn stop_after(&self, bytes: u64) {
        self.left.store(bytes, Ordering::Relaxed);
    }

    /// The store behind it.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

/// Copies until one side ends, while bytes are `left`; what comes after a silence comes late.
fn copy(mut from: TcpStream, mut to: TcpStream, late: Duration, left: &AtomicU64) {
    let mut bytes = vec![0; 1 << 16];
    let mut last = Instant::now();
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if last.elapsed() > Duration::from_millis(1) {
            std::thread::sleep(late);
        }
        let after = |left: u64| left.checked_sub(count as u64);
        while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after).is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
        last = Instant::now();
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

fn owned<'w>(words: &'w [&str]) -> impl Iterator<Item = String> + 'w {
    words.iter().map(|word| (*word).to_owned())
}

/// The server, or what Debian's `redis-tools` has: the same program, which goes
/// by what it is called.
fn spawn(arguments: &[String]) -> Result<Child> {
    let start = |program: &str| {
        Command::new(program)
            .arg0("redis-server")
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
    };
    start("redis-server").or_else(|_| start("redis-check-rdb")).context("redis-server")
}

/// A port that nobody has, and that the kernel gives to nobody: below those of outgoing
/// connections (`net.ipv4.ip_local_port_range`), at a place of this test process's own.
/// A Cluster's nodes talk on the port 10,000 above it, which is free too.
///
/// # Errors
/// Where no port is free.
pub fn free_port() -> Result<u16> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id().wrapping_mul(97) as u16;
    for _ in 0..PORTS {
        let place = first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % PORTS;
        let port = FIRST_PORT + place;
        let is_free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if is_free(port) && is_free(port + 10_000) {
            return Ok(port);
        }
    }
    anyhow::bail!("no port from {FIRST_PORT} on is free")
}

const FIRST_PORT: u16 = 12_000;
const PORTS: u16 = 9_000;
