//! Maps the name of a field to the NVML call that reads it. The names are those of [`doctor_checks::gpu`].
//!
//! The result of a call that serves several fields is cached per GPU.

use std::os::raw::{c_uint, c_ulonglong};

use doctor_checks::gpu::Reading;
use nvml_wrapper_sys::bindings::{
    field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, field_id::NVML_FI_DEV_MEMORY_TEMP, nvmlEccSramErrorStatus_v1_t,
    nvmlFieldValue_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t, nvmlMarginTemperature_v1_t, nvmlMemory_v2_t,
    nvmlPciInfo_t, nvmlProcessInfo_t, nvmlUtilization_t, nvmlViolationTime_t,
};

use super::{Card, Device, ask, code, text};

pub(super) type Answer<T> = Result<T, Reading>;

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
    nvmlUtilization_t,
    nvmlViolationTime_t
);

/// Returns the first word of a versioned struct: its size and version.
const fn version<T>(number: usize) -> c_uint {
    (size_of::<T>() | number << 24) as c_uint
}

pub(super) fn number<T: Default>(fill: impl FnOnce(*mut T) -> Answer<()>) -> Answer<T> {
    let mut value = T::default();
    fill(&mut value).map(|()| value)
}

pub(super) fn whole(value: Answer<c_uint>) -> Reading {
    value.map_or_else(|reading| reading, |value| Reading::Number(f64::from(value)))
}

pub(super) fn large(value: Answer<c_ulonglong>) -> Reading {
    value.map_or_else(|reading| reading, |value| Reading::Number(value as f64))
}

fn milli(value: Answer<c_uint>) -> Reading {
    value.map_or_else(|reading| reading, |value| Reading::Number(f64::from(value) / 1000.0))
}

/// Results that several fields share.
#[derive(Default)]
pub(super) struct Kept {
    remapped: Option<Answer<[c_uint; 4]>>,
    memory: Option<Answer<nvmlMemory_v2_t>>,
    fabric: Option<Answer<nvmlGpuFabricInfo_v3_t>>,
    pub(super) processes: Option<Answer<Vec<nvmlProcessInfo_t>>>,
    pub(super) links: Option<Vec<c_uint>>,
}

