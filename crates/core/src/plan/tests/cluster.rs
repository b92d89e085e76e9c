//! Fixtures as verbs: builds a cluster for a test, on a Sunday morning.

use std::sync::Arc;

use super::{
    super::{Plan, SkipReason, plan},
    lines, model,
};
use crate::{
    access::Place,
    case::{Case, CaseOutcome, CaseState, RepairStep, Step, StepKind, StepState},
    finding::{Evidence, Finding, OpenFinding, Remedy, Severity, Verdict},
    ids::{CaseId, HardwareId, IdSource, JobId, NodeName, OpId, PoolName, RuleId, RunId, TestId},
    job_failures::{JobFailure, JobFailureKind, Label, weigh},
    lifecycle::NodeState,
    node::{ForeignMark, Hold, MarkKind, Marks, Node, NodeOverrides, Occupancy, OurMark},
    observation::Entity,
    policy::{Allow, Mode, Policy, TestPolicy},
    reason::{ReasonCode, WithReason},
    run::{NonEmpty, ObservedJobState, Purpose, Run, RunState},
    snapshot::{
        ActiveRun, Backoff, Breaker, Cancelling, Capabilities, CommandKind, NodeRecord, Pause, PendingCommand,
        RecentActions, Snapshot, TestRecord, TestRecords,
    },
    time::{Span, Timestamp},
};

/// 2026-11-15, a Sunday, at eight in the morning.
pub(super) const NOW: Timestamp = Timestamp::from_secs(1_794_729_600);

/// Durations written as `5.minutes()`.
pub(super) trait Spans {
    fn minutes(self) -> Span;
    fn hours(self) -> Span;
    fn days(self) -> Span;
}

impl Spans for i64 {
    fn minutes(self) -> Span {
        Span::minutes(self)
    }
    fn hours(self) -> Span {
        Span::hours(self)
    }
    fn days(self) -> Span {
        Span::days(self)
    }
}

pub(super) fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

pub(super) fn test_id(text: &str) -> TestId {
    TestId::new(text).unwrap()
}

pub(super) fn pool(text: &str) -> PoolName {
    PoolName::new(text).unwrap()
}

pub(super) fn board(serial: &str) -> HardwareId {
    HardwareId::new(&format!("board-{serial}")).unwrap()
}

/// The default policy, under which only due tests run: `renewal` tests the rest.
fn without_renewal() -> Policy {
    let mut policy = Policy::built_in();
    policy.limits.renew_ahead = Span::ZERO;
    policy
}

/// A test with results valid for a week; it takes ten minutes, twenty at most.
pub(super) fn test(id: &str) -> TestPolicy {
    TestPolicy {
        id: test_id(id),
        suite: None,
        cutoff: 7.days(),
        limit: 20.minutes(),
        typical_duration: 10.minutes(),
        exclusive: true,
        place: Place::Job,
        routine: true,
        maintenance: false,
        multi_node: false,
        max_concurrent: None,
        shares: Vec::new(),
        pools: None,
    }
}

/// A quick check that the agent runs where there is one.
pub(super) fn agent_test(id: &str) -> TestPolicy {
    let (cutoff, typical_duration) = (1.days(), Span::from_secs(1));
    TestPolicy { place: Place::Agent, exclusive: false, cutoff, typical_duration, ..test(id) }
}

/// A confirmed finding of a test, seen a minute ago.
pub(super) fn bad(check: &str, severity: Severity) -> OpenFinding {
    OpenFinding {
        finding: Finding {
            check: test_id(check),
            entity: Entity::node(),
            verdict: Verdict::Fail,
            severity,
            remedy: severity.default_remedy(),
            reason: ReasonCode::fixed("broken"),
            text: format!("{check} is broken"),
            rule: RuleId::new("a-rule").unwrap(),
            evidence: Evidence::Nothing,
            confirm: 1,
        },
        run: None,
        first_seen: NOW.minus(1.minutes()),
        last_seen: NOW.minus(1.minutes()),
        sightings: 1,
    }
}

/// A finding that needs a second failing result.
pub(super) fn unconfirmed(check: &str, severity: Severity) -> OpenFinding {
    let mut open = bad(check, severity);
    open.finding.confirm = 2;
    open
}

