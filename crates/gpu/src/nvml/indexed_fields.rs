//! Fields with several instances: links, processes, and the paths to the other GPUs.

use std::{
    collections::BTreeMap,
    os::raw::{c_uint, c_ulonglong},
};

use doctor_checks::gpu::{FieldValue, normalize_bus_id};
use nvml_wrapper_sys::bindings::{nvmlPciInfo_t, nvmlProcessInfo_t};

use super::{
    Device, GpuHandle, ask, code,
    fields::{NvmlResult, Plain, QueryCache, read_value, uint_value, ulong_value, zeroed},
};

/// NVLinks per GPU in the largest design so far.
const MAX_LINKS: c_uint = 18;
/// The most processes per GPU. With more, the list is not available.
const MAX_PROCESSES: usize = 256;

/// Families of fields about the path between two GPUs.
const PEER_FAMILIES: [&str; 2] = ["topology", "p2p"];

/// Returns whether a field is about the path between two GPUs.
pub(super) fn is_peer_field(field: &str) -> bool {
    field.split_once(".*.").is_some_and(|(family, _)| PEER_FAMILIES.contains(&family))
}

/// Returns a list that NVML writes to a buffer. `fill` gets the buffer's length, which NVML replaces by the list's, and
/// the buffer.
pub(super) fn list<T: Plain + Clone>(fill: impl FnOnce(*mut c_uint, *mut T) -> NvmlResult<()>) -> NvmlResult<Vec<T>> {
    let mut all = vec![zeroed(); MAX_PROCESSES];
    let mut count = MAX_PROCESSES as c_uint;
    match fill(&mut count, all.as_mut_ptr()) {
        // There are more than fit, and NVML wrote none of them.
        Err(FieldValue::Failed { code: code::INSUFFICIENT_SIZE, .. }) => Err(FieldValue::NotSupported),
        other => other.map(|()| {
            all.truncate(count as usize);
            all
        }),
    }
}

impl Device<'_> {
    /// Reads all instances of a field.
    pub(super) fn read_indexed(
        self,
        family: &str,
        what: &str,
        index: c_uint,
        cards: &[GpuHandle<'_>],
        cache: &mut QueryCache,
    ) -> NvmlResult<BTreeMap<c_uint, FieldValue>> {
        match family {
            "nvlink" => {
                let links = cache.links.get_or_insert_with(|| self.links()).clone();
                if links.is_empty() {
                    return Err(FieldValue::NotSupported);
                }
                Ok(links.into_iter().map(|link| (link, self.link(link, what))).collect())
            }
            "process" => match cache.processes.get_or_insert_with(|| self.processes()) {
                Ok(processes) => {
                    let one = |process: &nvmlProcessInfo_t| match what {
                        "pid" => FieldValue::Number(f64::from(process.pid)),
                        // All ones: unknown to the driver.
                        "memory" if process.usedGpuMemory != c_ulonglong::MAX => {
                            FieldValue::Number(process.usedGpuMemory as f64)
                        }
                        _ => FieldValue::NotSupported,
                    };
                    Ok((0..).zip(processes.iter().map(one)).collect())
                }
                Err(reading) => Err(reading.clone()),
            },
            "activity" => match cache.activity.get_or_insert_with(|| self.activity()) {
                Ok(processes) => Ok((0..).zip(processes.iter().map(|process| process.field(what))).collect()),
                Err(reading) => Err(reading.clone()),
            },
            family if PEER_FAMILIES.contains(&family) => {
                let others = cards.iter().filter(|other| other.index != index);
                Ok(others.map(|other| (other.index, self.peer_field(other, family, what))).collect())
            }
            _ => Err(FieldValue::NotSupported),
        }
    }

    /// Returns the links that this GPU has, working or not.
    fn links(self) -> Vec<c_uint> {
        (0..MAX_LINKS)
            .filter(|link| {
                let mut state = 0;
                !matches!(
                    ask!(self.nvml, nvmlDeviceGetNvLinkState(self.handle, *link, &mut state)),
                    // NVML rejects a link that the chip does not have as an invalid argument or as not supported.
                    Err(FieldValue::NotSupported | FieldValue::Failed { code: 2, .. })
                )
            })
            .collect()
    }

    fn link(self, link: c_uint, what: &str) -> FieldValue {
        let Device { nvml, handle } = self;
        // Counters by NVML's numbers.
        let counter = match what {
            "state" => return uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetNvLinkState(handle, link, to)))),
            "remote_kind" => {
                return uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetNvLinkRemoteDeviceType(handle, link, to))));
            }
            "remote_bus" => {
                let mut pci: nvmlPciInfo_t = zeroed();
                return match ask!(nvml, nvmlDeviceGetNvLinkRemotePciInfo_v2(handle, link, &mut pci)) {
                    Ok(()) => {
                        let bus = format!("{:08x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device);
                        normalize_bus_id(&bus).map_or(FieldValue::NotSupported, FieldValue::Text)
                    }
                    Err(reading) => reading,
                };
            }
            "replay_errors" => 0,
            "recovery_errors" => 1,
            "crc_flit_errors" => 2,
            "crc_data_errors" => 3,
            _ => return FieldValue::NotSupported,
        };
        ulong_value(read_value(|to| ask!(nvml, nvmlDeviceGetNvLinkErrorCounter(handle, link, counter, to))))
    }

    /// Returns the processes with a compute context.
    pub(super) fn processes(self) -> NvmlResult<Vec<nvmlProcessInfo_t>> {
        list(|count, to| ask!(self.nvml, nvmlDeviceGetComputeRunningProcesses_v3(self.handle, count, to)))
    }

    fn peer_field(self, other: &GpuHandle<'_>, family: &str, what: &str) -> FieldValue {
        let nvml = self.nvml;
        let peer = match &other.device {
            Ok(device) => device.handle,
            Err(reading) => return reading.clone(),
        };
        match (family, what) {
            ("topology", "level") => {
                uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetTopologyCommonAncestor(self.handle, peer, to))))
            }
            // Capability index 2 is NVLink.
            ("p2p", "nvlink") => {
                uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetP2PStatus(self.handle, peer, 2, to))))
            }
            _ => FieldValue::NotSupported,
        }
    }
}
