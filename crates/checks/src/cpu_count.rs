//! cpu-count: are all processors of this machine type present?
//!
//! What it does: counts the sockets, cores and hardware threads that the kernel reports and compares them with the
//! machine profile.
//!
//! Why it matters: if firmware loses a socket or a core complex at boot, the machine keeps running with less. Jobs that
//! bind processes to cores fail or run two processes on one core; the memory of the missing socket is missing too.
//!
//! What to do: `cpu-count-wrong` is `isolate`: `lscpu` shows what is present. Before suspecting hardware, look for
//! `nosmt`, `maxcpus=` or `nr_cpus=` in `/proc/cmdline` and for a changed SMT setting in the firmware; `cpu-online`
//! reports processors that are only offline.
//!
//! Without `cpu_sockets`, `cpu_cores` and `cpu_threads` in the profile the counts are compared with other nodes of the
//! type and with this node's accepted past, at severity `monitor`; without those they are not judged
//! (`no-expectation`).

use std::collections::BTreeSet;

use doctor_core::{
    observation::{Entity, FailureKind, Metric, Observation, ProbeFailure},
    time::Span,
};

use crate::{
    files::glob_files,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

// The counts change only with a boot, and the check reads two files per processor.
const SPEC: Spec = Spec::quick("cpu-count", "sockets, cores and threads").every(Span::hours(1));

const RULES: &str = r#"
rules = [
  { id = "cpu-count-sockets", check = "cpu-count", metric = "cpu_sockets", not_as_profile = true,
    reason = "cpu-count-wrong", severity = "isolate", text = "{value} CPU sockets, expected {limit} on this machine type" },
  { id = "cpu-count-cores", check = "cpu-count", metric = "cpu_cores", not_as_profile = true,
    reason = "cpu-count-wrong", severity = "isolate", text = "{value} CPU cores, expected {limit} on this machine type" },
  { id = "cpu-count-threads", check = "cpu-count", metric = "cpu_threads", not_as_profile = true,
    reason = "cpu-count-wrong", severity = "isolate", text = "{value} CPU threads, expected {limit} on this machine type" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("cpu_count.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    let of = |name: &str| Probe::glob(&format!("/sys/devices/system/cpu/cpu*/topology/{name}"));
    vec![of("physical_package_id"), of("thread_siblings_list")]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let (packages, siblings) = (topology_values(outputs.first())?, topology_values(outputs.get(1))?);
    let distinct = |all: &[&str]| all.iter().collect::<BTreeSet<_>>().len() as f64;
    let metric = |name, value| Metric::count(name, Entity::node(), value);
    let metrics = vec![
        metric("cpu_sockets", distinct(&packages)),
        metric("cpu_cores", distinct(&siblings)),
        metric("cpu_threads", siblings.len() as f64),
    ];
    Ok(Observation::measured(metrics, Vec::new()))
}

/// Fails if one file cannot be read: an incomplete count is not a count.
fn topology_values(output: Option<&ProbeOutput>) -> Result<Vec<&str>, Observation> {
    let texts = glob_files(output)?.iter().map(|file| file.text.as_deref().map(str::trim));
    let texts: Vec<&str> = texts.collect::<Result<_, _>>().map_err(|failure| Observation::Failed(failure.clone()))?;
    if texts.is_empty() || texts.contains(&"") {
        let text = "no CPU found in /sys/devices/system/cpu";
        return Err(Observation::Failed(ProbeFailure::new(FailureKind::Empty, text)));
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::found, classify_fixture::classify_outputs_with};
    use doctor_core::{ids::Sku, profile::Profile};

    /// Threads with their socket and siblings. Made by hand.
    fn check(expected: Option<[f64; 3]>, threads: &[(&str, &str)]) -> Vec<String> {
        let names = ["cpu_sockets", "cpu_cores", "cpu_threads"].map(str::to_owned);
        let expect = expected.map(|numbers| names.into_iter().zip(numbers.map(Into::into)).collect()).unwrap_or_default();
        let profile = Profile { sku: Sku::new("hgx").unwrap(), version: 1, expect };
        let all = |name: &str, text: fn(&(&str, &str)) -> String| {
            let path = |n: usize| format!("/sys/devices/system/cpu/cpu{n}/topology/{name}");
            let all: Vec<_> = threads.iter().enumerate().map(|(n, thread)| (path(n), text(thread))).collect();
            found(&all.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect::<Vec<_>>())
        };
        let outputs = [all("physical_package_id", |t| t.0.to_owned()), all("thread_siblings_list", |t| t.1.to_owned())];
        classify_outputs_with(&CHECK, &Params::new(), Some(&profile), &outputs)
    }

    const FOUR: [(&str, &str); 4] = [("0\n", "0,2\n"), ("1\n", "1,3\n"), ("0\n", "0,2\n"), ("1\n", "1,3\n")];

    #[test]
    fn a_missing_socket_is_reported() {
        assert_eq!(check(Some([2.0, 2.0, 4.0]), &FOUR), ["pass within-limits"]);
        let line = "fail cpu-count-wrong isolate node";
        assert_eq!(check(Some([2.0, 2.0, 4.0]), &[FOUR[0], FOUR[2]]), [line, line, line]);
        assert_eq!(check(Some([2.0, 2.0, 2.0]), &FOUR), [line]);
    }

    #[test]
    fn a_missing_profile_or_an_empty_output_does_not_pass() {
        assert_eq!(check(None, &FOUR), ["not-applicable no-expectation"]);
        assert_eq!(check(Some([2.0, 2.0, 4.0]), &[]), ["inconclusive empty"]);
        assert_eq!(check(Some([2.0, 2.0, 4.0]), &[("", "")]), ["inconclusive empty"]);
    }
}
