//! Silence is never health: no check passes, or reports that it is not applicable, because it was denied access. And no
//! check panics, whatever a machine answers.

use doctor_checks::{
    Catalogue, Check, Params,
    gpu::{Driver, FieldValue, Gpu, GpuQueryResult},
    probe::{FileText, Probe, ProbeOutput, Process, Sample},
};
use doctor_core::{
    classify::classify,
    finding::Verdict,
    ids::CheckId,
    observation::{FailureKind, ProbeFailure},
    policy::Policy,
    time::{Span, Timestamp},
};
use proptest::prelude::*;

fn denied() -> ProbeFailure {
    ProbeFailure::new(FailureKind::Denied, "permission denied")
}

/// Returns the verdict and reason under the default rules.
fn judged(check: &Check, outputs: &[ProbeOutput]) -> (Verdict, String) {
    let rules = Catalogue::new([*check]).rules(&Policy::built_in()).unwrap();
    let id = CheckId::new(check.spec.id).unwrap();
    let judgement = classify(&rules, None, &id, &(check.interpret)(&Params::new(), outputs));
    (judgement.verdict, judgement.reason.to_string())
}

/// Returns a path that matches a pattern.
fn path_of(pattern: &str) -> String {
    pattern.replace('*', "0")
}

fn answers(check: &Check, answer: impl Fn(&Probe) -> ProbeOutput) -> Vec<ProbeOutput> {
    (check.probes)(&Params::new()).iter().map(answer).collect()
}

/// Files exist and cannot be read; everything else is denied.
fn nothing_may_be_read(probe: &Probe) -> ProbeOutput {
    let unread = |pattern: &str| FileText { path: path_of(pattern), text: Err(denied()) };
    match probe {
        Probe::Glob { pattern } | Probe::Bytes { pattern, .. } => ProbeOutput::Files(vec![unread(pattern)]),
        Probe::Sampled { pattern, .. } => ProbeOutput::Samples(vec![Sample {
            at: Timestamp::from_secs(1_794_700_800),
            uptime: Span::days(10),
            files: vec![unread(pattern)],
            removed: Vec::new(),
        }]),
        _ => ProbeOutput::Failed(denied()),
    }
}

#[test]
fn a_check_that_may_not_look_says_so() {
    let mut wrong = Vec::new();
    for check in Catalogue::built_in().iter() {
        let probes: [(&str, Vec<ProbeOutput>); 3] = [
            ("every probe is denied", answers(check, |_| ProbeOutput::Failed(denied()))),
            ("no file may be read", answers(check, nothing_may_be_read)),
            ("no answer at all", Vec::new()),
        ];
        for (how, outputs) in probes {
            let (verdict, reason) = judged(check, &outputs);
            // A check that the site did not configure does not run.
            let is_not_asked = verdict == Verdict::NotApplicable && reason == "not-configured";
            if verdict != Verdict::Inconclusive && !is_not_asked {
                wrong.push(format!("{}: {how}: {verdict} {reason}", check.spec.id));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn with_text(probe: &Probe, texts: &[String]) -> ProbeOutput {
    let text = |index: usize| texts[index % texts.len()].clone();
    let file = |pattern: &str, index| FileText { path: path_of(pattern), text: Ok(text(index)) };
    let sample = |pattern: &str, index: usize| Sample {
        at: Timestamp::from_secs(1_794_700_800 + 300 * i64::try_from(index).unwrap()),
        uptime: Span::minutes(5),
        files: vec![file(pattern, index)],
        removed: Vec::new(),
    };
    match probe {
        Probe::Read { .. } | Probe::Kmsg | Probe::ClockDiscipline | Probe::DcgmHealth { .. } => {
            ProbeOutput::Text(texts.concat())
        }
        Probe::List { .. } => ProbeOutput::Names(texts.to_vec()),
        Probe::Glob { pattern } | Probe::Bytes { pattern, .. } => ProbeOutput::Files(vec![file(pattern, 0)]),
        Probe::Links { pattern } => ProbeOutput::Links(vec![(path_of(pattern), text(0))]),
        Probe::Sampled { pattern, .. } => {
            ProbeOutput::Samples((0..texts.len()).map(|index| sample(pattern, index)).collect())
        }
        Probe::Processes => ProbeOutput::Processes(vec![Process {
            pid: 2,
            parent: 0,
            user: 0,
            name: text(0),
            state: text(0).chars().next().unwrap_or('D'),
            age: Span::hours(1),
            wchan: Some(text(1)),
        }]),
        Probe::Gpu { fields } => ProbeOutput::Gpus(GpuQueryResult {
            on_pci: vec![text(0)],
            driver: Ok(Driver { version: text(0), cuda: Some(text(1)), source: text(0) }),
            gpus: vec![Gpu {
                index: 0,
                bus: text(1),
                fields: fields.iter().map(|name| (name.replace('*', "0"), FieldValue::Text(text(0)))).collect(),
            }],
        }),
        Probe::Exec { .. } | Probe::ExecIfExists { .. } => {
            ProbeOutput::Ran { exit: Some(0), stdout: text(0), stderr: text(1) }
        }
        Probe::StatFs { .. } | Probe::Builtin { .. } => ProbeOutput::Failed(denied()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn no_probe_output_makes_a_check_panic(
        texts in proptest::collection::vec("[ -~\n\t]{0,60}|[0-9.:/-]{0,12}|.{0,20}", 1..4),
    ) {
        for check in Catalogue::built_in().iter() {
            judged(check, &answers(check, |probe| with_text(probe, &texts)));
        }
    }
}
