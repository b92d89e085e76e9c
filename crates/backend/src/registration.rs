//! How a kind of cluster is registered.
//!
//! A backend's crate has one type without values that implements [`Kind`]: it names the section of the configuration, and says
//! how that section is completed, checked, opened and inspected. The program lists these types in one table; nothing else in it
//! knows which kinds there are.

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
    toml_text::{BadText, Limit},
};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    Backend, BackendError,
    clock::{Clock, SystemClock},
    inspection::{Inspected, Inspection},
    vouch::Voucher,
};

/// One kind of cluster.
pub trait Kind {
    /// Its section is `[backend.NAME]`.
    const NAME: &'static str;
    /// Its part of the commented default file, up to its last line break.
    const DEFAULT_TEXT: &'static str;
    /// Numbers of its section that must lie within limits.
    const LIMITS: &'static [Limit] = &[];
    /// Whether jobs run on the machine of the service.
    const RUNS_HERE: bool = false;

    /// Its section, as it is written.
    type Config: Clone + Debug + PartialEq + Serialize + DeserializeOwned;

    /// Completes a section that was read from a file in the directory `beside`: relative paths, and what follows from the
    /// service's own settings.
    fn resolve(config: &mut Self::Config, beside: &Path, service: &Service<'_>);

    /// Checks what the form of the section does not say by itself.
    ///
    /// # Errors
    /// With what is wrong and what would be accepted.
    fn check(_config: &Self::Config) -> Result<(), String> {
        Ok(())
    }

    /// Says whether this program can open such a cluster. Settings can be read and printed in any case.
    ///
    /// # Errors
    /// With what was left out of this program, and the command that builds it in.
    fn available() -> Result<(), &'static str> {
        Ok(())
    }

    /// Opens the cluster.
    ///
    /// # Errors
    /// If it cannot be used as it is configured.
    fn open(config: &Self::Config, service: &Service<'_>) -> Result<Opened, BackendError>;

    /// Asks whether what the settings name is there and answers. Changes nothing.
    fn inspect(config: &Self::Config, service: &Service<'_>, _policy: &Policy) -> Inspection {
        vec![look(|| Self::open(config, service))].into()
    }

    /// Files that the section names and that are read again when they change.
    fn files(_config: &Self::Config) -> Vec<&Path> {
        Vec::new()
    }

    /// Checks the text of one of [`Self::files`].
    ///
    /// # Errors
    /// With the place of the mistake.
    fn check_file(_config: &Self::Config, _text: &str) -> Result<(), BadText> {
        Ok(())
    }

    /// The checks and machine types that such a cluster has under this policy.
    fn checks(policy: &Policy) -> (Catalogue, MachineTypes) {
        (Catalogue::with_site_checks(policy), doctor_checks::profiles::built_in())
    }

    /// Directories that the service writes for this backend.
    fn writes(_config: &Self::Config) -> Vec<PathBuf> {
        Vec::new()
    }
}

/// What a backend may know of the service that it works for.
#[derive(Debug, Clone, Copy)]
pub struct Service<'a> {
    /// A directory on a local disk, beside the database.
    pub state: &'a Path,
    /// The shared directory, as the service sees it.
    pub data: &'a Path,
    pub policy: Option<&'a Path>,
}

/// An open cluster.
pub struct Opened {
    pub backend: Arc<dyn Backend>,
    pub clock: Arc<dyn Clock>,
    /// Where the cluster itself says whose agent a token belongs to, and for how long that is believed.
    pub voucher: Option<(Arc<dyn Voucher>, Span)>,
}

impl Opened {
    /// A cluster in which the time is the system's, and agents are enrolled.
    pub fn new(backend: impl Backend + 'static) -> Self {
        Self { backend: Arc::new(backend), clock: Arc::new(SystemClock), voucher: None }
    }
}

impl Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("backend", &self.backend.name()).finish_non_exhaustive()
    }
}

/// Opens a cluster and lists its nodes.
pub fn look(open: impl FnOnce() -> Result<Opened, BackendError>) -> Inspected {
    let looked = open().and_then(|opened| Ok((opened.backend.name().to_owned(), opened.backend.snapshot()?.len())));
    match looked {
        Ok((name, nodes)) => {
            Inspected::good("cluster", format!("{name} answers with {nodes} node{}", if nodes == 1 { "" } else { "s" }))
        }
        Err(error) => Inspected::bad("cluster", error.to_string(), "see what [backend] names"),
    }
}
