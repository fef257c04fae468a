//! What tells a copy of a guest from the guest: its generation id, and the addresses of its
//! network cards.
//!
//! A card's address is part of the saved state, and of what the guest knows: a new one on the
//! command line alone changes nothing until the guest boots. So a copy runs with its links
//! down until its guest agent has set the new addresses: at no instant do two guests on one
//! network have the same.

use crate::cmdline::{Properties, arguments};
use crate::qmp::{Qmp, QmpError, monitor};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;

/// A network card's new address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewAddress {
    /// The one that it had, in lower case.
    pub old: String,
    /// The one that it gets.
    pub new: String,
}

/// Gives the copy of a guest a new generation id (`vmgenid`), by which its kernel knows that
/// it is a copy and makes random numbers of its own.
pub fn renew_generation(machine: &mut Value) {
    let Some(words) = machine["arguments"].as_array_mut() else { return };
    for word in words {
        let option = word.as_str().and_then(|word| Properties::parse(word).ok());
        let is_id = |it: &Properties| it.get("driver", "driver").as_deref() == Some("vmgenid");
        if let Some(mut device) = option.filter(is_id) {
            device.set("guid", "auto", "auto".into());
            *word = device.to_string().into();
        }
    }
}

/// Why the network cards of a guest cannot have new addresses.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// There are no random numbers to be had.
    #[error("random addresses: {0}")]
    Random(#[from] std::io::Error),
    /// A card has none of its own, but QEMU's default.
    #[error("network card '{0}' has no address of its own (mac=) on the command line")]
    NoAddress(String),
    /// An address is written in a way that is not understood.
    #[error("network card '{0}': its address is not six pairs of digits with ':' between")]
    Spelling(String),
    /// Cards of other kinds keep an address in what is saved, and take it again at a reset.
    #[error("network card '{0}' is not a virtio one: others come back to the address they had")]
    Kind(String),
}

/// Devices that are network cards, by how their names begin.
const CARDS: [&str; 10] = [
    "virtio-net",
    "e1000",
    "igb",
    "rtl8139",
    "ne2k",
    "i82",
    "pcnet",
    "vmxnet3",
    "tulip",
    "usb-net",
];

/// Gives the network cards of a saved machine new, random addresses, of QEMU's range.
///
/// # Errors
/// Where a card has no address on the command line, or would not keep a new one.
pub fn renew_addresses(machine: &mut Value) -> Result<Vec<NewAddress>, IdentityError> {
    let line: Vec<String> =
        serde_json::from_value(machine["arguments"].clone()).unwrap_or_default();
    let mut random = File::open("/dev/urandom")?;
    let mut changes = Vec::new();
    for argument in arguments(&line) {
        let options = argument.value.and_then(|value| Properties::parse(value).ok());
        let Some(mut options) = options else { continue };
        let word = || argument.value.unwrap_or_default().to_owned();
        let key = match argument.name {
            "device" => {
                let kind = options.get("driver", "driver").unwrap_or_default();
                if !CARDS.iter().any(|it| kind.starts_with(it)) && options.get("mac", "").is_none()
                {
                    continue;
                }
                if !kind.starts_with("virtio-net") {
                    return Err(IdentityError::Kind(word()));
                }
                "mac"
            }
            "nic" | "net" => {
                let kind = options.get("type", "type").unwrap_or_default();
                let is_card = if argument.name == "net" { kind == "nic" } else { kind != "none" };
                if !is_card {
                    continue;
                }
                if !options.get("model", "").is_some_and(|model| model.starts_with("virtio")) {
                    return Err(IdentityError::Kind(word()));
                }
                if argument.name == "nic" { "mac" } else { "macaddr" }
            }
            _ => continue,
        };
        let old = options.get(key, "").ok_or_else(|| IdentityError::NoAddress(word()))?;
        if !is_plain(&old) {
            return Err(IdentityError::Spelling(word()));
        }
        let mut bytes = [0; 3];
        random.read_exact(&mut bytes)?;
        // Not among QEMU's defaults, 52:54:00:12:34:56 and on.
        bytes[0] |= 0x80;
        let new = format!("52:54:00:{:02x}:{:02x}:{:02x}", bytes[0], bytes[1], bytes[2]);
        options.set(key, &new, new.as_str().into());
        machine["arguments"][argument.at + 1] = options.to_string().into();
        changes.push(NewAddress { old: old.to_lowercase(), new });
    }
    Ok(changes)
}

/// Whether an address is written as a guest's agent writes it.
fn is_plain(address: &str) -> bool {
    let pairs: Vec<&str> = address.split(':').collect();
    let is_pair = |it: &&str| it.len() == 2 && it.bytes().all(|it| it.is_ascii_hexdigit());
    pairs.len() == 6 && pairs.iter().all(is_pair)
}

