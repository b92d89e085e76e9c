//! Expectations for counts and sizes that no profile has: the value on which the node's peers agree, and the one that
//! the node had when it was last accepted.
//!
//! Both come from the stored counts. A node's own counts are loaded with those of the other nodes of its batch; those of
//! all nodes only if something has to be classified and a count has changed since the last time.

use std::{
    cell::OnceCell,
    collections::{BTreeMap, HashMap},
    fmt,
    sync::Arc,
};

use doctor_core::{
    ids::{NodeName, Sku},
    measured_count::{MeasuredCount, PeerCounts},
    time::{Span, Timestamp},
};
use doctor_store::{Lease, Store, StoreError, records::NodeCounts};

/// The nodes of each machine type, sorted by name.
pub type NodesBySku = BTreeMap<Sku, Vec<NodeName>>;

/// The nodes of each machine type, as the cluster has them now. They are listed when first needed: sorting a hundred
/// thousand names is skipped if nothing is compared with peers.
pub struct ClusterTypes<'a> {
    list: Box<dyn Fn() -> NodesBySku + 'a>,
    listed: OnceCell<NodesBySku>,
}

impl<'a> ClusterTypes<'a> {
    pub fn new(list: impl Fn() -> NodesBySku + 'a) -> Self {
        Self { list: Box::new(list), listed: OnceCell::new() }
    }

    pub fn nodes_by_sku(&self) -> &NodesBySku {
        self.listed.get_or_init(&self.list)
    }
}

impl fmt::Debug for ClusterTypes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ClusterTypes").field(&self.listed).finish()
    }
}

/// How long agreements are used while no count changes: nodes come, go and change their type.
const MAX_AGE: Span = Span::hours(1);

/// What the nodes of each machine type agree on. It is kept from cycle to cycle.
#[derive(Debug, Default)]
pub struct PeerAgreements {
    by_sku: BTreeMap<Sku, BTreeMap<Arc<str>, PeerCounts>>,
    /// When it was built; `None`: it is outdated.
    built: Option<Timestamp>,
}

impl PeerAgreements {
    fn is_current(&self, now: Timestamp) -> bool {
        self.built.is_some_and(|built| now.since(built) < MAX_AGE)
    }

    fn build(store: &Store, nodes: &NodesBySku, now: Timestamp) -> Result<Self, StoreError> {
        let types: HashMap<&NodeName, &Sku> =
            nodes.iter().flat_map(|(sku, names)| names.iter().map(move |name| (name, sku))).collect();
        let mut by_sku: BTreeMap<Sku, BTreeMap<Arc<str>, PeerCounts>> = BTreeMap::new();
        for (node, metric, accepted) in store.accepted_counts()? {
            let Some(sku) = types.get(&node) else { continue };
            // Most nodes are of a type that is known already.
            let metrics = match by_sku.get_mut(*sku) {
                Some(metrics) => metrics,
                None => by_sku.entry((*sku).clone()).or_default(),
            };
            metrics.entry(metric).or_default().add(accepted);
        }
        Ok(Self { by_sku, built: Some(now) })
    }
}

/// Expected values by metric, as in [`Baselines`](doctor_core::classify::Baselines).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Expectations {
    pub agreed: BTreeMap<String, f64>,
    pub accepted: BTreeMap<String, f64>,
}

/// Loads expectations, and collects the counts to store.
#[derive(Debug)]
pub struct ExpectationReader<'a> {
    store: &'a Store,
    agreements: &'a mut PeerAgreements,
    /// `repair.watch`: how long a lower value has to last before it is accepted.
    watch: Span,
    /// Nodes to load with the next one.
    batch: Vec<NodeName>,
    known: BTreeMap<NodeName, NodeCounts>,
    changed: BTreeMap<(NodeName, String), MeasuredCount>,
}

