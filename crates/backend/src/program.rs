//! Finds programs on this machine: `doctor-node`, for backends that start it here or copy it to hosts, and those of a scheduler.

use std::{
    env,
    path::{Path, PathBuf},
};

use doctor_host::trusted_file;
use rustix::fs::{Access, access};

/// The environment variable that names the program.
pub const PROGRAM_VARIABLE: &str = "DOCTOR_NODE";

const PROGRAM: &str = "doctor-node";

/// Returns the configured path, else `$DOCTOR_NODE`, else the program beside this one, else the first in `PATH`. The lookup is
/// not cached: the program may be built or updated while the service runs.
///
/// # Errors
/// With instructions for the operator.
pub fn find(configured: Option<&Path>) -> Result<PathBuf, String> {
    // Another user who can change what the configuration names would have our rights. What is beside this program is as safe as it.
    configured.map_or(Ok(()), check_trusted)?;
    let named = configured.map(Path::to_owned).or_else(|| env::var_os(PROGRAM_VARIABLE).map(PathBuf::from));
    if let Some(program) = named {
        return if program.is_file() { Ok(program) } else { Err(format!("{} is not a program", program.display())) };
    }
    let own_dir = env::current_exe().ok().and_then(|exe| Some(exe.parent()?.to_owned()));
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs = own_dir.iter().cloned().chain(env::split_paths(&path));
    let mut candidates = dirs.map(|dir| dir.join(PROGRAM));
    candidates.find(|candidate| candidate.is_file()).ok_or_else(|| {
        format!(
            "{PROGRAM} is neither beside this program nor in PATH, and ${PROGRAM_VARIABLE} is not set; \
             build it: cargo build --release -p {PROGRAM}"
        )
    })
}

/// As [`find`], and the program can be executed by this user.
///
/// # Errors
/// With instructions for the operator.
pub fn find_executable(configured: Option<&Path>) -> Result<PathBuf, String> {
    let program = find(configured)?;
    match is_executable(&program) {
        true => Ok(program),
        false => Err(format!("{} is not executable for this user: chmod +x", program.display())),
    }
}

/// Checks that a program exists: in this folder, or in `PATH` if there is none.
///
/// # Errors
/// With the program and where it was looked for.
pub fn check_installed(name: &str, folder: Option<&Path>) -> Result<(), String> {
    match folder {
        Some(folder) if is_executable(&folder.join(name)) => check_trusted(&folder.join(name)),
        Some(folder) => Err(format!("there is no program {name} in {}", folder.display())),
        None => {
            let path = env::var_os("PATH").unwrap_or_default();
            let is_there = env::split_paths(&path).any(|folder| is_executable(&folder.join(name)));
            is_there.then_some(()).ok_or_else(|| format!("the program {name} is not in PATH"))
        }
    }
}

/// Refuses a program that another user could change. One that does not exist is reported by the caller.
fn check_trusted(program: &Path) -> Result<(), String> {
    match trusted_file::program(program) {
        Err(error) if trusted_file::refusal(&error).is_some() => Err(error.to_string()),
        _ => Ok(()),
    }
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && access(path, Access::EXEC_OK).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_in_path_or_in_a_folder_and_must_be_executable() {
        assert_eq!(check_installed("sh", None), Ok(()));
        assert_eq!(
            check_installed("no-such-program", None),
            Err("the program no-such-program is not in PATH".to_owned())
        );
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("scontrol");
        std::fs::write(&path, "").unwrap();
        assert!(check_installed("scontrol", Some(folder.path())).unwrap_err().contains("no program scontrol in"));
        assert!(find_executable(Some(&path)).unwrap_err().contains("is not executable"));
        let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&path, executable).unwrap();
        assert_eq!(check_installed("scontrol", Some(folder.path())), Ok(()));
        assert_eq!(find_executable(Some(&path)), Ok(path.clone()));
        let writable = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(&path, writable).unwrap();
        assert!(find_executable(Some(&path)).unwrap_err().contains("chmod go-w"));
        assert!(check_installed("scontrol", Some(folder.path())).unwrap_err().contains("chmod go-w"));
    }
}
