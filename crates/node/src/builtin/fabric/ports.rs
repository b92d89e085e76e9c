//! Lists the ports to test, from sysfs.

use std::{env, path::PathBuf};

use doctor_checks::{
    fabric_counters,
    fabric_params::FabricParams,
    probe::{FileText, Probe, ProbeOutput},
    rdma::{LINK_LAYER, RATE, STATE, parse_rate, port_entity, port_file, ports},
};
use doctor_core::observation::{Entity, FailureKind, ProbeFailure};

use super::tool::Tool;
use crate::{
    runner::{LocalRunner, ProbeRunner as _},
    stop::Stop,
};

/// `/sys/class/infiniband/rdmap79s0/device/driver` points to `…/drivers/efa`.
const DRIVER: &str = "/sys/class/infiniband/*/device/driver";

/// A port to test.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Port {
    pub(super) device: String,
    pub(super) port: String,
    /// The link's rate in bits a second, if it is known.
    pub(super) rate: Option<f64>,
    pub(super) tool: Tool,
}

impl Port {
    pub(super) fn entity(&self) -> Entity {
        port_entity(&self.device, &self.port)
    }
}

/// The ports found.
#[derive(Debug, Default)]
pub(super) struct FoundPorts {
    pub(super) ports: Vec<Port>,
    /// Ports that could not be read, and configured devices that do not exist.
    pub(super) failures: Vec<ProbeFailure>,
}

/// Creates a new runner, because a runner reads each file only once.
fn new_runner(stop: &Stop) -> LocalRunner<'_> {
    LocalRunner::new(env::var_os("DOCTOR_ROOT").map_or_else(|| PathBuf::from("/"), PathBuf::from), stop)
}

fn files(output: ProbeOutput) -> Result<Vec<FileText>, ProbeFailure> {
    match output {
        ProbeOutput::Files(files) => Ok(files),
        ProbeOutput::Failed(failure) => Err(failure),
        _ => Err(ProbeFailure::new(FailureKind::Unparseable, "the answer is not a list of files")),
    }
}

/// Reads the error counters of a port.
pub(super) fn counters(port: &Port, stop: &Stop) -> Result<Vec<FileText>, ProbeFailure> {
    let runner = new_runner(stop);
    let paths = fabric_counters::counter_paths(&port.device, &port.port);
    let read = paths.into_iter().map(|pattern| files(runner.run(&Probe::Glob { pattern })));
    Ok(read.collect::<Result<Vec<_>, _>>()?.concat())
}

/// Lists the ports to test.
///
/// # Errors
/// If the kernel's list cannot be read or contains nothing to test.
pub(super) fn find(params: &FabricParams, stop: &Stop) -> Result<FoundPorts, ProbeFailure> {
    let runner = new_runner(stop);
    let states = runner.run(&Probe::glob(STATE));
    let rates = files(runner.run(&Probe::glob(RATE)))?;
    let layers = files(runner.run(&Probe::glob(LINK_LAYER)))?;
    let drivers = match runner.run(&Probe::Links { pattern: DRIVER.to_owned() }) {
        ProbeOutput::Links(links) => links,
        _ => Vec::new(),
    };
    let none = || ProbeFailure::new(FailureKind::Empty, "there is no RDMA device in /sys/class/infiniband");
    let all = ports(Some(&states)).map_err(|_| none())?;
    let layer = |port: &doctor_checks::rdma::Port<'_>| {
        port_file(&layers, LINK_LAYER, &[port.device, port.port]).ok().flatten().unwrap_or_default()
    };
    let has_infiniband = all.iter().any(|port| layer(port) == "InfiniBand");
    let mut result = FoundPorts::default();
    for port in &all {
        let is_named = params.devices.iter().any(|name| name == port.device);
        if !params.devices.is_empty() && !is_named {
            continue;
        }
        let link = format!("/{}/device/driver", port.device);
        let is_efa = drivers.iter().any(|(path, to)| path.ends_with(&link) && to.ends_with("/efa"));
        let (entity, layer) = (port.entity(), layer(port));
        match &port.state {
            Err(failure) => result.failures.push(failure.clone()),
            Ok("ACTIVE") if !is_efa && layer == "Ethernet" && has_infiniband && !is_named => {
                eprintln!("{entity}: not tested: Ethernet on a node with InfiniBand; add it to `devices` to test it");
            }
            Ok("ACTIVE") if is_efa || matches!(layer, "InfiniBand" | "Ethernet") => result.ports.push(Port {
                device: port.device.to_owned(),
                port: port.port.to_owned(),
                rate: port_file(&rates, RATE, &[port.device, port.port]).ok().flatten().and_then(parse_rate),
                tool: if is_efa { Tool::Pingpong } else { Tool::Write },
            }),
            Ok("ACTIVE") => {
                eprintln!("{entity}: not tested: neither InfiniBand nor Ethernet nor EFA");
            }
            Ok(state) => eprintln!("{entity}: not tested: state {state}; see ib-ports"),
        }
    }
    let missing = params.devices.iter().filter(|name| all.iter().all(|port| port.device != **name));
    result.failures.extend(
        missing.map(|name| {
            ProbeFailure::new(FailureKind::Missing, format!("the device {name} of `devices` does not exist"))
        }),
    );
    if result.ports.is_empty() && result.failures.is_empty() {
        let text = format!("none of {} ports is active and supported by the test; see ib-ports", all.len());
        return Err(ProbeFailure::new(FailureKind::Empty, text));
    }
    Ok(result)
}
