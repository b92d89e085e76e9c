//! Registers the Slurm backend.

use std::path::Path;

use doctor_backend::{
    BackendError,
    inspection::Inspection,
    registration::{BackendKind, OpenedCluster, ServiceSettings, probe_cluster},
};
use doctor_core::policy::Policy;

use super::{SlurmBackend, SlurmConfig, inspect, verify::verify};

/// A Slurm cluster.
#[derive(Debug)]
pub struct Slurm;

impl BackendKind for Slurm {
    const NAME: &'static str = "slurm";
    const DEFAULT_TEXT: &'static str = include_str!("default.toml");

    type Config = SlurmConfig;

    fn resolve(config: &mut SlurmConfig, beside: &Path, _service: &ServiceSettings<'_>) {
        let rest = config.rest.iter_mut().flat_map(|rest| [rest.token_file.as_mut(), rest.ca_file.as_mut()]);
        for path in rest.chain([config.slurm_conf.as_mut(), config.programs.as_mut()]).flatten() {
            *path = beside.join(&*path);
        }
    }

    fn check(config: &SlurmConfig) -> Result<(), String> {
        config.check().map_err(|error| error.to_string())
    }

    fn verify(config: &SlurmConfig, _service: &ServiceSettings<'_>) -> Result<(), BackendError> {
        verify(config)
    }

    fn open(config: &SlurmConfig, service: &ServiceSettings<'_>) -> Result<OpenedCluster, BackendError> {
        Ok(OpenedCluster::new(SlurmBackend::open(config.clone(), service.data, service.policy)?))
    }

    fn inspect(config: &SlurmConfig, service: &ServiceSettings<'_>, _policy: &Policy) -> Inspection {
        let mut found = inspect(config, service.data);
        found.push(probe_cluster(|| Self::open(config, service)));
        found.into()
    }
}
