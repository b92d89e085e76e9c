//! nvlink-state: is every NVLink of every GPU up?
//!
//! What it does: reads the state of each NVLink of each GPU. It reports links that are down on a GPU with other links
//! up, and a GPU without any link up while its neighbours have some.
//!
//! Why it matters: NCCL is as fast as the slowest path. One link of eighteen costs a few percent of every collective; a
//! GPU without any sends its traffic over PCIe at a tenth of the speed, or the job fails at start.
//!
//! What to do: `nvidia-smi nvlink -s -i BUS` shows the links, the kernel log the cause (Xid 74, SXid of the switch).
//! - `nvlink-down` is `reset`: drain the node and reset its GPUs together (`nvidia-smi --gpu-reset`, with the fabric
//!   manager running), which retrains the links. A link that stays down indicates a bad board, connector or switch; the
//!   case escalates to replacement.
//! - `nvlink-down-all` is `reset`: each GPU has equally many links down, so the shared switch or bridge is at fault and
//!   no GPU; reported once. `journalctl -k -g SXid` names the switch. If a reset of all GPUs does not restore the
//!   links, open a repair case for the machine and keep the boards.
//!
//! Parameters: `links`, how many links each GPU should have up. Set it for boards with fewer bridges than sockets; GPUs
//! without any link up are then reported too. Not applicable where GPUs have no NVLink, or, without `links`, where no
//! link of the machine is up, as on PCIe boards without bridges; `nvlink-count` compares that with the profile.

use doctor_core::observation::{Entity, Event, ObservationBuilder, Metric, Observation};

