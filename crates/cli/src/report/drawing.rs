//! A report's file. It is opened before the work begins, so that a path that cannot be written is found while
//! nothing has been done. What is there already stays as it is until there is a page.

use dewar_lifecycle::{Code, Failure};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A file for one page.
pub struct Drawing<'d> {
    path: &'d Path,
    file: File,
    /// Whether it was made for this page, which is not written.
    is_empty: bool,
}

impl<'d> Drawing<'d> {
    /// Opens the file, or makes it.
    pub fn open(path: &'d Path) -> Result<Self, Failure> {
        let mut options = OpenOptions::new();
        // A pipe that nobody reads is no reason to wait.
        options.write(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
        let (opened, is_empty) = match options.clone().create_new(true).open(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => (options.open(path), false),
            made => (made, true),
        };
        let file = opened.map_err(|error| unwritten(path, &error))?;
        Ok(Self { path, file, is_empty })
    }

    /// Writes the page.
    pub fn write(mut self, page: &str) -> Result<(), Failure> {
        let written = self.replace(page).map_err(|error| unwritten(self.path, &error));
        self.is_empty &= written.is_err();
        written
    }

    fn replace(&mut self, page: &str) -> io::Result<()> {
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        self.file.write_all(page.as_bytes())
    }
}

impl Drop for Drawing<'_> {
    fn drop(&mut self) {
        if self.is_empty {
            let _ = std::fs::remove_file(self.path);
        }
    }
}

fn unwritten(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::Failed, format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_that_was_made_for_a_page_is_removed() {
        let folder = tempfile::tempdir().expect("folder");
        let (new, old, link) =
            (folder.path().join("new"), folder.path().join("old"), folder.path().join("link"));
        std::fs::write(&old, "what was there, and is longer").expect("file");
        std::os::unix::fs::symlink(&old, &link).expect("link");
        for path in [&new, &old, &link, Path::new("/dev/null")] {
            drop(Drawing::open(path).expect("opened"));
        }
        assert!(!new.exists() && link.is_symlink() && Path::new("/dev/null").exists());
        assert_eq!(std::fs::read(&old).expect("file"), b"what was there, and is longer");
        for path in [&new, &link] {
            Drawing::open(path).and_then(|it| it.write("page")).expect("written");
            assert_eq!(std::fs::read(path).expect("file"), b"page");
        }
        assert!(link.is_symlink());
        assert!(Drawing::open(folder.path()).is_err());
        let full = Drawing::open(Path::new("/dev/full")).expect("opened").write("page");
        assert!(full.is_err_and(|failure| failure.whole().contains("No space left")));
        assert!(Path::new("/dev/full").exists());
    }
}
