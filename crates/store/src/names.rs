//! Names and their small numbers. A hundred thousand history rows repeat a name; the database holds it once.
//!
//! The numbers are kept in memory and grow with the tables. They are handed out under a lock that lasts until the
//! transaction ends, so that a higher number is never visible before a lower one: looking for numbers above the
//! highest known one finds them all.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use doctor_core::{
    finding::{Severity, Verdict},
    ids::{NodeName, TestId},
    lifecycle::Life,
    reason::ReasonCode,
    time::Timestamp,
};

use super::{
    db::{Row, Tx, Val, vals},
    error::{Result, StoreError},
    json,
};

/// What a history row says, apart from when: there are few different ones.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct OutcomeKind {
    pub(super) verdict: Verdict,
    pub(super) severity: Option<Severity>,
    pub(super) reason: ReasonCode,
    pub(super) untrusted: bool,
    pub(super) imported: bool,
}

impl OutcomeKind {
    pub(super) const fn new(verdict: Verdict, severity: Option<Severity>, reason: ReasonCode) -> Self {
        Self { verdict, severity, reason, untrusted: false, imported: false }
    }

    /// The row's unique name in its table.
    fn name(&self) -> String {
        let severity = self.severity.map_or("-", Severity::code);
        let trust = match (self.untrusted, self.imported) {
            (true, _) => "untrusted",
            (false, true) => "imported",
            (false, false) => "own",
        };
        format!("{}/{severity}/{trust}/{}", self.verdict, self.reason)
    }
}

#[derive(Debug, Clone)]
struct Dictionary<T> {
    numbers: HashMap<T, i64>,
    /// By number; numbers begin at 1 and have few gaps.
    names: Vec<Option<T>>,
}

impl<T> Default for Dictionary<T> {
    fn default() -> Self {
        Self { numbers: HashMap::new(), names: Vec::new() }
    }
}

impl<T: Clone + Eq + Hash> Dictionary<T> {
    fn add(&mut self, id: i64, name: T) {
        let place = usize::try_from(id).unwrap_or(0);
        if self.names.len() <= place {
            self.names.resize(place + 1, None);
        }
        self.names[place] = Some(name.clone());
        self.numbers.insert(name, id);
    }

    fn name(&self, id: i64) -> Option<&T> {
        self.names.get(usize::try_from(id).ok()?)?.as_ref()
    }

    fn highest(&self) -> i64 {
        i64::try_from(self.names.len()).unwrap_or(i64::MAX) - 1
    }
}

/// All names known to this process.
#[derive(Debug, Clone, Default)]
pub(super) struct Names {
    nodes: Dictionary<NodeName>,
    tests: Dictionary<TestId>,
    outcomes: Dictionary<OutcomeKind>,
}

impl Names {
    pub(super) fn len(&self) -> usize {
        self.nodes.numbers.len() + self.tests.numbers.len() + self.outcomes.numbers.len()
    }

    /// Whether the numbers of tests and outcomes have at most sixteen bits.
    pub(super) fn have_small_numbers(&self) -> bool {
        self.tests.highest().max(self.outcomes.highest()) <= i64::from(u16::MAX)
    }

    pub(super) fn node(&self, id: i64) -> Result<&NodeName> {
        self.nodes.name(id).ok_or_else(|| unknown("node", id))
    }

    pub(super) fn test(&self, id: i64) -> Result<&TestId> {
        self.tests.name(id).ok_or_else(|| unknown("test", id))
    }

    pub(super) fn outcome(&self, id: i64) -> Result<&OutcomeKind> {
        self.outcomes.name(id).ok_or_else(|| unknown("outcome", id))
    }

    pub(super) fn all_nodes(&self) -> impl Iterator<Item = &NodeName> {
        self.nodes.numbers.keys()
    }

    /// The numbers of outcomes with this verdict.
    pub(super) fn outcomes_with(&self, verdict: Verdict) -> impl Iterator<Item = i64> {
        self.outcomes.numbers.iter().filter(move |(kind, _)| kind.verdict == verdict).map(|(_, id)| *id)
    }

    pub(super) fn node_number(&self, name: &NodeName) -> Option<i64> {
        self.nodes.numbers.get(name).copied()
    }

    pub(super) fn test_number(&self, name: &TestId) -> Option<i64> {
        self.tests.numbers.get(name).copied()
    }
}

fn unknown(what: &'static str, id: i64) -> StoreError {
    StoreError::Unreadable { what, why: format!("nothing is known under its number {id}") }
}

const LOAD: &str = "loading names";

