//! Tests that nodes look the same through every interface, and that powered-down nodes are recognised.

use std::{fs, path::PathBuf, time::Duration};

use doctor_backend::Backend;
use doctor_backend_slurm::{Rest, SlurmConfig};
use doctor_core::{node::Occupancy, time::Span};
use doctor_testbed::slurm::{Generation, Layout, PowerSaving, Rest as Knows};

use crate::stage::{Stage, seen, wait, wait_free};

pub(crate) fn slurmrestd_tells_the_same(generation: Generation) {
    let version = match generation {
        Generation::Debian12 => "v0.0.38",
        Generation::Debian13 => "v0.0.42",
    };
    for knows in [Knows::Socket, Knows::Token] {
        let layout = Layout { generation, nodes: 3, rest: Some(knows), ..Layout::default() };
        let Some(stage) = Stage::with("slurmrestd", &layout) else { return };
        let (at, token_file, user) = match knows {
            Knows::Socket => (stage.slurm.rest_socket().display().to_string(), None, None),
            Knows::Token => {
                let file = stage.data("token");
                fs::write(&file, stage.slurm.token("root").unwrap()).unwrap();
                let at = stage.slurm.rest_url().trim_start_matches("http://").to_owned();
                (at, Some(file), Some("root".to_owned()))
            }
        };
        let rest = Some(Rest { at, ca_file: None, version: version.to_owned(), token_file, user });
        let (asking, plain) = (stage.open_with(SlurmConfig { rest, ..stage.config.clone() }), stage.open());
        let change = |args: &[&str]| stage.slurm.run("scontrol", &[&["update"], args].concat()).unwrap();
        change(&["nodename=node1", "state=drain", "reason=doctor: xid-79 [x]", "extra={\"rack\":7}"]);
        change(&["nodename=node2", "state=drain", "reason=fan noise"]);
        let job = stage.slurm.submit(&["--nodelist=node3", "--wrap=exec sleep 600"]).unwrap();
        stage.slurm.wait_for_job(job, "RUNNING").unwrap();
        wait_free(&plain, "node1");
        assert_eq!(asking.snapshot().unwrap(), plain.snapshot().unwrap(), "{knows:?}");
    }
}

pub(crate) fn a_node_that_is_powered_down_is_left_asleep(generation: Generation) {
    let power_saving = Some(PowerSaving {
        suspend: PathBuf::from("/bin/true"),
        resume: PathBuf::from("/bin/true"),
        after: Duration::from_secs(5),
    });
    let layout = Layout { generation, nodes: 1, power_saving, ..Layout::default() };
    let Some(stage) = Stage::with("power saving", &layout) else { return };
    let margin = |suspend_margin| stage.open_with(SlurmConfig { suspend_margin, ..stage.config.clone() });
    let (careful, bold) = (margin(Span::hours(1)), margin(Span::from_secs(0)));
    let reason = |backend: &dyn Backend| match seen(backend, "node1").node.occupancy.clone() {
        Occupancy::Free => "free".to_owned(),
        Occupancy::Busy { by } => by.to_string(),
        Occupancy::Unknown { why } => why.to_string(),
    };
    // slurmctld may be powering the node down at this moment; it is never free.
    wait("power saving to be the reason", || match reason(&careful) {
        saving if saving.contains("power saving") || saving.contains("powered down") => Ok(()),
        other => {
            assert_ne!(other, "free");
            Err(other)
        }
    });
    wait("the node to be powered down", || match reason(&bold) {
        asleep if asleep == "it is powered down" => Ok(()),
        other => Err(other),
    });
    for _ in 0..3 {
        careful.snapshot().unwrap();
    }
    assert!(stage.slurm.node_state("node1").unwrap().contains("POWERED_DOWN"), "reading its state woke it");
}
