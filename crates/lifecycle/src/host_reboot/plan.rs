//! What a reboot of the host would do with each guest, and what stands against it. Nothing is touched.

use super::note::Note;
use crate::attached_guest::AttachedGuest;
use crate::failure::{Code, Failure};
use crate::host::Host;
use crate::reporter::Reporter;
use dewar_guest_qemu::freeze::{check, check_place};
use dewar_hostreboot::{
    CommandLine, DaxMount, HostRebootError, KernelImage, dax, kexec, live_update,
};
use dewar_registry::{GuestRecord, Kept, Phase, RamFile};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where a running systemd says that it is the host's init.
const SYSTEMD: &str = "/run/systemd/system";
const RELEASE: &str = "/proc/sys/kernel/osrelease";
/// `f_type` of tmpfs (statfs(2)).
const TMPFS: rustix::fs::FsWord = 0x0102_1994;
/// How long another command may have a guest.
const PATIENCE: Duration = Duration::from_secs(5);
/// What the new kernel must be built with for memory of its command line to have files.
const FOR_DAX: [&str; 3] = ["CONFIG_X86_PMEM_LEGACY", "CONFIG_BLK_DEV_PMEM", "CONFIG_FS_DAX"];

/// What becomes of guests whose memory is not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Others {
    /// They are frozen into the default store, and thawed from it.
    Store,
    /// They are shut down.
    Stop,
    /// The host is not rebooted while there are any.
    Refuse,
}

/// What is done beforehand for the case that the memory is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// A checkpoint of each guest, in the default store.
    Checkpoint,
    /// Nothing.
    None,
}

/// What a person asks for.
#[derive(Debug, Clone)]
pub struct Request {
    /// The new kernel; that which runs, where nothing is said.
    pub kernel: Option<PathBuf>,
    /// Its initramfs; the usual one beside it, where nothing is said.
    pub initrd: Option<PathBuf>,
    /// Its command line; that of the running kernel, where nothing is said.
    pub append: Option<String>,
    /// What becomes of the others.
    pub others: Others,
    /// What is done for the case of a loss; by default a checkpoint where there is a default store.
    pub fallback: Option<Fallback>,
    /// Whether checksums of the memory are kept.
    pub checksums: bool,
    /// Whether the kernel is started at once, and not by the init system.
    pub now: bool,
}

/// What is done with one guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// Its memory is kept where it is.
    Kept,
    /// It is frozen already, in memory that is kept, and stays so.
    StaysFrozen,
    /// It is frozen into the store.
    Store,
    /// It is shut down.
    Stop,
}

/// What keeps a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keeper {
    /// The file system that it lies on, which is memory itself.
    Dax,
    /// The kernel (LUO).
    Kernel,
    /// Nothing.
    Nobody,
}

/// A guest of a plan.
#[derive(Debug, Clone)]
pub struct PlannedGuest {
    /// Its name.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// What is done with it.
    pub how: How,
    /// What keeps its memory.
    pub keeper: Keeper,
}

/// What would be done.
#[derive(Debug)]
pub struct Plan {
    /// The new kernel.
    pub kernel: KernelImage,
    /// Its initramfs.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub line: CommandLine,
    /// The guests.
    pub guests: Vec<PlannedGuest>,
    /// What their memory lies on.
    pub mounts: Vec<DaxMount>,
    /// Why it cannot be done, each a sentence.
    pub refusals: Vec<String>,
    /// What will not be as before, each a sentence.
    pub warnings: Vec<String>,
    /// Whether checkpoints are taken first.
    pub fallback: Fallback,
    /// Whether checksums are kept.
    pub checksums: bool,
    /// Whether the kernel is started at once.
    pub now: bool,
    /// How it went the last time.
    pub last: Option<Note>,
}

impl Plan {
    /// The names of the guests of which this is done.
    pub fn names(&self, how: How) -> impl Iterator<Item = &str> {
        self.guests.iter().filter(move |it| it.how == how).map(|it| it.name.as_str())
    }

    /// Whether the kernel itself keeps a guest's memory.
    pub fn is_kept_by_kernel(&self, name: &str) -> bool {
        self.guests.iter().any(|it| it.name == name && it.keeper == Keeper::Kernel)
    }

    /// That nothing stands against it.
    ///
    /// # Errors
    /// All that does.
    pub fn require(&self) -> Result<(), Failure> {
        if self.refusals.is_empty() {
            return Ok(());
        }
        let what = format!("the host cannot be rebooted so: {}", self.refusals.join("; "));
        Err(Failure::new(Code::Unsupported, what).state("no guest was touched"))
    }
}

