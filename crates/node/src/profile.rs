//! Detects the machine type, selects its hardware profile, and learns new profiles.
//!
//! `doctor-node check` judges counts and sizes by the profile found here. [`doctor_core::sku_detection`] decides; this module
//! gathers the facts from the machine and its cloud.

mod diff;
mod facts;
mod learn;
pub mod metadata;

use std::{
    io,
    path::{Path, PathBuf},
};

use doctor_core::{
    ids::Sku,
    profile::{MachineTypes, Profile, ProfileFile, UnknownBaseProfile},
    sku_detection::{Detection, DetectionSource, MachineFacts, detect, find},
    toml_text::TomlError,
};
use doctor_host::trusted_file;
use serde::Serialize;

use crate::runner::ProbeRunner;

pub use diff::{Comparison, Difference, compare, differences_table};
pub use facts::{GatheredFacts, boot_id, cached_instance_type, gather, instance_type, local_facts};
pub use learn::{LearnedProfile, default_name, learn};
pub use metadata::{LINK_LOCAL, MetadataError};

/// The value of `--sku` that selects no profile.
const NONE: &str = "none";

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a valid profile", .path.display())]
    Parse { path: PathBuf, source: TomlError },
    #[error("cannot merge the profiles")]
    UnknownBase(#[from] UnknownBaseProfile),
    #[error("unknown profile `{name}`; known profiles: {known}")]
    NoSuchProfile { name: Sku, known: String },
}

/// How to determine the machine type.
#[derive(Debug, clap::Args)]
pub struct MachineArgs {
    /// Machine type, instead of detecting it: the name of a profile, the cloud's name, or `none` to work without a
    /// profile. For `profile learn`: the name of the new type.
    #[arg(long, global = true, value_name = "NAME", env = "DOCTOR_SKU")]
    pub sku: Option<Sku>,
    /// Profile file for this machine, instead of a profile by name.
    #[arg(long, global = true, value_name = "FILE", conflicts_with = "sku")]
    pub profile: Option<PathBuf>,
    /// Directory of profiles (`*.toml`) to merge over the built-in ones.
    #[arg(long, global = true, value_name = "DIR", env = "DOCTOR_PROFILES")]
    pub profiles: Option<PathBuf>,
    /// The cluster's label for the machine type, for machines whose cloud does not report it.
    #[arg(long, global = true, value_name = "NAME", env = "DOCTOR_LABEL")]
    pub label: Option<Sku>,
    /// URL of the cloud's metadata service. It is queried only if the firmware identifies a cloud.
    #[arg(long, global = true, value_name = "URL", default_value = LINK_LOCAL)]
    pub metadata: String,
}

impl MachineArgs {
    /// No options: everything is detected.
    pub(crate) fn detect_all() -> Self {
        Self { sku: None, profile: None, profiles: None, label: None, metadata: LINK_LOCAL.to_owned() }
    }
}

/// The profile in use, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProfileChoice {
    /// `None`: what only a profile expects is not judged.
    pub profile: Option<Profile>,
    pub detection: Detection,
}

impl ProfileChoice {
    /// Returns a one-line summary.
    pub fn summary(&self) -> String {
        match (&self.profile, &self.detection.found) {
            (Some(profile), Some(detected)) if detected.source == DetectionSource::Chip => format!(
                "{}, of the chip, version {}: the machine type is unknown, its counts are not judged",
                profile.sku, profile.version
            ),
            (Some(profile), Some(detected)) => {
                format!("{} (by {}), version {}", profile.sku, detected.source, profile.version)
            }
            (Some(profile), None) => format!("{}, version {}, as requested", profile.sku, profile.version),
            (None, _) => {
                "none: neither the machine type nor its GPUs are known, so counts and rates are not judged".to_owned()
            }
        }
    }
}

