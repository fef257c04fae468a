use crate::console::Console;
use crate::guest::GuestSpec;
use crate::heartbeat::Heartbeat;
use crate::other_host::{self, OtherHost};
use crate::process::{is_alive, kill, wait_until, wait_while_alive};
use crate::warm;
use anyhow::{Context, Result, ensure};
use dewar_registry::Registry;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

/// A `--root` of its own, and everything in it is ended and removed with it.
#[derive(Debug)]
pub struct Lab {
    dewar: PathBuf,
    folder: Arc<tempfile::TempDir>,
    warm: bool,
    /// Where this is a host with others beside it.
    host: Option<Arc<OtherHost>>,
}

/// What a `dewar` command did.
#[derive(Debug, Clone)]
pub struct Ran {
    /// Its exit code; -1 where a signal ended it.
    pub code: i32,
    /// What it printed.
    pub stdout: String,
    /// What it said.
    pub stderr: String,
}

impl Ran {
    /// Of a command that has ended.
    pub fn of(output: &Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// The JSON object that it printed.
    ///
    /// # Panics
    /// Where it printed something else.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("no JSON ({error}): {self:?}"))
    }

    /// That it succeeded.
    ///
    /// # Panics
    /// Where it did not.
    pub fn done(self) -> Self {
        assert_eq!(self.code, 0, "{}", self.stderr);
        self
    }

    /// That it failed, with exit code 1, 3 or 4, and said why.
    ///
    /// # Panics
    /// Where it did not.
    pub fn code_is_a_refusal(self, what: &str) {
        assert!([1, 3, 4].contains(&self.code), "{what}: {self:?}");
        assert!(self.stderr.starts_with("dewar: "), "{what}: {self:?}");
    }

    /// That it failed with this exit code, and said something with these words.
    ///
    /// # Panics
    /// Where it did not.
    pub fn failed(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "'{word}' is not in: {}", self.stderr);
        }
        self
    }
}

/// A guest in a lab, with its serial ports.
#[derive(Debug)]
pub struct TestGuest {
    /// Its name.
    pub name: String,
    /// Where its serial ports and disks are.
    pub folder: PathBuf,
    /// The commands' port.
    pub console: Console,
}

impl Lab {
    /// An empty lab that drives the given binary.
    ///
    /// # Errors
    /// Where no temporary folder can be made.
    pub fn new(dewar: impl Into<PathBuf>) -> Result<Self> {
        // A short path: unix sockets have room for 107 bytes.
        let folder = tempfile::Builder::new().prefix("dw").tempdir_in("/tmp")?;
        Ok(Self { dewar: dewar.into(), folder: Arc::new(folder), warm: false, host: None })
    }

    /// The same lab as a host in namespaces of its own.
    ///
    /// # Errors
    /// Where none can be made.
    pub fn as_host(mut self) -> Result<Self> {
        self.host = Some(Arc::new(OtherHost::first()?));
        Ok(self)
    }

    /// A second host beside this one: it has the disks of these guests under the same paths, and a root
    /// and sockets of its own.
    ///
    /// # Errors
    /// Where no namespace can be made.
    pub fn second_host(&self, guests: &[&str]) -> Result<Self> {
        let first = self.host.as_ref().context("a host")?;
        let host = Some(Arc::new(OtherHost::second(self.path(), guests, first)?));
        Ok(Self { dewar: self.dewar.clone(), folder: Arc::clone(&self.folder), warm: false, host })
    }

    /// The words that reach this host, for '--via'; behind them a command may stand.
    pub fn via(&self) -> String {
        self.host.as_ref().map_or_else(|| "env".to_owned(), |host| host.via())
    }

    /// The address of this host, for one beside it.
    pub fn address(&self) -> String {
        other_host::address(1 + u8::from(self.is_second()))
    }

    fn is_second(&self) -> bool {
        self.host.as_ref().is_some_and(|host| host.is_second)
    }

    /// The program.
    pub fn program(&self) -> &Path {
        &self.dewar
    }

