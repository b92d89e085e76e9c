//! Response schemas, as JSON Schema. They are strict: tests on real responses fail on an undocumented or missing field,
//! so the description cannot drift from the code.

use doctor_core::{
    case::{Advice, RepairStep, StepKind, StepState},
    finding::{Remedy, Severity, Verdict},
    hostlist::NODE_STATES,
    policy::Mode,
    run::Purpose,
    view::{AttentionKind, BreakerState, OccupancyKind, OverallState, TestStatus, Urgency},
};
use serde_json::{Map, Value, json};

/// An object with exactly these fields, all required.
pub(super) fn object(fields: Value) -> Value {
    let names = fields.as_object().into_iter().flat_map(Map::keys);
    let required: Vec<Value> = names.map(|name| Value::from(name.as_str())).collect();
    let mut form = json!({ "type": "object", "required": required, "additionalProperties": false });
    form["properties"] = fields;
    form
}

/// As [`object`], with some fields optional.
pub(super) fn object_with_optional(fields: Value, missing: &[&str]) -> Value {
    let mut object = object(fields);
    if let Some(required) = object.get_mut("required").and_then(Value::as_array_mut) {
        required.retain(|name| name.as_str().is_none_or(|name| !missing.contains(&name)));
    }
    object
}

/// An object with the fields of several.
pub(super) fn merged(parts: &[Value]) -> Value {
    let mut fields = Map::new();
    for part in parts {
        if let Some(more) = part.get("properties").and_then(Value::as_object) {
            fields.extend(more.clone());
        }
    }
    object(Value::Object(fields))
}

pub(super) fn list(of: Value) -> Value {
    let mut form = json!({ "type": "array" });
    form["items"] = of;
    form
}

/// An array of fixed length, each element of one of these schemas. The order is documented as text: tools disagree on
/// how a schema expresses tuples.
pub(super) fn tuple(of: &[Value], count: usize) -> Value {
    json!({ "type": "array", "minItems": count, "maxItems": count, "items": { "anyOf": of } })
}

/// A page of a list, and where the next one starts.
pub(super) fn page(of: Value) -> Value {
    object(json!({ "items": list(of), "next": or_null(text()) }))
}

pub(super) fn or_null(of: Value) -> Value {
    let mut form = json!({});
    form["anyOf"] = Value::Array(vec![of, json!({ "type": "null" })]);
    form
}

pub(super) fn text() -> Value {
    json!({ "type": "string" })
}

pub(super) fn flag() -> Value {
    json!({ "type": "boolean" })
}

pub(super) fn count() -> Value {
    json!({ "type": "integer", "minimum": 0 })
}

pub(super) fn number() -> Value {
    json!({ "type": "number" })
}

/// RFC 3339, in UTC.
pub(super) fn timestamp() -> Value {
    json!({ "type": "string", "format": "date-time" })
}

/// A duration such as `1h 30m`.
pub(super) fn duration() -> Value {
    json!({ "type": "string", "description": "a duration such as 90s, 5m, 1h 30m or 7d" })
}

pub(super) fn one_of(values: &[&str]) -> Value {
    json!({ "type": "string", "enum": values })
}

/// Any value; documented as text elsewhere.
pub(super) fn any_value() -> Value {
    json!({})
}

macro_rules! enum_schemas {
    ($($name:ident: $type:ty,)+) => {
        $(pub(super) fn $name() -> Value {
            let values: Vec<&str> = <$type>::ALL.iter().map(|one| one.code()).collect();
            one_of(&values)
        })+
    };
}

enum_schemas! {
    verdict: Verdict,
    severity: Severity,
    remedy: Remedy,
    test_status: TestStatus,
    occupancy: OccupancyKind,
    purpose: Purpose,
    repair_step: RepairStep,
    advice: Advice,
    step_kind: StepKind,
    step_state: StepState,
    breaker_state: BreakerState,
    attention_kind: AttentionKind,
    urgency: Urgency,
    overall_state: OverallState,
    mode: Mode,
}

pub(super) fn node_state() -> Value {
    one_of(&NODE_STATES)
}

/// A tagged union: the field `is` selects the variant.
pub(super) fn tagged_union(forms: &[(&str, Value)]) -> Value {
    let form = |(word, fields): &(&str, Value)| {
        let mut fields = fields.as_object().cloned().unwrap_or_default();
        fields.insert("is".to_owned(), one_of(&[word]));
        object(Value::Object(fields))
    };
    json!({ "oneOf": forms.iter().map(form).collect::<Vec<_>>() })
}
