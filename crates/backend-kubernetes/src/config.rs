//! How the cluster is reached, and what things are called there.

use std::{collections::BTreeMap, path::PathBuf};

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
    /// What holds the shared directory, for jobs. Absent: there is none, and results come with the pods.
    pub share: Share,
    /// A ConfigMap in the jobs' namespace whose `policy.toml` is the site's policy, for parameters of tests.
    pub policy_map: Option<String>,
    /// A Job in YAML into which each run is put. Absent: the built-in one.
    pub template: Option<PathBuf>,
    /// As what runs are made.
    pub run_as: RunAs,
    /// Whose tokens are taken for those of agents.
    pub agents: AgentAccount,
    /// How long a job has to write its result after it was told to end.
    pub grace: Span,
    /// A job that ended is removed after this.
    pub keep: Span,
    /// Whether a pod that nobody would make anew may be evicted too. It is lost then.
    pub evict_unowned: bool,
    /// How a node resets its GPUs and reboots, as words of a command in a privileged pod that has the node's file system at
    /// /host. Empty: it cannot.
    pub reset: Vec<String>,
    pub reboot: Vec<String>,
    pub replace: Replace,
    pub write: Write,
}

/// What is written on nodes. What is switched off is not written and, where it was, left as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Write {
    /// `unhealthy` and `maintenance`, which keep work off. Without them a mark of ours is only read by us.
    pub taint: bool,
    /// `status` and `severity`.
    pub label: bool,
    /// `results` and `quarantine-result`.
    pub annotation: bool,
    /// Events of the node.
    pub event: bool,
    /// A condition of this type, `True` where all is well: for systems that repair nodes by their conditions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<String>,
}

impl Default for Write {
    fn default() -> Self {
        Self { taint: true, label: true, annotation: true, event: true, condition: None }
    }
}

/// As what a run is made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunAs {
    /// A Job of Kubernetes' own.
    #[default]
    Job,
    /// A job of Volcano's, which has to be in the cluster.
    Volcano(Volcano),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Volcano {
    /// Absent: Volcano's default queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// Who gives the pod its place.
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
    /// Not by us.
    #[default]
    None,
    /// The Node is deleted: Karpenter ends its machine then.
    DeleteNode,
    /// The instance behind the node's `providerID` is terminated by the program `aws`; its group makes another.
    Aws,
    /// A command of the site's; `{node}`, `{instance}`, `{zone}`, `{region}`, `{provider_id}` and `{op}` are filled in.
    Command(Vec<String>),
    /// The same as JSON to a server of the site's.
    Webhook(Webhook),
}

impl Replace {
    /// What `aws` stands for. The program finds its account as it always does: environment, instance profile, web identity.
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
    /// The environment variable that holds a bearer token for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_variable: Option<String>,
}

/// The account that agents run as, and how its tokens are checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AgentAccount {
    pub account: String,
    /// Where the account and its pods are. Absent: where our jobs run.
    pub namespace: Option<String>,
    /// For whom the tokens are made. Not the API server: whoever sees one can do nothing there with it.
    pub audience: String,
    /// For how long an answer of the API server holds: a token of a pod that is gone is believed no longer than this.
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

/// The shared directory as a job sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Share {
    /// There is none. A pod brings its result with it, in the message of its end and in its log.
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
            share: Share::None,
            policy_map: None,
            template: None,
            run_as: RunAs::Job,
            agents: AgentAccount::default(),
            grace: Span::from_secs(30),
            keep: Span::hours(1),
            evict_unowned: false,
            reset: ["chroot", "/host", "nvidia-smi", "--gpu-reset"].map(str::to_owned).to_vec(),
            reboot: ["chroot", "/host", "systemctl", "reboot"].map(str::to_owned).to_vec(),
            replace: Replace::None,
            write: Write::default(),
        }
    }
}

#[cfg(feature = "client")]
impl KubernetesConfig {
    /// A name of ours: `cluster-doctor.io/run`.
    pub(super) fn own(&self, name: &str) -> String {
        format!("{}/{name}", self.prefix)
    }

    /// Where the agents' account and pods are.
    pub(super) fn agent_namespace(&self) -> &str {
        self.agents.namespace.as_ref().unwrap_or(&self.namespace)
    }

    /// What the API server calls agents.
    pub(super) fn agent_user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.agent_namespace(), self.agents.account)
    }
}
