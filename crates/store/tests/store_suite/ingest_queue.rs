//! Messages between being durable and being entered in history: none is lost or entered twice by a crash, a second
//! controller or a repetition.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    sync::Arc,
};

use doctor_checks::document::{AgentReport, Document, RunKey, Versions};
use doctor_core::{
    finding::Verdict,
    ids::{NodeName, RunId},
    plan::{Action, Conclusion},
    reason::WithReason,
    run::{IncompleteReason, RunEnd, RunState},
    time::Span,
};
use doctor_store::{
    Entering, GroupCommit, Store, StoreError, StoreUrl,
    messages::{Enqueued, MessageContent, QueuedMessage, VerifiedMessage},
    records::{Accepted, AgentFindings, AgentResult, ClassifiedResult, HistoryFilter},
};

use crate::{
    bed::{StoreTestbed, hardware, node, test},
    over_tls, suite,
};

over_tls!(a_message_waits_until_it_is_entered_in_one_transaction, many_messages_are_queued_and_entered_together);

suite!(
    a_message_waits_until_it_is_entered_in_one_transaction,
    a_result_is_queued_once_for_each_run_and_node,
    a_run_with_a_queued_result_is_not_ended_without_it,
    another_process_enters_what_this_one_has_queued,
    a_message_is_entered_by_the_leader_only,
    reports_of_one_node_are_entered_in_order_and_a_repetition_counts_once,
    a_message_of_any_length_reads_back_unchanged,
    many_messages_are_queued_and_entered_together,
);

const KEY: RunKey = RunKey::new([9; 32]);

/// Plans `runs` runs on one node each, in one cycle.
fn plan(bed: &mut StoreTestbed, prefix: &str, runs: usize) -> Vec<(String, RunId)> {
    let names: Vec<String> = (0..runs).map(|i| format!("{prefix}{i}")).collect();
    let runs: Vec<_> = names.iter().map(|name| bed.run_on(&[name], &["disk"])).collect();
    let ids: Vec<RunId> = runs.iter().map(|run| run.id).collect();
    let submit: Vec<_> = runs.into_iter().map(|run| WithReason::new(Action::Submit(run), "due", "x")).collect();
    bed.commit(&submit);
    names.into_iter().zip(ids).collect()
}

/// Returns a verified document of this run, signed as its job would.
fn document(bed: &StoreTestbed, name: &str, run: RunId) -> VerifiedMessage {
    let document = Document {
        run,
        node: node(name),
        hardware: hardware(name),
        started: bed.now,
        ended: bed.now,
        tests: Vec::new(),
        uptime: None,
        machine: None,
    };
    let bytes = document.sign(&KEY).unwrap();
    let content = MessageContent::Document(Box::new(document));
    VerifiedMessage { node: node(name), received: bed.now, content, bytes }
}

fn report(bed: &StoreTestbed, name: &str, number: u64) -> VerifiedMessage {
    let report = AgentReport::heartbeat(node(name), number, bed.now, Versions::default());
    let bytes = report.sign(&KEY).unwrap();
    let content = MessageContent::Report(Box::new(report));
    VerifiedMessage { node: node(name), received: bed.now, content, bytes }
}

fn group(bed: &StoreTestbed) -> GroupCommit {
    GroupCommit::start(&bed.store).unwrap()
}

fn queue(group: &GroupCommit, message: VerifiedMessage) -> Enqueued {
    group.submit_and_wait(message).unwrap()
}

fn waiting(store: &Store) -> Vec<QueuedMessage> {
    store.queued_messages(None, 10_000).unwrap()
}

/// Enters all waiting documents as passed.
fn enter_all(bed: &StoreTestbed) -> Vec<Accepted> {
    let waiting = waiting(&bed.store);
    let messages: Vec<&QueuedMessage> = waiting.iter().collect();
    let results: Vec<ClassifiedResult> = bed
        .store
        .queued_contents(&messages)
        .unwrap()
        .into_iter()
        .map(|message| passed(bed, &message.unwrap()))
        .collect();
    let entering = Entering { results: &results, reports: &[], messages: &messages };
    bed.store.enter(&bed.lease, &entering).unwrap().results
}

fn passed(bed: &StoreTestbed, message: &Arc<VerifiedMessage>) -> ClassifiedResult {
    let name = message.node.as_str();
    let run = message.content.run().unwrap();
    let evidence = message.bytes.clone();
    ClassifiedResult { evidence, ..bed.result(run, name, vec![bed.outcome(name, "disk", Verdict::Pass)]) }
}

fn results_seen(store: &Store) -> usize {
    store.history(&HistoryFilter::default()).unwrap().len()
}

