//! nvme-state: do all NVMe disks answer?
//!
//! What it does: reads the state of each NVMe controller.
//!
//! Why it matters: when the kernel abandons a controller (`dead`), its data is inaccessible; file systems on it hang or
//! fail at the next access, often during a job.
//!
//! What to do: `dmesg | grep nvme` shows what happened; `nvme list` shows the remaining disks.
//! - `nvme-dead` is `isolate`: the kernel abandoned the controller. A power cycle may restore it once; replace it.
//! - `nvme-not-live` is `monitor`, confirmed by a second failure: it is being reset or reconnected. Fabrics (TCP, RDMA)
//!   do so when the storage server is unreachable.
//!
//! Not applicable where there is no NVMe controller; `nvme-count` checks whether one is missing.

use doctor_core::observation::{Entity, EntityKind, Event, ObservationBuilder, Metric, Observation};

use crate::{
    files::{glob_files, match_pattern_exact, unexpected_content},
    gpu::not_applicable,
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("nvme-state", "state of NVMe disks");

const RULES: &str = r#"
rules = [
  { id = "nvme-state-dead", check = "nvme-state", event = "nvme-dead", reason = "nvme-dead", severity = "isolate",
    text = "{entity}: {value}" },
  { id = "nvme-state-not-live", check = "nvme-state", event = "nvme-not-live", reason = "nvme-not-live",
    severity = "monitor", confirm = 2, text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("nvme_state.rs")), rules: RULES, probes, interpret };

const STATE: &str = "/sys/class/nvme/*/state";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::glob(STATE)]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let files = match glob_files(outputs.first()) {
        Ok(files) => files,
        Err(instead) => return instead,
    };
    let (mut builder, mut live) = (ObservationBuilder::default(), 0.0);
    for file in files {
        let Some([name]) = match_pattern_exact(STATE, &file.path) else { continue };
        let entity = Entity::new(EntityKind::Disk, name);
        match file.text.as_deref().map(str::trim) {
            Ok("live") => live += 1.0,
            Ok(state @ ("new" | "resetting" | "connecting")) => {
                builder.event(Event::seen("nvme-not-live", entity, format!("controller state is {state}")));
            }
            Ok(state @ ("dead" | "deleting" | "deleting (no IO)")) => {
                builder.event(Event::seen("nvme-dead", entity, format!("controller state is {state}")));
            }
            Ok(other) => builder.unreadable(unexpected_content(&file.path, other)),
            Err(failure) => builder.unreadable(failure.clone()),
        }
    }
    if !files.is_empty() {
        builder.metric(Metric::count("nvme_live", Entity::node(), live));
    }
    builder.build_or(not_applicable("no-nvme", "no NVMe controller on this node"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{files::tests::found, classify_fixture::classify_outputs};
    use proptest::prelude::*;

    fn check(state: &str) -> Vec<String> {
        classify_outputs(&CHECK, &[found(&[("/sys/class/nvme/nvme0/state", "live\n"), ("/sys/class/nvme/nvme1/state", state)])])
    }

    // Made by hand; the words are those of the kernel's nvme_sysfs_show_state.
    #[test]
    fn a_dead_disk_is_reported_next_to_a_live_one() {
        assert_eq!(check("live\n"), ["pass within-limits"]);
        assert_eq!(check("dead\n"), ["fail nvme-dead isolate disk:nvme1"]);
        assert_eq!(check("resetting\n"), ["fail nvme-not-live monitor disk:nvme1"]);
        assert_eq!(check("sleepy\n"), ["inconclusive unparseable"]);
        assert_eq!(classify_outputs(&CHECK, &[found(&[])]), ["not-applicable no-nvme"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,30}") {
            check(&text);
        }
    }
}
