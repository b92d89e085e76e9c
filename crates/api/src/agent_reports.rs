//! `POST /api/v1/ingest`: one signed report of one node, authenticated by the node's enrolment key or a token of its
//! cluster.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, to_bytes},
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use doctor_backend::{clock::Clock, token_review::TokenReviewError};
use doctor_checks::{
    document::{AgentReport, DocumentError, MAX_DOCUMENT_BYTES, RunKey},
    drain_permit::PERMIT_HEADER,
};
use doctor_core::ids::NodeName;
use doctor_engine::inbox::AgentMessage;
use doctor_store::{
    Store,
    records::{AgentConfirmation, AgentContact, AgentKey, ConfirmedRound},
};
use tokio::{sync::Semaphore, time::timeout};

use super::{
    agent_queue::{AgentIdentity, AgentQueue},
    token_review_cache::{BadAuthorization, TokenReviewCache, bearer_token},
};

/// Deadline for memory to become available and the body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(20);
/// Deadline for the engine to store a report.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);
const NODE_HEADER: &str = "x-doctor-node";

/// State shared by the handlers.
pub(super) struct IngestState {
    pub(super) store: Store,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) queue: Arc<AgentQueue>,
    /// Remaining memory for bodies, in KiB.
    pub(super) body_memory: Arc<Semaphore>,
    /// Set where the cluster vouches for agents.
    pub(super) token_reviews: Option<TokenReviewCache>,
}

