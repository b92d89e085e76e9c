//! The section `[reports]` of the service's configuration, separate from the code that writes reports.

use serde::{Deserialize, Serialize};

/// The format of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReportFormat {
    /// One file with everything in it, including plots.
    Html,
    Markdown,
    Json,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReportSettings {
    pub daily: bool,
    pub weekly: bool,
    pub formats: Vec<ReportFormat>,
}

impl Default for ReportSettings {
    fn default() -> Self {
        Self {
            daily: true,
            weekly: false,
            formats: vec![ReportFormat::Html, ReportFormat::Markdown, ReportFormat::Json],
        }
    }
}
