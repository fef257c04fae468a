//! Displays over VNC: a port is one QEMU's, and is taken when the other has let go of it.

use super::{Later, Rewriter, TakeoverPlan, Unsupported};
use crate::cmdline::Properties;
use serde_json::json;
use std::path::{Path, PathBuf};

/// The port of VNC's display 0.
const VNC_PORT: u16 = 5900;

impl TakeoverPlan {
    /// A display over VNC that no option names: it goes on as one that an option names.
    pub(crate) fn vnc_at(&mut self, host: &str, port: &str, scratch: &Path) {
        self.later.push(listening_at(host, port));
        self.line.extend(["-vnc".to_owned(), format!("unix:{}", vnc_socket(scratch).display())]);
    }
}

fn listening_at(host: &str, port: &str) -> Later {
    Later::Vnc(json!([{"type": "inet", "host": host, "port": port}]))
}

/// Where VNC waits until its port is free.
fn vnc_socket(scratch: &Path) -> PathBuf {
    scratch.join("vnc.sock")
}

impl Rewriter<'_> {
    /// VNC waits on a unix socket until its port is free.
    pub(super) fn vnc(&mut self, value: &str) -> Result<String, Unsupported> {
        let (address, rest) = value.split_once(',').unwrap_or((value, ""));
        let settings = Properties::parse(rest)?;
        let refused = |why: &str| Err(Unsupported(format!("-vnc {address}: {why}")));
        let unknown = ["websocket", "to"].iter().any(|key| settings.get(key, "").is_some());
        if unknown || settings.switch("reverse") == Some(true) {
            return refused("its connection cannot be handed over");
        }
        let address = match address.strip_prefix("unix:") {
            _ if address == "none" => return Ok(value.to_owned()),
            Some(path) => self.aside(path)?,
            None => {
                let Some((host, display)) = address.rsplit_once(':') else {
                    return refused("not understood");
                };
                let Ok(display) = display.parse::<u16>() else { return refused("not understood") };
                let host = host.trim_matches(['[', ']']);
                let port = (VNC_PORT + display).to_string();
                self.later(listening_at(host, &port));
                vnc_socket(self.scratch).display().to_string()
            }
        };
        let rest = if rest.is_empty() { String::new() } else { format!(",{rest}") };
        Ok(format!("unix:{address}{rest}"))
    }
}
