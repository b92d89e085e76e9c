//! NVML's lists of processes. `process.N` of a GPU's fields has a compute context, `graphics.N` a graphics context; both
//! have `pid` and `memory`. A process with `utilization` is also in the samples of use.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{nvmlProcessInfo_t, nvmlProcessUtilizationSample_t};

use crate::{
    fixture::FakeGpu,
    symbols::{Handle, INSUFFICIENT_SIZE, card, plain, put},
};

const NOT_FOUND: u32 = 6;

fn processes(card: &FakeGpu, family: &str) -> Vec<nvmlProcessInfo_t> {
    let one = |index: u32| {
        let pid = card.number(&format!("{family}.{index}.pid")).ok()? as c_uint;
        let memory = card.number(&format!("{family}.{index}.memory"));
        Some(nvmlProcessInfo_t {
            pid,
            usedGpuMemory: memory.map_or(c_ulonglong::MAX, |bytes| bytes as c_ulonglong),
            gpuInstanceId: c_uint::MAX,
            computeInstanceId: c_uint::MAX,
        })
    };
    (0..).map_while(one).collect()
}

fn samples(card: &FakeGpu, family: &str) -> Vec<nvmlProcessUtilizationSample_t> {
    let one = |(index, process): (u32, nvmlProcessInfo_t)| {
        let percent = card.number(&format!("{family}.{index}.utilization")).ok()? as c_uint;
        let sample = nvmlProcessUtilizationSample_t {
            pid: process.pid,
            timeStamp: 0,
            smUtil: percent,
            memUtil: 0,
            encUtil: 0,
            decUtil: 0,
        };
        Some(sample)
    };
    (0..).zip(processes(card, family)).filter_map(one).collect()
}

/// Writes a list.
///
/// # Safety
/// By NVIDIA's header, `to` has as many entries as `count` contains before the call.
unsafe fn put_list<T: Copy>(list: &[T], count: *mut c_uint, to: *mut T) -> Result<(), u32> {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if list.len() > count.read() as usize {
            return Err(INSUFFICIENT_SIZE);
        }
        for (index, one) in list.iter().enumerate() {
            to.add(index).write(*one);
        }
        put(count, list.len() as c_uint)
    }
}

plain! {
    nvmlDeviceGetComputeRunningProcesses_v3(device: Handle, count: *mut c_uint, to: *mut nvmlProcessInfo_t) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put_list(&processes(card(device)?, "process"), count, to) }
    }
    nvmlDeviceGetGraphicsRunningProcesses_v3(device: Handle, count: *mut c_uint, to: *mut nvmlProcessInfo_t) {
        // SAFETY: as NVIDIA's header says.
        unsafe { put_list(&processes(card(device)?, "graphics"), count, to) }
    }
    nvmlDeviceGetProcessUtilization(
        device: Handle, to: *mut nvmlProcessUtilizationSample_t, count: *mut c_uint, _since: c_ulonglong
    ) {
        let card = card(device)?;
        let all = [samples(card, "process"), samples(card, "graphics")].concat();
        if all.is_empty() {
            return Err(NOT_FOUND);
        }
        // SAFETY: as NVIDIA's header says.
        unsafe { put_list(&all, count, to) }
    }
}
