//! Regression tests for defects of other systems, each under its name. `docs/reference/regressions.md` has the whole
//! list, including tests elsewhere; the last two tests compare that page with the tree.

use std::{collections::BTreeSet, fs, path::Path};

use doctor_checks::{
    Catalogue, Check, Params,
    gpu::{Driver, FieldValue, Gpu, GpuQueryResult},
    probe::{Probe, ProbeOutput},
    tables,
};
use doctor_core::{
    classify::classify,
    finding::{Severity, Verdict},
    ids::CheckId,
    policy::Policy,
    profile::Profile,
    time::Span,
};

fn check(catalogue: &Catalogue, id: &str) -> Check {
    *catalogue.get(&CheckId::new(id).unwrap()).unwrap_or_else(|| panic!("there is no check {id}"))
}

/// Returns the verdict, and `REASON SEVERITY ENTITY` of each finding, under this policy's rules and without a profile.
fn judged(policy: &Policy, id: &str, outputs: &[ProbeOutput]) -> (Verdict, Vec<String>) {
    let catalogue = Catalogue::built_in();
    let rules = catalogue.rules(policy).unwrap();
    let observation = (check(&catalogue, id).interpret)(&Params::new(), outputs);
    let judgement = classify(&rules, None::<&Profile>, &CheckId::new(id).unwrap(), &observation);
    let line =
        |finding: &doctor_core::finding::Finding| format!("{} {} {}", finding.reason, finding.severity, finding.entity);
    (judgement.verdict, judgement.findings.iter().map(line).collect())
}

fn gpus(fields: &[(&str, FieldValue)]) -> ProbeOutput {
    let fields = fields.iter().map(|(name, reading)| ((*name).to_owned(), reading.clone())).collect();
    ProbeOutput::Gpus(GpuQueryResult {
        on_pci: vec!["0000:18:00.0".into()],
        driver: Ok(Driver { version: "570.124.06".into(), cuda: None, source: "nvml".into() }),
        gpus: vec![Gpu { index: 0, bus: "0000:18:00.0".into(), fields }],
    })
}

/// The log of a machine with an uptime of forty days, with this record that many days ago, and one H100.
fn xid(record: &str, days_ago: u64) -> Vec<ProbeOutput> {
    let at = (40 - days_ago) * 86_400 - 60;
    let log = format!("6,1,0,-;Linux version 6.8.0\n4,2,{at}000000,-;NVRM: Xid (PCI:0000:18:00): {record}\n");
    let name = FieldValue::Text("NVIDIA H100 80GB HBM3".into());
    vec![
        ProbeOutput::Text(log),
        ProbeOutput::Text("3456000.00 9.00\n".into()),
        ProbeOutput::Text("0e2b6d54-7f3a-4a56-9d43-0f4f4d5d1c11\n".into()),
        gpus(&[("name", name), ("mig.mode.current", FieldValue::Number(0.0))]),
        ProbeOutput::Text("nvidia_uvm 1540096 4 - Live 0x0\nnvidia 9715712 80 nvidia_uvm, Live 0x0\n".into()),
    ]
}

const REMAP: [(&str, FieldValue); 4] = [
    ("remapped_rows.correctable", FieldValue::Number(0.0)),
    ("remapped_rows.uncorrectable", FieldValue::Number(0.0)),
    ("remapped_rows.pending", FieldValue::Number(1.0)),
    ("remapped_rows.failure", FieldValue::Number(0.0)),
];

#[test]
fn no_check_is_killed_by_the_limit_of_another() {
    for check in Catalogue::built_in().iter() {
        let longest = (check.probes)(&Params::new()).iter().fold(Span::ZERO, |sum, probe| match probe {
            Probe::Exec { timeout, .. } | Probe::Builtin { timeout, .. } => sum + *timeout,
            // Of the many named devices, only those that exist are queried; each query is short.
            Probe::ExecIfExists { timeout, .. } => sum.max(*timeout),
            _ => sum,
        });
        assert!(longest <= check.spec.limit, "{} may take {longest}, and has {}", check.spec.id, check.spec.limit);
    }
}

#[test]
fn an_xid_of_last_month_does_not_fail_today() {
    let record = "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.";
    assert_eq!(judged(&Policy::built_in(), "gpu-xid", &xid(record, 0)).0, Verdict::Fail);
    assert_eq!(judged(&Policy::built_in(), "gpu-xid", &xid(record, 30)).0, Verdict::Pass);
}

#[test]
fn without_a_machine_type_no_count_passes() {
    let ports = ProbeOutput::Files(Vec::new());
    for (id, outputs) in [
        ("gpu-count", vec![gpus(&[("uuid", FieldValue::Text("GPU-0".into()))])]),
        ("nvme-count", vec![ProbeOutput::Names(vec!["nvme0".into()])]),
        ("efa-count", vec![ports, ProbeOutput::Text("864000.00 1.00\n".into())]),
    ] {
        let (verdict, _) = judged(&Policy::built_in(), id, &outputs);
        assert!(matches!(verdict, Verdict::Inconclusive | Verdict::NotApplicable), "{id}: {verdict}");
    }
}

#[test]
fn xids_94_and_95_are_found_and_each_has_its_own_code() {
    for (record, finding) in [
        ("94, pid=1, Contained: HBM", "xid-94 monitor gpu:0000:18:00.0"),
        ("95, pid=1, Uncontained: HBM", "xid-95 reset gpu:0000:18:00.0"),
        ("79, pid=1, GPU has fallen off the bus.", "xid-79 reboot gpu:0000:18:00.0"),
    ] {
        assert_eq!(judged(&Policy::built_in(), "gpu-xid", &xid(record, 0)).1, [finding], "{record}");
    }
}

