//! Collects the results of each cycle: what nodes have sent ([`crate::queued_results`]), documents from the backend's
//! response, and documents on the share. Valid ones are stored in one transaction; the others go to `rejected/` with the
//! reason.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use doctor_checks::document::TestEvidence;
use doctor_core::{
    ids::{NodeName, RunId},
    time::Timestamp,
};
use doctor_host::shared_directory::Entry;
use doctor_store::{
    Lease, StoreError,
    records::{Accepted, ClassifiedResult, StoredRun},
};

use crate::{
    baseline_reader::{BaselineQuery, BaselineReader},
    cycle_report::CycleReport,
    deps::EngineDeps,
    expectations::PeerAgreements,
    ingest_context::IngestContext,
    queued_results,
    rejection::Rejection,
    repeated_disturbance, result_validation,
    share::{ResultFile, Share},
};

/// The source of a document, which determines what happens to it when it is rejected.
enum Source {
    JobOutput {
        bytes: Vec<u8>,
    },
    File {
        path: PathBuf,
        /// The file that was read.
        entry: Entry,
    },
}

/// Rejected documents that a backend keeps returning, or that stay on the share until the writing thread moves them, or for ever if
/// it may not. Each is rejected, and counted, once.
#[derive(Debug, Default)]
pub(crate) struct RejectedDocuments {
    outputs: BTreeSet<(RunId, u64)>,
    files: BTreeMap<(RunId, PathBuf), RejectedFile>,
}

#[derive(Debug, Clone, Copy)]
struct RejectedFile {
    entry: Entry,
    /// Whether the writing thread has it. Otherwise it is offered again.
    is_queued: bool,
}

impl RejectedDocuments {
    /// Returns whether this document was not rejected before.
    fn is_new(&self, run: RunId, bytes: &[u8]) -> bool {
        !self.outputs.contains(&(run, fingerprint(bytes)))
    }

    fn remember(&mut self, run: RunId, bytes: &[u8]) {
        self.outputs.insert((run, fingerprint(bytes)));
    }

    /// Returns the file that was rejected at this path and need not be read again.
    fn done(&self, run: RunId, path: &Path) -> Option<Entry> {
        let known = self.files.get(&(run, path.to_owned()))?;
        known.is_queued.then_some(known.entry)
    }

    fn is_new_file(&self, run: RunId, path: &Path, entry: &Entry) -> bool {
        self.files.get(&(run, path.to_owned())).is_none_or(|known| !known.entry.is_same_file(entry))
    }

    fn remember_file(&mut self, run: RunId, path: PathBuf, file: RejectedFile) {
        self.files.insert((run, path), file);
    }

    /// Drops the documents of a run that is over.
    pub(crate) fn forget(&mut self, run: RunId) {
        self.outputs.retain(|(other, _)| *other != run);
        self.files.retain(|(other, _), _| *other != run);
    }
}

fn fingerprint(bytes: &[u8]) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

/// Processes everything that is waiting. Returns the nodes whose stored data changed. A source that fails does not keep the
/// others from being processed, nor the cycle from going on.
pub(crate) fn collect(
    deps: &mut EngineDeps,
    lease: &Lease,
    context: &IngestContext<'_>,
    state: &mut IngestState,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    let mut changed_nodes = Vec::new();
    // First: a job that has sent its result need not have written it elsewhere.
    let entered = queued_results::enter(deps, lease, context, &mut state.agreements, (&mut changed_nodes, report));
    let entered = report.unless_lease_lost("entering the messages of nodes", entered)?;
    let documents = collect_documents(deps, lease, context, state, report);
    let documents = report.unless_lease_lost("collecting the results of runs", documents)?;
    if documents.is_none() {
        state.unread.extend(context.runs.iter().map(|stored| stored.run.id));
    }
    let of_inboxes = queued_results::collect_from_inboxes(deps, lease, context, &mut state.agreements, report);
    let of_inboxes = report.unless_lease_lost("storing what is known of agents", of_inboxes)?;
    state.failed = entered.is_none() || documents.is_none() || of_inboxes.is_none();
    if state.failed {
        // A write whose answer was lost may have been committed.
        changed_nodes.extend(context.nodes.iter().map(|observed| observed.node.name.clone()));
    }
    changed_nodes.extend(documents.into_iter().chain(of_inboxes).flatten());
    Ok(changed_nodes)
}

/// Ingest state that is kept between cycles.
#[derive(Debug, Default)]
pub(crate) struct IngestState {
    pub(crate) rejected: RejectedDocuments,
    pub(crate) agreements: PeerAgreements,
    /// Runs whose results could not be looked for in this cycle, because the shared directory or the store does not answer.
    pub(crate) unread: BTreeSet<RunId>,
    /// Whether a part of the last collection failed: it is not known what it stored.
    pub(crate) failed: bool,
    /// How many results the last cycle read before its time was over: this one begins after them.
    read_before: usize,
}

