//! How a kind of cluster is registered.
//!
//! A backend crate has one unit type that implements [`BackendKind`]: it names the section of the configuration and defines how that
//! section is completed, checked, opened and inspected. The program lists these types in one table; no other code of it depends
//! on a particular kind.

use std::{
    fmt::Debug,
    path::{Path, PathBuf},
    sync::Arc,
};

use doctor_checks::Catalogue;
use doctor_core::{
    policy::Policy,
    profile::MachineTypes,
    time::Span,
    toml_text::{Limit, TomlError},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    Backend, BackendError,
    bounded::{BoundedBackend, CallLimits},
    clock::{Clock, SystemClock},
    inspection::{Inspection, InspectionItem},
    token_review::TokenReviewer,
};

/// A kind of cluster.
pub trait BackendKind {
    /// The name of its section, `[backend.NAME]`.
    const NAME: &'static str;
    /// Its part of the commented default file, without the last line break.
    const DEFAULT_TEXT: &'static str;
    /// Permitted ranges of numbers in its section.
    const LIMITS: &'static [Limit] = &[];
    /// Whether jobs run on the service's own machine.
    const RUNS_HERE: bool = false;

    /// Its section of the configuration file.
    type Config: Clone + Debug + PartialEq + Serialize + DeserializeOwned;

    /// Completes a section read from a file in the directory `config_dir`: resolves relative paths, and fills in values from the
    /// service's settings.
    fn resolve(config: &mut Self::Config, config_dir: &Path, service: &ServiceSettings<'_>);

    /// Checks what deserialising the section does not.
    ///
    /// # Errors
    /// With what is wrong and what would be accepted.
    fn check(_config: &Self::Config) -> Result<(), String> {
        Ok(())
    }

    /// Checks what [`Self::open`] would refuse, and that the programs and files which the backend needs on this machine exist.
    /// Changes nothing, starts no job and does not depend on whether the cluster answers.
    ///
    /// # Errors
    /// With what is missing and the setting that names it.
    fn verify(config: &Self::Config, service: &ServiceSettings<'_>) -> Result<(), BackendError>;

    /// Opens the cluster.
    ///
    /// # Errors
    /// If it cannot be used as configured.
    fn open(config: &Self::Config, service: &ServiceSettings<'_>) -> Result<OpenedCluster, BackendError>;

    /// Checks that what the settings name exists and responds. Changes nothing.
    fn inspect(config: &Self::Config, service: &ServiceSettings<'_>, _policy: &Policy) -> Inspection {
        vec![probe_cluster(|| Self::open(config, service))].into()
    }

    /// Returns the files named in the section that are reloaded when they change.
    fn files(_config: &Self::Config) -> Vec<&Path> {
        Vec::new()
    }

    /// Checks the text of one of [`Self::files`].
    ///
    /// # Errors
    /// With the position of the error.
    fn check_file(_config: &Self::Config, _text: &str) -> Result<(), TomlError> {
        Ok(())
    }

    /// Returns the checks and machine types of such a cluster under this policy.
    fn checks(_config: &Self::Config, policy: &Policy) -> (Catalogue, MachineTypes) {
        (Catalogue::with_site_checks(policy), doctor_checks::profiles::built_in())
    }

    /// Returns the directories that the service writes to for this backend.
    fn writes(_config: &Self::Config) -> Vec<PathBuf> {
        Vec::new()
    }
}

/// The service's settings that a backend may use.
#[derive(Debug, Clone, Copy)]
pub struct ServiceSettings<'a> {
    /// A directory on a local disk, beside the database.
    pub state: &'a Path,
    /// The shared directory, at the service's path.
    pub data: &'a Path,
    pub policy: Option<&'a Path>,
}

/// An open cluster.
pub struct OpenedCluster {
    pub backend: Arc<dyn Backend>,
    pub clock: Arc<dyn Clock>,
    /// Verifies the agents' tokens with the cluster itself, if it can. The span is how long a verification is cached.
    pub token_reviewer: Option<(Arc<dyn TokenReviewer>, Span)>,
}

impl OpenedCluster {
    /// A cluster that uses the system clock and whose agents are enrolled.
    pub fn new(backend: impl Backend + 'static) -> Self {
        Self { backend: Arc::new(backend), clock: Arc::new(SystemClock), token_reviewer: None }
    }

    /// Gives every call to the backend a deadline.
    #[must_use]
    pub fn with_deadlines(self, limits: CallLimits) -> Self {
        Self { backend: Arc::new(BoundedBackend::new(self.backend, limits)), ..self }
    }
}

impl Debug for OpenedCluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenedCluster").field("backend", &self.backend.name()).finish_non_exhaustive()
    }
}

/// Opens a cluster and counts its nodes.
pub fn probe_cluster(open: impl FnOnce() -> Result<OpenedCluster, BackendError>) -> InspectionItem {
    let result = open().and_then(|opened| Ok((opened.backend.name().to_owned(), opened.backend.snapshot()?.len())));
    match result {
        Ok((name, nodes)) => {
            InspectionItem::good("cluster", format!("{name} reports {nodes} node{}", if nodes == 1 { "" } else { "s" }))
        }
        Err(error) => InspectionItem::bad("cluster", error.to_string(), "check the section [backend]"),
    }
}
