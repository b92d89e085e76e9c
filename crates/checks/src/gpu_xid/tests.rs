//! Tests with records made by hand in the formats of drivers R550 to R575.

use super::*;
use crate::{
    gpu::{
        FieldValue,
        tests::{answer, n, none},
    },
    classify_fixture::classify_outputs,
    kmsg::tests::{BOOT, at_seconds, logged},
};
use doctor_core::observation::{FailureKind, ProbeFailure};
use proptest::prelude::*;

const GPU: &str = "gpu:0000:18:00.0";
const MODULES: &str = "nvidia_uvm 1540096 4 - Live 0x0\nnvidia 9715712 80 nvidia_uvm, Live 0x0\n";

fn named(name: &str, mig: f64) -> ProbeOutput {
    let fields = [("name", FieldValue::Text(name.to_owned())), ("mig.mode.current", n(mig))];
    answer(&[&fields, &fields])
}

fn with(mut log: Vec<ProbeOutput>, gpus: ProbeOutput, modules: &str) -> Vec<ProbeOutput> {
    log.extend([gpus, ProbeOutput::Text(modules.to_owned())]);
    log
}

/// Records `number, words` on one H100, a second apart.
fn check(lines: &[&str]) -> Vec<String> {
    on(named("NVIDIA H100 80GB HBM3", 0.0), lines)
}

fn on(gpus: ProbeOutput, lines: &[&str]) -> Vec<String> {
    let lines: Vec<String> = lines.iter().map(|line| written(line)).collect();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    classify_outputs(&CHECK, &with(logged(&lines), gpus, MODULES))
}

/// Expands a line that starts with a number to an Xid of the first GPU.
fn written(line: &str) -> String {
    let begins = line.starts_with(|c: char| c.is_ascii_digit());
    if begins { format!("NVRM: Xid (PCI:0000:18:00): {line}") } else { line.to_owned() }
}

fn fails(finding: &str) -> Vec<String> {
    vec![format!("fail {finding} {GPU}")]
}

const PASS: [&str; 1] = ["pass within-limits"];

fn asks(to: &str) -> String {
    format!("154, GPU recovery action changed from 0x0 (None) to {to}")
}

