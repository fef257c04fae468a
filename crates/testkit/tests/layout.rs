//! The rules of the house: who may depend on whom, and where `unsafe` lives.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Each crate and the crates of this workspace that it may use.
const MAY_USE: [(&str, &[&str]); 24] = [
    ("units", &[]),
    ("kernel", &["units"]),
    ("memory", &["units", "kernel"]),
    ("codec", &["units"]),
    ("codec-gpu", &["units"]),
    ("store", &["units"]),
    ("image", &["units", "codec", "store"]),
    ("wire", &["units", "codec"]),
    ("guest", &["units", "memory"]),
    ("registry", &["kernel"]),
    ("guest-qemu", &["units", "guest", "memory", "kernel", "registry"]),
    ("guest-oci", &["units", "guest", "memory", "kernel", "registry"]),
    ("capture", &["units", "kernel", "memory", "guest"]),
    ("checkpoint", &["units", "kernel", "memory", "codec", "image", "guest", "capture"]),
    ("migrate", &["units", "memory", "codec", "codec-gpu", "wire", "guest", "capture"]),
    // Programs in guests use it too: nothing but the standard library.
    ("beat", &[]),
    ("qos", &["beat", "kernel", "registry"]),
    ("pagecache", &["units", "kernel"]),
    ("blockcache", &["units", "kernel"]),
    ("hostreboot", &["kernel"]),
    (
        "lifecycle",
        &[
            "units",
            "kernel",
            "memory",
            "codec",
            "image",
            "guest",
            "registry",
            "guest-qemu",
            "guest-oci",
            "checkpoint",
            "wire",
            "migrate",
            "capture",
            "qos",
            "pagecache",
            "blockcache",
            "hostreboot",
        ],
    ),
    (
        "cli",
        &[
            "lifecycle",
            "units",
            "kernel",
            "memory",
            "codec",
            "image",
            "guest",
            "registry",
            "guest-qemu",
            "guest-oci",
            "checkpoint",
            "qos",
        ],
    ),
    ("testkit", &["kernel", "registry", "guest-qemu"]),
    (
        "bench",
        &[
            "testkit",
            "units",
            "kernel",
            "codec",
            "codec-gpu",
            "image",
            "pagecache",
            "registry",
            "guest-qemu",
            "beat",
        ],
    ),
];
const MAY_BE_UNSAFE: [&str; 3] = ["kernel", "memory", "codec-gpu"];

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("crates").to_owned()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.path() {
            path if path.is_dir() => found.extend(files(&path)),
            path => found.push(path),
        }
    }
    found
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = files(folder);
    found.retain(|path| path.extension().is_some_and(|it| it == "rs"));
    found
}

/// The ordinary dependencies of a manifest on crates of this workspace.
fn used_by(manifest: &str) -> Vec<String> {
    let mut section = "";
    let mut used = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            section = line;
        } else if section == "[dependencies]" {
            if let Some(name) = line.strip_prefix("dewar-") {
                let end = name.find(['.', ' ', '=']).unwrap_or(name.len());
                used.push(name[..end].to_owned());
            }
        }
    }
    used
}

#[test]
fn no_crate_uses_what_it_may_not() {
    let rules: BTreeMap<&str, &[&str]> = MAY_USE.into_iter().collect();
    let mut seen = 0;
    for entry in fs::read_dir(crates()).expect("crates").flatten() {
        let name = entry.file_name().into_string().expect("name");
        let allowed =
            rules.get(name.as_str()).unwrap_or_else(|| panic!("crate '{name}' has no rule"));
        let manifest = fs::read_to_string(entry.path().join("Cargo.toml")).expect("manifest");
        for used in used_by(&manifest) {
            assert!(allowed.contains(&used.as_str()), "'{name}' may not use '{used}'");
        }
        seen += 1;
    }
    assert_eq!(seen, MAY_USE.len());
}

#[test]
fn unsafe_lives_in_its_rooms_and_says_why() {
    for entry in fs::read_dir(crates()).expect("crates").flatten() {
        let name = entry.file_name().into_string().expect("name");
        let mut forbids = false;
        // This file speaks of it only.
        let others = sources(&entry.path()).into_iter().filter(|path| !path.ends_with(file!()));
        for path in others {
            let text = fs::read_to_string(&path).expect("source");
            let lines: Vec<&str> = text.lines().collect();
            forbids |= text.contains("#![forbid(unsafe_code)]");
            for (number, line) in lines.iter().enumerate() {
                let code = line.split("//").next().unwrap_or_default();
                // The type of a function of another language: who calls one has to say why.
                let code = code.replace("unsafe extern \"C\" fn(", "fn(");
                let is_unsafe = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern"]
                    .iter()
                    .any(|form| code.contains(form));
                if !is_unsafe {
                    continue;
                }
                let place = format!("{}:{}", path.display(), number + 1);
                assert!(MAY_BE_UNSAFE.contains(&name.as_str()), "unsafe in {place}");
                let above = &lines[number.saturating_sub(8)..=number];
                assert!(above.iter().any(|it| it.contains("SAFETY:")), "no SAFETY: at {place}");
            }
        }
        assert!(
            forbids || MAY_BE_UNSAFE.contains(&name.as_str()),
            "crate '{name}' does not forbid unsafe code"
        );
    }
}

