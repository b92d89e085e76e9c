//! Reference pages generated from the code.

mod markdown;
mod reasons;

pub(crate) use self::{
    markdown::{generate_all, place_sentence, rule_condition},
    reasons::{Reason, reasons},
};
