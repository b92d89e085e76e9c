//! How the latest validation runs ended: several in a row without a result are a fault of the service or of its nodes.

use doctor_core::{
    plan::Conclusion,
    run::{IncompleteReason, NotStartedReason},
    view::{EndedRun, RunFailure},
};
use doctor_store::{Store, StoreError, records::RunEndRow};

/// Runs that are considered. A fleet of thousands of nodes has this many in minutes, a small one in days.
const CONSIDERED: u32 = 100;
/// Longer texts are cut.
const MAX_TEXT: usize = 200;

/// Returns the latest runs that ended by themselves, newest first.
///
/// # Errors
/// If the store fails.
pub(crate) fn ended(store: &Store) -> Result<Vec<EndedRun>, StoreError> {
    Ok(store.last_run_ends(CONSIDERED)?.into_iter().filter_map(ended_run).collect())
}

/// Returns the end of a run; `None` if a user or an operator ended it, or if it waited in a queue: that says nothing about
/// the run.
fn ended_run(row: RunEndRow) -> Option<EndedRun> {
    let code = match row.end {
        None => None,
        Some(Conclusion::Incomplete(why)) if why.is_interruption() => return None,
        Some(Conclusion::Incomplete(why)) => Some(IncompleteReason::code(why)),
        Some(Conclusion::NotStarted(why @ NotStartedReason::Rejected)) => Some(NotStartedReason::code(why)),
        Some(Conclusion::NotStarted(_)) => return None,
    };
    let text = row.text.map(|text| text.chars().take(MAX_TEXT).collect());
    let failure = code.map(|code| RunFailure { code, text });
    Some(EndedRun { run: row.run, nodes: row.nodes, at: row.at, failure })
}
