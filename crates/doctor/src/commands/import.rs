//! `doctor import`: history of the original cluster_doctor.

use std::path::PathBuf;

use doctor_control::clock::{Clock, SystemClock};

use super::confirm::{Change, Signed};
use crate::{context::Context, exit::Exit, failure::Result, output::plural};

/// Bring in the SQLite files of the original cluster_doctor.
///
/// Imported rows are history. They are marked as not believed, because the original wrote `pass` whatever happened,
/// and make nothing fresh without --trust.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The files.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Believe them: they count as results.
    #[arg(long)]
    trust: bool,
    #[command(flatten)]
    signed: Signed,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let (by, at) = (args.signed.by(), SystemClock.now());
    let how = if args.trust { "as results that count" } else { "as history that is not believed" };
    let mut change = Change {
        plan: format!("Would import {} {how}.", plural(args.files.len(), "file")),
        changes: args.files.iter().map(|file| file.display().to_string()).collect(),
        done: format!("Imported {} {how}.", plural(args.files.len(), "file")),
        next: "`doctor history` shows the rows".to_owned(),
        why: "import".to_owned(),
        by,
        at,
    };
    args.signed.confirm(&change)?;
    let store = context.make_store()?;
    let imported = store.import(&args.files, args.trust, at)?;
    change.changes = vec![
        format!("{} added", plural(usize::try_from(imported.added).unwrap_or(usize::MAX), "row")),
        format!("{} known from an earlier import", imported.known),
        format!("{} not understood", imported.skipped),
    ];
    change.changes.extend(imported.skipped_examples.iter().map(|example| format!("not understood: {example}")));
    args.signed.say(context, &change)?;
    Ok(if imported.skipped > 0 { Exit::Trouble } else { Exit::Ok })
}
