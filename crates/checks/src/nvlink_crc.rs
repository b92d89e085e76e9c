//! nvlink-crc: is data often corrupted on NVLinks?
//!
//! What it does: reads the CRC errors of each NVLink (of flits and of data) as a rate over the time since the boot.
//!
//! Why it matters: every packet with a CRC error is retransmitted. Very many of them indicate a bad connector or a bad
//! transmitter: bandwidth drops first, then the link.
//!
//! What to do: `nvlink-crc` is `isolate`: more than 100 per second, which DCGM does not accept either (error 70,
//! isolate). Open a repair case; a reset does not cure it. `nvidia-smi nvlink -e -i BUS` shows the counters; comparing
//! the number at the other end of the link (`nvidia-smi nvlink -R`) distinguishes cable or switch from board.
//!
//! Single errors are harmless and not reported. A reset of the GPU clears the counters. Not applicable where no GPU has
//! NVLink or these counters.

use doctor_core::observation::Observation;

use crate::{
    nvlink_errors::{counter_probes, error_rates},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
};

const SPEC: Spec = Spec::quick("nvlink-crc", "CRC errors of NVLinks");

// 100 per second is 360,000 per hour.
const RULES: &str = r#"
rules = [
  { id = "nvlink-crc", check = "nvlink-crc", metric = "nvlink_crc_errors_per_hour", above = 360000.0,
    reason = "nvlink-crc", severity = "isolate",
    text = "{entity}: {value} CRC errors per hour since boot, limit {limit}" },
]
"#;

pub(crate) const CHECK: Check =
    Check { spec: SPEC, page: page_of(include_str!("nvlink_crc.rs")), rules: RULES, probes, interpret };

const CRC: [&str; 2] = ["crc_flit_errors", "crc_data_errors"];

fn probes(_: &Params) -> Vec<Probe> {
    counter_probes(&CRC)
}

fn interpret(_: &Params, outputs: &[ProbeOutput]) -> Observation {
    error_rates(outputs, "nvlink_crc_errors_per_hour", &CRC)
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

    fn check(flit: FieldValue, data: FieldValue) -> Vec<String> {
        let gpu = [("nvlink.4.crc_flit_errors", flit), ("nvlink.4.crc_data_errors", data)];
        classify_outputs(&CHECK, &[answer(&[&gpu]), ProbeOutput::Text("36000 1".to_owned())])
    }

    #[test]
    fn very_many_crc_errors_are_reported_and_a_few_are_not() {
        assert_eq!(check(n(0.0), n(0.0)), ["pass within-limits"]);
        assert_eq!(check(n(3.6e6), n(0.0)), ["pass within-limits"]);
        assert_eq!(check(n(3.6e6), n(1.0)), ["fail nvlink-crc isolate link:0000:18:00.0/4"]);
        // A GPU that has only one of the counters.
        assert_eq!(check(n(3.7e6), FieldValue::NotSupported), ["fail nvlink-crc isolate link:0000:18:00.0/4"]);
    }

    #[test]
    fn an_unreadable_counter_does_not_pass() {
        assert_eq!(check(n(0.0), lost()), ["inconclusive failed"]);
        assert_eq!(check(FieldValue::NotSupported, FieldValue::NotSupported), ["not-applicable not-supported"]);
        assert_eq!(classify_outputs(&CHECK, &[none()]), ["not-applicable no-gpu"]);
    }
}
