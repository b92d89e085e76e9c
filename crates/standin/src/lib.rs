//! A stand-in for NVML: a shared library with the real one's versioned symbols and struct sizes, which answers from a
//! file. The node program loads it as it would load the real one, so the loading and reading code is what tests run.
//!
//! `DOCTOR_STANDIN` names the file, TOML with one thing to a line:
//!
//! ```toml
//! driver = "570.124.06"
//! cuda = 12080
//! # What opening returns: 9 is "driver not loaded", 18 "driver and library differ".
//! init = 0
//! # The name of a function that never comes back.
//! hang = ""
//! # File descriptors that the library leaves open each time a session is closed.
//! loses = 0
//!
//! [[gpu]]
//! bus = "0000:18:00.0"
//! # What asking for its handle returns: 15 is "lost".
//! handle = 0
//! # Whether every function that is asked about it never comes back, the one for its handle included.
//! hang = false
//! # A file that every such function writes to first. On a file system that is frozen the kernel holds the caller, as a driver
//! # that hangs does, and SIGKILL does not end it.
//! touches = ""
//! # By the names that checks use; one that is missing is not supported.
//! [gpu.fields]
//! "temperature.gpu" = 41
//! "ecc.errors.uncorrected.volatile.total" = { error = 15 }
//! ```
//!
//! A function whose struct carries a version refuses one it does not know, as the real library does.
//!
//! The same library stands in for the CUDA driver and for NCCL, as far as the collective test uses them ([`cuda`], [`nccl`]):
//! memory of a GPU is memory of the process, kernels are functions here, and ranks really add up, over sockets of this
//! machine. `DOCTOR_STANDIN_GPUS` says how many GPUs there are, `DOCTOR_STANDIN_NODE` which node of several this process
//! plays, and `DOCTOR_STANDIN_FAULTS` what is wrong with them ([`faults`]).

mod answers;
mod cuda;
mod cuda_kernels;
mod dcgm;
mod faults;
mod nccl;
mod scene;
mod symbols;
