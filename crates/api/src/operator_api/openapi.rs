//! The API description, generated from the server's tables, as OpenAPI and as an HTML page.

use serde_json::{Map, Value, json};

use doctor_store::access::Role;

use super::{
    action_request::ActionKind,
    actions, cli,
    endpoint::Route,
    error::ApiError,
    events::Change,
    params::Param,
    routes::ROUTES,
    schema::{count, flag, object, one_of, text},
};

const DESCRIPTION: &str = "The views and commands of the command line. Responses have an ETag: with If-None-Match, an unchanged \
                     response is not sent again. Lists are paged: `next` of a page is the `cursor` of the next one. A request \
                     that takes longer than ten seconds, or finds the queue full, gets 503 with Retry-After. Times are RFC 3339 \
                     in UTC; durations are written as `1h 30m`.";
pub(super) const EVENTS_DESCRIPTION: &str = "Server-sent events. An event says what changed, without the new content: `nodes`, `runs` and `cases` list ids \
     (`more`: how many are left out), `status` is a change of the breaker, pauses, requests or the policy, `plan` a change of the \
     next cycle's plan, `everything` a reload because the changes are unknown. After a broken connection the browser sends \
     Last-Event-ID and gets the events it missed. A client that falls behind, or whose token was revoked or has another role now, \
     gets `dropped` and is disconnected. One caller may have at most 32 streams.";
pub(super) const ACTIONS_DESCRIPTION: &str = "Requires the role operator. Without `confirm` nothing is done: the response is the plan, with a confirmation that is valid \
     for this plan for ten minutes. The same request with `confirm` carries the plan out; if the plan has changed meanwhile, the \
     response is 409 with the current plan. A plan with `confirm_nodes` takes out more nodes than the circuit breaker would: the \
     second request repeats that number. Each node has a line in `changes` that names what blocks the command there: a hold, a \
     repair, or that the node left the cluster. The audit trail records commands that were carried out or rejected.";

/// Returns the description, as served and committed.
pub fn openapi() -> Value {
    let mut paths = Map::new();
    for route in ROUTES {
        paths.insert(format!("/api/v1{}", route.path), json!({ "get": get_operation(route) }));
    }
    paths.insert("/api/v1/whoami".to_owned(), json!({ "get": whoami() }));
    paths.insert("/api/v1/events".to_owned(), json!({ "get": events() }));
    paths.insert("/api/v1/cli".to_owned(), json!({ "post": cli_operation() }));
    for action in ActionKind::ALL {
        paths.insert(format!("/api/v1/actions/{}", action.name()), json!({ "post": post_operation(action) }));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Cluster Doctor",
            "version": env!("CARGO_PKG_VERSION"),
            "description": DESCRIPTION,
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": "/" }],
        "security": [{ "token": [] }],
        "paths": paths,
        "components": {
            "securitySchemes": { "token": {
                "type": "http", "scheme": "bearer", "description": "`doctor token create NAME --role viewer|operator`",
            }},
            "schemas": { "Error": ApiError::schema() },
        },
    })
}

/// Returns the description as text, one item per line, so that diffs are readable.
pub fn openapi_text() -> String {
    format!("{:#}\n", openapi())
}

fn error_response(description: &str) -> Value {
    json!({
        "description": description,
        "content": { "application/json": { "schema": { "$ref": "#/components/schemas/Error" } } },
    })
}

fn responses(description: &str, content_type: &str, schema: &Value) -> Value {
    let mut unavailable = error_response("overloaded, timed out, or the store does not respond");
    unavailable["headers"] = json!({ "Retry-After": { "schema": count(), "description": "seconds" } });
    json!({
        "200": { "description": description, "content": { content_type: { "schema": schema } } },
        "503": unavailable,
        "default": error_response("the error"),
    })
}

fn get_operation(route: &Route) -> Value {
    let mut responses = responses(route.summary, route.content_type, &(route.response_schema)());
    if let Some(responses) = responses.as_object_mut() {
        responses.insert("304".to_owned(), json!({ "description": "not modified" }));
    }
    json!({
        "operationId": route.name,
        "summary": route.summary,
        "description": route.description,
        "parameters": route.params.iter().map(|param| parameter(route, param)).collect::<Vec<_>>(),
        "responses": responses,
    })
}

fn parameter(route: &Route, param: &Param) -> Value {
    let in_path = route.path.contains(&format!("{{{}}}", param.name));
    json!({
        "name": param.name,
        "in": if in_path { "path" } else { "query" },
        "required": in_path,
        "description": param.description,
        "schema": param.schema(),
    })
}

fn whoami() -> Value {
    let roles = Role::ALL.map(Role::code);
    let who = object(json!({ "name": text(), "role": one_of(&roles), "known": flag(), "may_act": flag() }));
    json!({
        "operationId": "whoami",
        "summary": "The caller's name and role, and whether it may send commands",
        "description": "`known` is false for a local client while no token exists.",
        "parameters": [],
        "responses": responses("the caller", "application/json", &who),
    })
}

fn events() -> Value {
    json!({
        "operationId": "events",
        "summary": "Change notifications",
        "description": format!("{EVENTS_DESCRIPTION} Events: {}.", Change::NAMES.join(", ")),
        "parameters": [{
            "name": "Last-Event-ID", "in": "header", "required": false,
            "description": "the id of the last event received", "schema": text(),
        }],
        "responses": responses("events", "text/event-stream", &text()),
    })
}

