//! Table tests of the views.

use std::{collections::BTreeMap, sync::Arc};

use super::*;
use crate::{
    access::Place,
    case::{Case, CaseOutcome, CaseState, RepairStep, Step, StepKind, StepState},
    finding::{Evidence, Finding, OpenFinding, Remedy, Severity, Verdict},
    ids::{CaseId, HardwareId, JobId, OpId, PoolName, RuleId},
    lifecycle::NodeState,
    node::{Hold, Marks, Node, Occupancy},
    observation::Entity,
    policy::Policy,
    reason::{ReasonCode, WithReason},
    run::{IncompleteReason, NonEmpty, NotStartedReason, ObservedJobState, Purpose, Report, RunEnd, RunState},
    snapshot::{ActiveRun, Breaker, Capabilities, RecentActions, TestRecords},
    time::Span,
};

pub(super) const NOW: Timestamp = Timestamp::from_secs(1_794_729_600);

pub(super) fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

pub(super) fn test_id(text: &str) -> TestId {
    TestId::new(text).unwrap()
}

pub(super) fn days(days: i64) -> Timestamp {
    NOW.minus(Span::days(days))
}

/// `storage` is valid for a week, `dl` for three days and only in pool `gpu`.
fn tests() -> Vec<TestPolicy> {
    let test = |id: &str, cutoff: i64, pools: Option<Vec<PoolName>>| TestPolicy {
        id: test_id(id),
        suite: None,
        cutoff: Span::days(cutoff),
        limit: Span::minutes(20),
        typical_duration: Span::minutes(10),
        exclusive: true,
        place: Place::Job,
        routine: true,
        maintenance: false,
        multi_node: false,
        max_concurrent: None,
        shares: Vec::new(),
        pools,
    };
    vec![test("dl", 3, Some(vec![PoolName::new("gpu").unwrap()])), test("storage", 7, None)]
}

pub(super) fn cluster() -> Facts {
    Facts {
        now: NOW,
        backend: Some("slurm".to_owned()),
        observed_at: Some(NOW),
        cycle_at: Some(NOW),
        snapshot: Snapshot {
            at: NOW,
            planned_at: None,
            nodes: Vec::new(),
            runs: Vec::new(),
            cases: Vec::new(),
            recent: RecentActions::default(),
            spent: Span::ZERO,
            breaker: Breaker::Closed { since: None },
            pauses: Vec::new(),
            commands: Vec::new(),
            trials: Vec::new(),
            silence_reported: false,
            capabilities: Capabilities::NONE,
            policy: Arc::new(Policy::built_in()),
            tests: tests().into(),
        },
        gone: Vec::new(),
        skip_reasons: BTreeMap::new(),
    }
}

impl Facts {
    fn node_in(mut self, text: &str, pool: &str) -> Self {
        self.snapshot.nodes.push(NodeRecord {
            node: Node {
                name: name(text),
                pool: PoolName::new(pool).unwrap(),
                occupancy: Occupancy::Free,
                marks: Marks::default(),
                hardware: None,
                sku: None,
                declared: None,
                overrides: None,
            }
            .into(),
            state: NodeState::InService,
            since: Timestamp::MIN,
            test_records: TestRecords::untested(self.snapshot.tests.len()),
            findings: Vec::new(),
            backoff: None,
            hold: None,
            hardware: None,
            case: None,
            last_report: None,
            job_failures: None,
            remembered_gpus: 0,
        });
        self
    }

    pub(super) fn with(self, text: &str) -> Self {
        self.node_in(text, "gpu")
    }

    pub(super) fn last(&mut self) -> &mut NodeRecord {
        self.snapshot.nodes.last_mut().unwrap()
    }

    /// Adds a result to the node added last. Results are given oldest first.
    pub(super) fn result(mut self, test: &str, verdict: Verdict, at: Timestamp) -> Self {
        let index = self.snapshot.tests.iter().position(|known| known.id.as_str() == test).unwrap();
        self.last().test_records[index].add(verdict, at);
        self
    }

