//! Read-only commands, on the store of a demo.

use crate::workdir::{CommandOutput, Workdir, demo, demo_copy};

const STORE: [&str; 2] = ["--store", "demo/doctor.db"];

fn with_store<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [args, &STORE].concat()
}

#[test]
fn the_demo_prints_its_score_as_json_and_is_deterministic_by_seed() {
    let workdir = Workdir::new();
    let play = || workdir.json(&["demo", "--nodes", "12", "--days", "2", "--seed", "3"]);
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
fn nodes_lists_every_node_with_a_status_for_every_test() {
    let workdir = demo();
    let output = workdir.expect(0, &with_store(&["nodes"]));
    let lines: Vec<&str> = output.out.lines().collect();
    let rows = workdir.json(&with_store(&["nodes"]));
    let worst: Vec<&str> = rows.as_array().unwrap().iter().filter_map(|row| row["worst"].as_str()).collect();
    // The severities of findings are explained below the table.
    assert_eq!(lines.len(), 1 + 24 + usize::from(!worst.is_empty()) + 1, "{}", output.out);
    assert!(worst.iter().all(|severity| lines[25].contains(&format!("{severity}: "))), "{}", output.out);
    for column in ["NODE", "POOL", "STATE", "USE", "DL", "NCCL", "STORAGE", "NOTE"] {
        assert!(lines[0].contains(column), "{}", lines[0]);
    }
    assert!(lines.last().unwrap().starts_with("24 nodes; cluster observed"), "{}", output.out);
    assert!(!output.out.contains('\x1b'), "no colour without a terminal");
}

#[test]
fn selectors_select_and_an_unmatched_one_is_an_error() {
    let workdir = demo();
    assert_eq!(workdir.json(&with_store(&["nodes", "node[001-003]"])).as_array().unwrap().len(), 3);
    assert_eq!(workdir.json(&with_store(&["nodes", "*5", "pool=gpu"])).as_array().unwrap().len(), 24);
    workdir
        .expect(2, &with_store(&["nodes", "node999"]))
        .stderr_contains("no node `node999`")
        .stderr_contains("node[001-024]");
    workdir.expect(2, &with_store(&["nodes", "pool=none"])).stderr_contains("pool=none");
    // A state that no node is in is a good question; a command has nothing to do then.
    workdir.expect(0, &with_store(&["nodes", "state=requalifying"])).stdout_contains("No node matches.");
    workdir
        .expect(2, &with_store(&["hold", "state=requalifying", "--why", "x", "--yes"]))
        .stderr_contains("no node matches state=requalifying: there is nothing to do");
    workdir.expect(2, &with_store(&["nodes", "state=tired"])).stderr_contains("requalifying");
    workdir.expect(2, &with_store(&["nodes", "rack=3"])).stderr_contains("pool=NAME");
    workdir.expect(2, &with_store(&["nodes", "node[3-1]"])).stderr_contains("smaller number first");
}

#[test]
fn status_shows_that_there_is_no_leader_and_the_coverage() {
    let output = demo().doctor(&with_store(&["status"]));
    assert!(output.code < 3, "the cluster was observed: {}", output.out);
    output
        .stdout_contains("24 nodes")
        .stdout_contains("no controller leads: the last one stopped after its cycle of")
        .stdout_contains("-> doctor serve")
        .stdout_contains("SUITE");
    let tests = demo().doctor(&with_store(&["status", "--tests"]));
    tests.stdout_contains("NEVER TESTED").stdout_contains("storage");
    let json = demo().json(&with_store(&["status"]));
    assert_eq!(json["nodes"]["total"], 24);
    assert_eq!(json["coverage"].as_array().unwrap().len(), 3);
    let row = &json["coverage"][0];
    let sum: u64 = ["pass", "fail", "inconclusive", "stale", "never_tested", "not_applicable"]
        .iter()
        .map(|status| row[*status].as_u64().unwrap())
        .sum();
    assert_eq!(sum, 24);
}

#[test]
fn why_explains_a_node_and_the_next_step() {
    let workdir = demo();
    let output = workdir.doctor(&with_store(&["why", "node001"]));
    output
        .stdout_contains("node001 is")
        .stdout_contains("What to do")
        .stdout_contains("LAST PASS OR FAIL")
        .stdout_contains("Tests");
    let json = workdir.json(&with_store(&["why", "node001"]));
    assert_eq!(json["node"], "node001");
    assert_eq!(json["test_lines"].as_array().unwrap().len(), 3);
    assert!(!json["next"].as_array().unwrap().is_empty());
    workdir.expect(2, &with_store(&["why", "unknown"])).stderr_contains("no node `unknown`");
}

#[test]
fn history_names_runs_and_their_logs_can_be_read() {
    let workdir = demo();
    let rows = workdir.json(&with_store(&["history", "--test", "storage", "--limit", "5"]));
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 5);
    assert!(rows.iter().all(|row| row["test"] == "storage"));
    assert!(rows.is_sorted_by(|a, b| a["at"].as_str() >= b["at"].as_str()), "newest first");
    let node = rows[0]["node"].as_str().unwrap();
    let of_node = workdir.json(&with_store(&["history", node, "--since", "1d"]));
    assert!(of_node.as_array().unwrap().iter().all(|row| row["node"] == node));
    let run = rows[0]["run"].as_str().unwrap();
    for args in [&["log", run][..], &["log", run, "--follow"]] {
        workdir.expect(0, &with_store(args)).stdout_contains(&format!("{node}: storage ended"));
    }
    workdir.expect(2, &with_store(&["log", "r0000000000000"])).stderr_contains("no run");
    workdir.expect(2, &with_store(&["history", "--since", "yesterday"])).stderr_contains("such as \"7d\"");
}

