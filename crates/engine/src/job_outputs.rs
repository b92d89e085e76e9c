//! Keeps the last output of jobs that end without a complete result, so that `doctor log` can show why a job died.
//!
//! The output is requested when the plan ends such a run, before that is recorded: a controller that dies in between plans the
//! same again and requests it again. A job that is about to be cancelled is asked before, because the cancellation may destroy
//! what it said. The output comes from nodes and is not trusted: it is cut, and secrets and control characters are removed.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use doctor_backend::{Backend, BackendError, MAX_REMAINING_OUTPUT, clock::Clock};
use doctor_core::{
    ids::NodeName,
    last_output::{LastOutput, MAX_BYTES, end_of},
    plan::{Action, Conclusion},
    reason::WithReason,
    run::{CancelReason, IncompleteReason, NotStartedReason, Run, RunState},
    time::Span,
};
use doctor_store::{Earlier, Lease, StoreError, records::StoredRun};
use tracing::field::Empty;

use crate::{
    deps::EngineDeps,
    redact,
    spans::{in_span, span},
};

/// No request is started after this long in one cycle: the other runs end without their output. A cluster that does not answer
/// must not delay the cycle further.
const CYCLE_LIMIT: Span = Span::from_secs(5);
/// The nodes of one run whose output is kept.
const MAX_NODES: usize = 16;
/// The longest text about how a job ended, in characters.
const MAX_ENDING: usize = 1000;

/// One run whose output is to be kept.
struct Wanted<'a> {
    run: &'a Run,
    earlier: Earlier,
}

/// Requests and stores the output of the runs that this plan ends without a result. Returns one line for each failure.
///
/// # Errors
/// If the store fails.
pub(crate) fn collect(
    deps: &EngineDeps,
    lease: &Lease,
    runs: &[StoredRun],
    actions: &[WithReason<Action>],
) -> Result<Vec<String>, StoreError> {
    let wanted: Vec<Wanted<'_>> = actions.iter().filter_map(|action| wanted(runs, &action.value)).collect();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    // Users come first: their node is freed after this step.
    if actions.iter().any(|action| matches!(action.value, Action::Cancel { why: CancelReason::NodeTaken, .. })) {
        tracing::info!(runs = wanted.len(), "the output of ended jobs is not read: a user waits for a node");
        return Ok(Vec::new());
    }
    let (answered, mut problems) = ask(&*deps.backend, &*deps.clock, deps.workers, &wanted);
    for (index, answer) in answered {
        let Wanted { run, earlier } = &wanted[index];
        match answer {
            Ok(outputs) => {
                let outputs: Vec<LastOutput> = outputs.into_iter().take(MAX_NODES).map(clean).collect();
                deps.store.record_job_output(lease, run.id, &outputs, *earlier, deps.clock.now())?;
            }
            // The run ends all the same: its result is missing, whatever its job said.
            Err(error) => problems.push(format!("{}: {error}", run.id)),
        }
    }
    Ok(problems)
}

/// Returns the run that this action ends, or begins to end, without a result that its job can explain.
fn wanted<'a>(runs: &'a [StoredRun], action: &Action) -> Option<Wanted<'a>> {
    let run = match action {
        Action::Conclude { run, end } if is_explained_by_job(*end) => run,
        Action::Cancel { run, why } if *why != CancelReason::NodeTaken && *why != CancelReason::Withdrawn => run,
        _ => return None,
    };
    let stored = runs.iter().find(|stored| stored.run.id == *run)?;
    // A job that was never submitted has said nothing; why it was not is stored already.
    let submitted = !matches!(stored.run.state, RunState::Planned);
    let earlier = if stored.cancelling.is_some() { Earlier::Keep } else { Earlier::Replace };
    submitted.then_some(Wanted { run: &stored.run, earlier })
}

/// Returns whether the job itself can say why. A run that gave way to a user needs no explanation.
const fn is_explained_by_job(end: Conclusion) -> bool {
    match end {
        Conclusion::Incomplete(why) => match why {
            IncompleteReason::NodeTaken | IncompleteReason::Withdrawn => false,
            IncompleteReason::OverTimeLimit
            | IncompleteReason::NoResult
            | IncompleteReason::JobLost
            | IncompleteReason::NodeVanished
            | IncompleteReason::NodeDied
            | IncompleteReason::Crashed => true,
        },
        Conclusion::NotStarted(why) => match why {
            NotStartedReason::NodeTaken | NotStartedReason::Withdrawn => false,
            NotStartedReason::PendingTooLong | NotStartedReason::Rejected => true,
        },
    }
}

type Answer = (usize, Result<Vec<LastOutput>, BackendError>);

