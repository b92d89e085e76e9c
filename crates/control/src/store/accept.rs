//! The door for results: each run's result from each node once, a whole batch in one transaction.
//!
//! Everything a batch needs is read in two statements, decided in memory, and written in a handful, so that PostgreSQL is
//! asked twice per batch and SQLite touches each page once. A result leaves a row of history, its document and where its
//! test stands now; what its run waited for is struck off. The run itself is not written: it has ended when nobody waits
//! for it any more.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use doctor_core::{
    finding::{Severity, Verdict},
    ids::{CaseId, NodeName, RunId},
    node::Hardware,
    run::Outcome,
    time::{Span, Timestamp},
};

use super::{
    Store,
    audit::{self, Counter},
    bundle::{self, Arrival},
    db::{Access, Kind, Tx, Val, vals},
    error::Result,
    evidence::Packed,
    findings::{Changes, Open, Shown},
    lease::Lease,
    ledger::{self, Before, Posting},
    names::OutcomeKind,
    nodes::{self, Spoke},
    records::{Accepted, JudgedResult},
    spent::{self, Spell},
};

impl Store {
    /// Keeps results. When this returns, they are durable; a result that was here before changes nothing.
    pub fn accept(&self, lease: &Lease, results: &[JudgedResult]) -> Result<Vec<Accepted>> {
        let alone: Vec<Option<Packed>> = results.iter().map(bundle::pack_alone).collect::<Result<_>>()?;
        let asked = Asked::of(results.iter());
        self.write_foreseeing(
            Access::Write,
            lease,
            |tx| asked.foresee(tx),
            |tx| {
                let mut expected = Expected::load(tx, &asked.runs)?;
                let accepted: Vec<Accepted> = results.iter().map(|result| expected.admit(tx, result)).collect();
                let arrivals = expected.arrivals(tx, results.iter().zip(&alone).zip(&accepted));
                let bundles = bundle::keep(tx, &arrivals)?;
                let kept: Vec<Entry<'_>> = arrivals
                    .iter()
                    .zip(bundles)
                    .map(|(arrival, bundle)| Entry { node: arrival.node, result: arrival.result, bundle })
                    .collect();
                keep(tx, &expected, &asked, &kept)?;
                count_kept(tx, kept.len(), expected.ended.len())?;
                count_turned_away(tx, &accepted)?;
                Ok(accepted)
            },
        )
    }
}

/// Enters results whose documents are kept already, each in its bundle. They have been admitted; one that has been
/// entered since changes nothing.
pub(super) fn enter(tx: &mut Tx<'_>, asked: &Asked, results: &[(&JudgedResult, i64)]) -> Result<()> {
    let mut expected = Expected::load(tx, &asked.runs)?;
    let kept: Vec<Entry<'_>> = results
        .iter()
        .filter(|(result, _)| expected.admit(tx, result) == Accepted::Kept)
        .filter_map(|(result, bundle)| {
            Some(Entry { node: tx.names.node_number(&result.node)?, result, bundle: *bundle })
        })
        .collect();
    keep(tx, &expected, asked, &kept)?;
    count_kept(tx, kept.len(), expected.ended.len())
}

/// A result that history has not yet.
#[derive(Debug)]
struct Entry<'a> {
    node: i64,
    result: &'a JudgedResult,
    bundle: i64,
}

/// What is asked of the database for a batch.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) runs: Vec<i64>,
    nodes: BTreeSet<NodeName>,
}

impl Asked {
    pub(super) fn of<'a>(results: impl Iterator<Item = &'a JudgedResult> + Clone) -> Self {
        let runs: BTreeSet<i64> = results.clone().map(|result| number_of(result.run)).collect();
        Self { runs: runs.into_iter().collect(), nodes: results.map(|result| result.node.clone()).collect() }
    }

    /// The nodes that the batch speaks for, as far as they are known.
    fn nodes(&self, tx: &Tx<'_>) -> Vec<i64> {
        self.nodes.iter().filter_map(|name| tx.names.node_number(name)).collect()
    }

    /// All of it will be asked.
    pub(super) fn foresee(&self, tx: &mut Tx<'_>) {
        self.foresee_runs(tx);
        ledger::foresee(tx, &self.nodes(tx));
    }

    pub(super) fn foresee_runs(&self, tx: &mut Tx<'_>) {
        tx.foresee(READING_RUNS, AWAITED, &self.runs);
    }
}

fn number_of(run: RunId) -> i64 {
    run.number().cast_signed()
}

const READING_RUNS: &str = "reading runs";
const AWAITED: &str = "SELECT a.run, a.node, a.answered, a.whole, r.case_id, r.started, r.node_count \
                       FROM awaited a JOIN run r ON r.id = a.run WHERE a.run IN {keys}";

