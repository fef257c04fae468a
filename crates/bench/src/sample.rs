//! The fixed mix that fills guests: text and programs of the host's own.

use anyhow::Result;
use std::fs;
use std::path::{Path, PathBuf};

const HALF: usize = 32 << 20;

/// A file whose first half is text and whose second half is programs.
pub fn file(folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder)?;
    let path = std::path::absolute(folder.join("sample.raw"))?;
    if !path.exists() {
        let mut bytes = collect(Path::new("/usr/share/doc"))?;
        bytes.extend(collect(Path::new("/usr/lib"))?);
        let part = path.with_extension("part");
        fs::write(&part, bytes)?;
        fs::rename(&part, &path)?;
    }
    Ok(path)
}

/// The files of a folder, in the order of their paths, up to a half.
fn collect(folder: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(HALF);
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let mut entries: Vec<_> = fs::read_dir(&folder).into_iter().flatten().flatten().collect();
        entries.sort_by_key(fs::DirEntry::path);
        for entry in entries {
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                bytes.extend(fs::read(entry.path()).unwrap_or_default());
            }
            if bytes.len() >= HALF {
                bytes.truncate(HALF);
                return Ok(bytes);
            }
        }
    }
    // A small system: what there is, again and again.
    let once = bytes.clone();
    while bytes.len() < HALF && !once.is_empty() {
        let more = once.len().min(HALF - bytes.len());
        bytes.extend_from_slice(&once[..more]);
    }
    bytes.resize(HALF, 0);
    Ok(bytes)
}
