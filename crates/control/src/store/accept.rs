//! The door for results: each run's result from each node once, a whole batch in one transaction.
//!
//! Everything a batch needs is read in a handful of statements, decided in memory, and written in another handful, so
//! that PostgreSQL sees a dozen messages per batch and SQLite touches each page once.

use std::collections::{BTreeMap, BTreeSet, HashMap};

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
    db::{Access, Kind, Tx, Val, vals},
    error::Result,
    evidence::{self, Kept, Packed},
    findings::{Changes, Open, Shown},
    lease::Lease,
    ledger::{self, Before, Posting},
    names::OutcomeKind,
    nodes::{self, Spoke},
    records::{Accepted, JudgedResult},
    runs::{COMPLETED, ENDED},
};

impl Store {
    /// Keeps results. When this returns, they are durable; a result that was here before changes nothing.
    pub fn accept(&self, lease: &Lease, results: &[JudgedResult]) -> Result<Vec<Accepted>> {
        let packed: Result<Vec<Packed>> = results.iter().map(|result| Packed::new(&result.evidence)).collect();
        let packed = packed?;
        let batch: Vec<(&JudgedResult, &Packed)> = results.iter().zip(&packed).collect();
        self.accept_packed(Access::Write, lease, &batch)
    }

    /// As [`Self::accept`], where somebody else has done the compressing.
    pub(super) fn accept_packed(
        &self,
        access: Access,
        lease: &Lease,
        batch: &[(&JudgedResult, &Packed)],
    ) -> Result<Vec<Accepted>> {
        self.write_as(access, lease, |tx| {
            let mut expected = Expected::load(tx, batch)?;
            let accepted: Vec<Accepted> = batch.iter().map(|(result, _)| expected.admit(tx, result)).collect();
            let kept: Vec<(i64, &JudgedResult, &Packed)> = batch
                .iter()
                .zip(&accepted)
                .filter(|(_, accepted)| **accepted == Accepted::Kept)
                .filter_map(|((result, packed), _)| Some((tx.names.node_number(&result.node)?, *result, *packed)))
                .collect();
            if !kept.is_empty() {
                keep(tx, &expected, &kept)?;
            }
            count(tx, &accepted, expected.ended.len())?;
            Ok(accepted)
        })
    }
}

/// What the runs of a batch wait for.
#[derive(Debug, Default)]
struct Expected {
    runs: HashMap<RunId, Waiting>,
    /// Runs that the batch completes, with when they began and ended.
    ended: BTreeMap<RunId, (Timestamp, Timestamp)>,
}

#[derive(Debug, Default)]
struct Waiting {
    over: bool,
    case: Option<CaseId>,
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
    fn load(tx: &mut Tx<'_>, batch: &[(&JudgedResult, &Packed)]) -> Result<Self> {
        let runs: BTreeSet<i64> = batch.iter().map(|(result, _)| result.run.number().cast_signed()).collect();
        let keys: Vec<i64> = runs.into_iter().collect();
        let mut expected = Self::default();
        let sql = "SELECT r.id, r.state, r.case_id, n.node, n.answered, n.whole \
                   FROM run r JOIN run_node n ON n.run = r.id WHERE r.id IN {keys}";
        tx.keyed("reading runs", sql, &keys, |row| {
            let waiting = expected.runs.entry(row.run(0)?).or_default();
            waiting.over = row.text(1)? == ENDED;
            waiting.case = row.opt_case(2)?;
            let answer = match (row.opt_int(4)?, row.int(5)?) {
                (None, _) => Answer::None,
                (Some(_), 0) => Answer::Partial,
                (Some(_), _) => Answer::Whole,
            };
            waiting.nodes.insert(row.int(3)?, answer);
            Ok(())
        })?;
        Ok(expected)
    }

    fn admit(&mut self, tx: &Tx<'_>, result: &JudgedResult) -> Accepted {
        let Some(waiting) = self.runs.get_mut(&result.run) else { return Accepted::UnknownRun };
        let number = tx.names.node_number(&result.node);
        let Some(answer) = number.and_then(|node| waiting.nodes.get_mut(&node)) else { return Accepted::UnknownRun };
        if waiting.over || *answer != Answer::None {
            return Accepted::Duplicate;
        }
        *answer = if result.complete { Answer::Whole } else { Answer::Partial };
        if waiting.nodes.values().all(|answer| *answer == Answer::Whole) {
            waiting.over = true;
            let took: Span = result.outcomes.iter().map(|outcome| outcome.took).sum();
            self.ended.insert(result.run, (result.received.minus(took), result.received));
        }
        Accepted::Kept
    }
}

fn keep(tx: &mut Tx<'_>, expected: &Expected, kept: &[(i64, &JudgedResult, &Packed)]) -> Result<()> {
    let nodes: Vec<i64> = kept.iter().map(|(node, ..)| *node).collect::<BTreeSet<i64>>().into_iter().collect();
    let before = ledger::before(tx, &nodes)?;
    let entries = entries(tx, kept)?;
    ledger::post(tx, &before, &entries)?;
    // Only proofs belong to a case.
    let proofs: BTreeSet<RunId> =
        expected.runs.iter().filter(|(_, waiting)| waiting.case.is_some()).map(|(run, _)| *run).collect();
    show_findings(tx, &before, kept, &proofs)?;
    let evidence: Vec<Kept<'_>> = kept
        .iter()
        .map(|(node, result, packed)| {
            let case = expected.runs.get(&result.run).and_then(|waiting| waiting.case);
            Kept { node: *node, result, packed, case }
        })
        .collect();
    evidence::keep(tx, &evidence)?;
    note_answers(tx, expected, kept)?;
    end_runs(tx, &expected.ended)?;
    let spoke: Vec<Spoke<'_>> = kept
        .iter()
        .map(|(node, result, _)| Spoke { node: *node, hardware: &result.hardware, at: result.received })
        .collect();
    nodes::note_hardware(tx, |node| before.hardware(node), &spoke)?;
    // A result is proof that the job started.
    nodes::clear_back_off(tx, &before.backing_off())
}

