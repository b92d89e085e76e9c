//! The steps: for each part of the cluster, whether it exists, and the call that creates or changes it.

use super::{
    AzureStepKind, AzureStepState, DIGEST_TAG, FIRST_PORT, Files, NAT_RULE, Names, OUTBOUND_RULE, SSH_RULE, Step,
    digest, head_node, machines_call, with_subscription,
};
use crate::azure::{
    AzCommand, AzureError, Cluster, Mode, TAG,
    inventory::{Inventory, Node, Owner, ResourceKind, ScaleSet, State},
};

const FRONTEND: &str = "front";
const POOL: &str = "nodes";
/// Azure's default number of ports, which leaves room for growth.
const MIN_PORTS: u32 = 120;
/// Placeholders in a plan for machines that do not exist yet.
const ANY_NODE: &str = "<each node>";
const THE_HEAD: &str = "<head node>";

/// The inputs of a plan.
pub(super) struct Planner<'a> {
    pub(super) cluster: &'a Cluster,
    pub(super) inventory: &'a Inventory,
    pub(super) files: &'a Files,
    pub(super) names: Names,
}

/// Whether a resource that is not ours may be used.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shared {
    Yes,
    No,
}

impl Planner<'_> {
    fn command(&self, command: &str) -> AzCommand {
        AzCommand::new(command)
    }

    /// Adds the resource group, and the subscription if one is set.
    fn in_group(&self, call: AzCommand) -> AzCommand {
        let call = call.with("--resource-group", &self.cluster.resource_group);
        with_subscription(call, self.cluster)
    }

    fn tags(&self) -> Vec<String> {
        let cluster_tags = self.cluster.tags.iter().map(|(name, value)| format!("{name}={value}"));
        std::iter::once(format!("{TAG}={}", self.cluster.scale_set)).chain(cluster_tags).collect()
    }

    /// Starts a call that creates a named resource.
    fn create_command(&self, command: &str, name: &str) -> AzCommand {
        self.command(command)
            .with("--name", name)
            .with("--location", &self.cluster.location)
            .with_all("--tags", self.tags())
    }

    fn owned_resource(
        &self,
        kind: &ResourceKind,
        kind_label: &'static str,
        name: &str,
        shared: Shared,
    ) -> Result<AzureStepState, AzureError> {
        match self.inventory.find(kind, name).map(|resource| resource.owner) {
            None => Ok(AzureStepState::Missing),
            Some(Owner::Others) if shared == Shared::No => {
                Err(AzureError::NotOurs { kind: kind_label, name: name.to_owned() })
            }
            Some(_) => Ok(AzureStepState::Present),
        }
    }

    fn step(part: AzureStepKind, name: &str, need: AzureStepState, call: AzCommand) -> Step {
        Step { part, name: name.to_owned(), need, calls: vec![call] }
    }

    pub(super) fn resources(&self) -> Result<Vec<Step>, AzureError> {
        let (cluster, names) = (self.cluster, &self.names);
        let group = match self.inventory.group {
            Some(_) => AzureStepState::Present,
            None => AzureStepState::Missing,
        };
        let make = with_subscription(self.create_command("group create", &cluster.resource_group), cluster);
        let mut steps = vec![Self::step(AzureStepKind::Group, &cluster.resource_group, group, make)];
        let mut add = |part, kind: ResourceKind, name: &str, shared, call: AzCommand| -> Result<(), AzureError> {
            let need = self.owned_resource(&kind, part_kind(&kind), name, shared)?;
            steps.push(Self::step(part, name, need, self.in_group(call)));
            Ok(())
        };
        let name = &names.security_group;
        add(
            AzureStepKind::SecurityGroup,
            ResourceKind::SecurityGroup,
            name,
            Shared::No,
            self.create_command("network nsg create", name),
        )?;
        let name = &cluster.network.vnet;
        if cluster.network.subnet_id.is_none() {
            let call =
                self.create_command("network vnet create", name).with("--address-prefixes", &cluster.network.addresses);
            let call = call
                .with("--subnet-name", &cluster.network.subnet)
                .with("--subnet-prefixes", &cluster.network.addresses);
            add(AzureStepKind::Network, ResourceKind::Network, name, Shared::Yes, call)?;
        }
        if let Some(name) = &cluster.placement_group {
            let call = self.create_command("ppg create", name).with("--type", "Standard");
            add(AzureStepKind::PlacementGroup, ResourceKind::PlacementGroup, name, Shared::Yes, call)?;
        }
        let address = |name: &str| {
            self.create_command("network public-ip create", name)
                .with("--sku", "Standard")
                .with("--allocation-method", "Static")
        };
        let name = &names.balancer_address;
        add(AzureStepKind::BalancerAddress, ResourceKind::PublicAddress, name, Shared::No, address(name))?;
        let name = &names.balancer;
        let call = self
            .create_command("network lb create", name)
            .with("--sku", "Standard")
            .with("--public-ip-address", &names.balancer_address);
        let call = call.with("--frontend-ip-name", FRONTEND).with("--backend-pool-name", POOL);
        add(AzureStepKind::Balancer, ResourceKind::Balancer, name, Shared::No, call)?;
        if cluster.head_address {
            let name = &names.head_address;
            add(AzureStepKind::HeadAddress, ResourceKind::PublicAddress, name, Shared::No, address(name))?;
        }
        steps.extend([self.ssh_rule(), self.nat_rule(), self.outbound_rule()]);
        steps.sort_by_key(|step| step.part);
        Ok(steps)
    }

    fn ssh_rule(&self) -> Step {
        let mut desired = self.cluster.network.ssh_from.clone();
        desired.sort_unstable();
        let need = match &self.inventory.ssh_from {
            None => AzureStepState::Missing,
            Some(from) if *from == desired => AzureStepState::Present,
            Some(from) => AzureStepState::Differs(format!("from {}", from.join(", "))),
        };
        let call = self
            .command("network nsg rule create")
            .with("--nsg-name", &self.names.security_group)
            .with("--name", SSH_RULE);
        let call = call
            .with("--priority", "1000")
            .with("--direction", "Inbound")
            .with("--access", "Allow")
            .with("--protocol", "Tcp");
        let call =
            call.with_all("--source-address-prefixes", desired.iter().cloned()).with("--destination-port-ranges", "22");
        Self::step(AzureStepKind::SshRule, &desired.join(", "), need, self.in_group(call))
    }

    fn nat_rule(&self) -> Step {
        let last = FIRST_PORT + MIN_PORTS.max(self.cluster.count * 2) - 1;
        let need = match self.inventory.balancer.nat {
            None => AzureStepState::Missing,
            Some((first, last)) if last.saturating_sub(first) + 1 >= self.cluster.count => AzureStepState::Present,
            Some((first, last)) => AzureStepState::Differs(format!("ports {first} to {last} are too few")),
        };
        let call = self
            .command("network lb inbound-nat-rule create")
            .with("--lb-name", &self.names.balancer)
            .with("--name", NAT_RULE);
        let call = call.with("--protocol", "Tcp").with("--frontend-ip", FRONTEND).with("--backend-address-pool", POOL);
        let call = call.with("--frontend-port-range-start", FIRST_PORT.to_string());
        let call = call.with("--frontend-port-range-end", last.to_string()).with("--backend-port", "22");
        Self::step(AzureStepKind::NatRule, &format!("{FIRST_PORT} to {last}"), need, self.in_group(call))
    }

    /// Without this rule, machines behind the load balancer have no outbound connectivity, not even to package
    /// archives.
    fn outbound_rule(&self) -> Step {
        let need = if self.inventory.balancer.outbound { AzureStepState::Present } else { AzureStepState::Missing };
        let call = self
            .command("network lb outbound-rule create")
            .with("--lb-name", &self.names.balancer)
            .with("--name", OUTBOUND_RULE);
        let call = call.with("--frontend-ip-configs", FRONTEND).with("--address-pool", POOL).with("--protocol", "All");
        Self::step(AzureStepKind::OutboundRule, OUTBOUND_RULE, need, self.in_group(call))
    }

    pub(super) fn machines(&self) -> Result<Vec<Step>, AzureError> {
        let cluster = self.cluster;
        let name = &cluster.scale_set;
        self.owned_resource(&ResourceKind::ScaleSet, "scale set", name, Shared::No)?;
        let (need, call) = match &self.inventory.scale_set {
            None => (AzureStepState::Missing, self.create_scale_set()),
            Some(found) => self.existing_scale_set(found)?,
        };
        let set = Self::step(AzureStepKind::ScaleSet, name, need, self.in_group(call));
        if let Some(failed) = self.inventory.nodes.iter().find(|node| node.state == State::Failed) {
            return Err(AzureError::Failed { kind: "machine", name: failed.host.clone(), state: "Failed".to_owned() });
        }
        let ready = self.inventory.nodes.iter().filter(|node| node.state == State::Succeeded).count();
        let need = match (&self.inventory.scale_set, ready) {
            (None, _) => AzureStepState::AfterMachines,
            (Some(set), ready) if ready >= usize::try_from(set.capacity.min(cluster.count)).unwrap_or(usize::MAX) => {
                AzureStepState::Present
            }
            (Some(set), ready) => AzureStepState::InProgress(format!("{ready} of {} are ready", set.capacity)),
        };
        let list = machines_call(cluster);
        Ok(vec![set, Self::step(AzureStepKind::Machines, &cluster.count.to_string(), need, list)])
    }

    fn existing_scale_set(&self, found: &ScaleSet) -> Result<(AzureStepState, AzCommand), AzureError> {
        let cluster = self.cluster;
        let other = |is: &str, desired: &str| AzureError::Mismatch {
            kind: "scale set",
            name: cluster.scale_set.clone(),
            is: is.to_owned(),
            wanted: desired.to_owned(),
        };
        if found.mode != cluster.mode {
            return Err(other(found.mode.word(), cluster.mode.word()));
        }
        if !found.sku.eq_ignore_ascii_case(&cluster.sku) {
            return Err(other(&found.sku, &cluster.sku));
        }
        let wait = || {
            let timeout = cluster.limits.create.secs().max(60).to_string();
            let call = self.command("vmss wait").with("--name", &cluster.scale_set).flag("--updated");
            call.with("--interval", "10").with("--timeout", timeout)
        };
        match &found.state {
            State::Failed => Err(AzureError::Failed {
                kind: "scale set",
                name: cluster.scale_set.clone(),
                state: "Failed".to_owned(),
            }),
            State::InProgress(state) => Ok((AzureStepState::InProgress(state.clone()), wait())),
            State::Succeeded if found.capacity < cluster.count => {
                let call = self.command("vmss scale").with("--name", &cluster.scale_set);
                let call = call.with("--new-capacity", cluster.count.to_string());
                Ok((AzureStepState::Differs(format!("{} machines of {}", found.capacity, cluster.count)), call))
            }
            State::Succeeded => Ok((AzureStepState::Present, wait())),
        }
    }

    fn create_scale_set(&self) -> AzCommand {
        let (cluster, names) = (self.cluster, &self.names);
        let call =
            self.create_command("vmss create", &cluster.scale_set).with("--orchestration-mode", cluster.mode.word());
        let call = match cluster.mode {
            Mode::Flexible => call.with("--single-placement-group", "false"),
            Mode::Uniform => call.with("--single-placement-group", "true").flag("--disable-overprovision"),
        };
        let call = call.with("--instance-count", cluster.count.to_string()).with("--vm-sku", &cluster.sku);
        let call = call.with("--image", &cluster.image).with("--security-type", cluster.security.word());
        let call = call.with("--os-disk-size-gb", cluster.disk_gb.to_string());
        let call = call.with("--computer-name-prefix", &cluster.name_prefix).with("--admin-username", &cluster.admin);
        let call =
            call.with("--authentication-type", "ssh").with("--ssh-key-values", cluster.ssh_key.display().to_string());
        let call = call.with("--custom-data", self.files.at(Files::CLOUD_INIT));
        let call = match &cluster.network.subnet_id {
            Some(id) => call.with("--subnet", id),
            None => call.with("--vnet-name", &cluster.network.vnet).with("--subnet", &cluster.network.subnet),
        };
        let call = call.with("--nsg", &names.security_group).with("--load-balancer", &names.balancer);
        let call = call.with("--backend-pool-name", POOL);
        let call = call.with("--accelerated-networking", cluster.accelerated_networking.to_string());
        let call = cluster.placement_group.iter().fold(call, |call, group| call.with("--ppg", group));
        match &cluster.spot {
            None => call,
            Some(spot) => {
                let price = spot.max_price.map_or_else(|| "-1".to_owned(), |price| price.to_string());
                call.with("--priority", "Spot").with("--eviction-policy", "Delete").with("--max-price", price)
            }
        }
    }

    /// Plans the public address of the head node and the exchange of keys.
    pub(super) fn access(&self) -> Vec<Step> {
        let (cluster, names) = (self.cluster, &self.names);
        let head = head_node(self.inventory, names);
        let desired = usize::try_from(cluster.count).unwrap_or(usize::MAX);
        let ready = self.inventory.nodes.iter().filter(|node| node.state == State::Succeeded).count() >= desired;
        let mut steps = Vec::new();
        if cluster.head_address {
            let attached = head.is_some_and(|head| head.public.is_some());
            let need = if attached { AzureStepState::Present } else { later_unless(ready) };
            let of = |what: fn(&Node) -> &String| head.map_or(THE_HEAD.to_owned(), |head| what(head).clone());
            let call = self.command("network nic ip-config update").with("--nic-name", of(|node| &node.nic));
            let call = call.with("--name", of(|node| &node.ip_config)).with("--public-ip-address", &names.head_address);
            steps.push(Self::step(AzureStepKind::HeadNic, &of(|node| &node.host), need, self.in_group(call)));
        }
        let digest = head.map(|head| digest(cluster, &self.inventory.nodes, head));
        let recorded = self.inventory.scale_set.as_ref().and_then(|set| set.digest.as_ref());
        let need = match digest.is_some() && digest.as_ref() == recorded {
            true => AzureStepState::Present,
            false => later_unless(ready),
        };
        let head_machine = head.map_or(THE_HEAD, |head| head.machine.as_str());
        let head_host = head.map_or(THE_HEAD, |head| head.host.as_str());
        let run = |machine: &str, file: &str| self.run_script(machine, file);
        let each: Vec<AzCommand> = match self.inventory.nodes.is_empty() {
            true => vec![run(ANY_NODE, Files::TRUST)],
            false => self.inventory.nodes.iter().map(|node| run(&node.machine, Files::TRUST)).collect(),
        };
        let set = self.inventory.scale_set.as_ref().map_or("<scale set>", |set| set.id.as_str());
        let note = self.command("tag update").with("--resource-id", set).with("--operation", "Merge");
        let note =
            note.with("--tags", format!("{DIGEST_TAG}={}", digest.as_deref().unwrap_or("<digest of the nodes>")));
        steps.extend([
            Self::step(AzureStepKind::HeadKey, head_host, need.clone(), run(head_machine, Files::HEAD_KEY)),
            Step { part: AzureStepKind::Trust, name: cluster.count.to_string(), need: need.clone(), calls: each },
            Self::step(AzureStepKind::HeadFiles, head_host, need.clone(), run(head_machine, Files::HEAD_FILES)),
            Self::step(AzureStepKind::DigestTag, DIGEST_TAG, need, with_subscription(note, cluster)),
        ]);
        steps
    }

    /// Returns the call that runs a script on a machine through Azure.
    fn run_script(&self, machine: &str, file: &str) -> AzCommand {
        let call = match self.cluster.mode {
            Mode::Flexible => self.command("vm run-command invoke").with("--name", machine),
            Mode::Uniform => self
                .command("vmss run-command invoke")
                .with("--name", &self.cluster.scale_set)
                .with("--instance-id", machine),
        };
        let script = format!("@{}", self.files.at(file));
        self.in_group(call.with("--command-id", "RunShellScript").with("--scripts", script))
    }

    pub(super) fn notes(&self) -> Vec<String> {
        let cluster = self.cluster;
        let mut notes = Vec::new();
        if cluster.network.ssh_from.iter().any(|from| from == "Internet" || from == "*") {
            notes.push("Port 22 is open to the Internet; `network.ssh_from` can restrict it.".to_owned());
        }
        if cluster.mode == Mode::Uniform {
            notes.push(format!(
                "Machines of a Uniform scale set have no public addresses: all are reached through the load balancer, from port {FIRST_PORT} on."
            ));
        }
        if self.inventory.group == Some(Owner::Others) {
            notes.push(format!(
                "The resource group {} existed before: it is used, and `destroy` keeps it.",
                cluster.resource_group
            ));
        }
        if let Some(set) = self.inventory.scale_set.as_ref().filter(|set| set.capacity > cluster.count) {
            let text = format!(
                "The scale set has {} machines, but the file says {}; remove the extra machines in Azure.",
                set.capacity, cluster.count
            );
            notes.push(text);
        }
        if cluster.cloud_init.is_none() && cluster.doctor_node.is_none() {
            notes.push(
                "Without `doctor_node` the machines run no checks at first boot, and their health is unknown."
                    .to_owned(),
            );
        }
        notes
    }
}

const fn later_unless(ready: bool) -> AzureStepState {
    if ready { AzureStepState::Missing } else { AzureStepState::AfterMachines }
}

/// Returns the name of a kind for errors.
fn part_kind(kind: &ResourceKind) -> &'static str {
    match kind {
        ResourceKind::ScaleSet => "scale set",
        ResourceKind::PublicAddress => "public address",
        ResourceKind::Balancer => "load balancer",
        ResourceKind::Network => "virtual network",
        ResourceKind::SecurityGroup => "security group",
        ResourceKind::PlacementGroup => "proximity placement group",
        ResourceKind::Other(_) => "resource",
    }
}
