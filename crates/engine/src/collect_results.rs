//! Collects the results of each cycle: what nodes have sent ([`crate::queued_results`]), documents from the backend's
//! response, and documents on the share. Valid ones are stored, many in one transaction; the others go to `rejected/`
//! with the reason. One that cannot be entered because of what the store has about its node does not keep others out.

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
    cycle_report::{CycleReport, chain},
    deps::EngineDeps,
    expectations::PeerAgreements,
    ingest_context::IngestContext,
    queued_results,
    rejection::Rejection,
    repeated_disturbance, result_validation,
    share::{ResultFile, Share, ShareError},
};

/// Documents are entered when those that are open are longer than this together: each of thousands may have 16 MiB.
const MAX_OPENED_BYTES: usize = 8 << 20;

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

/// Rejected documents that a backend keeps returning, or that stay on the share until the writing thread moves them, or
/// for ever if it may not. Each is rejected, and counted, once.
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

/// Processes everything that is waiting. Returns the nodes whose stored data changed. A source that fails does not keep
/// the others from being processed, nor the cycle from going on.
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
    /// Runs whose results could not be looked for or entered in this cycle, because the shared directory or the store
    /// does not answer, or because of what the store has.
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
    let mut documents = DocumentCollector {
        deps,
        lease,
        context,
        reader,
        report,
        rejected,
        unread,
        good: Vec::new(),
        bad: Vec::new(),
        opened_bytes: 0,
        changed_nodes: Vec::new(),
        one_was_cancelled: false,
    };
    documents.open_job_outputs()?;
    if let Some(share) = &deps.share {
        documents.open_files(share, read_before)?;
    }
    documents.enter()?;
    documents.reader.write_counts(lease, context.now)?;
    Ok(documents.changed_nodes)
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

/// Opens the waiting documents and enters them, a few megabytes at a time.
struct DocumentCollector<'a, 'b> {
    deps: &'a EngineDeps,
    lease: &'a Lease,
    context: &'a IngestContext<'b>,
    reader: BaselineReader<'a>,
    report: &'a mut CycleReport,
    rejected: &'a mut RejectedDocuments,
    unread: &'a mut BTreeSet<RunId>,
    /// Valid documents that are not entered yet.
    good: Vec<OpenedDocument>,
    /// Documents that are not rejected yet.
    bad: Vec<BadDocument>,
    /// The length of both.
    opened_bytes: usize,
    changed_nodes: Vec<NodeName>,
    /// Whether the database has cancelled a statement for one document alone.
    one_was_cancelled: bool,
}

impl DocumentCollector<'_, '_> {
    /// Opens the documents in the backend's response.
    fn open_job_outputs(&mut self) -> Result<(), StoreError> {
        let context = self.context;
        for stored in context.runs {
            let run_id = stored.run.id;
            for bytes in context.polled.get(&run_id).into_iter().flat_map(|job| &job.documents) {
                if self.rejected.is_new(run_id, bytes) {
                    self.open(stored, bytes.clone(), Source::JobOutput { bytes: bytes.clone() })?;
                }
            }
        }
        Ok(())
    }

    /// Opens the documents on the share, as far as it answers. Results wait there: what is not read now is read in a
    /// later cycle, and its run does not end before.
    fn open_files(&mut self, share: &Share, read_before: &mut usize) -> Result<(), StoreError> {
        let context = self.context;
        let mut expected: Vec<(usize, PathBuf)> = Vec::new();
        for (index, stored) in context.runs.iter().enumerate() {
            let path = |node: &NodeName| (index, Share::document_path(&stored.run, node));
            expected.extend(stored.run.nodes.iter().map(path));
        }
        // A share so slow that one cycle cannot read all must not keep the last ones from ever being read.
        let first = if expected.is_empty() { 0 } else { *read_before % expected.len() };
        expected.rotate_left(first);
        let done = |run: usize, path: &Path| self.rejected.done(context.runs[run].run.id, path);
        let paths = expected.iter().map(|(run, path)| (path.clone(), done(*run, path))).collect();
        let (mut answered, mut entered) = (0, Ok(()));
        let outcome = share.read_results(paths, |index, result| {
            answered = index + 1;
            if entered.is_ok() {
                let (run, path) = &expected[index];
                entered = self.open_file(&context.runs[*run], path, result);
            }
        });
        *read_before = 0;
        if let Err(error) = outcome {
            self.report.add_problem(error.to_string());
            self.unread.extend(expected[answered..].iter().map(|(run, _)| context.runs[*run].run.id));
            *read_before = first + answered;
        }
        entered
    }

