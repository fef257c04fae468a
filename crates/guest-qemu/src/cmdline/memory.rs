//! What `run` changes of a command line: RAM becomes shared files, and disks that Dewar serves are on its server; and
//! the one thing that it adds: a QMP socket.

use super::options::{Argument, Properties, Unsupported, arguments, parse_size};
use super::served_disks::{DISKS_SOCKET_FILE, over_nbd};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// QEMU's RAM where `-m` is not given.
const DEFAULT_RAM: u64 = 128 << 20;
/// The backend that is added where the user names none.
const BACKEND_ID: &str = "dewar-ram";
/// Where QEMU maps RAM, so that the kernel can use huge pages for it; without
/// it the address is that of the guard page below, plus one page.
const ALIGNMENT: &str = "2M";
const ALIGNED_BYTES: u64 = 2 << 20;
/// Options that make a network backend.
const NETWORKS: [&str; 3] = ["netdev", "nic", "net"];
const BACKENDS: [&str; 3] = ["memory-backend-ram", "memory-backend-memfd", "memory-backend-file"];
const MEMORY_DEVICE: &str =
    "memory devices are not handled: give the guest all of its memory with -m";
/// Devices whose memory or whose access to RAM cannot be handled.
const REFUSED_DEVICES: [(&str, &str); 10] = [
    ("vfio-", "the device's own access to RAM is not seen (VFIO)"),
    (
        "vhost-user-",
        "another process writes its RAM (vhost-user), and that is not tracked; a folder can be \
         shared by 9p (-virtfs) or over the network instead of virtiofs",
    ),
    ("ivshmem-", "other processes write its memory (ivshmem)"),
    ("pc-dimm", MEMORY_DEVICE),
    ("nvdimm", MEMORY_DEVICE),
    ("virtio-mem", MEMORY_DEVICE),
    ("virtio-pmem", MEMORY_DEVICE),
    ("cxl-", "memory devices are not handled"),
    ("scsi-block", "the guest talks to the host's disk itself, which no file can stand in for"),
    ("scsi-generic", "the guest talks to the host's device itself, which no file can stand in for"),
];

/// A RAM file of a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedRegion {
    /// The id of its backend.
    pub id: String,
    /// Its size.
    pub bytes: u64,
    /// The file; new ones must be made before QEMU starts.
    pub path: PathBuf,
    /// Whether the file is ours to make and to remove.
    pub owned: bool,
}

/// A command line ready to be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunPlan {
    /// The arguments after the program.
    pub arguments: Vec<String>,
    /// The RAM files.
    pub regions: Vec<PlannedRegion>,
    /// Whether QEMU puts itself in the background.
    pub daemonizes: bool,
}

impl RunPlan {
    /// Has no port forwarded from the start: those that are wanted are added by QMP.
    ///
    /// # Errors
    /// Where an option cannot be read.
    pub fn forward_nothing(&mut self) -> Result<(), Unsupported> {
        let mut changed = self.arguments.clone();
        for argument in arguments(&self.arguments) {
            let Some(value) = argument.value.filter(|_| NETWORKS.contains(&argument.name)) else {
                continue;
            };
            let mut network = Properties::parse(value)?;
            if network.get("type", "type").as_deref() == Some("user") {
                network.remove("hostfwd");
                changed[argument.at + 1] = network.to_string();
            }
        }
        self.arguments = changed;
        Ok(())
    }
}

/// Plans how to run the command line `line` (without the program): RAM in
/// files that `ram_path` names by backend id, a QMP socket at `qmp`, and the server of its disks, if Dewar serves some,
/// beside that.
///
/// # Errors
/// Where the guest's RAM cannot be shared, or a device makes tracking wrong.
pub fn plan_run(
    line: &[String],
    qmp: &Path,
    ram_path: impl Fn(&str) -> PathBuf,
) -> Result<RunPlan, Unsupported> {
    let found = arguments(line);
    refuse(&found)?;
    let mut changed = line.to_vec();
    let mut regions = Vec::new();
    for argument in found.iter().filter(|argument| argument.name == "object") {
        let Some(mut object) = argument.value.map(Properties::parse).transpose()? else { continue };
        let kind = object.get("qom-type", "qom-type").unwrap_or_default();
        if kind.starts_with("memory-backend-") {
            regions.push(share(&kind, &mut object, &ram_path)?);
            changed[argument.at + 1] = object.to_string();
        }
    }
    let used = used_backends(&found)?;
    for id in &used {
        if !regions.iter().any(|region| region.id == *id) {
            return Err(Unsupported(format!("memory backend '{id}' is used but not defined")));
        }
    }
    if used.is_empty() {
        let bytes = ram_bytes(&found)?;
        let path = ram_path(BACKEND_ID);
        let file = path.display().to_string().replace(',', ",,");
        changed.extend([
            "-object".to_owned(),
            format!(
                "memory-backend-file,id={BACKEND_ID},size={bytes},mem-path={file},share=on,\
                 align={ALIGNMENT}"
            ),
            "-machine".to_owned(),
            format!("memory-backend={BACKEND_ID}"),
        ]);
        regions.push(PlannedRegion { id: BACKEND_ID.to_owned(), bytes, path, owned: true });
    }
    over_nbd(&mut changed, &qmp.with_file_name(DISKS_SOCKET_FILE));
    let socket = qmp.display().to_string().replace(',', ",,");
    changed.extend([
        "-chardev".to_owned(),
        format!("socket,id=dewar-qmp,path={socket},server=on,wait=off"),
        "-mon".to_owned(),
        "chardev=dewar-qmp,mode=control".to_owned(),
    ]);
    let daemonizes = found.iter().any(|argument| argument.name == "daemonize");
    Ok(RunPlan { arguments: changed, regions, daemonizes })
}

