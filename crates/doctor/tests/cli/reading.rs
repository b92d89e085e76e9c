//! Read-only commands, on the store of a demo.

use crate::workdir::{Workdir, demo};

const STORE: [&str; 2] = ["--store", "demo/doctor.db"];

fn with_store<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [args, &STORE].concat()
}

#[test]
fn a_demonstration_prints_its_score_as_one_json_object_and_the_same_seed_gives_the_same() {
    let bed = Workdir::new();
    let play = || bed.json(&["demo", "--nodes", "12", "--days", "2", "--seed", "3"]);
    let score = play();
    for key in [
        "nodes",
        "virtual_days",
        "faults_injected",
        "faults_found",
        "false_alarms",
        "median_hours_to_detect",
        "validation_node_hours",
        "user_jobs_disturbed",
        "coverage",
    ] {
        assert!(score.get(key).is_some(), "{key} is missing: {score}");
    }
    assert_eq!(score["nodes"], 12);
    assert_eq!(score, play());
}

#[test]
fn nodes_lists_every_node_with_a_word_for_every_test() {
    let bed = demo();
    let said = bed.expect(0, &with_store(&["nodes"]));
    let lines: Vec<&str> = said.out.lines().collect();
    let rows = bed.json(&with_store(&["nodes"]));
    let worst: Vec<&str> = rows.as_array().unwrap().iter().filter_map(|row| row["worst"].as_str()).collect();
    // The severities of findings are explained below the table.
    assert_eq!(lines.len(), 1 + 24 + usize::from(!worst.is_empty()) + 1, "{}", said.out);
    assert!(worst.iter().all(|severity| lines[25].contains(&format!("{severity}: "))), "{}", said.out);
    for column in ["NODE", "POOL", "STATE", "USE", "DL", "NCCL", "STORAGE", "NOTE"] {
        assert!(lines[0].contains(column), "{}", lines[0]);
    }
    assert!(lines.last().unwrap().starts_with("24 nodes; cluster observed"), "{}", said.out);
    assert!(!said.out.contains('\x1b'), "no colour without a terminal");
}

#[test]
fn selectors_select_and_a_slip_is_no_empty_answer() {
    let bed = demo();
    assert_eq!(bed.json(&with_store(&["nodes", "node[001-003]"])).as_array().unwrap().len(), 3);
    assert_eq!(bed.json(&with_store(&["nodes", "*5", "pool=gpu"])).as_array().unwrap().len(), 24);
    bed.expect(2, &with_store(&["nodes", "node999"]))
        .stderr_contains("no node `node999`")
        .stderr_contains("node[001-024]");
    bed.expect(2, &with_store(&["nodes", "pool=none"])).stderr_contains("pool=none");
    bed.expect(2, &with_store(&["nodes", "rack=3"])).stderr_contains("pool=NAME");
    bed.expect(2, &with_store(&["nodes", "node[3-1]"])).stderr_contains("smaller number first");
}

#[test]
fn status_says_that_nobody_leads_and_shows_coverage() {
    let said = demo().expect(1, &with_store(&["status"]));
    said.stdout_contains("24 nodes")
        .stdout_contains("no controller leads; start `doctor serve`")
        .stdout_contains("NEVER TESTED")
        .stdout_contains("storage");
    let json = demo().json(&with_store(&["status"]));
    assert_eq!(json["nodes"]["total"], 24);
    assert_eq!(json["coverage"].as_array().unwrap().len(), 3);
    let row = &json["coverage"][0];
    let sum: u64 = ["pass", "fail", "inconclusive", "stale", "never_tested", "not_applicable"]
        .iter()
        .map(|standing| row[*standing].as_u64().unwrap())
        .sum();
    assert_eq!(sum, 24);
}

#[test]
fn why_tells_everything_about_a_node_and_what_to_do() {
    let bed = demo();
    let said = bed.doctor(&with_store(&["why", "node001"]));
    said.stdout_contains("node001 is")
        .stdout_contains("What to do")
        .stdout_contains("LAST PASS OR FAIL")
        .stdout_contains("Tests");
    let json = bed.json(&with_store(&["why", "node001"]));
    assert_eq!(json["node"], "node001");
    assert_eq!(json["test_lines"].as_array().unwrap().len(), 3);
    assert!(!json["next"].as_array().unwrap().is_empty());
    bed.expect(2, &with_store(&["why", "unknown"])).stderr_contains("no node `unknown`");
}

#[test]
fn history_names_runs_and_their_logs_can_be_read() {
    let bed = demo();
    let rows = bed.json(&with_store(&["history", "--test", "storage", "--limit", "5"]));
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 5);
    assert!(rows.iter().all(|row| row["test"] == "storage"));
    assert!(rows.is_sorted_by(|a, b| a["at"].as_str() >= b["at"].as_str()), "newest first");
    let node = rows[0]["node"].as_str().unwrap();
    let of_node = bed.json(&with_store(&["history", node, "--since", "1d"]));
    assert!(of_node.as_array().unwrap().iter().all(|row| row["node"] == node));
    let run = rows[0]["run"].as_str().unwrap();
    for args in [&["log", run][..], &["log", run, "--follow"]] {
        bed.expect(0, &with_store(args)).stdout_contains(&format!("{node}: storage ended"));
    }
    bed.expect(2, &with_store(&["log", "r0000000000000"])).stderr_contains("no run");
    bed.expect(2, &with_store(&["history", "--since", "yesterday"])).stderr_contains("such as \"7d\"");
}

