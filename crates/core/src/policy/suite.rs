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
    /// While one of these tests runs because of that, the node bears our maintenance mark: nobody new comes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<bool>,
}
