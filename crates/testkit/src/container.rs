//! Containers of a real runtime, with the program of the test guests in them.

use crate::pipes::Pipes;
use crate::process::wait_while_alive;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the processes of a container may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(20);

/// The repository's folder of fetched things.
pub(crate) fn cache() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache")
}

/// The `PATH` with which CRIU and a runtime are found; or what is missing for tests of containers.
///
/// # Errors
/// Names what is missing.
pub fn container_tools(runtime: &str) -> Result<String, String> {
    let criu = cache().join("criu");
    if !criu.join("criu").exists() {
        return Err("CRIU was not fetched ('make criu')".to_owned());
    }
    // crun says so, and ends.
    if runtime == "crun" && !Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        return Err("crun needs control groups of version 2 alone".to_owned());
    }
    let own = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{own}:/usr/sbin:/sbin", criu.display());
    match Command::new(runtime).arg("--version").env("PATH", &path).output() {
        Ok(_) => Ok(path),
        Err(_) => Err(format!("{runtime} is not installed")),
    }
}

/// A bundle: a root file system with the test program, and a configuration.
#[derive(Debug, Clone)]
pub struct Bundle {
    /// Its folder.
    pub folder: PathBuf,
    /// The configuration, as it will be written.
    pub config: Value,
    /// Where the two pipes are.
    pipes: PathBuf,
    overlay: Option<Arc<Mounted>>,
}

/// Something that is mounted; it, and all on top of it, is taken away with this.
#[derive(Debug)]
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        while rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::empty()).is_ok() {}
    }
}

impl Bundle {
    /// Makes one in an empty folder.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn new(folder: &Path) -> Result<Self> {
        let root = folder.join("rootfs");
        for inside in ["bin", "proc", "sys", "dev", "tmp", "run"] {
            fs::create_dir_all(root.join(inside))?;
        }
        let programs = cache().join("guest/root/bin");
        for program in ["dewar-guest", "busybox"] {
            fs::copy(programs.join(program), root.join("bin").join(program))
                .with_context(|| format!("{program} ('make guest' builds it)"))?;
        }
        for name in ["sh", "sleep", "cat", "nc", "tail"] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name))?;
        }
        Pipes::make(&root.join("run"))?;
        let (pipes, overlay) = (root.join("run"), None);
        Ok(Self { folder: folder.to_owned(), config: configuration(), pipes, overlay })
    }

    /// Lets it see the programs of the host.
    ///
    /// # Errors
    /// Where its root file system cannot be changed.
    pub fn with_host_programs(mut self) -> Result<Self> {
        let root = self.folder.join("rootfs");
        for folder in ["lib", "lib64"] {
            std::os::unix::fs::symlink(format!("usr/{folder}"), root.join(folder))?;
        }
        fs::create_dir(root.join("usr"))?;
        let mount = json!({"destination": "/usr", "type": "bind", "source": "/usr", "options": ["bind", "ro"]});
        self.config["mounts"].as_array_mut().context("mounts")?.push(mount);
        Ok(self)
    }

    /// Puts a file into its root file system.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn with_file(self, path: &str, bytes: &[u8]) -> Result<Self> {
        let path = self.folder.join("rootfs").join(path);
        fs::create_dir_all(path.parent().context("a folder")?)?;
        fs::write(path, bytes)?;
        Ok(self)
    }

    /// The same root file system under an overlay, with the two pipes on a volume.
    ///
    /// # Errors
    /// Where it cannot be mounted.
    pub fn overlaid(mut self) -> Result<Self> {
        let inside = |name: &str| self.folder.join(name);
        fs::rename(inside("rootfs"), inside("lower"))?;
        for name in ["rootfs", "upper", "work", "volume"] {
            fs::create_dir(inside(name))?;
        }
        for fifo in ["commands", "answers"] {
            fs::rename(inside("lower/run").join(fifo), inside("volume").join(fifo))?;
        }
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            inside("lower").display(),
            inside("upper").display(),
            inside("work").display()
        );
        let options = std::ffi::CString::new(options)?;
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("overlay", inside("rootfs"), "overlay", flags, options.as_c_str())?;
        self.overlay = Some(Arc::new(Mounted(inside("rootfs"))));
        self.pipes = inside("volume");
        let volume = json!({
            "destination": "/run", "type": "bind", "source": self.pipes, "options": ["rbind", "rw"],
        });
        self.config["mounts"].as_array_mut().context("mounts")?.push(volume);
        Ok(self)
    }

    /// What it runs, in place of the test program.
    #[must_use]
    pub fn running(mut self, words: &[&str]) -> Self {
        self.config["process"]["args"] = json!(words);
        self
    }

    /// Writes the configuration.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn write(&self) -> Result<()> {
        Ok(fs::write(self.folder.join("config.json"), self.config.to_string())?)
    }
}

