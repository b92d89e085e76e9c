//! The order in which a call queries hosts.
//!
//! A call has a time limit and may not reach all hosts. The next call begins with those that were not reached, so that none is
//! left out in every call. Hosts that took long the last time are queried beside the others by a quarter of the workers: neither
//! group keeps the other waiting.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use doctor_backend::{
    deadline::{self, Deadline},
    ssh::Host,
};
use doctor_core::ids::NodeName;

use super::silent_hosts::PROMPT;

/// One of so many workers begins with slow hosts.
const SLOW_SHARE: usize = 4;

/// What the last query of each host says about when to query it next.
#[derive(Debug, Default)]
pub(super) struct QueryOrder(Mutex<BTreeMap<NodeName, LastQuery>>);

#[derive(Debug, Clone, Copy, Default)]
struct LastQuery {
    /// When the last query began that was not cut short by the end of its call. `None`: there was none.
    reached: Option<Instant>,
    took: Duration,
}

impl QueryOrder {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeName, LastQuery>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records how long a query took. `is_complete`: its call did not end before it.
    pub(super) fn record(&self, host: &Host, begun: Instant, took: Duration, is_complete: bool) {
        let mut all = self.lock();
        let last = all.entry(host.name.clone()).or_default();
        if is_complete {
            *last = LastQuery { reached: Some(begun), took };
        } else {
            // It might have taken longer.
            last.took = last.took.max(took);
        }
    }

    /// Forgets hosts that are no longer configured.
    pub(super) fn retain(&self, is_configured: impl Fn(&NodeName) -> bool) {
        self.lock().retain(|name, _| is_configured(name));
    }

    /// Returns the hosts in the order for the next call, which has this many workers.
    pub(super) fn queues(&self, hosts: &[Host], workers: usize) -> HostQueues {
        let all = self.lock();
        let last = |host: &Host| all.get(&host.name).copied().unwrap_or_default();
        let mut hosts = hosts.to_vec();
        hosts.sort_by_key(|host| last(host).reached);
        // A single worker serves both groups in turn.
        let (slow, quick) = hosts.into_iter().partition(|host| workers > 1 && last(host).took >= PROMPT);
        HostQueues { quick: HostQueue::new(quick), slow: HostQueue::new(slow) }
    }
}

/// The hosts of one call.
#[derive(Debug)]
pub(super) struct HostQueues {
    quick: HostQueue,
    slow: HostQueue,
}

#[derive(Debug)]
struct HostQueue {
    hosts: Vec<Host>,
    next: AtomicUsize,
}

impl HostQueue {
    const fn new(hosts: Vec<Host>) -> Self {
        Self { hosts, next: AtomicUsize::new(0) }
    }

    fn take(&self) -> Option<&Host> {
        self.hosts.get(self.next.fetch_add(1, Ordering::Relaxed))
    }
}

/// Calls `work` for each host on up to `workers` threads. The results are sorted by host name.
pub(super) fn each<T: Send>(queues: &HostQueues, workers: usize, work: impl Fn(&Host) -> T + Sync) -> Vec<(Host, T)> {
    let HostQueues { quick, slow } = queues;
    let workers = workers.min(quick.hosts.len() + slow.hosts.len());
    let begin_slow = workers.div_ceil(SLOW_SHARE).min(workers.saturating_sub(1));
    let call = Deadline::current();
    let worker = |number: usize| {
        let (first, second) = if number < begin_slow { (slow, quick) } else { (quick, slow) };
        let mut done = Vec::new();
        while let Some(host) = first.take().or_else(|| second.take()) {
            done.push((host.clone(), work(host)));
        }
        done
    };
    let mut results: Vec<(Host, T)> = std::thread::scope(|scope| {
        let (worker, call) = (&worker, &call);
        let start = |number| scope.spawn(move || deadline::enter(call.clone(), || worker(number)));
        let threads: Vec<_> = (0..workers).map(start).collect();
        // Propagate a worker's panic to the caller.
        let joined =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.flatten().collect()
    });
    results.sort_by(|(one, _), (other, _)| one.name.cmp(&other.name));
    results
}

#[cfg(test)]
mod tests {
    use std::sync::Condvar;

    use super::*;

    fn hosts(count: usize) -> Vec<Host> {
        doctor_backend::ssh::parse_hosts(&format!("n[001-{count:03}]")).unwrap()
    }

    fn names(queue: &HostQueue) -> Vec<&str> {
        queue.hosts.iter().map(|host| host.name.as_str()).collect()
    }

    #[test]
    fn hosts_that_were_not_reached_come_first_and_then_those_that_were_reached_longest_ago() {
        let (order, all, start) = (QueryOrder::default(), hosts(5), Instant::now());
        let quick = Duration::from_millis(600);
        order.record(&all[1], start + quick, quick, true);
        order.record(&all[0], start + quick * 2, quick, true);
        order.record(&all[3], start, quick, true);
        // The call ended before this one answered, and before the last was asked.
        order.record(&all[2], start + quick * 3, quick, false);
        let queues = order.queues(&all, 32);
        assert_eq!(names(&queues.quick), ["n003", "n005", "n004", "n002", "n001"]);
        assert!(queues.slow.hosts.is_empty());
        order.retain(|name| *name != all[0].name);
        assert_eq!(names(&order.queues(&all, 32).quick)[..3], ["n001", "n003", "n005"]);
    }

    #[test]
    fn a_host_stays_slow_until_a_query_shows_otherwise() {
        let (order, all, start) = (QueryOrder::default(), hosts(3), Instant::now());
        order.record(&all[0], start, Duration::from_secs(24), true);
        order.record(&all[0], start, Duration::from_millis(1), false);
        order.record(&all[1], start, Duration::from_secs(24), true);
        order.record(&all[1], start, Duration::from_millis(1), true);
        let queues = order.queues(&all, 2);
        assert_eq!((names(&queues.quick), names(&queues.slow)), (vec!["n003", "n002"], vec!["n001"]));
        assert_eq!(names(&order.queues(&all, 1).quick), ["n003", "n001", "n002"], "one worker: no group waits");
    }

    /// Slow hosts answer only after all quick ones. With the slow ones first, all workers would wait for them.
    #[test]
    fn slow_hosts_and_quick_ones_do_not_keep_each_other_waiting() {
        const PATIENCE: Duration = Duration::from_secs(120);
        for workers in [2, 4, 32] {
            let (order, all, start) = (QueryOrder::default(), hosts(60), Instant::now());
            let (slow, quick) = all.split_at(40);
            slow.iter().for_each(|host| order.record(host, start, PROMPT, true));
            let (answered, changed) = (Mutex::new((0, 0)), Condvar::new());
            let work = |host: &Host| {
                let mut counts = answered.lock().unwrap();
                if slow.contains(host) {
                    // One that has begun waits for the quick ones, and some begin before the quick ones are done.
                    counts.0 += 1;
                    changed.notify_all();
                    let wait = changed.wait_timeout_while(counts, PATIENCE, |counts| counts.1 < quick.len());
                    assert!(!wait.unwrap().1.timed_out(), "the quick hosts are kept waiting");
                } else {
                    let wait = changed.wait_timeout_while(counts, PATIENCE, |counts| counts.0 == 0);
                    let (mut counts, result) = wait.unwrap();
                    assert!(!result.timed_out(), "the slow hosts are kept waiting");
                    counts.1 += 1;
                    changed.notify_all();
                }
            };
            let results = each(&order.queues(&all, workers), workers, work);
            assert_eq!(results.into_iter().map(|(host, ())| host).collect::<Vec<_>>(), all, "sorted by name");
        }
    }
}
