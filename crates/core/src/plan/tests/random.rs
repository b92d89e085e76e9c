//! Random consistent clusters, and random events.

use proptest::{collection::vec, option, prelude::*, sample::select};

use super::{
    cluster::{
        Cluster, NOW, NodeFixture, Spans, bad, busy, cluster, done, free, job, name, pool, run, step, test, test_id,
        unconfirmed, unknown,
    },
    model,
};
use crate::{
    access::Place,
    case::{Repair, RepairStep, Step, StepKind, StepState},
    finding::{OpenFinding, Severity, Verdict},
    lifecycle::NodeState,
    node::{Hold, MarkKind, Occupancy, OurMark},
    policy::{Allow, Day, Mode, Policy, TestPolicy, TimeOfDay, Window, WindowKind},
    run::{CancelReason, JobEnd, ObservedJobState},
    snapshot::{Breaker, Capabilities, CommandKind, Snapshot},
    time::{Span, Timestamp},
};

const TESTS: [&str; 4] = ["dl", "nccl", "storage", "gpu-health"];
const POOLS: [&str; 2] = ["gpu", "other"];

/// Four tests: one with a limit, one with a mount and a pool of its own, one that agents run.
fn tests() -> Vec<TestPolicy> {
    let [dl, mut nccl, mut storage, gpu_health] = TESTS.map(test);
    nccl.max_concurrent = Some(2);
    nccl.cutoff = 1.days();
    storage.shares = vec!["/data".to_owned()];
    storage.pools = Some(vec![pool("gpu")]);
    vec![dl, nccl, storage, TestPolicy { place: Place::Agent, ..gpu_health }]
}

fn an_age() -> impl Strategy<Value = Span> {
    prop_oneof![(0_i64..180).prop_map(Span::minutes), (0_i64..240).prop_map(Span::hours)]
}

fn a_finding() -> impl Strategy<Value = OpenFinding> {
    (select(&TESTS[..]), select(Severity::ALL), any::<bool>(), an_age()).prop_map(|(check, severity, sure, ago)| {
        let make = if sure { bad } else { unconfirmed };
        OpenFinding { first_seen: NOW.minus(ago), last_seen: NOW.minus(ago), ..make(check, severity) }
    })
}

fn a_job() -> impl Strategy<Value = ObservedJobState> {
    (0..6, an_age(), an_age(), select(JobEnd::ALL)).prop_map(|(kind, ago, started, how)| {
        let since = NOW.minus(ago);
        match kind {
            0 => ObservedJobState::Unknown { why: "timeout".to_owned() },
            1 => ObservedJobState::Absent,
            2 => ObservedJobState::Pending { job: job(), since },
            3 => ObservedJobState::Running { job: job(), since },
            4 => ObservedJobState::Ended { job: job(), started: None, at: since, how },
            _ => ObservedJobState::Ended { job: job(), started: Some(since.minus(started)), at: since, how },
        }
    })
}

/// How a node of the random cluster is out of service, if it is.
fn out(node: NodeFixture, severity: Severity, repair_step: RepairStep, progress: u8, ago: Span) -> NodeFixture {
    let kind = match repair_step {
        RepairStep::Reset => StepKind::Reset,
        RepairStep::Reboot => StepKind::Reboot,
        RepairStep::Quarantine => StepKind::Requalify,
        RepairStep::Replace => StepKind::Replace,
    };
    let evidence = done(StepKind::SaveEvidence, repair_step, ago + 1.minutes());
    let node = node.out(severity, repair_step).since(ago);
    let repairing = NodeState::Repairing { step: kind, tries: 1 };
    match progress {
        0 => node,
        1 => node.step(evidence),
        2 => node.step(evidence).step(step(kind, repair_step, StepState::Proposed, ago)),
        3 if kind != StepKind::Requalify => node.state(repairing).step(evidence).step(done(kind, repair_step, ago)),
        4 if kind != StepKind::Requalify => {
            node.state(repairing).step(evidence).step(step(kind, repair_step, StepState::Intended, ago))
        }
        5 => node.state(NodeState::Requalifying { run: Some(crate::ids::RunId::from_number(1)) }).step(done(
            StepKind::Requalify,
            repair_step,
            ago,
        )),
        6 => node.state(NodeState::Out).step(done(StepKind::HandOver, repair_step, ago)),
        7 => node.state(NodeState::Held { by: "bob".to_owned() }),
        _ => node.step(evidence).step(step(kind, repair_step, StepState::Failed, ago)),
    }
}

