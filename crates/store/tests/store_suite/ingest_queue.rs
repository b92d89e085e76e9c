//! Results between being stored and being entered in history: no reader, writer or crash may reveal a difference.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use doctor_core::{
    finding::Verdict,
    ids::{NodeName, RunId},
    plan::{Action, Conclusion},
    reason::WithReason,
    run::{IncompleteReason, RunEnd, RunState},
    time::Span,
};
use doctor_store::{
    GroupCommit, Store, StoreUrl,
    records::{Accepted, ClassifiedResult, HistoryFilter},
};

use crate::{
    bed::{StoreTestbed, node, test},
    suite,
};

suite!(
    a_result_is_readable_as_soon_as_it_is_stored,
    another_process_sees_stored_results_soon,
    a_run_with_a_stored_result_is_not_concluded_without_it,
    results_applied_by_another_process_are_not_applied_again,
    a_new_leader_applies_the_results_that_the_old_one_stored,
    a_document_of_any_length_is_found,
);

/// Plans `runs` runs on one node each, in one cycle.
fn plan(bed: &mut StoreTestbed, prefix: &str, runs: usize) -> Vec<(String, RunId)> {
    let names: Vec<String> = (0..runs).map(|i| format!("{prefix}{i}")).collect();
    let runs: Vec<_> = names.iter().map(|name| bed.run_on(&[name], &["disk"])).collect();
    let ids: Vec<RunId> = runs.iter().map(|run| run.id).collect();
    let submit: Vec<_> = runs.into_iter().map(|run| WithReason::new(Action::Submit(run), "due", "x")).collect();
    bed.commit(&submit);
    names.into_iter().zip(ids).collect()
}

fn passed(bed: &StoreTestbed, name: &str, run: RunId) -> ClassifiedResult {
    bed.result(run, name, vec![bed.outcome(name, "disk", Verdict::Pass)])
}

fn submit(bed: &StoreTestbed, group: &GroupCommit, runs: &[(String, RunId)]) {
    std::thread::scope(|scope| {
        for (name, run) in runs {
            scope.spawn(move || assert_eq!(group.submit(passed(bed, name, *run)).unwrap(), Accepted::Stored));
        }
    });
}

fn results_seen(store: &Store) -> usize {
    store.history(&HistoryFilter::default()).unwrap().len()
}

fn a_result_is_readable_as_soon_as_it_is_stored(bed: &mut StoreTestbed) {
    let runs = plan(bed, "n", 40);
    let group = GroupCommit::start(&bed.store, &bed.lease).unwrap();
    for (index, (name, run)) in runs.iter().enumerate() {
        assert_eq!(group.submit(passed(bed, name, *run)).unwrap(), Accepted::Stored);
        assert_eq!(bed.store.latest_of(&node(name)).unwrap()[0].run, Some(*run));
        assert_eq!(bed.store.counters().unwrap().results_stored, index as u64 + 1);
        assert_eq!(group.submit(passed(bed, name, *run)).unwrap(), Accepted::Duplicate);
    }
    bed.assert_sound();
}

fn another_process_sees_stored_results_soon(bed: &mut StoreTestbed) {
    let Some(url) = bed.url.clone() else { return };
    let other = Store::open(&url).unwrap();
    let runs = plan(bed, "n", 30);
    let group = GroupCommit::start(&bed.store, &bed.lease).unwrap();
    // Also after a reader has found the ingest queue empty.
    for (some, expected) in runs.chunks(10).zip([10, 20, 30]) {
        submit(bed, &group, some);
        let began = Instant::now();
        while results_seen(&other) < expected {
            assert!(began.elapsed() < Duration::from_secs(240), "{} of {expected} are visible", results_seen(&other));
            std::thread::yield_now();
        }
        bed.store.counters().unwrap();
    }
}

