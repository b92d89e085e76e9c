//! Sends what the spool holds, in order, and a sign of life while there is nothing to send.
//!
//! A thread of its own: a controller that does not answer must not keep the agent from looking. It waits longer after
//! each failure, and not all nodes the same, so that a controller that comes back is not run over.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_checks::{
    credential::Credential,
    document::{AgentReport, Versions},
};
use doctor_core::node::Hardware;

use super::{
    http::{self, Address, Reply},
    schedule::spread,
    spool::{Next, Spool},
};
use crate::{clock::now, memory};

/// A node that says nothing for this long says that it is there.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// The door answers when the report was kept, for which it gives the controller ten seconds.
const EXCHANGE: Duration = Duration::from_secs(20);
/// While the agent is being stopped.
const LAST_EXCHANGE: Duration = Duration::from_millis(1500);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// A door that does not know this node, or its schema, will not change its mind in a minute.
const WAIT_FOR_PEOPLE: Duration = Duration::from_secs(300);

/// To whom and as whom.
#[derive(Debug, Clone)]
pub struct Route {
    pub credential: Credential,
    pub address: Address,
    pub versions: Versions,
}

/// Between the thread that looks and the thread that sends.
#[derive(Debug)]
pub struct Outbox {
    inside: Mutex<Inside>,
    wake: Condvar,
}

#[derive(Debug)]
struct Inside {
    spool: Spool,
    route: Arc<Route>,
    closing: bool,
    /// Reports were thrown away: what they said has to be said anew.
    say_all: bool,
}

impl Outbox {
    pub fn new(spool: Spool, route: Route) -> Self {
        let say_all = spool.lost() > 0;
        let inside = Inside { spool, route: Arc::new(route), closing: false, say_all };
        Self { inside: Mutex::new(inside), wake: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a report its number, keeps it, and sends it as soon as may be. Says what is wrong with the disk.
    pub fn add(&self, make: impl FnOnce(u64) -> AgentReport) -> Option<String> {
        let mut inside = self.lock();
        let number = inside.spool.number();
        let lost = inside.spool.lost();
        inside.spool.add(&make(number));
        inside.say_all |= inside.spool.lost() > lost;
        self.wake.notify_one();
        inside.spool.trouble().map(str::to_owned)
    }

    /// Whether everything has to be said anew. Asked when the controller listens: before that it would be lost again.
    pub fn take_say_all(&self) -> bool {
        let mut inside = self.lock();
        let now = inside.say_all && inside.spool.is_empty();
        inside.say_all &= !now;
        now
    }

    pub fn set_route(&self, route: Route) {
        self.lock().route = Arc::new(route);
        self.wake.notify_one();
    }

    /// What can be sent at once is sent; the rest waits on disk.
    pub fn close(&self) {
        self.lock().closing = true;
        self.wake.notify_one();
    }

    pub fn waiting(&self) -> usize {
        self.lock().spool.len()
    }
}

/// What became of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Fate {
    Taken,
    /// Not now: after the back-off, and not before this.
    Later(Duration),
    /// Never.
    Refused,
}

/// Runs until the outbox is closed.
pub fn run(outbox: &Outbox, tell: &dyn Fn(&str)) {
    let mut sender = Sender { outbox, tell, trouble: None, failures: 0, spoke: None };
    while sender.step() {}
}

struct Sender<'a> {
    outbox: &'a Outbox,
    tell: &'a dyn Fn(&str),
    /// What was said of the controller last, so that it is said once.
    trouble: Option<String>,
    failures: u32,
    /// When the controller last took something.
    spoke: Option<Instant>,
}

