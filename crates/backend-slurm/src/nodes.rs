//! Parses nodes from `scontrol show node -o`: the one format that every version has, and by far the fastest. Pure.

use std::collections::HashMap;

use doctor_core::{ids::NodeName, node::Declared, time::Timestamp};

use super::{
    scontrol_text::{Record, records},
    states::SlurmNodeState,
};

/// A node as Slurm reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct SlurmNode {
    pub(super) name: String,
    pub(super) state: SlurmNodeState,
    pub(super) partitions: Vec<String>,
    /// The active features.
    pub(super) features: Vec<String>,
    /// The available features, some perhaps only after a reboot.
    pub(super) available_features: Vec<String>,
    /// All that its configuration names, even if the node itself reports fewer.
    pub(super) gpus: u32,
    /// The same if all are whole GPUs, and `None` if there are none.
    pub(super) declared: Option<Declared>,
    pub(super) cpus: u64,
    /// In MB, as in Slurm.
    pub(super) memory: u64,
    pub(super) booted: Option<Timestamp>,
    pub(super) last_busy: Option<Timestamp>,
    pub(super) reason: Option<Reason>,
    pub(super) comment: String,
    pub(super) extra: String,
    pub(super) instance_type: Option<String>,
}

/// Why a node is out of service, and who set the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reason {
    pub(super) text: String,
    pub(super) by: Option<String>,
}

impl SlurmNode {
    /// Returns the name, if it is valid as a node name.
    pub(super) fn node_name(&self) -> Option<NodeName> {
        NodeName::new(&self.name).ok()
    }

    pub(super) fn reason_text(&self) -> &str {
        self.reason.as_ref().map_or("", |reason| &reason.text)
    }
}

/// The keys that end a value: all that Slurm prints for a node, from 20.11 to 26.05. Sorted.
const KEYS: [&str; 55] = [
    "ActiveFeatures",
    "AllocMem",
    "AllocTRES",
    "Arch",
    "AvailableFeatures",
    "AveWatts",
    "Boards",
    "BootTime",
    "CPUAlloc",
    "CPUEfctv",
    "CPUErr",
    "CPULoad",
    "CPUSpecList",
    "CPUTot",
    "CapWatts",
    "CfgTRES",
    "Comment",
    "CoreSpecCount",
    "CoresPerSocket",
    "CurrentWatts",
    "ExtSensorsJoules",
    "ExtSensorsTemp",
    "ExtSensorsWatts",
    "Extra",
    "FreeMem",
    "Gres",
    "GresDrain",
    "GresUsed",
    "InstanceId",
    "InstanceType",
    "LastBusyTime",
    "MCS_label",
    "MemSpecLimit",
    "NextState",
    "NodeAddr",
    "NodeHostName",
    "NodeName",
    "OS",
    "Owner",
    "Partitions",
    "Port",
    "RealMemory",
    "Reason",
    "ReservationName",
    "ResumeAfterTime",
    "SlurmdStartTime",
    "Sockets",
    "State",
    "SuspendTime",
    "ThreadsPerCore",
    "TmpDisk",
    "Topology",
    "Version",
    "Weight",
    "cpuspec",
];

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NodeListError {
    #[error("Slurm listed no node")]
    Empty,
}

/// Parses all nodes. A repeated name means that a text looks like a record: which of the two is real cannot be known, so the node
/// gets an unknown state.
pub(super) fn parse(text: &str) -> Result<Vec<SlurmNode>, NodeListError> {
    let mut nodes: Vec<SlurmNode> = Vec::new();
    let mut indices: HashMap<String, usize> = HashMap::new();
    for line in records(text, "NodeName") {
        let Some(node) = node(line) else { continue };
        match indices.get(&node.name) {
            Some(index) => nodes[*index].state = SlurmNodeState::parse("NAMED_TWICE"),
            None => {
                indices.insert(node.name.clone(), nodes.len());
                nodes.push(node);
            }
        }
    }
    if nodes.is_empty() { Err(NodeListError::Empty) } else { Ok(nodes) }
}

