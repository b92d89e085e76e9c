//! Accepts results: exactly one per run and node, a whole batch in one transaction.
//!
//! Everything a batch needs is read in two statements, decided in memory, and written in a handful, so that a batch
//! takes two round trips to PostgreSQL and SQLite touches each page once. A result writes its history rows, its
//! document and the updated `latest_result` row, and clears its entry in `pending_results`. The run itself is not
//! written: it has ended when it has no rows in `pending_results`.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use doctor_core::{
    classify::DISTURBED_REPEATEDLY,
    finding::{Finding, Severity, Verdict},
    ids::{CaseId, RunId},
    node::Hardware,
    run::Outcome,
    time::{Span, Timestamp},
};

use super::{
    Store, agent_findings,
    audit::{self, Counter},
    compression::Packed,
    db::{Access, ColumnType, SqlValue, Tx, vals},
    error::Result,
    evidence_pack::{self, IncomingResult},
    fencing::Lease,
    findings::{CheckFindings, FindingChanges, OpenFindings},
    id_cache::OutcomeKind,
    ingest_queue,
    messages::QueuedMessage,
    node_hours::{self, RunSpan},
    nodes::{self, HardwareReport},
    records::{Accepted, AgentFindings, ClassifiedResult},
    result_writer::{self, NewHistoryRow, StateBefore},
};

/// Classified messages of the ingest queue that are entered together.
#[derive(Debug, Default)]
pub struct Entering<'a> {
    pub results: &'a [ClassifiedResult],
    /// Several of one node in the order in which they arrived.
    pub reports: &'a [AgentFindings],
    /// The messages that these are made from, and those that were rejected: they leave the queue.
    pub messages: &'a [&'a QueuedMessage],
}

/// What became of them, in order.
#[derive(Debug, Default)]
pub struct Entered {
    pub results: Vec<Accepted>,
    pub reports: Vec<Accepted>,
}

impl Store {
    /// Enters messages of the ingest queue in history, in the transaction that removes them from it.
    pub fn enter(&self, lease: &Lease, entering: &Entering<'_>) -> Result<Entered> {
        let &Entering { results, reports, messages } = entering;
        if messages.is_empty() {
            return Ok(Entered::default());
        }
        let standalone: Vec<Option<Packed>> =
            results.iter().map(evidence_pack::compress_standalone).collect::<Result<_>>()?;
        let batch = BatchKeys::new(results.iter().collect());
        let ids: Vec<i64> = messages.iter().map(|message| message.id).collect();
        let entered = self.write_with_prefetch(
            Access::EnterQueued,
            lease,
            |tx| batch.prefetch(tx),
            |tx| {
                let results = enter_results(tx, &batch, results, &standalone)?;
                let reports = agent_findings::enter_reports(tx, reports)?;
                ingest_queue::remove(tx, &ids)?;
                Ok(Entered { results, reports })
            },
        )?;
        self.forget_messages(messages);
        Ok(entered)
    }

    /// Stores results. They are durable when this returns. A result that is already stored changes nothing.
    pub fn accept(&self, lease: &Lease, results: &[ClassifiedResult]) -> Result<Vec<Accepted>> {
        let standalone: Vec<Option<Packed>> =
            results.iter().map(evidence_pack::compress_standalone).collect::<Result<_>>()?;
        let batch = BatchKeys::new(results.iter().collect());
        self.write_with_prefetch(
            Access::Write,
            lease,
            |tx| batch.prefetch(tx),
            |tx| enter_results(tx, &batch, results, &standalone),
        )
    }
}

fn enter_results(
    tx: &mut Tx<'_>,
    batch: &BatchKeys<'_>,
    results: &[ClassifiedResult],
    standalone: &[Option<Packed>],
) -> Result<Vec<Accepted>> {
    if results.is_empty() {
        return Ok(Vec::new());
    }
    let mut expected = PendingRuns::load(tx, &batch.runs)?;
    let admitted: Vec<_> = results.iter().map(|result| expected.admit(tx, result)).collect();
    let arrivals: Vec<IncomingResult<'_>> = results
        .iter()
        .zip(standalone)
        .zip(&admitted)
        .filter_map(|((result, standalone), admitted)| {
            let &AdmissionInfo { node, case, .. } = admitted.as_ref().ok()?;
            Some(IncomingResult { node, result, standalone: standalone.as_ref(), case })
        })
        .collect();
    let bundles = evidence_pack::store_results(tx, &arrivals)?;
    let stored: Vec<PendingHistoryEntry<'_>> = arrivals
        .iter()
        .zip(bundles)
        .map(|(arrival, bundle)| PendingHistoryEntry { node: arrival.node, result: arrival.result, bundle })
        .collect();
    write_results(tx, &expected.conclusions, batch, &stored)?;
    count_rejected_results(tx, &admitted)?;
    Ok(admitted.into_iter().map(|one| one.map_or_else(Accepted::from, |_| Accepted::Stored)).collect())
}

