//! Fault localisation: which node is at fault when several nodes fail together, found by testing them in pairs.
//!
//! The next trial depends only on the results so far, never on state kept in memory. Nothing here starts a trial: the
//! planner does ([`crate::plan`]) where a controller manages the nodes, and an operator's command otherwise.

use std::{collections::BTreeSet, fmt};

use crate::{
    ids::NodeName,
    run::IncompleteWhy,
    snapshot::{Trial, TrialSaid},
};

/// Trials of the same nodes without a result, before the search gives up.
const MOST_SILENT: usize = 3;
/// Partners with which a node must fail before it is at fault itself.
const PARTNERS: usize = 2;

/// The next trials, or the conclusion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Run these trials; the second value is the conclusion if they cannot run.
    Try(Vec<Wanted>, Found),
    /// Trials are in progress.
    Wait,
    Over(Found),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    These(Vec<NodeName>),
    /// This node with a known-good partner that is not in `not`.
    WithGood {
        node: NodeName,
        not: BTreeSet<NodeName>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Well,
    Nodes(Vec<NodeName>),
    Pairs(Vec<(NodeName, NodeName)>),
    /// Every pair passes, but all nodes together fail.
    OnlyAll,
    Nothing(String),
}

/// The conclusion, as it is shown to operators.
impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Well => f.write_str("all nodes pass together"),
            Self::OnlyAll => f.write_str("the nodes fail only all together: every pair passes"),
            Self::Nothing(why) => write!(f, "the fault is not located: {why}"),
            Self::Nodes(nodes) => {
                let nodes: Vec<&str> = nodes.iter().map(NodeName::as_str).collect();
                write!(f, "at fault: {}", nodes.join(", "))
            }
            Self::Pairs(pairs) => {
                let pairs: Vec<String> = pairs.iter().map(|(one, other)| format!("{one} and {other}")).collect();
                write!(f, "at fault: the path between {}", pairs.join(", and between "))
            }
        }
    }
}

/// What the trials of one set of nodes have shown.
enum Known {
    Said(TrialSaid),
    Underway,
    /// Number of tries without a result, and the reason of the last one.
    Silent(usize, String),
}

impl Known {
    fn of<'a>(trials: impl Iterator<Item = &'a Trial>) -> Self {
        let mut known = Self::Silent(0, String::new());
        for trial in trials {
            match (&trial.said, &mut known) {
                (TrialSaid::NotYet, _) => return Self::Underway,
                (TrialSaid::Nothing(why), Self::Silent(times, last)) => {
                    *times += 1;
                    last.clone_from(why);
                }
                (TrialSaid::Nothing(_), _) => {}
                (said, _) => known = Self::Said(said.clone()),
            }
        }
        known
    }
}

fn is_over(trial: &Trial, nodes: &[NodeName]) -> bool {
    trial.nodes.len() == nodes.len() && nodes.iter().all(|node| trial.nodes.contains(node))
}

/// Returns the next trials for these nodes, if known-good nodes are available as partners.
pub fn next(nodes: &[NodeName], trials: &[Trial]) -> Next {
    begin(nodes, trials).unwrap_or_else(|| with_good_ones(nodes, trials))
}

/// Returns the next trials if no node is known to be good: the nodes are paired with each other, and a node that passes
/// in a pair serves as a partner for the others.
pub fn next_among(nodes: &[NodeName], trials: &[Trial]) -> Next {
    begin(nodes, trials).unwrap_or_else(|| in_pairs(nodes, trials))
}

/// Returns the nodes that passed in a pair, sorted by name.
pub fn cleared(trials: &[Trial]) -> BTreeSet<NodeName> {
    let passed = trials.iter().filter(|trial| trial.nodes.len() == 2 && trial.said == TrialSaid::Passed);
    passed.flat_map(|trial| trial.nodes.iter().cloned()).collect()
}

