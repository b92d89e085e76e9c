//! The kernel log contains what any driver, and any user with physical access, makes the kernel write.
//!
//! Each check that reads the log reads the text as a whole log, and once more with every line as the message of an Xid,
//! an SXid and a network card. There are never more events than lines, and every event has a rule.

#![no_main]

use std::sync::LazyLock;

use doctor_checks::{Catalogue, Check, Params, probe::ProbeOutput};
use doctor_core::{
    ids::CheckId,
    observation::Observation,
    policy::{Policy, Rule, When},
};
use libfuzzer_sys::fuzz_target;

static CATALOGUE: LazyLock<Catalogue> = LazyLock::new(Catalogue::built_in);
static RULES: LazyLock<Vec<Rule>> =
    LazyLock::new(|| CATALOGUE.rules(&Policy::built_in()).expect("the checks' own rules are tested"));

fn read(check: &Check, log: &str) {
    let known = [log, "1000000.00 9.00\n", "0e2b6d54-7f3a-4a56-9d43-0f4f4d5d1c11\n"];
    let mut outputs: Vec<ProbeOutput> = known.iter().map(|text| ProbeOutput::Text((*text).to_owned())).collect();
    outputs.resize((check.probes)(&Params::new()).len(), ProbeOutput::Text(String::new()));
    let Observation::Measured { metrics, events, .. } = (check.interpret)(&Params::new(), &outputs) else { return };
    assert!(!metrics.is_empty());
    assert!(events.len() <= log.lines().count());
    for event in events {
        assert!(event.key.is_some(), "an event of the log is known by its record");
        let judged = RULES.iter().any(|rule| {
            rule.check.as_str() == check.spec.id && matches!(&rule.when, When::Event(code) if *code == event.code)
        });
        assert!(judged, "{} of {} has no rule", event.code, check.spec.id);
    }
}

fuzz_target!(|text: &str| {
    let written = |start: &str| -> String {
        let lines = text.lines().take(100).enumerate();
        lines.map(|(n, line)| format!("4,{n},{},-;{start}{line}\n", 999_000_000_000 + n * 20_000_000)).collect()
    };
    for (id, start) in [
        ("kernel-log", ""),
        ("gpu-xid", "NVRM: Xid (PCI:0000:18:00): "),
        ("nvswitch-sxid", "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): "),
        ("nic-log", "mlx5_core 0000:3b:00.0: "),
    ] {
        let id = CheckId::new(id).expect("a fixed name");
        let check = CATALOGUE.get(&id).expect("a check of this program");
        read(check, text);
        read(check, &written(start));
    }
});