fn node(line: &str) -> Option<SlurmNode> {
    let record = Record::parse(line, &KEYS);
    let owned = |key: &str| record.text(key).unwrap_or_default().to_owned();
    Some(SlurmNode {
        name: record.word("NodeName")?.to_owned(),
        state: SlurmNodeState::parse(record.word("State").unwrap_or_default()),
        partitions: record.list("Partitions").map(str::to_owned).collect(),
        features: record.list("ActiveFeatures").map(str::to_owned).collect(),
        available_features: record.list("AvailableFeatures").map(str::to_owned).collect(),
        gpus: gpus(record.word("Gres").unwrap_or_default()),
        declared: declared(record.word("Gres").unwrap_or_default()),
        cpus: record.number("CPUTot").unwrap_or_default(),
        memory: record.number("RealMemory").unwrap_or_default(),
        booted: record.time("BootTime"),
        last_busy: record.time("LastBusyTime"),
        reason: record.text("Reason").map(reason),
        comment: owned("Comment"),
        extra: owned("Extra"),
        instance_type: record.word("InstanceType").map(str::to_owned),
    })
}

/// Parses `text [user@time]`.
fn reason(value: &str) -> Reason {
    let written = value.rfind(" [").and_then(|at| Some((&value[..at], value[at + 2..].split(']').next()?)));
    match written {
        Some((text, who)) if who.contains('@') => {
            let by = who.rsplit_once('@').map(|(user, _)| user.to_owned());
            Reason { text: text.to_owned(), by }
        }
        _ => Reason { text: value.to_owned(), by: None },
    }
}

/// Counts the GPUs in `gpu:h100:8(S:0-1),gpu:4,shard:16`.
pub(super) fn gpus(gres: &str) -> u32 {
    outside_brackets(gres).filter_map(|one| gres_count(one, "gpu")).fold(0, u32::saturating_add)
}

/// Returns what the configured `Gres` declares. `None`: no GPU, or partitions of GPUs (MIG), which are listed as GPUs too.
pub(super) fn declared(gres: &str) -> Option<Declared> {
    let of_gpus = || outside_brackets(gres).filter(|one| gres_count(one, "gpu").is_some());
    if of_gpus().any(is_partition) {
        return None;
    }
    Declared::gpus(gpus(gres))
}

/// Returns whether a type is that of a partition: `1g.10gb`, alone or after the GPU's name, as in `a100_1g.10gb`.
fn is_partition(entry: &str) -> bool {
    let gpu_type = entry.split([':', '(']).nth(1).unwrap_or_default();
    let parts: Vec<&str> = gpu_type.split('.').collect();
    parts.windows(2).any(|pair| {
        let slices = pair[0].strip_suffix('g').is_some_and(|before| before.ends_with(|c: char| c.is_ascii_digit()));
        let (memory, _) = pair[1].split_once("gb").unwrap_or_default();
        slices && !memory.is_empty() && memory.chars().all(|c| c.is_ascii_digit())
    })
}

