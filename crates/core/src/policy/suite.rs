//! A suite: a named set of tests.

use serde::{Deserialize, Serialize};

use crate::{ids::TestId, time::Span};

/// What a site says about a suite. What it leaves out is as the program's own suite of that name has it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteSettings {
    pub tests: Option<Vec<TestId>>,
    /// The controller runs these tests by itself when their last result is older than this.
    pub every: Option<Span>,
}
