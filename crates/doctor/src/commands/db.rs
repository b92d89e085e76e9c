//! `doctor db`: backs up, restores and verifies the database; shows and takes the lease.

mod lease;

use std::path::PathBuf;

use doctor_backend::clock::{Clock, SystemClock};
use doctor_store::records::VerifyReport;

use clap::Subcommand;

use super::confirmation::{Change, ChangeArgs};
use crate::{context::Context, exit::Exit, failure::Result};

/// Back up, restore and verify the database; show and take the lease.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: DbCommand,
}

#[derive(Debug, Subcommand)]
enum DbCommand {
    /// Write the whole database atomically to a new SQLite file. Works while a controller runs, and with PostgreSQL
    /// too.
    Backup {
        /// File to write; it must not exist.
        file: PathBuf,
    },
    /// Fill an empty database from a backup. A database with content is refused.
    Restore(RestoreArgs),
    /// Check the consistency of the database. Exit code 1 if it is inconsistent.
    Verify,
    /// Show or take the lease, by which one controller leads.
    #[command(subcommand)]
    Lease(lease::LeaseCommand),
}

#[derive(Debug, clap::Args)]
struct RestoreArgs {
    /// File written by `doctor db backup`.
    file: PathBuf,
    #[command(flatten)]
    change_args: ChangeArgs,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match &args.command {
        DbCommand::Backup { file } => {
            context.store_for_changes()?.backup(file)?;
            let view = serde_json::json!({ "backup": file });
            context.out.show(&view, |page| {
                page.line(format!("Wrote a backup to {}.", file.display()));
                page.line("It is a consistent copy of the store as of the start of the backup.");
                page.line("`doctor db restore` restores it into an empty store, SQLite or PostgreSQL.");
            })?;
            Ok(Exit::Ok)
        }
        DbCommand::Restore(args) => restore(context, args),
        DbCommand::Verify => {
            let verified = context.store_for_changes()?.verify()?;
            show(context, &verified)
        }
        DbCommand::Lease(command) => lease::run(context, command),
    }
}

fn restore(context: &Context, args: &RestoreArgs) -> Result<Exit> {
    let url = context.config()?.store.to_string();
    let file = args.file.display();
    let change = Change {
        plan: format!("Would restore {file} into the store {url}."),
        changes: vec![format!("{url}: all data of {file}")],
        done: format!("Restored {file} into {url}."),
        next: "start the controller: it adopts marks that the backup does not know and removes none".to_owned(),
        why: "restore".to_owned(),
        by: args.change_args.operator_name(),
        at: SystemClock.now(),
    };
    args.change_args.apply(context, &change, || Ok(context.open_or_create_store()?.restore(&args.file)?))
}

fn show(context: &Context, verified: &VerifyReport) -> Result<Exit> {
    context.out.show(verified, |page| {
        page.line(match verified.problems.len() {
            0 => "The store is consistent.".to_owned(),
            1 => "1 problem in the store.".to_owned(),
            n => format!("{n} problems in the store."),
        });
        for problem in &verified.problems {
            page.line(format!("  ! {problem}"));
        }
        page.line(format!("Checked: {}.", verified.checked.join(", ")));
        if !verified.is_consistent() {
            page.line("Stop the controller and restore the last good backup into another store (`doctor db restore`).");
        }
    })?;
    Ok(if verified.is_consistent() { Exit::Ok } else { Exit::ProblemsFound })
}
