//! Agent reports and credentials, on every kind of store.

use doctor_checks::document::{CheckRound, ConfirmedResults, DroppedReports, RunKey, Schema, Versions};
use doctor_core::{
    finding::Verdict,
    ids::HardwareId,
    observation::{Entity, EntityKind},
    plan::Action,
    reason::WithReason,
    snapshot::TestRecord,
    time::{Span, Timestamp},
};
use doctor_store::records::{
    Accepted, AgentAuth, AgentConfirmation, AgentContact, AgentFindings, AgentKey, AgentResult, ConfirmedRound,
    HistoryFilter, PublishOutcome, RetentionPolicy,
};

use crate::{
    bed::{StoreTestbed, finding, hardware, node, test},
    suite,
};

suite!(
    agents_open_and_clear_findings_without_history,
    an_agent_key_is_valid_until_it_is_revoked,
    an_agent_with_a_cluster_token_has_no_key_and_can_be_revoked,
    agent_contacts_are_stored_and_dropped_reports_are_audited,
    results_of_an_agent_count_like_those_of_a_run,
    unchanged_results_are_renewed_by_a_confirmation_of_what_the_store_has,
    the_newest_of_a_runs_and_an_agents_result_counts,
    a_report_that_waited_counts_from_when_it_was_made,
    results_of_an_agent_belong_to_its_machine_and_survive_a_backup,
    a_nodes_history_has_the_results_of_runs_and_of_its_agent_in_order,
    a_report_under_the_id_of_a_run_does_not_keep_its_result_out,
    no_text_of_a_node_fails_a_write,
    the_keys_of_endpoints_are_those_of_controllers_that_still_run,
);

fn report(bed: &StoreTestbed, number: u64, results: &[(&str, Verdict)]) -> AgentFindings {
    let result = |(name, verdict): &(&str, Verdict)| {
        let outcome = bed.outcome("n1", name, *verdict);
        let severity = outcome.findings.iter().map(|finding| finding.severity).max();
        (outcome.test, AgentResult { verdict: *verdict, severity, reason: outcome.reason })
    };
    let conclusive = results.iter().filter(|(_, verdict)| verdict.is_conclusive());
    AgentFindings {
        node: node("n1"),
        number,
        sent: bed.now,
        received: bed.now,
        waited: Span::ZERO,
        by_check: conclusive.map(|(name, verdict)| (test(name), bed.outcome("n1", name, *verdict).findings)).collect(),
        results: results.iter().map(result).collect(),
        confirmed: Vec::new(),
        hardware: hardware("n1"),
        dropped: None,
    }
}

fn accept(bed: &StoreTestbed, report: &AgentFindings) {
    assert_eq!(bed.store.accept_agent(&bed.lease, report).unwrap(), Accepted::Stored);
}

/// Confirms these checks of `n1`, which ran this long ago.
fn confirm(bed: &StoreTestbed, through: u64, rounds: &[(Span, &[&str])]) {
    let round = |(age, names): &(Span, &[&str])| CheckRound {
        age: *age,
        checks: names.iter().map(|name| test(name)).collect(),
    };
    let rounds = rounds.iter().map(round).collect();
    let rounds = ConfirmedRound::from_message(ConfirmedResults { through, rounds }, bed.now);
    let confirmations =
        [node("n1"), node("n9")].map(|node| AgentConfirmation { node, through, rounds: rounds.clone() });
    bed.store.confirm_agent_results(&bed.lease, &confirmations).unwrap();
}

fn record(bed: &StoreTestbed, name: &str) -> TestRecord {
    let mut nodes = bed.store.load_nodes_named(&[node("n1")]).unwrap();
    let all = bed.store.load_nodes().unwrap().remove(&node("n1")).unwrap();
    let stored = nodes.remove(&node("n1")).unwrap();
    assert_eq!(all.records, stored.records);
    let record = stored.records.get(&test(name)).copied().unwrap_or(TestRecord::NEVER);
    // What `doctor why` and the API show agrees with what the planner sees.
    let latest = bed.store.latest_of(&node("n1")).unwrap().into_iter().find(|row| row.test == test(name));
    assert_eq!(latest.as_ref().map(|row| (row.verdict, row.at)), record.verdict().zip(record.attempt()));
    let of_test = bed.store.latest_of_test(&test(name)).unwrap();
    assert_eq!(of_test, latest.into_iter().collect::<Vec<_>>());
    record
}

