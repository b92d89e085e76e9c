//! A site's own tests print measurements in our format, from programs that are not ours.
//!
//! A measured observation contains something, contains only finite numbers, and can be classified.

#![no_main]

use doctor_checks::{Params, interpret_measurements, probe::ProbeOutput};
use doctor_core::observation::Observation;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let ran = ProbeOutput::Ran { exit: Some(0), stdout: text.to_owned(), stderr: String::new() };
    if let Observation::Measured { metrics, events, .. } = interpret_measurements(&Params::new(), &[ran]) {
        assert!(!metrics.is_empty() || !events.is_empty());
        assert!(metrics.iter().all(|metric| metric.value.is_finite()));
    }
    // A program that failed has measured nothing, whatever it printed.
    let failed = ProbeOutput::Ran { exit: Some(1), stdout: text.to_owned(), stderr: text.to_owned() };
    assert!(matches!(interpret_measurements(&Params::new(), &[failed]), Observation::Failed(_)));
});
