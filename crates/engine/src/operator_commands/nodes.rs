//! Commands about nodes: test, hold, release, quarantine. Each is described node by node, with what prevents it there:
//! a hold, a repair, or that the cluster no longer lists the node.

use doctor_checks::Catalogue;
use doctor_core::{
    finding::Evidence,
    hostlist::{self, Selector},
    ids::{NodeName, TestId},
    lifecycle::NodeState,
    plan::{self, MAX_TEST_NODES, UnfinishedRepair},
    run::NonEmpty,
    snapshot::{CommandKind, NodeRecord},
    time::Timestamp,
    view::{Facts, format_time, plural},
};

use super::{CommandError, OverLimit, Precondition, PreparedCommand, StoreWrite, select_nodes};

/// The selected nodes and their records.
pub(super) struct SelectedNodes<'a> {
    facts: &'a Facts,
    pub(super) nodes: Vec<(&'a NodeRecord, bool)>,
}

/// The effect of a command on one node: in words, and as changes to the store.
pub(super) struct NodeOutcome {
    pub(super) text: String,
    pub(super) writes: Vec<StoreWrite>,
}

impl NodeOutcome {
    pub(super) const fn unchanged(text: String) -> Self {
        Self { text, writes: Vec::new() }
    }
}

pub(super) const UNLISTED_TEXT: &str = "gone from the cluster";

impl<'a> SelectedNodes<'a> {
    pub(super) fn select(facts: &'a Facts, selectors: &[Selector]) -> Result<Self, CommandError> {
        if selectors.is_empty() {
            return Err(CommandError::Usage(
                "no nodes given; accepted: node[01-64], pool=NAME, state=STATE, or a name with `*`".to_owned(),
            ));
        }
        let nodes = select_nodes(facts, selectors)?;
        if nodes.is_empty() {
            let named: Vec<String> = selectors.iter().map(ToString::to_string).collect();
            return Err(CommandError::Usage(format!("no node matches {}: there is nothing to do", named.join(" "))));
        }
        Ok(Self { facts, nodes: nodes.iter().filter_map(|name| facts.node(name)).collect() })
    }

    pub(super) fn node_names(&self) -> Vec<NodeName> {
        self.nodes.iter().map(|(record, _)| record.node.name.clone()).collect()
    }

    pub(super) fn folded_names(&self) -> String {
        hostlist::fold(&self.node_names())
    }

    pub(super) fn count_text(&self) -> String {
        plural(self.nodes.len(), "node")
    }

    /// Returns a node name for an example.
    pub(super) fn example_name(&self) -> &str {
        self.nodes.first().map_or("NODE", |(record, _)| record.node.name.as_str())
    }

    /// Returns who holds a node now, and why.
    pub(super) fn hold_text(&self, record: &NodeRecord) -> Option<String> {
        record.hold_at(self.facts.now).map(|hold| format!("held by {} ({})", hold.by, hold.why))
    }

    /// Collects the effect on each node. An error if there is none and the cluster lists none of the nodes.
    pub(super) fn describe_each(
        &self,
        outcome: impl Fn(&NodeRecord, bool) -> NodeOutcome,
    ) -> Result<(Vec<String>, Vec<StoreWrite>), CommandError> {
        let (mut changes, mut writes) = (Vec::with_capacity(self.nodes.len()), Vec::new());
        for (record, listed) in &self.nodes {
            let outcome = outcome(record, *listed);
            changes.push(format!("{}: {}", record.node.name, outcome.text));
            writes.extend(outcome.writes);
        }
        if writes.is_empty() && !self.nodes.iter().any(|(_, listed)| *listed) {
            return Err(CommandError::Usage(format!("the cluster no longer lists {}", self.folded_names())));
        }
        Ok((changes, writes))
    }

    /// Returns the preconditions of the command.
    pub(super) fn preconditions(&self) -> Vec<Precondition> {
        let precondition = |(record, _): &(&NodeRecord, bool)| Precondition::Node {
            node: record.node.name.clone(),
            life: record.state.clone(),
            hold: record.hold.clone(),
        };
        self.nodes.iter().map(precondition).collect()
    }
}

