//! Tokens, API audit lines, and pages of long lists, on every kind of store.

use std::time::{Duration, Instant};

use doctor_core::{
    finding::Verdict,
    reason::ReasonCode,
    time::{Span, Timestamp},
};
use doctor_store::{
    ApiCall, Store, StoreError, StoreUrl,
    access::{Role, TokenDigest, TokenRow},
    records::{HistoryFilter, HistoryRow},
};

use crate::{
    bed::{StoreTestbed, node, test},
    suite,
};

suite!(
    a_token_is_stored_as_a_digest_and_its_name_is_used_once,
    an_api_call_is_audited_with_its_origin_and_plan,
    pages_of_history_add_up_for_every_filter,
    pages_of_runs_audit_and_days_add_up,
    the_cluster_state_is_replaced_completely,
    the_newest_results_of_a_test_tell_its_duration_and_where_its_software_is_missing,
);

fn the_newest_results_of_a_test_tell_its_duration_and_where_its_software_is_missing(bed: &mut StoreTestbed) {
    let (gpu, disk, reasons) = (test("gpu"), test("disk"), [ReasonCode::fixed("no-fio"), ReasonCode::fixed("no-nccl")]);
    let mut add = |name: &str, verdict, reason: &'static str, seconds| {
        let run = bed.plan(name, &["disk"]);
        let mut outcome = bed.outcome(name, "disk", verdict);
        (outcome.reason, outcome.duration) = (ReasonCode::fixed(reason), Span::from_secs(seconds));
        bed.accept(&[bed.result(run, name, vec![outcome])]);
        bed.wait(Span::hours(1));
    };
    add("n1", Verdict::Pass, "within-limits", 500);
    add("n1", Verdict::Pass, "within-limits", 30);
    add("n2", Verdict::NotApplicable, "no-fio", 1);
    add("n3", Verdict::NotApplicable, "no-gpu", 1);
    add("n4", Verdict::Fail, "storage-slow", 50);
    add("n5", Verdict::NotApplicable, "no-fio", 1);
    add("n5", Verdict::Inconclusive, "failed", 900);
    let tests = [disk.clone(), gpu];
    assert_eq!(bed.store.mean_durations(&tests).unwrap(), [(disk.clone(), Span::from_secs(40))].into());
    let missing = bed.store.nodes_not_applicable(&tests, &reasons).unwrap();
    assert_eq!(missing, [(disk, ReasonCode::fixed("no-fio"), vec![node("n2")])], "the newest result counts");
}

fn a_token_is_stored_as_a_digest_and_its_name_is_used_once(bed: &mut StoreTestbed) {
    let digest = TokenDigest::of("doctor_token_x");
    let expires = Some(bed.now.plus(Span::days(1)));
    let (by, name) = ("ann".to_owned(), "ops".to_owned());
    let token = TokenRow { name, role: Role::Operator, by, created: bed.now, expires, revoked: None, digest };
    bed.store.add_token(&token, "for the pipeline").unwrap();
    assert_eq!(bed.store.tokens().unwrap(), std::slice::from_ref(&token));
    let again = bed.store.add_token(&token, "again").unwrap_err().to_string();
    assert!(again.contains("choose another name"), "{again}");
    let at = bed.wait(Span::minutes(1));
    assert!(bed.store.revoke_token("ops", "bob", "left", at).unwrap());
    assert!(!bed.store.revoke_token("ops", "bob", "left", at).unwrap(), "it was not accepted before");
    assert!(!bed.store.revoke_token("none", "bob", "left", at).unwrap());
    assert_eq!(bed.store.tokens().unwrap()[0].revoked, Some(at));
    assert!(bed.store.add_token(&token, "again").is_err(), "the audit trail refers to tokens by name");
    let trail: Vec<String> = bed.store.audit(10, None).unwrap().into_iter().map(|line| line.what).collect();
    assert_eq!(trail, ["revoke-token", "add-token"]);
}

