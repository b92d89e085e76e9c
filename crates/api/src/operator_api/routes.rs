//! The route table of readable endpoints, which the server, the description and the tests use.

use super::{
    audit, budget, cases, endpoint::Route, findings, fleet, history, measurements, nodes, plan, runs, status,
    test_catalog,
};

pub(super) const ROUTES: [&Route; 23] = [
    &status::STATUS,
    &status::COVERAGE,
    &fleet::MAP,
    &nodes::LIST,
    &nodes::ONE,
    &nodes::TIMELINE,
    &measurements::NODE_MEASUREMENTS,
    &findings::LIST,
    &cases::LIST,
    &cases::ONE,
    &cases::BUNDLE,
    &plan::PLAN,
    &runs::LIST,
    &runs::ONE,
    &runs::LOG,
    &runs::EVIDENCE,
    &history::LIST,
    &test_catalog::LIST,
    &test_catalog::ONE,
    &measurements::TEST_VALUES,
    &budget::BUDGET,
    &audit::LIST,
    &status::POLICY,
];
