//! Plans for clusters that do not exist, exist partly, or are complete.

use std::net::Ipv4Addr;

use super::*;
use crate::azure::{
    cluster::tests::{SMALL, read},
    destroy::{Removals, plan_removal},
    inventory::{Balancer, Owner, Resource, ResourceKind, ScaleSet, State},
};

fn files() -> Files {
    Files { folder: "vmss".into() }
}

fn node(number: u8) -> Node {
    Node {
        machine: format!("vmss_{number}"),
        host: format!("vm-{number}"),
        address: Ipv4Addr::new(10, 0, 0, number),
        nic: format!("nic-{number}"),
        ip_config: "ipconfig".to_owned(),
        public: None,
        identity: format!("id-{number}"),
        state: State::Succeeded,
    }
}

/// All resources of the small cluster, before the exchange of keys.
fn provisioned(cluster: &Cluster) -> Inventory {
    let names = Names::of(cluster);
    let ours = |kind, name: &str| Resource { kind, name: name.to_owned(), owner: Owner::Ours };
    Inventory {
        group: Some(Owner::Ours),
        resources: vec![
            ours(ResourceKind::SecurityGroup, &names.security_group),
            ours(ResourceKind::Network, &cluster.network.vnet),
            ours(ResourceKind::PublicAddress, &names.balancer_address),
            ours(ResourceKind::PublicAddress, &names.head_address),
            ours(ResourceKind::Balancer, &names.balancer),
            ours(ResourceKind::ScaleSet, &cluster.scale_set),
        ],
        ssh_from: Some(cluster.network.ssh_from.clone()),
        balancer: Balancer { nat: Some((50_000, 50_119)), outbound: true },
        scale_set: Some(ScaleSet {
            id: "/subscriptions/s/vmss".to_owned(),
            mode: cluster.mode,
            sku: cluster.sku.clone(),
            capacity: cluster.count,
            state: State::Succeeded,
            digest: None,
        }),
        nodes: vec![node(4), node(5)],
    }
}

fn open(plan: &Plan) -> Vec<AzureStepKind> {
    plan.steps.iter().filter(|step| step.need.is_open()).map(|step| step.part).collect()
}

#[test]
fn steps_are_ordered_and_have_unique_labels() {
    let cluster = read(&SMALL.replace("[network]", "placement_group = \"near\"\n[network]")).unwrap();
    let plan = plan(&cluster, &Inventory::default(), &files()).unwrap();
    let parts: Vec<AzureStepKind> = plan.steps.iter().map(|step| step.part).collect();
    assert_eq!(parts, AzureStepKind::ALL);
    let mut labels: Vec<&str> = AzureStepKind::ALL.iter().map(|part| part.label()).collect();
    labels.sort_unstable();
    labels.dedup();
    assert_eq!(labels.len(), AzureStepKind::ALL.len());
    assert!(plan.steps.iter().all(|step| step.need != AzureStepState::Present && !step.calls.is_empty()));
}

#[test]
fn existing_resources_are_not_created_again_and_keys_are_exchanged_until_recorded() {
    let cluster = read(SMALL).unwrap();
    let mut seen = provisioned(&cluster);
    let first = plan(&cluster, &seen, &files()).unwrap();
    assert_eq!(
        open(&first),
        [
            AzureStepKind::HeadNic,
            AzureStepKind::HeadKey,
            AzureStepKind::Trust,
            AzureStepKind::HeadFiles,
            AzureStepKind::DigestTag
        ]
    );
    let trust = first.steps.iter().find(|step| step.part == AzureStepKind::Trust).unwrap();
    assert_eq!(trust.calls.len(), 2);

    seen.nodes[0].public = Some("/subscriptions/s/publicIPAddresses/VMSS-head-ip".to_owned());
    let recorded = digest(&cluster, &seen.nodes, &seen.nodes[0]);
    seen.scale_set.as_mut().unwrap().digest = Some(recorded);
    let done = plan(&cluster, &seen, &files()).unwrap();
    assert!(done.is_done(), "{:?}", open(&done));

    // A new machine under the same name has other keys.
    seen.nodes[1].identity = "another".to_owned();
    let again = plan(&cluster, &seen, &files()).unwrap();
    assert_eq!(
        open(&again),
        [AzureStepKind::HeadKey, AzureStepKind::Trust, AzureStepKind::HeadFiles, AzureStepKind::DigestTag]
    );
    seen.reset_digest();
    assert!(!plan(&cluster, &seen, &files()).unwrap().is_done());
}