/// The names of a QEMU's network cards, which have these new addresses. Asked before the
/// saved state, which has the old ones, is loaded.
///
/// # Errors
/// Where QEMU does not answer, or has not just these: what it makes by itself, or by an
/// option that was not looked at, would have an address of another guest.
pub fn cards(qmp: &mut Qmp, changes: &[NewAddress]) -> Result<Vec<String>, QmpError> {
    let report = monitor(qmp, "info network")?;
    let refused = |reason: String| QmpError::Refused { command: "info network".to_owned(), reason };
    let missing = |new: &str| refused(format!("no network card has the address {new}"));
    let is_new = |line: &str| changes.iter().any(|it| line.trim_end().ends_with(&it.new));
    if let Some(other) = report.lines().find(|it| it.contains("type=nic,") && !is_new(it)) {
        return Err(refused(format!("a network card has no new address: {}", other.trim())));
    }
    changes
        .iter()
        .map(|change| card(&report, &change.new).ok_or_else(|| missing(&change.new)))
        .collect()
}

/// Finds a card in `info network`, which has a line for each:
/// `net0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:81:00:01`, set off, where the
/// card is on a hub, by a backslash and the name of the hub's port.
fn card(report: &str, address: &str) -> Option<String> {
    let has_it = |line: &&str| {
        line.contains("type=nic") && line.trim_end().ends_with(&format!("macaddr={address}"))
    };
    let (names, _) = report.lines().find(has_it)?.split_once(": index=")?;
    let name = names.rsplit_once(": ").map_or(names, |(_, name)| name);
    Some(name.trim_start_matches([' ', '\\']).to_owned())
}

/// Plugs cables of network cards in, or out.
///
/// # Errors
/// Where QEMU refuses.
pub fn set_links(qmp: &mut Qmp, cards: &[String], up: bool) -> Result<(), QmpError> {
    cards
        .iter()
        .try_for_each(|name| qmp.execute("set_link", json!({"name": name, "up": up})).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_a_generation_id_of_its_own() {
        let mut machine =
            json!({"arguments": ["-device", "vmgenid,guid=324e6eaf,id=v", "-m", "1G"]});
        renew_generation(&mut machine);
        assert_eq!(machine["arguments"][1], "vmgenid,guid=auto,id=v");
        assert_eq!(machine["arguments"][3], "1G");
    }

    #[test]
    fn every_spelling_of_an_address_is_renewed() {
        let mut machine = json!({"arguments": [
            "-device", "virtio-net-pci,netdev=a,mac=52:54:00:AA:00:01",
            "-nic", "user,model=virtio-net-pci,mac=52:54:00:aa:00:02",
            "-net", "nic,model=virtio,macaddr=52:54:00:aa:00:03",
            "-device", r#"{"driver":"virtio-net-pci","mac":"52:54:00:aa:00:04"}"#,
            "-device", "virtio-rng-pci", "-name", "mac=x", "-nic", "none",
        ]});
        let before = machine.clone();
        let changes = renew_addresses(&mut machine).expect("new ones");
        let old: Vec<&str> = changes.iter().map(|it| &it.old[12..]).collect();
        assert_eq!(old, ["00:01", "00:02", "00:03", "00:04"]);
        let text = machine.to_string();
        // Not what they begin with: a new one may, too.
        let is_there = |old: &String| text.to_lowercase().contains(&old.to_lowercase());
        assert!(!changes.iter().any(|it| is_there(&it.old)), "{text}");
        assert!(changes.iter().all(|it| text.contains(&it.new) && it.new != it.old));
        for untouched in [9, 11, 13] {
            assert_eq!(machine["arguments"][untouched], before["arguments"][untouched]);
        }
    }

    #[test]
    fn cards_that_would_not_keep_an_address_are_refused() {
        let renewed = |option: &str, value: &str| {
            renew_addresses(&mut json!({"arguments": [option, value]})).expect_err(value)
        };
        for value in ["e1000,netdev=a,mac=52:54:00:aa:00:01", "rtl8139,netdev=a", "new,mac=1"] {
            assert!(matches!(renewed("-device", value), IdentityError::Kind(_)), "{value}");
        }
        assert!(matches!(renewed("-nic", "user,mac=52:54:00:aa:00:01"), IdentityError::Kind(_)));
        let without = renewed("-device", "virtio-net-pci,netdev=a");
        assert!(matches!(without, IdentityError::NoAddress(_)), "{without}");
        for spelt in ["52-54-00-aa-00-01", "52:54:0:aa:0:1", "0x525400aa0001"] {
            let failed = renewed("-device", &format!("virtio-net-pci,netdev=a,mac={spelt}"));
            assert!(matches!(failed, IdentityError::Spelling(_)), "{failed}");
        }
    }

    #[test]
    fn a_card_is_found_by_its_address() {
        let told = "net0: index=0,type=nic,model=e1000,macaddr=52:54:00:81:00:01\r\n \\ a: index=0,\
            type=user,net=10.0.2.0,restrict=off\r\nhub 0\r\n \\ hub0port1: #net1: index=0,type=user\r\n \
            \\ hub0port0: virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:81:00:02\r\n";
        assert_eq!(card(told, "52:54:00:81:00:01").as_deref(), Some("net0"));
        assert_eq!(card(told, "52:54:00:81:00:02").as_deref(), Some("virtio-net-pci.0"));
        assert_eq!(card(told, "52:54:00:81:00:03"), None);
    }
}
