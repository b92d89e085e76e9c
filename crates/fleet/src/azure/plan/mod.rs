//! Plans what is missing: a pure function from the desired cluster and its state in Azure to steps, each with the calls
//! that perform it.
//!
//! The steps and their order are always the same; a step that is satisfied has nothing to run. The key exchange is not
//! verified on every machine each time: when it is complete, the scale set gets a tag with a digest of the machines,
//! and while the digest matches there is nothing to do.

mod steps;

use std::{fmt, path::PathBuf};

use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{
    AzCommand, AzureError, Cluster, Mode,
    inventory::{Inventory, Node},
};
use steps::Planner;

/// The tag of the scale set that records which machines have exchanged keys.
pub(super) const DIGEST_TAG: &str = "cluster-doctor-hosts";
pub(super) const SSH_RULE: &str = "ssh";
pub(super) const NAT_RULE: &str = "ssh";
pub(super) const OUTBOUND_RULE: &str = "out";
/// The first port of the load balancer that is forwarded to a node's port 22.
pub(super) const FIRST_PORT: u32 = 50_000;

/// The part of the cluster that a step is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AzureStepKind {
    Group,
    SecurityGroup,
    SshRule,
    Network,
    PlacementGroup,
    BalancerAddress,
    Balancer,
    NatRule,
    OutboundRule,
    HeadAddress,
    ScaleSet,
    Machines,
    HeadNic,
    HeadKey,
    Trust,
    HeadFiles,
    DigestTag,
}

impl AzureStepKind {
    pub const ALL: [Self; 17] = [
        Self::Group,
        Self::SecurityGroup,
        Self::SshRule,
        Self::Network,
        Self::PlacementGroup,
        Self::BalancerAddress,
        Self::Balancer,
        Self::NatRule,
        Self::OutboundRule,
        Self::HeadAddress,
        Self::ScaleSet,
        Self::Machines,
        Self::HeadNic,
        Self::HeadKey,
        Self::Trust,
        Self::HeadFiles,
        Self::DigestTag,
    ];

    pub const fn label(self) -> &'static str {
        match self {
            Self::Group => "resource group",
            Self::SecurityGroup => "security group",
            Self::SshRule => "SSH rule",
            Self::Network => "virtual network",
            Self::PlacementGroup => "proximity placement group",
            Self::BalancerAddress => "load balancer address",
            Self::Balancer => "load balancer",
            Self::NatRule => "inbound NAT rule",
            Self::OutboundRule => "outbound rule",
            Self::HeadAddress => "head node address",
            Self::ScaleSet => "scale set",
            Self::Machines => "machines",
            Self::HeadNic => "address on the head node's NIC",
            Self::HeadKey => "key pair on the head node",
            Self::Trust => "head node's key on every node, and their host keys",
            Self::HeadFiles => "host files and host keys on the head node",
            Self::DigestTag => "tag with the digest of the nodes",
        }
    }
}

/// The state of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "is", content = "why")]
pub enum AzureStepState {
    Present,
    Missing,
    Differs(String),
    /// Azure is working on it; the caller waits.
    InProgress(String),
    /// Cannot be decided before the machines exist.
    AfterMachines,
}

impl AzureStepState {
    /// Whether the step is to be done now.
    pub const fn is_open(&self) -> bool {
        matches!(self, Self::Missing | Self::Differs(_) | Self::InProgress(_))
    }
}

impl fmt::Display for AzureStepState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Present => f.write_str("present"),
            Self::Missing => f.write_str("missing"),
            Self::Differs(what) => write!(f, "differs: {what}"),
            Self::InProgress(what) => write!(f, "in progress: {what}"),
            Self::AfterMachines => f.write_str("after the machines are created"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub part: AzureStepKind,
    pub name: String,
    pub need: AzureStepState,
    pub calls: Vec<AzCommand>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Remarks for the operator before confirming.
    pub notes: Vec<String>,
}

impl Plan {
    pub fn is_done(&self) -> bool {
        self.steps.iter().all(|step| step.need == AzureStepState::Present)
    }
}

/// The directory of the files that `az` reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    pub folder: PathBuf,
}

impl Files {
    pub(super) const CLOUD_INIT: &str = "cloud-init.yaml";
    pub(super) const HEAD_KEY: &str = "head-key.sh";
    pub(super) const TRUST: &str = "trust.sh";
    pub(super) const HEAD_FILES: &str = "head-files.sh";

    pub(super) fn at(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }
}

/// The names of the resources that we create, derived from the name of the scale set.
pub(super) struct Names {
    pub(super) security_group: String,
    pub(super) balancer: String,
    pub(super) balancer_address: String,
    pub(super) head_address: String,
}

impl Names {
    pub(super) fn of(cluster: &Cluster) -> Self {
        let with = |end: &str| format!("{}-{end}", cluster.scale_set);
        Self {
            security_group: with("nsg"),
            balancer: with("lb"),
            balancer_address: with("lb-ip"),
            head_address: with("head-ip"),
        }
    }
}

/// Returns the head node: the node that has the head's public address already, otherwise the first by address.
pub(super) fn head_node<'a>(seen: &'a Inventory, names: &Names) -> Option<&'a Node> {
    let end = format!("/{}", names.head_address).to_ascii_lowercase();
    let chosen = |node: &&Node| node.public.as_ref().is_some_and(|id| id.to_ascii_lowercase().ends_with(&end));
    seen.nodes.iter().find(chosen).or_else(|| seen.nodes.first())
}

/// Returns a digest of the machines, which changes with any machine, name or address.
pub(super) fn digest(cluster: &Cluster, nodes: &[Node], head: &Node) -> String {
    let mut digest = Sha256::new();
    digest.update(format!("{}\n{}\n", cluster.admin, head.host));
    for node in nodes {
        digest.update(format!("{} {} {}\n", node.host, node.address, node.identity));
    }
    digest.finalize().iter().take(8).fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// Plans the steps.
///
/// # Errors If an existing resource is not ours, has failed, or differs from the file in a way that cannot be changed.
pub fn plan(cluster: &Cluster, seen: &Inventory, files: &Files) -> Result<Plan, AzureError> {
    let planner = Planner { cluster, inventory: seen, files, names: Names::of(cluster) };
    let mut steps = planner.resources()?;
    steps.extend(planner.machines()?);
    steps.extend(planner.access());
    Ok(Plan { steps, notes: planner.notes() })
}

pub(super) fn with_subscription(call: AzCommand, cluster: &Cluster) -> AzCommand {
    cluster.subscription.iter().fold(call, |call, subscription| call.with("--subscription", subscription)).finished()
}

/// Returns the call that lists the machines of the scale set.
pub(super) fn machines_call(cluster: &Cluster) -> AzCommand {
    let call = match cluster.mode {
        Mode::Flexible => AzCommand::new("vm list"),
        Mode::Uniform => AzCommand::new("vmss list-instances").with("--name", &cluster.scale_set),
    };
    with_subscription(call.with("--resource-group", &cluster.resource_group), cluster)
}

#[cfg(test)]
mod tests;
