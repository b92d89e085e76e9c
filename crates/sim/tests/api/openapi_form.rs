//! Validates values with the part of JSON Schema that the API description uses.

use serde_json::Value;

/// Returns the violations with their positions; none if the value is valid.
pub(crate) fn violations(value: &Value, schema: &Value, at: &str) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(forms) = schema.get("anyOf").or_else(|| schema.get("oneOf")).and_then(Value::as_array) {
        let all: Vec<Vec<String>> = forms.iter().map(|form| violations(value, form, at)).collect();
        if all.iter().all(|violations| !violations.is_empty()) {
            found.push(format!("{at}: fits none of its forms: {all:?}"));
        }
        return found;
    }
    if let Some(kind) = schema.get("type").and_then(Value::as_str)
        && !is_a(value, kind)
    {
        return vec![format!("{at}: {value} is no {kind}")];
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array)
        && !values.contains(value)
    {
        found.push(format!("{at}: {value} is none of {values:?}"));
    }
    if let Some(fields) = value.as_object() {
        let known = schema.get("properties").and_then(Value::as_object);
        for name in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
            if !fields.contains_key(name.as_str().unwrap_or_default()) {
                found.push(format!("{at}: {name} is missing"));
            }
        }
        for (name, value) in fields {
            match known.and_then(|known| known.get(name)) {
                Some(form) => found.extend(violations(value, form, &format!("{at}.{name}"))),
                None if schema.get("additionalProperties") == Some(&Value::Bool(false)) => {
                    found.push(format!("{at}: {name} is not described"));
                }
                None => {}
            }
        }
    }
    if let Some(items) = value.as_array() {
        let of = schema.get("items");
        let prefix = schema.get("prefixItems").and_then(Value::as_array);
        for (n, item) in items.iter().enumerate() {
            if let Some(form) = prefix.and_then(|prefix| prefix.get(n)).or(of) {
                found.extend(violations(item, form, &format!("{at}[{n}]")));
            }
        }
    }
    found
}

fn is_a(value: &Value, kind: &str) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        other => panic!("the description has a type `{other}`"),
    }
}

#[test]
fn missing_undescribed_and_wrongly_typed_fields_are_violations() {
    let schema = serde_json::json!({
        "type": "object", "required": ["a"], "additionalProperties": false,
        "properties": { "a": { "anyOf": [{ "type": "integer" }, { "type": "null" }] } },
    });
    let count = |text: &str| violations(&serde_json::from_str(text).unwrap(), &schema, "").len();
    assert_eq!((count("{\"a\": 3}"), count("{\"a\": null}")), (0, 0));
    assert_eq!((count("{}"), count("{\"a\": \"3\"}"), count("{\"a\": 3, \"b\": 4}")), (1, 1, 1));
}