fn a_message_waits_until_it_is_entered_in_one_transaction(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["disk"]);
    let group = group(bed);
    assert_eq!(queue(&group, document(bed, "n1", run)), Enqueued::Queued);
    assert_eq!((bed.store.queued_count().unwrap(), results_seen(&bed.store)), (1, 0));
    assert!(bed.store.active_run(run).unwrap().is_some());
    let listed = waiting(&bed.store);
    let bytes = document(bed, "n1", run).bytes;
    assert_eq!((listed[0].run, listed[0].received, listed[0].bytes), (Some(run), bed.now, bytes.len() as u64));
    assert!(bed.store.has_new_messages(), "it was offered once; the first cycle may not know its node");
    assert_eq!(enter_all(bed), [Accepted::Stored]);
    assert!(!bed.store.has_new_messages());
    assert_eq!((bed.store.queued_count().unwrap(), results_seen(&bed.store)), (0, 1));
    assert!(bed.store.active_run(run).unwrap().is_none(), "its key is erased");
    assert_eq!(bed.store.evidence(run, &node("n1")).unwrap().unwrap().bytes, bytes);
    bed.assert_sound();
}

fn a_result_is_queued_once_for_each_run_and_node(bed: &mut StoreTestbed) {
    let run = bed.run_on(&["n1", "n2"], &["disk"]);
    let id = run.id;
    bed.commit(&[WithReason::new(Action::Submit(run), "due", "x")]);
    bed.plan("n3", &["disk"]);
    let group = group(bed);
    for (name, outcome) in [
        ("n1", Enqueued::Queued),
        ("n1", Enqueued::Duplicate),
        ("n2", Enqueued::Queued),
        ("n3", Enqueued::UnknownRun),
        ("n9", Enqueued::UnknownRun),
    ] {
        assert_eq!(queue(&group, document(bed, name, id)), outcome, "{name}");
    }
    assert_eq!(queue(&group, document(bed, "n3", RunId::from_number(7))), Enqueued::UnknownRun);
    assert_eq!(enter_all(bed), [Accepted::Stored, Accepted::Stored]);
    assert_eq!(queue(&group, document(bed, "n1", id)), Enqueued::RunEnded);
    assert!(bed.store.had_run(id, &node("n2")).unwrap() && !bed.store.had_run(id, &node("n3")).unwrap());
    // One that came on another way before.
    let run = bed.plan("n1", &["disk"]);
    bed.accept(&[bed.result(run, "n1", vec![bed.outcome("n1", "disk", Verdict::Pass)])]);
    assert_eq!(queue(&group, document(bed, "n1", run)), Enqueued::RunEnded);
    assert_eq!(bed.store.queued_count().unwrap(), 0);
    bed.assert_sound();
}

fn a_run_with_a_queued_result_is_not_ended_without_it(bed: &mut StoreTestbed) {
    let (run, other) = (bed.plan("n1", &["disk"]), bed.plan("n2", &["disk"]));
    let group = group(bed);
    assert_eq!(queue(&group, document(bed, "n1", run)), Enqueued::Queued);
    let end = Conclusion::Incomplete(IncompleteReason::JobLost);
    let ends = [other, run].map(|run| WithReason::new(Action::Conclude { run, end }, "over", "x"));
    let error = bed.try_commit(&ends, &[]).unwrap_err();
    assert!(matches!(error, StoreError::ResultWaits { run: waits } if waits == run), "{error}");
    assert_eq!(bed.store.active_runs().unwrap().len(), 2, "nothing of the plan was written");
    assert_eq!(enter_all(bed), [Accepted::Stored]);
    bed.commit(&ends);
    let state = |run: RunId| bed.store.run(run).unwrap().unwrap().run.state;
    assert!(
        matches!(state(run), RunState::Ended(RunEnd::Completed(report)) if report.outcomes.len() == 1),
        "{:?}",
        state(run)
    );
    assert!(matches!(state(other), RunState::Ended(RunEnd::Incomplete { .. })), "{:?}", state(other));
    bed.assert_sound();
}

fn another_process_enters_what_this_one_has_queued(bed: &mut StoreTestbed) {
    let Some(url) = bed.url.clone() else { return };
    let runs = plan(bed, "n", 20);
    let other = GroupCommit::start(&Store::open(&url).unwrap()).unwrap();
    for (name, run) in &runs {
        // A process that does not lead takes results, too.
        assert_eq!(queue(&other, document(bed, name, *run)), Enqueued::Queued);
    }
    assert_eq!(queue(&group(bed), document(bed, "n0", runs[0].1)), Enqueued::Duplicate);
    assert_eq!(enter_all(bed).len(), 20);
    assert_eq!((bed.store.queued_count().unwrap(), results_seen(&bed.store)), (0, 20));
    assert_eq!(bed.store.counters().unwrap().results_stored, 20);
    bed.assert_sound();
}

