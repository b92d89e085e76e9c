//! Runs a child process with a deadline, capped output and a bounded end. Every process that the controller waits for runs here.
//!
//! [`run`] passes output to listeners while the process runs; [`output`] collects it. Both need a limit, and within a call to a
//! backend they end with the call ([`crate::deadline`]). [`ChildProcess`], for this crate only, is a started process for a caller
//! that communicates with it. Every wait is bounded: a process that survives SIGKILL, because it is blocked in the kernel, is
//! abandoned, and a later call reaps it if it ends after all.

mod running;

use std::{
    collections::VecDeque,
    io::{self, Read, Write as _},
    os::fd::AsFd,
    process::{ChildStdin, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::deadline::{self, Deadline, TIME_IS_UP};
pub(crate) use running::ChildProcess;
pub use running::Group;

/// How often to check whether a process has ended. Its pipes do not reveal it: a child of the process may hold them open.
const PAUSE: Duration = Duration::from_millis(2);
/// The name of the threads that read output.
const READER_THREAD: &str = "process output";
/// How often a reader of output checks whether its caller has left. A process that outlived the killed one may hold the pipe open.
const READER_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// How much of the beginning of standard error [`output`] keeps, in bytes.
const MAX_STDERR: usize = 16 * 1024;

/// Receives a process's output on a dedicated thread. Methods must not block.
pub trait OutputListener: Send + 'static {
    fn on_output(&mut self, part: &[u8]);

    /// Returns whether the input may be written. Some processes must print something first.
    fn is_ready_for_input(&self) -> bool {
        true
    }

    /// Returns whether no more output is expected although the stream is still open.
    fn is_finished(&self) -> bool {
        false
    }

    /// Returns whether the process exceeded its output limit. It is then killed.
    fn exceeds_limit(&self) -> bool {
        false
    }
}

/// Keeps the beginning of a stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeadBuffer {
    pub bytes: Vec<u8>,
    pub max_bytes: usize,
    pub dropped_bytes: u64,
}

impl HeadBuffer {
    pub fn with_capacity(max_bytes: usize) -> Self {
        Self { max_bytes, ..Self::default() }
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

impl OutputListener for HeadBuffer {
    fn on_output(&mut self, part: &[u8]) {
        let retained = part.len().min(self.max_bytes.saturating_sub(self.bytes.len()));
        self.bytes.extend(&part[..retained]);
        self.dropped_bytes += (part.len() - retained) as u64;
    }
}

/// Keeps the end of a stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TailBuffer {
    bytes: VecDeque<u8>,
    max_bytes: usize,
}

impl TailBuffer {
    pub fn with_capacity(max_bytes: usize) -> Self {
        Self { bytes: VecDeque::new(), max_bytes }
    }

