//! Forwarded ports of user-mode networking: what is forwarded now, by QEMU's
//! own word, and the same in another QEMU.

use crate::qmp::{Qmp, QmpError, monitor};
use dewar_registry::{Forward, NetworkBackend};

/// The backend that has this name, after those before it.
fn backend(name: &str, before: &[(NetworkBackend, String)]) -> NetworkBackend {
    // "#net012" for -nic and -netdev, "user.0" for -net.
    let is_numbered = |rest: &str| !rest.is_empty() && rest.bytes().all(|it| it.is_ascii_digit());
    if name.starts_with('#') || name.strip_prefix("user.").is_some_and(is_numbered) {
        let is_unnamed = |known: &NetworkBackend| matches!(known, NetworkBackend::Unnamed(_));
        return NetworkBackend::Unnamed(before.iter().filter(|(it, _)| is_unnamed(it)).count());
    }
    NetworkBackend::Named(name.to_owned())
}

/// What a QEMU forwards now.
pub(crate) fn forwards(qmp: &mut Qmp) -> Result<Vec<Forward>, QmpError> {
    Ok(parse(&monitor(qmp, "info usernet")?).1)
}

/// Lets go of ports.
pub(crate) fn remove(qmp: &mut Qmp, forwards: &[Forward]) -> Result<(), QmpError> {
    if forwards.is_empty() {
        return Ok(());
    }
    let (backends, _) = parse(&monitor(qmp, "info usernet")?);
    for Forward { backend, from, .. } in forwards {
        if let Some((_, name)) = backends.iter().find(|(known, _)| known == backend) {
            monitor(qmp, &format!("hostfwd_remove {name} {from}"))?;
        }
    }
    Ok(())
}

/// Forwards what is not forwarded yet; returns what QEMU said against it.
pub(crate) fn add(qmp: &mut Qmp, wanted: &[Forward]) -> Result<Vec<String>, QmpError> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let (backends, there) = parse(&monitor(qmp, "info usernet")?);
    let mut problems = Vec::new();
    for forward in wanted.iter().filter(|it| !there.contains(it)) {
        let backend = backends.iter().find(|(known, _)| *known == forward.backend);
        let Some((_, name)) = backend else {
            problems.push(format!("the network of port {} is not there", forward.from));
            continue;
        };
        let said = monitor(qmp, &format!("hostfwd_add {name} {}", forward.rule))?;
        if !said.trim().is_empty() {
            problems.push(said.trim().to_owned());
        }
    }
    Ok(problems)
}

/// Reads `info usernet`: under the name of each backend a table, in which a
/// forwarded port is such a line:
/// `TCP[HOST_FORWARD]  12  127.0.0.1 5555  10.0.2.15  22  0  0`.
fn parse(text: &str) -> (Vec<(NetworkBackend, String)>, Vec<Forward>) {
    let (mut backends, mut found) = (Vec::new(), Vec::new());
    for line in text.lines().map(str::trim_end) {
        if let Some(heading) = line.strip_suffix("):") {
            let name = heading.split_once('(').map_or(heading, |(_, name)| name);
            backends.push((backend(name, &backends), name.to_owned()));
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let [kind, _, host, port, guest, guest_port, ..] = words[..] else { continue };
        let Some(protocol) = kind.strip_suffix("[HOST_FORWARD]") else { continue };
        let Some((backend, _)) = backends.last() else { continue };
        let any = |address: &str| if address == "*" { String::new() } else { address.to_owned() };
        let from = format!("{}:{}:{port}", protocol.to_lowercase(), any(host));
        let rule = format!("{from}-{}:{guest_port}", any(guest));
        found.push(Forward { backend: backend.clone(), rule, from });
    }
    (backends, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_ports_are_read_and_connections_are_not() {
        let text = "Hub -1 (net0):\r\n  Protocol[State]    FD  Source Address  Port   \
            Dest. Address  Port RecvQ SendQ\r\n  TCP[ESTABLISHED]   15       10.0.2.15 48000 \
            10.0.2.2  8080     0     0\r\n  TCP[HOST_FORWARD]  12       127.0.0.1  5555       \
            10.0.2.15    22     0     0\r\nHub -1 (#net020):\r\n  UDP[HOST_FORWARD]  13      \
            *  6000       10.0.2.16    53     0     0\r\nHub 0 (user.1):\r\nHub -1 (user.x):\r\n";
        let (backends, forwards) = parse(text);
        let named = |name: &str| NetworkBackend::Named(name.to_owned());
        let of: Vec<&NetworkBackend> = backends.iter().map(|(backend, _)| backend).collect();
        let expected = [
            &named("net0"),
            &NetworkBackend::Unnamed(0),
            &NetworkBackend::Unnamed(1),
            &named("user.x"),
        ];
        assert_eq!(of, expected);
        let rules: Vec<_> =
            forwards.iter().map(|it| (&it.backend, it.rule.as_str(), it.from.as_str())).collect();
        let expected = [
            (&named("net0"), "tcp:127.0.0.1:5555-10.0.2.15:22", "tcp:127.0.0.1:5555"),
            (&NetworkBackend::Unnamed(0), "udp::6000-10.0.2.16:53", "udp::6000"),
        ];
        assert_eq!(rules, expected);
    }
}
