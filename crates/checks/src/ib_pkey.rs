//! ib-pkey: is every InfiniBand port in the required partitions?
//!
//! What it does: reads the partition keys of each InfiniBand port and looks for those that the site requires.
//!
//! Why it matters: a port outside its tenant's partition is up, passes every local test, and cannot reach the other
//! nodes of the job. On shared fabrics the subnet manager may omit a node that was replaced.
//!
//! What to do: `pkey-missing` is `isolate`: check the subnet manager's partition configuration (on Azure the host's:
//! report the node); a reboot of the node rarely helps. `cat /sys/class/infiniband/DEVICE/ports/1/pkeys/*` shows the
//! current keys.
//!
//! Parameters: `pkeys`, the keys that every InfiniBand port must have: `pkeys = ["0x8001"]`. The highest bit is full
//! membership, so 0x8001 and 0x0001 differ. Not applicable where none is set or no port is InfiniBand.

use doctor_core::{
    observation::{Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure},
    time::Span,
};

use crate::{
    files::{glob_files, match_pattern_exact, match_pattern},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    rdma::{LINK_LAYER, port_entity},
    check_params::{invalid_param, string_list},
    spec::{Check, Params, Spec, page_of},
};

// Each port has some hundred keys, most of them empty.
const SPEC: Spec = Spec::quick("ib-pkey", "partitions of the InfiniBand ports").every(Span::hours(1));

const RULES: &str = r#"
rules = [
  { id = "ib-pkey-missing", check = "ib-pkey", event = "pkey-missing", reason = "pkey-missing", severity = "isolate",
    text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("ib_pkey.rs")), rules: RULES, probes, interpret };

const PKEYS: &str = "/sys/class/infiniband/*/ports/*/pkeys/*";
const EXAMPLE: &str = "pkeys = [\"0x8001\"]";

/// Without required keys there is no need to read them all.
fn probes(params: &Params) -> Vec<Probe> {
    let keys = params.contains_key("pkeys").then(|| Probe::glob(PKEYS));
    std::iter::once(Probe::glob(LINK_LAYER)).chain(keys).collect()
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn key(text: &str) -> Option<u16> {
    u16::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let Some(required) = string_list(params, "pkeys", EXAMPLE)? else {
        return Ok(not_applicable("not-configured", "`pkeys` is not set"));
    };
    let required: Vec<u16> =
        required.iter().map(|text| key(text)).collect::<Option<_>>().ok_or_else(|| invalid_param("pkeys", EXAMPLE))?;
    let (layers, keys) = (glob_files(outputs.first())?, glob_files(outputs.get(1))?);
    let mut builder = ObservationBuilder::default();
    for layer in layers {
        let Some([device, port]) = match_pattern_exact(LINK_LAYER, &layer.path) else {
            continue;
        };
        match &layer.text {
            Ok(text) if text.trim() == "InfiniBand" => {}
            Ok(_) => continue,
            Err(failure) => {
                builder.unreadable(failure.clone());
                continue;
            }
        }
        let own =
            keys.iter().filter(|file| match_pattern(PKEYS, &file.path).is_some_and(|names| names.starts_with(&[device, port])));
        let has: Vec<u16> = own.filter_map(|file| key(file.text.as_deref().ok()?)).filter(|key| *key != 0).collect();
        let entity = port_entity(device, port);
        if has.is_empty() {
            builder.unreadable(ProbeFailure::new(FailureKind::Empty, format!("{entity} has no partition key")));
            continue;
        }
        builder.metric(Metric::count("partitions", entity.clone(), has.len() as f64));
        for key in required.iter().filter(|key| !has.contains(key)) {
            let all: Vec<_> = has.iter().map(|key| format!("{key:#06x}")).collect();
            let text = format!("the port is not in partition {key:#06x}; it is in {}", all.join(", "));
            builder.event(Event::seen("pkey-missing", entity.clone(), text));
        }
    }
    Ok(builder.build_or(not_applicable("no-infiniband", "no InfiniBand port on this node")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::found,
        classify_fixture::{classify_outputs, classify_outputs_with},
    };
    use proptest::prelude::*;

    fn check(pkeys: &str, layer: &str, keys: &[&str]) -> Vec<String> {
        let params: Params = toml::from_str(&format!("pkeys = {pkeys}")).unwrap();
        let path = |n: usize| format!("/sys/class/infiniband/mlx5_0/ports/1/pkeys/{n}");
        let keys: Vec<_> = keys.iter().enumerate().map(|(n, key)| (path(n), *key)).collect();
        let keys: Vec<_> = keys.iter().map(|(path, key)| (path.as_str(), *key)).collect();
        let layers = found(&[("/sys/class/infiniband/mlx5_0/ports/1/link_layer", layer)]);
        classify_outputs_with(&CHECK, &params, None, &[layers, found(&keys)])
    }

    // Made by hand.
    #[test]
    fn a_port_without_a_required_pkey_is_reported() {
        let keys = ["0x8001\n", "0xffff\n", "0x0000\n"];
        assert_eq!(check("['0x8001']", "InfiniBand\n", &keys), ["pass within-limits"]);
        assert_eq!(check("['0x8001', '0x8005']", "InfiniBand\n", &keys), ["fail pkey-missing isolate link:mlx5_0/1"]);
        assert_eq!(check("['0x0001']", "InfiniBand\n", &keys), ["fail pkey-missing isolate link:mlx5_0/1"]);
    }

    #[test]
    fn missing_settings_or_unreadable_keys_do_not_pass() {
        assert_eq!(classify_outputs(&CHECK, &[found(&[])]), ["not-applicable not-configured"]);
        assert_eq!(check("['0x8001']", "Ethernet\n", &["0xffff\n"]), ["not-applicable no-infiniband"]);
        assert_eq!(check("['0x8001']", "InfiniBand\n", &[]), ["inconclusive empty"]);
        assert_eq!(check("['32769']", "InfiniBand\n", &["0x8001"]), ["inconclusive unparseable"]);
        assert_eq!(check("'0x8001'", "InfiniBand\n", &["0x8001"]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,12}") {
            check("['0x8001']", "InfiniBand", &[&text]);
        }
    }
}
