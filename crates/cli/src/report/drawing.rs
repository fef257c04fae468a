use dewar_lifecycle::{Code, Failure};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// The file of a report, from before there is something to draw. It is removed where nothing is drawn.
pub struct Drawing<'d> {
    path: &'d Path,
    file: File,
    is_drawn: bool,
}

impl<'d> Drawing<'d> {
    /// Creates the file, and so finds out whether that can be done.
    pub fn create(path: &'d Path) -> Result<Self, Failure> {
        let file = File::create(path).map_err(|error| unwritten(path, &error))?;
        Ok(Self { path, file, is_drawn: false })
    }

    /// Writes the page.
    pub fn write(mut self, page: &str) -> Result<(), Failure> {
        self.file.write_all(page.as_bytes()).map_err(|error| unwritten(self.path, &error))?;
        self.is_drawn = true;
        Ok(())
    }
}

impl Drop for Drawing<'_> {
    fn drop(&mut self) {
        if !self.is_drawn {
            let _ = std::fs::remove_file(self.path);
        }
    }
}

fn unwritten(path: &Path, error: &io::Error) -> Failure {
    Failure::new(Code::Failed, format!("cannot write {}: {error}", path.display()))
}
