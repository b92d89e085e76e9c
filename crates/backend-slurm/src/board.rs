//! Writes a node's status on the node: one word in its note, and a feature that users can request.
//!
//! A feature lasts until slurmctld reconfigures; the next snapshot then shows that it is missing, and it is written again.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
};

use doctor_backend::{BackendError, Board, Effect, ToShow, one_by_one};
use doctor_core::{ids::NodeName, shown::Status};

use super::{SlurmBackend, config::SlurmConfig, marks::Update, nodes::NodeSeen, note::Note, programs::Does};

const OPERATION: &str = "write the status to the node";

/// Returns the number of the status on a node, if it is complete.
pub(super) fn number(node: &NodeSeen, config: &SlurmConfig) -> Option<u64> {
    let note = Note::of(node, config).note();
    let (number, of) = note.shown.as_deref()?.split_once('.')?;
    let feature = config.validated_feature.as_deref();
    let has = feature.is_some_and(|feature| node.features.iter().any(|one| one == feature));
    let should = feature.is_some() && note.status.as_deref() == Some(Status::Pass.code());
    // A status written under other settings has to be written again.
    u64::from_str_radix(number, 16).ok().filter(|_| has == should && of == feature.unwrap_or_default())
}

impl Board for SlurmBackend {
    fn number(&self, node: &NodeName) -> Option<u64> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).get(node).copied()
    }

    fn write(&self, node: &NodeName, what: &ToShow) -> Result<(), BackendError> {
        let found = self.nodes_named(OPERATION, std::slice::from_ref(node))?.into_iter().next();
        let now = found.ok_or_else(|| refused(format!("Slurm has no node {node}")))?;
        self.put(&now.name, &self.lines(&now, what)?)
    }

    /// Thousands of nodes have a handful of different statuses, and starting a command is slow: one command reads all nodes, and
    /// each status is written once for all of its nodes.
    fn write_all(&self, work: &[(NodeName, Arc<ToShow>)], workers: usize) -> Vec<(NodeName, BackendError)> {
        let alone =
            |work: &[(NodeName, Arc<ToShow>)]| one_by_one(work, workers, |node, what| Board::write(self, node, what));
        let names: Vec<NodeName> = work.iter().map(|(node, _)| node.clone()).collect();
        // One of them may not exist: writing one by one finds out which.
        let Ok(found) = self.nodes_named(OPERATION, &names) else { return alone(work) };
        let (mut failed, mut groups) = (Vec::new(), BTreeMap::<Lines, Vec<(NodeName, Arc<ToShow>)>>::new());
        for (one, now) in work.iter().zip(&found) {
            match self.lines(now, &one.1) {
                Ok(lines) => groups.entry(lines).or_default().push(one.clone()),
                Err(error) => failed.push((one.0.clone(), error)),
            }
        }
        for (lines, group) in groups {
            let names: Vec<&str> = group.iter().map(|(node, _)| node.as_str()).collect();
            if self.put(&names.join(","), &lines).is_err() {
                failed.extend(alone(&group));
            }
        }
        failed
    }
}

/// A status as values of Slurm's node fields.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Lines {
    /// The available and the active features, if they change. Slurm takes only the complete lists.
    features: Option<[String; 2]>,
    field: String,
}

fn refused(text: String) -> BackendError {
    BackendError { operation: OPERATION, text, effect: Effect::NoneGiveUp }
}

impl SlurmBackend {
    fn lines(&self, now: &NodeSeen, what: &ToShow) -> Result<Lines, BackendError> {
        let mut note = Note::of(now, &self.config).note();
        note.status = Some(what.shown.status.code().to_owned());
        let feature = self.config.validated_feature.as_deref();
        note.shown = Some(format!("{:016x}.{}", what.number, feature.unwrap_or_default()));
        let field = note.written(now, &self.config).map_err(|taken| refused(taken.to_string()))?;
        let there = what.shown.status == Status::Pass;
        Ok(Lines { features: feature.and_then(|feature| features(now, feature, there)), field })
    }

    /// Writes the note last: it records that the status is complete.
    fn put(&self, nodes: &str, lines: &Lines) -> Result<(), BackendError> {
        if let Some([available, active]) = &lines.features {
            let words = [
                "update".to_owned(),
                format!("nodename={nodes}"),
                format!("availablefeatures={available}"),
                format!("activefeatures={active}"),
            ];
            self.programs.run(OPERATION, "scontrol", &words, "", Does::Changes)?;
        }
        self.write(OPERATION, nodes, &Update { field: Some(lines.field.clone()), ..Update::default() })
    }
}

/// Returns the available and active features of a node after the change; `None`: unchanged. Only our feature is added or removed:
/// the others, which a node can be booted into, are the site's.
fn features(node: &NodeSeen, feature: &str, there: bool) -> Option<[String; 2]> {
    if node.features.iter().any(|one| one == feature) == there {
        return None;
    }
    let list = |words: &[String]| {
        let kept = words.iter().map(String::as_str).filter(|one| *one != feature);
        kept.chain(there.then_some(feature)).collect::<Vec<_>>().join(",")
    };
    Some([list(&node.available), list(&node.features)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_word_comes_and_goes_in_each_list() {
        let words = |text: &str| text.split(',').map(str::to_owned).collect::<Vec<_>>();
        let node = |available, active| NodeSeen {
            available: words(available),
            features: words(active),
            ..NodeSeen::default()
        };
        let lists = |available: &str, active: &str| Some([available.to_owned(), active.to_owned()]);
        assert_eq!(features(&node("a,mig,b", "a"), "ok", true), lists("a,mig,b,ok", "a,ok"));
        assert_eq!(features(&node("a,ok,mig", "a,ok"), "ok", false), lists("a,mig", "a"));
        assert_eq!(features(&node("a,ok,mig", "a"), "ok", true), lists("a,mig,ok", "a,ok"));
        assert_eq!(features(&node("a", "a"), "ok", false), None);
    }
}
