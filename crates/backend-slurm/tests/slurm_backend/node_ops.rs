//! Tests node operations: drain, requalification in a reservation, reboot, reset. Killed at any step, the node is never open to
//! users.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, BackendError, Change, ChangeReason, Effect, NodeOp, RenderedStatus, ReportProgress,
    clock::{Clock, SystemClock},
    contract_tests::Length,
};
use doctor_backend_slurm::{OutAs, SlurmBackend, SlurmConfig};
use doctor_core::{
    ids::{CaseId, IdSource, OpId, RunId},
    node::{MarkKind, OurMark},
    node_status::{NodeHealth, NodeStatus},
    run::{JobEnd, ObservedJobState},
};
use doctor_testbed::slurm::{Daemon, Generation};

use crate::stage::{Stage, has, job, node, run_id, seen, wait, wait_free, wait_job};

const NODE: &str = "node2";
const BETWEEN_BOOTS: Duration = Duration::from_secs(7);
const MAINTENANCE: OurMark = OurMark { kind: MarkKind::Maintenance, case: None };

struct Operator<'a> {
    backend: &'a SlurmBackend,
    ids: IdSource,
}

impl<'a> Operator<'a> {
    fn new(backend: &'a SlurmBackend) -> Self {
        let mut ids = IdSource::new(run_id(0).number());
        ids.set_time(SystemClock.now());
        Self { backend, ids }
    }

    fn op(&mut self) -> OpId {
        self.ids.op()
    }

    fn apply(&mut self, what: Change) -> Result<(), BackendError> {
        let op = self.ids.op();
        self.backend.apply(&node(NODE), &NodeOp { op, what })
    }

    /// Marks and drains the node, as for a case.
    fn take_out(&mut self) -> CaseId {
        let case = self.ids.case();
        let mark = OurMark { kind: MarkKind::Unhealthy, case: Some(case) };
        let reason =
            ChangeReason { case: Some(case), code: "xid-79".to_owned(), text: "GPU 3 fell off the bus".to_owned() };
        for what in [Change::Mark(mark), Change::Drain] {
            let op = self.ids.op();
            self.backend.apply_with_reason(&node(NODE), &NodeOp { op, what }, &reason).unwrap();
        }
        case
    }

    fn give_back(&mut self) {
        self.apply(Change::Undrain).unwrap();
        self.apply(Change::Unmark(OurMark { kind: MarkKind::Unhealthy, case: None })).unwrap();
    }
}

fn reason(stage: &Stage) -> String {
    let output = stage.slurm.run("scontrol", &["show", "node", "-o", NODE]).unwrap();
    let reason = output.split(" Reason=").nth(1).unwrap_or_default();
    reason.split(" [root@").next().unwrap_or_default().to_owned()
}

fn reservations(stage: &Stage) -> usize {
    let output = stage.slurm.run("scontrol", &["show", "reservation", "-o"]).unwrap();
    output.lines().filter(|line| line.starts_with("ReservationName=doctor-")).count()
}

fn requalify(backend: &SlurmBackend, run: RunId, length: Length) {
    backend.submit(&Stage::request(run, &[NODE], length)).unwrap();
}

