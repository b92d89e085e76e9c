//! `doctor-node test fabric`: moves data through each InfiniBand, RoCE or EFA port and back, and reports faults as
//! findings.
//!
//! The standard tools move the data ([`tool`]), with server and client on this machine ([`client_server`]), one port at a time.
//! Before the first port, each tool is run as a negative control on a device that does not exist: a tool that still
//! reports a result ignores its device argument, and its other results do not count.

mod client_server;
mod ports;
mod tool;

use std::{
    env,
    ffi::OsString,
    path::Path,
    time::{Duration, Instant},
};

use doctor_checks::{
    disturbance::RatesOf, document::Measurements, fabric_counters, fabric_params::FabricParams, probe::FileText,
};
use doctor_core::observation::{Event, FailureKind, Metric, ProbeFailure, Unit};

use super::{disturbance::Watch, program::Program};
use crate::{
    runner::{STATE_VARIABLE, hung_probes::HungProbes},
    stop::Stop,
};
use client_server::PairOutcome;
use ports::Port;
use tool::{Tool, ToolResult};

/// A device that does not exist.
const MISSING_DEVICE: &str = "doctor-none0";

/// Entry point of the test's process.
pub(super) fn run(args: Vec<OsString>) -> Result<Measurements, ProbeFailure> {
    let params = args.into_iter().next().and_then(|text| serde_json::from_str::<FabricParams>(text.to_str()?).ok());
    let Some(params) = params else {
        return Err(ProbeFailure::new(FailureKind::Unparseable, "cannot parse the parameters of the fabric test"));
    };
    let stop = Stop::on_signals()
        .map_err(|error| ProbeFailure::new(FailureKind::Failed, format!("cannot install signal handlers: {error}")))?;
    let found_ports = ports::find(&params, &stop)?;
    let watch = Watch::processors(&stop);
    let hung_probes = env::var_os(STATE_VARIABLE)
        .map_or_else(HungProbes::in_memory, |directory| HungProbes::in_directory(Path::new(&directory)));
    let mut test = Test {
        params: &params,
        stop: &stop,
        started: Instant::now(),
        hung_probes,
        measurements: Measurements::default(),
        throughput: Vec::new(),
    };
    test.measurements.failures.extend(found_ports.failures);
    for tool in Tool::ALL {
        let of_tool: Vec<&Port> = found_ports.ports.iter().filter(|port| port.tool == *tool).collect();
        if !of_tool.is_empty()
            && let Err(failure) = test.ports(*tool, &of_tool)
        {
            eprintln!("{}", failure.text);
            test.measurements.failures.push(failure);
        }
        if stop.requested().is_some() {
            return Err(ProbeFailure::new(FailureKind::Killed, "stopped by a signal"));
        }
    }
    test.compare();
    watch.report(Ok(test.measurements), RatesOf::EachGpu)
}

struct Test<'a> {
    params: &'a FabricParams,
    stop: &'a Stop,
    started: Instant,
    /// Processes that could not be killed.
    hung_probes: HungProbes,
    measurements: Measurements,
    /// The throughput of each port in bits a second.
    throughput: Vec<(Port, f64)>,
}

