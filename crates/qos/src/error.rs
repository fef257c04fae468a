use dewar_kernel::{KernelError, Task};
use std::io;
use std::path::{Path, PathBuf};

/// Why a guest cannot be given CPU time.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QosError {
    /// So much is promised to others.
    #[error("{}", refusal(*.wanted, *.limit, .others))]
    Full {
        /// What was asked for, in CPUs.
        wanted: f64,
        /// What can be promised in all.
        limit: f64,
        /// Who has been promised what.
        others: Vec<(String, f64)>,
    },
    /// Somebody gives it CPU time already.
    #[error("'{0}' has its CPU time from another 'dewar qos'")]
    Held(String),
    /// A thread has a reservation that no guest of ours was given.
    #[error(
        "thread {} of process {} is under SCHED_DEADLINE already, and not by a 'dewar qos'",
        .0.thread, .0.process
    )]
    Reserved(Task),
    /// It is not known what is promised.
    #[error("{} cannot be read: it is not known who has been promised what", .0.display())]
    Unreadable(PathBuf),
    /// No thread can be put under `SCHED_DEADLINE` here.
    #[error("threads cannot be given deadlines here: {0}")]
    NoDeadlines(String),
    /// The kernel promises CPU time to others than Dewar's guests.
    #[error("the kernel has promised the CPU time to others: {0}")]
    Busy(String),
    /// No CPU controller of a control group can be used.
    #[error("control groups cannot be used here: {0}")]
    NoGroups(String),
    /// The kernel failed us.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A file could not be read or written.
    #[error("{0}: {1}")]
    File(PathBuf, #[source] io::Error),
}

impl QosError {
    pub(crate) fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        |error| Self::File(path, error)
    }
}

fn refusal(wanted: f64, limit: f64, others: &[(String, f64)]) -> String {
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let taken: f64 = others.iter().map(|(_, share)| share).sum();
    let list: Vec<String> =
        others.iter().map(|(name, share)| format!("{name} {}", percent(*share))).collect();
    let list = if list.is_empty() { String::new() } else { format!(" ({})", list.join(", ")) };
    format!(
        "{} of a CPU cannot be promised: of {} that can be, {} are{list}",
        percent(wanted),
        percent(limit),
        percent(taken)
    )
}
