//! Real Redis servers and Clusters, on loopback.

use crate::process::wait_until;
use anyhow::{Context, Result, ensure};
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A server with a folder of its own; ended and removed when dropped.
#[derive(Debug)]
pub struct RedisServer {
    _folder: tempfile::TempDir,
    port: u16,
    arguments: Vec<String>,
    process: Child,
}

impl RedisServer {
    /// Starts one that keeps what it is given on disk. `arguments` are its own.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start(arguments: &[&str]) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("dwr").tempdir_in("/tmp")?;
        let port = free_port()?;
        let lasting = ["--appendonly", "yes", "--appendfsync", "always"];
        let mut all: Vec<String> = ["--bind", "127.0.0.1", "--save", ""]
            .iter()
            .chain(&lasting)
            .map(|word| (*word).to_owned())
            .collect();
        all.extend(["--port".to_owned(), port.to_string()]);
        all.extend(["--dir".to_owned(), folder.path().display().to_string()]);
        all.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        let process = spawn(&all)?;
        let server = Self { _folder: folder, port, arguments: all, process };
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
        let files = certificates.folder.path();
        let file = |name: &str| files.join(name).display().to_string();
        let server = Self::start(&[
            "--tls-port",
            &port.to_string(),
            "--tls-cert-file",
            &file("server.pem"),
            "--tls-key-file",
            &file("server.key"),
            "--tls-ca-cert-file",
            &file("authority.pem"),
            "--tls-auth-clients",
            "no",
        ])?;
        Ok((server, format!("rediss://127.0.0.1:{port}")))
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
}

/// A Cluster of three masters, without replicas.
#[derive(Debug)]
pub struct RedisCluster {
    /// Its nodes.
    pub nodes: Vec<RedisServer>,
}

impl RedisCluster {
    /// Starts one.
    ///
    /// # Errors
    /// Where it does not become one.
    pub fn start() -> Result<Self> {
        let arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"];
        let nodes = (0..3).map(|_| RedisServer::start(&arguments)).collect::<Result<Vec<_>>>()?;
        let made = Command::new("redis-cli")
            .args(["--cluster", "create"])
            .args(nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)))
            .arg("--cluster-yes")
            .stdin(Stdio::null())
            .output()
            .context("redis-cli")?;
        ensure!(made.status.success(), "redis-cli: {}", String::from_utf8_lossy(&made.stdout));
        let cluster = Self { nodes };
        cluster.wait_whole();
        Ok(cluster)
    }

    /// The store in it.
    pub fn url(&self) -> String {
        let hosts: Vec<_> =
            self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("redis://{}", hosts.join(","))
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

/// A way to a server on which every answer begins late.
#[derive(Debug)]
pub struct SlowWay {
    port: u16,
}

impl SlowWay {
    /// A way to `port`; it lasts as long as the test's process.
    ///
    /// # Errors
    /// Where no port is free.
    pub fn to(port: u16, late: Duration) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let own = listener.local_addr()?.port();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let (Ok(from), Ok(to)) = (server.try_clone(), client.try_clone()) else { continue };
                std::thread::spawn(move || copy(client, server, Duration::ZERO));
                std::thread::spawn(move || copy(from, to, late));
            }
        });
        Ok(Self { port: own })
    }

    /// The store behind it.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

/// Copies until one side ends; what comes after a silence comes late.
fn copy(mut from: TcpStream, mut to: TcpStream, late: Duration) {
    let mut bytes = vec![0; 1 << 16];
    let mut last = Instant::now();
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if last.elapsed() > Duration::from_millis(1) {
            std::thread::sleep(late);
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
        last = Instant::now();
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
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

/// A port whose neighbour 10,000 above, where a Cluster's nodes talk, exists.
fn free_port() -> Result<u16> {
    loop {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        if port < 55_000 {
            return Ok(port);
        }
    }
}
