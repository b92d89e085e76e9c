//! dcgm-health: do DCGM's health watches report incidents?
//!
//! What it does: where DCGM is installed and its host engine runs (`nv-hostengine`), queries the engine for the
//! incidents of its health watches: PCIe, NVLink, memory, infoROM, temperature and power of every GPU. The check uses
//! the running engine only; it starts neither an engine nor a test. If the watches are off, the check switches them on,
//! and they stay on: they cost the engine a reading of some counters every half minute.
//!
//! Why it matters: DCGM sees rates that a single reading does not show, such as PCIe replays and NVLink errors per
//! minute, and NVIDIA's support asks for its error number. Most other checks examine the same components by other
//! means: a fault that both find is certain.
//!
//! What to do: `dcgmi health -g 0 -c` shows the same incidents, and `doctor explain dcgm NUMBER` explains the error.
//! The severity of an error comes from our table:
//! - `dcgm-isolate` is `isolate`: hardware that DCGM recommends to take out of service. Run `dcgmi diag -r 3` on the
//!   drained node for the support case.
//! - `dcgm-triage` is `reboot`: reboot and check again; if the error recurs, open a support case. `dcgm-unrated`
//!   likewise: an error that this version does not know.
//! - `dcgm-reset` is `reset`: the GPU works again after a reset.
//! - `dcgm-monitor` and `dcgm-warned` are `monitor`: a setting, or a warning of a watch. An unhealthy IMEX is always a
//!   warning, whatever DCGM calls it, because DCGM reports it even where IMEX is not used; the check `imex` knows where
//!   it is used.
//!
//! Not applicable where DCGM's library is not installed, or where nothing listens at the engine's address. Inconclusive
//! if the engine's answer cannot be used, and for the first check after the watches were switched on.
//!
//! Parameters: `address` of the host engine, by default `"127.0.0.1:5555"`.

use std::collections::BTreeMap;

use doctor_core::{
    finding::Severity,
    observation::{Entity, EntityKind, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure},
    reason::ReasonCode,
    time::Span,
};

use crate::{
    dcgm_health_report::{WatchedHealth, Incident, HealthReport},
    files::file_text,
    gpu::{not_applicable, not_applicable_without_gpu},
    probe::{Probe, ProbeOutput},
    check_params::string,
    spec::{Check, Params, Spec, page_of},
    tables,
};

/// Less often than the fast checks: the library is loaded in a child process.
const SPEC: Spec = Spec::quick("dcgm-health", "DCGM health watches").every(Span::minutes(15));

const RULES: &str = r#"
rules = [
  { id = "dcgm-health-isolate", check = "dcgm-health", event = "dcgm-isolate", reason = "dcgm-isolate",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "dcgm-health-triage", check = "dcgm-health", event = "dcgm-triage", reason = "dcgm-triage",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "dcgm-health-unrated", check = "dcgm-health", event = "dcgm-unrated", reason = "dcgm-unrated",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "dcgm-health-reset", check = "dcgm-health", event = "dcgm-reset", reason = "dcgm-reset",
    severity = "reset", text = "{entity}: {value}" },
  { id = "dcgm-health-monitor", check = "dcgm-health", event = "dcgm-monitor", reason = "dcgm-monitor",
    severity = "monitor", text = "{entity}: {value}" },
  { id = "dcgm-health-warned", check = "dcgm-health", event = "dcgm-warned", reason = "dcgm-warned",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("dcgm_health.rs")), rules: RULES, probes, interpret };

/// The default address of `nv-hostengine`.
const ADDRESS: &str = "127.0.0.1:5555";

/// DCGM's constants.
const FAIL: u32 = 20;
const KIND_GPU: u32 = 1;
const KIND_SWITCH: u32 = 3;
const IMEX_UNHEALTHY: u32 = 122;

fn address(params: &Params) -> Result<String, Observation> {
    Ok(string(params, "address", "address = \"127.0.0.1:5555\"")?.unwrap_or_else(|| ADDRESS.to_owned()))
}

