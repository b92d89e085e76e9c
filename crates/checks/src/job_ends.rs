//! job-ends: were users' jobs killed here by signals that faulty hardware causes?
//!
//! What it does: reads the records of Slurm's epilog about jobs that failed on this node within the last day
//! (`doctor-node hook epilog`). Each is kept as evidence: how it ended, when, and which user's it was.
//!
//! Why it matters: a failed job is nearly always the user's own problem. If jobs of several users die of a bus error or
//! an abort on one node, they have that node in common.
//!
//! What to do: `jobs-died` is `monitor`: within the day, jobs of three or more users were killed by one of the signals
//! ILL, ABRT, BUS, FPE and SEGV. It is a reason to test the node (`doctor test NODE --suite standard`), not a verdict
//! on it.
//!
//! Parameters: `directory`, where the epilog writes its records, if its `state` is not the default. Not applicable
//! where there are no records.

use std::collections::BTreeSet;

use doctor_core::{
    observation::{Entity, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure},
    time::Timestamp,
};

use crate::{
    files::{glob_files, unexpected_content},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    check_params,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("job-ends", "user jobs that failed on this node");

const RULES: &str = r#"
rules = [
  { id = "jobs-died", check = "job-ends", metric = "users_whose_jobs_died", above = 2.0, reason = "jobs-died",
    severity = "monitor", text = "jobs of {value} users were killed by hardware-related signals on this node, limit {limit}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("job_ends.rs")), rules: RULES, probes, interpret };

const DIRECTORY: &str = "/var/lib/cluster-doctor/hook/jobs";
const EXAMPLE: &str = "\"/var/lib/cluster-doctor/hook/jobs\"";

/// ILL, ABRT, BUS, FPE, SEGV.
const HARDWARE_SIGNALS: [u8; 5] = [4, 6, 7, 8, 11];

fn directory(params: &Params) -> Result<String, Observation> {
    Ok(check_params::string(params, "directory", EXAMPLE)?.unwrap_or_else(|| DIRECTORY.to_owned()))
}

fn probes(params: &Params) -> Vec<Probe> {
    directory(params).map_or_else(|_| Vec::new(), |directory| vec![Probe::glob(&format!("{directory}/*"))])
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    directory(params)?;
    let (mut builder, mut died, mut users) = (ObservationBuilder::default(), 0_u32, BTreeSet::new());
    let noted = glob_files(outputs.first())?;
    for file in noted {
        let text = match &file.text {
            Ok(text) => text,
            // The record was a day old and was removed while the probe ran.
            Err(ProbeFailure { kind: FailureKind::Missing, .. }) => continue,
            Err(failure) => {
                builder.unreadable(failure.clone());
                continue;
            }
        };
        let Some(end) = UserJobEnd::parse(text) else {
            builder.unreadable(unexpected_content(&file.path, text));
            continue;
        };
        if end.is_hardware_signal() {
            died += 1;
            users.insert(end.user);
        }
        builder.event(end.event());
    }
    if noted.is_empty() {
        return Ok(not_applicable("no-job-ends", "the Slurm epilog has recorded no failed job on this node"));
    }
    builder.metric(Metric::count("jobs_died", Entity::node(), f64::from(died)));
    builder.metric(Metric::count("users_whose_jobs_died", Entity::node(), users.len() as f64));
    Ok(builder.build_or(not_applicable("no-job-ends", "no recorded job failure is recent")))
}

/// A record of the epilog, line by line: `job 17`, `user ann`, `ended 2026-11-15T00:00:00Z`, `batch 0:6`, `step 0:0`.
struct UserJobEnd<'a> {
    job: &'a str,
    user: &'a str,
    at: Timestamp,
    /// Exit code and signal, of the batch script and of the worst step.
    ends: [(u8, u8); 2],
}

impl<'a> UserJobEnd<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let line = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let pair = |name: &str| {
            let (code, signal) = line(name)?.split_once(':')?;
            Some((code.parse().ok()?, signal.parse().ok()?))
        };
        let ends = [pair("batch")?, pair("step")?];
        Some(Self { job: line("job")?, user: line("user")?, at: line("ended")?.parse().ok()?, ends })
    }

    /// Returns the first signal that ended the job, also from a shell's exit code above 128.
    fn signal(&self) -> Option<u8> {
        self.ends.iter().find_map(|(code, signal)| match signal {
            0 => code.checked_sub(128).filter(|signal| (1..=64).contains(signal)),
            signal => Some(*signal),
        })
    }

    fn is_hardware_signal(&self) -> bool {
        self.signal().is_some_and(|signal| HARDWARE_SIGNALS.contains(&signal))
    }

    fn event(&self) -> Event {
        let code = self.ends.iter().map(|(code, _)| *code).max().unwrap_or(0);
        let how = self.signal().map_or_else(|| format!("with code {code}"), |signal| format!("by signal {signal}"));
        let text = format!("job {} of {} ended {how}", self.job, self.user);
        let code = if self.is_hardware_signal() { "job-died" } else { "job-failed" };
        Event { at: Some(self.at), key: Some(format!("job:{}", self.job)), ..Event::seen(code, Entity::node(), text) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::found, classify_fixture::classify_outputs};

    // Made by hand, in the format of `doctor-node hook epilog`.
    fn noted(job: u32, user: &str, batch: &str, step: &str) -> (String, String) {
        let text = format!("job {job}\nuser {user}\nended 2026-11-15T00:00:00Z\nbatch {batch}\nstep {step}\n");
        (format!("{DIRECTORY}/{job}"), text)
    }

    fn output(all: &[(String, String)]) -> ProbeOutput {
        found(&all.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect::<Vec<_>>())
    }

    #[test]
    fn jobs_of_several_users_killed_by_signals_are_reported_and_others_are_not() {
        let of = |all: &[(String, String)]| classify_outputs(&CHECK, &[output(all)]);
        assert_eq!(of(&[]), ["not-applicable no-job-ends"]);
        let two = [noted(1, "ann", "0:6", "0:0"), noted(2, "bob", "139:0", "0:11"), noted(3, "bob", "0:7", "0:0")];
        assert_eq!(of(&two), ["pass within-limits"]);
        let [a, b, c] = two.clone();
        assert_eq!(of(&[a, b, c, noted(4, "cem", "0:0", "0:7")]), ["fail jobs-died monitor node"]);
        let [a, b, c] = two;
        assert_eq!(of(&[a, b, c, noted(4, "cem", "1:0", "0:0"), noted(5, "dan", "0:9", "0:9")]), ["pass within-limits"]);
    }

    #[test]
    fn every_job_end_is_an_event_keyed_by_job_id_and_a_truncated_file_is_not() {
        let all = [noted(1, "ann", "0:6", "0:0"), noted(2, "bob", "3:0", "0:0")];
        let Observation::Measured { events, .. } = interpret(&Params::new(), &[output(&all)]) else { panic!() };
        let found: Vec<_> = events.iter().map(|event| (event.code.as_str(), event.text.as_str(), event.key.as_deref())).collect();
        assert_eq!(
            found,
            [
                ("job-died", "job 1 of ann ended by signal 6", Some("job:1")),
                ("job-failed", "job 2 of bob ended with code 3", Some("job:2")),
            ]
        );
        let cut = [(format!("{DIRECTORY}/3"), "job 3\nuser".to_owned())];
        assert_eq!(classify_outputs(&CHECK, &[output(&cut)]), ["inconclusive unparseable"]);
    }
}
