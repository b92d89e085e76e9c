//! One exchange with the controller: a signed report, and what the reply says.

use std::{path::PathBuf, time::Duration};

use doctor_checks::{
    document::{AgentReport, RunKey, Versions},
    drain_permit::DrainPermit,
    site_profiles::SiteProfiles,
};
use doctor_core::{ids::NodeName, time::Timestamp};

use super::{
    http::{self, Address, Reply},
    tls::{self, TlsClient},
    token::Token,
};
use crate::clock::now;

pub(super) const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Back-off after a rejection that only an operator can resolve: an unknown node or schema.
const OPERATOR_BACKOFF: Duration = Duration::from_secs(300);

/// The controller's address and this node's identity.
#[derive(Debug, Clone)]
pub struct Route {
    pub node: NodeName,
    pub credentials: NodeCredentials,
    pub address: Address,
    /// Set where the address is encrypted.
    pub tls: Option<TlsClient>,
    pub versions: Versions,
}

/// How this node authenticates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeCredentials {
    /// The key from enrollment.
    Key(RunKey),
    /// A file with a token that the cluster issues.
    Token(PathBuf),
}

/// The outcome of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SendOutcome {
    Accepted,
    /// Retry after the back-off, and no sooner than this.
    Retry(Duration),
    /// Permanently rejected.
    Rejected,
}

/// The result of one attempt.
pub(super) struct Attempt {
    pub(super) outcome: SendOutcome,
    /// Message for the log.
    pub(super) log_message: Option<String>,
    /// Valid from `sent_at`.
    pub(super) permit: Option<DrainPermit>,
    pub(super) sent_at: Timestamp,
    /// The site's profiles, if this node has others.
    pub(super) profiles: Option<SiteProfiles>,
}

pub(super) fn attempt(route: &Route, mut report: AgentReport, limit: Duration) -> Attempt {
    let sent_at = now();
    let failed = |outcome, log_message: String| Attempt {
        outcome,
        log_message: Some(log_message),
        permit: None,
        sent_at,
        profiles: None,
    };
    // The machine may have been renamed since the report was stored.
    report.node = route.node.clone();
    let (key, token) = match &route.credentials {
        NodeCredentials::Key(key) => (key.clone(), None),
        NodeCredentials::Token(file) => match Token::read(file) {
            Ok(token) => (token.key(), Some(token)),
            Err(error) => return failed(SendOutcome::Retry(Duration::ZERO), super::chain(&error)),
        },
    };
    let Ok(bytes) = report.sign(&key) else {
        return failed(SendOutcome::Rejected, "cannot serialise a report; it is counted as lost".to_owned());
    };
    match http::post(&route.address, route.tls.as_ref(), &route.node, token.as_ref(), &bytes, limit) {
        Ok(reply) => {
            let (outcome, log_message) = classify_reply(route, &reply);
            let open = |text: &String| DrainPermit::open(text, &route.node, report.sequence, &key);
            let open_profiles = |text: &String| SiteProfiles::open(text, &route.node, report.sequence, &key);
            Attempt {
                outcome,
                log_message,
                permit: reply.permit.as_ref().and_then(open),
                sent_at,
                profiles: reply.profiles.as_ref().and_then(open_profiles),
            }
        }
        Err(error) => {
            let why = match tls::tls_failure(&error) {
                Some(why) => format!("is not trusted: {why}"),
                None => format!("does not answer: {error}"),
            };
            failed(SendOutcome::Retry(Duration::ZERO), format!("{} {why}", route.address))
        }
    }
}

fn classify_reply(route: &Route, reply: &Reply) -> (SendOutcome, Option<String>) {
    let address = &route.address;
    let message = |text: &str| Some(format!("{address} {text} ({}: {})", reply.status, reply.text));
    match (reply.status, &route.credentials) {
        (200..=299, _) => (SendOutcome::Accepted, None),
        (401 | 403, NodeCredentials::Key(_)) => {
            (SendOutcome::Retry(OPERATOR_BACKOFF), message("does not accept this node's credential"))
        }
        // The cluster will renew the token.
        (401 | 403, NodeCredentials::Token(_)) => {
            (SendOutcome::Retry(MAX_BACKOFF), message("does not accept this node's token"))
        }
        (404 | 405, _) => (SendOutcome::Retry(OPERATOR_BACKOFF), message("does not accept agent reports")),
        (409, _) => {
            (SendOutcome::Retry(OPERATOR_BACKOFF), message("does not support reports of this doctor-node version"))
        }
        (400 | 411 | 413 | 422, _) => (SendOutcome::Rejected, message("rejected this report; it is counted as lost")),
        _ => (SendOutcome::Retry(reply.retry_after.unwrap_or_default().min(MAX_BACKOFF)), message("is busy")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_CONTENT: Reply = Reply { status: 0, retry_after: None, text: String::new(), permit: None, profiles: None };

    fn route(proof: NodeCredentials) -> Route {
        let (node, address) = (NodeName::new("n1").unwrap(), "http://127.0.0.1:1".parse().unwrap());
        Route { node, credentials: proof, address, tls: None, versions: Versions::default() }
    }

    fn fate(status: u16, retry_after: Option<u64>) -> SendOutcome {
        let reply =
            Reply { status, retry_after: retry_after.map(Duration::from_secs), text: String::new(), ..NO_CONTENT };
        classify_reply(&route(NodeCredentials::Key(RunKey::new([1; 32]))), &reply).0
    }

    #[test]
    fn a_report_is_removed_only_if_it_was_accepted_or_can_never_be() {
        assert_eq!(fate(200, None), SendOutcome::Accepted);
        for status in [401, 403, 404, 409] {
            assert_eq!(fate(status, None), SendOutcome::Retry(OPERATOR_BACKOFF), "{status}");
        }
        for status in [400, 413] {
            assert_eq!(fate(status, None), SendOutcome::Rejected, "{status}");
        }
        for status in [100, 302, 408, 429, 500, 502, 503, 999] {
            assert_eq!(fate(status, None), SendOutcome::Retry(Duration::ZERO), "{status}");
        }
        assert_eq!(fate(503, Some(3)), SendOutcome::Retry(Duration::from_secs(3)));
        assert_eq!(fate(503, Some(99_999)), SendOutcome::Retry(MAX_BACKOFF), "the wait has a limit");
    }

    #[test]
    fn a_rejected_or_missing_token_is_retried_soon_and_loses_no_report() {
        let token = route(NodeCredentials::Token("no/such/token".into()));
        for status in [401, 403] {
            let reply = Reply { status, ..NO_CONTENT };
            assert_eq!(classify_reply(&token, &reply).0, SendOutcome::Retry(MAX_BACKOFF), "{status}");
        }
        let tried = attempt(
            &token,
            AgentReport::heartbeat(token.node.clone(), 1, now(), token.versions.clone()),
            Duration::from_secs(1),
        );
        assert_eq!(tried.outcome, SendOutcome::Retry(Duration::ZERO));
        assert!(tried.log_message.is_some_and(|message| message.contains("cannot read the token no/such/token: ")));
    }
}
