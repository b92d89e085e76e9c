//! fs-errors: has a local file system recorded corruption?
//!
//! What it does: reads how many errors each ext4 file system, and each disk of a btrfs file system, has recorded, and
//! whether the number grew within the last day.
//!
//! Why it matters: ext4 counts an error each time it finds an inconsistent structure. The count stays on the disk until
//! the file system is checked, also across reboots: a node that was "cured" by a reboot still shows it here.
//!
//! What to do: `dmesg | grep -i ext4` and `tune2fs -l /dev/DISK | grep -i error` show what happened and when.
//! - `file-system-errors-grow` is `reboot`: new errors within the day. Boot with a forced check (`fsck.mode=force`); if
//!   they recur, the disk or the memory is bad.
//! - `file-system-errors` is `monitor`: older errors were never repaired. Check the file system at the next boot.
//!
//! xfs has no such counter: it shuts down and logs this in the kernel log (`kernel-log`, `mounts`). Not applicable
//! where no file system has one.

use doctor_core::{
    observation::{Entity, EntityKind, Event, ObservationBuilder, Metric, Observation},
    time::Span,
};

use crate::{
    files::{Series, glob_files, match_pattern_exact, sampled_series, unexpected_content},
    gpu::not_applicable,
    probe::{FileText, Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("fs-errors", "errors that file systems recorded");

const RULES: &str = r#"
rules = [
  { id = "fs-errors-grow", check = "fs-errors", event = "file-system-errors-grow", reason = "file-system-errors-grow",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "fs-errors-old", check = "fs-errors", event = "file-system-errors", reason = "file-system-errors",
    severity = "monitor", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("fs_errors.rs")), rules: RULES, probes, interpret };

const EXT4: &str = "/sys/fs/ext4/*/errors_count";
const LAST_ERROR_TIME: &str = "/sys/fs/ext4/*/last_error_time";
const BTRFS: &str = "/sys/fs/btrfs/*/devinfo/*/error_stats";
const DAY: Span = Span::days(1);

fn probes(_: &Params) -> Vec<Probe> {
    let sampled = |pattern: &str| Probe::Sampled { pattern: pattern.to_owned(), keep: DAY };
    vec![sampled(EXT4), Probe::glob(LAST_ERROR_TIME), sampled(BTRFS)]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let (ext4, last, btrfs) = (sampled_series(outputs.first())?, glob_files(outputs.get(1))?, sampled_series(outputs.get(2))?);
    let mut builder = ObservationBuilder::default();
    for series in &ext4 {
        let Some([disk]) = match_pattern_exact(EXT4, series.path) else { continue };
        report_errors(disk.to_owned(), series, last_error_time(last, disk), &mut builder);
    }
    for series in &btrfs {
        let Some([of, disk]) = match_pattern_exact(BTRFS, series.path) else { continue };
        report_errors(format!("{of}/{disk}"), series, None, &mut builder);
    }
    Ok(builder.build_or(not_applicable("no-counter", "no file system of this node counts its errors")))
}

/// Sums the counters: a plain number, or lines that each end in a number, such as `write_errs 0`.
fn sum_counters(text: &str) -> Option<f64> {
    let numbers = text.lines().map(|line| line.split_ascii_whitespace().next_back()?.parse::<f64>().ok());
    numbers.sum::<Option<f64>>().filter(|_| !text.trim().is_empty())
}

fn report_errors(disk: String, series: &Series<'_>, when: Option<u64>, builder: &mut ObservationBuilder) {
    let now = match series.current() {
        Ok(Some(now)) => now,
        // The file system has been unmounted and has no errors to report.
        Ok(None) => return,
        Err(failure) => return builder.unreadable(failure),
    };
    let Some(count) = sum_counters(now) else {
        builder.unreadable(unexpected_content(series.path, now));
        return;
    };
    let entity = Entity::new(EntityKind::Disk, disk);
    builder.metric(Metric::count("file_system_errors", entity.clone(), count));
    // The count survives a reboot, so the first reading has nothing to compare with.
    let readings = series.points.iter().filter(|point| point.text.is_some()).count();
    let grown = if readings > 1 { series.growth_by(DAY, sum_counters).map_or(0.0, |growth| growth.by) } else { 0.0 };
    if grown > 0.0 {
        let text = format!("{grown} new file-system errors within a day, {count} in total");
        builder.event(Event::seen("file-system-errors-grow", entity, text));
    } else if count > 0.0 {
        let when = when.map(|at| doctor_core::time::Timestamp::from_secs(i64::try_from(at).unwrap_or(i64::MAX)));
        let when = when.map(|at| format!(", the last at {at}")).unwrap_or_default();
        builder.event(Event::seen("file-system-errors", entity, format!("{count} unrepaired file-system errors{when}")));
    }
}

fn last_error_time(all: &[FileText], disk: &str) -> Option<u64> {
    let file = all.iter().find(|file| match_pattern_exact(LAST_ERROR_TIME, &file.path) == Some([disk]))?;
    file.text.as_deref().ok()?.trim().parse().ok().filter(|at| *at > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::tests::{found, sampled_files},
        classify_fixture::classify_outputs,
    };
    use proptest::prelude::*;

    fn check(counts: &[&str]) -> Vec<String> {
        let each: Vec<_> = counts.iter().map(|count| [("/sys/fs/ext4/sda1/errors_count", *count)]).collect();
        let ext4 = sampled_files(&each.iter().map(|one| &one[..]).collect::<Vec<_>>());
        classify_outputs(&CHECK, &[ext4, found(&[("/sys/fs/ext4/sda1/last_error_time", "1794700000\n")]), sampled_files(&[&[]])])
    }

    // Made by hand.
    #[test]
    fn new_errors_are_more_severe_than_old_ones() {
        assert_eq!(check(&["0\n", "0\n"]), ["pass within-limits"]);
        assert_eq!(check(&["0\n", "3\n"]), ["fail file-system-errors-grow reboot disk:sda1"]);
        assert_eq!(check(&["3\n", "3\n"]), ["fail file-system-errors monitor disk:sda1"]);
    }

    #[test]
    fn old_errors_do_not_request_a_reboot_after_each_boot() {
        assert_eq!(check(&["3\n"]), ["fail file-system-errors monitor disk:sda1"]);
    }

    #[test]
    fn btrfs_counts_by_disk() {
        let path = "/sys/fs/btrfs/0a1b/devinfo/1/error_stats";
        let text = "write_errs 0\nread_errs 2\nflush_errs 0\ncorruption_errs 1\ngeneration_errs 0\n";
        let lines = classify_outputs(&CHECK, &[sampled_files(&[&[]]), found(&[]), sampled_files(&[&[(path, text)]])]);
        assert_eq!(lines, ["fail file-system-errors monitor disk:0a1b/1"]);
    }

    #[test]
    fn an_unreadable_counter_is_not_zero() {
        assert_eq!(check(&["?"]), ["inconclusive unparseable"]);
        assert_eq!(check(&[""]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[sampled_files(&[&[]]), found(&[]), sampled_files(&[&[]])]), ["not-applicable no-counter"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in ".{0,20}", b in "[0-9]{0,30}") {
            check(&[&a, &b]);
            check(&[&b, &a]);
        }
    }
}
