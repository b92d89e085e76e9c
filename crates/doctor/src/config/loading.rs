//! Loads all files that configure the engine, and reloads them when one changes.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use doctor_backend::trusted_file;
use doctor_checks::site_profiles::SiteProfiles;
use doctor_core::{
    policy::Policy,
    profile::{MachineTypes, ProfileFile},
    toml_text,
};
use doctor_engine::settings::Settings;

use super::{Config, ConfigError, ConfigSource};

/// A valid configuration and the file contents it was read from.
#[derive(Debug, Clone)]
pub(crate) struct LoadedConfig {
    pub source: ConfigSource,
    pub config: Config,
    pub settings: Settings,
    /// The site's profile files, for agents.
    pub site_profiles: SiteProfiles,
    /// The configuration in the file. `config` may differ because of command line options.
    from_file: Config,
    file_contents: Vec<FileContent>,
}

/// The contents of a file when it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileContent {
    path: PathBuf,
    content: String,
}

/// The result of a reload.
#[derive(Debug)]
pub(crate) enum ReloadOutcome {
    /// No file changed since the last reload, whether that succeeded or failed.
    Unchanged,
    /// The new configuration is in force, except for these settings, which are read only at start.
    Changed { after_restart: Vec<&'static str> },
    /// The new files are invalid; the previous configuration stays in force. Returned once per change.
    Invalid(ConfigError),
}

impl LoadedConfig {
    pub(crate) fn load(source: ConfigSource) -> Result<Self, ConfigError> {
        let mut texts = Vec::new();
        let config = read_config(&source, &mut texts)?;
        let (settings, site_profiles) = load_settings(&config, &source, &mut texts)?;
        Ok(Self { source, from_file: config.clone(), config, settings, site_profiles, file_contents: texts })
    }

    /// Reloads the files if one changed. An invalid change is remembered, so that it is reported only once.
    pub(crate) fn reload(&mut self) -> ReloadOutcome {
        if self.file_contents.iter().all(|text| current_content(&text.path).is_ok_and(|now| now == text.content)) {
            return ReloadOutcome::Unchanged;
        }
        match Self::load(self.source.clone()) {
            Ok(loaded) => {
                let after_restart = self.needs_restart(&loaded);
                *self = loaded;
                ReloadOutcome::Changed { after_restart }
            }
            Err(error) => {
                let now: Vec<FileContent> =
                    self.file_contents.iter().map(|text| FileContent::read_current(&text.path)).collect();
                if now == self.file_contents {
                    return ReloadOutcome::Unchanged;
                }
                self.file_contents = now;
                ReloadOutcome::Invalid(error)
            }
        }
    }

    /// Returns the settings that differ in `other` and are read only at start.
    fn needs_restart(&self, other: &Self) -> Vec<&'static str> {
        let (a, b) = (&self.from_file, &other.from_file);
        let pairs = [
            ("store", a.store != b.store),
            ("migration_backup", a.migration_backup != b.migration_backup),
            ("data", a.data != b.data),
            ("backend", a.backend != b.backend),
            ("lease", a.lease != b.lease),
            ("workers", a.workers != b.workers),
            ("publish", a.publish != b.publish),
            ("agents", a.agents != b.agents),
            ("probes", a.probes != b.probes),
            ("metrics", a.metrics != b.metrics),
            ("telemetry", a.telemetry != b.telemetry),
            ("web", a.web != b.web),
        ];
        pairs.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
    }
}

impl Config {
    /// Reads the service's file alone, so that the store can be read while the policy is invalid.
    pub(crate) fn load(source: &ConfigSource) -> Result<Self, ConfigError> {
        read_config(source, &mut Vec::new())
    }

    /// Creates the directories of the built-in configuration. Directories named in a file are never created, because
    /// that would hide a missing mount.
    pub(crate) fn create_directories(&self, source: &ConfigSource) -> Result<(), ConfigError> {
        let ConfigSource::BuiltIn { .. } = source else { return Ok(()) };
        fs::create_dir_all(&self.data)
            .map_err(|source| ConfigError::CreateStateDirectory { path: self.data.clone(), source })
    }
}

fn read_config(source: &ConfigSource, texts: &mut Vec<FileContent>) -> Result<Config, ConfigError> {
    match source {
        ConfigSource::File(path) => {
            let text = read_and_record(path, texts)?;
            let config_dir = path.parent().unwrap_or(Path::new(""));
            Config::parse(&text, config_dir).map_err(|error| invalid(path, error))
        }
        ConfigSource::BuiltIn { state } => Config::built_in(state).map_err(|error| invalid(state, error)),
    }
}

