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
    panic::{AssertUnwindSafe, catch_unwind},
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
/// A host that is silent again this soon after it answered is asked again after the same pause as before.
const RELAPSE: Duration = Duration::from_secs(300);

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
    /// Hosts that were silent until recently.
    recovered: BTreeMap<NodeName, Recovered>,
    /// The probes that run, by number, so that they can be cancelled.
    probes: BTreeMap<u64, Deadline>,
    next_probe: u64,
    /// The threads that ask hosts or wait until one is due.
    workers: usize,
    stopped: bool,
}

impl State {
    /// Cancels the probes of hosts that were removed or replaced.
    fn cancel_obsolete_probes(&self) {
        let is_current = |number: &u64| self.hosts.values().any(|silent| silent.probe == Some(*number));
        self.probes.iter().filter(|(number, _)| !is_current(number)).for_each(|(_, call)| call.cancel());
    }
}

struct Recovered {
    host: Host,
    at: Instant,
    /// The pause after which it was asked last.
    pause: Duration,
}

struct SilentHost {
    host: Host,
    why: String,
    since: Timestamp,
    /// When it is asked again.
    due: Instant,
    pause: Duration,
    /// The probe that asks it now.
    probe: Option<u64>,
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
        state.recovered.retain(|_, before| now.saturating_duration_since(before.at) < RELAPSE);
        match state.hosts.get_mut(&host.name) {
            // Two calls asked it at the same time.
            Some(known) if known.host == *host => why.clone_into(&mut known.why),
            _ => {
                let before = state.recovered.remove(&host.name).filter(|before| before.host == *host);
                let pause = before.map_or(FIRST_PAUSE, |before| before.pause);
                let (why, since) = (why.to_owned(), SystemClock.now());
                let new = SilentHost { host: host.clone(), why, since, due: now + pause, pause, probe: None };
                state.hosts.insert(host.name.clone(), new);
                state.cancel_obsolete_probes();
            }
        }
        let (wanted, stopped) = (state.hosts.len().min(self.slots), state.stopped);
        if state.workers < wanted && !stopped {
            state.workers += 1;
            let (shared, probe, limit) = (Arc::clone(&self.shared), Arc::clone(&self.probe), self.limit);
            let named = std::thread::Builder::new().name("silent hosts".to_owned());
            match named.spawn(move || work(&shared, &probe, limit)) {
                Ok(thread) => self.keep(thread),
                Err(_) => {
                    state.workers -= 1;
                    // Without a thread that asks it, calls have to: the next failure tries again.
                    if state.workers == 0 {
                        state.hosts.remove(&host.name);
                    }
                }
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
        state.recovered.retain(|_, before| is_configured(&before.host));
        state.cancel_obsolete_probes();
        drop(state);
        self.shared.changed.notify_all();
    }
}

/// Ends the probes with their `ssh` processes.
impl Drop for SilentHosts {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        state.probes.values().for_each(Deadline::cancel);
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
    while let Some(Turn { number, host, call }) = next(shared, limit) {
        // A panic was reported when it happened. It must end neither this thread nor the attempts.
        let answer = catch_unwind(AssertUnwindSafe(|| deadline::enter(Some(call), || probe(&host))))
            .unwrap_or_else(|_panic| Err("asking it failed because of an error in this program".to_owned()));
        let mut state = shared.lock();
        state.probes.remove(&number);
        // Otherwise the host was removed or has another address now.
        if let Some(silent) = state.hosts.get_mut(&host.name).filter(|silent| silent.probe == Some(number)) {
            match answer {
                Ok(()) => {
                    let recovered = Recovered { host, at: Instant::now(), pause: silent.pause };
                    state.hosts.remove(&recovered.host.name);
                    state.recovered.insert(recovered.host.name.clone(), recovered);
                }
                Err(why) => {
                    silent.probe = None;
                    silent.why = why;
                    silent.pause = (silent.pause * 2).min(LONGEST_PAUSE);
                    silent.due = Instant::now() + silent.pause;
                }
            }
        }
        drop(state);
        shared.changed.notify_all();
    }
}

/// One attempt to reach a silent host.
struct Turn {
    number: u64,
    host: Host,
    call: Deadline,
}

/// Waits until a silent host is due. `None`: there is none left for this thread, which no longer counts as a worker. Both are
/// decided under one lock: a host that becomes silent from then on gets a new thread.
fn next(shared: &Shared, limit: Duration) -> Option<Turn> {
    let mut state = shared.lock();
    loop {
        let State { hosts, probes, next_probe, workers, stopped, .. } = &mut *state;
        let waiting = hosts.values_mut().filter(|silent| silent.probe.is_none()).min_by_key(|silent| silent.due);
        let Some(silent) = waiting.filter(|_| !*stopped) else {
            *workers -= 1;
            return None;
        };
        let pause = silent.due.saturating_duration_since(Instant::now());
        if pause.is_zero() {
            let (number, call) = (*next_probe, Deadline::after(limit));
            *next_probe += 1;
            silent.probe = Some(number);
            probes.insert(number, call.clone());
            return Some(Turn { number, host: silent.host.clone(), call });
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

    /// Makes all hosts due now.
    fn skip_pauses(silent: &SilentHosts) {
        silent.shared.lock().hosts.values_mut().for_each(|silent| silent.due = Instant::now());
        silent.shared.changed.notify_all();
    }

    #[test]
    fn a_thread_that_finds_no_host_no_longer_counts_from_that_moment_on() {
        let shared = Shared::default();
        shared.lock().workers = 1;
        assert!(next(&shared, Duration::from_secs(60)).is_none());
        assert_eq!(shared.lock().workers, 0, "a host that is recorded now gets a thread");
    }

    #[test]
    fn a_probe_that_panics_is_repeated() {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let probe: Probe = Arc::new(move |_: &Host| match counted.fetch_add(1, Ordering::SeqCst) {
            0 => panic!("on purpose"),
            _ => Ok(()),
        });
        let silent = SilentHosts::new(1, Duration::from_secs(60), probe);
        let host = &hosts(1)[0];
        silent.record(host, "nothing");
        wait_until("the answer", || silent.why(host).is_none());
        assert_eq!(asked.load(Ordering::SeqCst), 2);
        assert!(silent.shared.lock().probes.is_empty());
    }

    #[test]
    fn a_host_that_is_silent_again_soon_is_asked_after_the_same_pause() {
        let answers = Arc::new(AtomicUsize::new(0));
        let known = Arc::clone(&answers);
        let probe: Probe = Arc::new(move |_: &Host| match known.load(Ordering::SeqCst) {
            0 => Err("still nothing".to_owned()),
            _ => Ok(()),
        });
        let silent = SilentHosts::new(1, Duration::from_secs(60), probe);
        let host = &hosts(1)[0];
        let pause = || silent.shared.lock().hosts[&host.name].pause;
        silent.record(host, "nothing");
        while pause() < LONGEST_PAUSE {
            let before = pause();
            skip_pauses(&silent);
            wait_until("an attempt", || pause() > before);
        }
        answers.store(1, Ordering::SeqCst);
        skip_pauses(&silent);
        wait_until("the answer", || silent.why(host).is_none());
        silent.record(host, "nothing again");
        assert_eq!(pause(), LONGEST_PAUSE);
        // With another address it is another host.
        let moved = Host { port: Some(2222), ..host.clone() };
        silent.record(&moved, "nothing there");
        assert_eq!(pause(), FIRST_PAUSE);
    }

    #[test]
    fn a_host_with_a_new_address_is_asked_once_at_a_time_and_its_probe_can_be_cancelled() {
        let (old, new) = (hosts(1)[0].clone(), Host { port: Some(2222), ..hosts(1)[0].clone() });
        let (asked_old, asked_new) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let old_may_end = Arc::new(AtomicUsize::new(0));
        let (first, second, end) = (Arc::clone(&asked_old), Arc::clone(&asked_new), Arc::clone(&old_may_end));
        let probe: Probe = Arc::new(move |host: &Host| {
            if host.port.is_none() {
                first.fetch_add(1, Ordering::SeqCst);
                // It ends only some time after it was cancelled.
                while end.load(Ordering::SeqCst) == 0 || !deadline::is_over() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            } else {
                second.fetch_add(1, Ordering::SeqCst);
                while !deadline::is_over() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Err("cancelled".to_owned())
        });
        let silent = SilentHosts::new(4, Duration::from_secs(3600), probe);
        // The other hosts are there for more threads.
        let other = |index: usize| Host { port: Some(2222), ..hosts(3)[index].clone() };
        silent.record(&old, "nothing");
        silent.record(&other(1), "nothing");
        skip_pauses(&silent);
        wait_until("two probes", || asked_old.load(Ordering::SeqCst) == 1 && asked_new.load(Ordering::SeqCst) == 1);
        silent.retain(|host| *host != old);
        silent.record(&new, "nothing there");
        silent.record(&other(2), "nothing");
        // Of the two, the one with the new address is due first.
        skip_pauses(&silent);
        wait_until("a probe of the new address", || silent.shared.lock().hosts[&new.name].probe.is_some());
        old_may_end.store(1, Ordering::SeqCst);
        wait_until("the next probe of the thread that asked the old one", || asked_new.load(Ordering::SeqCst) == 3);
        assert_eq!(silent.shared.lock().probes.len(), 3);
        assert_eq!(silent.shared.lock().hosts[&new.name].why, "nothing there", "the new address has not answered yet");
        let closed = std::thread::spawn(move || drop(silent));
        wait_until("the end of the probes", || closed.is_finished());
        assert_eq!(asked_new.load(Ordering::SeqCst), 3);
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