fn results_of_an_agent_count_like_those_of_a_run(bed: &mut StoreTestbed) {
    use Verdict::{Fail, Inconclusive, NotApplicable, Pass};
    let begin = bed.now;
    accept(bed, &report(bed, 1, &[("gpu", Fail), ("memory", Pass), ("efa", NotApplicable), ("disk", Inconclusive)]));
    for (name, verdict, settled, misses) in [
        ("gpu", Some(Fail), Some(begin), 0),
        ("memory", Some(Pass), Some(begin), 0),
        ("efa", Some(NotApplicable), Some(begin), 0),
        ("disk", Some(Inconclusive), None, 1),
        ("never", None, None, 0),
    ] {
        let known = record(bed, name);
        assert_eq!((known.verdict(), known.settled(), known.misses()), (verdict, settled, misses), "{name}");
    }
    assert_eq!((record(bed, "memory").judged(), record(bed, "efa").judged()), (Some(begin), None));
    // An inconclusive result changes the verdict and clears no finding.
    let later = bed.wait(Span::minutes(5));
    accept(bed, &report(bed, 2, &[("gpu", Inconclusive), ("memory", Pass)]));
    let known = record(bed, "gpu");
    assert_eq!((known.verdict(), known.settled(), known.attempt()), (Some(Inconclusive), Some(begin), Some(later)));
    assert_eq!(record(bed, "memory").settled(), Some(later), "a repeated result is newer");
    assert_eq!(bed.store.load_nodes().unwrap()[&node("n1")].findings.len(), 1);
    let rows = bed.store.history(&HistoryFilter::default()).unwrap();
    assert_eq!(rows.len(), 5, "a repeated result is no change: {rows:?}");
    assert_eq!((rows[0].test.as_str(), rows[0].verdict, rows[0].at), ("gpu", Inconclusive, later));
    assert!(rows.iter().all(|row| row.by_agent && row.run.is_none() && !row.untrusted), "{rows:?}");
    // They are in no statistics, and not among the results of runs.
    assert!(bed.store.failure_rates(begin).unwrap().is_empty() && bed.store.latest_all().unwrap().is_empty());
    let copy = bed.path("published.db");
    assert_eq!(bed.store.publish(&copy).unwrap(), PublishOutcome::Written { rows: 0, whole: true });
    bed.assert_sound();
}

fn unchanged_results_are_renewed_by_a_confirmation_of_what_the_store_has(bed: &mut StoreTestbed) {
    use Verdict::{Inconclusive, Pass};
    confirm(bed, 0, &[(Span::ZERO, &["memory"])]);
    let begin = bed.now;
    accept(bed, &report(bed, 7, &[("memory", Pass), ("disk", Inconclusive), ("cpu-count", Pass)]));
    let later = bed.wait(Span::minutes(6));
    confirm(bed, 7, &[(Span::minutes(1), &["memory", "disk", "no-such-check"]), (Span::hours(30), &["cpu-count"])]);
    let at = later.minus(Span::minutes(1));
    assert_eq!((record(bed, "memory").settled(), record(bed, "memory").judged()), (Some(at), Some(at)));
    let known = record(bed, "disk");
    assert_eq!((known.settled(), known.attempt(), known.misses()), (None, Some(at), 1));
    assert_eq!(record(bed, "cpu-count").attempt(), Some(begin), "it did not run");
    assert_eq!(record(bed, "no-such-check"), TestRecord::NEVER);
    // The agent has reported something that this store does not have, as after a restored backup.
    bed.wait(Span::minutes(5));
    confirm(bed, 8, &[(Span::ZERO, &["memory"])]);
    assert_eq!(record(bed, "memory").attempt(), Some(at));
    confirm(bed, 7, &[(Span::minutes(30), &["memory"])]);
    assert_eq!(record(bed, "memory").attempt(), Some(at), "an older confirmation changes nothing");
    // A report with a changed result follows; what it confirms is stored with it.
    let mut next = report(bed, 8, &[("disk", Pass)]);
    next.confirmed = vec![ConfirmedRound { at: bed.now, checks: vec![test("memory"), test("disk")] }];
    accept(bed, &next);
    assert_eq!((record(bed, "memory").settled(), record(bed, "disk").settled()), (Some(bed.now), Some(bed.now)));
}