/// Looks at the host, the new kernel and each guest.
///
/// # Errors
/// Where the kernel's files are not what they should be, or guests cannot be listed.
pub fn plan(host: &Host, request: &Request, reporter: &dyn Reporter) -> Result<Plan, Failure> {
    let kernel = new_kernel(request)?;
    let initrd = match &request.initrd {
        Some(path) if !path.is_file() => {
            return Err(Failure::new(Code::Failed, format!("there is no {}", path.display())));
        }
        Some(path) => Some(path.clone()),
        None => kernel.usual_initrd(),
    };
    let line = match &request.append {
        Some(text) => CommandLine::new(text),
        None => CommandLine::present()
            .map_err(|error| Failure::new(Code::Failed, format!("/proc/cmdline: {error}")))?,
    };
    let has_store = host.registry.default_store().is_dir();
    let by_default = if has_store { Fallback::Checkpoint } else { Fallback::None };
    let mut plan = Plan {
        kernel,
        initrd,
        line,
        guests: Vec::new(),
        mounts: Vec::new(),
        refusals: Vec::new(),
        warnings: Vec::new(),
        fallback: request.fallback.unwrap_or(by_default),
        checksums: request.checksums,
        now: request.now,
        last: Note::load(host)?,
    };
    plan.look_at_host();
    for (_, record) in host.guests()? {
        reporter.stage(&format!("looking at {}", record.name));
        plan.look_at_guest(host, &record, request.others, reporter);
    }
    plan.look_at_memory();
    Ok(plan)
}

fn new_kernel(request: &Request) -> Result<KernelImage, Failure> {
    match &request.kernel {
        Some(path) => Ok(KernelImage::open(path)?),
        None => KernelImage::present().ok_or_else(|| {
            let what = "the running kernel's file is not in /boot under its version";
            Failure::new(Code::Failed, what).advice("name one with --kernel")
        }),
    }
}

impl Plan {
    fn look_at_host(&mut self) {
        if let Err(error) = kexec::check() {
            self.refusals.push(error.to_string());
        }
        if self.last.as_ref().is_some_and(Note::is_before_reboot) {
            let why = "guests wait already for a reboot that the init system was asked for: 'dewar host-reboot --thaw' lets them go on";
            self.refusals.push(why.to_owned());
        }
        if kexec::needs_signature() {
            self.warnings
                .push("this kernel is locked down, and starts signed kernels alone".to_owned());
        }
        if !self.now && !Path::new(SYSTEMD).is_dir() {
            let why = "its init is not systemd, which would end other services in order: --now does without";
            self.refusals.push(why.to_owned());
        }
        if self.initrd.is_none() {
            self.warnings.push("the new kernel gets no initramfs".to_owned());
        }
    }

    fn look_at_guest(
        &mut self,
        host: &Host,
        record: &GuestRecord,
        others: Others,
        reporter: &dyn Reporter,
    ) {
        let name = record.name.clone();
        let memory_bytes = record.ram.iter().map(|file| file.bytes).sum();
        let planned = |how, keeper| PlannedGuest { name: name.clone(), memory_bytes, how, keeper };
        if record.phase == Phase::Leaving {
            // Another host may need memory that is here, whether or not its process lives.
            self.refusals.push(format!(
                "'{name}' is on its way to another host: 'dewar migrate {name} --resume' first"
            ));
            return;
        }
        if record.container.is_some() {
            if record.process.is_alive() && others == Others::Stop {
                self.guests.push(planned(How::Stop, Keeper::Nobody));
            } else if record.process.is_alive() {
                self.refusals.push(format!(
                    "'{name}' is a container, whose memory cannot be kept: checkpoint and stop it, or say --others stop"
                ));
            }
            return;
        }
        let kept = kept_by(&record.ram);
        if !record.process.is_alive() {
            // What is in a store, or has ended, is none of ours.
            let frozen = record.frozen.as_ref().map(|frozen| &frozen.kept);
            if !matches!(frozen, Some(Kept::InPlace { .. })) {
                return;
            }
            if let Ok((Keeper::Dax, mounts)) = kept {
                self.guests.push(planned(How::StaysFrozen, Keeper::Dax));
                self.add_mounts(mounts);
            } else {
                self.refusals.push(format!(
                    "'{name}' is frozen, and its memory would be lost: thaw it first, or freeze it --to-store"
                ));
            }
            return;
        }
        let freezable = is_freezable(host, &name, kept.is_ok(), reporter);
        if let (Err(why), true) = (&freezable, others != Others::Stop || kept.is_ok()) {
            self.refusals.push(format!("'{name}' cannot be frozen: {why}"));
            return;
        }
        match (kept, others) {
            (Ok((keeper, mounts)), _) => {
                self.guests.push(planned(How::Kept, keeper));
                self.add_mounts(mounts);
            }
            (Err(_), Others::Store) => self.guests.push(planned(How::Store, Keeper::Nobody)),
            (Err(_), Others::Stop) => self.guests.push(planned(How::Stop, Keeper::Nobody)),
            (Err(why), Others::Refuse) => self.refusals.push(format!(
                "the memory of '{name}' cannot be kept: {why}; --others store keeps it in the default store, \
                 --others stop shuts it down"
            )),
        }
    }

