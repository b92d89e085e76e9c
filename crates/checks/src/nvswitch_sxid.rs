//! nvswitch-sxid: which errors have the NVSwitches reported?
//!
//! What it does: reads the SXids of this boot from the kernel log, at most `within` old. Each number is classified by
//! NVIDIA's guide; where the record calls itself fatal or non-fatal and the guide differs, the record applies. Many
//! records of one number on one switch are one finding. Corrected errors and retrained links are only counted.
//!
//! Why it matters: all GPUs of the machine communicate through these switches. A fatal error there shows as Xid 74 and
//! 45 on several GPUs together, none of which is at fault.
//!
//! What to do: `doctor why NODE` names the switch; `doctor explain sxid N` explains the number.
//! - `sxid-N` is `reboot` for the fatal ones (11001 to 24007): NVIDIA advises to restart the machine, which resets the
//!   port. If the same number recurs on the same port, open a repair case: a switch or its baseboard is bad.
//! - `sxid-10003`, `sxid-19084` are `reset`: all GPUs and NVSwitches must be reset together; stop the fabric manager,
//!   run `nvidia-smi --gpu-reset`, start it again.
//! - `sxid-10001`, `sxid-10002`, `sxid-10004`, `sxid-20012` are `monitor`: watch; check the cooling (10004) or the
//!   link's mechanical parts (20012).
//! - `sxid-fatal` is `reboot`, `sxid-nonfatal` is `monitor`: the record's own rating, for numbers that the guide does
//!   not list or rates otherwise. An unknown number without a rating counts as fatal.
//!
//! NVSentinel treats all but `Non-fatal` as a support case, AWS warns at any, DCGM isolates (error 109).
//!
//! Not applicable where no device uses NVIDIA's NVSwitch driver and the log has no SXid.
//!
//! Parameters: `within`, by default `"7d"`.

use doctor_core::observation::{Entity, Metric, Observation};

use crate::{
    gpu::{normalize_bus_id, not_applicable},
    kmsg::{self, RecordGroups},
    probe::{Probe, ProbeOutput},
    spec::{Check, Params, Spec, page_of},
    sxid_record::SxidRecord,
};

const SPEC: Spec = Spec::quick("nvswitch-sxid", "NVSwitch errors in the kernel log (SXid)");

pub(crate) const CHECK: Check = Check {
    spec: SPEC,
    page: page_of(include_str!("nvswitch_sxid.rs")),
    rules: include_str!("tables/sxid_rules.toml"),
    probes,
    interpret,
};

fn probes(_: &Params) -> Vec<Probe> {
    let mut all: Vec<Probe> = kmsg::probes().into();
    all.push(Probe::Links { pattern: "/sys/bus/pci/drivers/nvidia-nvswitch/*".to_owned() });
    all
}

fn interpret(params: &Params, outputs: &[ProbeOutput]) -> Observation {
    let no_switch = || not_applicable("no-nvswitch", "no device uses NVIDIA's NVSwitch driver");
    let none_here = match outputs.get(3) {
        Some(ProbeOutput::Links(links)) => !links.iter().any(|(path, _)| is_device(path)),
        _ => false,
    };
    let log = match kmsg::parse_log(params, outputs) {
        Ok(log) => log,
        Err(_) if none_here => return no_switch(),
        Err(instead) => return instead,
    };
    let (mut bursts, mut counted, mut seen) = (RecordGroups::default(), 0_u32, false);
    for sxid in log.recent().filter_map(SxidRecord::parse) {
        seen = true;
        match sxid.code() {
            Some(code) => bursts.add(code, sxid.switch.clone(), &sxid.record),
            None => counted = counted.saturating_add(1),
        }
    }
    if none_here && !seen {
        return no_switch();
    }
    let metrics = vec![log.record_count(), Metric::count("corrected_sxids", Entity::node(), f64::from(counted))];
    Observation::measured(metrics, bursts.events(&log))
}

