//! Kernel log events, from the node's evidence to the finding, and what clears them: requalification, an operator, or a
//! reboot where a reboot is the remedy. Never silence, and never twice.

use doctor_checks::{
    Catalogue,
    document::{AgentReport, Document, RunKey, Schema, TestEvidence, Versions},
    probe::ProbeOutput,
};
use doctor_core::{
    finding::Verdict, ids::CheckId, lifecycle::NodeState, node::Hardware, observation::AcknowledgedEvents,
    plan::Action, policy::Policy, profile::Profiles, reason::WithReason, run::Purpose, snapshot::CommandKind,
    time::Span,
};
use doctor_engine::{
    result_validation::{self, KnownNode},
    settings::Settings,
};
use doctor_store::records::Accepted;

use crate::{
    bed::{StoreTestbed, node},
    cases::open_case,
    suite,
};

suite!(
    an_old_event_neither_keeps_a_proved_node_out_nor_brings_it_back_and_a_new_one_does,
    a_log_that_was_rotated_heals_no_node_and_a_boot_does_where_it_is_the_cure,
    an_operator_who_releases_a_node_ends_its_old_events,
);

const BOOT: &str = "0e2b6d54-7f3a-4a56-9d43-0f4f4d5d1c11";
const NEXT_BOOT: &str = "11111111-7f3a-4a56-9d43-0f4f4d5d1c11";
const QUIET: &str = "6,1,0,-;Linux version 6.8.0";
/// Remedied by a reboot.
const MACHINE_CHECK: &str = "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 7: be00000000800400";

fn settings() -> Settings {
    Settings::new(Policy::built_in(), Catalogue::built_in(), Profiles::default()).unwrap()
}

/// The kernel-log check's evidence for a log with these records.
fn evidence(settings: &Settings, boot: &str, records: &[(u64, &str)], bed: &StoreTestbed) -> TestEvidence {
    let id = CheckId::new("kernel-log").unwrap();
    let mut log = format!("{QUIET}\n");
    for (sequence, text) in records {
        log.push_str(&format!("3,{sequence},863990000000,-;{text}\n"));
    }
    let probes = (settings.catalogue.get(&id).unwrap().probes)(&Default::default());
    let outputs = [log, "864000.00 9.00\n".to_owned(), format!("{boot}\n")].map(ProbeOutput::Text);
    assert_eq!(probes.len(), outputs.len());
    TestEvidence { test: id, started: bed.now, ended: bed.now, probes: probes.into_iter().zip(outputs).collect() }
}

fn hardware(boot: &str) -> Hardware {
    Hardware { board_serial: Some("SN-n1".to_owned()), boot_id: Some(boot.to_owned()), ..Hardware::default() }
}

fn acknowledged(bed: &StoreTestbed) -> Vec<AcknowledgedEvents> {
    bed.store.acknowledged_events().unwrap().remove(&node("n1")).unwrap_or_default()
}

/// Lets the agent of `n1` report these records; returns the open findings.
fn report_events(bed: &mut StoreTestbed, boot: &str, records: &[(u64, &str)]) -> Vec<String> {
    let (settings, key) = (settings(), RunKey::new([9; 32]));
    bed.wait(Span::minutes(5));
    let versions = Versions { program: String::new(), schema: Schema::CURRENT, policy: 1, queued: 0 };
    let number = u64::try_from(bed.now.millis()).unwrap();
    let report = AgentReport {
        hardware: hardware(boot),
        checks: vec![evidence(&settings, boot, records, bed)],
        ..AgentReport::heartbeat(node("n1"), number, bed.now, versions)
    };
    let acknowledged = acknowledged(bed);
    let known = KnownNode { acknowledged: &acknowledged, ..KnownNode::default() };
    let (name, bytes) = (node("n1"), report.sign(&key).unwrap());
    let message = (&name, &key, bytes.as_slice());
    let mut baselines = result_validation::without_baselines;
    let findings = result_validation::open_report(&settings, known, message, bed.now, &mut baselines).unwrap();
    assert_eq!(bed.store.accept_agent(&bed.lease, &findings).unwrap(), Accepted::Stored);
    open(bed)
}

