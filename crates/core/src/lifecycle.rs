//! A node's way out of service and back.

use serde::{Deserialize, Serialize};

use crate::{case::StepKind, ids::RunId};

/// Where a node stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Life {
    /// Users may have it. Nothing failing is open against it.
    InService,
    /// Users may have it, but something failing is open: it is tested first.
    Suspect,
    /// Out of service, and nothing is being done to it right now.
    Quarantined,
    /// Out of service; this step was started and has not come to an end.
    Repairing { step: StepKind, tries: u32 },
    /// Out of service; this run decides whether it returns.
    Proving { run: RunId },
    /// Out of service for good, until somebody gives it back or another machine bears its name.
    Out,
    /// An operator intervened. We record and keep our hands off.
    Held { by: String },
}

impl Life {
    /// Users do not get this node, because of us.
    pub const fn is_out(&self) -> bool {
        matches!(self, Self::Quarantined | Self::Repairing { .. } | Self::Proving { .. } | Self::Out)
    }
}