    pub(super) fn change(mut self, change: impl FnOnce(&mut NodeRecord)) -> Self {
        change(self.last());
        self
    }
}

pub(super) fn finding(check: &str, severity: Severity, times: u32, confirm: u32) -> OpenFinding {
    OpenFinding {
        finding: Finding {
            check: test_id(check),
            entity: Entity::node(),
            verdict: Verdict::Fail,
            severity,
            remedy: Remedy::Watch,
            reason: ReasonCode::fixed("slow"),
            text: format!("{check} is slow"),
            rule: RuleId::new("a-rule").unwrap(),
            evidence: Evidence::Measured { metric: "read".into(), value: 1.0, limit: 2.0 },
            confirm,
        },
        run: None,
        first_seen: days(1),
        last_seen: NOW,
        sightings: times,
    }
}

fn run_on(node: &str, planned: Timestamp, state: RunState) -> Run {
    Run {
        id: RunId::from_number(u64::try_from(planned.millis()).unwrap() << 21),
        nodes: NonEmpty::one(name(node)),
        tests: NonEmpty::one(test_id("storage")),
        state,
        purpose: WithReason::new(Purpose::Validation, "stale", "it was due"),
        case: None,
        planned,
        limit: Span::minutes(20),
    }
}

#[test]
fn every_test_status_has_its_own_label() {
    use Verdict::{Fail, Inconclusive, NotApplicable, Pass};
    for (results, status) in [
        (vec![], TestStatus::NeverTested),
        (vec![(Pass, 2)], TestStatus::Pass),
        (vec![(Pass, 8)], TestStatus::Stale),
        (vec![(NotApplicable, 2)], TestStatus::NotApplicable),
        (vec![(NotApplicable, 8)], TestStatus::Stale),
        (vec![(Inconclusive, 8)], TestStatus::Inconclusive),
        (vec![(Pass, 2), (Inconclusive, 1)], TestStatus::Inconclusive),
        (vec![(Fail, 2)], TestStatus::Fail),
        (vec![(Fail, 80)], TestStatus::Fail),
        (vec![(Fail, 2), (Pass, 1)], TestStatus::Pass),
    ] {
        let mut facts = cluster().with("a");
        for (verdict, ago) in &results {
            facts = facts.result("storage", *verdict, days(*ago));
        }
        let row = node_rows(&facts, &[name("a")]).remove(0);
        let cell = row.tests.iter().find(|cell| cell.test.as_str() == "storage").unwrap();
        assert_eq!(cell.status, status, "{results:?}");
    }
    let labels: BTreeSet<&str> = TestStatus::ALL.iter().map(|status| status.label()).collect();
    assert_eq!(labels.len(), TestStatus::ALL.len());
}

#[test]
fn coverage_counts_conclusive_results_within_the_cut_off_over_nodes_that_the_test_applies_to() {
    use Verdict::{Fail, Inconclusive, NotApplicable, Pass};
    let facts = cluster()
        .with("pass")
        .result("storage", Pass, days(1))
        .with("fail")
        .result("storage", Fail, days(1))
        .with("shaky")
        .result("storage", Pass, days(2))
        .result("storage", Inconclusive, days(1))
        .with("silent")
        .result("storage", Inconclusive, days(1))
        .with("stale")
        .result("storage", Pass, days(9))
        .with("none")
        .result("storage", NotApplicable, days(1))
        .with("never")
        .node_in("cpu", "cpu");
    let rows = coverage(&facts);
    let storage = &rows[1];
    assert_eq!((storage.test.as_str(), storage.nodes, storage.covered), ("storage", 8, 3));
    let standings =
        [storage.pass, storage.fail, storage.inconclusive, storage.stale, storage.never_tested, storage.not_applicable];
    assert_eq!(standings, [1, 1, 2, 1, 2, 1]);
    assert_eq!(standings.iter().sum::<u32>(), storage.nodes);
    // One of eight does not apply: three of seven.
    assert!((storage.percent.unwrap() - 300.0 / 7.0).abs() < 1e-9);
    let dl = &rows[0];
    assert_eq!((dl.nodes, dl.never_tested, dl.percent), (7, 7, Some(0.0)), "dl is not for pool cpu");
}

