//! oom: did the kernel kill processes because memory ran out?
//!
//! What it does: reads from the control groups of systemd's slices how many processes were OOM-killed within the last
//! hour. `kernel-log` reports kills because the whole node ran out of memory; they are not counted again here, because
//! the kernel log names the slice of each victim.
//!
//! Why it matters: a job that requests too much is the user's own problem. When services of the node are killed with
//! it, the node may have lost its scheduler, its monitoring or its file systems.
//!
//! What to do: `oom-kills` is `monitor`. `dmesg | grep -i 'killed process'` names the victims and `systemctl --failed`
//! the affected services; restart those. Jobs run in system.slice too (Slurm, Docker), so the slice alone does not show
//! which it was. If it happens with different users, less memory is free than the scheduler assumes: see `memory`.
//!
//! Not applicable with control groups version 1, which do not count kills; the kernel log does (`kernel-log`).

use std::collections::BTreeMap;

use doctor_core::{
    observation::{Entity, EntityKind, Event, ObservationBuilder, Metric, Observation},
    time::Span,
};

use crate::{
    files::{Series, match_pattern_exact, sampled_series, unexpected_content},
    gpu::not_applicable,
    kmsg::{self, KmsgLog},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("oom", "processes killed by the OOM killer");

const RULES: &str = r#"
rules = [
  { id = "oom-kills", check = "oom", event = "oom-kills", reason = "oom-kills", severity = "monitor",
    text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("oom.rs")), rules: RULES, probes, interpret };

const MEMORY_EVENTS: &str = "/sys/fs/cgroup/*.slice/memory.events";

const WINDOW: Span = Span::hours(1);

fn probes(_: &Params) -> Vec<Probe> {
    let counters = Probe::Sampled { pattern: MEMORY_EVENTS.to_owned(), keep: WINDOW };
    kmsg::probes().into_iter().chain([counters]).collect()
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let all = match sampled_series(outputs.get(kmsg::probes().len())) {
        Ok(all) => all,
        Err(instead) => return instead,
    };
    // Without the log, none of the kills has been reported elsewhere.
    let node_kills = kmsg::parse_log(params, outputs).map(|log| kills_in_log(&log)).unwrap_or_default();
    let mut builder = ObservationBuilder::default();
    count_kills(&all, &node_kills, &mut builder);
    builder.build_or(not_applicable("no-counter", "the control groups of this node do not count OOM kills"))
}

/// Returns the kills of the last hour because the whole node ran out of memory, by slice:
/// `oom-kill:constraint=CONSTRAINT_NONE,…,global_oom,task_memcg=/system.slice/a.service,task=a,pid=1,uid=0`
fn kills_in_log<'a>(log: &KmsgLog<'a>) -> BTreeMap<&'a str, f64> {
    let mut kills = BTreeMap::new();
    for record in log.recent().filter(|record| log.age(record) <= WINDOW) {
        let what = record.text.strip_prefix("oom-kill:").filter(|what| what.contains(",global_oom,"));
        let group = what.and_then(|what| what.split_once("task_memcg=/")).map(|(_, group)| group);
        if let Some((slice, _)) = group.and_then(|group| group.split_once(".slice")) {
            *kills.entry(slice).or_insert(0.0) += 1.0;
        }
    }
    kills
}

