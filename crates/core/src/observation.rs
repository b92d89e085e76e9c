//! Observations: what a check measured, or why it could not measure.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    bounded_text::bound,
    reason::{ReasonCode, coded},
    time::Timestamp,
};

/// The outcome of a check before classification.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Observation {
    Measured {
        metrics: Vec<Metric>,
        events: Vec<Event>,
        /// Parts that the check could not read. The metrics and events of the other parts remain valid, but do not make
        /// these parts healthy.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        failures: Vec<ProbeFailure>,
    },
    /// The node is known to have nothing of this kind (no GPU, no such mount).
    NotApplicable(CodedReason),
    /// The check could not run. This is never a verdict on the node.
    Failed(ProbeFailure),
}

impl Observation {
    /// An observation for which every part could be read.
    pub const fn measured(metrics: Vec<Metric>, events: Vec<Event>) -> Self {
        Self::Measured { metrics, events, failures: Vec::new() }
    }

    /// Returns the observation within limits: a node can send anything. A finding is stored under its entity, with the
    /// text of its event. An observation with too many measurements is a failed one, because the controller enters all
    /// findings of a message in one transaction.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        if let Self::Measured { metrics, events, .. } = &mut self {
            let count = metrics.len() + events.len();
            if count > MAX_MEASUREMENTS {
                let text = format!("the check found {count} measurements and events; the limit is {MAX_MEASUREMENTS}");
                return Self::Failed(ProbeFailure::new(FailureKind::TooLong, text));
            }
            for metric in metrics {
                bound(&mut metric.entity.id, MAX_ENTITY_BYTES);
            }
            for event in events {
                bound(&mut event.entity.id, MAX_ENTITY_BYTES);
                bound(&mut event.text, MAX_EVENT_TEXT_BYTES);
                if let Some(key) = &mut event.key {
                    bound(key, MAX_EVENT_KEY_BYTES);
                }
            }
        }
        self
    }
}

/// The most measurements and events of one check. `ib-counters` has the most: ten counters of each RDMA port, virtual
/// ports included, and an event for each that grows too fast.
const MAX_MEASUREMENTS: usize = 4096;
/// The longest name of a part. A database limits the keys of an index, PostgreSQL to 2.7 kB.
const MAX_ENTITY_BYTES: usize = 1024;
/// Checks quote a few hundred characters.
const MAX_EVENT_TEXT_BYTES: usize = 4096;
/// A boot and a number, or a program and its owner.
const MAX_EVENT_KEY_BYTES: usize = 256;

/// Collects the observation of a check part by part. A part that cannot be read does not hide the others.
#[derive(Debug, Clone, Default)]
pub struct ObservationBuilder {
    metrics: Vec<Metric>,
    events: Vec<Event>,
    failures: Vec<ProbeFailure>,
}

impl ObservationBuilder {
    pub fn metric(&mut self, metric: Metric) {
        self.metrics.push(metric);
    }

    pub fn event(&mut self, event: Event) {
        self.events.push(event);
    }

    pub fn unreadable(&mut self, failure: ProbeFailure) {
        self.failures.push(failure);
    }

    /// Returns the collected observation, or `nothing` if it is empty.
    pub fn build_or(mut self, nothing: Observation) -> Observation {
        match (self.metrics.is_empty() && self.events.is_empty(), self.failures.is_empty()) {
            (true, true) => nothing,
            (true, false) => Observation::Failed(self.failures.swap_remove(0)),
            (false, _) => Observation::Measured { metrics: self.metrics, events: self.events, failures: self.failures },
        }
    }
}

/// A reason code and its text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CodedReason {
    pub code: ReasonCode,
    pub text: String,
}

/// One measurement of one part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metric {
    pub name: String,
    pub entity: Entity,
    pub value: f64,
    pub unit: Unit,
}

