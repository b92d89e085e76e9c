//! Errors of the CUDA driver, and what they say about the hardware.
//!
//! The same call can fail because the machine has no GPU, because another process holds its memory, or because the GPU
//! has just returned garbage. Only the last is a finding about the hardware.

use std::fmt;

use doctor_core::observation::{FailureKind, ProbeFailure};

/// The `CUresult` of a failed call, with the driver's name for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverError {
    pub call: &'static str,
    pub code: i32,
    pub name: String,
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} returned {} ({})", self.call, self.name, self.code)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error("the CUDA driver {library} cannot be loaded; it comes with NVIDIA's driver: {text}")]
    NoLibrary { library: String, text: String },
    #[error("the CUDA driver is too old: it has no {symbol}; driver 525 or newer is required")]
    NoSymbol { symbol: &'static str },
    #[error("{0}")]
    Driver(DriverError),
}

/// Codes that indicate a GPU fault rather than a wrong argument or a GPU in use.
const HARDWARE: &[i32] = &[
    214, // ECC_UNCORRECTABLE
    220, // NVLINK_UNCORRECTABLE
    226, // CONTAINED
    700, // ILLEGAL_ADDRESS: our kernels stay within their buffers, so the address was corrupted on its way
    702, // LAUNCH_TIMEOUT
    714, // HARDWARE_STACK_ERROR
    715, // ILLEGAL_INSTRUCTION
    716, // MISALIGNED_ADDRESS
    717, // INVALID_ADDRESS_SPACE
    718, // INVALID_PC
    719, // LAUNCH_FAILED
    721, // TENSOR_MEMORY_LEAK
];

const OUT_OF_MEMORY: i32 = 2;
const NO_DEVICE: i32 = 100;
const SYSTEM_NOT_READY: i32 = 802;

impl CudaError {
    /// Returns whether a GPU that worked a moment ago has failed.
    pub fn is_hardware(&self) -> bool {
        matches!(self, Self::Driver(error) if HARDWARE.contains(&error.code))
    }

    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Driver(error) if error.code == OUT_OF_MEMORY)
    }

    pub fn is_no_device(&self) -> bool {
        matches!(self, Self::Driver(error) if error.code == NO_DEVICE)
    }

    /// Converts the error into the reason for a missing measurement.
    pub fn failure(&self) -> ProbeFailure {
        match self {
            Self::NoLibrary { .. } | Self::NoSymbol { .. } => ProbeFailure::new(FailureKind::Missing, self.to_string()),
            Self::Driver(error) if error.code == NO_DEVICE => {
                ProbeFailure::new(FailureKind::Missing, "the CUDA driver sees no GPU on this machine")
            }
            Self::Driver(error) if error.code == SYSTEM_NOT_READY => ProbeFailure::new(
                FailureKind::Failed,
                format!("{error}: the fabric manager has not set up the GPUs yet, or is not running"),
            ),
            Self::Driver(error) => ProbeFailure::new(FailureKind::Failed, error.to_string()),
        }
    }
}