#[test]
fn a_test_that_applies_to_no_node_has_no_percentage() {
    let facts = cluster().node_in("cpu", "cpu");
    assert_eq!(coverage(&facts)[0].percent, None);
}

#[test]
fn due_tests_match_the_planner() {
    let due = |facts: &Facts| {
        let view = why(facts, &name("a"), StoredNodeData::default()).unwrap();
        view.tests.iter().find(|line| line.test.as_str() == "storage").unwrap().due
    };
    let facts = || cluster().with("a");
    assert_eq!(due(&facts()), Due::Now);
    assert_eq!(due(&facts().result("storage", Verdict::Pass, days(2))), Due::At { at: days(-5) });
    assert_eq!(due(&facts().result("storage", Verdict::Pass, days(8))), Due::Now);
    let tried = NOW.minus(Span::minutes(10));
    let again = facts().result("storage", Verdict::Inconclusive, tried);
    assert_eq!(due(&again), Due::Retry { at: tried.plus(Span::minutes(30)), misses: 1 });
    // A failing test that is not yet confirmed is repeated soon, long before its cut-off.
    let failed = facts()
        .result("storage", Verdict::Fail, tried)
        .change(|record| record.findings.push(finding("storage", Severity::Monitor, 1, 2)));
    assert_eq!(due(&failed), Due::Now);
}

#[test]
fn a_node_without_findings_is_healthy_only_if_every_test_has_passed() {
    let headline = |facts: &Facts| why(facts, &name("a"), StoredNodeData::default()).unwrap().headline;
    let passed = cluster().with("a").result("dl", Verdict::Pass, days(1)).result("storage", Verdict::Pass, days(1));
    assert!(headline(&passed).contains("every test that applies has passed"), "{}", headline(&passed));
    let half = cluster().with("a").result("dl", Verdict::Pass, days(1));
    let expected = "a is in service, but not known to be healthy: never tested: storage; `doctor test a --yes`";
    assert_eq!(headline(&half), expected);
    let silent = half.result("storage", Verdict::Inconclusive, days(1));
    let expected = "a is in service, but not known to be healthy: inconclusive: storage; `doctor test a --yes`";
    assert_eq!(headline(&silent), expected);
}

#[test]
fn why_names_the_agents_checks_that_a_requalification_waits_for() {
    let step = |number, what, at| Step {
        op: OpId::from_number(number),
        what,
        repair_step: RepairStep::Reboot,
        state: StepState::Done,
        at,
        attempts: 1,
        text: String::new(),
    };
    let id = CaseId::from_number(1);
    let case = Case {
        id,
        hardware: HardwareId::new("board-1").unwrap(),
        node: name("a"),
        opened: days(1),
        severity: Severity::Reboot,
        findings: Vec::new(),
        repair_step: RepairStep::Reboot,
        steps: vec![step(1, StepKind::Reboot, days(1)), step(2, StepKind::Requalify, NOW.minus(Span::hours(2)))],
        state: CaseState::Open,
        boot_id: None,
        advice: None,
        job_failures: Vec::new(),
        request: None,
    };
    let headline = |silent_for: Span| {
        let mut facts = cluster();
        let mut tests = tests();
        tests[1].place = Place::Agent;
        facts.snapshot.tests = tests.into();
        facts.snapshot.cases.push(case.clone());
        let facts = facts.with("a").result("dl", Verdict::Pass, NOW).result("storage", Verdict::Pass, days(1));
        let facts = facts.change(|record| {
            record.state = NodeState::Requalifying { run: None };
            record.case = Some(id);
            record.last_report = Some(NOW.minus(silent_for));
        });
        let view = why(&facts, &name("a"), StoredNodeData::default()).unwrap();
        (view.headline, view.next.join("\n"))
    };
    let (text, to_do) = headline(Span::hours(1));
    assert!(text.contains("waiting for the agent's checks since the reboot (storage): agent silent since"), "{text}");
    assert!(to_do.contains("doctor agent revoke a"), "{to_do}");
    let (text, to_do) = headline(Span::minutes(1));
    assert!(text.contains("(storage): agent last reported at") && to_do.contains("the agent repeats them"), "{text}");
}

