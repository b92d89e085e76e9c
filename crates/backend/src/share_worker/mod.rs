//! A thread for work on the shared directory, and its queue.
//!
//! A call to a file server that does not answer cannot be interrupted. It therefore blocks this thread and no other: the queue
//! is bounded, no second thread is started beside it, and who asks for something is told at once that the directory does not
//! answer. When it answers again, the thread goes on with what is queued.

mod progress;

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

pub use progress::{InCall, Noting, Progress, Stall};

/// Work for the thread.
pub type Work = Box<dyn FnOnce() + Send>;

/// How many pieces of work wait at most. More than a cycle has: what does not fit is asked for again in a later cycle.
const MAX_QUEUED: usize = 512;
/// How often a caller that waits checks whether the file system still answers.
const POLL: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub enum NotDone {
    Stalled(Stall),
    /// Not within the caller's limit, or the queue is full.
    TooSlow,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Work>,
    busy: bool,
    started: bool,
    closed: bool,
}

/// A thread with its queue. It is started by the first work and ends when this is dropped, or with the call that hangs then.
pub struct ShareWorker {
    name: &'static str,
    /// How long the file system may take for one answer.
    patience: Duration,
    progress: Progress,
    queue: Arc<(Mutex<Queue>, Condvar)>,
}

impl ShareWorker {
    /// The work notes its calls to the file system in `progress`.
    pub fn new(name: &'static str, patience: Duration, progress: Progress) -> Self {
        Self { name, patience, progress, queue: Arc::default() }
    }

    /// Returns the call that the file system does not answer.
    pub fn stall(&self) -> Option<Stall> {
        self.progress.stall(self.patience)
    }

    /// Queues work. Returns whether there was room.
    pub fn submit(&self, work: Work) -> bool {
        let mut queue = self.lock();
        if queue.waiting.len() >= MAX_QUEUED || !self.start(&mut queue) {
            return false;
        }
        queue.waiting.push_back(work);
        self.queue.1.notify_all();
        true
    }

    /// Has work done and waits for its result.
    pub fn ask<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NotDone> {
        let mut result = None;
        let answer = move |send: &mpsc::SyncSender<T>| {
            // The caller may have given up.
            let _late = send.send(work());
        };
        self.stream(limit, 1, answer, |value| result = Some(value))?;
        result.ok_or(NotDone::TooSlow)
    }

