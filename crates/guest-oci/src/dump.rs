//! A container that stands still while it is saved.

use crate::container::Container;
use crate::criu_log;
use crate::error::OciError;
use crate::folder::{images, runtime_log, settings as settings_file, work};
use crate::pages::{self, PagesFile};
use crate::precopy::PreCopy;
use crate::processes::{Processes, tracer};
use crate::runtime::{last_line, option};
use crate::staged_images::{StagingIndex, is_pages_file};
use crate::strays::Strays;
use dewar_registry::ProcessId;
use std::fs::{self, File};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long CRIU may take to stop all processes, in seconds, try by try; its own limit is ten.
///
/// A process that waits in vfork(2) for its child to become another program does not stop while CRIU
/// holds that child. Between two tries all of them run, and the child becomes what it is to be.
const STOP_WITHIN: [u32; 3] = [1, 3, 10];
/// How long CRIU may take to freeze a container and to write all but its pages.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// How long it may take to let it run.
const ENDS_WITHIN: Duration = Duration::from_secs(20);
/// How long CRIU may take to accept the connection to its page server.
const ACCEPTED_WITHIN: Duration = Duration::from_secs(2);
/// How often it is looked whether a container is frozen.
const LOOK: Duration = Duration::from_millis(2);
/// Most bytes of an open file that was deleted: CRIU puts it into its images.
const MOST_DELETED_BYTES: u64 = 1 << 30;

/// What a dump is to be like.
#[derive(Debug)]
pub struct DumpOptions {
    /// An empty folder for the images: in memory, as large as that of the processes.
    pub folder: PathBuf,
    /// Whose processes these are, to those who find them later.
    pub strays: Strays,
    /// What was copied of the memory before.
    pub copied: PreCopy,
}

/// A container on its way into a folder of images.
///
/// While it lives the container stands still. Dropped, it lets the container run.
#[derive(Debug)]
pub struct Dump {
    container: Container,
    process: ProcessId,
    folder: PathBuf,
    strays: Strays,
    /// The processes, and who held each of them from the start.
    held: Option<(Processes, Vec<i32>)>,
    /// What is copied of the memory.
    copied: Option<PreCopy>,
    frozen_at: Instant,
    runtime: Option<Child>,
    /// The connection for whose end CRIU waits before it lets the container run.
    hold: Option<TcpStream>,
}

impl Dump {
    /// Freezes a container and saves all but the pages of its memory.
    ///
    /// # Errors
    /// Where it cannot be saved; it runs on.
    pub fn begin(container: &Container, options: DumpOptions) -> Result<Self, OciError> {
        let DumpOptions { folder, strays, copied } = options;
        let process = container.process()?;
        for inside in [images(&folder), work(&folder)] {
            fs::create_dir_all(&inside).map_err(OciError::io("create", &inside))?;
        }
        let mut dump = Self {
            container: container.clone(),
            process,
            folder,
            strays,
            held: None,
            copied: Some(copied),
            frozen_at: Instant::now(),
            runtime: None,
            hold: None,
        };
        dump.save()?;
        Ok(dump)
    }

    /// Has the runtime save it, again where its processes did not all stop.
    fn save(&mut self) -> Result<(), OciError> {
        let [retried @ .., last] = STOP_WITHIN;
        let mut first_frozen = None;
        for seconds in retried {
            let saved = self.try_to_save(seconds);
            // It stood still in the tries before, too.
            self.frozen_at = *first_frozen.get_or_insert(self.frozen_at);
            if saved.is_ok() || !self.has_timed_out() {
                return saved;
            }
            self.remove_images()?;
        }
        let saved = self.try_to_save(last);
        self.frozen_at = first_frozen.unwrap_or(self.frozen_at);
        saved
    }

    /// Whether CRIU gave up since not all processes had stopped.
    fn has_timed_out(&self) -> bool {
        let log = fs::read(work(&self.folder).join("dump.log")).unwrap_or_default();
        criu_log::has_timed_out(&String::from_utf8_lossy(&log))
    }

    /// Removes what a try before has written.
    fn remove_images(&self) -> Result<(), OciError> {
        let folder = images(&self.folder);
        fs::remove_dir_all(&folder).map_err(OciError::io("remove", &folder))?;
        fs::create_dir(&folder).map_err(OciError::io("create", &folder))
    }

    fn try_to_save(&mut self, stop_within: u32) -> Result<(), OciError> {
        let port = match self.strays.port() {
            Some(port) => port,
            None => free_port()?,
        };
        let command = self.checkpoint(stop_within, port)?;
        self.runtime = Some(self.spawn(command)?);
        self.copy_until_frozen()?;
        let Some(hold) = self.connect(port) else {
            return Err(self.what_criu_said("saving"));
        };
        if !is_accepted(&hold, port) {
            // CRIU serves one, and waits until that one has gone.
            self.strays.kill();
            return Err(OciError::Criu {
                id: self.container.id.clone(),
                cause: "somebody else had reached its page server first".to_owned(),
                advice: Some("try again"),
            });
        }
        self.hold = Some(hold);
        let processes = Processes::of(self.process.pid)?;
        let tracers = processes.tracers();
        self.held = Some((processes, tracers));
        self.require_frozen()
    }

