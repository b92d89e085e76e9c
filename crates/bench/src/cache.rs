//! The folder of large inputs that are kept between runs, outside the work tree.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// Returns the cache folder, `$DOCTOR_BENCH_CACHE` or one in the home directory, and creates it if needed.
pub(crate) fn folder() -> Result<PathBuf> {
    let folder = match std::env::var_os("DOCTOR_BENCH_CACHE") {
        Some(named) => PathBuf::from(named),
        None => {
            let home = std::env::var_os("HOME").context("HOME is not set: set DOCTOR_BENCH_CACHE")?;
            Path::new(&home).join(".cache/cluster-doctor-bench")
        }
    };
    fs::create_dir_all(&folder).with_context(|| format!("creating the cache {}", folder.display()))?;
    Ok(folder)
}

/// Returns an input by its kind and the fingerprint of its generator. `make` creates a missing one at the given path;
/// inputs of this kind with another fingerprint are removed first.
pub(crate) fn input(kind: &str, fingerprint: u64, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let folder = folder()?;
    let cached = folder.join(format!("{kind}-{fingerprint:016x}"));
    if cached.exists() {
        return Ok(cached);
    }
    for entry in fs::read_dir(&folder).context("reading the cache")? {
        let path = entry.context("reading the cache")?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&format!("{kind}-"))) {
            remove(&path).with_context(|| format!("removing the outdated {}", path.display()))?;
        }
    }
    let part = folder.join(format!("{kind}-{fingerprint:016x}.part"));
    make(&part)?;
    fs::rename(&part, &cached).with_context(|| format!("renaming to {}", cached.display()))?;
    Ok(cached)
}

fn remove(path: &Path) -> std::io::Result<()> {
    if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}