#[test]
fn why_explains_cause_and_next_step_for_every_state() {
    let case = Case {
        id: CaseId::from_number(1),
        hardware: HardwareId::new("board-1").unwrap(),
        node: name("a"),
        opened: days(1),
        severity: Severity::Isolate,
        findings: Vec::new(),
        repair_step: RepairStep::Replace,
        steps: vec![Step {
            op: OpId::from_number(1),
            what: StepKind::Drain,
            repair_step: RepairStep::Replace,
            state: StepState::Proposed,
            at: days(1),
            attempts: 1,
            text: "waiting for an operator: the controller may not drain the node".into(),
        }],
        state: CaseState::Open,
        boot_id: None,
        advice: None,
        job_failures: Vec::new(),
        request: None,
    };
    let suspect = |record: &mut NodeRecord| {
        record.state = NodeState::Suspect;
        record.findings.push(finding("storage", Severity::Reset, 1, 2));
    };
    let held = |record: &mut NodeRecord| {
        record.state = NodeState::Held { by: "ann".into() };
        record.hold = Some(Hold { by: "ann".into(), why: "fan".into(), since: days(1), until: None });
    };
    type Set = dyn Fn(&mut NodeRecord);
    let table: [(&Set, &str, &str); 4] = [
        (&suspect, "is suspect: storage is slow", "storage failed 1 of 2 times"),
        (&held, "is held by ann", "doctor release a"),
        (&|record| record.state = NodeState::Out, "until an operator releases it", "allow.drain"),
        (&|record| record.state = NodeState::InService, "in service", "allow.drain"),
    ];
    for (set, headline, advice) in table {
        let facts = cluster().with("a").change(set);
        let view =
            why(&facts, &name("a"), StoredNodeData { case: Some(case.clone()), ..StoredNodeData::default() }).unwrap();
        assert!(view.headline.contains(headline), "{}", view.headline);
        assert!(view.next.iter().any(|line| line.contains(advice)), "{:?}", view.next);
    }
}

#[test]
fn a_run_without_a_result_is_shown_until_each_of_its_tests_has_one() {
    let facts = cluster().with("a");
    let ended = RunWithoutResult {
        run: RunId::from_number(7),
        node: name("a"),
        tests: vec![test_id("dl"), test_id("storage")],
        state: "incomplete",
        end: Some("crashed"),
        ended: days(1),
        last_output: Some("exec: doctor-node: not found (exit code 127)".to_owned()),
    };
    let conclusive = |at: Timestamp| LatestResult {
        at,
        verdict: Verdict::Pass,
        reason: ReasonCode::fixed("within-limits"),
        run: None,
        conclusive: Some((Verdict::Pass, at)),
        misses: 0,
    };
    let shown = |latest: &[(&str, Timestamp)]| {
        let latest = latest.iter().map(|(test, at)| (test_id(test), conclusive(*at))).collect();
        let without_result = Some(ended.clone());
        let stored = StoredNodeData { latest, without_result, ..StoredNodeData::default() };
        why(&facts, &name("a"), stored).unwrap().without_result
    };
    let sentence = shown(&[]).unwrap().sentence();
    assert!(sentence.ends_with("without a complete result (crashed): exec: doctor-node: not found (exit code 127)"));
    assert!(shown(&[("dl", NOW), ("storage", days(2))]).is_some(), "storage has no result since");
    assert_eq!(shown(&[("dl", NOW), ("storage", NOW)]), None);
    let silent = RunWithoutResult { last_output: None, ..ended.clone() };
    assert!(silent.sentence().ends_with("(crashed); its job left no output"));
}

