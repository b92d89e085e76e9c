//! SSH hosts that hang, and hosts that leave: neither stops the service, nor the tests of other hosts.

use std::{fs, time::Instant};

use doctor_testbed::{fake_machine::FakeMachine, ssh::HungHosts};
use serde_json::{Value, json};

use crate::{
    out_of_the_box,
    slurm_flows::rows,
    ssh_flows::SshFixture,
    this_machine::Service,
    workdir::{Workdir, wait_until},
};

fn occupancies(workdir: &Workdir) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let nodes = workdir.json(&["nodes"]);
    let rows = nodes.as_array().cloned().unwrap_or_default();
    rows.iter().map(|row| (text(&row["node"]), text(&row["occupancy"]))).collect()
}

/// Everything as shipped: the intervals, the limits, the policy. On commit c2d5b30d each cycle took longer than the lease, and
/// nothing was ever tested.
#[test]
fn a_good_host_among_seventy_that_hang_is_validated_with_the_shipped_settings() {
    let Some(site) = SshFixture::start("seventy SSH hosts that hang", 1) else { return };
    let SshFixture { workdir, fleet } = &site;
    out_of_the_box::replace_machine(workdir, &FakeMachine::hgx_h100());
    let program = out_of_the_box::stand_in_program(workdir);
    // In one list, the good host is the last.
    let hung = HungHosts::start((1..=70).map(|number| format!("a-hung{number:02}"))).unwrap();
    fs::write(fleet.path("hostfile"), hung.hostfile() + "host1\n").unwrap();
    workdir.write("policy.toml", "");
    workdir.write(
        "doctor.toml",
        &format!(
            "store = \"doctor.db\"\ndata = \"data\"\npolicy = \"policy.toml\"\n[backend.ssh]\nhostfile = \"{}\"\n\
             ssh_config = \"{}\"\ndoctor_node = \"{}\"\nstate = \"{}\"\n",
            fleet.path("hostfile").display(),
            fleet.ssh_config().display(),
            program.display(),
            fleet.path("s").display(),
        ),
    );
    let began = Instant::now();
    let service = Service::start(workdir);
    wait_until("the first result", || rows(workdir, "dl").iter().any(|row| row["verdict"] == "pass"));
    println!("the good host passed the deep test {:?} after the start of the service", began.elapsed());
    let found = occupancies(workdir);
    assert_eq!(found.len(), 71, "{found:?}");
    for (node, occupancy) in found.iter().filter(|(node, _)| node != "host1") {
        assert_eq!(occupancy, "unknown", "{node}");
    }
    workdir.doctor(&["why", "a-hung07"]).stdout_contains("did not answer within");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    for lost in ["the lease expired", "lease lost"] {
        assert!(!log.contains(lost), "{log}");
    }
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}

#[test]
fn a_run_on_a_host_that_is_removed_ends_with_the_reason() {
    let Some(site) = SshFixture::start("an SSH host that is removed", 2) else { return };
    let SshFixture { workdir, fleet } = &site;
    workdir.policy_for(
        &[],
        "[limits]\nresult_grace = \"1s\"\n\
         [tests.slow.params]\ntimeout = \"15m\"\ncommand = [\"/bin/sh\", \"-c\", \"exec sleep 600\"]\n",
    );
    let service = Service::start(workdir);
    wait_until("a run on each host", || site.run_on(0).is_some() && site.run_on(1).is_some());
    let active = || workdir.json(&["status"])["running"]["running"].as_u64();
    wait_until("both to be seen running", || active() == Some(2));
    fs::write(fleet.path("hostfile"), "host2\n").unwrap();
    wait_until("the end of the run", || !rows(workdir, "slow").is_empty());
    let found = rows(workdir, "slow");
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0]["node"], &found[0]["reason"]), (&json!("host1"), &json!("node-vanished")), "{found:?}");
    assert!(site.run_on(1).is_some() && active() == Some(1), "the run of the other host goes on");
    let (code, log) = service.stop();
    assert_eq!(code, Some(0), "{log}");
    workdir.expect(0, &["db", "verify"]).stdout_contains("The store is consistent.");
}
