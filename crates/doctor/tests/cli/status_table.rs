//! What `doctor status` prints in each situation that needs an operator, and its exit code.
//!
//! The situations are planted on simulated clusters, of which `doctor sim run --store` keeps the store. The whole table is
//! the reviewed page `status_table.md`; `UPDATE_STATUS_TABLE=1` rewrites it.

use std::{
    fmt::Write as _,
    io::{BufRead, BufReader},
    process::Stdio,
};

use crate::{
    api::KillOnDrop,
    this_machine::Service,
    workdir::{CommandOutput, Workdir, wait_until},
};

/// A situation.
struct Situation {
    title: &'static str,
    /// The scenario that leads to it; empty: there is no store.
    script: &'static str,
    /// Commands of an operator after it. `CASE` is the id of the open case.
    commands: &'static [&'static [&'static str]],
    /// Options of `status`.
    options: &'static [&'static str],
    code: i32,
    /// Parts of what it prints.
    prints: &'static [&'static str],
}

/// A situation without commands and options.
const fn planted(title: &'static str, script: &'static str, code: i32, prints: &'static [&'static str]) -> Situation {
    Situation { title, script, commands: &[], options: &[], code, prints }
}

const SITUATIONS: &[Situation] = &[
    planted("Nothing is wrong", "world nodes 6\nfresh\nrun 10m every 5m", 0, &["no open problems."]),
    planted(
        "Users have all nodes, and every result is stale",
        "world nodes 4\nrecord node[001-004] storage pass 20d\nrecord node[001-004] dl pass 20d\n\
         record node[001-004] nccl pass 20d\nuser-job node[001-004] 12h\nrun 1h every 10m",
        0,
        &["no open problems, 1 notice", "notice  coverage-low", "in use, and overdue for more than a day"],
    ),
    planted(
        "The controller was stopped in an orderly way a moment ago",
        "world nodes 6\nfresh\nrun 10m every 5m\nstop",
        0,
        &["no open problems, 1 notice", "the last one stopped after its cycle of", "-> doctor serve"],
    ),
    planted("There is no store", "", 3, &["there is no store at doctor.db"]),
    Situation {
        title: "The command line is mistyped",
        script: "",
        commands: &[],
        options: &["--al"],
        code: 3,
        prints: &["unexpected argument '--al'"],
    },
    planted(
        "No controller has run a cycle yet",
        "world nodes 2\nstop",
        3,
        &["UNKNOWN: ", "no controller leads, and none has run a cycle yet"],
    ),
    planted(
        "The cluster has not answered for some minutes",
        "world nodes 6\nfresh\nrun 10m every 5m\noutage 2h\nrun 6m every 1m",
        1,
        &["observation-old", "the cluster was last observed", "connection refused", "doctor config check --live"],
    ),
    planted(
        "The cluster has not answered for half an hour",
        "world nodes 6\nfresh\nrun 10m every 5m\noutage 2h\nrun 30m every 5m",
        2,
        &["critical  observation-old", "the cluster was last observed"],
    ),
    planted(
        "Too many nodes fail: the breaker is open",
        "world nodes 60\nfresh\nrun 10m\nfault node010 gpu-off-bus\nfault node011 gpu-off-bus\nfault node012 gpu-off-bus\n\
         fault node013 gpu-off-bus\nfault node014 gpu-off-bus\nrun 10m",
        2,
        &["the breaker is open", "-> doctor breaker close --why …"],
    ),
    planted(
        "A node has waited for an operator for some hours",
        "world nodes 10\nfresh\nrun 5m\nquarantine node003\nrun 4h every 10m",
        1,
        &["case-waiting", "node003: waiting for an operator", "-> doctor release node003 --why …"],
    ),
    planted(
        "A node has waited for an operator for more than a day",
        "world nodes 10\nfresh\nrun 5m\nquarantine node003\nrun 38h every 1h",
        2,
        &["critical  case-waiting", "node003: waiting for an operator"],
    ),
    Situation {
        title: "An operator has acknowledged the case that waits",
        script: "world nodes 10\nfresh\nrun 5m\nquarantine node003\nrun 4h every 10m",
        commands: &[&["cases", "ack", "CASE", "--yes"]],
        options: &[],
        code: 0,
        prints: &["no open problems, 1 notice", "acknowledged by ann"],
    },
    planted(
        "The policy leaves a reboot to an operator",
        "world nodes 10\nfresh\nrun 5m\nfault node003 gpu-off-bus\nrun 1h",
        1,
        &["proposal", "node003: waiting for an operator to reboot", "-> doctor repair node003 --step reboot --why …"],
    ),
    Situation {
        title: "An operator holds two nodes",
        script: "world nodes 6\nfresh\nrun 10m every 5m",
        commands: &[&["hold", "node[001-002]", "--why", "new fans", "--yes"]],
        options: &[],
        code: 0,
        prints: &["2 nodes (node[001-002]): held by ann", "new fans", "-> doctor release node[001-002] --why …"],
    },
    planted(
        "Commands took seven of eight nodes out of service",
        "world nodes 8\nfresh\nrun 5m\nquarantine node001\nquarantine node002\nquarantine node003\nquarantine node004\n\
         quarantine node005\nquarantine node006\nquarantine node007\nrun 20m every 5m",
        2,
        &["many-nodes-out", "7 of 8 nodes are out of service: node[001-007]"],
    ),
    planted(
        "Every validation job ends without a result",
        "world nodes 6\njobs no-result 40\nrun 1h every 5m",
        2,
        &["validation-failing", "validation jobs gave no result", "no-result", "-> doctor log r"],
    ),
    planted(
        "The cluster rejects every validation job",
        "world nodes 6\ncalls submit refused-for-good 12\nrun 10m every 1m",
        2,
        &["validation-failing", "rejected", "the cluster does not allow this"],
    ),
    planted(
        "One agent of eight is silent",
        "world nodes 8 agents every 5m\nfresh\nrun 10m every 5m\nagent-silent node002 3h\nrun 1h every 5m",
        1,
        &["agent-silent", "node002: agent silent for", "-> doctor agent list"],
    ),
    planted(
        "Most agents are silent",
        "world nodes 8 agents every 5m\nfresh\nrun 10m every 5m\nagents-silent 80% 3h\nrun 1h every 5m",
        2,
        &["critical  agents-silent", "check the network first"],
    ),
    planted(
        "A node cannot be reached",
        "world nodes 6\nfresh\nrun 10m every 5m\nunreachable node004 2h\nrun 10m every 5m",
        1,
        &["node004: occupancy unknown, not tested", "-> doctor why node004"],
    ),
    planted(
        "The budget is too small for the periods",
        "world nodes 6\npolicy limits = { node_hours_per_day = 0.1 }\nfresh\nrun 10m every 5m",
        1,
        &["limit-too-small", "`limits.node_hours_per_day` is 0.1", "-> doctor config check"],
    ),
    planted(
        "Free nodes are not tested, because the budget is spent",
        "world nodes 6\npolicy limits = { node_hours_per_day = 0.1 }\nrecord node[001-006] storage pass 20d\n\
         record node[001-006] dl pass 20d\nrecord node[001-006] nccl pass 20d\nrun 2h every 10m",
        1,
        &["coverage-low", "free, and overdue for more than a day", "today's validation node-hours are spent"],
    ),
    Situation {
        title: "Validation is paused, without an end",
        script: "world nodes 6\nfresh\nrun 10m every 5m",
        commands: &[&["pause", "--why", "upgrade of the switches", "--yes"]],
        options: &[],
        code: 1,
        prints: &["paused everywhere by ann until resumed: upgrade of the switches", "-> doctor resume --why …"],
    },
    Situation {
        title: "Validation of a pool is paused for four hours",
        script: "world nodes 6\nfresh\nrun 10m every 5m",
        commands: &[&["pause", "--pool", "gpu", "--for", "4h", "--why", "upgrade", "--yes"]],
        options: &[],
        code: 0,
        prints: &["paused in pool gpu by ann until", "-> doctor resume --pool gpu --why …"],
    },
    planted(
        "Another party keeps a node out of service",
        "world nodes 6\nfresh\nrun 5m\ncordon node002 by kubectl\nrun 10m every 5m",
        0,
        &["node002: kept out of service by kubectl, not tested: maintenance"],
    ),
    planted(
        "Results with a wrong signature are rejected",
        "world nodes 3\npolicy tests.storage.enabled = false\npolicy tests.nccl.enabled = false\njobs wrongly-signed 1\n\
         run 20m",
        1,
        &["results-rejected", "results or reports rejected so far: 1"],
    ),
    planted(
        "The jobs of one node crash in a row, and the others do not",
        "world nodes 3\npolicy tests.storage.enabled = false\npolicy tests.nccl.enabled = false\n\
         record node[002-003] dl pass 1h\njobs crashes 6\nrun 8h every 5m",
        1,
        &["node001: the last validation jobs gave no result: crashed", "-> doctor log r"],
    ),
    Situation {
        title: "Nothing is wrong, with one line for each test",
        script: "world nodes 6\nfresh\nrun 10m every 5m",
        commands: &[],
        options: &["--tests"],
        code: 0,
        prints: &["no open problems.", "NEVER TESTED"],
    },
];

