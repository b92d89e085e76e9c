//! The processes of a control plane, each with a log. None survives the process that started it.
//!
//! The kernel can end a child with its parent, but "parent" means the thread: a control plane that several tests share
//! would end with the test that started it. A watcher process therefore records which processes start and end. When
//! this process exits, even if it is killed, the watcher kills the rest and removes the files.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use super::{Component, KubernetesTestbedError, file_error, last_lines};

/// Reads `began` and `ended` records until its input ends with the process that writes them.
///
/// Removal is retried, because a process that was just killed may still create a file in the folder.
const WATCHER_SCRIPT: &str = r#"
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
    running: BTreeMap<Component, Child>,
    watcher: Child,
}

impl Daemons {
    /// Creates an empty set for processes whose files are all in this folder.
    pub(super) fn new(folder: &Path) -> Result<Self, KubernetesTestbedError> {
        let watcher = Command::new("sh")
            .args(["-c", WATCHER_SCRIPT, "sh"])
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A signal to this process's group must not reach the watcher.
            .process_group(0)
            .spawn()
            .map_err(|source| KubernetesTestbedError::Program { program: "sh".into(), source })?;
        Ok(Self { folder: folder.to_owned(), running: BTreeMap::new(), watcher })
    }

    /// Starts the program of a component and appends its output to the component's log.
    pub(super) fn start(
        &mut self,
        part: Component,
        programs: &Path,
        arguments: &[String],
    ) -> Result<(), KubernetesTestbedError> {
        let log = self.log(part);
        let output = File::options().create(true).append(true).open(&log).map_err(file_error("opening", &log))?;
        let errors = output.try_clone().map_err(file_error("opening", &log))?;
        let program = programs.join(part.program());
        let child = Command::new(&program)
            .args(arguments)
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .process_group(0)
            .spawn()
            .map_err(|source| KubernetesTestbedError::Program { program, source })?;
        let pid = child.id();
        self.running.insert(part, child);
        self.notify_watcher("began", pid)
    }

    /// Kills a component, if it runs, and waits until it is gone.
    pub(super) fn kill(&mut self, part: Component) -> Result<(), KubernetesTestbedError> {
        let Some(mut child) = self.running.remove(&part) else { return Ok(()) };
        let ended = |source| KubernetesTestbedError::Stop { part, source };
        child.kill().map_err(ended)?;
        // Recorded before the process id can be reused.
        self.notify_watcher("ended", child.id())?;
        child.wait().map(drop).map_err(ended)
    }

    /// Checks that a component still runs.
    ///
    /// # Errors
    /// Returns the end of its log if it has ended.
    pub(super) fn check(&mut self, part: Component) -> Result<(), KubernetesTestbedError> {
        let child = self.running.get_mut(&part).ok_or(KubernetesTestbedError::NotRunning { part })?;
        if child.try_wait().map_err(|source| KubernetesTestbedError::Stop { part, source })?.is_none() {
            return Ok(());
        }
        let pid = child.id();
        self.running.remove(&part);
        self.notify_watcher("ended", pid)?;
        Err(KubernetesTestbedError::Exited { part, said: self.last_lines(part) })
    }

    pub(super) fn pids(&self) -> impl Iterator<Item = (Component, u32)> + '_ {
        self.running.iter().map(|(part, child)| (*part, child.id()))
    }

    pub(super) fn log(&self, part: Component) -> PathBuf {
        self.folder.join(format!("{}.log", part.program()))
    }

    /// Returns the end of a component's log.
    pub(super) fn last_lines(&self, part: Component) -> String {
        last_lines(&self.log(part))
    }

    fn notify_watcher(&mut self, what: &str, pid: u32) -> Result<(), KubernetesTestbedError> {
        let written = match &mut self.watcher.stdin {
            Some(input) => writeln!(input, "{what} {pid}"),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        written.map_err(|source| KubernetesTestbedError::Program { program: "sh".into(), source })
    }
}

impl Drop for Daemons {
    fn drop(&mut self) {
        // Clients of the API server go first, so that they do not fill their logs with connection errors.
        for part in Component::ALL.into_iter().rev() {
            // What could not be killed here, the watcher kills when its input ends.
            drop(self.kill(part));
        }
        drop(self.watcher.stdin.take());
        drop(self.watcher.wait());
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::PermissionsExt as _,
        time::{Duration, Instant},
    };

    use super::*;

    /// Creates a folder with a program that prints a line and stays, and one that exits immediately.
    fn programs(folder: &Path) -> PathBuf {
        let programs = folder.join("programs");
        fs::create_dir(&programs).expect("a folder");
        for (part, script) in
            [(Component::Etcd, "echo up $1; exec sleep 600"), (Component::ApiServer, "echo port taken; exit 1")]
        {
            let path = programs.join(part.program());
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a program");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("a program");
        }
        programs
    }

    fn wait_until(mut reached: impl FnMut() -> bool) {
        let began = Instant::now();
        while !reached() {
            assert!(began.elapsed() < Duration::from_secs(240), "not reached");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn an_exited_daemon_is_an_error_with_its_last_output() {
        let folder = tempfile::tempdir().expect("a folder");
        let programs = programs(folder.path());
        let mut daemons = Daemons::new(folder.path()).expect("a watcher");
        daemons.start(Component::ApiServer, &programs, &[]).expect("it starts");
        let mut message = String::new();
        wait_until(|| daemons.check(Component::ApiServer).map_err(|error| message = error.to_string()).is_err());
        assert_eq!(message, "kube-apiserver exited; last output:\nport taken");
        assert!(matches!(
            daemons.check(Component::ApiServer),
            Err(KubernetesTestbedError::NotRunning { part: Component::ApiServer })
        ));
    }

    #[test]
    fn a_killed_daemon_can_be_restarted_and_its_log_is_continued() {
        let folder = tempfile::tempdir().expect("a folder");
        let programs = programs(folder.path());
        let mut daemons = Daemons::new(folder.path()).expect("a watcher");
        for time in ["once", "twice"] {
            daemons.start(Component::Etcd, &programs, &[time.to_owned()]).expect("it starts");
            wait_until(|| daemons.last_lines(Component::Etcd).ends_with(time));
            daemons.check(Component::Etcd).expect("it stays");
            daemons.kill(Component::Etcd).expect("it goes");
        }
        assert_eq!(daemons.last_lines(Component::Etcd), "up once\nup twice");
        assert_eq!(daemons.pids().count(), 0);
    }

    #[test]
    fn when_this_process_exits_the_daemons_and_their_files_are_removed() {
        let folder = tempfile::tempdir().expect("a folder").keep();
        let programs = programs(&folder);
        let mut daemons = Daemons::new(&folder).expect("a watcher");
        daemons.start(Component::Etcd, &programs, &[]).expect("it starts");
        wait_until(|| !daemons.last_lines(Component::Etcd).is_empty());
        // This is how the watcher observes the end of this process.
        drop(daemons.watcher.stdin.take());
        let child = daemons.running.get_mut(&Component::Etcd).expect("it was begun");
        wait_until(|| child.try_wait().expect("it is our child").is_some());
        wait_until(|| !folder.exists());
    }
}
