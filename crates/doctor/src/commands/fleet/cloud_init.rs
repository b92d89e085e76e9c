//! `doctor fleet cloud-init`: prints the cloud-init file of new machines, or checks a site's file.

use std::path::PathBuf;

use doctor_fleet::azure::{self, CloudInitError};

use super::azure::{cluster, read};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
};

/// Print the cloud-init file with which machines prepare and validate themselves.
///
/// It installs packages, makes one RAID-0 of the local NVMe disks with the caches of Docker and Hugging Face, records
/// node information, sets GPU persistence at every boot, and installs scripts below /opt that run AzNHC, DCGM and our
/// own checks on first boot and on demand. Logs and .status files are below /var/log; what could not run is unknown,
/// never passed.
#[derive(Debug, clap::Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct Args {
    /// Cluster file; only `admin` and `doctor_node` are used.
    #[arg(value_name = "FILE", required_unless_present = "check")]
    cluster: Option<PathBuf>,
    /// Print nothing; check this file for top-level keys unknown to cloud-init, which cloud-init's own checker ignores.
    #[arg(long, value_name = "FILE", conflicts_with = "cluster")]
    check: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  doctor fleet cloud-init cluster.toml > cloud-init.yaml     # to change, and name as `cloud_init`
  doctor fleet cloud-init --check cloud-init.yaml && cloud-init schema --config-file cloud-init.yaml";

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    if let Some(path) = &args.check {
        let text = read(path)?;
        azure::check_cloud_init(&text).map_err(|error| match error {
            CloudInitError::UnknownKey(error) => Failure::Cluster { path: path.clone(), error },
            other => Failure::Usage(format!("{}: {other}", path.display())),
        })?;
        context.out.print(&format!("{}: all top-level keys are known to cloud-init.\n", path.display()))?;
        return Ok(Exit::Ok);
    }
    let path = args
        .cluster
        .as_ref()
        .ok_or_else(|| Failure::Usage("the cluster file is missing: pass FILE, or --check FILE".to_owned()))?;
    context.out.print(&azure::cloud_init(&cluster(path)?))?;
    Ok(Exit::Ok)
}
