//! ib-flaps: has a high-speed network port dropped, or is it flapping?
//!
//! What it does: evaluates each port's state over the last twelve hours together with how often its link went down
//! (`link_downed`), which also counts drops between two readings.
//!
//! Why it matters: a link that drops for a few seconds kills the job that uses it, and is up again at the next check.
//! Only its history shows it.
//!
//! What to do: `doctor why NODE` names the port and the number.
//! - `port-dropped` is `isolate`: the port was up, has been down for four minutes or more and did not try to come back
//!   (its drop counter did not change); reported until ten minutes after it returned. Check the cable, the transceiver
//!   and the switch's port.
//! - `port-flaps` is `isolate`: the link went down and came back three times or more within twelve hours. Replace the
//!   cable; if many nodes of one switch report it, the switch is at fault.
//!
//! gpud counts a return only if the link was down for 25 seconds; readings five minutes apart do not show that, so each
//! drop counts here. The finding ends when twelve hours have passed without a third drop, or with a reboot.
//!
//! Not applicable where there is no RDMA device.

use doctor_core::{
    observation::{Entity, Event, ObservationBuilder, Metric, Observation},
    time::Span,
};

use crate::{
    files::{Series, match_pattern_exact, sampled_series, unexpected_content},
    probe::{Probe, ProbeOutput},
    rdma::{STATE, no_rdma, port_entity, parse_state},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("ib-flaps", "RDMA ports that drop or flap");

const RULES: &str = r#"
rules = [
  { id = "ib-flaps-dropped", check = "ib-flaps", event = "port-dropped", reason = "port-dropped", severity = "isolate",
    text = "{entity}: {value}" },
  { id = "ib-flaps-flaps", check = "ib-flaps", metric = "link_returns", above = 2.0, reason = "port-flaps",
    severity = "isolate", text = "{entity} went down and came back {value} times within 12 hours" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("ib_flaps.rs")), rules: RULES, probes, interpret };

const LINK_DOWNED: &str = "/sys/class/infiniband/*/ports/*/counters/link_downed";
const WINDOW: Span = Span::hours(12);
/// A port that is down for this long without trying to return has dropped.
const DROPPED_AFTER: Span = Span::minutes(4);
/// How long a drop is reported after the port is back.
const REPORTED_FOR: Span = Span::minutes(10);

fn probes(_: &Params) -> Vec<Probe> {
    [STATE, LINK_DOWNED].map(|pattern| Probe::Sampled { pattern: pattern.to_owned(), keep: WINDOW }).to_vec()
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let (states, counts) = (sampled_series(outputs.first())?, sampled_series(outputs.get(1))?);
    let mut builder = ObservationBuilder::default();
    for state in &states {
        let Some([device, port]) = match_pattern_exact(STATE, state.path) else { continue };
        match state.current() {
            Ok(Some(text)) if parse_state(text).is_none() => {
                builder.unreadable(unexpected_content(state.path, text));
                continue;
            }
            Err(failure) => {
                builder.unreadable(failure);
                continue;
            }
            Ok(_) => {}
        }
        let count = counts.iter().find(|series| match_pattern_exact(LINK_DOWNED, series.path) == Some([device, port])).map(points_since_boot);
        let (state, count) = (&points_since_boot(state), count.as_ref());
        let entity = port_entity(device, port);
        if let Some(text) = describe_drop(state, count) {
            builder.event(Event::seen("port-dropped", entity.clone(), text));
        }
        builder.metric(Metric::count("link_returns", entity, count_recoveries(state, count)));
    }
    if !states.is_empty() {
        builder.metric(Metric::count("ports_watched", Entity::node(), states.len() as f64));
    }
    Ok(builder.build_or(no_rdma()))
}

fn is_up(text: Option<&str>) -> bool {
    text.and_then(parse_state) == Some("ACTIVE")
}

/// Returns the readings of this boot: a port that was down because the machine was down has not dropped.
fn points_since_boot<'a>(series: &Series<'a>) -> Series<'a> {
    let booted = series.points.last().map(|last| last.at.minus(last.uptime));
    let points = series.points.iter().filter(|point| Some(point.at) >= booted).copied().collect();
    Series { points, ..*series }
}

/// Returns how often the link came back. The last drop of a port that is down now has not come back. The first reading
/// has no history, and drops counted before it have no known time.
fn count_recoveries(state: &Series<'_>, count: Option<&Series<'_>>) -> f64 {
    let seen = state.points.windows(2).filter(|two| !is_up(two[0].text) && is_up(two[1].text)).count() as f64;
    let counted = count
        .filter(|series| series.points.iter().filter(|point| point.text.is_some()).count() > 1)
        .and_then(|series| series.growth(WINDOW))
        .map_or(0.0, |growth| growth.by);
    let is_down = !is_up(state.points.last().and_then(|point| point.text));
    // A port that comes up for the first time has not returned.
    let began_down = state.points.first().is_some_and(|point| !is_up(point.text));
    let seen = if began_down { seen - 1.0 } else { seen };
    let counted = if is_down { counted - 1.0 } else { counted };
    seen.max(counted).max(0.0)
}

