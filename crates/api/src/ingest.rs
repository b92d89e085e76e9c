//! `POST /api/v1/ingest`: one signed report of one node, authenticated by the node's enrolment key or a token of its
//! cluster.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, to_bytes},
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use doctor_backend::{clock::Clock, vouch::NotVouched};
use doctor_checks::{
    document::{AgentReport, BadDocument, MAX_DOCUMENT_BYTES, RunKey},
    permit::PERMIT_HEADER,
};
use doctor_core::ids::NodeName;
use doctor_engine::inbox::AgentMessage;
use doctor_store::{
    Store,
    records::{AgentHeard, AgentKey},
};
use tokio::{sync::Semaphore, time::timeout};

use super::{
    mail::{Face, Mail},
    tokens::{NoToken, Tokens, token_of},
};

/// Deadline for memory to become available and the body to arrive.
const BODY: Duration = Duration::from_secs(20);
/// Deadline for the engine to store a report.
const KEEPING: Duration = Duration::from_secs(10);
const NODE: &str = "x-doctor-node";

/// State shared by the handlers.
pub(super) struct Desk {
    pub(super) store: Store,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) mail: Arc<Mail>,
    /// Remaining memory for bodies, in KiB.
    pub(super) room: Arc<Semaphore>,
    /// Set where the cluster vouches for agents.
    pub(super) tokens: Option<Tokens>,
}

