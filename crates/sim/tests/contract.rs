//! The simulated cluster fulfils the backend contract, in this process and from another.

use std::{
    sync::{Arc, atomic::AtomicBool},
    thread,
    time::Duration,
};

use doctor_backend::{
    Backend, JobOutput, JobRequest,
    clock::Clock,
    contract_tests::{Length, TestOccupancy, Testbed, violations},
};
use doctor_checks::document::RunKey;
use doctor_core::{
    ids::{NodeName, RunId, TestId},
    node::ForeignMark,
    run::NonEmpty,
    snapshot::Capabilities,
    time::{Span, Timestamp},
};
use doctor_sim::{Incident, RemoteSim, ServeConfig, SimBackend, WorldConfig};

/// The operations on the world that the suite needs, in this process or remote.
struct SimBed<F> {
    inject: F,
    pass: Box<dyn Fn()>,
    now: Box<dyn Fn() -> Timestamp>,
    started: Box<dyn Fn(RunId) -> usize>,
    successor: Box<dyn Fn() -> Option<Box<dyn Backend>>>,
}

impl<F: Fn(&Incident) -> bool> Testbed for SimBed<F> {
    fn now(&self) -> Timestamp {
        (self.now)()
    }

    fn node(&self) -> NodeName {
        NodeName::new("node002").unwrap()
    }

    fn set_occupancy(&self, node: &NodeName, occupancy: TestOccupancy) {
        assert!((self.inject)(&Incident::Clear { node: node.clone() }));
        let incident = match occupancy {
            TestOccupancy::Free => return,
            TestOccupancy::Busy => Incident::UserJob { nodes: vec![node.clone()], length: Span::days(3000) },
            TestOccupancy::Unknown => Incident::Unreachable { node: node.clone(), length: Span::days(3000) },
        };
        assert!((self.inject)(&incident), "{incident}");
    }

    fn set_foreign_mark(&self, node: &NodeName, present: bool) {
        let by = "operators".to_owned();
        let incident = if present {
            let mark = ForeignMark { by, text: "a hand on it".into(), blocks: true };
            Incident::ForeignMark { node: node.clone(), mark }
        } else {
            Incident::ForeignUnmark { node: node.clone(), by }
        };
        assert!((self.inject)(&incident), "{incident}");
    }

    fn job(&self, run: RunId, length: Length) -> JobRequest {
        let name = self.node();
        // A test takes ten minutes; sixty of them outlast the suite's timeouts.
        let tests = match length {
            Length::Short => vec![TestId::new("gpu-health").unwrap()],
            Length::Endless => vec![TestId::new("dl").unwrap(); 60],
        };
        JobRequest {
            run,
            nodes: NonEmpty::one(name.clone()),
            tests: NonEmpty::new(tests).unwrap(),
            access: Vec::new(),
            limit: Span::hours(1),
            key: RunKey::new([1; 32]),
            results: None,
            outputs: vec![JobOutput {
                document: format!("gpu-health/{name}/{run}.json").into(),
                logs: vec![format!("gpu-health/{name}/{run}.log").into()],
                node: name,
            }],
        }
    }

    fn jobs_started(&self, run: RunId) -> usize {
        (self.started)(run)
    }

    fn lose_job(&self, run: RunId) {
        assert!((self.inject)(&Incident::JobLost { run }));
    }

    fn let_time_pass(&self) {
        (self.pass)();
    }

    fn restarted(&self) -> Option<Box<dyn Backend>> {
        (self.successor)()
    }
}

fn bed(sim: &SimBackend) -> SimBed<impl Fn(&Incident) -> bool + use<>> {
    let (a, b, c, d, e) = (sim.clone(), sim.clone(), sim.clone(), sim.clone(), sim.clone());
    SimBed {
        inject: move |incident: &Incident| a.world().inject(incident),
        pass: Box::new(move || {
            let clock = b.clock();
            clock.sleep_until(clock.now().plus(Span::from_secs(2)));
        }),
        now: Box::new(move || c.clock().now()),
        started: Box::new(move |run| d.world().jobs_started(run)),
        successor: Box::new(move || Some(Box::new(e.clone()))),
    }
}

#[test]
fn the_simulated_cluster_fulfils_the_backend_contract() {
    for caps in [Capabilities::ALL, Capabilities { mark: true, ..Capabilities::NONE }] {
        let sim = SimBackend::new(WorldConfig { caps, ..WorldConfig::quiet(3) }).unwrap();
        assert_eq!(violations(&sim, &bed(&sim)), []);
    }
}

/// A served world, and the thread that serves it.
struct Host {
    folder: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Host {
    fn start(config: ServeConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (socket, stop_flag) = (folder.path().join("sim.sock"), stop.clone());
        let thread = Some(thread::spawn(move || doctor_sim::serve(&config, &socket, &stop_flag).unwrap()));
        Self { folder, stop, thread }
    }

    fn connect(&self) -> RemoteSim {
        RemoteSim::connect(&self.folder.path().join("sim.sock"), Duration::from_secs(20)).unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

#[test]
fn a_cluster_in_another_process_fulfils_the_backend_contract() {
    let effects = tempfile::NamedTempFile::new().unwrap();
    let world = WorldConfig { effects: Some(effects.path().to_owned()), ..WorldConfig::quiet(3) };
    let host = Arc::new(Host::start(ServeConfig { speed: 600.0, world }));
    let remote = Arc::new(host.connect());
    let path = effects.path().to_owned();
    let (a, b, c) = (remote.clone(), remote.clone(), host);
    let bed = SimBed {
        inject: move |incident: &Incident| a.inject(incident).unwrap(),
        // Real time passes by itself; this only limits the rate of the suite's queries.
        pass: Box::new(|| thread::sleep(Duration::from_millis(2))),
        now: Box::new(move || b.now()),
        started: Box::new(move |run| {
            let effects = doctor_sim::read_effects(&path).unwrap();
            let is_start = |effect: &&doctor_sim::Effect| matches!(effect.what, doctor_sim::EffectKind::Started { run: of, .. } if of == run);
            effects.iter().filter(is_start).count()
        }),
        successor: Box::new(move || Some(Box::new(c.connect()))),
    };
    assert_eq!(violations(&*remote, &bed), []);
}

#[test]
fn time_advances_without_requests_and_the_client_reconnects() {
    let host = Host::start(ServeConfig { speed: 3600.0, world: WorldConfig::quiet(2) });
    let first = host.connect();
    let began = first.now();
    first.sleep_until(began.plus(Span::minutes(30)));
    assert!(first.now() >= began.plus(Span::minutes(30)));
    drop(first);
    let second = host.connect();
    assert!(second.now() >= began.plus(Span::minutes(30)));
    assert_eq!(second.snapshot().unwrap().len(), 2);
    assert!(second.agent_reports().unwrap().is_empty());
    assert_eq!(second.speed(), 3600.0);
}

#[test]
fn a_lost_connection_is_an_error_that_states_its_possible_effect() {
    use doctor_backend::Effect;
    let host = Host::start(ServeConfig { speed: 600.0, world: WorldConfig::quiet(1) });
    let remote = host.connect();
    let before = remote.now();
    drop(host);
    let run = RunId::from_number(1);
    assert_eq!(remote.cancel(run).unwrap_err().effect, Effect::Unknown, "the server may have received it");
    assert_eq!(remote.cancel(run).unwrap_err().effect, Effect::NotAppliedRetry, "the server was not reached");
    assert_eq!(remote.snapshot().unwrap_err().effect, Effect::NotAppliedRetry);
    assert!(remote.now() >= before, "the clock is assumed to go on");
}