#[test]
fn a_report_comes_as_text_markdown_and_json_with_the_same_figures() {
    let workdir = demo();
    let json = workdir.json(&with_store(&["report", "--since", "3d"]));
    let queued = json["queued"].as_u64().unwrap();
    assert!(queued > 0, "{json}");
    assert!(json["node_hours"].as_f64().unwrap() > 0.0);
    let text = workdir.expect(0, &with_store(&["report", "--since", "3d"]));
    text.stdout_contains(&format!("{queued} queued")).stdout_contains("Coverage");
    let markdown = workdir.expect(0, &with_store(&["report", "--since", "3d", "--format", "markdown"]));
    markdown
        .stdout_contains("# Cluster Doctor")
        .stdout_contains(&format!("{queued} queued"))
        .stdout_contains("| storage |");
    let none = workdir.json(&with_store(&["report", "--since", "1s"]));
    assert_eq!(none["queued"], 0);
}

#[test]
fn explain_knows_checks_rules_and_reasons() {
    let workdir = Workdir::new();
    workdir
        .expect(0, &["explain", "disk-space"])
        .stdout_contains("Why it matters")
        .stdout_contains("disk-space-used: used_percent above 90");
    workdir.expect(0, &["explain", "disk-space-used"]).stdout_contains("of check disk-space");
    workdir.expect(0, &["explain", "share-busy"]).stdout_contains("limits.per_share");
    workdir.expect(0, &["explain", "disk-full"]).stdout_contains("disk-space-used");
    workdir.expect(0, &["explain", "reset"]).stdout_contains("reset (severity of a finding): GPU reset needed.");
    workdir.expect(0, &["explain", "nccl"]).stdout_contains("In force");
    workdir.expect(0, &["explain"]).stdout_contains("disk-space");
    workdir.expect(2, &["explain", "spoon"]).stderr_contains("no check, rule or reason `spoon`");
    for severity in ["monitor", "reset", "reboot", "isolate"] {
        workdir.expect(0, &["explain", severity]).stdout_contains(&format!("{severity} (severity of a finding): "));
    }
    for state in ["in-service", "suspect", "quarantined", "repairing", "requalifying", "out", "held"] {
        workdir.expect(0, &["explain", state]).stdout_contains(&format!("{state} (state of a node): "));
    }
    workdir.expect(0, &["explain", "Disk-Space"]).stdout_contains("Why it matters");
}

