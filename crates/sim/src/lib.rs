//! A simulated cluster behind the `Backend` trait: nodes that break, users who want them, operators who interfere, and
//! a clock that jumps. It has behaviour; it is not a mock. The production engine runs against it, from observing to
//! acting.
//!
//! Reading order: [`assumptions`] holds the world's parameters, [`config`] its configuration; [`fault`] and [`simulated_tests`]
//! (or [`shipped_tests`]) list what can break and what detects it; [`world`] is the world itself; [`backend`] is a controller's view of it,
//! [`serve`] and [`remote`] the same from another process; [`effects`] is the record of what really happened and
//! [`invariants`] checks invariants against it; [`truth`] is for scoring only.

pub mod assumptions;
pub mod backend;
pub mod config;
pub mod disruptions;
pub mod effects;
pub mod fault;
#[doc(hidden)]
pub mod fuzz_targets;
pub mod harness;
pub mod invariants;
mod kind;
mod machine;
mod measure;
mod random;
pub mod remote;
pub mod serve;
pub mod shipped_tests;
pub mod simulated_tests;
pub mod truth;
mod wire;
pub mod world;

pub use assumptions::Assumptions;
pub use backend::{SimBackend, VirtualClock};
pub use config::{BadWorld, PoolConfig, WorldConfig};
pub use disruptions::{Call, CallFailure, Disruptions, Incident, JobFault};
pub use effects::{Effect, EffectKind, EffectLog, read_effects};
pub use fault::FaultKind;
pub use invariants::{Tolerances, Violation, check_effects};
pub use kind::{Sim, SimConfig};
pub use remote::RemoteSim;
pub use serve::{ServeConfig, serve};
pub use truth::{FaultRecord, Truth};
pub use world::{Changes, OperatorRequest, QueuedReport, World};
