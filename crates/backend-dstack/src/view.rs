//! Combines a project's instances and runs: what is on each instance, and what is pending. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use doctor_backend::ObservedNode;
use doctor_core::{
    ids::{NodeName, PoolName, RunId, Sku},
    node::{Marks, Node, NodeOverrides, Occupancy},
    time::Timestamp,
};

use super::{
    api_types::{Fleet, Health, Instance, InstanceStatus, run_of},
    config::DstackConfig,
    occupancy::{IdleTermination, InstanceContext, foreign_marks, occupancy},
    pending_demand::{CandidateInstance, demanded_instances},
    replace::manual_steps,
    run_types::{Run, Selector},
    ssh_fallback::{SshState, Usage, is_skipped_by_dstack, is_unused},
};

/// dstack's type name for every host of an SSH fleet.
const SSH_INSTANCE_TYPE: &str = "instance";

/// The state of a project at one time.
#[derive(Debug)]
pub(super) struct View<'a> {
    pub(super) fleets: &'a [Fleet],
    /// Active and pending runs.
    pub(super) runs: &'a [Run],
    /// The user of our token, who owns our runs.
    pub(super) user: &'a str,
    pub(super) now: Timestamp,
    /// When dstack terminates idle instances, by instance id.
    pub(super) idle_terminations: &'a BTreeMap<String, IdleTermination>,
    /// dstack's health messages, by instance id.
    pub(super) health_messages: &'a BTreeMap<String, String>,
    /// The results of SSH queries of instances on which dstack starts nothing, by name.
    pub(super) ssh_states: &'a BTreeMap<String, SshState>,
}

