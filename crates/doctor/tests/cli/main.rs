//! The program as people use it: built, started, and asked; what it prints and how it ends is compared.

mod agents;
mod bed;
mod changing;
#[cfg(feature = "kubernetes-bed")]
mod kubernetes;
mod reading;
mod rejudging;
mod settings;
mod simulated;
mod this_machine;