/// What the runs of a batch wait for.
#[derive(Debug, Default)]
pub(super) struct Expected {
    runs: HashMap<RunId, Waiting>,
    /// Runs that the batch completes, and when that was.
    ended: BTreeMap<RunId, Spell>,
    /// Nodes of runs that had ended before.
    over: HashSet<(RunId, i64)>,
}

#[derive(Debug, Default)]
struct Waiting {
    over: bool,
    case: Option<CaseId>,
    started: Option<Timestamp>,
    node_count: i64,
    /// By node: whether it has answered, and with everything.
    nodes: HashMap<i64, Answer>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    None,
    Partial,
    Whole,
}

impl Expected {
    pub(super) fn load(tx: &mut Tx<'_>, runs: &[i64]) -> Result<Self> {
        let mut expected = Self::default();
        tx.keyed(READING_RUNS, AWAITED, runs, |row| {
            let waiting = expected.runs.entry(row.run(0)?).or_default();
            let answer = match (row.opt_int(2)?, row.int(3)?) {
                (None, _) => Answer::None,
                (Some(_), 0) => Answer::Partial,
                (Some(_), _) => Answer::Whole,
            };
            waiting.nodes.insert(row.int(1)?, answer);
            waiting.case = row.opt_case(4)?;
            waiting.started = row.opt_moment(5)?;
            waiting.node_count = row.int(6)?;
            Ok(())
        })?;
        let awaited = |run: &i64| expected.runs.contains_key(&RunId::from_number(run.cast_unsigned()));
        let others: Vec<i64> = runs.iter().copied().filter(|run| !awaited(run)).collect();
        tx.keyed(READING_RUNS, "SELECT run, node FROM run_node WHERE run IN {keys}", &others, |row| {
            expected.over.insert((row.run(0)?, row.int(1)?));
            Ok(())
        })?;
        Ok(expected)
    }

    pub(super) fn admit(&mut self, tx: &Tx<'_>, result: &JudgedResult) -> Accepted {
        let Some(node) = tx.names.node_number(&result.node) else { return Accepted::UnknownRun };
        if self.over.contains(&(result.run, node)) {
            return Accepted::Duplicate;
        }
        let Some(waiting) = self.runs.get_mut(&result.run) else { return Accepted::UnknownRun };
        let Some(answer) = waiting.nodes.get_mut(&node) else { return Accepted::UnknownRun };
        if waiting.over || *answer != Answer::None {
            return Accepted::Duplicate;
        }
        *answer = if result.complete { Answer::Whole } else { Answer::Partial };
        if waiting.nodes.values().all(|answer| *answer == Answer::Whole) {
            waiting.over = true;
            // By the node's clock, which may say anything.
            let took = result.outcomes.iter().map(|outcome| outcome.took).sum::<Span>().min(Span::days(1));
            let began = waiting.started.unwrap_or_else(|| result.received.minus(took));
            self.ended.insert(result.run, Spell { began, ended: result.received, nodes: waiting.node_count });
        }
        Accepted::Kept
    }

    /// Those that were admitted, with what is to be known when their documents are kept.
    pub(super) fn arrivals<'a>(
        &self,
        tx: &Tx<'_>,
        all: impl Iterator<Item = ((&'a JudgedResult, &'a Option<Packed>), &'a Accepted)>,
    ) -> Vec<Arrival<'a>> {
        all.filter(|(_, accepted)| **accepted == Accepted::Kept)
            .filter_map(|((result, alone), _)| {
                let case = self.runs.get(&result.run).and_then(|waiting| waiting.case);
                Some(Arrival { node: tx.names.node_number(&result.node)?, result, alone: alone.as_ref(), case })
            })
            .collect()
    }
}

fn keep(tx: &mut Tx<'_>, expected: &Expected, asked: &Asked, kept: &[Entry<'_>]) -> Result<()> {
    if kept.is_empty() {
        return Ok(());
    }
    let before = &ledger::before(tx, &asked.nodes(tx))?;
    let entries = entries(tx, kept)?;
    ledger::post(tx, before, &entries)?;
    // Only proofs belong to a case.
    let proofs: BTreeSet<RunId> =
        expected.runs.iter().filter(|(_, waiting)| waiting.case.is_some()).map(|(run, _)| *run).collect();
    show_findings(tx, before, kept, &proofs)?;
    strike_off(tx, expected, kept)?;
    let spells: Vec<Spell> = expected.ended.values().copied().collect();
    spent::add(tx, &spells)?;
    let spoke: Vec<Spoke<'_>> = kept
        .iter()
        .map(|Entry { node, result, .. }| Spoke { node: *node, hardware: &result.hardware, at: result.received })
        .collect();
    nodes::note_hardware(tx, |node| before.hardware(node), &spoke)?;
    // A result is proof that the job started.
    let spoken_for: BTreeSet<i64> = kept.iter().map(|entry| entry.node).collect();
    let backing_off: Vec<i64> = before.backing_off().into_iter().filter(|node| spoken_for.contains(node)).collect();
    nodes::clear_back_off(tx, &backing_off)
}

