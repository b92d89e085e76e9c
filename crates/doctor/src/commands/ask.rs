//! What operators ask of nodes: test, hold, release, quarantine. The controller's next cycles see to it.

use doctor_control::{picture, store::Store};
use doctor_core::{
    hostlist::{self, Selector},
    ids::{NodeName, TestId},
    lifecycle::Life,
    node::Hold,
    snapshot::Asked,
    time::{Span, Timestamp},
    view::Facts,
};

use super::confirm::{Change, Signed};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{clock, plural},
};

/// Ask for tests now, before anything that is merely due.
///
/// The tests start as soon as the node is free and the limits allow it.
#[derive(Debug, clap::Args)]
pub(crate) struct TestArgs {
    /// Nodes: node[01-64], pool=NAME, life=STATE, or a name with `*`.
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<Selector>,
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

/// Take nodes out of service on your own judgement. The breaker does not stand in the way of a person.
#[derive(Debug, clap::Args)]
pub(crate) struct QuarantineArgs {
    /// Nodes: node[01-64], pool=NAME, life=STATE, or a name with `*`.
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<Selector>,
    /// Why; it stands in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    signed: Signed,
}

/// What all four need: the store, what is known, and the nodes that are meant.
struct Meant {
    store: Store,
    facts: Facts,
    nodes: Vec<NodeName>,
}

impl Meant {
    fn of(context: &Context, selectors: &[Selector]) -> Result<Self> {
        let store = context.store()?;
        let facts = context.facts(&store)?;
        let nodes = context.pick(&facts, selectors)?;
        Ok(Self { store, facts, nodes })
    }

    fn life(&self, node: &NodeName) -> &Life {
        self.facts.node(node).map_or(&Life::InService, |(record, _)| &record.life)
    }

    fn names(&self) -> String {
        hostlist::fold(&self.nodes)
    }