/// Tests all nodes together. `None`: they failed, and the fault is not localised.
fn begin(nodes: &[NodeName], trials: &[Trial]) -> Option<Next> {
    let withdrawn = TrialSaid::Nothing(IncompleteWhy::Withdrawn.code().to_owned());
    if trials.iter().any(|trial| trial.said == withdrawn) {
        return Some(Next::Over(Found::Nothing("an operator withdrew it".to_owned())));
    }
    match Known::of(trials.iter().filter(|trial| is_over(trial, nodes))) {
        Known::Underway => Some(Next::Wait),
        Known::Silent(times, _) if times < MOST_SILENT => {
            Some(Next::Try(vec![Wanted::These(nodes.to_vec())], unknown()))
        }
        Known::Silent(_, why) => Some(Next::Over(Found::Nothing(why))),
        Known::Said(TrialSaid::Passed) => Some(Next::Over(Found::Well)),
        Known::Said(TrialSaid::Named(named)) => Some(Next::Over(Found::Nodes(named))),
        Known::Said(_) => None,
    }
}

/// All nodes fail together: tests them in pairs. If no pair passes, they are paired differently once more.
fn in_pairs(nodes: &[NodeName], trials: &[Trial]) -> Next {
    match nodes {
        [] | [_] => return Next::Over(Found::Nodes(nodes.to_vec())),
        [one, other] => return Next::Over(Found::Pairs(vec![(one.clone(), other.clone())])),
        _ => {}
    }
    let mut rotated = nodes.to_vec();
    rotated.rotate_left(1);
    let mut round = Round::of(&paired(nodes), trials);
    if round.is_over() && round.good.is_empty() && round.bad.is_empty() {
        let again = Round::of(&paired(&rotated), trials);
        round = Round { failed: [round.failed, again.failed].concat(), ..again };
    }
    let suspects: Vec<NodeName> = round.failed.into_iter().filter(|node| !round.good.contains(node)).collect();
    let suspects: Vec<NodeName> = nodes.iter().filter(|node| suspects.contains(node)).cloned().collect();
    match round.silent {
        _ if !round.wanted.is_empty() => Next::Try(round.wanted, found(round.bad, Vec::new()).unwrap_or_else(unknown)),
        _ if round.underway => Next::Wait,
        _ if !round.bad.is_empty() => Next::Over(Found::Nodes(round.bad.into_iter().collect())),
        Some(why) if suspects.is_empty() => Next::Over(Found::Nothing(why)),
        _ if suspects.is_empty() => neighbours(nodes, trials),
        _ if round.good.is_empty() => Next::Over(Found::Nothing("every pair that was tested fails as well".to_owned())),
        _ => not_with_each_other(with_good_ones(&suspects, trials), &suspects),
    }
}

/// Keeps suspects from being partners of each other: one that was cleared meanwhile is still not a known-good node, and
/// a trial of two suspects is evidence about neither.
fn not_with_each_other(mut next: Next, suspects: &[NodeName]) -> Next {
    if let Next::Try(wanted, _) = &mut next {
        for wanted in wanted {
            if let Wanted::WithGood { not, .. } = wanted {
                not.extend(suspects.iter().cloned());
            }
        }
    }
    next
}

/// Pairs the nodes; with an odd number, the last is paired with the first.
fn paired(nodes: &[NodeName]) -> Vec<Vec<NodeName>> {
    let mut pairs: Vec<Vec<NodeName>> = nodes.chunks(2).map(<[NodeName]>::to_vec).collect();
    if let (Some(last), Some(first)) = (pairs.last_mut().filter(|pair| pair.len() == 1), nodes.first()) {
        last.push(first.clone());
    }
    pairs
}

/// Results of one round of pairs.
#[derive(Default)]
struct Round {
    wanted: Vec<Wanted>,
    underway: bool,
    silent: Option<String>,
    good: BTreeSet<NodeName>,
    failed: Vec<NodeName>,
    bad: BTreeSet<NodeName>,
}

