//! A multi-node test over SSH hosts: a part on each, and trials that identify the faulty host. GPUs and NCCL are
//! stand-ins whose ranks really add up over sockets.

use doctor_testbed::fake_machine;

use crate::{
    slurm_flows::rows,
    slurm_several::POLICY,
    ssh_flows::{SshFixture, put},
    this_machine::Service,
    workdir::{doctor_node, wait_until},
};

/// Replaces systemd-run, which would only execute its command: the first GPU of `host2` hangs.
const SYSTEMD_RUN: &str = r#"#!/bin/sh
while [ "$1" != -- ]; do shift; done
shift
export DOCTOR_CUDA=LIBRARY DOCTOR_NCCL=LIBRARY DOCTOR_FAKE_NVIDIA_GPUS=2 DOCTOR_FAKE_NVIDIA_NODE="${DOCTOR_RANK:-0}"
[ "$(hostname)" = host2 ] && export DOCTOR_FAKE_NVIDIA_FAULTS="hang:$((2 * DOCTOR_RANK))"
exec "$@"
"#;

#[test]
fn hosts_are_tested_together_and_the_one_that_fails_with_every_partner_is_named() {
    let Some(site) = SshFixture::start("runs over several SSH hosts", 4) else { return };
    let SshFixture { workdir, fleet } = &site;
    let library = fake_machine::fake_nvidia_library(doctor_node()).display().to_string();
    for host in fleet.hosts() {
        std::fs::create_dir(host.home().join("bin")).unwrap();
        put(&host.home().join("bin/systemd-run"), &SYSTEMD_RUN.replace("LIBRARY", &library));
        std::fs::write(host.home().join(".bashrc"), "PATH=/root/bin:$PATH\n").unwrap();
        site.on(&host.name, "mkdir -p /run/systemd/system");
    }
    workdir.policy_for(&["memory"], POLICY);
    let service = Service::start(workdir);
    wait_until("every host to be known as good", || rows(workdir, "memory").len() == 4);
    workdir.expect(0, &["test", "--nodes", "host[1-2]", "collective", "--why", "training is slow", "--yes"]);
    wait_until("the faulty node to be identified", || workdir.doctor(&["audit"]).out.contains("at fault: host2"));
    workdir.doctor(&["why", "host2"]).stdout_contains("fails together with each of host1, host3, host4");
    for host in ["host1", "host3", "host4"] {
        let why = workdir.doctor(&["why", host]);
        assert!(!why.out.contains("fails together"), "{}", why.out);
    }
    // Each host's part is recorded once: the run, and the trials with good partners.
    let mut parts: Vec<String> =
        rows(workdir, "collective-nodes").iter().map(|row| format!("{} {}", row["run"], row["node"])).collect();
    let all = parts.len();
    parts.sort_unstable();
    parts.dedup();
    assert_eq!((parts.len(), all % 2), (all, 0), "{parts:?}");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}