#[test]
fn mistyped_names_get_suggestions() {
    let workdir = demo();
    for (args, suggestion) in [
        (&["explain", "disk-spcae"][..], "did you mean disk-space"),
        (&["explain", "isolte"], "did you mean isolate?"),
        (&["explain", "quarantned"], "did you mean quarantined"),
        (&["why", "node01", "--store", "demo/doctor.db"], "did you mean node001"),
        (&["why", "nod003", "--store", "demo/doctor.db"], "did you mean node003"),
        (&["history", "node0x2", "--store", "demo/doctor.db"], "did you mean node002"),
        (&["test", "node001", "--test", "storge", "--why", "x", "--store", "demo/doctor.db"], "did you mean storage?"),
        (&["quarantne", "node001"], "'quarantine'"),
        (&["config", "chekc"], "'check'"),
        (&["nodes", "--jsno"], "'--json'"),
    ] {
        workdir.expect(2, args).stderr_contains(suggestion);
    }
    // Nothing resembles it: all are named.
    workdir.expect(2, &["why", "zzz", "--store", "demo/doctor.db"]).stderr_contains("known: node[001-024]");
}

#[test]
fn version_names_program_schema_store_and_controller_and_what_is_unknown() {
    let view = demo().json(&["version", "--store", "demo/doctor.db"]);
    assert_eq!(view["program"], env!("CARGO_PKG_VERSION"));
    assert_eq!(view["store"]["schema"], view["schema"]);
    assert_eq!(view["controller"]["program"], env!("CARGO_PKG_VERSION"), "{view}");
    demo()
        .expect(0, &["version", "--store", "demo/doctor.db"])
        .stdout_contains("demo/doctor.db: schema ")
        .stdout_contains("none leads; the last cycle was run by doctor ");
    let workdir = Workdir::local();
    let output = workdir.expect(0, &["version"]);
    output.stdout_contains("schema unknown: it is empty or does not exist").stdout_contains("controller   unknown: ");
    assert!(!workdir.path("doctor.db").exists(), "looking creates nothing");
    workdir.write("doctor.toml", "cycel = 1\n");
    workdir.expect(0, &["version"]).stdout_contains("schema unknown: ").stdout_contains("`cycel`");
    workdir.expect(0, &["--version"]).stdout_contains(concat!("doctor ", env!("CARGO_PKG_VERSION")));
}

/// Commands that only read, so that their examples can run on the demo's store.
const READING: [&str; 9] = ["status", "nodes", "why", "history", "cases", "audit", "report", "explain", "version"];

#[test]
fn the_examples_of_reading_commands_run_on_a_simulated_cluster() {
    let workdir = demo_copy();
    let mut ran = 0;
    for command in READING {
        let help = workdir.expect(0, &[command, "--help"]).out;
        let (_, examples) = help.split_once("Examples:").unwrap();
        let examples = examples.lines().map(str::trim).filter(|line| line.starts_with("doctor "));
        for example in examples {
            let script = example.replacen("doctor", "\"$DOCTOR\"", 1);
            let mut shell = std::process::Command::new("/bin/sh");
            shell.args(["-c", &script]).current_dir(workdir.path("")).env_clear();
            shell
                .env("DOCTOR", env!("CARGO_BIN_EXE_doctor"))
                .env("DOCTOR_STORE", "doctor.db")
                .env("HOME", workdir.path(""));
            let output = CommandOutput::from_output(&shell.output().unwrap());
            // `doctor status` has the exit codes of a Nagios plugin; 3 is unknown.
            let largest = if command == "status" { 2 } else { 1 };
            assert!((0..=largest).contains(&output.code), "{example}: {}\n{}", output.code, output.err);
            assert!(!output.out.is_empty() && output.err.is_empty(), "{example}\n{}", output.err);
            ran += 1;
        }
    }
    assert!(ran >= 15, "{ran}");
}

