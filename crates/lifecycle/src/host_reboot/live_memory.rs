//! The guests' memory, kept by the kernel itself (LUO).

use super::note::{KeptGuest, Note};
use super::watcher::Watcher;
use crate::failure::{Code, Failure};
use crate::held_ram::{follow, link_to, link_to_file};
use crate::host::Host;
use dewar_kernel::{LiveSession, LiveUpdate};
use dewar_registry::RamFile;
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// What the kernel keeps while this lives, and a kexec ends it.
#[derive(Debug)]
pub struct Preserved {
    _session: LiveSession,
    _device: LiveUpdate,
}

/// A RAM file that is to be kept.
#[derive(Debug)]
pub struct OpenRam {
    file: File,
    ram: RamFile,
    token: u64,
}

impl OpenRam {
    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }
}

/// The name of the session of a root.
fn session_name(host: &Host) -> String {
    format!("dewar-{}", host.registry.tag())
}

fn failed(what: &str, path: &Path) -> impl FnOnce(io::Error) -> Failure {
    let what = format!("{what} {}", path.display());
    move |error| Failure::new(Code::Failed, format!("{what}: {error}"))
}

/// Opens the RAM files of guests that the kernel keeps, and notes a token for each.
pub fn open(
    host: &Host,
    guests: &mut [KeptGuest],
    is_live: impl Fn(&str) -> bool,
) -> Result<Vec<OpenRam>, Failure> {
    let mut opened = Vec::new();
    for kept in guests.iter_mut().filter(|kept| is_live(&kept.name)) {
        let record = host.registry.guest(&kept.name)?.record()?;
        for ram in record.ram {
            let file = File::options().read(true).write(true).open(&ram.path);
            let file = file.map_err(failed("open", &ram.path))?;
            let token = opened.len() as u64;
            kept.tokens.push(token);
            opened.push(OpenRam { file, ram, token });
        }
    }
    Ok(opened)
}

/// Takes the files' names, since the kernel keeps none that has one, and has it keep them. The watcher has them open.
/// The guests run all the while.
pub fn preserve(
    host: &Host,
    files: &[OpenRam],
    watcher: &Watcher,
) -> Result<Option<Preserved>, Failure> {
    if files.is_empty() {
        return Ok(None);
    }
    let device = LiveUpdate::open()?;
    let session = device.create(&session_name(host))?;
    for OpenRam { file, ram, token } in files {
        link_to(&ram.path, watcher.pid()).map_err(failed("link", &ram.path))?;
        session.preserve(file, *token)?;
    }
    Ok(Some(Preserved { _session: session, _device: device }))
}

/// Has the links of guests that run on lead to their QEMU, and no process of ours be needed.
pub fn leave_to_qemu(host: &Host, note: &Note) {
    for kept in note.guests.iter().filter(|kept| !kept.tokens.is_empty()) {
        let record = host.registry.guest(&kept.name).and_then(|folder| folder.record());
        if let Some(record) = record.ok().filter(|record| record.process.is_alive()) {
            follow(&record);
        }
    }
}

/// That what the kernel before has kept can be asked for now, where a guest needs it.
///
/// # Errors
/// Where another program has the kernel's device: what was kept is there still, and nothing is known to be lost.
pub fn require_device(note: &Note) -> Result<(), Failure> {
    if note.guests.iter().all(|kept| kept.tokens.is_empty()) {
        return Ok(());
    }
    match LiveUpdate::open() {
        Err(error) if error.errno() == Some(Errno::BUSY.raw_os_error()) => {
            Err(Failure::from(error)
                .state("the guests wait")
                .advice("'dewar host-reboot --thaw' tries again"))
        }
        _ => Ok(()),
    }
}

/// What the kernel before has kept, and the process that has it from now on.
#[derive(Debug)]
pub struct Retrieved {
    holder: Watcher,
}

impl Retrieved {
    /// Asks for all of it, and has the guests' paths lead to it; nothing where no guest needs any.
    ///
    /// # Errors
    /// Where the kernel has kept nothing for us, or not all of it.
    pub fn of(host: &Host, note: &Note) -> Result<Option<Self>, Failure> {
        if note.guests.iter().all(|kept| kept.tokens.is_empty()) {
            return Ok(None);
        }
        let device = LiveUpdate::open()?;
        let session = device.retrieve(&session_name(host))?;
        let mut files: Vec<(PathBuf, File)> = Vec::new();
        for kept in &note.guests {
            let record = host.registry.guest(&kept.name)?.record()?;
            for (ram, token) in record.ram.iter().zip(&kept.tokens) {
                files.push((ram.path.clone(), File::from(session.retrieve(*token)?)));
            }
        }
        let open: Vec<&File> = files.iter().map(|(_, file)| file).collect();
        let holder = Watcher::start(host, &open)?;
        for (path, file) in &files {
            // Its tmpfs is a new one.
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder).map_err(failed("create", folder))?;
            }
            link_to_file(path, holder.pid(), file).map_err(failed("link", path))?;
        }
        // The session ends with this process in any case.
        let _ = session.finish();
        Ok(Some(Self { holder }))
    }

    /// Each guest's QEMU has its memory.
    pub fn dismiss(self) {
        self.holder.dismiss();
    }
}
