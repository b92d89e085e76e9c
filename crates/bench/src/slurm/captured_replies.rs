//! A cluster in use, as printed by Slurm's client programs: recorded from a real slurmctld through the service's own
//! queries, with the states that responding nodes would have.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use doctor_testbed::slurm::Slurm;
use tempfile::TempDir;

use super::{NODES, is_drained, node_name, service};

/// Derives the file of a reply from the program and its arguments. The service starts each line of the queue with a
/// random token, which is replaced by a constant.
const SCRIPT_HEADER: &str = r#"#!/bin/sh
name=$(basename "$0")
token=$(printf %s "$*" | sed -n 's/.*--format=\([0-9a-f]*\).*/\1/p')
token=${token:-none}
answer=@ANSWERS@/$(printf %s "$name $*" | sed "s/$token/TOKEN/" | cksum | cut -d ' ' -f 1)
"#;

/// Runs the real program and records its output.
const RECORD: &str = r#"
SLURM_CONF=@CONF@ @PROGRAMS@/"$name" "$@" >"$answer.new" || { rm "$answer.new"; exit 1; }
sed "s/^$token/TOKEN/" "$answer.new" >"$answer"
cat "$answer.new"
rm "$answer.new"
"#;

/// Prints the recorded output. A query that failed or was never made fails.
const REPLAY: &str = r#"
[ "$token" = none ] && exec cat "$answer"
exec sed "s/^TOKEN/$token/" "$answer"
"#;

/// The service refuses to start without one of them. It asks the first three only, and starts no job.
const PROGRAMS: [&str; 5] = ["scontrol", "squeue", "sacct", "sbatch", "scancel"];

/// Of ten nodes, this many are free.
const FREE_OF_TEN: usize = 3;

/// The states of nodes without a slurmd, as slurmctld prints them.
const NOT_RESPONDING_STATES: [&str; 2] = ["State=IDLE+NOT_RESPONDING ", "State=IDLE* "];
const NOT_RESPONDING_DRAINED_STATES: [&str; 2] = ["State=IDLE+DRAIN+NOT_RESPONDING ", "State=IDLE*+DRAIN "];

pub(super) struct CapturedReplies {
    folder: TempDir,
    bytes: usize,
}

impl CapturedReplies {
    /// Records the queries of one cycle on this Slurm, and edits the replies to those of a cluster in use.
    pub(super) fn of(slurm: &Slurm, program: &Path) -> Result<Self> {
        let folder = tempfile::tempdir().context("creating a folder for the capture")?;
        let (answers, record, replay) =
            (folder.path().join("answers"), folder.path().join("record"), folder.path().join("bin"));
        fs::create_dir(&answers).context("creating a folder for answers")?;
        let settle = |script: &str| {
            let (conf, programs) = (slurm.conf(), slurm.programs());
            format!("{SCRIPT_HEADER}{script}")
                .replace("@CONF@", &conf.display().to_string())
                .replace("@PROGRAMS@", &programs.display().to_string())
                .replace("@ANSWERS@", &answers.display().to_string())
        };
        for (directory, script) in [(&record, settle(RECORD)), (&replay, settle(REPLAY))] {
            fs::create_dir(directory).context("creating a folder for programs")?;
            for name in PROGRAMS {
                write_program(&directory.join(name), &script)?;
            }
        }
        service(program, &record, None)?.run_cycle().context("capturing the output of Slurm")?;
        let mut bytes = 0;
        for answer in fs::read_dir(&answers).context("reading the answers")? {
            let path = answer.context("reading the answers")?.path();
            let text = fs::read_to_string(&path).context("reading an answer")?;
            if text.starts_with("NodeName=") && text.lines().count() == NODES {
                let text = set_states_in_use(&text)?;
                bytes = text.len();
                fs::write(&path, text).context("writing an answer")?;
            }
        }
        ensure!(bytes > 0, "the service did not query all nodes");
        Ok(Self { folder, bytes })
    }

    /// Returns the folder of the replaying programs.
    pub(super) fn programs(&self) -> PathBuf {
        self.folder.path().join("bin")
    }

    /// Returns the size of the reply with all nodes, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

fn write_program(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).with_context(|| format!("writing {}", path.display()))
}

/// Replaces the state of each node by that on a cluster in use.
fn set_states_in_use(text: &str) -> Result<String> {
    let mut changed = 0;
    let lines = text.lines().map(|line| {
        let number = line.strip_prefix("NodeName=node").and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
        let state = if number.is_some_and(is_free) { "State=IDLE " } else { "State=ALLOCATED " };
        let replaced = |line: &str, from: &[&str], to: &str| {
            from.iter().find(|from| line.contains(**from)).map(|from| line.replacen(from, to, 1))
        };
        let line = replaced(line, &NOT_RESPONDING_DRAINED_STATES, "State=IDLE+DRAIN ")
            .or_else(|| replaced(line, &NOT_RESPONDING_STATES, state));
        changed += usize::from(line.is_some());
        line.unwrap_or_default() + "\n"
    });
    let text: String = lines.collect();
    ensure!(changed == NODES, "{changed} of {NODES} nodes are in an expected state");
    Ok(text)
}

const fn is_free(number: usize) -> bool {
    number % 10 < FREE_OF_TEN
}

/// Returns the expected occupancy of the nodes.
pub(super) fn expected_in_use() -> BTreeMap<String, &'static str> {
    let used = |node| if !is_drained(node) && is_free(node) { "free" } else { "busy" };
    (1..=NODES).map(|node| (node_name(node), used(node))).collect()
}
