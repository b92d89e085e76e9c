//! Settings of the local backend.

use std::path::PathBuf;

use doctor_core::{
    ids::{NodeName, PoolName, Sku},
    time::Span,
};
use serde::{Deserialize, Serialize};

/// `[backend.local]` of the service's configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LocalConfig {
    /// Where jobs and marks are kept for a restarted controller, on a local disk. Empty: beside the database.
    #[serde(default)]
    pub state: PathBuf,
    /// The shared directory for logs and result documents, from the service's settings.
    #[serde(skip_deserializing)]
    pub share: PathBuf,
    /// Absent: the host name.
    #[serde(default)]
    pub node: Option<NodeName>,
    #[serde(default)]
    pub sku: Option<Sku>,
    /// Above this load per core (one-minute average, without our own jobs) the machine is busy.
    #[serde(default = "max_load_per_core")]
    pub max_load_per_core: f64,
    /// While this file exists, the machine is busy: users create it to keep jobs off.
    #[serde(default)]
    pub busy_file: Option<PathBuf>,
    /// Where the load average is read from.
    #[serde(default = "load_file")]
    pub load_file: PathBuf,
    /// The `doctor-node` program. Absent: `$DOCTOR_NODE`, then beside this program, then in `PATH`.
    #[serde(default)]
    pub doctor_node: Option<PathBuf>,
    /// The policy file for jobs, so that they run the probes that the controller expects. From the service's settings.
    #[serde(skip_deserializing)]
    pub policy: Option<PathBuf>,
    /// How long a cancelled job may take to write its results before it is killed.
    #[serde(default = "grace")]
    pub grace: Span,
    /// A job that has not started after this long counts as lost.
    #[serde(default = "start_limit")]
    pub start_limit: Span,
}

impl LocalConfig {
    pub fn new(state: impl Into<PathBuf>, share: impl Into<PathBuf>) -> Self {
        Self {
            state: state.into(),
            share: share.into(),
            node: None,
            sku: None,
            max_load_per_core: max_load_per_core(),
            busy_file: None,
            load_file: load_file(),
            doctor_node: None,
            policy: None,
            grace: grace(),
            start_limit: start_limit(),
        }
    }

    /// The pool of this one-node cluster.
    pub(super) fn pool() -> PoolName {
        PoolName::new("local").expect("a plain word is a pool name")
    }

    pub(super) fn node_name(&self) -> NodeName {
        self.node.clone().unwrap_or_else(|| {
            let name = rustix::system::uname();
            let name = name.nodename().to_str().ok().and_then(|name| NodeName::new(name).ok());
            name.unwrap_or_else(|| NodeName::new("localhost").expect("a plain word is a node name"))
        })
    }
}

const fn max_load_per_core() -> f64 {
    0.7
}

fn load_file() -> PathBuf {
    PathBuf::from("/proc/loadavg")
}

const fn grace() -> Span {
    Span::from_secs(5)
}

const fn start_limit() -> Span {
    Span::from_secs(30)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_section_is_valid_and_service_settings_are_rejected() {
        let config: LocalConfig = toml::from_str("state = \"/var/lib/doctor\"\n").unwrap();
        assert_eq!(config, LocalConfig::new("/var/lib/doctor", ""));
        assert_eq!(toml::from_str::<LocalConfig>("").unwrap(), LocalConfig::new("", ""));
        for key in ["share", "shares"] {
            let text = format!("state = \"a\"\n{key} = \"b\"\n");
            let error = toml::from_str::<LocalConfig>(&text).unwrap_err().to_string();
            assert!(error.contains(&format!("unknown field `{key}`")) && error.contains("line 2"), "{error}");
        }
    }
}
