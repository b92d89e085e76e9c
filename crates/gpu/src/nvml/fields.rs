//! Maps the name of a field to the NVML call that reads it. The names are those of [`doctor_checks::gpu`].
//!
//! The result of a call that serves several fields is cached per GPU.

use std::os::raw::{c_uint, c_ulonglong};

use doctor_checks::gpu::FieldValue;
use nvml_wrapper_sys::bindings::{
    field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, field_id::NVML_FI_DEV_MEMORY_TEMP, nvmlEccSramErrorStatus_v1_t,
    nvmlFieldValue_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t, nvmlMarginTemperature_v1_t, nvmlMemory_v2_t,
    nvmlPciInfo_t, nvmlProcessInfo_t, nvmlProcessUtilizationSample_t, nvmlUtilization_t, nvmlViolationTime_t,
};

use super::{Device, GpuHandle, ask, code, gpu_process::GpuProcess, text};

pub(super) type NvmlResult<T> = Result<T, FieldValue>;

/// Returns a zeroed C struct, as the library expects it.
pub(super) fn zeroed<T: Plain>() -> T {
    // SAFETY: `Plain` is implemented only for structs of numbers and arrays of numbers.
    unsafe { std::mem::zeroed() }
}

/// A C struct that may be zeroed.
///
/// # Safety
/// All zeroes must be a value of the type.
pub(super) unsafe trait Plain {}

macro_rules! plain {
    ($($type:ty),*) => { $(
        // SAFETY: a struct of numbers in NVIDIA's header.
        unsafe impl Plain for $type {}
    )* };
}
plain!(
    nvmlEccSramErrorStatus_v1_t,
    nvmlFieldValue_t,
    nvmlGpuFabricInfo_v3_t,
    nvmlMarginTemperature_v1_t,
    nvmlMemory_v2_t,
    nvmlPciInfo_t,
    nvmlProcessInfo_t,
    nvmlProcessUtilizationSample_t,
    nvmlUtilization_t,
    nvmlViolationTime_t
);

/// Returns the first word of a versioned struct: its size and version.
const fn version<T>(number: usize) -> c_uint {
    (size_of::<T>() | number << 24) as c_uint
}

pub(super) fn read_value<T: Default>(fill: impl FnOnce(*mut T) -> NvmlResult<()>) -> NvmlResult<T> {
    let mut value = T::default();
    fill(&mut value).map(|()| value)
}

pub(super) fn uint_value(value: NvmlResult<c_uint>) -> FieldValue {
    value.map_or_else(|reading| reading, |value| FieldValue::Number(f64::from(value)))
}

pub(super) fn ulong_value(value: NvmlResult<c_ulonglong>) -> FieldValue {
    value.map_or_else(|reading| reading, |value| FieldValue::Number(value as f64))
}

fn milli_value(value: NvmlResult<c_uint>) -> FieldValue {
    value.map_or_else(|reading| reading, |value| FieldValue::Number(f64::from(value) / 1000.0))
}

/// Results that several fields share.
#[derive(Default)]
pub(super) struct QueryCache {
    remapped: Option<NvmlResult<[c_uint; 4]>>,
    memory: Option<NvmlResult<nvmlMemory_v2_t>>,
    fabric: Option<NvmlResult<nvmlGpuFabricInfo_v3_t>>,
    pub(super) processes: Option<NvmlResult<Vec<nvmlProcessInfo_t>>>,
    pub(super) activity: Option<NvmlResult<Vec<GpuProcess>>>,
    pub(super) links: Option<Vec<c_uint>>,
}

