//! A program that we started, heard to its end: what it printed, what it complained about, and how it ended, within a limit of
//! time and one of size. What it started itself ends with it.

use std::{
    io::{self, Read, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

/// Of what a program complains about.
const MOST_COMPLAINT: u64 = 16 * 1024;

/// How much of a program is waited for.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub time: Duration,
    /// Of what it prints.
    pub bytes: u64,
}

/// What became of it.
#[derive(Debug)]
pub enum Heard {
    Ended {
        status: ExitStatus,
        output: Vec<u8>,
        complaint: String,
    },
    /// It printed more than it may, and was ended.
    TooLong,
    /// It did not end in time, and was ended.
    Silent,
}

/// Runs a program with this on its standard input.
///
/// # Errors
/// If it cannot be started.
pub fn hear(mut command: Command, input: &str, limits: Limits) -> io::Result<Heard> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    Ok(listen(&mut child, input.to_owned(), limits))
}

/// The last thing that a program said, in one line.
pub fn last_word(text: &str) -> String {
    let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it failed without a word");
    last.chars().take(400).collect()
}

fn listen(child: &mut Child, input: String, limits: Limits) -> Heard {
    let deadline = Instant::now() + limits.time;
    if let Some(mut pipe) = child.stdin.take() {
        // Who ends without reading it all has decided already.
        std::thread::spawn(move || pipe.write_all(input.as_bytes()));
    }
    let output = child.stdout.take().map(|pipe| whole(pipe, limits.bytes.saturating_add(1)));
    let complaint = child.stderr.take().map(|pipe| whole(pipe, MOST_COMPLAINT));
    let wait = |from: Option<mpsc::Receiver<Vec<u8>>>| {
        from.and_then(|from| from.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok())
    };
    let heard = wait(output);
    let complaint = wait(complaint);
    let too_long = heard.as_ref().is_some_and(|bytes| bytes.len() as u64 > limits.bytes);
    let (false, Some(output)) = (too_long, heard) else {
        end(child);
        return if too_long { Heard::TooLong } else { Heard::Silent };
    };
    loop {
        match child.try_wait() {
            Ok(Some(status)) => {
                let complaint = String::from_utf8_lossy(&complaint.unwrap_or_default()).into_owned();
                return Heard::Ended { status, output, complaint };
            }
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            Ok(None) | Err(_) => {
                end(child);
                return Heard::Silent;
            }
        }
    }
}

/// All of a pipe, up to a limit.
fn whole(pipe: impl Read + Send + 'static, most: u64) -> mpsc::Receiver<Vec<u8>> {
    let (send, heard) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read until it broke is all there is.
        let _broken = pipe.take(most).read_to_end(&mut bytes);
        // Nobody listens any more once the time was over.
        let _late = send.send(bytes);
    });
    heard
}

fn end(child: &mut Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
        // It may have ended by itself in this moment.
        let _gone = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
    }
    let _ended = child.wait();
}