/// A node as a test describes it.
#[derive(Debug, Clone)]
pub(super) struct NodeFixture {
    record: NodeRecord,
    /// Test (all, if none is named), verdict, age.
    past: Vec<(Option<TestId>, Verdict, Span)>,
    pub(super) case: Option<Case>,
}

fn node(text: &str, occupancy: Occupancy) -> NodeFixture {
    let node = Node {
        name: name(text),
        pool: pool("gpu"),
        occupancy,
        marks: Marks::default(),
        hardware: None,
        sku: None,
        declared: None,
        overrides: None,
    };
    let record = NodeRecord {
        node: node.into(),
        state: NodeState::InService,
        since: NOW.minus(30.days()),
        test_records: TestRecords::default(),
        findings: Vec::new(),
        backoff: None,
        hold: None,
        hardware: None,
        case: None,
        last_report: None,
        job_failures: None,
        remembered_gpus: 0,
    };
    NodeFixture { record, past: Vec::new(), case: None }
}

pub(super) fn free(text: &str) -> NodeFixture {
    node(text, Occupancy::Free)
}

pub(super) fn busy(text: &str) -> NodeFixture {
    node(text, Occupancy::Busy { by: "user job 7".into() })
}

pub(super) fn unknown(text: &str) -> NodeFixture {
    node(text, Occupancy::Unknown { why: "no answer".into() })
}

pub(super) fn unhealthy_mark() -> OurMark {
    OurMark { kind: MarkKind::Unhealthy, case: None }
}

pub(super) fn cordon_of(by: &str) -> ForeignMark {
    ForeignMark { by: by.to_owned(), text: "moving racks".to_owned(), blocks: true }
}

impl NodeFixture {
    /// Every test passed that long ago.
    pub(super) fn stale(self, ago: Span) -> Self {
        self.past(None, Verdict::Pass, ago)
    }

    /// Every test passed an hour ago.
    pub(super) fn fresh(self) -> Self {
        self.stale(1.hours())
    }

    pub(super) fn result(self, test: &str, verdict: Verdict, ago: Span) -> Self {
        self.past(Some(test_id(test)), verdict, ago)
    }

    fn past(mut self, test: Option<TestId>, verdict: Verdict, ago: Span) -> Self {
        self.past.push((test, verdict, ago));
        self
    }

    pub(super) fn pool(mut self, text: &str) -> Self {
        self.record.node_mut().pool = pool(text);
        self
    }

    pub(super) fn state(mut self, state: NodeState) -> Self {
        self.record.state = state;
        self
    }

    pub(super) fn suspect(self) -> Self {
        self.state(NodeState::Suspect)
    }

    /// Its state has been the present one for this long.
    pub(super) fn since(mut self, ago: Span) -> Self {
        self.record.since = NOW.minus(ago);
        self
    }

    pub(super) fn found(mut self, open: OpenFinding) -> Self {
        self.record.findings.push(open);
        self
    }

    pub(super) fn marked(mut self) -> Self {
        self.record.node_mut().marks.ours.push(unhealthy_mark());
        self
    }

    pub(super) fn cordoned_by(mut self, by: &str) -> Self {
        self.record.node_mut().marks.foreign.push(cordon_of(by));
        self
    }

    pub(super) fn apart(mut self, apart: NodeOverrides) -> Self {
        self.record.node_mut().overrides = Some(apart.into());
        self
    }

    /// Out of service with a case, in a cluster without marks.
    pub(super) fn excluded(mut self, severity: Severity, repair_step: RepairStep) -> Self {
        let case = case_of(&self.record, severity, repair_step);
        self.record.case = Some(case.id);
        self.case = Some(case);
        self.state(NodeState::Quarantined).since(1.hours())
    }

    pub(super) fn held(mut self, by: &str, until: Option<Timestamp>) -> Self {
        self.record.hold =
            Some(Hold { by: by.to_owned(), why: "my turn".to_owned(), since: NOW.minus(1.hours()), until });
        self
    }

    pub(super) fn backing_off(mut self, wait: Span) -> Self {
        self.record.backoff = Some(Backoff { until: NOW.plus(wait), sightings: 1 });
        self
    }

    /// It is this machine, and was before.
    pub(super) fn machine(self, serial: &str) -> Self {
        self.shows_machine(serial).was_machine(serial)
    }

    pub(super) fn shows_machine(mut self, serial: &str) -> Self {
        let hardware = Arc::make_mut(self.record.node_mut().hardware.get_or_insert_default());
        hardware.board_serial = Some(serial.to_owned());
        self
    }