fn probes(params: &Params) -> Vec<Probe> {
    let Ok(address) = address(params) else { return Vec::new() };
    vec![Probe::DcgmHealth { address }, Probe::gpu(&["uuid"])]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let could_not = |kind, text: String| Observation::Failed(ProbeFailure::new(kind, text));
    let address = address(params)?;
    let output = file_text(outputs.first()).map_err(|failure| match failure.kind {
        // A machine without a GPU needs no DCGM.
        FailureKind::Missing => match not_applicable_without_gpu(outputs.get(1), Observation::Failed(failure)) {
            Observation::Failed(_) => not_applicable("no-dcgm", "DCGM is not installed"),
            no_gpu => no_gpu,
        },
        _ => Observation::Failed(failure),
    })?;
    let answer = match HealthReport::parse(output) {
        Ok(HealthReport::Watched(answer)) => answer,
        Ok(HealthReport::NoEngine) => {
            let text = format!("DCGM is installed, but no host engine listens at {address}");
            return Err(not_applicable("dcgm-not-running", text));
        }
        Err(line) => return Err(could_not(FailureKind::Unparseable, format!("unexpected line in the DCGM report: {line}"))),
    };
    if answer.watched == 0 {
        let text = "DCGM's health watches were off and are now on; the next check has results";
        return Err(could_not(FailureKind::Empty, text.to_owned()));
    }
    if answer.gpus.is_empty() && answer.incidents.is_empty() {
        return Err(could_not(FailureKind::Empty, "the DCGM host engine watches no GPU".to_owned()));
    }
    Ok(to_observation(&answer))
}

fn to_observation(answer: &WatchedHealth) -> Observation {
    let mut builder = ObservationBuilder::default();
    let mut events: BTreeMap<(&'static str, Entity), Vec<String>> = BTreeMap::new();
    for incident in &answer.incidents {
        let texts = events.entry((code(incident), entity(incident, &answer.gpus))).or_default();
        let text = describe(incident);
        // DCGM reports an incident for each link of a GPU; a few examples suffice.
        if texts.len() < 3 && !texts.contains(&text) {
            texts.push(text);
        }
    }
    for ((code, entity), texts) in events {
        builder.event(Event { code: ReasonCode::fixed(code), entity, at: None, text: texts.join("; "), key: None });
    }
    if answer.truncated {
        let text = "DCGM has more incidents than one report contains";
        builder.unreadable(ProbeFailure::new(FailureKind::TooLong, text));
    }
    builder.metric(Metric::count("dcgm_gpus_watched", Entity::node(), answer.gpus.len() as f64));
    builder.metric(Metric::count("dcgm_incidents", Entity::node(), answer.incidents.len() as f64));
    builder.build_or(Observation::measured(Vec::new(), Vec::new()))
}

/// Returns the event code of an incident: the table's severity of its error, but a warning if the watch itself only
/// warns.
fn code(incident: &Incident) -> &'static str {
    if incident.health < FAIL || incident.error == IMEX_UNHEALTHY {
        return "dcgm-warned";
    }
    match tables::dcgm_error(incident.error).and_then(|row| row.severity) {
        Some(Severity::Isolate) => "dcgm-isolate",
        Some(Severity::Reboot) => "dcgm-triage",
        Some(Severity::Reset) => "dcgm-reset",
        Some(Severity::Monitor) => "dcgm-monitor",
        None => "dcgm-unrated",
    }
}

fn entity(incident: &Incident, gpus: &[(u32, String)]) -> Entity {
    let number = incident.entity.to_string();
    match incident.kind {
        KIND_GPU => {
            let bus = gpus.iter().find(|(gpu, bus)| *gpu == incident.entity && !bus.is_empty());
            Entity::new(EntityKind::Gpu, bus.map_or(number, |(_, bus)| bus.clone()))
        }
        KIND_SWITCH => Entity::new(EntityKind::Switch, number),
        _ => Entity::node(),
    }
}

