//! The store and files: the published copy, imports, backups, retention, damage.

use std::path::Path;

use doctor_core::{
    case::{Case, CaseOutcome, CaseState, RepairStep},
    finding::{Severity, Verdict},
    ids::RunId,
    plan::{Action, Conclusion},
    reason::WithReason,
    run::IncompleteReason,
    time::{Span, Timestamp},
};
use doctor_store::{
    Store, StoreError, StoreUrl,
    records::{HistoryFilter, PublishOutcome, RetentionPolicy},
};
use rusqlite::Connection;

use crate::{
    bed::{self, StoreTestbed, finding, hardware, node, test},
    over_tls, suite,
};

over_tls!(
    the_published_copy_supports_the_seed_queries_and_follows_changes,
    a_backup_restores_into_an_empty_store_of_either_kind,
);

suite!(
    the_published_copy_supports_the_seed_queries_and_follows_changes,
    an_import_is_untrusted_history_and_is_added_once,
    a_trusted_import_makes_tests_fresh_even_if_imported_untrusted_before,
    an_unreadable_import_is_rejected_by_name_and_changes_nothing,
    a_backup_restores_into_an_empty_store_of_either_kind,
    retention_keeps_the_last_conclusive_result_and_all_later_ones,
    retention_keeps_an_open_cases_evidence_and_logs,
);

fn rows_of(path: &Path, sql: &str) -> Vec<(String, String, i64, String)> {
    let copy = Connection::open(path).unwrap();
    let mut statement = copy.prepare(sql).unwrap();
    let rows = statement.query_map((), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))).unwrap();
    rows.map(Result::unwrap).collect()
}

/// Publishes, waiting out the pause that follows a slow copy.
fn publish(bed: &StoreTestbed, dest: &Path) -> Result<PublishOutcome, StoreError> {
    loop {
        match bed.store.publish(dest) {
            Ok(PublishOutcome::Deferred) => std::thread::sleep(std::time::Duration::from_millis(50)),
            done => return done,
        }
    }
}

const LATEST: &str = "SELECT node, test, timestamp, result FROM latest_status ORDER BY node, test";
const RUNS: &str = "SELECT node, test, timestamp, result FROM runs ORDER BY timestamp, node, test";

fn row(node: &str, test: &str, at: Timestamp, result: &str) -> (String, String, i64, String) {
    (node.to_owned(), test.to_owned(), at.secs(), result.to_owned())
}

fn the_published_copy_supports_the_seed_queries_and_follows_changes(bed: &mut StoreTestbed) {
    let dest = bed.path("validation.db");
    let first = bed.now;
    bed.run_test("n1", "disk", Verdict::Fail);
    bed.run_test("n2", "disk", Verdict::NotApplicable);
    assert_eq!(publish(bed, &dest).unwrap(), PublishOutcome::Written { rows: 1, whole: true });
    assert_eq!(publish(bed, &dest).unwrap(), PublishOutcome::Unchanged);
    assert_eq!(rows_of(&dest, LATEST), [row("n1", "disk", first, "fail")]);

    bed.wait(Span::hours(2));
    bed.run_test("n1", "disk", Verdict::Pass);
    let run = bed.plan("n3", &["gpu"]);
    bed.conclude(run, Conclusion::Incomplete(IncompleteReason::JobLost));
    assert_eq!(publish(bed, &dest).unwrap(), PublishOutcome::Written { rows: 2, whole: false });
    let now = bed.now;
    assert_eq!(rows_of(&dest, LATEST), [row("n1", "disk", now, "pass"), row("n3", "gpu", now, "incomplete")]);
    assert_eq!(rows_of(&dest, RUNS).len(), 3);

    // A run with a partial result is in the copy once, before and after its end.
    let run = bed.run_on(&["n4", "n5"], &["gpu"]);
    let id = run.id;
    bed.commit(&[WithReason::new(Action::Submit(run), "due", "x")]);
    bed.accept(&[bed.result(id, "n4", vec![bed.outcome("n4", "gpu", Verdict::Pass)])]);
    assert_eq!(publish(bed, &dest).unwrap(), PublishOutcome::Written { rows: 1, whole: false });
    bed.accept(&[bed.result(id, "n5", vec![bed.outcome("n5", "gpu", Verdict::Pass)])]);
    assert_eq!(publish(bed, &dest).unwrap(), PublishOutcome::Written { rows: 1, whole: false });
    assert_eq!(rows_of(&dest, RUNS).len(), 5);

    // A clock that jumps back hides no result.
    let right = bed.now;
    bed.now = right.minus(Span::days(3));
    bed.run_test("n6", "gpu", Verdict::Pass);
    assert_eq!(publish(bed, &dest).unwrap(), PublishOutcome::Written { rows: 1, whole: false });
    assert_eq!(rows_of(&dest, RUNS).len(), 6);
    bed.now = right;

    // A copy with a wrong row count is rewritten.
    Connection::open(&dest).unwrap().execute("DELETE FROM runs WHERE result = 'fail'", ()).unwrap();
    bed.run_test("n6", "disk", Verdict::Pass);
    assert_eq!(publish(bed, &dest).unwrap(), PublishOutcome::Written { rows: 7, whole: true });

    // A missing copy is rewritten from everything.
    std::fs::remove_file(&dest).unwrap();
    assert_eq!(publish(bed, &dest).unwrap(), PublishOutcome::Written { rows: 7, whole: true });
    let left: Vec<_> = std::fs::read_dir(bed.folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!left.iter().any(|name| name.to_string_lossy().ends_with(".tmp")), "{left:?}");
    assert_eq!(bed.store.counters().unwrap().published, 7);
}

