//! How the cluster is reached, and what things are called there.

use std::path::PathBuf;

use doctor_core::time::Span;
use serde::{Deserialize, Serialize};

/// Settings of the backend, `[backend.kubernetes]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesConfig {
    /// Absent: as `kubectl` finds it, or the pod's own account.
    pub kubeconfig: Option<PathBuf>,
    pub context: Option<String>,
    /// Where our jobs run.
    pub namespace: String,
    /// Of labels, annotations and taints.
    pub prefix: String,
    /// Nodes to look after, as a label selector; beyond that they must have GPUs.
    pub node_selector: Option<String>,
    /// What stands for GPUs. A `*` at the end stands for any text.
    pub gpu_resources: Vec<String>,
    pub gpu_present_label: String,
    pub gpu_count_label: String,
    pub pool_label: String,
    pub sku_label: String,
    /// Taints by key that are on every node of its kind, and keep nobody off who belongs there.
    pub usual_taints: Vec<String>,
    /// Of the job's pod: user pods go first. It has to be there.
    pub priority_class: Option<String>,
    pub image: String,
    pub image_pull_policy: String,
    pub service_account: Option<String>,
    /// What holds the shared directory, for jobs.
    pub share: Share,
    /// A ConfigMap in the jobs' namespace whose `policy.toml` is the site's policy, for parameters of tests.
    pub policy_map: Option<String>,
    /// How long a job has to write its result after it was told to end.
    pub grace: Span,
    /// A job that ended is removed after this.
    pub keep: Span,
}

/// The shared directory as a job sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Share {
    /// A claim in the jobs' namespace that every node can mount.
    Claim(String),
    /// The same directory on every node.
    HostPath(PathBuf),
}

impl Default for KubernetesConfig {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            context: None,
            namespace: "cluster-doctor".to_owned(),
            prefix: "cluster-doctor.io".to_owned(),
            node_selector: None,
            gpu_resources: vec!["nvidia.com/gpu".to_owned(), "nvidia.com/mig-*".to_owned(), "amd.com/gpu".to_owned()],
            gpu_present_label: "nvidia.com/gpu.present".to_owned(),
            gpu_count_label: "nvidia.com/gpu.count".to_owned(),
            pool_label: "cluster-doctor.io/pool".to_owned(),
            sku_label: "node.kubernetes.io/instance-type".to_owned(),
            usual_taints: vec!["nvidia.com/gpu".to_owned(), "amd.com/gpu".to_owned()],
            priority_class: Some("cluster-doctor".to_owned()),
            image: "cluster-doctor-node:latest".to_owned(),
            image_pull_policy: "IfNotPresent".to_owned(),
            service_account: None,
            share: Share::Claim("cluster-doctor-data".to_owned()),
            policy_map: None,
            grace: Span::from_secs(30),
            keep: Span::hours(1),
        }
    }
}

#[cfg(feature = "kubernetes")]
impl KubernetesConfig {
    /// A name of ours: `cluster-doctor.io/run`.
    pub(super) fn own(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }
}