impl Device<'_> {
    /// Reads these fields, with `*` expanded, each with its position among all requested ones.
    pub(super) fn read(
        self,
        index: c_uint,
        cards: &[GpuHandle<'_>],
        fields: &[(usize, &String)],
        all: &mut Vec<(usize, String, FieldValue)>,
    ) {
        let mut cache = QueryCache::default();
        for &(position, field) in fields {
            match field.split_once(".*.") {
                None => all.push((position, field.clone(), self.field(field, &mut cache))),
                Some((family, what)) => match self.read_indexed(family, what, index, cards, &mut cache) {
                    Ok(each) => {
                        let named = |(number, reading)| (position, format!("{family}.{number}.{what}"), reading);
                        all.extend(each.into_iter().map(named));
                    }
                    // No instance of the field could be read.
                    Err(reading) => all.push((position, field.clone(), reading)),
                },
            }
        }
    }

    fn field(self, name: &str, cache: &mut QueryCache) -> FieldValue {
        let Device { nvml, handle } = self;
        match name {
            "name" => text(|to, length| ask!(nvml, nvmlDeviceGetName(handle, to, length))),
            "uuid" => text(|to, length| ask!(nvml, nvmlDeviceGetUUID(handle, to, length))),
            "serial" => text(|to, length| ask!(nvml, nvmlDeviceGetSerial(handle, to, length))),
            "board_part" => text(|to, length| ask!(nvml, nvmlDeviceGetBoardPartNumber(handle, to, length))),
            "vbios_version" => text(|to, length| ask!(nvml, nvmlDeviceGetVbiosVersion(handle, to, length))),
            "inforom.image" => text(|to, length| ask!(nvml, nvmlDeviceGetInforomImageVersion(handle, to, length))),
            "inforom.valid" => match ask!(nvml, nvmlDeviceValidateInforom(handle)) {
                Ok(()) => FieldValue::Number(1.0),
                Err(FieldValue::Failed { code: 14, .. }) => FieldValue::Number(0.0),
                Err(reading) => reading,
            },
            "minor_number" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetMinorNumber(handle, to)))),
            "architecture" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetArchitecture(handle, to)))),
            "compute_cap" => self.compute_capability(),
            "persistence_mode" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetPersistenceMode(handle, to)))),
            "compute_mode" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetComputeMode(handle, to)))),
            "recovery_action" => self.field_value(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
            "mig.mode.current" => uint_value(self.mig().map(|(current, _)| current)),
            "mig.mode.pending" => uint_value(self.mig().map(|(_, pending)| pending)),
            "ecc.mode.current" => uint_value(self.ecc_mode().map(|(current, _)| current)),
            "ecc.mode.pending" => uint_value(self.ecc_mode().map(|(_, pending)| pending)),
            "ecc.sram.threshold_exceeded" => self.sram_threshold(),
            "retired_pages.single_bit_ecc.count" => self.retired(0),
            "retired_pages.double_bit.count" => self.retired(1),
            "retired_pages.pending" => {
                uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetRetiredPagesPendingStatus(handle, to))))
            }
            "pstate" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetPerformanceState(handle, to)))),
            "violation.power" => self.violation(0),
            "violation.thermal" => self.violation(1),
            "utilization.gpu" => self.utilization(),
            "pcie.replay" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetPcieReplayCounter(handle, to)))),
            "clocks_event_reasons.active" => self.clock_reasons(),
            _ => self.grouped_field(name, cache),
        }
    }

    fn grouped_field(self, name: &str, cache: &mut QueryCache) -> FieldValue {
        let Some((family, rest)) = name.split_once('.') else { return FieldValue::NotSupported };
        match family {
            "ecc" => self.ecc_errors(rest),
            "remapped_rows" => self.remapped(rest, cache),
            "clocks" => self.clocks(rest),
            "temperature" => self.temperature(rest),
            "power" => self.power(rest),
            "memory" => self.memory(rest, cache),
            "pcie" => self.pcie_link(rest),
            "fabric" => self.fabric(rest, cache),
            _ => FieldValue::NotSupported,
        }
    }

    fn compute_capability(self) -> FieldValue {
        let (mut major, mut minor) = (0, 0);
        match ask!(self.nvml, nvmlDeviceGetCudaComputeCapability(self.handle, &mut major, &mut minor)) {
            Ok(()) => FieldValue::Text(format!("{major}.{minor}")),
            Err(reading) => reading,
        }
    }

    fn mig(self) -> NvmlResult<(c_uint, c_uint)> {
        let (mut current, mut pending) = (0, 0);
        ask!(self.nvml, nvmlDeviceGetMigMode(self.handle, &mut current, &mut pending)).map(|()| (current, pending))
    }

    fn ecc_mode(self) -> NvmlResult<(c_uint, c_uint)> {
        let (mut current, mut pending) = (0, 0);
        ask!(self.nvml, nvmlDeviceGetEccMode(self.handle, &mut current, &mut pending)).map(|()| (current, pending))
    }

    /// Reads an ECC counter by the rest of its name: `errors.uncorrected.volatile.sram`.
    fn ecc_errors(self, rest: &str) -> FieldValue {
        let parts: Vec<&str> = rest.split('.').collect();
        let ["errors", kind, since, location] = parts[..] else { return FieldValue::NotSupported };
        let kind = match kind {
            "corrected" => 0,
            "uncorrected" => 1,
            _ => return FieldValue::NotSupported,
        };
        let since = match since {
            "volatile" => 0,
            "aggregate" => 1,
            _ => return FieldValue::NotSupported,
        };
        let (nvml, handle) = (self.nvml, self.handle);
        // Memory locations by NVML's numbers. GPUs before Ampere report SRAM only by cache.
        match location {
            "total" => ulong_value(read_value(|to| ask!(nvml, nvmlDeviceGetTotalEccErrors(handle, kind, since, to)))),
            "dram" => {
                ulong_value(read_value(|to| ask!(nvml, nvmlDeviceGetMemoryErrorCounter(handle, kind, since, 2, to))))
            }
            "sram" => {
                ulong_value(read_value(|to| ask!(nvml, nvmlDeviceGetMemoryErrorCounter(handle, kind, since, 7, to))))
            }
            _ => FieldValue::NotSupported,
        }
    }

    fn sram_threshold(self) -> FieldValue {
        let mut status: nvmlEccSramErrorStatus_v1_t = zeroed();
        status.version = version::<nvmlEccSramErrorStatus_v1_t>(1);
        let result = ask!(self.nvml, nvmlDeviceGetSramEccErrorStatus(self.handle, &mut status));
        uint_value(result.map(|()| status.bThresholdExceeded))
    }

    fn remapped(self, what: &str, cache: &mut QueryCache) -> FieldValue {
        let rows = cache.remapped.get_or_insert_with(|| {
            let mut rows = [0; 4];
            let [correctable, uncorrectable, pending, failure] = &mut rows;
            ask!(self.nvml, nvmlDeviceGetRemappedRows(self.handle, correctable, uncorrectable, pending, failure))
                .map(|()| rows)
        });
        let index = match what {
            "correctable" => 0,
            "uncorrectable" => 1,
            "pending" => 2,
            "failure" => 3,
            _ => return FieldValue::NotSupported,
        };
        uint_value(rows.clone().map(|rows| rows[index]))
    }

    fn retired(self, cause: c_uint) -> FieldValue {
        let mut count = 0;
        // Without a buffer, the call returns the count.
        let result = ask!(self.nvml, nvmlDeviceGetRetiredPages(self.handle, cause, &mut count, std::ptr::null_mut()));
        match result {
            Err(FieldValue::Failed { code: code::INSUFFICIENT_SIZE, .. }) | Ok(()) => {
                FieldValue::Number(f64::from(count))
            }
            Err(reading) => reading,
        }
    }

    fn clocks(self, what: &str) -> FieldValue {
        let Device { nvml, handle } = self;
        // Clock types by NVML's numbers: graphics 0, SM 1, memory 2.
        match what {
            "sm" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetClockInfo(handle, 1, to)))),
            "mem" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetClockInfo(handle, 2, to)))),
            "max.sm" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetMaxClockInfo(handle, 1, to)))),
            "max.mem" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetMaxClockInfo(handle, 2, to)))),
            "applications.graphics" => {
                uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetApplicationsClock(handle, 0, to))))
            }
            "applications.memory" => {
                uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetApplicationsClock(handle, 2, to))))
            }
            "default_applications.graphics" => {
                uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetDefaultApplicationsClock(handle, 0, to))))
            }
            "default_applications.memory" => {
                uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetDefaultApplicationsClock(handle, 2, to))))
            }
            _ => FieldValue::NotSupported,
        }
    }

    /// Reads the clock event reasons. The call was renamed with driver 535.
    fn clock_reasons(self) -> FieldValue {
        let Device { nvml, handle } = self;
        match ulong_value(read_value(|to| ask!(nvml, nvmlDeviceGetCurrentClocksEventReasons(handle, to)))) {
            FieldValue::NotSupported => {
                ulong_value(read_value(|to| ask!(nvml, nvmlDeviceGetCurrentClocksThrottleReasons(handle, to))))
            }
            reading => reading,
        }
    }

    fn violation(self, policy: c_uint) -> FieldValue {
        let mut time: nvmlViolationTime_t = zeroed();
        let result = ask!(self.nvml, nvmlDeviceGetViolationStatus(self.handle, policy, &mut time));
        ulong_value(result.map(|()| time.violationTime))
    }

    fn utilization(self) -> FieldValue {
        let mut rates: nvmlUtilization_t = zeroed();
        uint_value(ask!(self.nvml, nvmlDeviceGetUtilizationRates(self.handle, &mut rates)).map(|()| rates.gpu))
    }

    fn temperature(self, what: &str) -> FieldValue {
        let Device { nvml, handle } = self;
        // Thresholds by NVML's numbers: shutdown 0, slowdown 1.
        match what {
            "gpu" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetTemperature(handle, 0, to)))),
            "memory" => self.field_value(NVML_FI_DEV_MEMORY_TEMP),
            "shutdown" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetTemperatureThreshold(handle, 0, to)))),
            "slowdown" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetTemperatureThreshold(handle, 1, to)))),
            "gpu.tlimit" => {
                let mut margin: nvmlMarginTemperature_v1_t = zeroed();
                margin.version = version::<nvmlMarginTemperature_v1_t>(1);
                match ask!(nvml, nvmlDeviceGetMarginTemperature(handle, &mut margin)) {
                    Ok(()) => FieldValue::Number(f64::from(margin.marginTemperature)),
                    Err(reading) => reading,
                }
            }
            _ => FieldValue::NotSupported,
        }
    }

    fn power(self, what: &str) -> FieldValue {
        let Device { nvml, handle } = self;
        match what {
            "draw" => milli_value(read_value(|to| ask!(nvml, nvmlDeviceGetPowerUsage(handle, to)))),
            "limit" => milli_value(read_value(|to| ask!(nvml, nvmlDeviceGetPowerManagementLimit(handle, to)))),
            "default_limit" => {
                milli_value(read_value(|to| ask!(nvml, nvmlDeviceGetPowerManagementDefaultLimit(handle, to))))
            }
            "max_limit" => {
                let (mut min, mut max) = (0, 0);
                let result = ask!(nvml, nvmlDeviceGetPowerManagementLimitConstraints(handle, &mut min, &mut max));
                milli_value(result.map(|()| max))
            }
            _ => FieldValue::NotSupported,
        }
    }

    fn memory(self, what: &str, cache: &mut QueryCache) -> FieldValue {
        let memory = cache.memory.get_or_insert_with(|| {
            let mut memory: nvmlMemory_v2_t = zeroed();
            memory.version = version::<nvmlMemory_v2_t>(2);
            ask!(self.nvml, nvmlDeviceGetMemoryInfo_v2(self.handle, &mut memory)).map(|()| memory)
        });
        let pick: fn(nvmlMemory_v2_t) -> c_ulonglong = match what {
            "total" => |memory| memory.total,
            "used" => |memory| memory.used,
            "reserved" => |memory| memory.reserved,
            _ => return FieldValue::NotSupported,
        };
        ulong_value(memory.clone().map(pick))
    }

    fn pcie_link(self, what: &str) -> FieldValue {
        let Device { nvml, handle } = self;
        match what {
            "link.gen.current" => {
                uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetCurrPcieLinkGeneration(handle, to))))
            }
            "link.gen.max" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetMaxPcieLinkGeneration(handle, to)))),
            "link.width.current" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetCurrPcieLinkWidth(handle, to)))),
            "link.width.max" => uint_value(read_value(|to| ask!(nvml, nvmlDeviceGetMaxPcieLinkWidth(handle, to)))),
            _ => FieldValue::NotSupported,
        }
    }

    fn fabric(self, what: &str, cache: &mut QueryCache) -> FieldValue {
        let fabric = cache.fabric.get_or_insert_with(|| self.fabric_info());
        let info = match fabric {
            Ok(info) => *info,
            Err(reading) => return reading.clone(),
        };
        match what {
            "state" => FieldValue::Number(f64::from(info.state)),
            "status" => FieldValue::Number(f64::from(info.status)),
            "health_mask" => FieldValue::Number(f64::from(info.healthMask)),
            "clique" => FieldValue::Number(f64::from(info.cliqueId)),
            "cluster_uuid" => FieldValue::Text(doctor_core::hex::encode(&info.clusterUuid)),
            _ => FieldValue::NotSupported,
        }
    }

    /// Reads the newest struct version that this driver knows. The older one is a prefix of the newer.
    fn fabric_info(self) -> NvmlResult<nvmlGpuFabricInfo_v3_t> {
        let mut result = Err(FieldValue::NotSupported);
        for form in [version::<nvmlGpuFabricInfo_v3_t>(3), version::<nvmlGpuFabricInfo_v2_t>(2)] {
            let mut info: nvmlGpuFabricInfo_v3_t = zeroed();
            info.version = form;
            result = ask!(self.nvml, nvmlDeviceGetGpuFabricInfoV(self.handle, &mut info)).map(|()| info);
            if !matches!(result, Err(FieldValue::NotSupported)) {
                break;
            }
        }
        result
    }

    fn field_value(self, id: c_uint) -> FieldValue {
        let mut value: nvmlFieldValue_t = zeroed();
        value.fieldId = id;
        if let Err(reading) = ask!(self.nvml, nvmlDeviceGetFieldValues(self.handle, 1, &mut value)) {
            return reading;
        }
        if let Err(reading) = super::check_code(value.nvmlReturn) {
            return reading;
        }
        // SAFETY: the library reports which member of the union it wrote.
        unsafe {
            match value.valueType {
                0 => FieldValue::Number(value.value.dVal),
                1 => FieldValue::Number(f64::from(value.value.uiVal)),
                2 => FieldValue::Number(value.value.ulVal as f64),
                3 => FieldValue::Number(value.value.ullVal as f64),
                4 => FieldValue::Number(value.value.sllVal as f64),
                5 => FieldValue::Number(f64::from(value.value.siVal)),
                6 => FieldValue::Number(f64::from(value.value.usVal)),
                _ => FieldValue::NotSupported,
            }
        }
    }
}
