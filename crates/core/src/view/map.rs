//! The fleet map: one short row per node, designed for ten thousand nodes.
//!
//! Repeated strings are stored once, in the lists at the top, and rows refer to them by index. The map contains no
//! current time: the same cluster gives the same bytes, so that a client with the present version need not fetch it
//! again.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Serialize, Serializer, ser::SerializeTuple};

use super::{Facts, OccupancyKind, nodes::occupancy_of};
use crate::{
    finding::Severity,
    hostlist::NODE_STATES,
    ids::NodeName,
    node_status::{NodeHealth, NodeStatus},
    snapshot::NodeRecord,
    time::Timestamp,
};

/// The word lists that rows refer to, and the rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FleetMap {
    /// The names of a row's columns, in order.
    pub columns: [&'static str; 9],
    pub pools: Vec<String>,
    pub racks: Vec<String>,
    pub skus: Vec<String>,
    pub health: Vec<&'static str>,
    pub states: Vec<&'static str>,
    pub occupancies: Vec<&'static str>,
    pub severities: Vec<&'static str>,
    pub reasons: Vec<String>,
    pub checks: Vec<String>,
    pub nodes: Vec<MapRow>,
    /// One entry per node, reason and check of an open finding. Few nodes have any, so that they are no columns.
    pub findings: Vec<MapFinding>,
}

/// Indexes of the node's row, of the reason and of the check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MapFinding(pub u32, pub u32, pub u32);

/// Indexes into the lists of the map; `None` if unknown.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MapRow {
    pub node: NodeName,
    pub pool: Option<u32>,
    pub rack: Option<u32>,
    pub sku: Option<u32>,
    pub health: u32,
    pub state: u32,
    pub occupancy: u32,
    /// The time since which every applicable test has a settling result, in minutes since 1970. `None`: one never had.
    pub validated: Option<i64>,
    /// Of the worst open finding.
    pub severity: Option<u32>,
}

/// The names of a row's columns, in order.
const COLUMNS: [&str; 9] = ["node", "pool", "rack", "sku", "health", "state", "occupancy", "validated", "severity"];

/// Serialised as a list: in an object, ten thousand repetitions of nine field names would be most of the data.
impl Serialize for MapRow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut row = serializer.serialize_tuple(COLUMNS.len())?;
        row.serialize_element(&self.node)?;
        for index in [self.pool, self.rack, self.sku] {
            row.serialize_element(&index)?;
        }
        for index in [self.health, self.state, self.occupancy] {
            row.serialize_element(&index)?;
        }
        row.serialize_element(&self.validated)?;
        row.serialize_element(&self.severity)?;
        row.end()
    }
}

/// Words in the order of their first occurrence.
#[derive(Debug, Default)]
struct StringTable {
    indices: BTreeMap<String, u32>,
    strings: Vec<String>,
}

impl StringTable {
    fn index_of(&mut self, text: &str) -> u32 {
        if let Some(index) = self.indices.get(text) {
            return *index;
        }
        let index = u32::try_from(self.strings.len()).unwrap_or(u32::MAX);
        self.indices.insert(text.to_owned(), index);
        self.strings.push(text.to_owned());
        index
    }
}

fn position_in<T: PartialEq>(all: &[T], one: &T) -> u32 {
    all.iter().position(|known| known == one).and_then(|index| u32::try_from(index).ok()).unwrap_or(u32::MAX)
}

/// Builds the map, sorted by name. The rack of a node is the part of its name before the last `rack_before`.
pub fn fleet_map(facts: &Facts, rack_before: Option<&str>) -> FleetMap {
    let (mut pools, mut racks, mut skus) = (StringTable::default(), StringTable::default(), StringTable::default());
    let (mut reasons, mut checks, mut findings) = (StringTable::default(), StringTable::default(), Vec::new());
    let mut nodes = Vec::with_capacity(facts.snapshot.nodes.len() + facts.gone.len());
    for (record, here) in facts.nodes() {
        let name = &record.node.name;
        let rack = rack_before.and_then(|mark| name.as_str().rsplit_once(mark)).map(|(rack, _)| rack);
        // The health of a node that is gone is unknown.
        let health = if here { NodeStatus::health_of(&facts.snapshot, record) } else { NodeHealth::Unknown };
        let worst = record.findings.iter().map(|open| open.finding.severity).max();
        let row = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
        let kinds: BTreeSet<(&str, &str)> =
            record.findings.iter().map(|open| (open.finding.reason.as_str(), open.finding.check.as_str())).collect();
        findings.extend(
            kinds.into_iter().map(|(reason, check)| MapFinding(row, reasons.index_of(reason), checks.index_of(check))),
        );
        nodes.push(MapRow {
            node: name.clone(),
            pool: here.then(|| pools.index_of(record.node.pool.as_str())),
            rack: rack.map(|rack| racks.index_of(rack)),
            sku: record.node.sku.as_ref().map(|sku| skus.index_of(sku.as_str())),
            health: position_in(NodeHealth::ALL, &health),
            state: position_in(&NODE_STATES, &record.state.as_str()),
            occupancy: position_in(OccupancyKind::ALL, &occupancy_of(record, here).0),
            validated: validated(facts, record).map(|at| at.secs().div_euclid(60)),
            severity: worst.map(|worst| position_in(Severity::ALL, &worst)),
        });
    }
    FleetMap {
        columns: COLUMNS,
        pools: pools.strings,
        racks: racks.strings,
        skus: skus.strings,
        health: NodeHealth::ALL.iter().map(|status| status.code()).collect(),
        states: NODE_STATES.to_vec(),
        occupancies: OccupancyKind::ALL.iter().map(|used| used.code()).collect(),
        severities: Severity::ALL.iter().map(|severity| severity.code()).collect(),
        reasons: reasons.strings,
        checks: checks.strings,
        nodes,
        findings,
    }
}

/// Returns the oldest of the newest settling results of the routine tests.
fn validated(facts: &Facts, record: &NodeRecord) -> Option<Timestamp> {
    let mut oldest = None;
    for (_, known, _) in facts.due_of(record) {
        let settled = known.settled()?;
        oldest = Some(oldest.map_or(settled, |oldest: Timestamp| oldest.min(settled)));
    }
    oldest
}
