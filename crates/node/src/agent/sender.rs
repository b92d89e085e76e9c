//! Sends spooled reports in order, and heartbeats while there are none.
//!
//! The last message in the queue also names the checks that ran with unchanged results ([`super::check_rounds`]).
//!
//! It has its own thread so that an unresponsive controller does not delay checks. The back-off grows with each failure
//! and is jittered per node, so that the fleet does not overload a controller that comes back.

use std::{
    io::Write,
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_checks::{document::AgentReport, site_profiles::SiteProfiles};
use doctor_core::{ids::CheckId, time::Span};

use super::{
    check_rounds::{CheckRounds, Confirmation},
    drain_permit,
    exchange::{Attempt, MAX_BACKOFF, Route, SendOutcome, attempt},
    schedule::spread,
    spool::{NextMessage, Spool},
};
use crate::{clock::now, heap};

/// Interval of heartbeats while there is nothing to report.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// The agent endpoint replies once the report is stored, for which it allows the controller ten seconds.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(20);
/// Limit of an exchange during shutdown.
const SHUTDOWN_EXCHANGE_TIMEOUT: Duration = Duration::from_millis(1500);
const FIRST_WAIT: Duration = Duration::from_secs(1);

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
    rounds: CheckRounds,
    profiles: ReceivedProfiles,
}

/// The site's profiles, on their way from the controller to the checking thread.
#[derive(Debug)]
struct ReceivedProfiles {
    /// Digest of those that this node has.
    digest: String,
    new: Option<SiteProfiles>,
    /// Wakes the checking thread.
    wake: UnixStream,
}