pub(crate) fn a_requalification_run_on_a_drained_node_never_opens_it_to_users(generation: Generation) {
    let Some(stage) = Stage::new("requalification runs", generation) else { return };
    let backend = stage.open();
    let mut operator = Operator::new(&backend);
    let case = operator.take_out();
    let expected = format!("doctor: xid-79 GPU 3 fell off the bus [{case}]");
    assert_eq!(reason(&stage), expected);
    assert!(!stage.is_open_to_users(NODE), "drained");
    wait_free(&backend, NODE);

    // The run is active, its node is ours, and users wait.
    let run = run_id(1);
    requalify(&backend, run, Length::Endless);
    wait_job(&backend, run, "the requalification run", |seen| matches!(seen, ObservedJobState::Running { .. }));
    let marks = seen(&backend, NODE).node.marks.clone();
    assert!(MarkKind::ALL.iter().all(|kind| marks.has_ours(*kind)) && marks.foreign.is_empty(), "{marks:?}");
    assert_eq!(seen(&backend, NODE).jobs, [run]);
    wait_free(&backend, NODE);
    assert!(!stage.is_open_to_users(NODE), "while it runs");

    // While it runs, the mark cannot be removed, and the attempt leaves the node closed.
    let busy = operator.apply(Change::Unmark(MAINTENANCE)).unwrap_err();
    assert_eq!(busy.effect, Effect::NotAppliedRetry, "{busy}");
    assert!(!stage.is_open_to_users(NODE), "closed before its reservation goes");

    // The controller is killed here: its successor finds everything, and the end of the job does not open the node.
    let successor = stage.open();
    successor.cancel(run).unwrap();
    wait_job(&successor, run, "the end of the run", |seen| matches!(seen, ObservedJobState::Ended { .. }));
    assert!(!stage.is_open_to_users(NODE), "between the run and the removal of its reservation");
    assert!(has(&successor, NODE, MarkKind::Maintenance));
    let mut operator = Operator::new(&successor);
    wait("the reservation to go", || operator.apply(Change::Unmark(MAINTENANCE)).map_err(|error| error.to_string()));
    assert_eq!((reservations(&stage), reason(&stage)), (0, expected));
    assert!(!stage.is_open_to_users(NODE), "drained again");

    // A second run passes in the same way, and then the node is returned.
    let second = run_id(2);
    requalify(&successor, second, Length::Short);
    let ended = wait_job(&successor, second, "the second run", |seen| matches!(seen, ObservedJobState::Ended { .. }));
    assert!(matches!(ended, ObservedJobState::Ended { how: JobEnd::Exited, .. }), "{ended:?}");
    assert!(!stage.is_open_to_users(NODE), "requalified, and not yet returned");
    wait("the reservation to go", || operator.apply(Change::Unmark(MAINTENANCE)).map_err(|error| error.to_string()));
    operator.give_back();
    assert!(seen(&successor, NODE).node.marks.ours.is_empty());
    wait("the node to take users", || {
        stage.is_open_to_users(NODE).then_some(()).ok_or_else(|| stage.slurm.node_state(NODE).unwrap())
    });
}

