//! A command of somebody's on a host: what it printed on either stream and how it ended, or why nobody can say.
//!
//! The backend asks hosts by `doctor-node`; this is for everything else that is done on hosts by hand, where the answer is
//! whatever a command prints. [`Between`] tells the command's words from everybody else's.

use std::{
    fs::{self, File},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::process::{self, Ended, Group, Limits};
use doctor_checks::proc_stat::ProcStat;
use doctor_host::{
    occupancy,
    process::boot_id,
    protocol::{Ask, Said, Wanted},
};

use super::{
    config::SshConfig,
    framed_output::{Between, GO, Heard},
    hosts::Host,
    install::Asker,
    session::Lines,
};

/// The host ends a command when its time is over. Only if it does not, we stop listening.
const MARGIN: Duration = Duration::from_secs(5);
/// After a command was told to end there, before it is killed there.
const KILL_AFTER: u64 = 2;

/// Reaches hosts.
#[derive(Debug)]
pub struct Client {
    lines: Lines,
    as_root: Vec<String>,
    config: SshConfig,
    sockets: Option<PathBuf>,
    carrier: std::sync::OnceLock<Result<Asker, String>>,
}

/// What is to be done on a host.
#[derive(Debug, Clone)]
pub struct Order<'a> {
    /// For a POSIX shell there.
    pub script: &'a str,
    /// For its standard input; there is nothing else on it.
    pub input: &'a [u8],
    /// From the connection on.
    pub limit: Duration,
    /// Of each stream so many bytes are kept.
    pub most: usize,
    pub root: Root,
}

/// Whether something is done as root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Root {
    No,
    /// By the words of `as_root`, if there are any.
    IfTold,
    /// By the words of `as_root`; where there are none, who logs in has to be root, or nothing is done.
    Yes,
}

impl Root {
    /// As a person has asked for it.
    pub const fn asked(root: bool) -> Self {
        if root { Self::Yes } else { Self::No }
    }
}

/// What a host ends with on which nobody is root who should be.
const NOT_ROOT: i32 = 126;
const WHY_NOT_ROOT: &str = "who logs in is not root, and `as_root` under [backend.ssh] is empty: it would be [\"sudo\", \"-n\"], or what the site has for it";

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub how: How,
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// Bytes of either stream that were too many to be kept.
    pub left_out: u64,
    pub took: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum How {
    /// The command's own code, whatever `ssh` ended with. A signal is 128 and its number, as shells have it.
    Exited(i32),
    /// Its time was over. `ended`: it was ended there; else it may go on.
    Late { ended: bool },
    /// It was not begun: the host waits for our word before it does anything, and that was not sent.
    NotReached(String),
    /// It may have been begun, and the connection broke before it said how it ended.
    Lost(String),
}

impl Client {
    /// Each command has a connection of its own.
    pub fn new(config: &SshConfig) -> Self {
        Self::with(config, None)
    }

    /// Connections are kept and shared with the service's, where its folder for them can be used; a person without rights to
    /// it gets one for each command.
    pub fn sharing(config: &SshConfig) -> Self {
        let folder = config.state.join("c");
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        let sockets = made.is_ok().then_some(folder).filter(|folder| may_write(folder));
        Self::with(config, sockets)
    }

    fn with(config: &SshConfig, sockets: Option<PathBuf>) -> Self {
        Self {
            lines: Lines::new(config, sockets.as_deref()),
            as_root: config.as_root.clone(),
            config: config.clone(),
            sockets,
            carrier: std::sync::OnceLock::new(),
        }
    }

    /// Does it on one host.
    pub fn run(&self, host: &Host, order: &Order<'_>) -> Answer {
        self.heard(host, order, |word| Between::new(word, order.most)).0
    }