    fn count(&self) -> String {
        plural(self.nodes.len(), "node")
    }
}

pub(crate) fn test(context: &Context, args: &TestArgs) -> Result<Exit> {
    let meant = Meant::of(context, &args.nodes)?;
    let tests = &meant.facts.snapshot.tests;
    let catalogue = &context.loaded()?.settings.catalogue;
    let wanted = catalogue.named(&args.test);
    if let Some(unknown) = wanted.iter().find(|id| tests.iter().all(|test| test.id != **id)) {
        let suites = catalogue.suites().keys().map(TestId::as_str);
        let known = tests.iter().map(|test| test.id.as_str()).chain(suites).collect::<Vec<_>>().join(", ");
        return Err(Failure::Unknown { what: "test or suite", name: unknown.to_string(), known });
    }
    let which = match wanted.as_slice() {
        [] => "every test that is run regularly".to_owned(),
        some => some.iter().map(TestId::as_str).collect::<Vec<_>>().join(", "),
    };
    let (by, at) = (args.signed.by(), meant.facts.now);
    let change = Change {
        plan: format!("Would ask for {which} on {} ({}).", meant.count(), meant.names()),
        changes: meant.nodes.iter().map(|node| format!("{node}: {which}")).collect(),
        done: format!("Asked for {which} on {}.", meant.count()),
        next: format!("`doctor why {}` shows when it runs", example(&meant.nodes)),
        why: args.why.clone(),
        by: by.clone(),
        at,
    };
    args.signed.carry_out(context, &change, || {
        for node in &meant.nodes {
            let asked = Asked::Test { node: node.clone(), tests: wanted.clone() };
            meant.store.add_request(&asked, &by, &args.why, at)?;
        }
        Ok(())
    })
}

pub(crate) fn hold(context: &Context, args: &HoldArgs) -> Result<Exit> {
    let meant = Meant::of(context, &args.nodes)?;
    let (by, at) = (args.signed.by(), meant.facts.now);
    let until = args.until.as_deref().map(|text| moment(text, at)).transpose()?;
    let how_long = until.map_or_else(|| "until released".to_owned(), |until| format!("until {} UTC", clock(until)));
    let change = Change {
        plan: format!("Would hold {} ({}) {how_long}: no tests, no repairs.", meant.count(), meant.names()),
        changes: meant.nodes.iter().map(|node| format!("{node}: {} -> held", meant.life(node).word())).collect(),
        done: format!("Held {} {how_long}.", meant.count()),
        next: format!("`doctor release {} --why …` when it is ready", example(&meant.nodes)),
        why: args.why.clone(),
        by: by.clone(),
        at,
    };
    args.signed.carry_out(context, &change, || {
        for node in &meant.nodes {
            let hold = Hold { by: by.clone(), why: args.why.clone(), since: at, until };
            meant.store.hold(node, &hold)?;
        }
        Ok(())
    })
}

pub(crate) fn release(context: &Context, args: &ReleaseArgs) -> Result<Exit> {
    let meant = Meant::of(context, &args.nodes)?;
    let (by, at) = (args.signed.by(), meant.facts.now);
    let held = |node: &NodeName| meant.facts.node(node).is_some_and(|(record, _)| record.hold.is_some());
    let fate = |node: &NodeName| match meant.life(node) {
        Life::InService | Life::Suspect if held(node) => "the hold ends",
        Life::InService | Life::Suspect => "in users' hands already; nothing changes",
        Life::Proving { .. } => "a proof is running already",
        Life::Held { .. } => "the hold ends; proved first if a case is open",
        Life::Quarantined | Life::Repairing { .. } | Life::Out => "proved, then returned to users",
    };
    let change = Change {
        plan: format!("Would release {} ({}).", meant.count(), meant.names()),
        changes: meant
            .nodes
            .iter()
            .map(|node| format!("{node}: {}; {}", meant.life(node).word(), fate(node)))
            .collect(),
        done: format!("Released {}.", meant.count()),
        next: format!("`doctor why {}` follows it", example(&meant.nodes)),
        why: args.why.clone(),
        by: by.clone(),
        at,
    };
    args.signed.carry_out(context, &change, || {
        for node in &meant.nodes {
            if held(node) {
                meant.store.unhold(node, &by, &args.why, at)?;
            }
            meant.store.add_request(&Asked::Release { node: node.clone() }, &by, &args.why, at)?;
        }
        Ok(())
    })
}

pub(crate) fn quarantine(context: &Context, args: &QuarantineArgs) -> Result<Exit> {
    let meant = Meant::of(context, &args.nodes)?;
    let (by, at) = (args.signed.by(), meant.facts.now);
    let change = Change {
        plan: format!("Would take {} out of service ({}).", meant.count(), meant.names()),
        changes: meant.nodes.iter().map(|node| format!("{node}: {} -> quarantined", meant.life(node).word())).collect(),
        done: format!("Asked to take {} out of service.", meant.count()),
        next: format!("`doctor release {} --why …` proves and returns it", example(&meant.nodes)),
        why: args.why.clone(),
        by: by.clone(),
        at,
    };
    args.signed.carry_out(context, &change, || {
        for node in &meant.nodes {
            meant.store.add_request(&Asked::Quarantine { node: node.clone() }, &by, &args.why, at)?;
        }
        Ok(())
    })
}

/// A node to put into an example.
fn example(nodes: &[NodeName]) -> String {
    nodes.first().map_or_else(|| "NODE".to_owned(), ToString::to_string)
}

/// A length from now, or a moment that lies ahead.
pub(crate) fn moment(text: &str, now: Timestamp) -> Result<Timestamp> {
    let at = text.parse::<Span>().map(|span| now.plus(span)).or_else(|_| text.parse::<Timestamp>());
    match at {
        Ok(at) if at > now => Ok(at),
        Ok(at) => Err(Failure::Usage(format!("`{text}` is {} UTC, which is over: name a moment ahead", clock(at)))),
        Err(_) => Err(Failure::Usage(format!(
            "`{text}` is neither a length such as \"4h\" nor a moment such as \"2026-11-15T08:00:00Z\""
        ))),
    }
}

/// The moment of a change by an operator, in the cluster's own time.
pub(crate) fn moment_of_change(context: &Context, store: &Store) -> Result<Timestamp> {
    Ok(context.now(picture::last_seen(store)?.as_ref()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn until_takes_a_length_or_a_moment_ahead() {
        let now: Timestamp = "2026-11-15T08:00:00Z".parse().unwrap();
        assert_eq!(moment("4h", now).unwrap(), now.plus(Span::hours(4)));
        assert_eq!(moment("2026-11-16T08:00:00Z", now).unwrap(), now.plus(Span::days(1)));
        for text in ["yesterday", "2026-11-14T08:00:00Z", "0s", ""] {
            assert!(moment(text, now).is_err(), "{text}");
        }
    }
}
