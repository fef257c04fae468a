//! `adopt`: a QEMU that was started by other means becomes a guest. Nothing of it is changed.

use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::locked_guest::{NextGuest, clear_predecessor};
use dewar_guest_qemu::cmdline::{arguments, file_paths};
use dewar_guest_qemu::{Qmp, discover};
use dewar_registry::{GuestRecord, ProcessId, RamFile};
use std::fs;
use std::path::{Path, PathBuf};

/// Adopts the QEMU that listens on a QMP socket; returns the guest's record and QEMU's version.
///
/// # Errors
/// Where it is no QEMU that can be handled, or a guest already.
pub fn adopt(host: &Host, name: &str, socket: &Path) -> Result<(GuestRecord, String), Failure> {
    let folder = host.registry.guest(name)?;
    let _lock = folder.lock()?;
    drop(clear_predecessor(&folder, None, NextGuest::Another)?);
    let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    let failed = |why: String| Failure::new(Code::Failed, format!("{}: {why}", socket.display()));
    let mut qmp = Qmp::connect(&socket).map_err(|error| {
        failed(error.to_string())
            .advice("give the guest a socket for Dewar alone: -qmp unix:PATH,server=on,wait=off")
    })?;
    let pid = qmp.peer_pid().map_err(|error| failed(error.to_string()))?;
    let process = ProcessId::of(pid)
        .ok_or_else(|| failed("the process that listens on it has ended".to_owned()))?;
    if let Some(other) = known_guest(host, process)? {
        return Err(failed(format!("it is guest '{other}' already")));
    }
    let unreadable = |error: std::io::Error| failed(error.to_string());
    let started = (program(pid).map_err(unreadable)?, command_line(pid).map_err(unreadable)?);
    let cwd = fs::read_link(format!("/proc/{pid}/cwd")).map_err(unreadable)?;
    let record = GuestRecord::new(name, process, started, cwd, socket.clone());
    let mut record = GuestRecord { adopted: true, ..record };
    refuse_lost_paths(&record)?;
    let found = discover(&mut qmp, &record)?;
    record.ram = found
        .ram
        .regions()
        .iter()
        .map(|region| RamFile {
            id: region.name.clone(),
            path: PathBuf::new(),
            bytes: region.addresses.end - region.addresses.start,
        })
        .collect();
    folder.set_record(&record)?;
    Ok((record, found.version))
}

/// That the files which its command line names can be found by it: a QEMU that puts itself
/// in the background goes to `/` and leaves no word of where it was started.
fn refuse_lost_paths(record: &GuestRecord) -> Result<(), Failure> {
    let daemonizes = arguments(&record.arguments).iter().any(|it| it.name == "daemonize");
    let lost = file_paths(&record.arguments)
        .into_iter()
        .find(|path| daemonizes && !path.is_empty() && !path.starts_with('/'));
    match lost {
        None => Ok(()),
        Some(path) => Err(Failure::new(
            Code::Unsupported,
            format!("it put itself in the background, and where its '{path}' is cannot be known"),
        )
        .state("the guest was not touched")
        .advice("start it with whole paths, or by 'dewar run'")),
    }
}

/// The program's path, also where another file has taken its place since.
fn program(pid: i32) -> std::io::Result<PathBuf> {
    let path = fs::read_link(format!("/proc/{pid}/exe"))?;
    let text = path.to_string_lossy();
    Ok(text.strip_suffix(" (deleted)").map_or_else(|| path.clone(), PathBuf::from))
}

fn command_line(pid: i32) -> std::io::Result<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline"))?;
    let text = bytes.strip_suffix(&[0]).unwrap_or(&bytes);
    Ok(text
        .split(|byte| *byte == 0)
        .skip(1)
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect())
}

fn known_guest(host: &Host, process: ProcessId) -> Result<Option<String>, Failure> {
    Ok(host.registry.names()?.into_iter().find(|name| {
        let record = host.registry.guest(name).and_then(|folder| folder.record());
        record.is_ok_and(|record| record.process.is_same(&process))
    }))
}
