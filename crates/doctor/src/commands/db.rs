//! `doctor db`: backs up, restores, migrates and verifies the database; shows and takes the lease.

mod lease;

use std::path::PathBuf;

use doctor_backend::clock::{Clock, SystemClock};
use doctor_store::{
    LeaseClock, MigrationBackup, MigrationPlan, MigrationReport, PlannedBackup, Store, records::VerifyReport,
    this_process,
};

use clap::Subcommand;

use super::confirmation::{Change, ChangeArgs};
use crate::{
    context::{self, Context},
    exit::Exit,
    failure::Result,
    output::format_time,
};

/// Back up, restore, migrate and verify the database; show and take the lease.
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
    /// Migrate the database to the schema of this version, after a backup.
    ///
    /// `doctor serve` and `doctor run` do the same when they lead; this command is for hand work while no controller runs.
    /// It takes the lease for the time of the migration, and fails with exit code 5 if a controller leads. A failure or a
    /// crash leaves the old schema.
    Migrate(MigrateArgs),
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

#[derive(Debug, clap::Args)]
struct MigrateArgs {
    /// Write no backup, because this database is backed up by other means.
    #[arg(long)]
    skip_backup: bool,
    #[command(flatten)]
    change_args: ChangeArgs,
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match &args.command {
        DbCommand::Backup { file } => {
            // Also of an older schema, before it is migrated.
            context.store()?.backup(file)?;
            let view = serde_json::json!({ "backup": file });
            context.out.show(&view, |page| {
                page.line(format!("Wrote a backup to {}.", file.display()));
                page.line("It is a consistent copy of the store as of the start of the backup.");
                page.line("`doctor db restore` restores it into an empty store, SQLite or PostgreSQL.");
            })?;
            Ok(Exit::Ok)
        }
        DbCommand::Restore(args) => restore(context, args),
        DbCommand::Migrate(args) => migrate(context, args),
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

fn migrate(context: &Context, args: &MigrateArgs) -> Result<Exit> {
    let (config, url) = (context.config()?, context.existing_store()?);
    let backup = if args.skip_backup { MigrationBackup::None } else { config.migration_backup.clone() };
    let failed = |source| context::store_failure(url, source);
    let Some(planned) = Store::plan_migration(url, &backup).map_err(failed)? else {
        let schema = Store::probe(url).map_err(failed)?.schema;
        let line = match schema {
            Some(schema) => format!("Nothing to do: the store has schema {schema}, that of this version."),
            None => "Nothing to do: the store is empty; the first start creates its schema.".to_owned(),
        };
        context.out.show(&serde_json::json!({ "schema": schema, "migrated": false }), |page| {
            page.line(&line);
        })?;
        return Ok(Exit::Ok);
    };
    let at = SystemClock.now();
    let mut change = Change {
        plan: format!("Would migrate the store {url} from schema {} to {}.", planned.from, planned.to),
        changes: planned_lines(&planned),
        done: format!("Migrated the store {url} from schema {} to {}.", planned.from, planned.to),
        next: "start the controllers of this version: those of older ones cannot use the store".to_owned(),
        why: "upgrade".to_owned(),
        by: args.change_args.operator_name(),
        at,
    };
    if let Some((leader, until)) = Store::probe(url).map_err(failed)?.leader.filter(|(_, until)| *until > at) {
        change.changes.push(format!("{leader} leads until {} UTC: stop it first", format_time(until)));
    }
    args.change_args.confirm(&change)?;
    let store = Store::open_to_lead(url, backup).map_err(failed)?;
    let lease = store.acquire(&this_process(), LeaseClock::Database, config.lease)?;
    let report = store.take_migration_report();
    store.release(&lease)?;
    change.changes = match &report {
        Some(report) => done_lines(report),
        None => vec!["another controller has migrated it meanwhile".to_owned()],
    };
    args.change_args.report(context, &change)?;
    Ok(Exit::Ok)
}

fn planned_lines(planned: &MigrationPlan) -> Vec<String> {
    vec![
        format!("schema: {} to {}", planned.from, planned.to),
        format!("backup before it: {}", planned.backup),
        "one transaction: whatever fails, the store keeps its schema".to_owned(),
    ]
}

fn done_lines(report: &MigrationReport) -> Vec<String> {
    let backup = match &report.backup {
        PlannedBackup::File(path) => format!("backup: {} (`doctor db restore` restores it)", path.display()),
        PlannedBackup::Skipped(why) => format!("no backup: {why}"),
    };
    vec![
        format!("schema: {} to {}", report.from, report.to),
        backup,
        format!("took: {:.1} s", report.took.as_secs_f64()),
    ]
}

/// Returns one line that says what a migration did.
pub(super) fn migration_line(report: &MigrationReport) -> String {
    format!("migrated the store from schema {} to {}; backup: {}", report.from, report.to, report.backup)
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
