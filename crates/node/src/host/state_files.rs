//! Where this machine keeps its runs, repairs and reports, each apart from the others.

use std::{io, path::Path};

use doctor_core::time::Span;
use doctor_host::jobs::Jobs;

/// A job that has not come up after this long will not.
const START_LIMIT: Span = Span::from_secs(30);

/// What the ids of jobs begin with.
const KIND: &str = "ssh";

/// Files of a run that has no shared directory to leave them in.
pub(super) const DOCUMENT: &str = "document.json";
pub(super) const LOG: &str = "log.txt";
/// All hosts of a run over several.
pub(super) const NODES: &str = "nodes.json";

/// Runs, which others ask about.
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
