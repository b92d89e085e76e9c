//! `doctor import`: imports the history of the original cluster_doctor, and profiles from the files of other tools.

mod profiles;

use std::path::PathBuf;

use doctor_backend::clock::{Clock, SystemClock};

use super::confirmation::{Change, ChangeArgs};
use crate::{context::Context, exit::Exit, failure::Result, output::plural};

/// Import the SQLite files of the original cluster_doctor, or with `profiles` the machine types of other tools.
///
/// Imported rows are history. They are marked as untrusted, because the original wrote `pass` in every case, and do not
/// count as fresh results without --trust.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Option<ImportCommand>,
    /// Files to import.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Trust the rows: they count as results.
    #[arg(long)]
    trust: bool,
    #[command(flatten)]
    change_args: ChangeArgs,
}

#[derive(Debug, clap::Subcommand)]
enum ImportCommand {
    Profiles(profiles::Args),
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    if let Some(ImportCommand::Profiles(args)) = &args.command {
        return profiles::run(context, args);
    }
    let (by, at) = (args.change_args.operator_name(), SystemClock.now());
    let how = if args.trust { "as trusted results" } else { "as untrusted history" };
    let mut change = Change {
        plan: format!("Would import {} {how}.", plural(args.files.len(), "file")),
        changes: args.files.iter().map(|file| file.display().to_string()).collect(),
        done: format!("Imported {} {how}.", plural(args.files.len(), "file")),
        next: "`doctor history` shows the rows".to_owned(),
        why: "import".to_owned(),
        by,
        at,
    };
    args.change_args.confirm(&change)?;
    let store = context.open_or_create_store()?;
    let imported = store.import(&args.files, args.trust, at)?;
    change.changes = vec![
        format!("{} added", plural(usize::try_from(imported.added).unwrap_or(usize::MAX), "row")),
        format!("{} known from an earlier import", imported.already_imported),
        format!("{} not understood", imported.skipped),
    ];
    change.changes.extend(imported.skipped_examples.iter().map(|example| format!("not understood: {example}")));
    args.change_args.report(context, &change)?;
    Ok(if imported.skipped > 0 { Exit::ProblemsFound } else { Exit::Ok })
}
