//! Parses the output of Node Health Check (NHC) and of Azure's health checks (AzNHC).
//!
//! Both stop, or continue, after lines such as `ERROR:  nhc:  Health check failed:  check_x:  text`; without a log file
//! (`-l -`) the line starts with `Health`. AzNHC adds a fault code, of which `NHCNA` means that the check itself could
//! not run: that is no verdict on the node. NHC prints nothing when all is well, and also when it has no configuration
//! or none for this host, so silence is not health: run it as `nhc -v -l -` to make it list its checks. AzNHC exits
//! with 0 on machines that it does not support; that is not health either.

use std::collections::BTreeMap;

use doctor_core::{
    observation::{Entity, Event, FailureKind, Metric, Observation, ObservationBuilder, ProbeFailure},
    reason::ReasonCode,
};

use crate::{gpu::not_applicable, measurements::exit_failure, probe::ProbeOutput};

/// AzNHC's codes and their meaning, from Azure's fault dictionary. 2006 is not used.
pub const FAULTS: &[(u16, &str)] = &[
    (2001, "generic fault"),
    (2002, "an InfiniBand device is missing"),
    (2003, "InfiniBand is slow"),
    (2004, "an InfiniBand port is down"),
    (2005, "an InfiniBand port flaps"),
    (2007, "row remapping of GPU memory is pending or failed"),
    (2008, "the infoROM is corrupt"),
    (2009, "a GPU is missing"),
    (2010, "needs manual inspection"),
    (2011, "Xid 95: a memory error was not contained"),
    (2012, "Xid 94: a memory error was contained"),
    (2013, "Xid 79: a GPU has fallen off the bus"),
    (2014, "Xid 48: a double-bit error"),
    (2015, "nvidia-smi fails"),
    (2016, "an NVLink is down"),
    (2017, "DCGM reports a thermal violation"),
    (2018, "the table of retired pages is full"),
    (2019, "too many ECC errors"),
    (2020, "a GPU's bandwidth test or diagnostic fails"),
    (2021, "GPU memory is slow"),
    (2022, "the CPU is slow"),
    (2023, "an NVMe disk is missing"),
];

/// Interprets a run of `nhc` or of AzNHC's `run-health-checks.sh`.
pub fn interpret(output: Option<&ProbeOutput>) -> Observation {
    let could_not = |kind, text: &str| Observation::Failed(ProbeFailure::new(kind, text));
    let (exit, stdout, stderr) = match output {
        Some(ProbeOutput::Ran { exit, stdout, stderr }) => (*exit, stdout, stderr),
        Some(ProbeOutput::Failed(failure)) => return Observation::Failed(failure.clone()),
        _ => return could_not(FailureKind::Unparseable, "the probe returned no output of NHC"),
    };
    let lines = || stdout.lines().chain(stderr.lines());
    let mut builder = ObservationBuilder::default();
    let mut failures: BTreeMap<ReasonCode, Vec<String>> = BTreeMap::new();
    for line in lines().filter_map(failed_line) {
        match NhcLine::parse(line) {
            NhcLine::Fault(code, text) => {
                let texts = failures.entry(code).or_default();
                // The same line is printed on both streams, and again in the summary.
                if !texts.contains(&text) {
                    texts.push(text);
                }
            }
            NhcLine::CouldNot(failure) => builder.unreadable(failure),
        }
    }
    let failed = failures.len();
    for (code, texts) in failures {
        builder.event(Event { code, entity: Entity::node(), at: None, text: texts.join("; "), key: None });
    }
    if failed > 0 || (exit == Some(0) && has_run_checks(stdout, stderr)) {
        builder.metric(Metric::count("nhc_faults", Entity::node(), failed as f64));
    }
    builder.build_or(no_result(exit, stdout, stderr))
}

/// Returns whether the output shows that something was checked. NHC 1.4 ends with `completed successfully` even after
/// no check at all; 1.5 adds their number.
fn has_run_checks(stdout: &str, stderr: &str) -> bool {
    let lines = || stdout.lines().chain(stderr.lines());
    let some_passed = |line: &str| {
        let count =
            line.split_once("Node Health Check completed successfully; ").and_then(|(_, rest)| rest.split_once(' '));
        count.is_some_and(|(count, rest)| rest.starts_with("passed") && count.parse().is_ok_and(|count: u32| count > 0))
    };
    // AzNHC has a list of checks for this machine type and completed it.
    let azure = lines().any(|line| line.starts_with("Running health checks for Standard_"))
        && lines().any(|line| line.trim() == "Health checks completed with exit code: 0.");
    let says = |line: &str| {
        // The last is the format of AzNHC's log.
        ["Running check ", "Running check:", "nhc:  Health check passed:"].iter().any(|sign| line.contains(sign))
    };
    azure || lines().any(|line| says(line) || some_passed(line))
}

