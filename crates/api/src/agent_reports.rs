//! `POST /api/v1/ingest`: one signed report of one node, authenticated by the node's enrolment key or a token of its
//! cluster.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension,
    body::Body,
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
use doctor_store::{
    Store, SubmitOutcome,
    messages::{Enqueued, MessageContent, VerifiedMessage},
    records::{AgentConfirmation, AgentContact, AgentKey, ConfirmedRound},
};
use futures_util::StreamExt;
use tokio::{sync::oneshot, time::timeout};

use super::{
    agent_queue::{AgentIdentity, AgentQueue},
    body_memory::{BodyMemory, BodyPermit, NoMemory},
    connections::Peer,
    token_review_cache::{BadAuthorization, TokenReviewCache, bearer_token},
};

/// Deadline for the body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(20);
/// Deadline for a message to become durable.
const STORE_TIMEOUT: Duration = Duration::from_secs(10);
const NODE_HEADER: &str = "x-doctor-node";

/// State shared by the handlers.
pub(super) struct IngestState {
    pub(super) store: Store,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) queue: Arc<AgentQueue>,
    pub(super) body_memory: BodyMemory,
    /// Set where the cluster vouches for agents.
    pub(super) token_reviews: Option<TokenReviewCache>,
}

/// Why the body of a message was not read.
#[derive(Debug, thiserror::Error)]
pub(super) enum BodyError {
    #[error("Content-Length is required")]
    NoLength,
    #[error("a message is at most {MAX_DOCUMENT_BYTES} bytes long")]
    TooLong,
    /// The sender repeats the message: the network may have been too slow or interrupted.
    #[error("the body did not arrive in time, or not to its end")]
    Late,
    #[error("too many messages arrive: there is no memory for this one")]
    NoMemory,
}

impl From<NoMemory> for BodyError {
    fn from(_: NoMemory) -> Self {
        Self::NoMemory
    }
}

