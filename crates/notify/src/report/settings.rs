//! The section `[reports]` of the service's file. It stands alone: whoever reads such a file needs nothing else of reports.

use serde::{Deserialize, Serialize};

/// The form of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Page {
    /// One file with everything in it, plots too.
    Html,
    Markdown,
    Json,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReportSettings {
    pub daily: bool,
    pub weekly: bool,
    pub formats: Vec<Page>,
}

impl Default for ReportSettings {
    fn default() -> Self {
        Self { daily: false, weekly: false, formats: vec![Page::Html, Page::Markdown, Page::Json] }
    }
}
