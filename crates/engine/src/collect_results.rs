//! Collects the results of each cycle: documents from the backend's response, documents on the share, and agents'
//! messages. Valid ones are stored in one transaction; the others go to `rejected/` with the reason.

use std::collections::{BTreeMap, BTreeSet};

use doctor_backend::{ObservedNode, PolledJob};
use doctor_checks::document::TestEvidence;
use doctor_core::{
    ids::{NodeName, RunId},
    node::Node,
    observation::AcknowledgedEvents,
    snapshot::Snapshot,
    time::Timestamp,
};
use doctor_store::{
    Lease, StoreError,
    records::{Accepted, AgentConfirmation, AgentFindings, ClassifiedResult, StoredRun},
};

use crate::{
    agents,
    baseline_reader::{BaselineQuery, BaselineReader},
    cycle_report::CycleReport,
    deps::EngineDeps,
    expectations::{NodesBySku, PeerAgreements},
    inbox::AgentMessage,
    rejection::Rejection,
    repeated_disturbance,
    result_validation::{self, KnownNode},
    settings::Settings,
    share::{ResultFile, Share},
};

/// The source of a document, which determines what happens to it when it is rejected.
enum Source {
    JobOutput { bytes: Vec<u8> },
    File(std::path::PathBuf),
}

/// Documents that a backend returned and may return again, until their runs have ended. Each is entered, or rejected, once.
#[derive(Debug, Default)]
pub(crate) struct KnownDocuments(BTreeSet<(RunId, u64)>);

impl KnownDocuments {
    /// Returns whether this document was neither entered nor rejected before.
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

    /// Returns what is known about a node. A node that has just left the cluster keeps its last known type.
    fn known(&self, node: &NodeName) -> KnownNode<'a> {
        let acknowledged = self.acknowledged.get(node).map_or(&[][..], Vec::as_slice);
        let observed = self.now(node).or_else(|| self.last_record(node));
        observed.map_or(KnownNode { acknowledged, ..KnownNode::default() }, |node| KnownNode::of(node, acknowledged))
    }

    /// Returns the nodes of each machine type, by name.
    fn nodes_by_sku(&self) -> NodesBySku {
        let mut types = NodesBySku::new();
        for node in self.nodes.iter().map(|observed| &observed.node) {
            if let Some(sku) = &node.sku {
                types.entry(sku.clone()).or_default().push(node.name.clone());
            }
        }
        types
    }

    /// Returns whether the planner needs the times of these confirmed results now.
    fn is_reload_due(&self, confirmed: &AgentConfirmation) -> bool {
        let Some(snapshot) = self.snapshot else { return false };
        let known = snapshot.nodes.binary_search_by(|record| record.node.name.cmp(&confirmed.node));
        known.is_ok_and(|index| agents::is_reload_due(&snapshot.nodes[index], &snapshot.tests, confirmed))
    }
}

/// Processes everything that is waiting. Returns the nodes whose stored data changed.
pub(crate) fn collect(
    deps: &mut EngineDeps,
    lease: &Lease,
    context: &IngestContext<'_>,
    state: &mut IngestState,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    let mut changed_nodes = collect_documents(deps, lease, context, state, report)?;
    changed_nodes.extend(collect_agent_reports(deps, lease, context, &mut state.agreements, report)?);
    Ok(changed_nodes)
}

/// Ingest state that is kept between cycles.
#[derive(Debug, Default)]
pub(crate) struct IngestState {
    pub(crate) documents: KnownDocuments,
    pub(crate) agreements: PeerAgreements,
}

fn collect_documents(
    deps: &EngineDeps,
    lease: &Lease,
    context: &IngestContext<'_>,
    state: &mut IngestState,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    let IngestState { documents: known, agreements } = state;
    let mut reader = BaselineReader::new(&deps.store, &deps.settings, agreements, || context.nodes_by_sku());
    reader.announce(context.runs.iter().flat_map(|stored| stored.run.nodes.iter().cloned()));
    let OpenedDocuments { mut good, mut bad } = open_all(deps, context, known, &mut reader, report)?;
    let results = good.iter_mut().map(|opened| &mut opened.result);
    repeated_disturbance::add_findings(&deps.store, &deps.settings, results)?;
    let changed_nodes = store_results(deps, lease, good, (&mut bad, known), &mut reader, report)?;
    reader.write_counts(lease, context.now)?;
    for (run, _, source) in &bad {
        if let Source::JobOutput { bytes } = source {
            known.remember(*run, bytes);
        }
    }
    reject(deps, lease, bad, context.now, report)?;
    Ok(changed_nodes)
}

/// A valid document, classified but not stored yet.
struct OpenedDocument {
    result: ClassifiedResult,
    /// The counts and sizes in it.
    counts: Vec<(String, f64)>,
    source: Source,
}

/// A rejected document, with the reason.
type BadDocument = (RunId, Rejection, Source);

/// The waiting documents: the valid ones, and the rejected ones.
#[derive(Default)]
struct OpenedDocuments {
    good: Vec<OpenedDocument>,
    bad: Vec<BadDocument>,
}

impl OpenedDocuments {
    fn add(&mut self, run: RunId, opened: Opened, source: Source) {
        match opened {
            Ok((result, counts)) => self.good.push(OpenedDocument { result, counts, source }),
            Err(why) => self.bad.push((run, why, source)),
        }
    }
}

