//! Where large inputs are kept between runs, outside the work tree.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// The cache folder, created if there is none: `$DOCTOR_BENCH_CACHE`, else one under the home directory.
pub(crate) fn folder() -> Result<PathBuf> {
    let folder = match std::env::var_os("DOCTOR_BENCH_CACHE") {
        Some(named) => PathBuf::from(named),
        None => {
            let home =
                std::env::var_os("HOME").context("set DOCTOR_BENCH_CACHE: there is no HOME to keep inputs in")?;
            Path::new(&home).join(".cache/cluster-doctor-bench")
        }
    };
    fs::create_dir_all(&folder).with_context(|| format!("creating the cache {}", folder.display()))?;
    Ok(folder)
}

/// An input by its kind and a fingerprint of how it is made. `make` puts a missing one at the path it is given;
/// whatever of this kind was made in another way is removed first.
pub(crate) fn input(kind: &str, fingerprint: u64, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let folder = folder()?;
    let whole = folder.join(format!("{kind}-{fingerprint:016x}"));
    if whole.exists() {
        return Ok(whole);
    }
    for entry in fs::read_dir(&folder).context("reading the cache")? {
        let path = entry.context("reading the cache")?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&format!("{kind}-"))) {
            remove(&path).with_context(|| format!("removing the outdated {}", path.display()))?;
        }
    }
    let part = folder.join(format!("{kind}-{fingerprint:016x}.part"));
    make(&part)?;
    fs::rename(&part, &whole).with_context(|| format!("putting {} in place", whole.display()))?;
    Ok(whole)
}

fn remove(path: &Path) -> std::io::Result<()> {
    if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}
