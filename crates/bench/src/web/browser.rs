//! M17, the dashboard: 10,000 nodes in a real browser.
//!
//! The controller is that of the API benchmark, while results come in; the browser is Debian's headless Chromium,
//! driven by the script of the dashboard's tests. `first_paint_ms` is from the start of the navigation to the frame
//! with every node on the map, `hover_ms` from a hover or filter event to the frame that shows its effect; both are the
//! worst of five pages.
//!
//! Correctness check: the painted map has every node, and the page logged nothing to its console.

use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::{NODES, fixture::WebFixture};
use crate::{Measured, figure::Figure, shipped};

/// The exit code of the script on a machine without a browser.
const NO_BROWSER_EXIT_CODE: i32 = 3;

pub(crate) fn run() -> Result<Measured> {
    let program = shipped::doctor()?;
    eprintln!("  starting a simulated cluster of {NODES} nodes and a controller");
    let stage = WebFixture::new(&program, NODES)?;
    stage.verify_nodes(NODES)?;
    let mut script = Command::new("scripts/browser.sh");
    script.arg("paint").env("ADDRESS", format!("http://{}", stage.address())).env("NODES", NODES.to_string());
    let output = script.env("DOCTOR", &program).output().context("starting scripts/browser.sh")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(NO_BROWSER_EXIT_CODE) {
        return Ok(Measured::NotAvailable(stderr.lines().last().unwrap_or("there is no browser").to_owned()));
    }
    if !output.status.success() {
        bail!("the browser failed: {stderr}");
    }
    let figures: Value = serde_json::from_slice(&output.stdout).context("reading the measurements of the browser")?;
    let value = |name: &str| figures[name].as_f64().with_context(|| format!("the browser did not report {name}"));
    let inputs = json!({ "nodes": NODES, "pages": 5, "browser": "Chromium, headless", "cluster": "simulated" });
    let figure = |name: &str, note: String| {
        Ok(Figure { name: name.to_owned(), value: value(name)?, unit: "ms", inputs: inputs.clone(), note })
    };
    let (hover, filter) = (value("hover_alone_ms")?, value("filter_ms")?);
    let parts: Result<Vec<Figure>> = [
        figure("first_paint_ms", "until the frame in which every node is on the map; maximum of 5".to_owned()),
        figure("hover_ms", format!("until the frame that responds; maximum hover {hover}, maximum filter {filter}")),
    ]
    .into_iter()
    .collect();
    Ok(Measured::Figures(parts?))
}
