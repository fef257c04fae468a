//! A container as what a checkpoint captures.

use crate::container_process::{
    DUMP, images_folder, make_folder, remove_folder, resume_if_frozen, strays,
};
use crate::failure::{Code, Failure};
use crate::hot_pages::HOT_PAGES;
use dewar_guest::{GuestError, Health, ProcessGuest, SavedFiles, SavedProcesses};
use dewar_guest_oci::{
    Container, Description, Dump, DumpOptions, OciError, Overlay, PreCopy,
    ROOT_FILES as ROOT_FILES_ARCHIVE, Strays, free_port,
};
use dewar_kernel::{available_memory, free};
use dewar_memory::Ram;
use dewar_registry::{GuestFolder, GuestRecord, ProcessId};
use dewar_units::{ByteSize, PAGE_BYTES};
use serde_json::Value;
use std::error::Error;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// By which a checkpoint knows the files of the root file system.
const ROOT_FILES: &str = "root";

/// A container that is a guest of ours.
pub struct ContainerGuest<'f> {
    pub(super) folder: &'f GuestFolder,
    pub(super) container: Container,
    pub(super) process: ProcessId,
    pub(super) images: PathBuf,
    pub(super) overlay: Option<Overlay>,
    config: Value,
    /// What is copied of its memory before it is stopped.
    pub(super) copied: Option<PreCopy>,
    stopped_pages: u64,
    pub(super) strays: Strays,
    pub(super) dump: Option<Dump>,
}

impl<'f> ContainerGuest<'f> {
    /// The guest, and what a checkpoint says of it.
    ///
    /// # Errors
    /// Where it is no container, or its memory would not fit beside itself.
    pub fn new(
        folder: &'f GuestFolder,
        record: &GuestRecord,
    ) -> Result<(Self, Description), Failure> {
        let known = record.container.as_ref().ok_or_else(|| {
            Failure::new(Code::Failed, format!("'{}' is no container", record.name))
        })?;
        let container = Container::of(known);
        let description = container.describe()?;
        let images = images_folder(folder);
        let needed = container.memory_bytes()?;
        let room = images.parent().and_then(|place| free(place).ok());
        let room = room.map_or(u64::MAX, |it| it.file_system.min(it.memory.unwrap_or(u64::MAX)));
        let free = room.min(available_memory().unwrap_or(u64::MAX));
        if needed > free / 10 * 9 {
            let what = format!(
                "a copy of its memory needs {}, and {} are free",
                ByteSize(needed),
                ByteSize(free)
            );
            return Err(Failure::new(Code::Unsupported, what));
        }
        let process = record.process;
        let overlay = description.overlay.clone();
        make_folder(&images)?;
        let copied = Some(PreCopy::new(process.pid, &images)?);
        let (stopped_pages, dump) = (0, None);
        let strays = strays(folder);
        let guest = Self {
            folder,
            container,
            process,
            images,
            overlay,
            config: description.config.clone(),
            copied,
            stopped_pages,
            strays,
            dump,
        };
        Ok((guest, description))
    }

    /// Stops it, and copies what is left of its memory, and what it wrote to its root file system.
    pub(super) fn begin(&mut self) -> Result<Instant, Failure> {
        let copied = match self.copied.take() {
            Some(copied) => copied,
            None => PreCopy::new(self.process.pid, &self.images)?,
        };
        // One that its user has frozen is left so.
        self.container.process()?;
        // From here on a command that finds us dead lets the container run.
        let port = free_port()?;
        self.folder.write_for_now(DUMP, &port)?;
        self.strays = strays(self.folder).with_port(port);
        let options =
            DumpOptions { folder: self.images.clone(), strays: self.strays.clone(), copied };
        let dump = self.dump.insert(Dump::begin(&self.container, options)?);
        self.stopped_pages = dump.copy_pages()?;
        if let Some(overlay) = &self.overlay {
            self.container.save_files(overlay, &self.config, &archive(&self.images))?;
            // What it writes on from here is not in it.
            dump.require_frozen()?;
        }
        Ok(dump.frozen_at())
    }

