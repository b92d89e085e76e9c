//! gpu-processes: do dead processes still hold a GPU?
//!
//! What it does: compares the processes that the driver lists for each GPU with those of the machine. A process that no
//! longer exists, or exists only as a zombie, is dead and still holds GPU memory. Live processes belong to users: they
//! are counted without a limit.
//!
//! Why it matters: the next job finds part of the GPU's memory taken and fails with an out-of-memory error, on a GPU
//! that looks idle. Users cannot free the memory.
//!
//! What to do: `nvidia-smi --query-compute-apps=pid,used_memory,gpu_bus_id --format=csv` lists them;
//! `fuser -v /dev/nvidia*` shows which processes hold the device.
//! - `gpu-process-ghost` is `reset`, confirmed by a second failure: the driver kept the context of a process that is
//!   gone. Drain the node and reset the GPU.
//! - `gpu-process-zombie` is `reboot`, confirmed by a second failure: the process has ended and cannot be reaped, most
//!   often because one of its threads is stuck in the driver. If its parent (`ps -o ppid= -p PID`) is alive and merely
//!   does not reap it, ending the parent is enough.
//!
//! Inconclusive in a container that does not see the machine's processes. Not applicable without a GPU, or where the
//! driver lists no processes.

use doctor_core::observation::{Event, ObservationBuilder, Metric, Observation};

use crate::{
    gpu::{Gpu, FieldValue, for_each_gpu, read_indexed},
    host_processes::host_processes,
    probe::{Probe, ProbeOutput, Process},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("gpu-processes", "dead processes that hold a GPU");

const RULES: &str = r#"
rules = [
  { id = "gpu-processes-zombie", check = "gpu-processes", event = "gpu-process-zombie", reason = "gpu-process-zombie",
    severity = "reboot", confirm = 2, text = "{entity}: {value}" },
  { id = "gpu-processes-ghost", check = "gpu-processes", event = "gpu-process-ghost", reason = "gpu-process-ghost",
    severity = "reset", confirm = 2, text = "{entity}: {value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("gpu_processes.rs")), rules: RULES, probes, interpret };

/// The driver first: a process that starts in between is in the second list and cannot seem dead.
fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::gpu(&["process.*.pid", "process.*.memory"]), Probe::Processes]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let processes = host_processes(outputs.get(1));
    for_each_gpu(outputs.first(), "the driver lists no processes", |gpu, builder| {
        if matches!(gpu.get("process.*.pid"), Some(FieldValue::NotSupported)) {
            return;
        }
        let unreadable = matches!(gpu.get("process.*.pid"), Some(FieldValue::Failed { .. }));
        let listed = read_indexed(gpu, "process", "pid", builder);
        match &processes {
            Err(failure) => builder.unreadable(failure.clone()),
            Ok(_) if unreadable => {}
            Ok(processes) => {
                builder.metric(Metric::count("gpu_processes", gpu.entity(), listed.len() as f64));
                for (number, pid) in listed {
                    report_dead_process(gpu, number, pid, processes, builder);
                }
            }
        }
    })
}

fn report_dead_process(gpu: &Gpu, number: u32, pid: f64, processes: &[Process], builder: &mut ObservationBuilder) {
    let held = gpu
        .number(&format!("process.{number}.memory"))
        .map_or_else(String::new, |bytes| format!(", holding {:.0} MiB", bytes / f64::from(1 << 20)));
    match processes.iter().find(|process| f64::from(process.pid) == pid) {
        None => {
            let text = format!("process {pid} has ended and the driver still lists it{held}");
            builder.event(Event::seen("gpu-process-ghost", gpu.entity(), text));
        }
        Some(process) if matches!(process.state, 'Z' | 'X') => {
            let text = format!("process {pid} ({}) is a zombie{held}", process.name);
            builder.event(Event::seen("gpu-process-zombie", gpu.entity(), text));
        }
        Some(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        gpu::tests::{answer, lost, n, none},
        host_processes::tests::{process, running},
        classify_fixture::classify_outputs,
    };
    use doctor_core::observation::{FailureKind, ProbeFailure};

    fn uses(pid: f64) -> Vec<(&'static str, FieldValue)> {
        vec![("process.0.pid", n(pid)), ("process.0.memory", n(1e9))]
    }

    fn check(gpu: &[(&str, FieldValue)]) -> Vec<String> {
        let alive = [process(500, "python3", 'R'), process(600, "python3", 'Z'), process(700, "python3", 'D')];
        classify_outputs(&CHECK, &[answer(&[&[], gpu]), running(&alive)])
    }

    #[test]
    fn only_dead_processes_are_reported() {
        assert_eq!(check(&[]), ["pass within-limits"]);
        assert_eq!(check(&uses(500.0)), ["pass within-limits"]);
        assert_eq!(check(&uses(700.0)), ["pass within-limits"]);
        assert_eq!(check(&uses(12.0)), ["fail gpu-process-ghost reset gpu:0000:19:00.0"]);
        assert_eq!(check(&uses(600.0)), ["fail gpu-process-zombie reboot gpu:0000:19:00.0"]);
    }

    #[test]
    fn no_process_is_reported_dead_from_inside_a_container() {
        let inside = ProbeOutput::Processes(vec![process(1, "doctor-node", 'S')]);
        assert_eq!(classify_outputs(&CHECK, &[answer(&[&uses(12.0)]), inside]), ["inconclusive denied"]);
    }

    #[test]
    fn an_unreadable_process_list_is_not_an_empty_one() {
        assert_eq!(check(&[("process.*.pid", lost())]), ["inconclusive failed"]);
        assert_eq!(
            classify_outputs(&CHECK, &[answer(&[&[("process.*.pid", FieldValue::NotSupported)]]), running(&[])]),
            ["not-applicable not-supported"]
        );
        let failed = ProbeOutput::Failed(ProbeFailure::new(FailureKind::TimedOut, "no"));
        assert_eq!(classify_outputs(&CHECK, &[answer(&[&[]]), failed]), ["inconclusive timed-out"]);
        assert_eq!(classify_outputs(&CHECK, &[none(), running(&[])]), ["not-applicable no-gpu"]);
    }
}