/// Why a report was rejected.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("the header X-Doctor-Node with the node's name is missing or invalid")]
    NoNode,
    #[error("Content-Length is required")]
    NoLength,
    #[error("a report is at most {MAX_DOCUMENT_BYTES} bytes long")]
    TooLong,
    #[error("{0} is not enrolled: `doctor agent enroll {0}`")]
    Unknown(NodeName),
    #[error("the credential of {0} was revoked")]
    Revoked(NodeName),
    #[error("the report is not signed by {0}")]
    Forged(NodeName),
    #[error("the report is about {about}; {named} can report only about itself")]
    AboutOther { about: NodeName, named: NodeName },
    #[error(transparent)]
    NoToken(#[from] NoToken),
    #[error("tokens are not accepted, only enrolment keys: `doctor agent enroll {0}`")]
    NoTokens(NodeName),
    #[error(transparent)]
    NotVouched(#[from] NotVouched),
    #[error("the token belongs to the agent on {of}; it cannot report for {named}")]
    OtherNode { of: NodeName, named: NodeName },
    #[error("{0}")]
    Schema(BadDocument),
    #[error("{0}")]
    Malformed(String),
    #[error("this controller does not lead, or is still starting")]
    NotLeading,
    #[error("the report did not arrive in time")]
    Slow,
    #[error("the report queue is full")]
    Full,
    #[error("the report was not stored in time; is {0} a node of this cluster?")]
    NotKept(NodeName),
    #[error("the store does not respond")]
    Store,
}

impl Refused {
    const fn status(&self) -> StatusCode {
        match self {
            Self::NoNode | Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::NoLength => StatusCode::LENGTH_REQUIRED,
            Self::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Unknown(_)
            | Self::Revoked(_)
            | Self::NoToken(_)
            | Self::NoTokens(_)
            | Self::NotVouched(NotVouched::Refused(_)) => StatusCode::UNAUTHORIZED,
            Self::Forged(_) | Self::AboutOther { .. } | Self::OtherNode { .. } => StatusCode::FORBIDDEN,
            Self::Schema(_) => StatusCode::CONFLICT,
            Self::Slow => StatusCode::REQUEST_TIMEOUT,
            Self::NotLeading
            | Self::Full
            | Self::NotKept(_)
            | Self::Store
            | Self::NotVouched(NotVouched::Unanswered(_)) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let status = self.status();
        let text = format!("{self}\n");
        match status {
            StatusCode::SERVICE_UNAVAILABLE => (status, [(header::RETRY_AFTER, "2")], text).into_response(),
            _ => (status, text).into_response(),
        }
    }
}

pub(super) async fn ingest(State(desk): State<Arc<Desk>>, headers: HeaderMap, body: Body) -> Response {
    let node = named(&headers);
    match take(&desk, node.clone(), &headers, body).await {
        Ok(Taken { words, permit: Some(permit) }) => ([(PERMIT_HEADER, permit)], words).into_response(),
        Ok(Taken { words, permit: None }) => words.into_response(),
        Err(refused) => {
            let node = node.map_or_else(|| "unknown".to_owned(), |node| node.to_string());
            // Debug only: any client can connect, and a line for each would let it fill the disk.
            tracing::debug!(node, reason = %refused, "agent report rejected");
            refused.into_response()
        }
    }
}

fn named(headers: &HeaderMap) -> Option<NodeName> {
    NodeName::new(headers.get(NODE)?.to_str().ok()?).ok()
}

/// The response to an accepted report.
struct Taken {
    words: &'static str,
    /// Signed permit of the breaker for this node.
    permit: Option<String>,
}

/// Checks in this order: cheap ones first, and nothing is trusted before it is verified.
async fn take(desk: &Arc<Desk>, node: Option<NodeName>, headers: &HeaderMap, body: Body) -> Result<Taken, Refused> {
    let node = node.ok_or(Refused::NoNode)?;
    let length: u64 = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok())
        .ok_or(Refused::NoLength)?;
    if length > MAX_DOCUMENT_BYTES {
        return Err(Refused::TooLong);
    }
    if !desk.mail.is_leading() {
        return Err(Refused::NotLeading);
    }
    let Speaker { key, face } = speaker(desk, &node, headers).await?;
    let room = u32::try_from(length / 1024 + 1).map_err(|_| Refused::TooLong)?;
    let arriving = async {
        let place = Arc::clone(&desk.room).acquire_many_owned(room).await.map_err(|_| Refused::Full)?;
        let most = usize::try_from(length).map_err(|_| Refused::TooLong)?;
        let bytes = to_bytes(body, most).await.map_err(|_| Refused::Malformed("the body is incomplete".to_owned()))?;
        Ok::<_, Refused>((place, bytes))
    };
    let (_place, bytes) = timeout(BODY, arriving).await.map_err(|_| Refused::Slow)??;
    let bytes: Vec<u8> = bytes.into();
    let (report, key, bytes) = opened(&node, key, bytes).await?;
    let at = desk.clock.now();
    let AgentReport { number, at: sent, versions, .. } = &report;
    let number = *number;
    let heard = AgentHeard { at, number, sent: *sent, versions: versions.clone() };
    desk.mail.hear(&node, &face, heard);
    let taken = |key: &RunKey, words| {
        let permit = desk.mail.permit(&node).map(|permit| permit.sign(&node, number, key));
        Ok(Taken { words, permit })
    };
    if report.is_heartbeat() {
        return taken(&key, "heard\n");
    }
    drop(report);
    let message = AgentMessage { number: 0, node: node.clone(), key: key.clone(), bytes };
    let (waiting, kept) = desk.mail.post(message).ok_or(Refused::Full)?;
    match timeout(KEEPING, kept).await {
        Ok(Ok(())) => taken(&key, "kept\n"),
        _ => {
            desk.mail.withdraw(waiting);
            Err(Refused::NotKept(node))
        }
    }
}

/// The key that the report must be signed with, and the agent's identity.
struct Speaker {
    key: RunKey,
    face: Face,
}

/// Returns who may report for this node. Read from the store each time, so that a revocation takes effect immediately.
async fn speaker(desk: &Arc<Desk>, node: &NodeName, headers: &HeaderMap) -> Result<Speaker, Refused> {
    let vouched = match token_of(headers)? {
        None => None,
        Some(token) => {
            let tokens = desk.tokens.as_ref().ok_or_else(|| Refused::NoTokens(node.clone()))?;
            let (of, key) = tokens.whose(token).await?;
            if of != *node {
                return Err(Refused::OtherNode { of, named: node.clone() });
            }
            Some(key)
        }
    };
    let (asked, name) = (Arc::clone(desk), node.clone());
    let found = tokio::task::spawn_blocking(move || asked.store.agent_key(&name)).await.map_err(|_| Refused::Store)?;
    let found = found.map_err(|error| {
        tracing::warn!(%error, "cannot read an agent's key");
        Refused::Store
    })?;
    match (found, vouched) {
        (AgentKey::Revoked, _) => Err(Refused::Revoked(node.clone())),
        (AgentKey::Enrolled { key, heard, .. }, None) => Ok(Speaker { key, face: Face::Known(heard) }),
        (AgentKey::Vouched { .. } | AgentKey::Unknown, None) => Err(Refused::Unknown(node.clone())),
        (AgentKey::Enrolled { heard, .. } | AgentKey::Vouched { heard }, Some(key)) => {
            Ok(Speaker { key, face: Face::Known(heard) })
        }
        (AgentKey::Unknown, Some(key)) => Ok(Speaker { key, face: Face::New }),
    }
}

/// Opens a report: verified with that node's key, of a supported schema, and about that node.
async fn opened(node: &NodeName, key: RunKey, bytes: Vec<u8>) -> Result<(AgentReport, RunKey, Vec<u8>), Refused> {
    let work = move || (AgentReport::open(&bytes, &key), key, bytes);
    let (report, key, bytes) = tokio::task::spawn_blocking(work).await.map_err(|_| Refused::Full)?;
    let report = report.map_err(|error| match error {
        BadDocument::NoSignature | BadDocument::WrongSignature => Refused::Forged(node.clone()),
        BadDocument::TooLong { .. } => Refused::TooLong,
        BadDocument::NewerSchema { .. } | BadDocument::OlderSchema { .. } => Refused::Schema(error),
        BadDocument::Malformed(_) => Refused::Malformed(error.to_string()),
    })?;
    if report.node != *node {
        return Err(Refused::AboutOther { about: report.node, named: node.clone() });
    }
    Ok((report, key, bytes))
}