    pub(super) fn was_machine(mut self, serial: &str) -> Self {
        self.record.hardware = Some(board(serial));
        self
    }

    pub(super) fn boot(mut self, id: &str) -> Self {
        Arc::make_mut(self.record.node_mut().hardware.get_or_insert_default()).boot_id = Some(id.to_owned());
        self
    }

    /// Work of this many owners, which failed nowhere else, failed here that long ago.
    pub(super) fn user_work_failed(mut self, owners: u16, ago: Span) -> Self {
        let work = |owner: u16| JobFailure {
            id: Label::new(&format!("{}-{owner}", self.record.node.name)),
            name: Label::new("train"),
            owner: Label::new(&format!("user-{owner}")),
            at: NOW.minus(ago),
            how: JobFailureKind::Signal { number: 11 },
        };
        let failed: Vec<_> = (0..owners).map(|owner| (self.record.node.name.clone(), work(owner))).collect();
        self.record.job_failures = weigh(&failed).into_values().next().map(Arc::new);
        self
    }

    pub(super) fn reported(mut self, ago: Span) -> Self {
        self.record.last_report = Some(NOW.minus(ago));
        self
    }

    /// Out of service with a case open at this escalation level, marked by us an hour ago.
    pub(super) fn out(mut self, severity: Severity, repair_step: RepairStep) -> Self {
        let mut case = case_of(&self.record, severity, repair_step);
        case.steps.push(done(StepKind::Mark, repair_step, 1.hours()));
        self.record.case = Some(case.id);
        self.case = Some(case);
        self.state(NodeState::Quarantined).since(1.hours()).marked()
    }

    /// Out of service, drained by us, and seen without user work after that.
    pub(super) fn emptied(self, severity: Severity, repair_step: RepairStep) -> Self {
        let mut emptied = self.out(severity, repair_step).step(done(StepKind::Drain, repair_step, 1.hours()));
        emptied.record.node_mut().marks.ours.push(OurMark { kind: MarkKind::Cordon, case: None });
        emptied.step(done(StepKind::SaveEvidence, repair_step, 50.minutes()))
    }

    pub(super) fn step(mut self, step: Step) -> Self {
        self.case.as_mut().expect("a step belongs to a case").steps.push(step);
        self
    }

    fn build(self, tests: &[TestPolicy]) -> NodeRecord {
        let mut record = self.record;
        let mut past = self.past;
        past.sort_by_key(|(_, _, ago)| std::cmp::Reverse(*ago));
        record.test_records = tests
            .iter()
            .map(|test| {
                let mut known = TestRecord::NEVER;
                for (of, verdict, ago) in &past {
                    if of.as_ref().is_none_or(|of| *of == test.id) {
                        known.add(*verdict, NOW.minus(*ago));
                    }
                }
                known
            })
            .collect();
        record
    }
}

/// An open case of this node. Its number derives from the name.
pub(super) fn case_of(record: &NodeRecord, severity: Severity, repair_step: RepairStep) -> Case {
    let number = record.node.name.as_str().bytes().fold(0_u64, |sum, byte| (sum * 251 + u64::from(byte)) % (1 << 48));
    let hardware = record.node.hardware.as_ref().and_then(|hardware| hardware.id()).or_else(|| record.hardware.clone());
    Case {
        id: CaseId::from_number(number),
        hardware: hardware.unwrap_or_else(|| HardwareId::new(record.node.name.as_str()).unwrap()),
        node: record.node.name.clone(),
        opened: NOW.minus(1.hours()),
        severity,
        findings: record.findings.iter().map(|open| open.finding.clone()).collect(),
        repair_step,
        steps: Vec::new(),
        state: CaseState::Open,
        boot_id: record.node.hardware.as_ref().and_then(|hardware| hardware.boot_id.clone()),
        advice: None,
        job_failures: Vec::new(),
        request: None,
    }
}

/// A case of this machine that ended with its return, that long ago.
pub(super) fn returned(serial: &str, repair_step: RepairStep, did: StepKind, ago: Span) -> Case {
    let mut case = case_of(&free("elsewhere").machine(serial).record, Severity::Reset, repair_step);
    case.steps.push(done(did, repair_step, ago));
    case.state = CaseState::Closed { at: NOW.minus(ago), how: CaseOutcome::Returned };
    case
}