fn the_newest_of_a_runs_and_an_agents_result_counts(bed: &mut StoreTestbed) {
    bed.run_test("n1", "gpu", Verdict::Pass);
    bed.run_test("n1", "dl", Verdict::Pass);
    let at = bed.wait(Span::minutes(5));
    accept(bed, &report(bed, 1, &[("gpu", Verdict::Inconclusive)]));
    assert_eq!((record(bed, "gpu").verdict(), record(bed, "gpu").attempt()), (Some(Verdict::Inconclusive), Some(at)));
    let row = bed.store.latest_of(&node("n1")).unwrap().into_iter().find(|row| row.test == test("gpu")).unwrap();
    assert_eq!((row.run, row.conclusive), (None, Some((Verdict::Pass, at.minus(Span::minutes(5))))));
    bed.wait(Span::minutes(5));
    let run = bed.run_test("n1", "gpu", Verdict::Pass);
    let row = bed.store.latest_of(&node("n1")).unwrap().into_iter().find(|row| row.test == test("gpu")).unwrap();
    assert_eq!((row.verdict, row.run), (Verdict::Pass, Some(run)));
    assert_eq!(record(bed, "gpu").misses(), 0);
    let at = bed.wait(Span::minutes(5));
    confirm(bed, 1, &[(Span::ZERO, &["gpu", "dl"])]);
    assert_eq!((record(bed, "gpu").verdict(), record(bed, "gpu").attempt()), (Some(Verdict::Inconclusive), Some(at)));
    assert!(record(bed, "dl").attempt() < Some(at), "an agent renews its own results only");
    bed.assert_sound();
}

fn a_nodes_history_has_the_results_of_runs_and_of_its_agent_in_order(bed: &mut StoreTestbed) {
    let verdict = |n: u64| if n.is_multiple_of(2) { Verdict::Pass } else { Verdict::Inconclusive };
    for n in 0..12_u64 {
        // The agent's result changes while a run is active, before it ends and after it.
        let run = bed.plan("n1", &["dl", "gpu"]);
        for minutes in [10, 20] {
            bed.wait(Span::minutes(minutes));
            let results = [("memory", verdict(n + u64::from(minutes == 20))), ("oom", verdict(n))];
            accept(bed, &report(bed, 2 * n + u64::from(minutes == 20) + 1, &results));
        }
        bed.wait(Span::minutes(5));
        let outcomes = ["dl", "gpu"].map(|test| bed.outcome("n1", test, Verdict::Pass)).into();
        assert_eq!(bed.accept(&[bed.result(run, "n1", outcomes)]), [Accepted::Stored]);
        bed.wait(Span::hours(1));
    }
    let filter = |limit, after| HistoryFilter { node: Some(node("n1")), limit, after, ..HistoryFilter::default() };
    let all = bed.store.history(&filter(None, None)).unwrap();
    // Two tests in each run; `memory` and `oom` change once in each round, and `memory` twice in the first.
    assert_eq!((all.len(), all.iter().filter(|row| !row.by_agent).count()), (24 + 13 + 12, 24));
    assert!(all.is_sorted_by(|a, b| a.at >= b.at));
    for limit in 1..all.len() {
        let limit = u32::try_from(limit).unwrap();
        assert_eq!(bed.store.history(&filter(Some(limit), None)).unwrap(), all[..limit as usize], "{limit}");
    }
    for page in [1, 2, 3, 7, 50] {
        let (mut pages, mut after) = (Vec::new(), None);
        loop {
            let rows = bed.store.history_page(&filter(Some(page), after)).unwrap().rows;
            let Some(last) = rows.last() else { break };
            after = Some(last.cursor());
            pages.extend(rows);
        }
        assert_eq!(pages, all, "pages of {page}");
    }
    // All of it expires, except the last results of runs.
    let now = bed.wait(Span::days(400));
    let keep = RetentionPolicy { history: Span::days(30), evidence: Span::days(30), logs: Span::days(30) };
    let pruned = bed.store.apply_retention(&bed.lease, now, keep).unwrap();
    assert_eq!(pruned.history_rows, 13 + 12 + 22);
    assert_eq!(record(bed, "memory").verdict(), Some(verdict(12)));
    bed.assert_sound();
}

