use crate::StoreError;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

const REDIS_PORT: u16 = 6379;
const PREFIX: &str = "dewar";
const RETRY: Duration = Duration::from_secs(30);
const CREDENTIALS: &str = "credentials do not belong on a command line: set DEWAR_REDIS_USERNAME \
                           and DEWAR_REDIS_PASSWORD, or DEWAR_REDIS_PASSWORD_FILE";

/// Where a store is, as people write it: `file:DIR`, or
/// `redis://HOST[:PORT][,HOST[:PORT]…][/DB][?prefix=NAME&retry=30s]`; with
/// `rediss` the connection is encrypted (TLS). Several hosts are nodes of one
/// Cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A folder.
    Folder(PathBuf),
    /// A Redis or Valkey server, or a Cluster.
    Redis(RedisPlace),
}

/// Which Redis, and where in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedisPlace {
    /// Whether the connection is encrypted.
    pub tls: bool,
    /// Hosts and ports: one server, or some nodes of a Cluster.
    pub hosts: Vec<(String, u16)>,
    /// The number of the database; a Cluster has only 0.
    pub database: u32,
    /// The beginning of all keys; several stores may share a server.
    pub prefix: String,
    /// How long to try again where the server does not answer.
    pub retry: Duration,
}

impl Location {
    /// Reads what a person wrote.
    ///
    /// # Errors
    /// [`StoreError::BadUrl`]; a password in it is not repeated there.
    pub fn parse(url: &str) -> Result<Self, StoreError> {
        let path = url.strip_prefix("file:").or_else(|| url.starts_with('/').then_some(url));
        if let Some(path) = path.filter(|path| !path.is_empty()) {
            let path = PathBuf::from(path);
            return Ok(Self::Folder(std::path::absolute(&path).unwrap_or(path)));
        }
        let redis = |tls, rest| RedisPlace::parse(tls, rest).map(Self::Redis);
        let parsed = match url.split_once("://") {
            _ if url.contains('@') && url.contains(':') => Err(CREDENTIALS.to_owned()),
            Some(("redis" | "valkey", rest)) => redis(false, rest),
            Some(("rediss" | "valkeys", rest)) => redis(true, rest),
            _ => Err("it is not of a kind that is known: use file:DIR or redis://HOST".to_owned()),
        };
        parsed.map_err(|problem| StoreError::BadUrl { url: without_secrets(url), problem })
    }
}

impl RedisPlace {
    fn parse(tls: bool, rest: &str) -> Result<Self, String> {
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (hosts, database) = rest.split_once('/').unwrap_or((rest, ""));
        let mut place = Self {
            tls,
            hosts: hosts.split(',').map(host_and_port).collect::<Result<_, _>>()?,
            database: match database {
                "" => 0,
                number => {
                    number.parse().map_err(|_| "what follows '/' is not a database".to_owned())?
                }
            },
            prefix: PREFIX.to_owned(),
            retry: RETRY,
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("prefix", name)) if is_prefix(name) => place.prefix = name.to_owned(),
                Some(("prefix", _)) => return Err("its prefix cannot be one".to_owned()),
                Some(("retry", time)) => {
                    place.retry = dewar_units::parse_duration(time)
                        .map_err(|_| "its retry is not a time".to_owned())?;
                }
                // Not repeated: it may be a password.
                _ => return Err("after '?' it has only prefix=NAME and retry=TIME".to_owned()),
            }
        }
        Ok(place)
    }
}

fn host_and_port(text: &str) -> Result<(String, u16), String> {
    let bad = || "what follows '//' is not a host and a port".to_owned();
    // An IPv6 address is in brackets.
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, port)) => (host, port.strip_prefix(':')),
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = port.map_or(Ok(REDIS_PORT), |port| port.parse().map_err(|_| bad()))?;
    if host.is_empty() {
        return Err(bad());
    }
    Ok((host.to_owned(), port))
}

/// Letters, digits and `._-`: no braces, which mean something to a Cluster.
fn is_prefix(name: &str) -> bool {
    !name.is_empty()
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// Of a URL that is not understood nobody knows where a password in it ends.
fn without_secrets(url: &str) -> String {
    match url.split_once(':') {
        Some((scheme, _)) => format!("{scheme}:…"),
        None => url.to_owned(),
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(path) => write!(f, "file:{}", path.display()),
            Self::Redis(place) => place.fmt(f),
        }
    }
}

impl fmt::Display for RedisPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "redis{}://", if self.tls { "s" } else { "" })?;
        for (index, (host, port)) in self.hosts.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            match host.contains(':') {
                true => write!(f, "{comma}[{host}]:{port}")?,
                false => write!(f, "{comma}{host}:{port}")?,
            }
        }
        write!(f, "/{}", self.database)?;
        let mut query = Vec::new();
        if self.prefix != PREFIX {
            query.push(format!("prefix={}", self.prefix));
        }
        if self.retry != RETRY {
            query.push(format!("retry={}ms", self.retry.as_millis()));
        }
        if !query.is_empty() {
            write!(f, "?{}", query.join("&"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(url: &str) -> String {
        Location::parse(url).expect_err(url).to_string()
    }

    #[test]
    fn urls_come_back() {
        for url in [
            "file:/var/lib/x",
            "redis://h:6379/0",
            "rediss://a:1,[::1]:2/0?prefix=p.q-r&retry=500ms",
        ] {
            assert_eq!(Location::parse(url).expect(url).to_string(), url);
        }
        let Location::Redis(place) = Location::parse("redis://a,b:7000/3").expect("parse") else {
            panic!("not redis")
        };
        assert_eq!(place.hosts, [("a".to_owned(), 6379), ("b".to_owned(), 7000)]);
        assert_eq!((place.database, place.prefix.as_str()), (3, "dewar"));
    }

    #[test]
    fn wrong_ones_are_told_without_secrets() {
        assert!(problem("s3://bucket").contains("not of a kind"));
        assert!(problem("file:").contains("not of a kind"));
        assert!(problem("redis://").contains("not a host"));
        assert!(problem("redis://h:x").contains("not a host"));
        assert!(problem("redis://h/x").contains("not a database"));
        assert!(problem("redis://h?prefix={a}").contains("prefix"));
        assert!(problem("redis://h?retry=soon").contains("not a time"));
        for url in [
            "redis://me:s3cret@h",
            "redis://me:s3cret@s3cret?s3cret@h",
            "redis:me:s3cret@h",
            "redis://h?password=s3cret@s3cret",
        ] {
            let report = problem(url);
            assert!(
                report.contains("DEWAR_REDIS_PASSWORD") && !report.contains("s3cret"),
                "{report}"
            );
        }
        for url in [
            "redis://h?password=s3cret",
            "redis://h?s3cret",
            "redis:h?password=s3cret",
            "redis://h?prefix=a;password=s3cret",
            "redis://h/0;s3cret",
            "redis://me:s3cret",
        ] {
            let report = problem(url);
            assert!(!report.contains("s3cret"), "{report}");
        }
    }
}
