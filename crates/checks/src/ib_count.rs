//! ib-count: does the node have as many high-speed ports as its machine type?
//!
//! What it does: counts the active InfiniBand ports, or the active RoCE ports if no port is InfiniBand, and compares
//! the number with the machine profile. EFA has its own check, `efa-count`.
//!
//! Why it matters: an adapter that fell off the bus leaves no trace among the others. Only the expected number shows
//! that one is missing.
//!
//! What to do: `ib-count-wrong` is `isolate`, confirmed by a second failure. Run `ibstat -l` and `lspci -d 15b3:` on
//! the node: an adapter that lspci shows and ibstat does not has lost its driver (`dmesg | grep mlx5`); one that lspci
//! does not show has dropped off the bus and needs a power cycle or a repair. `ib-ports` shows which port is down.
//!
//! Without `fabric_ports_active` in the profile the count is compared with other nodes of the type and with this node's
//! accepted past, at severity `monitor`; without those it is not judged (`no-expectation`).

use doctor_core::observation::{Entity, ObservationBuilder, Metric, Observation};

use crate::{
    files::glob_files,
    probe::{Probe, ProbeOutput},
    rdma::{LINK_LAYER, STATE, port_file, ports},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("ib-count", "number of active RDMA ports");

const RULES: &str = r#"
rules = [
  { id = "ib-count-wrong", check = "ib-count", metric = "fabric_ports_active", not_as_profile = true,
    reason = "ib-count-wrong", severity = "isolate", confirm = 2,
    text = "{value} active RDMA ports, expected {limit} on this machine type" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("ib_count.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::glob(STATE), Probe::glob(LINK_LAYER)]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let layers = glob_files(outputs.get(1))?;
    // Zero is a number too: a machine that should have eight ports and has none is not one without ports.
    let ports = match ports(outputs.first()) {
        Err(Observation::NotApplicable(_)) => Vec::new(),
        other => other?,
    };
    let (mut infiniband, mut ethernet, mut any_infiniband) = (0.0, 0.0, false);
    let mut builder = ObservationBuilder::default();
    for port in &ports {
        match (&port.state, port_file(layers, LINK_LAYER, &[port.device, port.port])) {
            (Err(failure), _) => builder.unreadable(failure.clone()),
            (_, Err(failure)) => builder.unreadable(failure),
            (Ok(_), Ok(Some("InfiniBand"))) => {
                any_infiniband = true;
                infiniband += f64::from(u8::from(port.is_active()));
            }
            (Ok(_), Ok(Some("Ethernet"))) => ethernet += f64::from(u8::from(port.is_active())),
            (Ok(_), Ok(_)) => {}
        }
    }
    let count = if any_infiniband { infiniband } else { ethernet };
    builder.metric(Metric::count("fabric_ports_active", Entity::node(), count));
    Ok(builder.build_or(Observation::measured(Vec::new(), Vec::new())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::found, classify_fixture::classify_outputs_with};
    use doctor_core::{ids::Sku, profile::Profile};

    fn check(expected: Option<f64>, ports: &[(&str, &str)]) -> Vec<String> {
        let expect = expected.map(|count| ("fabric_ports_active".to_owned(), count.into())).into_iter().collect();
        let profile = Profile { sku: Sku::new("hgx-h100").unwrap(), version: 1, expect };
        let files = |name: &str, text: fn(&(&str, &str)) -> String| {
            let path = |n: usize| format!("/sys/class/infiniband/mlx5_{n}/ports/1/{name}");
            let all: Vec<_> = ports.iter().enumerate().map(|(n, port)| (path(n), text(port))).collect();
            found(&all.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect::<Vec<_>>())
        };
        let outputs = [files("state", |port| port.0.to_owned()), files("link_layer", |port| port.1.to_owned())];
        classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &outputs)
    }

    const UP: (&str, &str) = ("4: ACTIVE\n", "InfiniBand\n");
    const ROCE: (&str, &str) = ("4: ACTIVE\n", "Ethernet\n");

    #[test]
    fn one_port_less_is_missed() {
        assert_eq!(check(Some(2.0), &[UP, UP]), ["pass within-limits"]);
        assert_eq!(check(Some(2.0), &[UP, ("1: DOWN\n", "InfiniBand\n")]), ["fail ib-count-wrong isolate node"]);
        assert_eq!(check(Some(2.0), &[UP, UP, ROCE]), ["pass within-limits"]);
        assert_eq!(check(Some(1.0), &[ROCE, ("4: ACTIVE\n", "Unspecified\n")]), ["pass within-limits"]);
    }

    #[test]
    fn no_port_where_eight_are_expected_fails() {
        assert_eq!(check(Some(8.0), &[]), ["fail ib-count-wrong isolate node"]);
    }

    #[test]
    fn a_count_does_not_pass_without_a_profile() {
        assert_eq!(check(None, &[UP, UP]), ["not-applicable no-expectation"]);
        assert_eq!(check(Some(1.0), &[UP, ("?", "InfiniBand\n")]), ["inconclusive unparseable"]);
    }
}