#[test]
fn files_have_one_subject() {
    for entry in fs::read_dir(crates()).expect("crates").flatten() {
        for path in sources(&entry.path().join("src")) {
            let text = fs::read_to_string(&path).expect("source");
            let lines = text.lines().take_while(|line| *line != "#[cfg(test)]").count();
            assert!(lines <= 450, "{} has {lines} lines: one subject each", path.display());
        }
    }
}

#[test]
fn functions_are_short() {
    for entry in fs::read_dir(crates()).expect("crates").flatten() {
        for path in sources(&entry.path().join("src")) {
            let text = fs::read_to_string(&path).expect("source");
            let mut begun: Option<(usize, String, &str)> = None;
            for (number, line) in text.lines().enumerate() {
                let words = line.trim_start();
                let indent = &line[..line.len() - words.len()];
                let is_function = ["fn ", "pub fn ", "pub(crate) fn ", "pub(super) fn "]
                    .iter()
                    .any(|form| words.starts_with(form));
                if is_function && begun.is_none() {
                    begun = Some((number, format!("{indent}}}"), words));
                }
                let Some((first, end, name)) = &begun else { continue };
                let is_one_line = *first == number && line.ends_with(['}', ';']);
                // A trait's own lines have no body: `) -> Result<T, E>;`.
                let is_declared = line.starts_with(&end.replace('}', ")")) && line.ends_with(';');
                if line == end.as_str() || is_one_line || is_declared {
                    let lines = number - first + 1;
                    assert!(lines <= 120, "{}: {lines} lines: {name}", path.display());
                    begun = None;
                }
            }
        }
    }
}

/// Names that gave way to the field's own, and words that hide the actor: docs/style.md.
const RETIRED: [&str; 34] = [
    "Fate",
    "Freed",
    "TakenOver",
    "make_way",
    "Capturing",
    "strike_out",
    "require_still",
    "make_ready",
    "put_back",
    "give_back",
    "LINGERS",
    "Desk",
    "Sheet",
    "Means",
    "scribe",
    "Scribe",
    "whoever",
    "Whoever",
    "he",
    "He",
    "himself",
    "fate",
    "revive",
    "userfault",
    "Hold",
    "GUESS",
    "Stuck",
    "Plugged",
    "ReviveError",
    "Revival",
    "CurrentError",
    "OldRam",
    "DeadRam",
    "desk",
];

/// Words that no name is made of.
const RETIRED_PARTS: [&str; 4] = ["he", "his", "himself", "whoever"];

#[test]
fn no_retired_name_comes_back() {
    let documents = [crates().join("../docs"), crates().to_owned()];
    let is_text = |path: &PathBuf| path.extension().is_some_and(|it| it == "rs" || it == "md");
    for path in documents.iter().flat_map(|folder| files(folder)).filter(is_text) {
        // These two name them.
        if path.ends_with("layout.rs") || path.ends_with("style.md") {
            continue;
        }
        let text = fs::read_to_string(&path).expect("text");
        let words = text.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
        for word in words {
            assert!(!RETIRED.contains(&word), "'{word}' in {}", path.display());
            let is_made_of_one = word.split('_').any(|part| RETIRED_PARTS.contains(&part));
            assert!(!(word.contains('_') && is_made_of_one), "'{word}' in {}", path.display());
        }
    }
}

/// A test that is left out is left to a command that runs it.
#[test]
fn no_test_is_left_out_for_good() {
    for path in files(&crates()).iter().filter(|it| it.extension().is_some_and(|it| it == "rs")) {
        let text = fs::read_to_string(path).expect("text");
        for line in text.lines().map(str::trim).filter(|it| it.starts_with("#[ignore")) {
            assert_eq!(line, r#"#[ignore = "long: make test-long"]"#, "{}", path.display());
            assert!(
                path.iter().any(|it| it == "guests" || it == "deadlines"),
                "{}",
                path.display()
            );
        }
    }
}

/// Else the two commands fail on the oldest system that they are for.
#[test]
fn every_dependency_builds_with_the_oldest_rust() {
    let mut cargo = std::process::Command::new(env!("CARGO"));
    let cargo = cargo.args(["metadata", "--format-version", "1", "--locked"]);
    let output = cargo.current_dir(crates()).output().expect("cargo");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let number = |version: &str| -> Vec<u32> {
        version.split('.').take(2).filter_map(|part| part.parse().ok()).collect()
    };
    let oldest = number(env!("CARGO_PKG_RUST_VERSION"));
    for package in told["packages"].as_array().expect("packages") {
        let Some(needs) = package["rust_version"].as_str() else { continue };
        let name = &package["id"];
        assert!(number(needs) <= oldest, "{name} needs Rust {needs}; 'cargo update' an older one");
    }
}