fn a_run_with_a_stored_result_is_not_concluded_without_it(bed: &mut StoreTestbed) {
    let runs = plan(bed, "n", 20);
    let group = GroupCommit::start(&bed.store, &bed.lease).unwrap();
    submit(bed, &group, &runs);
    let end = Conclusion::Incomplete(IncompleteReason::JobLost);
    let ends: Vec<_> =
        runs.iter().map(|(_, run)| WithReason::new(Action::Conclude { run: *run, end }, "over", "x")).collect();
    bed.commit(&ends);
    for (_, run) in &runs {
        let state = bed.store.run(*run).unwrap().unwrap().run.state;
        assert!(
            matches!(&state, RunState::Ended(RunEnd::Completed(report)) if report.outcomes.len() == 1),
            "{state:?}"
        );
    }
    assert_eq!(results_seen(&bed.store), 20);
    bed.assert_sound();
}

fn results_applied_by_another_process_are_not_applied_again(bed: &mut StoreTestbed) {
    let Some(url) = bed.url.clone() else { return };
    let runs = plan(bed, "n", 50);
    let group = GroupCommit::start(&bed.store, &bed.lease).unwrap();
    for some in runs.chunks(5) {
        submit(bed, &group, some);
        // Opening it enters the ingest queue, possibly concurrently with this process.
        drop(Store::open(&url).unwrap());
    }
    assert_eq!(results_seen(&Store::open(&url).unwrap()), 50);
    assert_eq!(results_seen(&bed.store), 50);
    assert_eq!(bed.store.counters().unwrap().results_stored, 50);
    bed.assert_sound();
}

fn a_new_leader_applies_the_results_that_the_old_one_stored(bed: &mut StoreTestbed) {
    let Some(url) = bed.url.clone() else { return };
    let other = Store::open(&url).unwrap();
    let runs = plan(bed, "n", 20);
    let group = GroupCommit::start(&bed.store, &bed.lease).unwrap();
    let (before, after) = runs.split_at(10);
    submit(bed, &group, before);
    let lease = other.acquire("another", bed.now.plus(Span::days(40_000)), Span::days(1)).unwrap();
    assert_eq!(results_seen(&other), 10);
    let (name, run) = &after[0];
    let error = group.submit(passed(bed, name, *run)).unwrap_err();
    assert!(error.is_lease_lost(), "{error}");
    drop(group);
    assert_eq!(results_seen(&bed.store), 10);
    assert_eq!(other.accept(&lease, &[passed(bed, name, *run)]).unwrap(), [Accepted::Stored]);
    assert!(other.verify().unwrap().is_consistent());
}

fn a_document_of_any_length_is_found(bed: &mut StoreTestbed) {
    let runs = plan(bed, "n", 30);
    let document = |index: usize| {
        let lengths = [0, 1, 700, 15_000, 20_000, 300_000];
        (0..lengths[index % lengths.len()]).map(|i| (i * 31 + index) as u8).collect::<Vec<u8>>()
    };
    let results: Vec<ClassifiedResult> = runs
        .iter()
        .enumerate()
        .map(|(index, (name, run))| ClassifiedResult { evidence: document(index), ..passed(bed, name, *run) })
        .collect();
    assert!(bed.accept(&results[..15]).iter().all(|accepted| *accepted == Accepted::Stored));
    let group = GroupCommit::start(&bed.store, &bed.lease).unwrap();
    for result in &results[15..] {
        assert_eq!(group.submit(result.clone()).unwrap(), Accepted::Stored);
    }
    for result in &results {
        let stored = bed.store.evidence(result.run, &result.node).unwrap().unwrap();
        assert!(
            stored.bytes == result.evidence && !stored.truncated,
            "{} of {}",
            stored.bytes.len(),
            result.evidence.len()
        );
        assert_eq!((stored.received, stored.pinned_by), (bed.now, None));
    }
    assert_eq!(bed.store.evidence(results[0].run, &results[1].node).unwrap(), None);
}

/// Environment of the process that is killed: a store, and the runs to submit results for.
const CHILD: &str = "DOCTOR_TEST_WRITES_TO";
const CHILD_RUNS: &str = "DOCTOR_TEST_RUNS";
/// Threads that submit results.
const WRITERS: usize = 8;
/// Runs planned per process, more than it answers before it is killed.
const RUNS: usize = 400;

