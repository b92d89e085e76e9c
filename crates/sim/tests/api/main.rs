//! The API over a simulated cluster: responses, permissions, formats and effects.

mod acting;
mod bed;
mod form;
mod looking;
mod who;
