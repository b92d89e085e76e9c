//! The API over a simulated cluster: what is answered to whom, in which form, and what comes of it.

mod acting;
mod bed;
mod form;
mod looking;
mod who;
