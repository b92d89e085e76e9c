//! ib-ports: is every InfiniBand, RoCE or EFA port up?
//!
//! What it does: reads the state of each port of each RDMA device, now and over the last day.
//!
//! Why it matters: a job on many nodes waits for the slowest link. With one of eight ports down, NCCL either fails at
//! start or sends everything over the others, and all nodes of the job are slow because of this one.
//!
//! What to do: `doctor why NODE` names the port; `ibstat DEVICE` (or `rdma link`) on the node shows it. All findings
//! are confirmed by a second failure.
//! - `port-down` is `isolate`: a port that worked within the last day, or that `ports` names, has no link. Check that
//!   the switch's port is up and the cable is seated (`mlxlink -d DEVICE -c`), reseat or replace the cable, then check
//!   the adapter.
//! - `port-not-configured` is `isolate`: the link is up, but no subnet manager has given it an address (state `INIT` or
//!   `ARMED`). If many nodes report it together, the subnet manager is at fault, not the nodes: check it first
//!   (`sminfo`).
//! - `port-unused` is `monitor`: a port without a link that was not up in the last day and is not named. Usually a
//!   storage or spare port without a cable. Name the required ports in `ports` to silence it.
//!
//! Parameters: `ports`, a list of devices or ports such as `["mlx5_0", "mlx5_4/1"]`: these must be up, others are
//! ignored. One that is named and does not exist is `port-missing`, `isolate`.
//!
//! Not applicable where there is no RDMA device.

use doctor_core::{
    observation::{Entity, EntityKind, Event, ObservationBuilder, Metric, Observation},
    time::Span,
};

