//! `doctor cases ack` and `snooze`: silence the notifications of a case. The case itself does not change.

use clap::Subcommand;
use doctor_core::{alert::Mute, case::Case, ids::CaseId};
use doctor_engine::operator_commands;
use doctor_store::Store;

use crate::{
    commands::{
        confirmation::{Change, ChangeArgs},
        operator_commands::change_time,
    },
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::format_time,
};

#[derive(Debug, Subcommand)]
pub(super) enum MuteCommand {
    /// Acknowledge cases: send no more notifications about them until they close.
    Ack(AckArgs),
    /// Send no notifications about cases for a while, then report their state.
    Snooze(SnoozeArgs),
}

#[derive(Debug, clap::Args)]
pub(super) struct AckArgs {
    /// Case ids, as `doctor cases` prints them.
    #[arg(value_name = "CASE", required = true)]
    cases: Vec<CaseId>,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT", default_value = "seen")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

#[derive(Debug, clap::Args)]
pub(super) struct SnoozeArgs {
    /// Case ids, as `doctor cases` prints them.
    #[arg(value_name = "CASE", required = true)]
    cases: Vec<CaseId>,
    /// End of the snooze: a duration such as "4h", or a time such as "2026-11-15T08:00:00Z".
    #[arg(long, value_name = "WHEN", default_value = "8h")]
    until: String,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

pub(super) fn run(context: &Context, what: &MuteCommand) -> Result<Exit> {
    let store = context.store()?;
    let at = change_time(context, &store)?;
    let (cases, until, why, signed) = match what {
        MuteCommand::Ack(args) => (&args.cases, None, &args.why, &args.change_args),
        MuteCommand::Snooze(args) => {
            (&args.cases, Some(operator_commands::parse_deadline(&args.until, at)?), &args.why, &args.change_args)
        }
    };
    let cases = open_cases(&store, cases)?;
    let mute = Mute { by: signed.operator_name(), why: why.clone(), at, until };
    let (plan, done) = match until {
        None => ("Would send no more notifications about this until it closes.".to_owned(), "Acknowledged."),
        Some(until) => {
            (format!("Would send no notifications about this until {} UTC.", format_time(until)), "Snoozed.")
        }
    };
    let worst = |case: &Case| {
        let worst = case.findings.iter().max_by_key(|finding| finding.severity);
        worst.map_or_else(|| "requested by an operator".to_owned(), |finding| finding.text.clone())
    };
    let change = Change {
        plan,
        changes: cases.iter().map(|case| format!("{} on {}: {}", case.id, case.node, worst(case))).collect(),
        by: mute.by.clone(),
        why: mute.why.clone(),
        at,
        done: done.to_owned(),
        next: "`doctor why NODE` shows its progress; a notification is sent when it closes".to_owned(),
    };
    signed.apply(context, &change, || {
        for case in &cases {
            store.mute(case, &mute)?;
        }
        Ok(())
    })
}

fn open_cases(store: &Store, ids: &[CaseId]) -> Result<Vec<Case>> {
    let find = |id: &CaseId| match store.case(*id)? {
        Some(case) if case.is_open() => Ok(case),
        Some(case) => Err(Failure::Usage(format!("case {} on {} is closed: there is nothing to mute", id, case.node))),
        None => Err(Failure::Unknown {
            what: "case",
            name: id.to_string(),
            known: "those that `doctor cases` lists".to_owned(),
        }),
    };
    ids.iter().map(find).collect()
}
