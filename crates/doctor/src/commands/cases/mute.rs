//! `doctor cases ack` and `snooze`: silence the notifications of a case. The case itself does not change.

use clap::Subcommand;
use doctor_api::operator_api::ActionKind;
use doctor_core::ids::CaseId;
use doctor_engine::operator_commands::{self, OperatorCommand};

use crate::{
    commands::confirmation::{ApiAction, ChangeArgs},
    context::Context,
    exit::Exit,
    failure::Result,
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
    match what {
        MuteCommand::Ack(args) => {
            let action = ApiAction::new(ActionKind::Acknowledge).list("cases", &args.cases);
            let order = OperatorCommand::Acknowledge { cases: args.cases.clone() };
            args.change_args.submit_command(context, &args.why, &action, |_| Ok(order.clone()))
        }
        MuteCommand::Snooze(args) => {
            let action = ApiAction::new(ActionKind::Snooze).list("cases", &args.cases).text("until", Some(&args.until));
            args.change_args.submit_command(context, &args.why, &action, |now| {
                let until = operator_commands::parse_deadline(&args.until, now)?;
                Ok(OperatorCommand::Snooze { cases: args.cases.clone(), until })
            })
        }
    }
}
