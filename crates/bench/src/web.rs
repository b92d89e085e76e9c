//! M17, the API: a hundred clients of a controller with 10,000 nodes while results come in.
//!
//! The cluster is simulated in its own process; the controller is the shipped `doctor serve`, on SQLite. Each client
//! requests the resources of a dashboard in turn, over a persistent connection, and pauses a fifth of a second after
//! each response. It requests the fleet map with its last ETag, as a browser does. `api_p99_ms` covers all requests of
//! all clients; `rss_anon_mb` is the controller's peak anonymous memory since its start.
//!
//! Correctness check: every response is 200 or 304, the map has every node, and results came in during the measurement.

pub(crate) mod browser;
mod fixture;
mod reader;

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use self::{
    fixture::WebFixture,
    reader::{Reader, TimedRequest},
};
use crate::{Measured, figure::Figure, shipped};

const NODES: usize = 10_000;
const READERS: usize = 100;
const LASTS: Duration = Duration::from_secs(30);
const MEGABYTE: f64 = 1e6;

pub(crate) fn run() -> Result<Measured> {
    let program = shipped::doctor()?;
    eprintln!("  starting a simulated cluster of {NODES} nodes and a controller");
    let stage = WebFixture::new(&program, NODES)?;
    let before = stage.verify_nodes(NODES)?;
    eprintln!("  {READERS} readers for {} s", LASTS.as_secs());
    let over = AtomicBool::new(false);
    let read: Result<Vec<Vec<TimedRequest>>> = thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS)
            .map(|number| {
                let (over, address) = (&over, stage.address());
                scope.spawn(move || Reader::new(address, number).read_until(over))
            })
            .collect();
        thread::sleep(LASTS);
        over.store(true, Ordering::Relaxed);
        readers.into_iter().map(|reader| reader.join().map_err(|_| anyhow::anyhow!("a reader panicked"))?).collect()
    });
    let requests: Vec<TimedRequest> = read?.into_iter().flatten().collect();
    let after = stage.verify_nodes(NODES)?;
    ensure!(after > before, "no results arrived during the reads: {before} before, {after} after");
    let mut millis: Vec<f64> = requests.iter().map(|request| request.took.as_secs_f64() * 1e3).collect();
    millis.sort_by(f64::total_cmp);
    let part = |percent: usize| millis.get((millis.len() * percent / 100).min(millis.len().saturating_sub(1))).copied();
    let (p50, p99) = (part(50).context("no requests were made")?, part(99).context("no requests were made")?);
    let slowest = millis.last().copied().unwrap_or(0.0);
    let (map, packed) = stage.map_bytes()?;
    let inputs = json!({
        "nodes": NODES, "readers": READERS, "seconds": LASTS.as_secs(), "requests": requests.len(), "results": after - before,
        "map_bytes": map, "map_bytes_gzip": packed, "store": "SQLite", "cluster": "simulated",
    });
    let figure = |name: &str, value, unit, note: String| Figure {
        name: name.to_owned(),
        value,
        unit,
        inputs: inputs.clone(),
        note,
    };
    Ok(Measured::Figures(vec![
        figure(
            "api_p99_ms",
            p99,
            "ms",
            format!("from the request to the last byte; median {p50:.1}, maximum {slowest:.1}"),
        ),
        figure(
            "rss_anon_mb",
            stage.peak_rss_anon() as f64 / MEGABYTE,
            "MB",
            "peak RssAnon of doctor serve, in 10^6 bytes".to_owned(),
        ),
        figure("rss_mb", stage.peak_rss()? as f64 / MEGABYTE, "MB", "VmHWM of doctor serve, in 10^6 bytes".to_owned()),
        figure("map_kb", packed as f64 / 1e3, "kB", "the map of all nodes as gzip".to_owned()),
    ]))
}