impl Device<'_> {
    /// Reads these fields, with `*` expanded, each with its position among all requested ones.
    pub(super) fn read(
        self,
        index: c_uint,
        cards: &[Card<'_>],
        fields: &[(usize, &String)],
        all: &mut Vec<(usize, String, Reading)>,
    ) {
        let mut kept = Kept::default();
        for &(place, field) in fields {
            match field.split_once(".*.") {
                None => all.push((place, field.clone(), self.field(field, &mut kept))),
                Some((family, what)) => match self.numbered(family, what, index, cards, &mut kept) {
                    Ok(each) => {
                        let named = |(number, reading)| (place, format!("{family}.{number}.{what}"), reading);
                        all.extend(each.into_iter().map(named));
                    }
                    // No instance of the field could be read.
                    Err(reading) => all.push((place, field.clone(), reading)),
                },
            }
        }
    }

    fn field(self, name: &str, kept: &mut Kept) -> Reading {
        let Device { nvml, handle } = self;
        match name {
            "name" => text(|to, length| ask!(nvml, nvmlDeviceGetName(handle, to, length))),
            "uuid" => text(|to, length| ask!(nvml, nvmlDeviceGetUUID(handle, to, length))),
            "serial" => text(|to, length| ask!(nvml, nvmlDeviceGetSerial(handle, to, length))),
            "board_part" => text(|to, length| ask!(nvml, nvmlDeviceGetBoardPartNumber(handle, to, length))),
            "vbios_version" => text(|to, length| ask!(nvml, nvmlDeviceGetVbiosVersion(handle, to, length))),
            "inforom.image" => text(|to, length| ask!(nvml, nvmlDeviceGetInforomImageVersion(handle, to, length))),
            "inforom.valid" => match ask!(nvml, nvmlDeviceValidateInforom(handle)) {
                Ok(()) => Reading::Number(1.0),
                Err(Reading::Failed { code: 14, .. }) => Reading::Number(0.0),
                Err(reading) => reading,
            },
            "minor_number" => whole(number(|to| ask!(nvml, nvmlDeviceGetMinorNumber(handle, to)))),
            "architecture" => whole(number(|to| ask!(nvml, nvmlDeviceGetArchitecture(handle, to)))),
            "compute_cap" => self.compute_capability(),
            "persistence_mode" => whole(number(|to| ask!(nvml, nvmlDeviceGetPersistenceMode(handle, to)))),
            "compute_mode" => whole(number(|to| ask!(nvml, nvmlDeviceGetComputeMode(handle, to)))),
            "recovery_action" => self.field_value(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
            "mig.mode.current" => whole(self.mig().map(|(current, _)| current)),
            "mig.mode.pending" => whole(self.mig().map(|(_, pending)| pending)),
            "ecc.mode.current" => whole(self.ecc_mode().map(|(current, _)| current)),
            "ecc.mode.pending" => whole(self.ecc_mode().map(|(_, pending)| pending)),
            "ecc.sram.threshold_exceeded" => self.sram_threshold(),
            "retired_pages.single_bit_ecc.count" => self.retired(0),
            "retired_pages.double_bit.count" => self.retired(1),
            "retired_pages.pending" => {
                whole(number(|to| ask!(nvml, nvmlDeviceGetRetiredPagesPendingStatus(handle, to))))
            }
            "pstate" => whole(number(|to| ask!(nvml, nvmlDeviceGetPerformanceState(handle, to)))),
            "violation.power" => self.violation(0),
            "violation.thermal" => self.violation(1),
            "utilization.gpu" => self.utilization(),
            "pcie.replay" => whole(number(|to| ask!(nvml, nvmlDeviceGetPcieReplayCounter(handle, to)))),
            "clocks_event_reasons.active" => self.clock_reasons(),
            _ => self.of_a_family(name, kept),
        }
    }

    fn of_a_family(self, name: &str, kept: &mut Kept) -> Reading {
        let Some((family, rest)) = name.split_once('.') else { return Reading::NotSupported };
        match family {
            "ecc" => self.ecc_errors(rest),
            "remapped_rows" => self.remapped(rest, kept),
            "clocks" => self.clocks(rest),
            "temperature" => self.temperature(rest),
            "power" => self.power(rest),
            "memory" => self.memory(rest, kept),
            "pcie" => self.pcie_link(rest),
            "fabric" => self.fabric(rest, kept),
            _ => Reading::NotSupported,
        }
    }

    fn compute_capability(self) -> Reading {
        let (mut major, mut minor) = (0, 0);
        match ask!(self.nvml, nvmlDeviceGetCudaComputeCapability(self.handle, &mut major, &mut minor)) {
            Ok(()) => Reading::Text(format!("{major}.{minor}")),
            Err(reading) => reading,
        }
    }

    fn mig(self) -> Answer<(c_uint, c_uint)> {
        let (mut current, mut pending) = (0, 0);
        ask!(self.nvml, nvmlDeviceGetMigMode(self.handle, &mut current, &mut pending)).map(|()| (current, pending))
    }

    fn ecc_mode(self) -> Answer<(c_uint, c_uint)> {
        let (mut current, mut pending) = (0, 0);
        ask!(self.nvml, nvmlDeviceGetEccMode(self.handle, &mut current, &mut pending)).map(|()| (current, pending))
    }

    /// Reads an ECC counter by the rest of its name: `errors.uncorrected.volatile.sram`.
    fn ecc_errors(self, rest: &str) -> Reading {
        let parts: Vec<&str> = rest.split('.').collect();
        let ["errors", kind, since, place] = parts[..] else { return Reading::NotSupported };
        let kind = match kind {
            "corrected" => 0,
            "uncorrected" => 1,
            _ => return Reading::NotSupported,
        };
        let since = match since {
            "volatile" => 0,
            "aggregate" => 1,
            _ => return Reading::NotSupported,
        };
        let (nvml, handle) = (self.nvml, self.handle);
        // Memory locations by NVML's numbers. GPUs before Ampere report SRAM only by cache.
        match place {
            "total" => large(number(|to| ask!(nvml, nvmlDeviceGetTotalEccErrors(handle, kind, since, to)))),
            "dram" => large(number(|to| ask!(nvml, nvmlDeviceGetMemoryErrorCounter(handle, kind, since, 2, to)))),
            "sram" => large(number(|to| ask!(nvml, nvmlDeviceGetMemoryErrorCounter(handle, kind, since, 7, to)))),
            _ => Reading::NotSupported,
        }
    }

    fn sram_threshold(self) -> Reading {
        let mut status: nvmlEccSramErrorStatus_v1_t = zeroed();
        status.version = version::<nvmlEccSramErrorStatus_v1_t>(1);
        let answer = ask!(self.nvml, nvmlDeviceGetSramEccErrorStatus(self.handle, &mut status));
        whole(answer.map(|()| status.bThresholdExceeded))
    }

    fn remapped(self, what: &str, kept: &mut Kept) -> Reading {
        let rows = kept.remapped.get_or_insert_with(|| {
            let mut rows = [0; 4];
            let [correctable, uncorrectable, pending, failure] = &mut rows;
            ask!(self.nvml, nvmlDeviceGetRemappedRows(self.handle, correctable, uncorrectable, pending, failure))
                .map(|()| rows)
        });
        let place = match what {
            "correctable" => 0,
            "uncorrectable" => 1,
            "pending" => 2,
            "failure" => 3,
            _ => return Reading::NotSupported,
        };
        whole(rows.clone().map(|rows| rows[place]))
    }

    fn retired(self, cause: c_uint) -> Reading {
        let mut count = 0;
        // Without a buffer, the call returns the count.
        let answer = ask!(self.nvml, nvmlDeviceGetRetiredPages(self.handle, cause, &mut count, std::ptr::null_mut()));
        match answer {
            Err(Reading::Failed { code: code::INSUFFICIENT_SIZE, .. }) | Ok(()) => Reading::Number(f64::from(count)),
            Err(reading) => reading,
        }
    }

    fn clocks(self, what: &str) -> Reading {
        let Device { nvml, handle } = self;
        // Clock types by NVML's numbers: graphics 0, SM 1, memory 2.
        match what {
            "sm" => whole(number(|to| ask!(nvml, nvmlDeviceGetClockInfo(handle, 1, to)))),
            "mem" => whole(number(|to| ask!(nvml, nvmlDeviceGetClockInfo(handle, 2, to)))),
            "max.sm" => whole(number(|to| ask!(nvml, nvmlDeviceGetMaxClockInfo(handle, 1, to)))),
            "max.mem" => whole(number(|to| ask!(nvml, nvmlDeviceGetMaxClockInfo(handle, 2, to)))),
            "applications.graphics" => whole(number(|to| ask!(nvml, nvmlDeviceGetApplicationsClock(handle, 0, to)))),
            "applications.memory" => whole(number(|to| ask!(nvml, nvmlDeviceGetApplicationsClock(handle, 2, to)))),
            "default_applications.graphics" => {
                whole(number(|to| ask!(nvml, nvmlDeviceGetDefaultApplicationsClock(handle, 0, to))))
            }
            "default_applications.memory" => {
                whole(number(|to| ask!(nvml, nvmlDeviceGetDefaultApplicationsClock(handle, 2, to))))
            }
            _ => Reading::NotSupported,
        }
    }

    /// Reads the clock event reasons. The call was renamed with driver 535.
    fn clock_reasons(self) -> Reading {
        let Device { nvml, handle } = self;
        match large(number(|to| ask!(nvml, nvmlDeviceGetCurrentClocksEventReasons(handle, to)))) {
            Reading::NotSupported => {
                large(number(|to| ask!(nvml, nvmlDeviceGetCurrentClocksThrottleReasons(handle, to))))
            }
            reading => reading,
        }
    }

    fn violation(self, policy: c_uint) -> Reading {
        let mut time: nvmlViolationTime_t = zeroed();
        let answer = ask!(self.nvml, nvmlDeviceGetViolationStatus(self.handle, policy, &mut time));
        large(answer.map(|()| time.violationTime))
    }

    fn utilization(self) -> Reading {
        let mut rates: nvmlUtilization_t = zeroed();
        whole(ask!(self.nvml, nvmlDeviceGetUtilizationRates(self.handle, &mut rates)).map(|()| rates.gpu))
    }

    fn temperature(self, what: &str) -> Reading {
        let Device { nvml, handle } = self;
        // Thresholds by NVML's numbers: shutdown 0, slowdown 1.
        match what {
            "gpu" => whole(number(|to| ask!(nvml, nvmlDeviceGetTemperature(handle, 0, to)))),
            "memory" => self.field_value(NVML_FI_DEV_MEMORY_TEMP),
            "shutdown" => whole(number(|to| ask!(nvml, nvmlDeviceGetTemperatureThreshold(handle, 0, to)))),
            "slowdown" => whole(number(|to| ask!(nvml, nvmlDeviceGetTemperatureThreshold(handle, 1, to)))),
            "gpu.tlimit" => {
                let mut margin: nvmlMarginTemperature_v1_t = zeroed();
                margin.version = version::<nvmlMarginTemperature_v1_t>(1);
                match ask!(nvml, nvmlDeviceGetMarginTemperature(handle, &mut margin)) {
                    Ok(()) => Reading::Number(f64::from(margin.marginTemperature)),
                    Err(reading) => reading,
                }
            }
            _ => Reading::NotSupported,
        }
    }

    fn power(self, what: &str) -> Reading {
        let Device { nvml, handle } = self;
        match what {
            "draw" => milli(number(|to| ask!(nvml, nvmlDeviceGetPowerUsage(handle, to)))),
            "limit" => milli(number(|to| ask!(nvml, nvmlDeviceGetPowerManagementLimit(handle, to)))),
            "default_limit" => milli(number(|to| ask!(nvml, nvmlDeviceGetPowerManagementDefaultLimit(handle, to)))),
            "max_limit" => {
                let (mut least, mut most) = (0, 0);
                let answer = ask!(nvml, nvmlDeviceGetPowerManagementLimitConstraints(handle, &mut least, &mut most));
                milli(answer.map(|()| most))
            }
            _ => Reading::NotSupported,
        }
    }

    fn memory(self, what: &str, kept: &mut Kept) -> Reading {
        let memory = kept.memory.get_or_insert_with(|| {
            let mut memory: nvmlMemory_v2_t = zeroed();
            memory.version = version::<nvmlMemory_v2_t>(2);
            ask!(self.nvml, nvmlDeviceGetMemoryInfo_v2(self.handle, &mut memory)).map(|()| memory)
        });
        let pick: fn(nvmlMemory_v2_t) -> c_ulonglong = match what {
            "total" => |memory| memory.total,
            "used" => |memory| memory.used,
            "reserved" => |memory| memory.reserved,
            _ => return Reading::NotSupported,
        };
        large(memory.clone().map(pick))
    }

    fn pcie_link(self, what: &str) -> Reading {
        let Device { nvml, handle } = self;
        match what {
            "link.gen.current" => whole(number(|to| ask!(nvml, nvmlDeviceGetCurrPcieLinkGeneration(handle, to)))),
            "link.gen.max" => whole(number(|to| ask!(nvml, nvmlDeviceGetMaxPcieLinkGeneration(handle, to)))),
            "link.width.current" => whole(number(|to| ask!(nvml, nvmlDeviceGetCurrPcieLinkWidth(handle, to)))),
            "link.width.max" => whole(number(|to| ask!(nvml, nvmlDeviceGetMaxPcieLinkWidth(handle, to)))),
            _ => Reading::NotSupported,
        }
    }

    fn fabric(self, what: &str, kept: &mut Kept) -> Reading {
        let fabric = kept.fabric.get_or_insert_with(|| self.fabric_info());
        let info = match fabric {
            Ok(info) => *info,
            Err(reading) => return reading.clone(),
        };
        match what {
            "state" => Reading::Number(f64::from(info.state)),
            "status" => Reading::Number(f64::from(info.status)),
            "health_mask" => Reading::Number(f64::from(info.healthMask)),
            "clique" => Reading::Number(f64::from(info.cliqueId)),
            "cluster_uuid" => Reading::Text(doctor_core::hex::encode(&info.clusterUuid)),
            _ => Reading::NotSupported,
        }
    }

    /// Reads the newest struct version that this driver knows. The older one is a prefix of the newer.
    fn fabric_info(self) -> Answer<nvmlGpuFabricInfo_v3_t> {
        let mut answer = Err(Reading::NotSupported);
        for form in [version::<nvmlGpuFabricInfo_v3_t>(3), version::<nvmlGpuFabricInfo_v2_t>(2)] {
            let mut info: nvmlGpuFabricInfo_v3_t = zeroed();
            info.version = form;
            answer = ask!(self.nvml, nvmlDeviceGetGpuFabricInfoV(self.handle, &mut info)).map(|()| info);
            if !matches!(answer, Err(Reading::NotSupported)) {
                break;
            }
        }
        answer
    }

    fn field_value(self, id: c_uint) -> Reading {
        let mut value: nvmlFieldValue_t = zeroed();
        value.fieldId = id;
        if let Err(reading) = ask!(self.nvml, nvmlDeviceGetFieldValues(self.handle, 1, &mut value)) {
            return reading;
        }
        if let Err(reading) = super::became(value.nvmlReturn) {
            return reading;
        }
        // SAFETY: the library reports which member of the union it wrote.
        unsafe {
            match value.valueType {
                0 => Reading::Number(value.value.dVal),
                1 => Reading::Number(f64::from(value.value.uiVal)),
                2 => Reading::Number(value.value.ulVal as f64),
                3 => Reading::Number(value.value.ullVal as f64),
                4 => Reading::Number(value.value.sllVal as f64),
                5 => Reading::Number(f64::from(value.value.siVal)),
                6 => Reading::Number(f64::from(value.value.usVal)),
                _ => Reading::NotSupported,
            }
        }
    }
}
