//! OTLP's JSON encoding of spans: ids in hexadecimal, 64-bit numbers as strings.

use std::collections::BTreeMap;

use doctor_core::hex;

use serde_json::{Value, json};

use super::traceparent::SpanContext;

/// A finished span.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FinishedSpan {
    pub(super) context: SpanContext,
    pub(super) parent: Option<[u8; 8]>,
    pub(super) name: String,
    pub(super) kind: SpanKind,
    /// Nanoseconds since 1970.
    pub(super) started: u64,
    pub(super) ended: u64,
    pub(super) attributes: Vec<(&'static str, Attribute)>,
    pub(super) failed: Option<String>,
}

/// Span kind, as OTLP numbers it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum SpanKind {
    #[default]
    Internal = 1,
    Server = 2,
    Client = 3,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Attribute {
    Text(String),
    Int(i64),
    Float(f64),
    Bool(bool),
}

/// Returns the body of a request.
pub(super) fn document(instance: &str, resource: &BTreeMap<String, String>, spans: &[FinishedSpan]) -> Value {
    let defaults = [
        ("service.name", "cluster-doctor"),
        ("service.version", env!("CARGO_PKG_VERSION")),
        ("service.instance.id", instance),
    ];
    let defaults = defaults.into_iter().filter(|(name, _)| !resource.contains_key(*name));
    let attributes = defaults.chain(resource.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let resource_attributes: Vec<Value> =
        attributes.map(|(name, value)| attribute(name, &Attribute::Text(value.to_owned()))).collect();
    let spans: Vec<Value> = spans.iter().map(span).collect();
    let scope = json!({ "name": "cluster-doctor", "version": env!("CARGO_PKG_VERSION") });
    json!({ "resourceSpans": [{
        "resource": { "attributes": resource_attributes },
        "scopeSpans": [{ "scope": scope, "spans": spans }],
    }] })
}

fn span(span: &FinishedSpan) -> Value {
    let attributes: Vec<Value> = span.attributes.iter().map(|(name, value)| attribute(name, value)).collect();
    let mut encoded = json!({
        "traceId": hex::encode(&span.context.trace),
        "spanId": hex::encode(&span.context.span),
        "name": span.name,
        "kind": span.kind as u8,
        "startTimeUnixNano": span.started.to_string(),
        "endTimeUnixNano": span.ended.to_string(),
        "attributes": attributes,
    });
    if let Some(parent) = &span.parent {
        encoded["parentSpanId"] = hex::encode(parent).into();
    }
    if let Some(failed) = &span.failed {
        encoded["status"] = json!({ "code": 2, "message": failed });
    }
    encoded
}

fn attribute(name: &str, value: &Attribute) -> Value {
    let value = match value {
        Attribute::Text(text) => json!({ "stringValue": text }),
        Attribute::Int(number) => json!({ "intValue": number.to_string() }),
        Attribute::Float(number) => json!({ "doubleValue": number }),
        Attribute::Bool(flag) => json!({ "boolValue": flag }),
    };
    json!({ "key": name, "value": value })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_encoded_as_otlp_json() {
        let span = FinishedSpan {
            context: SpanContext { trace: [0xab; 16], span: [1; 8], sampled: true },
            parent: Some([2; 8]),
            name: "cycle".to_owned(),
            kind: SpanKind::Client,
            started: 1_700_000_000_000_000_001,
            ended: 1_700_000_000_000_000_002,
            attributes: vec![("nodes", Attribute::Int(3)), ("ok", Attribute::Bool(true))],
            failed: Some("no".to_owned()),
        };
        let resource = BTreeMap::from([("service.name".to_owned(), "ours".to_owned())]);
        let encoded = document("a/1", &resource, &[span]);
        let resource_spans = &encoded["resourceSpans"][0];
        let expected = json!([
            { "key": "service.version", "value": { "stringValue": env!("CARGO_PKG_VERSION") } },
            { "key": "service.instance.id", "value": { "stringValue": "a/1" } },
            { "key": "service.name", "value": { "stringValue": "ours" } },
        ]);
        assert_eq!(resource_spans["resource"]["attributes"], expected);
        let expected = json!({
            "traceId": "abababababababababababababababab",
            "spanId": "0101010101010101",
            "parentSpanId": "0202020202020202",
            "name": "cycle",
            "kind": 3,
            "startTimeUnixNano": "1700000000000000001",
            "endTimeUnixNano": "1700000000000000002",
            "attributes": [
                { "key": "nodes", "value": { "intValue": "3" } },
                { "key": "ok", "value": { "boolValue": true } },
            ],
            "status": { "code": 2, "message": "no" },
        });
        assert_eq!(resource_spans["scopeSpans"][0]["spans"][0], expected);
    }
}
