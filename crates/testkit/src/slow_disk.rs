use crate::wait_until;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A file system on a disk that reads and writes no faster than it is told:
/// QEMU's throttle, exported as a file and mounted from there.
#[derive(Debug)]
pub struct SlowDisk {
    daemon: Child,
    export: PathBuf,
    mount: PathBuf,
}

impl SlowDisk {
    /// Makes one of `gib` GiB in `folder`.
    ///
    /// # Errors
    /// Where there is no `qemu-storage-daemon` with FUSE, or nothing may be
    /// mounted.
    pub fn new(folder: &Path, gib: u64, bytes_a_second: u64) -> Result<Self> {
        Self::with_requests(folder, gib, bytes_a_second, 0)
    }

    /// One that takes no more than so many requests a second, too; 0: as many as there are.
    ///
    /// # Errors
    /// As [`SlowDisk::new`].
    pub fn with_requests(
        folder: &Path,
        gib: u64,
        bytes_a_second: u64,
        requests_a_second: u64,
    ) -> Result<Self> {
        let (backing, export) = (folder.join("slow.raw"), folder.join("slow.export"));
        let mount = folder.join("slow");
        std::fs::File::create(&backing)?.set_len(gib << 30)?;
        std::fs::File::create(&export)?;
        std::fs::create_dir(&mount)?;
        let daemon = Command::new("qemu-storage-daemon")
            .args([
                "--object",
                &format!(
                    "throttle-group,id=t,x-bps-total={bytes_a_second},\
                     x-bps-total-max={bytes_a_second},x-iops-total={requests_a_second}"
                ),
                "--blockdev",
                &format!("file,node-name=f,filename={},discard=unmap", backing.display()),
                "--blockdev",
                "throttle,node-name=t,throttle-group=t,file=f",
                "--export",
                &format!(
                    "fuse,id=e,node-name=t,mountpoint={},writable=on,growable=off",
                    export.display()
                ),
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("qemu-storage-daemon")?;
        let this = Self { daemon, export, mount };
        wait_until("the export", Duration::from_secs(10), || {
            std::fs::metadata(&this.export).is_ok_and(|it| it.len() == gib << 30)
        });
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(&this.export))?;
        run(Command::new("mount").args(["-o", "loop"]).args([&this.export, &this.mount]))?;
        Ok(this)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.mount).status();
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        // Who is killed leaves its mount behind.
        let _ = Command::new("umount").arg("-l").arg(&self.export).status();
    }
}

pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{command:?} failed");
    Ok(())
}
