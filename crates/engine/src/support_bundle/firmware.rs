//! Firmware versions of the machine: from the report that was taken on it, or from the newest check results.

use doctor_checks::{
    document::Document,
    gpu::Gpu,
    probe::{FileText, ProbeOutput},
};
use serde_json::{Map, Value, json};

/// Checks whose evidence contains versions.
const CHECKS: [&str; 2] = ["gpu-versions", "ib-firmware"];
/// Files of an RDMA adapter, and the field that each provides.
const ADAPTER: [(&str, &str); 2] = [("/fw_ver", "firmware"), ("/board_id", "board")];

/// Collects versions from documents, which must be sorted newest first. The format is that of `doctor-node report`.
pub(super) fn read<'a>(documents: impl Iterator<Item = &'a Document>) -> Value {
    let mut versions = json!({});
    let mut missing: Vec<&str> = CHECKS.to_vec();
    for document in documents {
        for evidence in &document.tests {
            let Some(index) = missing.iter().position(|check| *check == evidence.test.as_str()) else { continue };
            missing.remove(index);
            evidence.probes.iter().for_each(|(_, output)| add(&mut versions, output));
            versions["read"][evidence.test.as_str()] = json!({ "run": document.run, "at": evidence.ended });
        }
        if missing.is_empty() {
            break;
        }
    }
    versions
}

fn add(versions: &mut Value, output: &ProbeOutput) {
    match output {
        ProbeOutput::Gpus(result) => {
            if let Ok(driver) = &result.driver {
                versions["driver"] = json!({ "version": driver.version, "cuda": driver.cuda });
            }
            versions["gpus"] = result.gpus.iter().map(gpu).collect();
        }
        ProbeOutput::Files(files) => {
            for FileText { path, text } in files {
                let field = ADAPTER.iter().find(|(ending, _)| path.ends_with(ending));
                let (Some((_, field)), Some(name), Ok(text)) = (field, path.rsplit('/').nth(1), text) else { continue };
                versions["adapters"][name][field] = text.trim().into();
            }
        }
        _ => {}
    }
}

fn gpu(gpu: &Gpu) -> Value {
    let fields = gpu.fields.iter().filter_map(|(name, _)| Some((name.clone(), Value::from(gpu.text(name)?))));
    fields.chain([("bus".to_owned(), gpu.bus.as_str().into())]).collect::<Map<_, _>>().into()
}

/// Formats the versions for people, one line each.
pub(super) fn lines(versions: &Value) -> Vec<String> {
    let text_of = |value: &Value| value.as_str().unwrap_or("not known").to_owned();
    let mut lines = Vec::new();
    if versions["driver"]["version"].is_string() {
        lines.push(format!(
            "- driver {}, CUDA {}",
            text_of(&versions["driver"]["version"]),
            text_of(&versions["driver"]["cuda"])
        ));
    }
    for gpu in versions["gpus"].as_array().into_iter().flatten() {
        let [bus, name, vbios, inforom] =
            ["bus", "name", "vbios_version", "inforom.image"].map(|field| text_of(&gpu[field]));
        let serial = gpu["serial"].as_str().map_or_else(String::new, |serial| format!(", serial {serial}"));
        lines.push(format!("- GPU {bus}, {name}{serial}: VBIOS {vbios}, InfoROM {inforom}"));
    }
    for (name, adapter) in versions["adapters"].as_object().into_iter().flatten() {
        lines.push(format!(
            "- {name}: firmware {}, board {}",
            text_of(&adapter["firmware"]),
            text_of(&adapter["board"])
        ));
    }
    if let Some(bios) = versions["system"]["bios"].as_str() {
        lines.push(format!("- BIOS {bios} of {}", text_of(&versions["system"]["bios_date"])));
    }
    lines
}

#[cfg(test)]
mod tests {
    use doctor_checks::{
        document::TestEvidence,
        gpu::{Driver, FieldValue, GpuQueryResult},
        probe::Probe,
    };
    use doctor_core::{
        ids::{NodeName, RunId, TestId},
        node::Hardware,
        time::{Span, Timestamp},
    };

    use super::*;

    fn document(run: u64, test: &str, output: ProbeOutput) -> Document {
        let at = Timestamp::from_secs(1);
        let probes = vec![(Probe::Kmsg, output)];
        let evidence = TestEvidence { test: TestId::new(test).unwrap(), started: at, ended: at, probes };
        Document {
            run: RunId::from_number(run),
            node: NodeName::new("a").unwrap(),
            hardware: Hardware::default(),
            started: at,
            ended: at,
            tests: vec![evidence],
            uptime: Some(Span::minutes(1)),
            machine: None,
        }
    }

    #[test]
    fn versions_come_from_the_newest_evidence_of_each_check() {
        let gpus = |vbios: &str| {
            let fields = vec![
                ("name".to_owned(), FieldValue::Text("NVIDIA H200".to_owned())),
                ("vbios_version".to_owned(), FieldValue::Text(vbios.to_owned())),
                ("inforom.image".to_owned(), FieldValue::NotSupported),
            ];
            let driver = Driver { version: "570.124.06".to_owned(), cuda: None, source: "nvml".to_owned() };
            let gpus = vec![Gpu { index: 0, bus: "0000:18:00.0".to_owned(), fields }];
            ProbeOutput::Gpus(GpuQueryResult { on_pci: Vec::new(), driver: Ok(driver), gpus })
        };
        let path = "/sys/class/infiniband/mlx5_0/fw_ver".to_owned();
        let files = ProbeOutput::Files(vec![FileText { path, text: Ok("28.39.1002\n".to_owned()) }]);
        let documents = [
            document(3, "gpu-versions", gpus("96.00.A5.00.1A")),
            document(2, "gpu-versions", gpus("an older one")),
            document(1, "ib-firmware", files),
        ];
        let versions = read(documents.iter());
        assert_eq!(
            lines(&versions),
            [
                "- driver 570.124.06, CUDA not known",
                "- GPU 0000:18:00.0, NVIDIA H200: VBIOS 96.00.A5.00.1A, InfoROM not known",
                "- mlx5_0: firmware 28.39.1002, board not known",
            ]
        );
        assert_eq!(versions["read"]["ib-firmware"]["run"], RunId::from_number(1).to_string());
        assert!(lines(&read([].iter())).is_empty());
    }
}
