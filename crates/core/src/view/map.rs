//! The fleet at a glance: one short row per node, made for ten thousand of them.
//!
//! Words that repeat stand once, in the lists at the top, and rows have their places. There is no present moment in it: the same
//! cluster gives the same bytes, so that whoever has them need not fetch them again.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer, ser::SerializeTuple};

use super::{Facts, Use, nodes::used};
use crate::{
    finding::Severity,
    hostlist::LIVES,
    ids::NodeName,
    shown::{Shown, Status},
    snapshot::NodeRecord,
    time::Timestamp,
};

/// The words that rows have places in, and the rows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FleetMap {
    /// What stands where in a row.
    pub columns: [&'static str; 9],
    pub pools: Vec<String>,
    pub racks: Vec<String>,
    pub skus: Vec<String>,
    pub health: Vec<&'static str>,
    pub lives: Vec<&'static str>,
    pub uses: Vec<&'static str>,
    pub severities: Vec<&'static str>,
    pub nodes: Vec<MapRow>,
}

/// Places in the lists of the map; `None` where nothing is known.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MapRow {
    pub node: NodeName,
    pub pool: Option<u32>,
    pub rack: Option<u32>,
    pub sku: Option<u32>,
    pub health: u32,
    pub life: u32,
    pub used: u32,
    /// The moment since which everything that applies has been tested, in minutes since 1970. `None`: something never was.
    pub validated: Option<i64>,
    /// Of the worst open finding.
    pub severity: Option<u32>,
}

/// What stands where in a row.
const COLUMNS: [&str; 9] = ["node", "pool", "rack", "sku", "health", "life", "use", "validated", "severity"];

/// A list and not an object: ten thousand times the names of nine fields would be most of what is sent.
impl Serialize for MapRow {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut row = serializer.serialize_tuple(COLUMNS.len())?;
        row.serialize_element(&self.node)?;
        for place in [self.pool, self.rack, self.sku] {
            row.serialize_element(&place)?;
        }
        for place in [self.health, self.life, self.used] {
            row.serialize_element(&place)?;
        }
        row.serialize_element(&self.validated)?;
        row.serialize_element(&self.severity)?;
        row.end()
    }
}

/// Words in the order in which they first came.
#[derive(Debug, Default)]
struct Words {
    places: BTreeMap<String, u32>,
    words: Vec<String>,
}

impl Words {
    fn place(&mut self, word: &str) -> u32 {
        if let Some(place) = self.places.get(word) {
            return *place;
        }
        let place = u32::try_from(self.words.len()).unwrap_or(u32::MAX);
        self.places.insert(word.to_owned(), place);
        self.words.push(word.to_owned());
        place
    }
}

fn place_of<T: PartialEq>(all: &[T], one: &T) -> u32 {
    all.iter().position(|known| known == one).and_then(|place| u32::try_from(place).ok()).unwrap_or(u32::MAX)
}

/// Every node by name. The rack of a node is what stands in its name before the last `rack_before`.
pub fn fleet_map(facts: &Facts, rack_before: Option<&str>) -> FleetMap {
    let (mut pools, mut racks, mut skus) = (Words::default(), Words::default(), Words::default());
    let mut nodes = Vec::with_capacity(facts.snapshot.nodes.len() + facts.gone.len());
    for (record, here) in facts.nodes() {
        let name = &record.node.name;
        let rack = rack_before.and_then(|mark| name.as_str().rsplit_once(mark)).map(|(rack, _)| rack);
        // Of a node that is gone nobody can say anything.
        let health = if here { Shown::status_of(&facts.snapshot, record) } else { Status::Unknown };
        let worst = record.findings.iter().map(|open| open.finding.severity).max();
        nodes.push(MapRow {
            node: name.clone(),
            pool: here.then(|| pools.place(record.node.pool.as_str())),
            rack: rack.map(|rack| racks.place(rack)),
            sku: record.node.sku.as_ref().map(|sku| skus.place(sku.as_str())),
            health: place_of(Status::ALL, &health),
            life: place_of(&LIVES, &record.life.word()),
            used: place_of(Use::ALL, &used(record, here).0),
            validated: validated(facts, record).map(|at| at.secs().div_euclid(60)),
            severity: worst.map(|worst| place_of(Severity::ALL, &worst)),
        });
    }
    FleetMap {
        columns: COLUMNS,
        pools: pools.words,
        racks: racks.words,
        skus: skus.words,
        health: Status::ALL.iter().map(|status| status.code()).collect(),
        lives: LIVES.to_vec(),
        uses: Use::ALL.iter().map(|used| used.code()).collect(),
        severities: Severity::ALL.iter().map(|severity| severity.code()).collect(),
        nodes,
    }
}

/// The oldest of the newest results that say something, over the tests that are run regularly.
fn validated(facts: &Facts, record: &NodeRecord) -> Option<Timestamp> {
    let mut oldest = None;
    for (_, known, _) in facts.due_of(record) {
        let settled = known.settled()?;
        oldest = Some(oldest.map_or(settled, |oldest: Timestamp| oldest.min(settled)));
    }
    oldest
}