/// Why a report was rejected.
#[derive(Debug, thiserror::Error)]
enum IngestError {
    #[error("the header X-Doctor-Node with the node's name is missing or invalid")]
    NoNode,
    #[error("Content-Length is required")]
    NoLength,
    #[error("a report is at most {MAX_DOCUMENT_BYTES} bytes long")]
    TooLong,
    #[error("{0} is not enrolled: `doctor agent enroll {0}`")]
    NotEnrolled(NodeName),
    #[error("the credential of {0} was revoked")]
    Revoked(NodeName),
    #[error("the report is not signed by {0}")]
    BadSignature(NodeName),
    #[error("the report is about {about}; {named} can report only about itself")]
    AboutOther { about: NodeName, named: NodeName },
    #[error(transparent)]
    BadAuthorization(#[from] BadAuthorization),
    #[error("tokens are not accepted, only enrolment keys: `doctor agent enroll {0}`")]
    TokensDisabled(NodeName),
    #[error(transparent)]
    NotVouched(#[from] TokenReviewError),
    #[error("the token belongs to the agent on {of}; it cannot report for {named}")]
    OtherNode { of: NodeName, named: NodeName },
    #[error("{0}")]
    Schema(DocumentError),
    #[error("{0}")]
    Malformed(String),
    #[error("this controller is not the leader, or is still starting")]
    NotLeading,
    #[error("the report did not arrive in time")]
    BodyTimeout,
    #[error("the report queue is full")]
    QueueFull,
    #[error("the report was not stored in time; is {0} a node of this cluster?")]
    NotStored(NodeName),
    #[error("the store does not respond")]
    StoreUnavailable,
}

impl IngestError {
    const fn status(&self) -> StatusCode {
        match self {
            Self::NoNode | Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::NoLength => StatusCode::LENGTH_REQUIRED,
            Self::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
            Self::NotEnrolled(_)
            | Self::Revoked(_)
            | Self::BadAuthorization(_)
            | Self::TokensDisabled(_)
            | Self::NotVouched(TokenReviewError::Rejected(_)) => StatusCode::UNAUTHORIZED,
            Self::BadSignature(_) | Self::AboutOther { .. } | Self::OtherNode { .. } => StatusCode::FORBIDDEN,
            Self::Schema(_) => StatusCode::CONFLICT,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::NotLeading
            | Self::QueueFull
            | Self::NotStored(_)
            | Self::StoreUnavailable
            | Self::NotVouched(TokenReviewError::Unavailable(_)) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

impl IntoResponse for IngestError {
    fn into_response(self) -> Response {
        let status = self.status();
        let text = format!("{self}\n");
        match status {
            StatusCode::SERVICE_UNAVAILABLE => (status, [(header::RETRY_AFTER, "2")], text).into_response(),
            _ => (status, text).into_response(),
        }
    }
}

pub(super) async fn ingest(State(state): State<Arc<IngestState>>, headers: HeaderMap, body: Body) -> Response {
    let node = node_header(&headers);
    match accept_report(&state, node.clone(), &headers, body).await {
        Ok(IngestOutcome { text, permit: Some(permit) }) => ([(PERMIT_HEADER, permit)], text).into_response(),
        Ok(IngestOutcome { text, permit: None }) => text.into_response(),
        Err(error) => {
            let node = node.map_or_else(|| "unknown".to_owned(), |node| node.to_string());
            // Debug only: any client can connect, and a line for each would let it fill the disk.
            tracing::debug!(node, reason = %error, "agent report rejected");
            error.into_response()
        }
    }
}

fn node_header(headers: &HeaderMap) -> Option<NodeName> {
    NodeName::new(headers.get(NODE_HEADER)?.to_str().ok()?).ok()
}

/// The response to an accepted report.
struct IngestOutcome {
    /// One line, or the site's profiles for an agent that has others.
    text: String,
    /// Signed permit of the breaker for this node.
    permit: Option<String>,
}

/// Checks in this order: cheap ones first, and nothing is trusted before it is verified.
async fn accept_report(
    state: &Arc<IngestState>,
    node: Option<NodeName>,
    headers: &HeaderMap,
    body: Body,
) -> Result<IngestOutcome, IngestError> {
    let node = node.ok_or(IngestError::NoNode)?;
    let length: u64 = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|length| length.to_str().ok()?.parse().ok())
        .ok_or(IngestError::NoLength)?;
    if length > MAX_DOCUMENT_BYTES {
        return Err(IngestError::TooLong);
    }
    if !state.queue.is_leading() {
        return Err(IngestError::NotLeading);
    }
    let ReportAuth { key, identity } = authenticate(state, &node, headers).await?;
    let kib = u32::try_from(length / 1024 + 1).map_err(|_| IngestError::TooLong)?;
    let read_body = async {
        let memory_permit =
            Arc::clone(&state.body_memory).acquire_many_owned(kib).await.map_err(|_| IngestError::QueueFull)?;
        let max_bytes = usize::try_from(length).map_err(|_| IngestError::TooLong)?;
        let bytes =
            to_bytes(body, max_bytes).await.map_err(|_| IngestError::Malformed("the body is incomplete".to_owned()))?;
        Ok::<_, IngestError>((memory_permit, bytes))
    };
    let (_memory_permit, bytes) = timeout(BODY_TIMEOUT, read_body).await.map_err(|_| IngestError::BodyTimeout)??;
    let bytes: Vec<u8> = bytes.into();
    let (report, key, bytes) = verify_report(&node, key, bytes).await?;
    let at = state.clock.now();
    let is_heartbeat = report.is_heartbeat();
    let AgentReport { sequence: number, at: sent, versions, confirmed, profiles, .. } = report;
    let contact = AgentContact { at, number, sent, versions };
    // The engine stores what a report confirms, together with its results.
    let confirmed = confirmed.filter(|_| is_heartbeat).map(|confirmed| AgentConfirmation {
        node: node.clone(),
        through: confirmed.through,
        rounds: ConfirmedRound::from_message(confirmed, at),
    });
    state.queue.record_contact(&node, &identity, contact, confirmed);
    if is_heartbeat {
        return Ok(respond(state, &node, number, profiles, key, "heard\n").await);
    }
    let message = AgentMessage { number: 0, node: node.clone(), key: key.clone(), bytes };
    let (message_number, stored) = state.queue.enqueue(message).ok_or(IngestError::QueueFull)?;
    match timeout(STORE_TIMEOUT, stored).await {
        Ok(Ok(())) => Ok(respond(state, &node, number, profiles, key, "kept\n").await),
        _ => {
            state.queue.withdraw(message_number);
            Err(IngestError::NotStored(node))
        }
    }
}

/// Builds the response to an accepted message: with the permit of this moment, and with the site's profiles if the agent
/// has others.
async fn respond(
    state: &Arc<IngestState>,
    node: &NodeName,
    number: u64,
    agent_profiles: Option<String>,
    key: RunKey,
    text: &'static str,
) -> IngestOutcome {
    let permit = state.queue.permit(node).map(|permit| permit.sign(node, number, &key));
    let site = state.queue.site_profiles();
    let text = match agent_profiles.filter(|digest| *digest != site.digest) {
        None => text.into(),
        Some(_) => {
            let node = node.clone();
            let sign = move || site.profiles.sign(&node, number, &key);
            let signed = tokio::task::spawn_blocking(sign).await;
            // The message is accepted in any case; the agent's next one gets them.
            signed.ok().and_then(Result::ok).unwrap_or_else(|| text.into())
        }
    };
    IngestOutcome { text, permit }
}

/// The key that the report must be signed with, and the agent's identity.
struct ReportAuth {
    key: RunKey,
    identity: AgentIdentity,
}

/// Returns who may report for this node. Read from the store each time, so that a revocation takes effect immediately.
async fn authenticate(
    state: &Arc<IngestState>,
    node: &NodeName,
    headers: &HeaderMap,
) -> Result<ReportAuth, IngestError> {
    let token_key = match bearer_token(headers)? {
        None => None,
        Some(token) => {
            let tokens = state.token_reviews.as_ref().ok_or_else(|| IngestError::TokensDisabled(node.clone()))?;
            let (of, key) = tokens.node_of_token(token).await?;
            if of != *node {
                return Err(IngestError::OtherNode { of, named: node.clone() });
            }
            Some(key)
        }
    };
    let (shared, name) = (Arc::clone(state), node.clone());
    let found = tokio::task::spawn_blocking(move || shared.store.agent_key(&name))
        .await
        .map_err(|_| IngestError::StoreUnavailable)?;
    let found = found.map_err(|error| {
        tracing::warn!(%error, "cannot read an agent's key");
        IngestError::StoreUnavailable
    })?;
    match (found, token_key) {
        (AgentKey::Revoked, _) => Err(IngestError::Revoked(node.clone())),
        (AgentKey::Enrolled { key, last_contact: heard, .. }, None) => {
            Ok(ReportAuth { key, identity: AgentIdentity::Known(heard) })
        }
        (AgentKey::ClusterToken { .. } | AgentKey::Unknown, None) => Err(IngestError::NotEnrolled(node.clone())),
        (
            AgentKey::Enrolled { last_contact: heard, .. } | AgentKey::ClusterToken { last_contact: heard },
            Some(key),
        ) => Ok(ReportAuth { key, identity: AgentIdentity::Known(heard) }),
        (AgentKey::Unknown, Some(key)) => Ok(ReportAuth { key, identity: AgentIdentity::New }),
    }
}

/// Opens a report: verified with that node's key, of a supported schema, and about that node.
async fn verify_report(
    node: &NodeName,
    key: RunKey,
    bytes: Vec<u8>,
) -> Result<(AgentReport, RunKey, Vec<u8>), IngestError> {
    let work = move || (AgentReport::open(&bytes, &key), key, bytes);
    let (report, key, bytes) = tokio::task::spawn_blocking(work).await.map_err(|_| IngestError::QueueFull)?;
    let report = report.map_err(|error| match error {
        DocumentError::MissingSignature | DocumentError::WrongSignature => IngestError::BadSignature(node.clone()),
        DocumentError::TooLong { .. } => IngestError::TooLong,
        DocumentError::NewerSchema { .. } | DocumentError::OlderSchema { .. } => IngestError::Schema(error),
        DocumentError::Malformed(_) => IngestError::Malformed(error.to_string()),
    })?;
    if report.node != *node {
        return Err(IngestError::AboutOther { about: report.node, named: node.clone() });
    }
    Ok((report, key, bytes))
}
