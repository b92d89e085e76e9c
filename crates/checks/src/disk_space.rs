//! disk-space: do the important file systems have space left?
//!
//! What it does: reads how much of the space and of the inodes of each mount in `mounts` is used. Space is counted like
//! df(1): root's reserve is not free.
//!
//! Why it matters: a full file system fails jobs late and in unexpected ways (a truncated checkpoint, a container that
//! does not start), and a full root file system affects the node's own services. Inodes run out before space does when
//! something leaves millions of small files behind.
//!
//! What to do: `doctor why NODE` names the mount. Look for old containers, core dumps, logs and scratch files there
//! (`du -x -d 2 MOUNT`, `df -i MOUNT`). No restart cures a full disk, so every finding is `monitor`: it is shown and
//! the node stays in service. A site where a full scratch disk must keep jobs away raises the severity of
//! `disk-space-used` in its policy.
//!
//! - `disk-full`, `inodes-full`: over the limit, 90 % by default.
//! - `mount-missing`: nothing is mounted there. Without this, an unmounted /data would be reported with the space of /.
//! - `mount-hangs`, confirmed by a second failure: the mount did not answer in time.
//!
//! Parameters: `mounts`, a list of paths, by default `["/"]`.

use doctor_core::{
    observation::{Entity, EntityKind, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure, Unit},
    time::Span,
};

use crate::{
    probe::{FileSystemSpace, Probe, ProbeOutput},
    spec::{Check, Depth, Params, Spec, page_of},
};

const SPEC: Spec = Spec {
    id: "disk-space",
    title: "free space and inodes of mounts",
    depth: Depth::Quick,
    exclusive: false,
    every: Span::minutes(5),
    cutoff: Span::days(7),
    limit: Span::minutes(2),
    typical_duration: Span::from_secs(1),
    usual_by: None,
    shares: &[],
    shared_param: None,
    opt_in: false,
    access: &[],
};

const RULES: &str = r#"
[[rules]]
id = "disk-space-used"
check = "disk-space"
metric = "used_percent"
above = 90.0
severity = "monitor"
reason = "disk-full"
text = "{entity} is {value} % full, limit {limit} %"

[[rules]]
id = "disk-space-inodes"
check = "disk-space"
metric = "inodes_used_percent"
above = 90.0
severity = "monitor"
reason = "inodes-full"
text = "{entity} uses {value} % of its inodes, limit {limit} %"

[[rules]]
id = "disk-space-missing"
check = "disk-space"
event = "mount-missing"
severity = "monitor"
reason = "mount-missing"
text = "{value}"

[[rules]]
id = "disk-space-hangs"
check = "disk-space"
event = "mount-hangs"
severity = "monitor"
confirm = 2
reason = "mount-hangs"
text = "{entity} does not respond: {value}"
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("disk_space.rs")), rules: RULES, probes, interpret };

/// Returns the configured mounts. An invalid setting returns none, which is reported; it does not fall back to the
/// default.
fn mounts(params: &Params) -> Vec<String> {
    match params.get("mounts") {
        None => vec!["/".to_owned()],
        Some(toml::Value::Array(paths)) => {
            paths.iter().map(|path| path.as_str().map(str::to_owned)).collect::<Option<_>>().unwrap_or_default()
        }
        Some(_) => Vec::new(),
    }
}

/// First the list of mounts, then the space of each.
fn probes(params: &Params) -> Vec<Probe> {
    let list = Probe::Read { path: "/proc/mounts".to_owned() };
    std::iter::once(list).chain(mounts(params).into_iter().map(|path| Probe::StatFs { path })).collect()
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let could_not = |kind, text: String| Observation::Failed(ProbeFailure::new(kind, text));
    let (table, spaces) = match outputs {
        [ProbeOutput::Text(table), spaces @ ..] => (table, spaces),
        [ProbeOutput::Failed(failure), ..] => return Observation::Failed(failure.clone()),
        _ => return could_not(FailureKind::Unparseable, "the list of mounts is not text".to_owned()),
    };
    let mounted = mount_points(table);
    if mounted.is_empty() {
        return could_not(FailureKind::Unparseable, "/proc/mounts lists no mount".to_owned());
    }
    let expected = mounts(params);
    if expected.len() != spaces.len() || expected.is_empty() {
        let (expected, answers) = (expected.len(), spaces.len());
        let text =
            format!("{expected} mounts and {answers} answers; write `mounts` as a list, such as [\"/\", \"/data\"]");
        return could_not(FailureKind::Empty, text);
    }
    let mut builder = ObservationBuilder::default();
    for (path, output) in expected.iter().zip(spaces) {
        let entity = Entity::new(EntityKind::Mount, path.clone());
        let is_there = mounted.iter().any(|point| point == path);
        match output {
            ProbeOutput::StatFs(space) if is_there => {
                percentages(&entity, space).into_iter().for_each(|metric| builder.metric(metric));
            }
            ProbeOutput::Failed(failure) if is_there && is_hung(failure.kind) => {
                builder.event(Event::seen("mount-hangs", entity, failure.text.clone()));
            }
            ProbeOutput::Failed(failure) if is_there => builder.unreadable(failure.clone()),
            ProbeOutput::StatFs(_) | ProbeOutput::Failed(_) => {
                let text = format!("no file system is mounted at {path}");
                builder.event(Event::seen("mount-missing", entity, text));
            }
            _ => {
                return could_not(FailureKind::Unparseable, format!("the answer for {path} is not a statfs result"));
            }
        }
    }
    builder.build_or(Observation::measured(Vec::new(), Vec::new()))
}

