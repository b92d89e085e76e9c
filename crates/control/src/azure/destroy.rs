//! Taking a cluster away: only what bears its tag, in the order in which Azure lets go of it. What else is in the resource group is named and
//! stays, and the group with it.

use serde::Serialize;

use super::{
    Az, AzureError, Call, Cluster,
    plan::finish,
    provision::look,
    seen::{Kind, Owner, Seen},
};

/// One thing to delete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removal {
    /// What it is, and its name.
    pub what: String,
    pub call: Call,
}

/// What is deleted and what stays.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Removals {
    pub steps: Vec<Removal>,
    pub left: Vec<Left>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Left {
    pub kind: String,
    pub name: String,
    pub why: &'static str,
}

/// What would be deleted. The group itself goes when it is ours and nobody else has anything in it.
pub fn removal(cluster: &Cluster, seen: &Seen) -> Removals {
    let mut removals = Removals::default();
    let Some(group) = seen.group else { return removals };
    for kind in Kind::OURS {
        let ours = seen.resources.iter().filter(|resource| resource.kind == kind && resource.owner == Owner::Ours);
        for resource in ours {
            let call = delete(&kind).with("--name", &resource.name).with("--resource-group", &cluster.resource_group);
            removals
                .steps
                .push(Removal { what: format!("{} {}", kind.words(), resource.name), call: finish(call, cluster) });
        }
    }
    let left = |why| {
        move |resource: &super::seen::Resource| Left {
            kind: resource.kind.words().to_owned(),
            name: resource.name.clone(),
            why,
        }
    };
    let foreign =
        seen.resources.iter().filter(|resource| resource.owner == Owner::Others && !is_part_of_the_set(seen, resource));
    removals.left.extend(foreign.map(left("it does not bear our tag")));
    let group_left = |why| Left { kind: "resource group".to_owned(), name: cluster.resource_group.clone(), why };
    match group {
        Owner::Others => removals.left.push(group_left("it was there before us")),
        Owner::Ours if !removals.left.is_empty() => removals.left.push(group_left("others have something in it")),
        Owner::Ours => {
            let call = finish(Call::new("group delete").with("--name", &cluster.resource_group).flag("--yes"), cluster);
            removals.steps.push(Removal { what: format!("resource group {}", cluster.resource_group), call });
        }
    }
    removals
}

/// Machines, their network cards and disks come and go with their scale set; Azure gives them no tag of ours.
fn is_part_of_the_set(seen: &Seen, resource: &super::seen::Resource) -> bool {
    let Kind::Other(kind) = &resource.kind else { return false };
    let machine = |name: &str| {
        seen.nodes.iter().any(|node| name.to_ascii_lowercase().starts_with(&node.machine.to_ascii_lowercase()))
    };
    match kind.as_str() {
        "microsoft.compute/virtualmachines" | "microsoft.compute/disks" => machine(&resource.name),
        "microsoft.compute/virtualmachines/extensions" => machine(&resource.name),
        "microsoft.network/networkinterfaces" => {
            seen.nodes.iter().any(|node| node.nic.eq_ignore_ascii_case(&resource.name))
        }
        _ => false,
    }
}

fn delete(kind: &Kind) -> Call {
    match kind {
        Kind::ScaleSet => Call::new("vmss delete").with("--force-deletion", "true"),
        Kind::Balancer => Call::new("network lb delete"),
        Kind::PublicAddress => Call::new("network public-ip delete"),
        Kind::Network => Call::new("network vnet delete"),
        Kind::SecurityGroup => Call::new("network nsg delete"),
        Kind::PlacementGroup => Call::new("ppg delete"),
        Kind::Other(_) => Call::new("resource delete"),
    }
}

/// Deletes it, and looks again: what came to light meanwhile keeps the group.
///
/// # Errors
/// With the step that failed and what `az` said; what is left is found by the next run.
pub fn destroy(cluster: &Cluster, az: &Az, tell: &dyn Fn(&Removal)) -> Result<Removals, AzureError> {
    let mut done = Removals::default();
    let planned = removal(cluster, &look(cluster, az)?);
    let is_group = |removal: &Removal| removal.call.words().starts_with(&["group".to_owned()]);
    let act = |removal: &Removal| {
        tell(removal);
        az.run(&format!("deleting {}", removal.what), &removal.call, cluster.limits.create.to_std()).map(drop)
    };
    for removal in planned.steps.into_iter().filter(|removal| !is_group(removal)) {
        act(&removal)?;
        done.steps.push(removal);
    }
    let rest = removal(cluster, &look(cluster, az)?);
    done.left = rest.left;
    for removal in rest.steps {
        act(&removal)?;
        done.steps.push(removal);
    }
    Ok(done)
}