impl Round {
    fn of(pairs: &[Vec<NodeName>], trials: &[Trial]) -> Self {
        let mut round = Self::default();
        for pair in pairs {
            match Known::of(trials.iter().filter(|trial| is_over(trial, pair))) {
                Known::Underway => round.underway = true,
                Known::Silent(times, _) if times < MOST_SILENT => round.wanted.push(Wanted::These(pair.clone())),
                Known::Silent(_, why) => round.silent = Some(format!("{} with {}: {why}", pair[0], pair[1])),
                Known::Said(TrialSaid::Named(named)) => round.bad.extend(named),
                Known::Said(TrialSaid::Passed) => round.good.extend(pair.iter().cloned()),
                Known::Said(_) => round.failed.extend(pair.iter().cloned()),
            }
        }
        round
    }

    const fn is_over(&self) -> bool {
        self.wanted.is_empty() && !self.underway
    }
}

/// Results of the pairs of one node with known-good nodes.
#[derive(Default)]
struct Pairs {
    underway: bool,
    passed: bool,
    failed: Vec<NodeName>,
    /// Partners whose trial had a result.
    heard: BTreeSet<NodeName>,
    silent: Vec<String>,
    named: BTreeSet<NodeName>,
}

impl Pairs {
    fn of(node: &NodeName, nodes: &[NodeName], trials: &[Trial]) -> Self {
        let mut pairs = Self::default();
        for trial in trials.iter().filter(|trial| trial.nodes.len() == 2 && trial.nodes.contains(node)) {
            let Some(partner) = trial.nodes.iter().find(|other| *other != node && !nodes.contains(other)) else {
                continue;
            };
            match &trial.said {
                TrialSaid::NotYet => pairs.underway = true,
                TrialSaid::Nothing(why) => pairs.silent.push(why.clone()),
                TrialSaid::Passed => pairs.passed = true,
                TrialSaid::Failed => pairs.failed.push(partner.clone()),
                TrialSaid::Named(named) => pairs.named.extend(named.iter().cloned()),
            }
            if !matches!(trial.said, TrialSaid::NotYet | TrialSaid::Nothing(_)) {
                pairs.heard.insert(partner.clone());
            }
        }
        pairs
    }

    fn is_settled(&self, node: &NodeName) -> bool {
        self.passed || self.failed.len() >= PARTNERS || self.named.contains(node)
    }
}

fn with_good_ones(nodes: &[NodeName], trials: &[Trial]) -> Next {
    let (mut wanted, mut underway, mut silent) = (Vec::new(), false, None);
    let (mut bad, mut pairs) = (BTreeSet::new(), Vec::new());
    for node in nodes {
        let known = Pairs::of(node, nodes, trials);
        bad.extend(known.named.iter().cloned());
        if known.is_settled(node) {
            if known.passed {
                pairs.extend(known.failed.into_iter().map(|partner| (node.clone(), partner)));
            } else {
                bad.insert(node.clone());
            }
        } else if known.underway {
            underway = true;
        } else if known.silent.len() >= MOST_SILENT {
            silent = known.silent.last().map(|why| format!("{node} with another: {why}"));
        } else {
            wanted.push(Wanted::WithGood { node: node.clone(), not: known.heard });
        }
    }
    // A supposedly good node that fails with several nodes that pass with others is itself at fault.
    let partners: Vec<&NodeName> = pairs.iter().map(|(_, partner)| partner).collect();
    bad.extend(
        partners.iter().filter(|one| partners.iter().filter(|other| other == one).count() > 1).copied().cloned(),
    );
    match silent {
        _ if !wanted.is_empty() => Next::Try(wanted, found(bad, pairs).unwrap_or_else(unknown)),
        _ if underway => Next::Wait,
        _ if nodes.iter().all(|node| bad.contains(node)) => all_bad(nodes, trials, bad),
        silent => match (found(bad, pairs), silent) {
            (Some(found), _) => Next::Over(found),
            (None, Some(why)) => Next::Over(Found::Nothing(why)),
            (None, None) => neighbours(nodes, trials),
        },
    }
}

