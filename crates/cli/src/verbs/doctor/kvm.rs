//! Whether KVM runs a guest here, and not only opens: a boot sector goes from real mode, where
//! every firmware begins, to 64 bits with paging, where every kernel runs, and ends QEMU from
//! there. A KVM that can do only a part of it, or only by emulation, is found so.

use dewar_guest_qemu::launch::without_ours;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// With hardware virtualisation it takes a tenth of this.
const RUNS_WITHIN: Duration = Duration::from_secs(3);
/// What QEMU ends with when 0x10 is written to its exit device: `(0x10 << 1) | 1`.
const DONE: i32 = 33;
const SECTOR_BYTES: usize = 512;

/// At 0x7c00: clear 12 KiB at 0x1000 and build page tables there (one page of 2 MiB, identity
/// mapped), load a GDT, set CR4.PAE, CR3, EFER.LME and CR0.PG|PE, jump to 64-bit code, write
/// 0x10 to port 0xf4.
const SECTOR: [u8; 134] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0xbf, 0x00, 0x10, 0x66, 0x31, 0xc0, 0xb9, 0x00, 0x0c,
    0xfc, 0x66, 0xf3, 0xab, 0x66, 0xc7, 0x06, 0x00, 0x10, 0x03, 0x20, 0x00, 0x00, 0x66, 0xc7, 0x06,
    0x00, 0x20, 0x03, 0x30, 0x00, 0x00, 0x66, 0xc7, 0x06, 0x00, 0x30, 0x83, 0x00, 0x00, 0x00, 0x0f,
    0x01, 0x16, 0x80, 0x7c, 0x0f, 0x20, 0xe0, 0x66, 0x83, 0xc8, 0x20, 0x0f, 0x22, 0xe0, 0x66, 0xb8,
    0x00, 0x10, 0x00, 0x00, 0x0f, 0x22, 0xd8, 0x66, 0xb9, 0x80, 0x00, 0x00, 0xc0, 0x0f, 0x32, 0x66,
    0x0d, 0x00, 0x01, 0x00, 0x00, 0x0f, 0x30, 0x0f, 0x20, 0xc0, 0x66, 0x0d, 0x01, 0x00, 0x00, 0x80,
    0x0f, 0x22, 0xc0, 0xea, 0x68, 0x7c, 0x08, 0x00, 0xb0, 0x10, 0xe6, 0xf4, 0xf4, 0xeb, 0xfd, 0x90,
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x9a, 0x20, 0x00,
    0x0f, 0x00, 0x70, 0x7c, 0x00, 0x00,
];

/// Runs it.
pub fn runs() -> Result<String, String> {
    let opened = std::fs::File::options().read(true).write(true).open("/dev/kvm");
    opened.map_err(|error| error.to_string())?;
    let failed = |error: std::io::Error| format!("it cannot be tried: {error}");
    let disk = Disk::make().map_err(failed)?;
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-accel", "kvm", "-m", "16M", "-nodefaults", "-display", "none", "-no-reboot"])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4", "-drive"])
        .arg(format!("file={},format=raw,if=ide,readonly=off", disk.0.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut qemu = without_ours(&mut command).spawn().map_err(failed)?;
    let began = Instant::now();
    let status = loop {
        match qemu.try_wait() {
            Ok(Some(status)) => break status.code(),
            Ok(None) if began.elapsed() < RUNS_WITHIN => {
                std::thread::sleep(Duration::from_millis(10));
            }
            _ => {
                let _ = qemu.kill();
                let _ = qemu.wait();
                break None;
            }
        }
    };
    match status {
        Some(DONE) => Ok("runs guests".to_owned()),
        Some(_) => Err("it is there, and QEMU fails on it: use -accel tcg".to_owned()),
        None => Err(format!(
            "it is there, and does not bring a guest to 64 bits within {} s (nested, or emulated?): \
             use -accel tcg",
            RUNS_WITHIN.as_secs()
        )),
    }
}

/// A file that is removed with this.
struct Disk(PathBuf);

impl Disk {
    fn make() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("dewar-doctor-{}.img", std::process::id()));
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&path)?;
        let disk = Self(path);
        let mut sector = SECTOR.to_vec();
        sector.resize(SECTOR_BYTES - 2, 0);
        sector.extend([0x55, 0xaa]);
        file.write_all(&sector)?;
        // As large as firmware wants a disk to be.
        file.set_len(1 << 20)?;
        Ok(disk)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
