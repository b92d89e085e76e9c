//! Tests that are overdue, and why: on free nodes a warning, on nodes that users have one notice for the fleet.

use std::collections::{BTreeMap, BTreeSet};

use super::{AttentionItem, AttentionKind, Urgency, grouping::subject};
use crate::{
    ids::{NodeName, TestId},
    node::Occupancy,
    policy::TestPolicy,
    snapshot::{NodeRecord, TestRecord},
    time::{Span, Timestamp},
    view::{CoverageRow, Due, Facts, SkippedSince, format_percent, skip_code, skip_text},
};

/// Tests may be overdue for this long: other nodes come first, and users come before all.
const GRACE: Span = Span::days(1);
/// As many results in a row that are inconclusive are no coincidence.
const MISSES: u32 = 3;
/// Tests named in a sentence.
const MAX_NAMED: usize = 3;
/// The code of tests that run and give no conclusive result.
const NO_RESULT: &str = "no-result";

/// The nodes whose tests are overdue for the same reason.
#[derive(Debug, Default)]
struct Overdue<'a> {
    nodes: BTreeSet<&'a NodeName>,
    tests: BTreeSet<&'a TestId>,
    since: Option<Timestamp>,
    why: String,
}

/// Returns one item for each reason. `every_job_fails`: an item says so already.
pub(super) fn items(facts: &Facts, coverage: &[CoverageRow], every_job_fails: bool) -> Vec<AttentionItem> {
    let mut by_code: BTreeMap<&'static str, Overdue<'_>> = BTreeMap::new();
    let tested = facts.nodes_with_runs();
    for record in &facts.snapshot.nodes {
        if matches!(record.node.occupancy, Occupancy::Free) && may_be_tested(facts, record, &tested) {
            add_node(facts, record, &mut by_code);
        }
    }
    if every_job_fails {
        by_code.retain(|code, _| !matches!(*code, NO_RESULT | "backing-off"));
    }
    let overdue = by_code.into_iter().map(|(code, overdue)| item(code, &overdue, coverage));
    overdue.chain(in_use(facts, coverage, &tested)).chain(never_tested(facts, &tested)).collect()
}

/// Whether nothing but users keeps tests from the node. `tested`: the nodes with a run.
fn may_be_tested(facts: &Facts, record: &NodeRecord, tested: &BTreeSet<&NodeName>) -> bool {
    !record.state.is_out_of_service() && record.hold_at(facts.now).is_none() && !tested.contains(&record.node.name)
}

/// Returns the nodes that users have had for so long that their results are overdue. Nothing is wrong, but their last results
/// say little about them.
fn in_use(facts: &Facts, coverage: &[CoverageRow], tested: &BTreeSet<&NodeName>) -> Option<AttentionItem> {
    let mut overdue = Overdue::default();
    for record in &facts.snapshot.nodes {
        if !matches!(record.node.occupancy, Occupancy::Busy { .. }) || !may_be_tested(facts, record, tested) {
            continue;
        }
        for (test, known, due) in facts.due_of(record) {
            let Some(since) = known.settled().map(|settled| settled.plus(test.cutoff)) else { continue };
            if due == Due::Now && facts.now.since(since) > GRACE {
                overdue.nodes.insert(&record.node.name);
                overdue.tests.insert(&test.id);
                overdue.since = Some(overdue.since.map_or(since, |known| known.min(since)));
            }
        }
    }
    let nodes: Vec<NodeName> = overdue.nodes.iter().copied().cloned().collect();
    let tests = named_tests(&overdue, coverage);
    let text = format!(
        "{}: in use, and overdue for more than a day: {tests}: tested when users release them",
        subject(&nodes)
    );
    (!nodes.is_empty()).then(|| {
        AttentionItem::new(AttentionKind::CoverageLow, Urgency::Notice, text)
            .about(nodes)
            .since(overdue.since)
            .next("doctor plan --all")
    })
}

