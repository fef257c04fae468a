//! Character devices as `-serial`, `-monitor` and their like take them
//! (`qemu_chr_parse_compat` in QEMU's chardev/char.c).

use super::options::{Properties, Unsupported};

/// A character device in the old style as the value of `-chardev`, without an
/// id; `None` where there is nothing to change about it.
pub(super) fn modern(value: &str) -> Result<Option<Properties>, Unsupported> {
    let Some((kind, rest)) = value.split_once(':') else {
        let is_pty = value == "pty";
        return Ok(is_pty.then(|| Properties::Pairs(vec![("pty".to_owned(), None)])));
    };
    if kind == "file" {
        let path = ("path".to_owned(), Some(rest.to_owned()));
        return Ok(Some(Properties::Pairs(vec![("file".to_owned(), None), path])));
    }
    if !["unix", "tcp", "telnet", "websocket"].contains(&kind) {
        return Ok(None);
    }
    let Properties::Pairs(mut pairs) = Properties::parse(rest)? else { return Ok(None) };
    let first = if pairs.is_empty() { None } else { Some(pairs.remove(0)) };
    let address = match first {
        Some((key, Some(value))) if key == "path" => value,
        // The path has a '=' of its own.
        Some((start, Some(rest))) => format!("{start}={rest}"),
        Some((address, None)) => address,
        None => String::new(),
    };
    let mut all = vec![("socket".to_owned(), None)];
    if kind == "unix" {
        all.push(("path".to_owned(), Some(address)));
    } else {
        let (host, port) = address.rsplit_once(':').unwrap_or(("", &address));
        all.push(("host".to_owned(), Some(host.to_owned())));
        all.push(("port".to_owned(), Some(port.to_owned())));
    }
    all.extend(pairs);
    if kind == "telnet" || kind == "websocket" {
        all.push((kind.to_owned(), Some("on".to_owned())));
    }
    Ok(Some(Properties::Pairs(all)))
}
