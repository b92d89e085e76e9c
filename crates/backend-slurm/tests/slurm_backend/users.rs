//! Tests that users' jobs come first, and what a run leaves when Slurm or a controller fails.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use doctor_backend::{
    Backend, Effect,
    bounded::{BoundedBackend, CallLimits},
    contract_tests::Length,
};
use doctor_checks::document::Document;
use doctor_core::{
    node::Occupancy,
    run::{JobEnd, ObservedJobState},
    time::{Span, Timestamp},
};
use doctor_testbed::slurm::{Daemon, Generation, Layout};

use crate::stage::{KEY, Stage, job, run_id, seen, wait, wait_free, wait_job};

fn occupancy(backend: &dyn Backend, name: &str) -> Occupancy {
    seen(backend, name).node.occupancy.clone()
}

pub(crate) fn the_users_come_first(generation: Generation) {
    let Some(stage) = Stage::new("users' jobs", generation) else { return };
    let backend = stage.open();
    // Two nodes are taken; our job runs on the third.
    let user = |wrap: &str, node: &str| {
        stage.slurm.submit(&["--exclusive", "--nodelist", node, "--job-name=train|1", wrap]).unwrap()
    };
    let first = user("--wrap=exec sleep 600", "node1");
    let failing = stage.slurm.submit(&["--nodelist=node3", "--wrap=exit 3"]).unwrap();
    stage.slurm.wait_for_job(failing, "FAILED").unwrap();
    let second = user("--wrap=exec sleep 600", "node3");
    for job in [first, second] {
        stage.slurm.wait_for_job(job, "RUNNING").unwrap();
    }
    assert_eq!(occupancy(&backend, "node1"), Occupancy::Busy { by: format!("job {first} of root").into() });
    let run = run_id(1);
    backend.submit(&Stage::request(run, &["node2"], Length::Endless)).unwrap();
    wait_job(&backend, run, "the run", |seen| matches!(seen, ObservedJobState::Running { .. }));
    wait_free(&backend, "node2");

    // A held job needs no node; one that could run needs ours.
    let held = stage.slurm.submit(&["--hold", "--gres=gpu:8", "--wrap=true"]).unwrap();
    wait_free(&backend, "node2");
    let waiting = stage.slurm.submit(&["--gres=gpu:8", "--time=5", "--wrap=exec sleep 600"]).unwrap();
    wait("the node to be wanted", || match occupancy(&backend, "node2") {
        Occupancy::Busy { by } if by.contains(&format!("job {waiting} of root")) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    // slurmctld calls a job running before its program has started: one that is cancelled then signs nothing.
    wait("the test to run", || match stage.data(&format!("endless/node2/{run}.log")).exists() {
        true => Ok(()),
        false => Err("no log".to_owned()),
    });
    backend.cancel(run).unwrap();
    stage.slurm.wait_for_job(waiting, "RUNNING").unwrap();
    let ended = wait_job(&backend, run, "the end of the run", |seen| matches!(seen, ObservedJobState::Ended { .. }));
    assert!(matches!(ended, ObservedJobState::Ended { how: JobEnd::Killed, started: Some(_), .. }), "{ended:?}");
    let text = std::fs::read(stage.data(&format!("endless/node2/{run}.json"))).unwrap();
    assert_eq!(Document::open(&text, &KEY).unwrap().run, run, "the partial result is signed");
    stage.slurm.run("scancel", &[&held.to_string()]).unwrap();

    // The failed job is reported with its node.
    let failed = backend.job_failures(Timestamp::from_secs(0)).unwrap();
    let reported: Vec<String> =
        failed.iter().map(|one| format!("{} {} {:?}", one.job.id, one.job.how, one.nodes)).collect();
    assert_eq!(reported, [format!("slurm/{failing} exit code 3 [node3]")]);
}

pub(crate) fn what_slurm_forgets_is_told_by_the_claim(generation: Generation) {
    let layout = Layout { generation, nodes: 2, min_job_age: Duration::from_secs(2), ..Layout::default() };
    let Some(stage) = Stage::with("forgotten jobs", &layout) else { return };
    let backend = stage.open();
    let run = run_id(1);
    let request = Stage::request(run, &["node1"], Length::Short);
    backend.submit(&request).unwrap();
    let ended =
        |seen: &ObservedJobState| matches!(seen, ObservedJobState::Ended { how: JobEnd::Exited, started: Some(_), .. });
    wait_job(&backend, run, "the end", ended);
    let name = format!("--name=doctor-{run}");
    wait("Slurm to forget it", || {
        let listed = stage.slurm.run("squeue", &["--noheader", "--states=all", &name]).unwrap();
        listed.trim().is_empty().then_some(()).ok_or(listed)
    });
    assert!(ended(&job(&backend, run)), "{:?}", job(&backend, run));
    // Another controller submits it again, and Slurm has purged the job: it does not run again.
    stage.open().submit(&request).unwrap();
    let listed = stage.slurm.run("squeue", &["--noheader", "--states=all", &name]).unwrap();
    assert_eq!(listed.trim(), "");
}

pub(crate) fn an_outage_of_the_controller_is_an_error_and_nothing_is_doubled(generation: Generation) {
    let Some(stage) = Stage::new("outages", generation) else { return };
    let mut config = stage.config.clone();
    config.deadline = Span::from_secs(10);
    let backend = stage.open_with(config);
    let run = run_id(1);
    let request = Stage::request(run, &["node1"], Length::Endless);
    backend.submit(&request).unwrap();
    let before = wait_job(&backend, run, "the run", |seen| matches!(seen, ObservedJobState::Running { .. }));
    // Stopped cleanly: a killed slurmctld has lost the last seconds, and starts the job once more.
    stage.slurm.stop(Daemon::Controller).unwrap();
    assert_eq!(backend.snapshot().unwrap_err().effect, Effect::NotAppliedRetry);
    assert!(backend.poll(&[run]).is_err());
    assert!(backend.submit(&request).is_err());
    stage.slurm.restart(Daemon::Controller).unwrap();
    // Right after its start the nodes are unknown, never free.
    wait_free(&backend, "node1");
    assert_eq!(job(&backend, run), before);
    backend.submit(&request).unwrap();
    let name = format!("--name=doctor-{run}");
    let count =
        || stage.slurm.run("squeue", &["--noheader", "--states=all", "--format=%A", &name]).unwrap().lines().count();
    assert_eq!(count(), 1);

    stage.slurm.stop(Daemon::Munge).unwrap();
    let error = backend.snapshot().unwrap_err();
    assert_eq!(error.effect, Effect::NotAppliedRetry, "{error}");
    stage.slurm.restart(Daemon::Munge).unwrap();
    wait_free(&backend, "node1");
    assert_eq!((count(), job(&backend, run)), (1, before));
}

pub(crate) fn several_nodes_are_one_job(generation: Generation) {
    let Some(stage) = Stage::new("jobs over several nodes", generation) else { return };
    let backend = stage.open();
    let run = run_id(1);
    backend.submit(&Stage::request(run, &["node1", "node3"], Length::Short)).unwrap();
    let ended = wait_job(&backend, run, "the run", |seen| matches!(seen, ObservedJobState::Ended { .. }));
    assert!(matches!(ended, ObservedJobState::Ended { how: JobEnd::Exited, .. }), "{ended:?}");
    for name in ["node1", "node3"] {
        let text = std::fs::read(stage.data(&format!("memory/{name}/{run}.json"))).unwrap();
        assert_eq!(Document::open(&text, &KEY).unwrap().node.as_str(), name);
    }
    let name = format!("--name=doctor-{run}");
    let listed = stage.slurm.run("squeue", &["--noheader", "--states=all", "--format=%D", &name]).unwrap();
    assert_eq!(listed.trim(), "2");
}

/// A slurmctld that is stopped accepts connections and answers none: each of Slurm's commands waits for its own time limit.
pub(crate) fn a_controller_that_hangs_costs_one_deadline_for_each_call(generation: Generation) {
    let Some(stage) = Stage::new("a slurmctld that hangs", generation) else { return };
    let limit = Duration::from_secs(3);
    let backend = BoundedBackend::new(Arc::new(stage.open()), CallLimits { read: limit, change: limit });
    let run = run_id(2);
    let request = Stage::request(run, &["node1"], Length::Endless);
    let signal = |name: &str| {
        for pid in stage.slurm.pids(Daemon::Controller) {
            let sent = std::process::Command::new("kill").args([name, &pid.to_string()]).status().unwrap();
            assert!(sent.success(), "kill {name} {pid}");
        }
    };
    wait("a snapshot within the limit", || backend.snapshot().map_err(|error| error.to_string()));
    signal("-STOP");
    let began = Instant::now();
    let error = backend.snapshot().unwrap_err();
    assert!(error.effect == Effect::NotAppliedRetry && error.text.contains("did not end within"), "{error}");
    assert!(backend.poll(&[run]).is_err());
    let error = backend.submit(&request).unwrap_err();
    assert_ne!(error.effect, Effect::NotAppliedPermanent, "{error}");
    let error = backend.cancel(run).unwrap_err();
    assert_eq!(error.effect, Effect::Unknown, "{error}");
    println!("snapshot, poll, submit and cancel while slurmctld hangs: {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(120), "{:?}", began.elapsed());
    signal("-CONT");
    // What was in the air may have arrived: the run is submitted again by its id, and ends with one cancellation.
    wait("the submission", || backend.submit(&request).map_err(|error| error.to_string()));
    wait("the cancellation", || backend.cancel(run).map_err(|error| error.to_string()));
    let name = format!("--name=doctor-{run}");
    let left = || stage.slurm.run("squeue", &["--noheader", "--format=%A", &name]).unwrap();
    wait("the end of the run", || if left().trim().is_empty() { Ok(()) } else { Err(left()) });
}

/// An administrator takes a machine out of slurm.conf while a run of ours is on it.
pub(crate) fn a_run_on_a_node_that_is_removed_can_be_ended(generation: Generation) {
    let Some(stage) = Stage::new("nodes removed from slurm.conf", generation) else { return };
    let (backend, run) = (stage.open(), run_id(3));
    backend.submit(&Stage::request(run, &["node3"], Length::Endless)).unwrap();
    wait_job(&backend, run, "the run", |seen| matches!(seen, ObservedJobState::Running { .. }));
    stage.slurm.stop(Daemon::Controller).unwrap();
    stage.slurm.kill(Daemon::Node("node3")).unwrap();
    for file in [stage.slurm.conf(), stage.slurm.conf().with_file_name("gres.conf")] {
        let text = std::fs::read_to_string(&file).unwrap();
        let kept = text.lines().filter(|line| !line.starts_with("NodeName=node3 ")).map(|line| format!("{line}\n"));
        std::fs::write(&file, kept.collect::<String>()).unwrap();
    }
    stage.slurm.restart(Daemon::Controller).unwrap();
    wait("the node to leave the snapshot", || match backend.snapshot() {
        Ok(nodes) if nodes.iter().all(|seen| seen.node.name.as_str() != "node3") => Ok(()),
        other => Err(format!("{other:?}")),
    });
    wait("the cancellation", || backend.cancel(run).map_err(|error| error.to_string()));
    let over = |seen: &ObservedJobState| matches!(seen, ObservedJobState::Ended { .. } | ObservedJobState::Absent);
    wait_job(&backend, run, "the end of the run", over);
}
