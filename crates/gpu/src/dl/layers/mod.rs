//! Layers of deep learning, forward and backward, on every multiprocessor of a GPU, with known answers.
//!
//! Every block of a kernel is a replica: it computes the whole layer by itself, from the same inputs, into memory of its
//! own. There are two replicas for each multiprocessor, so that each one runs each layer. Then, on what lies in memory:
//!
//! - The bits of every replica give one number, its fingerprint, by a kernel of its own. The kernels use only operations
//!   whose result IEEE 754 fixes, in a fixed order, so the right fingerprint is the same for every architecture, driver
//!   and repeat: [`exact`] computes it without a GPU, and [`passes`] has it in a table. A replica with another one is
//!   wrong, and the multiprocessor that made it is named. That all replicas are wrong in the same way does not help them.
//! - The first replica is held against [`mod@reference`], textbook formulas in double precision, within tolerances that
//!   follow from the number of roundings. That is what says the known bits are those of the layer and of nothing else.
//!
//! Errors are planted after the pass and before both comparisons, in memory, by a kernel that they know nothing of.

mod compare;
pub mod exact;
pub mod passes;
mod plant;
pub mod problem;
pub mod reference;
mod report;
mod run;

pub use compare::{Deviation, WrongNumber};
pub use passes::Pass;
pub use plant::{Planted, PlantedError, Replicas};
pub use report::{LayersReport, PassReport, WrongReplica};
pub use run::{Layers, run};
