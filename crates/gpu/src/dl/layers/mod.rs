//! Layers of deep learning, forward and backward, on every multiprocessor of a GPU, with known answers.
//!
//! Every block of a kernel is a replica: it computes the whole layer from the same inputs into its own memory. There
//! are two replicas per multiprocessor, so that each one runs each layer. The outputs in memory are then verified twice:
//!
//! - A separate kernel reduces the bits of each replica to one number, its fingerprint. The kernels use only operations
//!   whose result IEEE 754 defines, in a fixed order, so the right fingerprint is the same on every architecture,
//!   driver and repeat: [`exact`] computes it without a GPU, and [`passes`] lists it. A replica with another one is
//!   wrong, and its multiprocessor is reported. This also detects errors that are the same in all replicas.
//! - The first replica is compared with [`mod@reference`], textbook formulas in double precision, within tolerances
//!   derived from the number of roundings. This shows that the known bits are indeed those of the layer.
//!
//! Errors are injected in memory after the pass and before both comparisons, by a kernel that shares nothing with them.

mod compare;
pub mod exact;
mod inject;
pub mod layer_inputs;
pub mod passes;
pub mod reference;
mod report;
mod run;

pub use compare::{Deviation, WrongNumber};
pub use inject::{InjectedError, OutputError, Replicas};
pub use passes::Pass;
pub use report::{LayersReport, PassReport, WrongReplica};
pub use run::{Layers, run};
