//! limits: is the kernel close to its limits on open files and threads?
//!
//! What it does: reads the number of open files and of threads as a percentage of what the kernel allows.
//!
//! Why it matters: when either is exhausted no program can start: `Too many open files in system`,
//! `fork: Resource temporarily unavailable`, also for the service that should clean up.
//!
//! What to do: find the process that uses them and restart it.
//! - `files-many` (80 %, `monitor`), `files-full` (95 %, `reboot`, confirmed by a second failure):
//!   `lsof | awk '{print $1}' | sort | uniq -c | sort -n | tail`; `sysctl fs.file-max` raises the limit.
//! - `threads-many` (80 %, `monitor`), `threads-full` (95 %, `reboot`, confirmed by a second failure):
//!   `ps -eo nlwp,pid,cmd --sort nlwp | tail`; `sysctl kernel.pid_max` and `kernel.threads-max` raise the limit.

use doctor_core::observation::{Entity, Metric, Observation, Unit};

use crate::{
    files::{file_text, unexpected_content},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("limits", "open files and threads, relative to the kernel's limits");

// The limits are gpud's.
const RULES: &str = r#"
rules = [
  { id = "limits-files-full", check = "limits", metric = "files_used_percent", above = 95.0, reason = "files-full",
    severity = "reboot", confirm = 2,
    text = "{value} % of the kernel's open-file limit in use, limit {limit} %" },
  { id = "limits-files-many", check = "limits", metric = "files_used_percent", above = 80.0, reason = "files-many",
    severity = "monitor", text = "{value} % of the kernel's open-file limit in use, limit {limit} %" },
  { id = "limits-threads-full", check = "limits", metric = "threads_used_percent", above = 95.0,
    reason = "threads-full", severity = "reboot", confirm = 2,
    text = "{value} % of the kernel's thread limit in use, limit {limit} %" },
  { id = "limits-threads-many", check = "limits", metric = "threads_used_percent", above = 80.0,
    reason = "threads-many", severity = "monitor",
    text = "{value} % of the kernel's thread limit in use, limit {limit} %" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("limits.rs")), rules: RULES, probes, interpret };

const FILES: [&str; 4] =
    ["/proc/sys/fs/file-nr", "/proc/loadavg", "/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"];

fn probes(_: &Params) -> Vec<Probe> {
    FILES.map(Probe::read).to_vec()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let read = |index: usize, parse: fn(&str) -> Option<(f64, f64)>| {
        let text = file_text(outputs.get(index)).map_err(Observation::Failed)?;
        parse(text).ok_or_else(|| Observation::Failed(unexpected_content(FILES[index], text)))
    };
    let (open, may_open) = read(0, files)?;
    let (threads, _) = read(1, threads)?;
    let (pids, _) = read(2, parse_number)?;
    let (most_threads, _) = read(3, parse_number)?;
    let percent = |name, part: f64, total: f64| Metric::new(name, Entity::node(), part * 100.0 / total, Unit::Percent);
    let metrics = vec![
        percent("files_used_percent", open, may_open),
        percent("threads_used_percent", threads, pids.min(most_threads)),
    ];
    Ok(Observation::measured(metrics, Vec::new()))
}

fn number(text: &str) -> Option<f64> {
    text.trim().parse::<u64>().ok().map(|number| number as f64)
}

/// Parses a limit; zero is invalid.
fn parse_number(text: &str) -> Option<(f64, f64)> {
    number(text).filter(|limit| *limit > 0.0).map(|limit| (limit, 0.0))
}

/// Parses `522 0 2465610`: open, unused, maximum.
fn files(text: &str) -> Option<(f64, f64)> {
    let mut fields = text.split_ascii_whitespace();
    let (open, unused, most) = (number(fields.next()?)?, number(fields.next()?)?, number(fields.next()?)?);
    (most > 0.0).then_some(((open - unused).max(0.0), most))
}

/// Parses `1.28 3.54 3.39 3/100 13212`: three running of a hundred threads.
fn threads(text: &str) -> Option<(f64, f64)> {
    let (running, all) = text.split_ascii_whitespace().nth(3)?.split_once('/')?;
    Some((number(all)?, number(running)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs;
    use proptest::prelude::*;

    fn check(files: &str, load: &str, pids: &str) -> Vec<String> {
        classify_outputs(&CHECK, &[files, load, pids, "192000\n"].map(|text| ProbeOutput::Text(text.to_owned())))
    }

    // The first line is captured: Linux 6.18, virtual machine, 2026-11-15; others are made by hand.
    #[test]
    fn a_table_that_fills_up_is_reported_early() {
        let load = "1.28 3.54 3.39 3/100 13212\n";
        assert_eq!(check("522\t0\t2465610\n", load, "4194304\n"), ["pass within-limits"]);
        assert_eq!(check("900\t0\t1000\n", load, "4194304\n"), ["fail files-many monitor node"]);
        let full = ["fail files-full reboot node", "fail files-many monitor node"];
        assert_eq!(check("960\t0\t1000\n", load, "4194304\n"), full);
        assert_eq!(check("522\t0\t2465610\n", load, "120\n"), ["fail threads-many monitor node"]);
    }

    #[test]
    fn a_truncated_line_is_not_a_measurement() {
        for (files, load, pids) in [("1 0", "0 0 0 1/2 3", "9"), ("1 0 9", "0 0 0", "9"), ("1 0 9", "0 0 0 1/2", "0")] {
            assert_eq!(check(files, load, pids), ["inconclusive unparseable"], "{files} {load} {pids}");
        }
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in "[0-9 ]{0,30}", b in "[0-9 /.]{0,30}") {
            check(&a, &b, &a);
        }
    }
}