/// Something that happened: a line of the kernel log, a wrong value found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    pub code: ReasonCode,
    pub entity: Entity,
    /// By the node's own clock, if the source records it.
    pub at: Option<Timestamp>,
    pub text: String,
    /// Unique key of the event, if the source provides one: boot and sequence number of a kernel record. Two events
    /// with the same key are one event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// One record of one boot. A higher sequence number of the same boot is newer; records of different boots have no
/// order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventKey {
    pub boot: String,
    pub sequence: u64,
}

impl EventKey {
    /// Returns whether `other` is of the same boot and not newer than this record.
    pub fn covers(&self, other: &Self) -> bool {
        self.boot == other.boot && other.sequence <= self.sequence
    }
}

impl fmt::Display for EventKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.boot, self.sequence)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not an event key such as BOOT:17")]
pub struct InvalidEventKey(String);

impl FromStr for EventKey {
    type Err = InvalidEventKey;
    fn from_str(text: &str) -> Result<Self, InvalidEventKey> {
        let parts = text.rsplit_once(':').and_then(|(boot, number)| Some((boot, number.parse().ok()?)));
        match parts {
            Some((boot, sequence)) if !boot.is_empty() => Ok(Self { boot: boot.to_owned(), sequence }),
            _ => Err(InvalidEventKey(text.to_owned())),
        }
    }
}

impl Serialize for EventKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for EventKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

/// Acknowledged events of one kind about one part: they are ignored when reported again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcknowledgedEvents {
    pub check: crate::ids::CheckId,
    pub code: ReasonCode,
    pub entity: Entity,
    /// This event and all before it.
    pub up_to: EventKey,
}

impl Observation {
    /// Returns the observation without acknowledged events. Its metrics are unchanged.
    #[must_use]
    pub fn without_acknowledged(mut self, check: &crate::ids::CheckId, settled: &[AcknowledgedEvents]) -> Self {
        if let Self::Measured { events, .. } = &mut self {
            events.retain(|event| {
                let key: Option<EventKey> = event.key.as_deref().and_then(|key| key.parse().ok());
                !key.is_some_and(|key| {
                    settled.iter().any(|settled| {
                        settled.check == *check
                            && settled.code == event.code
                            && settled.entity == event.entity
                            && settled.up_to.covers(&key)
                    })
                })
            });
        }
        self
    }
}

impl Observation {
    /// Returns the metrics of parts that no other process used meanwhile: only these may serve as a baseline.
    pub fn into_undisturbed_metrics(self) -> Vec<Metric> {
        let Self::Measured { mut metrics, events, .. } = self else { return Vec::new() };
        metrics.retain(|metric| !events.iter().any(|event| event.is_disturbance_of(&metric.entity)));
        metrics
    }
}

impl Metric {
    pub fn new(name: &str, entity: Entity, value: f64, unit: Unit) -> Self {
        Self { name: name.to_owned(), entity, value, unit }
    }

    /// A metric with the unit [`Unit::Count`].
    pub fn count(name: &str, entity: Entity, value: f64) -> Self {
        Self::new(name, entity, value, Unit::Count)
    }
}

impl Event {
    /// An event found by inspecting the current state, with no recorded time.
    pub fn seen(code: &'static str, entity: Entity, text: impl Into<String>) -> Self {
        Self { code: ReasonCode::fixed(code), entity, at: None, text: text.into(), key: None }
    }

    /// Another process used this part while it was measured. `disturber` identifies the program and its owner, and is
    /// the same in every run.
    pub fn disturbed(entity: Entity, disturber: &str, text: impl Into<String>) -> Self {
        Self { key: Some(disturber.to_owned()), ..Self::seen(FailureKind::Disturbed.code(), entity, text) }
    }

    pub fn is_disturbance(&self) -> bool {
        self.code.as_str() == FailureKind::Disturbed.code()
    }

    /// Returns whether the event is a disturbance of this part. A disturbance of the node concerns all parts.
    pub fn is_disturbance_of(&self, entity: &Entity) -> bool {
        self.is_disturbance() && (self.entity == *entity || self.entity.kind == EntityKind::Node)
    }
}

