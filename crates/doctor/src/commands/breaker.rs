//! `doctor breaker`: shows and closes the circuit breaker.

use clap::Subcommand;
use doctor_api::operator_api::ActionKind;
use doctor_core::view::{self, BreakerState, BreakerView, StoredStatus};
use doctor_engine::operator_commands::OperatorCommand;

use super::confirmation::{ApiAction, ChangeArgs};
use crate::{
    context::Context,
    exit::Exit,
    failure::Result,
    output::{ago, format_time, plural},
};

/// Show or close the circuit breaker, which limits how many nodes are taken out before an operator must act.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: BreakerCommand,
}

#[derive(Debug, Subcommand)]
enum BreakerCommand {
    /// Show its state and its counts. Exit code 1 while it is open.
    Show,
    /// Allow nodes to be taken out again. Earlier removals no longer count.
    Close(CloseArgs),
}

#[derive(Debug, clap::Args)]
struct CloseArgs {
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

impl Args {
    /// Whether this only reads.
    pub(crate) const fn reads(&self) -> bool {
        matches!(self.command, BreakerCommand::Show)
    }
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match &args.command {
        BreakerCommand::Show => show(context),
        BreakerCommand::Close(args) => close(context, args),
    }
}

pub(super) fn show(context: &Context) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let view = view::status(&facts, &StoredStatus::default()).breaker;
    let is_open = view.state == BreakerState::Open;
    context.out.show(&view, |page| {
        let since = view
            .since
            .map_or_else(String::new, |since| format!(" since {} UTC ({})", format_time(since), ago(facts.now, since)));
        page.line(format!("The breaker is {}{since}.", view.state));
        page.line(why(&view));
        page.line(match view.state {
            BreakerState::Open => {
                "Findings are recorded; no node is taken out. Check the cause, then run `doctor breaker close --why …`."
            }
            BreakerState::Closed => "Nothing to do.",
        });
    })?;
    Ok(if is_open { Exit::ProblemsFound } else { Exit::Ok })
}

fn why(view: &BreakerView) -> String {
    let limits = format!("{} an hour, {} % of a pool", view.nodes_per_hour, view.percent_of_pool);
    match &view.why {
        Some(why) => format!("Why: {why} (limits: {limits})"),
        None => format!("Taken out within the last hour: {} (limits: {limits})", plural(view.taken_out.len(), "node")),
    }
}

fn close(context: &Context, args: &CloseArgs) -> Result<Exit> {
    let action = ApiAction::new(ActionKind::CloseBreaker);
    args.change_args.submit_command(context, &args.why, &action, |_| Ok(OperatorCommand::CloseBreaker))
}