#[test]
fn each_xid_has_the_severity_of_its_row_and_a_quiet_log_passes() {
    assert_eq!(check(&[]), PASS);
    for (line, finding) in [
        ("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "xid-79 reboot"),
        ("48, pid=1, DBE (double bit error) ECC Error", "xid-48 reset"),
        ("54, ", "xid-54 isolate"),
        ("62, pid=1", "xid-62 reset"),
        ("63, pid=1, Row Remapper: New row marked for remapping", "xid-63 monitor"),
        ("92, ", "xid-92 monitor"),
        ("94, pid=1, Contained: SM", "xid-94 monitor"),
        ("109, pid=1", "xid-109 reset"),
        ("119, pid=1, Timeout after 6s of waiting for RPC response from GSP", "xid-119 reset"),
        ("151, ", "xid-151 reboot"),
        ("20, ", "xid-20 monitor"),
        ("173, something newer than the table", "xid-other monitor"),
        ("999, something new", "xid-other monitor"),
    ] {
        assert_eq!(check(&[line]), fails(finding), "{line}");
    }
}

#[test]
fn an_xid_of_an_application_is_no_fault_of_the_node() {
    for line in
        ["13, pid=1, Graphics Exception", "31, pid=1, MMU Fault", "43, pid=1", "45, pid=1", "69, pid=1", "68, x"]
    {
        assert_eq!(check(&[line]), PASS, "{line}");
    }
    assert_eq!(check(&["31, pid=1"; 500]), PASS, "a burst of one program is one error");
}

#[test]
fn consequences_of_an_xid_are_not_reported_separately() {
    assert_eq!(check(&["119, pid=1", "45, pid=1", "43, pid=2"]), fails("xid-119 reset"));
    let after = ["79, GPU has fallen off the bus.", "119, ", "48, ", &asks("0x2 (Node Reboot Required)"), "79, again"];
    assert_eq!(check(&after), fails("xid-79 reboot"));
    assert_eq!(check(&["48, ", "79, "]), [fails("xid-79 reboot"), fails("xid-48 reset")].concat());
}

#[test]
fn the_drivers_recovery_action_overrides_the_table() {
    let reset = asks("0x1 (GPU Reset Required)");
    assert_eq!(check(&["94, contained", &reset]), fails("xid-154-reset reset"));
    assert_eq!(check(&["48, ", &reset]), fails("xid-48 reset"));
    assert_eq!(check(&["120, ", &asks("0x2 (Node Reboot Required)")]), fails("xid-154-reboot reboot"));
    assert_eq!(check(&[&asks("0x3 (Drain P2P)")]), fails("xid-154-drain reset"));
    assert_eq!(check(&[&asks("0x4 (Drain and Reset)")]), fails("xid-154-reset reset"));
    // An Xid that 154 never follows is reported in addition to it.
    assert_eq!(check(&["54, ", &reset]), [fails("xid-54 isolate"), fails("xid-154-reset reset")].concat());
    // An unknown verdict does not override the table.
    assert_eq!(check(&["120, ", &asks("0x9 (New)")]), fails("xid-120 reset"));
    assert_eq!(check(&[&asks("0x9 (New)")]), fails("xid-other monitor"));
    // An Xid 154 of another GPU does not apply to this one.
    let other = reset.replace("154", "NVRM: Xid (PCI:0000:19:00): 154");
    let lines = ["94, contained", &other];
    assert_eq!(check(&lines), ["fail xid-154-reset reset gpu:0000:19:00.0", "fail xid-94 monitor gpu:0000:18:00.0"]);
}

#[test]
fn a_gpu_that_the_driver_reports_recovered_is_not_reported_again() {
    let back = "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)";
    let reset = asks("0x1 (GPU Reset Required)");
    assert_eq!(check(&["48, ", &reset, back]), PASS);
    assert_eq!(check(&["94, ", &reset, back]), PASS);
    assert_eq!(check(&["48, ", &reset, back, "48, "]), fails("xid-48 reset"));
    assert_eq!(check(&["54, ", back]), fails("xid-54 isolate"), "a reset does not connect a cable");
}

#[test]
fn one_memory_fault_is_one_finding() {
    assert_eq!(check(&["48, ", "63, ", "94, ", "45, "]), fails("xid-48 reset"));
    assert_eq!(check(&["63, ", "48, ", "171, "]), fails("xid-48 reset"));
    assert_eq!(check(&["48, ", "95, "]), fails("xid-48 reset"));
    assert_eq!(check(&["63, ", "94, "]).len(), 1);
    // On an A100 the failed row remapping is worse than the error itself.
    let a100 = || named("NVIDIA A100-SXM4-80GB", 0.0);
    assert_eq!(on(a100(), &["48, ", "64, "]), fails("xid-64-reboot reboot"));
    // An hour apart they are two faults.
    let lines = [(800_000, written("48, ")), (803_600, written("63, "))];
    let lines: Vec<(u64, &str)> = lines.iter().map(|(at, line)| (*at, line.as_str())).collect();
    let two = classify_outputs(&CHECK, &with(at_seconds(&lines), named("NVIDIA H200", 0.0), MODULES));
    assert_eq!(two, [fails("xid-48 reset"), fails("xid-63 monitor")].concat());
}

#[test]
fn an_a100_is_rebooted_and_one_with_mig_is_reset() {
    let a100 = |mig| named("NVIDIA A100-SXM4-40GB", mig);
    assert_eq!(on(a100(0.0), &["95, "]), fails("xid-95-reboot reboot"));
    assert_eq!(on(a100(1.0), &["95, "]), fails("xid-95 reset"));
    assert_eq!(on(a100(0.0), &["64, "]), fails("xid-64-reboot reboot"));
    assert_eq!(on(a100(1.0), &["64, "]), fails("xid-64-reboot reboot"));
    assert_eq!(check(&["95, "]), fails("xid-95 reset"));
    assert_eq!(check(&["64, "]), fails("xid-64 reset"));
    let unknown = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::TimedOut, "the driver hangs"));
    assert_eq!(on(unknown(), &["95, "]), fails("xid-95-reboot reboot"));
    assert_eq!(on(unknown(), &["64, "]), fails("xid-64-reboot reboot"));
}

