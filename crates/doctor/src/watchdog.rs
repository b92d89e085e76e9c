//! Ends the process when its control loop hangs, and when a stop takes too long.
//!
//! A thread cannot be ended from outside in Rust, and a call may hang where no deadline reaches: in the kernel, on a file
//! server, in a library. A loop that hangs has no use for its process: the lease runs out, another controller leads, and
//! systemd or Kubernetes starts this one again. So the process ends itself. The lease is left to run out and not
//! released: the call that hangs may still change the cluster.
//!
//! The thread shares nothing with the loop but the progress, the flag, and whether the store is being migrated: it sends no
//! query, and writes no log, whose reader may be what hangs. A migration may take longer than any other step, and ending
//! it would only begin it again.

use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use doctor_backend::progress::Progress;
use doctor_store::Store;

use crate::exit::Exit;

/// From SIGTERM or SIGINT to the end of the process at the latest. Below the grace periods of the shipped unit (45 s) and
/// manifests (60 s), which would end it by SIGKILL without a word.
pub(crate) const STOP_LIMIT: Duration = Duration::from_secs(30);
/// The interval at which the progress and the flag are read.
const INTERVAL: Duration = Duration::from_millis(200);
/// A longer gap between two looks means that the whole process was suspended. Its loop then has a whole limit to go on.
const SUSPENDED: Duration = Duration::from_secs(5);
/// The longest wait for the last line of the log.
const LOG_LIMIT: Duration = Duration::from_secs(1);

/// The thread that watches. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Watchdog {
    watched: Arc<Mutex<Option<(Progress, Store)>>>,
    /// Closed when this is dropped.
    _alive: mpsc::Sender<()>,
}

impl Watchdog {
    /// Starts the thread. Once `stopping` is set, the process has [`STOP_LIMIT`] to end.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(crate) fn start(stopping: Option<Arc<AtomicBool>>) -> io::Result<Self> {
        let watched = Arc::new(Mutex::new(None::<(Progress, Store)>));
        let (alive, closed) = mpsc::channel::<()>();
        let theirs = Arc::clone(&watched);
        thread::Builder::new().name("doctor-watchdog".to_owned()).spawn(move || {
            let (mut stop_began, mut last_look, mut resumed) = (None, Instant::now(), None::<Instant>);
            while closed.recv_timeout(INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                if stopping.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                    let began = *stop_began.get_or_insert_with(Instant::now);
                    if began.elapsed() >= STOP_LIMIT {
                        end_process(format!("not stopped within {} s of the signal", STOP_LIMIT.as_secs()));
                    }
                }
                if last_look.elapsed() > SUSPENDED {
                    resumed = Some(Instant::now());
                }
                last_look = Instant::now();
                let stall = match theirs.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
                    // The end of a migration is progress, and reported before it counts as ended.
                    Some((_, store)) if store.is_migrating() => None,
                    Some((progress, _)) => progress.stall(),
                    None => None,
                };
                if let Some(stall) = stall.filter(|stall| resumed.is_none_or(|at| at.elapsed() > stall.limit)) {
                    end_process(format!("the control loop is stuck: {stall}"));
                }
            }
        })?;
        Ok(Self { watched, _alive: alive })
    }

    /// Watches this loop from now on, which begins now. Before that a start may take its time: it may migrate a database.
    pub(crate) fn watch(&self, progress: &Progress, store: &Store) {
        progress.enter("start");
        *self.watched.lock().unwrap_or_else(PoisonError::into_inner) = Some((progress.clone(), store.clone()));
    }
}

/// Ends the process, with a last line in the log if that can be written.
fn end_process(why: String) -> ! {
    let (logged, written) = mpsc::channel();
    let log = move || {
        tracing::error!(
            "{why}; the process ends so that another controller can lead (exit code {})",
            Exit::Stuck.code()
        );
        // The receiver waits only for so long.
        let _late = logged.send(());
    };
    if thread::Builder::new().spawn(log).is_ok() {
        let _logged = written.recv_timeout(LOG_LIMIT);
    }
    std::process::exit(i32::from(Exit::Stuck.code()))
}
