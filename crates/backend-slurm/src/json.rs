//! Parses nodes from the JSON of slurmrestd and `--json`, in three dialects. Pure.
//!
//! Slurm 22.05 writes a state as one word with a list of flags, and times as numbers; from 24.11 on, states are lists and numbers
//! are wrapped in objects; between those two and 26.05, fields come and go. Every form is accepted for each field, and a missing
//! field is unknown.

use doctor_core::time::Timestamp;
use serde::Deserialize;

use super::{
    nodes::{NodeListError, Reason, SlurmNode, declared, gpus},
    states::SlurmNodeState,
};

/// The most bytes of a response that are read.
pub(super) const MAX_RESPONSE_BYTES: usize = 512 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub(super) enum ResponseError {
    #[error("the response has {0} bytes, expected at most {MAX_RESPONSE_BYTES}")]
    TooLong(usize),
    #[error("the response is not a list of nodes in JSON")]
    Json(#[source] serde_json::Error),
    #[error("Slurm reports: {0}")]
    Reported(String),
    #[error("the response is the table of `sinfo`, which is by groups; request nodes (`/slurm/v0.0.42/nodes`)")]
    Grouped,
    #[error(transparent)]
    Nodes(#[from] NodeListError),
}

#[derive(Deserialize)]
struct NodesResponse {
    #[serde(default)]
    nodes: Vec<NodeEntry>,
    #[serde(default)]
    errors: Vec<ErrorEntry>,
    #[serde(default)]
    sinfo: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct ErrorEntry {
    #[serde(default)]
    error: String,
    #[serde(default)]
    description: String,
}

#[derive(Deserialize)]
struct NodeEntry {
    #[serde(default)]
    name: String,
    #[serde(default)]
    state: StringList,
    #[serde(default)]
    state_flags: StringList,
    #[serde(default)]
    partitions: StringList,
    #[serde(default)]
    active_features: StringList,
    #[serde(default)]
    features: StringList,
    #[serde(default)]
    gres: Option<String>,
    #[serde(default)]
    cpus: Option<u64>,
    #[serde(default)]
    real_memory: Option<u64>,
    #[serde(default)]
    boot_time: Number,
    #[serde(default)]
    last_busy: Number,
    #[serde(default)]
    reason: Option<String>,
    #[serde(default)]
    reason_set_by_user: Option<String>,
    #[serde(default)]
    comment: Option<String>,
    #[serde(default)]
    extra: Option<String>,
    #[serde(default)]
    instance_type: Option<String>,
}

/// A list, a text with commas, or nothing.
#[derive(Deserialize, Default)]
#[serde(untagged)]
enum StringList {
    List(Vec<String>),
    Text(String),
    #[default]
    None,
}

impl StringList {
    fn iter(&self) -> impl Iterator<Item = &str> {
        let (list, text) = match self {
            Self::List(list) => (list.as_slice(), ""),
            Self::Text(text) => (&[][..], text.as_str()),
            Self::None => (&[][..], ""),
        };
        list.iter().map(String::as_str).chain(text.split(',').filter(|item| !item.is_empty()))
    }

    fn to_vec(&self) -> Vec<String> {
        self.iter().map(str::to_owned).collect()
    }
}

/// A number, or an object that states whether it is set.
#[derive(Deserialize, Default)]
#[serde(untagged)]
enum Number {
    Plain(i64),
    Wrapped {
        #[serde(default)]
        set: bool,
        #[serde(default)]
        infinite: bool,
        #[serde(default)]
        number: i64,
    },
    #[default]
    None,
}

impl Number {
    fn timestamp(&self) -> Option<Timestamp> {
        let seconds = match self {
            Self::Plain(number) => *number,
            Self::Wrapped { set: true, infinite: false, number } => *number,
            Self::Wrapped { .. } | Self::None => 0,
        };
        // Slurm writes 0 for never.
        (1..=253_402_300_799).contains(&seconds).then(|| Timestamp::from_secs(seconds))
    }
}

/// Parses a response of any dialect.
pub(super) fn parse(bytes: &[u8]) -> Result<Vec<SlurmNode>, ResponseError> {
    if bytes.len() > MAX_RESPONSE_BYTES {
        return Err(ResponseError::TooLong(bytes.len()));
    }
    let answer: NodesResponse = serde_json::from_slice(bytes).map_err(ResponseError::Json)?;
    if let Some(first_error) = answer.errors.first() {
        let text = if first_error.description.is_empty() { &first_error.error } else { &first_error.description };
        return Err(ResponseError::Reported(text.chars().take(200).collect()));
    }
    if answer.sinfo.is_some() {
        return Err(ResponseError::Grouped);
    }
    if answer.nodes.is_empty() {
        return Err(NodeListError::Empty.into());
    }
    Ok(answer.nodes.into_iter().map(node).collect())
}

fn node(entry: NodeEntry) -> SlurmNode {
    let text = |value: Option<String>| value.filter(|text| !text.is_empty());
    SlurmNode {
        state: SlurmNodeState::from_words(entry.state.iter().chain(entry.state_flags.iter())),
        partitions: entry.partitions.to_vec(),
        features: entry.active_features.to_vec(),
        available_features: entry.features.to_vec(),
        gpus: gpus(entry.gres.as_deref().unwrap_or_default()),
        declared: declared(entry.gres.as_deref().unwrap_or_default()),
        cpus: entry.cpus.unwrap_or_default(),
        memory: entry.real_memory.unwrap_or_default(),
        booted: entry.boot_time.timestamp(),
        last_busy: entry.last_busy.timestamp(),
        reason: text(entry.reason).map(|text| Reason { text, by: entry.reason_set_by_user }),
        comment: entry.comment.unwrap_or_default(),
        extra: entry.extra.unwrap_or_default(),
        instance_type: text(entry.instance_type),
        name: entry.name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_core::node::Declared;

    #[test]
    fn every_dialect_declares_the_configured_gpus_whatever_is_in_use() {
        for (version, bytes) in [
            ("22.05", include_bytes!("fixtures/22.05/slurmrestd-v0.0.38-nodes.json").as_slice()),
            ("22.05, all in use", include_bytes!("fixtures/22.05/sinfo-alloc.json").as_slice()),
            ("22.05, down", include_bytes!("fixtures/22.05/sinfo-down.json").as_slice()),
            ("24.11", include_bytes!("fixtures/24.11/slurmrestd-v0.0.42-nodes.json").as_slice()),
            ("26.05", include_bytes!("fixtures/26.05/slurmrestd-v0.0.45-nodes.json").as_slice()),
        ] {
            for node in parse(bytes).unwrap() {
                assert_eq!(node.declared, Declared::gpus(8), "{version}: {}", node.name);
            }
        }
    }
}