/// Not a test by itself: the process that the next test kills.
#[test]
fn a_process_that_brings_results_until_it_is_killed() {
    let (Ok(url), Ok(runs)) = (std::env::var(CHILD), std::env::var(CHILD_RUNS)) else { return };
    let url: StoreUrl = url.parse().unwrap();
    let runs: Vec<(String, RunId)> = runs
        .split_ascii_whitespace()
        .map(|pair| pair.split_once('=').map(|(name, run)| (name.to_owned(), run.parse().unwrap())).unwrap())
        .collect();
    let bed = StoreTestbed::at(&url);
    let group = GroupCommit::start(&bed.store, &bed.lease).unwrap();
    std::thread::scope(|scope| {
        for worker in 0..WRITERS {
            let (bed, group, runs) = (&bed, &group, &runs);
            scope.spawn(move || {
                for (name, run) in runs.iter().skip(worker).step_by(WRITERS) {
                    if group.submit(passed(bed, name, *run)).unwrap() == Accepted::Stored {
                        println!("kept {name}={run}");
                    }
                }
            });
        }
    });
}

#[test]
fn acknowledged_results_survive_a_kill_at_any_instant() {
    let mut left_in_queue = 0;
    for mut bed in [Some(StoreTestbed::file()), StoreTestbed::postgres()].into_iter().flatten() {
        let url = bed.url.clone().unwrap();
        let mut expected: BTreeMap<RunId, NodeName> = BTreeMap::new();
        for (round, acknowledged) in [1, 3, 17, 60, 140, 300].into_iter().enumerate() {
            let runs = plan(&mut bed, &format!("life{round}n"), RUNS);
            expected.extend(run_until_killed(&url, &runs, acknowledged));
            if let StoreUrl::Sqlite(path) = &url {
                let count = "SELECT COUNT(*) FROM ingest_queue";
                let file = rusqlite::Connection::open(path).unwrap();
                left_in_queue += file.query_row(count, (), |row| row.get::<_, u32>(0)).unwrap();
            }
            bed.reopen();
        }
        let rows = bed.store.history(&HistoryFilter::default()).unwrap();
        let mut seen: BTreeMap<RunId, NodeName> = BTreeMap::new();
        for row in rows {
            assert_eq!((row.test, row.verdict), (test("disk"), Verdict::Pass));
            let run = row.run.unwrap();
            let stored = bed.store.evidence(run, &row.node).unwrap().unwrap();
            assert_eq!(stored.bytes, format!("raw output of {run} on {}", row.node).into_bytes());
            assert_eq!(seen.insert(run, row.node), None, "{run} is in history twice");
        }
        let lost: Vec<_> = expected.iter().filter(|(run, name)| seen.get(run) != Some(name)).collect();
        assert!(lost.is_empty(), "acknowledged but missing: {lost:?}");
        assert_eq!(bed.store.counters().unwrap().results_stored, seen.len() as u64);
        bed.assert_sound();
    }
    assert!(left_in_queue > 0, "no process died between storing and entering: the test proves nothing");
}

/// Starts a process that submits results for these runs, kills it after `acknowledged` results, and returns which were
/// acknowledged.
fn run_until_killed(url: &StoreUrl, runs: &[(String, RunId)], acknowledged: usize) -> Vec<(RunId, NodeName)> {
    let runs: Vec<String> = runs.iter().map(|(name, run)| format!("{name}={run}")).collect();
    let url = match url {
        StoreUrl::Sqlite(path) => format!("sqlite:{}", path.display()),
        StoreUrl::Postgres(text) => text.clone(),
    };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ingest_queue::a_process_that_brings_results_until_it_is_killed", "--nocapture"])
        .env(CHILD, url)
        .env(CHILD_RUNS, runs.join(" "))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut confirmed = Vec::new();
    for line in lines {
        // The first line may follow the test runner's output.
        let Some((_, pair)) = line.split_once("kept ") else { continue };
        let (name, run) = pair.split_once('=').unwrap();
        confirmed.push((run.parse().unwrap(), node(name)));
        if confirmed.len() == acknowledged {
            // Output until the process has exited is read too.
            child.kill().unwrap();
        }
    }
    child.wait().unwrap();
    assert!(confirmed.len() >= acknowledged, "{} of {acknowledged} were acknowledged", confirmed.len());
    confirmed
}
