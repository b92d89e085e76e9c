//! A stand-in for NVML: a shared library with the real one's versioned symbols and struct sizes that answers from a
//! file. The node program loads it like the real one, so tests exercise the real loading and reading code.
//!
//! `DOCTOR_FAKE_NVIDIA` names the file, TOML with one item per line:
//!
//! ```toml
//! driver = "570.124.06"
//! cuda = 12080
//! # The result of opening a session: 9 is "driver not loaded", 18 "driver and library differ".
//! init = 0
//! # The name of a function that hangs.
//! hang = ""
//! # File descriptors that the library leaks each time a session is closed.
//! loses = 0
//!
//! [[gpu]]
//! bus = "0000:18:00.0"
//! # The result of requesting its handle: 15 is "lost".
//! handle = 0
//! # Whether every call for this GPU hangs, the one for its handle included.
//! hang = false
//! # A file that every such call writes to first. On a frozen file system the kernel blocks the caller, as a hung driver
//! # does, and SIGKILL does not end it.
//! touches = ""
//! # By the names that checks use; a missing field is not supported.
//! [gpu.fields]
//! "temperature.gpu" = 41
//! "ecc.errors.uncorrected.volatile.total" = { error = 15 }
//! ```
//!
//! A function rejects a versioned struct of an unknown version, as the real library does.
//!
//! The same library stands in for the CUDA driver and NCCL, as far as the collective test uses them ([`cuda`],
//! [`nccl`]): GPU memory is memory of the process, kernels are functions of this crate, and ranks really add up, over
//! local sockets. `DOCTOR_FAKE_NVIDIA_GPUS` is the number of GPUs, `DOCTOR_FAKE_NVIDIA_NODE` the node that this process plays,
//! and `DOCTOR_FAKE_NVIDIA_FAULTS` the injected faults ([`faults`]).

mod cuda;
mod cuda_kernels;
mod dcgm;
mod faults;
mod fixture;
mod nccl;
mod nvml_fixture;
mod symbols;
