//! Accepts results: exactly one per run and node, a whole batch in one transaction.
//!
//! Everything a batch needs is read in two statements, decided in memory, and written in a handful, so that a batch
//! takes two round trips to PostgreSQL and SQLite touches each page once. A result writes its history rows, its
//! document and the updated `latest_result` row, and clears its entry in `pending_results`. The run itself is not
//! written: it has ended when it has no rows in `pending_results`.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use doctor_core::{
    finding::{Severity, Verdict},
    ids::{CaseId, RunId},
    node::Hardware,
    run::Outcome,
    time::{Span, Timestamp},
};

use super::{
    Store,
    audit::{self, Counter},
    bundle::{self, Arrival},
    compression::Packed,
    db::{Access, Kind, Tx, Val, vals},
    error::Result,
    findings::{Changes, Open, Shown},
    lease::Lease,
    ledger::{self, Before, Posting},
    names::OutcomeKind,
    nodes::{self, Spoke},
    records::{Accepted, JudgedResult},
    spent::{self, Spell},
};

impl Store {
    /// Stores results. They are durable when this returns. A result that is already stored changes nothing.
    pub fn accept(&self, lease: &Lease, results: &[JudgedResult]) -> Result<Vec<Accepted>> {
        let alone: Vec<Option<Packed>> = results.iter().map(bundle::pack_alone).collect::<Result<_>>()?;
        let asked = Asked::of(results.iter().collect());
        self.write_foreseeing(
            Access::Write,
            lease,
            |tx| asked.foresee(tx),
            |tx| {
                let mut expected = Expected::load(tx, &asked.runs)?;
                let admitted: Vec<_> = results.iter().map(|result| expected.admit(tx, result)).collect();
                let arrivals: Vec<Arrival<'_>> = results
                    .iter()
                    .zip(&alone)
                    .zip(&admitted)
                    .filter_map(|((result, alone), admitted)| {
                        let &Admitted { node, case, .. } = admitted.as_ref().ok()?;
                        Some(Arrival { node, result, alone: alone.as_ref(), case })
                    })
                    .collect();
                let bundles = bundle::keep(tx, &arrivals)?;
                let kept: Vec<Entry<'_>> = arrivals
                    .iter()
                    .zip(bundles)
                    .map(|(arrival, bundle)| Entry { node: arrival.node, result: arrival.result, bundle })
                    .collect();
                keep(tx, &expected.conclusions, &asked, &kept)?;
                count_turned_away(tx, &admitted)?;
                Ok(admitted.into_iter().map(|one| one.map_or_else(Accepted::from, |_| Accepted::Kept)).collect())
            },
        )
    }
}

/// An admitted result whose document is in a bundle.
#[derive(Debug)]
pub(super) struct Admission {
    pub(super) result: JudgedResult,
    pub(super) bundle: i64,
    /// The admission decision; `None` if it is no longer known, because another process made it.
    pub(super) admitted: Option<Admitted>,
}

/// Enters admitted results in history. A result that has been entered since changes nothing.
pub(super) fn enter(tx: &mut Tx<'_>, asked: &Asked<'_>, results: &[&Admission]) -> Result<()> {
    let mut expected = Expected::load(tx, &asked.runs)?;
    let mut kept = Vec::with_capacity(results.len());
    for Admission { result, bundle, admitted } in results {
        let admitted = match *admitted {
            Some(admitted) if admitted.is_sole => {
                expected.conclusions.add(result.run, &admitted);
                Ok(admitted)
            }
            _ => expected.admit(tx, result),
        };
        if let Ok(Admitted { node, .. }) = admitted {
            kept.push(Entry { node, result, bundle: *bundle });
        }
    }
    keep(tx, &expected.conclusions, asked, &kept)
}

/// A result that is not in history yet.
#[derive(Debug)]
struct Entry<'a> {
    node: i64,
    result: &'a JudgedResult,
    bundle: i64,
}

/// The rows that a batch reads from the database.
#[derive(Debug)]
pub(super) struct Asked<'a> {
    pub(super) runs: Vec<i64>,
    results: Vec<&'a JudgedResult>,
}

impl<'a> Asked<'a> {
    pub(super) fn of(results: Vec<&'a JudgedResult>) -> Self {
        let runs = sorted(results.iter().map(|result| number_of(result.run)));
        Self { runs, results }
    }

