//! Registers the local backend.

use std::path::Path;

use doctor_core::{policy::Policy, toml_text::Limit};

use super::{LocalBackend, LocalConfig, inspect::try_node};
use crate::{
    BackendError,
    inspection::{Inspection, InspectionItem},
    registration::{BackendKind, OpenedCluster, ServiceSettings},
};

/// This machine as a one-node cluster.
#[derive(Debug)]
pub struct Local;

impl BackendKind for Local {
    const NAME: &'static str = "local";
    const DEFAULT_TEXT: &'static str = include_str!("default.toml");
    const LIMITS: &'static [Limit] = &[Limit {
        key: &["backend", "local", "max_load_per_core"],
        min: 0.0,
        max: 1000.0,
        accepted: "a load per core, 0 or more",
    }];
    const RUNS_HERE: bool = true;

    type Config = LocalConfig;

    fn resolve(config: &mut LocalConfig, config_dir: &Path, service: &ServiceSettings<'_>) {
        config.state = match config.state.as_os_str().is_empty() {
            // Job records must be on a local disk.
            true => service.state.join("local"),
            false => config_dir.join(&config.state),
        };
        for path in [&mut config.busy_file, &mut config.doctor_node].into_iter().flatten() {
            *path = config_dir.join(&*path);
        }
        config.share = service.data.to_owned();
        config.policy = service.policy.map(Path::to_owned);
    }

    fn verify(config: &LocalConfig, _service: &ServiceSettings<'_>) -> Result<(), BackendError> {
        LocalBackend::verify(config)
    }

    fn open(config: &LocalConfig, _service: &ServiceSettings<'_>) -> Result<OpenedCluster, BackendError> {
        Ok(OpenedCluster::new(LocalBackend::open(config.clone())?))
    }

    /// Does not open the backend, which would create its directories.
    fn inspect(config: &LocalConfig, _service: &ServiceSettings<'_>, _policy: &Policy) -> Inspection {
        let cluster = match LocalBackend::verify(config) {
            Ok(()) => {
                InspectionItem::good("cluster", format!("local: this machine is the node {}", config.node_name()))
            }
            Err(error) => InspectionItem::bad("cluster", error.to_string(), "check the section [backend]"),
        };
        Inspection { items: vec![cluster], agents: None, trial: Some(try_node(config)) }
    }
}