fn an_api_call_is_audited_with_its_origin_and_plan(bed: &mut StoreTestbed) {
    let call = ApiCall {
        action: "api-hold",
        by: "ops".to_owned(),
        code: "done",
        text: "fan".to_owned(),
        origin: "10.0.0.7".to_owned(),
        plan: Some("Would hold 1 node".to_owned()),
        node: Some(node("unheard-of")),
    };
    bed.store.record_call(&call, bed.now).unwrap();
    bed.store.close_breaker("ann", "seen", bed.now).unwrap();
    let [plain, called] = &bed.store.audit(10, None).unwrap()[..] else { panic!("two lines") };
    assert_eq!((called.origin.as_deref(), called.plan.as_deref()), (Some("10.0.0.7"), Some("Would hold 1 node")));
    assert_eq!((called.node.as_ref(), called.text.as_str()), (None, "fan"));
    assert_eq!((plain.origin.as_ref(), plain.plan.as_ref()), (None, None));
}

/// Results of two nodes, three tests each, over two days, with every third inconclusive.
fn fill_history(bed: &mut StoreTestbed) {
    for hour in 0..16 {
        for name in ["n1", "n2"] {
            let run = bed.plan(name, &["memory", "disk", "gpu"]);
            let verdict = |n: usize| if (hour + n).is_multiple_of(3) { Verdict::Inconclusive } else { Verdict::Pass };
            let tests = ["memory", "disk", "gpu"];
            let outcomes = tests.iter().enumerate().map(|(n, of)| bed.outcome(name, of, verdict(n))).collect();
            bed.accept(&[bed.result(run, name, outcomes)]);
        }
        bed.wait(Span::hours(3));
    }
}

fn pages_of_history_add_up_for_every_filter(bed: &mut StoreTestbed) {
    fill_history(bed);
    for name in [None, Some(node("n1"))] {
        for of in [None, Some(test("disk"))] {
            for verdict in [None, Some(Verdict::Inconclusive), Some(Verdict::Fail)] {
                let filter =
                    HistoryFilter { node: name.clone(), test: of.clone(), verdict, ..HistoryFilter::default() };
                let full = bed.store.history(&filter).unwrap();
                let mut paged: Vec<HistoryRow> = Vec::new();
                loop {
                    let after = paged.last().map(HistoryRow::cursor);
                    let page = bed.store.history(&HistoryFilter { after, limit: Some(5), ..filter.clone() }).unwrap();
                    let ended = page.len() < 5;
                    paged.extend(page);
                    if ended {
                        break;
                    }
                }
                assert_eq!(paged, full, "{name:?} {of:?} {verdict:?}");
                assert!(full.iter().all(|row| verdict.is_none_or(|verdict| row.verdict == verdict)));
            }
        }
    }
    assert_eq!(bed.store.latest_of_test(&test("disk")).unwrap().len(), 2);
    let mut names = bed.store.node_names().unwrap();
    names.sort();
    assert_eq!(names, [node("n1"), node("n2")]);
}

fn pages_of_runs_audit_and_days_add_up(bed: &mut StoreTestbed) {
    fill_history(bed);
    for name in [None, Some(node("n2"))] {
        let full = bed.store.runs_before(None, 1000, name.as_ref()).unwrap();
        assert_eq!(full.len(), if name.is_some() { 16 } else { 32 });
        let (mut paged, mut before) = (Vec::new(), None);
        loop {
            let page = bed.store.runs_before(before, 5, name.as_ref()).unwrap();
            let Some(last) = page.last() else { break };
            before = Some(last.run.id);
            paged.extend(page);
        }
        assert_eq!(paged, full);
        let full = bed.store.audit_before(None, 1000, name.as_ref()).unwrap();
        let first = bed.store.audit_before(None, 3, name.as_ref()).unwrap();
        let rest = bed.store.audit_before(Some(first[2].0), 1000, name.as_ref()).unwrap();
        assert_eq!([first, rest].concat(), full);
    }
    let days = bed.store.node_time_by_day(Timestamp::from_secs(0)).unwrap();
    let sum: Span = days.iter().map(|(_, spent)| *spent).sum();
    assert_eq!(sum, bed.store.node_time_since(Timestamp::from_secs(0)).unwrap());
    assert!(days.len() >= 2 && days.iter().all(|(day, _)| day.millis() % 86_400_000 == 0), "{days:?}");
}

/// Opens a second connection to the database of this bed.
fn second_connection(bed: &StoreTestbed) -> (tokio::runtime::Runtime, tokio_postgres::Client) {
    let Some(StoreUrl::Postgres(url)) = &bed.url else { panic!("a test bed on PostgreSQL has an address") };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (client, connection) = runtime.block_on(tokio_postgres::connect(url, tokio_postgres::NoTls)).unwrap();
    runtime.spawn(async move { drop(connection.await) });
    (runtime, client)
}

