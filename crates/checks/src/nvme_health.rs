//! nvme-health: do the NVMe disks report problems?
//!
//! What it does: runs `nvme smart-log` hourly for each NVMe controller present, and reads its critical warnings, spare
//! blocks, wear and media errors.
//!
//! Why it matters: an NVMe disk announces its failure: spare blocks run out, it becomes read-only, or it reports that
//! it is no longer reliable. The file system notices later, during a job.
//!
//! What to do: `nvme smart-log /dev/DISK` and `nvme error-log /dev/DISK` show the details.
//! - `nvme-failing` is `isolate`: the disk reports that it is unreliable or read-only, or that its volatile memory
//!   backup failed. Replace it.
//! - `nvme-spare-low` is `isolate`: fewer spare blocks than the vendor's threshold.
//! - `nvme-hot` is `monitor`, confirmed by a second failure: the disk exceeds its temperature limit. Check fans and air
//!   flow.
//! - `nvme-media-errors` is `monitor`: the number of times in its lifetime that the disk could not return data written
//!   to it. The count never decreases: replace the disk at the next opportunity, or accept the count with your own rule
//!   `nvme-health-media` and a higher limit.
//! - `nvme-worn` is `monitor`: the vendor's estimate of its lifetime is used up. It works; plan to replace it.
//!
//! Parameters: `disks`, the controllers to query, `["nvme0", …, "nvme31"]` by default. One that is present and not
//! listed is reported as not checked. Not applicable where there is none, and without the program `nvme`
//! (`no-nvme-cli`), which `doctor status` reports once for the fleet.

use doctor_core::{
    access::Access,
    observation::{Entity, EntityKind, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure, Unit},
    software::Software,
    time::Span,
};

