//! The kernels of the tests as functions on the stand-in's memory. Written independently of `crates/gpu/kernels`, so
//! that a mistake in one is not also in the other.

pub(crate) mod layers;
pub(crate) mod patterns;
pub(crate) mod product_checks;
pub(crate) mod products;
pub(crate) mod shares;

use std::fmt;

use super::memory::BadAddress;

/// The arguments of a launch, each in a word of 64 bits.
#[derive(Debug)]
pub(crate) struct Arguments(Vec<u64>);

impl Arguments {
    pub(crate) const fn new(values: Vec<u64>) -> Self {
        Self(values)
    }

    /// Returns the first arguments.
    fn take<const N: usize>(&self) -> Result<[u64; N], KernelError> {
        self.0.first_chunk().copied().ok_or(KernelError::Unexpected("too few parameters"))
    }
}

/// Why a kernel cannot run.
#[derive(Debug)]
pub(crate) enum KernelError {
    BadAddress,
    /// The memory holds something else than the kernel is made for.
    Unexpected(&'static str),
}

impl KernelError {
    /// Returns the `CUresult`: `ILLEGAL_ADDRESS` or `LAUNCH_FAILED`.
    pub(crate) const fn code(&self) -> i32 {
        match self {
            Self::BadAddress => 700,
            Self::Unexpected(_) => 719,
        }
    }
}

impl From<BadAddress> for KernelError {
    fn from(_: BadAddress) -> Self {
        Self::BadAddress
    }
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadAddress => f.write_str("an address outside of the allocations"),
            Self::Unexpected(text) => f.write_str(text),
        }
    }
}
