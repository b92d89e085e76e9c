//! External programs that a test runs: located in advance, and never outliving the test.
//!
//! This program starts itself first, requests a signal for the end of its parent, and then executes the external
//! program. That therefore ends with the test, even if the test is killed.

use std::{
    env,
    ffi::OsString,
    fs,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use super::SELF_EXE;
use crate::runner::{BUILTIN_ARGUMENT, KEY_VARIABLE};

/// The subtask name under which this program executes another one.
pub(super) const SUBTASK: &str = "bound";

/// An installed program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) path: PathBuf,
}

/// The signal that the program gets when the test ends before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndSignal {
    /// SIGTERM: it has to clean up.
    Term,
    /// SIGKILL.
    Kill,
}

impl EndSignal {
    const ALL: &'static [Self] = &[Self::Term, Self::Kill];

    const fn code(self) -> &'static str {
        match self {
            Self::Term => "ask",
            Self::Kill => "kill",
        }
    }

    const fn signal(self) -> Signal {
        match self {
            Self::Term => Signal::TERM,
            Self::Kill => Signal::KILL,
        }
    }
}

impl Program {
    /// Finds a program by its path, or by its name in `PATH` and then in these directories.
    pub(super) fn find(name: &str, also_in: &[&Path]) -> Option<Self> {
        if name.contains('/') {
            return Self::at(Path::new(name));
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let folders = env::split_paths(&path).chain(also_in.iter().map(|folder| folder.to_path_buf()));
        folders.filter(|folder| folder.is_absolute()).find_map(|folder| Self::at(&folder.join(name)))
    }

    fn at(path: &Path) -> Option<Self> {
        let file = fs::metadata(path).ok()?;
        (file.is_file() && file.permissions().mode() & 0o111 != 0).then(|| Self { path: path.to_owned() })
    }

    /// Builds a command, to which arguments are added. Its locale is C, and it does not get the run's key.
    pub(super) fn command(&self, at_the_end: EndSignal) -> Command {
        let mut command = Command::new(SELF_EXE);
        command.args([BUILTIN_ARGUMENT, SUBTASK, at_the_end.code(), &getpid().to_string()]).arg(&self.path);
        command.env("LC_ALL", "C").env_remove(KEY_VARIABLE);
        command
    }
}

/// Entry point of the process that executes the program.
pub(super) fn exec_bound(args: &[OsString]) -> ExitCode {
    let [at_the_end, parent, program, args @ ..] = args else { return ExitCode::FAILURE };
    let at_the_end = EndSignal::ALL.iter().find(|known| at_the_end == known.code());
    let Some(Ok(())) = at_the_end.map(|known| set_parent_process_death_signal(Some(known.signal()))) else {
        eprintln!("{SUBTASK} is internal to doctor-node");
        return ExitCode::FAILURE;
    };
    // A parent that ended earlier sends no signal any more.
    if getppid().map(|pid| pid.to_string()).as_deref() != parent.to_str() {
        return ExitCode::FAILURE;
    }
    let error = Command::new(program).args(args).exec();
    eprintln!("cannot run {}: {error}", program.display());
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_by_path_by_name_and_in_extra_directories() {
        assert_eq!(Program::find("/bin/sh", &[]).unwrap().path, Path::new("/bin/sh"));
        assert!(Program::find("sh", &[]).unwrap().path.is_absolute());
        let folder = tempfile::tempdir().unwrap();
        let tool = folder.path().join("doctor-tool");
        fs::write(&tool, "#!/bin/sh\n").unwrap();
        assert_eq!(Program::find("doctor-tool", &[folder.path()]), None, "it is not executable");
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(Program::find("doctor-tool", &[folder.path()]).unwrap().path, tool);
        assert_eq!(Program::find("doctor-tool", &[]), None);
        assert_eq!(Program::find(folder.path().to_str().unwrap(), &[]), None, "a directory is not a program");
    }
}