use crate::{
    files::directory_names,
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    check_params::string_list,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec =
    Spec::quick("nvme-health", "SMART health of NVMe disks").every(Span::hours(1)).access(&[Access::HostRoot]);

const RULES: &str = r#"
rules = [
  { id = "nvme-health-failing", check = "nvme-health", event = "nvme-failing", reason = "nvme-failing",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "nvme-health-spare", check = "nvme-health", event = "nvme-spare-low", reason = "nvme-spare-low",
    severity = "isolate", text = "{entity}: {value}" },
  { id = "nvme-health-hot", check = "nvme-health", event = "nvme-hot", reason = "nvme-hot", severity = "monitor",
    confirm = 2, text = "{entity}: {value}" },
  { id = "nvme-health-worn", check = "nvme-health", metric = "life_used_percent", above = 100.0, reason = "nvme-worn",
    severity = "monitor", text = "{entity} has used {value} % of its rated endurance, limit {limit} %" },
  { id = "nvme-health-media", check = "nvme-health", metric = "media_errors", above = 0.0, reason = "nvme-media-errors",
    severity = "monitor", text = "{entity}: {value} media and data integrity errors" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("nvme_health.rs")), rules: RULES, probes, interpret };

/// More than any machine has. One that does not exist costs nothing.
const MAX_DISKS: usize = 32;

fn disks(params: &Params) -> Result<Vec<String>, Observation> {
    let named = string_list(params, "disks", "disks = [\"nvme0\", \"nvme1\"]")?;
    Ok(named.unwrap_or_else(|| (0..MAX_DISKS).map(|n| format!("nvme{n}")).collect()))
}

/// Rejects names that could be read as an option or another path.
fn is_device_name(name: &str) -> bool {
    name.starts_with("nvme") && name.chars().all(|c| c.is_ascii_alphanumeric())
}

fn probes(params: &Params) -> Vec<Probe> {
    let ask = |name: String| Probe::ExecIfExists {
        path: format!("/sys/class/nvme/{name}"),
        program: "nvme".to_owned(),
        args: ["smart-log".to_owned(), format!("/dev/{name}"), "--output-format=json".to_owned()].to_vec(),
        timeout: Span::from_secs(10),
    };
    let named = disks(params).unwrap_or_default().into_iter().filter(|name| is_device_name(name));
    std::iter::once(Probe::List { path: "/sys/class/nvme".to_owned() }).chain(named.map(ask)).collect()
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let named: Vec<String> = disks(params)?.into_iter().filter(|name| is_device_name(name)).collect();
    let none = not_applicable("no-nvme", "no NVMe controller on this node");
    let present = directory_names(outputs.first()).map_err(Observation::Failed)?;
    let mut builder = ObservationBuilder::default();
    let present: Vec<&str> = present.iter().map(String::as_str).filter(|name| is_device_name(name)).collect();
    let output_of = |name: &str| named.iter().position(|other| other == name).map(|index| outputs.get(index + 1));
    let is_missing = |name: &&str| {
        matches!(output_of(name), Some(Some(ProbeOutput::Failed(failure))) if failure.kind == FailureKind::Missing)
    };
    if !present.is_empty() && present.iter().all(is_missing) {
        return Err(not_applicable(Software::NvmeCli.code(), "the program `nvme` is not installed"));
    }
    for name in present {
        let entity = Entity::new(EntityKind::Disk, name);
        match output_of(name) {
            None => {
                let text = format!("{name} exists and was not read; add it to `disks`");
                builder.unreadable(ProbeFailure::new(FailureKind::Empty, text));
            }
            Some(output) => match parse_smart_log(output) {
                Ok(log) => log.add_to(&entity, &mut builder),
                Err(failure) => builder.unreadable(failure),
            },
        }
    }
    Ok(builder.build_or(none))
}

struct SmartLog {
    warning: u64,
    spare: f64,
    spare_threshold: f64,
    used: f64,
    media_errors: Option<f64>,
}

fn parse_smart_log(output: Option<&ProbeOutput>) -> Result<SmartLog, ProbeFailure> {
    let text = match output {
        Some(ProbeOutput::Ran { exit: Some(0), stdout, .. }) => stdout,
        Some(ProbeOutput::Ran { exit, stdout, stderr }) => {
            let line = stderr.lines().chain(stdout.lines()).next().unwrap_or("no output");
            let exit = exit.map_or("a signal".to_owned(), |exit| format!("exit status {exit}"));
            return Err(ProbeFailure::new(FailureKind::Failed, format!("nvme smart-log: {exit}: {line}")));
        }
        Some(ProbeOutput::Failed(failure)) => return Err(failure.clone()),
        _ => return Err(ProbeFailure::new(FailureKind::Unparseable, "the probe returned no program output")),
    };
    let bad = |what: &str| ProbeFailure::new(FailureKind::Unparseable, format!("nvme smart-log: {what}"));
    let json: serde_json::Value = serde_json::from_str(text).map_err(|_| bad("the output is not JSON"))?;
    let need = |name: &str| number(json.get(name)).ok_or_else(|| bad(&format!("no number `{name}` in the output")));
    Ok(SmartLog {
        warning: need("critical_warning")? as u64,
        spare: need("avail_spare")?,
        spare_threshold: need("spare_thresh")?,
        used: need("percent_used")?,
        media_errors: number(json.get("media_errors")),
    })
}

/// Parses a number. Depending on the version it is a number, text, or an object with a `value`.
fn number(value: Option<&serde_json::Value>) -> Option<f64> {
    let value = value?;
    let number = value.as_f64().or_else(|| value.as_str()?.parse().ok()).or_else(|| value.get("value")?.as_f64());
    number.filter(|number| number.is_finite() && *number >= 0.0)
}

impl SmartLog {
    fn add_to(&self, entity: &Entity, builder: &mut ObservationBuilder) {
        // Bits of the NVMe specification, log page 02h.
        let bits = [(1 << 2, "no longer reliable"), (1 << 3, "read-only"), (1 << 4, "without cache backup")];
        let warnings: Vec<_> = bits.iter().filter(|(bit, _)| self.warning & bit != 0).map(|(_, text)| *text).collect();
        if !warnings.is_empty() {
            builder.event(Event::seen(
                "nvme-failing",
                entity.clone(),
                format!("the disk reports that it is {}", warnings.join(", ")),
            ));
        }
        if self.warning & 1 != 0 || self.spare < self.spare_threshold {
            let text =
                format!("{} % of spare blocks left, the vendor's limit is {} %", self.spare, self.spare_threshold);
            builder.event(Event::seen("nvme-spare-low", entity.clone(), text));
        }
        if self.warning & 2 != 0 {
            builder.event(Event::seen("nvme-hot", entity.clone(), "temperature above the disk's limit"));
        }
        let metric = |name, value, unit| Metric::new(name, entity.clone(), value, unit);
        builder.metric(metric("spare_percent", self.spare, Unit::Percent));
        builder.metric(metric("life_used_percent", self.used, Unit::Percent));
        if let Some(errors) = self.media_errors {
            builder.metric(metric("media_errors", errors, Unit::Count));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::{classify_outputs, classify_outputs_with};
    use proptest::prelude::*;

    fn ran(exit: i32, stdout: &str) -> ProbeOutput {
        ProbeOutput::Ran { exit: Some(exit), stdout: stdout.to_owned(), stderr: String::new() }
    }

    fn check(stdout: &str) -> Vec<String> {
        classify_outputs(&CHECK, &[ProbeOutput::Names(vec!["nvme0".into()]), ran(0, stdout)])
    }

    // Made by hand after the output of nvme-cli 1.16 and 2.x.
    const GOOD: &str = r#"{"critical_warning":0,"temperature":310,"avail_spare":100,"spare_thresh":10,"percent_used":3,
        "media_errors":0}"#;

    #[test]
    fn smart_warnings_are_reported() {
        assert_eq!(check(GOOD), ["pass within-limits"]);
        for (from, to, line) in [
            ("warning\":0", "warning\":4", "fail nvme-failing isolate disk:nvme0"),
            ("warning\":0", "warning\":{\"value\":8}", "fail nvme-failing isolate disk:nvme0"),
            ("spare\":100", "spare\":9", "fail nvme-spare-low isolate disk:nvme0"),
            ("warning\":0", "warning\":2", "fail nvme-hot monitor disk:nvme0"),
            ("used\":3", "used\":104", "fail nvme-worn monitor disk:nvme0"),
            ("errors\":0", "errors\":\"12\"", "fail nvme-media-errors monitor disk:nvme0"),
        ] {
            assert_eq!(check(&GOOD.replace(from, to)), [line], "{to}");
        }
    }

    #[test]
    fn a_disk_without_smart_data_does_not_pass() {
        let missing = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "nvme: not found"));
        let one = || ProbeOutput::Names(vec!["nvme0".into()]);
        assert_eq!(classify_outputs(&CHECK, &[one(), missing()]), ["not-applicable no-nvme-cli"]);
        let two = ProbeOutput::Names(vec!["nvme0".into(), "nvme1".into()]);
        assert_eq!(classify_outputs(&CHECK, &[two, ran(0, GOOD), missing()]), ["inconclusive missing"]);
        assert_eq!(classify_outputs(&CHECK, &[one(), ran(1, "No such device")]), ["inconclusive failed"]);
        assert_eq!(check("{}"), ["inconclusive unparseable"]);
        assert_eq!(check(""), ["inconclusive unparseable"]);
        let params: Params = toml::from_str("disks = ['nvme7']").unwrap();
        assert_eq!(classify_outputs_with(&CHECK, &params, None, &[one(), ran(0, GOOD)]), ["inconclusive empty"]);
        assert_eq!(classify_outputs(&CHECK, &[missing()]), ["not-applicable no-nvme"]);
        let params: Params = toml::from_str("disks = ['--help']").unwrap();
        assert_eq!(probes(&params).len(), 1, "a name is never an option");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,80}") {
            check(&text);
            check(&GOOD.replace("100", &text));
        }
    }
}
