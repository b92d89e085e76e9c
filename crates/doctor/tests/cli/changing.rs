//! Commands that change something: nothing happens without `--yes`, and every change is in the audit trail.

use crate::workdir::{Workdir, demo_copy};

const STORE: [&str; 2] = ["--store", "doctor.db"];

fn with_store<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [args, &STORE].concat()
}

fn audit(workdir: &Workdir) -> Vec<(String, String, String)> {
    let rows = workdir.json(&with_store(&["audit", "--limit", "5"]));
    let text = |row: &serde_json::Value, key: &str| row[key].as_str().unwrap().to_owned();
    rows.as_array().unwrap().iter().map(|row| (text(row, "what"), text(row, "by"), text(row, "text"))).collect()
}

#[test]
fn without_yes_the_plan_is_shown_and_nothing_is_changed() {
    let workdir = demo_copy();
    let before = workdir.json(&with_store(&["audit"]));
    for args in [
        &["hold", "node[001-002]", "--why", "new fans"][..],
        &["release", "node001", "--why", "done"],
        &["quarantine", "node001", "--why", "smoke"],
        &["test", "node001"],
        &["pause", "--why", "upgrade"],
        &["breaker", "close", "--why", "looked"],
    ] {
        let output = workdir.expect(6, &with_store(args));
        output.stderr_contains("Would ").stderr_contains("nothing was changed").stderr_contains("--yes");
        assert_eq!(output.out, "", "{args:?}");
    }
    assert_eq!(workdir.json(&with_store(&["audit"])), before);
}

#[test]
fn a_hold_is_seen_at_once_and_ends_with_a_release() {
    let workdir = demo_copy();
    let output =
        workdir.expect(0, &with_store(&["hold", "node[001-002]", "--why", "new fans", "--until", "4h", "--yes"]));
    output
        .stdout_contains("Held 2 nodes until")
        .stdout_contains("Why: new fans (ann)")
        .stdout_contains("Next: `doctor release node001");
    assert_eq!(audit(&workdir)[0], ("hold".into(), "ann".into(), "new fans".into()));
    assert_eq!(workdir.json(&with_store(&["why", "node001"]))["hold"]["by"], "ann");
    workdir
        .expect(0, &with_store(&["release", "node001", "--why", "done", "--by", "bob", "--yes"]))
        .stdout_contains("Released 1 node");
    assert_eq!(workdir.json(&with_store(&["why", "node001"]))["hold"], serde_json::Value::Null);
    assert_eq!(workdir.json(&with_store(&["why", "node002"]))["hold"]["by"], "ann");
    let changes: Vec<String> = audit(&workdir).into_iter().map(|(what, ..)| what).collect();
    assert_eq!(changes[..2], ["ask-release", "unhold"]);
}

#[test]
fn a_change_needs_a_reason_and_nodes_that_exist() {
    let workdir = demo_copy();
    workdir.expect(2, &with_store(&["hold", "node001", "--yes"])).stderr_contains("--why");
    workdir.expect(2, &with_store(&["hold", "node099", "--why", "x", "--yes"])).stderr_contains("no node `node099`");
    workdir
        .expect(2, &with_store(&["hold", "node001", "--why", "x", "--yes", "--until", "2020-01-01T00:00:00Z"]))
        .stderr_contains("in the past");
    workdir
        .expect(2, &with_store(&["test", "node001", "--test", "spoon", "--yes"]))
        .stderr_contains("no test or suite `spoon`")
        .stderr_contains("storage");
}

#[test]
fn pausing_shows_in_status_until_it_is_resumed() {
    let workdir = demo_copy();
    workdir.expect(2, &with_store(&["resume", "--why", "x", "--yes"])).stderr_contains("nothing is paused");
    workdir
        .expect(0, &with_store(&["pause", "--pool", "gpu", "--for", "4h", "--why", "upgrade", "--yes"]))
        .stdout_contains("Paused in pool gpu until");
    workdir.doctor(&with_store(&["status"])).stdout_contains("paused in pool gpu by ann");
    workdir.expect(2, &with_store(&["resume", "--why", "x", "--yes"])).stderr_contains("paused: in pool gpu");
    workdir
        .expect(0, &with_store(&["resume", "--pool", "gpu", "--why", "done", "--yes"]))
        .stdout_contains("Resumed in pool gpu");
    assert!(!workdir.doctor(&with_store(&["status"])).out.contains("paused in"));
}

#[test]
fn requests_wait_for_the_controller_and_are_counted() {
    let workdir = demo_copy();
    workdir
        .expect(0, &with_store(&["test", "node[001-003]", "--test", "storage,dl", "--yes"]))
        .stdout_contains("storage, dl on 3 nodes");
    workdir
        .expect(0, &with_store(&["quarantine", "node004", "--why", "smoke", "--yes"]))
        .stdout_contains("quarantine and examination of 1 node");
    assert_eq!(workdir.json(&with_store(&["status"]))["commands"], 4);
}

#[test]
fn a_backup_restores_into_an_empty_store_only() {
    let workdir = demo_copy();
    workdir.expect(0, &with_store(&["db", "backup", "copy.db"])).stdout_contains("Wrote a backup");
    workdir.expect(1, &with_store(&["db", "backup", "copy.db"])).stderr_contains("exists already");
    workdir.expect(0, &with_store(&["db", "verify"])).stdout_contains("The store is consistent.");
    workdir.expect(6, &["db", "restore", "copy.db", "--store", "new.db"]).stderr_contains("Would restore");
    assert!(!workdir.path("new.db").exists(), "asking leaves nothing behind");
    workdir.expect(0, &["db", "restore", "copy.db", "--store", "new.db", "--yes"]).stdout_contains("Restored");
    assert_eq!(workdir.json(&["nodes", "--store", "new.db"]), workdir.json(&with_store(&["nodes"])));
    workdir.expect(1, &with_store(&["db", "restore", "copy.db", "--yes"]));
}

#[test]
fn commands_with_yes_are_carried_out_although_others_change_the_node_meanwhile() {
    let workdir = demo_copy();
    let hold = |operator: usize| {
        for time in 0..5 {
            let (by, why) = (format!("operator-{operator}"), format!("time {time}"));
            workdir.expect(0, &with_store(&["hold", "node001", "--by", &by, "--why", &why, "--yes"]));
        }
    };
    std::thread::scope(|scope| {
        for operator in 0..4 {
            scope.spawn(move || hold(operator));
        }
    });
    let rows = workdir.json(&with_store(&["audit", "--limit", "40"]));
    let is_theirs = |row: &&serde_json::Value| row["by"].as_str().is_some_and(|by| by.starts_with("operator-"));
    assert_eq!(rows.as_array().unwrap().iter().filter(is_theirs).count(), 20, "{rows:#}");
}
