//! The state in Azure, parsed from the output of `az`. Only what affects a decision is kept.
//!
//! Unreadable output is an error and never "nothing exists": a plan based on it would create everything a second time.

use std::{collections::BTreeMap, net::Ipv4Addr};

use serde::Deserialize;
use serde_json::Value;

use super::{Cluster, Mode, TAG};

/// The contents of a resource group that concern one cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    pub group: Option<Owner>,
    pub(super) resources: Vec<Resource>,
    /// The sources that may reach port 22; `None`: there is no such rule.
    pub(super) ssh_from: Option<Vec<String>>,
    pub(super) balancer: Balancer,
    pub(super) scale_set: Option<ScaleSet>,
    pub nodes: Vec<Node>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Ours,
    Others,
}

/// A named resource in the group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Resource {
    pub(super) kind: ResourceKind,
    pub(super) name: String,
    pub(super) owner: Owner,
}

/// The kind of a resource. Only kinds that we create have a variant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ResourceKind {
    ScaleSet,
    PublicAddress,
    Balancer,
    Network,
    SecurityGroup,
    PlacementGroup,
    Other(String),
}

impl ResourceKind {
    fn from_type(text: &str) -> Self {
        match text.to_ascii_lowercase().as_str() {
            "microsoft.compute/virtualmachinescalesets" => Self::ScaleSet,
            "microsoft.network/publicipaddresses" => Self::PublicAddress,
            "microsoft.network/loadbalancers" => Self::Balancer,
            "microsoft.network/virtualnetworks" => Self::Network,
            "microsoft.network/networksecuritygroups" => Self::SecurityGroup,
            "microsoft.compute/proximityplacementgroups" => Self::PlacementGroup,
            other => Self::Other(other.to_owned()),
        }
    }

