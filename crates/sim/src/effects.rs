//! The record of effects: what really happened in the world, in order, whatever caused it. Invariants are checked
//! against it.
//!
//! The world keeps the record, not the controller: after a controller was killed, it shows whether anything was done
//! twice. It does not contain faults, which the controller has to find.

use std::{
    fs::File,
    hash::Hasher,
    io::{BufWriter, Write},
    path::Path,
};

use doctor_core::{
    fnv::Fnv1a,
    ids::{NodeName, OpId, RunId, TestId},
    node::OurMark,
    run::JobEnd,
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

/// One effect and its time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    pub at: Timestamp,
    #[serde(flatten)]
    pub what: EffectKind,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "effect")]
pub enum EffectKind {
    /// A job was created for a run.
    Submitted {
        run: RunId,
        nodes: Vec<Target>,
        tests: Vec<TestId>,
    },
    /// A run was submitted that already had a job.
    SubmittedAgain {
        run: RunId,
    },
    Started {
        run: RunId,
        nodes: Vec<Target>,
    },
    CancelRequested {
        run: RunId,
    },
    Ended {
        run: RunId,
        how: JobEnd,
        started: Option<Timestamp>,
    },
    /// A result document left the node.
    Document {
        run: RunId,
        node: NodeName,
        bytes: u64,
        /// The tests with results in it; none if it was corrupted and must be rejected.
        answers: Vec<TestId>,
    },
    /// An agent sent a report.
    Report {
        node: NodeName,
        number: u64,
    },
    /// A user job was given a node on which our job is still running.
    UserWaiting {
        run: RunId,
        node: NodeName,
    },
    /// That user job has started, this much later than possible.
    UserStarted {
        node: NodeName,
        after: Span,
    },
    Marked {
        op: OpId,
        node: NodeName,
        mark: OurMark,
    },
    Unmarked {
        op: OpId,
        node: NodeName,
        mark: OurMark,
    },
    Drained {
        op: OpId,
        node: NodeName,
    },
    /// User work was asked to leave, and left.
    Evicted {
        op: OpId,
        node: NodeName,
    },
    Undrained {
        op: OpId,
        node: NodeName,
    },
    /// The node was disturbed: reset, rebooted or taken away for replacement.
    Disturbed {
        op: OpId,
        node: NodeName,
        how: Disturbance,
        user: bool,
        in_progress: bool,
    },
    /// The disturbance is over.
    Recovered {
        node: NodeName,
    },
    /// An operation was requested that had been done already.
    RepeatedOperation {
        op: OpId,
        node: NodeName,
    },
    /// An incident from a script or by chance.
    Incident {
        text: String,
        done: bool,
    },
    /// The shared directory could not be written.
    ShareTrouble {
        run: RunId,
        text: String,
    },
}

/// A node that a job was created for or started on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    pub node: NodeName,
    /// How long it had not been free; absent if it was free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_for: Option<Span>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Disturbance {
    Reset,
    Reboot,
    Replace,
}

/// The append-only record of effects.
#[derive(Debug, Default)]
pub struct EffectLog {
    entries: Vec<Effect>,
    file: Option<BufWriter<File>>,
    /// The first error of the file. The world continues; readers must check that the file is complete.
    trouble: Option<std::io::Error>,
}

impl EffectLog {
    /// Creates a record that is also appended to a file; each line is flushed before the next.
    ///
    /// # Errors If the file cannot be opened.
    pub fn with_file(path: &Path) -> std::io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Self { file: Some(BufWriter::new(file)), ..Self::default() })
    }

    pub(crate) fn add(&mut self, at: Timestamp, what: EffectKind) {
        let effect = Effect { at, what };
        if let Some(file) = &mut self.file {
            let written = serde_json::to_writer(&mut *file, &effect)
                .map_err(std::io::Error::from)
                .and_then(|()| file.write_all(b"\n"))
                .and_then(|()| file.flush());
            if let Err(error) = written {
                self.trouble.get_or_insert(error);
                self.file = None;
            }
        }
        self.entries.push(effect);
    }

    pub fn entries(&self) -> &[Effect] {
        &self.entries
    }

    /// Returns why the file is incomplete, if it is.
    pub const fn trouble(&self) -> Option<&std::io::Error> {
        self.trouble.as_ref()
    }

    /// Returns a number that is equal for equal records: FNV-1a over their serialised form.
    pub fn digest(&self) -> u64 {
        let mut hash = Hashed(Fnv1a::default());
        for effect in &self.entries {
            serde_json::to_writer(&mut hash, effect).expect("an effect is plain data, and the hash takes any byte");
        }
        hash.0.finish()
    }
}

/// A writer that hashes its input.
struct Hashed(Fnv1a);

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Hasher::write(&mut self.0, bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// An unreadable file of effects.
#[derive(Debug, thiserror::Error)]
pub enum BadEffects {
    #[error("reading effects from `{path}`")]
    Read { path: String, source: std::io::Error },
    #[error("reading effects from `{path}`: line {line} is none")]
    Line { path: String, line: usize, source: serde_json::Error },
}

/// Reads what [`EffectLog::with_file`] wrote. An incomplete last line, which was being written when the world ended, is
/// left out.
///
/// # Errors If the file cannot be read or a complete line is not an effect.
pub fn read_effects(path: &Path) -> Result<Vec<Effect>, BadEffects> {
    let display = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|source| BadEffects::Read { path: display.clone(), source })?;
    parse(&text, &display)
}

pub(crate) fn parse(text: &str, path: &str) -> Result<Vec<Effect>, BadEffects> {
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    complete
        .lines()
        .enumerate()
        .map(|(index, line)| {
            serde_json::from_str(line).map_err(|source| BadEffects::Line {
                path: path.to_owned(),
                line: index + 1,
                source,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn effects() -> Vec<EffectKind> {
        let run = RunId::from_number(7);
        let node = NodeName::new("n1").unwrap();
        vec![
            EffectKind::Started { run, nodes: vec![Target { node: node.clone(), taken_for: Some(Span::minutes(1)) }] },
            EffectKind::Ended { run, how: JobEnd::Exited, started: Some(Timestamp::from_secs(4)) },
            EffectKind::Disturbed {
                op: OpId::from_number(3),
                node,
                how: Disturbance::Reboot,
                user: false,
                in_progress: true,
            },
        ]
    }

    #[test]
    fn effects_survive_a_round_trip_and_an_incomplete_last_line_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("effects.jsonl");
        let mut log = EffectLog::with_file(&path).unwrap();
        for what in effects() {
            log.add(Timestamp::from_secs(5), what);
        }
        assert_eq!(read_effects(&path).unwrap(), log.entries());
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"{\"at\":\"2026").unwrap();
        assert_eq!(read_effects(&path).unwrap(), log.entries());
        file.write_all(b"\n").unwrap();
        assert!(read_effects(&path).unwrap_err().to_string().contains("line 4"));
    }

    #[test]
    fn the_digest_depends_on_the_order_of_effects() {
        let digest = |effects: Vec<EffectKind>| {
            let mut log = EffectLog::default();
            effects.into_iter().for_each(|what| log.add(Timestamp::from_secs(5), what));
            log.digest()
        };
        assert_eq!(digest(effects()), digest(effects()));
        assert_ne!(digest(effects()), digest(effects().into_iter().rev().collect()));
    }
}
