//! Enters what nodes have sent: verified reports of agents and result documents of runs, from the store's ingest queue
//! in batches, and messages of sources that keep them themselves.
//!
//! A message was verified and parsed when it arrived. What the cycle adds is what only it knows: the node's machine
//! type, the acknowledged events, the baselines. A message leaves the queue in the transaction that enters it.

use std::{collections::BTreeMap, sync::Arc};

use doctor_checks::document::{AgentReport, Document, DocumentError, TestEvidence};
use doctor_core::{
    classify::Baselines,
    ids::{NodeName, RunId},
    time::{Span, Timestamp},
};
use doctor_store::{
    Entering, Lease, Store, StoreError,
    messages::{MessageContent, QueuedMessage, VerifiedMessage},
    records::{Accepted, AgentFindings, ClassifiedResult, StoredRun},
};

use crate::{
    baseline_reader::{BaselineQuery, BaselineReader},
    cycle_report::{CycleReport, chain},
    deps::EngineDeps,
    expectations::PeerAgreements,
    inbox::AgentMessage,
    ingest_context::IngestContext,
    rejection::Rejection,
    repeated_disturbance, result_validation,
    settings::Settings,
};

/// Messages listed at a time.
const LISTED: u32 = 1024;
/// Limits of one transaction: on SQLite, messages that arrive meanwhile wait for it.
const MAX_BATCH: usize = 64;
const MAX_BATCH_BYTES: u64 = 8 << 20;
/// Messages entered in one cycle; the next cycle follows soon.
const MAX_PER_CYCLE: usize = 16 << 10;
/// How long a report waits for its node to appear in the cluster.
const UNKNOWN_NODE_PATIENCE: Span = Span::hours(1);
/// How long a message waits that cannot be entered because of what the store has. Its run cannot end meanwhile.
const UNREADABLE_PATIENCE: Span = Span::minutes(5);
/// How long a message waits whose statements the database cancels: it may be slow for a while.
const CANCELLED_PATIENCE: Span = Span::hours(1);

/// Enters the messages of the ingest queue. Adds the nodes whose stored data changed to `changed_nodes`, also if it fails.
pub(crate) fn enter(
    deps: &EngineDeps,
    lease: &Lease,
    context: &IngestContext<'_>,
    agreements: &mut PeerAgreements,
    (changed_nodes, report): (&mut Vec<NodeName>, &mut CycleReport),
) -> Result<(), StoreError> {
    let reader = BaselineReader::new(&deps.store, &deps.settings, agreements, || context.nodes_by_sku());
    let mut entry = Entry { deps, lease, context, reader, report, changed_nodes, one_was_cancelled: false };
    let (mut after, mut listed_in_all) = (None, 0);
    loop {
        let listed = deps.store.queued_messages(after, LISTED)?;
        let ready: Vec<&QueuedMessage> = listed.iter().filter(|message| entry.is_ready(message)).collect();
        entry.reader.announce(ready.iter().map(|message| message.node.clone()));
        for batch in split(&ready) {
            entry.enter_batch(batch)?;
        }
        after = listed.last().map(|message| message.id);
        listed_in_all += listed.len();
        if listed.len() < LISTED as usize || listed_in_all >= MAX_PER_CYCLE {
            break;
        }
    }
    entry.reader.write_counts(lease, context.now)
}

/// Splits messages into batches, in order.
fn split<'a, 'b>(messages: &'b [&'a QueuedMessage]) -> Vec<&'b [&'a QueuedMessage]> {
    let mut batches = Vec::new();
    let (mut first, mut bytes) = (0, 0);
    for (index, message) in messages.iter().enumerate() {
        if index > first && (index - first == MAX_BATCH || bytes + message.bytes > MAX_BATCH_BYTES) {
            batches.push(&messages[first..index]);
            (first, bytes) = (index, 0);
        }
        bytes += message.bytes;
    }
    if first < messages.len() {
        batches.push(&messages[first..]);
    }
    batches
}

/// The state of one pass over the queue.
struct Entry<'a, 'b> {
    deps: &'a EngineDeps,
    lease: &'a Lease,
    context: &'a IngestContext<'b>,
    reader: BaselineReader<'a>,
    report: &'a mut CycleReport,
    changed_nodes: &'a mut Vec<NodeName>,
    /// Whether the database has cancelled a statement for one message alone.
    one_was_cancelled: bool,
}

/// The counts and sizes in a message.
type Counts = Vec<(String, f64)>;