/// What `runc spec` writes, with no terminal and no limits.
fn configuration() -> Value {
    let mount = |to: &str, kind: &str, options: &[&str]| json!({"destination": to, "type": kind, "source": kind, "options": options});
    let capabilities = json!(["CAP_KILL", "CAP_NET_BIND_SERVICE", "CAP_SYS_NICE"]);
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": {"uid": 0, "gid": 0},
            "args": ["/bin/dewar-guest", "serve", "/run/commands", "/run/answers"],
            "env": ["PATH=/bin"],
            "cwd": "/",
            "capabilities": {
                "bounding": capabilities, "effective": capabilities, "permitted": capabilities,
            },
            "noNewPrivileges": true,
        },
        "root": {"path": "rootfs", "readonly": false},
        "hostname": "test",
        "mounts": [
            mount("/proc", "proc", &[]),
            mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
            mount("/dev/pts", "devpts", &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
            mount("/dev/shm", "tmpfs", &["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"]),
            mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
        ],
        "linux": {
            "namespaces": [
                {"type": "pid"}, {"type": "network"}, {"type": "ipc"}, {"type": "uts"},
                {"type": "mount"},
            ],
            "maskedPaths": ["/proc/kcore", "/proc/keys"],
            "readonlyPaths": ["/proc/sys", "/proc/bus"],
        },
    })
}

/// A container that a runtime runs. Dropped, it is ended and forgotten.
#[derive(Debug)]
pub struct RunningContainer {
    /// The runtime's program.
    pub runtime: String,
    /// The folder in which the runtime keeps what it knows.
    pub state: PathBuf,
    /// Its id.
    pub id: String,
    /// Its bundle.
    pub bundle: Bundle,
    pipes: Pipes,
}

impl RunningContainer {
    /// Starts one with runc. What the runtime knows lies in the bundle's folder.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start(bundle: Bundle, id: &str) -> Result<Self> {
        Self::start_with("runc", bundle, id)
    }

    /// Starts one.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start_with(runtime: &str, bundle: Bundle, id: &str) -> Result<Self> {
        bundle.write()?;
        let state = bundle.folder.join("state");
        let pipes = Pipes::open(&bundle.pipes)?;
        let container =
            Self { runtime: runtime.to_owned(), state, id: id.to_owned(), bundle, pipes };
        let mut command = container.command(&["run", "--detach", "--bundle"]);
        command.arg(&container.bundle.folder).arg(id);
        let status =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        ensure!(status.success(), "{runtime} run: {status}");
        Ok(container)
    }

    /// A command of the runtime.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.runtime);
        command.env("PATH", container_tools(&self.runtime).unwrap_or_default());
        command.arg("--root").arg(&self.state).args(words);
        command
    }

    /// What the runtime says of it; `None` where it knows it not.
    pub fn runtime_state(&self) -> Option<Value> {
        let output = self.command(&["state", &self.id]).output().ok()?;
        output.status.success().then(|| serde_json::from_slice(&output.stdout).ok())?
    }

    /// Its first process.
    ///
    /// # Panics
    /// Where it does not run.
    pub fn pid(&self) -> i32 {
        let state = self.runtime_state().expect("a container that the runtime knows");
        state["pid"].as_i64().expect("its process") as i32
    }

    /// Ends it as a crash would, and makes the runtime forget it.
    ///
    /// # Panics
    /// Where it does not end.
    pub fn crash(&self) {
        let pid = self.pid();
        assert_eq!(self.delete(&self.id), Ok(()));
        wait_while_alive(pid);
    }

    /// Ends a container of this runtime, and makes the runtime forget it.
    ///
    /// # Errors
    /// What the runtime says, where the container does not end in time.
    pub fn delete(&self, id: &str) -> Result<(), String> {
        let began = Instant::now();
        loop {
            let mut command = self.command(&["delete", "--force", id]);
            let said = match command.stdin(Stdio::null()).output() {
                Ok(output) if output.status.success() => return Ok(()),
                Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
                Err(error) => error.to_string(),
            };
            // runc gives up where processes take a moment to end.
            if began.elapsed() > ENDS_WITHIN {
                return Err(format!("{id}: {said}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Gives its program a command and returns what follows `ok`.
    ///
    /// # Errors
    /// Where the answer is `bad`, or none comes in time.
    pub fn ask(&mut self, command: &str) -> Result<String> {
        self.pipes.ask(command)
    }
}

impl Drop for RunningContainer {
    fn drop(&mut self) {
        let ended = self.delete(&self.id);
        // One that is left would run for ever.
        assert!(ended.is_ok() || std::thread::panicking(), "{ended:?}");
    }
}
