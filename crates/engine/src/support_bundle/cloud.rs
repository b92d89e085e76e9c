//! The fields that clouds require when a machine is reported as faulty, as far as they are known.
//!
//! Azure's Guest Health Reporting takes an impact category and the physical host; AWS and Google take an instance and a
//! description. The mapping of findings to categories follows the list of azurehpc-health-checks, as of 2026-11.

use doctor_core::{case::Case, finding::Finding};
use serde_json::{Value, json};

use super::HardwareRecord;

/// Reasons and checks with a category of their own; the first match wins. A trailing `*` matches any suffix.
const CATEGORIES: [(&str, &str); 26] = [
    ("xid-79", "XID79FallenOffBus"),
    ("xid-48", "XID48DoubleBitECC"),
    ("xid-94*", "XID94ContainedECCError"),
    ("xid-95*", "XID95UncontainedECCError"),
    ("xid-74*", "NvLink"),
    ("xid-*", "UnhealthyGPUNvidiasmi"),
    ("gpu-presence", "HpcMissingGpu"),
    ("gpu-count", "HpcMissingGpu"),
    ("gpu-row-remap", "HpcRowRemapFailure"),
    ("gpu-inforom", "HpcInforomCorruption"),
    ("gpu-retired-pages", "ECCPageRetirementTableFull"),
    ("gpu-ecc-*", "DBEOverLimit"),
    ("gpu-temperature", "HpcDcgmiThermalReport"),
    ("gpu-memory-temperature", "HpcDcgmiThermalReport"),
    ("gpu-throttle", "HpcDcgmiThermalReport"),
    ("gpu-*", "UnhealthyGPUNvidiasmi"),
    ("nvlink-*", "NvLink"),
    ("nvswitch-*", "NvLink"),
    ("dcgm*", "HpcGpuDcgmDiagFailure"),
    ("ib-count", "MissingIB"),
    ("ib-ports", "IBPortDown"),
    ("ib-flaps", "IBPortFlapping"),
    ("ib-*", "IBPerformance"),
    ("fabric*", "IBPerformance"),
    ("cpu-*", "CPUPerformance"),
    ("collective*", "IBPerformance"),
];

/// Builds the fields. `cloud_instance` is the cloud instance as reported by the machine.
pub(super) fn provider_fields(case: &Case, machine: Option<&HardwareRecord>, cloud_instance: Option<&Value>) -> Value {
    let worst = case.findings.iter().max_by_key(|finding| finding.severity);
    let described = machine.map(|machine| &machine.hardware);
    let physical_host = described.and_then(|hardware| hardware.physical_host.clone());
    let description = worst.map_or_else(|| "taken out by an operator".to_owned(), |finding| finding.text.clone());
    let instance = |cloud: &str| {
        cloud_instance.filter(|cloud_instance| cloud_instance["name"] == cloud).cloned().unwrap_or_default()
    };
    json!({
        "azure": {
            "instance": instance("azure"),
            "startDateTime": case.opened,
            "impactCategory": worst.map_or("Resource.Hpc.Unhealthy.ManualInvestigation".to_owned(), category),
            "impactDescription": description,
            "additionalProperties": {
                "PhysicalHostName": physical_host,
                "SerialNumber": described.and_then(|hardware| hardware.board_serial.clone()),
                "Manufacturer": worst.filter(|finding| is_gpu(finding)).map(|_| "Nvidia"),
            },
        },
        "aws": {
            "node": case.node,
            "instance": instance("aws"),
            "physical_host": physical_host,
            "reason": description,
            "start": case.opened,
        },
        "gcp": {
            "node": case.node,
            "instance": instance("gcp"),
            "physical_host": physical_host,
            "reason": description,
            "start": case.opened,
        },
        "gpu_uuids": described.map(|hardware| hardware.gpu_uuids.clone()).unwrap_or_default(),
    })
}

fn is_gpu(finding: &Finding) -> bool {
    finding.check.as_str().starts_with("gpu") || finding.reason.as_str().starts_with("xid-")
}

fn category(finding: &Finding) -> String {
    let is_match = |pattern: &str, word: &str| match pattern.strip_suffix('*') {
        Some(prefix) => word.starts_with(prefix),
        None => word == pattern,
    };
    let names = [finding.reason.as_str(), finding.check.as_str()];
    let known = CATEGORIES.iter().find(|(pattern, _)| names.iter().any(|name| is_match(pattern, name)));
    format!("Resource.Hpc.Unhealthy.{}", known.map_or("HpcGenericFailure", |(_, category)| category))
}

#[cfg(test)]
mod tests {
    use doctor_core::{
        finding::{Evidence, Remedy, Severity, Verdict},
        ids::{CheckId, RuleId},
        observation::Entity,
        reason::ReasonCode,
    };

    use super::*;

    #[test]
    fn findings_map_to_azure_impact_categories() {
        for (check, reason, expected) in [
            ("gpu-xid", "xid-79", "XID79FallenOffBus"),
            ("gpu-xid", "xid-95-reboot", "XID95UncontainedECCError"),
            ("gpu-xid", "xid-62", "UnhealthyGPUNvidiasmi"),
            ("gpu-presence", "gpu-missing", "HpcMissingGpu"),
            ("gpu-ecc-sram", "sram-threshold", "DBEOverLimit"),
            ("ib-flaps", "link-flaps", "IBPortFlapping"),
            ("storage", "slow", "HpcGenericFailure"),
        ] {
            let finding = Finding {
                check: CheckId::new(check).unwrap(),
                entity: Entity::node(),
                verdict: Verdict::Fail,
                severity: Severity::Isolate,
                remedy: Remedy::HandOver,
                reason: ReasonCode::new(reason).unwrap(),
                text: String::new(),
                rule: RuleId::new("a-rule").unwrap(),
                evidence: Evidence::Nothing,
                confirm: 1,
            };
            assert_eq!(category(&finding), format!("Resource.Hpc.Unhealthy.{expected}"), "{check} {reason}");
        }
    }
}
