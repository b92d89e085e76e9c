//! Registers the dstack backend.

use std::path::Path;

use doctor_backend::{
    BackendError,
    inspection::Inspection,
    registration::{Kind, Opened, Service},
};
use doctor_core::policy::Policy;

use super::{DstackBackend, DstackConfig, inspect};

/// A project of a dstack server.
#[derive(Debug)]
pub struct Dstack;

impl Kind for Dstack {
    const NAME: &'static str = "dstack";
    const DEFAULT_TEXT: &'static str = include_str!("default.toml");

    type Config = DstackConfig;

    fn resolve(config: &mut DstackConfig, beside: &Path, _service: &Service<'_>) {
        config.beside(beside);
    }

    fn check(config: &DstackConfig) -> Result<(), String> {
        config.check().map_err(|error| error.to_string())
    }

    fn open(config: &DstackConfig, service: &Service<'_>) -> Result<Opened, BackendError> {
        Ok(Opened::new(DstackBackend::open(config.clone(), service.policy)?))
    }

    fn inspect(config: &DstackConfig, _service: &Service<'_>, _policy: &Policy) -> Inspection {
        inspect(config).into()
    }
}
