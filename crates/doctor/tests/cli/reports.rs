//! Reports and support bundles, from the store of a demo.

use std::process::Command;

use doctor_core::{
    case::{Case, CaseState, RepairStep},
    finding::{Evidence, Finding, Remedy, Severity, Verdict},
    ids::{CheckId, HardwareId, IdSource, RuleId},
    observation::Entity,
    plan::Action,
    policy::Policy,
    reason::{ReasonCode, WithReason},
    time::Span,
};
use doctor_store::{Store, StoreUrl, records::CycleIntent};
use rusqlite::Connection;

use crate::{
    this_machine::Service,
    workdir::{CommandOutput, Workdir, demo, demo_copy, wait_until},
};

/// A demo's store with a case against a node that has results, and the case.
fn with_a_case() -> (Workdir, String) {
    let workdir = demo_copy();
    let store = Store::open(&StoreUrl::Sqlite(workdir.path("doctor.db"))).unwrap();
    let now = store.cluster_state_time().unwrap().unwrap();
    let lease = store.acquire("a test", now, Span::hours(1)).unwrap();
    let (node, stored) = store.load_nodes().unwrap().pop_first().unwrap();
    let finding = Finding {
        check: CheckId::new("gpu-xid").unwrap(),
        entity: Entity::node(),
        verdict: Verdict::Fail,
        severity: Severity::Isolate,
        remedy: Remedy::HandOver,
        reason: ReasonCode::new("xid-79").unwrap(),
        text: "GPU 3 fell off the bus, token=swordfish".to_owned(),
        rule: RuleId::new("gpu-xid-79").unwrap(),
        evidence: Evidence::Nothing,
        confirm: 1,
    };
    let mut ids = IdSource::new(7);
    ids.set_time(now);
    let case = Case {
        id: ids.case(),
        hardware: stored.hardware.unwrap_or_else(|| HardwareId::new("board-none").unwrap()),
        node,
        opened: now,
        severity: Severity::Isolate,
        findings: vec![finding],
        repair_step: RepairStep::Quarantine,
        steps: Vec::new(),
        state: CaseState::Open,
        boot_id: None,
        advice: None,
        job_failures: Vec::new(),
        request: None,
    };
    let actions = [WithReason::new(Action::OpenCase(case.clone()), "confirmed", "off the bus")];
    let policy = Policy::built_in();
    let intent = CycleIntent {
        at: now,
        actions: &actions,
        keys: &std::collections::BTreeMap::new(),
        attributed_findings: &[],
        changed_reasons: &[],
        policy_version: policy.version,
        retry: &policy.retry,
        notifications: &[],
    };
    store.commit(&lease, &intent).unwrap();
    (workdir, case.id.to_string())
}

fn store() -> String {
    demo().path("demo/doctor.db").display().to_string()
}

#[test]
fn a_report_is_one_page_of_html_or_markdown_or_json() {
    let (workdir, store) = (Workdir::new(), store());
    workdir.expect(0, &["report", "--store", &store, "--since", "3d", "--format", "html", "--out", "page.html"]);
    let page = workdir.read("page.html");
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"), "{page}");
    assert!(page.matches("<svg").count() > 3 && page.contains("<rect class=\"pass\""), "{page}");
    assert!(!page.contains("<script") && !page.contains("http://") && !page.contains("https://"));
    workdir
        .expect(0, &["report", "--store", &store, "--last", "day", "--format", "markdown"])
        .stdout_contains("# Cluster Doctor: ");
    let json = workdir.json(&["report", "--store", &store, "--last", "day"]);
    assert_eq!(json["slots"].as_array().unwrap().len(), 24, "{json}");
    let output = workdir.expect(2, &["report", "--store", &store, "--out", "page.txt"]);
    output.stderr_contains("--format html, markdown or json");
}

#[test]
fn a_case_bundle_contains_what_a_vendor_needs() {
    let (workdir, case) = with_a_case();
    let store = "doctor.db";
    workdir.write("bug-report.log", "token=abcdef");
    let args = ["bundle", &case, "--store", store, "--out", "case.tar.gz", "--with", "bug-report.log"];
    workdir.expect(0, &args).stdout_contains("Wrote case.tar.gz");
    let unpacked = Command::new("tar").args(["-xzf", "case.tar.gz"]).current_dir(workdir.path("")).status().unwrap();
    assert!(unpacked.success());
    let file = |name: &str| workdir.read(&format!("case-{case}/{name}"));
    assert!(file("summary.md").contains("Severity isolate: keep the node out of service"), "{}", file("summary.md"));
    assert!(file("summary.md").contains(&format!("# Case {case} on ")), "{}", file("summary.md"));
    let cloud: serde_json::Value = serde_json::from_str(&file("cloud.json")).unwrap();
    assert_eq!(cloud["azure"]["impactCategory"], "Resource.Hpc.Unhealthy.XID79FallenOffBus", "{cloud}");
    for name in ["summary.md", "case.json", "cloud.json"] {
        assert!(file(name).contains("fell off the bus") && !file(name).contains("swordfish"), "{}", file(name));
    }
    let machines: serde_json::Value = serde_json::from_str(&file("machines.json")).unwrap();
    assert!(machines.as_array().unwrap().iter().any(|machine| machine["belongs_to_case"] == true), "{machines}");
    assert_eq!(file("more/bug-report.log"), "token=abcdef", "added files are not changed");
    assert!(std::fs::read_dir(workdir.path(&format!("case-{case}/evidence"))).unwrap().count() > 0);
    assert!(file("summary.md").contains("It was not taken: not requested"), "{}", file("summary.md"));
    workdir.expect(2, &["bundle", "c0000000000000", "--store", store]).stderr_contains("no case");
}

