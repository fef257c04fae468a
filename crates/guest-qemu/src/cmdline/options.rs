//! The shape of a QEMU command line (qemu-options.hx, util/keyval.c).

use serde_json::Value;

/// Options that take no argument.
const BARE: &[&str] = &[
    "h",
    "help",
    "version",
    "snapshot",
    "no-fd-bootchk",
    "no-acpi",
    "no-hpet",
    "nographic",
    "curses",
    "no-quit",
    "alt-grab",
    "ctrl-grab",
    "sdl",
    "gtk",
    "full-screen",
    "no-frame",
    "S",
    "s",
    "perfmap",
    "jitdump",
    "daemonize",
    "no-reboot",
    "no-shutdown",
    "enable-kvm",
    "usb",
    "singlestep",
    "mem-prealloc",
    "only-migratable",
    "nodefaults",
    "no-user-config",
    "portrait",
    "win2k-hack",
    "preconfig",
    "show-cursor",
    "semihosting",
    "xen-attach",
    "xen-domid-restrict",
    "enable-fips",
    "async-teardown",
    "old-param",
    "enable-sync-profile",
    "no-kvm",
    "no-kvm-irqchip",
];

/// A command line that cannot be taken, and exactly why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unsupported(pub String);

/// One option of a command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument<'a> {
    /// Where its name stands on the command line (after the program).
    pub at: usize,
    /// Its name without dashes; empty for a bare disk image.
    pub name: &'a str,
    /// Its value, where it takes one.
    pub value: Option<&'a str>,
}

/// The options of a command line, in order.
pub fn arguments(line: &[String]) -> Vec<Argument<'_>> {
    let mut found = Vec::new();
    let mut at = 0;
    while at < line.len() {
        let text = line[at].as_str();
        let Some(name) = text.strip_prefix('-').map(|name| name.trim_start_matches('-')) else {
            found.push(Argument { at, name: "", value: Some(text) });
            at += 1;
            continue;
        };
        if BARE.contains(&name) {
            found.push(Argument { at, name, value: None });
            at += 1;
        } else {
            found.push(Argument { at, name, value: line.get(at + 1).map(String::as_str) });
            at += 2;
        }
    }
    found
}

/// A value of the form `first,key=value,flag,…`, or JSON, that keeps the order
/// of its keys.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Properties {
    /// Pairs; a key without `=` has no value. `,,` stands for a comma.
    Pairs(Vec<(String, Option<String>)>),
    Json(serde_json::Map<String, Value>),
}

impl Properties {
    pub(crate) fn parse(text: &str) -> Result<Self, Unsupported> {
        if text.trim_start().starts_with('{') {
            return serde_json::from_str(text)
                .map(Self::Json)
                .map_err(|error| Unsupported(format!("'{text}' is not JSON: {error}")));
        }
        let mut parts = vec![String::new()];
        let mut letters = text.chars().peekable();
        while let Some(letter) = letters.next() {
            match letter {
                ',' if letters.peek() == Some(&',') => {
                    letters.next();
                    parts.last_mut().expect("never empty").push(',');
                }
                ',' => parts.push(String::new()),
                letter => parts.last_mut().expect("never empty").push(letter),
            }
        }
        let pair = |part: String| match part.split_once('=') {
            Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
            None => (part, None),
        };
        Ok(Self::Pairs(parts.into_iter().filter(|part| !part.is_empty()).map(pair).collect()))
    }

    /// The value of the last pair with this key. What stands without a key at
    /// the very front is the value of `implied`.
    pub(crate) fn get(&self, key: &str, implied: &str) -> Option<String> {
        match self {
            Self::Pairs(pairs) => {
                pairs.iter().enumerate().rev().find_map(|(at, (name, value))| match value {
                    Some(value) if name == key => Some(value.clone()),
                    None if at == 0 && key == implied => Some(name.clone()),
                    _ => None,
                })
            }
            Self::Json(map) => map.get(key).map(|value| match value {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            }),
        }
    }

    /// The value of a switch: `key`, `key=on`, `nokey`, `key=off`.
    pub(crate) fn switch(&self, key: &str) -> Option<bool> {
        let bare = |word: &str| match self {
            Self::Pairs(pairs) => pairs.iter().any(|(name, value)| name == word && value.is_none()),
            Self::Json(_) => false,
        };
        match self.get(key, "").as_deref() {
            Some("on" | "yes" | "true" | "y") => Some(true),
            Some(_) => Some(false),
            None if bare(key) => Some(true),
            None if bare(&format!("no{key}")) => Some(false),
            None => None,
        }
    }

