//! What a file with a kernel says of itself: the header of Documentation/arch/x86/boot.rst.

use crate::HostRebootError;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Where the header's magic number is, and what it is.
const MAGIC_AT: usize = 0x202;
const MAGIC: &[u8] = b"HdrS";
/// Where the pointer to the version's text is, which counts from 0x200.
const VERSION_POINTER_AT: usize = 0x20e;
const VERSION_BASE: usize = 0x200;
/// Where the size of the real-mode code is, in sectors less one, and of all that follows it, in units of 16 bytes.
const SETUP_SECTORS_AT: usize = 0x1f1;
const SYSTEM_SIZE_AT: usize = 0x1f4;
const SECTOR_BYTES: u64 = 512;
const SYSTEM_UNIT: u64 = 16;
/// What the first of the two means where it is 0.
const OLD_SETUP_SECTORS: u64 = 4;
/// As much of the file as can have both.
const HEAD_BYTES: u64 = 64 << 10;

/// A kernel that could be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelImage {
    /// Its file.
    pub path: PathBuf,
    /// Its version, such as `6.12.48+deb13-cloud-amd64`.
    pub version: String,
}

impl KernelImage {
    /// Looks into a file.
    ///
    /// # Errors
    /// Where it cannot be read, is no kernel, or was cut off: the kernel that runs would load that, and not come back.
    pub fn open(path: &Path) -> Result<Self, HostRebootError> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let mut head = Vec::new();
        let read = |head: &mut Vec<u8>| {
            let file = File::open(&path)?;
            let bytes = file.metadata()?.len();
            file.take(HEAD_BYTES).read_to_end(head).map(|_| bytes)
        };
        let bytes = read(&mut head).map_err(HostRebootError::file("read", &path))?;
        let no_kernel = |why| HostRebootError::NoKernel { path: path.clone(), why };
        let version = version(&head).map_err(no_kernel)?;
        if bytes < least_bytes(&head) {
            return Err(no_kernel("it is shorter than its header says"));
        }
        Ok(Self { path, version })
    }

    /// The kernel that runs now, where its file is under its usual name.
    pub fn present() -> Option<Self> {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
        Self::open(&Path::new("/boot").join(format!("vmlinuz-{}", release.trim()))).ok()
    }

    /// The initramfs that distributions keep beside it.
    pub fn usual_initrd(&self) -> Option<PathBuf> {
        let beside = self.path.parent()?;
        let names =
            [format!("initrd.img-{}", self.version), format!("initramfs-{}.img", self.version)];
        names.iter().map(|name| beside.join(name)).find(|path| path.is_file())
    }

    /// What its configuration says of an option, where that lies beside it: `y`, `m`, or nothing.
    pub fn option(&self, name: &str) -> Option<String> {
        let path = self.path.parent()?.join(format!("config-{}", self.version));
        let text = std::fs::read_to_string(path).ok()?;
        let value = |line| str::strip_prefix(line, name)?.strip_prefix('=').map(str::to_owned);
        Some(text.lines().find_map(value).unwrap_or_default())
    }
}

/// How long a file with this header is at least.
fn least_bytes(head: &[u8]) -> u64 {
    let sectors = match u64::from(head[SETUP_SECTORS_AT]) {
        0 => OLD_SETUP_SECTORS,
        sectors => sectors,
    };
    let size = &head[SYSTEM_SIZE_AT..SYSTEM_SIZE_AT + 4];
    let size = u32::from_le_bytes([size[0], size[1], size[2], size[3]]);
    (sectors + 1) * SECTOR_BYTES + u64::from(size) * SYSTEM_UNIT
}

fn version(head: &[u8]) -> Result<String, &'static str> {
    if head.get(MAGIC_AT..MAGIC_AT + MAGIC.len()) != Some(MAGIC) {
        return Err("it has no header of a bzImage");
    }
    let pointer = head.get(VERSION_POINTER_AT..VERSION_POINTER_AT + 2);
    let at = pointer.map(|it| VERSION_BASE + usize::from(u16::from_le_bytes([it[0], it[1]])));
    let text = at.and_then(|at| head.get(at..)).ok_or("it has no version")?;
    let word: Vec<u8> =
        text.iter().copied().take_while(|byte| byte.is_ascii_graphic()).take(128).collect();
    match String::from_utf8(word) {
        Ok(version) if !version.is_empty() => Ok(version),
        _ => Err("it has no version"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(version: &[u8]) -> Vec<u8> {
        let mut head = vec![0; 0x400];
        head[SETUP_SECTORS_AT] = 1;
        head[MAGIC_AT..MAGIC_AT + 4].copy_from_slice(MAGIC);
        head[VERSION_POINTER_AT..VERSION_POINTER_AT + 2].copy_from_slice(&0x100u16.to_le_bytes());
        head[0x300..0x300 + version.len()].copy_from_slice(version);
        head
    }

    #[test]
    fn the_version_is_its_first_word() {
        let said = version(&kernel(b"6.12.48-cloud (debian@example) #1 SMP"));
        assert_eq!(said.as_deref(), Ok("6.12.48-cloud"));
    }

    #[test]
    fn what_is_no_kernel_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("vmlinuz");
        let mut cut_off = kernel(b"6.1");
        cut_off[SYSTEM_SIZE_AT] = 1;
        let others =
            [&b""[..], &[0; 0x400], &kernel(b"")[..], &kernel(b"6.1")[..0x210], &cut_off[..]];
        for bytes in others {
            std::fs::write(&path, bytes).expect("a file");
            let error = KernelImage::open(&path).expect_err("no kernel").to_string();
            assert!(error.contains("no Linux kernel"), "{error}");
        }
        let error = KernelImage::open(&folder.path().join("none")).expect_err("nothing");
        assert!(error.to_string().contains("read"), "{error}");
    }

    #[test]
    fn its_configuration_lies_beside_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("vmlinuz-6.1");
        std::fs::write(&path, kernel(b"6.1 x")).expect("a kernel");
        let image = KernelImage::open(&path).expect("a kernel");
        assert_eq!(image.option("CONFIG_FS_DAX"), None, "not known");
        let config = "# CONFIG_A is not set\nCONFIG_FS_DAX=y\nCONFIG_FS_DAX_PMD=m\n";
        std::fs::write(folder.path().join("config-6.1"), config).expect("a configuration");
        assert_eq!(image.option("CONFIG_FS_DAX").as_deref(), Some("y"));
        assert_eq!(image.option("CONFIG_A").as_deref(), Some(""));
        assert_eq!(image.usual_initrd(), None);
        std::fs::write(folder.path().join("initrd.img-6.1"), "").expect("an initramfs");
        assert!(image.usual_initrd().is_some());
    }
}
