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
//! # A process with a compute context; `graphics.0` has a graphics context. Its share of the GPU's time is optional.
//! "process.0.pid" = 4711
//! "process.0.memory" = 3221225472
//! "process.0.utilization" = 98
//! ```
//!
//! A function rejects a versioned struct of an unknown version, as the real library does.
//!
//! The same library stands in for the CUDA driver and NCCL, as far as the deep-learning and the collective test use
//! them ([`cuda`], [`nccl`]): kernels are functions of this crate, memory holds what they write as functions of the
//! position, and ranks add up over local sockets. GPUs, names and memory sizes are those of the file; two more tables
//! of a GPU say how fast it is and what is wrong with it:
//!
//! ```toml
//! # Fields that differ while this process multiplies on the GPU.
//! [gpu.load]
//! "temperature.gpu" = 61
//! # Invented rates, by the names of the test's metrics. A GPU without a rate has about that of an H100.
//! [gpu.cuda]
//! gemm_bf16_flop_per_s = 7.0e14
//! h2d_bytes_per_s = 5.5e10
//! # The number of multiprocessors, by default 132.
//! multiprocessors = 132
//! # One number of each product in this format: row, column, and the bit that is wrong.
//! wrong_product = "fp16 77 123 12"
//! # A cell that inverts what is written to it: the byte, from the beginning of the memory, and the bit.
//! wrong_memory = "0x9c4000000 5"
//! # An output of a layer, wherever this multiprocessor computes it: pass, multiprocessor, output, bit.
//! wrong_layer = "gelu_forward 17 100 3"
//! # A word of each long copy: `h2d`, `d2h`, `d2d` or `p2p`, byte, bit.
//! wrong_copy = "d2h 4096 7"
//! # A multiprocessor, and how many times as long it takes.
//! slow_multiprocessor = "17 1.4"
//! # The seconds of work after which the GPU fails, and the driver's error from then on.
//! lost = "0.5 719"
//! ```
//!
//! `DOCTOR_FAKE_NVIDIA_GPUS` replaces the GPUs of the file by this number of small ones, whose messages take as long as
//! the sockets do; without a file, there are two. `DOCTOR_FAKE_NVIDIA_NODE` is the node that this process plays, and
//! `DOCTOR_FAKE_NVIDIA_FAULTS` has the faults injected into messages ([`faults`]).

mod cuda;
mod dcgm;
mod faults;
mod fixture;
mod nccl;
mod nvml_fixture;
mod nvml_processes;
mod symbols;