const fn is_hung(kind: FailureKind) -> bool {
    matches!(kind, FailureKind::TimedOut | FailureKind::Abandoned)
}

fn percentages(entity: &Entity, space: &FileSystemSpace) -> [Metric; 2] {
    let used = space.size.saturating_sub(space.free);
    let inodes_used = space.inodes.saturating_sub(space.inodes_free);
    let metric =
        |name: &str, value| Metric { name: name.to_owned(), entity: entity.clone(), value, unit: Unit::Percent };
    [
        metric("used_percent", percent(used, used.saturating_add(space.available))),
        metric("inodes_used_percent", percent(inodes_used, space.inodes)),
    ]
}

/// Returns 0 if `total` is 0: a file system without a size, or with inodes on demand, has no such limit to reach.
#[expect(clippy::cast_precision_loss, reason = "a percentage does not need more than 53 bits")]
fn percent(part: u64, total: u64) -> f64 {
    if total == 0 { 0.0 } else { part as f64 * 100.0 / total as f64 }
}

fn mount_points(table: &str) -> Vec<String> {
    table.lines().filter_map(|line| line.split(' ').nth(1)).map(unescape).collect()
}

/// Decodes space, tab, newline and backslash, which /proc/mounts writes as three octal digits.
fn unescape(text: &str) -> String {
    let codes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    codes.iter().fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TABLE: &str = "/dev/vda1 / ext4 rw,relatime 0 0\nnas:/x /data\\040set nfs rw 0 0\n";

    fn params(mounts: &[&str]) -> Params {
        let list = mounts.iter().map(|path| toml::Value::from(*path)).collect();
        [("mounts".to_owned(), toml::Value::Array(list))].into()
    }

    fn observe(mounts: &[&str], spaces: &[ProbeOutput]) -> Observation {
        let mut outputs = vec![ProbeOutput::Text(TABLE.to_owned())];
        outputs.extend_from_slice(spaces);
        interpret(&params(mounts), &outputs)
    }

    fn space(size: u64, free: u64, available: u64, inodes: u64, inodes_free: u64) -> ProbeOutput {
        ProbeOutput::StatFs(FileSystemSpace { size, available, free, inodes, inodes_free })
    }

    #[test]
    fn blocks_reserved_for_root_count_as_used_like_in_df() {
        let Observation::Measured { metrics, .. } = observe(&["/"], &[space(1000, 100, 50, 10, 1)]) else {
            panic!("measured");
        };
        assert!((metrics[0].value - 900.0 * 100.0 / 950.0).abs() < 1e-9, "{}", metrics[0].value);
        assert!((metrics[1].value - 90.0).abs() < 1e-9);
    }

    #[test]
    fn a_missing_mount_is_not_measured_by_its_parent_file_system() {
        let Observation::Measured { metrics, events, .. } = observe(&["/scratch"], &[space(1000, 900, 900, 10, 9)]) else {
            panic!("measured");
        };
        assert!(metrics.is_empty());
        assert_eq!(events[0].code.as_str(), "mount-missing");
    }

    #[test]
    fn a_hanging_mount_does_not_hide_a_full_one() {
        let hung = ProbeOutput::Failed(ProbeFailure::new(FailureKind::TimedOut, "no answer within 5s"));
        let Observation::Measured { metrics, events, .. } = observe(&["/", "/data set"], &[space(10, 0, 0, 0, 0), hung])
        else {
            panic!("measured");
        };
        assert!((metrics[0].value - 100.0).abs() < 1e-9);
        assert_eq!(
            (events[0].code.as_str(), events[0].entity.to_string()),
            ("mount-hangs", "mount:/data set".to_owned())
        );
    }

    #[test]
    fn an_unreadable_mount_is_reported() {
        let denied = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "statfs /: denied"));
        assert!(matches!(observe(&["/"], &[denied]), Observation::Failed(f) if f.kind == FailureKind::Denied));
        assert!(matches!(observe(&[], &[]), Observation::Failed(f) if f.kind == FailureKind::Empty));
        assert!(matches!(interpret(&Params::new(), &[]), Observation::Failed(_)));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,300}", size: u64, free: u64, available: u64) {
            let outputs = [ProbeOutput::Text(text), space(size, free, available, free, size)];
            interpret(&Params::new(), &outputs);
        }
    }
}