fn collect_documents(
    deps: &EngineDeps,
    lease: &Lease,
    context: &IngestContext<'_>,
    state: &mut IngestState,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    let IngestState { rejected, agreements, unread, read_before, .. } = state;
    unread.clear();
    let mut reader = BaselineReader::new(&deps.store, &deps.settings, agreements, || context.nodes_by_sku());
    reader.announce(context.runs.iter().flat_map(|stored| stored.run.nodes.iter().cloned()));
    let mut opened = OpenedDocuments::default();
    open_job_outputs(deps, context, rejected, &mut reader, &mut opened)?;
    if let Some(share) = &deps.share {
        let mut files = ResultFiles { share, unread, read_before, rejected, opened: &mut opened };
        files.open_all(deps, context, &mut reader, report)?;
    }
    let OpenedDocuments { mut good, mut bad } = opened;
    let results = good.iter_mut().map(|opened| &mut opened.result);
    repeated_disturbance::add_findings(&deps.store, &deps.settings, results)?;
    let changed_nodes = store_results(deps, lease, good, &mut bad, &mut reader, report)?;
    reader.write_counts(lease, context.now)?;
    for (run, _, source) in &bad {
        if let Source::JobOutput { bytes } = source {
            rejected.remember(*run, bytes);
        }
    }
    reject(deps, lease, bad, rejected, context.now, report)?;
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

/// Opens and classifies the documents in the backend's response.
fn open_job_outputs(
    deps: &EngineDeps,
    context: &IngestContext<'_>,
    rejected: &RejectedDocuments,
    reader: &mut BaselineReader<'_>,
    all: &mut OpenedDocuments,
) -> Result<(), StoreError> {
    for stored in context.runs {
        let run_id = stored.run.id;
        let documents = context.polled.get(&run_id).into_iter().flat_map(|job| &job.documents);
        for bytes in documents.filter(|bytes| rejected.is_new(run_id, bytes)) {
            let opened = open_document(deps, context, stored, bytes.clone(), reader)?;
            all.add(run_id, opened, Source::JobOutput { bytes: bytes.clone() });
        }
    }
    Ok(())
}

/// The results on the shared directory.
struct ResultFiles<'a> {
    share: &'a Share,
    unread: &'a mut BTreeSet<RunId>,
    read_before: &'a mut usize,
    rejected: &'a RejectedDocuments,
    opened: &'a mut OpenedDocuments,
}

impl ResultFiles<'_> {
    /// Opens and classifies the documents on the share, as far as it answers. Results wait there: what is not read now is read in
    /// a later cycle, and its run does not end before.
    fn open_all(
        &mut self,
        deps: &EngineDeps,
        context: &IngestContext<'_>,
        reader: &mut BaselineReader<'_>,
        report: &mut CycleReport,
    ) -> Result<(), StoreError> {
        let path = |stored: &StoredRun, node: &NodeName| Share::document_path(&stored.run, node);
        let mut expected: Vec<(usize, PathBuf)> = Vec::new();
        for (index, stored) in context.runs.iter().enumerate() {
            expected.extend(stored.run.nodes.iter().map(|node| (index, path(stored, node))));
        }
        // A share so slow that one cycle cannot read all must not keep the last ones from ever being read.
        let first = if expected.is_empty() { 0 } else { *self.read_before % expected.len() };
        expected.rotate_left(first);
        let done = |run: usize, path: &Path| self.rejected.done(context.runs[run].run.id, path);
        let paths = expected.iter().map(|(run, path)| (path.clone(), done(*run, path))).collect();
        let (mut answered, mut store_error) = (0, None);
        let outcome = self.share.read_results(paths, |index, result| {
            answered = index + 1;
            let (run, path) = &expected[index];
            let stored = &context.runs[*run];
            let run_id = stored.run.id;
            match result {
                Ok(ResultFile::Missing | ResultFile::RejectedBefore) => {}
                Ok(ResultFile::Rejected { why, entry }) => {
                    self.opened.add(run_id, Err(why), Source::File { path: path.clone(), entry });
                }
                Ok(ResultFile::Document { bytes, entry }) => {
                    match open_document(deps, context, stored, bytes, reader) {
                        Ok(opened) => self.opened.add(run_id, opened, Source::File { path: path.clone(), entry }),
                        Err(error) => store_error = Some(error),
                    }
                }
                Err(error) => {
                    if error.is_outage() {
                        self.unread.insert(run_id);
                    }
                    report.add_problem(error.to_string());
                }
            }
        });
        *self.read_before = 0;
        if let Err(error) = outcome {
            report.add_problem(error.to_string());
            self.unread.extend(expected[answered..].iter().map(|(run, _)| context.runs[*run].run.id));
            *self.read_before = first + answered;
        }
        store_error.map_or(Ok(()), Err)
    }
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
    bad: &mut Vec<BadDocument>,
    reader: &mut BaselineReader<'_>,
    report: &mut CycleReport,
) -> Result<Vec<NodeName>, StoreError> {
    if good.is_empty() {
        return Ok(Vec::new());
    }
    let (results, rest): (Vec<_>, Vec<_>) =
        good.into_iter().map(|opened| (opened.result, (opened.counts, opened.source))).unzip();
    let mut changed_nodes = Vec::new();
    let accepted = accept(deps, lease, &results)?;
    for ((accepted, result), (counts, source)) in accepted.into_iter().zip(results).zip(rest) {
        let run_id = result.run;
        let accepted = match accepted {
            Ok(accepted) => accepted,
            Err(why) => {
                bad.push((run_id, why, source));
                continue;
            }
        };
        match accepted {
            Accepted::Stored => {
                report.results += 1;
                reader.add_counts(&result.node, &counts, result.received)?;
                changed_nodes.push(result.node);
            }
            // A file stays on the share while its run is active; it is the same file as in the last cycle.
            Accepted::Duplicate if matches!(source, Source::File { .. }) => {}
            // The job has also posted it.
            Accepted::Duplicate
                if queued_results::is_stored(&deps.store, (result.run, &result.node), &result.evidence)? => {}
            Accepted::Duplicate => bad.push((run_id, Rejection::Duplicate, source)),
            Accepted::UnknownRun => bad.push((run_id, Rejection::UnknownRun, source)),
        }
    }
    Ok(changed_nodes)
}

