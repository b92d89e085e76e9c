//! The API over a simulated cluster: responses, permissions, formats and effects.

mod actions;
mod auth;
mod openapi_form;
mod reads;
mod testbed;