fn count_kills(all: &[Series<'_>], node_kills: &BTreeMap<&str, f64>, builder: &mut ObservationBuilder) {
    let (mut sum, mut any) = (0.0, false);
    for series in all {
        let Some([slice]) = match_pattern_exact(MEMORY_EVENTS, series.path) else { continue };
        match (series.growth_by(WINDOW, parse_kills), series.current()) {
            (Some(growth), _) => {
                let killed = growth.in_last_hour();
                (sum, any) = (sum + killed, true);
                let own = killed - node_kills.get(slice).unwrap_or(&0.0);
                // A single old kill, averaged over the time since the boot, does not count.
                if own > 0.5 {
                    let entity = Entity::new(EntityKind::Service, format!("{slice}.slice"));
                    let text = format!("{own:.0} OOM kills within the hour");
                    builder.event(Event::seen("oom-kills", entity, text));
                }
            }
            (None, Ok(Some(text))) => builder.unreadable(unexpected_content(series.path, text)),
            (None, Err(failure)) => builder.unreadable(failure),
            (None, Ok(None)) => {}
        }
    }
    if any {
        builder.metric(Metric::count("oom_kills", Entity::node(), sum));
    }
}

/// Parses the line `oom_kill 3`.
fn parse_kills(text: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::sampled_files, classify_fixture::classify_outputs, kernel_log, kmsg::tests::logged};
    use doctor_core::observation::{FailureKind, ProbeFailure};
    use proptest::prelude::*;

    fn counted(slice: &str, kills: &[&str]) -> ProbeOutput {
        let path = MEMORY_EVENTS.replace('*', slice);
        let texts: Vec<_> =
            kills.iter().map(|n| format!("low 0\nhigh 0\nmax 9\noom 3\noom_kill {n}\noom_group_kill 0\n")).collect();
        let files: Vec<_> = texts.iter().map(|text| [(path.as_str(), text.as_str())]).collect();
        sampled_files(&files.iter().map(|one| &one[..]).collect::<Vec<_>>())
    }

    fn check(log: &[&str], slice: &str, kills: &[&str]) -> Vec<String> {
        let mut outputs = logged(log);
        outputs.push(counted(slice, kills));
        classify_outputs(&CHECK, &outputs)
    }

    // Made by hand; the log's format is that of Linux 6.8.
    const GLOBAL: [&str; 2] = [
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=user.slice,mems_allowed=0,global_oom,task_memcg=/system.slice/a.service,task=a,pid=4242,uid=0",
        "Out of memory: Killed process 4242 (a) total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB, UID:0",
    ];

    #[test]
    fn kills_within_the_last_hour_count() {
        assert_eq!(check(&[], "system", &["0", "0"]), ["pass within-limits"]);
        assert_eq!(check(&[], "system", &["0", "1"]), ["fail oom-kills monitor service:system.slice"]);
        assert_eq!(check(&[], "kubepods", &["4", "6"]), ["fail oom-kills monitor service:kubepods.slice"]);
        assert_eq!(check(&[], "system", &["7", "7"]), ["pass within-limits"]);
        assert_eq!(check(&[], "system", &["?"]), ["inconclusive unparseable"]);
    }

    #[test]
    fn a_kill_counted_by_log_and_cgroup_is_one_finding() {
        let mut log = logged(&GLOBAL);
        log.truncate(3);
        assert_eq!(classify_outputs(&kernel_log::CHECK, &log), ["fail oom-kill monitor node"]);
        assert_eq!(check(&GLOBAL, "system", &["0", "1"]), ["pass within-limits"]);
        assert_eq!(check(&GLOBAL, "system", &["0", "2"]), ["fail oom-kills monitor service:system.slice"]);
        assert_eq!(check(&GLOBAL, "user", &["0", "1"]), ["fail oom-kills monitor service:user.slice"]);
    }

    #[test]
    fn a_job_that_hit_its_own_limit_is_counted_here_and_not_as_node_out_of_memory() {
        let own = [
            "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/system.slice/a,task_memcg=/system.slice/a,task=python3,pid=7,uid=0",
            "Memory cgroup out of memory: Killed process 7 (python3) total-vm:1kB",
        ];
        assert_eq!(classify_outputs(&kernel_log::CHECK, &logged(&own)), ["pass within-limits"]);
        assert_eq!(check(&own, "system", &["0", "1"]), ["fail oom-kills monitor service:system.slice"]);
    }

    #[test]
    fn without_the_log_every_kill_counts() {
        let mut outputs = logged(&GLOBAL);
        outputs[0] = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "/dev/kmsg"));
        outputs.push(counted("system", &["0", "1"]));
        assert_eq!(classify_outputs(&CHECK, &outputs), ["fail oom-kills monitor service:system.slice"]);
        let mut bare = logged(&GLOBAL);
        bare.push(sampled_files(&[&[]]));
        assert_eq!(classify_outputs(&CHECK, &bare), ["not-applicable no-counter"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in ".{0,12}", b in "[0-9]{0,30}", line in "(oom-kill:|,global_oom,|task_memcg=/|.){0,12}") {
            check(&[&line], "user", &[&a, &b]);
        }
    }
}
