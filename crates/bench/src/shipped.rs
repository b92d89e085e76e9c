//! The node program as it is shipped: M6 and M7 measure that one.

use std::{path::PathBuf, process::Command, time::Instant};

use anyhow::{Context, Result, ensure};

/// The node program as it is shipped. Building it takes minutes where it is not there yet.
pub(crate) fn node_program() -> Result<PathBuf> {
    eprintln!("  building doctor-node, profile dist");
    let began = Instant::now();
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--profile", "dist", "--quiet", "-p", "doctor-node"])
        .status()
        .context("starting cargo")?;
    ensure!(status.success(), "doctor-node does not build");
    eprintln!("  built in {:.0} s", began.elapsed().as_secs_f64());
    let this = std::env::current_exe().context("finding this program")?;
    let target = this.ancestors().nth(2).context("a program lies in a folder of the target directory")?;
    let program = target.join("dist/doctor-node");
    ensure!(program.exists(), "{} is not there", program.display());
    Ok(program)
}
