//! What things are and what should be done.
//!
//! This crate is the judgement of Cluster Doctor and nothing else: it has no clock, no files, no network and no
//! threads. A shell observes a cluster, hands over a [`Snapshot`](snapshot::Snapshot), and gets a
//! [`Plan`](plan::Plan) back; another shell carries it out. The same snapshot gives the same plan, always.
//!
//! Reading order: [`node`], [`run`], [`observation`], [`finding`] are the nouns; [`policy`] is what a site may set;
//! [`classify`] turns observations into findings; [`lifecycle`] is a node's way out of service and back;
//! [`plan`] is the one place where anything is decided; [`view`] is what people are shown, [`alert`] what they are told
//! without asking.

pub mod alert;
pub mod case;
pub mod classify;
pub mod failed_work;
pub mod finding;
pub mod fnv;
pub mod hex;
pub mod hostlist;
pub mod ids;
pub mod lifecycle;
pub mod machine;
pub mod node;
pub mod observation;
pub mod plan;
pub mod policy;
pub mod profile;
pub mod reason;
pub mod run;
pub mod shown;
pub mod snapshot;
pub mod test_status;
pub mod time;
pub mod toml_text;
pub mod trials;
pub mod view;
