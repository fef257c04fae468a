//! Connections to Redis, and trying again.
//!
//! What fails because the server is away, starting or changing its master is
//! tried again, later and later, for as long as the store's `retry` says. What
//! it refuses (a password, a full memory, a read-only replica) fails at once.
//! Every command that is tried again may have been done already; so each one
//! must be as good when it is done twice.

use super::connection::ServerConnection;
use crate::StoreError;
use crate::location::RedisPlace;
use redis::cluster::ClusterClientBuilder;
use redis::{ConnectionAddr, ConnectionLike, ErrorKind, RedisError, RedisResult, ServerErrorKind};
use std::error::Error;
use std::fmt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a server may take to answer: an object of 8 MiB on a slow network.
const ANSWER: Duration = Duration::from_secs(20);
/// The client of a Cluster asks so often again by itself, since a slot may have moved ...
const CLUSTER_RETRIES: u32 = 1;
/// ... also where no answer came; so all in all it takes no longer.
const CLUSTER_ANSWER: Duration =
    Duration::from_secs(ANSWER.as_secs() / (CLUSTER_RETRIES as u64 + 1));
const CONNECT: Duration = Duration::from_secs(3);
const FIRST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// A wrong host is told soon.
const FIRST_RETRY: Duration = Duration::from_secs(2);

type Connection = Box<dyn ConnectionLike + Send>;

/// Connections that are not in use; as many as threads work at a time.
pub(super) struct Pool {
    place: RedisPlace,
    url: String,
    secrets: Secrets,
    is_cluster: bool,
    idle: Mutex<Vec<Connection>>,
    /// How long what fails is tried again.
    retry: Mutex<Duration>,
}

/// Who we are, from the environment; never from a command line.
#[derive(Default)]
struct Secrets {
    username: Option<String>,
    password: Option<String>,
}

impl Pool {
    pub(super) fn connect(place: &RedisPlace) -> Result<Self, StoreError> {
        let mut pool = Self {
            place: place.clone(),
            url: place.to_string(),
            secrets: Secrets::from_environment()?,
            is_cluster: false,
            idle: Mutex::default(),
            retry: Mutex::new(place.retry),
        };
        let retry = FIRST_RETRY.min(place.retry);
        let mut ask = redis::cmd("INFO");
        ask.arg("cluster");
        let info: String =
            pool.run_within(retry, "open", "it", |connection| ask.query(connection))?;
        if info.contains("cluster_enabled:1") {
            pool.is_cluster = true;
            pool.idle = Mutex::default();
        } else if place.hosts.len() > 1 {
            // Each has its own objects: whichever answered would be taken for the store.
            let problem = "it names several hosts, and they are no Cluster".to_owned();
            return Err(StoreError::Unfit { store: pool.url, problem });
        }
        Ok(pool)
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) fn run<T>(
        &self,
        operation: &'static str,
        object: &str,
        work: impl FnMut(&mut dyn ConnectionLike) -> RedisResult<T>,
    ) -> Result<T, StoreError> {
        // It may be bounded while we try.
        self.run_while(|| *self.retry(), operation, object, work)
    }

    pub(super) fn set_patience(&self, patience: Duration) {
        *self.retry() = self.place.retry.min(patience);
    }

    fn retry(&self) -> MutexGuard<'_, Duration> {
        self.retry.lock().unwrap_or_else(|locked| locked.into_inner())
    }

    pub(super) fn run_within<T>(
        &self,
        retry: Duration,
        operation: &'static str,
        object: &str,
        work: impl FnMut(&mut dyn ConnectionLike) -> RedisResult<T>,
    ) -> Result<T, StoreError> {
        self.run_while(|| retry, operation, object, work)
    }

    fn run_while<T>(
        &self,
        retry: impl Fn() -> Duration,
        operation: &'static str,
        object: &str,
        mut work: impl FnMut(&mut dyn ConnectionLike) -> RedisResult<T>,
    ) -> Result<T, StoreError> {
        let (began, mut wait) = (Instant::now(), FIRST_WAIT);
        loop {
            let result = self.take().and_then(|mut connection| {
                let result = work(&mut *connection);
                match result.as_ref().is_err_and(is_broken) {
                    // What broke it has most likely broken the idle ones too; those
                    // to a Cluster find its other nodes by themselves.
                    true if !self.is_cluster => self.idle().clear(),
                    true => {}
                    false => self.idle().push(connection),
                }
                result
            });
            match result {
                Err(error) if is_passing(&error) && began.elapsed() + wait < retry() => {
                    std::thread::sleep(wait);
                    wait = (wait * 2).min(LONGEST_WAIT);
                }
                Err(error) => {
                    let is_full = error.code() == Some("OOM");
                    return Err(self.failure(operation, object, is_full, Refusal(error)));
                }
                Ok(value) => return Ok(value),
            }
        }
    }

    pub(super) fn error(
        &self,
        operation: &'static str,
        object: &str,
        cause: &'static str,
    ) -> StoreError {
        self.failure(operation, object, false, cause)
    }

    fn failure(
        &self,
        operation: &'static str,
        object: &str,
        is_full: bool,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> StoreError {
        let (object, store) = (object.to_owned(), self.url.clone());
        StoreError::Server { operation, object, store, is_full, cause: cause.into() }
    }

    fn take(&self) -> RedisResult<Connection> {
        let idle = self.idle().pop();
        match idle {
            Some(connection) => Ok(connection),
            None if self.is_cluster => self.connect_cluster(),
            None => self.connect_any(),
        }
    }

    /// To the first host that answers.
    fn connect_any(&self) -> RedisResult<Connection> {
        let mut failure = None;
        for (host, port) in &self.place.hosts {
            match self.connect_server(host, *port) {
                Ok(connection) => return Ok(connection),
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or_else(|| (ErrorKind::InvalidClientConfig, "no host").into()))
    }

    fn connect_server(&self, host: &str, port: u16) -> RedisResult<Connection> {
        let database = i64::from(self.place.database);
        let (name, password) = (&self.secrets.username, &self.secrets.password);
        let credentials = password.as_deref().map(|password| (name.as_deref(), password));
        let times = [CONNECT, ANSWER];
        let is_tls = self.place.tls;
        Ok(Box::new(ServerConnection::connect(host, port, is_tls, database, credentials, times)?))
    }

    fn connect_cluster(&self) -> RedisResult<Connection> {
        let nodes = self.place.hosts.iter().map(|(host, port)| self.address(host, *port));
        let mut builder = ClusterClientBuilder::new(nodes)
            .connection_timeout(CONNECT)
            .response_timeout(CLUSTER_ANSWER)
            .retries(CLUSTER_RETRIES);
        if let Some(name) = &self.secrets.username {
            builder = builder.username(name);
        }
        if let Some(password) = &self.secrets.password {
            builder = builder.password(password);
        }
        // The library knows who has what; each node is spoken to as a single server is.
        let connection = builder.build()?.get_generic_connection::<ServerConnection>()?;
        connection.set_read_timeout(Some(CLUSTER_ANSWER))?;
        connection.set_write_timeout(Some(CLUSTER_ANSWER))?;
        Ok(Box::new(connection))
    }

    fn address(&self, host: &str, port: u16) -> ConnectionAddr {
        let host = host.to_owned();
        match self.place.tls {
            true => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
            false => ConnectionAddr::Tcp(host, port),
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(|locked| locked.into_inner())
    }
}

impl Secrets {
    fn from_environment() -> Result<Self, StoreError> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let from_file = match variable("DEWAR_REDIS_PASSWORD_FILE") {
            Some(path) => {
                let path = Path::new(&path);
                let bytes = std::fs::read(path).map_err(StoreError::io("read", path))?;
                Some(String::from_utf8_lossy(&bytes).trim_end().to_owned())
            }
            None => None,
        };
        Ok(Self {
            username: variable("DEWAR_REDIS_USERNAME"),
            password: variable("DEWAR_REDIS_PASSWORD").or(from_file),
        })
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the secrets.
        f.debug_struct("Pool").field("url", &self.url).finish_non_exhaustive()
    }
}

/// Whether a connection is of no more use after an error.
fn is_broken(error: &RedisError) -> bool {
    // An answer that is still under way would be taken for the next one's.
    !matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension)
}

