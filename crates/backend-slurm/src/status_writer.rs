//! Writes a node's status on the node: one word in its note, and a feature that users can request.
//!
//! A feature lasts until slurmctld reconfigures; the next snapshot then shows that it is missing, and it is written again.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
};

use doctor_backend::{BackendError, Effect, RenderedStatus, StatusWriter, write_each};
use doctor_core::{ids::NodeName, node_status::NodeHealth};

use super::{
    SlurmBackend, config::SlurmConfig, marks::NodeUpdate, node_comment::Note, nodes::SlurmNode, programs::Access,
};

const OPERATION: &str = "write the status to the node";

/// Returns the number of the status on a node, if it is complete.
pub(super) fn status_number(node: &SlurmNode, config: &SlurmConfig) -> Option<u64> {
    let note = Note::read(node, config).into_note();
    let (number, of) = note.status_number.as_deref()?.split_once('.')?;
    let feature = config.validated_feature.as_deref();
    let has = feature.is_some_and(|feature| node.features.iter().any(|one| one == feature));
    let should = feature.is_some() && note.status.as_deref() == Some(NodeHealth::Pass.code());
    // A status written under other settings has to be written again.
    u64::from_str_radix(number, 16).ok().filter(|_| has == should && of == feature.unwrap_or_default())
}

impl StatusWriter for SlurmBackend {
    fn status_hash(&self, node: &NodeName) -> Option<u64> {
        self.status_numbers.lock().unwrap_or_else(PoisonError::into_inner).get(node).copied()
    }

    fn write(&self, node: &NodeName, what: &RenderedStatus) -> Result<(), BackendError> {
        let found = self.nodes_named(OPERATION, std::slice::from_ref(node))?.into_iter().next();
        let now = found.ok_or_else(|| permanent_error(format!("Slurm has no node {node}")))?;
        self.write_update(&now.name, &self.status_update(&now, what)?)
    }

    /// Thousands of nodes have a handful of different statuses, and starting a command is slow: one command reads all nodes, and
    /// each status is written once for all of its nodes.
    fn write_all(&self, work: &[(NodeName, Arc<RenderedStatus>)], workers: usize) -> Vec<(NodeName, BackendError)> {
        let alone = |work: &[(NodeName, Arc<RenderedStatus>)]| {
            write_each(work, workers, |node, what| StatusWriter::write(self, node, what))
        };
        let names: Vec<NodeName> = work.iter().map(|(node, _)| node.clone()).collect();
        // One of them may not exist: writing one by one finds out which.
        let Ok(found) = self.nodes_named(OPERATION, &names) else { return alone(work) };
        let (mut failed, mut groups) =
            (Vec::new(), BTreeMap::<StatusUpdate, Vec<(NodeName, Arc<RenderedStatus>)>>::new());
        for (one, now) in work.iter().zip(&found) {
            match self.status_update(now, &one.1) {
                Ok(lines) => groups.entry(lines).or_default().push(one.clone()),
                Err(error) => failed.push((one.0.clone(), error)),
            }
        }
        for (lines, group) in groups {
            let names: Vec<&str> = group.iter().map(|(node, _)| node.as_str()).collect();
            if self.write_update(&names.join(","), &lines).is_err() {
                failed.extend(alone(&group));
            }
        }
        failed
    }
}

/// A status as values of Slurm's node fields.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct StatusUpdate {
    /// The available and the active features, if they change. Slurm takes only the complete lists.
    features: Option<[String; 2]>,
    field: String,
}

fn permanent_error(text: String) -> BackendError {
    BackendError { operation: OPERATION, text, effect: Effect::NotAppliedPermanent }
}

impl SlurmBackend {
    fn status_update(&self, now: &SlurmNode, what: &RenderedStatus) -> Result<StatusUpdate, BackendError> {
        let mut note = Note::read(now, &self.config).into_note();
        note.status = Some(what.status.status.code().to_owned());
        let feature = self.config.validated_feature.as_deref();
        note.status_number = Some(format!("{:016x}.{}", what.hash, feature.unwrap_or_default()));
        let field = note.to_field(now, &self.config).map_err(|in_use| permanent_error(in_use.to_string()))?;
        let there = what.status.status == NodeHealth::Pass;
        Ok(StatusUpdate { features: feature.and_then(|feature| features(now, feature, there)), field })
    }

    /// Writes the note last: it records that the status is complete.
    fn write_update(&self, nodes: &str, lines: &StatusUpdate) -> Result<(), BackendError> {
        if let Some([available, active]) = &lines.features {
            let args = [
                "update".to_owned(),
                format!("nodename={nodes}"),
                format!("availablefeatures={available}"),
                format!("activefeatures={active}"),
            ];
            self.programs.run(OPERATION, "scontrol", &args, "", Access::Write)?;
        }
        self.write(OPERATION, nodes, &NodeUpdate { field: Some(lines.field.clone()), ..NodeUpdate::default() })
    }
}

/// Returns the available and active features of a node after the change; `None`: unchanged. Only our feature is added or removed:
/// the others, which a node can be booted into, are the site's.
fn features(node: &SlurmNode, feature: &str, there: bool) -> Option<[String; 2]> {
    if node.features.iter().any(|one| one == feature) == there {
        return None;
    }
    let list = |names: &[String]| {
        let others = names.iter().map(String::as_str).filter(|one| *one != feature);
        others.chain(there.then_some(feature)).collect::<Vec<_>>().join(",")
    };
    Some([list(&node.available_features), list(&node.features)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_feature_is_added_to_and_removed_from_each_list() {
        let split = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        let node = |available, active| SlurmNode {
            available_features: split(available),
            features: split(active),
            ..SlurmNode::default()
        };
        let lists = |available: &str, active: &str| Some([available.to_owned(), active.to_owned()]);
        assert_eq!(features(&node("a,mig,b", "a"), "ok", true), lists("a,mig,b,ok", "a,ok"));
        assert_eq!(features(&node("a,ok,mig", "a,ok"), "ok", false), lists("a,mig", "a"));
        assert_eq!(features(&node("a,ok,mig", "a"), "ok", true), lists("a,mig,ok", "a,ok"));
        assert_eq!(features(&node("a", "a"), "ok", false), None);
    }
}
