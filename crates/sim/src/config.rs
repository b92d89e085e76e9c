//! The configuration of a world.

use std::path::PathBuf;

use doctor_checks::Catalogue;
use doctor_core::{
    ids::{InvalidName, NodeName, PoolName, Sku},
    snapshot::Capabilities,
    time::{Span, Timestamp},
};
use serde::{Deserialize, Serialize};

use crate::{assumptions::Assumptions, disruptions::Disruptions, shipped_tests, simulated_tests};

/// The limit for the number of nodes. Every node takes memory from the start, and no cluster is larger.
const MAX_NODES: f64 = 1e6;

/// The configuration of a world. Two worlds with the same configuration that get the same calls at the same times are
/// identical to the last byte.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorldConfig {
    pub seed: u64,
    pub start: Timestamp,
    pub pools: Vec<PoolConfig>,
    pub assumptions: Assumptions,
    pub disruptions: Disruptions,
    /// The capabilities of this cluster's backend.
    pub caps: Capabilities,
    /// Whether nodes have agents that report.
    pub agents: bool,
    /// How often an agent reports its readings although they have not changed. Absent: only changes.
    pub agents_every: Option<Span>,
    /// Whether operators repair nodes that we marked as unhealthy and then request their return.
    pub repairs: bool,
    /// Whether users report undetected faults, and operators take such nodes away for repair.
    pub tickets: bool,
    /// Whether the nodes have the tests that are shipped, with their suites and durations, instead of the three
    /// simulated ones.
    pub shipped_tests: bool,
    /// The shared directory for the logs and result documents of jobs.
    pub share: Option<PathBuf>,
    /// Whether result documents also come with the answer to a poll.
    pub carry_documents: bool,
    /// The file to which every effect is appended, one line of JSON each.
    pub effects: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    pub name: PoolName,
    pub nodes: u32,
    /// Node names are this prefix and a number.
    pub prefix: String,
    pub sku: Sku,
}

impl PoolConfig {
    /// Creates a pool of the standard machine type.
    ///
    /// # Errors If the name is not a valid pool name, or the prefix not a valid beginning of a node name.
    pub fn new(name: &str, nodes: u32, prefix: &str) -> Result<Self, InvalidName> {
        NodeName::new(prefix)?;
        Ok(Self { name: PoolName::new(name)?, nodes, prefix: prefix.to_owned(), sku: simulated_tests::sku() })
    }

    /// Returns the name of the node with this number, counted from one. All names of a pool have the same length, so
    /// that they sort by number.
    pub(crate) fn node_name(&self, number: u32) -> Result<NodeName, InvalidName> {
        let width = self.nodes.to_string().len().max(3);
        NodeName::new(&format!("{}{number:0width$}", self.prefix))
    }
}

impl Default for WorldConfig {
    fn default() -> Self {
        Self::of(200)
    }
}

impl WorldConfig {
    /// Returns one pool of this many nodes, with users, faults, agents and repairs, and without hostile behaviour.
    pub fn of(nodes: u32) -> Self {
        Self {
            seed: 1,
            // 2026-11-01T00:00:00Z.
            start: Timestamp::from_secs(1_793_491_200),
            pools: vec![PoolConfig::new("gpu", nodes, "node").expect("fixed names that the types accept")],
            assumptions: Assumptions::default(),
            disruptions: Disruptions::default(),
            caps: Capabilities::ALL,
            agents: true,
            agents_every: None,
            repairs: true,
            tickets: true,
            shipped_tests: false,
            share: None,
            carry_documents: true,
            effects: None,
        }
    }

    /// Returns one pool of this many nodes in which nothing happens by itself.
    pub fn quiet(nodes: u32) -> Self {
        Self { assumptions: Assumptions::quiet(), repairs: false, tickets: false, ..Self::of(nodes) }
    }

