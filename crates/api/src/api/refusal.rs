//! API errors: a status, a code for programs, a text for people, and what would be accepted.

use axum::{
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};

use doctor_engine::orders::BadOrder;
use doctor_store::{StoreError, access::Role};

use super::limits::REQUEST_TIMEOUT;

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("no such endpoint")]
    NoSuchPlace,
    #[error("{method} is not supported here")]
    Method { method: String },
    #[error("unknown parameter `{name}`")]
    UnknownParameter { name: String, accepted: String },
    #[error("invalid parameter `{name}`: {why}")]
    BadParameter { name: &'static str, why: String },
    #[error("invalid body: {why}")]
    BadBody { why: String },
    #[error("unknown {what} `{name}`")]
    Unknown { what: &'static str, name: String, known: String },
    #[error("{0}")]
    BadOrder(String),
    #[error("sign in required: send Authorization: Bearer TOKEN")]
    NoToken,
    #[error("the token is unknown, expired or revoked")]
    BadToken,
    #[error("{0} is not in `proxy.from`: its user name is not accepted")]
    NotAProxy(String),
    #[error("more than one user name: the proxy must replace its header, not append to it")]
    TwoNames,
    #[error("host {0} is not accepted while no token exists: use localhost, or create a token")]
    Host(String),
    #[error("the role {needed} is required; the caller has the role {is}")]
    Role { is: Role, needed: Role },
    #[error("read-only: to allow commands, create a token: `doctor token create NAME --role operator`")]
    ReadOnly,
    #[error("cross-site request")]
    CrossSite,
    #[error("send JSON: Content-Type: application/json")]
    NotJson,
    #[error("the body is longer than {0} bytes")]
    TooLong(usize),
    #[error("the body did not arrive in time")]
    Slow,
    #[error("the confirmation has expired or is for another plan: review the current plan")]
    OtherPlan(Value),
    #[error("this confirmation was used before")]
    Replayed,
    #[error("not available, or no longer stored")]
    Gone,
    #[error("too many open requests: retry later")]
    Full,
    #[error("{0} event streams are open already: close one first")]
    TooManyListeners(usize),
    #[error("overloaded: retry in a moment")]
    Busy,
    #[error("no response within {} s: request less, or retry later", REQUEST_TIMEOUT.as_secs())]
    Late,
    #[error("the store does not respond: the audit trail shows whether the command was carried out")]
    Unsure,
    #[error("the store does not respond")]
    Store,
}

/// The response body.
#[derive(Debug, Serialize)]
struct Sent {
    error: Told,
}

#[derive(Debug, Serialize)]
struct Told {
    code: &'static str,
    text: String,
    /// What would be accepted, where known.
    accepted: Option<String>,
    /// The current plan, where another one was confirmed.
    plan: Option<Value>,
}

impl Refusal {
    pub(super) const fn code(&self) -> &'static str {
        match self {
            Self::NoSuchPlace => "no-such-place",
            Self::Method { .. } => "wrong-method",
            Self::UnknownParameter { .. } => "unknown-parameter",
            Self::BadParameter { .. } => "bad-parameter",
            Self::BadBody { .. } => "bad-body",
            Self::Unknown { .. } => "unknown",
            Self::BadOrder(_) => "bad-order",
            Self::NoToken => "no-token",
            Self::BadToken => "bad-token",
            Self::NotAProxy(_) => "not-a-proxy",
            Self::TwoNames => "two-names",
            Self::Host(_) => "wrong-host",
            Self::Role { .. } => "role",
            Self::ReadOnly => "read-only",
            Self::CrossSite => "cross-site",
            Self::NotJson => "not-json",
            Self::TooLong(_) => "too-long",
            Self::Slow => "slow",
            Self::OtherPlan(_) => "other-plan",
            Self::Replayed => "replayed",
            Self::Gone => "gone",
            Self::Full => "full",
            Self::TooManyListeners(_) => "too-many-listeners",
            Self::Busy => "busy",
            Self::Late => "late",
            Self::Unsure => "unsure",
            Self::Store => "store",
        }
    }

    /// Whether the client could not be identified.
    pub(super) const fn is_of_unknown(&self) -> bool {
        matches!(
            self,
            Self::NoToken | Self::BadToken | Self::NotAProxy(_) | Self::TwoNames | Self::Host(_) | Self::ReadOnly
        )
    }

    pub(super) const fn status(&self) -> StatusCode {
        match self {
            Self::NoSuchPlace | Self::Unknown { .. } => StatusCode::NOT_FOUND,
            Self::Method { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::UnknownParameter { .. } | Self::BadParameter { .. } | Self::BadBody { .. } | Self::BadOrder(_) => {
                StatusCode::BAD_REQUEST
            }
            Self::NoToken | Self::BadToken => StatusCode::UNAUTHORIZED,
            Self::NotAProxy(_)
            | Self::TwoNames
            | Self::Host(_)
            | Self::Role { .. }
            | Self::ReadOnly
            | Self::CrossSite => StatusCode::FORBIDDEN,
            Self::NotJson => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::TooLong(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::OtherPlan(_) | Self::Replayed => StatusCode::CONFLICT,
            Self::Gone => StatusCode::GONE,
            Self::TooManyListeners(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Full | Self::Busy | Self::Late | Self::Unsure | Self::Store => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn accepted(&self) -> Option<String> {
        match self {
            Self::NoSuchPlace => Some("GET /api/v1/ lists the endpoints".to_owned()),
            Self::UnknownParameter { accepted, .. } => Some(accepted.clone()),
            Self::Unknown { known, .. } => Some(known.clone()),
            Self::Role { needed, .. } => Some(format!("a token with the role {needed}")),
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

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = self.status();
        let plan = match &self {
            Self::OtherPlan(plan) => Some(plan.clone()),
            _ => None,
        };
        let told = Told { code: self.code(), text: self.to_string(), accepted: self.accepted(), plan };
        // Our own text and codes always serialise.
        let body = serde_json::to_vec(&Sent { error: told }).unwrap_or_default();
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

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        tracing::warn!(%error, "API: store read failed");
        if matches!(error, StoreError::Late { .. }) { Self::Late } else { Self::Store }
    }
}

impl From<BadOrder> for Refusal {
    fn from(error: BadOrder) -> Self {
        match error {
            BadOrder::Unknown { what, name, known } => Self::Unknown { what, name, known },
            BadOrder::Usage(text) => Self::BadOrder(text),
        }
    }
}
