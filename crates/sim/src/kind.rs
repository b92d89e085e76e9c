//! The registration of the simulated cluster as a backend.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use doctor_backend::{
    BackendError, Effect,
    registration::{BackendKind, OpenedCluster, ServiceSettings},
};
use doctor_checks::Catalogue;
use doctor_core::{policy::Policy, profile::MachineTypes};
use serde::{Deserialize, Serialize};

use crate::{RemoteSim, simulated_tests};

/// The time to wait for a simulated cluster that is starting.
const WAIT: Duration = Duration::from_secs(5);

/// A simulated cluster in a separate process.
#[derive(Debug)]
pub struct Sim;

/// `[backend.sim]` of the service's configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimConfig {
    pub socket: PathBuf,
    /// Whether the nodes run the shipped tests instead of the simulated ones. The world has a setting of the same name.
    #[serde(default)]
    pub shipped_tests: bool,
}

impl SimConfig {
    /// Connects to the simulated cluster.
    ///
    /// # Errors If no simulated cluster answers.
    pub fn connect(&self) -> Result<Arc<RemoteSim>, BackendError> {
        let refuse = |text: String| BackendError { operation: "connect", text, effect: Effect::NotAppliedRetry };
        RemoteSim::connect(&self.socket, WAIT).map(Arc::new).map_err(|error| refuse(error.to_string()))
    }
}

impl BackendKind for Sim {
    const NAME: &'static str = "sim";
    const DEFAULT_TEXT: &'static str = include_str!("default.toml");

    type Config = SimConfig;

    fn resolve(config: &mut SimConfig, beside: &Path, _service: &ServiceSettings<'_>) {
        config.socket = beside.join(&config.socket);
    }

    /// The simulated cluster has to answer, because its clock is the controller's.
    fn verify(config: &SimConfig, _service: &ServiceSettings<'_>) -> Result<(), BackendError> {
        config.connect().map(drop)
    }

    fn open(config: &SimConfig, _service: &ServiceSettings<'_>) -> Result<OpenedCluster, BackendError> {
        let sim = config.connect()?;
        Ok(OpenedCluster { backend: sim.clone(), clock: sim, token_reviewer: None })
    }

    fn checks(config: &SimConfig, policy: &Policy) -> (Catalogue, MachineTypes) {
        match config.shipped_tests {
            true => (Catalogue::with_site_checks(policy), doctor_checks::profiles::built_in()),
            false => (simulated_tests::catalogue(), MachineTypes::new([simulated_tests::profile_file()])),
        }
    }
}
