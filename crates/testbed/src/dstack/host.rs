//! The files of one host: its sshd configuration, the programs of its jobs, and its GPU health.

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command};

use serde_json::json;

use super::error::{DstackTestbedError, file_error};

const SHIM: &str = include_str!("shim.py");
const SYSTEMCTL: &str = include_str!("systemctl.sh");
/// Everything in the host runs as root, so sudo has nothing to do.
const SUDO: &str = "#!/bin/sh\nexec \"$@\"\n";
/// The paths are those inside the host, where `world.sh` mounts its folder.
const SSHD: &str = "HostKey /run/bed/host_key\nAuthorizedKeysFile .ssh/authorized_keys\nPidFile none\nStrictModes no\nUsePAM no\n\
    PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 200\n\
    MaxSessions 64\nSubsystem sftp internal-sftp\n";

/// The DCGM health of a host's GPUs, with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health<'a> {
    Healthy,
    Warning(&'a str),
    Failure(&'a str),
}

/// Creates the files of a host.
pub(super) fn write_host_files(testbed: &Path, number: u8) -> Result<(), DstackTestbedError> {
    let folder = testbed.join(format!("host{number}"));
    for name in ["home/.ssh", "home/.dstack", "bin", "tmp"] {
        let path = folder.join(name);
        fs::create_dir_all(&path).map_err(file_error("creating", &path))?;
    }
    let tmp = folder.join("tmp");
    fs::set_permissions(&tmp, fs::Permissions::from_mode(0o1777)).map_err(file_error("opening", &tmp))?;
    keygen(&folder.join("host_key"))?;
    let put = |name: &str, text: &str, mode: u32| {
        let path = folder.join(name);
        fs::write(&path, text).map_err(file_error("writing", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(file_error("opening", &path))
    };
    put("sshd_config", &format!("ListenAddress 10.98.{number}.2\n{SSHD}"), 0o644)?;
    put("shim.py", SHIM, 0o755)?;
    put("bin/sudo", SUDO, 0o755)?;
    put("bin/systemctl", SYSTEMCTL, 0o755)?;
    let key = testbed.join("id.pub");
    let key = fs::read_to_string(&key).map_err(file_error("reading", &key))?;
    put("home/.ssh/authorized_keys", &key, 0o600)
}

/// Replaces the health file with a rename, because the shim may read it at any moment.
pub(super) fn set_health(folder: &Path, health: &Health<'_>) -> Result<(), DstackTestbedError> {
    let (number, text) = match health {
        Health::Healthy => (0, None),
        Health::Warning(text) => (10, Some(text)),
        Health::Failure(text) => (20, Some(text)),
    };
    let incident = |text| json!({ "system": 1, "health": number, "error_message": text, "error_code": 1, "entity_group_id": 1, "entity_id": 5 });
    let report = json!({ "overall_health": number, "incidents": text.map(incident).into_iter().collect::<Vec<_>>() });
    let path = folder.join("home/.dstack/health.json");
    let aside = path.with_extension("new");
    fs::write(&aside, report.to_string()).and_then(|()| fs::rename(&aside, &path)).map_err(file_error("writing", &path))
}

/// Creates a key pair without a passphrase.
pub(super) fn keygen(path: &Path) -> Result<(), DstackTestbedError> {
    let program = "ssh-keygen";
    let output = Command::new(program).args(["-q", "-t", "ed25519", "-N", "", "-C", "bed", "-f"]).arg(path).output();
    let output = output.map_err(|source| DstackTestbedError::Program { program, source })?;
    if output.status.success() {
        return Ok(());
    }
    Err(DstackTestbedError::ProgramFailed { program, said: String::from_utf8_lossy(&output.stderr).trim().to_owned() })
}
