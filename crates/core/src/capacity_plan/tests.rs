//! Table tests of the capacity plan.

use super::*;

fn test(id: &str, period: Span, duration: Span) -> TestPolicy {
    TestPolicy {
        id: TestId::new(id).unwrap(),
        suite: None,
        cutoff: period,
        limit: Span::hours(1),
        typical_duration: duration,
        exclusive: true,
        routine: true,
        maintenance: false,
        multi_node: false,
        max_concurrent: None,
        shares: Vec::new(),
        pools: None,
        place: crate::access::Place::Job,
    }
}

/// A sweep of 11 minutes every 6 hours and a weekly test of a minute; each job takes a minute more.
fn tests() -> Vec<TestPolicy> {
    vec![
        test("dcgm", Span::hours(6), Span::minutes(10)),
        test("fabric", Span::hours(6), Span::minutes(1)),
        test("storage", Span::days(7), Span::minutes(1)),
    ]
}

fn pool(name: &str, nodes: u32) -> PoolSize {
    PoolSize { pool: PoolName::new(name).unwrap(), nodes, with_agents: 0 }
}

fn policy(text: &str) -> Policy {
    Policy::with_site_settings(text).unwrap()
}

fn plan(policy_text: &str, tests: &[TestPolicy], pools: &[PoolSize]) -> CapacityPlan {
    capacity_plan(&policy(policy_text), tests, pools, &BTreeMap::new())
}

#[test]
fn a_limit_that_does_not_hold_a_period_is_reported_with_the_one_that_would() {
    // 500 nodes of 12 minutes are 100 hours; the weekly test takes a tenth of a job.
    for (jobs, takes, line) in [
        ("20", Some(Span::minutes(302)), None),
        ("\"5 or 4%\"", Some(Span::minutes(302)), None),
        ("17", Some(Span::minutes(356)), None),
        (
            "10",
            Some(Span::minutes(607)),
            Some(
                "dcgm, fabric: a full pass needs 10h 7m (`limits.jobs` is 10), the period is 6h: at most 59 % coverage; \
                 raise `limits.jobs` to 17, or lengthen the period",
            ),
        ),
        (
            "0",
            None,
            Some(
                "dcgm, fabric: no capacity is left (`limits.jobs` is 0), the period is 6h: 0 % coverage; raise \
                 `limits.jobs` to 17, or lengthen the period",
            ),
        ),
    ] {
        let plan = plan(&format!("[limits]\njobs = {jobs}"), &tests(), &[pool("a", 500)]);
        assert_eq!(plan.passes[0].takes, takes, "{jobs}");
        assert_eq!(plan.shortfalls.first().map(String::as_str), line, "{jobs}");
    }
}

#[test]
fn the_stalest_tests_run_first_and_leave_the_rest_to_shorter_periods() {
    let mut tests = tests();
    // 500 nodes of 168 minutes are 1400 hours, which take 8 1/3 jobs for a week.
    tests[2].typical_duration = Span::minutes(167);
    let takes = |jobs: u32| {
        let plan = plan(&format!("[limits]\njobs = {jobs}"), &tests, &[pool("a", 500)]);
        (plan.passes[0].takes, plan.passes[1].takes, plan.shortfalls.len())
    };
    assert_eq!(takes(25), (Some(Span::hours(6)), Some(Span::hours(56)), 0));
    assert_eq!(takes(10), (Some(Span::hours(60)), Some(Span::hours(140)), 1));
    assert_eq!(takes(8), (None, Some(Span::hours(175)), 1), "nothing is left");
}

#[test]
fn measured_durations_replace_the_declared_ones() {
    let durations = [(TestId::new("dcgm").unwrap(), Span::minutes(4))].into();
    let plan = capacity_plan(&policy("[limits]\njobs = 10"), &tests(), &[pool("a", 500)], &durations);
    assert_eq!((plan.passes[0].duration, plan.passes[0].takes), (Span::minutes(5), Some(Span::minutes(304))));
    assert!(plan.shortfalls.is_empty(), "{:?}", plan.shortfalls);
}