/// Opens and classifies every waiting document.
fn open_all(
    deps: &EngineDeps,
    context: &IngestContext<'_>,
    known: &KnownDocuments,
    reader: &mut BaselineReader<'_>,
    report: &mut CycleReport,
) -> Result<OpenedDocuments, StoreError> {
    let mut all = OpenedDocuments::default();
    for stored in context.runs {
        let run_id = stored.run.id;
        let documents = context.polled.get(&run_id).into_iter().flat_map(|job| &job.documents);
        for bytes in documents.filter(|bytes| known.is_new(run_id, bytes)) {
            let opened = open_document(deps, context, stored, bytes.clone(), reader)?;
            all.add(run_id, opened, Source::JobOutput { bytes: bytes.clone() });
        }
        let Some(share) = &deps.share else { continue };
        for node in stored.run.nodes.iter() {
            let path = Share::document_path(&stored.run, node);
            match share.read(&path) {
                Ok(ResultFile::Missing) => {}
                Ok(ResultFile::Rejected(why)) => all.add(run_id, Err(why), Source::File(path)),
                Ok(ResultFile::Document(bytes)) => {
                    let opened = open_document(deps, context, stored, bytes, reader)?;
                    all.add(run_id, opened, Source::File(path));
                }
                Err(error) => report.problems.push(error.to_string()),
            }
        }
    }
    Ok(all)
}

/// A classified document with the counts and sizes in it, or why it is rejected.
type Opened = Result<(ClassifiedResult, Vec<(String, f64)>), Rejection>;

/// Opens and classifies one document of a run.
///
/// # Errors
/// If the store cannot be read.
fn open_document(
    deps: &EngineDeps,
    context: &IngestContext<'_>,
    stored: &StoredRun,
    bytes: Vec<u8>,
    reader: &mut BaselineReader<'_>,
) -> Result<Opened, StoreError> {
    let mut store_error = None;
    let mut load_baselines = |node: &NodeName, evidence: &TestEvidence| {
        let query = BaselineQuery { node, sku: context.known(node).sku, evidence, before: context.now };
        reader.load(query).unwrap_or_else(|error| {
            store_error = Some(error);
            result_validation::without_baselines(node, evidence)
        })
    };
    let opened = result_validation::open_document(
        &deps.settings,
        stored,
        bytes,
        context.now,
        |node| context.known(node),
        &mut load_baselines,
    );
    let counts = reader.take_counts();
    match store_error {
        Some(error) => Err(error),
        None => Ok(opened.map(|result| (result, counts))),
    }
}

fn store_results(
    deps: &EngineDeps,
    lease: &Lease,
    good: Vec<OpenedDocument>,
    (bad, known): (&mut Vec<BadDocument>, &mut KnownDocuments),
    reader: &mut BaselineReader<'_>,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    if good.is_empty() {
        return Ok(Vec::new());
    }
    let (results, rest): (Vec<_>, Vec<_>) =
        good.into_iter().map(|opened| (opened.result, (opened.counts, opened.source))).unzip();
    let mut changed_nodes = Vec::new();
    let accepted = deps.store.accept(lease, &results)?;
    for ((accepted, result), (counts, source)) in accepted.into_iter().zip(results).zip(rest) {
        let run_id = result.run;
        match accepted {
            Accepted::Stored => {
                if let Source::JobOutput { bytes } = &source {
                    known.remember(run_id, bytes);
                }
                report.results += 1;
                reader.add_counts(&result.node, &counts, result.received)?;
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
    bad: Vec<BadDocument>,
    now: Timestamp,
    report: &mut CycleReport,
) -> Result<(), StoreError> {
    if bad.is_empty() {
        return Ok(());
    }
    deps.store.count_rejected(lease, bad.len() as u64, now)?;
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
    agreements: &mut PeerAgreements,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    let mut changed_nodes = Vec::new();
    let mut rejected_count = 0;
    let EngineDeps { store, settings, inboxes, .. } = deps;
    let mut reader = BaselineReader::new(store, settings, agreements, || context.nodes_by_sku());
    for inbox in inboxes {
        // A new name may belong to a machine with a history: the planner identifies the machine first, and until then
        // the messages of its agent wait.
        let mut pending = inbox.pending();
        pending.retain(|message| context.last_record(&message.node).is_some());
        reader.announce(pending.iter().map(|message| message.node.clone()));
        for message in &pending {
            match open_report(settings, context, message, &mut reader)? {
                Ok(findings) => {
                    let counts = reader.take_counts();
                    if store.accept_agent(lease, &findings)? == Accepted::Stored {
                        reader.add_counts(&findings.node, &counts, findings.received)?;
                        changed_nodes.push(findings.node);
                    }
                }
                Err(why) => {
                    reader.take_counts();
                    tracing::warn!(node = %message.node, %why, "agent report rejected");
                    rejected_count += 1;
                }
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

/// Opens and classifies the report of an agent.
///
/// # Errors
/// If the store cannot be read.
fn open_report(
    settings: &Settings,
    context: &IngestContext<'_>,
    message: &AgentMessage,
    reader: &mut BaselineReader<'_>,
) -> Result<Result<AgentFindings, Rejection>, StoreError> {
    let known = context.known(&message.node);
    let mut store_error = None;
    let mut load_baselines = |node: &NodeName, evidence: &TestEvidence| {
        let query = BaselineQuery { node, sku: known.sku, evidence, before: context.now };
        reader.load_expectations(query).unwrap_or_else(|error| {
            store_error = Some(error);
            result_validation::without_baselines(node, evidence)
        })
    };
    let signed = (&message.node, &message.key, message.bytes.as_slice());
    let opened = result_validation::open_report(settings, known, signed, context.now, &mut load_baselines);
    match store_error {
        Some(error) => Err(error),
        None => Ok(opened),
    }
}
