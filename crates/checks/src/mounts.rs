//! mounts: are all required file systems mounted and writable?
//!
//! What it does: compares /proc/mounts with the configured mounts and with /etc/fstab, and calls statfs on each
//! configured mount to see whether it answers.
//!
//! Why it matters: a job that writes to /data while /data is not mounted fills the root disk; a process on a hung mount
//! cannot be killed. A local file system that detects damage becomes read-only, and everything on the node fails a
//! little later.
//!
//! What to do: run `findmnt PATH` and `dmesg` on the node.
//! - `mount-missing` is `reboot`, confirmed by a second failure: nothing is mounted at a configured path. `mount PATH`
//!   may cure it.
//! - `mount-wrong` is `monitor`: another type of file system is mounted there, or a configured option is missing.
//! - `mount-read-only` is `reboot`: it should be writable (as configured, or by /etc/fstab) and is not. The kernel log
//!   shows why (`Remounting filesystem read-only`); a reboot checks it (`fsck`). If it recurs the disk is bad.
//! - `mount-hangs` is `monitor`, confirmed by a second failure: no answer in time. If many nodes report it, the server
//!   or the network is at fault. Processes on it cannot be killed; `umount -f -l PATH` may free them, otherwise a
//!   reboot.
//!
//! Parameters: `mounts`, a list of paths or of tables:
//! `mounts = ["/scratch", { path = "/data", type = "nfs4", options = ["rw"] }]`. Without it, only local file systems of
//! /etc/fstab are checked.

use doctor_core::observation::{Entity, EntityKind, Event, FailureKind, ObservationBuilder, Metric, Observation, ProbeFailure};

use crate::{
    files::file_text,
    mount_table::{self, MountEntry},
    probe::{Probe, ProbeOutput},
    check_params::invalid_param,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("mounts", "file systems mounted and writable");

const RULES: &str = r#"
rules = [
  { id = "mounts-missing", check = "mounts", event = "mount-missing", reason = "mount-missing", severity = "reboot",
    confirm = 2, text = "{entity}: {value}" },
  { id = "mounts-read-only", check = "mounts", event = "mount-read-only", reason = "mount-read-only",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "mounts-hangs", check = "mounts", event = "mount-hangs", reason = "mount-hangs", severity = "monitor",
    confirm = 2, text = "{entity} does not respond: {value}" },
  { id = "mounts-wrong", check = "mounts", event = "mount-wrong", reason = "mount-wrong", severity = "monitor",
    text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("mounts.rs")), rules: RULES, probes, interpret };

const EXAMPLE: &str = "mounts = [\"/scratch\", { path = \"/data\", type = \"nfs4\", options = [\"rw\"] }]";
/// File systems on local disks.
const LOCAL_FILE_SYSTEMS: [&str; 5] = ["ext2", "ext3", "ext4", "xfs", "btrfs"];

/// A configured mount.
#[derive(Debug, PartialEq)]
struct ExpectedMount {
    path: String,
    kind: Option<String>,
    options: Vec<String>,
}

fn expected_mounts(params: &Params) -> Option<Vec<ExpectedMount>> {
    let Some(list) = params.get("mounts") else { return Some(Vec::new()) };
    let one = |value: &toml::Value| {
        if let Some(path) = value.as_str() {
            return Some(ExpectedMount { path: path.to_owned(), kind: None, options: Vec::new() });
        }
        let table = value.as_table()?;
        if table.keys().any(|key| !["path", "type", "options"].contains(&key.as_str())) {
            return None;
        }
        let text = |value: &toml::Value| value.as_str().map(str::to_owned);
        Some(ExpectedMount {
            path: text(table.get("path")?)?,
            kind: table.get("type").map(text).map_or(Some(None), |kind| kind.map(Some))?,
            options: table
                .get("options")
                .map_or(Some(Vec::new()), |list| list.as_array()?.iter().map(text).collect())?,
        })
    };
    list.as_array()?.iter().map(one).collect()
}

fn probes(params: &Params) -> Vec<Probe> {
    let paths = expected_mounts(params).unwrap_or_default().into_iter().map(|mount| Probe::StatFs { path: mount.path });
    [Probe::read("/proc/mounts"), Probe::read("/etc/fstab")].into_iter().chain(paths).collect()
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    observe(params, outputs).unwrap_or_else(|instead| instead)
}

fn observe(params: &Params, outputs: &[ProbeOutput]) -> Result<Observation, Observation> {
    let expected = expected_mounts(params).ok_or_else(|| invalid_param("mounts", EXAMPLE))?;
    let table: Vec<_> = mount_table::parse(file_text(outputs.first()).map_err(Observation::Failed)?).collect();
    if table.is_empty() {
        let text = "/proc/mounts lists no mount";
        return Err(Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, text)));
    }
    let mut builder = ObservationBuilder::default();
    for (index, expected) in expected.iter().enumerate() {
        let entity = Entity::new(EntityKind::Mount, &*expected.path);
        match table.iter().rev().find(|line| line.path == expected.path) {
            None => builder.event(Event::seen("mount-missing", entity, "no file system is mounted")),
            Some(line) => {
                check_mount(expected, line).into_iter().for_each(|event| builder.event(event));
                check_responds(&entity, outputs.get(index + 2), &mut builder);
            }
        }
    }
    let fstab = match file_text(outputs.get(1)) {
        Ok(fstab) => fstab,
        // An image without an fstab has no expectations.
        Err(failure) if failure.kind == FailureKind::Missing => "",
        Err(failure) => {
            builder.unreadable(failure);
            ""
        }
    };
    for promise in mount_table::parse(fstab).filter(|line| LOCAL_FILE_SYSTEMS.contains(&line.kind) && !line.is_read_only()) {
        let is_named = expected.iter().any(|expected| expected.path == promise.path);
        let seen = table.iter().rev().find(|line| line.path == promise.path);
        if seen.is_some_and(MountEntry::is_read_only) && !is_named {
            let entity = Entity::new(EntityKind::Mount, &*promise.path);
            builder.event(Event::seen(
                "mount-read-only",
                entity,
                "mounted read-only, writable in /etc/fstab",
            ));
        }
    }
    builder.metric(Metric::count("mounts", Entity::node(), table.len() as f64));
    Ok(builder.build_or(Observation::measured(Vec::new(), Vec::new())))
}