fn validation_db(path: &Path, rows: &[(&str, &str, &str, &str)]) {
    drop(std::fs::remove_file(path));
    let old = Connection::open(path).unwrap();
    old.execute_batch("CREATE TABLE runs (node TEXT, test TEXT, timestamp INTEGER, result TEXT)").unwrap();
    for row in rows {
        old.execute("INSERT INTO runs VALUES (?1, ?2, ?3, ?4)", *row).unwrap();
    }
}

fn an_import_is_untrusted_history_and_is_added_once(bed: &mut StoreTestbed) {
    let (runs, storage) = (bed.path("old.db"), bed.path("test-storage.db"));
    validation_db(
        &runs,
        &[
            ("n1", "DL unit test", "1700000000", "Pass"),
            ("n1", "DL unit test", "1700000000", "fail"),
            ("n2", "all", "1700000100", "incomplete"),
            ("../etc", "all", "1700000100", "pass"),
            ("n3", "all", "yesterday", "pass"),
            // Later than any run id can encode: it would be read as another time.
            ("n3", "all", "99999999999", "pass"),
            ("n3", "all", "1700000100", "maybe"),
        ],
    );
    let old = Connection::open(&storage).unwrap();
    old.execute_batch(
        "CREATE TABLE storage_performance (node TEXT, timestamp INTEGER, randread_iops REAL, PRIMARY KEY (node, timestamp));
         INSERT INTO storage_performance VALUES ('n1', 1700000000, 5000.5);",
    )
    .unwrap();
    let files = [runs, storage];
    let imported = bed.store.import(&files, false, bed.now).unwrap();
    assert_eq!((imported.added, imported.already_imported, imported.skipped), (4, 0, 4));
    assert_eq!(imported.skipped_examples.len(), 4);
    let again = bed.store.import(&files, false, bed.now).unwrap();
    assert_eq!((again.added, again.already_imported), (0, 4));

    let history = bed.store.history(&HistoryFilter::default()).unwrap();
    assert_eq!(history.len(), 4);
    assert!(history.iter().all(|row| row.untrusted && row.run.is_none()));
    let verdicts: Vec<_> = history.iter().map(|row| (row.test.to_string(), row.verdict)).collect();
    assert!(verdicts.contains(&("DL-unit-test".to_owned(), Verdict::Pass)), "{verdicts:?}");
    assert!(verdicts.contains(&("storage".to_owned(), Verdict::Inconclusive)), "{verdicts:?}");
    assert!(bed.store.latest_all().unwrap().is_empty());
    assert!(bed.store.failure_rates(Timestamp::from_secs(0)).unwrap().is_empty());
    assert!(bed.store.load_nodes().unwrap()[&node("n1")].records.is_empty());
    let copy = bed.path("validation.db");
    publish(bed, &copy).unwrap();
    assert!(rows_of(&copy, RUNS).is_empty());
    bed.run_test("n1", "all", Verdict::Pass);
    bed.assert_sound();
}