#[test]
fn a_switch_fault_is_not_reported_for_eight_gpus() {
    let link = "74, pid=1, NVLink: fatal error detected on link 4(0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)";
    let all: Vec<String> = (0..8).map(|gpu| written(link).replace("0000:18", &format!("0000:1{gpu}"))).collect();
    let mut lines: Vec<&str> = all.iter().map(String::as_str).collect();
    assert_eq!(check(&lines).len(), 8);
    let fatal = "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 11013, Fatal, Link 46 ingress header DBE";
    lines.insert(0, fatal);
    assert_eq!(check(&lines), PASS);
    lines[0] = "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 11012, Non-fatal, Link 46 single bit ECC";
    assert_eq!(check(&lines).len(), 8, "a corrected error breaks no link");
    // An hour later the GPU's link fails by itself.
    let lines = [(800_000, fatal), (803_600, all[0].as_str())];
    let later = classify_outputs(&CHECK, &with(at_seconds(&lines), named("NVIDIA H200", 0.0), MODULES));
    assert_eq!(later, ["fail xid-74 reset gpu:0000:10:00.0"]);
}

#[test]
fn nvlink_faults_are_classified_by_their_registers() {
    let link =
        |first: &str| format!("74, NVLink: fatal error detected on link 4({first}, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)");
    assert_eq!(check(&[&link("0x10000")]), fails("xid-74 reset"));
    assert_eq!(check(&[&link("0x1")]), fails("xid-74-minor monitor"));
    let b200 = || named("NVIDIA B200", 0.0);
    let down = "149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x0000000a)";
    assert_eq!(on(b200(), &[down]), fails("xid-149 reset"));
    let ber = "149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 08 (0x00000226 0x00000001 0x0)";
    assert_eq!(on(b200(), &[ber]), fails("xid-149-minor monitor"));
    let nothing = "144, SAW_MVB Nonfatal XC0 i0 Link -1 (0x00000021 0x00000004 0x0)";
    assert_eq!(on(b200(), &[nothing]), PASS);
    let program = "145, RLW_REMAP Nonfatal XC1 i0 Link 03 (0x00000004 0x00000001 0x0)";
    assert_eq!(on(b200(), &[program]), PASS);
    assert_eq!(on(b200(), &[program, &asks("0x1 (GPU Reset Required)")]), fails("xid-154-reset reset"));
}

#[test]
fn xid_159_counts_only_where_unified_memory_is_used() {
    let lines = || logged(&["NVRM: Xid (PCI:0000:18:00): 159, CHI Non-Data Error"]);
    let gpus = || named("NVIDIA GB200", 0.0);
    assert_eq!(classify_outputs(&CHECK, &with(lines(), gpus(), MODULES)), fails("xid-159 reset"));
    assert_eq!(classify_outputs(&CHECK, &with(lines(), gpus(), "nvidia 9715712 80 - Live 0x0\n")), PASS);
    let mut unread = lines();
    unread.extend([gpus(), ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "/proc/modules"))]);
    assert_eq!(classify_outputs(&CHECK, &unread), fails("xid-159 reset"));
}

#[test]
fn recovered_power_smoothing_is_no_finding() {
    assert_eq!(check(&["163, "]), fails("xid-163 monitor"));
    assert_eq!(check(&["163, ", "162, "]), PASS);
    assert_eq!(check(&["162, ", "163, "]), fails("xid-163 monitor"));
}