fn post_operation(action: ActionKind) -> Value {
    let mut responses = responses("the plan, or the result", "application/json", &actions::schema());
    responses["409"] =
        error_response("the plan has changed (the current one is in `plan`), or the confirmation was used before");
    json!({
        "operationId": format!("act-{}", action.name()),
        "summary": action.summary(),
        "description": ACTIONS_DESCRIPTION,
        "requestBody": { "required": true, "content": { "application/json": { "schema": action.schema() } } },
        "responses": responses,
    })
}

fn cli_operation() -> Value {
    json!({
        "operationId": cli::NAME,
        "summary": "Run a reading command of the command line",
        "description": cli::DESCRIPTION,
        "requestBody": { "required": true, "content": { "application/json": { "schema": cli::request_schema() } } },
        "responses": responses("what the command printed, and its exit code", "application/json", &cli::response_schema()),
    })
}

/// Returns the description as one HTML page without scripts or styles.
pub(super) fn html_page() -> String {
    let mut html = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>Cluster Doctor: API</title>\
         <main><h1>Cluster Doctor: API</h1><p>{}</p>\
         <p>Authenticate with <code>Authorization: Bearer TOKEN</code>; \
         <code>doctor token create NAME --role viewer|operator</code> creates a token. \
         For programs: <a href=\"/api/v1/openapi.json\">openapi.json</a>.</p>",
        with_code(DESCRIPTION)
    );
    let description = openapi();
    let paths = description["paths"].as_object().cloned().unwrap_or_default();
    for (title, method) in [("Reading", "get"), ("Commands", "post")] {
        html.push_str(&format!("<h2>{title}</h2>"));
        if method == "post" {
            html.push_str(&format!("<p>{}</p>", with_code(ACTIONS_DESCRIPTION)));
            html.push_str(&format!("<p><code>/api/v1/cli</code>: {}</p>", with_code(cli::DESCRIPTION)));
        }
        for (path, operation) in paths.iter().filter_map(|(path, operation)| Some((path, operation.get(method)?))) {
            html.push_str(&section(method, path, operation));
        }
    }
    html.push_str("</main></html>");
    html
}

fn section(method: &str, path: &str, operation: &Value) -> String {
    let field_html = |key: &str| with_code(operation[key].as_str().unwrap_or_default());
    let mut html =
        format!("<h3><code>{} {}</code></h3><p>{}.", method.to_uppercase(), escaped(path), field_html("summary"));
    if method == "get" {
        html.push_str(&format!(" {}", field_html("description")));
    }
    html.push_str("</p>");
    let params = operation["parameters"].as_array().into_iter().flatten().map(|param| {
        (param["name"].clone(), param["description"].clone(), param["schema"].clone(), param["required"] == true)
    });
    let body = &operation["requestBody"]["content"]["application/json"]["schema"];
    let required = |name: &str| body["required"].as_array().is_some_and(|all| all.iter().any(|one| one == name));
    let fields = body["properties"].as_object().into_iter().flatten();
    let fields = fields.map(|(name, field)| (json!(name), field["description"].clone(), field.clone(), required(name)));
    let rows: Vec<String> = params
        .chain(fields)
        .map(|(name, description, schema, required)| {
            let values = schema["enum"].as_array().map(|values| {
                let values: Vec<&str> = values.iter().filter_map(Value::as_str).collect();
                format!(" ({})", values.join(", "))
            });
            let required_text = if required { ", required" } else { "" };
            format!(
                "<dt><code>{}</code>{required_text}</dt><dd>{}{}</dd>",
                escaped(name.as_str().unwrap_or_default()),
                with_code(description.as_str().unwrap_or_default()),
                escaped(&values.unwrap_or_default())
            )
        })
        .collect();
    if !rows.is_empty() {
        html.push_str(&format!("<dl>{}</dl>", rows.concat()));
    }
    html
}

/// Escapes a text and renders what it has between backticks as code.
fn with_code(text: &str) -> String {
    let safe = escaped(text);
    let parts: Vec<String> = safe
        .split('`')
        .enumerate()
        .map(|(index, part)| if index % 2 == 1 { format!("<code>{part}</code>") } else { part.to_owned() })
        .collect();
    parts.concat()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_endpoint_documents_503_and_every_command_409() {
        for (path, operations) in openapi()["paths"].as_object().unwrap() {
            for (method, operation) in operations.as_object().unwrap() {
                let responses = &operation["responses"];
                assert!(responses["503"]["headers"]["Retry-After"].is_object(), "{method} {path}");
                assert_eq!(responses.get("409").is_some(), path.contains("/actions/"), "{method} {path}");
            }
        }
    }

    #[test]
    fn every_part_of_a_path_is_a_parameter_and_no_name_is_used_twice() {
        let mut names = std::collections::BTreeSet::new();
        for route in ROUTES {
            assert!(names.insert(route.name), "{}", route.name);
            let parts = route.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
            for part in parts {
                assert!(route.params.iter().any(|param| param.name == part), "{}: {part}", route.path);
            }
        }
        assert!(html_page().contains("/api/v1/nodes/{node}/timeline") && !html_page().contains("<script"));
        assert!(!html_page().contains('`'), "backticks are markup, not text of the page");
    }
}
