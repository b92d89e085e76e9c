//! Settings of the Kubernetes backend: access to the cluster, and the names used there.

use std::{collections::BTreeMap, path::PathBuf};

use doctor_core::time::Span;
use serde::{Deserialize, Serialize};

/// Settings of the backend, `[backend.kubernetes]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesConfig {
    /// Absent: as `kubectl` finds it, or the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    pub context: Option<String>,
    /// The namespace of our jobs.
    pub namespace: String,
    /// The prefix of our labels, annotations and taints.
    pub prefix: String,
    /// A label selector of the nodes to manage; they must also have GPUs.
    pub node_selector: Option<String>,
    /// The resource names of GPUs. A `*` at the end matches any text.
    pub gpu_resources: Vec<String>,
    pub gpu_present_label: String,
    pub gpu_count_label: String,
    pub pool_label: String,
    pub sku_label: String,
    /// Keys of taints that every node of a kind has, and that do not keep suitable work off.
    pub usual_taints: Vec<String>,
    /// The priority class of job pods, below that of user pods. It must exist.
    pub priority_class: Option<String>,
    pub image: String,
    pub image_pull_policy: String,
    pub service_account: Option<String>,
    /// The volume with the shared directory, for jobs. `none`: there is none, and results come with the pods.
    pub share: Share,
    /// A ConfigMap in the jobs' namespace whose `policy.toml` is the site's policy, for parameters of tests.
    pub policy_map: Option<String>,
    /// A Job in YAML into which each run is filled. Absent: the built-in one.
    pub template: Option<PathBuf>,
    /// Whether a job's pod gets the access to its node that its tests need. If not, such tests are inconclusive in jobs.
    pub host_access: bool,
    /// The kind of object that runs become.
    pub run_as: RunAs,
    /// The service account of agents.
    pub agents: AgentAccount,
    /// How long a cancelled job may take to write its result.
    pub grace: Span,
    /// How long a finished job is kept.
    pub keep: Span,
    /// Whether a pod without a controller may be evicted too. It is then lost.
    pub evict_unowned: bool,
    /// The commands that reset a node's GPUs and reboot it, in a privileged pod with the node's file system at /host. Empty: not
    /// possible.
    pub reset: Vec<String>,
    pub reboot: Vec<String>,
    pub replace: Replace,
    pub write: WriteConfig,
}

/// What is written on nodes. Disabling an item stops further writes and leaves the existing ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WriteConfig {
    /// The taints `unhealthy` and `maintenance`, which keep work off. Without them, only Cluster Doctor itself acts on its marks.
    pub taint: bool,
    /// The labels `status` and `severity`.
    pub label: bool,
    /// The annotations `results` and `quarantine-result`.
    pub annotation: bool,
    /// Events of the node.
    pub event: bool,
    /// A condition of this type, `True` if healthy: for controllers that repair nodes by their conditions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
}

impl Default for WriteConfig {
    fn default() -> Self {
        Self { taint: true, label: true, annotation: true, event: true, condition: None }
    }
}

/// The kind of object that a run becomes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunAs {
    /// A Kubernetes Job.
    #[default]
    Job,
    /// A Volcano job. Volcano must be installed in the cluster.
    Volcano(Volcano),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Volcano {
    /// Absent: Volcano's default queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// The scheduler of the pods.
    pub scheduler: String,
    /// Plugins of the job by name, with their arguments.
    pub plugins: BTreeMap<String, Vec<String>>,
}

impl Default for Volcano {
    fn default() -> Self {
        Self { queue: None, scheduler: "volcano".to_owned(), plugins: BTreeMap::new() }
    }
}

/// How a machine is replaced.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Replace {
    /// Not by Cluster Doctor.
    #[default]
    None,
    /// Deletes the Node object: Karpenter then terminates its machine.
    DeleteNode,
    /// Terminates the instance of the node's `providerID` with the program `aws`; its instance group creates another.
    Aws,
    /// Runs a site command; `{node}`, `{instance}`, `{zone}`, `{region}`, `{provider_id}` and `{op}` are filled in.
    Command(Vec<String>),
    /// Posts the same values as JSON to a site's server.
    Webhook(Webhook),
}

impl Replace {
    /// The command of [`Self::Aws`]. The program finds its credentials as usual: environment, instance profile, web identity.
    pub fn aws_command() -> Vec<String> {
        ["aws", "ec2", "terminate-instances", "--region", "{region}", "--instance-ids", "{instance}"]
            .map(str::to_owned)
            .to_vec()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Webhook {
    pub url: String,
    /// The environment variable with its bearer token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_variable: Option<String>,
}

/// The service account of agents, and how its tokens are reviewed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentAccount {
    pub account: String,
    /// The namespace of the account and its pods. Absent: that of our jobs.
    pub namespace: Option<String>,
    /// The audience of the tokens. It is not the API server, so a leaked token grants no access there.
    pub audience: String,
    /// How long a token review is cached: the token of a deleted pod is accepted for at most this long.
    pub remember: Span,
}

impl Default for AgentAccount {
    fn default() -> Self {
        Self {
            account: "cluster-doctor-agent".to_owned(),
            namespace: None,
            audience: "cluster-doctor".to_owned(),
            remember: Span::minutes(1),
        }
    }
}

/// The shared directory of jobs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Share {
    /// There is none. A pod returns its result in its termination message and its log.
    #[default]
    None,
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
            gpu_resources: vec!["nvidia.com/gpu".to_owned(), "nvidia.com/mig-*".to_owned()],
            gpu_present_label: "nvidia.com/gpu.present".to_owned(),
            gpu_count_label: "nvidia.com/gpu.count".to_owned(),
            pool_label: "cluster-doctor.io/pool".to_owned(),
            sku_label: "node.kubernetes.io/instance-type".to_owned(),
            usual_taints: vec!["nvidia.com/gpu".to_owned()],
            priority_class: Some("cluster-doctor".to_owned()),
            image: "cluster-doctor-node:latest".to_owned(),
            image_pull_policy: "IfNotPresent".to_owned(),
            service_account: None,
            share: Share::None,
            policy_map: None,
            template: None,
            host_access: true,
            run_as: RunAs::Job,
            agents: AgentAccount::default(),
            grace: Span::from_secs(30),
            keep: Span::hours(1),
            evict_unowned: false,
            reset: ["chroot", "/host", "nvidia-smi", "--gpu-reset"].map(str::to_owned).to_vec(),
            reboot: ["chroot", "/host", "systemctl", "reboot"].map(str::to_owned).to_vec(),
            replace: Replace::None,
            write: WriteConfig::default(),
        }
    }
}

#[cfg(feature = "client")]
impl KubernetesConfig {
    /// Returns a name with our prefix, such as `cluster-doctor.io/run`.
    pub(super) fn prefixed(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    /// Returns the namespace of the agents' account and pods.
    pub(super) fn agent_namespace(&self) -> &str {
        self.agents.namespace.as_ref().unwrap_or(&self.namespace)
    }

    /// Returns the API server's user name of agents.
    pub(super) fn agent_user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.agent_namespace(), self.agents.account)
    }
}
