//! A stand-in for NVML: a shared library with the real one's versioned symbols and struct sizes, which answers from a
//! file. The node program loads it as it would load the real one, so the loading and reading code is what tests run.
//!
//! `DOCTOR_STANDIN` names the file, TOML:
//!
//! ```toml
//! driver = "570.124.06"
//! cuda = 12080
//! init = 0                      # what opening returns: 9 is "driver not loaded", 18 "driver and library differ"
//! hang = ""                     # the name of a function that never comes back
//!
//! [[gpu]]
//! bus = "0000:18:00.0"
//! handle = 0                    # what asking for its handle returns: 15 is "lost"
//! [gpu.fields]                  # by the names that checks use; one that is missing is not supported
//! "temperature.gpu" = 41
//! "ecc.errors.uncorrected.volatile.total" = { error = 15 }
//! ```
//!
//! A function whose struct carries a version refuses one it does not know, as the real library does.

mod answers;
mod dcgm;
mod symbols;
