//! The unix sockets of a command line: those that QEMU listens on, which a second guest with
//! that line would take away; and those that it connects to, on which a server must listen before
//! QEMU can be started again.

use super::files::DEVICES;
use super::old_style::modern;
use super::options::{Properties, Unsupported, arguments};
use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// `__SO_ACCEPTCON` in /proc/net/unix: somebody listens there.
const LISTENS: u32 = 1 << 16;

/// A unix socket of a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
struct UnixSocket {
    path: PathBuf,
    is_server: bool,
    /// Whether QEMU starts without it, and tries again.
    is_patient: bool,
    /// Whether it is a TPM's.
    is_tpm: bool,
}

fn unix_sockets(line: &[String], folder: &Path) -> Vec<UnixSocket> {
    let all = arguments(line);
    let of_tpms: Vec<String> = all
        .iter()
        .filter(|it| it.name == "tpmdev")
        .filter_map(|it| Properties::parse(it.value?).ok()?.get("chardev", ""))
        .collect();
    let mut found = Vec::new();
    for argument in &all {
        let value = argument.value.unwrap_or_default();
        let device = match argument.name {
            "chardev" => Properties::parse(value).ok(),
            name if DEVICES.contains(&name) => {
                modern(value.strip_prefix("mon:").unwrap_or(value)).ok().flatten()
            }
            _ => None,
        };
        let Some(device) = device.filter(|it| it.switch("abstract") != Some(true)) else {
            continue;
        };
        let is_socket = device.get("backend", "backend").as_deref() == Some("socket");
        let Some(path) = device.get("path", "").filter(|_| is_socket) else { continue };
        let is_tpm = device.get("id", "").is_some_and(|id| of_tpms.contains(&id));
        let is_patient =
            ["reconnect", "reconnect-ms"].iter().any(|key| device.get(key, "").is_some());
        let is_server = device.switch("server") == Some(true);
        found.push(UnixSocket { path: folder.join(path), is_server, is_patient, is_tpm });
    }
    found
}

/// That a QEMU can be started with this line, in this folder: nobody else listens where it is
/// to listen, and somebody where it is to connect.
///
/// # Errors
/// Names the socket, and what to start.
pub fn require_sockets(line: &[String], folder: &Path) -> Result<(), Unsupported> {
    let Some(listening) = listening() else { return Ok(()) };
    for UnixSocket { path, is_server, is_patient, is_tpm } in unix_sockets(line, folder) {
        let is_listened = listening.contains(&path)
            || fs::canonicalize(&path).is_ok_and(|path| listening.contains(&path));
        // A listener may have bound it by a relative name, or through a link.
        let is_perhaps =
            path.exists() && listening.iter().any(|other| other.file_name() == path.file_name());
        if !is_server && (is_listened || is_perhaps || is_patient && !is_tpm) {
            continue;
        }
        let shown = path.display();
        let why = match (is_server, is_listened) {
            (true, true) => format!(
                "another process listens on {shown}, which its command line names, and would lose \
                 it: end that one first"
            ),
            (false, _) if is_tpm => format!(
                "its TPM is not there: nobody listens on {shown}; start it again ('swtpm socket \
                 --tpm2 --tpmstate dir=DIR --ctrl type=unixio,path={shown}', as before)"
            ),
            (false, _) => {
                format!("nobody listens on {shown}, to which its QEMU connects: start that first")
            }
            _ => continue,
        };
        return Err(Unsupported(why));
    }
    Ok(())
}

/// Where processes listen, of this network namespace; nothing where that cannot be read.
fn listening() -> Option<HashSet<PathBuf>> {
    let text = fs::read_to_string("/proc/net/unix").ok()?;
    let path = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let flags = u32::from_str_radix(fields.get(3)?, 16).ok()?;
        let path = fields.get(7..)?.join(" ");
        (flags & LISTENS != 0 && !path.is_empty()).then(|| PathBuf::from(path))
    };
    Some(text.lines().skip(1).filter_map(path).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn sockets_are_required_and_not_taken_away() {
        let folder = tempfile::tempdir().expect("tempdir");
        let line = |words: &[&str]| words.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        let server = line(&["-chardev", "socket,id=a,path=here,server=on,wait=off"]);
        let old = line(&["-serial", "unix:here,server,nowait"]);
        let client =
            line(&["-chardev", "socket,id=t,path=here", "-tpmdev", "emulator,id=x,chardev=t"]);
        let patient = line(&["-chardev", "socket,id=t,path=here,reconnect=1"]);
        let check = |line: &[String]| require_sockets(line, folder.path());
        let answer = |line: &[String]| check(line).expect_err("a reason").to_string();
        for free in [&server, &old, &patient] {
            check(free).expect("free");
        }
        assert!(answer(&client).contains("swtpm socket"));
        let _listener = UnixListener::bind(folder.path().join("here")).expect("bind");
        check(&client).expect("somebody listens");
        assert!(answer(&server).contains("would lose"));
        assert!(answer(&old).contains("would lose"));
    }
}
