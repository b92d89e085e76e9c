//! Extracts results and logs from the log that dstack keeps of a job.
//!
//! The document is at the end of the log, between unique marker lines. dstack collects logs a few seconds late, and some of its
//! log stores show them later still: what is missing is requested again for as long as the run is polled.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
};

use doctor_backend::MAX_REMAINING_OUTPUT;
use doctor_checks::result_transport;
use doctor_core::{
    ids::{NodeName, RunId},
    last_output::end_of,
};
use serde_json::json;

use super::{
    api_types::LogPage,
    client::{Client, DstackApiError},
    run_types::{Run, Selector},
};

/// The most bytes of a log, over all pages: the longest document and the output before it.
const MAX_LOG_BYTES: usize = 16 << 20;
/// The largest page that dstack returns.
const PAGE: u32 = 1000;
/// The most pages of one log. A store may return empty pages before it has something.
const MAX_PAGES: usize = 400;

/// Results taken from logs, by run.
#[derive(Debug, Default)]
pub(super) struct RunResults(Mutex<BTreeMap<RunId, RunResult>>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct RunResult {
    node: Option<NodeName>,
    document: Option<Vec<u8>>,
    log: String,
}

impl RunResults {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<RunId, RunResult>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the results of all other runs.
    pub(super) fn retain_runs(&self, runs: &[RunId]) {
        let runs: BTreeSet<&RunId> = runs.iter().collect();
        self.lock().retain(|run, _| runs.contains(run));
    }

    /// Returns the document of a run whose job has ended, after fetching it if needed.
    pub(super) fn fetch(&self, client: &Client, project: &str, run: RunId, record: &Run) -> Option<Vec<u8>> {
        if let Some(document) = self.lock().get(&run).and_then(|result| result.document.clone()) {
            return Some(document);
        }
        match read_log(client, project, record) {
            Ok(text) => {
                let result = result_from_log(&text, node_of(record));
                let document = result.document.clone();
                self.lock().insert(run, result);
                document
            }
            Err(error) => {
                tracing::warn!(run = %run, %error, "job log not fetched");
                None
            }
        }
    }

    pub(super) fn logs(&self, run: RunId) -> Vec<(NodeName, String)> {
        let all = self.lock();
        all.get(&run).and_then(|result| Some((result.node.clone()?, result.log.clone()))).into_iter().collect()
    }
}

/// Returns the end of what a job printed, without a result document, in whole lines.
pub(super) fn last_output(client: &Client, project: &str, run: &Run) -> Result<String, DstackApiError> {
    let text = read_log(client, project, run)?;
    let log = result_transport::split_log(&text).0;
    Ok(end_of(log, usize::try_from(MAX_REMAINING_OUTPUT).unwrap_or(usize::MAX)).to_owned())
}

fn node_of(run: &Run) -> Option<NodeName> {
    use Selector::{Name, Plain};
    match run.run_spec.configuration.instances.as_deref()? {
        [Plain(name) | Name { name }] => NodeName::new(name).ok(),
        _ => None,
    }
}

fn result_from_log(text: &str, node: Option<NodeName>) -> RunResult {
    let (log, packed) = result_transport::split_log(text);
    let document = packed.and_then(|_| match result_transport::extract_from_log(text) {
        Ok(document) => Some(document),
        Err(why) => {
            tracing::warn!(%why, "result missing from the job log");
            None
        }
    });
    RunResult { node, document, log: log.to_owned() }
}

/// Reads the job's output, as far as dstack has it and within our limits.
pub(super) fn read_log(client: &Client, project: &str, run: &Run) -> Result<String, DstackApiError> {
    let Some(newest) = run.latest_submission() else { return Ok(String::new()) };
    let (mut bytes, mut next) = (Vec::new(), None::<String>);
    for _ in 0..MAX_PAGES {
        let mut query =
            json!({ "run_name": run.name(), "job_submission_id": newest.id, "limit": PAGE, "descending": false });
        if let Some(token) = &next {
            query["next_token"] = json!(token);
        }
        let page: LogPage = client.post(&format!("/api/project/{project}/logs/poll"), &query)?;
        bytes.extend(page.bytes());
        // At the end, a store returns the same token again, or none.
        let over = page.next_token.is_none() || (page.next_token == next && page.is_empty());
        if over || bytes.len() > MAX_LOG_BYTES {
            break;
        }
        next = page.next_token;
    }
    // A job has a terminal, which ends lines with CR LF.
    Ok(String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_checks::result_transport::PackedDocument;

    #[test]
    fn the_document_is_extracted_from_the_log() {
        let node = NodeName::new("bed-0").ok();
        let log =
            format!("sh: no job control\njob: done\n{}", PackedDocument::pack(b"a document").unwrap().to_log_lines());
        let complete = result_from_log(&log, node.clone());
        assert_eq!(
            (complete.document.as_deref(), complete.log.as_str()),
            (Some(&b"a document"[..]), "sh: no job control\njob: done\n")
        );
        let cut = result_from_log(&log[..log.len() - 40], node);
        assert_eq!(cut.document, None, "half a document is none");
        assert_eq!(result_from_log("job: begun\n", None).log, "job: begun\n");
    }
}
