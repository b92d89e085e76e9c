//! Reference pages, made from code: what the code knows is written down once.

mod markdown;
mod reasons;

pub(crate) use self::{
    markdown::{all, rule_condition},
    reasons::{Reason, reasons},
};
