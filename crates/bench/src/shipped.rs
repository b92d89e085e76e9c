//! The shipped programs: profile `dist`, with the Kubernetes backend. Benchmarks of a program measure these.

use std::{path::PathBuf, process::Command, sync::OnceLock, time::Instant};

use anyhow::{Context, Result, ensure};

/// Returns the path of the shipped `doctor`.
pub(crate) fn doctor() -> Result<PathBuf> {
    Ok(folder()?.join("doctor"))
}

/// Returns the path of the shipped `doctor-node`.
pub(crate) fn doctor_node() -> Result<PathBuf> {
    Ok(folder()?.join("doctor-node"))
}

/// Returns the folder of both. Builds them first, which takes many minutes from scratch.
pub(crate) fn folder() -> Result<PathBuf> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if let Some(folder) = BUILT.get() {
        return Ok(folder.clone());
    }
    eprintln!("  building doctor and doctor-node, profile dist");
    let began = Instant::now();
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--profile", "dist", "--quiet", "-p", "doctor", "-p", "doctor-node"])
        .args(["--features", "doctor/kubernetes"])
        .status()
        .context("starting cargo")?;
    ensure!(status.success(), "building doctor and doctor-node failed");
    eprintln!("  built in {:.0} s", began.elapsed().as_secs_f64());
    let this = std::env::current_exe().context("finding this program")?;
    let target = this.ancestors().nth(2).context("this program is not in a target directory")?;
    let folder = target.join("dist");
    for program in ["doctor", "doctor-node"] {
        ensure!(folder.join(program).exists(), "{} does not exist", folder.join(program).display());
    }
    Ok(BUILT.get_or_init(|| folder).clone())
}