pub(crate) fn a_reboot_keeps_the_node_closed_and_is_done_when_it_is_back(generation: Generation) {
    let Some(stage) = Stage::new("reboots", generation) else { return };
    let backend = stage.open();
    let mut operator = Operator::new(&backend);
    operator.take_out();
    // The first call requests the reboot, whose effect is not observed yet.
    let op = operator.op();
    let reboot = NodeOp { op, what: Change::Reboot };
    let first = backend.apply(&node(NODE), &reboot).unwrap_err();
    assert_eq!(first.effect, Effect::Unknown, "{first}");
    // Its reservation stays meanwhile, and is no mark for the planner to remove: Slurm would open the node at the end.
    assert!(!has(&backend, NODE, MarkKind::Maintenance) && has(&backend, NODE, MarkKind::Cordon));
    match operator.apply(Change::Unmark(MAINTENANCE)) {
        Err(error) => assert!(error.text.contains("is being rebooted") && reservations(&stage) == 1, "{error}"),
        // It is back already.
        Ok(()) => assert!(stage.slurm.node_state(NODE).unwrap().contains("DRAIN")),
    }
    wait("the reboot", || {
        assert!(!stage.is_open_to_users(NODE), "while it reboots");
        // A successor repeats the same operation.
        stage.open().apply(&node(NODE), &reboot).map_err(|error| error.to_string())
    });
    assert_eq!(stage.slurm.reboots(), [NODE]);
    assert_eq!(reservations(&stage), 0);
    assert!(!stage.is_open_to_users(NODE), "rebooted, and not yet requalified");
    backend.apply(&node(NODE), &reboot).unwrap();
    assert_eq!(stage.slurm.reboots(), [NODE], "once");
    assert!(has(&backend, NODE, MarkKind::Unhealthy) && has(&backend, NODE, MarkKind::Cordon));
    wait_free(&backend, NODE);

    // Real machines take longer to boot again; two boots within a few seconds count as one.
    let back = Instant::now();
    wait("the next boot to be another", || (back.elapsed() > BETWEEN_BOOTS).then_some(()).ok_or_else(String::new));
    // An operator deletes the reservation: the node is closed at the end all the same.
    let second = NodeOp { op: operator.op(), what: Change::Reboot };
    backend.apply(&node(NODE), &second).unwrap_err();
    let reservation = format!("reservationname=doctor-{}", second.op);
    stage.slurm.run("scontrol", &["delete", &reservation]).unwrap();
    // slurmctld sets a node down that registers a second time with a later boot time. On a slow machine it does so by itself.
    let is_back = |state: &str| {
        (state.starts_with("IDLE") || state.starts_with("DOWN"))
            && !state.contains("REBOOT")
            && !state.contains("RESPOND")
    };
    wait("the second boot", || match (stage.slurm.reboots().len(), stage.slurm.node_state(NODE).unwrap()) {
        (2, state) if is_back(&state) => Ok(()),
        (count, state) => Err(format!("{count} reboots, {state}")),
    });
    let down = format!("nodename={NODE}");
    stage.slurm.run("scontrol", &["update", &down, "state=down", "reason=Node unexpectedly rebooted"]).unwrap();
    wait("the second reboot", || backend.apply(&node(NODE), &second).map_err(|error| error.to_string()));
    wait_free(&backend, NODE);
    assert!(!stage.is_open_to_users(NODE), "closed without its reservation");
    assert!(has(&backend, NODE, MarkKind::Unhealthy) && has(&backend, NODE, MarkKind::Cordon));
    // A repeated operation does nothing: an operator who resumed the node since then had a reason.
    operator.give_back();
    backend.apply(&node(NODE), &second).unwrap();
    assert!(seen(&backend, NODE).node.marks.ours.is_empty());
}

pub(crate) fn a_node_that_is_set_down_is_drained_too(generation: Generation) {
    let Some(stage) = Stage::new("nodes that are down", generation) else { return };
    let backend = stage.open_with(SlurmConfig { out_as: OutAs::Down, ..stage.config.clone() });
    let mut operator = Operator::new(&backend);
    wait_free(&backend, NODE);
    operator.take_out();
    let state = stage.slurm.node_state(NODE).unwrap();
    assert!(state.starts_with("DOWN") && state.contains("DRAIN"), "{state}");
    // Slurm would resume a node that is only down.
    stage.slurm.restart(Daemon::Node(NODE)).unwrap();
    stage.slurm.wait_for_node(NODE, "answering", |state| !state.contains("NOT_RESPONDING")).unwrap();
    assert!(!stage.is_open_to_users(NODE), "{}", stage.slurm.node_state(NODE).unwrap());
    operator.give_back();
    wait("the node to take users", || {
        stage.is_open_to_users(NODE).then_some(()).ok_or_else(|| stage.slurm.node_state(NODE).unwrap())
    });
}

pub(crate) fn a_node_that_does_not_come_back_from_a_reboot_stays_closed(generation: Generation) {
    let Some(stage) = Stage::new("reboots without return", generation) else { return };
    let backend = stage.open();
    let mut operator = Operator::new(&backend);
    operator.take_out();
    stage.slurm.set_returns_from_reboot(NODE, false).unwrap();
    let reboot = NodeOp { op: operator.op(), what: Change::Reboot };
    let failed = wait("the reboot to fail", || match backend.apply(&node(NODE), &reboot) {
        Err(error) if error.effect == Effect::NotAppliedPermanent => Ok(error),
        other => Err(format!("{other:?}")),
    });
    assert!(failed.text.contains("did not come back"), "{failed}");
    assert_eq!(reservations(&stage), 0);
    // Hours later an operator starts it, and Slurm would resume it.
    stage.slurm.set_returns_from_reboot(NODE, true).unwrap();
    stage.slurm.restart(Daemon::Node(NODE)).unwrap();
    stage.slurm.wait_for_node(NODE, "answering", |state| !state.contains("NOT_RESPONDING")).unwrap();
    assert!(!stage.is_open_to_users(NODE), "{}", stage.slurm.node_state(NODE).unwrap());
    assert!(has(&backend, NODE, MarkKind::Unhealthy));
}