    fn open_file(
        &mut self,
        stored: &StoredRun,
        path: &Path,
        result: Result<ResultFile, ShareError>,
    ) -> Result<(), StoreError> {
        let run_id = stored.run.id;
        match result {
            Ok(ResultFile::Missing | ResultFile::RejectedBefore) => {}
            Ok(ResultFile::Rejected { why, entry }) => {
                self.bad.push((run_id, why, Source::File { path: path.to_owned(), entry }));
            }
            Ok(ResultFile::Document { bytes, entry }) => {
                self.open(stored, bytes, Source::File { path: path.to_owned(), entry })?;
            }
            Err(error) => {
                if error.is_outage() {
                    self.unread.insert(run_id);
                }
                self.report.add_problem(error.to_string());
            }
        }
        Ok(())
    }

    /// Opens and classifies a document, and enters those that are open once they are long enough.
    fn open(&mut self, stored: &StoredRun, bytes: Vec<u8>, source: Source) -> Result<(), StoreError> {
        let run_id = stored.run.id;
        self.opened_bytes += bytes.len();
        match open_document(self.deps, self.context, stored, bytes, &mut self.reader) {
            Ok(Ok((result, counts))) => self.good.push(OpenedDocument { result, counts, source }),
            Ok(Err(why)) => self.bad.push((run_id, why, source)),
            Err(error) => self.leave(run_id, error)?,
        }
        if self.opened_bytes > MAX_OPENED_BYTES { self.enter() } else { Ok(()) }
    }

    /// Leaves a document for a later cycle if the error may be about this one alone. Its run does not end before.
    fn leave(&mut self, run: RunId, error: StoreError) -> Result<(), StoreError> {
        if !error.is_of_some_data() {
            return Err(error);
        }
        self.unread.insert(run);
        self.report.add_problem(format!("a result of {run} cannot be entered: {}", chain(&error)));
        Ok(())
    }

    /// Stores the valid documents that are open, and rejects the others.
    fn enter(&mut self) -> Result<(), StoreError> {
        self.opened_bytes = 0;
        let mut good = Vec::with_capacity(self.good.len());
        for mut opened in std::mem::take(&mut self.good) {
            let deps = self.deps;
            match repeated_disturbance::add_findings(&deps.store, &deps.settings, [&mut opened.result]) {
                Ok(()) => good.push(opened),
                Err(error) => self.leave(opened.result.run, error)?,
            }
        }
        self.store_results(good)?;
        let bad = std::mem::take(&mut self.bad);
        for (run, _, source) in &bad {
            if let Source::JobOutput { bytes } = source {
                self.rejected.remember(*run, bytes);
            }
        }
        reject(self.deps, self.lease, bad, self.rejected, self.context.now, self.report)
    }

    fn store_results(&mut self, good: Vec<OpenedDocument>) -> Result<(), StoreError> {
        if good.is_empty() {
            return Ok(());
        }
        let (results, rest): (Vec<_>, Vec<_>) =
            good.into_iter().map(|opened| (opened.result, (opened.counts, opened.source))).unzip();
        let accepted = self.accept(&results)?;
        for ((accepted, result), (counts, source)) in accepted.into_iter().zip(results).zip(rest) {
            let run_id = result.run;
            match accepted {
                Ok(Accepted::Stored) => {
                    self.report.results += 1;
                    self.reader.add_counts(&result.node, &counts, result.received)?;
                    self.changed_nodes.push(result.node);
                }
                // A file stays on the share while its run is active; it is the same file as in the last cycle.
                Ok(Accepted::Duplicate) if matches!(source, Source::File { .. }) => {}
                Ok(Accepted::Duplicate) => {
                    let of = (run_id, &result.node);
                    match queued_results::is_stored(&self.deps.store, of, &result.evidence) {
                        // The job has also posted it.
                        Ok(true) => {}
                        Ok(false) => self.bad.push((run_id, Rejection::Duplicate, source)),
                        Err(error) => self.leave(run_id, error)?,
                    }
                }
                Ok(Accepted::UnknownRun) => self.bad.push((run_id, Rejection::UnknownRun, source)),
                Err(error) if error.refuses_values() => {
                    self.bad.push((run_id, Rejection::by_store(&error), source));
                }
                Err(error) => self.leave(run_id, error)?,
            }
        }
        Ok(())
    }

    /// Stores results together, or each alone if something in or about one of them cannot be stored.
    fn accept(&mut self, results: &[ClassifiedResult]) -> Result<Vec<Result<Accepted, StoreError>>, StoreError> {
        let (store, lease) = (&self.deps.store, self.lease);
        match store.accept(lease, results) {
            Err(error) if error.is_of_some_data() => {}
            accepted => return Ok(accepted?.into_iter().map(Ok).collect()),
        }
        let mut all = Vec::with_capacity(results.len());
        for result in results {
            match store.accept(lease, std::slice::from_ref(result)) {
                Ok(accepted) => all.extend(accepted.into_iter().map(Ok)),
                // A database that cancels one after another is too slow for all of them, and each attempt takes long.
                Err(error) if error.is_cancelled() && std::mem::replace(&mut self.one_was_cancelled, true) => {
                    return Err(error);
                }
                Err(error) if error.is_of_some_data() => all.push(Err(error)),
                Err(error) => return Err(error),
            }
        }
        Ok(all)
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
