//! roce: are the Ethernet interfaces of RDMA ports up and configured alike?
//!
//! What it does: for each RDMA port on Ethernet, finds its network interface and reads its state and its MTU.
//!
//! Why it matters: RoCE runs over an ordinary interface. One that was left down, or with an MTU of 1500 among
//! neighbours of 9000, makes the port fail or slow in ways that RDMA tools do not show.
//!
//! What to do: `ip -d link show INTERFACE` and `rdma link` show both sides.
//! - `roce-interface-down` is `isolate`, confirmed by a second failure: the RDMA port is active, its interface is not
//!   up. Check the network service (`networkctl`, `nmcli`) and the cable; `ib-ports` reports the port itself.
//! - `roce-mtu-differs` is `monitor`: interfaces of identical adapters have different MTUs. Set the others' MTU in the
//!   network configuration (`ip link set INTERFACE mtu N` until the next boot).
//!
//! `ib-ports` reports ports without a link. Not applicable where no RDMA port is on Ethernet.

use std::collections::BTreeMap;

use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure};

use crate::{
    files::{glob_files, match_pattern_exact, unexpected_content},
    gpu::not_applicable,
    probe::{FileText, Probe, ProbeOutput},
    rdma::{HCA_TYPE, LINK_LAYER, STATE, port_file, ports},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("roce", "Ethernet interfaces below RDMA ports");

const RULES: &str = r#"
rules = [
  { id = "roce-interface-down", check = "roce", event = "roce-interface-down", reason = "roce-interface-down",
    severity = "isolate", confirm = 2, text = "{entity}: {value}" },
  { id = "roce-mtu-differs", check = "roce", event = "roce-mtu-differs", reason = "roce-mtu-differs",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("roce.rs")), rules: RULES, probes, interpret };

const OPERSTATE: &str = "/sys/class/infiniband/*/device/net/*/operstate";
const MTU: &str = "/sys/class/infiniband/*/device/net/*/mtu";

fn probes(_: &Params) -> Vec<Probe> {
    [STATE, LINK_LAYER, HCA_TYPE, OPERSTATE, MTU].map(Probe::glob).to_vec()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let ports = ports(outputs.first())?;
    let (layers, types) = (glob_files(outputs.get(1))?, glob_files(outputs.get(2))?);
    let (states, mtus) = (glob_files(outputs.get(3))?, glob_files(outputs.get(4))?);
    let mut builder = ObservationBuilder::default();
    let mut kinds: BTreeMap<&str, Vec<(Entity, f64)>> = BTreeMap::new();
    for port in &ports {
        match port_file(layers, LINK_LAYER, &[port.device, port.port]) {
            Ok(Some("Ethernet")) if port.is_active() => {}
            Ok(_) => continue,
            Err(failure) => {
                builder.unreadable(failure);
                continue;
            }
        }
        let Some((name, state)) = interface(states, port.device) else {
            let text = format!("no network interface of {} is visible", port.entity());
            builder.unreadable(ProbeFailure::new(FailureKind::Missing, text));
            continue;
        };
        let entity = Entity::new(EntityKind::Nic, name);
        match state {
            Ok("up" | "unknown") => {}
            Ok(state) => {
                let text = format!("RDMA port {} is active, its interface is {state}", port.entity());
                builder.event(Event::seen("roce-interface-down", entity.clone(), text));
            }
            Err(failure) => builder.unreadable(failure),
        }
        match port_file(mtus, MTU, &[port.device, name]) {
            Ok(Some(text)) => match text.parse::<u32>() {
                Ok(mtu) => {
                    let kind = port_file(types, HCA_TYPE, &[port.device]).ok().flatten().unwrap_or("");
                    builder.metric(Metric::count("mtu", entity.clone(), f64::from(mtu)));
                    kinds.entry(kind).or_default().push((entity, f64::from(mtu)));
                }
                Err(_) => builder.unreadable(unexpected_content(name, text)),
            },
            Ok(None) => {}
            Err(failure) => builder.unreadable(failure),
        }
    }
    for interfaces in kinds.values() {
        let most = interfaces.iter().map(|(_, mtu)| *mtu).fold(0.0, f64::max);
        for (entity, mtu) in interfaces.iter().filter(|(_, mtu)| *mtu < most) {
            let text = format!("MTU {mtu}, another adapter of the same type has {most}");
            builder.event(Event::seen("roce-mtu-differs", entity.clone(), text));
        }
    }
    Ok(builder.build_or(not_applicable("no-roce", "no active RoCE port on this node")))
}

/// Returns a device's interface that is up, else any: representors of virtual functions are listed next to the real
/// one.
fn interface<'a>(all: &'a [FileText], device: &str) -> Option<(&'a str, Result<&'a str, ProbeFailure>)> {
    let own = || {
        all.iter().filter_map(|file| {
            let [of_device, name] = match_pattern_exact(OPERSTATE, &file.path)?;
            (of_device == device).then(|| (name, file.text.as_deref().map(str::trim).map_err(Clone::clone)))
        })
    };
    own().find(|(_, state)| *state == Ok("up")).or_else(|| own().next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::found, classify_fixture::classify_outputs};

    /// Adapters: layer, state of the interface, MTU. Made by hand.
    fn check(adapters: &[(&str, &str, &str)]) -> Vec<String> {
        let all = |path: &str, text: fn(&(&str, &str, &str)) -> String| {
            let file = |(n, adapter)| (path.replace("{}", &format!("{n}")), text(adapter));
            let all: Vec<_> = adapters.iter().enumerate().map(file).collect();
            found(&all.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect::<Vec<_>>())
        };
        let outputs = [
            all("/sys/class/infiniband/mlx5_{}/ports/1/state", |_| "4: ACTIVE\n".to_owned()),
            all("/sys/class/infiniband/mlx5_{}/ports/1/link_layer", |adapter| adapter.0.to_owned()),
            all("/sys/class/infiniband/mlx5_{}/hca_type", |_| "MT4129\n".to_owned()),
            all("/sys/class/infiniband/mlx5_{}/device/net/gpu{}rdma/operstate", |adapter| adapter.1.to_owned()),
            all("/sys/class/infiniband/mlx5_{}/device/net/gpu{}rdma/mtu", |adapter| adapter.2.to_owned()),
        ];
        classify_outputs(&CHECK, &outputs)
    }

    const GOOD: (&str, &str, &str) = ("Ethernet\n", "up\n", "9000\n");

    #[test]
    fn an_interface_that_differs_from_the_others_is_reported() {
        assert_eq!(check(&[GOOD, GOOD]), ["pass within-limits"]);
        let down = ("Ethernet\n", "down\n", "9000\n");
        assert_eq!(check(&[GOOD, down]), ["fail roce-interface-down isolate nic:gpu1rdma"]);
        let small = ("Ethernet\n", "up\n", "1500\n");
        assert_eq!(check(&[small, GOOD]), ["fail roce-mtu-differs monitor nic:gpu0rdma"]);
    }

    #[test]
    fn not_applicable_on_infiniband() {
        assert_eq!(check(&[("InfiniBand\n", "down\n", "1500\n")]), ["not-applicable no-roce"]);
        assert_eq!(check(&[]), ["not-applicable no-rdma"]);
        assert_eq!(check(&[("Ethernet\n", "up\n", "big")]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }
}