#[test]
fn explain_knows_nvidia_error_numbers() {
    let workdir = Workdir::new();
    let output = workdir.expect(0, &["explain", "xid", "79"]);
    output
        .stdout_contains("Xid 79: GPU off bus: it no longer responds on PCIe.")
        .stdout_contains("RESTART_BM: reboot the machine");
    output
        .stdout_contains("Ours         reboot: node reboot needed")
        .stdout_contains("gpud fatal")
        .stdout_contains("Azure's runbook");
    output.stdout_contains("gpu-xid-79: event xid-79");
    workdir
        .expect(0, &["explain", "xid", "64"])
        .stdout_contains("xid-64-reboot (reboot)")
        .stdout_contains("gpu-xid-64-reboot");
    workdir.expect(0, &["explain", "xid", "13"]).stdout_contains("only counted").stdout_contains("compute-sanitizer");
    workdir
        .expect(0, &["explain", "sxid", "12030"])
        .stdout_contains("gpud only warns")
        .stdout_contains("nvswitch-sxid-12030");
    workdir.expect(0, &["explain", "dcgm", "30"]).stdout_contains("DCGM_FR_LOW_BANDWIDTH").stdout_contains("triage");
    assert_eq!(workdir.json(&["explain", "xid", "48"])["xid"]["severity"], "reset");
    workdir.expect(2, &["explain", "xid", "999"]).stderr_contains("no Xid `999`").stderr_contains("1 to 172");
    workdir.expect(2, &["explain", "sxid", "1"]).stderr_contains("no SXid `1`");
    workdir.expect(2, &["explain", "dcgm", "many"]).stderr_contains("no DCGM error `many`");
    workdir.expect(2, &["explain", "xid"]).stderr_contains("the number is missing");
    workdir.expect(0, &["explain", "dcgm"]).stdout_contains("dcgm: do the GPUs pass NVIDIA");
    workdir.expect(2, &["explain", "disk-space", "3"]).stderr_contains("take a number, not `disk-space`");
}

#[test]
fn read_commands_do_not_create_a_missing_store() {
    let workdir = Workdir::new();
    // Both tables of exit codes have 3 for a store that cannot be reached.
    for command in ["nodes", "status", "cases", "audit", "history"] {
        workdir
            .expect(3, &[command, "--store", "typo.db"])
            .stderr_contains("there is no store at typo.db")
            .stderr_contains("hint:");
    }
    assert!(!workdir.path("typo.db").exists());
}

#[test]
fn an_unreachable_database_is_reported_without_its_password() {
    let output = Workdir::new().expect(3, &["nodes", "--store", "postgres://doctor:secret@127.0.0.1:1/doctor"]);
    output.stderr_contains("127.0.0.1");
    assert!(!output.err.contains("secret"), "{}", output.err);
    Workdir::new().expect(2, &["nodes", "--store", "mysql://x"]).stderr_contains("postgres://USER@HOST/DATABASE");
}

#[test]
fn a_damaged_store_is_refused_and_left_as_it_is() {
    let workdir = Workdir::new();
    let rubbish = "this is not a database ".repeat(400);
    workdir.write("bad.db", &rubbish);
    for command in [&["nodes"][..], &["db", "verify"], &["run"]] {
        let output = workdir.expect(7, &[command, &["--store", "bad.db"]].concat());
        output.stderr_contains("damaged or not a SQLite database");
        assert_eq!(output.err.lines().filter(|line| line.contains("panicked")).count(), 0);
    }
    assert_eq!(workdir.read("bad.db"), rubbish);
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    let mut command = demo().command(&with_store(&["nodes"]));
    let mut child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn completions_and_manual_pages_are_generated() {
    let workdir = Workdir::new();
    workdir.expect(0, &["completions", "bash"]).stdout_contains("_doctor");
    workdir.expect(0, &["completions", "bash", "--of", "doctor-node"]).stdout_contains("-o default doctor-node");
    workdir.expect(0, &["man", "node", "--of", "doctor-node"]).stdout_contains("node/doctor-node.1");
    assert!(
        workdir.read("node/doctor-node-check.1").contains("disk\\-space") && !workdir.path("node/doctor.1").exists()
    );
    workdir.expect(0, &["man", "man"]).stdout_contains("manual pages");
    assert!(workdir.path("man/doctor-node-agent.1").exists());
    assert!(workdir.read("man/doctor.1").contains("breaker"));
    assert!(workdir.path("man/doctor-why.1").exists());
}

#[test]
fn help_names_the_exit_codes() {
    let output = Workdir::new().expect(0, &["--help"]);
    output.stdout_contains("Exit codes:").stdout_contains("5  another controller leads");
    Workdir::new().expect(2, &["frobnicate"]).stderr_contains("unrecognized subcommand");
}
