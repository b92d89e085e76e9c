//! Whether the limits of a policy can hold its periods: how long one pass of each period's tests over all nodes takes.
//!
//! The calculation is for nodes that are free; nodes in use need longer. The stalest tests run first, so a pass may use
//! what the passes of longer periods leave.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::{
    ids::{PoolName, TestId},
    policy::{Policy, TestPolicy, Window, WindowKind},
    time::{Span, Timestamp},
};

/// The time of a job besides its tests: a control cycle until it is submitted, its start, and the arrival of its result.
const JOB_OVERHEAD: Span = Span::minutes(1);
/// A limit is reported if it leaves less than this share of the nodes covered. Durations are not known more precisely.
const HELD: f64 = 0.95;
/// In minutes.
const WEEK: i64 = 7 * 24 * 60;
/// No cluster is larger.
const MAX_NODES: u32 = 1 << 20;

/// The nodes of one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSize {
    pub pool: PoolName,
    pub nodes: u32,
    /// Nodes whose agent reports: it runs the quick checks, and no job does.
    pub with_agents: u32,
}

/// What the periods of a policy need, compared with its limits.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CapacityPlan {
    pub nodes: u32,
    /// Concurrent validation jobs in a cluster of this size.
    pub jobs: u32,
    /// Node-hours a day that all periods together need.
    pub node_hours_per_day: f64,
    /// Ordered by period.
    pub passes: Vec<Pass>,
    /// Limits that do not hold a period, each with the remedy. Empty: all periods can be held.
    pub shortfalls: Vec<String>,
}

/// One pass of all tests of one period over their nodes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pass {
    pub tests: Vec<TestId>,
    pub period: Span,
    /// The usual duration on one node.
    pub duration: Span,
    /// How long the whole pass takes within the limits. `None`: it never ends.
    pub takes: Option<Span>,
    /// The setting that determines it.
    pub limited_by: String,
}

/// Computes the plan. `durations` are the measured ones; a test without one takes its `typical_duration`.
pub fn capacity_plan(
    policy: &Policy,
    tests: &[TestPolicy],
    pools: &[PoolSize],
    durations: &BTreeMap<TestId, Span>,
) -> CapacityPlan {
    let nodes = pools.iter().map(|pool| pool.nodes).sum();
    let jobs = policy.limits.jobs.for_nodes(nodes as usize);
    let tests: Vec<&TestPolicy> = tests.iter().filter(|test| test.routine && !test.cutoff.is_zero()).collect();
    let fleet = Fleet { policy, tests, pools, durations };
    let mut plan = CapacityPlan { nodes, jobs, ..CapacityPlan::default() };
    for period in fleet.periods() {
        plan.node_hours_per_day += fleet.work(&Scope::all(jobs), period) / HOUR * (DAY / millis(period));
    }
    let scopes = fleet.scopes(jobs);
    for period in fleet.periods() {
        plan.passes.extend(fleet.pass(&scopes, period));
    }
    plan.shortfalls = fleet.shortfalls(&scopes, plan.node_hours_per_day);
    plan
}

/// Returns the largest number of nodes whose periods these limits can hold; `None`: any number.
pub fn largest_fleet(policy: &Policy, tests: &[TestPolicy], durations: &BTreeMap<TestId, Span>) -> Option<u32> {
    // Limits of pools depend on how the nodes are distributed over them.
    let tests: Vec<TestPolicy> = tests.iter().map(|test| TestPolicy { pools: None, ..test.clone() }).collect();
    let mut policy = policy.clone();
    policy.limits.pools.clear();
    policy.windows.retain(|window| window.pool.is_none());
    let pool = PoolName::new("all").ok()?;
    let holds = |nodes| {
        let pools = [PoolSize { pool: pool.clone(), nodes, with_agents: 0 }];
        capacity_plan(&policy, &tests, &pools, durations).shortfalls.is_empty()
    };
    if holds(MAX_NODES) {
        return None;
    }
    let (mut good, mut bad) = (0, MAX_NODES);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if holds(middle) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    Some(good)
}

const HOUR: f64 = 3_600_000.0;
const DAY: f64 = 24.0 * HOUR;

#[expect(clippy::cast_precision_loss, reason = "durations of tests and periods are far below 2^53 milliseconds")]
fn millis(span: Span) -> f64 {
    span.millis() as f64
}

#[expect(clippy::cast_possible_truncation, reason = "a float converts with saturation")]
fn minutes(millis: f64) -> Span {
    Span::minutes((millis / 60_000.0 - 1e-6).ceil() as i64)
}

struct Fleet<'a> {
    policy: &'a Policy,
    /// Routine tests.
    tests: Vec<&'a TestPolicy>,
    pools: &'a [PoolSize],
    durations: &'a BTreeMap<TestId, Span>,
}

/// A limit, and what counts against it.
struct Scope<'a> {
    /// The setting.
    limit: String,
    slots: u32,
    pool: Option<&'a PoolName>,
    /// Only jobs with one of these tests count, for their whole duration. `None`: all jobs.
    tests: Option<BTreeSet<&'a TestId>>,
}