fn a_report_that_waited_counts_from_when_it_was_made(bed: &mut StoreTestbed) {
    let begin = bed.now;
    bed.wait(Span::hours(5));
    let mut late = report(bed, 1, &[("memory", Verdict::Pass)]);
    late.waited = Span::hours(5);
    accept(bed, &late);
    assert_eq!(record(bed, "memory").settled(), Some(begin));
    accept(bed, &report(bed, 2, &[("memory", Verdict::Inconclusive)]));
    let mut older = report(bed, 3, &[("memory", Verdict::Pass)]);
    older.waited = Span::hours(1);
    accept(bed, &older);
    assert_eq!(record(bed, "memory").verdict(), Some(Verdict::Inconclusive), "an older result replaces no newer one");
}

fn results_of_an_agent_belong_to_its_machine_and_survive_a_backup(bed: &mut StoreTestbed) {
    accept(bed, &report(bed, 1, &[("memory", Verdict::Pass)]));
    let at = bed.wait(Span::minutes(5));
    confirm(bed, 1, &[(Span::ZERO, &["memory"])]);
    let copy = bed.path("backup.db");
    bed.store.backup(&copy).unwrap();
    let restored = StoreTestbed::memory();
    restored.store.restore(&copy).unwrap();
    assert_eq!(record(&restored, "memory").settled(), Some(at));
    let hardware = HardwareId::new("board-SN-other").unwrap();
    let replaced = Action::HardwareReplaced { node: node("n1"), hardware };
    bed.commit(&[WithReason::new(replaced, "machine-exchanged", "new")]);
    assert_eq!(record(bed, "memory"), TestRecord::NEVER);
    // A report that the old machine made before.
    let mut late = report(bed, 2, &[("memory", Verdict::Pass)]);
    late.waited = Span::hours(1);
    accept(bed, &late);
    assert_eq!(record(bed, "memory"), TestRecord::NEVER);
    bed.wait(Span::minutes(1));
    accept(bed, &report(bed, 3, &[("memory", Verdict::Pass)]));
    assert_eq!(record(bed, "memory").settled(), Some(bed.now));
}

/// An agent chooses the time and the number of its report, of which its place in history is made.
fn a_report_under_the_id_of_a_run_does_not_keep_its_result_out(bed: &mut StoreTestbed) {
    let run = bed.plan("n1", &["memory"]);
    let number = run.number() & ((1 << 21) - 1);
    accept(bed, &report(bed, number, &[("memory", Verdict::Fail)]));
    bed.wait(Span::minutes(5));
    let outcome = bed.outcome("n1", "memory", Verdict::Pass);
    assert_eq!(bed.accept(&[bed.result(run, "n1", vec![outcome])]), [Accepted::Stored]);
    let history = bed.store.history(&HistoryFilter::default()).unwrap();
    let of_run: Vec<_> = history.iter().map(|row| (row.run, row.verdict, row.at)).collect();
    assert_eq!(of_run, [(Some(run), Verdict::Pass, bed.now)]);
    bed.assert_sound();
}