    /// Copies what is written while the runtime and CRIU start, which takes longer than what they do then.
    fn copy_until_frozen(&mut self) -> Result<(), OciError> {
        let deadline = Instant::now() + READY_WITHIN;
        let is_frozen = |dump: &Self| tracer(dump.process.pid) != 0;
        while !is_frozen(self) && !self.has_ended() && Instant::now() < deadline {
            if let Some(copied) = &mut self.copied {
                copied.round_of_tracked()?;
            }
            std::thread::sleep(LOOK);
        }
        self.frozen_at = Instant::now();
        Ok(())
    }

    /// Waits for CRIU's page server, which is there when all but the pages is saved. Without one the runtime has ended.
    fn connect(&mut self, port: u16) -> Option<TcpStream> {
        let deadline = Instant::now() + READY_WITHIN;
        while !self.has_ended() && Instant::now() < deadline {
            if let Ok(hold) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                return Some(hold);
            }
            std::thread::sleep(LOOK);
        }
        None
    }

    fn has_ended(&mut self) -> bool {
        self.runtime.as_mut().is_none_or(|it| !matches!(it.try_wait(), Ok(None)))
    }

    /// When the container was found to stand still.
    pub fn frozen_at(&self) -> Instant {
        self.frozen_at
    }

    /// Copies the pages of the memory that are not copied yet. Returns how many those were.
    ///
    /// # Errors
    /// Where there is no room, or the container ran meanwhile: the images are of no use then.
    pub fn copy_pages(&mut self) -> Result<u64, OciError> {
        let (Some((processes, _)), Some(copied)) = (&self.held, &mut self.copied) else {
            return Err(OciError::RanOn { id: self.container.id.clone() });
        };
        copied.finish(&images(&self.folder), processes)?;
        let pages = copied.stopped_pages();
        self.require_frozen()?;
        Ok(pages)
    }

    /// Puts the pages into the images, of which nothing is missing then. The container may run.
    ///
    /// # Errors
    /// Where there is no room.
    pub fn assemble(&mut self) -> Result<(), OciError> {
        self.copied.take().map_or(Ok(()), |copied| copied.assemble(&images(&self.folder)))
    }

    /// The copies of its memory that are still to be put into the images.
    pub fn copies(&mut self) -> Option<&mut PreCopy> {
        self.copied.as_mut()
    }

    /// Puts all that CRIU has written of pages, and other files, behind the copies, for another host. Returns where all
    /// is; the images of the folder are of no use without it then.
    ///
    /// # Errors
    /// Where there is no room.
    pub fn stage(&mut self, others: &[(String, PathBuf)]) -> Result<StagingIndex, OciError> {
        let folder = images(&self.folder);
        let mut files = others.to_vec();
        for entry in fs::read_dir(&folder).map_err(OciError::io("list", &folder))? {
            let entry = entry.map_err(OciError::io("list", &folder))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            files.extend(is_pages_file(&name).then(|| (name, entry.path())));
        }
        let copied = self
            .copied
            .as_mut()
            .ok_or_else(|| OciError::RanOn { id: self.container.id.clone() })?;
        copied.index(&files)
    }

    /// That every process was held by CRIU, the same, ever since the images were written: it holds each
    /// only once.
    ///
    /// # Errors
    /// Where the container ran meanwhile.
    pub fn require_frozen(&self) -> Result<(), OciError> {
        let ran_on = || OciError::RanOn { id: self.container.id.clone() };
        let (processes, tracers) = self.held.as_ref().ok_or_else(ran_on)?;
        let are_held = !tracers.is_empty() && !tracers.contains(&0);
        match are_held && processes.tracers() == *tracers {
            true => Ok(()),
            false => Err(ran_on()),
        }
    }

    /// Lets the container run.
    ///
    /// # Errors
    /// Where CRIU does not end; it is killed then, and the container runs on all the same.
    pub fn end(&mut self) -> Result<(), OciError> {
        if let Some(hold) = self.hold.take() {
            // Its page server ends when nobody wants pages any more.
            let _ = hold.shutdown(Shutdown::Both);
        }
        if self.held.is_none() && self.runtime.is_some() {
            // It waits for a connection that was not made.
            self.strays.end(self.process);
        }
        if self.runtime.is_some() {
            self.wait_for_runtime(ENDS_WITHIN)?;
        }
        Ok(())
    }

    /// The files of pages, when all are copied.
    ///
    /// # Errors
    /// Where they are not.
    pub fn pages(&self) -> Result<Vec<PagesFile>, OciError> {
        pages::files(&images(&self.folder))
    }

    /// The folder of the images.
    pub fn images(&self) -> PathBuf {
        images(&self.folder)
    }

    /// The command that saves it. What a runtime has no option for, CRIU reads from its settings.
    fn checkpoint(&self, stop_within: u32, port: u16) -> Result<Command, OciError> {
        let path = settings_file(&self.folder);
        let address = Ipv4Addr::LOCALHOST;
        let settings = format!(
            "timeout {stop_within}\nlazy-pages\naddress {address}\nport {port}\n\
             ghost-limit {MOST_DELETED_BYTES}\nnetwork-lock iptables\n"
        );
        fs::write(&path, settings).map_err(OciError::io("write", &path))?;
        let mut command = self.container.runtime.command("checkpoint");
        command
            .args(option("--image-path", &images(&self.folder)))
            .args(option("--work-path", &work(&self.folder)))
            .args(["--leave-running", "--tcp-established", "--file-locks", "--ext-unix-sk"])
            .env("CRIU_CONFIG_FILE", &path)
            .stdout(Stdio::null());
        if self.container.runtime.is_runc() {
            // It tells CRIU otherwise where it is not told.
            command.args(["--lazy-pages", "--page-server", &format!("{address}:{port}")]);
        }
        command.arg("--").arg(&self.container.id);
        Ok(command)
    }

    fn spawn(&self, mut command: Command) -> Result<Child, OciError> {
        let log = runtime_log(&self.folder);
        let said = File::create(&log).map_err(OciError::io("create", &log))?;
        self.strays.mark(&mut command);
        command.stderr(said).spawn().map_err(|cause| OciError::NoRuntime {
            program: self.container.runtime.program.clone(),
            cause,
        })
    }

    /// Waits for the runtime, and kills what does not end.
    fn wait_for_runtime(&mut self, patience: Duration) -> Result<(), OciError> {
        let Some(mut child) = self.runtime.take() else { return Ok(()) };
        let deadline = Instant::now() + patience;
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                ended => {
                    if !matches!(ended, Ok(Some(_))) {
                        self.strays.end(self.process);
                        let _ = child.wait();
                    }
                    return Err(self.what_criu_said("saving"));
                }
            }
        }
    }

    /// Why the dump failed, in words that name what it failed at.
    fn what_criu_said(&mut self, operation: &'static str) -> OciError {
        self.strays.end(self.process);
        if let Some(mut child) = self.runtime.take() {
            let _ = child.wait();
        }
        failure(&self.container, &self.folder, "dump.log", operation)
    }
}

