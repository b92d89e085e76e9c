//! The output of nvidia-smi, which includes process names chosen by users.
//!
//! Every requested field has a reading for every GPU, and no reading is an invalid number.

#![no_main]

use doctor_checks::{gpu::FieldValue, nvidia_smi};
use libfuzzer_sys::fuzz_target;

const FIELDS: [&str; 5] = [
    "memory.total",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.active",
    "mig.mode.current",
    "name",
];

fuzz_target!(|text: &str| {
    let mut fields: Vec<String> = FIELDS.iter().map(|&field| field.to_owned()).collect();
    fields.push("process.*.pid".to_owned());
    let Ok(answer) = nvidia_smi::parse_query(text, &fields, Vec::new()) else { return };
    for gpu in &answer.gpus {
        assert!(FIELDS.iter().all(|field| gpu.get(field).is_some()), "a field has no answer");
        for (name, reading) in &gpu.fields {
            if let FieldValue::Number(value) = reading {
                assert!(value.is_finite(), "{name} is {value}");
            }
        }
    }
});
