//! What a person, or a program, is told when something fails.

use crate::output::{printable, tell};
use dewar_checkpoint::CheckpointError;
use dewar_guest::GuestError;
use dewar_guest_qemu::handover::HandoverError;
use dewar_guest_qemu::launch::LaunchError;
use dewar_guest_qemu::start_from_state::ReviveError;
use dewar_guest_qemu::{DiskError, RecoverError};
use dewar_image::ImageError;
use dewar_registry::RegistryError;
use serde_json::{Value, json};
use std::io::Write;
use std::process::ExitCode;

/// Exit codes; part of the interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// It failed; the guest is unharmed.
    Failed = 1,
    /// The command line contradicts itself.
    Usage = 2,
    /// There is no such guest or checkpoint.
    NotFound = 3,
    /// It is not supported here.
    Unsupported = 4,
    /// It failed and the guest needs attention.
    Attention = 5,
}

/// A failed command: what failed, in what state the guest is, what to do.
#[derive(Debug)]
pub struct Failure {
    code: Code,
    what: String,
    state: Option<String>,
    advice: Option<String>,
    /// Whether a program has its one object already.
    printed: bool,
}

/// What to do about a guest whose process has ended.
pub const GONE: &str = "'dewar restore' brings it back from its newest checkpoint";

impl Failure {
    pub fn new(code: Code, what: impl Into<String>) -> Self {
        Self { code, what: what.into(), state: None, advice: None, printed: false }
    }

    /// Adds in what state the guest is.
    pub fn state(mut self, state: impl Into<String>) -> Self {
        self.state = Some(state.into());
        self
    }

    /// Adds what to do.
    pub fn advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// Raises the code to [`Code::Attention`].
    pub fn attention(mut self) -> Self {
        self.code = Code::Attention;
        self
    }

    /// The failure beside a result of which not all is as it should be, for programs.
    pub fn beside(&self, mut told: Value) -> Value {
        told["error"] = self.what.as_str().into();
        told["guest_state"] = self.state.as_deref().into();
        told["advice"] = self.advice.as_deref().into();
        told["exit_code"] = (self.code as u8).into();
        told
    }

    /// Says that the result was printed, failure and all.
    pub fn already_printed(mut self) -> Self {
        self.printed = true;
        self
    }

    /// Tells it beside a command that goes on.
    pub fn note(&self) {
        // Nobody may be there to hear it.
        let _ = writeln!(std::io::stderr(), "dewar: beside this: {}", printable(&self.whole()));
    }

    /// All that it says, in one sentence.
    pub fn whole(&self) -> String {
        let more = [&self.state, &self.advice].into_iter().flatten();
        std::iter::once(&self.what).chain(more).map(String::as_str).collect::<Vec<_>>().join("; ")
    }

    /// Whether the guest needs attention.
    pub fn is_attention(&self) -> bool {
        self.code == Code::Attention
    }