impl Scope<'_> {
    fn all(jobs: u32) -> Self {
        Self { limit: "limits.jobs".to_owned(), slots: jobs, pool: None, tests: None }
    }
}

/// The time that one pass takes within one limit.
struct PassTime {
    millis: f64,
    /// The slots with which it would end within its period.
    needed: f64,
}

impl<'a> Fleet<'a> {
    fn periods(&self) -> BTreeSet<Span> {
        self.tests.iter().map(|test| test.cutoff).collect()
    }

    fn scopes(&self, jobs: u32) -> Vec<Scope<'a>> {
        let limits = &self.policy.limits;
        let mut scopes = vec![Scope::all(jobs)];
        let known = |pool: &&PoolSize| limits.pools.contains_key(&pool.pool);
        scopes.extend(self.pools.iter().filter(known).map(|size| Scope {
            limit: format!("limits.pools.{}", size.pool),
            slots: limits.pools[&size.pool],
            pool: Some(&size.pool),
            tests: None,
        }));
        let mut shares: BTreeMap<&str, BTreeSet<&TestId>> = BTreeMap::new();
        for test in &self.tests {
            for share in &test.shares {
                shares.entry(share).or_default().insert(&test.id);
            }
            if let Some(slots) = test.max_concurrent {
                let limit = format!("tests.{}.max_concurrent", test.id);
                scopes.push(Scope { limit, slots, pool: None, tests: Some([&test.id].into()) });
            }
        }
        scopes.extend(shares.into_values().map(|tests| Scope {
            limit: "limits.per_share".to_owned(),
            slots: limits.per_share,
            pool: None,
            tests: Some(tests),
        }));
        scopes
    }

    /// Returns the nodes of a pool on which jobs run this test.
    fn nodes(&self, test: &TestPolicy, pool: &PoolSize) -> u32 {
        let applies = test.pools.as_ref().is_none_or(|pools| pools.contains(&pool.pool));
        match (applies, test.exclusive) {
            (false, _) => 0,
            (true, true) => pool.nodes,
            (true, false) => pool.nodes.saturating_sub(pool.with_agents),
        }
    }

    fn duration(&self, test: &TestPolicy) -> Span {
        self.durations.get(&test.id).copied().unwrap_or(test.typical_duration)
    }

    /// Returns the node-time of one pass of this period, in milliseconds.
    fn work(&self, scope: &Scope<'_>, period: Span) -> f64 {
        let pools = self.pools.iter().filter(|pool| scope.pool.is_none_or(|name| *name == pool.pool));
        pools.map(|pool| self.work_in(scope, period, pool)).sum()
    }

    fn work_in(&self, scope: &Scope<'_>, period: Span, pool: &PoolSize) -> f64 {
        let counts = |test: &TestPolicy| scope.tests.as_ref().is_none_or(|tests| tests.contains(&test.id));
        let started: Vec<u32> = self
            .tests
            .iter()
            .filter(|test| test.cutoff == period && counts(test))
            .map(|test| self.nodes(test, pool))
            .collect();
        let Some(jobs) = started.into_iter().max().filter(|jobs| *jobs > 0) else { return 0.0 };
        // A job carries everything that is due. It uses a share until it ends.
        let carried = self.tests.iter().filter(|test| match scope.tests {
            Some(_) => test.cutoff <= period,
            None => test.cutoff == period,
        });
        let tests: f64 =
            carried.map(|test| millis(self.duration(test)) * f64::from(self.nodes(test, pool).min(jobs))).sum();
        tests + millis(JOB_OVERHEAD) * f64::from(jobs)
    }

    /// Returns the share of time in which validation may start, averaged over the nodes that count.
    fn open_share(&self, scope: &Scope<'_>) -> f64 {
        let pools = self.pools.iter().filter(|pool| scope.pool.is_none_or(|name| *name == pool.pool));
        let (mut open, mut nodes) = (0.0, 0.0);
        for pool in pools {
            let quiet = quiet_minutes(&self.policy.windows, &pool.pool).iter().filter(|quiet| **quiet).count();
            let quiet = u32::try_from(quiet).map_or(1.0, f64::from);
            open += f64::from(pool.nodes) * (1.0 - quiet / millis(Span::from_millis(WEEK)));
            nodes += f64::from(pool.nodes);
        }
        if nodes > 0.0 { open / nodes } else { 1.0 }
    }

    /// Returns the time of a pass within one limit; `None` if nothing of this period counts against it.
    fn pass_time(&self, scope: &Scope<'_>, period: Span) -> Option<PassTime> {
        let work = self.work(scope, period);
        if work <= 0.0 {
            return None;
        }
        let open = self.open_share(scope);
        let longer = self.periods().into_iter().filter(|other| *other > period);
        let used: f64 = longer.map(|other| self.work(scope, other) / millis(other)).sum();
        let left = (f64::from(scope.slots) * open - used).max(0.0);
        let needed = if open > 0.0 { (used + work / millis(period)) / open } else { f64::INFINITY };
        Some(PassTime { millis: work / left, needed })
    }

    /// Returns the pass of one period, by the limit that makes it slowest.
    fn pass(&self, scopes: &[Scope<'_>], period: Span) -> Option<Pass> {
        let times = scopes.iter().filter_map(|scope| Some((scope, self.pass_time(scope, period)?)));
        let (scope, time) = times.max_by(|a, b| a.1.millis.total_cmp(&b.1.millis))?;
        let tests: Vec<&&TestPolicy> = self.tests.iter().filter(|test| test.cutoff == period).collect();
        Some(Pass {
            duration: tests.iter().map(|test| self.duration(test)).sum(),
            tests: tests.into_iter().map(|test| test.id.clone()).collect(),
            period,
            takes: time.millis.is_finite().then(|| minutes(time.millis)),
            limited_by: scope.limit.clone(),
        })
    }

    fn shortfalls(&self, scopes: &[Scope<'_>], node_hours: f64) -> Vec<String> {
        let mut lines = Vec::new();
        for period in self.periods() {
            for scope in scopes {
                let time = self.pass_time(scope, period);
                lines.extend(time.filter(|time| time.millis * HELD > millis(period)).map(|time| {
                    let tests = self.names(period, scope);
                    shortfall(&tests, period, scope, &time)
                }));
            }
        }
        lines.extend(self.policy.limits.node_hours_per_day.filter(|most| node_hours > *most).map(|most| {
            format!(
                "the routine tests need {node_hours:.digits$} node-hours a day, `limits.node_hours_per_day` is {most}: at \
                 most {:.0} % coverage; raise it, or lengthen the periods",
                (100.0 * most / node_hours).floor(),
                digits = if node_hours < 10.0 { 2 } else { 0 }
            )
        }));
        lines.extend(self.pools.iter().filter_map(|pool| self.long_quiet(pool)));
        lines
    }

    /// Reports a quiet time that is longer than the shortest period.
    fn long_quiet(&self, pool: &PoolSize) -> Option<String> {
        let quiet = longest_quiet(&self.policy.windows, &pool.pool);
        let period = self
            .periods()
            .into_iter()
            .find(|period| self.tests.iter().any(|test| test.cutoff == *period && self.nodes(test, pool) > 0))?;
        (quiet > period).then(|| {
            let all = Scope::all(0);
            format!(
                "in pool {} no validation starts for {quiet} in a row (`[[windows]]`), the period of {} is {period}: \
                 results become stale meanwhile; lengthen the period, or shorten the window",
                pool.pool,
                self.names(period, &all)
            )
        })
    }

    /// Names the tests of a period that count against a limit.
    fn names(&self, period: Span, scope: &Scope<'_>) -> String {
        const MAX_NAMED: usize = 4;
        let counts = |test: &TestPolicy| scope.tests.as_ref().is_none_or(|tests| tests.contains(&test.id));
        let all: Vec<&str> = self
            .tests
            .iter()
            .filter(|test| test.cutoff == period && counts(test))
            .map(|test| test.id.as_str())
            .collect();
        match all.len().checked_sub(MAX_NAMED) {
            Some(more @ 1..) => format!("{} and {more} more", all[..MAX_NAMED].join(", ")),
            _ => all.join(", "),
        }
    }
}

fn shortfall(tests: &str, period: Span, scope: &Scope<'_>, time: &PassTime) -> String {
    let remedy = if time.needed.is_finite() {
        format!("raise `{}` to {:.0}, or lengthen the period", scope.limit, (time.needed - 1e-6).ceil())
    } else {
        "shorten the quiet windows".to_owned()
    };
    if !time.millis.is_finite() {
        return format!(
            "{tests}: no capacity is left (`{}` is {}), the period is {period}: 0 % coverage; {remedy}",
            scope.limit, scope.slots
        );
    }
    format!(
        "{tests}: a full pass needs {} (`{}` is {}), the period is {period}: at most {:.0} % coverage; {remedy}",
        minutes(time.millis),
        scope.limit,
        scope.slots,
        (100.0 * millis(period) / time.millis).floor()
    )
}

/// Returns for each minute of a week whether validation may not start in this pool.
fn quiet_minutes(windows: &[Window], pool: &PoolName) -> Vec<bool> {
    let quiet: Vec<&Window> =
        windows.iter().filter(|window| window.kind == WindowKind::Quiet && window.applies_to(pool)).collect();
    if quiet.is_empty() {
        return Vec::new();
    }
    let at = |minute: i64| Timestamp::from_secs(minute * 60);
    (0..WEEK).map(|minute| quiet.iter().any(|window| window.contains(at(minute)))).collect()
}

/// Returns the longest time in a row in which validation may not start. A week repeats.
fn longest_quiet(windows: &[Window], pool: &PoolName) -> Span {
    let week = quiet_minutes(windows, pool);
    let (mut longest, mut run) = (0, 0);
    for quiet in week.iter().chain(&week) {
        run = if *quiet { run + 1 } else { 0 };
        longest = longest.max(run);
    }
    Span::minutes(longest.min(WEEK))
}

#[cfg(test)]
mod tests;