#[test]
fn fields_are_read_by_name_and_not_by_place() {
    let mut reversed = REMAP;
    reversed.reverse();
    let standard = Policy::built_in();
    let findings = judged(&standard, "gpu-row-remap", &[gpus(&REMAP)]);
    assert_eq!(findings, judged(&standard, "gpu-row-remap", &[gpus(&reversed)]));
    // A missing value is not taken from a neighbour.
    assert_eq!(judged(&standard, "gpu-row-remap", &[gpus(&REMAP[..2])]).0, Verdict::Inconclusive);
}

#[test]
fn no_check_changes_what_it_looks_at() {
    let mut programs = BTreeSet::new();
    for check in Catalogue::built_in().iter().filter(|check| !check.spec.opt_in) {
        for probe in (check.probes)(&Params::new()) {
            if let Probe::Exec { program, args, .. } | Probe::ExecIfExists { program, args, .. } = probe {
                programs.insert(format!("{program} {}", args.first().cloned().unwrap_or_default()));
            }
        }
    }
    // Only programs that do nothing but read may be added here.
    assert_eq!(programs, BTreeSet::from(["nvme smart-log".to_owned()]));
}

#[test]
fn an_error_that_no_table_knows_is_not_healthy() {
    let watch = "watched 0x1d3\ngpu 0 0000:18:00.0\nincident 1 0 0x10 20 9999 something new\n";
    let (verdict, findings) = judged(&Policy::built_in(), "dcgm-health", &[ProbeOutput::Text(watch.into())]);
    assert_eq!((verdict, findings), (Verdict::Fail, vec!["dcgm-unrated reboot gpu:0000:18:00.0".to_owned()]));
    let (verdict, _) = judged(&Policy::built_in(), "gpu-xid", &xid("999, pid=1, something new", 0));
    assert_eq!(verdict, Verdict::Fail);
}

#[test]
fn a_thermal_violation_of_dcgm_is_worth_watching_and_no_more() {
    for number in [10, 40, 41, 42] {
        let row = tables::dcgm_error(number).unwrap();
        assert_eq!(row.severity, Some(Severity::Monitor), "{}", row.name);
    }
}

#[test]
fn a_site_rates_an_xid_as_it_wants() {
    let record = "79, pid=1, GPU has fallen off the bus.";
    let site = "[[rules]]\nid = \"gpu-xid-79\"\ncheck = \"gpu-xid\"\nevent = \"xid-79\"\nreason = \"xid-79\"\n\
                severity = \"monitor\"\ntext = \"{value}\"\n";
    let site = Policy::with_site_settings(site).unwrap();
    assert_eq!(judged(&site, "gpu-xid", &xid(record, 0)).1, ["xid-79 monitor gpu:0000:18:00.0"]);
}

/// One row of the page.
struct Row {
    /// The system, or the number of the complaint.
    of: String,
    defect: String,
    /// Files and the tests in them. Empty: the part that has the defect comes with an issue.
    tests: Vec<(String, String)>,
}

#[expect(clippy::disallowed_methods, reason = "the page and the tests that it names are in the tree")]
fn read(file: &str) -> Option<String> {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file)).ok()
}

fn page() -> Vec<Row> {
    let page = read("docs/reference/regressions.md").unwrap();
    let rows: Vec<Row> = page.lines().filter(|line| line.starts_with("| ")).skip(1).map(row).collect();
    assert!(rows.len() > 50, "{} rows were read", rows.len());
    rows
}

/// Parses `| of | defect | [test](../../file), [test](../../file) |`, or `comes with issue 5` in the last column.
fn row(line: &str) -> Row {
    let line = line.replace("\\|", "/");
    let [_, of, defect, answer, _] = line.split('|').map(str::trim).collect::<Vec<_>>()[..] else {
        panic!("a row has three columns: {line}")
    };
    let tests = match answer.strip_prefix("comes with issue ") {
        Some(issue) => {
            assert!((4..=8).contains(&issue.parse::<u8>().unwrap()), "{line}");
            Vec::new()
        }
        None => answer.split(", ").map(|link| test_of(link).unwrap_or_else(|| panic!("{link}: {line}"))).collect(),
    };
    Row { of: of.to_owned(), defect: defect.to_owned(), tests }
}

fn test_of(link: &str) -> Option<(String, String)> {
    let (name, file) = link.strip_prefix('[')?.strip_suffix(')')?.split_once("](../../")?;
    Some((file.to_owned(), name.to_owned()))
}

#[test]
fn every_test_of_the_list_is_there() {
    let tests = page().into_iter().flat_map(|row| row.tests);
    let is_missing =
        |(file, name): &(String, String)| read(file).is_none_or(|text| !text.contains(&format!("fn {name}(")));
    let missing: Vec<String> = tests.filter(is_missing).map(|(file, name)| format!("{file}: {name}")).collect();
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn no_complaint_that_concerns_us_is_left_out() {
    let rows = page();
    for complaint in [2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 17, 20, 21, 24] {
        assert!(rows.iter().any(|row| row.of == complaint.to_string()), "row {complaint}");
    }
    let aws = |n: usize| rows.iter().any(|row| row.defect.starts_with(&format!("{n}: ")));
    assert!((1..=12).all(aws), "the twelve of AWS");
}
