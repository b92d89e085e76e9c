//! Commands about nodes: test, hold, release, quarantine. Each is described node by node, with what prevents it there:
//! a hold, a repair, or that the cluster no longer lists the node.

use doctor_checks::Catalogue;
use doctor_core::{
    finding::Evidence,
    hostlist::{self, Selector},
    ids::{NodeName, TestId},
    lifecycle::Life,
    plan::MOST_NODES,
    run::NonEmpty,
    snapshot::{Asked, NodeRecord},
    time::Timestamp,
    view::{Facts, clock, plural},
};

use super::{BadOrder, Prepared, Rests, Write, pick};

/// The selected nodes and their records.
struct Meant<'a> {
    facts: &'a Facts,
    nodes: Vec<(&'a NodeRecord, bool)>,
}

/// The effect of a command on one node: in words, and as changes to the store.
struct Fate {
    words: String,
    writes: Vec<Write>,
}

impl Fate {
    const fn nothing(words: String) -> Self {
        Self { words, writes: Vec::new() }
    }
}

const GONE: &str = "gone from the cluster";

impl<'a> Meant<'a> {
    fn of(facts: &'a Facts, selectors: &[Selector]) -> Result<Self, BadOrder> {
        if selectors.is_empty() {
            return Err(BadOrder::Usage(
                "no nodes given; accepted: node[01-64], pool=NAME, life=STATE, or a name with `*`".to_owned(),
            ));
        }
        let nodes = pick(facts, selectors)?;
        Ok(Self { facts, nodes: nodes.iter().filter_map(|name| facts.node(name)).collect() })
    }

    fn all(&self) -> Vec<NodeName> {
        self.nodes.iter().map(|(record, _)| record.node.name.clone()).collect()
    }

    fn names(&self) -> String {
        hostlist::fold(&self.all())
    }

    fn count(&self) -> String {
        plural(self.nodes.len(), "node")
    }

    /// Returns a node name for an example.
    fn example(&self) -> &str {
        self.nodes.first().map_or("NODE", |(record, _)| record.node.name.as_str())
    }

    /// Returns who holds a node now, and why.
    fn held(&self, record: &NodeRecord) -> Option<String> {
        record.hold_at(self.facts.now).map(|hold| format!("held by {} ({})", hold.by, hold.why))
    }

    /// Collects the effect on each node. An error if there is none and the cluster lists none of the nodes.
    fn each(&self, fate: impl Fn(&NodeRecord, bool) -> Fate) -> Result<(Vec<String>, Vec<Write>), BadOrder> {
        let (mut changes, mut writes) = (Vec::with_capacity(self.nodes.len()), Vec::new());
        for (record, here) in &self.nodes {
            let fate = fate(record, *here);
            changes.push(format!("{}: {}", record.node.name, fate.words));
            writes.extend(fate.writes);
        }
        if writes.is_empty() && !self.nodes.iter().any(|(_, here)| *here) {
            return Err(BadOrder::Usage(format!("the cluster no longer lists {}", self.names())));
        }
        Ok((changes, writes))
    }

    /// Returns the preconditions of the command.
    fn rests_on(&self) -> Vec<Rests> {
        let rests = |(record, _): &(&NodeRecord, bool)| Rests::Node {
            node: record.node.name.clone(),
            life: record.life.clone(),
            hold: record.hold.clone(),
        };
        self.nodes.iter().map(rests).collect()
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
        [] => "all routine tests".to_owned(),
        some => some.iter().map(TestId::as_str).collect::<Vec<_>>().join(", "),
    };
    let (changes, writes) = meant.each(|record, here| {
        let words = match (meant.held(record), &record.life) {
            _ if !here => return Fate::nothing(format!("{GONE}; not tested")),
            (Some(held), _) => format!("{which}, after the hold ends: {held}"),
            (None, Life::Repairing { .. }) => format!("{which}, after its repair"),
            (None, _) => which.clone(),
        };
        let asked = Asked::Test { node: record.node.name.clone(), tests: wanted.clone() };
        Fate { words, writes: vec![Write::Request(asked)] }
    })?;
    Ok(Prepared {
        plan: format!("Would request {which} on {} ({}).", meant.count(), meant.names()),
        changes,
        done: format!("Requested {which} on {}.", plural(writes.len(), "node")),
        next: format!("`doctor why {}` shows when it runs", meant.example()),
        writes,
        rests_on: meant.rests_on(),
        nodes: meant.all(),
    })
}

/// Prepares one run over several nodes, with fault localisation if it fails.
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
    let Some(nodes) = NonEmpty::new(meant.all()).filter(|nodes| nodes.len() > 1) else {
        let text = format!("{test} needs at least two nodes; `--nodes` names {}", meant.count());
        return Err(BadOrder::Usage(text));
    };
    if nodes.len() > MOST_NODES {
        return Err(BadOrder::Usage(format!("`--nodes` names {}; the limit is {MOST_NODES}", meant.count())));
    }
    if let Some((gone, _)) = meant.nodes.iter().find(|(_, here)| !here) {
        let text = format!("{} is {GONE}; {test} needs all of its nodes", gone.node.name);
        return Err(BadOrder::Usage(text));
    }
    let mut changes = vec![format!("{}: {test}, one run", meant.names())];
    changes.extend(meant.nodes.iter().filter_map(|(record, _)| {
        let held = meant.held(record)?;
        Some(format!("{}: {held}; the run waits until the hold ends", record.node.name))
    }));
    Ok(Prepared {
        plan: format!("Would request one run of {test} over {} ({}).", meant.count(), meant.names()),
        changes,
        done: format!("Requested one run of {test} over {}.", meant.count()),
        next: "`doctor audit` shows each trial and its result".to_owned(),
        writes: vec![Write::Request(Asked::Together { nodes, test: (*test).clone(), trials: Vec::new() })],
        rests_on: meant.rests_on(),
        nodes: meant.all(),
    })
}

