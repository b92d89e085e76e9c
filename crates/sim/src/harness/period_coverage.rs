//! Whether a policy holds its periods: hour by hour, the share of results that are younger than the period of their
//! test, among those that could be.
//!
//! A pair of node and test counts if the node is in service and, within the last period, was free for twice the test's
//! duration without interruption. A pair counts only after the controller has run for one period.

use std::collections::BTreeMap;

use doctor_core::{
    ids::{NodeName, TestId},
    policy::{Policy, TestPolicy},
    snapshot::TestRecord,
    time::{Span, Timestamp},
    view::{self, Urgency},
};
use doctor_engine::{cluster_state, snapshot};
use serde::Serialize;

use super::{
    score::{Score, round},
    session::{Session, SessionConfig, SessionError},
};
use crate::{WorldConfig, world::FreeStretch};

/// The default `cycle` of the service.
const CYCLE: Span = Span::from_secs(30);
/// A problem of the status that lasts this many hours is reported.
const LASTING: u32 = 24;

/// The result of simulating a policy with the shipped tests.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PeriodReport {
    pub nodes: u32,
    pub days: u32,
    pub seed: u64,
    pub tests: Vec<TestPeriods>,
    /// The lowest percentage of an hour, of all tests together.
    pub lowest_hour_percent: f64,
    /// Problems of the service in `doctor status` that were there for a day without interruption.
    pub lasting_problems: Vec<String>,
    pub validation_node_hours: f64,
    /// Validation as a share of all node-hours, and of those in which nodes were free.
    pub validation_percent: f64,
    pub validation_percent_of_free: f64,
    pub utilisation_percent: f64,
    pub user_jobs: u64,
    /// Jobs that waited for a validation job longer than assumed acceptable.
    pub user_jobs_disturbed: u64,
    pub faults: usize,
    pub faults_found: usize,
    pub false_alarms: u32,
}

/// One test of a [`PeriodReport`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TestPeriods {
    pub test: TestId,
    pub period: Span,
    /// Pairs that count, on average over the hours.
    pub pairs: f64,
    /// Results younger than the period, over all hours and in the worst one.
    pub fresh_percent: f64,
    pub lowest_hour_percent: f64,
}

/// Plays a policy with the shipped tests on a cluster of this many nodes.
///
/// # Errors If the policy is invalid or the store fails.
pub fn play(policy: Policy, nodes: u32, days: u32, seed: u64) -> Result<PeriodReport, SessionError> {
    let world = WorldConfig { shipped_tests: true, ..WorldConfig::of(nodes).with_seed(seed) };
    let policy = known_part(policy, &world);
    let config = SessionConfig { policy, every: CYCLE, ..SessionConfig::new(world) };
    let mut session = Session::new(config)?;
    let mut coverage = PeriodCoverage::new(&session);
    let until = session.now().plus(Span::days(i64::from(days)));
    session.run_until(until, |session, _| coverage.count(session))?;
    coverage.report(&session, (nodes, days, seed))
}

/// Removes from a policy what the simulated nodes do not have: other tests, and rules about real metrics.
fn known_part(mut policy: Policy, world: &WorldConfig) -> Policy {
    let catalogue = world.catalogue();
    let is_known = |id: &TestId| catalogue.get(id).is_some();
    policy.tests.retain(|id, settings| is_known(id) || settings.of.as_ref().is_some_and(is_known));
    policy.rules.clear();
    let variants: Vec<TestId> = policy.tests.keys().cloned().collect();
    let names = |id: &TestId| is_known(id) || variants.contains(id);
    for suite in policy.suites.values_mut() {
        suite.tests.iter_mut().for_each(|tests| tests.retain(&names));
    }
    let suites: Vec<TestId> = policy.suites.keys().chain(catalogue.suites().keys()).cloned().collect();
    for list in [&mut policy.repair.requalification, &mut policy.repair.examine] {
        list.retain(|id| names(id) || suites.contains(id));
    }
    policy
}

/// Pairs of one hour.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct HourCount {
    /// Pairs whose node was free for long enough.
    pairs: u32,
    /// Of these, pairs with a result that is younger than the period.
    fresh: u32,
}

impl HourCount {
    fn add(&mut self, other: Self) {
        self.pairs += other.pairs;
        self.fresh += other.fresh;
    }

    /// Returns the share of fresh results; 1 if there are no pairs.
    fn share(self) -> f64 {
        if self.pairs == 0 { 1.0 } else { f64::from(self.fresh) / f64::from(self.pairs) }
    }
}

/// The counts of all hours so far.
#[derive(Debug)]
struct PeriodCoverage {
    start: Timestamp,
    next: Timestamp,
    /// By test, one count per hour.
    hours: BTreeMap<TestId, Vec<HourCount>>,
    /// Problems of the status, by text without numbers.
    problems: BTreeMap<String, ProblemHours>,
}

/// How long a problem was there.
#[derive(Debug, Default)]
struct ProblemHours {
    text: String,
    /// Hours in a row until now, and the most so far.
    current: u32,
    longest: u32,
}

impl PeriodCoverage {
    /// Begins to count at the session's present time.
    fn new(session: &Session) -> Self {
        session.backend().world().record_free_time();
        let start = session.now();
        Self { start, next: start, hours: BTreeMap::new(), problems: BTreeMap::new() }
    }

