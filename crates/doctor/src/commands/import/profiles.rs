//! `doctor import profiles`: converts the machine types of other tools to profiles.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use doctor_core::profile::{self, ProfileFile};
use serde::Serialize;

use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::plural,
};

/// Write profiles from an instance-profiles.conf (AWS's health-check suite) or from AzNHC's conf/*.conf.
///
/// Each machine type becomes one file in --out; add that directory to `profiles` in the configuration. Lines that are
/// not understood are listed and left out. An existing file that differs is kept unless --force is given.
///
/// Exit code 0 if every line was understood, 1 if not, or if a file was kept.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Files to convert.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Directory to write to; created if it does not exist.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Overwrite files that differ.
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Default, Serialize)]
struct ProfileImportSummary {
    written: Vec<PathBuf>,
    /// Existing files that differ from the new profile and were kept.
    left: Vec<PathBuf>,
    used: usize,
    /// The number of lines about what checks cover without a profile.
    covered: usize,
    /// `FILE:LINE: why: text`
    skipped: Vec<String>,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let mut done = ProfileImportSummary::default();
    let make = |source| Failure::File { operation: "creating", path: args.out.clone(), source };
    fs::create_dir_all(&args.out).map_err(make)?;
    for path in &args.files {
        let read = |source| Failure::File { operation: "reading", path: path.clone(), source };
        let text = fs::read_to_string(path).map_err(read)?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let imported = profile::import(&name, &text);
        done.used += imported.used;
        done.covered += imported.covered;
        done.skipped.extend(
            imported
                .skipped
                .iter()
                .map(|skipped| format!("{}:{}: {}: {}", path.display(), skipped.line, skipped.why, skipped.text)),
        );
        for file in &imported.files {
            write(file, &args.out, args.force, &mut done)?;
        }
    }
    context.out.show(&done, |page| {
        for path in &done.written {
            page.line(format!("wrote {}", path.display()));
        }
        for path in &done.left {
            page.line(format!("kept, although it differs: {} (--force overwrites it)", path.display()));
        }
        for skipped in &done.skipped {
            page.line(format!("not understood: {skipped}"));
        }
        page.line(format!(
            "{} written; {} used, {} covered by checks without a profile, {} not understood",
            plural(done.written.len(), "profile"),
            plural(done.used, "line"),
            done.covered,
            done.skipped.len(),
        ));
    })?;
    let has_problems = !done.skipped.is_empty() || !done.left.is_empty() || done.used == 0;
    Ok(if has_problems { Exit::ProblemsFound } else { Exit::Ok })
}

fn write(file: &ProfileFile, out: &Path, force: bool, done: &mut ProfileImportSummary) -> Result<()> {
    let path = out.join(format!("{}.toml", file.sku));
    let text = toml::to_string(file).map_err(|error| Failure::Other(format!("serialising a profile: {error}")))?;
    let text = format!("# Imported Cluster Doctor profile. Values that are not set here are not checked.\n{text}");
    let failed = |source: io::Error| Failure::File { operation: "writing", path: path.clone(), source };
    match fs::read_to_string(&path) {
        Ok(existing) if existing == text => {}
        Ok(_) if !force => {
            done.left.push(path);
            return Ok(());
        }
        _ => fs::write(&path, text).map_err(failed)?,
    }
    done.written.push(path);
    Ok(())
}