pub(super) fn test(
    facts: &Facts,
    catalogue: &Catalogue,
    selectors: &[Selector],
    tests: &[TestId],
) -> Result<PreparedCommand, CommandError> {
    let selected = SelectedNodes::select(facts, selectors)?;
    let known = &facts.snapshot.tests;
    let expanded = catalogue.expand(tests);
    if let Some(multi_node) = known.iter().find(|test| test.multi_node && tests.contains(&test.id)) {
        let text =
            format!("{} runs on several nodes at once: doctor test --nodes A,B,… {}", multi_node.id, multi_node.id);
        return Err(CommandError::Usage(text));
    }
    if let Some(unknown) = expanded.iter().find(|id| known.iter().all(|test| test.id != **id)) {
        let suites = catalogue.suites().keys().map(TestId::as_str);
        let known = known.iter().map(|test| test.id.as_str()).chain(suites).collect::<Vec<_>>().join(", ");
        return Err(CommandError::Unknown { what: "test or suite", name: unknown.to_string(), known });
    }
    let test_names = match expanded.as_slice() {
        [] => "all routine tests".to_owned(),
        some => some.iter().map(TestId::as_str).collect::<Vec<_>>().join(", "),
    };
    let (changes, writes) = selected.describe_each(|record, listed| {
        let text = match (selected.hold_text(record), &record.state) {
            _ if !listed => return NodeOutcome::unchanged(format!("{UNLISTED_TEXT}; not tested")),
            (Some(held), _) => format!("{test_names}, after the hold ends: {held}"),
            (None, NodeState::Repairing { .. }) => format!("{test_names}, after its repair"),
            (None, _) => test_names.clone(),
        };
        let command = CommandKind::Test { node: record.node.name.clone(), tests: expanded.clone(), run: None };
        NodeOutcome { text, writes: vec![StoreWrite::Request(command)] }
    })?;
    Ok(PreparedCommand {
        plan: format!("Would request {test_names} on {} ({}).", selected.count_text(), selected.folded_names()),
        changes,
        done: format!("Requested {test_names} on {}.", plural(writes.len(), "node")),
        next: format!("`doctor why {}` shows when it runs", selected.example_name()),
        writes,
        preconditions: selected.preconditions(),
        nodes: selected.node_names(),
        over_limit: None,
    })
}

/// Prepares one run over several nodes, with fault localisation if it fails.
pub(super) fn multi_node_test(
    facts: &Facts,
    catalogue: &Catalogue,
    selectors: &[Selector],
    name: Option<&str>,
) -> Result<PreparedCommand, CommandError> {
    let selected = SelectedNodes::select(facts, selectors)?;
    let candidates: Vec<&TestId> =
        facts.snapshot.tests.iter().filter(|test| test.multi_node).map(|test| &test.id).collect();
    let name = name.unwrap_or("collective");
    let is_match =
        |id: &TestId| id.as_str() == name || catalogue.base_test(id).is_some_and(|base| base.as_str() == name);
    let Some(test) = candidates.iter().find(|id| is_match(id)) else {
        let known = candidates.iter().map(|id| id.as_str()).collect::<Vec<_>>().join(", ");
        return Err(CommandError::Unknown { what: "test over several nodes", name: name.to_owned(), known });
    };
    let Some(nodes) = NonEmpty::new(selected.node_names()).filter(|nodes| nodes.len() > 1) else {
        let text = format!("{test} needs at least two nodes; `--nodes` names {}", selected.count_text());
        return Err(CommandError::Usage(text));
    };
    if nodes.len() > MAX_TEST_NODES {
        return Err(CommandError::Usage(format!(
            "`--nodes` names {}; the limit is {MAX_TEST_NODES}",
            selected.count_text()
        )));
    }
    if let Some((unlisted, _)) = selected.nodes.iter().find(|(_, listed)| !listed) {
        let text = format!("{} is {UNLISTED_TEXT}; {test} needs all of its nodes", unlisted.node.name);
        return Err(CommandError::Usage(text));
    }
    let mut changes = vec![format!("{}: {test}, one run", selected.folded_names())];
    changes.extend(selected.nodes.iter().filter_map(|(record, _)| {
        let held = selected.hold_text(record)?;
        Some(format!("{}: {held}; the run waits until the hold ends", record.node.name))
    }));
    Ok(PreparedCommand {
        plan: format!("Would request one run of {test} over {} ({}).", selected.count_text(), selected.folded_names()),
        changes,
        done: format!("Requested one run of {test} over {}.", selected.count_text()),
        next: "`doctor audit` shows each trial and its result".to_owned(),
        writes: vec![StoreWrite::Request(CommandKind::MultiNodeTest {
            nodes,
            test: (*test).clone(),
            trials: Vec::new(),
        })],
        preconditions: selected.preconditions(),
        nodes: selected.node_names(),
        over_limit: None,
    })
}

pub(super) fn hold(
    facts: &Facts,
    selectors: &[Selector],
    until: Option<Timestamp>,
) -> Result<PreparedCommand, CommandError> {
    let selected = SelectedNodes::select(facts, selectors)?;
    let how_long =
        until.map_or_else(|| "until released".to_owned(), |until| format!("until {} UTC", format_time(until)));
    let (changes, writes) = selected.describe_each(|record, listed| {
        let text = match (selected.hold_text(record), listed) {
            (Some(held), _) => format!("already {held}; this hold replaces it"),
            (None, false) => format!("{UNLISTED_TEXT}; held if it returns"),
            (None, true) => format!("{} -> held", record.state.as_str()),
        };
        NodeOutcome { text, writes: vec![StoreWrite::Hold { node: record.node.name.clone(), until }] }
    })?;
    Ok(PreparedCommand {
        plan: format!(
            "Would hold {} ({}) {how_long}: no tests, no repairs.",
            selected.count_text(),
            selected.folded_names()
        ),
        changes,
        done: format!("Held {} {how_long}.", selected.count_text()),
        next: format!("`doctor release {} --why …` when it is ready", selected.example_name()),
        writes,
        preconditions: selected.preconditions(),
        nodes: selected.node_names(),
        over_limit: None,
    })
}

