//! The deep-learning test: memory, products, layers, copies and heat of every GPU, checked value by value.

pub mod control;
pub mod copies;
pub mod heat;
mod kernels;
pub mod known;
pub mod memory;
pub mod products;
