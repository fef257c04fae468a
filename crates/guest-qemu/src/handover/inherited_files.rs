//! The files of a running QEMU that another one takes over.

use super::tap::TapHeader;
use crate::cmdline::{Holder, Listening};
use crate::machine::command_line::netdevs;
use crate::qmp::{Qmp, QmpError};
use dewar_kernel::{KernelError, ProcessHandle, RemoteFd, list_fds, tap_header_bytes};
use rustix::net::{SocketAddrAny, getsockname, sockopt};
use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// What a QEMU holds open, and copies of what was claimed of it.
pub(crate) struct OpenFiles<'p> {
    process: &'p ProcessHandle,
    listeners: Vec<(SocketAddr, OwnedFd)>,
    /// By the tap's name.
    taps: Vec<(String, RemoteFd)>,
    /// The taps' names, by the network backend's id.
    names: HashMap<String, String>,
    /// To be inherited.
    pub(crate) claimed: Vec<OwnedFd>,
    /// All taps: their numbers there, and the headers of their packets.
    pub(crate) headers: Vec<TapHeader>,
    /// Copies of them.
    pub(crate) all_taps: Vec<OwnedFd>,
}

impl<'p> OpenFiles<'p> {
    /// Looks at what the process has open.
    pub(crate) fn of(process: &'p ProcessHandle, qmp: &mut Qmp) -> Result<Self, OpenFilesError> {
        let (mut listeners, mut taps) = (Vec::new(), Vec::new());
        let (mut headers, mut all_taps) = (Vec::new(), Vec::new());
        for file in list_fds(process.pid())? {
            if file.target.to_string_lossy().starts_with("socket:") {
                let Ok(socket) = process.fetch_fd(file.number) else { continue };
                if let Some(address) = listens_on(&socket) {
                    listeners.push((address, socket));
                }
            } else if file.target == Path::new("/dev/net/tun") {
                let tap = process.fetch_fd(file.number)?;
                if let Ok(bytes) = tap_header_bytes(&tap) {
                    headers.push(TapHeader { fd: file.number, bytes });
                    all_taps.push(tap);
                }
                taps.extend(tap_name(process, file.number).map(|name| (name, file)));
            }
        }
        // QEMU listens on every address of a name; who asks for the name finds the older kind too.
        listeners.sort_by_key(|(address, _)| address.is_ipv6());
        let names = tap_names(qmp)?;
        let claimed = Vec::new();
        Ok(Self { process, listeners, taps, names, claimed, headers, all_taps })
    }

    fn claim(&mut self, file: OwnedFd) -> i32 {
        self.claimed.push(file);
        self.claimed.last().map_or(-1, AsRawFd::as_raw_fd)
    }
}

/// Why it is not known what a QEMU holds open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenFilesError {
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

impl Holder for OpenFiles<'_> {
    fn listener(&mut self, at: &Listening<'_>) -> Option<i32> {
        let addresses: Vec<SocketAddr> = self.listeners.iter().map(|it| it.0).collect();
        let (_, socket) = self.listeners.remove(which_is(&addresses, at)?);
        Some(self.claim(socket))
    }

    fn tap(&mut self, id: Option<&str>, name: Option<&str>) -> Vec<i32> {
        let answer = id.and_then(|id| self.names.get(id)).map(String::as_str);
        let Some(name) = answer.or(name).map(str::to_owned).or_else(|| only(&self.taps)) else {
            return Vec::new();
        };
        let (mine, others) =
            std::mem::take(&mut self.taps).into_iter().partition(|it| it.0 == name);
        self.taps = others;
        let mine: Vec<(String, RemoteFd)> = mine;
        let fetched: Result<Vec<OwnedFd>, KernelError> =
            mine.iter().map(|(_, file)| self.process.fetch_fd(file.number)).collect();
        fetched.unwrap_or_default().into_iter().map(|file| self.claim(file)).collect()
    }

    fn number(&mut self, fd: i32) -> Option<i32> {
        let file = self.process.fetch_fd(fd).ok()?;
        Some(self.claim(file))
    }
}

