//! Configuration: searched for, checked, shown, and rejected with line and column.

use crate::workdir::Workdir;

#[test]
fn init_writes_valid_commented_defaults_and_overwrites_nothing() {
    let workdir = Workdir::new();
    workdir.expect(0, &["config", "init", "site"]).stdout_contains("site/doctor.toml");
    assert!(workdir.read("site/policy.toml").contains("# Concurrent validation jobs"));
    // The default directories do not exist here.
    let output = workdir.expect(0, &["config", "check", "--files-only", "--config", "site/doctor.toml"]);
    output.stdout_contains("site/doctor.toml is valid.").stdout_contains("disk-space");
    workdir.expect(2, &["config", "init", "site"]).stderr_contains("exists and is not overwritten");
}

#[test]
fn a_mistake_is_shown_with_file_line_column_and_what_is_accepted() {
    for (file, text, parts) in [
        ("doctor.toml", "store = \"a.db\"\ncycel = \"30s\"\n", ["doctor.toml, line 2, column 1", "`cycle`"]),
        ("doctor.toml", "cycle = \"30 parsecs\"\n", ["doctor.toml, line 1, column 9", "such as \"90s\""]),
        ("doctor.toml", "workers = -2\n", ["doctor.toml, line 1, column 11", "1 to 256"]),
        ("doctor.toml", "cycle = \n", ["doctor.toml, line 1", "column"]),
        ("policy.toml", "[limits]\n\n  job = 3\n", ["policy.toml, line 3, column 3", "`jobs`"]),
        ("policy.toml", "[limits]\npending = 300\n", ["policy.toml, line 2, column 11", "such as \"90s\""]),
        ("policy.toml", "[limits]\njobs = -1\n", ["policy.toml, line 2, column 8", "a share of the nodes such as"]),
        ("policy.toml", "[breaker]\npercent_of_pool = -5.0\n", ["policy.toml, line 2, column 19", "0 to 100 percent"]),
        ("policy.toml", "mode = \"yolo\"\n", ["policy.toml, line 1, column 8", "observe, recommend, act"]),
        ("policy.toml", "[[rules]]\nid = \"x\"\n", ["policy.toml, line 1", "missing field `check`"]),
        ("profile.toml", "version = 1\n[expect]\n", ["profile.toml, a name is missing", "has `sku`"]),
    ] {
        let workdir = Workdir::new();
        workdir.write("doctor.toml", "policy = \"policy.toml\"\nprofiles = [\"profile.toml\"]\n");
        workdir.write("policy.toml", "");
        workdir.write("profile.toml", "sku = \"h100\"\nversion = 1\n[expect]\n");
        workdir.write(file, text);
        let output = workdir.expect(4, &["config", "check"]);
        for part in parts {
            output.stderr_contains(part);
        }
        output.stderr_contains("hint:");
    }
}

#[test]
fn a_policy_with_unknown_names_is_rejected() {
    let workdir = Workdir::new();
    workdir.write("doctor.toml", "policy = \"policy.toml\"\n");
    workdir.write("policy.toml", "[tests.discs]\nenabled = false\n");
    workdir.expect(4, &["config", "check"]).stderr_contains("tests.discs").stderr_contains("disk-space");
    for (policy, expected) in [
        ("[suites.mine]\ntests = [\"discs\"]\n", "suite `mine` names `discs`"),
        ("[suites.memory]\ntests = [\"dl\"]\n", "there is a test `memory`"),
        ("[tests.dl-hot]\nof = \"deal\"\n", "`tests.dl-hot` as a form of `deal`"),
        ("[tests.dl-hot]\nof = \"dl-long\"\n", "`tests.dl-hot` as a form of `dl-long`"),
        ("[repair]\nrequalification = [\"every\"]\n", "`repair.requalification` names `every`"),
    ] {
        workdir.write("policy.toml", policy);
        workdir.expect(4, &["config", "check"]).stderr_contains(expected);
    }
    workdir.write("policy.toml", "[repair]\nrequalification = [\"quarantine\"]\n[suites.standard]\nevery = \"7d\"\n");
    workdir.expect(0, &["explain", "suites"]).stdout_contains("Suite standard: ").stdout_contains("older than 7d");
    workdir
        .expect(0, &["explain", "dl-long"])
        .stdout_contains("on request, or to requalify")
        .stdout_contains("heat = ");
    workdir.write("doctor.toml", "policy = \"missing.toml\"\n");
    workdir.expect(4, &["config", "check"]).stderr_contains("missing.toml").stderr_contains("No such file");
}

#[test]
fn a_configuration_may_begin_in_observe() {
    let workdir = Workdir::new();
    workdir.expect(0, &["config", "init", "plain"]).stdout_contains("--observe-first");
    workdir.expect(0, &["config", "init", "first", "--observe-first"]).stdout_contains("mode `observe`");
    let mode = |dir: &str| {
        let shown = workdir.json(&["config", "show", "--config", &format!("{dir}/doctor.toml")]);
        shown["policy_in_force"]["mode"].as_str().unwrap().to_owned()
    };
    assert_eq!([mode("plain"), mode("first")], ["recommend", "observe"]);
}

