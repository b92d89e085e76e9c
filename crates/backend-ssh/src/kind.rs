//! Registers the SSH backend.

use std::path::{Path, PathBuf};

use doctor_backend::{
    BackendError,
    inspection::Inspection,
    registration::{BackendKind, OpenedCluster, ServiceSettings},
};
use doctor_core::policy::Policy;

use super::{RequiredRepairs, SshBackend, SshConfig, inspect};

/// Hosts without a scheduler.
#[derive(Debug)]
pub struct Ssh;

impl BackendKind for Ssh {
    const NAME: &'static str = "ssh";
    const DEFAULT_TEXT: &'static str = include_str!("default.toml");

    type Config = SshConfig;

    fn resolve(config: &mut SshConfig, config_dir: &Path, _service: &ServiceSettings<'_>) {
        let files = [&mut config.hostfile, &mut config.ssh_config, &mut config.known_hosts, &mut config.doctor_node];
        for path in files.into_iter().flatten().chain([&mut config.state]) {
            *path = config_dir.join(&*path);
        }
    }

    fn check(config: &SshConfig) -> Result<(), String> {
        config.check().map_err(|error| error.to_string())
    }

    fn verify(config: &SshConfig, _service: &ServiceSettings<'_>) -> Result<(), BackendError> {
        SshBackend::verify(config)
    }

    fn open(config: &SshConfig, service: &ServiceSettings<'_>) -> Result<OpenedCluster, BackendError> {
        Ok(OpenedCluster::new(SshBackend::open(config.clone(), service.policy)?))
    }

    fn inspect(config: &SshConfig, _service: &ServiceSettings<'_>, policy: &Policy) -> Inspection {
        let repairs = RequiredRepairs { reset: policy.allow.reset, reboot: policy.allow.reboot };
        inspect(config, repairs)
    }

    fn writes(config: &SshConfig) -> Vec<PathBuf> {
        let keys = config.known_hosts.as_ref().and_then(|file| file.parent());
        [Some(config.state.as_path()), keys].into_iter().flatten().map(Path::to_owned).collect()
    }
}
