//! `doctor pause` and `doctor resume`: stop validation everywhere or in one pool, and continue it.

use doctor_api::operator_api::ActionKind;
use doctor_core::{ids::PoolName, time::Span};
use doctor_engine::operator_commands::OperatorCommand;

use super::confirmation::{ApiAction, ChangeArgs};
use crate::{context::Context, exit::Exit, failure::Result};

/// Stop starting validation. Active runs may finish; findings are still recorded.
#[derive(Debug, clap::Args)]
pub(crate) struct PauseArgs {
    /// Only in this pool. Default: everywhere.
    #[arg(long, value_name = "POOL")]
    pool: Option<PoolName>,
    /// End the pause after this long, such as "4h".
    #[arg(long = "for", value_name = "LENGTH")]
    length: Option<Span>,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

/// End a pause.
#[derive(Debug, clap::Args)]
pub(crate) struct ResumeArgs {
    /// End the pause of this pool. Default: the global pause.
    #[arg(long, value_name = "POOL")]
    pool: Option<PoolName>,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

pub(crate) fn pause(context: &Context, args: &PauseArgs) -> Result<Exit> {
    let order = OperatorCommand::Pause { pool: args.pool.clone(), length: args.length };
    let action = ApiAction::new(ActionKind::Pause).text("pool", args.pool.as_ref()).text("for", args.length.as_ref());
    args.change_args.submit_command(context, &args.why, &action, |_| Ok(order.clone()))
}

pub(crate) fn resume(context: &Context, args: &ResumeArgs) -> Result<Exit> {
    let action = ApiAction::new(ActionKind::Resume).text("pool", args.pool.as_ref());
    let order = OperatorCommand::Resume { pool: args.pool.clone() };
    args.change_args.submit_command(context, &args.why, &action, |_| Ok(order.clone()))
}
