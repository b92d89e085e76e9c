//! Kills the controller between any two changes in Slurm: the node stays closed to users, and the successor continues.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use doctor_backend::{Backend, BackendError, Change, NodeOp, contract_tests::Length};
use doctor_backend_slurm::{SlurmBackend, SlurmConfig};
use doctor_core::{
    ids::IdSource,
    node::{MarkKind, OurMark},
    run::ObservedJobState,
};
use doctor_testbed::slurm::Generation;

use crate::stage::{Stage, has, node, run_id, seen, wait, wait_job};

const NODE: &str = "node2";
const MAINTENANCE: OurMark = OurMark { kind: MarkKind::Maintenance, case: None };
const UNHEALTHY: OurMark = OurMark { kind: MarkKind::Unhealthy, case: None };

/// The change at which a controller is killed.
#[derive(Debug, Clone, Copy)]
struct Killed {
    /// The number of the change.
    at: usize,
    /// Whether that change has taken effect.
    after: bool,
}

/// Slurm's commands, of which those that change something fail as if the controller had been killed.
fn programs(stage: &Stage, killed: Killed) -> PathBuf {
    let real = stage.config.programs.as_ref().unwrap();
    let folder = stage.data(&format!("killed-{}-{}", killed.at, killed.after));
    fs::create_dir_all(&folder).unwrap();
    let count = folder.join("count");
    fs::write(&count, "").unwrap();
    for name in ["scontrol", "squeue", "sbatch", "scancel"] {
        let path = folder.join(name);
        fs::write(&path, script(&real.join(name), &count, name, killed)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    folder
}

fn script(real: &Path, count: &Path, name: &str, Killed { at, after }: Killed) -> String {
    let (real, count) = (real.display(), count.display());
    let reads = if name == "squeue" { "*" } else { "show" };
    let last = if after { format!("{real} \"$@\" >&2;") } else { String::new() };
    format!(
        "#!/bin/sh\ncase \"$1\" in {reads}) exec {real} \"$@\" ;; esac\necho x >> {count}\n\
         if [ \"$(wc -l < {count})\" -ge {at} ]; then {last} echo 'Socket timed out' >&2; exit 1; fi\nexec {real} \"$@\"\n"
    )
}

struct Operator {
    ids: IdSource,
}

impl Operator {
    fn apply(&mut self, backend: &SlurmBackend, what: Change) -> Result<(), BackendError> {
        backend.apply(&node(NODE), &NodeOp { op: self.ids.op(), what })
    }
}

/// Performs a whole requalification run, until it is killed. Returns whether it completed.
fn requalify(stage: &Stage, killed: Killed, operator: &mut Operator, number: u64) -> bool {
    let config = SlurmConfig { programs: Some(programs(stage, killed)), ..stage.config.clone() };
    let (backend, run) = (stage.open_with(config), run_id(number));
    let submitted = backend.submit(&Stage::request(run, &[NODE], Length::Endless));
    let begun = submitted.is_ok() && backend.cancel(run).is_ok();
    let mut tidied = || {
        wait_job(&backend, run, "the end of the run", |seen| matches!(seen, ObservedJobState::Ended { .. }));
        let mut apply = || operator.apply(&backend, Change::Unmark(MAINTENANCE));
        // A job that is still ending is retried; a killed controller does not retry.
        wait("the reservation to go", || match apply() {
            Err(error) if error.text.contains("is in use") => Err(error.to_string()),
            other => Ok(other),
        })
        .is_ok()
    };
    let ended = begun && tidied();
    // A successor finds the current state. Whatever it is, the node is closed to users.
    assert!(!stage.is_open_to_users(NODE), "killed at {killed:?}");
    stage.open().cancel(run).unwrap();
    ended
}

pub(crate) fn killed_anywhere_the_node_is_never_open_to_users(generation: Generation) {
    let Some(stage) = Stage::new("killed controllers", generation) else { return };
    let successor = stage.open();
    let mut operator = Operator { ids: IdSource::new(run_id(0).number()) };
    operator.apply(&successor, Change::Mark(UNHEALTHY)).unwrap();
    operator.apply(&successor, Change::Drain).unwrap();
    let (mut number, mut steps) = (1, 0);
    'steps: for at in 1.. {
        assert!(at < 20, "it ends after a bounded number of steps");
        for after in [false, true] {
            let killed = Killed { at, after };
            if requalify(&stage, killed, &mut operator, number) {
                break 'steps;
            }
            (number, steps) = (number + 1, steps + 1);
            assert!(
                has(&successor, NODE, MarkKind::Unhealthy) && has(&successor, NODE, MarkKind::Cordon),
                "{killed:?}"
            );
            if has(&successor, NODE, MarkKind::Maintenance) {
                wait("the leftovers to be removed", || {
                    operator.apply(&successor, Change::Unmark(MAINTENANCE)).map_err(|error| error.to_string())
                });
            }
            assert!(!stage.is_open_to_users(NODE), "cleaned up after {killed:?}");
            let left = stage.slurm.run("scontrol", &["show", "reservation", "-o"]).unwrap();
            assert!(!left.contains("ReservationName=doctor-"), "{killed:?}: {left}");
        }
    }
    assert!(steps >= 14, "reserved, flagged, resumed, submitted, cancelled, noted, drained, deleted: {steps}");
    operator.apply(&successor, Change::Undrain).unwrap();
    operator.apply(&successor, Change::Unmark(UNHEALTHY)).unwrap();
    assert!(seen(&successor, NODE).node.marks.ours.is_empty());
    wait("the node to take users", || {
        stage.is_open_to_users(NODE).then_some(()).ok_or_else(|| stage.slurm.node_state(NODE).unwrap())
    });
}