fn open(bed: &StoreTestbed) -> Vec<String> {
    let stored = bed.store.load_nodes().unwrap().remove(&node("n1")).unwrap();
    stored.findings.iter().map(|open| open.finding.reason.to_string()).collect()
}

/// Requalifies `n1` with these records; returns the verdict.
fn requalify(bed: &mut StoreTestbed, case: doctor_core::ids::CaseId, boot: &str, records: &[(u64, &str)]) -> Verdict {
    let settings = settings();
    let mut run = bed.run_on(&["n1"], &["kernel-log"]);
    run.purpose = WithReason::new(Purpose::Requalification, "proof", "prove it");
    run.case = Some(case);
    let id = run.id;
    bed.commit(&[WithReason::new(Action::Submit(run), "proof", "prove it")]);
    bed.wait(Span::minutes(2));
    let stored = bed.store.active_runs().unwrap().remove(0);
    let document = Document {
        uptime: None,
        machine: None,
        run: id,
        node: node("n1"),
        hardware: hardware(boot),
        started: bed.now,
        ended: bed.now,
        tests: vec![evidence(&settings, boot, records, bed)],
    };
    let bytes = document.sign(&stored.key).unwrap();
    let acknowledged = acknowledged(bed);
    let result = result_validation::open_document(
        &settings,
        &stored,
        bytes,
        bed.now,
        |_| KnownNode { acknowledged: &acknowledged, ..KnownNode::default() },
        &mut result_validation::without_baselines,
    )
    .unwrap();
    let verdict = result.outcomes[0].verdict;
    assert_eq!(bed.accept(&[result]), [Accepted::Stored]);
    verdict
}

fn an_old_event_neither_keeps_a_proved_node_out_nor_brings_it_back_and_a_new_one_does(bed: &mut StoreTestbed) {
    assert_eq!(report_events(bed, BOOT, &[(500, MACHINE_CHECK)]), ["machine-check"]);
    let case = open_case(bed, "n1");
    // It was repaired without a reboot: the log still contains the record.
    assert_eq!(requalify(bed, case.id, BOOT, &[(500, MACHINE_CHECK)]), Verdict::Pass);
    assert_eq!(open(bed), Vec::<String>::new());
    // The agent reports it again, even after its own restart.
    for _ in 0..3 {
        assert_eq!(report_events(bed, BOOT, &[(500, MACHINE_CHECK)]), Vec::<String>::new());
    }
    assert_eq!(report_events(bed, BOOT, &[(500, MACHINE_CHECK), (731, MACHINE_CHECK)]), ["machine-check"], "a new one");
    let case = open_case(bed, "n1");
    assert_eq!(
        requalify(bed, case.id, BOOT, &[(731, MACHINE_CHECK), (732, MACHINE_CHECK)]),
        Verdict::Fail,
        "during it"
    );
    bed.assert_sound();
}

fn a_log_that_was_rotated_heals_no_node_and_a_boot_does_where_it_is_the_cure(bed: &mut StoreTestbed) {
    assert_eq!(report_events(bed, BOOT, &[(500, MACHINE_CHECK)]), ["machine-check"]);
    assert_eq!(
        report_events(bed, BOOT, &[]),
        ["machine-check"],
        "the event has left the log, and the node is unchanged"
    );
    assert_eq!(report_events(bed, NEXT_BOOT, &[]), Vec::<String>::new());
}

fn an_operator_who_releases_a_node_ends_its_old_events(bed: &mut StoreTestbed) {
    assert_eq!(report_events(bed, BOOT, &[(500, MACHINE_CHECK)]), ["machine-check"]);
    let stored = bed.store.load_nodes().unwrap().remove(&node("n1")).unwrap();
    assert_eq!((stored.state, stored.case), (NodeState::InService, None), "no case was opened");
    let request =
        bed.store.add_command(&CommandKind::Release { node: node("n1") }, "ann", "repaired", bed.now).unwrap();
    bed.commit(&[WithReason::new(Action::CompleteCommand { command: request }, "operator", "requested by ann")]);
    assert_eq!(open(bed), Vec::<String>::new());
    assert_eq!(report_events(bed, BOOT, &[(500, MACHINE_CHECK)]), Vec::<String>::new());
    assert_eq!(report_events(bed, BOOT, &[(501, MACHINE_CHECK)]), ["machine-check"]);
}