impl FileContent {
    /// Reads a file; an unreadable file counts as empty, because only changes matter here.
    fn read_current(path: &Path) -> Self {
        Self { path: path.to_owned(), content: current_content(path).unwrap_or_default() }
    }
}

/// Returns the contents of a file, or the names of the profiles in a directory, so that a new profile counts as a
/// change.
fn current_content(path: &Path) -> io::Result<String> {
    if path.is_dir() {
        let files = profile_files(path)?;
        return Ok(files.iter().map(|file| format!("{}\n", file.display())).collect());
    }
    trusted_file::read_to_string(path)
}

fn invalid(path: &Path, error: toml_text::TomlError) -> ConfigError {
    ConfigError::Invalid { path: path.to_owned(), error }
}

fn read_and_record(path: &Path, texts: &mut Vec<FileContent>) -> Result<String, ConfigError> {
    let content =
        trusted_file::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    texts.push(FileContent { path: path.to_owned(), content: content.clone() });
    Ok(content)
}

fn load_settings(
    config: &Config,
    source: &ConfigSource,
    texts: &mut Vec<FileContent>,
) -> Result<(Settings, SiteProfiles), ConfigError> {
    let (policy, policy_path) = match &config.policy {
        Some(path) => {
            let text = read_and_record(path, texts)?;
            (Policy::with_site_settings(&text).map_err(|error| invalid(path, error))?, path.clone())
        }
        None => (Policy::built_in(), PathBuf::from(source.to_string())),
    };
    let (catalogue, mut types) = config.backend.checks(&policy);
    let site_profiles = merge_profiles(&mut types, &config.profiles, texts)?;
    check_files(config, texts)?;
    let settings = Settings::new(policy, catalogue, types.profiles())
        .map_err(|source| ConfigError::Settings { path: policy_path, source })?;
    Ok((settings, site_profiles))
}

/// Reads and validates the files that the backend watches itself.
fn check_files(config: &Config, texts: &mut Vec<FileContent>) -> Result<(), ConfigError> {
    for path in config.backend.files() {
        let text = read_and_record(path, texts)?;
        config.backend.check_file(&text).map_err(|error| invalid(path, error))?;
    }
    Ok(())
}

/// Merges the site's profiles over the built-in ones, and returns their texts. Each path is a file, or a directory whose
/// `.toml` files are read.
fn merge_profiles(
    types: &mut MachineTypes,
    paths: &[PathBuf],
    texts: &mut Vec<FileContent>,
) -> Result<SiteProfiles, ConfigError> {
    let (mut files, mut site) = (Vec::new(), Vec::new());
    for path in paths {
        let listed = if path.is_dir() {
            texts.push(FileContent::read_current(path));
            profile_files(path).map_err(|source| ConfigError::Read { path: path.clone(), source })?
        } else {
            vec![path.clone()]
        };
        for path in listed {
            let text = read_and_record(&path, texts)?;
            files.push(ProfileFile::read(&text).map_err(|error| invalid(&path, error))?);
            site.push(text);
        }
    }
    let path = || paths.first().cloned().unwrap_or_default();
    types.merge_all(files).map_err(|source| ConfigError::Profiles { path: path(), source })?;
    SiteProfiles::new(site).map_err(|source| ConfigError::ProfilesTooLong { path: path(), source })
}

