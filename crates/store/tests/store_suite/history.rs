//! Findings and history: what results add, and how they are read.

use doctor_core::{
    classify::DISTURBED_REPEATEDLY,
    finding::Verdict,
    ids::HardwareId,
    lifecycle::NodeState,
    plan::Action,
    reason::WithReason,
    time::{Span, Timestamp},
};
use doctor_store::records::HistoryFilter;

use crate::{
    bed::{StoreTestbed, finding, node, test},
    suite,
};

suite!(
    findings_count_up_while_they_last_and_a_conclusive_result_clears_them,
    an_inconclusive_result_opens_only_a_finding_about_repeated_disturbance_and_clears_none,
    a_late_result_is_history_and_changes_neither_latest_nor_findings,
    new_hardware_under_a_known_name_starts_without_history,
    history_is_read_newest_first_by_node_test_and_time,
    a_limit_cuts_history_where_it_would_be_cut_without_one,
    failure_rates_are_counted_by_the_hour,
);

fn findings_count_up_while_they_last_and_a_conclusive_result_clears_them(bed: &mut StoreTestbed) {
    let first = bed.now;
    bed.run_test("n1", "gpu", Verdict::Fail);
    bed.wait(Span::hours(1));
    bed.run_test("n1", "gpu", Verdict::Inconclusive);
    bed.wait(Span::hours(1));
    let run = bed.run_test("n1", "gpu", Verdict::Fail);
    let open = bed.store.load_nodes().unwrap()[&node("n1")].findings.clone();
    assert_eq!(open.len(), 1);
    assert_eq!((open[0].sightings, open[0].first_seen, open[0].last_seen), (2, first, bed.now));
    assert_eq!(open[0].run, Some(run));

    // The same check now shows another part: the old finding is cleared, the new one starts at one.
    bed.wait(Span::hours(1));
    let run = bed.plan("n1", &["gpu"]);
    let mut outcome = bed.outcome("n1", "gpu", Verdict::Fail);
    outcome.findings = vec![finding("gpu", "gpu-hot", 5), finding("gpu", "gpu-hot", 5)];
    bed.accept(&[bed.result(run, "n1", vec![outcome])]);
    let open = bed.store.load_nodes().unwrap()[&node("n1")].findings.clone();
    assert_eq!(
        open.iter().map(|open| (open.finding.entity.to_string(), open.sightings)).collect::<Vec<_>>(),
        [("gpu:5".to_owned(), 1)]
    );

    // Another check's pass clears nothing here; not applicable clears nothing; this check's pass does.
    bed.wait(Span::hours(1));
    bed.run_test("n1", "disk", Verdict::Pass);
    bed.run_test("n1", "gpu", Verdict::NotApplicable);
    assert_eq!(bed.store.load_nodes().unwrap()[&node("n1")].findings.len(), 1);
    bed.run_test("n1", "gpu", Verdict::Pass);
    assert!(bed.store.load_nodes().unwrap()[&node("n1")].findings.is_empty());
    let trail: Vec<String> = bed.store.audit(100, Some(&node("n1"))).unwrap().into_iter().map(|row| row.what).collect();
    assert_eq!(trail.iter().filter(|what| *what == "finding-opened").count(), 2);
    assert_eq!(trail.iter().filter(|what| *what == "finding-cleared").count(), 2);
    bed.assert_sound();
}

fn an_inconclusive_result_opens_only_a_finding_about_repeated_disturbance_and_clears_none(bed: &mut StoreTestbed) {
    bed.run_test("n1", "gpu", Verdict::Fail);
    bed.wait(Span::hours(1));
    let run = bed.plan("n1", &["gpu"]);
    let mut outcome = bed.outcome("n1", "gpu", Verdict::Inconclusive);
    outcome.findings = vec![finding("gpu", "clock-off", 5), finding("gpu", DISTURBED_REPEATEDLY, 5)];
    bed.accept(&[bed.result(run, "n1", vec![outcome])]);
    let rules = |bed: &StoreTestbed| {
        let open = bed.store.load_nodes().unwrap()[&node("n1")].findings.clone();
        open.iter().map(|open| open.finding.rule.to_string()).collect::<Vec<_>>()
    };
    let mut open = rules(bed);
    open.sort();
    assert_eq!(open, [DISTURBED_REPEATEDLY, "gpu-hot"]);
    let newest = HistoryFilter { limit: Some(1), ..HistoryFilter::default() };
    assert_eq!(bed.store.history(&newest).unwrap()[0].severity, None, "an inconclusive result has no severity");
    bed.wait(Span::hours(1));
    bed.run_test("n1", "gpu", Verdict::Pass);
    assert_eq!(rules(bed), Vec::<String>::new());
    bed.assert_sound();
}

fn a_late_result_is_history_and_changes_neither_latest_nor_findings(bed: &mut StoreTestbed) {
    bed.run_test("n1", "gpu", Verdict::Inconclusive);
    bed.wait(Span::hours(2));
    bed.run_test("n1", "gpu", Verdict::Inconclusive);
    bed.wait(Span::hours(1));
    // A fail from an hour ago falls between the two: one miss follows it, and it is open.
    let run = bed.plan("n1", &["gpu"]);
    let mut outcome = bed.outcome("n1", "gpu", Verdict::Fail);
    outcome.at = bed.now.minus(Span::hours(2));
    bed.accept(&[bed.result(run, "n1", vec![outcome])]);
    let latest = bed.store.latest_of(&node("n1")).unwrap().remove(0);
    assert_eq!((latest.verdict, latest.misses), (Verdict::Inconclusive, 1));
    assert_eq!(latest.conclusive, Some((Verdict::Fail, bed.now.minus(Span::hours(2)))));
    assert_eq!(bed.store.load_nodes().unwrap()[&node("n1")].findings.len(), 1);

    // An older pass does not clear the finding of a newer fail.
    let run = bed.plan("n1", &["gpu"]);
    let mut outcome = bed.outcome("n1", "gpu", Verdict::Pass);
    outcome.at = bed.now.minus(Span::hours(5));
    bed.accept(&[bed.result(run, "n1", vec![outcome])]);
    assert_eq!(bed.store.load_nodes().unwrap()[&node("n1")].findings.len(), 1);
    assert_eq!(bed.store.latest_of(&node("n1")).unwrap().remove(0), latest);
    assert_eq!(bed.store.history(&HistoryFilter::default()).unwrap().len(), 4);
    bed.assert_sound();
}