/// Plays a script, and serves the API over the store that it leaves. Returns the API's address.
fn serve_story(workdir: &Workdir, script: &str) -> (KillOnDrop, String) {
    workdir.write("story.txt", script);
    let args = ["sim", "run", "story.txt", "--store", "doctor.db", "--listen", "127.0.0.1:0"];
    let mut child = workdir.command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let out = child.stdout.take().unwrap();
    let running = KillOnDrop(child);
    let mut lines = BufReader::new(out).lines().map_while(Result::ok);
    let address = lines.find_map(|line| Some(line.strip_prefix("Dashboard: ")?.trim_end_matches('/').to_owned()));
    (running, address.unwrap_or_else(|| panic!("it serves no API: {script}")))
}

/// Plants a situation, and returns the exit code of `status` with what it printed on both channels. A client of the API sees the
/// same.
fn play(situation: &Situation) -> (i32, String) {
    let workdir = Workdir::new();
    let served = (!situation.script.is_empty()).then(|| serve_story(&workdir, situation.script));
    for command in situation.commands {
        let case = || workdir.json(&["cases", "--store", "doctor.db"])[0]["id"].as_str().unwrap().to_owned();
        let command: Vec<String> =
            command.iter().map(|word| if *word == "CASE" { case() } else { (*word).to_owned() }).collect();
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        workdir.expect(0, &[&words[..], &["--store", "doctor.db"]].concat());
    }
    let output = workdir.doctor(&[&["status"], situation.options, &["--store", "doctor.db"]].concat());
    if let Some((_running, address)) = &served {
        let remote = workdir.doctor(&[&["status"], situation.options, &["--server", address]].concat());
        let parts = |output: &CommandOutput| (output.code, output.out.clone(), output.err.clone());
        assert_eq!(parts(&remote), parts(&output), "{}", situation.title);
    }
    (output.code, format!("{}{}", output.out, output.err))
}

