//! Tests hosts together and, if they fail, in pairs, until the faulty host or pair is identified.
//!
//! [`doctor_core::fault_localization`] decides the next trial. Trials without a common host run in parallel.

use std::{collections::BTreeSet, sync::Mutex};

use doctor_backend::ssh::run_on_each;
use doctor_core::{
    fault_localization::{FaultLocation, NextStep, TrialRequest, cleared, next_trials, next_without_known_good},
    ids::{NodeName, RunId},
    run::NonEmpty,
    snapshot::{Trial, TrialResult},
};

/// Locates the fault. `good` are known good hosts outside `hosts`; without any, hosts that pass in a pair count as
/// good. `attempt` tests some hosts together; `on_trial` is called for each finished trial.
pub fn search(
    hosts: &[NodeName],
    good: &[NodeName],
    at_once: usize,
    attempt: impl Fn(&[NodeName]) -> TrialResult + Sync,
    on_trial: impl Fn(&Trial) + Sync,
) -> (FaultLocation, Vec<Trial>) {
    let mut trials: Vec<Trial> = Vec::new();
    loop {
        let step = if good.is_empty() { next_without_known_good(hosts, &trials) } else { next_trials(hosts, &trials) };
        let (requested, otherwise) = match step {
            NextStep::Done(found) => return (found, trials),
            // Cannot happen: every trial ends before the next step is computed.
            NextStep::Wait => return (FaultLocation::Undetermined("a trial has not ended".to_owned()), trials),
            NextStep::Try(requested, otherwise) => (requested, otherwise),
        };
        let known = if good.is_empty() { cleared(&trials).into_iter().collect() } else { good.to_vec() };
        let round = disjoint_trials(&requested, &known);
        if round.is_empty() {
            return (outcome_without_partner(&requested, otherwise), trials);
        }
        // Reports are serialised.
        let output_lock = Mutex::new(());
        let results = run_on_each(
            &round,
            at_once,
            |nodes| {
                let trial = Trial { run: RunId::from_number(0), nodes: nodes.clone(), result: attempt(nodes) };
                let _one_at_a_time = output_lock.lock();
                on_trial(&trial);
                trial
            },
            |_| {},
        );
        trials.extend(results);
        // All hosts together without a result: a repetition would have the same outcome.
        if let [Trial { result: TrialResult::Inconclusive(why), .. }] = &*trials {
            return (FaultLocation::Undetermined(why.clone()), trials);
        }
    }
}

/// Selects wanted trials that have no host in common.
fn disjoint_trials(requested: &[TrialRequest], good: &[NodeName]) -> Vec<NonEmpty<NodeName>> {
    let mut taken: BTreeSet<NodeName> = BTreeSet::new();
    let mut round = Vec::new();
    for requested in requested {
        let nodes = match requested {
            TrialRequest::Nodes(nodes) => nodes.clone(),
            TrialRequest::WithKnownGood { node, not } => {
                let fits = |other: &&NodeName| *other != node && !not.contains(*other) && !taken.contains(*other);
                let Some(partner) = good.iter().find(fits) else { continue };
                vec![node.clone(), partner.clone()]
            }
        };
        if nodes.iter().any(|node| taken.contains(node)) {
            continue;
        }
        taken.extend(nodes.iter().cloned());
        round.extend(NonEmpty::new(nodes));
    }
    round
}

fn outcome_without_partner(requested: &[TrialRequest], otherwise: FaultLocation) -> FaultLocation {
    match (otherwise, requested.first()) {
        (FaultLocation::Undetermined(_), Some(TrialRequest::WithKnownGood { node, .. })) => {
            FaultLocation::Undetermined(format!("there is no other known-good host to test {node} with"))
        }
        (found, _) => found,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &str) -> Vec<NodeName> {
        doctor_core::hostlist::parse(list).unwrap()
    }

    fn found(hosts: &str, good: &str, bad: &str) -> (String, usize) {
        let good = if good.is_empty() { Vec::new() } else { names(good) };
        let attempt = |nodes: &[NodeName]| {
            if nodes.iter().any(|node| node.as_str() == bad) { TrialResult::Failed } else { TrialResult::Passed }
        };
        let (found, trials) = search(&names(hosts), &good, 4, attempt, |_| {});
        (found.to_string(), trials.len())
    }

    #[test]
    fn the_host_that_fails_with_every_partner_is_named() {
        assert_eq!(found("n[1-8]", "", "n5").0, "at fault: n5");
        assert_eq!(found("n[1-4]", "g[1-2]", "n2").0, "at fault: n2");
        assert_eq!(
            found("n[1-4]", "g1", "n2").0,
            "the fault is not located: there is no other known-good host to test n2 with"
        );
        assert_eq!(found("n[1-8]", "", "none"), ("all nodes pass together".to_owned(), 1));
    }

    #[test]
    fn concurrent_trials_share_no_host_and_inconclusive_ones_are_not_repeated() {
        let requested = [
            TrialRequest::Nodes(names("a,b")),
            TrialRequest::Nodes(names("b,c")),
            TrialRequest::WithKnownGood { node: names("d").remove(0), not: names("g").into_iter().collect() },
        ];
        let round = disjoint_trials(&requested, &names("g,a,h"));
        let round: Vec<String> = round.iter().map(|nodes| doctor_core::hostlist::fold(nodes)).collect();
        assert_eq!(round, ["a,b", "d,h"]);
        let (found, trials) =
            search(&names("n[1-4]"), &[], 2, |_| TrialResult::Inconclusive("no mpirun".to_owned()), |_| {});
        assert_eq!((found.to_string().as_str(), trials.len()), ("the fault is not located: no mpirun", 1));
    }
}