impl Tx<'_> {
    /// Learns names that others have added.
    pub(super) fn refresh_names(&mut self) -> Result<()> {
        let sql = "SELECT (SELECT MAX(id) FROM node), (SELECT MAX(id) FROM test), (SELECT MAX(id) FROM outcome)";
        let there = self.first(LOAD, sql, &[], |row| Ok([row.opt_int(0)?, row.opt_int(1)?, row.opt_int(2)?]))?;
        self.learn(there.unwrap_or_default())
    }

    /// Loads what is above the highest known numbers. `there`: the highest in the tables.
    pub(super) fn learn(&mut self, there: [Option<i64>; 3]) -> Result<()> {
        let [node, test, outcome] = there.map(|id| id.unwrap_or(0));
        let known = [self.names.nodes.highest(), self.names.tests.highest(), self.names.outcomes.highest()];
        let mut fresh = Arc::clone(&self.names);
        if node > known[0] {
            let names = &mut Arc::make_mut(&mut fresh).nodes;
            self.rows(LOAD, "SELECT id, name FROM node WHERE id > $1 ORDER BY id", vals![known[0]], |row| {
                names.add(row.int(0)?, parsed("node name", NodeName::new(row.text(1)?))?);
                Ok(())
            })?;
        }
        if test > known[1] {
            let names = &mut Arc::make_mut(&mut fresh).tests;
            self.rows(LOAD, "SELECT id, name FROM test WHERE id > $1 ORDER BY id", vals![known[1]], |row| {
                names.add(row.int(0)?, parsed("test name", TestId::new(row.text(1)?))?);
                Ok(())
            })?;
        }
        if outcome > known[2] {
            let names = &mut Arc::make_mut(&mut fresh).outcomes;
            let sql =
                "SELECT id, verdict, severity, reason, untrusted, imported FROM outcome WHERE id > $1 ORDER BY id";
            self.rows(LOAD, sql, vals![known[2]], |row| {
                names.add(row.int(0)?, read_outcome(row)?);
                Ok(())
            })?;
        }
        self.names = fresh;
        Ok(())
    }

    /// The number of a node, whose row is made if there is none.
    pub(super) fn node_id(&mut self, name: &NodeName, now: Timestamp) -> Result<i64> {
        if let Some(id) = self.names.node_number(name) {
            return Ok(id);
        }
        let life = json::write(&Life::InService)?;
        let sql = "INSERT INTO node (name, life, since) VALUES ($1, $2, $3) ON CONFLICT (name) DO NOTHING";
        let id = self.number_of("node", name.as_str(), sql, vals![name.as_str(), &life, now])?;
        Arc::make_mut(&mut self.names).nodes.add(id, name.clone());
        Ok(id)
    }

    pub(super) fn test_id(&mut self, name: &TestId) -> Result<i64> {
        if let Some(id) = self.names.test_number(name) {
            return Ok(id);
        }
        let sql = "INSERT INTO test (name) VALUES ($1) ON CONFLICT (name) DO NOTHING";
        let id = self.number_of("test", name.as_str(), sql, vals![name.as_str()])?;
        Arc::make_mut(&mut self.names).tests.add(id, name.clone());
        Ok(id)
    }

    pub(super) fn outcome_id(&mut self, kind: &OutcomeKind) -> Result<i64> {
        if let Some(id) = self.names.outcomes.numbers.get(kind) {
            return Ok(*id);
        }
        let name = kind.name();
        let sql = "INSERT INTO outcome (name, verdict, severity, reason, untrusted, imported) \
                   VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (name) DO NOTHING";
        let severity = kind.severity.map(Severity::code);
        let vals = vals![&name, kind.verdict.code(), severity, kind.reason.as_str(), kind.untrusted, kind.imported];
        let id = self.number_of("outcome", &name, sql, vals)?;
        Arc::make_mut(&mut self.names).outcomes.add(id, kind.clone());
        Ok(id)
    }

    fn number_of(&mut self, table: &'static str, name: &str, insert: &str, vals: &[Val<'_>]) -> Result<i64> {
        let operation = "adding a name";
        if !self.is_sqlite() {
            self.run(operation, "SELECT pg_advisory_xact_lock(7301118)", &[])?;
            self.refresh_names()?;
        }
        self.run(operation, insert, vals)?;
        let sql = format!("SELECT id FROM {table} WHERE name = $1");
        self.first(operation, &sql, vals![name], |row| row.int(0))?
            .ok_or_else(|| StoreError::Unreadable { what: "name", why: format!("{name} was added and is not there") })
    }
}

fn read_outcome(row: &Row<'_>) -> Result<OutcomeKind> {
    Ok(OutcomeKind {
        verdict: parsed("verdict", row.text(1)?.parse())?,
        severity: row.opt_text(2)?.map(|code| parsed("severity", code.parse())).transpose()?,
        reason: parsed("reason", ReasonCode::new(row.text(3)?))?,
        untrusted: row.int(4)? != 0,
        imported: row.int(5)? != 0,
    })
}

/// A word from the database that must be one of ours.
pub(super) fn parsed<T, E: std::fmt::Display>(what: &'static str, word: std::result::Result<T, E>) -> Result<T> {
    word.map_err(|error| StoreError::Unreadable { what, why: error.to_string() })
}
