//! Slurm's own configuration: its partitions, and when it powers nodes down. Pure.

use std::collections::HashMap;

use doctor_core::{
    hostlist,
    ids::NodeName,
    time::{Span, Timestamp},
};

use super::{
    nodes::SlurmNode,
    scontrol_text::{Record, is_null, parse_duration, records},
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Partition {
    pub(super) up: bool,
    /// `None`: unlimited.
    pub(super) max_time: Option<Span>,
    /// Only jobs in a reservation run there.
    pub(super) reserved_only: bool,
    suspend_after: Option<SuspendAfter>,
}

/// The idle time after which nodes are powered down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SuspendAfter {
    Never,
    After(Span),
}

/// Sorted.
const KEYS: [&str; 46] = [
    "AllocNodes",
    "AllowAccounts",
    "AllowGroups",
    "AllowQos",
    "Alternate",
    "DefMemPerCPU",
    "DefMemPerNode",
    "Default",
    "DefaultTime",
    "DenyAccounts",
    "DenyQos",
    "DisableRootJobs",
    "ExclusiveTopo",
    "ExclusiveUser",
    "GraceTime",
    "Hidden",
    "JobDefaults",
    "LLN",
    "MaxCPUsPerNode",
    "MaxCPUsPerSocket",
    "MaxMemPerCPU",
    "MaxMemPerNode",
    "MaxNodes",
    "MaxTime",
    "MinNodes",
    "NodeSets",
    "Nodes",
    "OverSubscribe",
    "OverTimeLimit",
    "PartitionName",
    "PreemptMode",
    "PriorityJobFactor",
    "PriorityTier",
    "QoS",
    "ReqResv",
    "ResumeTimeout",
    "RootOnly",
    "SelectTypeParameters",
    "State",
    "SuspendTime",
    "SuspendTimeout",
    "TRES",
    "TRESBillingWeights",
    "Topology",
    "TotalCPUs",
    "TotalNodes",
];

/// Parses `scontrol show partition -o`.
pub(super) fn partitions(text: &str) -> HashMap<String, Partition> {
    records(text, "PartitionName")
        .filter_map(|line| {
            let record = Record::parse(line, &KEYS);
            let partition = Partition {
                up: record.word("State") == Some("UP"),
                max_time: record.word("MaxTime").and_then(parse_duration),
                reserved_only: record.word("ReqResv") == Some("YES"),
                suspend_after: record.word("SuspendTime").and_then(parse_suspend),
            };
            Some((record.word("PartitionName")?.to_owned(), partition))
        })
        .collect()
}

/// When idle nodes are powered down.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PowerSaving {
    after: Option<Span>,
    excluded_nodes: Vec<NodeName>,
    excluded_partitions: Vec<String>,
    /// Whether power saving is enabled.
    enabled: bool,
}

/// Parses `scontrol show config`.
pub(super) fn power_saving(text: &str) -> PowerSaving {
    let mut found = PowerSaving::default();
    for (key, value) in text.lines().filter_map(|line| line.split_once('=')) {
        let (key, value) = (key.trim(), value.trim());
        let is_set = !is_null(value);
        match key {
            "SuspendProgram" => found.enabled = is_set,
            "SuspendTime" => found.after = parse_suspend(value).and_then(SuspendAfter::span),
            // `node1:2` spares any two of them: that guarantees nothing for a single node.
            "SuspendExcNodes" if is_set => found.excluded_nodes = hostlist::parse(value).unwrap_or_default(),
            "SuspendExcParts" if is_set => found.excluded_partitions = value.split(',').map(str::to_owned).collect(),
            _ => {}
        }
    }
    found
}

impl SuspendAfter {
    const fn span(self) -> Option<Span> {
        match self {
            Self::Never => None,
            Self::After(span) => Some(span),
        }
    }
}

/// Parses `300 sec`, `300`, `INFINITE`, `NONE`, `-1`.
fn parse_suspend(value: &str) -> Option<SuspendAfter> {
    let word = value.split(' ').next()?;
    match word.parse::<i64>() {
        Ok(seconds @ 0..) => Some(SuspendAfter::After(Span::from_secs(seconds))),
        Ok(_) => Some(SuspendAfter::Never),
        Err(_) if word.eq_ignore_ascii_case("GLOBAL") => None,
        Err(_) => Some(SuspendAfter::Never),
    }
}

impl PowerSaving {
    /// Returns when an idle node will be powered down. `None`: never.
    pub(super) fn power_down_time(
        &self,
        node: &SlurmNode,
        partitions: &HashMap<String, Partition>,
    ) -> Option<Timestamp> {
        let spared = self.excluded_nodes.iter().any(|name| name.as_str() == node.name)
            || node.partitions.iter().any(|name| self.excluded_partitions.contains(name));
        if !self.enabled || spared {
            return None;
        }
        // A partition's setting overrides the cluster's; of several the longest counts.
        let own: Vec<SuspendAfter> =
            node.partitions.iter().filter_map(|name| partitions.get(name)?.suspend_after).collect();
        let after = match own.as_slice() {
            [] => self.after?,
            own if own.contains(&SuspendAfter::Never) => return None,
            own => own.iter().filter_map(|one| one.span()).max()?,
        };
        Some(node.last_busy?.plus(after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "SuspendExcNodes         = node[8-9]\nSuspendExcParts         = login\n\
                          SuspendProgram          = /usr/sbin/suspend\nSuspendTime             = 600 sec\n";
    const PARTITIONS: &str = "PartitionName=gpu AllowGroups=ALL MaxTime=UNLIMITED Nodes=node[1-4] State=UP ReqResv=NO\n\
                              PartitionName=slow MaxTime=1-00:00:00 State=DOWN SuspendTime=3600\n\
                              PartitionName=kept State=UP SuspendTime=INFINITE MaxTime=60\n";

    fn node(name: &str, partitions: &[&str]) -> SlurmNode {
        SlurmNode {
            name: name.to_owned(),
            partitions: partitions.iter().map(|name| (*name).to_owned()).collect(),
            last_busy: Some(Timestamp::from_secs(1000)),
            ..SlurmNode::default()
        }
    }

    #[test]
    fn partitions_are_parsed_with_their_state_and_time_limit() {
        assert!(KEYS.is_sorted());
        let found = partitions(PARTITIONS);
        assert_eq!((found["gpu"].up, found["gpu"].max_time), (true, None));
        assert_eq!((found["slow"].up, found["slow"].max_time), (false, Some(Span::days(1))));
        assert_eq!(found["kept"].max_time, Some(Span::hours(1)));
    }

    #[test]
    fn a_node_is_powered_down_after_the_suspend_time_of_its_partition_unless_it_is_excluded() {
        let (saving, found) = (power_saving(CONFIG), partitions(PARTITIONS));
        let moment = |node: SlurmNode| saving.power_down_time(&node, &found).map(Timestamp::secs);
        assert_eq!(moment(node("node1", &["gpu"])), Some(1600));
        assert_eq!(moment(node("node1", &["gpu", "slow"])), Some(4600));
        assert_eq!(moment(node("node1", &["slow", "kept"])), None);
        assert_eq!(moment(node("node9", &["gpu"])), None);
        assert_eq!(moment(node("node1", &["login"])), None);
        let off = power_saving("SuspendProgram = (null)\nSuspendTime = 600 sec\n");
        assert_eq!(off.power_down_time(&node("node1", &["gpu"]), &found), None);
        let never = power_saving("SuspendProgram = /x\nSuspendTime = INFINITE\n");
        assert_eq!(never.power_down_time(&node("node1", &["gpu"]), &found), None);
    }
}
