//! Parses reservations from `scontrol show reservation -o`. Pure.

use doctor_core::{hostlist, ids::NodeName, time::Timestamp};

use super::scontrol_text::{Record, records};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reservation {
    pub(super) name: String,
    pub(super) start: Option<Timestamp>,
    pub(super) active: bool,
    /// Sorted.
    pub(super) nodes: Vec<NodeName>,
    /// Its list of nodes could not be parsed: it may hold any node.
    pub(super) unreadable: bool,
}

impl Reservation {
    pub(super) fn holds(&self, node: &NodeName) -> bool {
        self.unreadable || self.nodes.binary_search(node).is_ok()
    }
}

/// Sorted.
const KEYS: [&str; 27] = [
    "Accounts",
    "AllowedPartitions",
    "BurstBuffer",
    "Comment",
    "CoreCnt",
    "Duration",
    "EndTime",
    "Features",
    "Flags",
    "Groups",
    "Licenses",
    "MaxStartDelay",
    "NodeCnt",
    "NodeName",
    "Nodes",
    "PartitionName",
    "Partitions",
    "Purge",
    "PurgeComp",
    "QOS",
    "ReservationName",
    "Skip",
    "StartTime",
    "State",
    "TRES",
    "Users",
    "Watts",
];

/// Parses all reservations. There may be none.
pub(super) fn parse(text: &str) -> Vec<Reservation> {
    records(text, "ReservationName").filter_map(reservation).collect()
}

fn reservation(line: &str) -> Option<Reservation> {
    let record = Record::parse(line, &KEYS);
    let listed = record.word("Nodes").map(hostlist::parse);
    let unreadable = matches!(listed, Some(Err(_)));
    let mut nodes = listed.and_then(Result::ok).unwrap_or_default();
    nodes.sort();
    Some(Reservation {
        name: record.word("ReservationName")?.to_owned(),
        start: record.time("StartTime"),
        // Active unless Slurm says otherwise.
        active: record.word("State") != Some("INACTIVE"),
        nodes,
        unreadable,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: &str = include_str!("fixtures/22.05/scontrol-show-reservation.txt");

    fn name(text: &str) -> NodeName {
        NodeName::new(text).unwrap()
    }

    #[test]
    fn reservations_name_their_nodes() {
        assert!(KEYS.is_sorted());
        let all = parse(SHOWN);
        assert_eq!(all.iter().map(|one| &*one.name).collect::<Vec<_>>(), ["doctor-r1", "alice2"]);
        assert!(all.iter().all(|one| one.active && !one.unreadable));
        assert!(all[0].holds(&name("node1")) && !all[0].holds(&name("node2")));
        assert!(all[1].holds(&name("node2")));
        assert_eq!(all[1].start.map(Timestamp::secs), Some(1_794_783_480));
    }

    #[test]
    fn a_reservation_with_unreadable_nodes_may_hold_any_node_and_no_reservations_is_valid_output() {
        let odd = parse("ReservationName=x StartTime=2026-11-15T22:58:00 Nodes=node[1-] State=INACTIVE");
        assert!(odd[0].holds(&name("node9")) && !odd[0].active);
        assert!(!parse("ReservationName=licences Nodes=(null) State=ACTIVE")[0].holds(&name("node9")));
        assert_eq!(parse("No reservations in the system\n"), []);
    }
}
