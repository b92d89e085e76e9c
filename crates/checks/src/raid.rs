//! raid: are the software RAID arrays intact?
//!
//! What it does: reads /proc/mdstat and the state of each array.
//!
//! Why it matters: a degraded mirror works until its other half fails. A striped scratch array with a failed member has
//! lost everything, and reports it only when queried.
//!
//! What to do: `mdadm --detail /dev/ARRAY` names the failed member.
//! - `raid-broken` is `isolate`: the array's data is lost or inaccessible (inactive, or a stripe that lost a member).
//!   Replace the disk and recreate the array. An array that did not assemble at boot may only need `mdadm --assemble`.
//! - `raid-degraded` is `monitor`: members are missing and the data is still there. Replace the disk soon.
//!
//! An array that is being rebuilt counts as degraded until it is done. Not applicable where there is no array.

use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, ObservationBuilder, Metric, Observation};

use crate::{
    files::{glob_files, match_pattern_exact, file_text},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("raid", "software RAID arrays");

const RULES: &str = r#"
rules = [
  { id = "raid-broken", check = "raid", event = "raid-broken", reason = "raid-broken", severity = "isolate",
    text = "{entity}: {value}" },
  { id = "raid-degraded", check = "raid", event = "raid-degraded", reason = "raid-degraded", severity = "monitor",
    text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("raid.rs")), rules: RULES, probes, interpret };

/// Contains `broken` for a stripe with a failed member, which /proc/mdstat does not show.
const STATE: &str = "/sys/block/md*/md/array_state";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::read("/proc/mdstat"), Probe::glob(STATE)]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(outputs).unwrap_or_else(|instead| instead)
}

fn observe(outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let none = not_applicable("no-raid", "no software RAID array on this node");
    let table = match file_text(outputs.first()) {
        Ok(table) => table,
        // The kernel creates the file when it first finds an array.
        Err(failure) if failure.kind == FailureKind::Missing => return Ok(none),
        Err(failure) => return Err(Observation::Failed(failure)),
    };
    let mut builder = ObservationBuilder::default();
    let states = glob_files(outputs.get(1))?;
    for array in arrays(table) {
        let entity = Entity::new(EntityKind::Disk, array.name);
        let state = states.iter().find(|file| match_pattern_exact(STATE, &file.path).is_some_and(|[rest]| array.name[2..] == *rest));
        let is_broken = state.is_some_and(|file| file.text.as_deref().is_ok_and(|text| text.trim() == "broken"));
        builder.metric(Metric::count("members_missing", entity.clone(), array.missing));
        if is_broken || !array.is_active {
            let text = if is_broken { "the array is broken" } else { "the array is inactive" };
            builder.event(Event::seen("raid-broken", entity, text));
        } else if array.missing > 0.0 || array.has_failed {
            let text = format!("missing or failed members: {}", array.missing.max(1.0));
            builder.event(Event::seen("raid-degraded", entity, text));
        }
    }
    Ok(builder.build_or(none))
}

struct Array<'a> {
    name: &'a str,
    is_active: bool,
    has_failed: bool,
    missing: f64,
}

/// Parses `md0 : active raid1 sda1[0] sdb1[1](F)`, followed by indented lines of which one ends in `[2/1] [U_]`.
fn arrays(table: &str) -> Vec<Array<'_>> {
    let mut all: Vec<Array<'_>> = Vec::new();
    for line in table.lines() {
        match line.split_once(" : ") {
            Some((name, rest)) if name.starts_with("md") && name.len() > 2 => all.push(Array {
                name,
                is_active: rest.trim_start().starts_with("active"),
                has_failed: rest.contains("(F)"),
                missing: 0.0,
            }),
            _ => {
                if let Some(array) = all.last_mut().filter(|_| line.starts_with(' ')) {
                    array.missing += missing(line);
                }
            }
        }
    }
    all
}

/// Counts the underscores of a word like `[UU_]`.
fn missing(line: &str) -> f64 {
    let is_map = |field: &&str| field.len() > 2 && field[1..field.len() - 1].chars().all(|c| c == 'U' || c == '_');
    let mut fields = line.split_ascii_whitespace().filter(|field| field.starts_with('[') && field.ends_with(']'));
    fields.find(is_map).map_or(0.0, |map| map.matches('_').count() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::found, classify_fixture::classify_outputs};
    use doctor_core::observation::ProbeFailure;
    use proptest::prelude::*;

    fn check(table: &str, state: &str) -> Vec<String> {
        classify_outputs(&CHECK, &[ProbeOutput::Text(table.to_owned()), found(&[("/sys/block/md128/md/array_state", state)])])
    }

    // Made by hand after md(4).
    const MIRROR: &str = "Personalities : [raid1] [raid0]\nmd127 : active raid1 sda2[0] sdb2[1]\n\
        \u{20}     524224 blocks super 1.2 [2/2] [UU]\n      bitmap: 0/1 pages [0KB], 65536KB chunk\n\n\
        md128 : active raid0 nvme0n1[0] nvme1n1[1]\n      7499802624 blocks super 1.2 512k chunks\n\n\
        unused devices: <none>\n";

    #[test]
    fn a_degraded_mirror_and_a_broken_stripe_are_reported() {
        assert_eq!(check(MIRROR, "clean\n"), ["pass within-limits"]);
        let half = MIRROR.replace("[2/2] [UU]", "[2/1] [U_]").replace("sdb2[1]", "sdb2[1](F)");
        assert_eq!(check(&half, "clean\n"), ["fail raid-degraded monitor disk:md127"]);
        assert_eq!(check(MIRROR, "broken\n"), ["fail raid-broken isolate disk:md128"]);
        let inactive = MIRROR.replace("active raid0", "inactive");
        assert_eq!(check(&inactive, "inactive\n"), ["fail raid-broken isolate disk:md128"]);
    }

    #[test]
    fn not_applicable_without_an_array_and_unreadable_input_does_not_pass() {
        assert_eq!(check("Personalities : \nunused devices: <none>\n", ""), ["not-applicable no-raid"]);
        let failed = |kind| ProbeOutput::Failed(ProbeFailure::new(kind, "no"));
        assert_eq!(classify_outputs(&CHECK, &[failed(FailureKind::Missing), found(&[])]), ["not-applicable no-raid"]);
        assert_eq!(classify_outputs(&CHECK, &[failed(FailureKind::Denied), found(&[])]), ["inconclusive denied"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "((md.{0,9} : )?.{0,20}( \\[.{0,5}\\])?\n){0,4}") {
            check(&text, &text);
        }
    }
}
