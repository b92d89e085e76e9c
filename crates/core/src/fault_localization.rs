//! Fault localisation: which node is at fault when several nodes fail together, found by testing them in pairs.
//!
//! The next trial depends only on the results so far, never on state kept in memory. Nothing here starts a trial: the
//! planner does ([`crate::plan`]) where a controller manages the nodes, and an operator's command otherwise.

use std::{collections::BTreeSet, fmt};

use crate::{
    ids::NodeName,
    run::IncompleteReason,
    snapshot::{Trial, TrialResult},
};

/// How many trials of the same nodes may end without a result before the search gives up.
const MAX_INCONCLUSIVE_TRIALS: usize = 3;
/// Partners with which a node must fail before it is at fault itself.
const PARTNERS: usize = 2;

/// The next trials, or the conclusion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextStep {
    /// Run these trials; the second value is the conclusion if they cannot run.
    Try(Vec<TrialRequest>, FaultLocation),
    /// Trials are in progress.
    Wait,
    Done(FaultLocation),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrialRequest {
    Nodes(Vec<NodeName>),
    /// This node with a known-good partner that is not in `not`.
    WithKnownGood {
        node: NodeName,
        not: BTreeSet<NodeName>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FaultLocation {
    NoFault,
    Nodes(Vec<NodeName>),
    Pairs(Vec<(NodeName, NodeName)>),
    /// Every pair passes, but all nodes together fail.
    OnlyTogether,
    Undetermined(String),
}

/// The conclusion, as it is shown to operators.
impl fmt::Display for FaultLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoFault => f.write_str("all nodes pass together"),
            Self::OnlyTogether => f.write_str("the nodes fail only all together: every pair passes"),
            Self::Undetermined(why) => write!(f, "the fault is not located: {why}"),
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
enum TrialHistory {
    Concluded(TrialResult),
    Underway,
    /// Number of tries without a result, and the reason of the last one.
    Inconclusive(usize, String),
}

impl TrialHistory {
    fn of<'a>(trials: impl Iterator<Item = &'a Trial>) -> Self {
        let mut known = Self::Inconclusive(0, String::new());
        for trial in trials {
            match (&trial.result, &mut known) {
                (TrialResult::Pending, _) => return Self::Underway,
                (TrialResult::Inconclusive(why), Self::Inconclusive(times, last)) => {
                    *times += 1;
                    last.clone_from(why);
                }
                (TrialResult::Inconclusive(_), _) => {}
                (result, _) => known = Self::Concluded(result.clone()),
            }
        }
        known
    }
}

fn is_over(trial: &Trial, nodes: &[NodeName]) -> bool {
    trial.nodes.len() == nodes.len() && nodes.iter().all(|node| trial.nodes.contains(node))
}

/// Returns the next trials for these nodes, if known-good nodes are available as partners.
pub fn next_trials(nodes: &[NodeName], trials: &[Trial]) -> NextStep {
    test_all(nodes, trials).unwrap_or_else(|| with_known_good(nodes, trials))
}

/// Returns the next trials if no node is known to be good: the nodes are paired with each other, and a node that passes
/// in a pair serves as a partner for the others.
pub fn next_without_known_good(nodes: &[NodeName], trials: &[Trial]) -> NextStep {
    test_all(nodes, trials).unwrap_or_else(|| in_pairs(nodes, trials))
}

/// Returns the nodes that passed in a pair, sorted by name.
pub fn cleared(trials: &[Trial]) -> BTreeSet<NodeName> {
    let passed = trials.iter().filter(|trial| trial.nodes.len() == 2 && trial.result == TrialResult::Passed);
    passed.flat_map(|trial| trial.nodes.iter().cloned()).collect()
}

/// Tests all nodes together. `None`: they failed, and the fault is not localised.
fn test_all(nodes: &[NodeName], trials: &[Trial]) -> Option<NextStep> {
    let withdrawn = TrialResult::Inconclusive(IncompleteReason::Withdrawn.code().to_owned());
    if trials.iter().any(|trial| trial.result == withdrawn) {
        return Some(NextStep::Done(FaultLocation::Undetermined("an operator withdrew it".to_owned())));
    }
    match TrialHistory::of(trials.iter().filter(|trial| is_over(trial, nodes))) {
        TrialHistory::Underway => Some(NextStep::Wait),
        TrialHistory::Inconclusive(times, _) if times < MAX_INCONCLUSIVE_TRIALS => {
            Some(NextStep::Try(vec![TrialRequest::Nodes(nodes.to_vec())], undetermined()))
        }
        TrialHistory::Inconclusive(_, why) => Some(NextStep::Done(FaultLocation::Undetermined(why))),
        TrialHistory::Concluded(TrialResult::Passed) => Some(NextStep::Done(FaultLocation::NoFault)),
        TrialHistory::Concluded(TrialResult::AtFault(named)) => Some(NextStep::Done(FaultLocation::Nodes(named))),
        TrialHistory::Concluded(_) => None,
    }
}

/// All nodes fail together: tests them in pairs. If no pair passes, they are paired differently once more.
fn in_pairs(nodes: &[NodeName], trials: &[Trial]) -> NextStep {
    match nodes {
        [] | [_] => return NextStep::Done(FaultLocation::Nodes(nodes.to_vec())),
        [one, other] => return NextStep::Done(FaultLocation::Pairs(vec![(one.clone(), other.clone())])),
        _ => {}
    }
    let mut rotated = nodes.to_vec();
    rotated.rotate_left(1);
    let mut round = Round::of(&paired(nodes), trials);
    if round.is_complete() && round.good.is_empty() && round.bad.is_empty() {
        let again = Round::of(&paired(&rotated), trials);
        round = Round { failed: [round.failed, again.failed].concat(), ..again };
    }
    let suspects: Vec<NodeName> = round.failed.into_iter().filter(|node| !round.good.contains(node)).collect();
    let suspects: Vec<NodeName> = nodes.iter().filter(|node| suspects.contains(node)).cloned().collect();
    match round.inconclusive {
        _ if !round.requests.is_empty() => {
            NextStep::Try(round.requests, fault_location(round.bad, Vec::new()).unwrap_or_else(undetermined))
        }
        _ if round.underway => NextStep::Wait,
        _ if !round.bad.is_empty() => NextStep::Done(FaultLocation::Nodes(round.bad.into_iter().collect())),
        Some(why) if suspects.is_empty() => NextStep::Done(FaultLocation::Undetermined(why)),
        _ if suspects.is_empty() => neighbours(nodes, trials),
        _ if round.good.is_empty() => {
            NextStep::Done(FaultLocation::Undetermined("every pair that was tested fails as well".to_owned()))
        }
        _ => exclude_suspects(with_known_good(&suspects, trials), &suspects),
    }
}

/// Keeps suspects from being partners of each other: one that was cleared meanwhile is still not a known-good node, and
/// a trial of two suspects is evidence about neither.
fn exclude_suspects(mut next: NextStep, suspects: &[NodeName]) -> NextStep {
    if let NextStep::Try(requests, _) = &mut next {
        for request in requests {
            if let TrialRequest::WithKnownGood { not, .. } = request {
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
    requests: Vec<TrialRequest>,
    underway: bool,
    inconclusive: Option<String>,
    good: BTreeSet<NodeName>,
    failed: Vec<NodeName>,
    bad: BTreeSet<NodeName>,
}

impl Round {
    fn of(pairs: &[Vec<NodeName>], trials: &[Trial]) -> Self {
        let mut round = Self::default();
        for pair in pairs {
            match TrialHistory::of(trials.iter().filter(|trial| is_over(trial, pair))) {
                TrialHistory::Underway => round.underway = true,
                TrialHistory::Inconclusive(times, _) if times < MAX_INCONCLUSIVE_TRIALS => {
                    round.requests.push(TrialRequest::Nodes(pair.clone()));
                }
                TrialHistory::Inconclusive(_, why) => {
                    round.inconclusive = Some(format!("{} with {}: {why}", pair[0], pair[1]));
                }
                TrialHistory::Concluded(TrialResult::AtFault(named)) => round.bad.extend(named),
                TrialHistory::Concluded(TrialResult::Passed) => round.good.extend(pair.iter().cloned()),
                TrialHistory::Concluded(_) => round.failed.extend(pair.iter().cloned()),
            }
        }
        round
    }

    const fn is_complete(&self) -> bool {
        self.requests.is_empty() && !self.underway
    }
}

/// Results of the pairs of one node with known-good nodes.
#[derive(Default)]
struct PartnerTrials {
    underway: bool,
    passed: bool,
    failed: Vec<NodeName>,
    /// Partners whose trial had a result.
    partners: BTreeSet<NodeName>,
    inconclusive: Vec<String>,
    at_fault: BTreeSet<NodeName>,
}

impl PartnerTrials {
    fn of(node: &NodeName, nodes: &[NodeName], trials: &[Trial]) -> Self {
        let mut pairs = Self::default();
        for trial in trials.iter().filter(|trial| trial.nodes.len() == 2 && trial.nodes.contains(node)) {
            let Some(partner) = trial.nodes.iter().find(|other| *other != node && !nodes.contains(other)) else {
                continue;
            };
            match &trial.result {
                TrialResult::Pending => pairs.underway = true,
                TrialResult::Inconclusive(why) => pairs.inconclusive.push(why.clone()),
                TrialResult::Passed => pairs.passed = true,
                TrialResult::Failed => pairs.failed.push(partner.clone()),
                TrialResult::AtFault(named) => pairs.at_fault.extend(named.iter().cloned()),
            }
            if !matches!(trial.result, TrialResult::Pending | TrialResult::Inconclusive(_)) {
                pairs.partners.insert(partner.clone());
            }
        }
        pairs
    }

    fn is_decided(&self, node: &NodeName) -> bool {
        self.passed || self.failed.len() >= PARTNERS || self.at_fault.contains(node)
    }
}

fn with_known_good(nodes: &[NodeName], trials: &[Trial]) -> NextStep {
    let (mut requests, mut underway, mut inconclusive) = (Vec::new(), false, None);
    let (mut bad, mut pairs) = (BTreeSet::new(), Vec::new());
    for node in nodes {
        let known = PartnerTrials::of(node, nodes, trials);
        bad.extend(known.at_fault.iter().cloned());
        if known.is_decided(node) {
            if known.passed {
                pairs.extend(known.failed.into_iter().map(|partner| (node.clone(), partner)));
            } else {
                bad.insert(node.clone());
            }
        } else if known.underway {
            underway = true;
        } else if known.inconclusive.len() >= MAX_INCONCLUSIVE_TRIALS {
            inconclusive = known.inconclusive.last().map(|why| format!("{node} with another: {why}"));
        } else {
            requests.push(TrialRequest::WithKnownGood { node: node.clone(), not: known.partners });
        }
    }
    // A supposedly good node that fails with several nodes that pass with others is itself at fault.
    let partners: Vec<&NodeName> = pairs.iter().map(|(_, partner)| partner).collect();
    bad.extend(
        partners.iter().filter(|one| partners.iter().filter(|other| other == one).count() > 1).copied().cloned(),
    );
    match inconclusive {
        _ if !requests.is_empty() => NextStep::Try(requests, fault_location(bad, pairs).unwrap_or_else(undetermined)),
        _ if underway => NextStep::Wait,
        _ if nodes.iter().all(|node| bad.contains(node)) => rule_out_common_cause(nodes, trials, bad),
        inconclusive => match (fault_location(bad, pairs), inconclusive) {
            (Some(found), _) => NextStep::Done(found),
            (None, Some(why)) => NextStep::Done(FaultLocation::Undetermined(why)),
            (None, None) => neighbours(nodes, trials),
        },
    }
}

fn undetermined() -> FaultLocation {
    FaultLocation::Undetermined("no further trial is possible".to_owned())
}

fn fault_location(bad: BTreeSet<NodeName>, pairs: Vec<(NodeName, NodeName)>) -> Option<FaultLocation> {
    match (bad.is_empty(), pairs.is_empty()) {
        (false, _) => Some(FaultLocation::Nodes(bad.into_iter().collect())),
        (true, false) => Some(FaultLocation::Pairs(pairs)),
        (true, true) => None,
    }
}

/// Every node fails with every partner. To rule out a common cause, two known-good partners are tested with each other.
fn rule_out_common_cause(nodes: &[NodeName], trials: &[Trial], bad: BTreeSet<NodeName>) -> NextStep {
    let failed = trials.iter().filter(|trial| trial.nodes.len() == 2 && trial.result == TrialResult::Failed);
    let others: BTreeSet<&NodeName> =
        failed.flat_map(|trial| trial.nodes.iter()).filter(|node| !nodes.contains(node)).collect();
    let mut others = others.into_iter().cloned();
    let (Some(one), Some(other)) = (others.next(), others.next()) else {
        return NextStep::Done(FaultLocation::Nodes(bad.into_iter().collect()));
    };
    let good = [one, other];
    match TrialHistory::of(trials.iter().filter(|trial| is_over(trial, &good))) {
        TrialHistory::Underway => NextStep::Wait,
        TrialHistory::Inconclusive(times, _) if times < MAX_INCONCLUSIVE_TRIALS => {
            NextStep::Try(vec![TrialRequest::Nodes(good.to_vec())], undetermined())
        }
        TrialHistory::Inconclusive(_, why) => {
            NextStep::Done(FaultLocation::Undetermined(format!("{} with {}: {why}", good[0], good[1])))
        }
        TrialHistory::Concluded(TrialResult::Failed) => {
            let text = format!("every pair fails, also {} with {}, which were known to be good", good[0], good[1]);
            NextStep::Done(FaultLocation::Undetermined(text))
        }
        TrialHistory::Concluded(TrialResult::AtFault(named)) => NextStep::Done(FaultLocation::Nodes(named)),
        TrialHistory::Concluded(_) => NextStep::Done(FaultLocation::Nodes(bad.into_iter().collect())),
    }
}

/// Every node passes with other partners: tests neighbours with each other.
fn neighbours(nodes: &[NodeName], trials: &[Trial]) -> NextStep {
    let (mut requests, mut underway, mut inconclusive) = (Vec::new(), false, None);
    let (mut bad, mut pairs) = (BTreeSet::new(), Vec::new());
    for pair in nodes.windows(2) {
        match TrialHistory::of(trials.iter().filter(|trial| is_over(trial, pair))) {
            TrialHistory::Underway => underway = true,
            TrialHistory::Inconclusive(times, _) if times < MAX_INCONCLUSIVE_TRIALS => {
                requests.push(TrialRequest::Nodes(pair.to_vec()));
            }
            TrialHistory::Inconclusive(_, why) => inconclusive = Some(format!("{} with {}: {why}", pair[0], pair[1])),
            TrialHistory::Concluded(TrialResult::Failed) => pairs.push((pair[0].clone(), pair[1].clone())),
            TrialHistory::Concluded(TrialResult::AtFault(named)) => bad.extend(named),
            TrialHistory::Concluded(_) => {}
        }
    }
    match inconclusive {
        _ if !requests.is_empty() => NextStep::Try(requests, fault_location(bad, pairs).unwrap_or_else(undetermined)),
        _ if underway => NextStep::Wait,
        inconclusive => NextStep::Done(match (fault_location(bad, pairs), inconclusive) {
            (Some(found), _) => found,
            (None, Some(why)) => FaultLocation::Undetermined(why),
            (None, None) => FaultLocation::OnlyTogether,
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
    fn run_trials(nodes: &[NodeName], fails: impl Fn(&[NodeName]) -> bool) -> (FaultLocation, Vec<Trial>) {
        let mut trials: Vec<Trial> = Vec::new();
        for _ in 0..200 {
            let (requests, otherwise) = match next_without_known_good(nodes, &trials) {
                NextStep::Done(found) => return (found, trials),
                NextStep::Wait => panic!("no trial is in progress"),
                NextStep::Try(requests, otherwise) => (requests, otherwise),
            };
            let mut tried = false;
            for request in requests {
                let over = match request {
                    TrialRequest::Nodes(nodes) => nodes,
                    TrialRequest::WithKnownGood { node, not } => {
                        let good = cleared(&trials).into_iter().find(|good| *good != node && !not.contains(good));
                        let Some(good) = good else { continue };
                        vec![node, good]
                    }
                };
                tried = true;
                let result = if fails(&over) { TrialResult::Failed } else { TrialResult::Passed };
                trials.push(Trial { run: RunId::from_number(0), nodes: NonEmpty::new(over).unwrap(), result });
            }
            if !tried {
                return (otherwise, trials);
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
                let (found, trials) = run_trials(&nodes, |over| over.contains(bad));
                assert_eq!(found, FaultLocation::Nodes(vec![bad.clone()]), "{bad} of {count}");
                assert!(trials.len() <= 1 + count + 4, "{} trials for {count}", trials.len());
            }
        }
    }

    #[test]
    fn a_path_between_two_is_named_as_a_pair() {
        let nodes = nodes(6);
        let (one, other) = (&nodes[2], &nodes[3]);
        let (found, _) = run_trials(&nodes, |over| over.contains(one) && over.contains(other));
        assert_eq!(found, FaultLocation::Pairs(vec![(one.clone(), other.clone())]));
        // Neighbours that are not in one pair in the first round.
        let (one, other) = (&nodes[1], &nodes[2]);
        let (found, _) = run_trials(&nodes, |over| over.contains(one) && over.contains(other));
        assert_eq!(found, FaultLocation::Pairs(vec![(one.clone(), other.clone())]));
    }

    #[test]
    fn what_fails_in_every_pair_or_only_for_all_names_no_node() {
        let nodes = nodes(5);
        assert!(
            matches!(run_trials(&nodes, |_| true).0, FaultLocation::Undetermined(why) if why.contains("every pair"))
        );
        assert_eq!(run_trials(&nodes, |over| over.len() > 2).0, FaultLocation::OnlyTogether);
        assert_eq!(run_trials(&nodes, |_| false).0, FaultLocation::NoFault);
        assert_eq!(run_trials(&nodes[..1], |_| true).0, FaultLocation::Nodes(vec![name("n1")]));
        assert_eq!(run_trials(&nodes[..2], |_| true).0, FaultLocation::Pairs(vec![(name("n1"), name("n2"))]));
    }

    proptest! {
        #[test]
        fn no_healthy_node_is_named_and_the_search_terminates(count in 3..10usize, bad in proptest::collection::btree_set(0..10usize, 0..3)) {
            let nodes = nodes(count);
            let bad: Vec<NodeName> = nodes.iter().enumerate().filter(|(index, _)| bad.contains(index)).map(|(_, node)| node.clone()).collect();
            let (found, _) = run_trials(&nodes, |over| over.iter().any(|node| bad.contains(node)));
            match found {
                FaultLocation::NoFault => prop_assert!(bad.is_empty()),
                FaultLocation::Nodes(named) => prop_assert!(named.iter().all(|node| bad.contains(node)), "{:?} of {:?}", named, bad),
                FaultLocation::Pairs(_) | FaultLocation::OnlyTogether => prop_assert!(!bad.is_empty()),
                FaultLocation::Undetermined(_) => prop_assert!(bad.len() > 1),
            }
        }
    }
}
