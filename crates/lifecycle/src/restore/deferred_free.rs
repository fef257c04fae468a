//! The memory of the guest that a restore replaces. To give it back takes tens of
//! milliseconds for each GiB, and the restored guest need not wait for it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread::{Builder, JoinHandle};

/// Its files, which have no names any more. Dropped, they are given back.
pub struct DeferredFree {
    files: Vec<File>,
    freeing: Option<JoinHandle<()>>,
}

impl DeferredFree {
    /// Nobody else may have them open when they are to be given back.
    pub fn new(files: Vec<File>) -> Self {
        Self { files, freeing: None }
    }

    /// Begins to give it back, beside whatever we do next. Returns how many bytes
    /// the file system of this folder will have more.
    pub fn free(&mut self, folder: &Path) -> u64 {
        let device = folder.metadata().map(|it| it.dev()).ok();
        let there = |file: &File| file.metadata().ok().filter(|it| Some(it.dev()) == device);
        // `st_blocks` is in units of 512 bytes (stat(2)).
        let bytes = self.files.iter().filter_map(there).map(|it| it.blocks() * 512).sum();
        let files = std::mem::take(&mut self.files);
        // Where no thread can be made it is given back here and now.
        self.freeing = Builder::new().spawn(move || drop(files)).ok();
        bytes
    }

    /// Waits until all that was begun is given back.
    pub fn wait(&mut self) {
        if let Some(thread) = self.freeing.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for DeferredFree {
    fn drop(&mut self) {
        self.wait();
    }
}
