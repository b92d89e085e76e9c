//! The errors of `doctor deploy`.

use std::{io, path::PathBuf};

use super::SettingError;

#[derive(Debug, thiserror::Error)]
pub(crate) enum DeployError {
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error("{0}")]
    Usage(String),
    #[error("{operation} {}", path.display())]
    File { operation: &'static str, path: PathBuf, source: io::Error },
    #[error("{0}")]
    Other(String),
}

pub(super) type Result<T> = std::result::Result<T, DeployError>;