fn unknown() -> Found {
    Found::Nothing("no further trial is possible".to_owned())
}

fn found(bad: BTreeSet<NodeName>, pairs: Vec<(NodeName, NodeName)>) -> Option<Found> {
    match (bad.is_empty(), pairs.is_empty()) {
        (false, _) => Some(Found::Nodes(bad.into_iter().collect())),
        (true, false) => Some(Found::Pairs(pairs)),
        (true, true) => None,
    }
}

/// Every node fails with every partner. To rule out a common cause, two known-good partners are tested with each other.
fn all_bad(nodes: &[NodeName], trials: &[Trial], bad: BTreeSet<NodeName>) -> Next {
    let failed = trials.iter().filter(|trial| trial.nodes.len() == 2 && trial.said == TrialSaid::Failed);
    let others: BTreeSet<&NodeName> =
        failed.flat_map(|trial| trial.nodes.iter()).filter(|node| !nodes.contains(node)).collect();
    let mut others = others.into_iter().cloned();
    let (Some(one), Some(other)) = (others.next(), others.next()) else {
        return Next::Over(Found::Nodes(bad.into_iter().collect()));
    };
    let good = [one, other];
    match Known::of(trials.iter().filter(|trial| is_over(trial, &good))) {
        Known::Underway => Next::Wait,
        Known::Silent(times, _) if times < MOST_SILENT => Next::Try(vec![Wanted::These(good.to_vec())], unknown()),
        Known::Silent(_, why) => Next::Over(Found::Nothing(format!("{} with {}: {why}", good[0], good[1]))),
        Known::Said(TrialSaid::Failed) => {
            let text = format!("every pair fails, also {} with {}, which were known to be good", good[0], good[1]);
            Next::Over(Found::Nothing(text))
        }
        Known::Said(TrialSaid::Named(named)) => Next::Over(Found::Nodes(named)),
        Known::Said(_) => Next::Over(Found::Nodes(bad.into_iter().collect())),
    }
}