fn the_cluster_state_is_replaced_completely(bed: &mut StoreTestbed) {
    assert_eq!((bed.store.cluster_state().unwrap(), bed.store.cluster_state_time().unwrap()), (None, None));
    for nodes in [1_000, 1] {
        let state: Vec<String> = (0..nodes).map(|number| format!("é\u{0}\\{number} is free")).collect();
        let at = bed.wait(Span::minutes(1));
        bed.store.save_cluster_state(&bed.lease, at, &state).unwrap();
        assert_eq!(bed.store.cluster_state().unwrap(), Some((at, serde_json::to_vec(&state).unwrap())));
        assert_eq!(bed.store.cluster_state_time().unwrap(), Some(at));
    }
    bed.assert_sound();
}

/// The same on SQLite is tested with the other files.
#[test]
fn a_postgresql_store_of_another_version_is_rejected_unchanged() {
    let Some(bed) = StoreTestbed::postgres() else { return };
    let (runtime, client) = second_connection(&bed);
    let content = "SELECT MAX(version), COUNT(*), (SELECT COUNT(*) FROM pg_class) FROM schema_version";
    for found in [1, 8, 99] {
        let set = format!("DELETE FROM schema_version; INSERT INTO schema_version VALUES ({found})");
        runtime.block_on(client.batch_execute(&set)).unwrap();
        let before = runtime.block_on(client.query_one(content, &[])).unwrap();
        match Store::open(bed.url.as_ref().unwrap()).unwrap_err() {
            StoreError::OldSchema { found: version } => assert_eq!((version, found < 9), (found, true)),
            StoreError::NewerSchema { found: version, .. } => assert_eq!((version, found > 9), (found, true)),
            other => panic!("{other}"),
        }
        let after = runtime.block_on(client.query_one(content, &[])).unwrap();
        for column in 0..3_usize {
            assert_eq!(after.get::<_, i64>(column), before.get::<_, i64>(column), "schema {found}");
        }
    }
}

/// PostgreSQL consumes an id for each name that exists already.
#[test]
fn latest_results_are_the_same_with_ids_above_sixteen_bits() {
    let Some(mut bed) = StoreTestbed::postgres() else { return };
    bed.run_test("n2", "disk", Verdict::Fail);
    bed.run_test("n1", "disk", Verdict::Pass);
    let (runtime, client) = second_connection(&bed);
    for table in ["test", "outcome"] {
        let sql = format!("ALTER TABLE {table} ALTER COLUMN id RESTART WITH 70000");
        runtime.block_on(client.batch_execute(&sql)).unwrap();
    }
    let each = |bed: &StoreTestbed| ["n2", "n1"].map(|name| bed.store.latest_of(&node(name)).unwrap()).concat();
    assert_eq!(bed.store.latest_all().unwrap(), each(&bed));
    bed.run_test("n2", "memory", Verdict::Inconclusive);
    bed.run_test("n1", "disk", Verdict::Inconclusive);
    assert_eq!(bed.store.latest_all().unwrap(), each(&bed));
    let row = runtime.block_on(client.query_one("SELECT MAX(test) FROM latest_result", &[])).unwrap();
    assert_eq!(row.get::<_, i32>(0), 70000, "a number that does not fit into sixteen bits");
}

/// Another session locks the table and does not release it.
#[test]
fn a_postgresql_query_over_its_deadline_is_aborted() {
    let Some(bed) = StoreTestbed::postgres() else { return };
    let (runtime, client) = second_connection(&bed);
    runtime.block_on(client.batch_execute("BEGIN; LOCK TABLE token IN ACCESS EXCLUSIVE MODE")).unwrap();
    for _ in 0..6 {
        let late = bed.store.with_deadline(Instant::now() + Duration::from_millis(300)).tokens().unwrap_err();
        assert!(matches!(late, StoreError::DeadlineExceeded { .. }), "{late}");
    }
    let soon = || bed.store.with_deadline(Instant::now() + Duration::from_secs(120));
    assert!(soon().audit(1, None).unwrap().is_empty(), "a query of an unlocked table returns");
    runtime.block_on(client.batch_execute("ROLLBACK")).unwrap();
    assert!(soon().tokens().unwrap().is_empty());
}