    fn failed<T: Into<Box<dyn Error + Send + Sync>>>(
        &self,
        operation: &'static str,
    ) -> impl Fn(T) -> GuestError {
        let guest = self.folder.name().to_owned();
        move |cause| GuestError::failed(operation, &guest, cause)
    }
}

impl ProcessGuest for ContainerGuest<'_> {
    fn name(&self) -> &str {
        self.folder.name()
    }

    fn copy_running(&mut self) -> Result<Option<u64>, GuestError> {
        let round = self.copied.as_mut().map(PreCopy::round);
        round.transpose().map_err(self.failed("copying the memory"))
    }

    fn stop(&mut self) -> Result<Instant, GuestError> {
        self.begin().map_err(|failure| self.failed("saving")(failure.whole()))
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        self.dump.as_mut().map_or(Ok(()), Dump::end).map_err(self.failed("letting run"))?;
        // Where it did not end, the rollback goes on from here.
        let _ = self.folder.remove(DUMP);
        Ok(())
    }

    fn saved(&mut self) -> Result<SavedProcesses, GuestError> {
        let stopped_pages = self.stopped_pages;
        let Some(dump) = &mut self.dump else {
            return Err(self.failed("saving")("it was not stopped"));
        };
        let mut read = || -> Result<SavedProcesses, OciError> {
            dump.assemble()?;
            let folder = dump.images();
            // Where it is not known what it uses, nothing is read before it is needed.
            let _ = fs::copy(self.folder.file(HOT_PAGES), folder.join(HOT_PAGES));
            Ok(SavedProcesses {
                memory: memory(&folder, dump)?,
                stopped_pages,
                files: saved_files(self.overlay.as_ref(), &self.images),
                state: pack(&folder).map_err(|cause| OciError::Io {
                    operation: "pack",
                    path: folder.clone(),
                    cause,
                })?,
            })
        };
        let saved = read();
        saved.map_err(self.failed("reading what was saved"))
    }

    fn rollback(&mut self) {
        // Dropped, it lets the container run.
        self.dump = None;
        if self.folder.file(DUMP).exists() {
            // Where something does not end the next command goes on from here.
            if self.strays.end(self.process) {
                resume_if_frozen(&self.container, &self.process);
                let _ = self.folder.remove(DUMP);
            }
        }
    }

    fn health(&mut self) -> Health {
        match self.container.process() {
            Ok(process) if process.is_same(&self.process) => Health::Running,
            Ok(_) => Health::Gone,
            Err(_) if !self.process.is_alive() => Health::Gone,
            Err(OciError::NotRunning { status, .. }) => {
                Health::Stands(format!("the container is {status}, by its user"))
            }
            Err(error) => Health::Unknown(error.to_string()),
        }
    }
}

impl Drop for ContainerGuest<'_> {
    fn drop(&mut self) {
        self.dump = None;
        let _ = remove_folder(&self.images);
    }
}

fn saved_files(overlay: Option<&Overlay>, images: &Path) -> Vec<SavedFiles> {
    let archive = archive(images);
    let files = |_: &Overlay| SavedFiles { name: ROOT_FILES.to_owned(), archive };
    overlay.map(files).into_iter().collect()
}

/// The archive of what was written to the root file system.
pub(super) fn archive(images: &Path) -> PathBuf {
    images.join(ROOT_FILES_ARCHIVE)
}

/// The files of pages, one after the other.
fn memory(folder: &Path, dump: &Dump) -> Result<Ram, OciError> {
    let mut ram = Ram::default();
    for file in dump.pages()? {
        let path = folder.join(&file.name);
        let failed = |cause| OciError::Io { operation: "map", path: path.clone(), cause };
        let opened = File::open(&path).map_err(&failed)?;
        ram.add(file.name, opened, file.pages * PAGE_BYTES as u64, 0)
            .map_err(|error| failed(std::io::Error::other(error)))?;
    }
    Ok(ram)
}

/// The images but for those files, as an archive.
pub(super) fn pack(folder: &Path) -> std::io::Result<Vec<u8>> {
    let output = Command::new("tar")
        .arg("--directory")
        .arg(folder)
        .args(["--exclude=./pages-*.img", "--create", "--file=-", "."])
        .stdin(Stdio::null())
        .output()?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(std::io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}