#[test]
fn repeated_exceptions_of_one_tpc_are_reported() {
    let gpus = || named("NVIDIA H100 80GB HBM3", 0.0);
    let at =
        |tpc: u32| written(&format!("13, pid=1, Graphics SM Warp Exception on (GPC 4, TPC {tpc}, SM 1): Out Of Range"));
    let times = |apart: u64, lines: &[String]| {
        let lines: Vec<(u64, &str)> =
            lines.iter().enumerate().map(|(k, line)| (800_000 + k as u64 * apart, line.as_str())).collect();
        classify_outputs(&CHECK, &with(at_seconds(&lines), gpus(), MODULES))
    };
    assert_eq!(times(600, &[at(0), at(0), at(0)]), fails("xid-13-repeated monitor"));
    assert_eq!(times(600, &[at(0), at(0)]), PASS);
    assert_eq!(times(600, &[at(0), at(1), at(2), at(3)]), PASS, "an error of the program changes place");
    assert_eq!(times(60, &[at(0), at(0), at(0)]), PASS, "one burst");
    let fault = written("31, pid=1, MMU Fault: ENGINE GRAPHICS GPC3 GPCCLIENT_T1_0 faulted @ 0x7f42");
    assert_eq!(times(600, &vec![fault.clone(); 5]), fails("xid-31-repeated monitor"));
    assert_eq!(times(600, &vec![fault.clone(); 4]), PASS);
    let elsewhere = fault.replace("0000:18", "0000:19");
    assert_eq!(times(600, &[vec![fault; 5], vec![elsewhere]].concat()), PASS, "on two GPUs it is the program");
}

#[test]
fn an_old_xid_does_not_fail_a_node_for_ever() {
    let old =
        with(at_seconds(&[(1, "NVRM: Xid (PCI:0000:18:00): 79, off the bus")]), named("NVIDIA H100", 0.0), MODULES);
    assert_eq!(classify_outputs(&CHECK, &old), PASS);
}

#[test]
fn a_flood_is_one_event_with_a_key() {
    let lines = vec!["NVRM: Xid (PCI:0000:18:00): 119, pid=1"; 400];
    let outputs = with(logged(&lines), named("NVIDIA H100", 0.0), MODULES);
    let Observation::Measured { events, .. } = interpret(&Params::new(), &outputs) else { panic!("measured") };
    assert_eq!(events.len(), 1);
    assert!(events[0].text.contains("400 times"), "{}", events[0].text);
    assert_eq!(events[0].key, Some(format!("{BOOT}:499")));
}

#[test]
fn not_applicable_without_a_gpu_unless_the_log_has_records() {
    assert_eq!(on(none(), &[]), ["not-applicable no-gpu"]);
    assert_eq!(on(none(), &["79, GPU has fallen off the bus."]), fails("xid-79 reboot"));
    let denied = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "/dev/kmsg"));
    let without_log = |gpus| {
        let mut outputs = logged(&[]);
        outputs[0] = denied();
        classify_outputs(&CHECK, &with(outputs, gpus, MODULES))
    };
    assert_eq!(without_log(none()), ["not-applicable no-gpu"]);
    assert_eq!(without_log(named("NVIDIA H100", 0.0)), ["inconclusive denied"]);
}

#[test]
fn a_driver_that_does_not_answer_hides_no_record() {
    let hangs = ProbeOutput::Failed(ProbeFailure::new(FailureKind::TimedOut, "NVML"));
    assert_eq!(on(hangs.clone(), &["119, pid=1"]), fails("xid-119 reset"));
    assert_eq!(on(hangs, &[]), PASS);
}

proptest! {
    #[test]
    fn whatever_the_log_says_it_does_not_panic_and_every_event_has_a_rule(
        lines in proptest::collection::vec(("1[5-9]", 1_u16..200, "(Fatal|Nonfatal|.{0,10}) [(]?(0x[0-9a-f]{1,8} ){0,7}[)]?"), 0..12),
    ) {
        let lines: Vec<String> =
            lines.iter().map(|(bus, n, rest)| format!("NVRM: Xid (PCI:0000:{bus}:00): {n}, {rest}")).collect();
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let outputs = with(logged(&lines), named("NVIDIA H100", 0.0), MODULES);
        let Observation::Measured { events, .. } = interpret(&Params::new(), &outputs) else { panic!("measured") };
        for event in events {
            prop_assert!(CHECK.rules.contains(&format!("event = \"{}\"", event.code)), "{}", event.code);
        }
    }
}
