//! What the commands for Azure share: the file of a cluster, and the program that is asked.

use std::{
    fs,
    path::{Path, PathBuf},
};

use doctor_fleet::azure::{Az, Cluster};

use crate::failure::{Failure, Result};

/// No file of a cluster, nor one for cloud-init, is longer.
const MOST: u64 = 1024 * 1024;

/// Options of every command that asks Azure.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct AzArgs {
    /// Azure's command line.
    #[arg(long, value_name = "PROGRAM", default_value = "az")]
    az: PathBuf,
}

impl AzArgs {
    pub(super) fn az(&self) -> Az {
        Az::new(&self.az)
    }
}

/// A text file of the site's.
pub(super) fn read(path: &Path) -> Result<String> {
    let failed = |source| Failure::File { operation: "reading", path: path.to_owned(), source };
    let length = fs::metadata(path).map_err(failed)?.len();
    if length > MOST {
        return Err(Failure::Usage(format!(
            "{} has {length} bytes, expected a text of at most {MOST}",
            path.display()
        )));
    }
    fs::read_to_string(path).map_err(failed)
}

pub(super) fn cluster(path: &Path) -> Result<Cluster> {
    let text = read(path)?;
    let home = std::env::var_os("HOME").map(PathBuf::from);
    Cluster::read(&text, path, home.as_deref()).map_err(|error| Failure::Cluster { path: path.to_owned(), error })
}
