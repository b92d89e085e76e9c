//! API errors: a status, a code for programs, a text for people, and what would be accepted.

use axum::{
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};

use doctor_engine::operator_commands::CommandError;
use doctor_store::{StoreError, access::Role};

use super::limits::REQUEST_TIMEOUT;
use crate::connections::did_not_arrive;

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(super) enum ApiError {
    #[error("no such endpoint")]
    NotFound,
    #[error("{method} is not supported here")]
    MethodNotAllowed { method: String },
    #[error("unknown parameter `{name}`")]
    UnknownParameter { name: String, accepted: String },
    #[error("invalid parameter `{name}`: {why}")]
    BadParameter { name: &'static str, why: String },
    #[error("invalid body: {why}")]
    BadBody { why: String },
    #[error("unknown {what} `{name}`")]
    UnknownName { what: &'static str, name: String, known: String },
    #[error("{0}")]
    BadCommand(String),
    #[error("refused: {why}")]
    Refused { why: String, instead: String },
    #[error("{limit}: send their number as `confirm_nodes`")]
    NumberNotConfirmed { limit: String, nodes: usize },
    #[error("the controller (doctor {}) does not run this command for a client: {why}", env!("CARGO_PKG_VERSION"))]
    CommandLine { why: String },
    #[error("sign in required: send Authorization: Bearer TOKEN")]
    SignInRequired,
    #[error("the token is unknown, expired or revoked")]
    BadToken,
    #[error("{0} is not in `proxy.from`: its user name is not accepted")]
    UntrustedProxy(String),
    #[error("the header x-doctor-proxy-secret is missing or wrong: the user name is not accepted")]
    BadProxySecret,
    #[error("more than one user name: the proxy must replace its header, not append to it")]
    AmbiguousUser,
    #[error("host {0} is not accepted while no token exists: use localhost, or create a token")]
    HostNotAllowed(String),
    #[error("the role {needed} is required; the caller has the role {is}")]
    RoleRequired { is: Role, needed: Role },
    #[error("read-only: to allow commands, create a token: `doctor token create NAME --role operator`")]
    ReadOnly,
    #[error("cross-site request")]
    CrossSite,
    #[error("send JSON: Content-Type: application/json")]
    NotJson,
    #[error("the body is longer than {0} bytes")]
    BodyTooLong(usize),
    #[error("the body did not arrive in time, or not to its end")]
    BodyTimeout,
    #[error("the confirmation has expired or is for another plan: review the current plan")]
    PlanChanged(Value),
    #[error("this confirmation was used before")]
    Replayed,
    #[error("not available, or no longer stored")]
    Gone,
    #[error("too many open requests: retry later")]
    CapacityReached,
    #[error("{0} event streams are open already: close one first")]
    TooManyStreams(usize),
    #[error("overloaded: retry in a moment")]
    Overloaded,
    #[error("no response within {} s: request less, or retry later", REQUEST_TIMEOUT.as_secs())]
    TimedOut,
    #[error("the store does not respond: the audit trail shows whether the command was carried out")]
    OutcomeUnknown,
    #[error("the store does not respond")]
    StoreUnavailable,
}

/// The response body.
#[derive(Debug, Serialize)]
struct ErrorResponse {
    error: ErrorBody,
}

#[derive(Debug, Serialize)]
struct ErrorBody {
    code: &'static str,
    text: String,
    /// What would be accepted, where known.
    accepted: Option<String>,
    /// The current plan, where another one was confirmed.
    plan: Option<Value>,
}

impl ApiError {
    /// The error of a body that could not be read, up to this length.
    pub(super) fn of_body(error: &axum::Error, max_bytes: usize) -> Self {
        if did_not_arrive(error) { Self::BodyTimeout } else { Self::BodyTooLong(max_bytes) }
    }

    pub(super) const fn code(&self) -> &'static str {
        match self {
            Self::NotFound => "no-such-place",
            Self::MethodNotAllowed { .. } => "wrong-method",
            Self::UnknownParameter { .. } => "unknown-parameter",
            Self::BadParameter { .. } => "bad-parameter",
            Self::BadBody { .. } => "bad-body",
            Self::UnknownName { .. } => "unknown",
            Self::BadCommand(_) => "bad-order",
            Self::Refused { .. } => "refused",
            Self::NumberNotConfirmed { .. } => "confirm-nodes",
            Self::CommandLine { .. } => "command-line",
            Self::SignInRequired => "no-token",
            Self::BadToken => "bad-token",
            Self::UntrustedProxy(_) => "not-a-proxy",
            Self::BadProxySecret => "proxy-secret",
            Self::AmbiguousUser => "two-names",
            Self::HostNotAllowed(_) => "wrong-host",
            Self::RoleRequired { .. } => "role",
            Self::ReadOnly => "read-only",
            Self::CrossSite => "cross-site",
            Self::NotJson => "not-json",
            Self::BodyTooLong(_) => "too-long",
            Self::BodyTimeout => "slow",
            Self::PlanChanged(_) => "other-plan",
            Self::Replayed => "replayed",
            Self::Gone => "gone",
            Self::CapacityReached => "full",
            Self::TooManyStreams(_) => "too-many-listeners",
            Self::Overloaded => "busy",
            Self::TimedOut => "late",
            Self::OutcomeUnknown => "unsure",
            Self::StoreUnavailable => "store",
        }
    }

    /// Whether the client could not be identified.
    pub(super) const fn is_unauthenticated(&self) -> bool {
        matches!(
            self,
            Self::SignInRequired
                | Self::BadToken
                | Self::UntrustedProxy(_)
                | Self::BadProxySecret
                | Self::AmbiguousUser
                | Self::HostNotAllowed(_)
                | Self::ReadOnly
        )
    }

    pub(super) const fn status(&self) -> StatusCode {
        match self {
            Self::NotFound | Self::UnknownName { .. } => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::UnknownParameter { .. }
            | Self::BadParameter { .. }
            | Self::BadBody { .. }
            | Self::BadCommand(_)
            | Self::CommandLine { .. } => StatusCode::BAD_REQUEST,
            Self::SignInRequired | Self::BadToken => StatusCode::UNAUTHORIZED,
            Self::UntrustedProxy(_)
            | Self::BadProxySecret
            | Self::AmbiguousUser
            | Self::HostNotAllowed(_)
            | Self::RoleRequired { .. }
            | Self::ReadOnly
            | Self::CrossSite => StatusCode::FORBIDDEN,
            Self::NotJson => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::BodyTooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::PlanChanged(_) | Self::Replayed | Self::Refused { .. } | Self::NumberNotConfirmed { .. } => {
                StatusCode::CONFLICT
            }
            Self::Gone => StatusCode::GONE,
            Self::TooManyStreams(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::CapacityReached
            | Self::Overloaded
            | Self::TimedOut
            | Self::OutcomeUnknown
            | Self::StoreUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn accepted(&self) -> Option<String> {
        match self {
            Self::NotFound => Some("GET /api/v1/ lists the endpoints".to_owned()),
            Self::UnknownParameter { accepted, .. } => Some(accepted.clone()),
            Self::UnknownName { known, .. } => Some(known.clone()),
            Self::Refused { instead, .. } => Some(instead.clone()),
            Self::NumberNotConfirmed { nodes, .. } => Some(format!("confirm_nodes: {nodes}")),
            Self::RoleRequired { needed, .. } => Some(format!("a token with the role {needed}")),
            _ => None,
        }
    }

    /// Schema of an error, with all codes and their status.
    pub(super) fn schema() -> Value {
        json!({
            "type": "object",
            "required": ["error"],
            "additionalProperties": false,
            "properties": { "error": {
                "type": "object",
                "required": ["code", "text", "accepted", "plan"],
                "additionalProperties": false,
                "properties": {
                    "code": { "type": "string", "description": "stable, for programs" },
                    "text": { "type": "string", "description": "for people" },
                    "accepted": { "type": ["string", "null"], "description": "what would be accepted" },
                    "plan": { "type": ["object", "null"], "description": "with other-plan: the current plan" },
                },
            }},
        })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = self.status();
        let plan = match &self {
            Self::PlanChanged(plan) => Some(plan.clone()),
            _ => None,
        };
        let error = ErrorBody { code: self.code(), text: self.to_string(), accepted: self.accepted(), plan };
        // Our own text and codes always serialise.
        let body = serde_json::to_vec(&ErrorResponse { error }).unwrap_or_default();
        let mut response = (status, [(header::CONTENT_TYPE, "application/json")], body).into_response();
        let extra: Option<(HeaderName, &'static str)> = match status {
            StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, "Bearer")),
            StatusCode::SERVICE_UNAVAILABLE => Some((header::RETRY_AFTER, "2")),
            _ => None,
        };
        if let Some((name, value)) = extra {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        tracing::warn!(%error, "API: store read failed");
        if matches!(error, StoreError::DeadlineExceeded { .. }) { Self::TimedOut } else { Self::StoreUnavailable }
    }
}

impl From<CommandError> for ApiError {
    fn from(error: CommandError) -> Self {
        match error {
            CommandError::Unknown { what, name, known } => Self::UnknownName { what, name, known },
            CommandError::Usage(text) => Self::BadCommand(text),
            CommandError::Refused { why, instead } => Self::Refused { why, instead },
        }
    }
}