fn a_node(n: usize) -> impl Strategy<Value = NodeFixture> {
    let rare = |weight: u32| prop_oneof![9 => Just(false), weight => Just(true)];
    let placement = (0..4, select(&POOLS[..]), rare(1), option::weighted(0.1, an_age()), any::<bool>());
    let past = vec((select(&TESTS[..]), select(Verdict::ALL), an_age()), 0..6);
    let health = (vec(a_finding(), 0..3), 0..10, select(Severity::ALL), select(RepairStep::ALL), 0_u8..9, an_age());
    let failed = option::weighted(0.2, (1_u16..4, an_age()));
    let rest = (option::of(an_age()), 0..6, option::weighted(0.1, 0_i64..60), rare(1), failed);
    (placement, past, health, rest).prop_map(move |(placement, past, health, rest)| {
        let (occupancy, in_pool, foreign, held, expired) = placement;
        let (findings, condition, severity, repair_step, progress, ago) = health;
        let (last_report, machine, backoff, marked, failed) = rest;
        let text = format!("n{n:02}");
        let node = match occupancy {
            0 => busy(&text),
            1 => unknown(&text),
            _ => free(&text),
        };
        let mut node = node.pool(in_pool);
        node = past.into_iter().fold(node, |node, (test, verdict, ago)| node.result(test, verdict, ago));
        node = findings.into_iter().fold(node, NodeFixture::found);
        let serial = format!("J{n}");
        node = match machine {
            0 => node,
            1 => node.shows_machine(&serial),
            2 => node.machine(&serial).shows_machine("J99"),
            3 => node.machine(&serial).boot("one"),
            _ => node.machine(&serial),
        };
        node = match condition {
            0..5 => node,
            5 => node.suspect(),
            6 => node.state(NodeState::Held { by: "ann".to_owned() }),
            _ => out(node, severity, repair_step, progress, ago),
        };
        node = if foreign { node.cordoned_by("bob") } else { node };
        node = if marked { node.marked() } else { node };
        if let Some(ago) = held {
            node = node.held("ann", expired.then(|| NOW.minus(ago)));
        }
        node = failed.into_iter().fold(node, |node, (owners, ago)| node.user_work_failed(owners, ago));
        node = backoff.into_iter().fold(node, |node, wait| node.backing_off(wait.minutes()));
        last_report.into_iter().fold(node, NodeFixture::reported)
    })
}

fn a_policy() -> impl Strategy<Value = Policy> {
    let limits = (0_u32..6, option::of(0_u32..3), option::of(0_i64..4), 1_u32..3, select(&[0_i64, 1, 5][..]));
    let may = (select(Mode::ALL), any::<[bool; 6]>());
    let breaker = (0_u32..4, select(&[5.0, 10.0, 30.0, 60.0][..]));
    let window = option::weighted(0.2, (select(WindowKind::ALL), 0_u16..24));
    (limits, may, breaker, window).prop_map(|(limits, (mode, may), breaker, window)| {
        let mut policy = Policy::built_in();
        let (jobs, in_pool, hours, per_share, ahead) = limits;
        policy.limits.renew_ahead = ahead.days();
        policy.limits.jobs = jobs.into();
        policy.limits.per_share = per_share;
        policy.limits.pools.extend(in_pool.map(|most| (pool("gpu"), most)));
        #[expect(clippy::cast_precision_loss, reason = "a few hours")]
        let hours = hours.map(|hours| hours as f64 / 2.0);
        policy.limits.node_hours_per_day = hours;
        policy.mode = mode;
        policy.repair.examine = vec![test_id(TESTS[0])];
        let [mark, drain, evict, reset, reboot, replace] = may;
        policy.allow = Allow { mark: mark || drain, drain, evict, reset, reboot, replace };
        (policy.breaker.nodes_per_hour, policy.breaker.percent_of_pool) = breaker;
        policy.windows.extend(window.map(|(kind, from)| Window {
            kind,
            pool: None,
            days: Day::ALL.to_vec(),
            from: TimeOfDay(from * 60),
            to: TimeOfDay(((from + 6) % 24) * 60),
            utc_offset_minutes: 0,
        }));
        policy
    })
}

