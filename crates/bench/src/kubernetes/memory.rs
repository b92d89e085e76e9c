//! M2: the memory of the controller, at its peak and in steady cycles.
//!
//! The default policy is in force, so five validation jobs are pending in the cluster and polled in every cycle;
//! nothing runs them here. A cycle is a second instead of thirty, so that half a minute has as many cycles as a quarter
//! of an hour.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use serde_json::json;

use super::{
    cluster::Cluster,
    population::{NODES, PODS},
    service::{Service, Validation, as_made},
};
use crate::{Measured, figure::Figure};

/// How long it is sampled after every node was seen.
const STEADY: Duration = Duration::from_secs(25);
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
const MEGABYTE: f64 = 1e6;

pub(crate) fn run() -> Result<Measured> {
    let cluster = match Cluster::start()? {
        Ok(cluster) => cluster,
        Err(why) => return Ok(Measured::NotAvailable(why)),
    };
    let mut service = Service::start(&cluster, Validation::Default)?;
    let anonymous = service.running.watch_memory("RssAnon");
    eprintln!("  checking: the service sees every node as created");
    service.wait_until_seen(&as_made())?;
    let listed = anonymous.peak();
    eprintln!("  measuring: steady cycles");
    let began = Instant::now();
    let mut steady = 0;
    while began.elapsed() < STEADY {
        thread::sleep(SAMPLE_INTERVAL);
        service.running.check()?;
        steady = steady.max(service.running.memory("RssAnon")?);
    }
    let (most, resident) = (anonymous.peak(), service.running.peak_rss()?);
    drop(anonymous);
    service.stop_and_compare(&as_made())?;

    let mb = |bytes: u64| bytes as f64 / MEGABYTE;
    let inputs = json!({
        "nodes": NODES, "pods": PODS, "policy": "default", "cycle_s": 1, "steady_s": STEADY.as_secs(),
        "store": "SQLite", "most_in_the_first_look_mb": mb(listed), "most_in_steady_cycles_mb": mb(steady),
    });
    let figure = |name: &str, bytes, note: &str| Figure {
        name: name.to_owned(),
        value: mb(bytes),
        unit: "MB",
        inputs: inputs.clone(),
        note: note.to_owned(),
    };
    Ok(Measured::Figures(vec![
        figure(
            "rss_anon_mb",
            most,
            "peak RssAnon of doctor serve from its start to the end of the steady cycles, in 10^6 bytes",
        ),
        figure("rss_mb", resident, "VmHWM of the same, in 10^6 bytes"),
    ]))
}