impl View<'_> {
    /// Returns every instance whose name is valid as a node name.
    pub(super) fn seen_nodes(&self, config: &DstackConfig) -> Vec<ObservedNode> {
        let mut contexts = self.contexts();
        let offers: Vec<CandidateInstance<'_>> = self.candidates(&contexts).collect();
        let users: Vec<&Run> = self.runs.iter().filter(|run| self.our_run(run).is_none()).collect();
        for (name, by) in demanded_instances(&offers, &users, self.now) {
            contexts.entry(name).or_default().waiting_run = Some(by);
        }
        let all = self.fleets.iter().flat_map(|fleet| fleet.instances.iter().map(move |instance| (fleet, instance)));
        all.filter_map(|(fleet, instance)| {
            let context = contexts.remove(&instance.name).unwrap_or_default();
            self.node(fleet, instance, &context, config)
        })
        .collect()
    }

    /// Returns `None` if the instance's or the fleet's name is not valid here.
    fn node(
        &self,
        fleet: &Fleet,
        instance: &Instance,
        context: &InstanceContext,
        config: &DstackConfig,
    ) -> Option<ObservedNode> {
        let health_message = self.health_messages.get(&instance.id).map_or("", String::as_str);
        let occupancy = self.occupancy(instance, context, health_message, config);
        let type_name =
            instance.instance_type.as_ref().map(|kind| kind.name.as_str()).filter(|name| *name != SSH_INSTANCE_TYPE);
        let sku = config.skus.get(&fleet.name).cloned().or_else(|| type_name.and_then(|name| Sku::new(name).ok()));
        let node = Node {
            name: NodeName::new(&instance.name).ok()?,
            pool: PoolName::new(&fleet.name).ok()?,
            overrides: Some(Arc::new(self.apart(fleet, instance, context, &occupancy))),
            occupancy,
            marks: Marks { ours: Vec::new(), foreign: foreign_marks(instance, health_message) },
            // The job's result reports it.
            hardware: None,
            sku,
            declared: instance.instance_type.as_ref().and_then(|kind| kind.resources.declared()).map(Arc::new),
        };
        let over_ssh = self.ssh_states.get(&instance.name).into_iter().flat_map(|found| &found.runs);
        let jobs = context.our_runs.iter().chain(over_ssh).copied().collect();
        Some(ObservedNode { node: Arc::new(node), agent_last_seen: None, jobs })
    }

    /// Returns the occupancy that dstack reports, or the use found over SSH if dstack cannot tell.
    fn occupancy(
        &self,
        instance: &Instance,
        context: &InstanceContext,
        health_message: &str,
        config: &DstackConfig,
    ) -> Occupancy {
        let reported = occupancy(instance, context, health_message, (self.now, config.idle_margin));
        match (&reported, self.ssh_states.get(&instance.name).map(|found| &found.usage)) {
            (Occupancy::Unknown { .. }, Some(Usage::By(by))) => Occupancy::Busy { by: by.as_str().into() },
            _ => reported,
        }
    }

    /// Returns what can be done with the instance without dstack.
    fn apart(
        &self,
        fleet: &Fleet,
        instance: &Instance,
        context: &InstanceContext,
        occupancy: &Occupancy,
    ) -> NodeOverrides {
        let unused = is_unused(instance) && context.users.is_empty() && context.our_runs.is_empty();
        let past = unused && is_skipped_by_dstack(instance) && matches!(occupancy, Occupancy::Unknown { .. });
        let empty = self.ssh_states.get(&instance.name).is_some_and(|found| found.usage == Usage::Unused);
        // On an instance that dstack does not reach, work may still run.
        let vacant = past && instance.unreachable == Some(false);
        NodeOverrides {
            out_of_band: past && empty,
            vacant,
            manual_replacement: fleet.is_ssh().then(|| manual_steps(fleet, instance)),
        }
    }

    /// Returns our run of a dstack run. The name alone is no proof: any user may choose it.
    fn our_run(&self, run: &Run) -> Option<RunId> {
        run_of(run.name()).filter(|_| run.user == self.user)
    }

    /// Returns the runs on each instance, by name.
    fn contexts(&self) -> BTreeMap<String, InstanceContext> {
        let mut all: BTreeMap<String, InstanceContext> = BTreeMap::new();
        for instance in self.fleets.iter().flat_map(|fleet| &fleet.instances) {
            let ends = self.idle_terminations.get(&instance.id).copied().unwrap_or_default();
            all.entry(instance.name.clone()).or_default().idle_termination = ends;
        }
        let by_host: BTreeMap<&str, &str> = self
            .fleets
            .iter()
            .flat_map(|fleet| &fleet.instances)
            .filter_map(|instance| Some((instance.hostname.as_deref()?, instance.name.as_str())))
            .collect();
        for run in self.runs {
            let ours = self.our_run(run);
            let mut instances_used: BTreeSet<&str> =
                run.jobs.iter().filter_map(|job| by_host.get(job.host()?).copied()).collect();
            // A pending run of ours names its instance.
            instances_used.extend(ours.and_then(|_| pinned_instance(run)));
            for instance_name in instances_used {
                let context = all.entry(instance_name.to_owned()).or_default();
                match ours {
                    Some(id) => context.our_runs.push(id),
                    None => context.users.push(run.description()),
                }
            }
        }
        all
    }

    /// Returns the instances that a user's run could have: no other run is on them, and dstack would start one there.
    fn candidates<'a>(
        &'a self,
        contexts: &'a BTreeMap<String, InstanceContext>,
    ) -> impl Iterator<Item = CandidateInstance<'a>> {
        let usable = |instance: &Instance| {
            instance.unreachable == Some(false)
                && matches!(instance.status, InstanceStatus::Idle | InstanceStatus::Busy)
                && instance.health_status != Some(Health::Failure)
        };
        let of_fleet = move |fleet: &'a Fleet| {
            fleet.instances.iter().filter(move |instance| usable(instance)).filter_map(move |instance| {
                let context = contexts.get(&instance.name)?;
                let ours = !context.our_runs.is_empty();
                let free = instance.status == InstanceStatus::Idle && instance.busy_blocks == 0;
                (context.users.is_empty() && (ours || free)).then_some(CandidateInstance {
                    fleet,
                    instance,
                    has_our_run: ours,
                })
            })
        };
        self.fleets.iter().flat_map(of_fleet)
    }
}

