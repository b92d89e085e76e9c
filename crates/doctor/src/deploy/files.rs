//! Files that a site installs, each with the kind of machine it is for. They are printed in sequence, or written into
//! one directory per kind of machine.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::error::{DeployError, Result};

/// The machines that a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum TargetHosts {
    /// The machine of slurmctld, where its configuration is kept.
    Slurmctld,
    /// The machine of `doctor serve` or `doctor run`.
    Controller,
    EveryNode,
}

impl TargetHosts {
    pub(crate) const fn label(self) -> &'static str {
        match self {
            Self::Slurmctld => "for slurmctld's machine",
            Self::Controller => "on the controller's machine",
            Self::EveryNode => "on every node",
        }
    }

    /// Returns the directory for the files of these machines.
    pub(crate) const fn directory(self) -> &'static str {
        match self {
            Self::Slurmctld => "slurmctld",
            Self::Controller => "controller",
            Self::EveryNode => "nodes",
        }
    }
}

/// A file: its path on the machine, its mode and its text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct DeployFile {
    pub(crate) path: String,
    pub(crate) on: TargetHosts,
    pub(crate) mode: u32,
    pub(crate) text: String,
}

impl DeployFile {
    pub(crate) fn new(path: impl Into<String>, on: TargetHosts, text: impl Into<String>) -> Self {
        Self { path: path.into(), on, mode: 0o644, text: text.into() }
    }
}

/// Returns all files in sequence, each below a line with its machine, path and mode. A single file has no such line.
pub(crate) fn render(files: &[DeployFile]) -> String {
    if let [only] = files {
        return only.text.clone();
    }
    let titled = files
        .iter()
        .map(|file| format!("# ---- {}: {} (mode {:o})\n{}", file.on.label(), file.path, file.mode, file.text));
    titled.collect::<Vec<_>>().join("\n")
}

/// Writes the files below a directory that must not exist, and returns their paths.
pub(crate) fn write_files(folder: &Path, files: &[DeployFile]) -> Result<Vec<(PathBuf, TargetHosts)>> {
    let failed = |operation, path: &Path, source| DeployError::File { operation, path: path.to_owned(), source };
    if folder.exists() {
        return Err(DeployError::Usage(format!(
            "{} exists and is not overwritten: choose another directory",
            folder.display()
        )));
    }
    let mut written = Vec::new();
    for file in files {
        let path = folder.join(file.on.directory()).join(file.path.trim_start_matches('/'));
        let above = path.parent().unwrap_or(folder);
        fs::create_dir_all(above).map_err(|source| failed("making", above, source))?;
        let created = OpenOptions::new().write(true).create_new(true).mode(file.mode).open(&path);
        created
            .and_then(|mut created| created.write_all(file.text.as_bytes()))
            .map_err(|source| failed("writing", &path, source))?;
        written.push((path, file.on));
    }
    Ok(written)
}

/// Checks that a path needs no quoting in a unit, a script or slurm.conf.
pub(crate) fn check_path(path: &Path) -> Result<()> {
    let text = path.to_string_lossy();
    if path.is_absolute() && !text.contains(|c: char| c.is_whitespace() || c.is_control() || "\"'#\\$`%".contains(c)) {
        return Ok(());
    }
    Err(DeployError::Usage(format!(
        "`{text}` is not a valid path for units and scripts: expected an absolute path with no spaces or quotes"
    )))
}

pub(crate) fn check_user(user: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if !user.is_empty() && user.chars().all(plain) && !user.starts_with('-') {
        return Ok(());
    }
    Err(DeployError::Usage(format!("`{user}` is not a valid user name")))
}
