//! Shared by the Azure commands: reading the cluster file, and the options for the `az` program.

use std::{
    io,
    path::{Path, PathBuf},
};

use doctor_backend::trusted_file;
use doctor_fleet::azure::{Az, Cluster};

use crate::failure::{Failure, Result};

/// The size limit of a cluster or cloud-init file, in bytes.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// The options of every command that queries Azure.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct AzArgs {
    /// Path of the Azure CLI.
    #[arg(long, value_name = "PROGRAM", default_value = "az")]
    az: PathBuf,
}

impl AzArgs {
    pub(super) fn az(&self) -> Az {
        Az::new(&self.az)
    }
}

/// Reads a text file of the site, of at most [`MAX_FILE_BYTES`] bytes.
pub(super) fn read(path: &Path) -> Result<String> {
    let failed = |source| Failure::File { operation: "reading", path: path.to_owned(), source };
    // It names what is installed on the machines, with the operator's rights in the cloud.
    let file = trusted_file::open(path).map_err(failed)?;
    let length = file.metadata().map_err(failed)?.len();
    if length > MAX_FILE_BYTES {
        return Err(Failure::Usage(format!(
            "{} has {length} bytes, expected a text of at most {MAX_FILE_BYTES}",
            path.display()
        )));
    }
    io::read_to_string(file).map_err(failed)
}

pub(super) fn cluster(path: &Path) -> Result<Cluster> {
    let text = read(path)?;
    let home = std::env::var_os("HOME").map(PathBuf::from);
    Cluster::parse(&text, path, home.as_deref()).map_err(|error| Failure::Cluster { path: path.to_owned(), error })
}
