//! Tests of the world: it is reproducible, matches its assumptions, and fulfils the `Backend` trait.

mod assumptions;
mod jobs;
mod machines;
mod properties;

use doctor_backend::{Backend, Change, Effect, JobOutput, JobRequest, NodeOp, clock::Clock};
use doctor_checks::document::{AgentReport, Document, RunKey};
use doctor_core::{
    ids::{IdSource, NodeName, RunId, TestId},
    node::{ForeignMark, MarkKind, Occupancy, OurMark},
    run::{JobEnd, NonEmpty, ObservedJobState},
    time::{Span, Timestamp},
};
use doctor_sim::{
    Assumptions, Call, CallFailure, EffectKind, FaultKind, Incident, JobFault, SimBackend, World, WorldConfig,
};

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn key() -> RunKey {
    RunKey::new([7; 32])
}

fn job(run: RunId, name: &str, tests: &[&str]) -> JobRequest {
    JobRequest {
        run,
        nodes: NonEmpty::one(node(name)),
        tests: NonEmpty::new(tests.iter().map(|test| TestId::new(test).unwrap()).collect()).unwrap(),
        access: Vec::new(),
        limit: Span::hours(1),
        key: key(),
        results: None,
        outputs: vec![JobOutput {
            node: node(name),
            logs: vec![format!("{}/{name}/{run}.log", tests[0]).into()],
            document: format!("{}/{name}/{run}.json", tests[0]).into(),
        }],
    }
}

/// A quiet world with helpers for requests.
struct Bench {
    sim: SimBackend,
    ids: IdSource,
}

impl Bench {
    fn new(config: WorldConfig) -> Self {
        let sim = SimBackend::new(config).unwrap();
        let mut ids = IdSource::new(1);
        ids.set_time(sim.clock().now());
        Self { sim, ids }
    }

    fn quiet(nodes: u32) -> Self {
        Self::new(WorldConfig::quiet(nodes))
    }

    fn pass(&self, span: Span) {
        let now = self.sim.clock().now();
        self.sim.clock().sleep_until(now.plus(span));
    }

    fn submit(&mut self, name: &str, tests: &[&str]) -> RunId {
        let run = self.ids.run();
        self.sim.submit(&job(run, name, tests)).unwrap();
        run
    }

    fn seen(&self, run: RunId) -> ObservedJobState {
        self.sim.poll(&[run]).unwrap().remove(0).state
    }

    fn documents(&self, run: RunId) -> Vec<Vec<u8>> {
        self.sim.poll(&[run]).unwrap().remove(0).documents
    }

    fn occupancy(&self, name: &str) -> Occupancy {
        self.observed_node(name).unwrap().occupancy
    }

    fn observed_node(&self, name: &str) -> Option<doctor_core::node::Node> {
        self.sim
            .snapshot()
            .unwrap()
            .into_iter()
            .map(|seen| std::sync::Arc::unwrap_or_clone(seen.node))
            .find(|observed| observed.name == node(name))
    }

    fn apply(&mut self, name: &str, what: Change) {
        let op = self.ids.op();
        self.sim.apply(&node(name), &NodeOp { op, what }).unwrap();
    }

    #[expect(clippy::needless_pass_by_value, reason = "a story reads better without references")]
    fn inject(&self, incident: Incident) {
        assert!(self.sim.world().inject(&incident), "{incident}");
    }
}

const UNHEALTHY: Change = Change::Mark(OurMark { kind: MarkKind::Unhealthy, case: None });

/// A minimal controller: tests free nodes in turn, and marks and resets failing ones now and then.
fn drive(config: WorldConfig, days: i64) -> SimBackend {
    let mut bench = Bench::new(config);
    let mut turn = 0;
    let end = bench.sim.clock().now().plus(Span::days(days));
    while bench.sim.clock().now() < end {
        bench.ids.set_time(bench.sim.clock().now());
        if let Ok(nodes) = bench.sim.snapshot() {
            let free: Vec<_> = nodes.iter().filter(|seen| seen.node.occupancy.is_free()).collect();
            if !free.is_empty() {
                let name = free[turn % free.len()].node.name.clone();
                let run = bench.ids.run();
                let _ = bench.sim.submit(&job(run, name.as_str(), &["dl", "nccl"]));
                turn += 7;
                if turn % 5 == 0 {
                    let op = bench.ids.op();
                    let _ = bench.sim.apply(&name, &NodeOp { op, what: Change::Reset });
                }
            }
        }
        bench.pass(Span::minutes(30));
    }
    bench.sim
}