/// The classified content of a batch.
#[derive(Default)]
struct Classified {
    results: Vec<ClassifiedResult>,
    counts_of_results: Vec<Counts>,
    reports: Vec<AgentFindings>,
    counts_of_reports: Vec<Counts>,
    rejected: Vec<Rejected>,
}

/// A rejected message; `bytes`: what is kept of it.
struct Rejected {
    node: NodeName,
    run: Option<RunId>,
    why: Rejection,
    bytes: Vec<u8>,
}

impl Entry<'_, '_> {
    /// A new name may belong to a machine with a history: the planner identifies the machine first, and until then the
    /// messages of its agent wait.
    fn is_ready(&self, message: &QueuedMessage) -> bool {
        let is_known = message.run.is_some() || self.context.last_record(&message.node).is_some();
        is_known || self.has_waited(message, UNKNOWN_NODE_PATIENCE)
    }

    fn has_waited(&self, message: &QueuedMessage, patience: Span) -> bool {
        self.context.now.since(message.received) > patience
    }

    /// Enters a batch or, if something in it or about it cannot be entered, each message alone: none keeps the others out.
    fn enter_batch(&mut self, batch: &[&QueuedMessage]) -> Result<(), StoreError> {
        match self.enter_together(batch) {
            Err(error) if error.is_of_some_data() => batch.iter().try_for_each(|message| self.enter_alone(message)),
            entered => entered,
        }
    }

    /// Enters a message, or removes it from the queue if it can never be entered.
    fn enter_alone(&mut self, message: &QueuedMessage) -> Result<(), StoreError> {
        let error = match self.enter_together(&[message]) {
            // A database that cancels one after another is too slow for all of them, and each attempt takes long.
            Err(error) if error.is_cancelled() && std::mem::replace(&mut self.one_was_cancelled, true) => {
                return Err(error);
            }
            Err(error) if error.is_of_some_data() => error,
            entered => return entered,
        };
        let patience = if error.is_cancelled() { CANCELLED_PATIENCE } else { UNREADABLE_PATIENCE };
        if !error.refuses_values() && !self.has_waited(message, patience) {
            self.report.add_problem(format!("a message of {} cannot be entered: {}", message.node, chain(&error)));
            return Ok(());
        }
        let content = self.deps.store.queued_contents(&[message]).ok().and_then(|mut contents| contents.pop()?.ok());
        let bytes = content.map_or_else(Vec::new, |content| content.bytes.clone());
        self.deps.store.enter(self.lease, &Entering { messages: &[message], ..Entering::default() })?;
        let (node, run, why) = (message.node.clone(), message.run, Rejection::by_store(&error));
        self.reject(vec![Rejected { node, run, why, bytes }])
    }

    fn enter_together(&mut self, batch: &[&QueuedMessage]) -> Result<(), StoreError> {
        // Those of a batch that failed.
        drop(self.reader.take_counts());
        let mut classified = Classified::default();
        let runs = self.runs_of(batch)?;
        for (message, content) in batch.iter().zip(self.deps.store.queued_contents(batch)?) {
            self.classify(message, content, &runs, &mut classified)?;
        }
        let Classified { mut results, counts_of_results, reports, counts_of_reports, rejected } = classified;
        repeated_disturbance::add_findings(&self.deps.store, &self.deps.settings, &mut results)?;
        let entering = Entering { results: &results, reports: &reports, messages: batch };
        let entered = self.deps.store.enter(self.lease, &entering)?;
        for ((result, counts), accepted) in results.into_iter().zip(counts_of_results).zip(entered.results) {
            if accepted == Accepted::Stored {
                self.report.results += 1;
                self.reader.add_counts(&result.node, &counts, result.received)?;
                self.changed_nodes.push(result.node);
            } else {
                // The same result came on another way, too.
                tracing::debug!(run = %result.run, node = %result.node, ?accepted, "posted result not entered");
            }
        }
        for ((findings, counts), accepted) in reports.into_iter().zip(counts_of_reports).zip(entered.reports) {
            if accepted == Accepted::Stored {
                self.reader.add_counts(&findings.node, &counts, findings.received)?;
                self.changed_nodes.push(findings.node);
            }
        }
        self.reject(rejected)
    }

    /// Returns the active runs that the batch has documents of. One that this cycle does not know was planned or ended
    /// since it read them.
    fn runs_of(&self, batch: &[&QueuedMessage]) -> Result<BTreeMap<RunId, StoredRun>, StoreError> {
        let mut runs = BTreeMap::new();
        for run in batch.iter().filter_map(|message| message.run) {
            if runs.contains_key(&run) {
                continue;
            }
            let known = self.context.runs.iter().find(|stored| stored.run.id == run).cloned();
            let stored = known.map_or_else(|| self.deps.store.active_run(run), |known| Ok(Some(known)))?;
            runs.extend(stored.map(|stored| (run, stored)));
        }
        Ok(runs)
    }

