//! Determines which instances pending user runs need. Pure.
//!
//! dstack does not preempt and, unless a run has a retry policy, does not even queue: a run that finds no instance fails. A run
//! with retries stays `pending`, and if only a run of ours is in its way, ours is cancelled. This module only checks that an
//! instance would fit; what dstack knows beyond that (prices, reservations, volumes) can only make it refuse.

use std::collections::BTreeMap;

use doctor_core::time::{Span, Timestamp};

use super::{
    api_types::{Fleet, Instance, Resources},
    run_types::{Job, Range, ResourceRequest, Run, RunStatus, Selector},
};

/// The server has tried to place a run that was submitted this long ago.
const PLACEMENT_TIME: Span = Span::from_secs(15);

/// An instance that may suit a pending run.
#[derive(Debug, Clone, Copy)]
pub(super) struct CandidateInstance<'a> {
    pub(super) fleet: &'a Fleet,
    pub(super) instance: &'a Instance,
    /// Whether a run of ours is on it.
    pub(super) has_our_run: bool,
}

/// Returns the needed instances, by name, and the run that needs each. An instance without our run is reserved for the user's;
/// one with our run is taken only if there is no other.
pub(super) fn demanded_instances(
    offers: &[CandidateInstance<'_>],
    runs: &[&Run],
    now: Timestamp,
) -> BTreeMap<String, String> {
    let mut waiting: Vec<&Run> = runs.iter().copied().filter(|run| is_waiting(run, now)).collect();
    waiting.sort_by(|one, other| (&one.submitted_at, &one.id).cmp(&(&other.submitted_at, &other.id)));
    let mut demanded = BTreeMap::new();
    for run in waiting {
        for job in run.jobs.iter().filter(|job| is_unplaced(job)) {
            let fitting = |ours: bool| {
                offers.iter().find(|offer| {
                    offer.has_our_run == ours && !demanded.contains_key(&offer.instance.name) && fits(run, job, offer)
                })
            };
            if let Some(offer) = fitting(false).or_else(|| fitting(true)) {
                demanded.insert(offer.instance.name.clone(), run.description());
            }
        }
    }
    demanded
}

fn is_waiting(run: &Run, now: Timestamp) -> bool {
    match run.status {
        // A scheduled run waits for its time.
        RunStatus::Pending => run.next_triggered_at.is_none(),
        RunStatus::Submitted => run.submitted_at.parse().is_ok_and(|at| now.since(at) >= PLACEMENT_TIME),
        _ => false,
    }
}

fn is_unplaced(job: &Job) -> bool {
    job.job_submissions.last().is_none_or(|newest| newest.job_provisioning_data.is_none())
}

fn fits(run: &Run, job: &Job, offer: &CandidateInstance<'_>) -> bool {
    let configuration = &run.run_spec.configuration;
    let in_fleet =
        configuration.fleets.as_ref().is_none_or(|fleets| fleets.iter().any(|one| one.name() == offer.fleet.name));
    let selected = configuration.instances.as_ref().is_none_or(|all| all.iter().any(|one| selects(one, offer)));
    let resources = offer.instance.instance_type.as_ref().map(|kind| &kind.resources);
    in_fleet
        && selected
        && resources.is_some_and(|available| satisfies(&job.job_spec.requirements.resources, available))
}

fn selects(selector: &Selector, offer: &CandidateInstance<'_>) -> bool {
    match selector {
        Selector::Plain(name) | Selector::Name { name } => *name == offer.instance.name,
        Selector::Hostname { hostname } => offer.instance.hostname.as_ref() == Some(hostname),
        Selector::Number { fleet, instance } => {
            fleet.name() == offer.fleet.name && *instance == offer.instance.instance_num
        }
        // No instance is released for an unknown selector.
        Selector::Other(_) => false,
    }
}

fn satisfies(request: &ResourceRequest, available: &Resources) -> bool {
    let least = |range: Option<Range>| range.and_then(|range| range.min).unwrap_or(0.0);
    let same = |one: &str, other: &Option<String>| other.as_ref().is_none_or(|other| other.eq_ignore_ascii_case(one));
    let gibibytes = |mebibytes: f64| mebibytes / 1024.0;
    let cpu = request.cpu.clone().unwrap_or_default();
    let arch = cpu.arch.as_ref().is_none_or(|arch| same(arch, &available.cpu_arch));
    let enough = f64::from(available.cpus) >= least(cpu.count)
        && gibibytes(available.memory_mib) >= least(request.memory)
        && gibibytes(available.disk.size_mib) >= least(request.disk.as_ref().and_then(|disk| disk.size));
    let Some(gpu) = &request.gpu else { return arch && enough };
    let fitting = available.gpus.iter().filter(|one| {
        let named = gpu.name.as_ref().is_none_or(|names| names.iter().any(|name| name.eq_ignore_ascii_case(&one.name)));
        let vendor = gpu.vendor.as_ref().is_none_or(|vendor| same(vendor, &one.vendor));
        named && vendor && gibibytes(one.memory_mib) >= least(gpu.memory)
    });
    #[expect(clippy::cast_precision_loss, reason = "a count of GPUs")]
    let count = fitting.count() as f64;
    arch && enough && count >= least(gpu.count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api_types::tests::{NO_CAPACITY, fleet};
    use serde_json::{Value, json};

    const NOW: &str = "2026-11-15T01:22:00Z";

    /// A user's run that found no instance and is retried, with changes.
    fn waiting(change: impl FnOnce(&mut Value)) -> Run {
        let mut run: Value = serde_json::from_str(NO_CAPACITY).unwrap();
        run["status"] = json!("pending");
        run["user"] = json!("alice");
        run["run_spec"]["configuration"]["instances"] = json!(null);
        change(&mut run);
        serde_json::from_value(run).unwrap()
    }

    /// Returns which run needs which of the fleet's three instances, of which the last two have runs of ours.
    fn demanded_by(runs: &[Run]) -> Vec<(String, String)> {
        let fleet = fleet();
        let offer = |(number, instance)| CandidateInstance { fleet: &fleet, instance, has_our_run: number > 0 };
        let offers: Vec<CandidateInstance<'_>> = fleet.instances.iter().enumerate().map(offer).collect();
        demanded_instances(&offers, &runs.iter().collect::<Vec<_>>(), NOW.parse().unwrap()).into_iter().collect()
    }

    fn one_demand(name: &str) -> Vec<(String, String)> {
        vec![(name.to_owned(), "run val5 of alice".to_owned())]
    }

    #[test]
    fn a_waiting_run_is_offered_instances_without_our_runs_first() {
        assert_eq!(demanded_by(&[waiting(|_| {})]), one_demand("bed-0"));
        let names: Vec<_> =
            demanded_by(&[waiting(|_| {}), waiting(|_| {})]).into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["bed-0", "bed-1"], "two runs want two instances");
    }

    #[test]
    fn only_a_suitable_instance_is_demanded() {
        let resources = |path: &'static str, value: Value| {
            waiting(move |run| {
                let expected = &mut run["jobs"][0]["job_spec"]["requirements"]["resources"];
                *expected.pointer_mut(path).unwrap() = value;
            })
        };
        let spec = |key: &'static str, value: Value| waiting(move |run| run["run_spec"]["configuration"][key] = value);
        for (run, expected) in [
            (resources("/gpu/count/min", json!(9)), None),
            (resources("/gpu/name", json!(["A100"])), None),
            (resources("/gpu/vendor", json!("amd")), None),
            (resources("/cpu/count/min", json!(97)), None),
            (resources("/cpu/arch", json!("arm")), None),
            (resources("/memory/min", json!(4000)), None),
            (resources("/gpu/name", json!(["h100"])), Some("bed-0")),
            (spec("fleets", json!(["other"])), None),
            (spec("fleets", json!(["main/bed"])), Some("bed-0")),
            (spec("instances", json!([{ "name": "bed-2" }])), Some("bed-2")),
            (spec("instances", json!(["bed-1"])), Some("bed-1")),
            (spec("instances", json!([{ "hostname": "10.98.0.3" }])), Some("bed-2")),
            (spec("instances", json!([{ "fleet": "bed", "instance": 1 }])), Some("bed-1")),
            (spec("instances", json!([{ "label": "x" }])), None),
        ] {
            assert_eq!(demanded_by(&[run]), expected.map(one_demand).unwrap_or_default());
        }
    }

    #[test]
    fn a_placed_scheduled_or_just_submitted_run_demands_nothing() {
        let status = |status: &'static str| waiting(move |run| run["status"] = json!(status));
        assert_eq!(demanded_by(&[status("running")]), []);
        assert_eq!(demanded_by(&[status("submitted")]), one_demand("bed-0"), "submitted long ago");
        let just = waiting(|run| {
            run["status"] = json!("submitted");
            run["submitted_at"] = json!("2026-11-15T01:21:59Z");
        });
        assert_eq!(demanded_by(&[just]), []);
        assert_eq!(demanded_by(&[waiting(|run| run["next_triggered_at"] = json!("2026-11-16T00:00:00Z"))]), []);
        let placed = waiting(|run| {
            run["jobs"][0]["job_submissions"][0]["job_provisioning_data"] = json!({ "hostname": "10.98.0.1" });
        });
        assert_eq!(demanded_by(&[placed]), []);
    }
}