/// A result that is not in history yet.
#[derive(Debug)]
struct PendingHistoryEntry<'a> {
    node: i64,
    result: &'a ClassifiedResult,
    bundle: i64,
}

/// The rows that a batch reads from the database.
#[derive(Debug)]
struct BatchKeys<'a> {
    runs: Vec<i64>,
    results: Vec<&'a ClassifiedResult>,
}

impl<'a> BatchKeys<'a> {
    fn new(results: Vec<&'a ClassifiedResult>) -> Self {
        let runs = sorted(results.iter().map(|result| number_of(result.run)));
        Self { runs, results }
    }

    /// The known nodes that the batch reports on.
    fn nodes(&self, tx: &Tx<'_>) -> Vec<i64> {
        sorted(self.results.iter().filter_map(|result| tx.ids.node_id(&result.node)))
    }

    /// Announces all queries of this batch.
    fn prefetch(&self, tx: &mut Tx<'_>) {
        tx.prefetch(READING_RUNS, PENDING_RESULTS_SQL, &self.runs);
        result_writer::prefetch(tx, &self.nodes(tx));
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
const PENDING_RESULTS_SQL: &str = "SELECT a.run, a.node, a.received_at, a.complete, r.case_id, r.started, r.node_count \
                       FROM pending_results a JOIN run r ON r.id = a.run WHERE a.run IN {keys}";

/// The pending results of the runs in a batch.
#[derive(Debug, Default)]
struct PendingRuns {
    runs: HashMap<RunId, PendingRun>,
    conclusions: RunConclusions,
    /// Nodes of runs that ended before this batch.
    ended_nodes: HashSet<(RunId, i64)>,
}

/// The effect of a batch's results on their runs.
#[derive(Debug, Default)]
struct RunConclusions {
    /// Runs that the batch completes, with their time span.
    ended: BTreeMap<RunId, RunSpan>,
    /// Runs that belong to a case: requalification runs only.
    requalification_runs: BTreeSet<RunId>,
}

impl RunConclusions {
    fn add(&mut self, run: RunId, admitted: &AdmissionInfo) {
        self.ended.extend(admitted.ended.map(|spell| (run, spell)));
        self.requalification_runs.extend(admitted.case.map(|_| run));
    }
}

/// A new result, for a run that is waiting for it.
#[derive(Debug, Clone, Copy)]
struct AdmissionInfo {
    node: i64,
    /// Evidence of a case's run is stored with the case.
    case: Option<CaseId>,
    ended: Option<RunSpan>,
}

/// Why a result is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RejectReason {
    Duplicate,
    UnknownRun,
}

impl From<RejectReason> for Accepted {
    fn from(why: RejectReason) -> Self {
        match why {
            RejectReason::Duplicate => Self::Duplicate,
            RejectReason::UnknownRun => Self::UnknownRun,
        }
    }
}

#[derive(Debug, Default)]
struct PendingRun {
    ended: bool,
    case: Option<CaseId>,
    started: Option<Timestamp>,
    node_count: i64,
    /// By node: whether it has answered, and whether for all tests.
    nodes: HashMap<i64, NodeResult>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodeResult {
    Missing,
    Partial,
    Complete,
}

impl PendingRuns {
    fn load(tx: &mut Tx<'_>, runs: &[i64]) -> Result<Self> {
        let mut expected = Self::default();
        tx.rows_by_key(READING_RUNS, PENDING_RESULTS_SQL, runs, |row| {
            let waiting = expected.runs.entry(row.run(0)?).or_default();
            let answer = match (row.opt_int(2)?, row.int(3)?) {
                (None, _) => NodeResult::Missing,
                (Some(_), 0) => NodeResult::Partial,
                (Some(_), _) => NodeResult::Complete,
            };
            waiting.nodes.insert(row.int(1)?, answer);
            waiting.case = row.opt_case(4)?;
            waiting.started = row.opt_timestamp(5)?;
            waiting.node_count = row.int(6)?;
            Ok(())
        })?;
        let awaited = |run: &i64| expected.runs.contains_key(&RunId::from_number(run.cast_unsigned()));
        let others: Vec<i64> = runs.iter().copied().filter(|run| !awaited(run)).collect();
        tx.rows_by_key(READING_RUNS, "SELECT run, node FROM run_node WHERE run IN {keys}", &others, |row| {
            expected.ended_nodes.insert((row.run(0)?, row.int(1)?));
            Ok(())
        })?;
        Ok(expected)
    }