/// Stores results together, or each alone if the store refuses the values of one.
fn accept(
    deps: &EngineDeps,
    lease: &Lease,
    results: &[ClassifiedResult],
) -> Result<Vec<Result<Accepted, Rejection>>, StoreError> {
    match deps.store.accept(lease, results) {
        Err(error) if error.refuses_values() => {}
        accepted => return Ok(accepted?.into_iter().map(Ok).collect()),
    }
    let mut all = Vec::with_capacity(results.len());
    for result in results {
        match deps.store.accept(lease, std::slice::from_ref(result)) {
            Ok(accepted) => all.extend(accepted.into_iter().map(Ok)),
            Err(error) if error.refuses_values() => all.push(Err(Rejection::by_store(&error))),
            Err(error) => return Err(error),
        }
    }
    Ok(all)
}

fn reject(
    deps: &EngineDeps,
    lease: &Lease,
    bad: Vec<BadDocument>,
    rejected: &mut RejectedDocuments,
    now: Timestamp,
    report: &mut CycleReport,
) -> Result<(), StoreError> {
    let is_new = |(run, _, source): &BadDocument| match source {
        Source::JobOutput { .. } => true,
        Source::File { path, entry } => rejected.is_new_file(*run, path, entry),
    };
    let bad: Vec<(bool, BadDocument)> = bad.into_iter().map(|bad| (is_new(&bad), bad)).collect();
    let count = bad.iter().filter(|(is_new, _)| *is_new).count();
    if count > 0 {
        deps.store.count_rejected(lease, count as u64, now)?;
        report.rejected += count;
    }
    for (is_new, (run_id, why, source)) in bad {
        if is_new {
            tracing::warn!(run = %run_id, %why, "result rejected");
        }
        let Some(share) = &deps.share else { continue };
        let queued = match source {
            Source::JobOutput { bytes } => {
                share.write_later(bytes.len(), move |files| files.reject_bytes(&run_id.to_string(), &bytes, &why, now))
            }
            Source::File { path, entry } => {
                let of = path.clone();
                let is_queued = share.write_later(0, move |files| files.reject_file(&of, &entry, &why, now));
                rejected.remember_file(run_id, path, RejectedFile { entry, is_queued });
                is_queued
            }
        };
        if !queued {
            report.add_problem("rejected results are not kept: the shared directory is too slow".to_owned());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use doctor_host::shared_directory::SharedDirectory;

    use super::*;

    #[test]
    fn a_rejected_file_is_counted_once_until_another_has_its_name_and_offered_until_it_is_queued() {
        let folder = tempfile::tempdir().unwrap();
        let root = SharedDirectory::open(folder.path()).unwrap();
        let write = |content: &str| {
            std::fs::write(folder.path().join("new"), content).unwrap();
            std::fs::rename(folder.path().join("new"), folder.path().join("a.json")).unwrap();
            root.entry(Path::new("a.json")).unwrap().unwrap()
        };
        let (path, run, other) = (PathBuf::from("a.json"), RunId::from_number(1), RunId::from_number(2));
        let mut rejected = RejectedDocuments::default();
        let bad = write("bad");
        assert!(rejected.is_new_file(run, &path, &bad) && rejected.done(run, &path).is_none());
        rejected.remember_file(run, path.clone(), RejectedFile { entry: bad, is_queued: false });
        assert!(!rejected.is_new_file(run, &path, &bad), "it is not counted again");
        assert!(rejected.done(run, &path).is_none(), "it is read and offered again");
        rejected.remember_file(run, path.clone(), RejectedFile { entry: bad, is_queued: true });
        assert_eq!(rejected.done(run, &path), Some(bad));
        assert!(rejected.is_new_file(run, &path, &write("as bad as before")));
        assert!(rejected.is_new_file(other, &path, &bad));
        rejected.forget(other);
        assert!(rejected.done(run, &path).is_some());
        rejected.forget(run);
        assert!(rejected.done(run, &path).is_none());
    }
}
