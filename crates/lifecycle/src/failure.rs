//! What a person, or a program, is told when something fails: what failed, in what state the guest is,
//! what to do. Each error of the crates below becomes one such sentence.

use dewar_checkpoint::CheckpointError;
use dewar_guest::GuestError;
use dewar_guest_qemu::handover::HandoverError;
use dewar_guest_qemu::launch::LaunchError;
use dewar_guest_qemu::start_from_state::StartError;
use dewar_guest_qemu::{DiskError, IncomingError, RecoverError, RollbackError, StateError};
use dewar_image::{ImageError, StoreError};
use dewar_kernel::KernelError;
use dewar_migrate::MigrateError;
use dewar_qos::QosError;
use dewar_registry::RegistryError;
use serde_json::Value;

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
    /// A failure with this exit code.
    pub fn new(code: Code, what: impl Into<String>) -> Self {
        Self { code, what: what.into(), state: None, advice: None, printed: false }
    }

    /// What a command that died left could not be finished.
    fn unfinished(error: &dyn std::error::Error) -> Self {
        Self::new(Code::Attention, error.to_string())
            .state("a guest is not as it was before a command that died")
            .advice("the same command tries again")
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
    pub fn beside(&self, mut report: Value) -> Value {
        report["error"] = self.what.as_str().into();
        report["guest_state"] = self.state.as_deref().into();
        report["advice"] = self.advice.as_deref().into();
        report["exit_code"] = (self.code as u8).into();
        report
    }

    /// Says that the result was printed, failure and all.
    pub fn already_printed(mut self) -> Self {
        self.printed = true;
        self
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

    /// How it ends the command.
    pub fn code(&self) -> Code {
        self.code
    }

    /// Whether its result was printed, failure and all.
    pub fn is_printed(&self) -> bool {
        self.printed
    }

    /// What failed, without the guest's state and advice.
    pub fn what(&self) -> &str {
        &self.what
    }
}

impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Self {
        Self::new(Code::Failed, error.to_string())
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
            | ImageError::Store(StoreError::BadUrl { .. } | StoreError::Unfit { .. })
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

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        ImageError::from(error).into()
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

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        Self::new(Code::Failed, error.to_string())
    }
}

impl From<IncomingError> for Failure {
    fn from(error: IncomingError) -> Self {
        match error {
            IncomingError::Registry(error) => error.into(),
            error => Self::new(Code::Failed, error.to_string()),
        }
    }
}

impl From<MigrateError> for Failure {
    fn from(error: MigrateError) -> Self {
        match error {
            MigrateError::Guest(error) => error.into(),
            MigrateError::NoGpu => {
                Self::new(Code::Unsupported, error.to_string()).advice("leave '--gpu' out")
            }
            error => Self::new(Code::Failed, error.to_string()),
        }
    }
}

impl From<StateError> for Failure {
    fn from(error: StateError) -> Self {
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

impl From<RollbackError> for Failure {
    fn from(error: RollbackError) -> Self {
        if let RollbackError::Disk(DiskError::Outdated { own, overlay }) = &error {
            let (own, overlay) = (own.display(), overlay.display());
            return Self::new(Code::Attention, error.to_string())
                .state("neither file was changed")
                .advice(format!(
                    "'rm {overlay}' keeps {own} as it is now; were it sure that nobody else wrote \
                     it, 'qemu-img commit {overlay}' before that would keep what the guest wrote"
                ));
        }
        Self::unfinished(&error)
    }
}

impl From<RecoverError> for Failure {
    fn from(error: RecoverError) -> Self {
        match error {
            RecoverError::Rollback(error) => error.into(),
            RecoverError::Handover(error) => match *error {
                HandoverError::Unknown(..) => (*error).into(),
                error => Self::from(error).attention(),
            },
            error => Self::unfinished(&error),
        }
    }
}

impl From<QosError> for Failure {
    fn from(error: QosError) -> Self {
        let text = error.to_string();
        let unchanged = "its threads are scheduled as before";
        match error {
            QosError::Full { wanted, limit, others } => {
                let free = limit - others.iter().map(|(_, share)| share).sum::<f64>();
                // Rounded down: it is to be admitted with that.
                let fits = (free.max(0.0) / wanted * 100.0 + 0.001).floor();
                let advice = match fits >= 1.0 {
                    true => format!("with {fits} % of its --max it would be admitted; "),
                    false => String::new(),
                };
                Self::new(Code::Failed, text)
                    .state(unchanged)
                    .advice(format!("{advice}--overcommit admits it as it is"))
            }
            QosError::Held(_) => Self::new(Code::Failed, text)
                .state("it goes on")
                .advice("'dewar qos NAME --release' ends it"),
            QosError::Reserved(task) => {
                Self::new(Code::Failed, text).state(unchanged).advice(format!(
                    "if nobody else gave it that, 'dewar qos --release --pid {}' takes it away",
                    task.process
                ))
            }
            QosError::Unreadable(_) => Self::new(Code::Failed, text)
                .state(unchanged)
                .advice("remove it when the guest that has its name has ended"),
            QosError::NoDeadlines(_) | QosError::NoGroups(_) => {
                Self::new(Code::Unsupported, text).state(unchanged)
            }
            QosError::Kernel(_) | QosError::File(..) | QosError::Busy(_) => {
                Self::new(Code::Failed, text).state(unchanged)
            }
            _ => Self::new(Code::Failed, text),
        }
    }
}
