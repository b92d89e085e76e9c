//! `doctor db lease`: shows the lease, and takes it from a controller that is gone.

use clap::Subcommand;
use doctor_backend::clock::{Clock, SystemClock};
use doctor_core::time::Span;
use doctor_store::LeaseStatus;
use serde::Serialize;

use crate::{
    commands::confirmation::{Change, ChangeArgs},
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::format_time,
};

#[derive(Debug, Subcommand)]
pub(super) enum LeaseCommand {
    /// Show which controller leads, since when and until when, by the database's clock. Exit code 1 if none does.
    Show,
    /// Take the lease from its holder, for the night when the holder is gone and its lease is not.
    ///
    /// The former holder can write nothing and starts no effect from then on, even if it is alive. A controller that waits
    /// leads from its next cycle; so may the former holder, if it still runs.
    Take(TakeArgs),
}

#[derive(Debug, clap::Args)]
pub(super) struct TakeArgs {
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

/// The lease, or that it is free.
#[derive(Debug, Serialize)]
struct LeaseView {
    free: bool,
    #[serde(flatten)]
    lease: Option<LeaseStatus>,
}

pub(super) fn run(context: &Context, command: &LeaseCommand) -> Result<Exit> {
    match command {
        LeaseCommand::Show => show(context),
        LeaseCommand::Take(args) => take(context, args),
    }
}

fn show(context: &Context) -> Result<Exit> {
    let lease = context.store()?.lease_status(SystemClock.now())?;
    let leads = lease.as_ref().is_some_and(|lease| lease.alive);
    let view = LeaseView { free: lease.is_none(), lease };
    context.out.show(&view, |page| match &view.lease {
        None => {
            page.line("The lease is free: no controller leads.");
            page.line("Next: start a controller (`doctor serve`).");
        }
        Some(lease) => {
            page.line(format!(
                "{} {}",
                lease.holder,
                if lease.alive { "leads." } else { "led; its lease has expired." }
            ));
            let since = lease.since.map_or_else(|| "unknown".to_owned(), |since| format!("{} UTC", format_time(since)));
            page.line(format!("Since: {since} (fence {})", lease.fence));
            page.line(format!("Until: {} UTC ({})", format_time(lease.until), end(lease)));
            page.line(format!("Database's clock: {} UTC", format_time(lease.now)));
            page.line(match lease.alive {
                true => {
                    "Next: nothing, if that controller runs. If it is gone for good: `doctor db lease take --why …`."
                }
                false => "Next: a controller that waits takes it in its next cycle; otherwise start one.",
            });
        }
    })?;
    Ok(if leads { Exit::Ok } else { Exit::ProblemsFound })
}

fn end(lease: &LeaseStatus) -> String {
    let whole = |span: Span| Span::from_secs(span.secs());
    match lease.alive {
        true => format!("in {}, unless it is renewed", whole(lease.until.since(lease.now))),
        false => format!("{} ago", whole(lease.now.since(lease.until))),
    }
}

fn take(context: &Context, args: &TakeArgs) -> Result<Exit> {
    let store = context.store_for_changes()?;
    let Some(lease) = store.lease_status(SystemClock.now())? else {
        return Err(Failure::Refused {
            why: "the lease is free: there is no holder to take it from".to_owned(),
            instead: "start a controller (`doctor serve`)".to_owned(),
        });
    };
    let by = args.change_args.operator_name();
    let holder = &lease.holder;
    let change = Change {
        plan: format!("Would take the lease from {holder}: it could write nothing and start no effect from then on."),
        changes: vec![format!("lease: {holder} (fence {}, ends {}) -> free", lease.fence, end(&lease))],
        done: format!("Took the lease from {holder}."),
        next: "a controller that waits leads from its next cycle (`doctor db lease show`)".to_owned(),
        why: args.why.clone(),
        by: by.clone(),
        at: lease.now,
    };
    args.change_args.apply(context, &change, || Ok(store.take_lease(lease.fence, &by, &args.why)?))
}
