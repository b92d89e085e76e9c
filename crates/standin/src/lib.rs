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
//!
//! [[gpu]]
//! bus = "0000:18:00.0"
//! # What asking for its handle returns: 15 is "lost".
//! handle = 0
//! # By the names that checks use; one that is missing is not supported.
//! [gpu.fields]
//! "temperature.gpu" = 41
//! "ecc.errors.uncorrected.volatile.total" = { error = 15 }
//! ```
//!
//! A function whose struct carries a version refuses one it does not know, as the real library does.

mod answers;
mod dcgm;
mod scene;
mod symbols;
