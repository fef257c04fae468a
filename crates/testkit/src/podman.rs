//! Containers of a real podman, with the program of the test guests in them.

use crate::container::{Bundle, cache, container_tools};
use crate::pipes::Pipes;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The image that the containers are made from.
pub const IMAGE: &str = "localhost/dewar-guest:1";

/// The `PATH` with which podman finds CRIU and a runtime; or what is missing for tests of it.
///
/// # Errors
/// Names what is missing.
pub fn podman_tools() -> Result<String, String> {
    let path = container_tools("runc")?;
    match cache().join("podman/bin/podman").exists() {
        true => Ok(path),
        false => Err("podman was not fetched ('make podman')".to_owned()),
    }
}

/// A podman with containers and images of its own. Dropped, it ends and removes them.
#[derive(Debug)]
pub struct Podman {
    /// A program that is this podman.
    pub program: PathBuf,
    folder: PathBuf,
}

/// A container of it.
#[derive(Debug)]
pub struct PodmanContainer {
    /// Its name.
    pub name: String,
    pipes: Pipes,
}

impl Podman {
    /// Makes one in an empty folder, with an image of the test program.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn new(folder: &Path) -> Result<Self> {
        let podman = cache().canonicalize()?.join("podman");
        let inside = |name: &str| folder.join(name);
        fs::create_dir_all(inside("home/.config/containers"))?;
        fs::write(
            inside("home/.config/containers/policy.json"),
            r#"{"default": [{"type": "insecureAcceptAnything"}]}"#,
        )?;
        let programs = podman.join("bin");
        fs::write(
            inside("containers.conf"),
            format!(
                "[engine]\nhelper_binaries_dir = [\"{0}\"]\nconmon_path = [\"{0}/conmon\"]\nruntime = \"runc\"\n\
                 cgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\nlock_type = \"file\"\n",
                programs.display()
            ),
        )?;
        let options = ["root", "runroot", "tmpdir"]
            .map(|it| format!("--{it} '{}'", inside("podman").join(it).display()));
        let script = format!(
            "#!/bin/sh\nexport HOME='{}' CONTAINERS_CONF='{}' PODMAN_IGNORE_CGROUPSV1_WARNING=1 XDG_RUNTIME_DIR=\n\
             exec '{}' {} --storage-driver overlay \"$@\"\n",
            inside("home").display(),
            inside("containers.conf").display(),
            programs.join("podman").display(),
            options.join(" ")
        );
        let program = inside("podman.sh");
        fs::write(&program, script)?;
        fs::set_permissions(&program, Permissions::from_mode(0o755))?;
        let this = Self { program, folder: folder.to_owned() };
        this.import_image()?;
        Ok(this)
    }

    fn import_image(&self) -> Result<()> {
        let bundle = self.folder.join("image");
        fs::create_dir(&bundle)?;
        Bundle::new(&bundle)?
            .with_file("data/old", b"old")?
            .with_file("data/changed", b"before")?
            .with_file("gone", b"gone")?;
        let archive = self.folder.join("image.tar");
        let mut tar = Command::new("tar");
        tar.arg("--create").arg("--file").arg(&archive).arg("--directory");
        let status = tar.arg(bundle.join("rootfs")).arg(".").status()?;
        ensure!(status.success(), "tar: {status}");
        self.run(&["import", &archive.to_string_lossy(), IMAGE])?;
        fs::remove_file(archive)?;
        Ok(fs::remove_dir_all(bundle)?)
    }

    /// Starts a container, with options of `podman run`.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn start(&self, name: &str, options: &[&str]) -> Result<PodmanContainer> {
        let pipes = self.folder.join(format!("pipes-{name}"));
        let _ = fs::remove_dir_all(&pipes);
        fs::create_dir(&pipes)?;
        Pipes::make(&pipes)?;
        let opened = Pipes::open(&pipes)?;
        let volume = format!("{}:/pipes", pipes.display());
        let mut words = vec!["run", "--detach", "--name", name, "--volume", &volume];
        words.extend(options);
        words.extend([IMAGE, "/bin/dewar-guest", "serve", "/pipes/commands", "/pipes/answers"]);
        self.run(&words)?;
        Ok(PodmanContainer { name: name.to_owned(), pipes: opened })
    }

    /// A command of it.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.env("PATH", podman_tools().unwrap_or_default()).args(words).stdin(Stdio::null());
        command
    }

    /// Runs one; returns what it says.
    ///
    /// # Errors
    /// Where it fails.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        let output = self.command(words).output().context("podman")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "podman {}: {said}", words.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// What it knows of a container; `None` where it knows none.
    pub fn inspect(&self, name: &str) -> Option<Value> {
        let said = self.run(&["container", "inspect", name]).ok()?;
        serde_json::from_str::<Value>(&said).ok().map(|mut it| it[0].take())
    }

    /// How it says that a container is.
    pub fn status(&self, name: &str) -> Option<String> {
        self.inspect(name)?["State"]["Status"].as_str().map(str::to_owned)
    }

    /// The first process of a container.
    ///
    /// # Panics
    /// Where there is none.
    pub fn pid(&self, name: &str) -> i32 {
        let known = self.inspect(name).expect("a container that podman knows");
        known["State"]["Pid"].as_i64().expect("its process") as i32
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let removed = self.run(&["rm", "--all", "--force", "--time", "0"]);
        let flags = rustix::mount::UnmountFlags::empty();
        let _ = rustix::mount::unmount(self.folder.join("podman/root/overlay"), flags);
        // One that is left would run for ever.
        assert!(removed.is_ok() || std::thread::panicking(), "{removed:?}");
    }
}

impl PodmanContainer {
    /// Gives its program a command and returns what follows `ok`.
    ///
    /// # Errors
    /// Where the answer is `bad`, or none comes in time.
    pub fn ask(&mut self, command: &str) -> Result<String> {
        self.pipes.ask(command)
    }
}
