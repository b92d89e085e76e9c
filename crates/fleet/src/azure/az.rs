//! The Azure CLI: calls as data, which are printed exactly as they are run, and their execution with limits.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use doctor_backend::process::{self, ProcessOutput};

use serde_json::Value;

/// The output limit in bytes. A complete list of a thousand machines is a tenth of it.
const MAX_OUTPUT_BYTES: usize = 64 * 1024 * 1024;
/// Arguments of every call.
const COMMON_ARGS: [&str; 3] = ["--output", "json", "--only-show-errors"];

/// The arguments of one call, after `az`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AzCommand(Vec<String>);

impl AzCommand {
    /// Starts a call with its command, such as `network lb create`.
    pub(super) fn new(command: &str) -> Self {
        Self(command.split(' ').map(str::to_owned).collect())
    }

    pub(super) fn with(mut self, flag: &str, value: impl Into<String>) -> Self {
        self.0.extend([flag.to_owned(), value.into()]);
        self
    }

    pub(super) fn with_all(mut self, flag: &str, values: impl IntoIterator<Item = String>) -> Self {
        let mut values = values.into_iter().peekable();
        if values.peek().is_some() {
            self.0.push(flag.to_owned());
            self.0.extend(values);
        }
        self
    }

    pub(super) fn flag(mut self, flag: &str) -> Self {
        self.0.push(flag.to_owned());
        self
    }

    pub(super) fn finished(mut self) -> Self {
        self.0.extend(COMMON_ARGS.map(str::to_owned));
        self
    }

    pub fn args(&self) -> &[String] {
        &self.0
    }
}

/// Prints the call as it would be typed in a shell.
impl fmt::Display for AzCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("az")?;
        self.0.iter().try_for_each(|word| write!(f, " {}", shell_quoted(word)))
    }
}

/// Quotes a word for a shell if it needs quotes.
pub(super) fn shell_quoted(arg: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./:=@,+%".contains(&byte);
    match !arg.is_empty() && arg.bytes().all(is_plain) {
        true => arg.to_owned(),
        false => format!("'{}'", arg.replace('\'', "'\\''")),
    }
}