    /// For [`enter`], which need not read `pending_results` for runs of one node.
    pub(super) fn to_enter(admissions: &[&'a Admission]) -> Self {
        let sole = |one: &Admission| one.admitted.is_some_and(|admitted| admitted.is_sole);
        let runs = sorted(admissions.iter().filter(|one| !sole(one)).map(|one| number_of(one.result.run)));
        Self { runs, results: admissions.iter().map(|one| &one.result).collect() }
    }

    /// The known nodes that the batch reports on.
    fn nodes(&self, tx: &Tx<'_>) -> Vec<i64> {
        sorted(self.results.iter().filter_map(|result| tx.names.node_number(&result.node)))
    }

    /// Announces all queries of this batch.
    pub(super) fn foresee(&self, tx: &mut Tx<'_>) {
        self.foresee_runs(tx);
        ledger::foresee(tx, &self.nodes(tx));
    }

    pub(super) fn foresee_runs(&self, tx: &mut Tx<'_>) {
        tx.foresee(READING_RUNS, AWAITED, &self.runs);
    }
}

/// Sorts and removes duplicates.
fn sorted(numbers: impl Iterator<Item = i64>) -> Vec<i64> {
    let mut numbers: Vec<i64> = numbers.collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

fn number_of(run: RunId) -> i64 {
    run.number().cast_signed()
}

const READING_RUNS: &str = "reading runs";
const AWAITED: &str = "SELECT a.run, a.node, a.received_at, a.complete, r.case_id, r.started, r.node_count \
                       FROM pending_results a JOIN run r ON r.id = a.run WHERE a.run IN {keys}";

/// The pending results of the runs in a batch.
#[derive(Debug, Default)]
pub(super) struct Expected {
    runs: HashMap<RunId, Waiting>,
    conclusions: Conclusions,
    /// Nodes of runs that ended before this batch.
    over: HashSet<(RunId, i64)>,
}

/// The effect of a batch's results on their runs.
#[derive(Debug, Default)]
struct Conclusions {
    /// Runs that the batch completes, with their time span.
    ended: BTreeMap<RunId, Spell>,
    /// Runs that belong to a case: requalification runs only.
    proofs: BTreeSet<RunId>,
}

impl Conclusions {
    fn add(&mut self, run: RunId, admitted: &Admitted) {
        self.ended.extend(admitted.ended.map(|spell| (run, spell)));
        self.proofs.extend(admitted.case.map(|_| run));
    }
}

/// A new result, for a run that is waiting for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Admitted {
    pub(super) node: i64,
    /// Evidence of a case's run is stored with the case.
    pub(super) case: Option<CaseId>,
    /// The run has one node, so only this result can decide how it ends.
    is_sole: bool,
    ended: Option<Spell>,
}

/// Why a result is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TurnedAway {
    Duplicate,
    UnknownRun,
}

impl From<TurnedAway> for Accepted {
    fn from(why: TurnedAway) -> Self {
        match why {
            TurnedAway::Duplicate => Self::Duplicate,
            TurnedAway::UnknownRun => Self::UnknownRun,
        }
    }
}

#[derive(Debug, Default)]
struct Waiting {
    over: bool,
    case: Option<CaseId>,
    started: Option<Timestamp>,
    node_count: i64,
    /// By node: whether it has answered, and whether for all tests.
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

    pub(super) fn admit(&mut self, tx: &Tx<'_>, result: &JudgedResult) -> std::result::Result<Admitted, TurnedAway> {
        let node = tx.names.node_number(&result.node).ok_or(TurnedAway::UnknownRun)?;
        if self.over.contains(&(result.run, node)) {
            return Err(TurnedAway::Duplicate);
        }
        let waiting = self.runs.get_mut(&result.run).ok_or(TurnedAway::UnknownRun)?;
        let answer = waiting.nodes.get_mut(&node).ok_or(TurnedAway::UnknownRun)?;
        if waiting.over || *answer != Answer::None {
            return Err(TurnedAway::Duplicate);
        }
        *answer = if result.complete { Answer::Whole } else { Answer::Partial };
        waiting.over = waiting.nodes.values().all(|answer| *answer == Answer::Whole);
        let ended = waiting.over.then(|| waiting.spell(result));
        let admitted = Admitted { node, case: waiting.case, is_sole: waiting.nodes.len() == 1, ended };
        self.conclusions.add(result.run, &admitted);
        Ok(admitted)
    }
}