    /// Sets a switch, however it was written before.
    pub(crate) fn set_switch(&mut self, key: &str, on: bool) {
        self.remove(key);
        self.remove(&format!("no{key}"));
        self.set(key, if on { "on" } else { "off" }, Value::from(on));
    }

    /// Sets a key: in place where it stands, else at the end. In JSON, `json`
    /// is its value.
    pub(crate) fn set(&mut self, key: &str, value: &str, json: Value) {
        match self {
            Self::Pairs(pairs) => match pairs.iter_mut().rev().find(|(name, _)| name == key) {
                Some((_, old)) => *old = Some(value.to_owned()),
                None => pairs.push((key.to_owned(), Some(value.to_owned()))),
            },
            Self::Json(map) => drop(map.insert(key.to_owned(), json)),
        }
    }

    /// Replaces the value that stands first without a key, or under `implied`.
    pub(crate) fn set_implied(&mut self, implied: &str, value: &str) {
        match self {
            Self::Pairs(pairs) if pairs.first().is_some_and(|(_, value)| value.is_none()) => {
                pairs[0].0 = value.to_owned();
            }
            other => other.set(implied, value, Value::from(value)),
        }
    }

    pub(crate) fn remove(&mut self, key: &str) {
        match self {
            Self::Pairs(pairs) => pairs.retain(|(name, _)| name != key),
            Self::Json(map) => drop(map.remove(key)),
        }
    }
}

impl std::fmt::Display for Properties {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Json(map) => write!(f, "{}", Value::Object(map.clone())),
            Self::Pairs(pairs) => {
                let quote = |text: &str| text.replace(',', ",,");
                let text: Vec<String> = pairs
                    .iter()
                    .map(|(key, value)| match value {
                        Some(value) => format!("{key}={}", quote(value)),
                        None => quote(key),
                    })
                    .collect();
                write!(f, "{}", text.join(","))
            }
        }
    }
}

/// Puts what `with` makes of it in the place of each option of this name that has that property.
pub(super) fn change_option(
    line: &mut [String],
    option: &str,
    (key, wanted): (&str, &str),
    with: impl Fn(&mut Properties) -> String,
) {
    let changed = arguments(line).into_iter().filter(|it| it.name == option).filter_map(|it| {
        let mut options = Properties::parse(it.value?).ok()?;
        let is_it = options.get(key, "").as_deref() == Some(wanted);
        is_it.then(|| (it.at + 1, with(&mut options)))
    });
    let changed: Vec<(usize, String)> = changed.collect();
    changed.into_iter().for_each(|(at, text)| line[at] = text);
}

/// Reads a memory size; a plain number counts in `unit` bytes.
pub(crate) fn parse_size(text: &str, unit: u64) -> Result<u64, Unsupported> {
    let bad = || Unsupported(format!("'{text}' is not a memory size"));
    let factor = match text.chars().last().map(|letter| letter.to_ascii_uppercase()) {
        Some('B') => 1,
        Some('K') => 1 << 10,
        Some('M') => 1 << 20,
        Some('G') => 1 << 30,
        Some('T') => 1 << 40,
        Some('0'..='9') => unit,
        _ => return Err(bad()),
    };
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let number: f64 = digits.parse().map_err(|_| bad())?;
    (number > 0.0).then_some((number * factor as f64) as u64).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_keep_their_order_and_commas() {
        let text = "file=/a,,b.img,if=virtio,readonly";
        let mut properties = Properties::parse(text).expect("parse");
        assert_eq!(properties.get("file", ""), Some("/a,b.img".to_owned()));
        assert_eq!(properties.to_string(), text);
        properties.set("file", "/c,d", Value::Null);
        properties.set("format", "qcow2", Value::Null);
        assert_eq!(properties.to_string(), "file=/c,,d,if=virtio,readonly,format=qcow2");
    }

    #[test]
    fn sizes_count_in_their_unit() {
        assert_eq!(parse_size("512", 1 << 20), Ok(512 << 20));
        assert_eq!(parse_size("2G", 1), Ok(2 << 30));
        assert_eq!(parse_size("1.5g", 1), Ok(3 << 29));
        assert!(parse_size("lots", 1).is_err());
        assert!(parse_size("", 1).is_err());
    }
}