fn entries(tx: &mut Tx<'_>, kept: &[Entry<'_>]) -> Result<Vec<Posting>> {
    let mut entries = Vec::with_capacity(kept.len());
    for Entry { node, result, bundle } in kept {
        let first = entries.len();
        for outcome in &result.outcomes {
            let test = tx.test_id(&outcome.test)?;
            // One row for a test of a run, whatever the document repeats.
            if entries[first..].iter().any(|entry: &Posting| entry.test == test) {
                continue;
            }
            let kind = OutcomeKind::new(outcome.verdict, worst(outcome), outcome.reason.clone());
            let (run, at, took) = (result.run, outcome.at, outcome.took);
            entries.push(Posting { node: *node, run, test, kind, at, took, bundle: Some(*bundle) });
        }
    }
    Ok(entries)
}

fn worst(outcome: &Outcome) -> Option<Severity> {
    let failing = outcome.findings.iter().filter(|finding| finding.verdict == Verdict::Fail);
    failing.map(|finding| finding.severity).max()
}

/// Only a pass or a fail says anything about what is open, and only if no newer one has spoken.
fn show_findings(tx: &mut Tx<'_>, before: &Before, kept: &[Entry<'_>], proofs: &BTreeSet<RunId>) -> Result<()> {
    let mut open = Open::load(tx, &before.with_findings())?;
    let mut changes = Changes::default();
    let mut newest: HashMap<(i64, i64), Timestamp> = HashMap::new();
    let mut in_order: Vec<(i64, RunId, &Outcome, &Hardware)> = kept
        .iter()
        .flat_map(|Entry { node, result, .. }| {
            result.outcomes.iter().map(|outcome| (*node, result.run, outcome, &result.hardware))
        })
        .filter(|(_, _, outcome, _)| outcome.verdict.is_conclusive())
        .collect();
    in_order.sort_by_key(|(_, run, outcome, _)| (outcome.at, *run));
    for (node, run, outcome, hardware) in in_order {
        let check = tx.test_id(&outcome.test)?;
        let known = before.standings.get(&(node, check)).and_then(|standing| standing.sure).map(|(_, at)| at);
        let known = newest.get(&(node, check)).copied().max(known);
        if known.is_some_and(|known| outcome.at < known) || !before.counts(node, outcome.at) {
            continue;
        }
        newest.insert((node, check), outcome.at);
        let (findings, boot) = (&*outcome.findings, hardware.boot_id.as_deref());
        let shown = Shown { node, check, run: Some(run), at: outcome.at, findings, proof: proofs.contains(&run), boot };
        open.show(&shown, &mut changes);
    }
    changes.write(tx)?;
    let at = kept.first().map_or(Timestamp::MIN, |entry| entry.result.received);
    audit::append(tx, at, None, &changes.lines)
}

/// A run that has all its answers is awaited no more. A node that has answered before the others of its run waits for
/// them before it is free for another run.
fn strike_off(tx: &mut Tx<'_>, expected: &Expected, kept: &[Entry<'_>]) -> Result<()> {
    let operation = "noting answers";
    let over: Vec<Val<'_>> = expected.ended.keys().map(|run| (*run).into()).collect();
    let sqlite = "DELETE FROM awaited WHERE run = $1";
    let postgres = "DELETE FROM awaited WHERE run = ANY ($1::int8[])";
    tx.each(operation, (sqlite, postgres), &[Kind::Int], &over)?;
    let mut rows: Vec<Val<'_>> = Vec::new();
    for Entry { node, result, .. } in kept.iter().filter(|entry| !expected.ended.contains_key(&entry.result.run)) {
        rows.extend_from_slice(vals![result.run, *node, result.received, result.complete]);
    }
    let sqlite = "UPDATE awaited SET answered = $3, whole = $4 WHERE run = $1 AND node = $2";
    let postgres = "UPDATE awaited w SET answered = a.at, whole = a.whole \
                    FROM UNNEST($1::int8[], $2::int8[], $3::int8[], $4::int8[]) AS a (run, node, at, whole) \
                    WHERE w.run = a.run AND w.node = a.node";
    tx.each(operation, (sqlite, postgres), &[Kind::Int; 4], &rows)
}

fn count_kept(tx: &mut Tx<'_>, kept: usize, ended: usize) -> Result<()> {
    let (kept, ended) = (kept as u64, ended as u64);
    audit::count(tx, &[(Counter::Kept, kept), (Counter::Changes, kept), (Counter::RunsEnded, ended)])
}

pub(super) fn count_turned_away(tx: &mut Tx<'_>, accepted: &[Accepted]) -> Result<()> {
    let of = |kind: Accepted| accepted.iter().filter(|one| **one == kind).count() as u64;
    audit::count(tx, &[(Counter::Duplicate, of(Accepted::Duplicate)), (Counter::UnknownRun, of(Accepted::UnknownRun))])
}