/// Whether an error may be gone in a while.
fn is_passing(error: &RedisError) -> bool {
    use ServerErrorKind::{Ask, BusyLoading, ClusterDown, MasterDown, Moved, TryAgain};
    match error.kind() {
        ErrorKind::Io | ErrorKind::ClusterConnectionNotFound => true,
        ErrorKind::Server(kind) => {
            matches!(kind, Ask | BusyLoading | ClusterDown | MasterDown | Moved | TryAgain)
        }
        ErrorKind::Parse => error.is_connection_dropped(),
        _ => false,
    }
}

/// What a server refused with, and what that means.
#[derive(Debug)]
struct Refusal(RedisError);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match meaning(&self.0) {
            Some(plain) => write!(f, "{plain}: {}", self.0),
            None => self.0.fmt(f),
        }
    }
}

impl Error for Refusal {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.0)
    }
}

fn meaning(error: &RedisError) -> Option<&'static str> {
    Some(match (error.kind(), error.code()) {
        (_, Some("OOM")) => "it is full (its maxmemory is reached)",
        (_, Some("MISCONF")) => "it cannot save to its own disk and takes no more",
        (_, Some("WRONGPASS" | "NOAUTH")) | (ErrorKind::AuthenticationFailed, _) => {
            "it refused the credentials (DEWAR_REDIS_USERNAME, DEWAR_REDIS_PASSWORD)"
        }
        (ErrorKind::Server(ServerErrorKind::ReadOnly), _) => "it is a read-only replica",
        (ErrorKind::Server(ServerErrorKind::NoPerm), _) => "its user has not the right to",
        (ErrorKind::Server(ServerErrorKind::ClusterDown), _) => "a part of the Cluster is down",
        (ErrorKind::ClusterConnectionNotFound, _) => "a node of the Cluster cannot be reached",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Location;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// A node of a Cluster that never ends telling who has what.
    #[test]
    fn a_nodes_answer_without_end_ends() {
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = server.local_addr().expect("its address").port();
        std::thread::spawn(move || {
            for mut peer in server.incoming().flatten() {
                std::thread::spawn(move || {
                    let mut asked = [0; 256];
                    while let Ok(bytes @ 1..) = peer.read(&mut asked) {
                        let asked = String::from_utf8_lossy(&asked[..bytes]);
                        let _ = match &asked {
                            asked if asked.contains("INFO") => {
                                peer.write_all(b"$17\r\ncluster_enabled:1\r\n")
                            }
                            asked if asked.contains("SLOTS") => {
                                let _ = peer.write_all(b"*2000000000\r\n");
                                while peer.write_all(&b":1\r\n".repeat(1 << 12)).is_ok() {}
                                Ok(())
                            }
                            _ => peer.write_all(b"+PONG\r\n"),
                        };
                    }
                });
            }
        });
        let url = format!("redis://127.0.0.1:{port}?retry=1s");
        let Ok(Location::Redis(place)) = Location::parse(&url) else { panic!("{url}") };
        let pool = Pool::connect(&place).expect("it answers");
        let began = Instant::now();
        let ask = redis::cmd("PING");
        let error = pool.run("read", "it", |connection| ask.query::<String>(connection));
        error.expect_err("an answer without end");
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    }
}
