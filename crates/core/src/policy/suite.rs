//! A suite: a named set of tests.

use serde::{Deserialize, Serialize};

use crate::{ids::TestId, time::Span};

/// A site's settings of a suite. Absent values are those of the built-in suite with that name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteSettings {
    pub tests: Option<Vec<TestId>>,
    /// The controller runs these tests when their last result is older than this. Zero: only on request.
    pub every: Option<Span>,
    /// While the controller runs one of these tests because of `every`, the node has our maintenance mark and gets no
    /// new work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub maintenance: Option<bool>,
}
