//! The processes of the whole machine, verified not to be those of a container.
//!
//! In a container with its own PID namespace, every process of the host seems to be missing. A check that asks "is this
//! running?" or "is this gone?" must not draw conclusions there.

use doctor_core::observation::{FailureKind, ProbeFailure};

use crate::probe::{ProbeOutput, Process};

/// Returns the machine's processes.
///
/// # Errors
/// Returns the failure that the check should report: no list, or only that of a container.
pub fn host_processes(output: Option<&ProbeOutput>) -> Result<&[Process], ProbeFailure> {
    let processes = match output {
        Some(ProbeOutput::Processes(processes)) => processes,
        Some(ProbeOutput::Failed(failure)) => return Err(failure.clone()),
        _ => return Err(ProbeFailure::new(FailureKind::Unparseable, "the answer is not a list of processes")),
    };
    // kthreadd, which starts all other kernel threads, is process 2 of the machine and of no container.
    if processes.iter().any(|process| process.pid == 2 && process.name == "kthreadd") {
        return Ok(processes);
    }
    let text = "only the container's processes are visible; use the host's PID namespace (Kubernetes: `hostPID: true`)";
    Err(ProbeFailure::new(FailureKind::Denied, text))
}

/// Returns whether a process of this name is running. The kernel keeps 15 bytes of a name.
pub fn is_running(processes: &[Process], name: &str) -> bool {
    let truncated = name.get(..15).unwrap_or(name);
    processes.iter().any(|process| process.name == truncated && !matches!(process.state, 'Z' | 'X'))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use doctor_core::time::Span;

    pub(crate) fn process(pid: u32, name: &str, state: char) -> Process {
        Process { pid, parent: 1, user: 0, name: name.to_owned(), state, age: Span::hours(1), wchan: None }
    }

    /// A machine with its kernel threads and these processes.
    pub(crate) fn running(processes: &[Process]) -> ProbeOutput {
        let own = [process(1, "systemd", 'S'), process(2, "kthreadd", 'S')];
        ProbeOutput::Processes(own.into_iter().chain(processes.iter().cloned()).collect())
    }

    #[test]
    fn processes_of_a_container_are_rejected() {
        assert!(host_processes(Some(&running(&[]))).is_ok());
        let inside = ProbeOutput::Processes(vec![process(1, "doctor-node", 'S'), process(2, "bash", 'S')]);
        assert!(matches!(host_processes(Some(&inside)), Err(failure) if failure.text.contains("hostPID")));
        assert!(host_processes(Some(&ProbeOutput::Processes(Vec::new()))).is_err());
        assert!(host_processes(None).is_err());
    }

    #[test]
    fn a_long_name_is_matched_by_its_first_15_bytes() {
        let processes = [process(900, "nv-fabricmanage", 'S'), process(901, "nvidia-imex", 'Z')];
        assert!(is_running(&processes, "nv-fabricmanager"));
        assert!(!is_running(&processes, "nvidia-imex"));
        assert!(!is_running(&processes, "nv-fabric"));
    }
}