#[test]
fn differences_are_updated_and_impossible_changes_are_refused() {
    let cluster = read(SMALL).unwrap();
    let mut seen = provisioned(&cluster);
    seen.ssh_from = Some(vec!["*".to_owned()]);
    seen.balancer = Balancer { nat: Some((50_000, 50_000)), outbound: false };
    seen.scale_set.as_mut().unwrap().capacity = 1;
    seen.nodes.truncate(1);
    let parts = open(&plan(&cluster, &seen, &files()).unwrap());
    assert_eq!(
        parts,
        [AzureStepKind::SshRule, AzureStepKind::NatRule, AzureStepKind::OutboundRule, AzureStepKind::ScaleSet]
    );

    let refused = |change: &dyn Fn(&mut Inventory)| {
        let mut seen = provisioned(&cluster);
        change(&mut seen);
        plan(&cluster, &seen, &files()).unwrap_err().to_string()
    };
    assert!(
        refused(&|seen| seen.scale_set.as_mut().unwrap().mode = Mode::Uniform).contains("cannot be changed in place")
    );
    assert!(refused(&|seen| seen.scale_set.as_mut().unwrap().sku = "Standard_D4".to_owned()).contains("Standard_D4"));
    assert!(refused(&|seen| seen.scale_set.as_mut().unwrap().state = State::Failed).contains("failed in Azure"));
    assert!(refused(&|seen| seen.nodes[1].state = State::Failed).contains("vm-5"));
    for index in [0, 2, 3, 4, 5] {
        assert!(refused(&|seen| seen.resources[index].owner = Owner::Others).contains("without our tag"), "{index}");
    }
    // A foreign network is used as it is.
    let mut seen = provisioned(&cluster);
    seen.resources[1].owner = Owner::Others;
    assert!(!open(&plan(&cluster, &seen, &files()).unwrap()).contains(&AzureStepKind::Network));
}

#[test]
fn later_steps_wait_for_machines_that_are_not_ready() {
    let cluster = read(SMALL).unwrap();
    let mut seen = provisioned(&cluster);
    seen.nodes[1].state = State::InProgress("Creating".to_owned());
    let steps = plan(&cluster, &seen, &files()).unwrap().steps;
    let need = |part| steps.iter().find(|step| step.part == part).unwrap().need.clone();
    assert_eq!(need(AzureStepKind::Machines), AzureStepState::InProgress("1 of 2 are ready".to_owned()));
    assert!(
        [AzureStepKind::HeadNic, AzureStepKind::HeadKey, AzureStepKind::Trust, AzureStepKind::DigestTag]
            .into_iter()
            .all(|part| need(part) == AzureStepState::AfterMachines)
    );
    seen.scale_set.as_mut().unwrap().state = State::InProgress("Updating".to_owned());
    let steps = plan(&cluster, &seen, &files()).unwrap().steps;
    let set = steps.iter().find(|step| step.part == AzureStepKind::ScaleSet).unwrap();
    assert!(set.need.is_open() && set.calls[0].to_string().starts_with("az vmss wait "), "{set:?}");
}

#[test]
fn only_resources_with_our_tag_are_deleted_and_the_group_only_if_it_is_empty() {
    let cluster = read(SMALL).unwrap();
    let mut seen = provisioned(&cluster);
    let full = plan_removal(&cluster, &seen);
    assert_eq!(full.steps.len(), 7, "{full:?}");
    assert!(
        full.kept.is_empty()
            && full.steps[0].what == "scale set vmss"
            && full.steps[6].what == "resource group vmss-rg"
    );
    // A machine's network interface is deleted with its scale set; a foreign one is kept, and the group with it.
    let other = |name: &str| Resource {
        kind: ResourceKind::Other("microsoft.network/networkinterfaces".to_owned()),
        name: name.to_owned(),
        owner: Owner::Others,
    };
    seen.resources.push(other("nic-4"));
    assert_eq!(plan_removal(&cluster, &seen), full);
    seen.resources.push(other("theirs"));
    let part = plan_removal(&cluster, &seen);
    assert_eq!(part.steps.len(), 6);
    assert_eq!(part.kept.iter().map(|left| left.name.as_str()).collect::<Vec<_>>(), ["theirs", "vmss-rg"]);
    seen.group = Some(Owner::Others);
    assert!(plan_removal(&cluster, &seen).steps.iter().all(|removal| !removal.what.starts_with("resource group")));
    assert_eq!(plan_removal(&cluster, &Inventory::default()), Removals::default());
}

#[test]
fn resources_that_only_inherited_our_tag_are_kept_and_named() {
    let cluster = read(SMALL).unwrap();
    let mut seen = provisioned(&cluster);
    let full = plan_removal(&cluster, &seen);
    // A site's policy copies the group's tags to resources with our kinds, with our names, and with neither.
    let inherited = |kind, name: &str| Resource { kind, name: name.to_owned(), owner: Owner::Ours };
    let other = |kind: &str| ResourceKind::Other(kind.to_owned());
    let foreign = [
        inherited(ResourceKind::SecurityGroup, "theirs"),
        inherited(ResourceKind::PlacementGroup, "vmss-nsg"),
        inherited(other("microsoft.storage/storageaccounts"), "data"),
        inherited(other("microsoft.compute/virtualmachines"), "vmss_40"),
        inherited(other("microsoft.compute/disks"), "vmss_40_disk"),
    ];
    seen.resources.extend(foreign);
    // A machine of the scale set and its disk are deleted with it, and do not block the deletion of the group.
    seen.resources.push(inherited(other("microsoft.compute/virtualmachines"), "vmss_4"));
    seen.resources.push(inherited(other("microsoft.compute/disks"), "vmss_4_OsDisk_1_a0"));
    let part = plan_removal(&cluster, &seen);
    assert_eq!(part.steps[..], full.steps[..6]);
    let left: Vec<&str> = part.kept.iter().map(|left| left.name.as_str()).collect();
    assert_eq!(left, ["theirs", "vmss-nsg", "data", "vmss_40", "vmss_40_disk", "vmss-rg"]);
    assert!(part.kept[..5].iter().all(|left| left.why.starts_with("it has our tag, but")), "{part:?}");
}
