//! A container on its way to another host: what is copied and stopped here, for `migrate`.

use super::guest::{ContainerGuest, archive, pack};
use crate::container_process::{
    DUMP, images_folder, let_run, remove_folder, strays, unmount_files,
};
use crate::failure::{Code, Failure};
use crate::hot_pages::HOT_PAGES;
use dewar_guest_oci::{Container, Description, Fence, PreCopy, ROOT_FILES, staging_file};
use dewar_memory::Ram;
use dewar_registry::{GuestFolder, GuestRecord, ProcessId};
use dewar_units::{PAGE_BYTES, PageRange, PageSet};
use std::fs::{self, File};
use std::ops::Range;

/// Where all lies in the file of copies, among CRIU's images.
pub(crate) const STAGING_INDEX: &str = "staging.json";
/// Says that it is kept from running, and what was changed for that.
const FENCE: &str = "fence.json";
/// What the file of copies may hold beside twice the memory that is in use: what is written to the root file system.
const MORE_ROOM: u64 = 8 << 30;

/// What a container's last step here has made.
pub(crate) struct LastState {
    /// Which pages of the copies were written last.
    pub written: PageSet,
    /// CRIU's images but for pages, as an archive.
    pub archive: Vec<u8>,
}

impl<'f> ContainerGuest<'f> {
    /// One that is about to leave, what the other host must know of it, and its copies as memory to be sent.
    ///
    /// # Errors
    /// Where it is no container, or its memory would not fit beside itself.
    pub(crate) fn leaving(
        folder: &'f GuestFolder,
        record: &GuestRecord,
    ) -> Result<(Self, Description, Ram), Failure> {
        let (mut guest, description) = Self::new(folder, record)?;
        let needed = guest.container.memory_bytes()?;
        let room = (2 * needed + MORE_ROOM).next_multiple_of(PAGE_BYTES as u64);
        let path = staging_file(&guest.images);
        let failed =
            |what: String| Failure::new(Code::Failed, format!("{}: {what}", path.display()));
        // The other one was made for a checkpoint.
        guest.copied = None;
        fs::remove_file(&path).map_err(|error| failed(error.to_string()))?;
        guest.copied = Some(PreCopy::with_room(record.process.pid, &guest.images, room)?);
        let mut copies = Ram::default();
        let file = File::open(&path).map_err(|error| failed(error.to_string()))?;
        copies
            .add("copies".to_owned(), file, room, 0)
            .map_err(|error| failed(error.to_string()))?;
        Ok((guest, description, copies))
    }

