//! In-memory cache of names and their ids. A hundred thousand history rows repeat a name; the database stores it once.

use std::{collections::HashMap, hash::Hash};

use doctor_core::{
    classify::is_not_judged,
    finding::{Severity, Verdict},
    ids::{NodeName, TestId},
    reason::ReasonCode,
    run::IncompleteReason,
};

use super::error::{Result, StoreError};

/// The content of a history row except its time; there are few distinct ones.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct OutcomeKind {
    pub(super) verdict: Verdict,
    pub(super) severity: Option<Severity>,
    pub(super) reason: ReasonCode,
    pub(super) untrusted: bool,
    pub(super) imported: bool,
    /// A result of a node's agent, which has no run.
    pub(super) by_agent: bool,
}

impl OutcomeKind {
    /// Returns whether some measurements of such a result have no expected value.
    pub(super) fn is_not_judged(&self) -> bool {
        is_not_judged(&self.reason)
    }

    /// Returns whether such a result counts as the latest of its test. Imported history without a verdict and runs that
    /// were interrupted for a user or an operator do not.
    pub(super) fn counts_as_latest(&self) -> bool {
        let interrupted =
            || IncompleteReason::from_code(self.reason.as_str()).is_some_and(IncompleteReason::is_interruption);
        let is_interruption = self.verdict == Verdict::Inconclusive && interrupted();
        !self.untrusted && !is_interruption
    }

    pub(super) const fn new(verdict: Verdict, severity: Option<Severity>, reason: ReasonCode) -> Self {
        Self { verdict, severity, reason, untrusted: false, imported: false, by_agent: false }
    }

    pub(super) const fn of_agent(verdict: Verdict, severity: Option<Severity>, reason: ReasonCode) -> Self {
        Self { verdict, severity, reason, untrusted: false, imported: false, by_agent: true }
    }

    pub(super) const fn has_run(&self) -> bool {
        !self.imported && !self.by_agent
    }

    /// Returns the row's unique name in its table.
    pub(super) fn name(&self) -> String {
        let severity = self.severity.map_or("-", Severity::code);
        let trust = match (self.untrusted, self.imported) {
            (true, _) => "untrusted",
            (false, true) => "imported",
            (false, false) if self.by_agent => "agent",
            (false, false) => "own",
        };
        format!("{}/{severity}/{trust}/{}", self.verdict, self.reason)
    }
}

#[derive(Debug, Clone)]
struct Dictionary<T> {
    numbers: HashMap<T, i64>,
    /// By id; ids start at 1 and have few gaps.
    names: Vec<Option<T>>,
}

impl<T> Default for Dictionary<T> {
    fn default() -> Self {
        Self { numbers: HashMap::new(), names: Vec::new() }
    }
}

impl<T: Clone + Eq + Hash> Dictionary<T> {
    fn add(&mut self, id: i64, name: T) {
        let index = usize::try_from(id).unwrap_or(0);
        if self.names.len() <= index {
            self.names.resize(index + 1, None);
        }
        self.names[index] = Some(name.clone());
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
pub(super) struct IdCache {
    nodes: Dictionary<NodeName>,
    tests: Dictionary<TestId>,
    outcomes: Dictionary<OutcomeKind>,
}

impl IdCache {
    pub(super) fn len(&self) -> usize {
        self.nodes.numbers.len() + self.tests.numbers.len() + self.outcomes.numbers.len()
    }

    /// Whether the ids of tests and outcomes fit in 16 bits.
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

    /// Returns the ids of outcomes with this verdict.
    pub(super) fn outcomes_with(&self, verdict: Verdict) -> impl Iterator<Item = i64> {
        self.outcomes.numbers.iter().filter(move |(kind, _)| kind.verdict == verdict).map(|(_, id)| *id)
    }

    /// Returns the ids of outcomes of agents.
    pub(super) fn outcomes_of_agents(&self) -> impl Iterator<Item = i64> {
        self.outcomes.numbers.iter().filter(|(kind, _)| kind.by_agent).map(|(_, id)| *id)
    }

    pub(super) fn node_id(&self, name: &NodeName) -> Option<i64> {
        self.nodes.numbers.get(name).copied()
    }

    pub(super) fn test_id(&self, name: &TestId) -> Option<i64> {
        self.tests.numbers.get(name).copied()
    }

    pub(super) fn outcome_id(&self, kind: &OutcomeKind) -> Option<i64> {
        self.outcomes.numbers.get(kind).copied()
    }

    /// Returns the number of tests, an upper bound on a run's results per node.
    pub(super) fn tests(&self) -> i64 {
        i64::try_from(self.tests.numbers.len()).unwrap_or(i64::MAX)
    }

    /// Returns the highest known ids of nodes, tests and outcomes.
    pub(super) fn highest_numbers(&self) -> [i64; 3] {
        [self.nodes.highest(), self.tests.highest(), self.outcomes.highest()]
    }

    pub(super) fn add_node(&mut self, id: i64, name: NodeName) {
        self.nodes.add(id, name);
    }

    pub(super) fn add_test(&mut self, id: i64, name: TestId) {
        self.tests.add(id, name);
    }

    pub(super) fn add_outcome(&mut self, id: i64, kind: OutcomeKind) {
        self.outcomes.add(id, kind);
    }
}

fn unknown(what: &'static str, id: i64) -> StoreError {
    StoreError::Unreadable { what, why: format!("id {id} is unknown") }
}

/// Converts a parse error of a stored value into [`StoreError::Unreadable`].
pub(super) fn parsed<T, E: std::fmt::Display>(what: &'static str, value: std::result::Result<T, E>) -> Result<T> {
    value.map_err(|error| StoreError::Unreadable { what, why: error.to_string() })
}
