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
    baselines::{BaselineQuery, BaselineReader},
    cycle_report::CycleReport,
    deps::EngineDeps,
    ingest::{self, ClassifyContext},
    rejection::Rejection,
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
        let place = self.nodes.binary_search_by(|seen| seen.node.name.cmp(node)).ok()?;
        Some(&self.nodes[place].node)
    }

    fn last_record(&self, node: &NodeName) -> Option<&'a Node> {
        let nodes = &self.snapshot?.nodes;
        let place = nodes.binary_search_by(|record| record.node.name.cmp(node)).ok()?;
        Some(&nodes[place].node)
    }

    fn acknowledged_by(&self, node: &NodeName) -> Vec<AcknowledgedEvents> {
        self.acknowledged.get(node).cloned().unwrap_or_default()
    }

    /// Returns the nodes of each machine type, by name.
    fn nodes_by_sku(&self) -> BTreeMap<Sku, Vec<NodeName>> {
        let mut types: BTreeMap<Sku, Vec<NodeName>> = BTreeMap::new();
        for node in self.nodes.iter().map(|seen| &seen.node) {
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
    parts: &mut EngineDeps,
    lease: &Lease,
    known: &IngestContext<'_>,
    turned: &mut RejectedDocuments,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    let (good, mut bad) = open_all(parts, known, turned, report)?;
    let mut touched = store_results(parts, lease, good, &mut bad, report)?;
    for (run, _, source) in &bad {
        if let Source::JobOutput { bytes } = source {
            turned.remember(*run, bytes);
        }
    }
    reject(parts, lease, bad, known.now, report)?;
    touched.extend(collect_agent_reports(parts, lease, known, report)?);
    Ok(touched)
}

type OpenedDocuments = Vec<(ClassifiedResult, Source)>;
type BadDocuments = Vec<(RunId, Rejection, Source)>;

/// Opens and classifies every waiting document: the valid ones, and the rejected ones.
fn open_all(
    parts: &EngineDeps,
    known: &IngestContext<'_>,
    turned: &RejectedDocuments,
    report: &mut CycleReport,
) -> Result<(OpenedDocuments, BadDocuments), StoreError> {
    let IngestContext { runs, polled, now, .. } = *known;
    let settled = |node: &NodeName| known.acknowledged_by(node);
    let (mut good, mut bad) = (OpenedDocuments::new(), BadDocuments::new());
    // Sorting a hundred thousand names is skipped if no rule compares with peers.
    let none_wanted = BaselineNeeds::for_all_checks(&parts.settings.rules).peer_metrics.is_empty();
    let of_type = if none_wanted { BTreeMap::new() } else { known.nodes_by_sku() };
    let mut reader = BaselineReader::new(&parts.store, &parts.settings, of_type);
    let mut unread = None;
    for stored in runs {
        let name = stored.run.id;
        let sku = known.sku(stored.run.nodes.first());
        let mut past = |node: &NodeName, evidence: &TestEvidence| {
            let of = BaselineQuery { node, sku, test: &evidence.test, at: evidence.ended, before: now };
            reader.load(of).unwrap_or_else(|error| {
                unread = Some(error);
                ingest::without_baselines(node, evidence)
            })
        };
        let offered = polled.get(&name).into_iter().flat_map(|job| &job.documents);
        for bytes in offered.filter(|bytes| turned.is_new(name, bytes)) {
            let source = Source::JobOutput { bytes: bytes.clone() };
            match ingest::open_document(&parts.settings, stored, sku, bytes.clone(), now, settled, &mut past) {
                Ok(result) => good.push((result, source)),
                Err(why) => bad.push((name, why, source)),
            }
        }
        let Some(share) = &parts.share else { continue };
        for node in stored.run.nodes.iter() {
            let path = Share::document_path(&stored.run, node);
            match share.read(&path) {
                Ok(ResultFile::Missing) => {}
                Ok(ResultFile::Rejected(why)) => bad.push((name, why, Source::File(path))),
                Ok(ResultFile::Document(bytes)) => {
                    match ingest::open_document(&parts.settings, stored, sku, bytes, now, settled, &mut past) {
                        Ok(result) => good.push((result, Source::File(path))),
                        Err(why) => bad.push((name, why, Source::File(path))),
                    }
                }
                Err(error) => report.problems.push(error.to_string()),
            }
        }
    }
    match unread {
        Some(error) => Err(error),
        None => Ok((good, bad)),
    }
}

fn store_results(
    parts: &EngineDeps,
    lease: &Lease,
    good: Vec<(ClassifiedResult, Source)>,
    bad: &mut Vec<(RunId, Rejection, Source)>,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    if good.is_empty() {
        return Ok(Vec::new());
    }
    let (results, sources): (Vec<_>, Vec<_>) = good.into_iter().unzip();
    let mut touched = Vec::new();
    for ((accepted, result), source) in parts.store.accept(lease, &results)?.into_iter().zip(results).zip(sources) {
        let name = result.run;
        match accepted {
            Accepted::Stored => {
                report.results += 1;
                touched.push(result.node);
            }
            // A file stays on the share while its run is active; it is the same file as in the last cycle.
            Accepted::Duplicate if matches!(source, Source::File(_)) => {}
            Accepted::Duplicate => bad.push((name, Rejection::Duplicate, source)),
            Accepted::UnknownRun => bad.push((name, Rejection::UnknownRun, source)),
        }
    }
    Ok(touched)
}

fn reject(
    parts: &EngineDeps,
    lease: &Lease,
    bad: Vec<(RunId, Rejection, Source)>,
    now: Timestamp,
    report: &mut CycleReport,
) -> Result<(), StoreError> {
    if bad.is_empty() {
        return Ok(());
    }
    parts.store.count_rejected(lease, bad.len() as u64)?;
    report.rejected += bad.len();
    for (name, why, source) in bad {
        tracing::warn!(run = %name, %why, "result rejected");
        let Some(share) = &parts.share else { continue };
        let moved = match &source {
            Source::JobOutput { bytes } => share.reject_bytes(&name.to_string(), bytes, &why, now),
            Source::File(path) => share.reject_file(path, &why, now),
        };
        if let Err(error) = moved {
            report.problems.push(error.to_string());
        }
    }
    Ok(())
}

fn collect_agent_reports(
    parts: &mut EngineDeps,
    lease: &Lease,
    known: &IngestContext<'_>,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    let mut touched = Vec::new();
    let mut turned_away = 0;
    for inbox in &mut parts.inboxes {
        let mut seen_to = Vec::new();
        // A new name may belong to a machine with a history: the planner identifies the machine first, and until then
        // the messages of its agent wait.
        for message in inbox.pending().into_iter().filter(|message| known.last_record(&message.node).is_some()) {
            seen_to.push(message.number);
            let sku = known.sku(&message.node);
            let settled = known.acknowledged_by(&message.node);
            let by = ClassifyContext { settings: &parts.settings, sku, acknowledged: &settled };
            match ingest::open_report(by, &message.node, &message.key, &message.bytes, known.now) {
                Ok(findings) => {
                    if parts.store.accept_agent(lease, &findings)? == Accepted::Stored {
                        touched.push(findings.node);
                    }
                }
                Err(why) => {
                    tracing::warn!(node = %message.node, %why, "agent report rejected");
                    turned_away += 1;
                }
            }
        }
        if !seen_to.is_empty() {
            inbox.acknowledge(&seen_to);
        }
        parts.store.record_agent_contacts(lease, &inbox.take_last_reports(known.now))?;
    }
    if turned_away > 0 {
        parts.store.count_rejected(lease, turned_away)?;
        report.rejected += usize::try_from(turned_away).unwrap_or(usize::MAX);
    }
    Ok(touched)
}
