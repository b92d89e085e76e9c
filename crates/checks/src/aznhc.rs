//! aznhc: does the node pass Azure's own health checks?
//!
//! What it does: runs AzNHC's `run-health-checks.sh` where it is installed, as on Azure's HPC images, and reads the
//! fault codes that it prints. AzNHC starts a container that measures GPU bandwidth, NCCL and InfiniBand, and occupies
//! the node for minutes. The test therefore runs when it is named (`doctor-node test aznhc`), or in validation runs
//! where the policy sets `[tests.aznhc] enabled = true`.
//!
//! Why it matters: Azure requires AzNHC's fault code when a machine is returned, and AzNHC uses Azure's own limits for
//! each machine type.
//!
//! What to do: AzNHC writes its log to `health.log` next to its program; the line with the code shows what was
//! measured. Compare it with the results of our own checks of the same component.
//! - `nhc-2008`, `nhc-2018`, `nhc-2019`, `nhc-2023`, `nhc-2005` and `nhc-2010` are `isolate`: infoROM, memory beyond
//!   repair, a missing disk, a flapping link, or Azure's "needs manual inspection". Return the machine.
//! - `nhc-2007`, `nhc-2011`, `nhc-2014` and `nhc-2016` are `reset`: GPU memory or an NVLink that a reset recovers.
//! - Codes for heat, the processor and contained errors are `monitor`; all others are `reboot`.
//! - `nhc-failed` is `monitor`: a check without a code, or with one that is not in Azure's dictionary.
//!
//! `NHCNA` means that one of AzNHC's checks could not run: the result is inconclusive, and other faults are still
//! reported. Not applicable where AzNHC is not installed or does not support this machine type; in that case it exits
//! with 0 without having checked anything.
//!
//! Parameters: `program`, the path of `run-health-checks.sh`.

use doctor_core::{
    access::Access,
    observation::{FailureKind, Observation},
    time::Span,
};

