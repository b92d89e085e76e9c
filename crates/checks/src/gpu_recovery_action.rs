//! gpu-recovery-action: does the driver itself request a reset or a reboot?
//!
//! What it does: reads each GPU's recovery action, which the driver sets after a fault that it cannot repair alone.
//!
//! Why it matters: it is the driver's own verdict (kernel log: Xid 154), more certain than any table of Xids. Until the
//! action is taken, new work on the GPU fails or runs at reduced capacity.
//!
//! What to do: take the requested action on a drained node. `nvidia-smi -q -i BUS | grep "Recovery Action"` shows it.
//! - `recovery-reset` is `reset`: `nvidia-smi --gpu-reset -i BUS`.
//! - `recovery-reboot` is `reboot`.
//! - `recovery-drain` is `reset`: traffic to other GPUs must end first, so drain the node; then reset the GPU.
//! - `recovery-drain-reset` is `reset`: the GPU works at reduced capacity; let the jobs end, then reset it.
//!
//! Not applicable where the driver is too old or the GPU does not support it.

use doctor_core::observation::{Event, FailureKind, Metric, Observation, ProbeFailure};

use crate::{
    gpu::{for_each_gpu, read_number},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-recovery-action", "recovery action that the driver requests");

const RULES: &str = r#"
rules = [
  { id = "gpu-recovery-reboot", check = "gpu-recovery-action", event = "recovery-reboot", reason = "recovery-reboot",
    severity = "reboot", text = "{entity}: {value}" },
  { id = "gpu-recovery-reset", check = "gpu-recovery-action", event = "recovery-reset", reason = "recovery-reset",
    severity = "reset", text = "{entity}: {value}" },
  { id = "gpu-recovery-drain", check = "gpu-recovery-action", event = "recovery-drain", reason = "recovery-drain",
    severity = "reset", text = "{entity}: {value}" },
  { id = "gpu-recovery-drain-reset", check = "gpu-recovery-action", event = "recovery-drain-reset",
    reason = "recovery-drain-reset", severity = "reset", text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_recovery_action.rs")), rules: RULES, probes, interpret };

const ACTION: &str = "recovery_action";

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&[ACTION])]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    for_each_gpu(outputs.first(), "no GPU of this node reports a recovery action", |gpu, builder| {
        let Some(action) = read_number(gpu, ACTION, builder) else { return };
        let (code, text) = match action as u32 {
            0 => {
                builder.metric(Metric::count("recovery_action", gpu.entity(), action));
                return;
            }
            1 => ("recovery-reset", "the driver requests a reset of this GPU"),
            2 => ("recovery-reboot", "the driver requests a reboot of the node"),
            3 => ("recovery-drain", "the driver requests that peer-to-peer traffic of this GPU is drained"),
            4 => ("recovery-drain-reset", "GPU works at reduced capacity until it is drained and reset"),
            _ => {
                let text = format!("{}: unknown {ACTION} {action}", gpu.entity());
                builder.unreadable(ProbeFailure::new(FailureKind::Unparseable, text));
                return;
            }
        };
        builder.metric(Metric::count("recovery_action", gpu.entity(), action));
        builder.event(Event::seen(code, gpu.entity(), text));
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::{
            FieldValue,
            tests::{answer, lost, n, none},
        },
        classify_fixture::classify_outputs,
    };

    fn check(actions: &[FieldValue]) -> Vec<String> {
        let gpus: Vec<_> = actions.iter().map(|action| [(ACTION, action.clone())]).collect();
        let gpus: Vec<_> = gpus.iter().map(<[_; 1]>::as_slice).collect();
        classify_outputs(&CHECK, &[answer(&gpus)])
    }

    #[test]
    fn each_recovery_action_has_its_severity() {
        for (action, line) in [
            (0.0, "pass within-limits"),
            (1.0, "fail recovery-reset reset gpu:0000:19:00.0"),
            (2.0, "fail recovery-reboot reboot gpu:0000:19:00.0"),
            (3.0, "fail recovery-drain reset gpu:0000:19:00.0"),
            (4.0, "fail recovery-drain-reset reset gpu:0000:19:00.0"),
        ] {
            assert_eq!(check(&[n(0.0), n(action)]), [line]);
        }
    }

    #[test]
    fn an_unknown_action_does_not_pass() {
        assert_eq!(check(&[n(0.0), n(9.0)]), ["inconclusive unparseable"]);
        assert_eq!(check(&[n(0.0), lost()]), ["inconclusive failed"]);
        assert_eq!(check(&[FieldValue::NotSupported]), ["not-applicable not-supported"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
