//! One file per check.
//!
//! A check says which probes it wants ([`probe`]), understands what they brought ([`Check::interpret`]), and brings
//! the rules by which that is judged. It never reads anything itself, so every one of them is tested on captured
//! output. The word in [`CHECKS`] is all that registers it.

pub mod document;
pub mod files;
pub mod gpu;
pub mod job_file;
#[cfg(test)]
mod judged;
pub mod measurements;
pub mod probe;
pub mod proc_stat;
pub mod site;
pub mod spec;

pub use measurements::interpret_measurements;
pub use spec::{Catalogue, Check, Depth, Params, Spec, page_of};

/// The visible list. A new check is its file and its word here.
macro_rules! checks {
    ($($name:ident),* $(,)?) => {
        $(mod $name;)*
        /// Every check that this program knows.
        pub static CHECKS: &[Check] = &[$($name::CHECK),*];
    };
}

checks![clock_source, disk_space, gpu_row_remap, kernel_log, memory];
