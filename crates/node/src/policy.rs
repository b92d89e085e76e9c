//! Loads the site's policy and hardware profile from files on the node. A policy names commands that run as root, and a profile decides
//! what is healthy: a file that another user could change is refused.

use std::{
    io,
    path::{Path, PathBuf},
};

use doctor_checks::job_file::policy_digest;
use doctor_core::{
    policy::Policy,
    profile::{Profile, ProfileFile, UnknownBaseProfile},
    toml_text::TomlError,
};
use doctor_host::trusted_file;

use crate::job::shared_file;

#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a valid {what}", .path.display())]
    Parse { path: PathBuf, what: &'static str, source: TomlError },
    #[error("{} is not the policy that this run was submitted with: it was changed since", .path.display())]
    OtherPolicy { path: PathBuf },
    #[error("cannot resolve the base or the chip of {}", .path.display())]
    UnknownBase { path: PathBuf, source: UnknownBaseProfile },
}

/// Loads the default policy with the site's file merged over it, key by key. Returns the default without a file.
pub fn load_policy(path: Option<&Path>) -> Result<Policy, FileError> {
    let Some(path) = path else { return Ok(Policy::built_in()) };
    let bad = |source| FileError::Parse { path: path.to_owned(), what: "policy", source };
    Policy::with_site_settings(&read(path)?).map_err(bad)
}

/// Loads the policy that a run was submitted with. Other users may be able to change the file; the caller's digest detects that.
pub fn load_submitted_policy(path: &Path, digest: &str) -> Result<Policy, FileError> {
    let failed = |source| FileError::Read { path: path.to_owned(), source };
    let text = shared_file::read(path, trusted_file::MAX_TEXT_BYTES).map_err(failed)?;
    let other = || FileError::OtherPolicy { path: path.to_owned() };
    if policy_digest(&text) != digest {
        return Err(other());
    }
    let text = String::from_utf8(text).map_err(|_| other())?;
    let bad = |source| FileError::Parse { path: path.to_owned(), what: "policy", source };
    Policy::with_site_settings(&text).map_err(bad)
}

/// Loads a profile file and resolves the built-in profile that it extends and its chip. Returns `None` without a file.
pub fn load_profile(path: Option<&Path>) -> Result<Option<Profile>, FileError> {
    let Some(path) = path else { return Ok(None) };
    let bad = |source| FileError::Parse { path: path.to_owned(), what: "hardware profile", source };
    let file = ProfileFile::read(&read(path)?).map_err(bad)?;
    let sku = file.sku.clone();
    let mut types = doctor_checks::profiles::built_in();
    types.merge(file).map_err(|source| FileError::UnknownBase { path: path.to_owned(), source })?;
    Ok(types.profile(&sku))
}

fn read(path: &Path) -> Result<String, FileError> {
    trusted_file::read_to_string(path).map_err(|source| FileError::Read { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt, symlink},
    };

    use super::*;

    #[test]
    fn a_site_policy_overrides_only_its_settings_and_a_mistake_is_reported_with_its_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy.toml");
        fs::write(&path, "[limits]\njobs = 9\n[tests.memory]\nenabled = false\n").unwrap();
        let policy = load_policy(Some(&path)).unwrap();
        assert_eq!((policy.limits.jobs, policy.limits.per_share), (9.into(), Policy::built_in().limits.per_share));

        fs::write(&path, "[limits]\njob = 9\n").unwrap();
        let error = load_policy(Some(&path)).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("job") && source.contains("line 2"), "{source}");
    }

    #[test]
    fn a_submitted_policy_is_accepted_by_its_digest_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy.toml");
        fs::write(&path, "[limits]\njobs = 9\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        let digest = policy_digest(b"[limits]\njobs = 9\n");
        assert_eq!(load_submitted_policy(&path, &digest).unwrap().limits.jobs, 9.into());
        fs::write(&path, "[limits]\njobs = 8\n").unwrap();
        assert!(matches!(load_submitted_policy(&path, &digest), Err(FileError::OtherPolicy { .. })));
    }

    #[test]
    fn a_submitted_policy_is_not_read_through_what_another_node_planted() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let digest = policy_digest(b"");
        fs::create_dir_all(at("share/metadata/slurm")).unwrap();
        fs::create_dir_all(at("outside/slurm")).unwrap();
        for name in ["outside/policy.toml", "outside/slurm/policy.toml", "share/metadata/slurm/policy.toml"] {
            fs::write(at(name), "").unwrap();
        }
        load_submitted_policy(&at("share/metadata/slurm/policy.toml"), &digest).unwrap();
        symlink(at("outside/policy.toml"), at("share/metadata/slurm/link.toml")).unwrap();
        let made = std::process::Command::new("mkfifo").arg(at("share/metadata/slurm/pipe.toml")).status().unwrap();
        assert!(made.success());
        for (name, expected) in [("link.toml", "is a symbolic link"), ("pipe.toml", "is a named pipe")] {
            let error = load_submitted_policy(&at("share/metadata/slurm").join(name), &digest).unwrap_err();
            let source = std::error::Error::source(&error).unwrap().to_string();
            assert!(source.contains(expected), "{source}");
        }
        // Each directory on the way.
        fs::create_dir_all(at("second/metadata")).unwrap();
        fs::create_dir_all(at("third")).unwrap();
        symlink(at("outside/slurm"), at("second/metadata/slurm")).unwrap();
        symlink(at("outside"), at("third/metadata")).unwrap();
        for share in ["second", "third"] {
            let path = at(share).join("metadata/slurm/policy.toml");
            assert!(fs::read(&path).is_ok());
            let error = load_submitted_policy(&path, &digest).unwrap_err();
            let source = std::error::Error::source(&error).unwrap().to_string();
            assert!(source.contains("is a symbolic link"), "{source}");
        }
    }

    #[test]
    fn a_policy_or_a_profile_that_another_user_could_change_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy.toml");
        fs::write(&path, "").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        let refused = |error: FileError| {
            let FileError::Read { source, .. } = error else { panic!("{error}") };
            trusted_file::refusal(&source).unwrap().remedy()
        };
        let remedy = format!("chmod go-w {}", path.canonicalize().unwrap().display());
        assert_eq!(refused(load_policy(Some(&path)).unwrap_err()), remedy);
        assert_eq!(refused(load_profile(Some(&path)).unwrap_err()), remedy);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        load_policy(Some(&path)).unwrap();
    }
}