/// Returns the instance for which a run of ours was submitted.
fn pinned_instance(run: &Run) -> Option<&str> {
    if run.latest_submission().is_some_and(|newest| newest.status.is_finished()) {
        return None;
    }
    match run.run_spec.configuration.instances.as_deref()? {
        [Selector::Plain(name) | Selector::Name { name }] => Some(name),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api_types::tests::{FLEETS, RUNNING};
    use serde_json::{Value, json};

    /// The captured fleet with all three instances healthy, the first of them busy.
    fn fleets() -> Vec<Fleet> {
        let mut fleets: Value = serde_json::from_str(FLEETS).unwrap();
        for instance in fleets[0]["instances"].as_array_mut().unwrap() {
            instance["unreachable"] = json!(false);
            instance["health_status"] = json!("healthy");
        }
        fleets[0]["instances"][0]["status"] = json!("busy");
        serde_json::from_value(fleets).unwrap()
    }

    /// The captured run, which is on the first instance, with changes.
    fn run(change: impl FnOnce(&mut Value)) -> Run {
        let mut run: Value = serde_json::from_str(RUNNING).unwrap();
        change(&mut run);
        serde_json::from_value(run).unwrap()
    }

    fn seen(runs: &[Run]) -> Vec<(String, Vec<RunId>)> {
        let fleets = fleets();
        let empty = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let now = "2026-11-15T01:22:00Z".parse().unwrap();
        let (ends, complaints, found) = (&empty.0, &empty.1, &empty.2);
        let view = View {
            fleets: &fleets,
            runs,
            user: "doctor",
            now,
            idle_terminations: ends,
            health_messages: complaints,
            ssh_states: found,
        };
        let word = |seen: &ObservedNode| match &seen.node.occupancy {
            Occupancy::Free => "free".to_owned(),
            Occupancy::Busy { by } => by.to_string(),
            Occupancy::Unknown { why } => format!("unknown: {why}"),
        };
        view.seen_nodes(&DstackConfig::default()).iter().map(|one| (word(one), one.jobs.clone())).collect()
    }

    fn occupancies(seen: &[(String, Vec<RunId>)]) -> Vec<&str> {
        seen.iter().map(|(word, _)| word.as_str()).collect()
    }

    #[test]
    fn a_users_run_makes_its_instance_busy_and_names_the_user() {
        assert_eq!(occupancies(&seen(&[run(|_| {})])), ["run val3 of admin", "free", "free"]);
        assert_eq!(occupancies(&seen(&[])), ["a run that is not visible to this project", "free", "free"]);
    }

    #[test]
    fn our_runs_are_recognised_by_name_and_owner() {
        let id = RunId::from_number(7);
        let ours = |user: &'static str| {
            run(move |run| {
                run["user"] = json!(user);
                run["run_spec"]["run_name"] = json!("doctor-r0000000000007");
            })
        };
        assert_eq!(seen(&[ours("doctor")])[0], ("free".to_owned(), vec![id]));
        assert_eq!(occupancies(&seen(&[ours("mallory")]))[0], "run doctor-r0000000000007 of mallory");
        // A run that has no instance yet counts on the one that it names.
        let waiting = run(|run| {
            run["user"] = json!("doctor");
            run["run_spec"]["run_name"] = json!("doctor-r0000000000007");
            run["run_spec"]["configuration"]["instances"] = json!([{ "name": "bed-2" }]);
            run["jobs"][0]["job_submissions"][0]["job_provisioning_data"] = json!(null);
            run["jobs"][0]["job_submissions"][0]["status"] = json!("submitted");
        });
        assert_eq!(seen(&[waiting])[2], ("free".to_owned(), vec![id]));
    }

    #[test]
    fn a_waiting_user_gets_a_free_instance_before_one_with_our_run() {
        let ours = run(|run| {
            run["user"] = json!("doctor");
            run["run_spec"]["run_name"] = json!("doctor-r0000000000007");
        });
        let waiting = |name: &'static str, on: Value| {
            run(move |run| {
                run["status"] = json!("pending");
                run["run_spec"]["run_name"] = json!(name);
                run["run_spec"]["configuration"]["instances"] = on;
                run["jobs"][0]["job_submissions"][0]["job_provisioning_data"] = json!(null);
            })
        };
        let any = |name| waiting(name, json!(null));
        let waits = "run a of admin, which waits for an instance";
        assert_eq!(occupancies(&seen(&[ours.clone(), any("a")])), ["free", waits, "free"]);
        let all = seen(&[ours.clone(), any("a"), any("b"), any("c")]);
        assert!(all.iter().all(|(word, _)| word.contains("which waits")), "{all:?}");
        let pinned = waiting("a", json!([{ "name": "bed-0" }]));
        assert_eq!(occupancies(&seen(&[ours, pinned])), [waits, "free", "free"]);
    }
}