#[test]
fn an_expired_hold_is_not_in_the_view() {
    let hold = Hold { by: "ann".into(), why: "fan".into(), since: days(2), until: Some(days(1)) };
    let facts = cluster().with("a").change(|record| record.hold = Some(hold));
    assert_eq!(why(&facts, &name("a"), StoredNodeData::default()).unwrap().hold, None);
}

#[test]
fn a_node_no_longer_listed_is_gone_and_not_free() {
    let mut facts = cluster().with("a");
    facts.gone = std::mem::take(&mut facts.snapshot.nodes);
    let row = node_rows(&facts, &[name("a")]).remove(0);
    assert_eq!((row.occupancy, row.pool), (OccupancyKind::Gone, None));
    let counts = status(&facts, &StoredStatus::default()).nodes;
    assert_eq!((counts.total, counts.gone, counts.free), (0, 1, 0));
    assert!(
        why(&facts, &name("a"), StoredNodeData::default())
            .unwrap()
            .headline
            .contains("no longer listed by the cluster")
    );
}

#[test]
fn a_run_on_a_node_takes_precedence_over_its_skip_reason() {
    let mut facts = cluster().with("a");
    facts.skip_reasons.insert(name("a"), SkippedSince { since: days(1), reason: SkipReason::WaitingForSlot });
    assert_eq!(node_rows(&facts, &[name("a")])[0].skipped.as_ref().unwrap().code, "waiting-for-slot");
    let job = JobId("1".into());
    let run = run_on("a", days(0), RunState::Running { job: job.clone(), since: NOW });
    facts.snapshot.runs.push(ActiveRun {
        run,
        job: ObservedJobState::Running { job, since: NOW },
        started: Some(NOW),
        cancelling: None,
        absent_since: None,
    });
    let row = node_rows(&facts, &[name("a")]).remove(0);
    assert_eq!((row.skipped, row.run.unwrap().state), (None, "running"));
    assert_eq!(status(&facts, &StoredStatus::default()).running.running, 1);
}

#[test]
fn a_report_counts_what_was_queued_run_and_skipped_and_what_it_cost() {
    let hour = |hours: i64| NOW.minus(Span::hours(hours));
    let ended = |end: RunEnd| RunState::Ended(end);
    let run =
        |planned, started, finished, end| RunFacts { run: run_on("a", planned, ended(end)), started, ended: finished };
    let completed = RunEnd::Completed(Report::default());
    let cut = RunEnd::Incomplete { why: IncompleteReason::NodeTaken, partial: None };
    let case = |opened: Timestamp, state| Case {
        id: CaseId::from_number(1),
        hardware: HardwareId::new("board-1").unwrap(),
        node: name("a"),
        opened,
        severity: Severity::Isolate,
        findings: vec![finding("storage", Severity::Isolate, 1, 1).finding],
        repair_step: RepairStep::Replace,
        steps: Vec::new(),
        state,
        boot_id: None,
        advice: None,
        job_failures: Vec::new(),
        request: None,
    };
    let result = |verdict, at| TestResult { test: test_id("storage"), node: name("a"), verdict, at };
    let period = Period {
        runs: vec![
            // It began before the period and ended inside: one hour of it counts.
            run(hour(26), Some(hour(25)), Some(hour(23)), completed.clone()),
            run(hour(10), Some(hour(9)), Some(hour(8)), completed),
            run(hour(7), Some(hour(7)), Some(hour(6)), cut),
            run(hour(5), None, Some(hour(5)), RunEnd::NotStarted(NotStartedReason::PendingTooLong)),
            run(hour(4), None, Some(hour(4)), RunEnd::NotStarted(NotStartedReason::PendingTooLong)),
        ],
        results: vec![result(Verdict::Fail, hour(9)), result(Verdict::Fail, hour(9)), result(Verdict::Pass, hour(2))],
        cases: vec![
            case(hour(3), CaseState::Open),
            case(hour(90), CaseState::Closed { at: hour(2), how: CaseOutcome::Returned }),
        ],
    };
    let mut facts = cluster().with("a");
    facts.skip_reasons.insert(name("a"), SkippedSince { since: days(1), reason: SkipReason::QuietWindow });
    let view = report(&facts, &period, hour(24));
    assert_eq!((view.queued, view.run, view.completed), (4, 2, 1));
    assert_eq!(view.not_started, [Count { code: "pending-too-long", count: 2 }]);
    assert_eq!(view.incomplete, [Count { code: "node-taken", count: 1 }]);
    assert_eq!(view.skipped, [Count { code: "quiet-window", count: 1 }]);
    assert_eq!((view.cases_opened, view.cases_closed, view.cases_open), (1, 1, 1));
    assert!((view.node_hours - 3.0).abs() < 1e-9, "{}", view.node_hours);
    assert_eq!(view.node_hours_per_fault, Some(3.0));
    assert_eq!((view.results[0].fail, view.results[0].failing_nodes), (2, 1));
    assert_eq!(view.overdue, [name("a")]);
    assert_eq!((view.slots.len(), view.slots[0].at), (24, hour(24)));
    assert_eq!((view.slots[15].fail, view.slots[22].pass, view.slots[21].cases_opened), (2, 1, 1));
    assert_eq!(view.slots[22].cases_closed, 1);
    let spent: f64 = view.slots.iter().map(|slot| slot.node_hours).sum();
    assert!((spent - view.node_hours).abs() < 1e-9, "the pieces add up: {spent}");
    let year = report(&facts, &period, hour(24 * 365));
    assert!(year.slots.len() <= 120, "{}", year.slots.len());
}

