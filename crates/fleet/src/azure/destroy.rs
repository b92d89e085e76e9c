//! Deletes a cluster: only what `provision` creates for it, in the order that Azure requires. Other resources in the
//! resource group are listed and kept, and then the group is kept too.
//!
//! The tag alone proves nothing: a site's policy may copy the tags of a group to every resource in it. A resource is
//! ours if it has the tag and also the kind and name of something that we create.

use serde::Serialize;

use super::{
    Az, AzCommand, AzureError, Cluster,
    inventory::{Inventory, Owner, Resource, ResourceKind},
    plan::{Names, with_subscription},
    provision::read_inventory,
};

/// A resource to delete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removal {
    /// Its kind and name.
    pub what: String,
    pub call: AzCommand,
}

/// The resources to delete and those that are kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Removals {
    pub steps: Vec<Removal>,
    pub kept: Vec<KeptResource>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeptResource {
    pub kind: String,
    pub name: String,
    pub why: &'static str,
}

/// Plans the deletion. The group is deleted if it is ours and contains nothing else.
pub fn plan_removal(cluster: &Cluster, seen: &Inventory) -> Removals {
    let mut removals = Removals::default();
    let Some(group) = seen.group else { return removals };
    for (kind, name) in created_resources(cluster) {
        let ours = |resource: &&Resource| matches_resource(resource, &kind, &name) && resource.owner == Owner::Ours;
        for resource in seen.resources.iter().filter(ours) {
            let call =
                delete_command(&kind).with("--name", &resource.name).with("--resource-group", &cluster.resource_group);
            removals.steps.push(Removal {
                what: format!("{} {}", kind.label(), resource.name),
                call: with_subscription(call, cluster),
            });
        }
    }
    for resource in seen.resources.iter().filter(|resource| !belongs_to_scale_set(seen, resource)) {
        let is_made = created_resources(cluster).iter().any(|(kind, name)| matches_resource(resource, kind, name));
        let why = match resource.owner {
            Owner::Ours if is_made => continue,
            Owner::Ours => "it has our tag, but this file does not define it",
            Owner::Others => "it does not have our tag",
        };
        removals.kept.push(KeptResource { kind: resource.kind.label().to_owned(), name: resource.name.clone(), why });
    }
    let group_left =
        |why| KeptResource { kind: "resource group".to_owned(), name: cluster.resource_group.clone(), why };
    match group {
        Owner::Others => removals.kept.push(group_left("it existed before provisioning")),
        Owner::Ours if !removals.kept.is_empty() => removals.kept.push(group_left("it contains resources of others")),
        Owner::Ours => {
            let call = with_subscription(
                AzCommand::new("group delete").with("--name", &cluster.resource_group).flag("--yes"),
                cluster,
            );
            removals.steps.push(Removal { what: format!("resource group {}", cluster.resource_group), call });
        }
    }
    removals
}

/// Returns what is created for a cluster, in the order in which it can be deleted.
fn created_resources(cluster: &Cluster) -> Vec<(ResourceKind, String)> {
    let names = Names::of(cluster);
    let mut resources = vec![
        (ResourceKind::ScaleSet, cluster.scale_set.clone()),
        (ResourceKind::Balancer, names.balancer),
        (ResourceKind::PublicAddress, names.balancer_address),
        (ResourceKind::PublicAddress, names.head_address),
        (ResourceKind::Network, cluster.network.vnet.clone()),
        (ResourceKind::SecurityGroup, names.security_group),
    ];
    resources.extend(cluster.placement_group.iter().map(|name| (ResourceKind::PlacementGroup, name.clone())));
    resources
}

fn matches_resource(resource: &Resource, kind: &ResourceKind, name: &str) -> bool {
    resource.kind == *kind && resource.name.eq_ignore_ascii_case(name)
}

/// Whether Azure creates and deletes the resource with the scale set, whatever its tags: machines, network interfaces,
/// disks.
fn belongs_to_scale_set(seen: &Inventory, resource: &Resource) -> bool {
    let ResourceKind::Other(kind) = &resource.kind else { return false };
    // The names of a machine's disks and extensions begin with its name, followed by a separator.
    let name = resource.name.to_ascii_lowercase();
    let of_a_machine = |next: Option<char>| {
        let rests = seen.nodes.iter().filter_map(|node| name.strip_prefix(&node.machine.to_ascii_lowercase()));
        rests.map(|rest| rest.chars().next()).any(|first| first == next)
    };
    match kind.as_str() {
        "microsoft.compute/virtualmachines" => of_a_machine(None),
        "microsoft.compute/disks" => of_a_machine(Some('_')),
        "microsoft.compute/virtualmachines/extensions" => of_a_machine(Some('/')),
        "microsoft.network/networkinterfaces" => {
            seen.nodes.iter().any(|node| node.nic.eq_ignore_ascii_case(&resource.name))
        }
        _ => false,
    }
}

fn delete_command(kind: &ResourceKind) -> AzCommand {
    match kind {
        ResourceKind::ScaleSet => AzCommand::new("vmss delete").with("--force-deletion", "true"),
        ResourceKind::Balancer => AzCommand::new("network lb delete"),
        ResourceKind::PublicAddress => AzCommand::new("network public-ip delete"),
        ResourceKind::Network => AzCommand::new("network vnet delete"),
        ResourceKind::SecurityGroup => AzCommand::new("network nsg delete"),
        ResourceKind::PlacementGroup => AzCommand::new("ppg delete"),
        ResourceKind::Other(_) => AzCommand::new("resource delete"),
    }
}

/// Deletes the cluster, then inspects the group again: resources found then keep the group.
///
/// # Errors With the failed step and the error of `az`. The next run finds what remains.
pub fn destroy(cluster: &Cluster, az: &Az, on_removal: &dyn Fn(&Removal)) -> Result<Removals, AzureError> {
    let mut done = Removals::default();
    let before = read_inventory(cluster, az)?;
    let planned = plan_removal(cluster, &before);
    let is_group = |removal: &Removal| removal.call.args().starts_with(&["group".to_owned()]);
    let act = |removal: &Removal| {
        on_removal(removal);
        az.run(&format!("deleting {}", removal.what), &removal.call, cluster.limits.create.to_std()).map(drop)
    };
    for removal in planned.steps.into_iter().filter(|removal| !is_group(removal)) {
        act(&removal)?;
        done.steps.push(removal);
    }
    // A network interface may outlive its machine briefly; it still counts as part of the set.
    let mut after = read_inventory(cluster, az)?;
    after.nodes.extend(before.nodes);
    let remaining = plan_removal(cluster, &after);
    done.kept = remaining.kept;
    for removal in remaining.steps {
        act(&removal)?;
        done.steps.push(removal);
    }
    Ok(done)
}
