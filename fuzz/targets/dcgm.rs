//! `dcgmi diag -j` prints JSON of three forms, with text around it, and without `-j` a table.
//!
//! A measured observation is based on at least one result, and every event has a rule. A table has a line for each result.

#![no_main]

use doctor_checks::{
    dcgm_diag::{self, ExpectedResults},
    dcgm_text_output::DcgmTextOutput,
    probe::ProbeOutput,
};
use doctor_core::observation::Observation;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let table = DcgmTextOutput::parse(text);
    let results = table.passed + table.skipped + table.failed.len() + table.warned.len() + table.not_run.len();
    assert!(results <= text.lines().count());
    for exit in [Some(0), Some(226), None] {
        let ran = ProbeOutput::Ran { exit, stdout: text.to_owned(), stderr: String::new() };
        if let Observation::Measured { metrics, events, .. } =
            dcgm_diag::interpret(Some(&ran), &[], ExpectedResults::default())
        {
            let results: f64 = metrics.iter().filter(|m| m.name != "dcgm_results_skipped").map(|m| m.value).sum();
            assert!(results >= 1.0, "a diagnosis without a result is none");
            for event in events {
                let rule = format!("event = \"{}\"", event.code);
                assert!(dcgm_diag::RULES.contains(&rule), "{} has no rule", event.code);
            }
        }
    }
});