fn describe(incident: &Incident) -> String {
    let text: String = incident.text.chars().take(300).collect();
    match tables::dcgm_error(incident.error) {
        Some(row) => format!("{text} (DCGM error {}, {})", incident.error, row.name),
        None => format!("{text} (DCGM error {})", incident.error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        classify_fixture::classify_outputs,
        gpu::tests::{answer, none},
    };
    use proptest::prelude::*;

    // Made by hand, worded like DCGM 4.
    fn check(lines: &str) -> Vec<String> {
        let text = format!("watched 0x1d3\ngpu 0 0000:18:00.0\ngpu 1 0000:28:00.0\n{lines}");
        classify_outputs(&CHECK, &[ProbeOutput::Text(text)])
    }

    #[test]
    fn incidents_are_rated_by_the_table_and_told_by_bus_id() {
        assert_eq!(check(""), ["pass within-limits"]);
        for (line, finding) in [
            ("incident 1 0 0x10 20 4 a double-bit error", "dcgm-isolate isolate gpu:0000:18:00.0"),
            ("incident 1 1 0x10 20 6 pages wait", "dcgm-reset reset gpu:0000:28:00.0"),
            ("incident 1 1 0x2 20 14 link 3 is down", "dcgm-triage reboot gpu:0000:28:00.0"),
            ("incident 1 7 0x2 20 14 link 3 is down", "dcgm-triage reboot gpu:7"),
            ("incident 1 0 0x80 10 10 it is warm", "dcgm-warned monitor gpu:0000:18:00.0"),
            ("incident 1 0 0x10 10 4 a double-bit error", "dcgm-warned monitor gpu:0000:18:00.0"),
            ("incident 1 0 0x10 20 9999 something new", "dcgm-unrated reboot gpu:0000:18:00.0"),
            ("incident 3 2 0x800 20 15 fatal", "dcgm-isolate isolate switch:2"),
        ] {
            assert_eq!(check(line), [format!("fail {finding}")], "{line}");
        }
    }

    #[test]
    fn several_links_of_one_gpu_are_one_finding() {
        let lines: String = (0..18).map(|link| format!("incident 1 0 0x2 20 14 link {link} is down\n")).collect();
        assert_eq!(check(&lines), ["fail dcgm-triage reboot gpu:0000:18:00.0"]);
    }

    #[test]
    fn imex_that_nobody_uses_isolates_no_node() {
        let lines = "incident 1 0 0x2 20 122 IMEX is not ready";
        assert_eq!(check(lines), ["fail dcgm-warned monitor gpu:0000:18:00.0"]);
    }

    #[test]
    fn a_missing_host_engine_or_one_without_watches_does_not_pass() {
        let failed = |kind| classify_outputs(&CHECK, &[ProbeOutput::Failed(ProbeFailure::new(kind, "libdcgm"))]);
        assert_eq!(failed(FailureKind::Missing), ["not-applicable no-dcgm"]);
        assert_eq!(failed(FailureKind::TimedOut), ["inconclusive timed-out"]);
        let missing = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "libdcgm.so.4 cannot be loaded"));
        assert_eq!(classify_outputs(&CHECK, &[missing(), none()]), ["not-applicable no-gpu"]);
        assert_eq!(classify_outputs(&CHECK, &[missing(), answer(&[&[]])]), ["not-applicable no-dcgm"]);
        let findings = |text: &str| classify_outputs(&CHECK, &[ProbeOutput::Text(text.to_owned())]);
        assert_eq!(findings("engine none\n"), ["not-applicable dcgm-not-running"]);
        assert_eq!(findings("watched 0x0\ngpu 0 0000:18:00.0\n"), ["inconclusive empty"]);
        assert_eq!(findings("watched 0x1d3\n"), ["inconclusive empty"]);
        assert_eq!(findings("all is well\n"), ["inconclusive unparseable"]);
        assert_eq!(check("cut\n"), ["inconclusive too-long"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(incident |gpu |0x|[0-9]| |\n|.){0,60}") {
            check(&text);
        }
    }
}
