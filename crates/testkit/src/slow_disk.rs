use crate::wait_until;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A file that reads and writes no faster than it is told: QEMU's throttle before another file, exported by FUSE.
#[derive(Debug)]
pub struct SlowFile {
    daemon: Child,
    export: PathBuf,
}

impl SlowFile {
    /// One in `folder` that is `backing`, and takes no more than so many requests a second; 0: as many as there are. So
    /// many bytes may come at once after a rest; 0: those of a tenth of a second.
    ///
    /// # Errors
    /// Where there is no `qemu-storage-daemon` with FUSE.
    pub fn new(
        folder: &Path,
        backing: &Path,
        bytes_a_second: u64,
        requests_a_second: u64,
        burst: u64,
    ) -> Result<Self> {
        let export = folder.join("slow.export");
        std::fs::File::create(&export)?;
        let bytes = std::fs::metadata(backing)?.len();
        let daemon = Command::new("qemu-storage-daemon")
            .args([
                "--object",
                &format!(
                    "throttle-group,id=t,x-bps-total={bytes_a_second},\
                     x-bps-total-max={burst},x-iops-total={requests_a_second}"
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
        let this = Self { daemon, export };
        wait_until("the export", Duration::from_secs(10), || {
            std::fs::metadata(&this.export).is_ok_and(|it| it.len() == bytes)
        });
        Ok(this)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.export
    }
}

impl Drop for SlowFile {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
        // Who is killed leaves its mount behind.
        let _ = Command::new("umount").arg("-l").arg(&self.export).status();
    }
}

/// A file system on a disk that reads and writes no faster than it is told.
#[derive(Debug)]
pub struct SlowDisk {
    mount: PathBuf,
    _file: SlowFile,
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
        let (backing, mount) = (folder.join("slow.raw"), folder.join("slow"));
        std::fs::File::create(&backing)?.set_len(gib << 30)?;
        std::fs::create_dir(&mount)?;
        let file =
            SlowFile::new(folder, &backing, bytes_a_second, requests_a_second, bytes_a_second)?;
        run(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(file.path()))?;
        run(Command::new("mount").args(["-o", "loop"]).args([file.path(), &mount]))?;
        Ok(Self { mount, _file: file })
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.mount
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.mount).status();
    }
}

pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{command:?} failed");
    Ok(())
}