/// Besides its devices, a driver's directory has a link to its module.
fn is_device(path: &str) -> bool {
    path.rsplit('/').next().is_some_and(|name| normalize_bus_id(name).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        classify_fixture::classify_outputs,
        kmsg::tests::{at_seconds, logged},
    };
    use doctor_core::observation::{FailureKind, ProbeFailure};
    use proptest::prelude::*;

    fn links(names: &[&str]) -> ProbeOutput {
        let link =
            |name: &&str| (format!("/sys/bus/pci/drivers/nvidia-nvswitch/{name}"), format!("/sys/devices/{name}"));
        ProbeOutput::Links(names.iter().map(link).collect())
    }

    fn with(mut log: Vec<ProbeOutput>, switches: ProbeOutput) -> Vec<String> {
        log.push(switches);
        classify_outputs(&CHECK, &log)
    }

    fn check(records: &[&str]) -> Vec<String> {
        let line = |record: &&str| format!("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): {record}");
        let lines: Vec<String> = records.iter().map(line).collect();
        with(logged(&lines.iter().map(String::as_str).collect::<Vec<_>>()), links(&["0000:05:00.0", "module"]))
    }

    #[test]
    fn each_kind_of_record_is_classified_for_its_switch() {
        assert_eq!(check(&[]), ["pass within-limits"]);
        for (record, finding) in [
            ("12028, Non-fatal, Link 32 egress non-posted PRIV error (First)", "sxid-12028 reboot"),
            ("11013, Fatal, Link 46 ingress header DBE", "sxid-11013 reboot"),
            ("12030, Fatal, Link 46 egress control parity error", "sxid-12030 reboot"),
            ("19084, Non-fatal, Link 3 AN1 Heartbeat Timeout Error", "sxid-19084 reset"),
            ("20012, Non-fatal, Link 3", "sxid-20012 monitor"),
            ("77777, Non-fatal, Link 3 new", "sxid-nonfatal monitor"),
            ("77777, Fatal, Link 3 new", "sxid-fatal reboot"),
            ("77777, new", "sxid-fatal reboot"),
        ] {
            assert_eq!(check(&[record]), [format!("fail {finding} switch:0000:05:00.0")], "{record}");
        }
    }

    #[test]
    fn corrected_errors_are_counted_and_a_flood_is_one_finding() {
        assert_eq!(check(&["11012, Non-fatal, Link 46 single bit ECC"; 50]), ["pass within-limits"]);
        let flood = check(&["11013, Fatal, Link 46 ingress header DBE"; 300]);
        assert_eq!(flood, ["fail sxid-11013 reboot switch:0000:05:00.0"]);
    }

    #[test]
    fn not_applicable_without_a_switch_unless_the_log_has_records() {
        assert_eq!(with(logged(&[]), links(&[])), ["not-applicable no-nvswitch"]);
        assert_eq!(with(logged(&[]), links(&["module", "bind"])), ["not-applicable no-nvswitch"]);
        let line = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 11013, Fatal, Link 46 ingress header DBE";
        assert_eq!(with(logged(&[line]), links(&[])), ["fail sxid-11013 reboot switch:0000:05:00.0"]);
        let unread = || ProbeOutput::Failed(ProbeFailure::new(FailureKind::Denied, "/sys"));
        assert_eq!(with(logged(&[]), unread()), ["pass within-limits"]);
        let mut denied = logged(&[]);
        denied[0] = unread();
        assert_eq!(with(denied.clone(), links(&[])), ["not-applicable no-nvswitch"]);
        assert_eq!(with(denied, links(&["0000:05:00.0"])), ["inconclusive denied"]);
    }

    #[test]
    fn an_old_sxid_does_not_fail() {
        let line = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 11013, Fatal, Link 46 ingress header DBE";
        assert_eq!(with(at_seconds(&[(1, line)]), links(&["0000:05:00.0"])), ["pass within-limits"]);
    }

    proptest! {
        #[test]
        fn every_event_has_a_rule(number in 10_000_u32..25_000, word in "(Fatal|Non-fatal|)") {
            let line = format!("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): {number}, {word}, Link 1");
            let mut outputs = logged(&[&line]);
            outputs.push(links(&["0000:05:00.0"]));
            let Observation::Measured { events, .. } = interpret(&Params::new(), &outputs) else { panic!("measured") };
            for event in events {
                prop_assert!(CHECK.rules.contains(&format!("event = \"{}\"", event.code)), "{}", event.code);
            }
        }
    }
}
