//! processes-stuck: are processes stuck in the kernel?
//!
//! What it does: looks for processes that are older than five minutes and in uninterruptible sleep (state `D`). A
//! second failure, five minutes later, confirms the finding.
//!
//! Why it matters: such a process cannot be killed, not even by root. It keeps its memory, its GPU and its mount; the
//! scheduler cannot end the job, and the next one finds the GPU in use.
//!
//! What to do: `ps -eo pid,stat,wchan:32,cmd | awk '$2 ~ /D/'` shows where they wait; as root also
//! `cat /proc/PID/stack`.
//! - `nvidia-stuck` is `reboot`: a process waits inside NVIDIA's driver, or one of NVIDIA's own programs hangs. Only a
//!   reboot frees the GPU; look for an Xid in the kernel log (`gpu-xid`).
//! - `processes-stuck` is `monitor`: most often a file server that does not answer (`mounts`) or a failing disk
//!   (`kernel-log`). When the server returns they continue.

use doctor_core::{
    observation::{Entity, Event, Metric, Observation},
    time::Span,
};

use crate::{
    host_processes::host_processes,
    probe::{Probe, ProbeOutput, Process},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("processes-stuck", "processes stuck in the kernel (state D)");

const RULES: &str = r#"
rules = [
  { id = "processes-stuck-nvidia", check = "processes-stuck", event = "nvidia-stuck", reason = "nvidia-stuck",
    severity = "reboot", confirm = 2, text = "{value}" },
  { id = "processes-stuck-other", check = "processes-stuck", event = "processes-stuck", reason = "processes-stuck",
    severity = "monitor", confirm = 2, text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("processes_stuck.rs")), rules: RULES, probes, interpret };

/// A process that just started may wait for its disk.
const MIN_AGE: Span = Span::minutes(5);

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::Processes]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    let all = match host_processes(outputs.first()) {
        Ok(all) => all,
        Err(failure) => return Observation::Failed(failure),
    };
    let stuck = all.iter().filter(|process| process.state == 'D' && process.age >= MIN_AGE);
    let (nvidia, other): (Vec<_>, Vec<_>) = stuck.partition(|process| is_nvidia_process(process));
    let events = [("nvidia-stuck", &nvidia), ("processes-stuck", &other)]
        .into_iter()
        .filter(|(_, processes)| !processes.is_empty())
        .map(|(code, processes)| Event::seen(code, Entity::node(), describe_processes(processes)))
        .collect();
    let count = (nvidia.len() + other.len()) as f64;
    Observation::measured(vec![Metric::count("processes_stuck", Entity::node(), count)], events)
}

fn is_nvidia_process(process: &Process) -> bool {
    let name =
        process.name.starts_with("nvidia") || process.name.starts_with("nv-") || process.name.starts_with("dcgm");
    let function = process.wchan.as_deref().unwrap_or("");
    let prefixes = ["nv_", "nvidia", "_nv", "uvm_", "rm_", "os_acquire"];
    name || prefixes.iter().any(|prefix| function.starts_with(prefix))
}

/// Returns the number of processes, and the names of the first few.
fn describe_processes(processes: &[&Process]) -> String {
    let one = |process: &&Process| {
        let location = process.wchan.as_ref().map(|location| format!(" in {location}")).unwrap_or_default();
        format!("{} ({}){location}", process.name, process.pid)
    };
    let first: Vec<_> = processes.iter().take(4).map(one).collect();
    let more = if processes.len() > 4 { ", …" } else { "" };
    format!("{} processes stuck in the kernel (state D): {}{more}", processes.len(), first.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs;

    fn process(name: &str, state: char, minutes: i64, waits_in: &str) -> Process {
        Process {
            pid: 4711,
            parent: 1,
            user: 0,
            name: name.to_owned(),
            state,
            age: Span::minutes(minutes),
            wchan: (!waits_in.is_empty()).then(|| waits_in.to_owned()),
        }
    }

    fn check(process: Process) -> Vec<String> {
        let first = Process { pid: 2, ..self::process("kthreadd", 'S', 9000, "") };
        classify_outputs(&CHECK, &[ProbeOutput::Processes(vec![first, process])])
    }

    // Made by hand.
    #[test]
    fn a_process_stuck_in_the_driver_requires_a_reboot() {
        assert_eq!(check(process("python", 'R', 600, "")), ["pass within-limits"]);
        let nvidia = ["fail nvidia-stuck reboot node"];
        assert_eq!(check(process("nvidia-smi", 'D', 6, "")), nvidia);
        assert_eq!(check(process("python", 'D', 600, "uvm_va_space_mm_shutdown")), nvidia);
        assert_eq!(check(process("rsync", 'D', 600, "rpc_wait_bit_killable")), ["fail processes-stuck monitor node"]);
        assert_eq!(check(process("cp", 'D', 1, "folio_wait_bit_common")), ["pass within-limits"]);
    }

    #[test]
    fn processes_of_a_container_are_rejected() {
        assert_eq!(classify_outputs(&CHECK, &[ProbeOutput::Processes(Vec::new())]), ["inconclusive denied"]);
        let own = vec![process("doctor-node", 'R', 600, "")];
        assert_eq!(classify_outputs(&CHECK, &[ProbeOutput::Processes(own)]), ["inconclusive denied"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }
}
