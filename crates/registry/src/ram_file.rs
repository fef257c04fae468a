//! RAM files that are removed.

use dewar_kernel::is_dax;
use rustix::fs::{SeekFrom, seek};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes that are cleared at once.
const PIECE: usize = 2 << 20;

/// Removes a RAM file. One whose pages are persistent memory is cleared first: there they outlive the file, and the
/// kernel. Returns the file, if it was there, which is freed when it is closed.
///
/// # Errors
/// Where it cannot be cleared or removed.
pub fn remove_ram_file(path: &Path) -> io::Result<Option<File>> {
    // A link leads to a process that may be another by now: it is no more than a name.
    let is_file = fs::symlink_metadata(path).is_ok_and(|data| data.is_file());
    let opened =
        is_file.then(|| OpenOptions::new().read(true).write(true).open(path).ok()).flatten();
    if let Some(file) = opened.as_ref().filter(|file| is_dax(file).unwrap_or(false)) {
        clear(file)?;
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(opened),
    }
}

/// Clears what a file holds; its holes hold nothing.
fn clear(file: &File) -> io::Result<()> {
    let (bytes, zeros) = (file.metadata()?.len(), vec![0; PIECE]);
    let mut at = 0;
    while at < bytes {
        let Ok(data) = seek(file, SeekFrom::Data(at)) else { return Ok(()) };
        let end = seek(file, SeekFrom::Hole(data)).unwrap_or(bytes).min(bytes);
        at = data;
        while at < end {
            let count = (end - at).min(PIECE as u64) as usize;
            file.write_all_at(&zeros[..count], at)?;
            at += count as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_a_file_holds_is_cleared_and_its_holes_stay() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(16 << 20).expect("size");
        for at in [0, 5 << 20, (16 << 20) - 1] {
            file.write_all_at(b"s", at).expect("write");
        }
        clear(&file).expect("cleared");
        let mut bytes = vec![1; 16 << 20];
        file.read_exact_at(&mut bytes, 0).expect("read");
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert_eq!(file.metadata().expect("the file").len(), 16 << 20);
    }

    #[test]
    fn a_link_is_removed_and_not_what_it_leads_to() {
        let folder = tempfile::tempdir().expect("a folder");
        let (other, link) = (folder.path().join("other"), folder.path().join("ram"));
        fs::write(&other, "a stranger's").expect("a file");
        std::os::unix::fs::symlink(&other, &link).expect("a link");
        assert!(remove_ram_file(&link).expect("removed").is_none());
        assert_eq!(fs::read(&other).expect("there"), b"a stranger's");
        assert!(fs::symlink_metadata(&link).is_err());
        assert!(remove_ram_file(&link).expect("nothing to do").is_none());
    }
}