    /// Bytes of memory that its processes have for themselves.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.container.memory_bytes().unwrap_or(0)
    }

    /// Copies what was written since the last time, or all at first; says which pages of the copies that changed.
    ///
    /// # Errors
    /// Where there is no room for it, or the container has ended.
    pub(crate) fn copy_round(&mut self, pages: u64) -> Result<PageSet, Failure> {
        let Some(copied) = &mut self.copied else {
            return Err(Failure::new(Code::Failed, "it was stopped already"));
        };
        copied.round()?;
        Ok(changed(&copied.take_written(), pages))
    }

    /// Stops it, and keeps it from running whatever becomes of us.
    ///
    /// A network that was there before the container is closed first: CRIU, which is to let the container run, opens it
    /// again as soon as all but the pages is saved, and the kernel would acknowledge what is sent to a process that never
    /// reads it. One that CRIU saves with the container must be as it was until then.
    ///
    /// # Errors
    /// Where it cannot be saved, or not be kept so.
    pub(crate) fn stop_to_leave(&mut self, pages: u64) -> Result<LastState, Failure> {
        let (container, process) = (self.container.clone(), self.process);
        // On disk before it is made: only what we have done is taken back.
        let fence = container.plan_fence(&process)?;
        let is_silent = container.has_named_network()?;
        if is_silent {
            self.folder.write(FENCE, &fence)?;
            let silenced = container.silence(&process, &fence, &strays(self.folder));
            let begun = silenced.map_err(Failure::from).and_then(|()| self.begin());
            if let Err(error) = begun {
                container.unsilence(&process, &fence)?;
                self.folder.remove(FENCE)?;
                return Err(error);
            }
        } else {
            self.begin()?;
            self.folder.write(FENCE, &fence)?;
        }
        let strays = self.strays.clone();
        std::thread::scope(|scope| {
            // It takes as long as the rest.
            let folder = self.folder;
            let fence = scope.spawn(move || -> Result<(), Failure> {
                if let Err(error) = container.freeze(&strays) {
                    // That it stands still is not ours to take back.
                    container.unsilence(&process, &fence)?;
                    folder.remove(FENCE)?;
                    return Err(error.into());
                }
                match is_silent {
                    true => Ok(()),
                    false => Ok(container.silence(&process, &fence, &strays)?),
                }
            });
            let staged = self.stage(pages);
            fence.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            staged
        })
    }

    fn stage(&mut self, pages: u64) -> Result<LastState, Failure> {
        let Some(dump) = &mut self.dump else {
            return Err(Failure::new(Code::Failed, "it was not stopped"));
        };
        let files = self.overlay.iter().map(|_| (ROOT_FILES.to_owned(), archive(&self.images)));
        let index = dump.stage(&files.collect::<Vec<_>>())?;
        let written = dump.copies().map(PreCopy::take_written).unwrap_or_default();
        let folder = dump.images();
        let failed = |error: std::io::Error| {
            Failure::new(Code::Failed, format!("packing its images: {error}"))
        };
        let text = serde_json::to_vec(&index).map_err(|error| failed(error.into()))?;
        fs::write(folder.join(STAGING_INDEX), text).map_err(failed)?;
        // Where it is not known what it uses, nothing is read before it is needed.
        let _ = fs::copy(self.folder.file(HOT_PAGES), folder.join(HOT_PAGES));
        let archive = pack(&folder).map_err(failed)?;
        Ok(LastState { written: changed(&written, pages), archive })
    }

    /// That it has stood still ever since, and still does.
    ///
    /// # Errors
    /// Where it ran meanwhile, which its user alone can have done: what was sent of it is not what it is.
    pub(crate) fn require_stopped(&mut self) -> Result<(), Failure> {
        match &self.dump {
            Some(dump) => {
                dump.require_frozen()?;
                Ok(self.container.require_fenced()?)
            }
            None => Err(Failure::new(Code::Failed, "it was let run meanwhile")),
        }
    }

    /// Lets it run here, after all.
    ///
    /// # Errors
    /// Where it does not.
    pub(crate) fn stay(&mut self) -> Result<(), Failure> {
        if let Some(mut dump) = self.dump.take() {
            dump.end()?;
        }
        let _ = self.folder.remove(DUMP);
        lift_fence(self.folder, &self.container, &self.process)
    }

    /// Ends it: it runs at the other host.
    ///
    /// # Errors
    /// Where it does not end.
    pub(crate) fn leave(&mut self) -> Result<(), Failure> {
        self.container.end_fenced(&self.process, &self.strays)?;
        self.dump = None;
        unmount_files(self.folder)
    }
}

/// The same as [`ContainerGuest::stay`], of a container that is known by its record alone.
///
/// # Errors
/// As there.
pub(crate) fn stay_by_record(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    let Some(known) = &record.container else { return Ok(()) };
    if folder.file(FENCE).exists() {
        // The runtime may be about to freeze it.
        strays(folder).end_all();
    }
    let_run(folder, record)?;
    lift_fence(folder, &Container::of(known), &record.process)
}

/// Takes back what keeps it from running, if that is there.
fn lift_fence(
    folder: &GuestFolder,
    container: &Container,
    process: &ProcessId,
) -> Result<(), Failure> {
    if let Some(fence) = folder.read::<Fence>(FENCE)? {
        container.lift_fence(process, &fence)?;
        folder.remove(FENCE)?;
    }
    Ok(())
}

/// The same as [`ContainerGuest::leave`], of one that is known by its record alone.
///
/// # Errors
/// As there.
pub(crate) fn leave_by_record(folder: &GuestFolder, record: &GuestRecord) -> Result<(), Failure> {
    let Some(known) = &record.container else { return Ok(()) };
    Container::of(known).end_fenced(&record.process, &strays(folder))?;
    unmount_files(folder)?;
    let _ = remove_folder(&images_folder(folder));
    Ok(())
}

/// The pages of these bytes.
fn changed(written: &[Range<u64>], pages: u64) -> PageSet {
    let mut set = PageSet::new(pages);
    for range in written {
        let first = range.start / PAGE_BYTES as u64;
        let end = range.end.div_ceil(PAGE_BYTES as u64).min(pages);
        set.insert_range(PageRange::new(first, end.max(first)));
    }
    set
}