fn no_text_of_a_node_fails_a_write(bed: &mut StoreTestbed) {
    let mut report = report(bed, 1, &[("memory", Verdict::Fail)]);
    report.hardware.boot_id = Some("boot\0".to_owned());
    for finding in report.by_check.values_mut().flatten() {
        finding.entity = Entity::new(EntityKind::Mount, "/a\0b");
        finding.text = "\0".to_owned();
    }
    accept(bed, &report);
    let open = bed.store.load_nodes().unwrap().remove(&node("n1")).unwrap().findings;
    assert_eq!(open.len(), 1, "{open:?}");
    bed.store.enroll_agent(&node("n1"), &RunKey::new([1; 32]), "ann", "new node", bed.now).unwrap();
    let versions = Versions { program: "\0".to_owned(), ..Versions::default() };
    let contact = AgentContact { at: bed.now, number: 2, sent: bed.now, versions };
    bed.store.record_agent_contacts(&bed.lease, &[(node("n1"), contact)]).unwrap();
    bed.assert_sound();
}

fn the_keys_of_endpoints_are_those_of_controllers_that_still_run(bed: &mut StoreTestbed) {
    let key = |text: &str| vec![format!("sha256:{text}")];
    let record = |bed: &mut StoreTestbed, text: &str, after: Span| {
        let now = bed.wait(after);
        bed.store.record_endpoint_keys(&key(text), now).unwrap()
    };
    assert!(record(bed, "a", Span::ZERO).is_empty());
    assert_eq!(record(bed, "b", Span::hours(1)), key("a"));
    assert_eq!(record(bed, "c", Span::hours(1)), [key("a"), key("b")].concat());
    assert_eq!(record(bed, "c", Span::hours(22)), [key("a"), key("b")].concat());
    assert_eq!(record(bed, "c", Span::minutes(30)), key("b"), "nobody has had the other for a day");
    bed.assert_sound();
}

fn agents_open_and_clear_findings_without_history(bed: &mut StoreTestbed) {
    let mut report = report(bed, 1, &[]);
    report.by_check = [(test("gpu"), vec![finding("gpu", "gpu-hot", 1)])].into();
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Stored);
    report.received = bed.wait(Span::minutes(1));
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Duplicate, "it was stored before");
    report.number = 2;
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Stored);
    let stored = bed.store.load_nodes().unwrap().remove(&node("n1")).unwrap();
    assert_eq!((stored.findings[0].sightings, stored.findings[0].run), (2, None));
    assert_eq!(stored.hardware, hardware("n1").id());
    assert_eq!(bed.store.audit(10, None).unwrap().len(), 1, "only a change is written to the audit trail");
    // The agent was reinstalled and restarts its numbering.
    (report.number, report.sent) = (1, bed.now);
    report.by_check.insert(test("gpu"), Vec::new());
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Stored);
    assert!(bed.store.load_nodes().unwrap()[&node("n1")].findings.is_empty());
    assert!(bed.store.history(&HistoryFilter::default()).unwrap().is_empty());
}

fn an_agent_key_is_valid_until_it_is_revoked(bed: &mut StoreTestbed) {
    let (n1, first, second) = (node("n1"), RunKey::new([1; 32]), RunKey::new([2; 32]));
    assert_eq!(bed.store.agent_key(&n1).unwrap(), AgentKey::Unknown);
    assert!(!bed.store.revoke_agent(&n1, "ann", "lost", bed.now).unwrap());
    let operators = bed.store.operator_changes().unwrap();
    let key_now = |bed: &StoreTestbed| match bed.store.agent_key(&node("n1")).unwrap() {
        AgentKey::Enrolled { key, last_contact: None, .. } => key,
        other => panic!("{other:?}"),
    };
    bed.store.enroll_agent(&n1, &first, "ann", "new node", bed.now).unwrap();
    assert_eq!(key_now(bed), first);
    bed.store.enroll_agent(&n1, &second, "ann", "reinstalled", bed.now).unwrap();
    assert_eq!(key_now(bed), second, "one key at a time");
    assert!(bed.store.operator_changes().unwrap() > operators);
    assert!(bed.store.load_nodes().unwrap().is_empty(), "enrolling adds no node to the cluster");

    let at = bed.wait(Span::minutes(1));
    assert!(bed.store.revoke_agent(&n1, "ann", "stolen", at).unwrap());
    assert_eq!(bed.store.agent_key(&n1).unwrap(), AgentKey::Revoked);
    assert_eq!(bed.store.agents().unwrap()[0].revoked, Some(at));
    let actions: Vec<String> = bed.store.audit(10, None).unwrap().into_iter().map(|line| line.what).collect();
    assert_eq!(actions, ["revoke-agent", "enroll-agent", "enroll-agent"]);
}