coded! {
    /// The kind of part that a measurement is about.
    pub enum EntityKind {
        Node => "node",
        Gpu => "gpu",
        Nic => "nic",
        Link => "link",
        Switch => "switch",
        Mount => "mount",
        Disk => "disk",
        Dimm => "dimm",
        Service => "service",
    }
}

/// The part that a metric, an event or a finding is about. Written `gpu:3`, `mount:/data`, or just `node`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entity {
    pub kind: EntityKind,
    pub id: String,
}

impl Entity {
    pub fn node() -> Self {
        Self { kind: EntityKind::Node, id: String::new() }
    }

    pub fn new(kind: EntityKind, id: impl Into<String>) -> Self {
        Self { kind, id: id.into() }
    }
}

impl fmt::Display for Entity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.id.is_empty() { f.pad(self.kind.code()) } else { f.pad(&format!("{}:{}", self.kind, self.id)) }
    }
}

impl FromStr for Entity {
    type Err = crate::reason::UnknownCode;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (kind, id) = text.split_once(':').unwrap_or((text, ""));
        Ok(Self { kind: kind.parse()?, id: id.to_owned() })
    }
}

impl Serialize for Entity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Entity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

coded! {
    /// The unit of a metric.
    pub enum Unit {
        Count => "count",
        Percent => "percent",
        Ratio => "ratio",
        Bytes => "bytes",
        BytesPerSecond => "bytes/s",
        OperationsPerSecond => "ops/s",
        FlopPerSecond => "flop/s",
        Seconds => "s",
        Celsius => "celsius",
        Watts => "watts",
        PerHour => "1/h",
        PerSecond => "1/s",
        BitsPerSecond => "bits/s",
        Hertz => "hertz",
    }
}

/// Why a probe returned nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeFailure {
    pub kind: FailureKind,
    pub text: String,
}

coded! {
    /// The ways in which a probe can fail.
    pub enum FailureKind {
        /// The file, tool or library does not exist.
        Missing => "missing",
        /// The third-party program or library of a test is not installed on this node.
        NotInstalled => "not-installed",
        /// The hardware is of a kind that the test does not support.
        Unsupported => "unsupported",
        Denied => "denied",
        TimedOut => "timed-out",
        /// The probe could not be killed (stuck in the kernel) and was left behind.
        Abandoned => "abandoned",
        Killed => "killed",
        /// The tool ran and reported a failure.
        Failed => "failed",
        TooLong => "too-long",
        Unparseable => "unparseable",
        /// The tool ran and reported nothing at all.
        Empty => "empty",
        /// Another process used the measured part. The text names the process and its owner.
        Disturbed => "disturbed",
    }
}

impl ProbeFailure {
    pub fn new(kind: FailureKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entities_read_back_also_when_their_name_has_a_colon() {
        for text in ["node", "gpu:3", "mount:/data", "link:0000:18:00.0"] {
            assert_eq!(text.parse::<Entity>().unwrap().to_string(), text);
        }
        assert!("spoon:1".parse::<Entity>().unwrap_err().to_string().contains("gpu"));
    }

    #[test]
    fn acknowledged_events_are_removed_and_newer_ones_or_those_of_another_boot_are_not() {
        let check = crate::ids::CheckId::new("gpu-xid").unwrap();
        let gpu = |id: &str| Entity::new(EntityKind::Gpu, id);
        let acknowledged = [AcknowledgedEvents {
            check: check.clone(),
            code: ReasonCode::fixed("xid-48"),
            entity: gpu("0"),
            up_to: "boot-a:500".parse().unwrap(),
        }];
        let remaining = |code: &'static str, id: &str, key: Option<&str>| {
            let event = Event { key: key.map(str::to_owned), ..Event::seen(code, gpu(id), "") };
            match Observation::measured(Vec::new(), vec![event]).without_acknowledged(&check, &acknowledged) {
                Observation::Measured { events, .. } => events.len(),
                other => panic!("{other:?}"),
            }
        };
        for old in ["boot-a:500", "boot-a:499", "boot-a:1"] {
            assert_eq!(remaining("xid-48", "0", Some(old)), 0, "{old}");
        }
        for new in [Some("boot-a:501"), Some("boot-b:1"), Some("nonsense"), None] {
            assert_eq!(remaining("xid-48", "0", new), 1, "{new:?}");
        }
        assert_eq!(remaining("xid-79", "0", Some("boot-a:499")), 1, "another kind");
        assert_eq!(remaining("xid-48", "1", Some("boot-a:499")), 1, "another part");
    }