    fn classify(
        &mut self,
        message: &QueuedMessage,
        content: Result<Arc<VerifiedMessage>, DocumentError>,
        runs: &BTreeMap<RunId, StoredRun>,
        classified: &mut Classified,
    ) -> Result<(), StoreError> {
        let mut reject = |why: Rejection, bytes: &[u8]| {
            let (node, run, bytes) = (message.node.clone(), message.run, bytes.to_vec());
            classified.rejected.push(Rejected { node, run, why, bytes });
        };
        let verified = match content {
            Ok(verified) => verified,
            Err(error) => {
                reject(error.into(), b"");
                return Ok(());
            }
        };
        let (deps, context) = (self.deps, self.context);
        match &verified.content {
            MessageContent::Report(_) if context.last_record(&message.node).is_none() => {
                reject(Rejection::UnknownNode(message.node.clone()), b"");
            }
            MessageContent::Report(report) => {
                let received = message.received;
                classified.reports.push(classify_report(&deps.settings, context, &mut self.reader, report, received)?);
                classified.counts_of_reports.push(self.reader.take_counts());
            }
            MessageContent::Document(document) => {
                let Some(stored) = runs.get(&document.run) else {
                    // The job has written the same document elsewhere, and that one has ended the run.
                    if !is_stored(&deps.store, (document.run, &document.node), &verified.bytes)? {
                        reject(Rejection::UnknownRun, &verified.bytes);
                    }
                    return Ok(());
                };
                if let Err(why) = result_validation::check_document(&stored.run, document) {
                    reject(why, &verified.bytes);
                    return Ok(());
                }
                let result = self.classify_document(stored, document, &verified)?;
                classified.results.push(result);
                classified.counts_of_results.push(self.reader.take_counts());
            }
        }
        Ok(())
    }

    fn classify_document(
        &mut self,
        stored: &StoredRun,
        document: &Document,
        message: &VerifiedMessage,
    ) -> Result<ClassifiedResult, StoreError> {
        let known = self.context.known(&document.node);
        let (reader, before) = (&mut self.reader, self.context.now);
        let load = |node: &NodeName, evidence: &TestEvidence| {
            reader.load(BaselineQuery { node, sku: known.sku, evidence, before })
        };
        let document = (document, message.bytes.clone());
        let settings = &self.deps.settings;
        with_baselines(load, |baselines| {
            result_validation::classify_document(settings, &stored.run, document, message.received, known, baselines)
        })
    }

    fn reject(&mut self, rejected: Vec<Rejected>) -> Result<(), StoreError> {
        if rejected.is_empty() {
            return Ok(());
        }
        self.deps.store.count_rejected(self.lease, rejected.len() as u64, self.context.now)?;
        self.report.rejected += rejected.len();
        for Rejected { node, run, why, bytes } in rejected {
            let name = match run {
                Some(run) => {
                    tracing::warn!(%run, %node, %why, "result rejected");
                    run.to_string()
                }
                None => {
                    tracing::warn!(%node, %why, "agent report rejected");
                    if bytes.is_empty() {
                        continue;
                    }
                    node.to_string()
                }
            };
            let Some(share) = &self.deps.share else { continue };
            let now = self.context.now;
            let queued = share.write_later(bytes.len(), move |files| files.reject_bytes(&name, &bytes, &why, now));
            if !queued {
                self.report.add_problem("rejected results are not kept: the shared directory is too slow".to_owned());
            }
        }
        Ok(())
    }
}

/// Returns whether the stored result of this run and node is this very document.
pub(crate) fn is_stored(store: &Store, (run, node): (RunId, &NodeName), document: &[u8]) -> Result<bool, StoreError> {
    let stored = store.evidence(run, node)?;
    // Of a document that was too long, the store has the beginning.
    Ok(stored.is_some_and(|row| row.bytes == document || (row.truncated && document.starts_with(&row.bytes))))
}

/// Classifies a verified report.
fn classify_report(
    settings: &Settings,
    context: &IngestContext<'_>,
    reader: &mut BaselineReader<'_>,
    report: &AgentReport,
    received: Timestamp,
) -> Result<AgentFindings, StoreError> {
    let known = context.known(&report.node);
    let load = |node: &NodeName, evidence: &TestEvidence| {
        reader.load_expectations(BaselineQuery { node, sku: known.sku, evidence, before: context.now })
    };
    with_baselines(load, |baselines| result_validation::classify_report(settings, known, report, received, baselines))
}

