//! Finds the `doctor-node` program on this machine, for backends that start it here or copy it to hosts.

use std::{
    env,
    path::{Path, PathBuf},
};

/// The environment variable that names the program.
pub const PROGRAM_VARIABLE: &str = "DOCTOR_NODE";

const PROGRAM: &str = "doctor-node";

/// Returns the configured path, else `$DOCTOR_NODE`, else the program beside this one, else the first in `PATH`. The lookup is
/// not cached: the program may be built or updated while the service runs.
///
/// # Errors
/// With instructions for the operator.
pub fn find(configured: Option<&Path>) -> Result<PathBuf, String> {
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