fn a_trusted_import_makes_tests_fresh_even_if_imported_untrusted_before(bed: &mut StoreTestbed) {
    let file = [bed.path("old.db")];
    let recent = bed.now.minus(Span::days(1)).secs().to_string();
    validation_db(
        &file[0],
        &[("n1", "disk", "1700000000", "fail"), ("n1", "disk", &recent, "pass"), ("n2", "disk", &recent, "pass")],
    );
    bed.run_test("n2", "disk", Verdict::Fail);
    bed.store.import(&file, false, bed.now).unwrap();
    let trusted = bed.store.import(&file, true, bed.now).unwrap();
    assert_eq!((trusted.added, trusted.already_imported, trusted.trusted), (0, 3, 3));
    let latest = bed.store.latest_all().unwrap();
    let rows: Vec<_> = latest.iter().map(|row| (row.node.to_string(), row.verdict, row.run.is_some())).collect();
    // Our own later result remains the newest.
    assert_eq!(rows, [("n2".to_owned(), Verdict::Fail, true), ("n1".to_owned(), Verdict::Pass, false)]);
    assert_eq!(bed.store.failure_rates(Timestamp::from_secs(0)).unwrap()[0].pass, 2);
    assert_eq!(bed.store.import(&file, true, bed.now).unwrap().trusted, 0);
    let copy = bed.path("validation.db");
    publish(bed, &copy).unwrap();
    assert_eq!(rows_of(&copy, RUNS).len(), 4);
    bed.assert_sound();
}

fn an_unreadable_import_is_rejected_by_name_and_changes_nothing(bed: &mut StoreTestbed) {
    let garbage = bed.path("garbage.db");
    std::fs::write(&garbage, b"this is no database, and long enough to look at").unwrap();
    let stranger = bed.path("stranger.db");
    Connection::open(&stranger).unwrap().execute_batch("CREATE TABLE songs (title TEXT)").unwrap();
    let narrow = bed.path("narrow.db");
    Connection::open(&narrow).unwrap().execute_batch("CREATE TABLE runs (node TEXT, timestamp INTEGER)").unwrap();
    for (file, why) in [
        (garbage, "garbage.db"),
        (stranger, "none of the known tables"),
        (narrow, "no column test"),
        (bed.path("absent.db"), "absent.db"),
    ] {
        let error = bed.store.import(&[file], false, bed.now).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("runs(node, test, timestamp, result)"), "{error}");
    }
    assert!(bed.store.history(&HistoryFilter::default()).unwrap().is_empty());
}

fn a_backup_restores_into_an_empty_store_of_either_kind(bed: &mut StoreTestbed) {
    let failed_run = bed.run_test("n1", "gpu", Verdict::Fail);
    bed.wait(Span::hours(1));
    bed.run_test("n2", "disk", Verdict::Pass);
    let active = bed.plan("n3", &["disk"]);
    let case = case_of(bed, "n1");
    bed.commit(&[WithReason::new(Action::OpenCase(case.clone()), "confirmed", "hot")]);
    let file = bed.path("backup.db");
    bed.store.backup(&file).unwrap();
    assert!(bed.store.backup(&file).unwrap_err().to_string().contains("name a new file"));

    let mut stores =
        vec![Store::open_in_memory().unwrap(), Store::open(&StoreUrl::Sqlite(bed.path("restored.db"))).unwrap()];
    stores.extend(bed::postgres::new_database().map(|url| Store::open(&url).unwrap()));
    for store in stores {
        store.restore(&file).unwrap();
        assert_eq!(store.load_nodes().unwrap(), bed.store.load_nodes().unwrap());
        assert_eq!(store.latest_all().unwrap(), bed.store.latest_all().unwrap());
        assert_eq!(store.cases_all(9).unwrap(), std::slice::from_ref(&case));
        assert_eq!(store.active_runs().unwrap()[0].run.id, active);
        assert_eq!(
            store.evidence(failed_run, &node("n1")).unwrap(),
            bed.store.evidence(failed_run, &node("n1")).unwrap()
        );
        assert_eq!(store.audit(99, None).unwrap(), bed.store.audit(99, None).unwrap());
        assert_eq!(store.leader().unwrap(), None);
        assert!(store.verify().unwrap().is_consistent());
        // It continues where the old one was, including ids that the database generates.
        store.acquire("next", bed.now, Span::hours(1)).unwrap();
        store
            .hold(
                &node("n99"),
                &doctor_core::node::Hold { by: "x".into(), why: "y".into(), since: bed.now, until: None },
            )
            .unwrap();
        assert_eq!(store.load_nodes().unwrap().len(), 4);
        let refused = store.restore(&file).unwrap_err().to_string();
        assert!(refused.contains("not empty"), "{refused}");
    }
    std::fs::write(bed.path("bad.db"), b"SQLite format 3\0 and then nothing of the kind").unwrap();
    let error = Store::open_in_memory().unwrap().restore(&bed.path("bad.db")).unwrap_err();
    assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
}