    /// Does it on one host, and what it prints goes into this file. So many bytes are there then.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn fetch(&self, host: &Host, order: &Order<'_>, file: &File) -> std::io::Result<(Answer, usize)> {
        let file = file.try_clone()?;
        let (answer, out) = self.heard(host, order, |word| Between::into_file(word, order.most, file));
        match out.unwritten {
            Some(why) => Err(std::io::Error::other(why)),
            None => Ok((answer, out.kept)),
        }
    }

    /// What was heard on standard output is in the answer too.
    fn heard(&self, host: &Host, order: &Order<'_>, listener: impl FnOnce(&str) -> Between) -> (Answer, Heard) {
        let began = Instant::now();
        let failed = |how| {
            let took = began.elapsed();
            (Answer { how, stdout: Vec::new(), stderr: Vec::new(), left_out: 0, took }, Heard::default())
        };
        let word = match unguessable() {
            Ok(word) => word,
            Err(error) => return failed(How::NotReached(format!("asking the system for random bits: {error}"))),
        };
        let mut ssh = self.lines.command(host, &format!("exec sh -c {}", quoted(&self.script(&word, order))));
        let limits = Limits { group: Group::Shared, ..Limits::new(self.lines.connect() + order.limit + MARGIN) };
        let listeners = (listener(&word), Between::new(&word, order.most));
        let input = [GO.as_bytes(), b"\n", order.input].concat();
        let (ended, out, err) = match process::run(&mut ssh, input, limits, listeners) {
            Ok(ran) => ran,
            Err(error) => return failed(How::NotReached(format!("ssh cannot be started: {error}"))),
        };
        let (mut out, err) = (out.into_heard(), err.into_heard());
        let took = began.elapsed();
        let how = match (out.code, ended) {
            // What `timeout` ends with; before the time was over it is the command's own code.
            (Some(124 | 137), _) if took >= order.limit => How::Late { ended: true },
            (Some(code), _) => How::Exited(code),
            (None, Ended::Late | Ended::TooMuch) if out.begun => How::Late { ended: false },
            (None, Ended::Late | Ended::TooMuch) => How::NotReached("it does not answer".to_owned()),
            (None, Ended::Itself(_)) if out.begun => How::Lost(complaint(&err.text)),
            (None, Ended::Itself(_)) => How::NotReached(complaint(&err.noise)),
        };
        let (stdout, left_out) = (std::mem::take(&mut out.text), out.left_out + err.left_out);
        (Answer { how, stdout, stderr: err.text, left_out, took }, out)
    }

    fn script(&self, word: &str, order: &Order<'_>) -> String {
        let secs = order.limit.as_secs().max(1);
        let root = if order.root == Root::No { String::new() } else { self.as_root.join(" ") };
        let input = if order.input.is_empty() { "</dev/null" } else { "" };
        // `timeout` is everywhere where coreutils or busybox are; elsewhere only we keep the time.
        let run = format!(
            "T=; if command -v timeout >/dev/null 2>&1; then T=\"timeout -k {KILL_AFTER} {secs}\"; fi; {root} $T sh -c {} {input}",
            quoted(order.script)
        );
        if order.root == Root::Yes && self.as_root.is_empty() {
            let why = quoted(WHY_NOT_ROOT);
            let run =
                format!("if [ \"$(id -u)\" = 0 ]; then {run}; else printf \"%s\\n\" {why} >&2; (exit {NOT_ROOT}); fi");
            return Between::around(word, &run);
        }
        Between::around(word, &run)
    }

    /// Where OpenSSH goes for a host, as its configuration has it. Nobody is asked.
    pub fn address(&self, host: &Host) -> Option<String> {
        self.lines.address(host).ok()
    }

    fn carrier(&self) -> Result<&Asker, String> {
        let carrier = self.carrier.get_or_init(|| Asker::new(&self.config, self.sockets.as_deref()));
        carrier.as_ref().map_err(Clone::clone)
    }

    /// Where `doctor-node` is on a host, which gets it first if it has none.
    ///
    /// # Errors
    /// If there is no such program here, or it cannot be carried there.
    pub fn carry(&self, host: &Host) -> Result<String, String> {
        self.carrier()?.carry(host)
    }

    /// What keeps work off a host, by the rule by which the service calls one free: somebody uses it, somebody may, or it is marked.
    /// That nobody can say keeps it off too.
    pub fn kept_off(&self, host: &Host) -> Option<String> {
        let carrier = match self.carrier() {
            Ok(carrier) => carrier,
            Err(why) => return Some(why),
        };
        let (locks, bystanders) = (self.config.locks.clone(), self.config.bystanders.clone());
        let ask = Ask::Look(Wanted { runs: Vec::new(), locks, bystanders });
        let mut look = match carrier.ask(host, &ask, Duration::ZERO) {
            Ok(Said::Looked(look)) => *look,
            Ok(Said::Failed { text }) => return Some(text),
            Ok(_) => return Some("it answered something else".to_owned()),
            Err(why) => return Some(why.text().to_owned()),
        };
        if look.boot_id == boot_id()
            && let Ok(terminals) = &mut look.terminals
        {
            // The host is this machine: who asks is no user of it.
            terminals.retain(|process| !is_of_our_session(process.pid));
        }
        let of_ours = || look.under_way.first().map(|run| format!("run {run} of the service is on it"));
        occupancy::kept_off(&look, self.config.max_load_per_core).or_else(of_ours)
    }
}

/// One word for a POSIX shell, whatever is in it.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// A word that no command and no file on a host can know.
///
/// # Errors
/// If the system has no random bits.
pub fn unguessable() -> Result<String, getrandom::Error> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits)?;
    Ok(format!("doctor-{:032x}", u128::from_le_bytes(bits)))
}

fn is_of_our_session(pid: u32) -> bool {
    let session = |process: &str| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        ProcStat::parse(&stat).map(|stat| stat.session)
    };
    session("self").is_some_and(|own| session(&pid.to_string()) == Some(own))
}

fn complaint(noise: &[u8]) -> String {
    let text = String::from_utf8_lossy(noise);
    let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    last.unwrap_or("the connection ended without a word").chars().take(300).collect()
}

fn may_write(folder: &Path) -> bool {
    use rustix::fs::{Access, access};
    access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_word_reaches_the_shell_as_it_is() {
        for text in ["plain", "it's", "$(id) `id` \"x\" \\ ! * ;", "'", "a\nb", ""] {
            let said = std::process::Command::new("sh").args(["-c", &format!("printf %s {}", quoted(text))]).output();
            assert_eq!(String::from_utf8(said.unwrap().stdout).unwrap(), text);
        }
    }

    #[test]
    fn the_last_complaint_is_the_one_that_counts() {
        assert_eq!(complaint(b"Welcome\n\nssh: Connection refused\r\n\n"), "ssh: Connection refused");
        assert_eq!(complaint(b""), "the connection ended without a word");
    }

    #[test]
    fn no_two_words_are_the_same() {
        assert_ne!(unguessable().unwrap(), unguessable().unwrap());
    }
}
