//! Collects the results of each cycle: documents from the backend's response, documents on the share, and agents'
//! messages. Valid ones are stored in one transaction; the others go to `rejected/` with the reason.

use std::collections::{BTreeMap, BTreeSet};

use doctor_backend::{ObservedNode, PolledJob};
use doctor_checks::document::TestEvidence;
use doctor_core::{
    classify::BaselineNeeds,
    ids::{NodeName, RunId, Sku},
    node::Node,
    observation::AcknowledgedEvents,
    snapshot::Snapshot,
    time::Timestamp,
};
use doctor_store::{
    Lease, StoreError,
    records::{Accepted, ClassifiedResult, StoredRun},
};

use crate::{
    baseline_reader::{BaselineQuery, BaselineReader},
    cycle_report::CycleReport,
    deps::EngineDeps,
    rejection::Rejection,
    result_validation::{self, ClassifyContext},
    share::{ResultFile, Share},
};

/// The source of a document, which determines what happens to it when it is rejected.
enum Source {
    JobOutput { bytes: Vec<u8> },
    File(std::path::PathBuf),
}

/// Rejected documents that a backend keeps returning. Each is rejected, and counted, once.
#[derive(Debug, Default)]
pub(crate) struct RejectedDocuments(BTreeSet<(RunId, u64)>);

impl RejectedDocuments {
    /// Returns whether this document was not rejected before.
    fn is_new(&self, run: RunId, bytes: &[u8]) -> bool {
        !self.0.contains(&(run, fingerprint(bytes)))
    }

    fn remember(&mut self, run: RunId, bytes: &[u8]) {
        self.0.insert((run, fingerprint(bytes)));
    }

    /// Drops the documents of a run that is over.
    pub(crate) fn forget(&mut self, run: RunId) {
        self.0.retain(|(other, _)| *other != run);
    }
}

fn fingerprint(bytes: &[u8]) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// The context in which documents are classified.
pub(crate) struct IngestContext<'a> {
    pub(crate) runs: &'a [StoredRun],
    pub(crate) polled: &'a BTreeMap<RunId, PolledJob>,
    /// The cluster as observed now, by name, and as of the last cycle.
    pub(crate) nodes: &'a [ObservedNode],
    pub(crate) snapshot: Option<&'a Snapshot>,
    /// Acknowledged events.
    pub(crate) acknowledged: &'a BTreeMap<NodeName, Vec<AcknowledgedEvents>>,
    pub(crate) now: Timestamp,
}

impl<'a> IngestContext<'a> {
    fn now(&self, node: &NodeName) -> Option<&'a Node> {
        let index = self.nodes.binary_search_by(|observed| observed.node.name.cmp(node)).ok()?;
        Some(&self.nodes[index].node)
    }

    fn last_record(&self, node: &NodeName) -> Option<&'a Node> {
        let nodes = &self.snapshot?.nodes;
        let index = nodes.binary_search_by(|record| record.node.name.cmp(node)).ok()?;
        Some(&nodes[index].node)
    }

    fn acknowledged_by(&self, node: &NodeName) -> Vec<AcknowledgedEvents> {
        self.acknowledged.get(node).cloned().unwrap_or_default()
    }

    /// Returns the nodes of each machine type, by name.
    fn nodes_by_sku(&self) -> BTreeMap<Sku, Vec<NodeName>> {
        let mut types: BTreeMap<Sku, Vec<NodeName>> = BTreeMap::new();
        for node in self.nodes.iter().map(|observed| &observed.node) {
            if let Some(sku) = &node.sku {
                types.entry(sku.clone()).or_default().push(node.name.clone());
            }
        }
        types
    }

    /// Returns the machine type of a node. A node that has just left the cluster keeps its last known type.
    fn sku(&self, node: &NodeName) -> Option<&'a Sku> {
        self.now(node).or_else(|| self.last_record(node))?.sku.as_ref()
    }
}

/// Processes everything that is waiting. Returns the nodes whose stored data changed.
pub(crate) fn collect(
    deps: &mut EngineDeps,
    lease: &Lease,
    context: &IngestContext<'_>,
    rejected: &mut RejectedDocuments,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    let (good, mut bad) = open_all(deps, context, rejected, report)?;
    let mut changed_nodes = store_results(deps, lease, good, &mut bad, report)?;
    for (run, _, source) in &bad {
        if let Source::JobOutput { bytes } = source {
            rejected.remember(*run, bytes);
        }
    }
    reject(deps, lease, bad, context.now, report)?;
    changed_nodes.extend(collect_agent_reports(deps, lease, context, report)?);
    Ok(changed_nodes)
}

type OpenedDocuments = Vec<(ClassifiedResult, Source)>;
type BadDocuments = Vec<(RunId, Rejection, Source)>;