impl Waiting {
    /// Returns the time span of a run that ends with this result.
    fn spell(&self, last: &JudgedResult) -> Spell {
        // Measured by the node's clock, which may be wrong; hence the cap of one day.
        let took = last.outcomes.iter().map(|outcome| outcome.took).sum::<Span>().min(Span::days(1));
        let began = self.started.unwrap_or_else(|| last.received.minus(took));
        Spell { began, ended: last.received, nodes: self.node_count }
    }
}

fn keep(tx: &mut Tx<'_>, conclusions: &Conclusions, asked: &Asked<'_>, kept: &[Entry<'_>]) -> Result<()> {
    if kept.is_empty() {
        return Ok(());
    }
    let before = &ledger::before(tx, &asked.nodes(tx))?;
    let entries = entries(tx, kept)?;
    ledger::post(tx, before, &entries)?;
    show_findings(tx, before, kept, &conclusions.proofs)?;
    strike_off(tx, &conclusions.ended, kept)?;
    let spells: Vec<Spell> = conclusions.ended.values().copied().collect();
    spent::add(tx, &spells)?;
    let spoke: Vec<Spoke<'_>> = kept
        .iter()
        .map(|Entry { node, result, .. }| Spoke { node: *node, hardware: &result.hardware, at: result.received })
        .collect();
    nodes::note_hardware(tx, |node| before.hardware(node), &spoke)?;
    // A result proves that the job started.
    let spoken_for: BTreeSet<i64> = kept.iter().map(|entry| entry.node).collect();
    let backing_off: Vec<i64> = before.backing_off().into_iter().filter(|node| spoken_for.contains(node)).collect();
    nodes::clear_back_off(tx, &backing_off)?;
    let (kept, ended) = (kept.len() as u64, conclusions.ended.len() as u64);
    audit::count(tx, &[(Counter::Kept, kept), (Counter::Changes, kept), (Counter::RunsEnded, ended)])
}

fn entries(tx: &mut Tx<'_>, kept: &[Entry<'_>]) -> Result<Vec<Posting>> {
    let mut entries = Vec::with_capacity(kept.len());
    for Entry { node, result, bundle } in kept {
        let first = entries.len();
        for outcome in &result.outcomes {
            let test = tx.test_id(&outcome.test)?;
            // One row per test of a run, even if the document repeats a test.
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

/// Updates open findings. Only a pass or a fail does so, and only if no newer result exists.
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

/// Removes completed runs from `pending_results`. A node that answers before the other nodes of its run stays occupied
/// until the run ends.
fn strike_off(tx: &mut Tx<'_>, ended: &BTreeMap<RunId, Spell>, kept: &[Entry<'_>]) -> Result<()> {
    let operation = "recording answers";
    let over: Vec<Val<'_>> = ended.keys().map(|run| (*run).into()).collect();
    let sqlite = "DELETE FROM pending_results WHERE run = $1";
    let postgres = "DELETE FROM pending_results WHERE run = ANY ($1::int8[])";
    tx.each(operation, (sqlite, postgres), &[Kind::Int], &over)?;
    let mut rows: Vec<Val<'_>> = Vec::new();
    for Entry { node, result, .. } in kept.iter().filter(|entry| !ended.contains_key(&entry.result.run)) {
        rows.extend_from_slice(vals![result.run, *node, result.received, result.complete]);
    }
    let sqlite = "UPDATE pending_results SET received_at = $3, complete = $4 WHERE run = $1 AND node = $2";
    let postgres = "UPDATE pending_results w SET received_at = a.received_at, complete = a.complete \
                    FROM UNNEST($1::int8[], $2::int8[], $3::int8[], $4::int8[]) \
                    AS a (run, node, received_at, complete) WHERE w.run = a.run AND w.node = a.node";
    tx.each(operation, (sqlite, postgres), &[Kind::Int; 4], &rows)
}

pub(super) fn count_turned_away(tx: &mut Tx<'_>, admitted: &[std::result::Result<Admitted, TurnedAway>]) -> Result<()> {
    let of = |kind| admitted.iter().filter(|one| one.as_ref().err() == Some(&kind)).count() as u64;
    let (again, unknown) = (of(TurnedAway::Duplicate), of(TurnedAway::UnknownRun));
    audit::count(tx, &[(Counter::Duplicate, again), (Counter::UnknownRun, unknown)])
}