use crate::{
    gpu::{Gpu, require_gpus, not_applicable, read_indexed},
    probe::{Probe, ProbeOutput},
    check_params::invalid_param,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("nvlink-state", "NVLinks of GPUs that are down");

const RULES: &str = r#"
rules = [
  { id = "nvlink-state-down", check = "nvlink-state", event = "nvlink-down", reason = "nvlink-down",
    severity = "reset", text = "{entity}: {value}" },
  { id = "nvlink-state-down-all", check = "nvlink-state", event = "nvlink-down-all", reason = "nvlink-down-all",
    severity = "reset", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("nvlink_state.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&["nvlink.*.state"])]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let expected = match params.get("links").map(toml::Value::as_integer) {
        None => None,
        Some(Some(links @ 1..)) => usize::try_from(links).ok(),
        Some(_) => return invalid_param("links", "links = 18"),
    };
    let gpus = match require_gpus(outputs.first()) {
        Ok(gpus) => gpus,
        Err(instead) => return instead,
    };
    let mut builder = ObservationBuilder::default();
    let links: Vec<(&Gpu, Vec<(u32, bool)>)> = gpus.iter().map(|gpu| (gpu, states(gpu, &mut builder))).collect();
    let up = |states: &[(u32, bool)]| states.iter().filter(|(_, up)| *up).count();
    if expected.is_some() || links.iter().any(|(_, states)| up(states) > 0) {
        let linked = || links.iter().filter(|(_, states)| !states.is_empty());
        linked().for_each(|(gpu, states)| {
            builder.metric(Metric::count("nvlinks_up", gpu.entity(), up(states) as f64));
        });
        let down = |states: &[(u32, bool)]| expected.unwrap_or(states.len()).saturating_sub(up(states));
        let ill: Vec<_> = linked().filter(|(_, states)| down(states) > 0).collect();
        match ill.first().map(|(_, states)| down(states)) {
            Some(each) if ill.len() > 1 && linked().all(|(_, states)| down(states) == each) => {
                let text = format!("{each} NVLinks are down on each of {} GPUs: a shared part is faulty", ill.len());
                builder.event(Event::seen("nvlink-down-all", Entity::node(), text));
            }
            _ => ill.iter().for_each(|(gpu, states)| {
                builder.event(Event::seen("nvlink-down", gpu.entity(), describe_down(states, expected)));
            }),
        }
        return builder.build_or(not_applicable("no-nvlink", "no GPU of this node has NVLink"));
    }
    let (code, text) = if links.iter().all(|(_, states)| states.is_empty()) {
        ("no-nvlink", "no GPU of this node has NVLink")
    } else {
        ("nvlink-unused", "no NVLink of this node is up")
    };
    builder.build_or(not_applicable(code, text))
}

fn states(gpu: &Gpu, builder: &mut ObservationBuilder) -> Vec<(u32, bool)> {
    read_indexed(gpu, "nvlink", "state", builder).into_iter().map(|(link, state)| (link, state != 0.0)).collect()
}

fn describe_down(states: &[(u32, bool)], expected: Option<usize>) -> String {
    let down: Vec<String> = states.iter().filter(|(_, up)| !up).map(|(link, _)| link.to_string()).collect();
    let up = states.len() - down.len();
    let expected = expected.unwrap_or(states.len());
    format!("{up} of {expected} NVLinks are up; down: {}", down.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::{
            FieldValue,
            tests::{answer, lost, n, none},
        },
        classify_fixture::{classify_outputs, classify_outputs_with},
    };

    /// Links in a row: `1` up, `0` down, `-` absent, `x` unreadable.
    fn gpu(links: &str) -> Vec<(String, FieldValue)> {
        let reading = |state| match state {
            '1' => n(1.0),
            '0' => n(0.0),
            '-' => FieldValue::NotSupported,
            _ => lost(),
        };
        links.chars().enumerate().map(|(link, state)| (format!("nvlink.{link}.state"), reading(state))).collect()
    }

    fn check(params: &Params, gpus: &[&str]) -> Vec<String> {
        let gpus: Vec<_> = gpus.iter().map(|links| gpu(links)).collect();
        let gpus: Vec<Vec<(&str, FieldValue)>> = gpus
            .iter()
            .map(|gpu| gpu.iter().map(|(name, reading)| (name.as_str(), reading.clone())).collect())
            .collect();
        let gpus: Vec<_> = gpus.iter().map(Vec::as_slice).collect();
        classify_outputs_with(&CHECK, params, None, &[answer(&gpus)])
    }

    fn wants(links: impl Into<toml::Value>) -> Params {
        [("links".to_owned(), links.into())].into()
    }

    #[test]
    fn a_link_that_is_down_is_reported_for_its_gpu() {
        let none = Params::new();
        assert_eq!(check(&none, &["1111", "1111"]), ["pass within-limits"]);
        assert_eq!(check(&none, &["1111", "1011"]), ["fail nvlink-down reset gpu:0000:19:00.0"]);
        assert_eq!(check(&none, &["0000", "1111"]), ["fail nvlink-down reset gpu:0000:18:00.0"]);
        assert_eq!(check(&none, &["1111", "1110", "1001"]).len(), 2);
        assert_eq!(check(&none, &["11--", "11--"]), ["pass within-limits"]);
    }

    // The link numbers of a switch differ from GPU to GPU.
    #[test]
    fn a_dead_switch_is_one_finding_and_blames_no_gpu() {
        let line = ["fail nvlink-down-all reset node"];
        assert_eq!(check(&Params::new(), &["1110", "1101", "1110", "0111"]), line);
        assert_eq!(check(&wants(4), &["0000", "0000"]), line);
    }

    #[test]
    fn boards_without_bridges_have_no_nvlink() {
        let none = Params::new();
        assert_eq!(check(&none, &["0000", "0000"]), ["not-applicable nvlink-unused"]);
        assert_eq!(check(&none, &["----", ""]), ["not-applicable no-nvlink"]);
        assert_eq!(check(&wants(2), &["1100"]), ["pass within-limits"]);
        assert_eq!(check(&wants(4), &["0000"]), ["fail nvlink-down reset gpu:0000:18:00.0"]);
        assert_eq!(check(&wants("18"), &["1111"]), ["inconclusive unparseable"]);
        assert_eq!(check(&wants(-1), &["1111"]), ["inconclusive unparseable"]);
    }

    #[test]
    fn an_unreadable_link_state_does_not_pass() {
        assert_eq!(check(&Params::new(), &["1111", "1x11"]), ["inconclusive failed"]);
        assert_eq!(check(&Params::new(), &["xxxx"]), ["inconclusive failed"]);
        let lost_field = [("nvlink.*.state", lost())];
        assert_eq!(classify_outputs(&CHECK, &[answer(&[&lost_field])]), ["inconclusive failed"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
