//! Why a running QEMU cannot be described.

use crate::qmp::QmpError;

/// Why it is not known how a guest could be started as it is now.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DescribeError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("{0}")]
    Unknown(String),
}