    pub(super) fn label(&self) -> &str {
        match self {
            Self::ScaleSet => "scale set",
            Self::PublicAddress => "public address",
            Self::Balancer => "load balancer",
            Self::Network => "virtual network",
            Self::SecurityGroup => "security group",
            Self::PlacementGroup => "proximity placement group",
            Self::Other(kind) => kind,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Balancer {
    /// First and last port of the rule that forwards to port 22 of the nodes.
    pub(super) nat: Option<(u32, u32)>,
    pub(super) outbound: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ScaleSet {
    pub(super) id: String,
    pub(super) mode: Mode,
    pub(super) sku: String,
    pub(super) capacity: u32,
    pub(super) state: State,
    /// The recorded digest of the nodes that have exchanged keys.
    pub(super) digest: Option<String>,
}

/// The provisioning state of a resource.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum State {
    Succeeded,
    Failed,
    InProgress(String),
}

impl State {
    fn parse(text: Option<&str>) -> Self {
        match text {
            Some("Succeeded") => Self::Succeeded,
            Some("Failed" | "Canceled") => Self::Failed,
            other => Self::InProgress(other.unwrap_or("unknown").to_owned()),
        }
    }
}

/// A machine of the scale set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its id for run-command: its name, or its instance number in a Uniform scale set.
    pub(super) machine: String,
    pub host: String,
    pub address: Ipv4Addr,
    pub(super) nic: String,
    pub(super) ip_config: String,
    /// The resource id of its public address.
    pub(super) public: Option<String>,
    /// Differs for a new machine under the same name.
    pub(super) identity: String,
    pub(super) state: State,
}

type ParseError = String;

#[derive(Debug, Deserialize)]
struct TaggedResource {
    name: String,
    #[serde(default)]
    tags: Option<BTreeMap<String, String>>,
    #[serde(rename = "type", default)]
    kind: String,
}

fn items<T: serde::de::DeserializeOwned>(response: Value) -> Result<Vec<T>, ParseError> {
    serde_json::from_value(response).map_err(|error| error.to_string())
}

fn owner(tags: Option<&BTreeMap<String, String>>, cluster: &Cluster) -> Owner {
    match tags.and_then(|tags| tags.get(TAG)) {
        Some(value) if *value == cluster.scale_set => Owner::Ours,
        _ => Owner::Others,
    }
}

/// Parses `az group list`. Names are compared without case, as in Azure.
pub(super) fn group(response: Value, cluster: &Cluster) -> Result<Option<Owner>, ParseError> {
    let groups: Vec<TaggedResource> = items(response)?;
    let ours = groups.iter().find(|group| group.name.eq_ignore_ascii_case(&cluster.resource_group));
    Ok(ours.map(|group| owner(group.tags.as_ref(), cluster)))
}

/// Parses `az resource list`.
pub(super) fn resources(response: Value, cluster: &Cluster) -> Result<Vec<Resource>, ParseError> {
    let resources: Vec<TaggedResource> = items(response)?;
    let read = |named: TaggedResource| Resource {
        kind: ResourceKind::from_type(&named.kind),
        owner: owner(named.tags.as_ref(), cluster),
        name: named.name,
    };
    Ok(resources.into_iter().map(read).collect())
}

/// Parses `az network nsg show`.
pub(super) fn ssh_from(response: &Value, rule: &str) -> Result<Option<Vec<String>>, ParseError> {
    let rules = response["securityRules"].as_array().ok_or("a security group without securityRules")?;
    let Some(rule) = rules.iter().find(|found| found["name"] == rule) else { return Ok(None) };
    let one = rule["sourceAddressPrefix"].as_str().filter(|text| !text.is_empty());
    let many = rule["sourceAddressPrefixes"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut from: Vec<String> = one.into_iter().chain(many).map(str::to_owned).collect();
    from.sort_unstable();
    Ok(Some(from))
}

/// Parses `az network lb show`.
pub(super) fn balancer(response: &Value, nat: &str, outbound: &str) -> Result<Balancer, ParseError> {
    let list = |name: &str| response[name].as_array().ok_or_else(|| format!("a load balancer without {name}"));
    let port = |rule: &Value, name: &str| rule[name].as_u64().and_then(|port| u32::try_from(port).ok());
    let nat = list("inboundNatRules")?.iter().find(|rule| rule["name"] == nat);
    Ok(Balancer {
        nat: nat.and_then(|rule| Some((port(rule, "frontendPortRangeStart")?, port(rule, "frontendPortRangeEnd")?))),
        outbound: list("outboundRules")?.iter().any(|rule| rule["name"] == outbound),
    })
}

/// Parses `az vmss show`.
pub(super) fn scale_set(response: &Value, noted: &str) -> Result<ScaleSet, ParseError> {
    let mode = match response["orchestrationMode"].as_str() {
        Some("Flexible") => Mode::Flexible,
        // A scale set without a mode has the older one.
        Some("Uniform") | None => Mode::Uniform,
        Some(other) => return Err(format!("a scale set of the mode {other}")),
    };
    let capacity = response["sku"]["capacity"].as_u64().and_then(|count| u32::try_from(count).ok());
    Ok(ScaleSet {
        id: response["id"].as_str().ok_or("a scale set without an id")?.to_owned(),
        mode,
        sku: response["sku"]["name"].as_str().ok_or("a scale set without a size")?.to_owned(),
        capacity: capacity.ok_or("a scale set without a capacity")?,
        state: State::parse(response["provisioningState"].as_str()),
        digest: response["tags"][noted].as_str().map(str::to_owned),
    })
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Machine {
    name: String,
    #[serde(default)]
    instance_id: Option<String>,
    #[serde(default)]
    os_profile: Option<OsProfile>,
    #[serde(default)]
    virtual_machine_scale_set: Option<Id>,
    #[serde(default)]
    vm_id: Option<String>,
    #[serde(default)]
    provisioning_state: Option<String>,
    #[serde(default)]
    id: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OsProfile {
    computer_name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Id {
    id: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Nic {
    name: String,
    #[serde(default)]
    virtual_machine: Option<Id>,
    #[serde(default)]
    ip_configurations: Vec<IpConfig>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct IpConfig {
    name: String,
    #[serde(rename = "privateIPAddress", alias = "privateIpAddress")]
    private: Option<Ipv4Addr>,
    #[serde(rename = "publicIPAddress", alias = "publicIpAddress", default)]
    public: Option<Id>,
}

/// Combines the list of machines with the list of their network interfaces, sorted by address. A machine without an
/// address is left out; the planner notices it by the count.
pub(super) fn nodes(machines: Value, nics: Value, cluster: &Cluster) -> Result<Vec<Node>, ParseError> {
    let machines: Vec<Machine> = items(machines)?;
    let nics: Vec<Nic> = items(nics)?;
    let end = format!("/virtualmachinescalesets/{}", cluster.scale_set).to_ascii_lowercase();
    let in_set = |machine: &Machine| match cluster.mode {
        Mode::Uniform => true,
        Mode::Flexible => {
            machine.virtual_machine_scale_set.as_ref().is_some_and(|set| set.id.to_ascii_lowercase().ends_with(&end))
        }
    };
    let mut nodes: Vec<Node> =
        machines.iter().filter(|machine| in_set(machine)).filter_map(|machine| node(machine, &nics)).collect();
    nodes.sort_by_key(|node| node.address);
    Ok(nodes)
}

fn node(machine: &Machine, nics: &[Nic]) -> Option<Node> {
    let is_its = |nic: &&Nic| nic.virtual_machine.as_ref().is_some_and(|vm| vm.id.eq_ignore_ascii_case(&machine.id));
    let nic = nics.iter().find(is_its)?;
    let config = nic.ip_configurations.iter().find(|config| config.private.is_some())?;
    let host = machine.os_profile.as_ref().and_then(|profile| profile.computer_name.clone())?;
    // The name becomes a line of a host file and of a script.
    let plain = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    (plain && !host.is_empty() && !host.starts_with('-')).then(|| Node {
        machine: machine.instance_id.clone().unwrap_or_else(|| machine.name.clone()),
        host,
        address: config.private.unwrap_or(Ipv4Addr::UNSPECIFIED),
        nic: nic.name.clone(),
        ip_config: config.name.clone(),
        public: config.public.as_ref().map(|public| public.id.clone()),
        identity: machine.vm_id.clone().unwrap_or_else(|| machine.id.clone()),
        state: State::parse(machine.provisioning_state.as_deref()),
    })
}

impl Inventory {
    /// Clears the record of exchanged keys.
    pub(super) fn reset_digest(&mut self) {
        if let Some(set) = &mut self.scale_set {
            set.digest = None;
        }
    }

    pub(super) fn find(&self, kind: &ResourceKind, name: &str) -> Option<&Resource> {
        self.resources.iter().find(|resource| resource.kind == *kind && resource.name.eq_ignore_ascii_case(name))
    }
}

/// Parses `az vmss list-instance-connection-info`: address and port per machine, under a name that ends in its number.
pub(super) fn connection(response: &Value, machine: &str) -> Option<(String, u32)> {
    let found = response.as_object()?.iter().find(|(name, _)| name.rsplit(' ').next() == Some(machine))?;
    let (address, port) = found.1.as_str()?.rsplit_once(':')?;
    Some((address.to_owned(), port.parse().ok()?))
}