fn case_of(bed: &mut StoreTestbed, name: &str) -> Case {
    bed.ids.set_time(bed.now);
    Case {
        id: bed.ids.case(),
        hardware: hardware(name).id().unwrap(),
        node: node(name),
        opened: bed.now,
        severity: Severity::Reset,
        findings: vec![finding("gpu", "gpu-hot", 3)],
        repair_step: RepairStep::Reset,
        steps: Vec::new(),
        state: CaseState::Open,
        boot_id: None,
        advice: None,
        job_failures: Vec::new(),
        request: None,
    }
}

const KEEP: RetentionPolicy =
    RetentionPolicy { history: Span::days(90), evidence: Span::days(30), logs: Span::days(30) };

fn retention_keeps_the_last_conclusive_result_and_all_later_ones(bed: &mut StoreTestbed) {
    let mut runs: Vec<RunId> = Vec::new();
    for verdict in [
        Verdict::Pass,
        Verdict::Fail,
        Verdict::Pass,
        Verdict::NotApplicable,
        Verdict::Inconclusive,
        Verdict::Inconclusive,
    ] {
        runs.push(bed.run_test("n1", "gpu", verdict));
        bed.wait(Span::days(1));
    }
    let only_inconclusive = bed.run_test("n2", "gpu", Verdict::Inconclusive);
    bed.wait(Span::days(1));
    for verdict in [Verdict::Pass, Verdict::Inconclusive] {
        bed.run_test("n3", "gpu", verdict);
        bed.wait(Span::days(1));
    }
    bed.wait(Span::days(200));
    bed.run_test("n3", "gpu", Verdict::Pass);
    let before = bed.store.latest_all().unwrap();
    let pruned = bed.store.apply_retention(&bed.lease, bed.now, KEEP).unwrap();
    assert_eq!(pruned.history_rows, 4, "{pruned:?}");
    let left: Vec<_> = bed.store.history(&HistoryFilter::default()).unwrap();
    let of_n1: Vec<_> = left.iter().filter(|row| row.node == node("n1")).filter_map(|row| row.run).collect();
    assert_eq!(of_n1, [runs[5], runs[4], runs[3], runs[2]]);
    assert!(left.iter().any(|row| row.run == Some(only_inconclusive)));
    assert_eq!(bed.store.latest_all().unwrap(), before);
    bed.assert_sound();

    // The newest result's log stays; the others are listed until their deletion is confirmed.
    let named: Vec<RunId> = pruned.logs.iter().map(|log| log.run).collect();
    assert_eq!(named.len(), 7, "{named:?}");
    assert!(!named.contains(&runs[5]) && !named.contains(&only_inconclusive));
    assert_eq!(bed.store.apply_retention(&bed.lease, bed.now, KEEP).unwrap().logs, pruned.logs);
    bed.store.logs_deleted(&bed.lease, &named).unwrap();
    let again = bed.store.apply_retention(&bed.lease, bed.now, KEEP).unwrap();
    assert!(again.logs.is_empty() && again.history_rows == 0);
    assert_eq!(again.run_rows, 4, "runs without any data are deleted");
    assert_eq!(bed.store.run(runs[0]).unwrap(), None);
    assert!(bed.store.run(runs[2]).unwrap().is_some());
    bed.assert_sound();
}

