//! memlock: may programs lock enough memory for RDMA?
//!
//! What it does: on a machine with an RDMA device, reads the locked-memory limit of this program (/proc/self/limits).
//!
//! Why it matters: RDMA pins the memory that it sends from. Under a small limit NCCL and MPI fail at start with
//! `Cannot allocate memory` from `ibv_reg_mr`, or a library silently falls back to TCP.
//!
//! What to do: `memlock-small` is `monitor`. The limit is that of the process that ran this check: under Slurm's health
//! hook slurmd's, which its jobs inherit; for the agent that of its unit. Set `LimitMEMLOCK=infinity` in the unit
//! (`systemctl edit slurmd`, containerd likewise), `* - memlock unlimited` in /etc/security/limits.d for logins, and
//! restart the service.
//!
//! Not applicable where there is no RDMA device.

use doctor_core::observation::{Entity, FailureKind, Metric, Observation, ProbeFailure, Unit};

use crate::{
    files::{directory_names, file_text},
    probe::{Probe, ProbeOutput},
    rdma::no_rdma,
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("memlock", "limit on locked memory");

// 16 GiB, which AWS recommends for EFA.
const RULES: &str = r#"
rules = [
  { id = "memlock-small", check = "memlock", metric = "memlock_bytes", below = 17179869184.0, reason = "memlock-small",
    severity = "monitor", text = "locked-memory limit {value}B, RDMA needs at least {limit}B or unlimited" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("memlock.rs")), rules: RULES, probes, interpret };

fn probes(_: &Params) -> Vec<Probe> {
    vec![Probe::List { path: "/sys/class/infiniband".to_owned() }, Probe::read("/proc/self/limits")]
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    match directory_names(outputs.first()) {
        Ok([]) => return no_rdma(),
        Ok(_) => {}
        Err(failure) => return Observation::Failed(failure),
    }
    match file_text(outputs.get(1)).map(soft_limit) {
        Ok(Some(bytes)) => {
            Observation::measured(vec![Metric::new("memlock_bytes", Entity::node(), bytes, Unit::Bytes)], Vec::new())
        }
        Ok(None) => {
            let text = "/proc/self/limits has no valid line `Max locked memory`";
            Observation::Failed(ProbeFailure::new(FailureKind::Unparseable, text))
        }
        Err(failure) => Observation::Failed(failure),
    }
}

/// Returns the soft limit in bytes; `unlimited` is the largest number.
fn soft_limit(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    match line.split_ascii_whitespace().next()? {
        "unlimited" => Some(u64::MAX as f64),
        bytes => bytes.parse::<u64>().ok().map(|bytes| bytes as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify_fixture::classify_outputs;
    use proptest::prelude::*;

    // Captured: Linux 6.18, virtual machine, 2026-11-15; two lines of sixteen.
    const SMALL: &str = "Limit                     Soft Limit           Hard Limit           Units     \n\
        Max locked memory         8388608              8388608              bytes     \n";

    fn check(devices: &[&str], limits: &str) -> Vec<String> {
        let names = ProbeOutput::Names(devices.iter().map(|&name| name.to_owned()).collect());
        classify_outputs(&CHECK, &[names, ProbeOutput::Text(limits.to_owned())])
    }

    #[test]
    fn a_low_limit_fails_only_with_rdma_devices() {
        assert_eq!(check(&["mlx5_0"], SMALL), ["fail memlock-small monitor node"]);
        assert_eq!(check(&["mlx5_0"], &SMALL.replace("8388608  ", "unlimited")), ["pass within-limits"]);
        assert_eq!(check(&["mlx5_0"], &SMALL.replace("8388608  ", "17179869184")), ["pass within-limits"]);
        assert_eq!(check(&[], SMALL), ["not-applicable no-rdma"]);
        assert_eq!(check(&["mlx5_0"], "Max processes 1 1\n"), ["inconclusive unparseable"]);
        let missing = ProbeOutput::Failed(ProbeFailure::new(FailureKind::Missing, "no such directory"));
        assert_eq!(classify_outputs(&CHECK, &[missing.clone(), missing]), ["not-applicable no-rdma"]);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "(Max locked memory)?.{0,60}") {
            check(&["mlx5_0"], &text);
        }
    }
}