fn a_message_is_entered_by_the_leader_only(bed: &mut StoreTestbed) {
    let Some(url) = bed.url.clone() else { return };
    let run = bed.plan("n1", &["disk"]);
    assert_eq!(queue(&group(bed), document(bed, "n1", run)), Enqueued::Queued);
    let listed = waiting(&bed.store);
    let other = Store::open(&url).unwrap();
    let lease = other.acquire("another", bed.now.plus(Span::days(40_000)), Span::days(1)).unwrap();
    let messages: Vec<&QueuedMessage> = listed.iter().collect();
    let content = other.queued_contents(&messages).unwrap().remove(0).unwrap();
    let results = [passed(bed, &content)];
    let entering = Entering { results: &results, reports: &[], messages: &messages };
    let error = bed.store.enter(&bed.lease, &entering).unwrap_err();
    assert!(error.is_lease_lost(), "{error}");
    assert_eq!(other.enter(&lease, &entering).unwrap().results, [Accepted::Stored]);
    assert_eq!((results_seen(&other), other.queued_count().unwrap()), (1, 0));
    assert!(waiting(&bed.store).is_empty());
    assert!(other.verify().unwrap().is_consistent());
}

fn reports_of_one_node_are_entered_in_order_and_a_repetition_counts_once(bed: &mut StoreTestbed) {
    let group = group(bed);
    for (name, number) in [("n1", 1), ("n2", 1), ("n1", 2), ("n1", 2), ("n2", 2)] {
        assert_eq!(queue(&group, report(bed, name, number)), Enqueued::Queued);
    }
    let listed = waiting(&bed.store);
    let messages: Vec<&QueuedMessage> = listed.iter().collect();
    // The check fails in the first report of a node and passes in the second.
    let findings = |message: &QueuedMessage, content: Arc<VerifiedMessage>| {
        let MessageContent::Report(report) = &content.content else { panic!("{content:?}") };
        let verdict = if report.sequence == 1 { Verdict::Fail } else { Verdict::Pass };
        let outcome = bed.outcome(message.node.as_str(), "disk", verdict);
        let result = AgentResult { verdict, severity: None, reason: outcome.reason };
        AgentFindings {
            node: message.node.clone(),
            number: report.sequence,
            sent: report.at,
            received: message.received,
            waited: Span::ZERO,
            by_check: [(test("disk"), outcome.findings)].into(),
            results: [(test("disk"), result)].into(),
            confirmed: Vec::new(),
            hardware: hardware(message.node.as_str()),
            dropped: None,
        }
    };
    let contents = bed.store.queued_contents(&messages).unwrap();
    let reports: Vec<AgentFindings> =
        messages.iter().zip(contents).map(|(message, content)| findings(message, content.unwrap())).collect();
    let entering = Entering { results: &[], reports: &reports, messages: &messages };
    let accepted = bed.store.enter(&bed.lease, &entering).unwrap().reports;
    use Accepted::{Duplicate, Stored};
    assert_eq!(accepted, [Stored, Stored, Stored, Duplicate, Stored]);
    for name in ["n1", "n2"] {
        let latest = bed.store.latest_of(&node(name)).unwrap();
        assert_eq!((latest.len(), latest[0].verdict), (1, Verdict::Pass), "{name}");
        assert!(bed.store.load_nodes().unwrap()[&node(name)].findings.is_empty(), "{name}");
    }
    let audit: Vec<String> = bed.store.audit(10, None).unwrap().into_iter().map(|line| line.what).collect();
    assert_eq!(audit.iter().filter(|what| *what == "finding-opened").count(), 2, "{audit:?}");
    assert_eq!(audit.iter().filter(|what| *what == "finding-cleared").count(), 2, "{audit:?}");
    assert_eq!(bed.store.queued_count().unwrap(), 0);
    bed.assert_sound();
}

