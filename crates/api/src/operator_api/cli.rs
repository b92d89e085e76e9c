//! `POST /api/v1/cli`: a reading command of the command line, run by the controller on its own store.
//!
//! The request is what a person typed after `doctor`, and the response is what the program would print here, with its
//! exit code: `doctor --server URL` shows the same as `doctor` beside the store. This crate does not know the commands. The
//! program passes a [`CliHandler`](super::cli_handler::CliHandler), which accepts only commands that read, and limits what they read. Commands that
//! change something are [`actions`](super::actions).
//!
//! The text of nodes in the output is redacted, as everywhere in the API.

use std::{borrow::Cow, net::IpAddr, sync::Arc, time::Duration};

use axum::{
    body::{Body, to_bytes},
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use doctor_engine::redact::{redact, redact_json};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::{
    auth::check_cross_site,
    cli_handler::{CliCall, CliError, CliOutput},
    error::ApiError,
    limits::REQUEST_TIMEOUT,
    response_cache::CachePolicy,
    schema::{count, object, text},
    state::ApiState,
};
use crate::response::{RawBody, SharedResponse};

/// The name of the endpoint, and of its worker pool.
pub(super) const NAME: &str = "cli";
pub(super) const DESCRIPTION: &str = "Runs a reading command of the command line on the controller and returns what it prints and its exit code: \
     `doctor --server URL` uses it. `args` are the arguments after `doctor`, without global options. Only commands that read are \
     accepted, without options that name a file; the others get the error `command-line`, which names the version of the controller. \
     `config show` requires the role operator, every other command the role viewer.";

const MAX_BODY_BYTES: usize = 64 << 10;
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_ARGS: usize = 256;
/// The widest terminal for which a page is wrapped.
const MAX_WIDTH: u16 = 1000;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CliRequest {
    args: Vec<String>,
    #[serde(default)]
    json: bool,
    #[serde(default)]
    colour: bool,
    width: Option<u16>,
}

#[derive(Debug, Serialize)]
struct CliResponse {
    /// The version of the controller.
    version: &'static str,
    #[serde(flatten)]
    output: CliOutput,
}

pub(super) fn request_schema() -> Value {
    json!({
        "type": "object",
        "required": ["args"],
        "additionalProperties": false,
        "properties": {
            "args": {
                "type": "array", "minItems": 1, "maxItems": MAX_ARGS, "items": { "type": "string" },
                "description": "the arguments after `doctor`, without global options, such as `why`, `node001`",
            },
            "json": { "type": "boolean", "description": "print JSON, as `--json` does" },
            "colour": { "type": "boolean", "description": "colour the text for a terminal" },
            "width": {
                "type": ["integer", "null"], "minimum": 1, "maximum": MAX_WIDTH,
                "description": "columns of the terminal; without it, lines are not wrapped",
            },
        },
    })
}

pub(super) fn response_schema() -> Value {
    object(json!({ "version": text(), "stdout": text(), "stderr": text(), "exit": count() }))
}

/// Handles one request.
pub(super) async fn handle(state: Arc<ApiState>, peer: IpAddr, headers: HeaderMap, body: Body) -> Response {
    match run(&state, peer, &headers, body).await {
        Ok(response) => response.respond_to(&headers),
        Err(error) => {
            state.audit_throttle.log_unknown_client(peer, "/api/v1/cli", &error);
            error.into_response()
        }
    }
}

async fn run(state: &Arc<ApiState>, peer: IpAddr, headers: &HeaderMap, body: Body) -> Result<SharedResponse, ApiError> {
    let caller = state.auth.authenticate(peer, headers).await?;
    check_cross_site(headers)?;
    let handler = state.cli.clone().ok_or(ApiError::NotFound)?;
    let bytes = timeout(BODY_TIMEOUT, to_bytes(body, MAX_BODY_BYTES)).await.map_err(|_| ApiError::BodyTimeout)?;
    let request = parse(&bytes.map_err(|error| ApiError::of_body(&error, MAX_BODY_BYTES))?)?;
    let until = Instant::now() + REQUEST_TIMEOUT;
    let call = CliCall {
        args: request.args,
        json: request.json,
        colour: request.colour,
        width: request.width,
        role: caller.role,
        store: state.store.with_deadline(until.into_std()),
    };
    let (worker_state, span) = (Arc::clone(state), tracing::Span::current());
    let work = move || {
        span.in_scope(|| {
            let output = handler(&call).map_err(|error| match error {
                CliError::NotAccepted(why) => ApiError::CommandLine { why },
                CliError::RoleRequired(needed) => ApiError::RoleRequired { is: call.role, needed },
            })?;
            let response = CliResponse { version: env!("CARGO_PKG_VERSION"), output: redacted(output, call.json) };
            worker_state.response_cache.reserve(RawBody::json(&response)?)
        })
    };
    state.workers.run_read((NAME, CachePolicy::Briefly), until, work).await?
}

fn parse(bytes: &[u8]) -> Result<CliRequest, ApiError> {
    let bad = |why: String| ApiError::BadBody { why };
    let request: CliRequest = serde_json::from_slice(bytes).map_err(|error| bad(error.to_string()))?;
    if !(1..=MAX_ARGS).contains(&request.args.len()) {
        return Err(bad(format!("`args` must have 1 to {MAX_ARGS} items")));
    }
    if request.width.is_some_and(|width| !(1..=MAX_WIDTH).contains(&width)) {
        return Err(bad(format!("`width` must be 1 to {MAX_WIDTH}")));
    }
    Ok(request)
}

/// Removes what looks like a secret. Output without one is unchanged to the byte.
fn redacted(output: CliOutput, json: bool) -> CliOutput {
    let text = |text: String| {
        let changed = match redact(&text) {
            Cow::Owned(redacted) => Some(redacted),
            Cow::Borrowed(_) => None,
        };
        changed.unwrap_or(text)
    };
    let stdout = match json.then(|| serde_json::from_str::<Value>(&output.stdout)) {
        Some(Ok(value)) => {
            let mut clean = value.clone();
            redact_json(&mut clean);
            if clean == value { output.stdout } else { format!("{clean:#}\n") }
        }
        _ => text(output.stdout),
    };
    CliOutput { stdout, stderr: text(output.stderr), exit: output.exit }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(stdout: &str) -> CliOutput {
        CliOutput { stdout: stdout.to_owned(), stderr: String::new(), exit: 1 }
    }

    #[test]
    fn output_without_a_secret_is_unchanged_and_a_secret_is_removed() {
        let plain = output("{\n  \"b\": 1,\n  \"a\": \"x\"\n}\n");
        assert_eq!(redacted(plain.clone(), true), plain, "the order of fields stays");
        assert_eq!(redacted(output("a\nexit 1: token=hunter2\n"), false).stdout, "a\nexit 1: token=[removed]\n");
        let json = redacted(output("{\n  \"b\": 1,\n  \"a\": \"token=hunter2\"\n}\n"), true).stdout;
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), json!({ "a": "token=[removed]", "b": 1 }));
    }

    #[test]
    fn a_request_is_limited_and_strict() {
        assert_eq!(parse(br#"{"args": ["status"]}"#).unwrap().args, ["status"]);
        for (body, part) in [
            (r#"{"args": []}"#.to_owned(), "1 to 256"),
            (json!({ "args": vec!["x"; 257] }).to_string(), "1 to 256"),
            (r#"{"args": ["status"], "store": "x"}"#.to_owned(), "unknown field `store`"),
            (r#"{"args": ["status"], "width": 0}"#.to_owned(), "`width`"),
            (r#"{"args": "status"}"#.to_owned(), "expected a sequence"),
            ("[]".to_owned(), "invalid length"),
        ] {
            let error = parse(body.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(part), "{body}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_body_is_parsed_or_rejected(text in ".{0,300}") {
            let _result = parse(text.as_bytes());
        }
    }
}
