//! Sends spooled reports in order, and heartbeats while there are none.
//!
//! It has its own thread so that an unresponsive controller does not delay checks. The back-off grows with each failure
//! and is jittered per node, so that the fleet does not overload a controller that comes back.

use std::{
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_checks::{
    document::{AgentReport, RunKey, Versions},
    drain_permit::DrainPermit,
};
use doctor_core::{ids::NodeName, node::Hardware, time::Timestamp};

use super::{
    drain_permit,
    http::{self, Address, Reply},
    schedule::spread,
    spool::{NextMessage, Spool},
    token::Token,
};
use crate::{clock::now, heap};

/// Interval of heartbeats while there is nothing to report.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// The agent endpoint replies once the report is stored, for which it allows the controller ten seconds.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(20);
/// Limit of an exchange during shutdown.
const SHUTDOWN_EXCHANGE_TIMEOUT: Duration = Duration::from_millis(1500);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Back-off after a rejection that only an operator can resolve: an unknown node or schema.
const OPERATOR_BACKOFF: Duration = Duration::from_secs(300);

/// The controller's address and this node's identity.
#[derive(Debug, Clone)]
pub struct Route {
    pub node: NodeName,
    pub credentials: NodeCredentials,
    pub address: Address,
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

/// The queue between the checking thread and the sending thread.
#[derive(Debug)]
pub struct Outbox {
    inside: Mutex<Inside>,
    wake: Condvar,
}

#[derive(Debug)]
struct Inside {
    spool: Spool,
    route: Arc<Route>,
    /// Directory where the controller's permits are stored.
    permit_directory: PathBuf,
    closing: bool,
    /// Reports were dropped, so all results must be reported again.
    full_report_requested: bool,
}

impl Outbox {
    pub fn new(spool: Spool, route: Route, state: PathBuf) -> Self {
        let say_all = spool.lost_count() > 0;
        let inside = Inside {
            spool,
            route: Arc::new(route),
            permit_directory: state,
            closing: false,
            full_report_requested: say_all,
        };
        Self { inside: Mutex::new(inside), wake: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers and stores a report and wakes the sender. Returns the spool's disk error, if any.
    pub fn add(&self, make: impl FnOnce(u64) -> AgentReport) -> Option<String> {
        let mut inside = self.lock();
        let number = inside.spool.number();
        let lost = inside.spool.lost_count();
        inside.spool.add(&make(number));
        inside.full_report_requested |= inside.spool.lost_count() > lost;
        self.wake.notify_one();
        inside.spool.disk_error().map(str::to_owned)
    }

    /// Returns whether all results must be reported again, and clears the request. True only once the spool is empty:
    /// before that, the new reports might be dropped too.
    pub fn take_full_report_request(&self) -> bool {
        let mut inside = self.lock();
        let now = inside.full_report_requested && inside.spool.is_empty();
        inside.full_report_requested &= !now;
        now
    }

    pub fn set_route(&self, route: Route) {
        self.lock().route = Arc::new(route);
        self.wake.notify_one();
    }

    /// Tells the sender to stop after what it can send now; the rest stays on disk.
    pub fn close(&self) {
        self.lock().closing = true;
        self.wake.notify_one();
    }

    pub fn waiting(&self) -> usize {
        self.lock().spool.len()
    }
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

/// Runs until the outbox is closed.
pub fn run(outbox: &Outbox, log: &dyn Fn(&str)) {
    let mut sender = Sender { outbox, log, last_error: None, failures: 0, last_accepted: None };
    while sender.step() {}
}

struct Sender<'a> {
    outbox: &'a Outbox,
    log: &'a dyn Fn(&str),
    /// The last message about the controller, to log each one once.
    last_error: Option<String>,
    failures: u32,
    /// When the controller last accepted a message.
    last_accepted: Option<Instant>,
}

impl Sender<'_> {
    /// Sends one message or waits once. Returns false when finished.
    fn step(&mut self) -> bool {
        let mut inside = self.outbox.lock();
        let next = inside.spool.next_message();
        if inside.closing && (next.is_none() || self.failures > 0) {
            inside.spool.mark_retry();
            return false;
        }
        let quiet = self.last_accepted.map_or(HEARTBEAT, |last| last.elapsed());
        if next.is_none() && quiet < HEARTBEAT {
            let (_inside, _timeout) =
                self.outbox.wake.wait_timeout(inside, HEARTBEAT - quiet).unwrap_or_else(PoisonError::into_inner);
            return true;
        }
        let limit = if inside.closing { SHUTDOWN_EXCHANGE_TIMEOUT } else { EXCHANGE_TIMEOUT };
        let route = Arc::clone(&inside.route);
        let mut report = match &next {
            Some(next) => next.message(&route),
            None => empty_report(&route, inside.spool.number()),
        };
        let behind = inside.spool.len() - usize::from(matches!(next, Some(NextMessage::Report(_))));
        report.versions.queued = u32::try_from(behind).unwrap_or(u32::MAX);
        drop(inside);
        let tried = attempt(&route, report, limit);
        let was_large = next.is_some();
        self.handle_outcome(next.as_ref(), tried);
        drop(next);
        if was_large {
            heap::give_back();
        }
        true
    }

    fn handle_outcome(&mut self, next: Option<&NextMessage>, tried: Attempt) {
        let Attempt { outcome, log_message, permit, sent_at } = tried;
        let mut inside = self.outbox.lock();
        match (&outcome, next) {
            (SendOutcome::Accepted, next) => {
                // A lost permit is renewed within a minute; until then hooks do not drain.
                let _stored = drain_permit::store(&inside.permit_directory, permit, sent_at);
                if let Some(next) = next {
                    inside.spool.mark_accepted(next);
                }
                self.last_accepted = Some(Instant::now());
                if self.last_error.take().is_some() {
                    (self.log)("the controller accepts reports again");
                }
                self.failures = 0;
            }
            (SendOutcome::Rejected, Some(next)) => {
                inside.spool.mark_rejected(next);
                inside.full_report_requested = true;
            }
            (SendOutcome::Rejected, None) | (SendOutcome::Retry(_), _) => inside.spool.mark_retry(),
        }
        if let Some(log_message) = log_message
            && self.last_error.as_ref() != Some(&log_message)
        {
            (self.log)(&log_message);
            self.last_error = Some(log_message);
        }
        let at_least = match outcome {
            SendOutcome::Accepted => return,
            SendOutcome::Retry(at_least) => at_least,
            SendOutcome::Rejected => Duration::ZERO,
        };
        // An overloaded endpoint sends the same retry-after to all nodes; the jitter spreads them.
        let wait = at_least.max(back_off(self.failures, jitter(inside.route.node.as_str())));
        self.failures = self.failures.saturating_add(1);
        self.pause(inside, wait);
    }

    /// Waits. A stop or a new route ends the wait early; new reports do not.
    fn pause(&self, mut inside: MutexGuard<'_, Inside>, wait: Duration) {
        let deadline = Instant::now() + wait;
        let route = Arc::clone(&inside.route);
        while !inside.closing && Arc::ptr_eq(&route, &inside.route) {
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return;
            }
            inside = self.outbox.wake.wait_timeout(inside, remaining).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl NextMessage {
    /// Builds the message for this entry.
    pub(super) fn message(&self, route: &Route) -> AgentReport {
        match self {
            Self::Report(report) => (**report).clone(),
            Self::Lost { number, dropped } => {
                AgentReport { dropped: Some(dropped.clone()), ..empty_report(route, *number) }
            }
        }
    }
}

fn empty_report(route: &Route, number: u64) -> AgentReport {
    AgentReport {
        uptime: None,
        node: route.node.clone(),
        hardware: Hardware::default(),
        sequence: number,
        at: now(),
        checks: Vec::new(),
        versions: route.versions.clone(),
        dropped: None,
    }
}

/// The result of one attempt.
pub(super) struct Attempt {
    pub(super) outcome: SendOutcome,
    /// Message for the log.
    log_message: Option<String>,
    /// Valid from `sent_at`.
    pub(super) permit: Option<DrainPermit>,
    pub(super) sent_at: Timestamp,
}

pub(super) fn attempt(route: &Route, mut report: AgentReport, limit: Duration) -> Attempt {
    let sent_at = now();
    let failed =
        |outcome, log_message: String| Attempt { outcome, log_message: Some(log_message), permit: None, sent_at };
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
    match http::post(&route.address, &route.node, token.as_ref(), &bytes, limit) {
        Ok(reply) => {
            let (outcome, log_message) = classify_reply(route, &reply);
            let open = |text: &String| DrainPermit::open(text, &route.node, report.sequence, &key);
            Attempt { outcome, log_message, permit: reply.permit.as_ref().and_then(open), sent_at }
        }
        Err(error) => failed(SendOutcome::Retry(Duration::ZERO), format!("{} does not answer: {error}", route.address)),
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

/// Doubles from one second to one minute. `jitter`, from 0 to 1, subtracts up to half.
fn back_off(failures: u32, jitter: f64) -> Duration {
    let full = FIRST_WAIT.saturating_mul(1 << failures.min(6)).min(MAX_BACKOFF);
    full.mul_f64(1.0 - jitter.clamp(0.0, 1.0) / 2.0)
}

fn jitter(node: &str) -> f64 {
    let salt = u64::from(std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().subsec_nanos());
    let mixed = (spread(node) ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    mixed as f64 / f64::from(1 << 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(proof: NodeCredentials) -> Route {
        let (node, address) = (NodeName::new("n1").unwrap(), "http://127.0.0.1:1".parse().unwrap());
        Route { node, credentials: proof, address, versions: Versions::default() }
    }

    fn fate(status: u16, retry_after: Option<u64>) -> SendOutcome {
        let reply =
            Reply { status, retry_after: retry_after.map(Duration::from_secs), text: String::new(), permit: None };
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
            let reply = Reply { status, retry_after: None, text: String::new(), permit: None };
            assert_eq!(classify_reply(&token, &reply).0, SendOutcome::Retry(MAX_BACKOFF), "{status}");
        }
        let tried = attempt(&token, empty_report(&token, 1), Duration::from_secs(1));
        assert_eq!(tried.outcome, SendOutcome::Retry(Duration::ZERO));
        assert!(tried.log_message.is_some_and(|message| message.contains("cannot read the token no/such/token: ")));
    }

    #[test]
    fn the_back_off_grows_to_a_minute_and_differs_between_nodes() {
        let seconds: Vec<u64> = (0..9).map(|failures| back_off(failures, 0.0).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(back_off(3, 1.0), Duration::from_secs(4));
        assert!((0.0..1.0).contains(&jitter("n1")));
    }
}