/// Describes the latest stretch of readings in which the port was down, after one in which it was up.
fn describe_drop(state: &Series<'_>, count: Option<&Series<'_>>) -> Option<String> {
    let points = &state.points;
    let last_down = points.iter().rposition(|point| !is_up(point.text))?;
    let last_up = points[..last_down].iter().rposition(|point| is_up(point.text))?;
    let (from, to) = (points[last_up + 1].at, points[last_down].at);
    let long = to.since(from);
    let now = points.last()?.at;
    // The value at that time: not all readings of an unchanged counter are kept.
    let value = |at| count?.points.iter().rfind(|point| point.at <= at)?.text;
    let stands_still = value(from) == value(to);
    let is_recent = last_down + 1 == points.len() || now.since(points[last_down + 1].at) <= REPORTED_FOR;
    let is_up_now = last_down + 1 < points.len();
    (long >= DROPPED_AFTER && stands_still && is_recent).then(|| {
        let end = if is_up_now { "it is up again" } else { "it is still down" };
        format!("the port was down for at least {long} without link recovery attempts; {end}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::sampled_files, classify_fixture::classify_outputs};
    use proptest::prelude::*;

    const PORT: &str = "/sys/class/infiniband/mlx5_0/ports/1/state";
    const COUNT: &str = "/sys/class/infiniband/mlx5_0/ports/1/counters/link_downed";

    /// Readings five minutes apart: `+` up or `-` down, and the drop counter.
    fn check(each: &[(char, &str)]) -> Vec<String> {
        let state = |up: char| if up == '+' { "4: ACTIVE\n" } else { "1: DOWN\n" };
        let states: Vec<_> = each.iter().map(|(up, _)| [(PORT, state(*up))]).collect();
        let counts: Vec<_> = each.iter().map(|(_, count)| [(COUNT, *count)]).collect();
        let outputs = [&states, &counts].map(|all| sampled_files(&all.iter().map(|one| &one[..]).collect::<Vec<_>>()));
        classify_outputs(&CHECK, &outputs)
    }

    // Made by hand.
    #[test]
    fn a_drop_is_minutes_down_without_an_attempt_to_return() {
        let dropped = ["fail port-dropped isolate link:mlx5_0/1"];
        assert_eq!(check(&[('+', "0"), ('+', "0")]), ["pass within-limits"]);
        assert_eq!(check(&[('+', "0"), ('-', "1")]), ["pass within-limits"]);
        assert_eq!(check(&[('+', "0"), ('-', "1"), ('-', "1")]), dropped);
        assert_eq!(check(&[('+', "0"), ('-', "1"), ('-', "1"), ('+', "1"), ('+', "1")]), dropped);
        let long_back = [('+', "0"), ('-', "1"), ('-', "1"), ('+', "1"), ('+', "1"), ('+', "1"), ('+', "1")];
        assert_eq!(check(&long_back), ["pass within-limits"]);
        assert_eq!(check(&[('-', "0"), ('-', "0"), ('-', "0")]), ["pass within-limits"]);
    }

    #[test]
    fn three_returns_are_flapping_and_one_drop_raises_no_sticky_alarm() {
        let flaps = ["fail port-flaps isolate link:mlx5_0/1"];
        assert_eq!(check(&[('+', "4"), ('+', "7")]), flaps);
        assert_eq!(check(&[('+', "0"), ('-', "1"), ('+', "1"), ('-', "2"), ('+', "2"), ('-', "3"), ('+', "3")]), flaps);
        assert_eq!(check(&[('+', "4"), ('+', "6")]), ["pass within-limits"]);
        assert_eq!(check(&[('+', "4"), ('-', "7")]), ["pass within-limits"]);
        assert_eq!(check(&[('+', "90")]), ["pass within-limits"]);
    }

    #[test]
    fn boots_are_not_flaps() {
        let ups = ["4: ACTIVE\n", "1: DOWN\n", "4: ACTIVE\n", "1: DOWN\n", "4: ACTIVE\n", "1: DOWN\n", "4: ACTIVE\n"];
        let each = ups.map(|up| [(PORT, up)]);
        let ProbeOutput::Samples(mut samples) = sampled_files(&each.each_ref().map(|one| &one[..])) else { panic!("samples") };
        samples.iter_mut().for_each(|sample| sample.uptime = Span::minutes(2));
        assert_eq!(classify_outputs(&CHECK, &[ProbeOutput::Samples(samples), sampled_files(&[&[]])]), ["pass within-limits"]);
    }

    #[test]
    fn no_port_differs_from_an_unparseable_state() {
        assert_eq!(classify_outputs(&CHECK, &[sampled_files(&[&[]]), sampled_files(&[&[]])]), ["not-applicable no-rdma"]);
        assert_eq!(classify_outputs(&CHECK, &[sampled_files(&[&[(PORT, "?")]]), sampled_files(&[&[]])]), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_history_makes_it_panic(ups in "[+?-]{1,20}", count in ".{0,6}") {
            check(&ups.chars().map(|up| (up, count.as_str())).collect::<Vec<_>>());
        }
    }
}
