//! Words and single lines: names, ids, durations, times, keys, and single lines of the kernel.
//!
//! An accepted value reads back as itself, names are safe to build a path from, and numbers are valid.

#![no_main]

use std::{
    fmt::{Debug, Display},
    str::FromStr,
};

use doctor_checks::{
    cpu_list,
    dcgm_health_report::HealthReport,
    document::{RunKey, Schema},
    files, pci,
    probe::ProbeOutput,
    proc_stat::ProcStat,
    rdma, uptime,
};
use doctor_core::{
    finding::{Severity, Verdict},
    hostlist::Selector,
    ids::{CaseId, CheckId, HardwareId, NodeName, OpId, PoolName, RuleId, RunId, Sku},
    observation::{Entity, EventKey},
    policy::TimeOfDay,
    time::{Span, Timestamp},
};
use doctor_fuzz::{pick, round_trip, text};
use libfuzzer_sys::fuzz_target;

const PARSERS: &[fn(&str)] = &[
    same::<Span>,
    same::<Timestamp>,
    |text| name(round_trip::<NodeName>(text).as_ref().map(NodeName::as_str)),
    |text| name(round_trip::<PoolName>(text).as_ref().map(PoolName::as_str)),
    |text| name(round_trip::<CheckId>(text).as_ref().map(CheckId::as_str)),
    |text| name(round_trip::<RuleId>(text).as_ref().map(RuleId::as_str)),
    |text| name(round_trip::<Sku>(text).as_ref().map(Sku::as_str)),
    |text| name(round_trip::<HardwareId>(text).as_ref().map(HardwareId::as_str)),
    same::<RunId>,
    same::<CaseId>,
    same::<OpId>,
    same::<Entity>,
    same::<EventKey>,
    same::<Schema>,
    same::<Verdict>,
    same::<Severity>,
    selector,
    time_of_day,
    key,
    processors,
    process,
    up,
    rate,
    place,
    wild,
    watch,
];

fn same<T>(text: &str)
where
    T: FromStr<Err: Display> + Display + Debug + PartialEq,
{
    let _accepted = round_trip::<T>(text);
}

fn selector(text: &str) {
    let _accepted = text.parse::<Selector>();
}

fn name(name: Option<&str>) {
    if let Some(name) = name {
        assert!((1..=253).contains(&name.len()) && !name.contains('/') && !name.contains("..") && !name.contains('\0'));
    }
}

fn time_of_day(text: &str) {
    if let Ok(time) = TimeOfDay::try_from(text.to_owned()) {
        assert_eq!(TimeOfDay::try_from(String::from(time)).ok(), Some(time));
    }
}

fn key(text: &str) {
    if let Some(key) = RunKey::from_hex(text) {
        assert!(key.to_hex().eq_ignore_ascii_case(text), "a key of other digits than were written");
    }
}

fn processors(text: &str) {
    if let Some(count) = cpu_list::count(text) {
        assert!(count == 0 || text.bytes().any(|byte| byte.is_ascii_digit()));
    }
}

fn process(text: &str) {
    if ProcStat::parse(text).is_some() {
        assert!(ProcStat::name(text).is_some_and(|name| text.contains(name)));
    }
}

fn up(text: &str) {
    if let Ok(seconds) = uptime::uptime_seconds(Some(&ProbeOutput::Text(text.to_owned()))) {
        assert!(seconds.is_finite() && seconds >= 0.0, "{seconds}");
    }
}

fn rate(text: &str) {
    let _word = rdma::parse_state(text);
    if let Some(bits) = rdma::parse_rate(text) {
        assert!(bits.is_finite() && bits >= 0.0, "{bits}");
    }
}

fn place(text: &str) {
    assert!(pci::parent_bridges(text).count() <= text.split('/').count());
    assert!(pci::parent_bridge(text).is_none_or(|bus| text.contains(bus)));
}

/// Filling the wildcards of the pattern with the matches gives the path.
fn wild(text: &str) {
    let Some((pattern, path)) = text.split_once('\n') else { return };
    let Some(found) = files::match_pattern(pattern, path) else { return };
    let mut parts = found.iter();
    let filled: Vec<String> = pattern
        .split('/')
        .map(|wanted| match wanted.split_once('*') {
            Some((before, after)) => format!("{before}{}{after}", parts.next().expect("one part for each open place")),
            None => wanted.to_owned(),
        })
        .collect();
    assert_eq!(filled.join("/"), path);
}

/// DCGM's watches, in our line format.
fn watch(text: &str) {
    // Runs of white space become one space, so the written forms are compared.
    if let Ok(watch) = HealthReport::parse(text) {
        let written = watch.to_text();
        assert_eq!(HealthReport::parse(&written).map(|again| again.to_text()), Ok(written));
    }
}

fuzz_target!(|data: &[u8]| {
    if let Some((parse, rest)) = pick(PARSERS, data) {
        parse(&text(rest));
    }
});