#[test]
fn a_pool_has_its_own_limit_and_its_own_tests() {
    let mut tests = tests();
    tests[0].pools = Some(vec![PoolName::new("a").unwrap()]);
    let plan = plan("[limits]\njobs = 100\npools = { a = 2, b = 2 }", &tests, &[pool("a", 100), pool("b", 100)]);
    // In pool b the sweep has no dcgm: 2 minutes a node.
    assert_eq!(plan.shortfalls.len(), 1, "{:?}", plan.shortfalls);
    assert!(plan.shortfalls[0].contains("needs 10h 7m (`limits.pools.a` is 2)"), "{:?}", plan.shortfalls);
    assert!(plan.shortfalls[0].contains("raise `limits.pools.a` to 4"), "{:?}", plan.shortfalls);
}

#[test]
fn a_shared_resource_is_in_use_until_its_job_ends() {
    let mut tests = tests();
    tests[2].shares = vec!["/data".to_owned()];
    let holds = |nodes| {
        let plan = plan("[limits]\njobs = \"10%\"", &tests, &[pool("a", nodes)]);
        assert!(plan.shortfalls.iter().all(|line| line.contains("raise `limits.per_share` to 2")), "{plan:?}");
        plan.shortfalls.is_empty()
    };
    // A job with all three tests takes 13 minutes: 775 of them fit into a week, and 816 cover 95 % of the nodes.
    assert!(holds(816) && !holds(817));
}

#[test]
fn a_test_with_a_limit_of_its_own_is_reported_by_it() {
    let mut tests = tests();
    tests[0].max_concurrent = Some(2);
    let plan = plan("[limits]\njobs = 100", &tests, &[pool("a", 100)]);
    assert!(plan.shortfalls[0].contains("raise `tests.dcgm.max_concurrent` to 4"), "{:?}", plan.shortfalls);
}

#[test]
fn quiet_windows_shorten_the_time_and_may_be_longer_than_a_period() {
    let window = |from: &str, to: &str| {
        format!("[limits]\njobs = 17\n[[windows]]\nkind = \"quiet\"\nfrom = \"{from}\"\nto = \"{to}\"\n")
    };
    let short = plan(&window("08:00", "12:00"), &tests(), &[pool("a", 500)]);
    assert!(short.shortfalls[0].contains("raise `limits.jobs` to 21"), "{:?}", short.shortfalls);
    let night = plan(&window("22:00", "06:00"), &tests(), &[pool("a", 10)]);
    let [line] = &night.shortfalls[..] else { panic!("{:?}", night.shortfalls) };
    assert!(line.contains("no validation starts for 8h in a row") && line.contains("dcgm, fabric is 6h"), "{line}");
    let always = plan(&window("00:00", "00:00"), &tests(), &[pool("a", 10)]);
    assert!(always.shortfalls[0].contains("shorten the quiet windows"), "{:?}", always.shortfalls);
}

#[test]
fn a_daily_budget_is_compared_with_what_all_periods_need() {
    let plan = plan("[limits]\njobs = 20\nnode_hours_per_day = 48.0", &tests(), &[pool("a", 500)]);
    assert!((plan.node_hours_per_day - 402.4).abs() < 0.1, "{}", plan.node_hours_per_day);
    let [line] = &plan.shortfalls[..] else { panic!("{:?}", plan.shortfalls) };
    assert!(line.contains("402 node-hours") && line.contains("at most 11 % coverage"), "{line}");
}

#[test]
fn agents_run_the_quick_checks_instead_of_jobs() {
    let mut quick = test("disk-space", Span::days(1), Span::minutes(10));
    quick.exclusive = false;
    let with = |agents| {
        let pools = [PoolSize { with_agents: agents, ..pool("a", 100) }];
        plan("[limits]\njobs = 1", std::slice::from_ref(&quick), &pools).passes.first().and_then(|pass| pass.takes)
    };
    assert_eq!(with(0), Some(Span::minutes(1100)));
    assert_eq!(with(90), Some(Span::minutes(110)));
    assert_eq!(with(100), None, "no job runs them");
}

#[test]
fn the_largest_fleet_is_the_last_one_that_the_limits_hold() {
    let none = BTreeMap::new();
    assert_eq!(largest_fleet(&policy("[limits]\njobs = 17"), &tests(), &none), Some(533));
    assert_eq!(largest_fleet(&policy(""), &tests(), &none), None, "the limit grows with the fleet");
    assert_eq!(largest_fleet(&policy("[limits]\njobs = 0"), &tests(), &none), Some(0));
}