fn new_hardware_under_a_known_name_starts_without_history(bed: &mut StoreTestbed) {
    bed.run_test("n1", "gpu", Verdict::Fail);
    bed.wait(Span::hours(1));
    let board = HardwareId::new("board-SN-other").unwrap();
    bed.commit(&[WithReason::new(
        Action::HardwareReplaced { node: node("n1"), hardware: board.clone() },
        "machine-exchanged",
        "new",
    )]);
    let stored = bed.store.load_nodes().unwrap().remove(&node("n1")).unwrap();
    assert_eq!((stored.state, stored.hardware, stored.findings.len()), (NodeState::InService, Some(board), 0));
    assert!(stored.records.is_empty() && bed.store.latest_all().unwrap().is_empty());
    assert_eq!(bed.store.history(&HistoryFilter::default()).unwrap().len(), 1);
    bed.assert_sound();
    bed.wait(Span::hours(1));
    bed.run_test("n1", "gpu", Verdict::Pass);
    assert_eq!(bed.store.latest_all().unwrap()[0].conclusive, Some((Verdict::Pass, bed.now)));
    bed.assert_sound();
}

fn history_is_read_newest_first_by_node_test_and_time(bed: &mut StoreTestbed) {
    let begin = bed.now;
    for hour in 0..30 {
        for name in ["n1", "n2"] {
            bed.run_test(name, if hour % 2 == 0 { "disk" } else { "gpu" }, Verdict::Pass);
        }
        bed.wait(Span::hours(1));
        assert_eq!(bed.now, begin.plus(Span::hours(hour + 1)));
    }
    let of = |filter: HistoryFilter| bed.store.history(&filter).unwrap();
    let all = of(HistoryFilter::default());
    assert_eq!(all.len(), 60);
    assert!(all.is_sorted_by_key(|row| std::cmp::Reverse(row.at)));
    assert_eq!(of(HistoryFilter { limit: Some(7), ..HistoryFilter::default() }), all[..7]);
    assert_eq!(of(HistoryFilter { limit: Some(1000), ..HistoryFilter::default() }), all);
    let n1 = of(HistoryFilter { node: Some(node("n1")), limit: Some(20), ..HistoryFilter::default() });
    assert_eq!(n1.len(), 20);
    assert!(n1.iter().all(|row| row.node == node("n1")) && n1[0].at == begin.plus(Span::hours(29)));
    let since = begin.plus(Span::hours(20));
    assert_eq!(of(HistoryFilter { since: Some(since), ..HistoryFilter::default() }).len(), 20);
    let disk = HistoryFilter {
        node: Some(node("n2")),
        test: Some(test("disk")),
        since: Some(since),
        ..HistoryFilter::default()
    };
    assert_eq!(of(disk).len(), 5);
    assert!(of(HistoryFilter { test: Some(test("never")), ..HistoryFilter::default() }).is_empty());
    assert!(of(HistoryFilter { node: Some(node("never")), ..HistoryFilter::default() }).is_empty());
    assert_eq!(bed.store.last_runs(5).unwrap().len(), 5);
}

fn a_limit_cuts_history_where_it_would_be_cut_without_one(bed: &mut StoreTestbed) {
    for _ in 0..3 {
        let run = bed.plan("n1", &["memory", "disk", "gpu"]);
        let outcomes = ["memory", "disk", "gpu"].map(|of| bed.outcome("n1", of, Verdict::Pass)).to_vec();
        bed.accept(&[bed.result(run, "n1", outcomes)]);
        bed.wait(Span::hours(1));
    }
    for name in [None, Some(node("n1"))] {
        let of = |limit| bed.store.history(&HistoryFilter { node: name.clone(), limit, ..HistoryFilter::default() });
        let all = of(None).unwrap();
        assert_eq!(all.len(), 9);
        for limit in 1..=9 {
            assert_eq!(of(Some(limit)).unwrap(), all[..limit as usize], "{name:?} {limit}");
        }
    }
}

fn failure_rates_are_counted_by_the_hour(bed: &mut StoreTestbed) {
    bed.run_test("n1", "disk", Verdict::Fail);
    bed.wait(Span::days(10));
    for (i, verdict) in [Verdict::Pass, Verdict::Pass, Verdict::Fail, Verdict::Inconclusive, Verdict::NotApplicable]
        .into_iter()
        .enumerate()
    {
        bed.run_test(&format!("n{i}"), "disk", verdict);
    }
    let lately = bed.store.failure_rates(bed.now.minus(Span::days(1))).unwrap();
    let [rate] = lately.as_slice() else { panic!("{lately:?}") };
    assert_eq!((rate.pass, rate.fail, rate.inconclusive, rate.not_applicable), (2, 1, 1, 1));
    assert_eq!(bed.store.failure_rates(Timestamp::from_secs(0)).unwrap()[0].fail, 2);
}