    /// Returns the checks of the nodes.
    pub fn catalogue(&self) -> Catalogue {
        if self.shipped_tests { shipped_tests::catalogue() } else { simulated_tests::catalogue() }
    }

    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}

/// An invalid configuration.
#[derive(Debug, thiserror::Error)]
pub enum BadWorld {
    #[error("making the world: two nodes would be called `{0}`; give each pool another prefix")]
    DuplicateName(NodeName),
    #[error("making the world: a pool's prefix does not begin a node name")]
    Name(#[from] InvalidName),
    #[error("making the world: there are no nodes; give at least one pool with at least one node")]
    Empty,
    #[error("making the world: `{name}` is {value}, {accepted}")]
    OutOfRange { name: &'static str, value: f64, accepted: &'static str },
    #[error("making the world: cannot write the file of effects `{path}`")]
    Effects { path: PathBuf, source: std::io::Error },
}

impl WorldConfig {
    /// Rejects values with which time would stand still or pass without end, and worlds that do not fit into memory.
    pub(crate) fn check(&self) -> Result<(), BadWorld> {
        let a = &self.assumptions;
        let within = |name, value: f64, low: f64, high: f64, accepted| {
            if (low..=high).contains(&value) { Ok(()) } else { Err(BadWorld::OutOfRange { name, value, accepted }) }
        };
        for (name, value) in [
            ("hard_per_node_day", a.hard_per_node_day),
            ("gray_per_node_day", a.gray_per_node_day),
            ("sdc_per_node_day", a.sdc_per_node_day),
        ] {
            within(name, value, 0.0, 100.0, "0 to 100 a day are accepted")?;
        }
        within("utilisation", a.utilisation, 0.0, 1.5, "0 to 1.5 is accepted")?;
        within("weibull_shape", a.weibull_shape, 0.1, 10.0, "0.1 to 10 is accepted")?;
        within("lemon_factor", a.lemon_factor, 1.0, 1000.0, "1 to 1000 is accepted")?;
        within("hazard_per_incident", a.hazard_per_incident, 1.0, 10.0, "1 to 10 is accepted")?;
        within("infant_factor", a.infant_factor, 1.0, 1000.0, "1 to 1000 is accepted")?;
        within("job_sigma", a.job_sigma, 0.0, 5.0, "0 to 5 is accepted")?;
        for (name, value) in [
            ("lemon_share", a.lemon_share),
            ("catch_gray", a.catch_gray),
            ("catch_sdc_cold", a.catch_sdc_cold),
            ("catch_sdc_hot", a.catch_sdc_hot),
            ("avoids_validation", a.avoids_validation),
            ("repair_over_a_day", a.repair_over_a_day),
            ("outlier", a.outlier),
        ] {
            within(name, value, 0.0, 1.0, "0 to 1 is accepted")?;
        }
        if self.pools.iter().all(|pool| pool.nodes == 0) {
            return Err(BadWorld::Empty);
        }
        let nodes = self.pools.iter().map(|pool| f64::from(pool.nodes)).sum();
        within("nodes", nodes, 1.0, MAX_NODES, "1 to 1000000 in all pools together are accepted")?;
        Ok(())
    }
}

/// Parses backend capabilities separated by commas: `mark,drain`. `none` is no capability.
///
/// # Errors With the accepted names.
pub fn caps_named(names: &str) -> Result<Capabilities, String> {
    let mut caps = Capabilities::NONE;
    for name in names.split(',').filter(|name| *name != "none") {
        let can = match name {
            "mark" => &mut caps.mark,
            "drain" => &mut caps.drain,
            "evict" => &mut caps.evict,
            "reset" => &mut caps.reset,
            "reboot" => &mut caps.reboot,
            "replace" => &mut caps.replace,
            _ => {
                return Err(format!("`{name}` is unknown; accepted: mark, drain, evict, reset, reboot, replace, none"));
            }
        };
        *can = true;
    }
    Ok(caps)
}
