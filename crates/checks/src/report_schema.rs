//! The versions behind an agent's report: of its schema, of the program that wrote it and of the policy in force.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The versions that produced a report, and its backlog. Controllers ignore fields that they do not know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// The version of the node's program; empty if not given.
    pub program: String,
    pub schema: Schema,
    /// The version of the policy in force on the agent.
    pub policy: u32,
    /// Reports queued on the node behind this one.
    #[serde(default)]
    pub queued: u32,
}

/// The schema version of reports. A controller reads its own version and the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Schema {
    pub major: u16,
    pub minor: u16,
}

impl Schema {
    /// The version that this program writes.
    pub const CURRENT: Self = Self { major: 1, minor: 2 };
    /// The oldest version that it reads.
    pub const OLDEST: Self = Self { major: 1, minor: 1 };
}

/// The version of a report that does not give one, as before 1.1.
impl Default for Schema {
    fn default() -> Self {
        Self { major: 1, minor: 0 }
    }
}

impl fmt::Display for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a schema version, such as 1.1")]
pub struct InvalidSchema(String);

impl FromStr for Schema {
    type Err = InvalidSchema;
    fn from_str(text: &str) -> Result<Self, InvalidSchema> {
        let parts = text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        parts.map(|(major, minor)| Self { major, minor }).ok_or_else(|| InvalidSchema(text.to_owned()))
    }
}

impl Serialize for Schema {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Schema {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}