/// Returns the nodes on which no test has run yet, and why not. It may only be that users have them, but nothing is known
/// of their health.
fn never_tested(facts: &Facts, tested: &BTreeSet<&NodeName>) -> Option<AttentionItem> {
    let (mut nodes, mut reasons) = (Vec::new(), BTreeMap::<&str, usize>::new());
    for record in &facts.snapshot.nodes {
        if facts.due_of(record).any(|(_, known, _)| known.attempt().is_some()) || tested.contains(&record.node.name) {
            continue;
        }
        let Some(skipped) = facts.skip_reasons.get(&record.node.name) else { continue };
        let code = skip_code(&skipped.reason);
        if !matches!(code, "fresh" | "nothing-applies" | "out-of-service" | "held" | "foreign-mark") {
            nodes.push(record.name());
            *reasons.entry(code).or_default() += 1;
        }
    }
    let reasons: Vec<String> = reasons.into_iter().map(|(code, count)| format!("{count} {code}")).collect();
    let text = format!("{}: no test has run yet: {}", subject(&nodes), reasons.join(", "));
    (!nodes.is_empty()).then(|| {
        AttentionItem::new(AttentionKind::NeverTested, Urgency::Notice, text).about(nodes).next("doctor plan --all")
    })
}

fn add_node<'a>(facts: &'a Facts, record: &'a NodeRecord, by_code: &mut BTreeMap<&'static str, Overdue<'a>>) {
    let skipped = facts.skip_reasons.get(&record.node.name);
    for (test, known, due) in facts.due_of(record).filter(|(.., due)| *due != Due::ByAgent) {
        let Some((code, why, since)) = reason(facts, test, known, due, skipped) else { continue };
        let overdue = by_code.entry(code).or_default();
        overdue.nodes.insert(&record.node.name);
        overdue.tests.insert(&test.id);
        if since.is_some() && overdue.since.is_none_or(|known| since < Some(known)) {
            (overdue.since, overdue.why) = (since, why);
        }
    }
}

/// Returns why a test has no valid result on a free node, as a code and in words, and since when. `None`: it has one, it
/// is on its way, or another item says why.
fn reason(
    facts: &Facts,
    test: &TestPolicy,
    known: &TestRecord,
    due: Due,
    skipped: Option<&SkippedSince>,
) -> Option<(&'static str, String, Option<Timestamp>)> {
    if known.misses() >= MISSES {
        return Some((NO_RESULT, String::new(), known.attempt()));
    }
    let skipped = skipped.filter(|_| due == Due::Now)?;
    let code = skip_code(&skipped.reason);
    if !matches!(code, "backing-off" | "waiting-for-slot" | "pool-full" | "share-busy" | "budget-spent") {
        return None;
    }
    // A test that never ran is overdue since the node waits.
    let overdue_since = known.settled().map_or(skipped.since, |settled| settled.plus(test.cutoff));
    (facts.now.since(overdue_since) > GRACE).then(|| (code, skip_text(&skipped.reason), Some(overdue_since)))
}

fn item(code: &'static str, overdue: &Overdue<'_>, coverage: &[CoverageRow]) -> AttentionItem {
    let nodes: Vec<NodeName> = overdue.nodes.iter().copied().cloned().collect();
    let tests = named_tests(overdue, coverage);
    let text = match code {
        NO_RESULT => format!("{}: no conclusive result of {tests}, {MISSES} times in a row", subject(&nodes)),
        _ => format!("{}: free, and overdue for more than a day: {tests}: {}", subject(&nodes), overdue.why),
    };
    let next = match (code, nodes.first()) {
        (NO_RESULT, Some(node)) => format!("doctor history {node}"),
        ("backing-off", Some(node)) => format!("doctor why {node}"),
        _ => "doctor plan --all".to_owned(),
    };
    AttentionItem::new(AttentionKind::CoverageLow, Urgency::Warning, text).about(nodes).since(overdue.since).next(next)
}

/// Names the first overdue tests, with the lowest coverage among all of them.
fn named_tests(overdue: &Overdue<'_>, coverage: &[CoverageRow]) -> String {
    let named: Vec<&str> = overdue.tests.iter().take(MAX_NAMED).map(|test| test.as_str()).collect();
    let more = overdue.tests.len().saturating_sub(MAX_NAMED);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    let covered = coverage.iter().filter(|row| overdue.tests.contains(&row.test)).filter_map(|row| row.percent);
    let lowest = covered
        .min_by(f64::total_cmp)
        .map_or_else(String::new, |percent| format!(" (coverage {})", format_percent(Some(percent))));
    format!("{}{more}{lowest}", named.join(", "))
}
