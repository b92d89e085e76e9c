//! The forms of answers, as JSON Schema. They are strict: a field that is not described, or is missing, is a mistake that the
//! tests find on real answers, so that the description cannot drift from the code.

use doctor_core::{
    case::{Advice, Rung, StepKind, StepState},
    finding::{Remedy, Severity, Verdict},
    hostlist::LIVES,
    policy::Mode,
    run::Purpose,
    view::{BreakerState, Standing, Use},
};
use serde_json::{Map, Value, json};

/// All fields are there, and no others.
pub(super) fn object(fields: Value) -> Value {
    let names = fields.as_object().into_iter().flat_map(Map::keys);
    let required: Vec<Value> = names.map(|name| Value::from(name.as_str())).collect();
    let mut form = json!({ "type": "object", "required": required, "additionalProperties": false });
    form["properties"] = fields;
    form
}

/// The same, of which these fields may be missing.
pub(super) fn object_without(fields: Value, missing: &[&str]) -> Value {
    let mut object = object(fields);
    if let Some(required) = object.get_mut("required").and_then(Value::as_array_mut) {
        required.retain(|name| name.as_str().is_none_or(|name| !missing.contains(&name)));
    }
    object
}

/// The fields of several objects in one.
pub(super) fn joined(parts: &[Value]) -> Value {
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

/// A list of so many things, each of one of these forms. Which of them stands where is told in words: programs that read
/// descriptions do not agree on how to say it.
pub(super) fn places(of: &[Value], count: usize) -> Value {
    json!({ "type": "array", "minItems": count, "maxItems": count, "items": { "anyOf": of } })
}

/// A page of a list, and where the next one begins.
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
pub(super) fn moment() -> Value {
    json!({ "type": "string", "format": "date-time" })
}

/// A length such as `1h 30m`.
pub(super) fn span() -> Value {
    json!({ "type": "string", "description": "a length such as 90s, 5m, 1h 30m or 7d" })
}

pub(super) fn one_of(words: &[&str]) -> Value {
    json!({ "type": "string", "enum": words })
}

/// Whatever the code writes; told in words elsewhere.
pub(super) fn anything() -> Value {
    json!({})
}

macro_rules! words {
    ($($name:ident: $type:ty,)+) => {
        $(pub(super) fn $name() -> Value {
            let words: Vec<&str> = <$type>::ALL.iter().map(|one| one.code()).collect();
            one_of(&words)
        })+
    };
}

words! {
    verdict: Verdict,
    severity: Severity,
    remedy: Remedy,
    standing: Standing,
    used: Use,
    purpose: Purpose,
    rung: Rung,
    advice: Advice,
    step_kind: StepKind,
    step_state: StepState,
    breaker_state: BreakerState,
    mode: Mode,
}

pub(super) fn life() -> Value {
    one_of(&LIVES)
}

/// One of several forms that a field `is` tells apart; each with its other fields.
pub(super) fn told_apart(forms: &[(&str, Value)]) -> Value {
    let form = |(word, fields): &(&str, Value)| {
        let mut fields = fields.as_object().cloned().unwrap_or_default();
        fields.insert("is".to_owned(), one_of(&[word]));
        object(Value::Object(fields))
    };
    json!({ "oneOf": forms.iter().map(form).collect::<Vec<_>>() })
}
