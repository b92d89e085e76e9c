//! ib-firmware: do identical network adapters run the same firmware?
//!
//! What it does: reads the board type and firmware of each RDMA adapter and compares those of the same type.
//!
//! Why it matters: an adapter that was replaced in a repair has the firmware of the spare part. It works, but behaves
//! unlike its seven neighbours under congestion, which can go unnoticed for weeks.
//!
//! What to do: `firmware-differs` is `monitor`. `mlxfwmanager --query` shows the versions and available updates; bring
//! the adapter to the version of the others (`mlxfwmanager -u -d BUS`, then reboot). If the site requires one version
//! everywhere, set it in `firmware`: any other version is then reported too.
//!
//! Parameters: `firmware`, accepted versions by board type: `firmware = { MT_0000000838 = ["28.39.1002"] }`.
//!
//! Not applicable where no RDMA adapter reports a firmware version (EFA does not).

use std::collections::{BTreeMap, BTreeSet};

use doctor_core::observation::{Entity, EntityKind, Event, ObservationBuilder, Metric, Observation};

use crate::{
    files::{glob_files, match_pattern_exact},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    rdma::port_file,
    check_params::{invalid_param, string_list},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("ib-firmware", "firmware of the network adapters");

const RULES: &str = r#"
rules = [
  { id = "ib-firmware-differs", check = "ib-firmware", event = "firmware-differs", reason = "firmware-differs",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("ib_firmware.rs")), rules: RULES, probes, interpret };

const FIRMWARE: &str = "/sys/class/infiniband/*/fw_ver";
const BOARD: &str = "/sys/class/infiniband/*/board_id";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::glob(FIRMWARE), Probe::glob(BOARD)]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    const EXAMPLE: &str = "firmware = { MT_0000000838 = [\"28.39.1002\"] }";
    let accepted: Params = match params.get("firmware") {
        None => Params::new(),
        Some(value) => value.as_table().ok_or_else(|| invalid_param("firmware", EXAMPLE))?.clone().into_iter().collect(),
    };
    let (versions, boards) = (glob_files(outputs.first())?, glob_files(outputs.get(1))?);
    let mut builder = ObservationBuilder::default();
    let mut kinds: BTreeMap<&str, Vec<(&str, &str)>> = BTreeMap::new();
    for file in versions {
        let Some([device]) = match_pattern_exact(FIRMWARE, &file.path) else { continue };
        match (&file.text, port_file(boards, BOARD, &[device])) {
            (Ok(version), Ok(Some(board))) if !version.trim().is_empty() => {
                kinds.entry(board).or_default().push((device, version.trim()));
            }
            (Err(failure), _) => builder.unreadable(failure.clone()),
            (_, Err(failure)) => builder.unreadable(failure),
            // EFA and other adapters without a board id have no firmware to compare.
            (Ok(_), Ok(_)) => {}
        }
    }
    for (board, adapters) in &kinds {
        let distinct: BTreeSet<_> = adapters.iter().map(|(_, version)| *version).collect();
        builder.metric(Metric::count("firmware_versions", Entity::new(EntityKind::Nic, *board), distinct.len() as f64));
        let accepted = string_list(&accepted, board, EXAMPLE)?.unwrap_or_else(|| vec![most_common(adapters).to_owned()]);
        for (device, version) in adapters.iter().filter(|(_, version)| !accepted.iter().any(|own| own == version)) {
            let text =
                format!("firmware {version}, expected {} on adapters {board}", accepted.join(" or "));
            builder.event(Event::seen("firmware-differs", Entity::new(EntityKind::Nic, *device), text));
        }
    }
    Ok(builder.build_or(not_applicable("no-rdma", "no RDMA adapter of this node reports a firmware version")))
}

/// On a tie, returns the version that compares greater as text; either choice is good enough to point at a difference.
fn most_common<'a>(adapters: &[(&str, &'a str)]) -> &'a str {
    let count = |version: &str| adapters.iter().filter(|(_, other)| *other == version).count();
    adapters.iter().map(|(_, version)| *version).max_by_key(|version| (count(version), *version)).unwrap_or("")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::found,
        classify_fixture::{classify_outputs, classify_outputs_with},
    };

    fn outputs(adapters: &[(&str, &str)]) -> [ProbeOutput; 2] {
        let all = |name: &str, text: fn(&(&str, &str)) -> String| {
            let path = |n: usize| format!("/sys/class/infiniband/mlx5_{n}/{name}");
            let all: Vec<_> = adapters.iter().enumerate().map(|(n, adapter)| (path(n), text(adapter))).collect();
            found(&all.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect::<Vec<_>>())
        };
        [all("fw_ver", |adapter| format!("{}\n", adapter.1)), all("board_id", |adapter| format!("{}\n", adapter.0))]
    }

    const A: (&str, &str) = ("MT_0000000838", "28.39.1002");
    const OLD: (&str, &str) = ("MT_0000000838", "28.36.1010");
    const STORAGE: (&str, &str) = ("MT_0000000359", "26.38.1002");

    // Made by hand.
    #[test]
    fn a_differing_firmware_version_is_reported() {
        assert_eq!(classify_outputs(&CHECK, &outputs(&[A, A, STORAGE])), ["pass within-limits"]);
        assert_eq!(classify_outputs(&CHECK, &outputs(&[A, OLD, A])), ["fail firmware-differs monitor nic:mlx5_1"]);
        let params: Params = toml::from_str("firmware = { MT_0000000838 = ['28.39.1002'] }").unwrap();
        let lines = classify_outputs_with(&CHECK, &params, None, &outputs(&[OLD, STORAGE]));
        assert_eq!(lines, ["fail firmware-differs monitor nic:mlx5_0"]);
        let params: Params = toml::from_str("firmware = '28.39.1002'").unwrap();
        assert_eq!(classify_outputs_with(&CHECK, &params, None, &outputs(&[A])), ["inconclusive unparseable"]);
    }

    #[test]
    fn not_applicable_without_adapters() {
        assert_eq!(classify_outputs(&CHECK, &outputs(&[])), ["not-applicable no-rdma"]);
        assert_eq!(classify_outputs(&CHECK, &outputs(&[("", "")])), ["not-applicable no-rdma"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }
}