#[test]
fn a_report_comes_as_text_markdown_and_json_with_the_same_figures() {
    let bed = demo();
    let json = bed.json(&with_store(&["report", "--since", "3d"]));
    let queued = json["queued"].as_u64().unwrap();
    assert!(queued > 0, "{json}");
    assert!(json["node_hours"].as_f64().unwrap() > 0.0);
    let text = bed.expect(0, &with_store(&["report", "--since", "3d"]));
    text.stdout_contains(&format!("{queued} queued")).stdout_contains("Coverage");
    let markdown = bed.expect(0, &with_store(&["report", "--since", "3d", "--format", "markdown"]));
    markdown
        .stdout_contains("# Cluster Doctor")
        .stdout_contains(&format!("{queued} queued"))
        .stdout_contains("| storage |");
    let none = bed.json(&with_store(&["report", "--since", "1s"]));
    assert_eq!(none["queued"], 0);
}

#[test]
fn explain_knows_checks_rules_and_reasons() {
    let bed = Workdir::new();
    bed.expect(0, &["explain", "disk-space"])
        .stdout_contains("Why it matters")
        .stdout_contains("disk-space-used: used_percent above 90");
    bed.expect(0, &["explain", "disk-space-used"]).stdout_contains("of check disk-space");
    bed.expect(0, &["explain", "share-busy"]).stdout_contains("limits.per_share");
    bed.expect(0, &["explain", "disk-full"]).stdout_contains("disk-space-used");
    bed.expect(0, &["explain", "reset"]).stdout_contains("reset (severity of a finding): GPU reset needed.");
    bed.expect(0, &["explain", "nccl"]).stdout_contains("In force");
    bed.expect(0, &["explain"]).stdout_contains("disk-space");
    bed.expect(2, &["explain", "spoon"]).stderr_contains("no check, rule or reason `spoon`");
}

#[test]
fn explain_knows_the_numbers_of_nvidia() {
    let bed = Workdir::new();
    let said = bed.expect(0, &["explain", "xid", "79"]);
    said.stdout_contains("Xid 79: GPU off bus: it no longer responds on PCIe.")
        .stdout_contains("RESTART_BM: reboot the machine");
    said.stdout_contains("Ours         reboot: node reboot needed")
        .stdout_contains("gpud fatal")
        .stdout_contains("Azure's runbook");
    said.stdout_contains("gpu-xid-79: event xid-79");
    bed.expect(0, &["explain", "xid", "64"])
        .stdout_contains("xid-64-reboot (reboot)")
        .stdout_contains("gpu-xid-64-reboot");
    bed.expect(0, &["explain", "xid", "13"]).stdout_contains("only counted").stdout_contains("compute-sanitizer");
    bed.expect(0, &["explain", "sxid", "12030"])
        .stdout_contains("gpud only warns")
        .stdout_contains("nvswitch-sxid-12030");
    bed.expect(0, &["explain", "dcgm", "30"]).stdout_contains("DCGM_FR_LOW_BANDWIDTH").stdout_contains("triage");
    assert_eq!(bed.json(&["explain", "xid", "48"])["xid"]["severity"], "reset");
    bed.expect(2, &["explain", "xid", "999"]).stderr_contains("no Xid `999`").stderr_contains("1 to 172");
    bed.expect(2, &["explain", "sxid", "1"]).stderr_contains("no SXid `1`");
    bed.expect(2, &["explain", "dcgm", "many"]).stderr_contains("no DCGM error `many`");
    bed.expect(2, &["explain", "xid"]).stderr_contains("the number is missing");
    bed.expect(0, &["explain", "dcgm"]).stdout_contains("dcgm: do the GPUs pass NVIDIA");
    bed.expect(2, &["explain", "disk-space", "3"]).stderr_contains("take a number, not `disk-space`");
}

#[test]
fn a_store_that_is_not_there_is_not_made_by_looking() {
    let bed = Workdir::new();
    for command in ["nodes", "status", "cases", "audit", "history"] {
        bed.expect(3, &[command, "--store", "typo.db"])
            .stderr_contains("there is no store at typo.db")
            .stderr_contains("hint:");
    }
    assert!(!bed.path("typo.db").exists());
}

#[test]
fn a_database_that_does_not_answer_is_said_to_be_out_of_reach_without_its_password() {
    let said = Workdir::new().expect(3, &["nodes", "--store", "postgres://doctor:secret@127.0.0.1:1/doctor"]);
    said.stderr_contains("127.0.0.1");
    assert!(!said.err.contains("secret"), "{}", said.err);
    Workdir::new().expect(2, &["nodes", "--store", "mysql://x"]).stderr_contains("postgres://USER@HOST/DATABASE");
}

#[test]
fn a_damaged_store_is_refused_and_left_as_it_is() {
    let bed = Workdir::new();
    let rubbish = "this is not a database ".repeat(400);
    bed.write("bad.db", &rubbish);
    for command in [&["nodes"][..], &["db", "verify"], &["run"]] {
        let said = bed.expect(7, &[command, &["--store", "bad.db"]].concat());
        said.stderr_contains("damaged or not a SQLite database");
        assert_eq!(said.err.lines().filter(|line| line.contains("panicked")).count(), 0);
    }
    assert_eq!(bed.read("bad.db"), rubbish);
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut command = demo().command(&with_store(&["nodes"]));
    let mut child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn completions_and_manual_pages_are_made_from_the_command_line() {
    let bed = Workdir::new();
    bed.expect(0, &["completions", "bash"]).stdout_contains("_doctor");
    bed.expect(0, &["man", "man"]).stdout_contains("manual pages");
    assert!(bed.read("man/doctor.1").contains("breaker"));
    assert!(bed.path("man/doctor-why.1").exists());
}

#[test]
fn help_names_the_exit_codes() {
    let said = Workdir::new().expect(0, &["--help"]);
    said.stdout_contains("Exit codes:").stdout_contains("5  another controller leads");
    Workdir::new().expect(2, &["frobnicate"]).stderr_contains("unrecognized subcommand");
}
