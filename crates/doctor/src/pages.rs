//! Reference pages generated from the code.

mod markdown;
mod reasons;

pub(crate) use self::{
    markdown::{all, rule_condition},
    reasons::{Reason, reasons},
};