/// An error in creating, inspecting or deleting a cluster.
#[derive(Debug, thiserror::Error)]
pub enum AzureError {
    #[error("cannot start {program}; install the Azure CLI, or set its path with --az", program = program.display())]
    Start { program: PathBuf, source: std::io::Error },
    #[error("{step}: az is not logged in; run `az login`, or `az login --identity` on a machine that has an identity")]
    NotLoggedIn { step: String },
    #[error("{step}: az failed: {said}")]
    CommandFailed { step: String, said: String },
    #[error("{step}: az did not finish within {} s; its operation may continue in Azure, run this again to resume", limit.as_secs())]
    TimedOut { step: String, limit: Duration },
    #[error("{step}: az printed more than {MAX_OUTPUT_BYTES} bytes")]
    OutputTooLong { step: String },
    #[error("{step}: cannot parse the output of az: {why}")]
    Unreadable { step: String, why: String },
    #[error("{kind} {name} already exists without our tag and is left unchanged; choose another name, or delete it")]
    NotOurs { kind: &'static str, name: String },
    #[error(
        "{kind} {name} is {is}, but the file says {wanted}; this cannot be changed in place: destroy it first, or change the file"
    )]
    Mismatch { kind: &'static str, name: String, is: String, wanted: String },
    #[error("{kind} {name} failed in Azure ({state}); inspect it in the portal, delete it, and run this again")]
    Failed { kind: &'static str, name: String, state: String },
    #[error("{step} on {node}: the script did not finish: {said}")]
    Script { step: String, node: String, said: String },
    #[error("the head node cannot log in to {}", nodes.join("; "))]
    Unreachable { nodes: Vec<String> },
    #[error("still incomplete after {rounds} rounds: {left}")]
    NotConverged { rounds: usize, left: String },
    #[error("writing {}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
}

impl AzureError {
    /// Whether Azure could not be queried at all.
    pub const fn is_connectivity(&self) -> bool {
        matches!(self, Self::Start { .. } | Self::NotLoggedIn { .. } | Self::TimedOut { .. })
    }
}

/// The `az` program at a path.
#[derive(Debug, Clone)]
pub struct Az {
    program: PathBuf,
}

impl Az {
    pub fn new(program: &Path) -> Self {
        Self { program: program.to_owned() }
    }

    /// Runs a call and returns its output.
    ///
    /// # Errors With the name of the step and the error of `az`.
    pub(super) fn run(&self, step: &str, call: &AzCommand, limit: Duration) -> Result<Value, AzureError> {
        let mut command = Command::new(&self.program);
        command.args(call.args());
        // No prompts and no colours.
        command.env("AZURE_CORE_NO_COLOR", "true").env("AZURE_CORE_DISABLE_PROGRESS_BAR", "true");
        command.env("AZURE_CORE_DISABLE_CONFIRM_PROMPT", "true");
        let ran = process::output(command, b"", limit, MAX_OUTPUT_BYTES);
        let ran = ran.map_err(|source| AzureError::Start { program: self.program.clone(), source })?;
        let step = step.to_owned();
        match ran {
            ProcessOutput::Exited { status, stdout, .. } if status.success() => parse_output(step, &stdout),
            ProcessOutput::Exited { stderr, .. } => Err(command_error(step, &stderr)),
            ProcessOutput::OutputLimit => Err(AzureError::OutputTooLong { step }),
            ProcessOutput::TimedOut => Err(AzureError::TimedOut { step, limit }),
        }
    }
}

/// Parses the output as JSON. Some commands print nothing on success, which is `null`.
fn parse_output(step: String, output: &[u8]) -> Result<Value, AzureError> {
    if output.trim_ascii().is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(output).map_err(|error| AzureError::Unreadable { step, why: error.to_string() })
}

fn command_error(step: String, stderr: &str) -> AzureError {
    if stderr.contains("az login") {
        return AzureError::NotLoggedIn { step };
    }
    AzureError::CommandFailed { step, said: error_text(stderr) }
}

/// Returns the error message: the first `ERROR:` line, which later lines only repeat, or else the last line, which ends
/// a traceback.
fn error_text(stderr: &str) -> String {
    let error = stderr.lines().find_map(|line| line.trim().strip_prefix("ERROR: "));
    let line = error.map_or_else(|| process::last_line(stderr), str::to_owned);
    line.chars().filter(|c| !c.is_control()).take(600).collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt};

    use super::*;

    #[test]
    fn a_command_is_printed_with_shell_quoting() {
        let call = AzCommand::new("network lb create")
            .with("--name", "it's a name")
            .with_all("--tags", ["a=b".to_owned(), "c=".to_owned()]);
        assert_eq!(
            call.with_all("--none", []).to_string(),
            "az network lb create --name 'it'\\''s a name' --tags a=b c="
        );
    }

    #[test]
    fn errors_of_az_name_the_step_and_a_hung_az_times_out() {
        let folder = tempfile::tempdir().unwrap();
        let az = |script: &str| {
            let path = folder.path().join("az");
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            Az::new(&path)
                .run("the network", &AzCommand::new("x"), Duration::from_millis(1500))
                .map_err(|error| error.to_string())
        };
        assert_eq!(az("echo '{\"a\": 1}'").unwrap()["a"], 1);
        assert_eq!(az("true").unwrap(), Value::Null);
        let denied = az(
            "echo 'ERROR: (AuthorizationFailed) You may not.\nCode: AuthorizationFailed\nMessage: You may not.' >&2; exit 1",
        );
        assert_eq!(denied.unwrap_err(), "the network: az failed: (AuthorizationFailed) You may not.");
        assert!(
            az("echo \"ERROR: Please run 'az login' to setup account.\" >&2; exit 1")
                .unwrap_err()
                .contains("not logged in")
        );
        assert!(az("echo not json").unwrap_err().contains("cannot parse the output of az"));
        assert!(az("sleep 60").unwrap_err().contains("did not finish within 1 s"));
        let missing =
            Az::new(Path::new("/no/such/az")).run("x", &AzCommand::new("x"), Duration::from_secs(1)).unwrap_err();
        assert!(missing.to_string().contains("--az"), "{missing}");
    }
}
