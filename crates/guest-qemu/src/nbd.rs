//! NBD servers that a disk is on, and whether they serve one client more: while a guest moves,
//! its old QEMU and the new one are both connected.

use serde_json::Value;
use std::io::Read;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long a server may take to greet us. One that is full accepts nobody, and says nothing.
const GREETS_WITHIN: Duration = Duration::from_secs(2);
/// What it says first (doc/proto.md of the NBD project).
const GREETING: &[u8; 8] = b"NBDMAGIC";
const PORT: u16 = 10809;

#[derive(Debug, PartialEq, Eq)]
enum Server {
    Unix(String),
    Tcp(String, u16),
}

/// The server in QEMU's name for a disk.
fn server_of(file: &str) -> Option<Server> {
    if let Some(options) = file.strip_prefix("json:") {
        return in_json(&serde_json::from_str(options).ok()?);
    }
    let rest = file.strip_prefix("nbd")?;
    if let Some(query) = rest.strip_prefix("+unix://") {
        return query.split_once("socket=").map(|(_, path)| Server::Unix(path.to_owned()));
    }
    if let Some(path) = rest.strip_prefix(":unix:") {
        return Some(Server::Unix(path.split(":exportname=").next()?.to_owned()));
    }
    let address = rest.strip_prefix("://").or_else(|| rest.strip_prefix("+tcp://"));
    let address = address.or_else(|| rest.strip_prefix(':'))?;
    let address = address.split(['/', '?']).next()?;
    if let Some((host, port)) = address.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        let port = port.strip_prefix(':').and_then(|port| port.parse().ok()).unwrap_or(PORT);
        return Some(Server::Tcp(host.to_owned(), port));
    }
    let (host, port) = address.split_once(':').map_or((address, None), |(host, port)| {
        (host, port.split(':').next().and_then(|port| port.parse().ok()))
    });
    Some(Server::Tcp(host.to_owned(), port.unwrap_or(PORT)))
}

fn in_json(node: &Value) -> Option<Server> {
    if node["driver"] != "nbd" {
        return in_json(node.get("file")?);
    }
    let server = &node["server"];
    let text = |key: &str| server[key].as_str().or(node[key].as_str()).map(str::to_owned);
    text("path").map(Server::Unix).or_else(|| {
        let port = text("port").and_then(|port| port.parse().ok()).unwrap_or(PORT);
        Some(Server::Tcp(text("host")?, port))
    })
}

/// Whether a disk is on an NBD server that does not serve one client more: it lets us connect,
/// and says nothing. One that cannot be reached from here may be by QEMU.
pub(crate) fn is_full(file: &str) -> bool {
    let greets = |mut stream: Box<dyn Read>| {
        let mut greeting = [0; 8];
        stream.read_exact(&mut greeting).is_ok() && greeting == *GREETING
    };
    match server_of(file) {
        None => false,
        Some(Server::Unix(path)) => UnixStream::connect(path).is_ok_and(|stream| {
            stream.set_read_timeout(Some(GREETS_WITHIN)).is_ok() && !greets(Box::new(stream))
        }),
        Some(Server::Tcp(host, port)) => {
            let addresses = (host.as_str(), port).to_socket_addrs().into_iter().flatten();
            let connect = |at| TcpStream::connect_timeout(&at, GREETS_WITHIN).ok();
            addresses.into_iter().find_map(connect).is_some_and(|stream| {
                stream.set_read_timeout(Some(GREETS_WITHIN)).is_ok() && !greets(Box::new(stream))
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_found_in_every_spelling() {
        let unix = |path: &str| Some(Server::Unix(path.to_owned()));
        let tcp = |host: &str, port| Some(Server::Tcp(host.to_owned(), port));
        for (name, server) in [
            ("nbd+unix:///?socket=/run/a", unix("/run/a")),
            ("nbd+unix:///export?socket=/run/a", unix("/run/a")),
            ("nbd:unix:/run/a:exportname=x", unix("/run/a")),
            ("nbd://host:5/x", tcp("host", 5)),
            ("nbd://host", tcp("host", PORT)),
            ("nbd://[::1]:10810/x", tcp("::1", 10810)),
            ("nbd:host:7", tcp("host", 7)),
            (
                r#"json:{"driver":"raw","file":{"driver":"nbd","server":{"type":"unix","path":"/run/a"}}}"#,
                unix("/run/a"),
            ),
            ("/a/b.qcow2", None),
        ] {
            assert_eq!(server_of(name), server, "{name}");
        }
    }
}