    #[test]
    fn what_a_node_measures_has_a_limited_length() {
        let long = || Entity::new(EntityKind::Mount, format!("/{}", "a\0".repeat(5000)));
        let metric = Metric::count("reads", long(), 1.0);
        let event = Event { key: Some("ö".repeat(5000)), ..Event::seen("gone", long(), "ä".repeat(5000)) };
        let Observation::Measured { metrics, events, .. } = Observation::measured(vec![metric], vec![event]).bounded()
        else {
            panic!("it was measured")
        };
        for entity in [&metrics[0].entity, &events[0].entity] {
            assert!(entity.id.len() <= 1024 && entity.id.starts_with("/a\u{FFFD}a"), "{entity}");
        }
        assert_eq!((events[0].text.len(), events[0].key.as_ref().map(String::len)), (4096, Some(256)));
    }

    #[test]
    fn an_observation_with_too_many_measurements_or_events_failed() {
        let bounded = |metrics: usize, events: usize| {
            let metric = Metric::count("errors", Entity::node(), 1.0);
            let event = Event::seen("disk-error", Entity::node(), "I/O error");
            Observation::measured(vec![metric; metrics], vec![event; events]).bounded()
        };
        for (metrics, events) in [(MAX_MEASUREMENTS, 0), (0, MAX_MEASUREMENTS), (1, MAX_MEASUREMENTS - 1)] {
            assert!(matches!(bounded(metrics, events), Observation::Measured { .. }), "{metrics} and {events}");
        }
        for (metrics, events) in [(MAX_MEASUREMENTS + 1, 0), (0, MAX_MEASUREMENTS + 1), (1, MAX_MEASUREMENTS)] {
            let Observation::Failed(failure) = bounded(metrics, events) else { panic!("{metrics} and {events}") };
            assert_eq!(failure.kind, FailureKind::TooLong);
            assert!(failure.text.contains("4097 measurements and events"), "{}", failure.text);
        }
    }

    #[test]
    fn only_undisturbed_metrics_may_be_a_baseline() {
        let mount = |path: &str| Entity::new(EntityKind::Mount, path);
        let names = |disturbed: Option<Entity>| {
            let metrics = ["/a", "/b"].map(|path| Metric::count("reads", mount(path), 1.0)).to_vec();
            let events =
                disturbed.map(|entity| Event::disturbed(entity, "dd of uid 0", "used by dd")).into_iter().collect();
            let left = Observation::measured(metrics, events).into_undisturbed_metrics();
            left.into_iter().map(|metric| metric.entity.id).collect::<Vec<_>>()
        };
        assert_eq!(names(None), ["/a", "/b"]);
        assert_eq!(names(Some(mount("/a"))), ["/b"]);
        assert!(names(Some(Entity::node())).is_empty());
    }

    #[test]
    fn every_code_reads_back() {
        for kind in EntityKind::ALL {
            assert_eq!(EntityKind::from_code(kind.code()), Some(*kind));
        }
        for unit in Unit::ALL {
            assert_eq!(Unit::from_code(unit.code()), Some(*unit));
        }
        for kind in FailureKind::ALL {
            assert_eq!(FailureKind::from_code(kind.code()), Some(*kind));
        }
    }
}