    fn admit(&mut self, tx: &Tx<'_>, result: &ClassifiedResult) -> std::result::Result<AdmissionInfo, RejectReason> {
        let node = tx.ids.node_id(&result.node).ok_or(RejectReason::UnknownRun)?;
        if self.ended_nodes.contains(&(result.run, node)) {
            return Err(RejectReason::Duplicate);
        }
        let waiting = self.runs.get_mut(&result.run).ok_or(RejectReason::UnknownRun)?;
        let answer = waiting.nodes.get_mut(&node).ok_or(RejectReason::UnknownRun)?;
        if waiting.ended || *answer != NodeResult::Missing {
            return Err(RejectReason::Duplicate);
        }
        *answer = if result.complete { NodeResult::Complete } else { NodeResult::Partial };
        waiting.ended = waiting.nodes.values().all(|answer| *answer == NodeResult::Complete);
        let ended = waiting.ended.then(|| waiting.run_span(result));
        let admitted = AdmissionInfo { node, case: waiting.case, ended };
        self.conclusions.add(result.run, &admitted);
        Ok(admitted)
    }
}

impl PendingRun {
    /// Returns the time span of a run that ends with this result.
    fn run_span(&self, last: &ClassifiedResult) -> RunSpan {
        // Measured by the node's clock, which may be wrong; hence the cap of one day.
        let duration = last.outcomes.iter().map(|outcome| outcome.duration).sum::<Span>().min(Span::days(1));
        let began = self.started.unwrap_or_else(|| last.received.minus(duration));
        RunSpan { started: began, ended: last.received, nodes: self.node_count }
    }
}

fn write_results(
    tx: &mut Tx<'_>,
    conclusions: &RunConclusions,
    batch: &BatchKeys<'_>,
    stored: &[PendingHistoryEntry<'_>],
) -> Result<()> {
    if stored.is_empty() {
        return Ok(());
    }
    let before = &result_writer::load_state_before(tx, &batch.nodes(tx))?;
    let entries = entries(tx, stored)?;
    result_writer::write_results(tx, before, &entries)?;
    update_findings(tx, before, stored, &conclusions.requalification_runs)?;
    remove_pending(tx, &conclusions.ended, stored)?;
    let spans: Vec<RunSpan> = conclusions.ended.values().copied().collect();
    node_hours::add(tx, &spans)?;
    let reports: Vec<HardwareReport<'_>> = stored
        .iter()
        .map(|PendingHistoryEntry { node, result, .. }| HardwareReport {
            node: *node,
            hardware: &result.hardware,
            at: result.received,
        })
        .collect();
    nodes::record_hardware(tx, |node| before.hardware(node), &reports)?;
    // A result proves that the job started.
    let reporting: BTreeSet<i64> = stored.iter().map(|entry| entry.node).collect();
    let backing_off: Vec<i64> =
        before.nodes_with_backoff().into_iter().filter(|node| reporting.contains(node)).collect();
    nodes::clear_back_off(tx, &backing_off)?;
    let (stored, ended) = (stored.len() as u64, conclusions.ended.len() as u64);
    audit::add_counts(
        tx,
        &[(Counter::ResultsStored, stored), (Counter::HistoryChanges, stored), (Counter::RunsEnded, ended)],
    )
}

fn entries(tx: &mut Tx<'_>, stored: &[PendingHistoryEntry<'_>]) -> Result<Vec<NewHistoryRow>> {
    let mut entries = Vec::with_capacity(stored.len());
    for PendingHistoryEntry { node, result, bundle } in stored {
        let first = entries.len();
        for outcome in &result.outcomes {
            let test = tx.test_id(&outcome.test)?;
            // One row per test of a run, even if the document repeats a test.
            if entries[first..].iter().any(|entry: &NewHistoryRow| entry.test == test) {
                continue;
            }
            // The findings of an inconclusive result follow from the history, not from its evidence.
            let severity = worst(outcome).filter(|_| outcome.verdict != Verdict::Inconclusive);
            let kind = OutcomeKind::new(outcome.verdict, severity, outcome.reason.clone());
            let (run, at, duration) = (result.run, outcome.at, outcome.duration);
            entries.push(NewHistoryRow { node: *node, run, test, kind, at, duration, bundle: Some(*bundle) });
        }
    }
    Ok(entries)
}

fn worst(outcome: &Outcome) -> Option<Severity> {
    let failing = outcome.findings.iter().filter(|finding| finding.verdict == Verdict::Fail);
    failing.map(|finding| finding.severity).max()
}

/// Whether a finding is about consecutive inconclusive results, and so stands although the newest one is inconclusive.
fn is_from_history(finding: &Finding) -> bool {
    finding.rule.as_str() == DISTURBED_REPEATEDLY
}

/// Updates open findings, if no newer result exists. Only a pass or a fail clears some.
fn update_findings(
    tx: &mut Tx<'_>,
    before: &StateBefore,
    stored: &[PendingHistoryEntry<'_>],
    proofs: &BTreeSet<RunId>,
) -> Result<()> {
    let mut open = OpenFindings::load(tx, &before.nodes_with_findings())?;
    let mut changes = FindingChanges::default();
    let mut newest: HashMap<(i64, i64), Timestamp> = HashMap::new();
    let mut in_order: Vec<(i64, RunId, &Outcome, &Hardware)> = stored
        .iter()
        .flat_map(|PendingHistoryEntry { node, result, .. }| {
            result.outcomes.iter().map(|outcome| (*node, result.run, outcome, &result.hardware))
        })
        .filter(|(_, _, outcome, _)| outcome.verdict.is_conclusive() || outcome.findings.iter().any(is_from_history))
        .collect();
    in_order.sort_by_key(|(_, run, outcome, _)| (outcome.at, *run));
    for (node, run, outcome, hardware) in in_order {
        let check = tx.test_id(&outcome.test)?;
        let known = before.test_statuses.get(&(node, check)).and_then(|status| status.conclusive).map(|(_, at)| at);
        let known = newest.get(&(node, check)).copied().max(known);
        if known.is_some_and(|known| outcome.at < known) || !before.is_current_machine(node, outcome.at) {
            continue;
        }
        let is_conclusive = outcome.verdict.is_conclusive();
        if is_conclusive {
            newest.insert((node, check), outcome.at);
        }
        let boot = hardware.boot_id.as_deref();
        let from_history: Vec<Finding>;
        let findings = if is_conclusive {
            &*outcome.findings
        } else {
            from_history = outcome.findings.iter().filter(|finding| is_from_history(finding)).cloned().collect();
            &*from_history
        };
        let reported = CheckFindings {
            node,
            check,
            run: Some(run),
            at: outcome.at,
            findings,
            is_conclusive,
            is_requalification: proofs.contains(&run),
            boot,
        };
        open.apply(&reported, &mut changes);
    }
    changes.write(tx)?;
    let at = stored.first().map_or(Timestamp::MIN, |entry| entry.result.received);
    audit::append(tx, at, None, &changes.audit_lines)
}

/// Removes completed runs from `pending_results`. A node that answers before the other nodes of its run stays occupied
/// until the run ends.
fn remove_pending(tx: &mut Tx<'_>, ended: &BTreeMap<RunId, RunSpan>, stored: &[PendingHistoryEntry<'_>]) -> Result<()> {
    let operation = "recording answers";
    let ended_runs: Vec<SqlValue<'_>> = ended.keys().map(|run| (*run).into()).collect();
    let sqlite = "DELETE FROM pending_results WHERE run = $1";
    let postgres = "DELETE FROM pending_results WHERE run = ANY ($1::int8[])";
    tx.execute_each(operation, (sqlite, postgres), &[ColumnType::Int], &ended_runs)?;
    let mut rows: Vec<SqlValue<'_>> = Vec::new();
    for PendingHistoryEntry { node, result, .. } in stored.iter().filter(|entry| !ended.contains_key(&entry.result.run))
    {
        rows.extend_from_slice(vals![result.run, *node, result.received, result.complete]);
    }
    let sqlite = "UPDATE pending_results SET received_at = $3, complete = $4 WHERE run = $1 AND node = $2";
    let postgres = "UPDATE pending_results w SET received_at = a.received_at, complete = a.complete \
                    FROM UNNEST($1::int8[], $2::int8[], $3::int8[], $4::int8[]) \
                    AS a (run, node, received_at, complete) WHERE w.run = a.run AND w.node = a.node";
    tx.execute_each(operation, (sqlite, postgres), &[ColumnType::Int; 4], &rows)
}

fn count_rejected_results(
    tx: &mut Tx<'_>,
    admitted: &[std::result::Result<AdmissionInfo, RejectReason>],
) -> Result<()> {
    let of = |kind| admitted.iter().filter(|one| one.as_ref().err() == Some(&kind)).count() as u64;
    let (duplicate, unknown) = (of(RejectReason::Duplicate), of(RejectReason::UnknownRun));
    audit::add_counts(tx, &[(Counter::ResultsDuplicate, duplicate), (Counter::ResultsOfUnknownRuns, unknown)])
}
