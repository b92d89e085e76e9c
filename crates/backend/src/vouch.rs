//! The seam to a cluster that gives its pods tokens: whoever runs there needs no enrolment, because the cluster itself says
//! whose a token is and on which node its owner runs. Only a cluster that can say both has an implementation.

use std::pin::Pin;

use doctor_core::ids::NodeName;

/// Of the question, when it is answered. It may be awaited on any runtime.
pub type Answer = Pin<Box<dyn Future<Output = Result<NodeName, NotVouched>> + Send>>;

pub trait Voucher: Send + Sync {
    /// The node whose agent this token belongs to, as the cluster says it now. Nothing in the token is believed for its own
    /// sake, and the token goes nowhere but to the cluster.
    fn whose(&self, token: String) -> Answer;
}

/// Why a token speaks for no node. Its text never has the token in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotVouched {
    #[error("the token is not accepted: {0}")]
    Refused(String),
    /// Nothing is known of the token, good or bad: it may be tried again.
    #[error("nobody can say now whose the token is: {0}")]
    Unanswered(String),
}