pub(crate) fn a_reset_runs_on_the_drained_node_and_leaves_it_drained(generation: Generation) {
    let Some(stage) = Stage::new("resets", generation) else { return };
    // Without GPUs the effect of a reset cannot be verified; this tests that the command runs.
    let done = stage.data("done");
    let command = format!("echo $SLURMD_NODENAME >> {}", done.display());
    let program = stage.data("repair");
    std::fs::write(&program, "#!/bin/sh\nshift 3\nexec \"$@\"\n").unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let config = SlurmConfig {
        doctor_node: program,
        reset: ["sh", "-c", &command].map(str::to_owned).to_vec(),
        ..stage.config.clone()
    };
    let backend = stage.open_with(config.clone());
    let user = stage.slurm.submit(&["--nodelist", NODE, "--wrap=exec sleep 600"]).unwrap();
    stage.slurm.wait_for_job(user, "RUNNING").unwrap();
    let mut operator = Operator::new(&backend);
    operator.take_out();
    let op = operator.op();
    let reset = NodeOp { op, what: Change::Reset };
    let busy = backend.apply(&node(NODE), &reset).unwrap_err();
    assert!(busy.text.contains(&format!("job {user} of root")) && busy.effect == Effect::NotAppliedRetry, "{busy}");
    stage.slurm.run("scancel", &[&user.to_string()]).unwrap();
    stage.slurm.wait_for_job(user, "CANCELLED").unwrap();
    // An operator is faster and takes the node out of service.
    let update = |args: &[&str]| {
        stage.slurm.run("scontrol", &[&["update", "nodename=node2"], args].concat()).unwrap();
    };
    update(&["state=drain", "reason=mine now"]);
    let theirs = wait("the user's job to be off", || match backend.apply(&node(NODE), &reset) {
        Err(error) if error.text.contains("would be killed") => Err(error.to_string()),
        other => Ok(other.unwrap_err()),
    });
    assert!(theirs.text.contains("mine now") && theirs.effect == Effect::NotAppliedRetry, "{theirs}");
    assert_eq!(reservations(&stage), 0);
    update(&["state=resume"]);
    operator.take_out();
    // The node's own report is taken before, inside a reservation that ends with it.
    let reporter = stage.open();
    let report = wait("the report", || match reporter.collect_report(&node(NODE), op) {
        ReportProgress::Done(report) => Ok(report),
        ReportProgress::InProgress => Err("in progress".to_owned()),
        ReportProgress::Failed { text } => panic!("{text}"),
    });
    assert!(report.machine["hardware"]["boot_id"].is_string(), "{:#}", report.machine);
    assert_eq!(reporter.collect_report(&node(NODE), op), ReportProgress::Done(report), "it is taken once");
    assert_eq!(reservations(&stage), 0);
    assert!(!stage.is_open_to_users(NODE));
    wait("the reset", || backend.apply(&node(NODE), &reset).map_err(|error| error.to_string()));
    assert_eq!(std::fs::read_to_string(&done).unwrap(), format!("{NODE}\n"), "once");
    assert_eq!(reservations(&stage), 0);
    assert!(!stage.is_open_to_users(NODE));

    // An abandoned reset leaves no job behind.
    let endless = ["sleep", "600"].map(str::to_owned).to_vec();
    let backend = stage.open_with(SlurmConfig { reset: endless, ..config });
    let reset = NodeOp { op: operator.op(), what: Change::Reset };
    // The node may still be completing the job before.
    wait("the second reset to begin", || match backend.apply(&node(NODE), &reset).unwrap_err() {
        begun if begun.effect == Effect::Unknown => Ok(()),
        other if other.effect == Effect::NotAppliedRetry => Err(other.to_string()),
        other => panic!("{other}"),
    });
    let mut operator = Operator::new(&backend);
    wait("the reservation to go", || operator.apply(Change::Unmark(MAINTENANCE)).map_err(|error| error.to_string()));
    let name = format!("--name=doctor-{}", reset.op);
    let left = stage.slurm.run("squeue", &["--noheader", "--states=pending,running", "--format=%T", &name]).unwrap();
    assert_eq!((left.trim(), reservations(&stage)), ("", 0));
    assert!(!stage.is_open_to_users(NODE));
    // slurmctld lists a cancelled job as completing until slurmd has reported its end.
    let ended = wait("the cancelled reset to have failed", || match backend.apply(&node(NODE), &reset).unwrap_err() {
        ended if ended.effect == Effect::NotAppliedPermanent => Ok(ended),
        other => Err(other.to_string()),
    });
    assert!(ended.text.contains("CANCELLED"), "{ended}");
}