impl Sender<'_> {
    /// One message, or one wait. False when it is over.
    fn step(&mut self) -> bool {
        let mut inside = self.outbox.lock();
        let next = inside.spool.first();
        if inside.closing && (next.is_none() || self.failures > 0) {
            inside.spool.not_taken();
            return false;
        }
        let quiet = self.spoke.map_or(HEARTBEAT, |spoke| spoke.elapsed());
        if next.is_none() && quiet < HEARTBEAT {
            let (_inside, _timeout) =
                self.outbox.wake.wait_timeout(inside, HEARTBEAT - quiet).unwrap_or_else(PoisonError::into_inner);
            return true;
        }
        let limit = if inside.closing { LAST_EXCHANGE } else { EXCHANGE };
        let route = Arc::clone(&inside.route);
        let report = match &next {
            Some(Next::Report(report)) => (**report).clone(),
            Some(Next::Lost { number, dropped }) => {
                AgentReport { dropped: Some(dropped.clone()), ..bare(&route, *number) }
            }
            None => bare(&route, inside.spool.number()),
        };
        drop(inside);
        let (fate, said) = attempt(&route, report, limit);
        let was_large = next.is_some();
        self.settle(next.as_ref(), &fate, said);
        drop(next);
        if was_large {
            memory::give_back();
        }
        memory::rest_after_a_look();
        true
    }

    fn settle(&mut self, next: Option<&Next>, fate: &Fate, said: Option<String>) {
        let mut inside = self.outbox.lock();
        match (fate, next) {
            (Fate::Taken, next) => {
                if let Some(next) = next {
                    inside.spool.taken(next);
                }
                self.spoke = Some(Instant::now());
                if self.trouble.take().is_some() {
                    (self.tell)("the controller takes reports again");
                }
                self.failures = 0;
            }
            (Fate::Refused, Some(next)) => {
                inside.spool.refused(next);
                inside.say_all = true;
            }
            (Fate::Refused, None) | (Fate::Later(_), _) => inside.spool.not_taken(),
        }
        if let Some(said) = said
            && self.trouble.as_ref() != Some(&said)
        {
            (self.tell)(&said);
            self.trouble = Some(said);
        }
        let at_least = match fate {
            Fate::Taken => return,
            Fate::Later(at_least) => *at_least,
            Fate::Refused => Duration::ZERO,
        };
        // A door that is run over tells everybody the same; what each adds of its own spreads them.
        let wait = at_least.max(back_off(self.failures, jitter(inside.route.credential.node.as_str())));
        self.failures = self.failures.saturating_add(1);
        self.pause(inside, wait);
    }

    /// New reports do not cut this short; being told to stop, or another route, does.
    fn pause(&self, mut inside: MutexGuard<'_, Inside>, wait: Duration) {
        let until = Instant::now() + wait;
        let route = Arc::clone(&inside.route);
        while !inside.closing && Arc::ptr_eq(&route, &inside.route) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            inside = self.outbox.wake.wait_timeout(inside, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

fn bare(route: &Route, number: u64) -> AgentReport {
    AgentReport {
        up: None,
        node: route.credential.node.clone(),
        hardware: Hardware::default(),
        number,
        at: now(),
        checks: Vec::new(),
        versions: route.versions.clone(),
        dropped: None,
    }
}

fn attempt(route: &Route, mut report: AgentReport, limit: Duration) -> (Fate, Option<String>) {
    let node = &route.credential.node;
    // What was kept under an older name of this machine is this node's all the same.
    report.node = node.clone();
    let Ok(bytes) = report.sign(&route.credential.key) else {
        return (Fate::Refused, Some("a report cannot be written as JSON; it is counted as lost".to_owned()));
    };
    match http::post(&route.address, node, &bytes, limit) {
        Ok(reply) => judge(&route.address, &reply),
        Err(error) => (Fate::Later(Duration::ZERO), Some(format!("{} does not answer: {error}", route.address))),
    }
}

fn judge(address: &Address, reply: &Reply) -> (Fate, Option<String>) {
    let said = |words: &str| Some(format!("{address} {words} ({}: {})", reply.status, reply.text));
    match reply.status {
        200..=299 => (Fate::Taken, None),
        401 | 403 => (Fate::Later(WAIT_FOR_PEOPLE), said("does not accept this node's credential")),
        404 | 405 => (Fate::Later(WAIT_FOR_PEOPLE), said("is no controller that takes reports")),
        409 => (Fate::Later(WAIT_FOR_PEOPLE), said("does not read reports of this program")),
        400 | 411 | 413 | 422 => (Fate::Refused, said("will never take this report; it is counted as lost")),
        _ => (Fate::Later(reply.retry_after.unwrap_or_default().min(LONGEST_WAIT)), said("is busy")),
    }
}

/// Doubles from a second to a minute. `jitter` from 0 to 1 takes up to half of it away.
fn back_off(failures: u32, jitter: f64) -> Duration {
    let whole = FIRST_WAIT.saturating_mul(1 << failures.min(6)).min(LONGEST_WAIT);
    whole.mul_f64(1.0 - jitter.clamp(0.0, 1.0) / 2.0)
}

fn jitter(node: &str) -> f64 {
    let salt = u64::from(std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().subsec_nanos());
    let mixed = (spread(node) ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    mixed as f64 / f64::from(1 << 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fate(status: u16, retry_after: Option<u64>) -> Fate {
        let reply = Reply { status, retry_after: retry_after.map(Duration::from_secs), text: String::new() };
        judge(&"http://ctl:1".parse().unwrap(), &reply).0
    }

    #[test]
    fn only_what_was_kept_is_forgotten_and_only_what_can_never_be_taken_is_given_up() {
        assert_eq!(fate(200, None), Fate::Taken);
        for status in [401, 403, 404, 409] {
            assert_eq!(fate(status, None), Fate::Later(WAIT_FOR_PEOPLE), "{status}");
        }
        for status in [400, 413] {
            assert_eq!(fate(status, None), Fate::Refused, "{status}");
        }
        for status in [100, 302, 408, 429, 500, 502, 503, 999] {
            assert_eq!(fate(status, None), Fate::Later(Duration::ZERO), "{status}");
        }
        assert_eq!(fate(503, Some(3)), Fate::Later(Duration::from_secs(3)));
        assert_eq!(fate(503, Some(99_999)), Fate::Later(LONGEST_WAIT), "nobody sends us to sleep");
    }

    #[test]
    fn waits_grow_to_a_minute_and_differ_from_node_to_node() {
        let waits: Vec<u64> = (0..9).map(|failures| back_off(failures, 0.0).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(back_off(3, 1.0), Duration::from_secs(4));
        assert!((0.0..1.0).contains(&jitter("n1")));
    }
}