fn entries(tx: &mut Tx<'_>, kept: &[(i64, &JudgedResult, &Packed)]) -> Result<Vec<Posting>> {
    let mut entries = Vec::with_capacity(kept.len());
    for (node, result, _) in kept {
        let first = entries.len();
        for outcome in &result.outcomes {
            let test = tx.test_id(&outcome.test)?;
            // One row for a test of a run, whatever the document repeats.
            if entries[first..].iter().any(|entry: &Posting| entry.test == test) {
                continue;
            }
            let kind = OutcomeKind::new(outcome.verdict, worst(outcome), outcome.reason.clone());
            entries.push(Posting { node: *node, run: result.run, test, kind, at: outcome.at, took: outcome.took });
        }
    }
    Ok(entries)
}

fn worst(outcome: &Outcome) -> Option<Severity> {
    let failing = outcome.findings.iter().filter(|finding| finding.verdict == Verdict::Fail);
    failing.map(|finding| finding.severity).max()
}

/// Only a pass or a fail says anything about what is open, and only if no newer one has spoken.
fn show_findings(
    tx: &mut Tx<'_>,
    before: &Before,
    kept: &[(i64, &JudgedResult, &Packed)],
    proofs: &BTreeSet<RunId>,
) -> Result<()> {
    let mut open = Open::load(tx, &before.with_findings())?;
    let mut changes = Changes::default();
    let mut newest: HashMap<(i64, i64), Timestamp> = HashMap::new();
    let mut in_order: Vec<(i64, RunId, &Outcome, &Hardware)> = kept
        .iter()
        .flat_map(|(node, result, _)| {
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
    let at = kept.first().map_or(Timestamp::MIN, |(_, result, _)| result.received);
    audit::append(tx, at, None, &changes.lines)
}

/// A node that has answered waits for the others of its run, if there are any, before it is free for another run.
fn note_answers(tx: &mut Tx<'_>, expected: &Expected, kept: &[(i64, &JudgedResult, &Packed)]) -> Result<()> {
    let operation = "noting answers";
    let mut rows: Vec<Val<'_>> = Vec::with_capacity(kept.len() * 5);
    let mut freed: Vec<Val<'_>> = Vec::new();
    for (node, result, _) in kept {
        let over = expected.ended.contains_key(&result.run);
        rows.extend_from_slice(vals![result.run, *node, result.received, result.complete, !over]);
        let nodes = expected.runs.get(&result.run).map_or(0, |waiting| waiting.nodes.len());
        if over && nodes > 1 {
            freed.push(result.run.into());
        }
    }
    let sqlite = "UPDATE run_node SET answered = $3, whole = $4, active = $5 WHERE run = $1 AND node = $2";
    let postgres = "UPDATE run_node r SET answered = a.at, whole = a.whole, active = a.active \
                    FROM UNNEST($1::int8[], $2::int8[], $3::int8[], $4::int8[], $5::int8[]) \
                    AS a (run, node, at, whole, active) WHERE r.run = a.run AND r.node = a.node";
    tx.each(operation, (sqlite, postgres), &[Kind::Int; 5], &rows)?;
    let sqlite = "UPDATE run_node SET active = 0 WHERE run = $1";
    let postgres = "UPDATE run_node SET active = 0 WHERE run = ANY ($1::int8[])";
    tx.each(operation, (sqlite, postgres), &[Kind::Int], &freed).map(drop)
}

fn end_runs(tx: &mut Tx<'_>, ended: &BTreeMap<RunId, (Timestamp, Timestamp)>) -> Result<()> {
    let mut rows: Vec<Val<'_>> = Vec::with_capacity(ended.len() * 3);
    for (run, (began, at)) in ended {
        rows.extend_from_slice(vals![*run, *began, *at]);
    }
    let set = format!("state = '{ENDED}', ending = '{COMPLETED}', secret = NULL");
    let sqlite = format!("UPDATE run SET {set}, started = COALESCE(started, $2), ended = $3 WHERE id = $1");
    let postgres = format!(
        "UPDATE run SET {set}, started = COALESCE(started, e.began), ended = e.at \
         FROM UNNEST($1::int8[], $2::int8[], $3::int8[]) AS e (run, began, at) WHERE run.id = e.run"
    );
    tx.each("completing runs", (&sqlite, &postgres), &[Kind::Int; 3], &rows).map(drop)
}

fn count(tx: &mut Tx<'_>, accepted: &[Accepted], ended: usize) -> Result<()> {
    let of = |kind: Accepted| accepted.iter().filter(|one| **one == kind).count() as u64;
    let kept = of(Accepted::Kept);
    audit::count(
        tx,
        &[
            (Counter::Kept, kept),
            (Counter::Changes, kept),
            (Counter::Duplicate, of(Accepted::Duplicate)),
            (Counter::UnknownRun, of(Accepted::UnknownRun)),
            (Counter::RunsEnded, ended as u64),
        ],
    )
}