    /// The same lab, whose guests do not boot where the state of one that did fits them.
    #[must_use]
    pub fn warm(mut self) -> Self {
        self.warm = true;
        self
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The `--root` of its commands.
    pub fn root(&self) -> PathBuf {
        self.path().join(if self.is_second() { "root-b" } else { "root" })
    }

    /// The folder of the default store.
    pub fn store(&self) -> PathBuf {
        self.root().join("store")
    }

    /// A `dewar` command, ready to be run.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = match &self.host {
            Some(host) => host.command(&self.dewar),
            None => Command::new(&self.dewar),
        };
        command.arg("--json").arg("--root").arg(self.root()).args(arguments);
        command.current_dir(self.path());
        command
    }

    /// Runs a `dewar` command with `--json`.
    ///
    /// # Panics
    /// Where it cannot be started.
    pub fn dewar(&self, arguments: &[&str]) -> Ran {
        Ran::of(&self.command(arguments).output().expect("dewar starts"))
    }

    /// Starts a guest through `dewar run` and waits until its program obeys, where it boots one.
    ///
    /// # Errors
    /// Where it does not start.
    pub fn run(&self, name: &str, spec: &GuestSpec) -> Result<TestGuest> {
        if !spec.boots {
            self.start(name, spec)?;
            return self.attach(name);
        }
        match warm::warm_spec(spec).filter(|_| self.warm) {
            Some(fitting) => self.run_warm(name, spec, &fitting),
            None => {
                self.start(name, spec)?;
                self.reach(name)
            }
        }
    }

    /// The same without waiting for the guest to boot.
    fn run_warm(&self, name: &str, spec: &GuestSpec, fitting: &GuestSpec) -> Result<TestGuest> {
        // It is there until its state is kept.
        let mut other = None;
        let state = warm::state_of(fitting, || {
            let lab = other.insert(Self::new(&self.dewar)?);
            warm::make_served(lab.path(), fitting)?;
            lab.start("warm", fitting)?;
            lab.reach("warm")?.console.ask("settle")?;
            Ok(lab.qmp_socket("warm"))
        })?;
        self.start(name, spec)?;
        warm::load(&self.qmp_socket(name), &state, &self.path().join("warm.qcow2"))?;
        let mut guest = self.attach(name)?;
        guest.console.ask("count").context("the guest goes on")?;
        Ok(guest)
    }

    fn qmp_socket(&self, name: &str) -> PathBuf {
        self.root().join("guests").join(name).join("qmp.sock")
    }

    fn start(&self, name: &str, spec: &GuestSpec) -> Result<()> {
        let folder = self.guest_folder(name)?;
        let line = spec.command(&folder)?;
        let mut arguments = vec!["run", name];
        arguments.extend(spec.qos.then_some("--qos"));
        arguments.extend(spec.served.iter().flat_map(|disk| ["--disk", disk]));
        arguments.extend(spec.run_words.iter().map(String::as_str));
        arguments.push("--");
        arguments.extend(line.iter().map(String::as_str));
        let mut command = self.command(&arguments);
        command.envs(spec.environment.iter().map(|(name, value)| (name, value)));
        let ran = Ran::of(&command.output()?);
        ensure!(ran.code == 0, "dewar run: exit code {}: {}", ran.code, ran.stderr);
        Ok(())
    }

    /// Waits until the program of a guest that was just started obeys.
    ///
    /// # Errors
    /// Where it does not.
    pub fn reach(&self, name: &str) -> Result<TestGuest> {
        let mut guest = self.attach(name)?;
        guest.console.wait_ready(Duration::from_secs(120)).context("the guest boots")?;
        Ok(guest)
    }

    /// The ports of a guest, whatever it does.
    ///
    /// # Errors
    /// Where it is not there.
    pub fn attach(&self, name: &str) -> Result<TestGuest> {
        let folder = self.guest_folder(name)?;
        let console = Console::connect(&folder.join("console"))?;
        Ok(TestGuest { name: name.to_owned(), folder, console })
    }

    /// The folder for a guest's serial ports and disks.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn guest_folder(&self, name: &str) -> Result<PathBuf> {
        let folder = match self.is_second() {
            true => OtherHost::folder(self.path(), name),
            false => self.path().join(name),
        };
        std::fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    /// The process of a guest, as `dewar ps` tells it.
    pub fn pid(&self, name: &str) -> Option<i32> {
        self.ps(name)?["pid"].as_i64().map(|pid| pid as i32)
    }

    /// What is on record of a guest, whatever a command would say of it.
    ///
    /// # Panics
    /// Where there is no record.
    pub fn record(&self, name: &str) -> Value {
        let path = self.root().join("guests").join(name).join("guest.json");
        let text =
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        serde_json::from_slice(&text).expect("JSON")
    }

    /// The process that a guest has on record; `what` is `process`, or `server` for its page server.
    ///
    /// # Panics
    /// Where it has none.
    pub fn pid_on_record(&self, name: &str, what: &str) -> i32 {
        let pid = self.record(name)[what]["pid"].as_i64();
        pid.unwrap_or_else(|| panic!("'{name}' has no {what}")) as i32
    }

    /// What `dewar ps` tells of a guest.
    pub fn ps(&self, name: &str) -> Option<Value> {
        let listed = self.dewar(&["ps"]).json();
        listed["guests"].as_array()?.iter().find(|guest| guest["name"] == name).cloned()
    }

    /// Waits until all memory of a restored guest has arrived.
    ///
    /// # Panics
    /// Where it does not within a minute.
    pub fn wait_for_memory(&self, name: &str) {
        wait_until("all memory", Duration::from_secs(60), || {
            self.ps(name).is_some_and(|it| it["lazy_restore"]["complete"] != false)
        });
    }

    /// The files of a guest's RAM, and what is kept beside them, in the folders
    /// that Dewar chooses by itself.
    pub fn ram_files(&self, name: &str) -> Vec<PathBuf> {
        let prefix = self.ram_prefix(name);
        let folders =
            ["/dev/shm", "/run/dewar/ram"].into_iter().filter_map(|it| fs::read_dir(it).ok());
        let mut files: Vec<_> = folders.flatten().flatten().map(|it| it.path()).collect();
        files.retain(|it| {
            it.file_name().is_some_and(|it| it.to_string_lossy().starts_with(&prefix))
        });
        files
    }

    /// How the names of a guest's RAM files begin.
    pub fn ram_prefix(&self, name: &str) -> String {
        let folder = Registry::new(&self.root()).guest(name).expect("a guest's name");
        folder.ram_file(Path::new(""), "").display().to_string()
    }

    /// Ends a guest's process as a crash would.
    pub fn crash(&self, name: &str) {
        if let Some(pid) = self.pid(name) {
            kill(pid, Signal::KILL);
            wait_while_alive(pid);
        }
    }

    /// Restores a checkpoint of a guest and reaches its program again.
    ///
    /// # Errors
    /// Where it does not come back.
    pub fn restore(&self, guest: &mut TestGuest, arguments: &[&str]) -> Result<Ran> {
        let mut all = vec!["restore"];
        all.extend(arguments);
        let ran = self.dewar(&all);
        ensure!(ran.code == 0, "dewar restore: {}", ran.stderr);
        guest.console = Console::connect(&guest.folder.join("console"))?;
        Ok(ran)
    }
}

impl TestGuest {
    /// Begins to time its heartbeat.
    ///
    /// # Errors
    /// Where its port cannot be reached.
    pub fn heartbeat(&self) -> Result<Heartbeat> {
        Heartbeat::listen(&self.folder.join("heartbeat"))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let guests = self.root().join("guests");
        for entry in std::fs::read_dir(guests).into_iter().flatten().flatten() {
            let Ok(text) = std::fs::read(entry.path().join("guest.json")) else { continue };
            let Ok(record) = serde_json::from_slice::<Value>(&text) else { continue };
            if let Some(pid) = record["process"]["pid"].as_i64() {
                let pid = pid as i32;
                if is_alive(pid) {
                    kill(pid, Signal::KILL);
                }
            }
            for file in record["owned_ram"].as_array().into_iter().flatten() {
                let _ = std::fs::remove_file(file.as_str().unwrap_or_default());
            }
        }
    }
}