use crate::{
    gpu::not_applicable,
    nhc,
    probe::{Probe, ProbeOutput},
    check_params::string,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec =
    Spec::deep("aznhc", "Azure's node health checks (AzNHC)", Span::minutes(5), Span::minutes(20))
        .opt_in()
        .access(&[Access::HostRoot, Access::Gpu, Access::Rdma]);

// The fault codes are AzNHC's; their severities follow those of our own checks for the same faults. A failed check
// without a code may be site-specific, and only the site knows what it proves.
const RULES: &str = r#"
rules = [
  { id = "aznhc-failed", check = "aznhc", event = "nhc-failed", reason = "nhc-failed", severity = "monitor", text = "{value}" },
  { id = "aznhc-2001", check = "aznhc", event = "nhc-2001", reason = "nhc-2001", severity = "reboot", text = "{value}" },
  { id = "aznhc-2002", check = "aznhc", event = "nhc-2002", reason = "nhc-2002", severity = "reboot", text = "{value}" },
  { id = "aznhc-2003", check = "aznhc", event = "nhc-2003", reason = "nhc-2003", severity = "reboot", text = "{value}" },
  { id = "aznhc-2004", check = "aznhc", event = "nhc-2004", reason = "nhc-2004", severity = "reboot", text = "{value}" },
  { id = "aznhc-2005", check = "aznhc", event = "nhc-2005", reason = "nhc-2005", severity = "isolate", text = "{value}" },
  { id = "aznhc-2007", check = "aznhc", event = "nhc-2007", reason = "nhc-2007", severity = "reset", text = "{value}" },
  { id = "aznhc-2008", check = "aznhc", event = "nhc-2008", reason = "nhc-2008", severity = "isolate", text = "{value}" },
  { id = "aznhc-2009", check = "aznhc", event = "nhc-2009", reason = "nhc-2009", severity = "reboot", text = "{value}" },
  { id = "aznhc-2010", check = "aznhc", event = "nhc-2010", reason = "nhc-2010", severity = "isolate", text = "{value}" },
  { id = "aznhc-2011", check = "aznhc", event = "nhc-2011", reason = "nhc-2011", severity = "reset", text = "{value}" },
  { id = "aznhc-2012", check = "aznhc", event = "nhc-2012", reason = "nhc-2012", severity = "monitor", text = "{value}" },
  { id = "aznhc-2013", check = "aznhc", event = "nhc-2013", reason = "nhc-2013", severity = "reboot", text = "{value}" },
  { id = "aznhc-2014", check = "aznhc", event = "nhc-2014", reason = "nhc-2014", severity = "reset", text = "{value}" },
  { id = "aznhc-2015", check = "aznhc", event = "nhc-2015", reason = "nhc-2015", severity = "reboot", text = "{value}" },
  { id = "aznhc-2016", check = "aznhc", event = "nhc-2016", reason = "nhc-2016", severity = "reset", text = "{value}" },
  { id = "aznhc-2017", check = "aznhc", event = "nhc-2017", reason = "nhc-2017", severity = "monitor", text = "{value}" },
  { id = "aznhc-2018", check = "aznhc", event = "nhc-2018", reason = "nhc-2018", severity = "isolate", text = "{value}" },
  { id = "aznhc-2019", check = "aznhc", event = "nhc-2019", reason = "nhc-2019", severity = "isolate", text = "{value}" },
  { id = "aznhc-2020", check = "aznhc", event = "nhc-2020", reason = "nhc-2020", severity = "reboot", text = "{value}" },
  { id = "aznhc-2021", check = "aznhc", event = "nhc-2021", reason = "nhc-2021", severity = "reboot", text = "{value}" },
  { id = "aznhc-2022", check = "aznhc", event = "nhc-2022", reason = "nhc-2022", severity = "monitor", text = "{value}" },
  { id = "aznhc-2023", check = "aznhc", event = "nhc-2023", reason = "nhc-2023", severity = "isolate", text = "{value}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("aznhc.rs")), rules: RULES, probes, interpret };

/// The program's path on Azure's HPC images.
const PROGRAM: &str = "/opt/azurehpc/test/azurehpc-health-checks/run-health-checks.sh";

/// NHC limits itself to 500 s for all checks; the container image may have to be pulled first.
const TIMEOUT: Span = Span::minutes(15);

fn program(params: &Params) -> Result<String, Observation> {
    Ok(string(params, "program", "program = \"/opt/aznhc/run-health-checks.sh\"")?.unwrap_or_else(|| PROGRAM.to_owned()))
}

fn probes(params: &Params) -> Vec<Probe> {
    let Ok(program) = program(params) else { return Vec::new() };
    let folder = program.rsplit_once('/').map_or(".", |(folder, _)| folder);
    // `-a` runs all checks: without it NHC stops at the first failure. `-o` sets the log's path: without it NHC writes
    // to the current directory.
    let args = ["-a".to_owned(), "-o".to_owned(), format!("{folder}/health.log")].to_vec();
    vec![Probe::Exec { program, args, timeout: TIMEOUT }]
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    match (program(params), outputs.first()) {
        (Err(instead), _) => instead,
        (Ok(program), Some(ProbeOutput::Failed(failure))) if failure.kind == FailureKind::Missing => {
            not_applicable("no-aznhc", format!("AzNHC is not installed: {program} does not exist"))
        }
        (Ok(_), output) => nhc::interpret(output),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs;
    use doctor_core::observation::ProbeFailure;

    #[test]
    fn not_applicable_if_aznhc_is_not_installed() {
        let missing = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "no such file"));
        assert_eq!(classify_outputs(&CHECK, &[missing]), ["not-applicable no-aznhc"]);
        let denied = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "permission denied"));
        assert_eq!(classify_outputs(&CHECK, &[denied]), ["inconclusive denied"]);
    }

    #[test]
    fn the_log_is_in_the_installation_directory() {
        let params: Params = [("program".to_owned(), "/opt/nhc/run.sh".into())].into();
        let [Probe::Exec { program, args, .. }] = &probes(&params)[..] else { panic!("one program") };
        assert_eq!((program.as_str(), args.join(" ").as_str()), ("/opt/nhc/run.sh", "-a -o /opt/nhc/health.log"));
        let params: Params = [("program".to_owned(), 3.into())].into();
        assert!(probes(&params).is_empty() && matches!(interpret(&params, &[]), Observation::Failed(_)));
    }
}