#[test]
fn acknowledging_or_snoozing_a_case_records_operator_and_reason() {
    let (workdir, case) = with_a_case();
    let case = case.as_str();
    let listed = workdir.expect(0, &["cases", "--store", "doctor.db"]);
    listed.stdout_contains(case).stdout_contains("isolate: keep the node out of service until repaired");
    workdir.expect(0, &["cases", "ack", case, "--store", "doctor.db", "--yes"]).stdout_contains("Acknowledged.");
    let snooze = ["cases", "snooze", case, "--store", "doctor.db", "--why", "tomorrow", "--until", "4h", "--yes"];
    workdir.expect(0, &snooze).stdout_contains("Snoozed.");
    workdir.expect(6, &snooze[..snooze.len() - 1]);
    let trail = workdir.expect(0, &["audit", "--store", "doctor.db"]);
    trail.stdout_contains("acknowledge").stdout_contains("snooze").stdout_contains("tomorrow").stdout_contains("ann");
    workdir.expect(2, &["cases", "ack", "c0000000000000", "--store", "doctor.db", "--yes"]).stderr_contains("no case");
}

#[test]
fn a_controller_writes_yesterdays_report_once() {
    let workdir = Workdir::local();
    workdir.write("busy", "");
    let reports = "cycle = \"1s\"\n[reports]\ndaily = true\nformats = [\"html\"]\n[backend";
    workdir
        .write("doctor.toml", &(workdir.read("doctor.toml").replace("[backend", reports) + "busy_file = \"busy\"\n"));
    let written = || -> Vec<std::path::PathBuf> {
        let Ok(entries) = std::fs::read_dir(workdir.path("data/reports")) else { return Vec::new() };
        entries
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|end| end == "html"))
            .collect()
    };
    let cycles = || {
        let store = Connection::open(workdir.path("doctor.db"));
        store.unwrap().query_row("SELECT count(*) FROM cycle", [], |row| row.get::<_, u32>(0)).unwrap_or(0)
    };
    let controller = Service::start(&workdir);
    wait_until("a cycle", || cycles() >= 1);
    // Reports are written beside the cycles.
    std::thread::sleep(std::time::Duration::from_secs(2));
    controller.stop();
    assert!(written().is_empty(), "nothing was observed yesterday");
    let yesterday = "UPDATE cycle SET at = at - 86400000 WHERE id = (SELECT min(id) FROM cycle)";
    Connection::open(workdir.path("doctor.db")).unwrap().execute_batch(yesterday).unwrap();
    let mut controller = Service::start(&workdir);
    wait_until("a report", || !written().is_empty());
    controller.wait_for_log("reports written");
    controller.stop();
    let [page] = &written()[..] else { panic!("{:?}", written()) };
    std::fs::write(page, "seen").unwrap();
    let controller = Service::start(&workdir);
    wait_until("the restarted controller", || workdir.json(&["status"])["leader"]["is"] == "leads");
    controller.stop();
    assert_eq!(std::fs::read_to_string(page).unwrap(), "seen", "an existing report is not rewritten");
}

#[test]
fn a_bundle_contains_the_machine_and_vendor_reports_or_the_reason() {
    let workdir = Workdir::local();
    workdir.expect(0, &["run", "--wait"]);
    workdir.expect(0, &["quarantine", "here", "--why", "it smells", "--yes"]);
    // A report is refused while a validation run is on the node.
    workdir.expect(0, &["run", "--wait"]);
    let case = workdir.json(&["cases"])[0]["id"].as_str().unwrap().to_owned();
    let bundle = |path: &str| {
        let args = ["bundle", &case, "--from-node", "--out", "case.tar.gz", "--by", "ann"];
        workdir.expect(6, &args).stderr_contains("Run `doctor-node report` on here.");
        let args = [&args[..], &["--yes"]].concat();
        let output = CommandOutput::from_output(&workdir.command(&args).env("PATH", path).output().unwrap());
        assert_eq!(output.code, 0, "{} {}", output.out, output.err);
        let unpacked =
            Command::new("tar").args(["-xzf", "case.tar.gz"]).current_dir(workdir.path("")).status().unwrap();
        assert!(unpacked.success());
        workdir.read(&format!("case-{case}/summary.md"))
    };
    let recorded = || {
        let audit = workdir.json(&["audit", "here"]);
        let lines = audit.as_array().unwrap();
        lines.iter().filter(|line| line["what"] == "report" && line["by"] == "ann").count()
    };
    let summary = bundle("/usr/bin:/bin");
    assert_eq!(recorded(), 1, "only the confirmed one");
    assert!(summary.contains("It could not be taken: nvidia-bug-report.sh is not installed here."), "{summary}");
    let tool = workdir.path("tools/nvidia-bug-report.sh");
    std::fs::create_dir(workdir.path("tools")).unwrap();
    std::fs::write(&tool, "#!/bin/sh\nprintf 'all of it' >nvidia-bug-report.log.gz\n").unwrap();
    std::fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let summary = bundle(&format!("{}:/usr/bin:/bin", workdir.path("tools").display()));
    assert!(summary.contains("It is in node/, as the vendor's tool wrote it: nvidia-bug-report.log.gz."), "{summary}");
    assert_eq!(workdir.read(&format!("case-{case}/node/nvidia-bug-report.log.gz")), "all of it");
    let firmware: serde_json::Value =
        serde_json::from_str(&workdir.read(&format!("case-{case}/firmware.json"))).unwrap();
    assert!(firmware["system"]["kernel"].is_string() && firmware["hardware"]["boot_id"].is_string(), "{firmware}");
}