    /// Has work done that sends several values, and takes each as it comes. At most `ahead` values wait to be taken. When the
    /// caller has given up, sending fails and the work should end.
    pub fn stream<T: Send + 'static>(
        &self,
        limit: Duration,
        ahead: usize,
        work: impl FnOnce(&mpsc::SyncSender<T>) + Send + 'static,
        mut take: impl FnMut(T),
    ) -> Result<(), NotDone> {
        if let Some(stall) = self.stall() {
            return Err(NotDone::Stalled(stall));
        }
        let (send, values) = mpsc::sync_channel(ahead);
        // Work whose caller has given up before it began is skipped.
        let wanted = Arc::new(());
        let is_wanted = Arc::downgrade(&wanted);
        let queued = self.submit(Box::new(move || {
            if is_wanted.strong_count() > 0 {
                work(&send);
            }
        }));
        if !queued {
            return Err(NotDone::TooSlow);
        }
        let until = Instant::now() + limit;
        loop {
            match values.recv_timeout(POLL) {
                Ok(value) => take(value),
                Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if let Some(stall) = self.stall() {
                        return Err(NotDone::Stalled(stall));
                    }
                }
            }
            if Instant::now() >= until {
                return Err(NotDone::TooSlow);
            }
        }
    }

    /// Waits until nothing is queued, the file system does not answer, or the limit has passed.
    pub fn settle(&self, limit: Duration) {
        let until = Instant::now() + limit;
        let mut queue = self.lock();
        while (queue.busy || !queue.waiting.is_empty()) && Instant::now() < until && self.stall().is_none() {
            queue = self.queue.1.wait_timeout(queue, POLL).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Starts the thread if it does not run. Returns whether it runs.
    fn start(&self, queue: &mut Queue) -> bool {
        if queue.started {
            return true;
        }
        let shared = Arc::clone(&self.queue);
        let thread = thread::Builder::new().name(self.name.to_owned()).spawn(move || run(&shared));
        queue.started = thread.is_ok();
        queue.started
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn run((queue, changed): &(Mutex<Queue>, Condvar)) {
    let lock = || queue.lock().unwrap_or_else(PoisonError::into_inner);
    let mut state = lock();
    loop {
        match state.waiting.pop_front() {
            Some(work) => {
                state.busy = true;
                drop(state);
                // The panic hook has printed it. The work's caller sees that its sender is gone, and the thread goes on.
                let _panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                state = lock();
                state.busy = false;
                changed.notify_all();
            }
            None if state.closed => return,
            None => state = changed.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl Drop for ShareWorker {
    fn drop(&mut self) {
        self.lock().closed = true;
        self.queue.1.notify_all();
    }
}

impl std::fmt::Debug for ShareWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShareWorker").field("name", &self.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const PATIENCE: Duration = Duration::from_millis(200);
    /// Tells dead from slow.
    const LONG: Duration = Duration::from_secs(120);

    /// Makes the worker hang as a call to a dead file server does. Returns what lets it go on.
    fn hang(worker: &ShareWorker) -> mpsc::Sender<()> {
        let (go_on, wait) = mpsc::channel::<()>();
        let progress = worker.progress.clone();
        assert!(worker.submit(Box::new(move || {
            let _call = progress.begin("reading results");
            let _ended = wait.recv();
        })));
        let began = Instant::now();
        while worker.stall().is_none() {
            assert!(began.elapsed() < LONG);
            thread::yield_now();
        }
        go_on
    }

    #[test]
    fn while_one_call_hangs_callers_are_told_at_once_and_no_second_thread_is_started() {
        let worker = ShareWorker::new("test", PATIENCE, Progress::default());
        let runs = Arc::new(AtomicU32::new(0));
        let go_on = hang(&worker);
        let count = Arc::clone(&runs);
        let counted = move || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        assert!(worker.submit(Box::new(counted)), "it waits in the queue");
        let began = Instant::now();
        for _ in 0..1000 {
            let count = Arc::clone(&runs);
            let answer = worker.ask(LONG, move || count.fetch_add(100, Ordering::Relaxed));
            assert!(matches!(answer, Err(NotDone::Stalled(Stall { what: "reading results", .. }))));
        }
        assert!(began.elapsed() < LONG / 2, "a thousand callers did not wait");
        worker.settle(LONG);
        assert_eq!(runs.load(Ordering::Relaxed), 0, "nothing ran beside the call that hangs");
        go_on.send(()).unwrap();
        worker.settle(LONG);
        let began = Instant::now();
        while runs.load(Ordering::Relaxed) != 1 {
            assert!(began.elapsed() < LONG, "what was queued is done when it answers again");
            worker.settle(LONG);
        }
        assert_eq!(worker.ask(LONG, || 7).ok(), Some(7));
        assert_eq!(runs.load(Ordering::Relaxed), 1, "what callers gave up is not done");
    }

    #[test]
    fn the_queue_is_bounded() {
        let worker = ShareWorker::new("test", PATIENCE, Progress::default());
        let go_on = hang(&worker);
        let room = (0..2 * MAX_QUEUED).filter(|_| worker.submit(Box::new(|| {}))).count();
        assert_eq!(room, MAX_QUEUED);
        drop(go_on);
        let began = Instant::now();
        // Until the call that hangs has ended, there is nothing to wait for.
        while !worker.submit(Box::new(|| {})) {
            assert!(began.elapsed() < LONG);
            worker.settle(LONG);
        }
    }

    #[test]
    fn work_that_panics_does_not_end_the_thread() {
        let worker = ShareWorker::new("test", PATIENCE, Progress::default());
        assert!(worker.ask(LONG, || -> u32 { panic!("on purpose") }).is_err());
        assert_eq!(worker.ask(LONG, || 7).ok(), Some(7));
    }
}
