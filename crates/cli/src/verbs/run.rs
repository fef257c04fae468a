use crate::args::RunArgs;
use crate::context::Context;
use crate::output::{note, warn};
use crate::verbs::doctor::require_tracking;
use dewar_guest_qemu::cmdline::LONGEST_DISK_ID;
use dewar_lifecycle::launch::{LaunchRequest, Started, start};
use dewar_lifecycle::served_disks::ServedDisk;
use dewar_lifecycle::{Code, Failure};
use dewar_units::ByteSize;
use serde_json::json;
use std::path::{Path, PathBuf};

pub fn run(context: &Context, args: RunArgs) -> Result<(), Failure> {
    require_tracking()?;
    let (program, arguments) = split_command(args.command)?;
    let disks = served_disks(&args.disks)?;
    context.registry.guest(&args.name)?;
    // Disks that this guest needs may be another's that a dead command left; what cannot be
    // finished with that is told, and in nobody's way.
    context.recover_all()?.failures.iter().for_each(note);
    let request = LaunchRequest {
        name: args.name,
        program,
        arguments,
        ram_dir: args.ram_dir,
        overcommit: args.overcommit,
        qos: args.qos,
        disks,
    };
    let Started { record, why_not_running, no_checkpoint } = start(context, request)?;
    if let Some(why) = why_not_running {
        warn(&format!("the guest {why}"));
    }
    if let Some(why) = &no_checkpoint {
        warn(&format!("no checkpoint of it can be taken: {why}"));
    }
    let bytes: u64 = record.ram.iter().map(|file| file.bytes).sum();
    let log = context.registry.guest(&record.name)?.file("console.log");
    context.print(
        json!({"name": record.name, "pid": record.process.pid, "memory_bytes": bytes,
            "no_checkpoint": no_checkpoint}),
        &format!(
            "{} runs as process {} with {} of RAM; its console is in {}",
            record.name,
            record.process.pid,
            ByteSize(bytes),
            log.display()
        ),
    );
    Ok(())
}

/// The disks that `--disk` names.
fn served_disks(words: &[String]) -> Result<Vec<ServedDisk>, Failure> {
    let disks: Vec<ServedDisk> = words
        .iter()
        .enumerate()
        .map(|(at, word)| served_disk(at, word))
        .collect::<Result<_, _>>()?;
    for (at, disk) in disks.iter().enumerate() {
        if disks[..at].iter().any(|it| it.id == disk.id || it.path == disk.path) {
            let what = format!("--disk {}: another has its path or id", disk.path.display());
            return Err(Failure::new(Code::Usage, what));
        }
    }
    Ok(disks)
}

fn served_disk(at: usize, word: &str) -> Result<ServedDisk, Failure> {
    let bad = |why: String| Failure::new(Code::Usage, format!("--disk {word}: {why}"));
    let mut parts = word.split(',');
    let path = Path::new(parts.next().unwrap_or_default());
    let path = path.canonicalize().map_err(|error| bad(error.to_string()))?;
    let mut disk = ServedDisk {
        id: format!("disk{at}"),
        path,
        format: "raw".to_owned(),
        is_read_only: false,
        is_warm: false,
        cache_bytes: None,
    };
    for part in parts {
        match part.split_once('=') {
            None if part == "readonly" => disk.is_read_only = true,
            Some(("format", format @ ("raw" | "qcow2"))) => disk.format = format.to_owned(),
            Some(("cache", "warm")) => disk.is_warm = true,
            Some(("cache", "off")) => disk.is_warm = false,
            Some(("cache-size", size)) => {
                let size = size.parse::<ByteSize>().map_err(|error| bad(error.to_string()))?;
                disk.cache_bytes = Some(size.0);
            }
            Some(("id", id)) if (1..=LONGEST_DISK_ID).contains(&id.len()) => {
                disk.id = id.to_owned()
            }
            _ => return Err(bad(format!("'{part}' is not understood"))),
        }
    }
    Ok(disk)
}

fn split_command(command: Vec<std::ffi::OsString>) -> Result<(PathBuf, Vec<String>), Failure> {
    let mut words = command.into_iter();
    let name = words.next().unwrap_or_default();
    if name.as_encoded_bytes().starts_with(b"-") {
        let what = format!("'{}' is no program", name.to_string_lossy());
        return Err(Failure::new(Code::Usage, what).advice(
            "name QEMU before its options: dewar run NAME -- qemu-system-x86_64 -m 2G ...",
        ));
    }
    let arguments = words
        .map(|word| {
            word.into_string().map_err(|word| {
                let what = format!("argument {} is not UTF-8", word.to_string_lossy());
                Failure::new(Code::Unsupported, what)
            })
        })
        .collect::<Result<_, _>>()?;
    Ok((find_program(Path::new(&name))?, arguments))
}

/// The file of a program that is named as in a shell.
pub fn find_program(path: &Path) -> Result<PathBuf, Failure> {
    let found = if path.components().count() > 1 {
        std::path::absolute(path).ok().filter(|path| path.is_file())
    } else {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&folders).map(|folder| folder.join(path)).find(|it| it.is_file())
    };
    let missing = || {
        Failure::new(Code::Failed, format!("there is no program {}", path.display()))
            .advice("install QEMU (Debian: qemu-system-x86)")
    };
    found.ok_or_else(missing)
}
