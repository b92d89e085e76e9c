//! A program of the system's, run with limits: how long it may take, and, by who listens, how much of what it prints is kept.
//!
//! It stays in our process group, so that who presses Ctrl-C ends both.

use std::{
    io::{self, Read, Write as _},
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex, PoisonError, mpsc},
    time::{Duration, Instant},
};

/// When a program has ended, what it printed is nearly all here. Another that it left behind may hold its streams open for ever.
const FAREWELL: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

/// Who takes what a program prints.
pub trait Listen: Send + 'static {
    fn hear(&mut self, part: &[u8]);

    /// Whether it is time to speak to the program: some are spoken to only when they have said something first.
    fn may_answer(&self) -> bool {
        true
    }

    /// Whether nothing more is to come, although the stream is still open.
    fn is_over(&self) -> bool {
        false
    }
}

/// Keeps the beginning.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kept {
    pub bytes: Vec<u8>,
    pub most: usize,
    pub left_out: u64,
}

impl Kept {
    pub fn up_to(most: usize) -> Self {
        Self { most, ..Self::default() }
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

impl Listen for Kept {
    fn hear(&mut self, part: &[u8]) {
        let kept = part.len().min(self.most.saturating_sub(self.bytes.len()));
        self.bytes.extend(&part[..kept]);
        self.left_out += (part.len() - kept) as u64;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub time: Duration,
    /// After it was asked to end, before it is killed.
    pub grace: Duration,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    Itself(ExitStatus),
    /// Its time was over, and it was ended.
    Late,
}

/// Runs it to its end, with this on its standard input as soon as who listens to its standard output lets it, and gives back who listened.
///
/// # Errors
/// If it cannot be started, or not be waited for.
pub fn run<O: Listen, E: Listen>(
    command: &mut Command,
    input: Vec<u8>,
    limits: Limits,
    (out, err): (O, E),
) -> io::Result<(Ended, O, E)> {
    let until = Instant::now() + limits.time;
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let mut answer = child.stdin.take().map(|pipe| (pipe, input));
    if out.may_answer() {
        speak(&mut answer);
    }
    let (tell, told) = mpsc::channel();
    let err = listen(child.stderr.take(), err, tell.clone(), None);
    let out = listen(child.stdout.take(), out, tell, answer);
    let ended = wait(&mut child, &told, until, limits.grace);
    if ended.is_err() {
        // Nothing is left behind, whatever cannot be learnt about it.
        let _gone = child.kill();
    }
    Ok((ended?, taken(&out), taken(&err)))
}

type Shared<L> = Arc<Mutex<Option<L>>>;
type Answer = Option<(ChildStdin, Vec<u8>)>;

/// Says what there is to say, once.
fn speak(answer: &mut Answer) {
    if let Some((mut pipe, input)) = answer.take() {
        // Who ends without reading it all has decided already.
        std::thread::spawn(move || pipe.write_all(&input));
    }
}

/// A stream of the program's, and what it is told when it has come to that. If it never does, it hears only that nobody speaks.
fn listen<L: Listen>(
    pipe: Option<impl Read + Send + 'static>,
    listener: L,
    tell: mpsc::Sender<()>,
    mut answer: Answer,
) -> Shared<L> {
    let shared = Arc::new(Mutex::new(Some(listener)));
    let own = Arc::clone(&shared);
    std::thread::spawn(move || {
        let mut part = [0; 16 * 1024];
        let mut pipe = pipe;
        while let Some(count @ 1..) = pipe.as_mut().and_then(|pipe| pipe.read(&mut part).ok()) {
            let mut listener = own.lock().unwrap_or_else(PoisonError::into_inner);
            // Nobody listens any more.
            let Some(listener) = listener.as_mut() else { return };
            listener.hear(&part[..count]);
            if listener.may_answer() {
                speak(&mut answer);
            }
            if listener.is_over() {
                break;
            }
        }
        let _nobody = tell.send(());
    });
    shared
}

fn taken<L>(shared: &Shared<L>) -> L {
    let mut listener = shared.lock().unwrap_or_else(PoisonError::into_inner);
    listener.take().expect("it is taken once, at the end")
}

fn wait(child: &mut Child, told: &mpsc::Receiver<()>, until: Instant, grace: Duration) -> io::Result<Ended> {
    let (mut streams, mut exited) = (0, None);
    loop {
        match told.recv_timeout(PAUSE) {
            Ok(()) => streams += 1,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            // Both have ended: only the program itself is waited for.
            Err(mpsc::RecvTimeoutError::Disconnected) => std::thread::sleep(PAUSE),
        }
        if exited.is_none() {
            exited = child.try_wait()?.map(|status| (status, Instant::now()));
        }
        match exited {
            Some((status, at)) if streams == 2 || at.elapsed() > FAREWELL => return Ok(Ended::Itself(status)),
            None if Instant::now() >= until => {
                end(child, grace)?;
                return Ok(Ended::Late);
            }
            _ => {}
        }
    }
}

/// Asks it to end, which lets it end what it has started elsewhere, and kills it if it does not.
fn end(child: &mut Child, grace: Duration) -> io::Result<()> {
    let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
    if let Some(pid) = pid.filter(|_| !grace.is_zero()) {
        // It may have ended by itself in this moment.
        let _gone = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let until = Instant::now() + grace;
        while Instant::now() < until {
            if child.try_wait()?.is_some() {
                return Ok(());
            }
            std::thread::sleep(PAUSE);
        }
    }
    child.kill()?;
    child.wait().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Limits = Limits { time: Duration::from_secs(30), grace: Duration::ZERO };

    fn shell(script: &str, input: &str, limits: Limits) -> (Ended, String, String) {
        let listeners = (Kept::up_to(64), Kept::up_to(64));
        let mut command = Command::new("sh");
        let (ended, out, err) =
            run(command.args(["-c", script]), input.as_bytes().to_vec(), limits, listeners).unwrap();
        (ended, out.text(), err.text())
    }

    #[test]
    fn both_streams_and_the_end_are_heard() {
        let (ended, out, err) = shell("cat; echo no >&2; exit 3", "yes", LONG);
        let Ended::Itself(status) = ended else { panic!("{ended:?}") };
        assert_eq!((status.code(), out.as_str(), err.as_str()), (Some(3), "yes", "no\n"));
        assert!(
            run(&mut Command::new("/no/such/program"), Vec::new(), LONG, (Kept::default(), Kept::default())).is_err()
        );
    }

    #[test]
    fn a_program_is_not_spoken_to_before_it_has_said_what_was_waited_for() {
        #[derive(Default)]
        struct Waits(Kept);
        impl Listen for Waits {
            fn hear(&mut self, part: &[u8]) {
                self.0.hear(part);
            }
            fn may_answer(&self) -> bool {
                self.0.text().contains("ready")
            }
        }
        let heard = |script: &str| {
            let (listeners, mut command) = ((Waits(Kept::up_to(64)), Kept::up_to(64)), Command::new("sh"));
            run(command.args(["-c", script]), b"go\n".to_vec(), LONG, listeners).unwrap().1.0.text()
        };
        assert_eq!(heard("echo ready; read x; echo \"heard $x\""), "ready\nheard go\n");
        assert_eq!(
            heard("echo stop; exec >/dev/null; read x; echo \"$x\" >&2"),
            "stop\n",
            "it hears the end of its input"
        );
    }

    #[test]
    fn one_that_does_not_end_is_ended_and_what_it_said_is_kept() {
        let limits = Limits { time: Duration::from_millis(500), grace: Duration::from_secs(5) };
        let began = Instant::now();
        let (ended, out, _) =
            shell("trap 'echo ending; exit 0' TERM; echo begun; while :; do sleep 0.05; done", "", limits);
        assert!(ended == Ended::Late && out.starts_with("begun") && began.elapsed() < Duration::from_secs(20), "{out}");
        let stubborn = Limits { time: Duration::from_millis(200), grace: Duration::from_millis(200) };
        assert_eq!(shell("trap '' TERM; exec sleep 600", "", stubborn).0, Ended::Late);
    }

    #[test]
    fn what_is_printed_without_end_is_not_kept_and_a_child_left_behind_holds_up_nothing() {
        let (_, out, _) = shell("head -c 1000000 /dev/zero | tr '\\0' x", "", LONG);
        assert_eq!(out.len(), 64);
        let began = Instant::now();
        let (ended, out, _) = shell("sleep 20 & echo done", "", LONG);
        assert!(matches!(ended, Ended::Itself(_)) && out == "done\n", "{out}");
        assert!(began.elapsed() < Duration::from_secs(15));
    }
}
