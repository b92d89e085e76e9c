//! Operator commands on nodes: test, hold, release, quarantine, repair. They are stored, and the controller's next cycles carry
//! them out.

use doctor_api::operator_api::ActionKind;
use doctor_core::{case::Repair, hostlist::Selector, ids::TestId, time::Timestamp};
use doctor_engine::{
    operator_commands::{self, OperatorCommand},
    snapshot,
};
use doctor_store::Store;

use super::confirmation::{ApiAction, ChangeArgs, NodeChangeArgs};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
};

/// Request tests now, before any that are only due.
///
/// The tests start as soon as the node is free and the limits allow it.
///
/// With `--nodes`, one run covers all these nodes together as soon as all of them are free: `doctor test --nodes
/// node[01-08] collective`. If the run fails as a whole, each node is tested again in a pair with a known good node,
/// until the faulty node or pair of nodes is identified. `doctor audit` shows the progress and the outcome.
#[derive(Debug, clap::Args)]
pub(crate) struct TestArgs {
    /// Nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`. With `--nodes`: the test, by default
    /// `collective`.
    #[arg(value_name = "NODE", required_unless_present = "multi_node")]
    names: Vec<String>,
    /// Run one test over all these nodes together: A,B,… or node[01-08].
    #[arg(long = "nodes", value_name = "NODES")]
    multi_node: Vec<Selector>,
    /// Tests or suites to run, such as `standard`. Default: all routine tests.
    #[arg(long, visible_alias = "suite", value_name = "TEST", value_delimiter = ',')]
    test: Vec<TestId>,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT", default_value = "requested on the command line")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

/// Exclude nodes from tests and repairs until they are released.
#[derive(Debug, clap::Args)]
pub(crate) struct HoldArgs {
    /// Nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`.
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<Selector>,
    /// End of the hold: a duration such as "4h", or a time such as "2026-11-15T08:00:00Z".
    #[arg(long, value_name = "WHEN")]
    until: Option<String>,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

/// End a hold, and requalify nodes that were out of service before users get them.
///
/// A repair that an operator requested goes on when the hold ends. On a node that is not held, a repair that was not sent to
/// the cluster yet is withdrawn; the plan of the command says so.
#[derive(Debug, clap::Args)]
pub(crate) struct ReleaseArgs {
    /// Nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`.
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<Selector>,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

/// Take nodes out of service by an operator's decision and examine them.
///
/// The node is marked and drained. The tests of `repair.examine` (the suite `quarantine`) run as soon as it is empty,
/// and their advice is recorded: return, return-flagged, reboot, replace, or examine-again if something could not be
/// tested. The operator decides. The circuit breaker does not block this command.
#[derive(Debug, clap::Args)]
pub(crate) struct QuarantineArgs {
    /// Nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`.
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<Selector>,
    /// Evict user work if the cluster supports it; otherwise the work may finish.
    #[arg(long)]
    drain: bool,
    /// Reason, recorded in the audit trail and shown by the cluster.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: NodeChangeArgs,
}

/// Reset, reboot or replace nodes by an operator's decision, then requalify them.
///
/// The node is marked and drained. When its user work has ended, its evidence is saved and the step is performed once. A
/// node that passes its requalification returns to service; otherwise the operator decides again: no harsher step follows
/// by itself. The command needs no entry below `[allow]`, and the circuit breaker does not block it. It is refused where
/// the cluster cannot do it, in mode `observe`, while the pool of a node is paused, and while another party keeps the node
/// out of service. `doctor pause` stops what was not sent to the cluster yet. A repair that cannot begin within 24 hours is
/// withdrawn.
///
/// Example: `doctor repair gpu-a07 --step reboot --why "hangs in NCCL"`.
#[derive(Debug, clap::Args)]
pub(crate) struct RepairArgs {
    /// Nodes: node[01-64], pool=NAME, state=STATE, or a name with `*`.
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<Selector>,
    /// reset, reboot or replace.
    #[arg(long, value_name = "STEP")]
    step: Repair,
    /// Evict user work if the cluster supports it, and give up work on a node that does not answer; otherwise the work may
    /// finish.
    #[arg(long)]
    drain: bool,
    /// Reason, recorded in the audit trail and shown by the cluster.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: NodeChangeArgs,
}

pub(crate) fn test(context: &Context, args: &TestArgs) -> Result<Exit> {
    let order = if args.multi_node.is_empty() {
        let selectors: std::result::Result<Vec<Selector>, _> = args.names.iter().map(|text| text.parse()).collect();
        let nodes = selectors.map_err(|error| Failure::Usage(error.to_string()))?;
        OperatorCommand::Test { nodes, tests: args.test.clone() }
    } else {
        let named = args.names.iter().map(String::as_str);
        let names: Vec<&str> = named.chain(args.test.iter().map(TestId::as_str)).collect();
        let test = match names.as_slice() {
            [] => None,
            [one] => Some((*one).to_owned()),
            _ => return Err(Failure::Usage("a run over several nodes takes one test".to_owned())),
        };
        OperatorCommand::MultiNodeTest { nodes: args.multi_node.clone(), test }
    };
    let action = ApiAction::new(ActionKind::Test);
    let action = match &order {
        OperatorCommand::MultiNodeTest { nodes, test } => {
            action.list("nodes", nodes).list("tests", test).flag("multi_node", true)
        }
        _ => action.list("nodes", &args.names).list("tests", &args.test),
    };
    args.change_args.submit_command(context, &args.why, &action, |_| Ok(order.clone()))
}

pub(crate) fn hold(context: &Context, args: &HoldArgs) -> Result<Exit> {
    let action = ApiAction::new(ActionKind::Hold).list("nodes", &args.nodes).text("until", args.until.as_ref());
    args.change_args.submit_command(context, &args.why, &action, |now| {
        let until = args.until.as_deref().map(|text| operator_commands::parse_deadline(text, now)).transpose()?;
        Ok(OperatorCommand::Hold { nodes: args.nodes.clone(), until })
    })
}

pub(crate) fn release(context: &Context, args: &ReleaseArgs) -> Result<Exit> {
    let action = ApiAction::new(ActionKind::Release).list("nodes", &args.nodes);
    let order = OperatorCommand::Release { nodes: args.nodes.clone() };
    args.change_args.submit_command(context, &args.why, &action, |_| Ok(order.clone()))
}

pub(crate) fn quarantine(context: &Context, args: &QuarantineArgs) -> Result<Exit> {
    let action = ApiAction::new(ActionKind::Quarantine).list("nodes", &args.nodes).flag("drain", args.drain);
    args.change_args.submit_command(context, &args.why, &action, |_| {
        Ok(OperatorCommand::Quarantine { nodes: args.nodes.clone(), evict: args.drain })
    })
}

pub(crate) fn repair(context: &Context, args: &RepairArgs) -> Result<Exit> {
    let action = ApiAction::new(ActionKind::Repair).list("nodes", &args.nodes).text("step", Some(args.step));
    let action = action.flag("drain", args.drain);
    args.change_args.submit_command(context, &args.why, &action, |_| {
        Ok(OperatorCommand::Repair { nodes: args.nodes.clone(), step: args.step, evict: args.drain })
    })
}

/// Returns the time of an operator's change, in the cluster's time.
pub(crate) fn change_time(context: &Context, store: &Store) -> Result<Timestamp> {
    Ok(context.now(snapshot::last_observed(store)?.as_ref()))
}
