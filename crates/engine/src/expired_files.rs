//! Removes expired files from the shared directory: logs with their documents, support bundles, rejected documents.

use std::time::{Duration, Instant};

use doctor_core::{
    ids::RunId,
    time::{Span, Timestamp},
};
use doctor_store::records::ExpiredLog;

use crate::{
    share::{Share, ShareError, ShareFiles},
    support_bundle,
};

/// How long one call may remove files. The rest is listed again at the next time.
const LIMIT: Duration = Duration::from_secs(15);
/// Runs whose logs are removed at a time.
const AT_A_TIME: usize = 200;

/// Removes what has expired, as far as the shared directory answers in time. Returns the runs whose logs are gone.
pub(crate) fn remove(share: &Share, logs: &[ExpiredLog], keep_evidence: Span, now: Timestamp) -> Vec<RunId> {
    let until = Instant::now() + LIMIT;
    let mut removed = Vec::new();
    for logs in logs.chunks(AT_A_TIME) {
        let left = until.saturating_duration_since(Instant::now());
        let work = logs.to_vec();
        match share.write("removing expired logs", left, move |files| remove_logs(files, &work)).and_then(|done| done) {
            Ok(()) => removed.extend(logs.iter().map(|log| log.run)),
            Err(error) => {
                tracing::warn!(%error, "expired logs stay on the shared directory for now");
                return removed;
            }
        }
    }
    share.write_later(0, move |files| {
        // What a node put in place of one folder must not keep the others from being cleaned.
        let bundles = support_bundle::remove_expired(files, now.minus(keep_evidence));
        let rejected = files.prune(now);
        bundles.and(rejected)
    });
    removed
}

fn remove_logs(files: &ShareFiles, logs: &[ExpiredLog]) -> Result<(), ShareError> {
    for log in logs {
        for test in &log.tests {
            files.remove_log(test, &log.node, log.planned)?;
        }
    }
    Ok(())
}