/// Splits at commas outside of brackets.
fn outside_brackets(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_usize;
    text.split(move |c: char| {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
}

/// Returns the count of an entry `NAME[:TYPE][:COUNT]`, if it has this name.
fn gres_count(entry: &str, name: &str) -> Option<u32> {
    let entry = entry.split('(').next().unwrap_or_default();
    let mut parts = entry.split([':', '=']);
    if parts.next()? != name {
        return None;
    }
    // Without a count it is one.
    Some(parts.next_back().map_or(1, |last| parse_count(last).unwrap_or(1)))
}

/// Parses `8` or `2K`.
fn parse_count(text: &str) -> Option<u32> {
    let (digits, scale) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1024),
        None => (text, 1),
    };
    digits.parse::<u32>().ok()?.checked_mul(scale)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::states::{Base, Flag};

    const DOWN: &str = include_str!("fixtures/22.05/scontrol-show-node-down.txt");
    const MIXED: &str = include_str!("fixtures/24.11/scontrol-show-node-mixed.txt");
    const DRAINED: &str = include_str!("fixtures/22.05/scontrol-show-node-drained.txt");

    #[test]
    fn the_keys_are_sorted_for_binary_search() {
        assert!(KEYS.is_sorted());
    }

    #[test]
    fn a_drained_node_has_its_reason_and_its_author() {
        let nodes = parse(DRAINED).unwrap();
        let [node] = &nodes[..] else { panic!("{nodes:?}") };
        assert_eq!(node.name, "node1");
        assert_eq!((node.state.base(), node.state.has(Flag::Drain)), (Some(Base::Idle), true));
        assert_eq!(node.partitions, ["gpu", "debug"]);
        assert_eq!(
            (&node.features, &node.available_features),
            (&vec!["h100".to_owned(), "ib".to_owned()], &node.features)
        );
        assert_eq!((node.gpus, node.cpus, node.memory), (8, 96, 1_900_000));
        assert_eq!(
            node.reason,
            Some(Reason { text: "gpucheck: xid 79 gpu 3".to_owned(), by: Some("root".to_owned()) })
        );
        assert_eq!(node.booted.map(Timestamp::secs), Some(1_794_701_406));
    }

    #[test]
    fn a_down_node_is_parsed_as_down() {
        let nodes = parse(DOWN).unwrap();
        assert_eq!(nodes[0].state.base(), Some(Base::Down));
        assert!(nodes[0].state.has(Flag::NotResponding));
    }

    #[test]
    fn the_output_of_a_later_version_is_parsed_the_same() {
        let nodes = parse(MIXED).unwrap();
        assert_eq!(nodes[0].state.base(), Some(Base::Mixed));
        assert_eq!((nodes[0].gpus, &*nodes[0].partitions), (8, &["gpu".to_owned()][..]));
        assert_eq!(nodes[0].extra, r#"{"doctor":{"shown":"7980362b4f46951d.validated","status":"fail"}}"#);
    }

    #[test]
    fn gpus_of_every_type_are_counted() {
        for (gres, count) in [
            ("gpu:h100:8(S:0-1)", 8),
            ("gpu:8", 8),
            ("gpu", 1),
            ("gpu:a100:4(S:0,2),gpu:v100:2,shard:64", 6),
            ("nic:2,gpus:9", 0),
            ("(null)", 0),
            ("gpu:h100:4294967295,gpu:1", u32::MAX),
        ] {
            assert_eq!(gpus(gres), count, "{gres}");
        }
    }

    #[test]
    fn whole_gpus_of_the_configuration_are_declared() {
        for text in [DOWN, MIXED, DRAINED] {
            for node in parse(text).unwrap() {
                assert_eq!(node.declared, Declared::gpus(8), "{}", node.name);
            }
        }
        for (gres, count) in [
            ("gpu:h100:8(S:0-1)", Some(8)),
            ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1),nic:4", Some(8)),
            ("gpu:a100:4(S:0,2),gpu:v100:2,shard:64", Some(6)),
            ("gpu:8", Some(8)),
            ("gpu:0", None),
            ("(null)", None),
            ("nic:2", None),
            // Partitions are not GPUs: written by hand, as Slurm's documentation names them.
            ("gpu:1g.10gb:7", None),
            ("gpu:nvidia_a100_3g.20gb:2(S:0-1)", None),
            ("gpu:a100_1g.5gb+me:1", None),
            ("gpu:h100:7,gpu:h100_1g.10gb:7", None),
        ] {
            assert_eq!(declared(gres).and_then(|declared| declared.gpus), count, "{gres}");
        }
    }

    #[test]
    fn used_and_drained_gpus_do_not_change_what_is_declared() {
        let text = "NodeName=n1 State=MIXED Gres=gpu:h100:8(S:0-1) GresDrain=N/A GresUsed=gpu:h100:3(IDX:0-2)\n\
                    NodeName=n2 State=IDLE GresUsed=gpu:h100:0(IDX:N/A)\n";
        let nodes = parse(text).unwrap();
        assert_eq!((nodes[0].declared, nodes[1].declared), (Declared::gpus(8), None));
    }

    #[test]
    fn a_duplicate_name_has_no_state_and_output_without_names_is_an_error() {
        let nodes = parse("NodeName=a State=DOWN\nNodeName=b State=IDLE\nNodeName=a State=IDLE\n").unwrap();
        assert_eq!(nodes.len(), 2);
        assert_eq!(nodes[0].state.unrecognized(), Some("NAMED_TWICE"));
        assert_eq!(parse("No nodes in the system\n"), Err(NodeListError::Empty));
    }

    #[test]
    fn a_reason_without_an_author_is_all_text() {
        assert_eq!(reason("disk [2] full"), Reason { text: "disk [2] full".to_owned(), by: None });
        assert_eq!(reason("a [b] [u@x@2026]").by.as_deref(), Some("u@x"));
    }
}
