//! oom: did the kernel kill processes for want of memory?
//!
//! What it does: reads from the control groups of systemd's slices how many processes were killed for want of memory
//! within the last hour.
//!
//! Why it matters: a job that asks for too much is its user's affair. When services of the node die with it, the node
//! may have lost its scheduler, its monitoring or its file systems.
//!
//! What to do: `oom-kills` is `monitor`. `dmesg | grep -i 'killed process'` names the victims and `systemctl --failed`
//! the services that suffered; start those again. Jobs lie in system.slice too (Slurm, Docker), so the slice alone
//! does not tell which it was. If it happens with different users, less memory is free than the scheduler believes:
//! see `memory`.
//!
//! Not applicable where control groups are of the first version, which do not count this; the kernel's log does
//! (`kernel-log`).

use doctor_core::{
    observation::{Entity, EntityKind, Event, Look, Metric, Observation},
    time::Span,
};

use crate::{
    files::{parts, samples, unreadable},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("oom", "processes killed for want of memory");

const RULES: &str = r#"
rules = [
  { id = "oom-kills", check = "oom", event = "oom-kills", reason = "oom-kills", severity = "monitor",
    text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("oom.rs")), rules: RULES, probes, interpret };

const EVENTS: &str = "/sys/fs/cgroup/*.slice/memory.events";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::Sampled { pattern: EVENTS.to_owned(), keep: Span::hours(1) }]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let all = match samples(outputs.first()) {
        Ok(all) => all,
        Err(instead) => return instead,
    };
    let mut look = Look::default();
    let (mut sum, mut any) = (0.0, false);
    for series in &all {
        let Some([slice]) = parts(EVENTS, series.path) else { continue };
        match (series.growth_of(Span::hours(1), kills), series.reading()) {
            (Some(growth), _) => {
                let killed = growth.in_an_hour();
                (sum, any) = (sum + killed, true);
                // One of a long past, shared out over the time since the boot, is none.
                if killed > 0.5 {
                    let entity = Entity::new(EntityKind::Service, format!("{slice}.slice"));
                    let text = format!("{killed:.0} processes were killed for want of memory within the hour");
                    look.event(Event::seen("oom-kills", entity, text));
                }
            }
            (None, Ok(Some(text))) => look.could_not(unreadable(series.path, text)),
            (None, Err(failure)) => look.could_not(failure),
            (None, Ok(None)) => {}
        }
    }
    if any {
        look.metric(Metric::count("oom_kills", Entity::node(), sum));
    }
    look.or(not_applicable("no-counter", "the control groups here do not count kills"))
}

/// The line `oom_kill 3`.
fn kills(text: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::looks, judged::judged};
    use proptest::prelude::*;

    fn look(slice: &str, kills: &[&str]) -> Vec<String> {
        let path = EVENTS.replace('*', slice);
        let texts: Vec<_> =
            kills.iter().map(|n| format!("low 0\nhigh 0\nmax 9\noom 3\noom_kill {n}\noom_group_kill 0\n")).collect();
        let files: Vec<_> = texts.iter().map(|text| [(path.as_str(), text.as_str())]).collect();
        judged(&CHECK, &[looks(&files.iter().map(|one| &one[..]).collect::<Vec<_>>())])
    }

    // Made by hand.
    #[test]
    fn kills_of_this_hour_count() {
        assert_eq!(look("system", &["0", "0"]), ["pass within-limits"]);
        assert_eq!(look("system", &["0", "1"]), ["fail oom-kills monitor service:system.slice"]);
        assert_eq!(look("kubepods", &["4", "6"]), ["fail oom-kills monitor service:kubepods.slice"]);
        assert_eq!(look("system", &["7", "7"]), ["pass within-limits"]);
        assert_eq!(look("system", &["?"]), ["inconclusive unparseable"]);
        assert_eq!(judged(&CHECK, &[looks(&[&[]])]), ["not-applicable no-counter"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(a in ".{0,12}", b in "[0-9]{0,30}") {
            look("user", &[&a, &b]);
        }
    }
}