    fn add_mounts(&mut self, mounts: Vec<DaxMount>) {
        for mount in mounts {
            if !self.mounts.contains(&mount) {
                self.mounts.push(mount);
            }
        }
    }

    fn look_at_memory(&mut self) {
        if self.guests.iter().any(|it| it.keeper == Keeper::Kernel) {
            self.refusals.extend(live_update::refusals(&self.kernel, &self.line));
            if !self.now {
                let why = "init would end the process that has the guests' memory: --now does without init";
                self.refusals.push(why.to_owned());
            }
            let present = std::fs::read_to_string(RELEASE).unwrap_or_default();
            if present.trim() != self.kernel.version {
                self.warnings.push(format!(
                    "Linux {} must understand what Linux {} hands over: try the two together first",
                    self.kernel.version,
                    present.trim()
                ));
            }
        }
        for mount in &self.mounts {
            self.refusals.extend(mount.check(&self.line).err());
            let lacks =
                |name: &&&str| self.kernel.option(name).is_some_and(|value| value.is_empty());
            if let Some(option) = FOR_DAX.iter().find(lacks).filter(|_| mount.by_command_line) {
                let version = &self.kernel.version;
                self.refusals.push(format!("Linux {version} is built without {option}"));
                break;
            }
        }
    }
}

/// What of this host's memory could be kept when its kernel is replaced.
///
/// # Errors
/// What to add, with the very words.
pub fn kept_memory() -> Result<String, String> {
    kexec::check().map_err(|error| error.to_string())?;
    if let Some(mount) = dax::mounts().first() {
        return Ok(format!("what lies in {} ('dewar run --memory-dir')", mount.display()));
    }
    live_update::check_running().map(|()| "all, by the kernel".to_owned()).map_err(|_| {
        let words = dax::suggestion();
        format!(
            "none: {words} on the kernel's command line, then 'mkfs.ext4 -b 4096 /dev/pmem0' and 'mount -o dax \
             /dev/pmem0 DIR'; or Linux 6.19 with kho=on liveupdate=on"
        )
    })
}

/// What keeps memory, and the file systems that it lies on; or why nothing does.
fn kept_by(ram: &[RamFile]) -> Result<(Keeper, Vec<DaxMount>), String> {
    if ram.is_empty() {
        return Err("nothing is known of it".to_owned());
    }
    let mount = |file: &RamFile| DaxMount::of(&file.path).map_err(|error| error.to_string());
    let mounts: Vec<Option<DaxMount>> = ram.iter().map(mount).collect::<Result<_, _>>()?;
    let on_dax: Vec<DaxMount> = mounts.into_iter().flatten().collect();
    if on_dax.len() == ram.len() {
        return Ok((Keeper::Dax, on_dax));
    }
    let elsewhere = ram.iter().find(|file| !is_in_tmpfs(&file.path));
    let path = |file: &RamFile| file.path.display().to_string();
    match live_update::check_running() {
        Ok(()) if elsewhere.is_none() && on_dax.is_empty() => Ok((Keeper::Kernel, Vec::new())),
        Ok(()) => Err(match elsewhere {
            Some(file) => {
                format!("{} is neither on persistent memory (DAX) nor in a tmpfs", path(file))
            }
            None => "it lies partly on persistent memory (DAX), and partly in a tmpfs".to_owned(),
        }),
        Err(why) => Err(format!("{} is not on persistent memory (DAX), and {why}", path(&ram[0]))),
    }
}

fn is_in_tmpfs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|state| state.f_type == TMPFS)
}

/// That a guest could be frozen, where its memory is or into a store.
fn is_freezable(
    host: &Host,
    name: &str,
    in_place: bool,
    reporter: &dyn Reporter,
) -> Result<(), String> {
    let look = || -> Result<(), Failure> {
        let mut attached = AttachedGuest::lock(host, name, PATIENCE, reporter)?;
        check(&mut attached.guest)?;
        if in_place {
            check_place(&attached.guest)?;
        }
        Ok(())
    };
    look().map_err(|failure| failure.what().to_owned())
}

impl From<HostRebootError> for Failure {
    fn from(error: HostRebootError) -> Self {
        let code = match error {
            HostRebootError::NotAllowed(_) => Code::Unsupported,
            _ => Code::Failed,
        };
        Self::new(code, error.to_string()).state("no guest was touched")
    }
}
