//! `doctor config check --live` on this machine: the program that jobs run, its version, our rights and the device files. Changes
//! nothing.

use std::{path::Path, process::Command, time::Duration};

use super::LocalConfig;
use crate::{
    inspection::{NodeAspect, NodeTrial},
    process::{self, ProcessOutput},
    program,
};

const VERSION_DEADLINE: Duration = Duration::from_secs(10);
const MAX_OUTPUT_BYTES: usize = 4096;

pub(super) fn try_node(config: &LocalConfig) -> NodeTrial {
    let mut trial = NodeTrial::new(config.node_name());
    match program::find_executable(config.doctor_node.as_deref()) {
        Ok(program) => {
            trial.good(NodeAspect::Program, program.display().to_string());
            match version(&program) {
                Ok(version) => trial.version(&version),
                Err(why) => trial.bad(NodeAspect::Version, why, "install doctor-node again"),
            }
        }
        Err(why) => {
            trial.bad(NodeAspect::Program, why, "install doctor-node, or set `doctor_node` under [backend.local]");
            trial.could_not(NodeAspect::Version, "there is no program");
        }
    }
    trial.good(NodeAspect::SharedDirectory, format!("jobs run here and use {} themselves", config.share.display()));
    match rustix::process::geteuid().is_root() {
        true => trial.good(NodeAspect::Rights, "root"),
        false => trial.could_not(
            NodeAspect::Rights,
            "this user is not root; checks that need the kernel log or serial numbers are inconclusive for it",
        ),
    }
    trial.devices(gpu_files(Path::new("/dev")));
    trial.good(NodeAspect::Clock, "the clock of this machine");
    trial
}

/// Returns the version that the program prints, such as `0.3.0`.
fn version(program: &Path) -> Result<String, String> {
    let mut command = Command::new(program);
    command.arg("--version");
    let failed = |why: String| format!("{} --version: {why}", program.display());
    match process::output(command, b"", VERSION_DEADLINE, MAX_OUTPUT_BYTES)
        .map_err(|error| failed(error.to_string()))?
    {
        ProcessOutput::Exited { status, stdout, .. } if status.success() => {
            let text = String::from_utf8_lossy(&stdout);
            let version = text.trim().strip_prefix("doctor-node ").map(str::to_owned);
            version.ok_or_else(|| failed("it printed no version".to_owned()))
        }
        ProcessOutput::Exited { status, stderr, .. } => {
            Err(failed(format!("{status}: {}", process::last_line(&stderr))))
        }
        ProcessOutput::OutputLimit => Err(failed("it printed no version".to_owned())),
        ProcessOutput::TimedOut => Err(failed(format!("no answer within {} s", VERSION_DEADLINE.as_secs()))),
    }
}

/// Counts the device files of GPUs: `nvidia0`, `nvidia1` and so on.
fn gpu_files(folder: &Path) -> usize {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let is_gpu = |name: &str| {
        let number = name.strip_prefix("nvidia");
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    names.filter(|name| name.to_str().is_some_and(is_gpu)).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspection::InspectionStatus;

    #[test]
    fn only_the_files_of_gpus_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia", "sda"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(gpu_files(folder.path()), 2);
        assert_eq!(gpu_files(&folder.path().join("missing")), 0);
    }

    #[test]
    fn a_missing_program_and_one_that_fails_are_bad() {
        let tried = |program: &str| {
            try_node(&LocalConfig { doctor_node: Some(program.into()), ..LocalConfig::new("/state", "/share") })
        };
        let missing = tried("/no/such/doctor-node");
        assert_eq!(missing.found[&NodeAspect::Program].status, InspectionStatus::Bad);
        assert_eq!(missing.found[&NodeAspect::Version].status, InspectionStatus::Unknown);
        let other = tried("/bin/false");
        assert_eq!(other.found[&NodeAspect::Program].status, InspectionStatus::Good);
        assert_eq!(other.found[&NodeAspect::Version].status, InspectionStatus::Bad, "{other:?}");
        assert_eq!(other.found.len(), NodeAspect::ALL.len());
    }
}
