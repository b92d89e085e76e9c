//! Token review by clusters that issue tokens to their pods. An agent there needs no enrolment: the cluster identifies the
//! token's owner and the node on which that owner runs. Only clusters that report both have an implementation.

use std::pin::Pin;

use doctor_core::ids::NodeName;

/// The pending result of a token review. It may be awaited on any runtime.
pub type ReviewFuture = Pin<Box<dyn Future<Output = Result<NodeName, TokenReviewError>> + Send>>;

pub trait TokenReviewer: Send + Sync {
    /// Returns the node whose agent owns this token, according to the cluster now. An implementation trusts no claim in the token
    /// itself and sends the token only to the cluster.
    fn review(&self, token: String) -> ReviewFuture;
}

/// Why a token identifies no node. The text never contains the token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenReviewError {
    #[error("the token is not accepted: {0}")]
    Rejected(String),
    /// The token is neither accepted nor rejected; the caller may retry.
    #[error("token review failed: {0}")]
    Unavailable(String),
}