pub(super) fn step(what: StepKind, repair_step: RepairStep, state: StepState, ago: Span) -> Step {
    let op = OpId::from_number(what as u64 + 1000 * repair_step as u64);
    Step { op, what, repair_step, state, at: NOW.minus(ago), attempts: 1, text: String::new() }
}

pub(super) fn done(what: StepKind, repair_step: RepairStep, ago: Span) -> Step {
    step(what, repair_step, StepState::Done, ago)
}

/// A run on a node, with this state of its job.
pub(super) fn run(node: &str, tests: &[&str], seen: ObservedJobState) -> ActiveRun {
    let tests = tests.iter().map(|id| test_id(id)).collect();
    let started = match &seen {
        ObservedJobState::Running { since, .. } => Some(*since),
        ObservedJobState::Ended { started, .. } => *started,
        ObservedJobState::Unknown { .. } | ObservedJobState::Absent | ObservedJobState::Pending { .. } => None,
    };
    let state = match &seen {
        ObservedJobState::Absent | ObservedJobState::Unknown { .. } => RunState::Planned,
        ObservedJobState::Pending { job, since } => RunState::Submitted { job: job.clone(), at: *since },
        ObservedJobState::Running { job, since } => RunState::Running { job: job.clone(), since: *since },
        ObservedJobState::Ended { job, at, .. } => RunState::Submitted { job: job.clone(), at: *at },
    };
    ActiveRun {
        run: Run {
            id: run_of(node),
            nodes: NonEmpty::one(name(node)),
            tests: NonEmpty::new(tests).unwrap(),
            state,
            purpose: WithReason::new(Purpose::Validation, "stale", "never tested"),
            case: None,
            planned: NOW.minus(1.minutes()),
            limit: 20.minutes(),
        },
        job: seen,
        started,
        cancelling: None,
        absent_since: None,
    }
}

/// The id of the run that `run` creates for a node.
pub(super) fn run_of(node: &str) -> RunId {
    RunId::from_number(node.bytes().fold(7_u64, |sum, byte| (sum * 251 + u64::from(byte)) % (1 << 48)))
}

pub(super) fn job() -> JobId {
    JobId("job-1".to_owned())
}

pub(super) fn pending(ago: Span) -> ObservedJobState {
    ObservedJobState::Pending { job: job(), since: NOW.minus(ago) }
}

pub(super) fn running(ago: Span) -> ObservedJobState {
    ObservedJobState::Running { job: job(), since: NOW.minus(ago) }
}

/// A cluster under test. `cycle` plans, executes the plan and lets a minute pass.
#[derive(Debug, Clone)]
pub(super) struct Cluster {
    pub(super) snapshot: Snapshot,
    pub(super) ids: IdSource,
    nodes: Vec<NodeFixture>,
}

/// The default policy and one test, `dl`.
pub(super) fn cluster() -> Cluster {
    let snapshot = Snapshot {
        at: NOW,
        planned_at: None,
        nodes: Vec::new(),
        runs: Vec::new(),
        cases: Vec::new(),
        recent: RecentActions::default(),
        spent: Span::ZERO,
        breaker: Breaker::Closed { since: None },
        pauses: Vec::new(),
        commands: Vec::new(),
        trials: Vec::new(),
        silence_reported: false,
        capabilities: Capabilities::ALL,
        policy: Arc::new(without_renewal()),
        tests: [test("dl")].into(),
    };
    Cluster { snapshot, ids: IdSource::new(1), nodes: Vec::new() }
}

/// A cluster in which the controller may take every step but eviction.
pub(super) fn acting() -> Cluster {
    cluster().policy(|policy| {
        policy.mode = Mode::Act;
        policy.allow = Allow { mark: true, drain: true, evict: false, reset: true, reboot: true, replace: true };
    })
}

impl Cluster {
    pub(super) fn node(mut self, node: NodeFixture) -> Self {
        self.nodes.push(node);
        self.assemble()
    }

    /// `count` busy and fresh nodes, so that a pool is large enough for the breaker.
    pub(super) fn fillers(mut self, count: usize) -> Self {
        self.nodes.extend((0..count).map(|n| busy(&format!("z{n:04}")).fresh()));
        self.assemble()
    }

    pub(super) fn tests(mut self, tests: Vec<TestPolicy>) -> Self {
        self.snapshot.tests = tests.into();
        self.assemble()
    }

