//! The output of NHC and AzNHC, including that of a site's own checks.
//!
//! A failed run is never parsed as one without a fault, and every event has a rule.

#![no_main]

use doctor_checks::{nhc, probe::ProbeOutput};
use doctor_core::observation::Observation;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for exit in [Some(0), Some(1), None] {
        let ran = ProbeOutput::Ran { exit, stdout: text.to_owned(), stderr: String::new() };
        if let Observation::Measured { events, .. } = nhc::interpret(Some(&ran)) {
            assert!(exit == Some(0) || !events.is_empty(), "it failed and nothing is told");
            for event in events {
                let known = nhc::FAULTS.iter().any(|(number, _)| event.code.as_str() == format!("nhc-{number}"));
                assert!(known || event.code.as_str() == "nhc-failed", "{} is no fault of NHC's", event.code);
            }
        }
    }
});
