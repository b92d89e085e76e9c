//! The source of a release's programs: this machine's packages, or a root file system of another Debian.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{
    error::SlurmTestbedError,
    files::{executable, folder},
    layout::{Generation, PathsAndPorts},
    namespaces::Namespaces,
};
use crate::kubernetes::from_script;

/// The client programs that tests call.
const CLIENTS: [&str; 10] =
    ["sacct", "salloc", "sattach", "sbatch", "scancel", "scontrol", "sdiag", "sinfo", "squeue", "srun"];

/// The version in the packages of Debian 12.
const DEBIAN_12_VERSION: &str = "22.05";

#[derive(Debug)]
pub(super) struct Installation {
    /// The root file system used in place of this machine's.
    pub(super) root: Option<PathBuf>,
}

impl Installation {
    /// Finds the programs of a release.
    ///
    /// # Errors
    /// Returns [`SlurmTestbedError::Unsupported`] with what is missing.
    pub(super) fn find(generation: Generation) -> Result<Self, SlurmTestbedError> {
        let no = |why: String| SlurmTestbedError::Unsupported { why };
        match generation {
            Generation::Debian12 => {
                installed().map_err(no)?;
                Ok(Self { root: None })
            }
            Generation::Debian13 => Ok(Self { root: Some(from_script("scripts/slurm.sh", &[]).map_err(no)?) }),
        }
    }

    /// Returns the folder of the client programs: the installed ones, or wrappers that run those of the other root.
    pub(super) fn client_programs(
        &self,
        paths_and_ports: &PathsAndPorts,
        world: &Namespaces,
    ) -> Result<PathBuf, SlurmTestbedError> {
        if self.root.is_none() {
            return Ok(PathBuf::from("/usr/bin"));
        }
        let programs = paths_and_ports.folder.join("bin");
        folder(&programs)?;
        let enter = world.enter().join(" ");
        for name in CLIENTS {
            let program = format!("#!/bin/sh\nexec {enter} --wdns=\"$PWD\" /usr/bin/{name} \"$@\"\n");
            executable(&programs.join(name), &program)?;
        }
        Ok(programs)
    }
}

/// Checks that this machine has the Slurm of Debian 12. Returns why not.
fn installed() -> Result<(), String> {
    for program in ["/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/bin/scontrol"] {
        if !Path::new(program).exists() {
            return Err(format!("{program} is not installed; scripts/system.sh installs it"));
        }
    }
    let output = Command::new("/usr/sbin/slurmctld").arg("-V").output();
    let output = output.map_err(|error| format!("running slurmctld: {error}"))?;
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if version.contains(DEBIAN_12_VERSION) {
        return Ok(());
    }
    Err(format!("the installed Slurm is `{version}`, expected {DEBIAN_12_VERSION} of Debian 12"))
}
