//! Which machine type this is, what is expected of it, and how a new type's profile is made.
//!
//! `doctor-node check` judges counts and sizes by the profile that is found here. The deciding is
//! [`doctor_core::machine`]'s; this only gathers what the machine and its cloud say.

mod diff;
mod facts;
mod learn;
pub mod metadata;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use doctor_core::{
    ids::Sku,
    machine::{Detected, Detection, ToldBy, detect},
    profile::{MachineTypes, Profile, ProfileFile, UnknownLike},
    toml_text::BadText,
};
use serde::Serialize;

use crate::runner::ProbeRunner;

pub use diff::{Compared, Difference, compare, differences_table};
pub use facts::gather;
pub use learn::{Learned, learn, usual_name};
pub use metadata::{LINK_LOCAL, MetadataError, instance_type};

/// The word for "judge without a profile".
const NONE: &str = "none";

#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a profile", .path.display())]
    Parse { path: PathBuf, source: BadText },
    #[error("the profiles do not go together")]
    Like(#[from] UnknownLike),
    #[error("there is no profile `{name}`; there are: {known}")]
    NoSuchProfile { name: Sku, known: String },
}

/// How the machine type is to be found.
#[derive(Debug, clap::Args)]
pub struct MachineArgs {
    /// The machine type, where it is not to be found out: the name of a profile, what the cloud calls it, or `none` to
    /// judge without a profile. For `profile learn`: what to call the new type.
    #[arg(long, global = true, value_name = "NAME", env = "DOCTOR_SKU")]
    pub sku: Option<Sku>,
    /// A file that says what is expected of this machine, instead of a profile by name.
    #[arg(long, global = true, value_name = "FILE", conflicts_with = "sku")]
    pub profile: Option<PathBuf>,
    /// A directory of profiles (`*.toml`) to lay over those that are built in.
    #[arg(long, global = true, value_name = "DIR", env = "DOCTOR_PROFILES")]
    pub profiles: Option<PathBuf>,
    /// What the cluster's label calls this machine, for where its cloud does not say.
    #[arg(long, global = true, value_name = "NAME", env = "DOCTOR_LABEL")]
    pub label: Option<Sku>,
    /// Where the cloud's metadata service answers. It is asked only if the firmware says that this is a cloud.
    #[arg(long, global = true, value_name = "URL", default_value = LINK_LOCAL)]
    pub metadata: String,
}

impl MachineArgs {
    /// Nobody said anything: it is to be found out.
    pub(crate) fn unasked() -> Self {
        Self { sku: None, profile: None, profiles: None, label: None, metadata: LINK_LOCAL.to_owned() }
    }
}

/// What this machine is judged by, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Choice {
    /// None: counts cannot be judged and say so.
    pub profile: Option<Profile>,
    pub detection: Detection,
}

impl Choice {
    /// One line for people.
    pub fn in_words(&self) -> String {
        match (&self.profile, &self.detection.found) {
            (Some(profile), Some(found)) => format!("{} (by {}), version {}", profile.sku, found.by, profile.version),
            (Some(profile), None) => format!("{}, version {}, as asked for", profile.sku, profile.version),
            (None, _) => "none: what needs one is inconclusive".to_owned(),
        }
    }
}

/// Finds the profile of this machine. `state` remembers what the cloud said since the boot.
///
/// # Errors
/// If a file is wrong or a name is not known. A machine that nobody knows is no error.
pub fn choose(args: &MachineArgs, state: Option<&Path>, runner: &dyn ProbeRunner) -> Result<Choice, ProfileError> {
    if let Some(path) = &args.profile {
        let file = read(path)?;
        let sku = file.sku.clone();
        let base = file.like.as_ref().unwrap_or(&sku);
        let mut types = doctor_checks::profiles::built_in_like(base);
        // A site's own types may be what it builds on; and who names one that nobody knows is told which there are.
        if args.profiles.is_some() || (file.like.is_some() && types.get(base).is_none()) {
            types = known_types(args.profiles.as_deref())?;
        }
        types.lay_over(file)?;
        let steps = vec![format!("file: {} was asked for", path.display())];
        let profile = types.get(&sku).map(ProfileFile::profile);
        return Ok(Choice { profile, detection: Detection { found: None, steps } });
    }
    let types = known_types(args.profiles.as_deref())?;
    if let Some(name) = &args.sku {
        let steps = vec![format!("--sku: `{name}` was asked for")];
        let detection = Detection { found: None, steps };
        if name.as_str() == NONE {
            return Ok(Choice { profile: None, detection });
        }
        let profile = named(&types, name)?;
        return Ok(Choice { profile: Some(profile), detection });
    }
    let facts = gather(args, state, runner);
    let mut detection = detect(&types, &facts.machine);
    detection.steps.splice(0..0, facts.notes);
    let profile = detection.found.as_ref().and_then(|found| types.get(&found.sku)).map(ProfileFile::profile);
    Ok(Choice { profile, detection })
}

/// A profile by its name, or by what a cloud calls its machines.
///
/// # Errors
/// If there is none.
pub fn named(types: &MachineTypes, name: &Sku) -> Result<Profile, ProfileError> {
    let facts = doctor_core::machine::MachineFacts { told: Some(name.clone()), ..Default::default() };
    let found = detect(types, &facts).found;
    let sku = found.filter(|found| matches!(found, Detected { by: ToldBy::Label, .. })).map(|found| found.sku);
    let file = sku.and_then(|sku| types.get(&sku).cloned());
    file.map(|file| file.profile())
        .ok_or_else(|| ProfileError::NoSuchProfile { name: name.clone(), known: types.names() })
}

/// The built-in machine types with a site's directory laid over.
///
/// # Errors
/// If a file cannot be read or is no profile.
pub fn known_types(directory: Option<&Path>) -> Result<MachineTypes, ProfileError> {
    let mut types = doctor_checks::profiles::built_in();
    let Some(directory) = directory else { return Ok(types) };
    let unreadable = |source| ProfileError::Read { path: directory.to_owned(), source };
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            paths.push(path);
        }
    }
    paths.sort_unstable();
    let files: Result<Vec<_>, _> = paths.iter().map(|path| read(path)).collect();
    types.lay_over_all(files?)?;
    Ok(types)
}

/// # Errors
/// If it cannot be read or is no profile.
pub fn read(path: &Path) -> Result<ProfileFile, ProfileError> {
    let text = fs::read_to_string(path).map_err(|source| ProfileError::Read { path: path.to_owned(), source })?;
    ProfileFile::read(&text).map_err(|source| ProfileError::Parse { path: path.to_owned(), source })
}
