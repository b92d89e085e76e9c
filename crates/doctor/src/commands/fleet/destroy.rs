//! `doctor fleet destroy`: deletes the resources that were created for a cluster, and only those.

use std::{io::Write as _, path::PathBuf};

use doctor_fleet::azure::{self, KeptResource, Removals};

use serde_json::json;

use super::azure::{AzArgs, cluster};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::plural,
};

/// Delete what `provision` created in Azure: only resources with the cluster's tag and a kind and name that it creates.
/// Other resources are listed and kept.
///
/// Without --yes nothing is deleted: the calls are printed as they would be run.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Cluster file.
    #[arg(value_name = "FILE")]
    cluster: PathBuf,
    /// Only print what would be deleted; exit code 0.
    #[arg(long, conflicts_with = "yes")]
    plan: bool,
    /// Delete the machines and all data on their disks.
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    az: AzArgs,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let cluster = cluster(&args.cluster)?;
    let az = args.az.az();
    if args.yes {
        let done = azure::destroy(&cluster, &az, &|removal| {
            // Progress goes to standard error; a failure to write it is ignored.
            let _printed = writeln!(std::io::stderr(), "deleting {}", removal.what);
        })?;
        show(context, &done, &format!("{} deleted.", plural(done.steps.len(), "resource")))?;
        return Ok(Exit::Ok);
    }
    let planned = azure::plan_removal(&cluster, &azure::read_inventory(&cluster, &az)?);
    show(
        context,
        &planned,
        &format!(
            "# Cluster {}: {} to delete. Nothing was changed.",
            cluster.scale_set,
            plural(planned.steps.len(), "resource")
        ),
    )?;
    if args.plan || planned.steps.is_empty() { Ok(Exit::Ok) } else { Err(Failure::NotConfirmed) }
}

fn show(context: &Context, removals: &Removals, first: &str) -> Result<()> {
    let steps: Vec<_> =
        removals.steps.iter().map(|removal| json!({ "what": removal.what, "call": removal.call.args() })).collect();
    Ok(context.out.show(&json!({ "steps": steps, "left": removals.kept }), |page| {
        page.line(first);
        for removal in &removals.steps {
            page.line(format!("# {}", removal.what)).line(removal.call.to_string());
        }
        for KeptResource { kind, name, why } in &removals.kept {
            page.line(format!("# kept: {kind} {name}: {why}"));
        }
    })?)
}