fn check_mount(expected: &ExpectedMount, line: &MountEntry<'_>) -> Vec<Event> {
    let entity = Entity::new(EntityKind::Mount, &*expected.path);
    let mut events = Vec::new();
    if let Some(kind) = expected.kind.as_ref().filter(|kind| *kind != line.kind) {
        let text = format!("file system type {}, expected {kind}", line.kind);
        events.push(Event::seen("mount-wrong", entity.clone(), text));
    }
    for option in expected.options.iter().filter(|option| !line.options.contains(&option.as_str())) {
        let is_ro = option == "rw" && line.is_read_only();
        let code = if is_ro { "mount-read-only" } else { "mount-wrong" };
        let text = if is_ro { "mounted read-only".to_owned() } else { format!("mounted without `{option}`") };
        events.push(Event::seen(code, entity.clone(), text));
    }
    events
}

fn check_responds(entity: &Entity, output: Option<&ProbeOutput>, builder: &mut ObservationBuilder) {
    match output {
        Some(ProbeOutput::StatFs(_)) => {}
        Some(ProbeOutput::Failed(failure))
            if matches!(failure.kind, FailureKind::TimedOut | FailureKind::Abandoned) =>
        {
            builder.event(Event::seen("mount-hangs", entity.clone(), failure.text.clone()));
        }
        Some(ProbeOutput::Failed(failure)) => builder.unreadable(failure.clone()),
        _ => builder
            .unreadable(ProbeFailure::new(FailureKind::Unparseable, format!("the answer for {entity} is not a statfs result"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{classify_fixture::classify_outputs_with, probe::FileSystemSpace};
    use proptest::prelude::*;

    // The first line is captured: Linux 6.18, virtual machine, 2026-11-15; the others are made by hand.
    const TABLE: &str = "/dev/vda / ext4 rw,relatime,discard 0 0\nnas:/x /data\\040set nfs4 rw,vers=4.2 0 0\n";
    const FSTAB: &str = "# comment\n/dev/vda / ext4 defaults 0 1\n";

    fn fine() -> ProbeOutput {
        ProbeOutput::StatFs(FileSystemSpace { size: 9, available: 9, free: 9, inodes: 9, inodes_free: 9 })
    }

    fn check(mounts: &str, table: &str, answer: ProbeOutput) -> Vec<String> {
        let params: Params = toml::from_str(mounts).unwrap();
        let text = |text: &str| ProbeOutput::Text(text.to_owned());
        classify_outputs_with(&CHECK, &params, None, &[text(table), text(FSTAB), answer])
    }

    #[test]
    fn configured_mounts_must_exist_as_configured() {
        let data = "mounts = [{ path = '/data set', type = 'nfs4', options = ['rw'] }]";
        assert_eq!(check(data, TABLE, fine()), ["pass within-limits"]);
        assert_eq!(check("mounts = ['/scratch']", TABLE, fine()), ["fail mount-missing reboot mount:/scratch"]);
        let read_only = TABLE.replace("rw,vers", "ro,vers");
        assert_eq!(check(data, &read_only, fine()), ["fail mount-read-only reboot mount:/data set"]);
        assert_eq!(check(data, &TABLE.replace("nfs4", "lustre"), fine()), ["fail mount-wrong monitor mount:/data set"]);
        let hung = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Abandoned, "no answer within 5s"));
        assert_eq!(check(data, TABLE, hung), ["fail mount-hangs monitor mount:/data set"]);
        let denied = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "denied"));
        assert_eq!(check(data, TABLE, denied), ["inconclusive denied"]);
    }

    #[test]
    fn a_local_file_system_that_became_read_only_is_reported_without_settings() {
        assert_eq!(check("", TABLE, fine()), ["pass within-limits"]);
        let damaged = TABLE.replace("ext4 rw", "ext4 ro");
        assert_eq!(check("", &damaged, fine()), ["fail mount-read-only reboot mount:/"]);
    }

    #[test]
    fn an_invalid_setting_is_reported() {
        for mounts in ["mounts = '/data'", "mounts = [1]", "mounts = [{ path = '/', kind = 'x' }]"] {
            assert_eq!(check(mounts, TABLE, fine()), ["inconclusive unparseable"], "{mounts}");
        }
        assert_eq!(check("", "", fine()), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,120}") {
            check("mounts = ['/']", &text, fine());
        }
    }
}
