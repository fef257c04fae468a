//! The files of a running QEMU that another one takes over.

use super::current::netdevs;
use super::tap::TapHeader;
use crate::cmdline::Holder;
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
        // Of the addresses of a name the older kind comes first.
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
pub enum OpenFilesError {
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// QEMU.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

impl Holder for OpenFiles<'_> {
    fn listener(&mut self, host: &str, port: u16) -> Option<i32> {
        let (here, others) = std::mem::take(&mut self.listeners)
            .into_iter()
            .partition(|(address, _)| address.port() == port);
        self.listeners = others;
        let mut here: Vec<(SocketAddr, OwnedFd)> = here;
        let found = which_is(&here, host, port).map(|at| here.remove(at).1);
        self.listeners.append(&mut here);
        found.map(|socket| self.claim(socket))
    }

    fn tap(&mut self, id: Option<&str>, name: Option<&str>) -> Vec<i32> {
        let told = id.and_then(|id| self.names.get(id)).map(String::as_str);
        let Some(name) = told.or(name).map(str::to_owned).or_else(|| only(&self.taps)) else {
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

/// Which of the sockets that listen on one port is this host's.
fn which_is(listeners: &[(SocketAddr, OwnedFd)], host: &str, port: u16) -> Option<usize> {
    let at = |ip: IpAddr| listeners.iter().position(|(address, _)| address.ip() == ip);
    let every = || listeners.iter().position(|(address, _)| address.ip().is_unspecified());
    match host.trim_matches(['[', ']']).parse::<IpAddr>() {
        Ok(ip) => at(ip),
        Err(_) if host.is_empty() => every(),
        // No need to ask for the name's addresses.
        Err(_) if listeners.len() == 1 => Some(0),
        Err(_) => {
            let its: Vec<IpAddr> =
                (host, port).to_socket_addrs().ok()?.map(|address| address.ip()).collect();
            listeners.iter().position(|(address, _)| its.contains(&address.ip()))
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
    let name = |told: &str| {
        let name = told.split_once("type=tap,ifname=")?.1.split(',').next()?;
        Some(name.to_owned())
    };
    Ok(netdevs(qmp)?.into_iter().filter_map(|(id, told)| Some((id, name(&told)?))).collect())
}
