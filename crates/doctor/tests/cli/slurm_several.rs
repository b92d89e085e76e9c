//! A multi-node test on a real Slurm: one job of which each node runs its part, and trials that identify the faulty
//! node. GPUs and NCCL are stand-ins whose ranks really add up over sockets.

use std::{fs, os::unix::fs::PermissionsExt as _};

use doctor_testbed::slurm::{Generation, Layout};

use crate::{
    slurm_flows::{SlurmFixture, rows},
    this_machine::Service,
    workdir::{doctor_node, wait_until},
};

/// The stand-ins are slower than real GPUs, and hangs are given up soon.
pub(crate) const POLICY: &str = "[limits]\nresult_grace = \"2s\"\n[tests.collective-nodes]\n\
    params = { mode = \"nodes\", least = 1024, most = \"16KiB\", stall = \"5s\", gather = \"60s\" }\n\
    [[rules]]\nid = \"collective-nccl_nodes_busbw_bytes_per_s-floor\"\ncheck = \"collective\"\nmetric = \"nccl_nodes_busbw_bytes_per_s\"\n\
    below = 1.0\nwhere_measured = true\nof_all = true\nreason = \"collective-slow\"\nseverity = \"monitor\"\ntext = \"{value}\"\n\
    [[rules]]\nid = \"collective-link-slow\"\ncheck = \"collective\"\nmetric = \"nccl_link_percent_of_median\"\nbelow = 0.01\n\
    where_measured = true\nof_all = true\nreason = \"link-slow\"\nseverity = \"monitor\"\ntext = \"{value}\"\n";

/// `doctor-node` on nodes that are all this machine: they meet on a port derived from their job id, and the first GPU
/// of `node2` hangs.
const ON_A_NODE: &str = r#"#!/bin/sh
export DOCTOR_CUDA=LIBRARY DOCTOR_NCCL=LIBRARY DOCTOR_FAKE_NVIDIA_GPUS=2 DOCTOR_FAKE_NVIDIA_NODE="${SLURM_PROCID:-0}"
export DOCTOR_RENDEZVOUS="127.0.0.1:$((PORTS + SLURM_JOB_ID))"
[ "$SLURMD_NODENAME" = node2 ] && export DOCTOR_FAKE_NVIDIA_FAULTS="hang:$((2 * SLURM_PROCID))"
exec PROGRAM "$@"
"#;

fn the_one_that_fails_with_every_partner_is_named(generation: Generation, ports: &str) {
    let layout = Layout { generation, nodes: 4, ..Layout::default() };
    let Some(fixture) = SlurmFixture::start("runs over several nodes on Slurm", &layout) else { return };
    let SlurmFixture { workdir, slurm } = &fixture;
    let standin = doctor_testbed::fake_machine::fake_nvidia_library(doctor_node());
    let wrapped = ON_A_NODE.replace("LIBRARY", &standin.display().to_string()).replace("PORTS", ports);
    workdir.write("doctor-node", &wrapped.replace("PROGRAM", &doctor_node().display().to_string()));
    fs::set_permissions(workdir.path("doctor-node"), fs::Permissions::from_mode(0o755)).unwrap();
    workdir.write(
        "doctor.toml",
        &format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\ncycle = \"1s\"\nlease = \"5s\"\n\
             [backend.slurm]\nprograms = \"{}\"\nslurm_conf = \"{}\"\ndoctor_node = \"{}\"\nnode_state = \"{}\"\n",
            slurm.programs().display(),
            slurm.conf().display(),
            workdir.path("doctor-node").display(),
            workdir.path("node").display(),
        ),
    );
    workdir.policy_for(&["memory"], POLICY);
    let service = Service::start(workdir);
    wait_until("every node to be known as good", || rows(workdir, "memory").len() == 4);
    workdir.expect(0, &["test", "--nodes", "node[1-2]", "collective", "--why", "training is slow", "--yes"]);
    wait_until("the faulty node to be identified", || workdir.doctor(&["audit"]).out.contains("at fault: node2"));
    workdir.doctor(&["why", "node2"]).stdout_contains("fails together with each of node1, node3, node4");
    for node in ["node1", "node3", "node4"] {
        let why = workdir.doctor(&["why", node]);
        assert!(!why.out.contains("fails together"), "{}", why.out);
    }
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn the_one_that_fails_with_every_partner_is_named_on_the_older_slurm() {
    the_one_that_fails_with_every_partner_is_named(Generation::Debian12, "20000");
}

#[test]
fn the_one_that_fails_with_every_partner_is_named_on_the_newer_slurm() {
    the_one_that_fails_with_every_partner_is_named(Generation::Debian13, "24000");
}