    pub fn text(&self) -> String {
        let bytes: Vec<u8> = self.bytes.iter().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl OutputListener for TailBuffer {
    fn on_output(&mut self, part: &[u8]) {
        self.bytes.extend(part);
        let surplus = self.bytes.len().saturating_sub(self.max_bytes);
        self.bytes.drain(..surplus);
    }
}

/// Lets both streams share one listener.
impl<L: OutputListener> OutputListener for Arc<Mutex<L>> {
    fn on_output(&mut self, part: &[u8]) {
        self.lock().unwrap_or_else(PoisonError::into_inner).on_output(part);
    }

    fn is_ready_for_input(&self) -> bool {
        self.lock().unwrap_or_else(PoisonError::into_inner).is_ready_for_input()
    }

    fn is_finished(&self) -> bool {
        self.lock().unwrap_or_else(PoisonError::into_inner).is_finished()
    }

    fn exceeds_limit(&self) -> bool {
        self.lock().unwrap_or_else(PoisonError::into_inner).exceeds_limit()
    }
}

/// Keeps a whole stream, or reports that it is too long.
#[derive(Debug)]
struct CappedBuffer(HeadBuffer);

impl OutputListener for CappedBuffer {
    fn on_output(&mut self, part: &[u8]) {
        self.0.on_output(part);
    }

    fn exceeds_limit(&self) -> bool {
        self.0.dropped_bytes > 0
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub time: Duration,
    /// The time between SIGTERM and SIGKILL. Zero: SIGKILL only.
    pub grace: Duration,
    /// How long the streams are read after the process has ended, because a process it left behind may hold them open. `None`: to
    /// their end; if that does not come before the deadline, the process counts as late.
    pub drain: Option<Duration>,
    pub group: Group,
}

impl Limits {
    /// Limits for a process that leads its own group and gets SIGKILL when its time is over.
    pub const fn new(time: Duration) -> Self {
        Self { time, grace: Duration::ZERO, drain: Some(Duration::from_secs(1)), group: Group::Own }
    }
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessEnd {
    Exited(ExitStatus),
    /// It exceeded its time, or the kernel could not report its state, and it was killed.
    TimedOut,
    /// It exceeded a listener's limit and was killed.
    OutputLimit,
}

/// The result of [`output`].
#[derive(Debug)]
pub enum ProcessOutput {
    Exited {
        status: ExitStatus,
        stdout: Vec<u8>,
        stderr: String,
    },
    /// It exceeded the output limit and was killed.
    OutputLimit,
    /// It, or its output, did not end in time, and it was killed.
    TimedOut,
}

/// Runs a process in its own group with `input` on its standard input. Collects at most `max_bytes` bytes of standard output, and the
/// beginning of standard error.
///
/// # Errors
/// If it cannot be started. Then nothing has happened.
pub fn output(mut command: Command, input: &[u8], time: Duration, max_bytes: usize) -> io::Result<ProcessOutput> {
    // Truncated output must not pass for complete output.
    let limits = Limits { drain: None, ..Limits::new(time) };
    let listeners = (CappedBuffer(HeadBuffer::with_capacity(max_bytes)), HeadBuffer::with_capacity(MAX_STDERR));
    let (ended, stdout, stderr) = run(&mut command, input.to_vec(), limits, listeners)?;
    Ok(match ended {
        ProcessEnd::Exited(status) => ProcessOutput::Exited { status, stdout: stdout.0.bytes, stderr: stderr.text() },
        ProcessEnd::OutputLimit => ProcessOutput::OutputLimit,
        ProcessEnd::TimedOut => ProcessOutput::TimedOut,
    })
}

/// Runs a process to its end and returns its listeners. The input is written as soon as the listener of standard output permits
/// it.
///
/// # Errors
/// If it cannot be started. Then nothing has happened. The kind is [`io::ErrorKind::TimedOut`] if the call that needs it has no
/// time left.
pub fn run<O: OutputListener, E: OutputListener>(
    command: &mut Command,
    input: Vec<u8>,
    limits: Limits,
    (out, err): (O, E),
) -> io::Result<(ProcessEnd, O, E)> {
    if deadline::is_over() {
        return Err(io::Error::new(io::ErrorKind::TimedOut, TIME_IS_UP));
    }
    let until = Instant::now() + deadline::time_left(limits.time);
    let stdin = if input.is_empty() { Stdio::null() } else { Stdio::piped() };
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = ChildProcess::start(command, limits.group)?;
    let mut pending_input = running.take_stdin().map(|pipe| (pipe, input));
    if out.is_ready_for_input() {
        write_input(&mut pending_input);
    }
    let (sender, events) = mpsc::channel();
    let err = spawn_reader(running.take_stderr(), err, sender.clone(), None);
    let out = spawn_reader(running.take_stdout(), out, sender, pending_input);
    let ended = wait(&mut running, &events, until, limits);
    Ok((ended, take_listener(&out), take_listener(&err)))
}

/// Returns the last line that a process printed, at most 400 characters, for a message.
pub fn last_line(text: &str) -> String {
    let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it failed without output");
    last.chars().take(400).collect()
}

type Shared<L> = Arc<Mutex<Option<L>>>;
type PendingInput = Option<(ChildStdin, Vec<u8>)>;

/// What a stream's reader reports.
enum StreamEvent {
    End,
    LimitExceeded,
}

/// Writes the input once, on its own thread.
fn write_input(pending_input: &mut PendingInput) {
    if let Some((mut pipe, input)) = pending_input.take() {
        // A process may end without reading all of its input.
        std::thread::spawn(move || pipe.write_all(&input));
    }
}

/// Reads a stream, and writes the input once the listener permits it. If it never does, the process sees the end of its input.
fn spawn_reader<L: OutputListener>(
    pipe: Option<impl Read + AsFd + Send + 'static>,
    listener: L,
    sender: mpsc::Sender<StreamEvent>,
    mut pending_input: PendingInput,
) -> Shared<L> {
    let shared = Arc::new(Mutex::new(Some(listener)));
    let reader_listener = Arc::clone(&shared);
    let reader = std::thread::Builder::new().name(READER_THREAD.to_owned());
    let reading = reader.spawn(move || {
        let mut part = vec![0; 64 * 1024];
        let mut pipe = pipe;
        let is_awaited = || reader_listener.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        while let Some(count @ 1..) = pipe.as_mut().and_then(|pipe| read(pipe, &mut part, is_awaited)) {
            let mut listener = reader_listener.lock().unwrap_or_else(PoisonError::into_inner);
            // The caller has stopped waiting for the process.
            let Some(listener) = listener.as_mut() else { return };
            listener.on_output(&part[..count]);
            if listener.is_ready_for_input() {
                write_input(&mut pending_input);
            }
            if listener.exceeds_limit() {
                let _given_up = sender.send(StreamEvent::LimitExceeded);
                return;
            }
            if listener.is_finished() {
                break;
            }
        }
        let _given_up = sender.send(StreamEvent::End);
    });
    // As `std::thread::spawn` does: without a thread, no output can be read.
    drop(reading.expect("the system can start a thread"));
    shared
}

/// Returns `None` if the stream broke, or the caller no longer awaits its output.
fn read(pipe: &mut (impl Read + AsFd), part: &mut [u8], is_awaited: impl Fn() -> bool) -> Option<usize> {
    loop {
        match poll(&mut [PollFd::new(&*pipe, PollFlags::IN)], Some(&READER_PAUSE)) {
            Ok(0) if is_awaited() => continue,
            Ok(0) => return None,
            Err(Errno::INTR) => continue,
            // If the pipe cannot be polled, reading it says why.
            Ok(_) | Err(_) => {}
        }
        match pipe.read(part) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.ok(),
        }
    }
}

fn take_listener<L>(shared: &Shared<L>) -> L {
    let mut listener = shared.lock().unwrap_or_else(PoisonError::into_inner);
    listener.take().expect("it is taken once, at the end")
}

fn wait(
    running: &mut ChildProcess,
    events: &mpsc::Receiver<StreamEvent>,
    until: Instant,
    limits: Limits,
) -> ProcessEnd {
    let (mut streams, mut ended_at) = (0, None);
    let call = Deadline::current();
    loop {
        match events.recv_timeout(PAUSE) {
            Ok(StreamEvent::End) => streams += 1,
            Ok(StreamEvent::LimitExceeded) => {
                running.terminate(limits.grace);
                return ProcessEnd::OutputLimit;
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            // Both streams have ended; only the process itself is left to wait for.
            Err(mpsc::RecvTimeoutError::Disconnected) => std::thread::sleep(PAUSE),
        }
        let ended = running.has_ended();
        if matches!(ended, Ok(true)) {
            ended_at.get_or_insert_with(Instant::now);
        }
        let late = Instant::now() >= until || ended.is_err() || call.as_ref().is_some_and(|call| call.left().is_zero());
        let drained = |at: Instant| limits.drain.is_some_and(|drain| late || at.elapsed() > drain);
        match ended_at {
            Some(at) if streams == 2 || drained(at) => {
                return running.reap().map_or(ProcessEnd::TimedOut, ProcessEnd::Exited);
            }
            _ if late => {
                running.terminate(limits.grace);
                return ProcessEnd::TimedOut;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Limits = limits(30_000, 0);

    const fn limits(time: u64, grace: u64) -> Limits {
        let (time, grace) = (Duration::from_millis(time), Duration::from_millis(grace));
        Limits { grace, group: Group::Shared, ..Limits::new(time) }
    }

    fn shell(script: &str, input: &str, limits: Limits) -> (ProcessEnd, String, String) {
        let listeners = (HeadBuffer::with_capacity(64), HeadBuffer::with_capacity(64));
        let mut command = Command::new("sh");
        let (ended, out, err) =
            run(command.args(["-c", script]), input.as_bytes().to_vec(), limits, listeners).unwrap();
        (ended, out.text(), err.text())
    }

    #[test]
    fn both_streams_and_the_exit_status_are_reported() {
        let (ended, out, err) = shell("cat; echo no >&2; exit 3", "yes", LONG);
        let ProcessEnd::Exited(status) = ended else { panic!("{ended:?}") };
        assert_eq!((status.code(), out.as_str(), err.as_str()), (Some(3), "yes", "no\n"));
        assert!(
            run(
                &mut Command::new("/no/such/program"),
                Vec::new(),
                LONG,
                (HeadBuffer::default(), HeadBuffer::default())
            )
            .is_err()
        );
    }

    #[test]
    fn input_is_sent_only_after_the_listener_is_ready() {
        #[derive(Default)]
        struct Waits(HeadBuffer);
        impl OutputListener for Waits {
            fn on_output(&mut self, part: &[u8]) {
                self.0.on_output(part);
            }
            fn is_ready_for_input(&self) -> bool {
                self.0.text().contains("ready")
            }
        }
        let stdout_of = |script: &str| {
            let (listeners, mut command) =
                ((Waits(HeadBuffer::with_capacity(64)), HeadBuffer::with_capacity(64)), Command::new("sh"));
            run(command.args(["-c", script]), b"go\n".to_vec(), LONG, listeners).unwrap().1.0.text()
        };
        assert_eq!(stdout_of("echo ready; read x; echo \"heard $x\""), "ready\nheard go\n");
        assert_eq!(
            stdout_of("echo stop; exec >/dev/null; read x; echo \"$x\" >&2"),
            "stop\n",
            "it sees the end of its input"
        );
    }

    #[test]
    fn a_process_that_times_out_is_killed_and_its_output_is_kept() {
        let began = Instant::now();
        let (ended, out, _) =
            shell("trap 'echo ending; exit 0' TERM; echo begun; while :; do sleep 0.05; done", "", limits(500, 5000));
        assert!(
            ended == ProcessEnd::TimedOut && out.starts_with("begun") && began.elapsed() < Duration::from_secs(20),
            "{out}"
        );
        assert_eq!(shell("trap '' TERM; exec sleep 600", "", limits(200, 200)).0, ProcessEnd::TimedOut);
    }

    #[test]
    fn endless_output_is_dropped_and_an_orphaned_child_does_not_block() {
        let (_, out, _) = shell("head -c 1000000 /dev/zero | tr '\\0' x", "", LONG);
        assert_eq!(out.len(), 64);
        let began = Instant::now();
        let (ended, out, _) = shell("sleep 20 & echo done", "", LONG);
        assert!(matches!(ended, ProcessEnd::Exited(_)) && out == "done\n", "{out}");
        assert!(began.elapsed() < Duration::from_secs(15));
    }

    fn collected(script: &str, time: Duration, max_bytes: usize) -> ProcessOutput {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        output(command, b"input", time, max_bytes).unwrap()
    }

    #[test]
    fn output_is_collected_completely_or_not_at_all() {
        let long = Duration::from_secs(30);
        let ProcessOutput::Exited { status, stdout, stderr } = collected("cat; echo no >&2; exit 3", long, 5) else {
            panic!("it ended before the limit")
        };
        assert_eq!((status.code(), &*stdout, &*stderr), (Some(3), &b"input"[..], "no\n"));
        assert!(matches!(collected("cat; echo", long, 5), ProcessOutput::OutputLimit), "one byte too many");
        let began = Instant::now();
        assert!(matches!(collected("yes", long, 1 << 20), ProcessOutput::OutputLimit), "it never stops printing");
        assert!(began.elapsed() < long);
        // The process has ended while another one holds its output open: the output may be incomplete.
        assert!(matches!(collected("echo a; sleep 600 &", Duration::from_millis(300), 99), ProcessOutput::TimedOut));
        let ProcessOutput::Exited { stderr, .. } = collected("head -c 3000000 /dev/zero >&2", long, 5) else {
            panic!("output on standard error does not block it")
        };
        assert_eq!(stderr.len(), MAX_STDERR);
    }

    #[test]
    fn a_group_leader_is_killed_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let script = format!("sleep 600 & echo $! >{}; wait", pid.display());
        let mut command = Command::new("sh");
        let (ended, ..) = run(
            command.args(["-c", &script]),
            Vec::new(),
            Limits::new(Duration::from_secs(1)),
            (HeadBuffer::default(), HeadBuffer::default()),
        )
        .unwrap();
        assert_eq!(ended, ProcessEnd::TimedOut);
        let pid = std::fs::read_to_string(pid).unwrap();
        let state = || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
            stat.rsplit(')').next().unwrap_or_default().trim().chars().next()
        };
        let until = Instant::now() + Duration::from_secs(30);
        // The process that adopts it may take a while to reap it.
        while !matches!(state(), None | Some('Z' | 'X')) {
            assert!(Instant::now() < until, "what it started goes on");
            std::thread::sleep(PAUSE);
        }
    }

    #[test]
    fn no_reader_outlives_its_caller_although_an_orphan_holds_the_pipe() {
        let readers = || {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
            let name = |task: &std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            tasks.filter(|task| name(task).trim() == READER_THREAD).count()
        };
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        // In a session of its own, it survives the end of the group.
        let script = format!(
            "setsid sh -c 'echo $$ >{0}; exec sleep 600' & until [ -s {0} ]; do sleep 0.01; done; echo begun",
            pid.display()
        );
        let (_, out, _) = shell(&script, "", limits(30_000, 0));
        assert_eq!(out, "begun\n");
        let until = Instant::now() + Duration::from_secs(240);
        // Other tests of this program have readers too, which end.
        while readers() > 0 {
            assert!(Instant::now() < until, "{} readers", readers());
            std::thread::sleep(PAUSE);
        }
        let orphan = std::fs::read_to_string(pid).unwrap();
        assert!(Command::new("kill").args(["-9", orphan.trim()]).status().unwrap().success());
    }

    #[test]
    fn a_process_ends_with_the_call_that_needs_it() {
        let call = Deadline::after(Duration::from_millis(300));
        let ended = deadline::enter(Some(call), || shell("exec sleep 600", "", LONG).0);
        assert_eq!(ended, ProcessEnd::TimedOut);
        let folder = tempfile::tempdir().unwrap();
        let begun = folder.path().join("begun");
        let script = format!("touch {}; exec sleep 600", begun.display());
        let call = Deadline::after(Duration::from_secs(3600));
        let working = call.clone();
        let running = std::thread::spawn(move || deadline::enter(Some(working), || shell(&script, "", LONG).0));
        let until = Instant::now() + Duration::from_secs(120);
        while !begun.exists() {
            assert!(Instant::now() < until, "it begins");
            std::thread::sleep(PAUSE);
        }
        call.cancel();
        assert_eq!(running.join().unwrap(), ProcessEnd::TimedOut);
    }

    #[test]
    fn the_tail_of_both_streams_is_kept() {
        let tail = Arc::new(Mutex::new(TailBuffer::with_capacity(5)));
        let mut command = Command::new("sh");
        let both = (Arc::clone(&tail), Arc::clone(&tail));
        run(command.args(["-c", "head -c 300000 /dev/zero; echo 1234 >&2"]), Vec::new(), LONG, both).unwrap();
        let text = tail.lock().unwrap().text();
        assert!(text.len() == 5 && (text.ends_with('\0') || text == "1234\n"), "{text:?}");
    }
}
