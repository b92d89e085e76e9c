//! The table of backends: the only place in this program that lists the kinds of cluster.
//!
//! To add one, write a crate with a [`BackendKind`], then add one line to the table and one to `Cargo.toml`.

use std::path::{Path, PathBuf};

use doctor_backend::{
    BackendError,
    inspection::Inspection,
    local::Local,
    registration::{BackendKind, OpenedCluster, ServiceSettings},
};
use doctor_backend_dstack::Dstack;
use doctor_backend_kubernetes::Kubernetes;
use doctor_backend_slurm::Slurm;
use doctor_backend_ssh::Ssh;
use doctor_checks::Catalogue;
use doctor_core::{
    policy::Policy,
    profile::MachineTypes,
    toml_text::{Limit, TomlError},
};
use doctor_sim::Sim;
use serde::{Deserialize, Serialize};
use toml::Spanned;

/// Generates `BackendChoice`, `Sections` and their functions from pairs of a section name and its [`BackendKind`].
macro_rules! backends {
    ($($section:ident => $kind:ident),+ $(,)?) => {
        /// The one cluster that this service serves, with its configuration.
        #[derive(Debug, Clone, PartialEq, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub(crate) enum BackendChoice {
            $($kind(Box<<$kind as BackendKind>::Config>)),+
        }

        /// The `[backend]` table as parsed.
        #[derive(Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct Sections {
            $($section: Option<Box<Spanned<<$kind as BackendKind>::Config>>>),+
        }

        impl Sections {
            pub(crate) const NAMES: &[&str] = &[$(<$kind as BackendKind>::NAME),+];

            /// Returns the number of backends configured.
            pub(crate) fn count(&self) -> usize {
                0 $(+ usize::from(self.$section.is_some()))+
            }

            pub(crate) fn check(&self, text: &str) -> Result<(), TomlError> {
                $(if let Some(section) = &self.$section {
                    <$kind as BackendKind>::check(section.get_ref())
                        .map_err(|error| TomlError::at(text, Some(section.span()), error))?;
                })+
                Ok(())
            }

            /// Returns the first backend configured, with its paths resolved against `config_dir`.
            pub(crate) fn chosen(self, config_dir: &Path, service: &ServiceSettings<'_>) -> Option<BackendChoice> {
                $(if let Some(section) = self.$section {
                    let mut config = section.into_inner();
                    <$kind as BackendKind>::resolve(&mut config, config_dir, service);
                    return Some(BackendChoice::$kind(Box::new(config)));
                })+
                None
            }
        }

        /// Returns the commented default file: the service's settings, then one section per backend.
        pub(crate) fn default_text(service: &str) -> String {
            let sections = [$(<$kind as BackendKind>::DEFAULT_TEXT),+];
            sections.iter().fold(service.to_owned(), |text, section| format!("{text}\n{section}"))
        }

        /// Returns the allowed ranges of the numeric settings of all sections.
        pub(crate) fn limits() -> impl Iterator<Item = Limit> {
            [$(<$kind as BackendKind>::LIMITS),+].into_iter().flatten().copied()
        }

        impl BackendChoice {
            pub(crate) fn verify(&self, service: &ServiceSettings<'_>) -> Result<(), BackendError> {
                match self { $(Self::$kind(config) => <$kind as BackendKind>::verify(config, service)),+ }
            }

            pub(crate) fn open(&self, service: &ServiceSettings<'_>) -> Result<OpenedCluster, BackendError> {
                match self { $(Self::$kind(config) => <$kind as BackendKind>::open(config, service)),+ }
            }

            pub(crate) fn inspect(&self, service: &ServiceSettings<'_>, policy: &Policy) -> Inspection {
                match self { $(Self::$kind(config) => <$kind as BackendKind>::inspect(config, service, policy)),+ }
            }

            pub(crate) fn files(&self) -> Vec<&Path> {
                match self { $(Self::$kind(config) => <$kind as BackendKind>::files(config)),+ }
            }

            pub(crate) fn check_file(&self, text: &str) -> Result<(), TomlError> {
                match self { $(Self::$kind(config) => <$kind as BackendKind>::check_file(config, text)),+ }
            }

            pub(crate) fn checks(&self, policy: &Policy) -> (Catalogue, MachineTypes) {
                match self { $(Self::$kind(config) => <$kind as BackendKind>::checks(config, policy)),+ }
            }

            pub(crate) fn writes(&self) -> Vec<PathBuf> {
                match self { $(Self::$kind(config) => <$kind as BackendKind>::writes(config)),+ }
            }

            pub(crate) const fn runs_here(&self) -> bool {
                match self { $(Self::$kind(_) => <$kind as BackendKind>::RUNS_HERE),+ }
            }
        }

        #[cfg(test)]
        #[test]
        fn section_names_match_the_backend_kinds() {
            $(assert_eq!(stringify!($section), <$kind as BackendKind>::NAME);)+
        }
    };
}

backends! {
    local => Local,
    kubernetes => Kubernetes,
    slurm => Slurm,
    ssh => Ssh,
    dstack => Dstack,
    sim => Sim,
}

impl BackendChoice {
    /// Returns the default backend: this machine as a cluster of one node.
    pub(crate) fn local_machine(config_dir: &Path, service: &ServiceSettings<'_>) -> Self {
        let mut config = <Local as BackendKind>::Config::new("", "");
        Local::resolve(&mut config, config_dir, service);
        Self::Local(Box::new(config))
    }
}
