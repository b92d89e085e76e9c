//! The processes of a control plane: each with its log, none outliving the process that started them.
//!
//! The kernel can end a child with its parent, but it means the parent's thread: a control plane that several tests share would
//! end with the test that started it. So a watcher outside this process is told what began and what ended; when this process
//! is gone, however it went, the watcher ends what is left and removes the files.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{BedError, Part, at};

/// How much of a log an error shows.
const LAST_LINES: usize = 12;

/// Reads what began and ended until its input ends with the process that writes it.
///
/// A process that was just killed may still create a file while its folder is removed, hence more than one try.
const WATCHER: &str = r#"
running=
while read -r what pid; do
  case $what in
  began) running="$running $pid" ;;
  ended)
    left=
    for one in $running; do [ "$one" = "$pid" ] || left="$left $one"; done
    running=$left
    ;;
  esac
done
for pid in $running; do kill -KILL "$pid"; done
tries=0
while [ -e "$1" ] && [ $tries -lt 100 ]; do
  rm -rf "$1" || sleep 0.1
  tries=$((tries + 1))
done
"#;

#[derive(Debug)]
pub(super) struct Daemons {
    folder: PathBuf,
    running: BTreeMap<Part, Child>,
    watcher: Child,
}

impl Daemons {
    /// For processes whose files are all in this folder.
    pub(super) fn new(folder: &Path) -> Result<Self, BedError> {
        let watcher = Command::new("sh")
            .args(["-c", WATCHER, "sh"])
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Whoever ends this process by its group must not end the watcher as well.
            .process_group(0)
            .spawn()
            .map_err(|source| BedError::Program { program: "sh".into(), source })?;
        Ok(Self { folder: folder.to_owned(), running: BTreeMap::new(), watcher })
    }

    /// Starts the part's program; what it says is added to the part's log.
    pub(super) fn begin(&mut self, part: Part, programs: &Path, arguments: &[String]) -> Result<(), BedError> {
        let log = self.log(part);
        let output = File::options().create(true).append(true).open(&log).map_err(at("opening", &log))?;
        let errors = output.try_clone().map_err(at("opening", &log))?;
        let program = programs.join(part.program());
        let child = Command::new(&program)
            .args(arguments)
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .process_group(0)
            .spawn()
            .map_err(|source| BedError::Program { program, source })?;
        let pid = child.id();
        self.running.insert(part, child);
        self.tell("began", pid)
    }

    /// Kills the part's process, if it runs, and waits until it is gone.
    pub(super) fn kill(&mut self, part: Part) -> Result<(), BedError> {
        let Some(mut child) = self.running.remove(&part) else { return Ok(()) };
        let ended = |source| BedError::Ending { part, source };
        child.kill().map_err(ended)?;
        // Told before its number can become another process's.
        self.tell("ended", child.id())?;
        child.wait().map(drop).map_err(ended)
    }

    /// Whether the part's process still runs.
    ///
    /// # Errors
    /// If it has ended, with the last that it said.
    pub(super) fn check(&mut self, part: Part) -> Result<(), BedError> {
        let child = self.running.get_mut(&part).ok_or(BedError::NotRunning { part })?;
        if child.try_wait().map_err(|source| BedError::Ending { part, source })?.is_none() {
            return Ok(());
        }
        let pid = child.id();
        self.running.remove(&part);
        self.tell("ended", pid)?;
        Err(BedError::Ended { part, said: self.last_lines(part) })
    }

    pub(super) fn pids(&self) -> impl Iterator<Item = (Part, u32)> + '_ {
        self.running.iter().map(|(part, child)| (*part, child.id()))
    }

    pub(super) fn log(&self, part: Part) -> PathBuf {
        self.folder.join(format!("{}.log", part.program()))
    }

    /// The end of what a part has said.
    pub(super) fn last_lines(&self, part: Part) -> String {
        let log = fs::read(self.log(part)).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
    }

    fn tell(&mut self, what: &str, pid: u32) -> Result<(), BedError> {
        let told = match &mut self.watcher.stdin {
            Some(input) => writeln!(input, "{what} {pid}"),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        told.map_err(|source| BedError::Program { program: "sh".into(), source })
    }
}

impl Drop for Daemons {
    fn drop(&mut self) {
        // Those that ask the API server go first, so that they do not fill their logs with its absence.
        for part in Part::ALL.into_iter().rev() {
            // What could not be ended here is left to the watcher, which is told by the end of its input.
            drop(self.kill(part));
        }
        drop(self.watcher.stdin.take());
        drop(self.watcher.wait());
    }
}