use crate::{
    files::{Series, glob_files, sampled_series, unexpected_content, match_pattern},
    probe::{FileText, Probe, ProbeOutput},
    rdma::{PHYS_STATE, STATE, no_rdma, port_file, port_entity, parse_state},
    check_params::string_list,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("ib-ports", "state of each RDMA port");

const RULES: &str = r#"
rules = [
  { id = "ib-ports-down", check = "ib-ports", event = "port-down", reason = "port-down", severity = "isolate",
    confirm = 2, text = "{entity}: {value}" },
  { id = "ib-ports-missing", check = "ib-ports", event = "port-missing", reason = "port-missing", severity = "isolate",
    confirm = 2, text = "{entity}: {value}" },
  { id = "ib-ports-not-configured", check = "ib-ports", event = "port-not-configured", reason = "port-not-configured",
    severity = "isolate", confirm = 2, text = "{entity}: {value}" },
  { id = "ib-ports-unused", check = "ib-ports", event = "port-unused", reason = "port-unused", severity = "monitor",
    confirm = 2, text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("ib_ports.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::Sampled { pattern: STATE.to_owned(), keep: Span::days(1) }, Probe::glob(PHYS_STATE)]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let named = string_list(params, "ports", "ports = [\"mlx5_0\", \"mlx5_4/1\"]")?;
    let series = sampled_series(outputs.first())?;
    let phys = glob_files(outputs.get(1))?;
    let mut builder = ObservationBuilder::default();
    for port in named.iter().flatten() {
        if !series.iter().any(|one| port_id(one).is_some_and(|id| matches_port(port, id)) && one.current() != Ok(None)) {
            builder.event(Event::seen("port-missing", link_entity(port), "the port is listed in `ports` and does not exist"));
        }
    }
    let mut active = 0.0;
    for one in &series {
        let Some(id) = port_id(one) else { continue };
        let named = named.as_ref().map(|list| list.iter().any(|port| matches_port(port, id)));
        if named == Some(false) {
            continue;
        }
        match one.current().map(|text| text.map(|text| parse_state(text).ok_or(text))) {
            Ok(Some(Ok("ACTIVE"))) => active += 1.0,
            Ok(Some(Ok(state))) => builder.event(port_event(one, id, state, phys, named.is_some())),
            Ok(Some(Err(text))) => builder.unreadable(unexpected_content(one.path, text)),
            Err(failure) => builder.unreadable(failure),
            Ok(None) if named.is_some() => {}
            Ok(None) => {
                builder.event(Event::seen("port-down", port_entity(id.0, id.1), "the port has disappeared"));
            }
        }
    }
    if !series.is_empty() {
        builder.metric(Metric::count("ports_active", Entity::node(), active));
    }
    Ok(builder.build_or(no_rdma()))
}

fn port_id<'a>(series: &Series<'a>) -> Option<(&'a str, &'a str)> {
    match match_pattern(STATE, series.path)?[..] {
        [device, port] => Some((device, port)),
        _ => None,
    }
}

/// Returns whether `mlx5_0` or `mlx5_0/1` means this port.
fn matches_port(pattern: &str, (device, port): (&str, &str)) -> bool {
    match pattern.split_once('/') {
        Some((name, number)) => name == device && number == port,
        None => pattern == device,
    }
}

fn link_entity(port: &str) -> Entity {
    Entity::new(EntityKind::Link, port)
}

fn port_event(series: &Series<'_>, id: (&str, &str), state: &str, phys: &[FileText], is_named: bool) -> Event {
    let entity = port_entity(id.0, id.1);
    let phys = port_file(phys, PHYS_STATE, &[id.0, id.1]).ok().flatten().and_then(parse_state).unwrap_or("unknown");
    let was_up = series.points.iter().any(|point| point.text.and_then(parse_state) == Some("ACTIVE"));
    let text = format!("port state {state}, physical state {phys}");
    if phys == "LinkUp" {
        Event::seen("port-not-configured", entity, text)
    } else if is_named || was_up {
        Event::seen("port-down", entity, text)
    } else {
        Event::seen("port-unused", entity, format!("{text}; not active within the last day"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::{found, sampled_files},
        classify_fixture::{classify_outputs, classify_outputs_with},
    };
    use proptest::prelude::*;

    const A: &str = "/sys/class/infiniband/mlx5_0/ports/1/state";
    const B: &str = "/sys/class/infiniband/mlx5_1/ports/1/state";
    const PHYS_B: &str = "/sys/class/infiniband/mlx5_1/ports/1/phys_state";
    const UP: &str = "4: ACTIVE\n";
    const DOWN: &str = "1: DOWN\n";

    fn check(each: &[&[(&str, &str)]], phys: &str) -> Vec<String> {
        classify_outputs(&CHECK, &[sampled_files(each), found(&[(PHYS_B, phys)])])
    }

    // Made by hand after the kernel's documentation of /sys/class/infiniband.
    #[test]
    fn a_port_that_was_up_recently_differs_from_one_that_never_was() {
        let both = [(A, UP), (B, UP)];
        let one = [(A, UP), (B, DOWN)];
        assert_eq!(check(&[&both, &both], "5: LinkUp"), ["pass within-limits"]);
        assert_eq!(check(&[&both, &one], "2: Polling"), ["fail port-down isolate link:mlx5_1/1"]);
        assert_eq!(check(&[&one, &one], "3: Disabled"), ["fail port-unused monitor link:mlx5_1/1"]);
        assert_eq!(check(&[&both, &[(A, UP)]], ""), ["fail port-down isolate link:mlx5_1/1"]);
        let waits = [(A, UP), (B, "2: INIT\n")];
        assert_eq!(check(&[&waits], "5: LinkUp"), ["fail port-not-configured isolate link:mlx5_1/1"]);
    }

    #[test]
    fn configured_ports_must_be_up() {
        let with = |ports: &str, state: &[(&str, &str)]| {
            let params: Params = toml::from_str(&format!("ports = {ports}")).unwrap();
            classify_outputs_with(&CHECK, &params, None, &[sampled_files(&[state]), found(&[(PHYS_B, "3: Disabled")])])
        };
        let one = [(A, UP), (B, DOWN)];
        assert_eq!(with("['mlx5_0']", &one), ["pass within-limits"]);
        assert_eq!(with("['mlx5_0', 'mlx5_1/1']", &one), ["fail port-down isolate link:mlx5_1/1"]);
        assert_eq!(with("['mlx5_0', 'mlx5_7']", &one), ["fail port-missing isolate link:mlx5_7"]);
        assert_eq!(with("'all'", &one), ["inconclusive unparseable"]);
        assert_eq!(with("['mlx5_0']", &[]), ["fail port-missing isolate link:mlx5_0"]);
    }

    #[test]
    fn no_port_differs_from_an_unparseable_state() {
        assert_eq!(check(&[&[]], ""), ["not-applicable no-rdma"]);
        assert_eq!(check(&[&[(A, UP), (B, "?")]], ""), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(state in ".{0,20}", phys in ".{0,20}") {
            check(&[&[(A, &state)], &[(B, &state)]], &phys);
        }
    }
}
