//! JSON response bodies.

use doctor_engine::redact::{redact_json, replace_control_chars};
use serde::Serialize;
use serde_json::Value;

use super::error::ApiError;
use crate::response::RawBody;

impl RawBody {
    pub(super) fn json(value: &impl Serialize) -> Result<Self, ApiError> {
        let bytes = serde_json::to_vec(value).map_err(|error| {
            tracing::error!(%error, "cannot serialise a response");
            ApiError::StoreUnavailable
        })?;
        Ok(Self { bytes, content_type: "application/json", file_name: None })
    }

    /// Serialises text from nodes, which is untrusted: redacts secrets and removes control characters.
    pub(super) fn json_redacted(value: &impl Serialize) -> Result<Self, ApiError> {
        let mut value = serde_json::to_value(value).map_err(|error| {
            tracing::error!(%error, "cannot serialise a response");
            ApiError::StoreUnavailable
        })?;
        redact_json(&mut value);
        strip_control_characters(&mut value);
        Self::json(&value)
    }
}

fn strip_control_characters(value: &mut Value) {
    match value {
        Value::String(text) if text.contains(char::is_control) => *text = replace_control_chars(text),
        Value::Array(items) => items.iter_mut().for_each(strip_control_characters),
        Value::Object(fields) => fields.values_mut().for_each(strip_control_characters),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_from_nodes_are_redacted_and_have_no_control_characters() {
        let input = serde_json::json!({ "text": "exit 1: token=hunter2 \u{1b}[2J", "times": 3 });
        let body = RawBody::json_redacted(&input).unwrap();
        let output: Value = serde_json::from_slice(&body.bytes).unwrap();
        assert_eq!(output, serde_json::json!({ "text": "exit 1: token=[removed] \u{fffd}[2J", "times": 3 }));
    }
}