/// Returns the observation if there is neither a failure nor a sign that anything was checked.
fn no_result(exit: Option<i32>, stdout: &str, stderr: &str) -> Observation {
    let lines = || stdout.lines().chain(stderr.lines());
    if let Some(line) = lines().find(|line| line.contains("not supported")) {
        let message: String = line.trim().chars().take(200).collect();
        return not_applicable("nhc-not-supported", message);
    }
    Observation::Failed(match exit {
        Some(0) => ProbeFailure::new(
            FailureKind::Empty,
            "the output of NHC names no check; run `nhc -v -l -`, with lines for this host in its configuration",
        ),
        exit => exit_failure(exit, if stderr.trim().is_empty() { stdout } else { stderr }),
    })
}

/// Returns the text after `Health check failed:`. It may be preceded by a time, `ERROR:  nhc:`, `ERROR` from a run in
/// the background, `NHC:` in a node's reason in Slurm, or nothing.
fn failed_line(line: &str) -> Option<&str> {
    line.split_once("Health check failed:").map(|(_, text)| text.trim())
}

enum NhcLine {
    Fault(ReasonCode, String),
    CouldNot(ProbeFailure),
}

impl NhcLine {
    fn parse(message: &str) -> Self {
        let text: String = message.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(300).collect();
        // NHC also reports its own errors as failed checks. They say nothing about the node.
        const OWN: [(&str, FailureKind); 5] = [
            ("Script timed out", FailureKind::TimedOut),
            ("Watchdog timer unable to terminate", FailureKind::TimedOut),
            ("Terminated by signal", FailureKind::Killed),
            ("No such check ", FailureKind::Missing),
            ("Unable to run check ", FailureKind::Denied),
        ];
        if let Some((_, kind)) = OWN.iter().find(|(start, _)| text.starts_with(start)) {
            return Self::CouldNot(ProbeFailure::new(*kind, text));
        }
        let code = text.split_once("FaultCode:").map(|(_, code)| code.trim().trim_end_matches('.'));
        match code {
            Some("NHCNA") => Self::CouldNot(ProbeFailure::new(FailureKind::Failed, text)),
            Some(code) => {
                let number = code.strip_prefix("NHC").and_then(|digits| digits.parse::<u16>().ok());
                match number.and_then(|number| FAULTS.iter().find(|(known, _)| *known == number)) {
                    Some((number, means)) => match ReasonCode::new(&format!("nhc-{number}")) {
                        Ok(code) => Self::Fault(code, format!("{text} ({means})")),
                        Err(_) => Self::Fault(ReasonCode::fixed("nhc-failed"), text),
                    },
                    None => Self::Fault(ReasonCode::fixed("nhc-failed"), text),
                }
            }
            None => Self::Fault(ReasonCode::fixed("nhc-failed"), text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{aznhc::CHECK, classify_fixture::classify_outputs};
    use proptest::prelude::*;

    fn ran(exit: i32, stdout: &str, stderr: &str) -> Vec<String> {
        let output = ProbeOutput::Ran { exit: Some(exit), stdout: stdout.to_owned(), stderr: stderr.to_owned() };
        classify_outputs(&CHECK, &[output])
    }

    /// A failure line in AzNHC's format.
    fn azure(text: &str) -> String {
        format!("ERROR:  nhc:  Health check failed:  {text}\n")
    }

    #[test]
    fn failures_are_reported_with_their_codes() {
        for (text, finding) in [
            ("check_fs_mount:  /scratch not mounted", "nhc-failed monitor"),
            ("check_gpu_count: Expected 8 and found 7. FaultCode: NHC2009", "nhc-2009 reboot"),
            ("check_gpu_ecc: GPU 3 row remap pending. FaultCode: NHC2007.", "nhc-2007 reset"),
            ("check_nvsmi_healthmon: infoROM corrupt FaultCode: NHC2008", "nhc-2008 isolate"),
            ("check_new: something FaultCode: NHC9999", "nhc-failed monitor"),
        ] {
            assert_eq!(ran(1, &azure(text), ""), [format!("fail {finding} node")], "{text}");
            assert_eq!(ran(1, "", &azure(text)), [format!("fail {finding} node")], "{text}");
        }
        for line in [
            "NHC: Health check failed:  check_hw_ib: no port",
            "Health check failed:  check_hw_ib: no port",
            "ERROR Health check failed:  check_hw_ib: no port",
            "[12] - Health check failed:  check_hw_ib: no port",
        ] {
            assert_eq!(ran(1, line, ""), ["fail nhc-failed monitor node"], "{line}");
        }
    }

    #[test]
    fn every_azure_fault_code_has_a_rule() {
        for (number, _) in FAULTS {
            let lines = ran(1, &azure(&format!("check_x: y FaultCode: NHC{number}")), "");
            assert!(lines[0].starts_with(&format!("fail nhc-{number} ")), "{lines:?}");
        }
        assert_eq!(CHECK.rules.matches("event = ").count(), FAULTS.len() + 1);
    }

    #[test]
    fn a_check_that_could_not_run_is_no_verdict_and_hides_no_other() {
        let na = azure("check_gpu_bw: nvbandwidth not found FaultCode: NHCNA");
        assert_eq!(ran(1, &na, ""), ["inconclusive failed"]);
        let both = na + &azure("check_gpu_count: 7 of 8 FaultCode: NHC2009");
        assert_eq!(ran(1, &both, ""), ["fail nhc-2009 reboot node"]);
        for (own, reason) in [
            ("No such check \"check_x\" (missing/corrupt .nhc file?); check 1 of 9 (check_x) returned 127", "missing"),
            (
                "Unable to run check \"check_x\" (permissions/mount flags?); check 1 of 9 (check_x) returned 126",
                "denied",
            ),
            ("Terminated by signal SIGTERM.", "killed"),
            ("Watchdog timer unable to terminate hung NHC process 1234.", "timed-out"),
        ] {
            assert_eq!(ran(1, &azure(own), ""), [format!("inconclusive {reason}")], "{own}");
        }
        let hung = azure("Script timed out while executing \"check_fs_mount_rw -f /scratch\".");
        let output = ProbeOutput::Ran { exit: Some(1), stdout: hung, stderr: String::new() };
        let Observation::Failed(failure) = interpret(Some(&output)) else { panic!("could not") };
        assert_eq!(failure.kind, FailureKind::TimedOut);
        assert!(failure.text.contains("check_fs_mount_rw"), "the text names the check that hung: {}", failure.text);
    }

    #[test]
    fn only_a_run_that_says_so_has_passed() {
        let well = "Node Health Check starting.\nRunning check 1 of 1:  \"check_fs_mount /\"\n\
                    Node Health Check completed successfully; 1 passed in 1 second(s).\n";
        assert_eq!(ran(0, well, ""), ["pass within-limits"]);
        let older = "Running check:  \"check_fs_mount /\"\nNode Health Check completed successfully (1s).\n";
        assert_eq!(ran(0, older, ""), ["pass within-limits"]);
        let azure =
            "Running health checks for Standard_nd96isr_h100_v5 SKU...\nHealth checks completed with exit code: 0.\n";
        assert_eq!(ran(0, azure, ""), ["pass within-limits"]);
        let log = "SUCCESS:  nhc:  Health check passed:  check_gpu_count: Expected 8 and found 8\n";
        assert_eq!(ran(0, log, ""), ["pass within-limits"]);
        for nothing in [
            "",
            "Node Health Check completed successfully; 0 passed in 0 second(s).",
            "Node Health Check completed successfully (0s).",
            "Missing/invalid configuration file (\"/etc/nhc/nhc.conf\") ignored.",
            "Health checks completed with exit code: 0.",
        ] {
            assert_eq!(ran(0, nothing, ""), ["inconclusive empty"], "{nothing}");
        }
        let still = "ERROR:  Prior NHC instance is still running (PID #1234); is it hung?";
        assert_eq!(ran(145, "", still), ["inconclusive failed"]);
        assert_eq!(ran(3, "", "nhc: command not found"), ["inconclusive failed"]);
        assert_eq!(ran(1, well, ""), ["inconclusive failed"], "success and a non-zero exit code");
    }

    #[test]
    fn a_machine_that_aznhc_does_not_support_is_not_healthy_although_it_ends_with_0() {
        let message = "The vm SKU 'standard_nc4as_t4_v3' is currently not supported by Azure health checks.";
        assert_eq!(ran(0, message, ""), ["not-applicable nhc-not-supported"]);
    }

    #[test]
    fn a_killed_or_timed_out_run_is_inconclusive() {
        let killed = ProbeOutput::Ran { exit: None, stdout: String::new(), stderr: String::new() };
        assert_eq!(classify_outputs(&CHECK, &[killed]), ["inconclusive killed"]);
        let late = ProbeOutput::Failed(ProbeFailure::new(FailureKind::TimedOut, "nhc"));
        assert_eq!(classify_outputs(&CHECK, &[late]), ["inconclusive timed-out"]);
        assert_eq!(classify_outputs(&CHECK, &[]), ["inconclusive unparseable"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(
            text in "(ERROR:  nhc:  Health check failed:|FaultCode: NHC|NHCNA|[0-9]|.|\n){0,60}", exit in 0..4,
        ) {
            ran(exit, &text, "");
        }
    }
}