/// Returns the `.toml` files in a directory, sorted by path.
pub(crate) fn profile_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = trusted_file::list(directory)?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(policy: &str) -> (tempfile::TempDir, ConfigSource) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("doctor.toml");
        fs::write(&path, "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\n").unwrap();
        fs::write(directory.path().join("policy.toml"), policy).unwrap();
        (directory, ConfigSource::File(path))
    }

    #[test]
    fn an_invalid_change_keeps_the_last_valid_configuration_and_is_reported_once() {
        let (directory, source) = site("[limits]\njobs = 7\n");
        let mut loaded = LoadedConfig::load(source).unwrap();
        assert_eq!(loaded.settings.policy.limits.jobs, 7.into());
        assert!(matches!(loaded.reload(), ReloadOutcome::Unchanged));

        fs::write(directory.path().join("policy.toml"), "[limits]\njobs = -7\n").unwrap();
        let ReloadOutcome::Invalid(error) = loaded.reload() else { panic!("a negative number must be rejected") };
        let text = error.to_string();
        assert!(text.contains("policy.toml, line 2, column 8"), "{text}");
        assert_eq!(loaded.settings.policy.limits.jobs, 7.into());
        assert!(matches!(loaded.reload(), ReloadOutcome::Unchanged));

        fs::write(directory.path().join("policy.toml"), "[limits]\njobs = 8\n").unwrap();
        assert!(matches!(loaded.reload(), ReloadOutcome::Changed { after_restart } if after_restart.is_empty()));
        assert_eq!(loaded.settings.policy.limits.jobs, 8.into());
        assert!(matches!(loaded.reload(), ReloadOutcome::Unchanged));
    }

    #[cfg(feature = "kubernetes")]
    #[test]
    fn an_invalid_job_template_is_rejected_with_its_position_and_changes_are_detected() {
        let (directory, source) = site("");
        let at = |name: &str| directory.path().join(name);
        fs::write(at("doctor.toml"), "[backend.kubernetes]\ntemplate = \"job.yaml\"\n").unwrap();
        let error = LoadedConfig::load(source.clone()).unwrap_err().to_string();
        assert!(error.contains("job.yaml"), "{error}");
        fs::write(at("job.yaml"), doctor_backend_kubernetes::STANDARD_TEMPLATE).unwrap();
        let mut loaded = LoadedConfig::load(source).unwrap();
        fs::write(at("job.yaml"), "apiVersion: batch/v1\nkind: Job\nspec:\n  completions: 2\n").unwrap();
        let ReloadOutcome::Invalid(error) = loaded.reload() else { panic!("`completions` must be rejected") };
        assert!(error.to_string().contains("job.yaml, line 4, column 3: `completions`"), "{error}");
        fs::write(at("job.yaml"), "apiVersion: batch/v1\nkind: Job\n").unwrap();
        assert!(matches!(loaded.reload(), ReloadOutcome::Changed { after_restart } if after_restart.is_empty()));
    }

    #[test]
    fn site_profiles_override_the_built_in_ones_and_new_files_are_detected() {
        let (directory, source) = site("");
        let at = |name: &str| directory.path().join(name);
        fs::create_dir(at("profiles")).unwrap();
        let text = "store = \"doctor.db\"\ndata = \"data\"\nprofiles = [\"profiles\"]\n";
        fs::write(at("doctor.toml"), text).unwrap();
        fs::write(at("profiles/p5.toml"), "sku = \"p5.48xlarge\"\nversion = 9\n[expect]\nnvme_disks = 9\n").unwrap();
        let mut loaded = LoadedConfig::load(source).unwrap();
        let expected = |loaded: &LoadedConfig, sku: &str, metric: &str| {
            let sku = doctor_core::ids::Sku::new(sku).unwrap();
            let profile = loaded.settings.profiles.get(Some(&sku))?;
            profile.value(metric).map(|value| value.to_string())
        };
        assert_eq!(expected(&loaded, "p5.48xlarge", "nvme_disks").as_deref(), Some("9"));
        assert_eq!(expected(&loaded, "p5.48xlarge", "efa_devices").as_deref(), Some("32"));
        assert!(matches!(loaded.reload(), ReloadOutcome::Unchanged));

        fs::write(at("profiles/ours.toml"), "sku = \"ours\"\nversion = 1\nlike = \"hgx-h100\"\n").unwrap();
        assert!(matches!(loaded.reload(), ReloadOutcome::Changed { .. }));
        assert_eq!(expected(&loaded, "ours", "gpu_count").as_deref(), Some("8"));

        fs::write(at("profiles/ours.toml"), "sku = \"ours\"\nversion = 1\nlike = \"hgx-h101\"\n").unwrap();
        let ReloadOutcome::Invalid(error) = loaded.reload() else { panic!("there is no such machine type") };
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("hgx-h101") && source.contains("hgx-h100"), "{source}");
    }

    #[test]
    fn an_unknown_test_is_rejected_with_the_known_ones() {
        let (_directory, source) = site("[tests.discs]\nenabled = false\n");
        let error = LoadedConfig::load(source).unwrap_err();
        let source = std::error::Error::source(&error).unwrap().to_string();
        assert!(source.contains("tests.discs") && source.contains("disk-space"), "{source}");
    }

    #[test]
    fn settings_that_need_a_restart_are_named() {
        let (directory, source) = site("");
        let before = LoadedConfig::load(source.clone()).unwrap();
        fs::write(directory.path().join("doctor.toml"), "store = \"other.db\"\ndata = \"data\"\ncycle = \"20s\"\n")
            .unwrap();
        let after = LoadedConfig::load(source).unwrap();
        assert_eq!(before.needs_restart(&after), ["store", "backend"]);
    }
}