fn a_wish(nodes: usize) -> impl Strategy<Value = CommandKind> {
    (0..nodes, 0..6, select(&TESTS[..]), select(Repair::ALL)).prop_map(|(n, kind, test, step)| {
        let node = name(&format!("n{n:02}"));
        match kind {
            0 => CommandKind::Test { node, tests: vec![test_id(test)], run: None },
            1 => CommandKind::Release { node },
            2 => CommandKind::Quarantine { node, evict: test == TESTS[0] },
            3 | 4 => CommandKind::Repair { node, step, evict: test == TESTS[0] },
            _ => CommandKind::CancelRun { run: super::cluster::run_of(node.as_str()) },
        }
    })
}

/// A cluster in operation: states, cases, marks, runs and results that are consistent with each other.
pub(super) fn a_cluster() -> impl Strategy<Value = Cluster> {
    (1_usize..10).prop_flat_map(|count| {
        let nodes: Vec<_> = (0..count).map(|n| a_node(n).boxed()).collect();
        let runs = vec(option::weighted(0.3, (a_job(), select(&TESTS[..]), option::weighted(0.3, an_age()))), count);
        let rest = (any::<bool>(), an_age(), any::<bool>(), option::weighted(0.1, an_age()));
        let wishes = vec(a_wish(count), 0..3);
        (nodes, runs, a_policy(), rest, wishes).prop_map(|(nodes, runs, policy, rest, wishes)| {
            let mut cluster = cluster().tests(tests()).policy(|standard| *standard = policy);
            for node in nodes {
                cluster = cluster.node(node);
            }
            for (n, active) in runs.into_iter().enumerate() {
                let Some((seen, test, cancelled)) = active else { continue };
                cluster = cluster.run(run(&format!("n{n:02}"), &[test], seen));
                if let Some(ago) = cancelled {
                    cluster = cluster.cancelling(CancelReason::NodeTaken, ago);
                }
            }
            let (open, spent, silence, paused) = rest;
            if let Some(ago) = paused {
                cluster = cluster.paused(None, Some(NOW.minus(ago).plus(1.hours())));
            }
            cluster.snapshot.spent = Span::from_millis(spent.millis() / 50);
            cluster.snapshot.silence_reported = silence;
            if open {
                cluster.snapshot.breaker = Breaker::Open { since: NOW, why: "enough".to_owned() };
            }
            wishes.into_iter().fold(cluster, Cluster::asks)
        })
    })
}

/// A new, healthy cluster in which everything is allowed.
pub(super) fn a_young_cluster() -> impl Strategy<Value = Cluster> {
    (2_usize..9, any::<bool>()).prop_map(|(count, small_steps)| {
        let cluster = super::cluster::acting().tests(tests()).caps(Capabilities::ALL).policy(|policy| {
            policy.breaker.percent_of_pool = 60.0;
            policy.limits.jobs = if small_steps { 1 } else { 5 }.into();
        });
        (0..count)
            .fold(cluster, |cluster, n| cluster.node(free(&format!("n{n:02}")).machine(&format!("J{n}")).boot("one")))
    })
}

/// An event between two plans.
#[derive(Debug, Clone)]
pub(super) enum ClusterEvent {
    Wait(Span),
    /// The controller's clock is set back.
    ClockBack(Span),
    Occupied(usize, u8),
    JobStarts(usize),
    JobEnds(usize, JobEnd),
    JobVanishes(usize),
    BackendSilent(usize),
    Result(usize, Verdict),
    Found(usize, OpenFinding),
    Cleared(usize),
    Cordoned(usize),
    Uncordoned(usize),
    OurMarksRemoved(usize),
    MarkAppears(usize),
    Held(usize, Option<Span>),
    Unheld(usize),
    Exchanged(usize, usize),
    Rebooted(usize),
    Heard(usize),
    /// An agent reports this result of all tests that it runs.
    AgentResult(usize, Verdict),
    Asked(CommandKind),
    BreakerClosed,
    Paused(Span),
    /// The controller was killed after the commit of a requested repair: before it was sent, or right after.
    KilledAtRepair(usize, bool),
}