fn refuse(found: &[Argument<'_>]) -> Result<(), Unsupported> {
    for Argument { name, value, .. } in found {
        let value = value.unwrap_or_default();
        let reason = match *name {
            "snapshot" => "-snapshot keeps the disks in files that vanish with QEMU".to_owned(),
            "drive" if Properties::parse(value)?.switch("snapshot") == Some(true) => {
                "-drive snapshot=on keeps the disk in a file that vanishes with QEMU".to_owned()
            }
            "mem-path" => {
                "-mem-path makes RAM that is not shared; use -object memory-backend-file,share=on"
                    .to_owned()
            }
            "incoming" => "the guest would come from a migration".to_owned(),
            "device" => {
                let device = Properties::parse(value)?.get("driver", "driver").unwrap_or_default();
                match REFUSED_DEVICES.iter().find(|(prefix, _)| device.starts_with(prefix)) {
                    Some((_, why)) => format!("-device {device}: {why}"),
                    None => continue,
                }
            }
            "netdev"
                if Properties::parse(value)?.get("type", "type").as_deref()
                    == Some("vhost-user") =>
            {
                "-netdev vhost-user: another process writes its RAM (vhost-user)".to_owned()
            }
            "numa" if Properties::parse(value)?.get("mem", "").is_some() => {
                "-numa node,mem= gives RAM that cannot be shared; use memdev=".to_owned()
            }
            _ => continue,
        };
        return Err(Unsupported(reason));
    }
    Ok(())
}

/// Makes a memory backend a shared file.
fn share(
    kind: &str,
    object: &mut Properties,
    ram_path: &impl Fn(&str) -> PathBuf,
) -> Result<PlannedRegion, Unsupported> {
    let id =
        object.get("id", "").ok_or_else(|| Unsupported(format!("-object {kind} has no id")))?;
    if !BACKENDS.contains(&kind) {
        return Err(Unsupported(format!("-object {kind}: RAM of this kind cannot be shared")));
    }
    let bytes = parse_size(&object.get("size", "").unwrap_or_default(), 1)
        .map_err(|_| Unsupported(format!("-object {kind},id={id} has no size")))?;
    let (path, owned) = match object.get("mem-path", "") {
        // Not by us: the file may be a template that many guests begin with.
        Some(path) if kind == "memory-backend-file" && object.switch("share") != Some(true) => {
            return Err(Unsupported(format!(
                "-object {kind},id={id} has {path} private, so what the guest writes is not in \
                 it: say share=on to have it written there, or leave mem-path out"
            )));
        }
        Some(path) if kind == "memory-backend-file" => (PathBuf::from(path), false),
        _ => {
            for memfd_only in ["hugetlb", "hugetlbsize", "seal"] {
                object.remove(memfd_only);
            }
            object.set_implied("qom-type", "memory-backend-file");
            (ram_path(&id), true)
        }
    };
    let text = path.display().to_string();
    object.set("mem-path", &text, Value::from(text.as_str()));
    object.set("share", "on", Value::from(true));
    if owned && object.get("align", "").is_none() {
        object.set("align", ALIGNMENT, Value::from(ALIGNED_BYTES));
    }
    Ok(PlannedRegion { id, bytes, path, owned })
}

/// The ids of the backends that the guest's RAM is made of.
fn used_backends(found: &[Argument<'_>]) -> Result<Vec<String>, Unsupported> {
    let mut used = Vec::new();
    for Argument { name, value, .. } in found {
        let key = match *name {
            "machine" | "M" => "memory-backend",
            "numa" => "memdev",
            _ => continue,
        };
        used.extend(Properties::parse(value.unwrap_or_default())?.get(key, ""));
    }
    Ok(used)
}

fn ram_bytes(found: &[Argument<'_>]) -> Result<u64, Unsupported> {
    const MIB: u64 = 1 << 20;
    let mut bytes = DEFAULT_RAM;
    // `-m` is another way to write `-machine memory.`; the last word counts.
    for argument in found {
        // A number alone counts in MiB after -m, and in bytes as QEMU's own size.
        let (key, implied, unit) = match argument.name {
            "m" => ("size", "size", MIB),
            "machine" | "M" => ("memory.size", "", 1),
            _ => continue,
        };
        let properties = Properties::parse(argument.value.unwrap_or_default())?;
        let size = match &properties {
            Properties::Json(map) if implied.is_empty() => map
                .get("memory")
                .and_then(|memory| memory.get("size"))
                .map(|size| size.as_str().map_or_else(|| size.to_string(), str::to_owned)),
            pairs => pairs.get(key, implied),
        };
        if let Some(size) = size {
            bytes = parse_size(&size, unit)?;
        }
    }
    Ok(bytes)
}
