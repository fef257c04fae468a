//! kexec: the next kernel is loaded while this one runs, and started in its place.

use crate::{CommandLine, HostRebootError, KernelImage};
use dewar_kernel::{kexec_load, kexec_unload};
use std::fs::{self, File};
use std::path::Path;

const DISABLED: &str = "/proc/sys/kernel/kexec_load_disabled";
const LOADED: &str = "/sys/kernel/kexec_loaded";
const LOCKDOWN: &str = "/sys/kernel/security/lockdown";

/// That this kernel would start another, as far as it says.
///
/// # Errors
/// [`HostRebootError::NotAllowed`] with what stands against it.
pub fn check() -> Result<(), HostRebootError> {
    let refused = |why: &str| Err(HostRebootError::NotAllowed(why.to_owned()));
    if !Path::new(LOADED).exists() {
        return refused("it is built without kexec (CONFIG_KEXEC_FILE)");
    }
    if fs::read_to_string(DISABLED).is_ok_and(|text| text.trim() != "0") {
        return refused("kernel.kexec_load_disabled is set, until the host restarts");
    }
    if !rustix::process::geteuid().is_root() {
        return refused("only root may load one");
    }
    Ok(())
}

/// Whether the running kernel is locked down, so that it starts only kernels that are signed.
pub fn needs_signature() -> bool {
    fs::read_to_string(LOCKDOWN)
        .is_ok_and(|text| text.contains("[integrity]") || text.contains("[confidentiality]"))
}

/// Loads a kernel; one that was loaded before is replaced.
///
/// # Errors
/// Where a file cannot be read, or this kernel refuses it.
pub fn load(
    kernel: &KernelImage,
    initrd: Option<&Path>,
    line: &CommandLine,
) -> Result<(), HostRebootError> {
    let open = |path: &Path| File::open(path).map_err(HostRebootError::file("open", path));
    let image = open(&kernel.path)?;
    let initrd = initrd.map(open).transpose()?;
    Ok(kexec_load(&image, initrd.as_ref(), line.text())?)
}

/// Has no kernel loaded any more.
///
/// # Errors
/// Where this kernel refuses.
pub fn unload() -> Result<(), HostRebootError> {
    Ok(kexec_unload()?)
}