    /// Counts if another hour has passed. To be called after each cycle.
    fn count(&mut self, session: &Session) -> Result<(), SessionError> {
        let now = session.now();
        if now < self.next {
            return Ok(());
        }
        self.next = now.plus(Span::hours(1));
        let stored = session.store().load_nodes()?;
        let free: BTreeMap<NodeName, Vec<FreeStretch>> = session.backend().world().free_time().into_iter().collect();
        for test in session.settings().tests.iter().filter(|test| test.routine && test.exclusive) {
            let mut count = HourCount::default();
            for (name, node) in stored.iter().filter(|(_, node)| !node.state.is_out_of_service()) {
                let stretches = free.get(name).map_or(&[][..], Vec::as_slice);
                let settled = node.records.get(&test.id).and_then(TestRecord::settled);
                count.add(self.pair(test, stretches, settled, now));
            }
            self.hours.entry(test.id.clone()).or_default().push(count);
        }
        self.count_problems(session)
    }

    fn pair(
        &self,
        test: &TestPolicy,
        stretches: &[FreeStretch],
        settled: Option<Timestamp>,
        now: Timestamp,
    ) -> HourCount {
        let since = now.minus(test.cutoff);
        let long_enough = test.typical_duration.times(2);
        let was_free = stretches
            .iter()
            .rev()
            .take_while(|stretch| stretch.to >= since)
            .any(|stretch| stretch.to.since(stretch.from.max(since)) >= long_enough);
        let counts = was_free && since >= self.start;
        let is_fresh = settled.is_some_and(|at| at >= since);
        HourCount { pairs: u32::from(counts), fresh: u32::from(counts && is_fresh) }
    }

    fn count_problems(&mut self, session: &Session) -> Result<(), SessionError> {
        let store = session.store();
        let Some((at, cluster)) = snapshot::last_observed(store)? else { return Ok(()) };
        // The cluster state is saved every few seconds of real time, in which hours are simulated: the status is that of the
        // last cycle before.
        let now = cluster.last_cycle(at);
        let facts = cluster_state::facts(store, Some(at), cluster, now)?;
        let status = view::status(&facts, &cluster_state::status_ledger(store, &facts)?);
        // The same problem with other numbers is the same problem.
        let kind = |text: &String| text.chars().filter(|letter| !letter.is_ascii_digit()).collect::<String>();
        let problems = status
            .attention
            .into_iter()
            .filter(|item| item.urgency != Urgency::Notice && item.kind.is_about_the_service());
        let present: BTreeMap<String, String> = problems.map(|item| (kind(&item.text), item.text)).collect();
        for (kind, hours) in &mut self.problems {
            if !present.contains_key(kind) {
                hours.current = 0;
            }
        }
        for (kind, text) in present {
            let hours = self.problems.entry(kind).or_default();
            hours.text = text;
            hours.current += 1;
            hours.longest = hours.longest.max(hours.current);
        }
        Ok(())
    }

    /// Returns the counts of all tests together, by hour.
    fn all_hours(&self) -> Vec<HourCount> {
        let hours = self.hours.values().map(Vec::len).max().unwrap_or(0);
        let mut all = vec![HourCount::default(); hours];
        for counts in self.hours.values() {
            all.iter_mut().zip(counts).for_each(|(all, count)| all.add(*count));
        }
        all
    }

    fn report(&self, session: &Session, (nodes, days, seed): (u32, u32, u64)) -> Result<PeriodReport, SessionError> {
        let score = Score::of(session)?;
        let all = f64::from(nodes) * 24.0 * f64::from(days);
        let free: Span = session
            .backend()
            .world()
            .free_time()
            .iter()
            .flat_map(|(_, stretches)| stretches)
            .map(|stretch| stretch.to.since(stretch.from))
            .sum();
        let percent = |part: f64, whole: f64| if whole > 0.0 { round(100.0 * part / whole) } else { 0.0 };
        let tests = session.settings().tests.iter();
        let tests = tests.filter_map(|test| Some(TestPeriods::of(test, self.hours.get(&test.id)?))).collect();
        let lasting = self.problems.values().filter(|problem| problem.longest >= LASTING);
        Ok(PeriodReport {
            nodes,
            days,
            seed,
            tests,
            lowest_hour_percent: lowest(&self.all_hours()),
            lasting_problems: lasting.map(|problem| problem.text.clone()).collect(),
            validation_node_hours: score.validation_node_hours,
            validation_percent: percent(score.validation_node_hours, all),
            validation_percent_of_free: percent(score.validation_node_hours, free.as_hours()),
            utilisation_percent: round(100.0 * score.utilisation),
            user_jobs: score.user_jobs,
            user_jobs_disturbed: score.user_jobs_disturbed,
            faults: score.faults_injected,
            faults_found: score.faults_found,
            false_alarms: score.false_alarms,
        })
    }
}

impl TestPeriods {
    #[expect(clippy::cast_precision_loss, reason = "a count of hours")]
    fn of(test: &TestPolicy, hours: &[HourCount]) -> Self {
        let counted: Vec<HourCount> = hours.iter().copied().filter(|hour| hour.pairs > 0).collect();
        let mut sum = HourCount::default();
        counted.iter().for_each(|hour| sum.add(*hour));
        Self {
            test: test.id.clone(),
            period: test.cutoff,
            pairs: round(f64::from(sum.pairs) / counted.len().max(1) as f64),
            fresh_percent: round(100.0 * sum.share()),
            lowest_hour_percent: lowest(&counted),
        }
    }
}

fn lowest(hours: &[HourCount]) -> f64 {
    round(100.0 * hours.iter().map(|hour| hour.share()).fold(1.0, f64::min))
}
