//! The cloud-init file of a new machine, generated from the scripts and units in `deploy/azure/node`, so that the files
//! that are checked there are those that run on machines.
//!
//! cloud-init silently ignores a top-level key that it does not know, together with everything below it. A site's file
//! is therefore checked against the list of known keys.

use std::fmt::Write as _;

use doctor_core::toml_text::TomlError;

use super::{Cluster, az::shell_quoted, cloud_init_keys::KNOWN_KEYS};

/// Azure's limit for custom data, in bytes.
const MAX_BYTES: usize = 64 * 1024;

/// A file on the machine.
struct FileEntry {
    path: &'static str,
    mode: &'static str,
    text: &'static str,
}

macro_rules! placed {
    ($($path:literal $mode:literal $source:literal)*) => {
        &[$(FileEntry { path: $path, mode: $mode, text: include_str!(concat!("../../../../deploy/azure/node/", $source)) }),*]
    };
}

const FILES: &[FileEntry] = placed! {
    "/opt/install-doctor-node.sh" "0755" "install-doctor-node.sh"
    "/opt/setup-nvme.sh" "0755" "setup-nvme.sh"
    "/opt/node-info.sh" "0755" "node-info.sh"
    "/opt/health-notes.sh" "0644" "health-notes.sh"
    "/opt/run-aznhc.sh" "0755" "run-aznhc.sh"
    "/opt/run-dcgmi.sh" "0755" "run-dcgmi.sh"
    "/opt/run-doctor-check.sh" "0755" "run-doctor-check.sh"
    "/opt/check-node-health.sh" "0755" "check-node-health.sh"
    "/opt/run-health-checks.sh" "0755" "run-health-checks.sh"
    "/etc/systemd/system/cluster-doctor-boot.service" "0644" "cluster-doctor-boot.service"
    "/etc/systemd/system/cluster-doctor-first-boot.service" "0644" "cluster-doctor-first-boot.service"
};

/// Packages for people who log in, and for the RAID array of the local disks.
const PACKAGES: [&str; 8] = ["tree", "ncdu", "tmux", "nload", "inotify-tools", "mdadm", "xfsprogs", "curl"];

/// An invalid cloud-init file.
#[derive(Debug, thiserror::Error)]
pub enum CloudInitError {
    #[error("{0}")]
    UnknownKey(TomlError),
    #[error("the file has {0} bytes, but Azure passes at most {MAX_BYTES} to a machine")]
    TooLong(usize),
    #[error("the file begins with {0:?}, expected #cloud-config on its first line, or a script that begins with #!")]
    BadFirstLine(String),
}

/// Returns the cloud-init file of this cluster.
pub fn render(cluster: &Cluster) -> String {
    let mut text = String::from(
        "#cloud-config\n# Made by `doctor fleet cloud-init`. The first lines of each file say what it is for.\npackage_update: true\npackages:\n",
    );
    for package in PACKAGES {
        let _infallible = writeln!(text, "  - {package}");
    }
    text.push_str("write_files:\n");
    for FileEntry { path, mode, text: content } in FILES {
        let _infallible = writeln!(text, "  - path: {path}\n    permissions: '{mode}'\n    content: |");
        for line in content.lines() {
            let line = format!("      {line}");
            let _infallible = writeln!(text, "{}", line.trim_end());
        }
    }
    text.push_str("runcmd:\n");
    let docker = format!("if getent group docker >/dev/null; then usermod -aG docker {}; fi", cluster.admin);
    let install = cluster.doctor_node.as_ref().map(|download| {
        format!("/opt/install-doctor-node.sh {} {}", shell_quoted(&download.url), shell_quoted(&download.sha256))
    });
    let begin = [
        docker,
        "systemctl daemon-reload".to_owned(),
        "systemctl enable --now cluster-doctor-boot.service".to_owned(),
        // Docker's data directory has moved.
        "systemctl try-restart docker.service".to_owned(),
    ];
    // The machine is usable when cloud-init ends; the validation continues in the background.
    let validate = [
        "systemctl enable cluster-doctor-first-boot.service",
        "systemctl start --no-block cluster-doctor-first-boot.service",
    ];
    for command in begin.into_iter().chain(install).chain(validate.map(str::to_owned)) {
        // A JSON string is valid YAML for any content.
        let _infallible = writeln!(text, "  - [sh, -c, {}]", serde_json::Value::String(command));
    }
    text
}

