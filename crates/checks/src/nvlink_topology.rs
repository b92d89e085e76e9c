//! nvlink-topology: does NVLink connect every GPU with every other?
//!
//! What it does: on machines whose NVLinks go to switches, queries the driver for each pair of GPUs whether NVLink
//! connects them (as `nvidia-smi topo -p2p n` shows).
//!
//! Why it matters: behind a switch every GPU reaches every other. A pair without a path falls back to PCIe and the
//! whole job runs at a tenth of its speed; nothing fails.
//!
//! What to do: `nvidia-smi topo -p2p n` and `nvidia-smi topo -m` show the matrix.
//! - `nvlink-no-path` is `reset`: names the GPU that explains most of the missing pairs. Reset all GPUs of the node
//!   together with the fabric manager running; its log (`/var/log/fabricmanager.log`) shows which routes it could not
//!   set up. If pairs stay missing the hardware is at fault and the case escalates. AWS's suite isolates immediately.
//! - `nvlink-no-paths` is `reset`: no pair at all is connected. The fabric manager did not configure the fabric: see
//!   `fabric-manager` and `gpu-fabric`.
//!
//! Not applicable with fewer than two GPUs, with MIG (which has no NVLink by design), or where NVLinks go from GPU to
//! GPU: bridged boards connect pairs only, by design.

use std::collections::BTreeSet;

use doctor_core::observation::{Entity, Event, ObservationBuilder, Metric, Observation};

use crate::{
    gpu::{Gpu, require_gpus, not_applicable, read_number, read_indexed},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("nvlink-topology", "pairs of GPUs that NVLink does not connect");

const RULES: &str = r#"
rules = [
  { id = "nvlink-topology-pair", check = "nvlink-topology", event = "nvlink-no-path", reason = "nvlink-no-path",
    severity = "reset", text = "{entity}: {value}" },
  { id = "nvlink-topology-none", check = "nvlink-topology", event = "nvlink-no-paths", reason = "nvlink-no-paths",
    severity = "reset", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("nvlink_topology.rs")), rules: RULES, probes, interpret };

/// `nvmlIntNvLinkDeviceType_t`.
const TO_SWITCH: f64 = 2.0;
const MIG: &str = "mig.mode.current";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&["nvlink.*.remote_kind", "p2p.*.nvlink", MIG])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let all = match require_gpus(outputs.first()) {
        Ok(gpus) => gpus,
        Err(instead) => return instead,
    };
    let mut builder = ObservationBuilder::default();
    let judged: Vec<&Gpu> = all.iter().filter(|gpu| is_switched(gpu, &mut builder)).collect();
    let here: BTreeSet<u32> = judged.iter().map(|gpu| gpu.index).collect();
    let (mut pairs, mut missing) = (BTreeSet::new(), BTreeSet::new());
    for gpu in &judged {
        for (other, status) in read_indexed(gpu, "p2p", "nvlink", &mut builder) {
            if other != gpu.index && here.contains(&other) {
                let pair = (gpu.index.min(other), gpu.index.max(other));
                pairs.insert(pair);
                if status != 0.0 {
                    missing.insert(pair);
                }
            }
        }
    }
    if pairs.is_empty() {
        return builder.build_or(not_applicable("no-nvlink-switch", "no two GPUs of this node are connected by an NVLink switch"));
    }
    builder.metric(Metric::count("nvlink_pairs", Entity::node(), (pairs.len() - missing.len()) as f64));
    if missing.len() == pairs.len() {
        let text = format!("NVLink connects none of {} pairs of GPUs", pairs.len());
        builder.event(Event::seen("nvlink-no-paths", Entity::node(), text));
    } else {
        no_path_events(&judged, missing).into_iter().for_each(|event| builder.event(event));
    }
    builder.build_or(not_applicable("no-nvlink-switch", "no two GPUs of this node are connected by an NVLink switch"))
}

/// Returns whether NVLinks connect the GPU to a switch and MIG is off.
fn is_switched(gpu: &Gpu, builder: &mut ObservationBuilder) -> bool {
    let switched = read_indexed(gpu, "nvlink", "remote_kind", builder).iter().any(|(_, kind)| *kind == TO_SWITCH);
    switched && read_number(gpu, MIG, builder).unwrap_or(0.0) == 0.0
}

