//! Every process that uses a GPU: those with a compute or graphics context, and those that used it within the last
//! seconds.

use std::{
    collections::BTreeMap,
    os::raw::{c_uint, c_ulonglong},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nvml_wrapper_sys::bindings::{nvmlProcessInfo_t, nvmlProcessUtilizationSample_t};

use super::{Device, ask, fields::NvmlResult, gpu_process::GpuProcess, indexed_fields::list};

/// How far back the driver's samples of use count. It takes one or more a second.
const WINDOW: Duration = Duration::from_secs(2);

impl Device<'_> {
    /// Returns every process that uses the GPU, by pid.
    ///
    /// Fails only if the processes with a compute context are unknown: not every GPU supports the other two lists.
    pub(super) fn activity(self) -> NvmlResult<Vec<GpuProcess>> {
        let Device { nvml, handle } = self;
        let compute = self.processes()?;
        let graphics = list(|count, to| ask!(nvml, nvmlDeviceGetGraphicsRunningProcesses_v3(handle, count, to)));
        Ok(merge(&compute, &graphics.unwrap_or_default(), &self.samples_of_use()))
    }

    fn samples_of_use(self) -> Vec<nvmlProcessUtilizationSample_t> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(WINDOW);
        let since = since.as_micros() as c_ulonglong;
        // Without a sample in this time, the driver returns an error.
        let samples = list(|count, to| ask!(self.nvml, nvmlDeviceGetProcessUtilization(self.handle, to, count, since)));
        samples.unwrap_or_default()
    }
}

/// Combines the driver's three lists.
fn merge(
    compute: &[nvmlProcessInfo_t],
    graphics: &[nvmlProcessInfo_t],
    samples: &[nvmlProcessUtilizationSample_t],
) -> Vec<GpuProcess> {
    let mut all: BTreeMap<c_uint, GpuProcess> = BTreeMap::new();
    for process in compute.iter().chain(graphics) {
        // All ones: unknown to the driver.
        let memory = Some(process.usedGpuMemory).filter(|bytes| *bytes != c_ulonglong::MAX);
        let known = all.entry(process.pid).or_insert(GpuProcess { pid: process.pid, memory, percent: None });
        known.memory = known.memory.max(memory);
    }
    // The driver writes an entry without a pid where it has no sample.
    for sample in samples.iter().filter(|sample| sample.pid != 0) {
        let known = all.entry(sample.pid).or_insert(GpuProcess { pid: sample.pid, memory: Some(0), percent: None });
        let shares = [sample.smUtil, sample.memUtil, sample.encUtil, sample.decUtil];
        known.percent = known.percent.max(shares.into_iter().filter(|share| *share <= 100).max());
    }
    all.into_values().collect()
}

#[cfg(test)]
mod tests {
    use doctor_checks::gpu::FieldValue;

    use super::*;

    fn process(pid: c_uint, memory: c_ulonglong) -> nvmlProcessInfo_t {
        nvmlProcessInfo_t { pid, usedGpuMemory: memory, gpuInstanceId: c_uint::MAX, computeInstanceId: c_uint::MAX }
    }

    fn sample(pid: c_uint, percent: c_uint) -> nvmlProcessUtilizationSample_t {
        nvmlProcessUtilizationSample_t {
            pid,
            timeStamp: 1,
            smUtil: percent,
            memUtil: 1,
            encUtil: 0,
            decUtil: c_uint::MAX,
        }
    }

    #[test]
    fn a_process_of_several_lists_is_one_with_its_highest_use() {
        let all = merge(
            &[process(7, 1 << 30), process(8, c_ulonglong::MAX)],
            &[process(7, 1 << 20), process(9, 4 << 20)],
            &[sample(7, 40), sample(7, 98), sample(5, 1), sample(0, 50)],
        );
        let found: Vec<_> = all.iter().map(|one| (one.pid, one.memory, one.percent)).collect();
        assert_eq!(
            found,
            [(5, Some(0), Some(1)), (7, Some(1 << 30), Some(98)), (8, None, None), (9, Some(4 << 20), None),]
        );
        assert_eq!(all[1].field("utilization"), FieldValue::Number(98.0));
        assert_eq!(
            (all[2].field("memory"), all[2].field("other")),
            (FieldValue::NotSupported, FieldValue::NotSupported)
        );
    }
}
