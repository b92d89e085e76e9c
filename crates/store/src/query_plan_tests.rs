//! Query plan tests: no API query scans a table that grows with time.

use std::time::{Duration, Instant};

use doctor_core::{
    finding::Verdict,
    ids::{CaseId, NodeName, RunId, TestId},
    reason::ReasonCode,
    time::{Span, Timestamp},
};

use super::{
    Store,
    db::{Access, plans},
    id_cache::OutcomeKind,
    records::{HistoryCursor, HistoryFilter},
};

/// Tables that grow with time, and their aliases in queries. The cluster state is built from all of `latest_result`,
/// which a query about one node or test need not read.
const GROWING_TABLES: [&str; 17] = [
    "history",
    "h",
    "latest_result",
    "l",
    "agent_result",
    "run",
    "r",
    "run_node",
    "job_output",
    "o",
    "audit_log",
    "case_record",
    "evidence",
    "evidence_pack",
    "hourly_count",
    "node_hours",
    "node_taken_out",
];

fn plan_steps_of_all_queries(store: &Store) -> Vec<String> {
    let (node, test) = (NodeName::new("n1").unwrap(), TestId::new("dl").unwrap());
    let now = Timestamp::from_secs(1_700_000_000);
    let run = RunId::born_at(now);
    let mut filters = Vec::new();
    for of_node in [None, Some(&node)] {
        for of_test in [None, Some(&test)] {
            for verdict in [None, Some(Verdict::Fail)] {
                for since in [None, Some(now.minus(Span::days(400)))] {
                    for run in [None, Some(None), Some(Some(run))] {
                        let cursor = |run| HistoryCursor { at: now, run, node: node.clone(), test: test.clone() };
                        let (node, test, after) = (of_node.cloned(), of_test.cloned(), run.map(cursor));
                        filters.push(HistoryFilter {
                            node,
                            test,
                            since,
                            verdict,
                            after,
                            before: None,
                            limit: Some(101),
                        });
                    }
                }
            }
        }
    }
    plans::record(|| {
        for filter in &filters {
            store.history_page(filter).unwrap();
        }
        store.runs_before(Some(run), 101, None).unwrap();
        store.run(run).unwrap();
        store.job_output(run).unwrap();
        store.last_without_result(&node).unwrap();
        store.without_result_since(now, 101).unwrap();
        store.last_run_ends(101).unwrap();
        store.audit_before(None, 101, None).unwrap();
        store.audit_before(Some(7), 101, Some(&node)).unwrap();
        for open in [false, true] {
            store.cases_before(CaseId::from_number(7), open, 101).unwrap();
        }
        store.case_spans(now).unwrap();
        store.case(CaseId::from_number(7)).unwrap();
        store.latest_of(&node).unwrap();
        store.latest_of_test(&test).unwrap();
        store.mean_durations(std::slice::from_ref(&test)).unwrap();
        store.nodes_not_applicable(std::slice::from_ref(&test), &[ReasonCode::fixed("no-fio")]).unwrap();
        store.evidence(run, &node).unwrap();
        store.node_time_by_day(now).unwrap();
        store.node_time_since(now).unwrap();
        store.counters().unwrap();
        store.leader().unwrap();
        store.tokens().unwrap();
    })
}

#[test]
fn no_api_query_scans_a_growing_table() {
    let store = Store::open_in_memory().unwrap();
    let names = |tx: &mut super::Tx<'_>| {
        tx.node_id(&NodeName::new("n1").unwrap(), Timestamp::from_secs(1))?;
        for (verdict, reason) in [(Verdict::Pass, "within-limits"), (Verdict::NotApplicable, "no-fio")] {
            tx.outcome_id(&OutcomeKind::new(verdict, None, ReasonCode::fixed(reason)))?;
        }
        tx.test_id(&TestId::new("dl").unwrap())
    };
    store.write_unfenced(Access::Write, names).unwrap();
    let steps = plan_steps_of_all_queries(&store);
    assert!(steps.len() > 50, "{steps:?}");
    for step in &steps {
        let mut tokens = step.split(' ');
        let scans = tokens.next() == Some("SCAN") && tokens.next().is_some_and(|table| GROWING_TABLES.contains(&table));
        // This index contains open cases only.
        assert!(!scans || step.contains("USING INDEX case_record_open"), "{step}");
    }
    // Ordering by newest must not scan the runs of all other nodes.
    let of_node = plans::record(|| drop(store.runs_before(None, 101, NodeName::new("n1").ok().as_ref()).unwrap()));
    let found_by_id = |step: &String| step.starts_with("SEARCH run USING INTEGER PRIMARY KEY (rowid=?)");
    assert!(of_node.iter().any(found_by_id), "{of_node:#?}");
}

#[test]
fn a_query_over_its_deadline_is_aborted_and_the_next_one_succeeds() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&super::StoreUrl::Sqlite(folder.path().join("doctor.db"))).unwrap();
    let endless =
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000000000) SELECT COUNT(*) FROM n";
    let count = |store: &Store, sql: &str| store.read(|tx| tx.first("counting", sql, &[], |row| row.int(0)));
    let soon = store.with_deadline(Instant::now() + Duration::from_millis(100));
    let late = count(&soon, endless).unwrap_err();
    assert!(matches!(late, super::StoreError::DeadlineExceeded { .. }), "{late}");
    let late = count(&soon, "SELECT 1").unwrap_err();
    assert!(matches!(late, super::StoreError::DeadlineExceeded { .. }), "the deadline has passed: {late}");
    for store in [&store, &store.with_deadline(Instant::now() + Duration::from_secs(600))] {
        assert_eq!(count(store, "SELECT COUNT(*) FROM token").unwrap(), Some(0));
    }
}
