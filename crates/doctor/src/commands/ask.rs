//! What operators ask of nodes: test, hold, release, quarantine. The controller's next cycles see to it.

use doctor_core::{hostlist::Selector, ids::TestId, time::Timestamp};
use doctor_engine::{
    orders::{self, Order},
    snapshot,
};
use doctor_store::Store;

use super::confirm::Signed;
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
};

/// Ask for tests now, before anything that is merely due.
///
/// The tests start as soon as the node is free and the limits allow it.
///
/// With `--nodes`, one run goes over all these nodes at once, as soon as all of them are free: `doctor test --nodes
/// node[01-08] collective`. If they fail together, each is tried again in a pair with a node that is known to be good, until
/// the node, or the pair of nodes, that is at fault can be named. `doctor audit` tells how it goes, and what came out.
#[derive(Debug, clap::Args)]
pub(crate) struct TestArgs {
    /// Nodes: node[01-64], pool=NAME, life=STATE, or a name with `*`. With `--nodes`: the test, by default `collective`.
    #[arg(value_name = "NODE", required_unless_present = "together")]
    named: Vec<String>,
    /// One run over all these nodes together: A,B,… or node[01-08].
    #[arg(long = "nodes", value_name = "NODES")]
    together: Vec<Selector>,
    /// These tests or suites, such as `standard`. Without: all that are run regularly.
    #[arg(long, visible_alias = "suite", value_name = "TEST", value_delimiter = ',')]
    test: Vec<TestId>,
    /// Why; it stands in the audit trail.
    #[arg(long, value_name = "TEXT", default_value = "asked for on the command line")]
    why: String,
    #[command(flatten)]
    signed: Signed,
}

/// Keep the doctor's hands off nodes: no tests, no repairs, until released.
#[derive(Debug, clap::Args)]
pub(crate) struct HoldArgs {
    /// Nodes: node[01-64], pool=NAME, life=STATE, or a name with `*`.
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<Selector>,
    /// The hold ends by itself: a length such as "4h", or a moment such as "2026-11-15T08:00:00Z".
    #[arg(long, value_name = "WHEN")]
    until: Option<String>,
    /// Why; it stands in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    signed: Signed,
}

/// Give nodes back: ends a hold, and proves a node that was out of service before users get it.
#[derive(Debug, clap::Args)]
pub(crate) struct ReleaseArgs {
    /// Nodes: node[01-64], pool=NAME, life=STATE, or a name with `*`.
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<Selector>,
    /// Why; it stands in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    signed: Signed,
}

/// Take nodes out of service on your own judgement, and have them examined.
///
/// The node is marked and drained, the tests of `repair.examine` (the suite `quarantine`) run as soon as it is empty, and
/// their advice is kept: return, return-flagged, reboot, replace, or examine-again where something could not be tested.
/// You decide. The breaker does not stand in the way of a person.
#[derive(Debug, clap::Args)]
pub(crate) struct QuarantineArgs {
    /// Nodes: node[01-64], pool=NAME, life=STATE, or a name with `*`.
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<Selector>,
    /// Ask user work on it to leave, where the cluster can do that; otherwise it may finish.
    #[arg(long)]
    drain: bool,
    /// Why; it stands in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    signed: Signed,
}

pub(crate) fn test(context: &Context, args: &TestArgs) -> Result<Exit> {
    let order = if args.together.is_empty() {
        let selectors: std::result::Result<Vec<Selector>, _> = args.named.iter().map(|text| text.parse()).collect();
        let nodes = selectors.map_err(|error| Failure::Usage(error.to_string()))?;
        Order::Test { nodes, tests: args.test.clone() }
    } else {
        let named = args.named.iter().map(String::as_str);
        let wanted: Vec<&str> = named.chain(args.test.iter().map(TestId::as_str)).collect();
        let test = match wanted.as_slice() {
            [] => None,
            [one] => Some((*one).to_owned()),
            _ => return Err(Failure::Usage("one test at a time runs over several nodes".to_owned())),
        };
        Order::Together { nodes: args.together.clone(), test }
    };
    args.signed.give(context, &args.why, |_| Ok(order))
}

pub(crate) fn hold(context: &Context, args: &HoldArgs) -> Result<Exit> {
    args.signed.give(context, &args.why, |now| {
        let until = args.until.as_deref().map(|text| orders::moment(text, now)).transpose()?;
        Ok(Order::Hold { nodes: args.nodes.clone(), until })
    })
}

pub(crate) fn release(context: &Context, args: &ReleaseArgs) -> Result<Exit> {
    args.signed.give(context, &args.why, |_| Ok(Order::Release { nodes: args.nodes.clone() }))
}

pub(crate) fn quarantine(context: &Context, args: &QuarantineArgs) -> Result<Exit> {
    args.signed.give(context, &args.why, |_| Ok(Order::Quarantine { nodes: args.nodes.clone(), evict: args.drain }))
}

/// The moment of a change by an operator, in the cluster's own time.
pub(crate) fn moment_of_change(context: &Context, store: &Store) -> Result<Timestamp> {
    Ok(context.now(snapshot::last_seen(store)?.as_ref()))
}