#[test]
fn config_check_says_whether_the_limits_can_hold_the_periods() {
    let workdir = Workdir::local();
    let check = |policy: &str| {
        workdir.write("policy.toml", policy);
        workdir.doctor(&["config", "check"])
    };
    check("").stdout_contains("The limits can hold the periods of all tests on up to ");
    check("[limits]\njobs = 1\n").stdout_contains("of all tests on up to ");
    // With a store, the nodes that were last observed count.
    workdir.policy("");
    workdir.expect(0, &["run", "--wait", "--timeout", "1m"]);
    check("").stdout_contains("of all tests on 1 node (");
    let slow = "[limits]\njobs = 1\n[tests.dl]\ntypical_duration = \"8d\"\n";
    let view = check(slow);
    view.stdout_contains("a full pass needs 8d 4m (`limits.jobs` is 1)");
    view.stdout_contains("the period is 7d: at most 87 % coverage; raise `limits.jobs` to 2, or lengthen the period");
    workdir.expect(1, &["config", "check"]);
}

#[test]
fn the_effective_configuration_is_shown_and_parses() {
    let workdir = Workdir::local();
    let output = workdir.expect(0, &["config", "show"]);
    output
        .stdout_contains("max_load_per_core = 1000")
        .stdout_contains("[limits]")
        .stdout_contains("jobs = \"5 or 4%\"");
    let json = workdir.json(&["config", "show"]);
    assert_eq!(json["cycle"], "30s");
    assert_eq!(json["policy_in_force"]["mode"], "recommend");
}

#[test]
fn a_named_file_that_is_missing_is_not_replaced_by_another() {
    let workdir = Workdir::local();
    workdir.expect(4, &["nodes", "--config", "other.toml"]).stderr_contains("other.toml");
}

#[test]
fn a_missing_shared_directory_is_reported_with_the_remedy() {
    let workdir = Workdir::local();
    std::fs::remove_dir(workdir.path("data")).unwrap();
    workdir.expect(3, &["run"]).stderr_contains("data").stderr_contains("create the directory");
}

#[test]
fn profiles_of_other_tools_are_imported_and_used() {
    let workdir = Workdir::local();
    workdir.write("instance-profiles.conf", "# type|gpus|efa|nvlink|provider\nour.8xlarge|8|4|true|efa\nwhat\n");
    workdir.write("nd8_v9.conf", " * || check_gpu_count 8\n * || check_hw_ib 400 mlx5_ib0:1\n * || check_gpu_xid\n");
    let files = ["instance-profiles.conf", "nd8_v9.conf"];
    let output = workdir.expect(1, &["import", "profiles", files[0], files[1], "--out", "profiles"]);
    output
        .stdout_contains("instance-profiles.conf:3: expected")
        .stdout_contains("2 profiles written; 3 lines used, 1 covered");
    assert!(workdir.read("profiles/nd8_v9.toml").contains("fabric_ports_active = 1"));
    workdir.expect(0, &["import", "profiles", files[1], "--out", "profiles"]);

    let text = workdir.read("doctor.toml");
    workdir.write("doctor.toml", &format!("profiles = [\"profiles\"]\n{text}"));
    workdir.write("profiles/nd8_v9.toml", "sku = \"nd8_v9\"\nversion = 1\nlike = \"hgx-h999\"\n");
    workdir.expect(4, &["config", "check"]).stderr_contains("hgx-h999");
    workdir
        .expect(1, &["import", "profiles", files[1], "--out", "profiles"])
        .stdout_contains("kept, although it differs");
}

#[test]
fn a_live_check_verifies_that_configured_resources_exist() {
    let workdir = Workdir::local();
    let output = workdir.expect(0, &["config", "check", "--live"]);
    output
        .stdout_contains("good     store: ")
        .stdout_contains("the first start creates it")
        .stdout_contains("good     data: ")
        .stdout_contains("good     cluster: local")
        .stdout_contains("good     here: program: ")
        .stdout_contains("good     here: version: doctor-node ")
        .stdout_contains("good     here: shared directory: ")
        .stdout_contains("here: rights: ")
        .stdout_contains("here: device files: ")
        .stdout_contains("good     here: clock: ");
    assert!(!workdir.path("doctor.db").exists(), "looking makes nothing");
    std::fs::write(workdir.path("doctor.db"), "this is no database at all, whatever its name says").unwrap();
    let view = workdir.json(&["config", "check", "--live"]);
    let store = view["live"].as_array().unwrap().iter().find(|one| one["subject"] == "store").unwrap();
    assert_eq!(store["status"], "bad", "{view}");
    assert!(store["remedy"].is_string(), "{view}");
    std::fs::remove_dir(workdir.path("data")).unwrap();
    let output = workdir.expect(7, &["config", "check", "--live"]);
    output.stdout_contains("bad      data: ").stdout_contains(" failed; ").stdout_contains("would not start");
    output.stderr_contains("does not start with the SQLite header").stderr_contains("create the directory");
    std::fs::create_dir(workdir.path("data")).unwrap();
    std::fs::remove_file(workdir.path("doctor.db")).unwrap();
    assert!(workdir.json(&["config", "check"])["live"].is_null(), "only with --live");
}
