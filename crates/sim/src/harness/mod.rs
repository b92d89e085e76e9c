//! Drives the production engine over a simulated cluster: sessions, scenarios, the demo, comparisons.

pub mod compare;
mod decisions;
pub mod demo;
pub mod period_coverage;
pub mod scenario;
pub mod score;
pub mod session;

pub use session::{Session, SessionConfig};
