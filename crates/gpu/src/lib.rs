//! NVIDIA's libraries, loaded at run time and made safe: the node program needs none of them to start, and says so
//! plainly where they are missing.
//!
//! A call into a driver may hang for ever. Nothing here guards against that: whoever calls does so where it may hang
//! without harm.

pub mod collective;
pub mod cublas;
pub mod cuda;
pub mod dcgm;
pub mod dl;
pub mod nccl;
pub mod nvml;