/// Every node passes with other partners: tests neighbours with each other.
fn neighbours(nodes: &[NodeName], trials: &[Trial]) -> Next {
    let (mut wanted, mut underway, mut silent) = (Vec::new(), false, None);
    let (mut bad, mut pairs) = (BTreeSet::new(), Vec::new());
    for pair in nodes.windows(2) {
        match Known::of(trials.iter().filter(|trial| is_over(trial, pair))) {
            Known::Underway => underway = true,
            Known::Silent(times, _) if times < MOST_SILENT => wanted.push(Wanted::These(pair.to_vec())),
            Known::Silent(_, why) => silent = Some(format!("{} with {}: {why}", pair[0], pair[1])),
            Known::Said(TrialSaid::Failed) => pairs.push((pair[0].clone(), pair[1].clone())),
            Known::Said(TrialSaid::Named(named)) => bad.extend(named),
            Known::Said(_) => {}
        }
    }
    match silent {
        _ if !wanted.is_empty() => Next::Try(wanted, found(bad, pairs).unwrap_or_else(unknown)),
        _ if underway => Next::Wait,
        silent => Next::Over(match (found(bad, pairs), silent) {
            (Some(found), _) => found,
            (None, Some(why)) => Found::Nothing(why),
            (None, None) => Found::OnlyAll,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ids::RunId, run::NonEmpty};
    use proptest::prelude::*;

    fn name(text: &str) -> NodeName {
        NodeName::new(text).unwrap()
    }

    /// Runs the requested trials until there is a conclusion. `fails` decides which nodes fail together.
    fn played(nodes: &[NodeName], fails: impl Fn(&[NodeName]) -> bool) -> (Found, Vec<Trial>) {
        let mut trials: Vec<Trial> = Vec::new();
        for _ in 0..200 {
            let wanted = match next_among(nodes, &trials) {
                Next::Over(found) => return (found, trials),
                Next::Wait => panic!("no trial is in progress"),
                Next::Try(wanted, otherwise) => (wanted, otherwise),
            };
            let mut tried = false;
            for wanted in wanted.0 {
                let over = match wanted {
                    Wanted::These(nodes) => nodes,
                    Wanted::WithGood { node, not } => {
                        let good = cleared(&trials).into_iter().find(|good| *good != node && !not.contains(good));
                        let Some(good) = good else { continue };
                        vec![node, good]
                    }
                };
                tried = true;
                let said = if fails(&over) { TrialSaid::Failed } else { TrialSaid::Passed };
                trials.push(Trial { run: RunId::from_number(0), nodes: NonEmpty::new(over).unwrap(), said });
            }
            if !tried {
                return (wanted.1, trials);
            }
        }
        panic!("the search does not end");
    }

    fn nodes(count: usize) -> Vec<NodeName> {
        (1..=count).map(|number| name(&format!("n{number}"))).collect()
    }

    #[test]
    fn one_bad_node_is_named_without_any_known_good_node() {
        for count in 3..9 {
            let nodes = nodes(count);
            for bad in &nodes {
                let (found, trials) = played(&nodes, |over| over.contains(bad));
                assert_eq!(found, Found::Nodes(vec![bad.clone()]), "{bad} of {count}");
                assert!(trials.len() <= 1 + count + 4, "{} trials for {count}", trials.len());
            }
        }
    }

    #[test]
    fn a_path_between_two_is_named_as_a_pair() {
        let nodes = nodes(6);
        let (one, other) = (&nodes[2], &nodes[3]);
        let (found, _) = played(&nodes, |over| over.contains(one) && over.contains(other));
        assert_eq!(found, Found::Pairs(vec![(one.clone(), other.clone())]));
        // Neighbours that are not in one pair in the first round.
        let (one, other) = (&nodes[1], &nodes[2]);
        let (found, _) = played(&nodes, |over| over.contains(one) && over.contains(other));
        assert_eq!(found, Found::Pairs(vec![(one.clone(), other.clone())]));
    }

    #[test]
    fn what_fails_in_every_pair_or_only_for_all_names_no_node() {
        let nodes = nodes(5);
        assert!(matches!(played(&nodes, |_| true).0, Found::Nothing(why) if why.contains("every pair")));
        assert_eq!(played(&nodes, |over| over.len() > 2).0, Found::OnlyAll);
        assert_eq!(played(&nodes, |_| false).0, Found::Well);
        assert_eq!(played(&nodes[..1], |_| true).0, Found::Nodes(vec![name("n1")]));
        assert_eq!(played(&nodes[..2], |_| true).0, Found::Pairs(vec![(name("n1"), name("n2"))]));
    }

    proptest! {
        #[test]
        fn no_healthy_node_is_named_and_it_comes_to_an_end(count in 3..10usize, bad in proptest::collection::btree_set(0..10usize, 0..3)) {
            let nodes = nodes(count);
            let bad: Vec<NodeName> = nodes.iter().enumerate().filter(|(place, _)| bad.contains(place)).map(|(_, node)| node.clone()).collect();
            let (found, _) = played(&nodes, |over| over.iter().any(|node| bad.contains(node)));
            match found {
                Found::Well => prop_assert!(bad.is_empty()),
                Found::Nodes(named) => prop_assert!(named.iter().all(|node| bad.contains(node)), "{:?} of {:?}", named, bad),
                Found::Pairs(_) | Found::OnlyAll => prop_assert!(!bad.is_empty()),
                Found::Nothing(_) => prop_assert!(bad.len() > 1),
            }
        }
    }
}
