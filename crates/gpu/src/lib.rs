//! NVIDIA's libraries, loaded at run time behind safe interfaces: the node program starts without them and reports
//! which are missing.
//!
//! A driver call may hang for ever. This crate does not guard against that: call it where a hang does no harm.

pub mod collective;
pub mod cublas;
pub mod cuda;
pub mod dcgm;
pub mod dl;
pub mod nccl;
pub mod nvml;