fn retention_keeps_an_open_cases_evidence_and_logs(bed: &mut StoreTestbed) {
    let run = bed.run_test("n1", "gpu", Verdict::Fail);
    let other = bed.run_test("n2", "gpu", Verdict::Pass);
    let case = case_of(bed, "n1");
    bed.commit(&[WithReason::new(Action::OpenCase(case.clone()), "confirmed", "hot")]);
    let pinned = bed.store.evidence(run, &node("n1")).unwrap().unwrap();
    assert_eq!(pinned.pinned_by, Some(case.id));
    let mut proof = bed.run_on(&["n1"], &["gpu"]);
    proof.case = Some(case.id);
    let proof_run = proof.id;
    bed.commit(&[WithReason::new(Action::Submit(proof), "requalify", "x")]);
    bed.accept(&[bed.result(proof_run, "n1", vec![bed.outcome("n1", "gpu", Verdict::Pass)])]);

    bed.wait(Span::days(100));
    bed.run_test("n1", "gpu", Verdict::Pass);
    let pruned = bed.store.apply_retention(&bed.lease, bed.now, KEEP).unwrap();
    assert_eq!(pruned.evidence_rows, 1);
    assert_eq!(bed.store.evidence(other, &node("n2")).unwrap(), None);
    for of_the_case in [run, proof_run] {
        assert!(bed.store.evidence(of_the_case, &node("n1")).unwrap().is_some());
        assert!(!pruned.logs.iter().any(|log| log.run == of_the_case));
    }

    let close = Action::CloseCase { case: case.id, node: node("n1"), how: CaseOutcome::Returned };
    bed.commit(&[WithReason::new(close, "proved", "well")]);
    // Closing does not delete it: its retention period applies.
    assert_eq!(bed.store.apply_retention(&bed.lease, bed.now, KEEP).unwrap().evidence_rows, 0);
    bed.wait(Span::days(31));
    let pruned = bed.store.apply_retention(&bed.lease, bed.now, KEEP).unwrap();
    assert_eq!(pruned.evidence_rows, 3);
    assert!(pruned.logs.iter().any(|log| log.run == run && log.tests == [test("gpu")]));
    bed.assert_sound();
}

#[test]
fn a_file_that_is_not_a_database_is_rejected_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("doctor.db");
    for content in [b"an operator's precious notes".to_vec(), b"SQLite format 3\0 but not really".to_vec()] {
        std::fs::write(&path, &content).unwrap();
        let error = Store::open(&StoreUrl::Sqlite(path.clone())).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), content);
    }
}

#[test]
fn a_damaged_store_is_refused_and_left_as_it_is() {
    let mut bed = StoreTestbed::file();
    for i in 0..200 {
        bed.run_test(&format!("n{i}"), "disk", Verdict::Pass);
    }
    let copy = bed.path("copy.db");
    bed.store.backup(&copy).unwrap();
    let mut bytes = std::fs::read(&copy).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 8192].fill(0x5A);
    std::fs::write(&copy, &bytes).unwrap();
    let error = Store::open(&StoreUrl::Sqlite(copy.clone())).unwrap_err();
    assert!(matches!(error, StoreError::Damaged { .. }) && error.to_string().contains("left as it is"), "{error}");
    assert_eq!(std::fs::read(&copy).unwrap(), bytes);
}

#[test]
fn a_store_of_a_newer_program_is_refused() {
    let mut bed = StoreTestbed::file();
    bed.run_test("n1", "disk", Verdict::Pass);
    let copy = bed.path("copy.db");
    bed.store.backup(&copy).unwrap();
    Connection::open(&copy).unwrap().execute_batch("INSERT INTO schema_version VALUES (99)").unwrap();
    let error = Store::open(&StoreUrl::Sqlite(copy.clone())).unwrap_err();
    assert!(matches!(error, StoreError::NewerSchema { found: 99, .. }), "{error}");
    let error = Store::open_in_memory().unwrap().restore(&copy).unwrap_err();
    assert!(matches!(error, StoreError::NewerSchema { found: 99, .. }), "{error}");
}

