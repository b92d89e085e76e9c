//! Checks what can be known of a Slurm configuration without asking Slurm: settings, programs and files.

use doctor_backend::{BackendError, Effect, program, trusted_file};

use super::config::SlurmConfig;

/// The commands that the backend requires.
pub(super) const REQUIRED_PROGRAMS: [&str; 4] = ["scontrol", "squeue", "sbatch", "scancel"];

/// Checks what opening the backend would refuse, and that Slurm's commands and the files named in the section exist. Changes
/// nothing and runs nothing.
pub(super) fn verify(config: &SlurmConfig) -> Result<(), BackendError> {
    let operation = "open the Slurm backend";
    let refuse = |text: String| BackendError { operation, text, effect: Effect::NotAppliedPermanent };
    config.check().map_err(|error| refuse(error.to_string()))?;
    for name in REQUIRED_PROGRAMS {
        let installed = program::check_installed(name, config.programs.as_deref());
        installed.map_err(|text| refuse(format!("{text}; see `programs` under [backend.slurm]")))?;
    }
    let token = config.rest.as_ref().and_then(|rest| rest.token_file.as_deref());
    let authorities = config.rest.as_ref().and_then(|rest| rest.ca_file.as_deref());
    let files =
        [("slurm_conf", config.slurm_conf.as_deref()), ("rest.token_file", token), ("rest.ca_file", authorities)];
    for (key, path) in files {
        let Some(path) = path else { continue };
        trusted_file::open(path).map_err(|error| refuse(format!("`{key}` {}: {error}", path.display())))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[test]
    fn missing_programs_and_files_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = SlurmConfig { programs: Some(folder.path().to_owned()), ..SlurmConfig::default() };
        let refused = |config: &SlurmConfig| verify(config).unwrap_err().text;
        assert!(refused(&config).contains("there is no program scontrol in"), "{}", refused(&config));
        for name in REQUIRED_PROGRAMS {
            fs::write(folder.path().join(name), "").unwrap();
            fs::set_permissions(folder.path().join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        assert_eq!(verify(&config), Ok(()));
        config.slurm_conf = Some(folder.path().join("slurm.conf"));
        assert!(refused(&config).contains("`slurm_conf`"), "{}", refused(&config));
    }
}
