//! Tests that run third-party software: a node on which it is not installed is not at fault.

use doctor_core::{
    observation::{CodedReason, FailureKind, Observation},
    software::Software,
};

/// Returns "not applicable" instead of the failure of a test whose software is not installed.
pub(crate) fn not_applicable_without(software: Software, observation: Observation) -> Observation {
    match observation {
        Observation::Failed(failure) if failure.kind == FailureKind::NotInstalled => {
            Observation::NotApplicable(CodedReason { code: software.reason(), text: failure.text })
        }
        other => other,
    }
}