#[test]
fn every_view_is_json() {
    let facts = cluster()
        .with("a")
        .result("storage", Verdict::Inconclusive, days(1))
        .change(|record| record.findings.push(finding("storage", Severity::Reset, 1, 2)));
    let view = why(&facts, &name("a"), StoredNodeData::default()).unwrap();
    let text = serde_json::to_string(&view).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&json["node"], &json["state"]), (&"a".into(), &"in-service".into()));
    for key in json.as_object().unwrap().keys() {
        assert_eq!(text.matches(&format!("\"{key}\":")).count(), 1 + nested(&json, key), "{key} is there twice");
    }
    assert_eq!(json["open_findings"][0]["rule"], "a-rule");
    assert_eq!(json["test_lines"][0]["status"], "never-tested");
    assert_eq!(json["test_lines"][1]["due"]["is"], "now");
    assert!(serde_json::to_string(&status(&facts, &StoredStatus::default())).is_ok());
    assert!(serde_json::to_string(&report(&facts, &Period::default(), days(1))).is_ok());
}

#[test]
fn the_map_lists_each_reason_and_check_of_a_node_once() {
    let facts = cluster()
        .with("a")
        .with("b")
        .change(|record| {
            // Two disks of one node are slow: one entry.
            record.findings.push(finding("storage", Severity::Monitor, 1, 2));
            record.findings.push(finding("storage", Severity::Reset, 1, 2));
            record.findings.push(finding("dl", Severity::Reset, 1, 2));
        })
        .with("c")
        .change(|record| record.findings.push(finding("storage", Severity::Monitor, 1, 2)));
    let map = fleet_map(&facts, None);
    assert_eq!(map.reasons, ["slow"]);
    assert_eq!(map.checks, ["dl", "storage"]);
    assert_eq!(map.findings, [MapFinding(1, 0, 0), MapFinding(1, 0, 1), MapFinding(2, 0, 1)]);
}

/// Counts how often a key appears below the top level.
fn nested(json: &serde_json::Value, key: &str) -> usize {
    fn count(value: &serde_json::Value, key: &str) -> usize {
        match value {
            serde_json::Value::Object(map) => {
                usize::from(map.contains_key(key)) + map.values().map(|value| count(value, key)).sum::<usize>()
            }
            serde_json::Value::Array(list) => list.iter().map(|value| count(value, key)).sum(),
            _ => 0,
        }
    }
    count(json, key) - 1
}
