//! A process and its use of one GPU.

use std::os::raw::{c_uint, c_ulonglong};

use doctor_checks::gpu::FieldValue;

/// One process and its use of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GpuProcess {
    pub(super) pid: c_uint,
    /// Bytes. Zero for a process without a context; none if the driver does not know.
    pub(super) memory: Option<c_ulonglong>,
    /// The highest share of the GPU's time; none if the driver has no sample of it.
    pub(super) percent: Option<c_uint>,
}

impl GpuProcess {
    pub(super) fn field(&self, what: &str) -> FieldValue {
        let number = match what {
            "pid" => Some(f64::from(self.pid)),
            "memory" => self.memory.map(|bytes| bytes as f64),
            "utilization" => self.percent.map(f64::from),
            _ => None,
        };
        number.map_or(FieldValue::NotSupported, FieldValue::Number)
    }
}
