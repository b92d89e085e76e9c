//! `doctor rejudge`, on the store of a demo.

use crate::workdir::{Workdir, demo_copy};

fn workdir() -> Workdir {
    let workdir = demo_copy();
    std::fs::create_dir(workdir.path("data")).unwrap();
    workdir.write("doctor.toml", "store = \"doctor.db\"\ndata = \"data\"\n[backend.sim]\nsocket = \"sim.sock\"\n");
    workdir
}

const SLOWER_THAN_OTHERS: &str = r#"
version = 7
[[rules]]
id = "nccl-beside-peers"
check = "nccl"
metric = "allreduce_bandwidth"
below_percent_of_peers = 100.0
peers_at_least = 3
severity = "monitor"
reason = "slower-than-peers"
text = "{value}, others reach {limit}"
"#;

#[test]
fn with_the_original_rules_every_verdict_is_unchanged() {
    let workdir = workdir();
    let output = workdir.expect(0, &["rejudge", "--since", "30d"]);
    output.stdout_contains("0 would differ").stdout_contains("Nothing was changed");
    let json = workdir.json(&["rejudge"]);
    assert!(json["reclassified"].as_u64().unwrap() > 50, "{json}");
    assert_eq!(json["reclassified"], json["unchanged"]);
}

#[test]
fn a_peer_rule_shows_the_differences_and_changes_nothing() {
    let workdir = workdir();
    let before = workdir.expect(0, &["history", "--json"]).out;
    workdir.write("stricter.toml", SLOWER_THAN_OTHERS);
    workdir
        .expect(1, &["rejudge", "--policy", "stricter.toml"])
        .stdout_contains("slower-than-peers")
        .stdout_contains("policy version 7");
    let json = workdir.json(&["rejudge", "--policy", "stricter.toml"]);
    let differs = json["changed"].as_array().unwrap();
    // Each result is compared with the median of its peers: about half are below, and results without peers are not
    // compared.
    let (found, judged) = (differs.len() as u64, json["reclassified"].as_u64().unwrap());
    assert!(found > 5 && found < judged / 2, "{found} of {judged}");
    for difference in differs {
        assert_eq!(difference["test"], "nccl", "{difference}");
        assert_eq!(difference["new"]["reason"], "slower-than-peers", "{difference}");
        assert_eq!(difference["new"]["severity"], "monitor", "{difference}");
    }
    let one = differs[0]["node"].as_str().unwrap();
    let of_one = workdir.json(&["rejudge", "--policy", "stricter.toml", "--node", one]);
    assert!(of_one["changed"].as_array().unwrap().iter().all(|difference| difference["node"] == one));
    assert!(of_one["reclassified"].as_u64().unwrap() < judged);
    assert_eq!(workdir.expect(0, &["history", "--json"]).out, before);

    workdir.write("wrong.toml", "[[rules]]\nid = \"x\"\n");
    workdir.expect(4, &["rejudge", "--policy", "wrong.toml"]).stderr_contains("wrong.toml");
}