/// Requests the output of these runs from the backend, concurrently. Returns the answers by index, and one line if some runs were
/// not asked for.
fn ask(backend: &dyn Backend, clock: &dyn Clock, workers: usize, wanted: &[Wanted<'_>]) -> (Vec<Answer>, Vec<String>) {
    let (next, answers) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let (until, current) = (clock.now().plus(CYCLE_LIMIT), tracing::Span::current());
    let work = || {
        let _within = current.enter();
        while clock.now() < until {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(Wanted { run, .. }) = wanted.get(index) else { return };
            let span = span!(
                "backend.output",
                otel.kind = "client",
                backend = backend.name(),
                run = %run.id,
                failed = Empty
            );
            let answer = in_span(&span, || backend.remaining_output(run));
            answers.lock().unwrap_or_else(PoisonError::into_inner).push((index, answer));
        }
    };
    thread::scope(|scope| {
        for _ in 1..workers.clamp(1, wanted.len()) {
            scope.spawn(work);
        }
        work();
    });
    let mut answers = answers.into_inner().unwrap_or_else(PoisonError::into_inner);
    answers.sort_by_key(|(index, _)| *index);
    let skipped = wanted.len() - answers.len();
    let problem = format!("the output of {skipped} jobs was not read: the cluster took longer than {CYCLE_LIMIT}");
    (answers, if skipped > 0 { vec![problem] } else { Vec::new() })
}

/// Returns what is kept of a refused submission: there is no job that could say more.
pub(crate) fn of_refused_submission(node: &NodeName, error: &BackendError) -> LastOutput {
    clean(LastOutput { node: node.clone(), ending: Some(error.to_string()), text: String::new() })
}

/// Removes secrets and control characters, and cuts the text to its end and the ending to its start.
pub(crate) fn clean(output: LastOutput) -> LastOutput {
    let ending = output.ending.map(|ending| readable(&ending).chars().take(MAX_ENDING).collect::<String>());
    let most = usize::try_from(MAX_REMAINING_OUTPUT).unwrap_or(usize::MAX);
    // More than is kept, so that a secret that begins before the kept part is recognised.
    let text = readable(end_of(&output.text, most));
    LastOutput {
        node: output.node,
        ending: ending.filter(|ending| !ending.trim().is_empty()),
        text: end_of(&text, MAX_BYTES).to_owned(),
    }
}

fn readable(text: &str) -> String {
    // A terminal ends lines with CR LF, and a progress bar rewrites its line with CR.
    let lines = text.replace("\r\n", "\n").replace('\r', "\n");
    redact::replace_control_chars(&redact::redact(&lines))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cleaned(ending: &str, text: &str) -> LastOutput {
        let node = NodeName::new("n1").unwrap();
        clean(LastOutput { node, ending: Some(ending.to_owned()), text: text.to_owned() })
    }

    #[test]
    fn output_keeps_its_end_without_secrets_and_control_characters() {
        let text = format!("{}\x1b[31mHF_TOKEN=hunter2\r\nlast\u{0}\n", "old line\n".repeat(10_000));
        let output = cleaned("exit code 127", &text);
        assert!(output.text.len() <= MAX_BYTES && output.text.starts_with("old line\n"), "{}", output.text.len());
        assert!(output.text.ends_with("[removed]\nlast\u{fffd}\n"), "{:?}", &output.text[output.text.len() - 60..]);
        assert!(!output.text.contains("hunter2") && !output.text.contains('\x1b'));
        assert_eq!(output.ending.as_deref(), Some("exit code 127"));
    }

    #[test]
    fn a_private_key_that_begins_before_the_kept_part_is_removed() {
        let key = format!("-----BEGIN PRIVATE KEY-----\n{}-----END PRIVATE KEY-----\n", "hunter2\n".repeat(1500));
        let output = cleaned("", &format!("{key}exec: not found\n"));
        assert_eq!((output.text.as_str(), output.ending), ("[removed]\nexec: not found\n", None));
    }

    #[test]
    fn one_long_line_is_cut_between_characters() {
        let output = cleaned(&"ü".repeat(MAX_ENDING + 1), &"ü".repeat(MAX_BYTES));
        assert_eq!(output.text.len(), MAX_BYTES);
        assert_eq!(output.ending.unwrap().chars().count(), MAX_ENDING);
        assert_eq!(end_of("aü", 1), "", "half a character is left out");
    }

    #[test]
    fn a_run_that_gave_way_is_not_asked_for() {
        let asked: Vec<&str> = IncompleteReason::ALL
            .iter()
            .filter(|why| is_explained_by_job(Conclusion::Incomplete(**why)))
            .map(|why| why.code())
            .collect();
        let expected = ["over-time-limit", "no-result", "job-lost", "node-vanished", "node-died", "crashed"];
        assert_eq!(asked, expected);
        let asked = |why| is_explained_by_job(Conclusion::NotStarted(why));
        assert!(asked(NotStartedReason::Rejected) && asked(NotStartedReason::PendingTooLong));
        assert!(!asked(NotStartedReason::NodeTaken) && !asked(NotStartedReason::Withdrawn));
    }
}
