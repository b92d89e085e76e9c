//! Reference pages generated from the code.

mod markdown;
mod reasons;

pub(crate) use self::{
    markdown::{generate_all, rule_condition},
    reasons::{Reason, reasons},
};
