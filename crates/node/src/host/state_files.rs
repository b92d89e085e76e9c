//! The directories of this machine's runs, repairs and reports, which are kept apart.

use std::{io, path::Path};

use doctor_core::time::Span;
use doctor_host::jobs::Jobs;

/// A job that has not started after this time never will.
const START_LIMIT: Span = Span::from_secs(30);

/// Prefix of job ids.
const KIND: &str = "ssh";

/// Files of a run without a shared directory.
pub(super) const DOCUMENT: &str = "document.json";
pub(super) const LOG: &str = "log.txt";
/// All hosts of a multi-node run.
pub(super) const NODES: &str = "nodes.json";

/// Runs, which the controller queries.
pub(super) fn runs(state: &Path) -> io::Result<Jobs> {
    Jobs::open(state, KIND, START_LIMIT)
}

/// Repairs of this machine.
pub(super) fn repairs(state: &Path) -> io::Result<Jobs> {
    Jobs::open(&state.join("repairs"), KIND, START_LIMIT)
}

/// Reports of this machine.
pub(super) fn reports(state: &Path) -> io::Result<Jobs> {
    Jobs::open(&state.join("reports"), KIND, START_LIMIT)
}