impl BodyError {
    pub(super) const fn status(&self) -> StatusCode {
        match self {
            Self::NoLength => StatusCode::LENGTH_REQUIRED,
            Self::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Late => StatusCode::REQUEST_TIMEOUT,
            Self::NoMemory => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// Why a report was rejected.
#[derive(Debug, thiserror::Error)]
enum IngestError {
    #[error("the header X-Doctor-Node with the node's name is missing or invalid")]
    NoNode,
    #[error(transparent)]
    Body(#[from] BodyError),
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
    #[error("the ingest queue is full")]
    QueueFull,
    #[error("too many reports of {0} wait")]
    NodeQueueFull(NodeName),
    #[error("{0} was not a node of this cluster when it was last observed")]
    NotInCluster(NodeName),
    #[error("the report was not stored in time")]
    NotStored,
    #[error("the store does not respond")]
    StoreUnavailable,
}

impl IngestError {
    const fn status(&self) -> StatusCode {
        match self {
            Self::NoNode | Self::Malformed(_) => StatusCode::BAD_REQUEST,
            Self::Body(error) => error.status(),
            Self::NotEnrolled(_)
            | Self::Revoked(_)
            | Self::BadAuthorization(_)
            | Self::TokensDisabled(_)
            | Self::NotVouched(TokenReviewError::Rejected(_)) => StatusCode::UNAUTHORIZED,
            Self::BadSignature(_) | Self::AboutOther { .. } | Self::OtherNode { .. } => StatusCode::FORBIDDEN,
            Self::Schema(_) => StatusCode::CONFLICT,
            Self::NotLeading
            | Self::QueueFull
            | Self::NodeQueueFull(_)
            | Self::NotInCluster(_)
            | Self::NotStored
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

pub(super) async fn ingest(
    State(state): State<Arc<IngestState>>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let node = node_header(&headers);
    match accept_report(&state, node.clone(), peer, &headers, body).await {
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

pub(super) fn node_header(headers: &HeaderMap) -> Option<NodeName> {
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
    peer: Peer,
    headers: &HeaderMap,
    body: Body,
) -> Result<IngestOutcome, IngestError> {
    let node = node.ok_or(IngestError::NoNode)?;
    let length = announced_length(headers, MAX_DOCUMENT_BYTES)?;
    // Only the leader knows when agents last reported, and which nodes they may drain.
    if !state.queue.is_leading() {
        return Err(IngestError::NotLeading);
    }
    let ReportAuth { key, identity } = authenticate(state, &node, headers).await?;
    let body = read_body(state, peer, length, body).await?;
    let (shared, name) = (Arc::clone(state), node.clone());
    let verify = move || verify_report(&shared, &name, ReportAuth { key, identity }, body);
    let verified = tokio::task::spawn_blocking(verify).await.map_err(|_| IngestError::QueueFull)??;
    let VerifiedReport { number, profiles, key, durable } = verified;
    let Some(durable) = durable else {
        return Ok(respond(state, &node, number, profiles, key, "heard\n").await);
    };
    match timeout(STORE_TIMEOUT, durable).await {
        Ok(Ok(Ok(Enqueued::QueueFull))) => Err(IngestError::QueueFull),
        Ok(Ok(Ok(Enqueued::NodeQueueFull))) => Err(IngestError::NodeQueueFull(node)),
        Ok(Ok(Ok(_))) => {
            state.queue.trigger_cycle();
            Ok(respond(state, &node, number, profiles, key, "kept\n").await)
        }
        Ok(Ok(Err(error))) => {
            tracing::warn!(%error, "cannot store an agent's report");
            Err(IngestError::StoreUnavailable)
        }
        _ => Err(IngestError::NotStored),
    }
}

/// Returns the length of the body that a sender announces.
pub(super) fn announced_length(headers: &HeaderMap, max: u64) -> Result<u64, BodyError> {
    let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
    let length: u64 = length.ok_or(BodyError::NoLength)?;
    if length > max { Err(BodyError::TooLong) } else { Ok(length) }
}

/// Reads a body of the announced length, as far as there is memory for it.
pub(super) async fn read_body(
    state: &IngestState,
    Peer(peer): Peer,
    length: u64,
    body: Body,
) -> Result<(Vec<u8>, BodyPermit), BodyError> {
    let announced = usize::try_from(length).map_err(|_| BodyError::TooLong)?;
    let mut received = state.body_memory.begin(peer, announced);
    let read = async {
        let mut pieces = body.into_data_stream();
        while let Some(piece) = pieces.next().await {
            received.add(&piece.map_err(|_| BodyError::Late)?)?;
        }
        if received.is_complete() { Ok(()) } else { Err(BodyError::Late) }
    };
    timeout(BODY_TIMEOUT, read).await.map_err(|_| BodyError::Late)??;
    Ok(received.into_parts())
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

/// A verified report on its way into the ingest queue.
struct VerifiedReport {
    number: u64,
    /// Digest of the site's profiles that the agent has.
    profiles: Option<String>,
    key: RunKey,
    /// `None`: a heartbeat, which is recorded with others.
    durable: Option<oneshot::Receiver<SubmitOutcome>>,
}

/// Opens a report: verified with that node's key, of a supported schema, and about that node. Records the contact, and
/// submits the report unless it is a heartbeat.
fn verify_report(
    state: &IngestState,
    node: &NodeName,
    auth: ReportAuth,
    (bytes, memory): (Vec<u8>, BodyPermit),
) -> Result<VerifiedReport, IngestError> {
    let ReportAuth { key, identity } = auth;
    let report = AgentReport::open(&bytes, &key).map_err(|error| match error {
        DocumentError::MissingSignature | DocumentError::WrongSignature => IngestError::BadSignature(node.clone()),
        DocumentError::TooLong { .. } => BodyError::TooLong.into(),
        DocumentError::NewerSchema { .. } | DocumentError::OlderSchema { .. } => IngestError::Schema(error),
        DocumentError::Malformed(_) => IngestError::Malformed(error.to_string()),
    })?;
    if report.node != *node {
        return Err(IngestError::AboutOther { about: report.node, named: node.clone() });
    }
    let (at, is_heartbeat) = (state.clock.now(), report.is_heartbeat());
    let contact = AgentContact { at, number: report.sequence, sent: report.at, versions: report.versions.clone() };
    // The engine stores what a report confirms, together with its results.
    let confirmed = report.confirmed.as_ref().filter(|_| is_heartbeat).map(|confirmed| AgentConfirmation {
        node: node.clone(),
        through: confirmed.through,
        rounds: ConfirmedRound::from_message(confirmed.clone(), at),
    });
    state.queue.record_contact(node, &identity, contact, confirmed);
    let (number, profiles) = (report.sequence, report.profiles.clone());
    if is_heartbeat {
        return Ok(VerifiedReport { number, profiles, key, durable: None });
    }
    if !state.queue.is_in_cluster(node) {
        return Err(IngestError::NotInCluster(node.clone()));
    }
    let content = MessageContent::Report(Box::new(report));
    let durable = state.queue.submit(VerifiedMessage { node: node.clone(), received: at, content, bytes }, memory);
    Ok(VerifiedReport { number, profiles, key, durable: Some(durable) })
}