pub(super) fn release(facts: &Facts, selectors: &[Selector]) -> Result<PreparedCommand, CommandError> {
    let selected = SelectedNodes::select(facts, selectors)?;
    let (changes, writes) = selected.describe_each(|record, listed| {
        let name = &record.node.name;
        let end = record.hold.as_ref().map(|_| StoreWrite::Unhold(name.clone()));
        let held = selected.hold_text(record).unwrap_or_else(|| record.state.as_str().to_owned());
        let repair = plan::unfinished_repair(&facts.snapshot, record);
        if !listed {
            let effect = if end.is_some() { "the hold ends" } else { "nothing changes" };
            return NodeOutcome {
                text: format!("{held}; {UNLISTED_TEXT}; {effect}"),
                writes: end.into_iter().collect(),
            };
        }
        // The command that `doctor why` names for a repair that waits for the hold must not withdraw it.
        if let (Some(repair), true) = (&repair, record.hold_at(facts.now).is_some()) {
            let UnfinishedRepair { what, by, why, .. } = repair;
            return NodeOutcome {
                text: format!("{held}; the hold ends, and the {what} requested by {by} ({why}) goes on"),
                writes: end.into_iter().collect(),
            };
        }
        let withdrawn = repair.filter(|repair| !repair.sent).map_or_else(String::new, |repair| {
            format!("this withdraws the {} requested by {} ({}); ", repair.what, repair.by, repair.why)
        });
        let effect = match &record.state {
            NodeState::InService | NodeState::Suspect if end.is_some() => "the hold ends",
            NodeState::InService | NodeState::Suspect if has_event_findings(record) => "its events are acknowledged",
            NodeState::InService | NodeState::Suspect if !withdrawn.is_empty() => "nothing else changes",
            NodeState::InService | NodeState::Suspect => "nothing changes",
            NodeState::Requalifying { .. } => "requalification is already running",
            NodeState::Held { .. } => "the hold ends; requalified first if a case is open",
            NodeState::Quarantined | NodeState::Repairing { .. } | NodeState::Out => {
                "requalified, then returned to service"
            }
        };
        let request = StoreWrite::Request(CommandKind::Release { node: name.clone() });
        NodeOutcome { text: format!("{held}; {withdrawn}{effect}"), writes: end.into_iter().chain([request]).collect() }
    })?;
    Ok(PreparedCommand {
        plan: format!("Would release {} ({}).", selected.count_text(), selected.folded_names()),
        changes,
        done: format!("Released {}.", selected.count_text()),
        next: format!("`doctor why {}` shows its progress", selected.example_name()),
        writes,
        preconditions: selected.preconditions(),
        nodes: selected.node_names(),
        over_limit: None,
    })
}

/// Returns whether a finding is open that rests on an event only and belongs to no case.
fn has_event_findings(record: &NodeRecord) -> bool {
    let event = |evidence: &Evidence| matches!(evidence, Evidence::Event { known_by: Some(_), .. });
    record.case.is_none() && record.findings.iter().any(|open| event(&open.finding.evidence))
}

pub(super) fn quarantine(facts: &Facts, selectors: &[Selector], evict: bool) -> Result<PreparedCommand, CommandError> {
    let selected = SelectedNodes::select(facts, selectors)?;
    let work = if evict { "user work evicted" } else { "user work may finish" };
    let (changes, writes) = selected.describe_each(|record, listed| {
        let then = format!("quarantined, {work}, then examined");
        let state = record.state.as_str();
        let text = match (selected.hold_text(record), &record.state) {
            _ if !listed => return NodeOutcome::unchanged(format!("{UNLISTED_TEXT}; nothing changes")),
            (Some(held), _) => format!("{held}; after the hold: {then}"),
            (None, NodeState::InService | NodeState::Suspect) => format!("{state} -> {then}"),
            (None, NodeState::Held { .. }) => format!("{state}; after the hold: {then}"),
            (
                None,
                NodeState::Quarantined | NodeState::Repairing { .. } | NodeState::Requalifying { .. } | NodeState::Out,
            ) => {
                return NodeOutcome::unchanged(format!("{state}: already out of service; nothing changes"));
            }
        };
        let command = CommandKind::Quarantine { node: record.node.name.clone(), evict };
        NodeOutcome { text, writes: vec![StoreWrite::Request(command)] }
    })?;
    Ok(PreparedCommand {
        plan: format!("Would take {} out of service ({}).", selected.count_text(), selected.folded_names()),
        changes,
        done: format!("Requested quarantine and examination of {}.", plural(writes.len(), "node")),
        next: format!(
            "`doctor why {0}` shows the advice; `doctor release {0} --why …` requalifies and returns it",
            selected.example_name()
        ),
        writes,
        preconditions: selected.preconditions(),
        nodes: selected.node_names(),
        over_limit: OverLimit::of(facts, &selected.node_names()),
    })
}