#[test]
fn status_says_what_needs_an_operator_and_exits_as_a_nagios_plugin() {
    let mut page = String::from(
        "# What `doctor status` prints\n\n\
         Each situation is planted on a simulated cluster. The test `status_table` compares this page with what the program\n\
         prints; `UPDATE_STATUS_TABLE=1` rewrites it. The same command with `--server` prints the same. Exit codes: 0 ok,\n\
         1 warning, 2 critical, 3 unknown.\n",
    );
    let mut wrong = Vec::new();
    for (number, situation) in SITUATIONS.iter().enumerate() {
        let (code, printed) = play(situation);
        let missing: Vec<&&str> = situation.prints.iter().filter(|part| !printed.contains(**part)).collect();
        if code != situation.code || !missing.is_empty() {
            wrong.push(format!("{}: exit code {code}, missing {missing:?} in\n{printed}", situation.title));
        }
        let _ = write!(page, "\n## {}. {}\n\n", number + 1, situation.title);
        if !situation.script.is_empty() {
            let commands = situation.commands.iter().map(|command| format!("\n$ doctor {}", command.join(" ")));
            let _ = write!(page, "```text\n{}{}\n```\n\n", situation.script, commands.collect::<String>());
        }
        // The first part is the list; what follows describes the service.
        let list =
            if situation.options.is_empty() { printed.split("\n\n").next().unwrap_or_default() } else { &printed };
        let options: String = situation.options.iter().map(|option| format!(" {option}")).collect();
        let _ = write!(page, "Exit code {code} of `doctor status{options}`:\n\n```text\n{}\n```\n", list.trim_end());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    let reviewed = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/status_table.md");
    if std::env::var_os("UPDATE_STATUS_TABLE").is_some() {
        std::fs::write(reviewed, &page).unwrap();
    }
    assert_eq!(std::fs::read_to_string(reviewed).unwrap(), page, "UPDATE_STATUS_TABLE=1 rewrites the page; review it");
}

#[test]
fn a_killed_controller_is_critical_and_one_that_stopped_is_not() {
    let workdir = Workdir::local();
    let config = workdir.read("doctor.toml").replace("[backend", "cycle = \"1s\"\nlease = \"3s\"\n[backend");
    workdir.write("doctor.toml", &config);
    let observed = || workdir.path("doctor.db").exists() && !workdir.json(&["status"])["observed_at"].is_null();
    let service = Service::start(&workdir);
    wait_until("an observation", observed);
    assert_eq!(service.stop().0, Some(0));
    let stopped = workdir.json(&["status"]);
    let item = &stopped["attention"].as_array().unwrap().iter().find(|item| item["kind"] == "no-controller").unwrap();
    assert_eq!(item["urgency"], "notice", "{stopped:#}");
    assert!(item["text"].as_str().unwrap().contains("the last one stopped"), "{item:#}");

    let mut service = Service::start(&workdir);
    service.wait_for_log("started");
    wait_until("its lease", || workdir.json(&["status"])["leader"]["is"] == "leads");
    // Dropping it kills it.
    drop(service);
    wait_until("the end of the lease", || workdir.json(&["status"])["leader"]["is"] == "lost");
    workdir
        .expect(2, &["status"])
        .stdout_contains("no controller leads: the lease of")
        .stdout_contains("-> doctor serve");
}

#[test]
fn a_usage_error_and_an_unreadable_configuration_are_unknown_for_status_alone() {
    let workdir = Workdir::new();
    for args in [&["status", "--frobnicate"][..], &["--json", "status", "extra"], &["status", "--store", "mysql://x"]] {
        workdir.expect(3, args);
    }
    workdir.expect(2, &["nodes", "--frobnicate"]);
    workdir.expect(2, &["--frobnicate", "nodes"]);
    workdir.write("doctor.toml", "frobnicate = true\n");
    workdir.expect(3, &["status"]).stderr_contains("frobnicate");
    workdir.expect(4, &["nodes"]);
    let help = workdir.expect(0, &["status", "--help"]);
    help.stdout_contains("2  an operator is needed now").stdout_contains("3  nothing is known");
}