pub(crate) fn results_are_shown_on_the_node(generation: Generation) {
    let Some(stage) = Stage::new("results on nodes", generation) else { return };
    let backend =
        stage.open_with(SlurmConfig { validated_feature: Some("validated".to_owned()), ..stage.config.clone() });
    let writer = backend.status_writer().unwrap();
    let rendered = |status| {
        Arc::new(RenderedStatus::new(NodeStatus {
            status,
            severity: None,
            state: "in-service",
            case: None,
            operator: None,
            advice: None,
            passed: 1,
            not_applicable: 0,
            not_judged: 0,
            findings: Vec::new(),
            more_findings: 0,
            not_known: Vec::new(),
            more_not_known: 0,
            agent_silent: false,
        }))
    };
    // A node that can also be booted with another feature.
    let lists = ["availablefeatures=h100,ib,mig", "activefeatures=h100,ib"];
    stage.slurm.run("scontrol", &[&["update", "nodename=node2"], &lists[..]].concat()).unwrap();
    backend.snapshot().unwrap();
    assert_eq!(writer.status_hash(&node(NODE)), None);
    let well = rendered(NodeHealth::Pass);
    writer.write(&node(NODE), &well).unwrap();
    backend.snapshot().unwrap();
    assert_eq!(writer.status_hash(&node(NODE)), Some(well.hash));
    // Users request it.
    let job_id = stage.slurm.submit(&["--constraint=validated", "--wrap=exec sleep 600"]).unwrap();
    stage.slurm.wait_for_job(job_id, "RUNNING").unwrap();
    assert_eq!(stage.slurm.run("squeue", &["--noheader", "--format=%N"]).unwrap().trim(), NODE);
    // All of them together, each with its own features; a node that Slurm does not have does not prevent the others.
    let all = ["node1", "node2", "node3"].map(node);
    let work: Vec<_> = all.iter().cloned().map(|node| (node, well.clone())).collect();
    assert_eq!(writer.write_all(&work, 4), []);
    backend.snapshot().unwrap();
    assert!(all.iter().all(|node| writer.status_hash(node) == Some(well.hash)));
    let mut work: Vec<_> = all.iter().cloned().map(|node| (node, rendered(NodeHealth::Unknown))).collect();
    work.push((node("node99"), rendered(NodeHealth::Unknown)));
    let failed = writer.write_all(&work, 4);
    assert!(failed.len() == 1 && failed[0].0 == node("node99") && failed[0].1.text.contains("no node"), "{failed:?}");
    backend.snapshot().unwrap();
    assert!(all.iter().all(|node| writer.status_hash(node) == Some(work[0].1.hash)));
    writer.write(&node(NODE), &rendered(NodeHealth::Fail)).unwrap();
    let output = stage.slurm.run("scontrol", &["show", "node", "-o", NODE]).unwrap();
    assert!(output.contains("AvailableFeatures=h100,ib,mig ActiveFeatures=h100,ib "), "{output}");
    assert_eq!(job(&backend, run_id(1)), ObservedJobState::Absent);
}