/// Which of the addresses is meant; of those of a name the first.
fn which_is(all: &[SocketAddr], wanted: &Listening<'_>) -> Option<usize> {
    let fits = |address: &SocketAddr| {
        let excluded = if address.is_ipv6() { wanted.ipv6 } else { wanted.ipv4 } == Some(false);
        let is_other = if address.is_ipv6() { wanted.ipv4 } else { wanted.ipv6 } == Some(true);
        let both = wanted.ipv4 == Some(true) && wanted.ipv6 == Some(true);
        address.port() == wanted.port && !excluded && (!is_other || both)
    };
    let on = |ip: IpAddr| all.iter().position(|it| fits(it) && it.ip() == ip);
    match wanted.host.parse::<IpAddr>() {
        Ok(ip) => on(ip),
        Err(_) if wanted.host.is_empty() => {
            all.iter().position(|it| fits(it) && it.ip().is_unspecified())
        }
        // No need to ask for the name's addresses.
        Err(_) if all.iter().filter(|it| fits(it)).count() == 1 => all.iter().position(fits),
        Err(_) => {
            let its: Vec<SocketAddr> = (wanted.host, wanted.port).to_socket_addrs().ok()?.collect();
            all.iter().position(|it| fits(it) && its.iter().any(|its| its.ip() == it.ip()))
        }
    }
}

/// The address on which a socket listens for TCP connections.
fn listens_on(socket: &OwnedFd) -> Option<SocketAddr> {
    let listening = sockopt::socket_acceptconn(socket).is_ok_and(|it| it);
    let address: SocketAddrAny = listening.then(|| getsockname(socket).ok())??;
    SocketAddr::try_from(address).ok()
}

/// The name of the tap that a descriptor belongs to (`tun_chr_show_fdinfo` in
/// drivers/net/tun.c).
fn tap_name(process: &ProcessHandle, fd: i32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{}/fdinfo/{fd}", process.pid().0)).ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("iff:"))?;
    Some(name.trim().to_owned())
}

/// The name that all taps have, if it is one.
fn only(taps: &[(String, RemoteFd)]) -> Option<String> {
    let (first, _) = taps.first()?;
    taps.iter().all(|(name, _)| name == first).then(|| first.clone())
}

/// Which tap belongs to which network backend.
fn tap_names(qmp: &mut Qmp) -> Result<HashMap<String, String>, QmpError> {
    let name = |answer: &str| {
        let name = answer.split_once("type=tap,ifname=")?.1.split(',').next()?;
        Some(name.to_owned())
    };
    Ok(netdevs(qmp)?.into_iter().filter_map(|(id, answer)| Some((id, name(&answer)?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_told_apart_by_their_addresses() {
        let all: Vec<SocketAddr> =
            ["127.0.0.1:7", "0.0.0.0:7", "127.0.0.1:8", "[::1]:7", "[::]:7", "[::]:9"]
                .map(|address| address.parse().expect("address"))
                .to_vec();
        let which = |host, port, ipv4, ipv6| {
            which_is(&all, &Listening { host, port, ipv4, ipv6 }).map(|at| all[at].to_string())
        };
        for (host, port, ipv4, ipv6, expected) in [
            ("::1", 7, None, None, Some("[::1]:7")),
            ("127.0.0.1", 7, None, None, Some("127.0.0.1:7")),
            ("127.0.0.2", 7, None, None, None),
            ("", 7, Some(true), None, Some("0.0.0.0:7")),
            ("", 7, None, Some(true), Some("[::]:7")),
            ("", 7, Some(false), None, Some("[::]:7")),
            ("", 9, Some(true), Some(true), Some("[::]:9")),
            ("no.such.host.invalid", 8, None, None, Some("127.0.0.1:8")),
            ("localhost", 7, None, None, Some("127.0.0.1:7")),
            ("localhost", 10, None, None, None),
        ] {
            let found = which(host, port, ipv4, ipv6);
            assert_eq!(found.as_deref(), expected, "{host} {port} {ipv4:?} {ipv6:?}");
        }
    }
}
