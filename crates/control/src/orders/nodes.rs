//! Orders about nodes: test, hold, release, quarantine.

use doctor_checks::Catalogue;
use doctor_core::{
    hostlist::{self, Selector},
    ids::{NodeName, TestId},
    lifecycle::Life,
    plan::MOST_NODES,
    run::NonEmpty,
    snapshot::Asked,
    time::Timestamp,
    view::{Facts, clock, plural},
};

use super::{BadOrder, Prepared, Write, pick};

/// The nodes that are meant, and what is known of them.
struct Meant<'a> {
    facts: &'a Facts,
    nodes: Vec<NodeName>,
}

impl<'a> Meant<'a> {
    fn of(facts: &'a Facts, selectors: &[Selector]) -> Result<Self, BadOrder> {
        if selectors.is_empty() {
            return Err(BadOrder::Usage(
                "name nodes: node[01-64], pool=NAME, life=STATE, or a name with `*`".to_owned(),
            ));
        }
        Ok(Self { facts, nodes: pick(facts, selectors)? })
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

    /// A node to put into an example.
    fn example(&self) -> &str {
        self.nodes.first().map_or("NODE", NodeName::as_str)
    }
}

pub(super) fn test(
    facts: &Facts,
    catalogue: &Catalogue,
    selectors: &[Selector],
    tests: &[TestId],
) -> Result<Prepared, BadOrder> {
    let meant = Meant::of(facts, selectors)?;
    let known = &facts.snapshot.tests;
    let wanted = catalogue.named(tests);
    if let Some(several) = known.iter().find(|test| test.together && tests.contains(&test.id)) {
        let text = format!("{} runs on several nodes at once: doctor test --nodes A,B,… {}", several.id, several.id);
        return Err(BadOrder::Usage(text));
    }
    if let Some(unknown) = wanted.iter().find(|id| known.iter().all(|test| test.id != **id)) {
        let suites = catalogue.suites().keys().map(TestId::as_str);
        let known = known.iter().map(|test| test.id.as_str()).chain(suites).collect::<Vec<_>>().join(", ");
        return Err(BadOrder::Unknown { what: "test or suite", name: unknown.to_string(), known });
    }
    let which = match wanted.as_slice() {
        [] => "every test that is run regularly".to_owned(),
        some => some.iter().map(TestId::as_str).collect::<Vec<_>>().join(", "),
    };
    let asked = |node: &NodeName| Write::Request(Asked::Test { node: node.clone(), tests: wanted.clone() });
    Ok(Prepared {
        plan: format!("Would ask for {which} on {} ({}).", meant.count(), meant.names()),
        changes: meant.nodes.iter().map(|node| format!("{node}: {which}")).collect(),
        done: format!("Asked for {which} on {}.", meant.count()),
        next: format!("`doctor why {}` shows when it runs", meant.example()),
        writes: meant.nodes.iter().map(asked).collect(),
        nodes: meant.nodes,
    })
}

/// One run over several nodes, and who is at fault if it fails.
pub(super) fn together(
    facts: &Facts,
    catalogue: &Catalogue,
    selectors: &[Selector],
    name: Option<&str>,
) -> Result<Prepared, BadOrder> {
    let meant = Meant::of(facts, selectors)?;
    let several: Vec<&TestId> = facts.snapshot.tests.iter().filter(|test| test.together).map(|test| &test.id).collect();
    let name = name.unwrap_or("collective");
    let is_meant = |id: &TestId| id.as_str() == name || catalogue.form_of(id).is_some_and(|of| of.as_str() == name);
    let Some(test) = several.iter().find(|id| is_meant(id)) else {
        let known = several.iter().map(|id| id.as_str()).collect::<Vec<_>>().join(", ");
        return Err(BadOrder::Unknown { what: "test over several nodes", name: name.to_owned(), known });
    };
    let Some(nodes) = NonEmpty::new(meant.nodes.clone()).filter(|nodes| nodes.len() > 1) else {
        let text = format!("{test} needs two nodes at least; `--nodes` names {}", meant.count());
        return Err(BadOrder::Usage(text));
    };
    if nodes.len() > MOST_NODES {
        return Err(BadOrder::Usage(format!("`--nodes` names {}, {MOST_NODES} is the limit", meant.count())));
    }
    Ok(Prepared {
        plan: format!("Would ask for {test} over {} together ({}).", meant.count(), meant.names()),
        changes: vec![format!("{}: {test}, together", meant.names())],
        done: format!("Asked for {test} over {} together.", meant.count()),
        next: "`doctor audit` shows each trial and what came out".to_owned(),
        writes: vec![Write::Request(Asked::Together { nodes, test: (*test).clone(), trials: Vec::new() })],
        nodes: meant.nodes,
    })
}

pub(super) fn hold(facts: &Facts, selectors: &[Selector], until: Option<Timestamp>) -> Result<Prepared, BadOrder> {
    let meant = Meant::of(facts, selectors)?;
    let how_long = until.map_or_else(|| "until released".to_owned(), |until| format!("until {} UTC", clock(until)));
    Ok(Prepared {
        plan: format!("Would hold {} ({}) {how_long}: no tests, no repairs.", meant.count(), meant.names()),
        changes: meant.nodes.iter().map(|node| format!("{node}: {} -> held", meant.life(node).word())).collect(),
        done: format!("Held {} {how_long}.", meant.count()),
        next: format!("`doctor release {} --why …` when it is ready", meant.example()),
        writes: meant.nodes.iter().map(|node| Write::Hold { node: node.clone(), until }).collect(),
        nodes: meant.nodes,
    })
}

pub(super) fn release(facts: &Facts, selectors: &[Selector]) -> Result<Prepared, BadOrder> {
    let meant = Meant::of(facts, selectors)?;
    let held = |node: &NodeName| facts.node(node).is_some_and(|(record, _)| record.hold.is_some());
    let fate = |node: &NodeName| match meant.life(node) {
        Life::InService | Life::Suspect if held(node) => "the hold ends",
        Life::InService | Life::Suspect => "in users' hands already; nothing changes",
        Life::Proving { .. } => "a proof is running already",
        Life::Held { .. } => "the hold ends; proved first if a case is open",
        Life::Quarantined | Life::Repairing { .. } | Life::Out => "proved, then returned to users",
    };
    let changes = meant.nodes.iter().map(|node| format!("{node}: {}; {}", meant.life(node).word(), fate(node)));
    let mut writes = Vec::new();
    for node in &meant.nodes {
        writes.extend(held(node).then(|| Write::Unhold(node.clone())));
        writes.push(Write::Request(Asked::Release { node: node.clone() }));
    }
    Ok(Prepared {
        plan: format!("Would release {} ({}).", meant.count(), meant.names()),
        changes: changes.collect(),
        done: format!("Released {}.", meant.count()),
        next: format!("`doctor why {}` follows it", meant.example()),
        writes,
        nodes: meant.nodes,
    })
}

pub(super) fn quarantine(facts: &Facts, selectors: &[Selector], evict: bool) -> Result<Prepared, BadOrder> {
    let meant = Meant::of(facts, selectors)?;
    let work = if evict { "user work asked to leave" } else { "user work may finish" };
    let fate = |node: &NodeName| format!("{node}: {} -> quarantined, {work}, then examined", meant.life(node).word());
    let asked = |node: &NodeName| Write::Request(Asked::Quarantine { node: node.clone(), evict });
    Ok(Prepared {
        plan: format!("Would take {} out of service ({}).", meant.count(), meant.names()),
        changes: meant.nodes.iter().map(fate).collect(),
        done: format!("Asked to take {} out of service and to examine it.", meant.count()),
        next: format!(
            "`doctor why {0}` tells what the examination advises; `doctor release {0} --why …` proves and returns it",
            meant.example()
        ),
        writes: meant.nodes.iter().map(asked).collect(),
        nodes: meant.nodes,
    })
}