fn an_agent_with_a_cluster_token_has_no_key_and_can_be_revoked(bed: &mut StoreTestbed) {
    let (n1, n2, key) = (node("n1"), node("n2"), RunKey::new([1; 32]));
    bed.store.enroll_agent(&n1, &key, "ann", "new node", bed.now).unwrap();
    let operators = bed.store.operator_changes().unwrap();
    for _ in 0..2 {
        bed.store.register_agents(&[(n1.clone(), bed.now), (n2.clone(), bed.now)]).unwrap();
    }
    assert!(matches!(bed.store.agent_key(&n1).unwrap(), AgentKey::Enrolled { key: known, .. } if known == key));
    assert_eq!(bed.store.agent_key(&n2).unwrap(), AgentKey::ClusterToken { last_contact: None });
    let auth: Vec<AgentAuth> = bed.store.agents().unwrap().iter().map(|agent| agent.auth).collect();
    assert_eq!(auth, [AgentAuth::Key, AgentAuth::Token]);
    assert_eq!(bed.store.operator_changes().unwrap(), operators, "no operator was involved");
    let actions: Vec<String> = bed.store.audit(10, None).unwrap().into_iter().map(|line| line.what).collect();
    assert_eq!(actions, ["introduce-agent", "enroll-agent"], "once, and only for the new one");

    assert!(bed.store.revoke_agent(&n2, "ann", "taken over", bed.now).unwrap());
    bed.store.register_agents(&[(n2.clone(), bed.now)]).unwrap();
    assert_eq!(bed.store.agent_key(&n2).unwrap(), AgentKey::Revoked, "only an operator can enroll it again");
}

fn agent_contacts_are_stored_and_dropped_reports_are_audited(bed: &mut StoreTestbed) {
    let contact = |number: u64, at: Timestamp| AgentContact {
        at,
        number,
        sent: at,
        versions: Versions { program: "0.1.0".to_owned(), schema: Schema::CURRENT, policy: 7, queued: 0 },
    };
    for name in ["n1", "n2", "n3"] {
        bed.store.enroll_agent(&node(name), &RunKey::new([1; 32]), "ann", "x", bed.now).unwrap();
    }
    bed.store.revoke_agent(&node("n2"), "ann", "x", bed.now).unwrap();
    let at = bed.wait(Span::minutes(1));
    let all: Vec<_> = ["n1", "n2", "n9"].map(|name| (node(name), contact(5, at))).into();
    bed.store.record_agent_contacts(&bed.lease, &all).unwrap();
    let known: Vec<_> = bed.store.agents().unwrap().into_iter().map(|agent| agent.last_contact).collect();
    assert_eq!(known, [Some(contact(5, at)), None, None], "neither revoked nor unknown agents are recorded");

    let dropped = DroppedReports { reports: 12, checks: [(test("gpu"), 9)].into(), from: at, to: at };
    let report = AgentFindings { dropped: Some(dropped), ..report(bed, 1, &[]) };
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Stored);
    let line = &bed.store.audit(1, None).unwrap()[0];
    assert_eq!(line.what, "reports-dropped");
    assert!(line.text.contains("12 reports") && line.text.contains("gpu 9"), "{}", line.text);

    let checks = (0..4096).map(|number| (test(&format!("check-{number}")), 1)).collect();
    let dropped = DroppedReports { reports: 4096, checks, from: at, to: at };
    let report = AgentFindings { dropped: Some(dropped), number: 2, ..report };
    assert_eq!(bed.store.accept_agent(&bed.lease, &report).unwrap(), Accepted::Stored);
    let line = &bed.store.audit(1, None).unwrap()[0];
    assert!(line.text.len() < 4096 && line.text.ends_with(", and 3968 more"), "{}", line.text);
}
