//! Hosts that do not answer.
//!
//! A request to a host that hangs costs its whole time limit. A host on which one was spent is *silent* from then on: calls to
//! the backend answer for it at once, with the reason, and spend no time on it. Threads of their own ask it again, each with the
//! full time limit and less and less often, until it answers. Seventy hosts that hang therefore cost seventy time limits once,
//! on as many workers as there are, and nothing in any later cycle.
//!
//! A host that fails at once, such as one that refuses the connection, is not silent: it is asked in each call.

use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use doctor_backend::{
    clock::{Clock as _, SystemClock},
    deadline::{self, Deadline},
    ssh::Host,
};
use doctor_core::{ids::NodeName, time::Timestamp};

/// A failure that took less than this is no silence.
pub(super) const PROMPT: Duration = Duration::from_secs(2);
/// When a silent host is asked again: the first pause, doubled up to the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Asks a host whether it answers. `Err` is why not.
pub(super) type Probe = Arc<dyn Fn(&Host) -> Result<(), String> + Send + Sync>;

pub(super) struct SilentHosts {
    shared: Arc<Shared>,
    probe: Probe,
    /// How many of them are asked at the same time.
    slots: usize,
    /// The longest time that one probe may take.
    limit: Duration,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for SilentHosts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SilentHosts").field("slots", &self.slots).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    hosts: BTreeMap<NodeName, SilentHost>,
    /// The probes that run, so that they can be cancelled.
    probes: Vec<(NodeName, Deadline)>,
    /// The threads that have not ended.
    workers: usize,
    stopped: bool,
}

struct SilentHost {
    host: Host,
    why: String,
    since: Timestamp,
    /// When it is asked again.
    due: Instant,
    pause: Duration,
    /// A thread asks it now.
    is_asked: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SilentHosts {
    pub(super) fn new(slots: usize, limit: Duration, probe: Probe) -> Self {
        Self { shared: Arc::default(), probe, slots, limit, threads: Mutex::default() }
    }

    /// Returns why a host is not asked now: it is silent. `None`: ask it.
    pub(super) fn why(&self, host: &Host) -> Option<String> {
        let state = self.shared.lock();
        // A host whose address was changed is another one.
        let silent = state.hosts.get(&host.name).filter(|silent| silent.host == *host)?;
        // No text that differs in each cycle: a node whose text changes is written again.
        Some(format!("{}; it has been silent since {} and is asked again in the background", silent.why, silent.since))
    }

    /// Records that a host was asked for its whole time limit without success.
    pub(super) fn record(&self, host: &Host, why: &str) {
        let mut state = self.shared.lock();
        let now = Instant::now();
        let new = SilentHost {
            host: host.clone(),
            why: why.to_owned(),
            since: SystemClock.now(),
            due: now + FIRST_PAUSE,
            pause: FIRST_PAUSE,
            is_asked: false,
        };
        match state.hosts.get_mut(&host.name) {
            // Two calls asked it at the same time.
            Some(known) if known.host == *host => why.clone_into(&mut known.why),
            _ => drop(state.hosts.insert(host.name.clone(), new)),
        }
        let (wanted, stopped) = (state.hosts.len().min(self.slots), state.stopped);
        if state.workers < wanted && !stopped {
            state.workers += 1;
            let (shared, probe, limit) = (Arc::clone(&self.shared), Arc::clone(&self.probe), self.limit);
            let named = std::thread::Builder::new().name("silent hosts".to_owned());
            match named.spawn(move || work(&shared, &probe, limit)) {
                Ok(thread) => self.keep(thread),
                // The next failure tries again; until then the host stays unknown.
                Err(_) => state.workers -= 1,
            }
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    fn keep(&self, thread: JoinHandle<()>) {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
    }

    /// Forgets hosts that are no longer configured.
    pub(super) fn retain(&self, is_configured: impl Fn(&Host) -> bool) {
        let mut state = self.shared.lock();
        state.hosts.retain(|_, silent| is_configured(&silent.host));
        let State { hosts, probes, .. } = &*state;
        probes.iter().filter(|(name, _)| !hosts.contains_key(name)).for_each(|(_, probe)| probe.cancel());
        drop(state);
        self.shared.changed.notify_all();
    }
}

/// Ends the probes with their `ssh` processes.
impl Drop for SilentHosts {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        state.probes.iter().for_each(|(_, probe)| probe.cancel());
        drop(state);
        self.shared.changed.notify_all();
        for thread in self.threads.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // A panic of a probe was reported when it happened.
            let _panicked = thread.join();
        }
    }
}

/// Asks silent hosts in turn, until there are none.
fn work(shared: &Shared, probe: &Probe, limit: Duration) {
    /// Counts the thread out, also after a panic.
    struct Leave<'a>(&'a Shared);
    impl Drop for Leave<'_> {
        fn drop(&mut self) {
            self.0.lock().workers -= 1;
        }
    }
    let _leave = Leave(shared);
    while let Some((host, call)) = next(shared, limit) {
        let answer = deadline::enter(Some(call), || probe(&host));
        let mut state = shared.lock();
        state.probes.retain(|(name, _)| *name != host.name);
        match answer {
            Ok(()) => {
                if state.hosts.get(&host.name).is_some_and(|silent| silent.host == host) {
                    state.hosts.remove(&host.name);
                }
            }
            Err(why) => {
                if let Some(silent) = state.hosts.get_mut(&host.name) {
                    silent.is_asked = false;
                    if silent.host == host {
                        silent.why = why;
                        silent.pause = (silent.pause * 2).min(LONGEST_PAUSE);
                        silent.due = Instant::now() + silent.pause;
                    }
                }
            }
        }
        drop(state);
        shared.changed.notify_all();
    }
}