/// Opens and classifies every waiting document: the valid ones, and the rejected ones.
fn open_all(
    deps: &EngineDeps,
    context: &IngestContext<'_>,
    rejected: &RejectedDocuments,
    report: &mut CycleReport,
) -> Result<(OpenedDocuments, BadDocuments), StoreError> {
    let IngestContext { runs, polled, now, .. } = *context;
    let acknowledged = |node: &NodeName| context.acknowledged_by(node);
    let (mut good, mut bad) = (OpenedDocuments::new(), BadDocuments::new());
    // Sorting a hundred thousand names is skipped if no rule compares with peers.
    let no_peer_rules = BaselineNeeds::for_all_checks(&deps.settings.rules).peer_metrics.is_empty();
    let nodes_by_sku = if no_peer_rules { BTreeMap::new() } else { context.nodes_by_sku() };
    let mut reader = BaselineReader::new(&deps.store, &deps.settings, nodes_by_sku);
    let mut store_error = None;
    for stored in runs {
        let run_id = stored.run.id;
        let sku = context.sku(stored.run.nodes.first());
        let mut load_baselines = |node: &NodeName, evidence: &TestEvidence| {
            let query = BaselineQuery { node, sku, test: &evidence.test, at: evidence.ended, before: now };
            reader.load(query).unwrap_or_else(|error| {
                store_error = Some(error);
                result_validation::without_baselines(node, evidence)
            })
        };
        let documents = polled.get(&run_id).into_iter().flat_map(|job| &job.documents);
        for bytes in documents.filter(|bytes| rejected.is_new(run_id, bytes)) {
            let source = Source::JobOutput { bytes: bytes.clone() };
            match result_validation::open_document(
                &deps.settings,
                stored,
                sku,
                bytes.clone(),
                now,
                acknowledged,
                &mut load_baselines,
            ) {
                Ok(result) => good.push((result, source)),
                Err(why) => bad.push((run_id, why, source)),
            }
        }
        let Some(share) = &deps.share else { continue };
        for node in stored.run.nodes.iter() {
            let path = Share::document_path(&stored.run, node);
            match share.read(&path) {
                Ok(ResultFile::Missing) => {}
                Ok(ResultFile::Rejected(why)) => bad.push((run_id, why, Source::File(path))),
                Ok(ResultFile::Document(bytes)) => {
                    match result_validation::open_document(
                        &deps.settings,
                        stored,
                        sku,
                        bytes,
                        now,
                        acknowledged,
                        &mut load_baselines,
                    ) {
                        Ok(result) => good.push((result, Source::File(path))),
                        Err(why) => bad.push((run_id, why, Source::File(path))),
                    }
                }
                Err(error) => report.problems.push(error.to_string()),
            }
        }
    }
    match store_error {
        Some(error) => Err(error),
        None => Ok((good, bad)),
    }
}

fn store_results(
    deps: &EngineDeps,
    lease: &Lease,
    good: Vec<(ClassifiedResult, Source)>,
    bad: &mut Vec<(RunId, Rejection, Source)>,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    if good.is_empty() {
        return Ok(Vec::new());
    }
    let (results, sources): (Vec<_>, Vec<_>) = good.into_iter().unzip();
    let mut changed_nodes = Vec::new();
    for ((accepted, result), source) in deps.store.accept(lease, &results)?.into_iter().zip(results).zip(sources) {
        let run_id = result.run;
        match accepted {
            Accepted::Stored => {
                report.results += 1;
                changed_nodes.push(result.node);
            }
            // A file stays on the share while its run is active; it is the same file as in the last cycle.
            Accepted::Duplicate if matches!(source, Source::File(_)) => {}
            Accepted::Duplicate => bad.push((run_id, Rejection::Duplicate, source)),
            Accepted::UnknownRun => bad.push((run_id, Rejection::UnknownRun, source)),
        }
    }
    Ok(changed_nodes)
}

fn reject(
    deps: &EngineDeps,
    lease: &Lease,
    bad: Vec<(RunId, Rejection, Source)>,
    now: Timestamp,
    report: &mut CycleReport,
) -> Result<(), StoreError> {
    if bad.is_empty() {
        return Ok(());
    }
    deps.store.count_rejected(lease, bad.len() as u64)?;
    report.rejected += bad.len();
    for (run_id, why, source) in bad {
        tracing::warn!(run = %run_id, %why, "result rejected");
        let Some(share) = &deps.share else { continue };
        let result = match &source {
            Source::JobOutput { bytes } => share.reject_bytes(&run_id.to_string(), bytes, &why, now),
            Source::File(path) => share.reject_file(path, &why, now),
        };
        if let Err(error) = result {
            report.problems.push(error.to_string());
        }
    }
    Ok(())
}

fn collect_agent_reports(
    deps: &mut EngineDeps,
    lease: &Lease,
    context: &IngestContext<'_>,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    let mut changed_nodes = Vec::new();
    let mut rejected_count = 0;
    for inbox in &mut deps.inboxes {
        let mut processed = Vec::new();
        // A new name may belong to a machine with a history: the planner identifies the machine first, and until then
        // the messages of its agent wait.
        for message in inbox.pending().into_iter().filter(|message| context.last_record(&message.node).is_some()) {
            processed.push(message.number);
            let sku = context.sku(&message.node);
            let acknowledged = context.acknowledged_by(&message.node);
            let classify_context = ClassifyContext { settings: &deps.settings, sku, acknowledged: &acknowledged };
            match result_validation::open_report(
                classify_context,
                &message.node,
                &message.key,
                &message.bytes,
                context.now,
            ) {
                Ok(findings) => {
                    if deps.store.accept_agent(lease, &findings)? == Accepted::Stored {
                        changed_nodes.push(findings.node);
                    }
                }
                Err(why) => {
                    tracing::warn!(node = %message.node, %why, "agent report rejected");
                    rejected_count += 1;
                }
            }
        }
        if !processed.is_empty() {
            inbox.acknowledge(&processed);
        }
        deps.store.record_agent_contacts(lease, &inbox.take_last_reports(context.now))?;
    }
    if rejected_count > 0 {
        deps.store.count_rejected(lease, rejected_count)?;
        report.rejected += usize::try_from(rejected_count).unwrap_or(usize::MAX);
    }
    Ok(changed_nodes)
}