impl Test<'_> {
    /// Tests all ports of one tool, after its negative control.
    fn ports(&mut self, tool: Tool, ports: &[&Port]) -> Result<(), ProbeFailure> {
        let program = tool.find(self.params)?;
        self.negative_control(tool, &program)?;
        for port in ports {
            if self.stop.requested().is_some() {
                return Ok(());
            }
            if self.started.elapsed() > self.params.timeout.to_std() {
                let (entity, timeout) = (port.entity(), self.params.timeout);
                let text = format!("{entity} was not tested within {timeout}; increase `timeout`");
                return Err(ProbeFailure::new(FailureKind::TimedOut, text));
            }
            self.port(&program, port)?;
        }
        Ok(())
    }

    /// Runs the negative control: a tool that succeeds on a device that does not exist proves nothing.
    fn negative_control(&self, tool: Tool, program: &Program) -> Result<(), ProbeFailure> {
        let unusable = |behaviour: &str| {
            let text =
                format!("{} {behaviour} for a device that does not exist, so its results prove nothing", tool.name());
            ProbeFailure::new(FailureKind::Failed, text)
        };
        match self.pair(tool, program, MISSING_DEVICE, "1")? {
            PairOutcome::Finished(output) => match tool.parse_output(&output) {
                ToolResult::NoResult(FailureKind::Failed, text) => {
                    eprintln!("{}: negative control: a device that does not exist is rejected ({text})", tool.name());
                    Ok(())
                }
                ToolResult::Throughput { .. } => Err(unusable("gives a result")),
                ToolResult::Failed(_) => Err(unusable("moves messages")),
                ToolResult::NoResult(..) => Err(unusable("does not report a failure")),
            },
            PairOutcome::Stalled(limit) => Err(unusable(&format!("does not end within {limit:?}"))),
            PairOutcome::Unkillable { pid, child } => {
                self.hung_probes.add(tool.name(), pid, child);
                Err(unusable(&format!("hangs as process {pid}")))
            }
            PairOutcome::TooLong => Err(unusable("prints too much output")),
            PairOutcome::Stopped => Ok(()),
        }
    }

    fn pair(&self, tool: Tool, program: &Program, device: &str, port: &str) -> Result<PairOutcome, ProbeFailure> {
        let failed = |what: &str, error: std::io::Error| {
            ProbeFailure::new(FailureKind::Failed, format!("{}: {what}: {error}", tool.name()))
        };
        let listen = client_server::free_port().map_err(|error| failed("no port to listen on", error))?;
        let sides = tool.command_lines(self.params, device, port, listen);
        let limit = tool.load_time(self.params).to_std() + self.params.stall.to_std();
        client_server::run(program, &sides, limit, self.stop).map_err(|error| failed("cannot start it", error))
    }

    /// Tests one port: its counters, the load, its counters again.
    fn port(&mut self, program: &Program, port: &Port) -> Result<(), ProbeFailure> {
        let entity = port.entity();
        let what = format!("fabric {entity}");
        if let Some(pid) = self.hung_probes.hanging(&what) {
            let text = format!("process {pid} of an earlier test still hangs on it; not tested again");
            self.add_event(port, "loopback-stalled", text);
            return Ok(());
        }
        let before = ports::counters(port, self.stop);
        let started = Instant::now();
        let ran = self.pair(port.tool, program, &port.device, &port.port)?;
        let elapsed = started.elapsed();
        match ran {
            PairOutcome::Stopped => return Ok(()),
            PairOutcome::Stalled(limit) => {
                self.add_event(
                    port,
                    "loopback-stalled",
                    format!("{} did not end within {limit:.0?}", port.tool.name()),
                );
            }
            PairOutcome::TooLong => {
                let text = format!("{entity}: {} prints too much output", port.tool.name());
                self.unread(ProbeFailure::new(FailureKind::TooLong, text));
            }
            PairOutcome::Unkillable { pid, child } => {
                self.hung_probes.add(&what, pid, child);
                let text = format!("{} hangs in the kernel and was left behind as process {pid}", port.tool.name());
                self.add_event(port, "loopback-stalled", text);
            }
            PairOutcome::Finished(output) => match port.tool.parse_output(&output) {
                ToolResult::Throughput { bits_per_second, seconds } => {
                    let share = port.rate.map_or_else(String::new, |rate| {
                        format!(", {:.0} % of its link", bits_per_second * 100.0 / rate)
                    });
                    eprintln!("{entity}: {:.1} Gbit/s{share}, {:.1} s", bits_per_second / 1e9, elapsed.as_secs_f64());
                    let metrics = port.tool.metrics(&entity, bits_per_second, seconds, port.rate);
                    self.measurements.metrics.extend(metrics);
                    self.throughput.push((port.clone(), bits_per_second));
                }
                ToolResult::Failed(text) => self.add_event(port, "loopback-failed", text),
                ToolResult::NoResult(kind, text) => self.unread(ProbeFailure::new(kind, format!("{entity}: {text}"))),
            },
        }
        self.compare_counters(port, before, elapsed);
        Ok(())
    }

    fn add_event(&mut self, port: &Port, code: &'static str, text: String) {
        eprintln!("{}: {code}: {text}", port.entity());
        self.measurements.events.push(Event::seen(code, port.entity(), text));
    }

    fn unread(&mut self, failure: ProbeFailure) {
        eprintln!("{}", failure.text);
        self.measurements.failures.push(failure);
    }

    fn compare_counters(&mut self, port: &Port, before: Result<Vec<FileText>, ProbeFailure>, elapsed: Duration) {
        let both = before.and_then(|before| Ok((before, ports::counters(port, self.stop)?)));
        match both {
            Ok((before, after)) => {
                let (events, unread) = fabric_counters::growth_events(&before, &after, elapsed.as_secs_f64());
                for event in &events {
                    eprintln!("{}: {}: {}", event.entity, event.code, event.text);
                }
                self.measurements.events.extend(events);
                unread.into_iter().for_each(|failure| self.unread(failure));
            }
            Err(failure) => self.unread(failure),
        }
    }

    /// Compares each port with its peers: same tool, same link rate.
    fn compare(&mut self) {
        for (index, (port, bits)) in self.throughput.iter().enumerate() {
            let is_like = |other: &Port| other.tool == port.tool && other.rate == port.rate;
            let others =
                self.throughput.iter().enumerate().filter(|(other, (like, _))| *other != index && is_like(like));
            let others: Vec<f64> = others.map(|(_, (_, bits))| *bits).collect();
            // With only two ports, neither can be called the outlier.
            if others.len() >= 2
                && let Some(typical) = median(others).filter(|typical| *typical > 0.0)
            {
                let share = bits * 100.0 / typical;
                let metric = Metric::new("loopback_percent_of_others", port.entity(), share, Unit::Percent);
                self.measurements.metrics.push(metric);
            }
        }
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (middle, is_odd) = (values.len() / 2, values.len() % 2 == 1);
    let upper = *values.get(middle)?;
    Some(if is_odd { upper } else { f64::midpoint(*values.get(middle.checked_sub(1)?)?, upper) })
}
