//! Errors of NCCL.

use doctor_core::observation::{FailureKind, ProbeFailure};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NcclError {
    #[error("NCCL ({library}) cannot be loaded; install libnccl2, or set `library` or DOCTOR_NCCL to its path: {text}")]
    NoLibrary { library: String, text: String },
    #[error("NCCL is too old: it has no {symbol}; 2.14 or newer is required")]
    NoSymbol { symbol: &'static str },
    #[error("{call} returned {code}: {text}")]
    Failed { call: &'static str, code: i32, text: String },
    /// The caller ended the wait.
    #[error("{call} was aborted")]
    Aborted { call: &'static str },
}

/// `ncclRemoteError`.
const REMOTE_ERROR: i32 = 6;

impl NcclError {
    /// Returns whether another rank left or became unreachable.
    pub const fn is_remote_error(&self) -> bool {
        matches!(self, Self::Failed { code: REMOTE_ERROR, .. })
    }

    /// Converts the error into the reason for a missing measurement.
    pub fn failure(&self) -> ProbeFailure {
        let kind = match self {
            Self::NoLibrary { .. } => FailureKind::NotInstalled,
            Self::NoSymbol { .. } => FailureKind::Missing,
            Self::Failed { .. } => FailureKind::Failed,
            Self::Aborted { .. } => FailureKind::TimedOut,
        };
        ProbeFailure::new(kind, self.to_string())
    }
}