    pub(super) fn policy(mut self, change: impl FnOnce(&mut Policy)) -> Self {
        change(Arc::make_mut(&mut self.snapshot.policy));
        self
    }

    pub(super) fn caps(mut self, caps: Capabilities) -> Self {
        self.snapshot.capabilities = caps;
        self
    }

    pub(super) fn run(mut self, run: ActiveRun) -> Self {
        self.snapshot.runs.push(run);
        self
    }

    /// The newest run was cancelled that long ago.
    pub(super) fn cancelling(mut self, why: crate::run::CancelReason, ago: Span) -> Self {
        let run = self.snapshot.runs.last_mut().expect("a run to cancel");
        run.cancelling = Some(Cancelling { why, since: NOW.minus(ago) });
        self
    }

    pub(super) fn case(mut self, case: Case) -> Self {
        self.snapshot.cases.push(case);
        self
    }

    pub(super) fn asks(mut self, what: CommandKind) -> Self {
        self.ask(what);
        self
    }

    pub(super) fn ask(&mut self, what: CommandKind) {
        let id = self.snapshot.commands.last().map_or(1, |last| last.id + 1);
        let request =
            PendingCommand { id, by: "ann".to_owned(), why: "I say so".to_owned(), at: self.snapshot.at, kind: what };
        self.snapshot.commands.push(request);
    }

    pub(super) fn paused(mut self, pool: Option<PoolName>, until: Option<Timestamp>) -> Self {
        let (by, why, since) = ("ann".to_owned(), "storage work".to_owned(), NOW.minus(1.hours()));
        self.snapshot.pauses.push(Pause { pool, by, why, since, until });
        self
    }

    pub(super) fn with(mut self, change: impl FnOnce(&mut Snapshot)) -> Self {
        change(&mut self.snapshot);
        self
    }

    fn assemble(mut self) -> Self {
        self.nodes.sort_by(|a, b| a.record.node.name.cmp(&b.record.node.name));
        for node in &self.nodes {
            if let Some(case) = node.case.as_ref().filter(|case| self.snapshot.cases.iter().all(|c| c.id != case.id)) {
                self.snapshot.cases.push(case.clone());
            }
        }
        let tests = &self.snapshot.tests;
        self.snapshot.nodes = self.nodes.iter().map(|node| node.clone().build(tests)).collect();
        self
    }

    pub(super) fn record(&mut self, text: &str) -> &mut NodeRecord {
        let name = name(text);
        self.snapshot.nodes.iter_mut().find(|record| record.node.name == name).unwrap()
    }

    pub(super) fn plan(&self) -> Plan {
        plan(&self.snapshot, &mut self.ids.clone())
    }

    /// Returns the actions of the plan, one line each.
    pub(super) fn lines(&self) -> Vec<String> {
        lines::of(&self.plan())
    }

    /// Returns only the submitted runs: `n1 dl+storage`.
    pub(super) fn chosen(&self) -> Vec<String> {
        lines::submitted(&self.plan())
    }

    pub(super) fn passed_over(&self, text: &str) -> Option<SkipReason> {
        let name = name(text);
        self.plan().skipped.into_iter().find(|(node, _)| *node == name).map(|(_, why)| why)
    }

    /// Plans, executes the plan, and lets a minute pass.
    pub(super) fn cycle(&mut self) -> Vec<String> {
        let plan = plan(&self.snapshot, &mut self.ids);
        model::carry_out(&mut self.snapshot, &plan.actions);
        self.wait(1.minutes());
        lines::of(&plan)
    }

    pub(super) fn wait(&mut self, span: Span) {
        self.snapshot.at = self.snapshot.at.plus(span);
    }

    /// Ends the run on this node with one result for all its tests.
    pub(super) fn ends(&mut self, node: &str, verdict: Verdict) {
        model::finish(&mut self.snapshot, &name(node), |_| verdict);
    }
}

impl Cluster {
    /// The agent of this node reports one result for all tests that it runs.
    pub(super) fn agent_reports(&mut self, node: &str, verdict: Verdict) {
        model::agent_reports(&mut self.snapshot, &name(node), verdict);
    }
}

/// The planner ignores the remedy; a separate test verifies that.
pub(super) fn with_remedy(mut open: OpenFinding, remedy: Remedy) -> OpenFinding {
    open.finding.remedy = remedy;
    open
}