pub(super) fn hold(facts: &Facts, selectors: &[Selector], until: Option<Timestamp>) -> Result<Prepared, BadOrder> {
    let meant = Meant::of(facts, selectors)?;
    let how_long = until.map_or_else(|| "until released".to_owned(), |until| format!("until {} UTC", clock(until)));
    let (changes, writes) = meant.each(|record, here| {
        let words = match (meant.held(record), here) {
            (Some(held), _) => format!("already {held}; this hold replaces it"),
            (None, false) => format!("{GONE}; held if it returns"),
            (None, true) => format!("{} -> held", record.life.word()),
        };
        Fate { words, writes: vec![Write::Hold { node: record.node.name.clone(), until }] }
    })?;
    Ok(Prepared {
        plan: format!("Would hold {} ({}) {how_long}: no tests, no repairs.", meant.count(), meant.names()),
        changes,
        done: format!("Held {} {how_long}.", meant.count()),
        next: format!("`doctor release {} --why …` when it is ready", meant.example()),
        writes,
        rests_on: meant.rests_on(),
        nodes: meant.all(),
    })
}

pub(super) fn release(facts: &Facts, selectors: &[Selector]) -> Result<Prepared, BadOrder> {
    let meant = Meant::of(facts, selectors)?;
    let (changes, writes) = meant.each(|record, here| {
        let name = &record.node.name;
        let end = record.hold.as_ref().map(|_| Write::Unhold(name.clone()));
        let held = meant.held(record).unwrap_or_else(|| record.life.word().to_owned());
        if !here {
            let after = if end.is_some() { "the hold ends" } else { "nothing changes" };
            return Fate { words: format!("{held}; {GONE}; {after}"), writes: end.into_iter().collect() };
        }
        let after = match &record.life {
            Life::InService | Life::Suspect if end.is_some() => "the hold ends",
            Life::InService | Life::Suspect if tells_of_events(record) => "its events are acknowledged",
            Life::InService | Life::Suspect => "nothing changes",
            Life::Proving { .. } => "requalification is already running",
            Life::Held { .. } => "the hold ends; requalified first if a case is open",
            Life::Quarantined | Life::Repairing { .. } | Life::Out => "requalified, then returned to service",
        };
        let asked = Write::Request(Asked::Release { node: name.clone() });
        Fate { words: format!("{held}; {after}"), writes: end.into_iter().chain([asked]).collect() }
    })?;
    Ok(Prepared {
        plan: format!("Would release {} ({}).", meant.count(), meant.names()),
        changes,
        done: format!("Released {}.", meant.count()),
        next: format!("`doctor why {}` shows its progress", meant.example()),
        writes,
        rests_on: meant.rests_on(),
        nodes: meant.all(),
    })
}

/// Returns whether a finding is open that rests on an event only and belongs to no case.
fn tells_of_events(record: &NodeRecord) -> bool {
    let event = |evidence: &Evidence| matches!(evidence, Evidence::Event { known_by: Some(_), .. });
    record.case.is_none() && record.findings.iter().any(|open| event(&open.finding.evidence))
}

pub(super) fn quarantine(facts: &Facts, selectors: &[Selector], evict: bool) -> Result<Prepared, BadOrder> {
    let meant = Meant::of(facts, selectors)?;
    let work = if evict { "user work evicted" } else { "user work may finish" };
    let (changes, writes) = meant.each(|record, here| {
        let then = format!("quarantined, {work}, then examined");
        let life = record.life.word();
        let words = match (meant.held(record), &record.life) {
            _ if !here => return Fate::nothing(format!("{GONE}; nothing changes")),
            (Some(held), _) => format!("{held}; after the hold: {then}"),
            (None, Life::InService | Life::Suspect) => format!("{life} -> {then}"),
            (None, Life::Held { .. }) => format!("{life}; after the hold: {then}"),
            (None, Life::Quarantined | Life::Repairing { .. } | Life::Proving { .. } | Life::Out) => {
                return Fate::nothing(format!("{life}: already out of service; nothing changes"));
            }
        };
        let asked = Asked::Quarantine { node: record.node.name.clone(), evict };
        Fate { words, writes: vec![Write::Request(asked)] }
    })?;
    Ok(Prepared {
        plan: format!("Would take {} out of service ({}).", meant.count(), meant.names()),
        changes,
        done: format!("Requested quarantine and examination of {}.", plural(writes.len(), "node")),
        next: format!(
            "`doctor why {0}` shows the advice; `doctor release {0} --why …` requalifies and returns it",
            meant.example()
        ),
        writes,
        rests_on: meant.rests_on(),
        nodes: meant.all(),
    })
}