pub(super) fn an_event() -> impl Strategy<Value = ClusterEvent> {
    use ClusterEvent as E;
    let n = 0_usize..9;
    prop_oneof![
        6 => an_age().prop_map(E::Wait),
        1 => (0_i64..90).prop_map(|minutes| E::ClockBack(minutes.minutes())),
        6 => (n.clone(), 0_u8..5).prop_map(|(n, how)| E::Occupied(n, how)),
        6 => n.clone().prop_map(E::JobStarts),
        8 => (n.clone(), select(Verdict::ALL)).prop_map(|(n, verdict)| E::Result(n, verdict)),
        1 => (n.clone(), select(JobEnd::ALL)).prop_map(|(n, how)| E::JobEnds(n, how)),
        1 => n.clone().prop_map(E::JobVanishes),
        1 => n.clone().prop_map(E::BackendSilent),
        4 => (n.clone(), a_finding()).prop_map(|(n, open)| E::Found(n, open)),
        1 => n.clone().prop_map(E::Cleared),
        1 => n.clone().prop_map(E::Cordoned),
        2 => n.clone().prop_map(E::Uncordoned),
        1 => n.clone().prop_map(E::OurMarksRemoved),
        1 => n.clone().prop_map(E::MarkAppears),
        1 => (n.clone(), option::of(an_age())).prop_map(|(n, wait)| E::Held(n, wait)),
        2 => n.clone().prop_map(E::Unheld),
        2 => (n.clone(), 0_usize..12).prop_map(|(n, machine)| E::Exchanged(n, machine)),
        1 => n.clone().prop_map(E::Rebooted),
        3 => n.clone().prop_map(E::Heard),
        3 => (n, select(Verdict::ALL)).prop_map(|(n, verdict)| E::AgentResult(n, verdict)),
        3 => a_wish(9).prop_map(E::Asked),
        1 => Just(E::BreakerClosed),
        1 => an_age().prop_map(E::Paused),
        2 => (0_usize..9, any::<bool>()).prop_map(|(n, sent)| E::KilledAtRepair(n, sent)),
    ]
}

/// Applies the event. An impossible one (about a job or node that does not exist) has no effect.
pub(super) fn apply_event(cluster: &mut Cluster, event: &ClusterEvent) {
    use ClusterEvent as E;
    let snapshot = &mut cluster.snapshot;
    match event {
        E::Wait(span) => snapshot.at = snapshot.at.plus(*span),
        E::ClockBack(span) => snapshot.at = snapshot.at.minus(*span),
        E::JobStarts(n) | E::JobVanishes(n) | E::BackendSilent(n) | E::JobEnds(n, _) | E::Result(n, _) => {
            apply_job_event(snapshot, *n, event);
        }
        E::Asked(what) => cluster.ask(what.clone()),
        E::BreakerClosed => snapshot.breaker = Breaker::Closed { since: Some(snapshot.at) },
        E::Paused(span) => {
            let until = Some(snapshot.at.plus(*span));
            *cluster = cluster.clone().paused(Some(pool("gpu")), until);
        }
        E::KilledAtRepair(n, sent) => kill_at_repair(snapshot, *n, *sent),
        E::Occupied(n, _)
        | E::Found(n, _)
        | E::Cleared(n)
        | E::Cordoned(n)
        | E::Uncordoned(n)
        | E::OurMarksRemoved(n)
        | E::MarkAppears(n)
        | E::Held(n, _)
        | E::Unheld(n)
        | E::Exchanged(n, _)
        | E::Rebooted(n)
        | E::AgentResult(n, _)
        | E::Heard(n) => apply_node_event(snapshot, *n, event),
    }
}