/// Finds the profile of this machine. `state` caches the cloud's answer until the next boot.
///
/// # Errors
/// If a file is invalid or a name is unknown. An unknown machine is no error.
pub fn select_profile(
    args: &MachineArgs,
    state: Option<&Path>,
    runner: &dyn ProbeRunner,
) -> Result<ProfileChoice, ProfileError> {
    if let Some(path) = &args.profile {
        let file = read(path)?;
        let sku = file.sku.clone();
        let types = types_for(file, args.profiles.as_deref())?;
        let steps = vec![format!("file: {} was requested", path.display())];
        let profile = types.profile(&sku);
        return Ok(ProfileChoice { profile, detection: Detection { found: None, steps } });
    }
    let types = known_types(args.profiles.as_deref())?;
    if let Some(name) = &args.sku {
        let steps = vec![format!("--sku: `{name}` was requested")];
        let detection = Detection { found: None, steps };
        if name.as_str() == NONE {
            return Ok(ProfileChoice { profile: None, detection });
        }
        let profile = named(&types, name)?;
        return Ok(ProfileChoice { profile: Some(profile), detection });
    }
    Ok(choose(&types, gather(args, state, runner)))
}

/// Chooses the profile of the machine with these facts.
pub fn choose(types: &MachineTypes, facts: GatheredFacts) -> ProfileChoice {
    let mut detection = detect(types, &facts.machine);
    detection.steps.splice(0..0, facts.notes);
    let profile = detection.found.as_ref().and_then(|detected| types.profile(&detected.sku));
    ProfileChoice { profile, detection }
}

/// Merges a file over those that it extends. Parsing all built-in profiles takes longer than those that it needs.
fn types_for(file: ProfileFile, directory: Option<&Path>) -> Result<MachineTypes, ProfileError> {
    if directory.is_none() {
        let mut types = doctor_checks::profiles::built_in_for(&file);
        if types.merge(file.clone()).is_ok() {
            return Ok(types);
        }
    }
    // The file may extend one of the site's types; the full list also makes the error for an unknown name complete.
    let mut types = known_types(directory)?;
    types.merge(file)?;
    Ok(types)
}

/// Finds a profile by its name, by a cloud's name for the machine type, or by the name of a chip.
///
/// # Errors
/// If there is none.
pub fn named(types: &MachineTypes, name: &Sku) -> Result<Profile, ProfileError> {
    let profile = find(types, Some(name), &MachineFacts::default()).and_then(|detected| types.profile(&detected.sku));
    profile.ok_or_else(|| ProfileError::NoSuchProfile { name: name.clone(), known: types.names() })
}

/// Returns the built-in machine types with those of a site's directory merged over them.
///
/// # Errors
/// If a file cannot be read or is not a profile.
pub fn known_types(directory: Option<&Path>) -> Result<MachineTypes, ProfileError> {
    let Some(directory) = directory else { return Ok(doctor_checks::profiles::built_in()) };
    let unreadable = |source| ProfileError::Read { path: directory.to_owned(), source };
    let mut paths = trusted_file::list(directory).map_err(unreadable)?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "toml"));
    let files: Result<Vec<_>, _> = paths.iter().map(|path| read(path)).collect();
    Ok(with_site_files(files?)?)
}

/// Returns the built-in machine types with a site's files merged over them.
///
/// # Errors
/// If a file is based on an unknown machine type.
pub fn with_site_files(files: Vec<ProfileFile>) -> Result<MachineTypes, UnknownBaseProfile> {
    let mut types = doctor_checks::profiles::built_in();
    types.merge_all(files)?;
    Ok(types)
}

/// Reads a profile file.
///
/// # Errors
/// If it cannot be read or is not a profile.
pub fn read(path: &Path) -> Result<ProfileFile, ProfileError> {
    let text =
        trusted_file::read_to_string(path).map_err(|source| ProfileError::Read { path: path.to_owned(), source })?;
    ProfileFile::read(&text).map_err(|source| ProfileError::Parse { path: path.to_owned(), source })
}