#[test]
fn a_store_of_a_development_version_is_rejected_unchanged() {
    let mut bed = StoreTestbed::file();
    bed.run_test("n1", "disk", Verdict::Pass);
    let copy = bed.path("copy.db");
    bed.store.backup(&copy).unwrap();
    let content = || {
        let sql = "SELECT (SELECT MAX(version) FROM schema_version), (SELECT COUNT(*) FROM sqlite_schema), \
                   (SELECT COUNT(*) FROM history)";
        let old = Connection::open(&copy).unwrap();
        old.query_row(sql, (), |row| Ok([row.get::<_, i64>(0)?, row.get(1)?, row.get(2)?])).unwrap()
    };
    for version in [1, 8] {
        let set = format!("DELETE FROM schema_version; INSERT INTO schema_version VALUES ({version})");
        Connection::open(&copy).unwrap().execute_batch(&set).unwrap();
        let before = content();
        let opened = Store::open(&StoreUrl::Sqlite(copy.clone())).unwrap_err();
        let restored = Store::open_in_memory().unwrap().restore(&copy).unwrap_err();
        for error in [opened, restored] {
            assert!(matches!(error, StoreError::OldSchema { found } if found == version), "{error}");
            assert!(error.to_string().contains("start again"), "{error}");
        }
        assert_eq!(content(), before);
    }
}

#[test]
fn an_unusable_store_path_is_rejected_with_reason_and_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let missing = StoreUrl::Sqlite(folder.path().join("no/such/doctor.db"));
    assert!(Store::open(&missing).unwrap_err().to_string().contains("create it first"));
    let directory = StoreUrl::Sqlite(folder.path().to_owned());
    assert!(Store::open(&directory).unwrap_err().to_string().contains("name a file in it"));
    let unreachable: StoreUrl = "postgres://doctor@127.0.0.1:1/doctor".parse().unwrap();
    assert!(Store::open(&unreachable).unwrap_err().to_string().contains("connecting"));
}

#[test]
fn a_store_opens_after_a_kill_with_all_acknowledged_results() {
    let mut bed = StoreTestbed::file();
    bed.run_test("n1", "disk", Verdict::Pass);
    // A killed process leaves the file, its log, and no checkpoint.
    let StoreUrl::Sqlite(live) = bed.url.clone().unwrap() else { panic!() };
    let copy = bed.path("crashed.db");
    for suffix in ["", "-wal"] {
        let (from, to) = [&live, &copy].map(|path| format!("{}{suffix}", path.display())).into();
        std::fs::copy(from, to).unwrap();
    }
    let store = Store::open(&StoreUrl::Sqlite(copy)).unwrap();
    assert_eq!(store.latest_all().unwrap(), bed.store.latest_all().unwrap());
    assert!(store.verify().unwrap().is_consistent());
}

#[test]
fn verification_finds_inconsistencies() {
    for (damage, finds) in [
        ("UPDATE latest_result SET inconclusive_count = 7", "differs between"),
        ("DELETE FROM history", "not in `history`"),
        ("DELETE FROM latest_result", "not in `latest_result`"),
        (
            "INSERT INTO pending_results (run, node, run_key, complete) SELECT run, node, 'x', 0 FROM run_node; \
             UPDATE run SET end_kind = 'incomplete'",
            "both ended and active",
        ),
        (
            "INSERT INTO pending_results (run, node, run_key, complete) SELECT run, node, '', 0 FROM run_node",
            "without a key",
        ),
        ("UPDATE node SET case_id = 5", "which is not open"),
        ("UPDATE hourly_count SET passed = 0", "too low"),
    ] {
        let mut bed = StoreTestbed::file();
        bed.run_test("n1", "disk", Verdict::Pass);
        bed.assert_sound();
        let StoreUrl::Sqlite(path) = bed.url.clone().unwrap() else { panic!() };
        Connection::open(path).unwrap().execute_batch(damage).unwrap();
        let verified = bed.store.verify().unwrap();
        assert!(verified.problems.iter().any(|problem| problem.contains(finds)), "{damage}: {verified:?}");
    }
}