fn kill_at_repair(snapshot: &mut Snapshot, n: usize, sent: bool) {
    let Some(NodeState::Repairing { .. }) = snapshot.nodes.get(n).map(|record| &record.state) else { return };
    let of_node = snapshot.nodes[n].case;
    let Some(case) = snapshot.cases.iter_mut().find(|case| Some(case.id) == of_node) else { return };
    let Some(op) = case.requested_repair().map(|(_, repair)| repair.op) else { return };
    let done = |step: &&mut Step| step.op == op && step.state == StepState::Done;
    let Some(step) = case.steps.iter_mut().find(done) else { return };
    step.state = StepState::Intended;
    if let Some(repair) = case.repair_with_op_mut(op).filter(|_| !sent) {
        repair.sent = None;
    }
}

fn apply_node_event(snapshot: &mut Snapshot, n: usize, event: &ClusterEvent) {
    use ClusterEvent as E;
    let at = snapshot.at;
    if let E::AgentResult(_, verdict) = event {
        if let Some(name) = snapshot.nodes.get(n).map(|record| record.node.name.clone()) {
            model::agent_reports(snapshot, &name, *verdict);
        }
        return;
    }
    let Some(record) = snapshot.nodes.get_mut(n) else { return };
    let marks = &mut record.node_mut().marks;
    match event {
        E::Occupied(_, how) => record.node_mut().occupancy = occupancy(*how),
        E::Found(_, open) => {
            record.findings.retain(|known| known.finding.check != open.finding.check);
            record.findings.push(OpenFinding { first_seen: at, last_seen: at, ..open.clone() });
        }
        E::Cleared(_) => record.findings.clear(),
        E::Cordoned(_) if marks.foreign.is_empty() => marks.foreign.push(super::cluster::cordon_of("bob")),
        E::Uncordoned(_) => marks.foreign.clear(),
        E::OurMarksRemoved(_) => marks.ours.clear(),
        E::MarkAppears(_) if marks.ours.is_empty() => {
            marks.ours.push(OurMark { kind: MarkKind::Unhealthy, case: None });
        }
        E::Held(_, wait) => {
            let until = wait.map(|wait| at.plus(wait));
            record.hold = Some(Hold { by: "ann".to_owned(), why: "my turn".to_owned(), since: at, until });
        }
        E::Unheld(_) => record.hold = None,
        E::Exchanged(_, machine) => {
            std::sync::Arc::make_mut(record.node_mut().hardware.get_or_insert_default()).board_serial =
                Some(format!("J{machine}"));
        }
        E::Rebooted(_) => {
            let hardware = std::sync::Arc::make_mut(record.node_mut().hardware.get_or_insert_default());
            hardware.boot_id = Some(at.millis().to_string());
        }
        E::Heard(_) => record.last_report = Some(at),
        _ => {}
    }
}

pub(super) fn occupancy(how: u8) -> Occupancy {
    match how {
        0 => Occupancy::Busy { by: "user job 8".into() },
        1 => Occupancy::Unknown { why: "no answer".into() },
        _ => Occupancy::Free,
    }
}

fn apply_job_event(snapshot: &mut Snapshot, n: usize, event: &ClusterEvent) {
    use ClusterEvent as E;
    let at = snapshot.at;
    let Some(active) = snapshot.runs.get_mut(n) else { return };
    let (id, node) = (active.run.id, active.run.nodes.first().clone());
    let over = matches!(active.job, ObservedJobState::Ended { .. });
    match event {
        E::JobStarts(_) if matches!(active.job, ObservedJobState::Pending { .. }) => model::start(snapshot, id),
        E::JobEnds(_, how) if !over => {
            active.job = ObservedJobState::Ended { job: job(), started: active.started, at, how: *how };
        }
        E::JobVanishes(_) => {
            active.job = ObservedJobState::Absent;
            active.absent_since = Some(at);
        }
        E::BackendSilent(_) => active.job = ObservedJobState::Unknown { why: "timeout".to_owned() },
        E::Result(_, verdict) if active.started.is_some() && snapshot.nodes.iter().any(|r| r.node.name == node) => {
            let verdict = *verdict;
            model::finish(snapshot, &node, |_| verdict);
        }
        _ => {}
    }
}

/// Later than every time in the fixtures.
pub(super) fn long_after(at: Timestamp) -> Timestamp {
    at.plus(60.days())
}