/// Checks whether a file can be used for machines.
///
/// # Errors With the first top-level key that cloud-init would ignore.
pub fn check(text: &str) -> Result<(), CloudInitError> {
    if text.len() > MAX_BYTES {
        return Err(CloudInitError::TooLong(text.len()));
    }
    let first = text.lines().next().unwrap_or_default();
    if first.starts_with("#!") {
        return Ok(());
    }
    if first.trim_end() != "#cloud-config" {
        return Err(CloudInitError::BadFirstLine(first.chars().take(60).collect()));
    }
    let mut at = 0;
    for line in text.split_inclusive('\n') {
        let begin = at;
        at += line.len();
        let Some((word, _)) = line.split_once(':') else { continue };
        if word.starts_with([' ', '\t', '#', '-', '}', ']', '"', '\'']) || word.is_empty() {
            continue;
        }
        if !KNOWN_KEYS.contains(&word.trim_end()) {
            let near = KNOWN_KEYS.iter().max_by_key(|known| similarity(known, word)).copied().unwrap_or_default();
            let message = format!(
                "cloud-init has no key `{}` and would ignore everything below it; similar: {near}",
                word.trim_end()
            );
            return Err(CloudInitError::UnknownKey(TomlError::at(
                text,
                Some(begin..begin + word.trim_end().len()),
                message,
            )));
        }
    }
    Ok(())
}

/// Returns the similarity of two words, by the pairs of letters that they share.
fn similarity(one: &str, other: &str) -> usize {
    let pairs =
        |word: &str| -> Vec<[u8; 2]> { word.as_bytes().windows(2).filter_map(|pair| pair.try_into().ok()).collect() };
    let (one, other) = (pairs(one), pairs(other));
    2 * one.iter().filter(|pair| other.contains(pair)).count() + usize::from(one.len() == other.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::azure::cluster::tests::{SMALL, read};

    #[test]
    fn the_rendered_file_is_within_the_size_limit_and_uses_known_keys() {
        let cluster = read(&SMALL.replace(
            "[network]",
            &format!(
                "doctor_node = {{ url = \"https://x.org/doctor-node?a=1\", sha256 = \"{}\" }}\n[network]",
                "0".repeat(64)
            ),
        ));
        let text = render(&cluster.unwrap());
        check(&text).unwrap();
        assert!(text.len() < MAX_BYTES / 3, "{}", text.len());
        assert!(text.contains("/opt/install-doctor-node.sh 'https://x.org/doctor-node?a=1' 000"), "{text}");
        assert!(!text.contains("StrictHostKeyChecking"), "host keys are verified");
    }

    #[test]
    fn an_unknown_cloud_init_key_is_reported_with_its_position() {
        let error = check("#cloud-config\n# packges: x\npackages:\n  - tree\npackges:\n  - tmux\n").unwrap_err();
        let CloudInitError::UnknownKey(error) = error else { panic!("{error}") };
        assert_eq!((error.line(), error.column()), (Some(5), Some(1)), "{error}");
        assert!(error.to_string().contains("similar: packages"), "{error}");
        assert!(matches!(check("packages: [tree]\n"), Err(CloudInitError::BadFirstLine(_))));
        assert!(matches!(check(&format!("#cloud-config\n{}", " ".repeat(MAX_BYTES))), Err(CloudInitError::TooLong(_))));
        check("#!/bin/sh\nreboot: now\n").unwrap();
    }
}
