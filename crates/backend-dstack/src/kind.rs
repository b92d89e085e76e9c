//! Registers the dstack backend.

use std::path::Path;

use doctor_backend::{
    BackendError,
    inspection::Inspection,
    registration::{BackendKind, OpenedCluster, ServiceSettings},
};
use doctor_core::policy::Policy;

use super::{DstackBackend, DstackConfig, inspect};

/// A project of a dstack server.
#[derive(Debug)]
pub struct Dstack;

impl BackendKind for Dstack {
    const NAME: &'static str = "dstack";
    const DEFAULT_TEXT: &'static str = include_str!("default.toml");

    type Config = DstackConfig;

    fn resolve(config: &mut DstackConfig, config_dir: &Path, _service: &ServiceSettings<'_>) {
        config.resolve_paths(config_dir);
    }

    fn check(config: &DstackConfig) -> Result<(), String> {
        config.check().map_err(|error| error.to_string())
    }

    fn verify(config: &DstackConfig, _service: &ServiceSettings<'_>) -> Result<(), BackendError> {
        DstackBackend::verify(config)
    }

    fn open(config: &DstackConfig, service: &ServiceSettings<'_>) -> Result<OpenedCluster, BackendError> {
        Ok(OpenedCluster::new(DstackBackend::open(config.clone(), service.policy)?))
    }

    fn inspect(config: &DstackConfig, _service: &ServiceSettings<'_>, _policy: &Policy) -> Inspection {
        inspect(config).into()
    }
}