fn a_message_of_any_length_reads_back_unchanged(bed: &mut StoreTestbed) {
    let runs = plan(bed, "n", 12);
    let group = group(bed);
    let mut sent = BTreeMap::new();
    for (index, (name, run)) in runs.iter().enumerate() {
        let mut message = document(bed, name, *run);
        // Spaces after the body keep it valid.
        message.bytes.extend(vec![b' '; [0, 1, 700, 15_000, 20_000, 300_000][index % 6]]);
        sent.insert(*run, (node(name), message.bytes.clone()));
        assert_eq!(queue(&group, message), Enqueued::Queued);
    }
    // This process has kept them parsed; another reads them back.
    let url = bed.url.clone();
    for store in [Some(bed.store.clone()), url.map(|url| Store::open(&url).unwrap())].into_iter().flatten() {
        let listed = waiting(&store);
        let contents = store.queued_contents(&listed.iter().collect::<Vec<_>>()).unwrap();
        for message in contents.into_iter().map(Result::unwrap) {
            assert_eq!(sent[&message.content.run().unwrap()], (message.node.clone(), message.bytes.clone()));
        }
        assert_eq!(listed.len(), 12);
    }
    assert!(enter_all(bed).iter().all(|accepted| *accepted == Accepted::Stored));
    for (run, (name, bytes)) in sent {
        let stored = bed.store.evidence(run, &name).unwrap().unwrap();
        assert!(stored.bytes == bytes && !stored.truncated, "{} of {}", stored.bytes.len(), bytes.len());
    }
}

fn many_messages_are_queued_and_entered_together(bed: &mut StoreTestbed) {
    let nodes: Vec<[String; 2]> = (0..32).map(|i| [format!("a{i}"), format!("b{i}")]).collect();
    let runs: Vec<_> = nodes.iter().map(|[a, b]| bed.run_on(&[a, b], &["disk"])).collect();
    let ids: Vec<_> = runs.iter().map(|run| run.id).collect();
    let submit: Vec<_> = runs.into_iter().map(|run| WithReason::new(Action::Submit(run), "due", "x")).collect();
    bed.commit(&submit);
    let group = group(bed);
    std::thread::scope(|scope| {
        for (run, pair) in ids.iter().zip(&nodes) {
            for name in pair {
                let (bed, group) = (&bed, &group);
                scope.spawn(move || assert_eq!(queue(group, document(bed, name, *run)), Enqueued::Queued));
            }
        }
    });
    assert_eq!(enter_all(bed).len(), 64);
    assert!(bed.store.active_runs().unwrap().is_empty());
    assert_eq!(bed.store.counters().unwrap().runs_ended, ids.len() as u64);
    let ended = bed.store.run(ids[0]).unwrap().unwrap();
    assert!(matches!(&ended.run.state, RunState::Ended(RunEnd::Completed(report)) if report.outcomes.len() == 2));
    bed.assert_sound();
}

#[test]
fn a_queue_survives_a_backup() {
    let mut bed = StoreTestbed::file();
    let run = bed.plan("n1", &["disk"]);
    assert_eq!(queue(&group(&bed), document(&bed, "n1", run)), Enqueued::Queued);
    let copy = bed.path("copy.db");
    bed.store.backup(&copy).unwrap();
    let mut restored = StoreTestbed::file();
    restored.store.release(&restored.lease).unwrap();
    restored.store.restore(&copy).unwrap();
    restored.now = bed.now;
    restored.reopen();
    assert_eq!(enter_all(&restored), [Accepted::Stored]);
    restored.assert_sound();
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
    let group = group(&bed);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|worker| {
                let (bed, group, runs) = (&bed, &group, &runs);
                scope.spawn(move || {
                    for (name, run) in runs.iter().skip(worker).step_by(WRITERS) {
                        if queue(group, document(bed, name, *run)) == Enqueued::Queued {
                            println!("kept {name}={run}");
                        }
                    }
                })
            })
            .collect();
        // The same process enters them meanwhile, as a controller does.
        while writers.iter().any(|writer| !writer.is_finished()) {
            enter_all(&bed);
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
            bed.reopen();
            left_in_queue += bed.store.queued_count().unwrap();
            enter_all(&bed);
        }
        let rows = bed.store.history(&HistoryFilter::default()).unwrap();
        let mut seen: BTreeMap<RunId, NodeName> = BTreeMap::new();
        for row in rows {
            assert_eq!((row.test, row.verdict), (test("disk"), Verdict::Pass));
            let run = row.run.unwrap();
            let stored = bed.store.evidence(run, &row.node).unwrap().unwrap();
            assert_eq!(Document::parse_stored(&stored.bytes).unwrap().run, run);
            assert_eq!(seen.insert(run, row.node), None, "{run} is in history twice");
        }
        let lost: Vec<_> = expected.iter().filter(|(run, name)| seen.get(run) != Some(name)).collect();
        assert!(lost.is_empty(), "acknowledged but missing: {lost:?}");
        assert_eq!(bed.store.counters().unwrap().results_stored, seen.len() as u64);
        bed.assert_sound();
    }
    assert!(left_in_queue > 0, "no process died between queueing and entering: the test proves nothing");
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