/// Classifies with baselines that may fail to load.
///
/// # Errors
/// If the store could not be read.
fn with_baselines<T>(
    mut load: impl FnMut(&NodeName, &TestEvidence) -> Result<Baselines, StoreError>,
    classify: impl FnOnce(&mut result_validation::BaselineLoader<'_>) -> T,
) -> Result<T, StoreError> {
    let mut store_error = None;
    let mut load_or_note = |node: &NodeName, evidence: &TestEvidence| {
        load(node, evidence).unwrap_or_else(|error| {
            store_error = Some(error);
            result_validation::without_baselines(node, evidence)
        })
    };
    let classified = classify(&mut load_or_note);
    match store_error {
        Some(error) => Err(error),
        None => Ok(classified),
    }
}

/// Enters the messages of sources that keep them until they are acknowledged, and stores what the inboxes know of
/// agents. Returns the nodes whose stored data changed.
pub(crate) fn collect_from_inboxes(
    deps: &mut EngineDeps,
    lease: &Lease,
    context: &IngestContext<'_>,
    agreements: &mut PeerAgreements,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    let mut changed_nodes = Vec::new();
    let mut rejected_count = 0;
    let EngineDeps { store, settings, inboxes, .. } = deps;
    let mut reader = BaselineReader::new(store, settings, agreements, || context.nodes_by_sku());
    for inbox in inboxes {
        inbox.set_nodes(context.nodes);
        let mut pending = inbox.pending();
        pending.retain(|message| context.last_record(&message.node).is_some());
        reader.announce(pending.iter().map(|message| message.node.clone()));
        let (mut reports, mut counts) = (Vec::new(), Vec::new());
        for message in &pending {
            match open_report(message) {
                Ok(opened) => {
                    reports.push(classify_report(settings, context, &mut reader, &opened, context.now)?);
                    counts.push(reader.take_counts());
                }
                Err(why) => {
                    tracing::warn!(node = %message.node, %why, "agent report rejected");
                    rejected_count += 1;
                }
            }
        }
        let accepted = store.accept_agents(lease, &reports)?;
        for ((findings, counts), accepted) in reports.into_iter().zip(counts).zip(accepted) {
            if accepted == Accepted::Stored {
                reader.add_counts(&findings.node, &counts, findings.received)?;
                changed_nodes.push(findings.node);
            }
        }
        reader.write_counts(lease, context.now)?;
        if !pending.is_empty() {
            inbox.acknowledge(&pending.iter().map(|message| message.number).collect::<Vec<_>>());
        }
        store.record_agent_contacts(lease, &inbox.take_last_reports(context.now))?;
        let confirmations = inbox.take_confirmations(context.now);
        store.confirm_agent_results(lease, &confirmations)?;
        let renewed = confirmations.into_iter().filter(|confirmed| context.is_reload_due(confirmed));
        changed_nodes.extend(renewed.map(|confirmed| confirmed.node));
    }
    if rejected_count > 0 {
        store.count_rejected(lease, rejected_count, context.now)?;
        report.rejected += usize::try_from(rejected_count).unwrap_or(usize::MAX);
    }
    Ok(changed_nodes)
}

/// Verifies and parses a message.
fn open_report(message: &AgentMessage) -> Result<AgentReport, Rejection> {
    let report = AgentReport::open(&message.bytes, &message.key)?;
    if report.node != message.node {
        return Err(Rejection::WrongNode(report.node));
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_bounded_by_number_and_by_length() {
        let message = |id: i64, bytes: u64| QueuedMessage {
            id,
            node: NodeName::new("n1").unwrap(),
            run: None,
            received: Timestamp::from_secs(1),
            bytes,
            stored_bytes: 1,
        };
        let sizes = |messages: &[QueuedMessage]| -> Vec<usize> {
            split(&messages.iter().collect::<Vec<_>>()).iter().map(|batch| batch.len()).collect()
        };
        assert!(sizes(&[]).is_empty());
        assert_eq!(sizes(&(0..150).map(|id| message(id, 10)).collect::<Vec<_>>()), [64, 64, 22]);
        assert_eq!(sizes(&(0..5).map(|id| message(id, 3 << 20)).collect::<Vec<_>>()), [2, 2, 1]);
        assert_eq!(sizes(&[message(1, 16 << 20), message(2, 16 << 20)]), [1, 1], "each on its own");
    }
}
