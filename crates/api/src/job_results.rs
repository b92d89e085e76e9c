//! `POST /api/v1/results`: the signed result document of one node of one run, sent by its job.
//!
//! The headers `X-Doctor-Run` and `X-Doctor-Node` name the run and the node, so that the key is known before the body is
//! read. Each run and node has one result: the first one counts, and a repetition is answered with 200. The response
//! comes when the document is durable; a controller that does not lead accepts it, too, because the ingest queue is in
//! the store and the leader enters it.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension,
    body::Body,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use doctor_checks::{
    document::{Document, DocumentError, MAX_DOCUMENT_BYTES},
    result_transport::RUN_HEADER,
};
use doctor_core::ids::{NodeName, RunId};
use doctor_engine::{rejection::Rejection, result_validation};
use doctor_store::{
    SubmitOutcome,
    messages::{Enqueued, MessageContent, VerifiedMessage},
    records::StoredRun,
};
use tokio::{sync::oneshot, time::timeout};

use super::{
    agent_reports::{BodyError, IngestState, announced_length, node_header, read_body},
    body_memory::BodyPermit,
    connections::Peer,
};

/// Deadline for a document to become durable.
const STORE_TIMEOUT: Duration = Duration::from_secs(20);

/// Why a result was not accepted.
#[derive(Debug, thiserror::Error)]
enum ResultError {
    #[error("the header X-Doctor-Run with the run's id or X-Doctor-Node with the node's name is missing or invalid")]
    NoSubject,
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error("there is no run {run} on {node}")]
    UnknownRun { run: RunId, node: NodeName },
    #[error("{run} has ended: no result of {node} is accepted any more")]
    RunEnded { run: RunId, node: NodeName },
    #[error("the document is not signed with the key of {0}")]
    BadSignature(RunId),
    #[error("rejected: {0}")]
    OtherSubject(Rejection),
    #[error("rejected: {0}")]
    Unacceptable(Rejection),
    #[error("the ingest queue is full")]
    QueueFull,
    #[error("too many messages of {0} wait")]
    NodeQueueFull(NodeName),
    #[error("the result was not stored in time")]
    NotStored,
    #[error("the store does not respond")]
    StoreUnavailable,
}

impl ResultError {
    const fn status(&self) -> StatusCode {
        match self {
            Self::NoSubject => StatusCode::BAD_REQUEST,
            Self::Body(error) => error.status(),
            Self::UnknownRun { .. } => StatusCode::NOT_FOUND,
            Self::RunEnded { .. } => StatusCode::GONE,
            Self::BadSignature(_) | Self::OtherSubject(_) => StatusCode::FORBIDDEN,
            Self::Unacceptable(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::QueueFull | Self::NodeQueueFull(_) | Self::NotStored | Self::StoreUnavailable => {
                StatusCode::SERVICE_UNAVAILABLE
            }
        }
    }
}

impl IntoResponse for ResultError {
    fn into_response(self) -> Response {
        let status = self.status();
        let text = format!("{self}\n");
        match status {
            StatusCode::SERVICE_UNAVAILABLE => (status, [(header::RETRY_AFTER, "2")], text).into_response(),
            _ => (status, text).into_response(),
        }
    }
}

pub(super) async fn post_result(
    State(state): State<Arc<IngestState>>,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    match accept_result(&state, peer, &headers, body).await {
        Ok(Enqueued::Duplicate) => "accepted before\n".into_response(),
        Ok(_) => (StatusCode::ACCEPTED, "accepted\n").into_response(),
        Err(error) => {
            // Debug only: any client can connect, and a line for each would let it fill the disk.
            tracing::debug!(reason = %error, "posted result rejected");
            error.into_response()
        }
    }
}

fn run_header(headers: &HeaderMap) -> Option<RunId> {
    headers.get(RUN_HEADER)?.to_str().ok()?.parse().ok()
}

/// Checks in this order: cheap ones first, and nothing is trusted before it is verified.
async fn accept_result(
    state: &Arc<IngestState>,
    peer: Peer,
    headers: &HeaderMap,
    body: Body,
) -> Result<Enqueued, ResultError> {
    let (run, node) = run_header(headers).zip(node_header(headers)).ok_or(ResultError::NoSubject)?;
    let length = announced_length(headers, MAX_DOCUMENT_BYTES)?;
    let stored = find_run(state, run, &node).await?;
    let body = read_body(state, peer, length, body).await?;
    let (shared, name) = (Arc::clone(state), node.clone());
    let durable = tokio::task::spawn_blocking(move || submit(&shared, &stored, name, body)).await;
    let durable = durable.map_err(|_| ResultError::StoreUnavailable)??;
    match timeout(STORE_TIMEOUT, durable).await {
        Ok(Ok(Ok(accepted @ (Enqueued::Queued | Enqueued::Duplicate)))) => {
            state.queue.trigger_cycle();
            Ok(accepted)
        }
        Ok(Ok(Ok(Enqueued::RunEnded))) => Err(ResultError::RunEnded { run, node }),
        Ok(Ok(Ok(Enqueued::UnknownRun))) => Err(ResultError::UnknownRun { run, node }),
        Ok(Ok(Ok(Enqueued::QueueFull))) => Err(ResultError::QueueFull),
        Ok(Ok(Ok(Enqueued::NodeQueueFull))) => Err(ResultError::NodeQueueFull(node)),
        Ok(Ok(Err(error))) => {
            tracing::warn!(%error, %run, %node, "cannot store a posted result");
            Err(ResultError::StoreUnavailable)
        }
        _ => Err(ResultError::NotStored),
    }
}

/// Returns the active run on this node.
async fn find_run(state: &Arc<IngestState>, run: RunId, node: &NodeName) -> Result<StoredRun, ResultError> {
    let (shared, name) = (Arc::clone(state), node.clone());
    let find = move || {
        let active = shared.store.active_run(run)?;
        match active.filter(|stored| stored.run.nodes.contains(&name)) {
            Some(stored) => Ok(Ok(stored)),
            None if shared.store.had_run(run, &name)? => Ok(Err(ResultError::RunEnded { run, node: name })),
            None => Ok(Err(ResultError::UnknownRun { run, node: name })),
        }
    };
    let found = tokio::task::spawn_blocking(find).await.map_err(|_| ResultError::StoreUnavailable)?;
    found.map_err(|error: doctor_store::StoreError| {
        tracing::warn!(%error, %run, "cannot read a run's key");
        ResultError::StoreUnavailable
    })?
}

/// Verifies a document with its run's key, checks that it is of this run and node, and submits it.
fn submit(
    state: &IngestState,
    stored: &StoredRun,
    node: NodeName,
    (bytes, memory): (Vec<u8>, BodyPermit),
) -> Result<oneshot::Receiver<SubmitOutcome>, ResultError> {
    let run = stored.run.id;
    let document = Document::open(&bytes, &stored.key).map_err(|error| match error {
        DocumentError::MissingSignature | DocumentError::WrongSignature => ResultError::BadSignature(run),
        other => ResultError::Unacceptable(other.into()),
    })?;
    if document.node != node {
        return Err(ResultError::OtherSubject(Rejection::WrongNode(document.node)));
    }
    result_validation::check_document(&stored.run, &document).map_err(|why| match why {
        Rejection::WrongRun(_) | Rejection::WrongNode(_) => ResultError::OtherSubject(why),
        _ => ResultError::Unacceptable(why),
    })?;
    let content = MessageContent::Document(Box::new(document));
    Ok(state.queue.submit(VerifiedMessage { node, received: state.clock.now(), content, bytes }, memory))
}