impl Outbox {
    /// `profiles` is the digest of the site's profiles that this node has; a byte on `wake` tells of new ones.
    pub fn new(spool: Spool, route: Route, state: PathBuf, profiles: String, wake: UnixStream) -> Self {
        let say_all = spool.lost_count() > 0;
        let inside = Inside {
            spool,
            route: Arc::new(route),
            permit_directory: state,
            closing: false,
            full_report_requested: say_all,
            rounds: CheckRounds::default(),
            profiles: ReceivedProfiles { digest: profiles, new: None, wake },
        };
        Self { inside: Mutex::new(inside), wake: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers and stores a report and wakes the sender. `round` are checks that ran together and whose results are in
    /// this report or in earlier ones. Returns the spool's disk error, if any.
    pub fn add(&self, round: Vec<CheckId>, make: impl FnOnce(u64) -> AgentReport) -> Option<String> {
        let mut inside = self.lock();
        let number = inside.spool.number();
        let lost = inside.spool.lost_count();
        let report = make(number);
        inside.spool.add(&report);
        inside.full_report_requested |= inside.spool.lost_count() > lost;
        inside.rounds.record_report(&report);
        inside.rounds.add(Instant::now(), round);
        self.wake.notify_one();
        inside.spool.disk_error().map(str::to_owned)
    }

    /// Records checks that ran together with the results that they were last reported with.
    pub fn confirm(&self, round: Vec<CheckId>) {
        self.lock().rounds.add(Instant::now(), round);
    }

    /// Returns profiles that the controller has sent, and clears them.
    pub fn take_profiles(&self) -> Option<SiteProfiles> {
        self.lock().profiles.new.take()
    }

    /// Returns whether all results must be reported again, and clears the request. True only once the spool is empty:
    /// before that, the new reports might be dropped too.
    pub fn take_full_report_request(&self) -> bool {
        let mut inside = self.lock();
        let now = inside.full_report_requested && inside.spool.is_empty();
        inside.full_report_requested &= !now;
        if now {
            inside.rounds.clear();
        }
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
        report.profiles = Some(inside.profiles.digest.clone());
        // While reports wait or were lost, the controller has other results than those that these rounds confirm.
        let is_current = behind == 0 && !inside.full_report_requested;
        let confirmation = inside.rounds.confirmation(Instant::now()).filter(|_| is_current);
        report.confirmed = confirmation.as_ref().map(|confirmation| confirmation.results.clone());
        drop(inside);
        let tried = attempt(&route, report, limit);
        let was_large = next.is_some() || tried.profiles.is_some();
        self.handle_outcome(next.as_ref(), confirmation.as_ref(), tried);
        drop(next);
        if was_large {
            heap::give_back();
        }
        true
    }

    fn handle_outcome(&mut self, next: Option<&NextMessage>, confirmation: Option<&Confirmation>, tried: Attempt) {
        let Attempt { outcome, log_message, permit, sent_at, profiles } = tried;
        let mut inside = self.outbox.lock();
        match (&outcome, next) {
            (SendOutcome::Accepted, next) => {
                if let Some(profiles) = profiles {
                    inside.profiles.receive(profiles);
                }
                if let Some(confirmation) = confirmation {
                    inside.rounds.mark_accepted(confirmation);
                }
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

impl ReceivedProfiles {
    /// Hands profiles over to the checking thread. They count as known even if they turn out to be unusable: sending the
    /// same ones again would not help.
    fn receive(&mut self, profiles: SiteProfiles) {
        self.digest = profiles.digest();
        self.new = Some(profiles);
        // A full channel has woken it already.
        let _woken = self.wake.write(&[1]);
    }
}

impl NextMessage {
    /// Builds the message for this entry.
    pub(super) fn message(&self, route: &Route) -> AgentReport {
        match self {
            Self::Report(report) => {
                let waited = Some(now().since(report.at)).filter(|waited| *waited > Span::ZERO);
                AgentReport { waited, ..(**report).clone() }
            }
            Self::Lost { number, dropped } => {
                AgentReport { dropped: Some(dropped.clone()), ..empty_report(route, *number) }
            }
        }
    }
}

fn empty_report(route: &Route, number: u64) -> AgentReport {
    AgentReport::heartbeat(route.node.clone(), number, now(), route.versions.clone())
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
    use std::{io::Read, net::TcpListener, thread};

    use doctor_checks::document::{RunKey, TestEvidence, Versions};
    use doctor_core::{ids::NodeName, time::Timestamp};

    use super::*;
    use crate::agent::{exchange::NodeCredentials, spool::SpoolLimits};

    const KEY: RunKey = RunKey::new([1; 32]);

    /// A controller that answers each message with what `reply` makes of it, and returns the messages.
    fn controller(
        messages: usize,
        reply: impl Fn(&AgentReport) -> (u16, String) + Send + 'static,
    ) -> (String, thread::JoinHandle<Vec<AgentReport>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let serve = move || {
            let mut received = Vec::new();
            for _ in 0..messages {
                let (mut stream, _) = listener.accept().unwrap();
                let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
                let report = loop {
                    let count = stream.read(&mut buffer).unwrap();
                    bytes.extend(&buffer[..count]);
                    let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
                    if let Ok(report) = AgentReport::open(&bytes[end + 4..], &KEY) {
                        break report;
                    }
                };
                let (status, text) = reply(&report);
                let length = text.len();
                write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\r\n{text}").unwrap();
                received.push(report);
            }
            received
        };
        (address, thread::spawn(serve))
    }

    fn outbox(state: &std::path::Path, address: &str) -> (Outbox, UnixStream) {
        let spool = Spool::open(&state.join("spool"), SpoolLimits::default()).unwrap();
        let (news, wake) = UnixStream::pair().unwrap();
        let route = Route {
            node: NodeName::new("n1").unwrap(),
            credentials: NodeCredentials::Key(KEY),
            address: address.parse().unwrap(),
            tls: None,
            versions: Versions { schema: doctor_checks::document::Schema::CURRENT, ..Versions::default() },
        };
        (Outbox::new(spool, route, state.to_owned(), "none".to_owned(), wake), news)
    }

    fn checks(names: &[&str]) -> Vec<CheckId> {
        names.iter().map(|name| CheckId::new(name).unwrap()).collect()
    }

    fn report(outbox: &Outbox, ran: &[&str], changed: &[&str]) {
        let at = Timestamp::from_secs(1);
        let evidence = |test| TestEvidence { test, started: at, ended: at, probes: Vec::new() };
        let changed = checks(changed).into_iter().map(evidence).collect();
        let route = Arc::clone(&outbox.lock().route);
        outbox.add(checks(ran), |number| AgentReport { checks: changed, ..empty_report(&route, number) });
    }

    fn steps(outbox: &Outbox, count: usize) {
        let mut sender = Sender { outbox, log: &|_| {}, last_error: None, failures: 0, last_accepted: None };
        for _ in 0..count {
            assert!(sender.step());
        }
    }

    #[test]
    fn only_the_last_message_in_the_queue_confirms_results_and_each_once() {
        let state = tempfile::tempdir().unwrap();
        let (address, controller) = controller(3, |_| (200, "kept\n".to_owned()));
        let (outbox, _news) = outbox(state.path(), &address);
        report(&outbox, &["memory", "oom"], &["memory", "oom"]);
        report(&outbox, &["memory"], &["memory"]);
        steps(&outbox, 2);
        outbox.confirm(checks(&["oom"]));
        // A new sender has not sent anything, so its heartbeat is due.
        steps(&outbox, 1);
        let received = controller.join().unwrap();
        let confirmed = |report: &AgentReport| {
            let confirmed = report.confirmed.clone()?;
            Some((confirmed.through, confirmed.rounds.into_iter().flat_map(|round| round.checks).collect::<Vec<_>>()))
        };
        assert_eq!(confirmed(&received[0]), None, "a later report has other results");
        assert_eq!(confirmed(&received[1]), Some((received[1].sequence, checks(&["oom", "memory"]))));
        assert_eq!(confirmed(&received[2]), Some((received[1].sequence, checks(&["oom"]))));
        assert!(received[2].is_heartbeat() && received[2].sequence > received[1].sequence);
    }

    #[test]
    fn nothing_is_confirmed_after_a_lost_report_until_everything_was_reported_again() {
        let state = tempfile::tempdir().unwrap();
        let (address, controller) = controller(3, |report| {
            let status = if report.checks.is_empty() { 200 } else { 400 };
            (status, "x\n".to_owned())
        });
        let (outbox, _news) = outbox(state.path(), &address);
        report(&outbox, &["memory"], &["memory"]);
        // The report is rejected; then the loss is reported.
        steps(&outbox, 2);
        assert!(outbox.take_full_report_request());
        steps(&outbox, 1);
        let received = controller.join().unwrap();
        assert!(received[0].confirmed.is_some() && received[1].dropped.is_some());
        assert_eq!((&received[1].confirmed, &received[2].confirmed), (&None, &None));
    }

    #[test]
    fn profiles_in_a_reply_are_handed_over_and_named_in_the_next_message() {
        let state = tempfile::tempdir().unwrap();
        let site = SiteProfiles::new(vec!["sku = \"ours\"\nversion = 1\n".to_owned()]).unwrap();
        let signed = site.clone();
        let (address, controller) =
            controller(2, move |report| (200, signed.sign(&report.node, report.sequence, &KEY).unwrap()));
        let (outbox, mut news) = outbox(state.path(), &address);
        steps(&outbox, 1);
        news.read_exact(&mut [0]).unwrap();
        assert_eq!((outbox.take_profiles(), outbox.take_profiles()), (Some(site.clone()), None));
        steps(&outbox, 1);
        let received = controller.join().unwrap();
        let digests: Vec<_> = received.into_iter().filter_map(|report| report.profiles).collect();
        assert_eq!(digests, ["none".to_owned(), site.digest()]);
    }

    #[test]
    fn the_back_off_grows_to_a_minute_and_differs_between_nodes() {
        let seconds: Vec<u64> = (0..9).map(|failures| back_off(failures, 0.0).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(back_off(3, 1.0), Duration::from_secs(4));
        assert!((0.0..1.0).contains(&jitter("n1")));
    }
}