/// Waits until a silent host is due. `None`: there is none left for this thread.
fn next(shared: &Shared, limit: Duration) -> Option<(Host, Deadline)> {
    let mut state = shared.lock();
    loop {
        if state.stopped {
            return None;
        }
        let State { hosts, probes, .. } = &mut *state;
        let waiting = hosts.values_mut().filter(|silent| !silent.is_asked);
        let silent = waiting.min_by_key(|silent| silent.due)?;
        let pause = silent.due.saturating_duration_since(Instant::now());
        if pause.is_zero() {
            silent.is_asked = true;
            let (host, call) = (silent.host.clone(), Deadline::after(limit));
            probes.push((host.name.clone(), call.clone()));
            return Some((host, call));
        }
        state = shared.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        sync::atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    fn hosts(count: usize) -> Vec<Host> {
        doctor_backend::ssh::parse_hosts(&format!("n[001-{count:03}]")).unwrap()
    }

    fn wait_until(what: &str, condition: impl Fn() -> bool) {
        let began = Instant::now();
        while !condition() {
            assert!(began.elapsed() < Duration::from_secs(120), "timed out waiting for {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_silent_host_is_asked_in_the_background_until_it_answers() {
        let answering: Arc<Mutex<BTreeSet<NodeName>>> = Arc::default();
        let known = Arc::clone(&answering);
        let probe: Probe =
            Arc::new(
                move |host: &Host| {
                    if known.lock().unwrap().contains(&host.name) { Ok(()) } else { Err("still nothing".to_owned()) }
                },
            );
        let silent = SilentHosts::new(2, Duration::from_secs(60), probe);
        let all = hosts(3);
        all.iter().for_each(|host| silent.record(host, "it did not answer within 25 s"));
        assert!(silent.why(&all[0]).unwrap().starts_with("it did not answer within 25 s"));
        assert_eq!(silent.shared.lock().workers, 2, "no more threads than slots");
        wait_until("a second attempt", || silent.why(&all[2]).unwrap().starts_with("still nothing"));
        answering.lock().unwrap().insert(all[1].name.clone());
        wait_until("the answer", || silent.why(&all[1]).is_none());
        assert!(silent.why(&all[0]).is_some());
        // A host with another address is not the one that was silent.
        let moved = Host { port: Some(2222), ..all[0].clone() };
        assert_eq!(silent.why(&moved), None);
        silent.retain(|host| host.name != all[0].name);
        assert_eq!(silent.why(&all[0]), None);
        silent.retain(|_| false);
        wait_until("the threads to end", || silent.shared.lock().workers == 0);
    }

    #[test]
    fn probes_end_when_the_backend_is_closed() {
        let running = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&running);
        let probe: Probe = Arc::new(move |_: &Host| {
            counted.fetch_add(1, Ordering::SeqCst);
            while !deadline::is_over() {
                std::thread::sleep(Duration::from_millis(1));
            }
            counted.fetch_sub(1, Ordering::SeqCst);
            Err("cancelled".to_owned())
        });
        let silent = SilentHosts::new(8, Duration::from_secs(3600), probe);
        hosts(8).iter().for_each(|host| silent.record(host, "nothing"));
        wait_until("all probes", || running.load(Ordering::SeqCst) == 8);
        drop(silent);
        assert_eq!(running.load(Ordering::SeqCst), 0);
    }
}