    /// Tells it and gives the exit code.
    pub fn report(&self, json: bool) -> ExitCode {
        // Nobody may be there to hear it.
        let _ = writeln!(std::io::stderr(), "dewar: {}", printable(&self.whole()));
        if json && !self.printed {
            tell(self.beside(json!({})));
        }
        ExitCode::from(self.code as u8)
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

impl From<RegistryError> for Failure {
    fn from(error: RegistryError) -> Self {
        let code = match error {
            RegistryError::NoSuchGuest(_) => Code::NotFound,
            RegistryError::BadName(_) => Code::Usage,
            _ => Code::Failed,
        };
        let failure = Self::new(code, error.to_string());
        match error {
            RegistryError::NoSuchGuest(_) => failure.advice("'dewar ps' lists guests"),
            RegistryError::Locked(_) => failure.advice("wait for it, then try again"),
            RegistryError::Exists(name) => failure.advice(format!(
                "choose another name; or end it: 'dewar stop {name}', or 'dewar restore' with \
                     --replace"
            )),
            _ => failure,
        }
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        let code = match error {
            ImageError::NotFound { .. } | ImageError::NoStore { .. } => Code::NotFound,
            ImageError::TooNew { .. }
            | ImageError::BadUrl { .. }
            | ImageError::Unfit { .. }
            | ImageError::TooLarge { .. } => Code::Unsupported,
            _ => Code::Failed,
        };
        let failure = Self::new(code, error.to_string());
        match error {
            ImageError::NotFound { .. } => failure.advice("'dewar ls' lists checkpoints"),
            ImageError::NoStore { .. } => failure.advice("take a checkpoint first"),
            ImageError::Damaged { .. } => failure.advice("the checkpoint cannot be used"),
            ImageError::BrokenRecord { id, .. } => {
                failure.advice(format!("'dewar delete {id}' removes it"))
            }
            ImageError::Unsure { found: Some(id), .. } => {
                failure.advice(format!("the newest of that name that can be read is {id}"))
            }
            ImageError::Unsure { .. } => failure.advice("'dewar ls' lists checkpoints"),
            _ => failure,
        }
    }
}

impl From<GuestError> for Failure {
    fn from(error: GuestError) -> Self {
        let code = match error {
            GuestError::Unsupported { .. } => Code::Unsupported,
            _ => Code::Failed,
        };
        Self::new(code, error.to_string())
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        match error {
            CheckpointError::Guest(error) => error.into(),
            CheckpointError::Image(error) => error.into(),
            other => Self::new(Code::Failed, other.to_string()),
        }
    }
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        let code = match error {
            LaunchError::NoRoom { .. } => Code::Unsupported,
            _ => Code::Failed,
        };
        let failure = Self::new(code, error.to_string());
        match error {
            LaunchError::NoRoom { .. } => failure.advice(
                "end or freeze another guest, give the file system more, name another with \
                 --ram-dir, or take the risk with --overcommit: where memory runs out a guest is \
                 killed",
            ),
            _ => failure,
        }
    }
}

impl From<ReviveError> for Failure {
    fn from(error: ReviveError) -> Self {
        Self::new(Code::Failed, error.to_string())
    }
}

impl From<HandoverError> for Failure {
    fn from(error: HandoverError) -> Self {
        let what = error.to_string();
        match error {
            HandoverError::Guest(error) => error.into(),
            HandoverError::Unsupported(..) => Self::new(Code::Unsupported, what),
            HandoverError::Unknown(name, pid) => Self::new(Code::Attention, what)
                .state("its memory may be ahead of its devices")
                .advice(format!(
                    "give it up with 'kill {pid}', then 'dewar restore {name}' brings back its \
                     newest checkpoint"
                )),
            HandoverError::Unfinished(_) => Self::new(Code::Attention, what)
                .state("the guest runs in its new QEMU")
                .advice("'dewar ps' goes on with the rest"),
            HandoverError::Crashed => Self::new(Code::Attention, what)
                .state("the guest has ended")
                .advice("'dewar restore' brings back its newest checkpoint"),
            _ => Self::new(Code::Failed, what),
        }
    }
}

impl From<RecoverError> for Failure {
    fn from(error: RecoverError) -> Self {
        if let RecoverError::Handover(error) = error {
            return match *error {
                HandoverError::Unknown(..) => (*error).into(),
                error => Self::from(error).attention(),
            };
        }
        if let RecoverError::Disk(DiskError::Outdated { own, overlay }) = &error {
            let (own, overlay) = (own.display(), overlay.display());
            return Self::new(Code::Attention, error.to_string())
                .state("neither file was changed")
                .advice(format!(
                    "'rm {overlay}' keeps {own} as it is now; were it sure that nobody else wrote \
                     it, 'qemu-img commit {overlay}' before that would keep what the guest wrote"
                ));
        }
        Self::new(Code::Attention, error.to_string())
            .state("a guest is not as it was before a command that died")
            .advice("the same command tries again")
    }
}
