//! Entry points for the fuzzer: the server's responses, parts of which users wrote.

use std::collections::BTreeMap;

use doctor_core::{node::Occupancy, time::Timestamp};

use super::{DstackConfig, api_types::Fleet, run_types::Run, view::View};

/// Returns the names of the free instances of a project with these fleets and runs; `None`: they do not parse.
pub fn free(fleets: &[u8], runs: &[u8]) -> Option<Vec<String>> {
    let fleets: Vec<Fleet> = serde_json::from_slice(fleets).ok()?;
    let runs: Vec<Run> = serde_json::from_slice(runs).ok()?;
    let empty = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let now = Timestamp::from_secs(1_794_703_000);
    let (ends, complaints, found) = (&empty.0, &empty.1, &empty.2);
    let view = View {
        fleets: &fleets,
        runs: &runs,
        user: "doctor",
        now,
        idle_terminations: ends,
        health_messages: complaints,
        ssh_states: found,
    };
    let seen = view.seen_nodes(&DstackConfig::default());
    let free = seen.iter().filter(|seen| seen.node.occupancy == Occupancy::Free);
    Some(free.map(|seen| seen.node.name.to_string()).collect())
}
