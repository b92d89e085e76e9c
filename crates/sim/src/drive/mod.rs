//! Driving the production engine over a simulated cluster: sessions, scenarios, the demonstration, comparisons.

pub mod compare;
pub mod demo;
pub mod scenario;
pub mod score;
pub mod session;

pub use session::{Session, SessionConfig};
