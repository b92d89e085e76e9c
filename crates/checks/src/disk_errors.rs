//! disk-errors: do commands to SCSI and SATA disks fail?
//!
//! What it does: reads how many commands each such disk failed within the last hour.
//!
//! Why it matters: the kernel repeats failed commands until the disk answers, so everything on the disk is slow before
//! it fails for good.
//!
//! What to do: `disk-errors` is `monitor`: more than ten failed commands within the hour. `dmesg | grep DISK` and
//! `smartctl -a /dev/DISK` show whether the disk or its cable is bad. A few failed commands are usual when a tool sends
//! a command that the disk does not support.
//!
//! `nvme-state` and `nvme-health` cover NVMe disks. Not applicable where there is no SCSI or SATA disk.

use doctor_core::{
    observation::{Entity, EntityKind, ObservationBuilder, Metric, Observation, Unit},
    time::Span,
};

use crate::{
    files::{match_pattern_exact, sampled_series, unexpected_content},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("disk-errors", "failed commands of SCSI and SATA disks");

const RULES: &str = r#"
rules = [
  { id = "disk-errors-many", check = "disk-errors", metric = "failed_commands", above = 10.0, reason = "disk-errors",
    severity = "monitor", text = "{entity}: {value} failed commands within the hour, limit {limit}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("disk_errors.rs")), rules: RULES, probes, interpret };

const ERROR_COUNTER: &str = "/sys/block/*/device/ioerr_cnt";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::Sampled { pattern: ERROR_COUNTER.to_owned(), keep: Span::hours(1) }]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let all = match sampled_series(outputs.first()) {
        Ok(all) => all,
        Err(instead) => return instead,
    };
    let mut builder = ObservationBuilder::default();
    for series in &all {
        let Some([disk]) = match_pattern_exact(ERROR_COUNTER, series.path) else { continue };
        match (series.growth_by(Span::hours(1), hexadecimal), series.current()) {
            (Some(growth), _) => {
                let entity = Entity::new(EntityKind::Disk, disk);
                builder.metric(Metric::new("failed_commands", entity, growth.in_last_hour(), Unit::PerHour));
            }
            (None, Ok(Some(text))) => builder.unreadable(unexpected_content(series.path, text)),
            (None, Err(failure)) => builder.unreadable(failure),
            // The disk was removed.
            (None, Ok(None)) => {}
        }
    }
    builder.build_or(not_applicable("no-disk", "no SCSI or SATA disk on this node"))
}

/// Parses the kernel's format, such as `0x1f`.
fn hexadecimal(text: &str) -> Option<f64> {
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok().map(f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::sampled_files, classify_fixture::classify_outputs};
    use proptest::prelude::*;

    fn check(counts: &[&str]) -> Vec<String> {
        let each: Vec<_> = counts.iter().map(|count| [("/sys/block/sda/device/ioerr_cnt", *count)]).collect();
        classify_outputs(&CHECK, &[sampled_files(&each.iter().map(|one| &one[..]).collect::<Vec<_>>())])
    }

    // Made by hand.
    #[test]
    fn only_failed_commands_within_the_last_hour_count() {
        assert_eq!(check(&["0x2\n", "0x2\n"]), ["pass within-limits"]);
        assert_eq!(check(&["0x2\n", "0xf\n"]), ["fail disk-errors monitor disk:sda"]);
        assert_eq!(check(&["0xff\n", "0xff\n"]), ["pass within-limits"]);
        assert_eq!(check(&["17\n"]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[sampled_files(&[&[]])]), ["not-applicable no-disk"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(0x)?.{0,12}") {
            check(&[&text, "0x1"]);
            check(&["0x1", &text]);
        }
    }
}