impl Drop for Dump {
    fn drop(&mut self) {
        if self.runtime.is_some() {
            let _ = self.end();
        }
    }
}

/// Why CRIU, or the runtime before it, failed.
pub(crate) fn failure(
    container: &Container,
    folder: &Path,
    log: &str,
    operation: &'static str,
) -> OciError {
    let id = container.id.clone();
    // podman has it write there.
    let of_podman = container.podman.as_ref().map(|_| container.bundle.join(log));
    let logs = [Some(work(folder).join(log)), of_podman];
    let log = logs.into_iter().flatten().find_map(|it| fs::read(it).ok()).unwrap_or_default();
    if let Some((cause, advice)) = criu_log::reason(&String::from_utf8_lossy(&log)) {
        return OciError::Criu { id, cause, advice };
    }
    let said = fs::read(runtime_log(folder)).unwrap_or_default();
    let said = last_line(&String::from_utf8_lossy(&said));
    // Its own words for a CRIU that is gone.
    let cause = if said.contains("unixpacket") { "CRIU was killed".to_owned() } else { said };
    OciError::Runtime { operation, id, cause }
}

/// Whether CRIU has accepted a connection of ours: a socket that was not accepted has no inode yet
/// (`/proc/net/tcp`, net/ipv4/tcp_ipv4.c).
fn is_accepted(ours: &TcpStream, port: u16) -> bool {
    let Ok(own) = ours.local_addr() else { return false };
    let deadline = Instant::now() + ACCEPTED_WITHIN;
    while Instant::now() < deadline {
        let table = fs::read_to_string("/proc/net/tcp").unwrap_or_default();
        if table.lines().any(|line| is_accepted_line(line, port, own.port())) {
            return true;
        }
        std::thread::sleep(LOOK);
    }
    false
}

/// Whether a line is of CRIU's end of our connection, and accepted.
fn is_accepted_line(line: &str, port: u16, own: u16) -> bool {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let has_port = |field: usize, port: u16| {
        fields.get(field).is_some_and(|it| it.ends_with(&format!(":{port:04X}")))
    };
    has_port(1, port) && has_port(2, own) && fields.get(9).is_some_and(|inode| *inode != "0")
}

/// A port that nobody listens on now. Should somebody take it before CRIU does, CRIU fails.
///
/// # Errors
/// Where there is none.
pub fn free_port() -> Result<u16, OciError> {
    let port = || Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port());
    port().map_err(OciError::io("listen on", Path::new("127.0.0.1")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_connection_that_was_accepted_is_served() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listen");
        let port = listener.local_addr().expect("address").port();
        let first = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("connect");
        let ours = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("connect");
        let (_served, _) = listener.accept().expect("accept");
        assert!(is_accepted(&first, port));
        assert!(!is_accepted(&ours, port), "it only waits");
    }
}
