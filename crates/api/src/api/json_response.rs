//! JSON response bodies.

use doctor_engine::scrub::{harmless, scrub_json};
use serde::Serialize;
use serde_json::Value;

use super::refusal::Refusal;
use crate::response::Made;

impl Made {
    pub(super) fn json(value: &impl Serialize) -> Result<Self, Refusal> {
        let bytes = serde_json::to_vec(value).map_err(|error| {
            tracing::error!(%error, "cannot serialise a response");
            Refusal::Store
        })?;
        Ok(Self { bytes, kind: "application/json", file: None })
    }

    /// Serialises text from nodes, which is untrusted: redacts secrets and removes control characters.
    pub(super) fn told_by_nodes(value: &impl Serialize) -> Result<Self, Refusal> {
        let mut value = serde_json::to_value(value).map_err(|error| {
            tracing::error!(%error, "cannot serialise a response");
            Refusal::Store
        })?;
        scrub_json(&mut value);
        make_harmless(&mut value);
        Self::json(&value)
    }
}

fn make_harmless(value: &mut Value) {
    match value {
        Value::String(text) if text.contains(char::is_control) => *text = harmless(text),
        Value::Array(items) => items.iter_mut().for_each(make_harmless),
        Value::Object(fields) => fields.values_mut().for_each(make_harmless),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_from_nodes_are_redacted_and_have_no_control_characters() {
        let told = serde_json::json!({ "text": "exit 1: token=hunter2 \u{1b}[2J", "times": 3 });
        let made = Made::told_by_nodes(&told).unwrap();
        let clean: Value = serde_json::from_slice(&made.bytes).unwrap();
        assert_eq!(clean, serde_json::json!({ "text": "exit 1: token=[removed] \u{fffd}[2J", "times": 3 }));
    }
}