/// Reports the fewest GPUs that explain all missing pairs, each with those it cannot reach: a GPU that lost its links
/// leaves a gap with each of its healthy neighbours.
fn no_path_events(gpus: &[&Gpu], mut missing: BTreeSet<(u32, u32)>) -> Vec<Event> {
    let mut events = Vec::new();
    while !missing.is_empty() {
        let gaps = |index: u32| missing.iter().filter(|(a, b)| *a == index || *b == index).count();
        // Among equals, the first in the driver's order.
        let Some(worst) = gpus.iter().rev().max_by_key(|gpu| gaps(gpu.index)) else { break };
        let mine: Vec<(u32, u32)> =
            missing.iter().copied().filter(|(a, b)| *a == worst.index || *b == worst.index).collect();
        if mine.is_empty() {
            break;
        }
        let others = mine.iter().map(|(a, b)| if *a == worst.index { *b } else { *a });
        let name = |index| gpus.iter().find(|gpu| gpu.index == index).map(|gpu| gpu.entity().id).unwrap_or_default();
        let others: Vec<String> = others.map(name).collect();
        let text = format!("no NVLink path to {}", others.join(", "));
        events.push(Event::seen("nvlink-no-path", worst.entity(), text));
        missing.retain(|pair| !mine.contains(pair));
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::{
            FieldValue,
            tests::{answer, lost, n, none},
        },
        classify_fixture::classify_outputs,
    };
    use proptest::prelude::*;

    /// GPUs behind a switch (`kind` 2) or bridged (0), with all pairs but these connected.
    fn machine(count: u32, kind: f64, missing: &[(u32, u32)], mig: f64) -> ProbeOutput {
        let gpu = |index: u32| {
            let mut fields = vec![("nvlink.0.remote_kind".to_owned(), n(kind)), (MIG.to_owned(), n(mig))];
            for other in (0..count).filter(|other| *other != index) {
                let gap = missing.contains(&(index, other)) || missing.contains(&(other, index));
                fields.push((format!("p2p.{other}.nvlink"), n(if gap { 3.0 } else { 0.0 })));
            }
            fields
        };
        let gpus: Vec<_> = (0..count).map(gpu).collect();
        let gpus: Vec<Vec<(&str, FieldValue)>> =
            gpus.iter().map(|gpu| gpu.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()).collect();
        answer(&gpus.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }

    #[test]
    fn one_gpu_without_links_is_blamed_and_its_neighbours_are_not() {
        assert_eq!(classify_outputs(&CHECK, &[machine(8, 2.0, &[], 0.0)]), ["pass within-limits"]);
        let lonely: Vec<(u32, u32)> = (0..8).filter(|other| *other != 3).map(|other| (3, other)).collect();
        assert_eq!(classify_outputs(&CHECK, &[machine(8, 2.0, &lonely, 0.0)]), ["fail nvlink-no-path reset gpu:0000:1b:00.0"]);
        assert_eq!(classify_outputs(&CHECK, &[machine(8, 2.0, &[(1, 5)], 0.0)]), ["fail nvlink-no-path reset gpu:0000:19:00.0"]);
    }

    #[test]
    fn no_pair_at_all_is_one_finding() {
        let all: Vec<(u32, u32)> = (0..4).flat_map(|a| (a + 1..4).map(move |b| (a, b))).collect();
        assert_eq!(classify_outputs(&CHECK, &[machine(4, 2.0, &all, 0.0)]), ["fail nvlink-no-paths reset node"]);
    }

    #[test]
    fn bridged_boards_and_mig_have_gaps_by_design() {
        let pairs_only = [(0, 2), (0, 3), (1, 2), (1, 3)];
        assert_eq!(classify_outputs(&CHECK, &[machine(4, 0.0, &pairs_only, 0.0)]), ["not-applicable no-nvlink-switch"]);
        assert_eq!(classify_outputs(&CHECK, &[machine(4, 2.0, &pairs_only, 1.0)]), ["not-applicable no-nvlink-switch"]);
        assert_eq!(classify_outputs(&CHECK, &[machine(1, 2.0, &[], 0.0)]), ["not-applicable no-nvlink-switch"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }

    #[test]
    fn a_lost_gpu_is_not_connected() {
        let well = [("nvlink.0.remote_kind", n(2.0)), (MIG, n(0.0)), ("p2p.1.nvlink", n(0.0))];
        let lost_fields = [("nvlink.*.remote_kind", lost()), (MIG, lost()), ("p2p.*.nvlink", lost())];
        assert_eq!(classify_outputs(&CHECK, &[answer(&[&well, &lost_fields])]), ["inconclusive failed"]);
    }

    proptest! {
        #[test]
        fn every_gap_is_explained(gaps in proptest::collection::btree_set((0_u32..6, 0_u32..6), 0..15)) {
            let gaps: Vec<_> = gaps.into_iter().filter(|(a, b)| a != b).collect();
            let lines = classify_outputs(&CHECK, &[machine(6, 2.0, &gaps, 0.0)]);
            prop_assert_eq!(gaps.is_empty(), lines == ["pass within-limits"]);
        }
    }
}