impl<'a> ExpectationReader<'a> {
    pub const fn new(store: &'a Store, agreements: &'a mut PeerAgreements, watch: Span) -> Self {
        Self { store, agreements, watch, batch: Vec::new(), known: BTreeMap::new(), changed: BTreeMap::new() }
    }

    /// Announces nodes, so that one query loads all of them.
    pub fn announce(&mut self, nodes: impl IntoIterator<Item = NodeName>) {
        self.batch.extend(nodes);
    }

    /// Returns the expectations for a result of this node, with what is known now. `sku` is the machine type: as the
    /// cluster declares it, or as it was detected.
    ///
    /// `measured` are the result's own counts: a count that is accepted with this result is expected in it. A first
    /// value has nothing to be compared with.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn expectations_for(
        &mut self,
        node: &NodeName,
        sku: Option<&Sku>,
        types: &ClusterTypes<'_>,
        measured: &[(String, f64)],
        now: Timestamp,
    ) -> Result<Expectations, StoreError> {
        let watch = self.watch;
        let own = self.counts_of(node)?.clone();
        let mut expectations = Expectations::default();
        if let Some(sku) = sku {
            if !self.agreements.is_current(now) {
                *self.agreements = PeerAgreements::build(self.store, types.nodes_by_sku(), now)?;
            }
            for (metric, peers) in self.agreements.by_sku.get(sku).into_iter().flatten() {
                let own = own.get(&**metric).map(|count| count.accepted);
                expectations.agreed.extend(peers.agreed(own).map(|value| (metric.to_string(), value)));
            }
        }
        for (metric, count) in own {
            let count = match measured.iter().find(|(name, _)| *name == metric) {
                Some((_, value)) => count.with(*value, now, watch),
                None => count.settled(now, watch),
            };
            expectations.accepted.insert(metric, count.accepted);
        }
        Ok(expectations)
    }

    /// Adds the counts of a stored result. They are written by [`Self::write_changes`].
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn add(&mut self, node: &NodeName, measured: &[(String, f64)], now: Timestamp) -> Result<(), StoreError> {
        if measured.is_empty() {
            return Ok(());
        }
        let watch = self.watch;
        self.counts_of(node)?;
        let Some(counts) = self.known.get_mut(node) else { return Ok(()) };
        for (metric, value) in measured {
            let old = counts.get(metric).copied();
            let new = match old {
                Some(old) => Some(old.with(*value, now, watch)),
                None => MeasuredCount::first(*value, now),
            };
            if let Some(new) = new.filter(|new| old != Some(*new)) {
                counts.insert(metric.clone(), new);
                self.changed.insert((node.clone(), metric.clone()), new);
            }
        }
        Ok(())
    }

    /// Writes what has changed. This is a transaction after that of the results: if the controller is killed in
    /// between, the next result of the node has the same counts.
    ///
    /// # Errors
    /// If the store cannot be written.
    pub fn write_changes(&mut self, lease: &Lease, now: Timestamp) -> Result<(), StoreError> {
        if self.changed.is_empty() {
            return Ok(());
        }
        let rows: Vec<_> = std::mem::take(&mut self.changed)
            .into_iter()
            .map(|((node, metric), count)| (node, metric, count))
            .collect();
        self.store.record_measured_counts(lease, &rows, now)?;
        self.agreements.built = None;
        Ok(())
    }

    fn counts_of(&mut self, node: &NodeName) -> Result<&NodeCounts, StoreError> {
        if !self.known.contains_key(node) {
            let mut batch = std::mem::take(&mut self.batch);
            batch.push(node.clone());
            let mut stored = match self.store.measured_counts(&batch) {
                // Those of another node may be unreadable.
                Err(error) if error.is_of_some_data() && batch.len() > 1 => {
                    batch = vec![node.clone()];
                    self.store.measured_counts(&batch)?
                }
                stored => stored?,
            };
            for name in batch {
                let counts = stored.remove(&name).unwrap_or_default();
                self.known.entry(name).or_insert(counts);
            }
        }
        Ok(self.known.entry(node.clone()).or_default())
    }
}
