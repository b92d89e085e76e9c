//! What a check saw: numbers and events, or plainly that it saw nothing.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    reason::{ReasonCode, coded},
    time::Timestamp,
};

/// The outcome of looking, before any judgement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Observation {
    Measured {
        metrics: Vec<Metric>,
        events: Vec<Event>,
        /// Parts that it could not look at beside those it could. What was seen stands; the rest is not healthy by it.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        unread: Vec<ProbeFailure>,
    },
    /// There is nothing of this kind here (no GPU, no such mount), and that is known, not guessed.
    NotApplicable(Why),
    /// The check could not look. This is never a verdict on the node.
    CouldNot(ProbeFailure),
}

impl Observation {
    /// Everything that was to be looked at was looked at.
    pub const fn measured(metrics: Vec<Metric>, events: Vec<Event>) -> Self {
        Self::Measured { metrics, events, unread: Vec::new() }
    }
}

/// Gathers what a check sees, part by part: one part that cannot be read hides nothing of the others.
#[derive(Debug, Clone, Default)]
pub struct Look {
    metrics: Vec<Metric>,
    events: Vec<Event>,
    unread: Vec<ProbeFailure>,
}

impl Look {
    pub fn metric(&mut self, metric: Metric) {
        self.metrics.push(metric);
    }

    pub fn event(&mut self, event: Event) {
        self.events.push(event);
    }

    pub fn could_not(&mut self, failure: ProbeFailure) {
        self.unread.push(failure);
    }

    /// What was seen; `nothing` if there was nothing to see.
    pub fn or(mut self, nothing: Observation) -> Observation {
        match (self.metrics.is_empty() && self.events.is_empty(), self.unread.is_empty()) {
            (true, true) => nothing,
            (true, false) => Observation::CouldNot(self.unread.swap_remove(0)),
            (false, _) => Observation::Measured { metrics: self.metrics, events: self.events, unread: self.unread },
        }
    }
}

/// A code and its words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    pub code: ReasonCode,
    pub text: String,
}

/// One number about one thing.
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
    /// By the node's own clock, where the source gives it.
    pub at: Option<Timestamp>,
    pub text: String,
    /// What makes it this event and no other, where the source gives it: boot and sequence number of a kernel record.
    /// The same event told again is still one event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// One record of one boot. Later ones of the same boot are newer; of different boots nobody can say from here.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventKey {
    pub boot: String,
    pub sequence: u64,
}

impl EventKey {
    /// Whether the other one is of the same boot and not newer than this.
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
#[error("`{0}` is no key such as BOOT:17")]
pub struct BadEventKey(String);

impl FromStr for EventKey {
    type Err = BadEventKey;
    fn from_str(text: &str) -> Result<Self, BadEventKey> {
        let parts = text.rsplit_once(':').and_then(|(boot, number)| Some((boot, number.parse().ok()?)));
        match parts {
            Some((boot, sequence)) if !boot.is_empty() => Ok(Self { boot: boot.to_owned(), sequence }),
            _ => Err(BadEventKey(text.to_owned())),
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

/// Events of one kind about one part that have had their answer: told again, they say nothing new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    pub check: crate::ids::CheckId,
    pub code: ReasonCode,
    pub entity: Entity,
    /// This one and all before it.
    pub through: EventKey,
}

impl Observation {
    /// Without the events that have had their answer. What the check measured beside them stands.
    #[must_use]
    pub fn less(mut self, check: &crate::ids::CheckId, settled: &[Settled]) -> Self {
        if let Self::Measured { events, .. } = &mut self {
            events.retain(|event| {
                let key: Option<EventKey> = event.key.as_deref().and_then(|key| key.parse().ok());
                !key.is_some_and(|key| {
                    settled.iter().any(|settled| {
                        settled.check == *check
                            && settled.code == event.code
                            && settled.entity == event.entity
                            && settled.through.covers(&key)
                    })
                })
            });
        }
        self
    }
}

impl Metric {
    pub fn new(name: &str, entity: Entity, value: f64, unit: Unit) -> Self {
        Self { name: name.to_owned(), entity, value, unit }
    }

    /// How many of something there are.
    pub fn count(name: &str, entity: Entity, value: f64) -> Self {
        Self::new(name, entity, value, Unit::Count)
    }
}

impl Event {
    /// One that was found by looking at how things are, and that nobody recorded when it came about.
    pub fn seen(code: &'static str, entity: Entity, text: impl Into<String>) -> Self {
        Self { code: ReasonCode::fixed(code), entity, at: None, text: text.into(), key: None }
    }
}

coded! {
    /// What kind of part a measurement is about.
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
    /// What a number counts.
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

/// Why a probe brought nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeFailure {
    pub kind: FailureKind,
    pub text: String,
}

coded! {
    /// The ways in which looking can fail.
    pub enum FailureKind {
        /// The file, tool or library is not there.
        Missing => "missing",
        Denied => "denied",
        TimedOut => "timed-out",
        /// It could not even be killed (stuck in the kernel) and was left behind.
        Abandoned => "abandoned",
        Killed => "killed",
        /// The tool ran and said that it failed.
        Failed => "failed",
        TooLong => "too-long",
        Unparseable => "unparseable",
        /// It ran, and reported nothing at all.
        Empty => "empty",
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
    fn an_event_that_had_its_answer_is_taken_out_and_a_newer_one_or_one_of_another_boot_is_not() {
        let check = crate::ids::CheckId::new("gpu-xid").unwrap();
        let gpu = |id: &str| Entity::new(EntityKind::Gpu, id);
        let settled = [Settled {
            check: check.clone(),
            code: ReasonCode::fixed("xid-48"),
            entity: gpu("0"),
            through: "boot-a:500".parse().unwrap(),
        }];
        let told = |code: &'static str, id: &str, key: Option<&str>| {
            let event = Event { key: key.map(str::to_owned), ..Event::seen(code, gpu(id), "") };
            match Observation::measured(Vec::new(), vec![event]).less(&check, &settled) {
                Observation::Measured { events, .. } => events.len(),
                other => panic!("{other:?}"),
            }
        };
        for old in ["boot-a:500", "boot-a:499", "boot-a:1"] {
            assert_eq!(told("xid-48", "0", Some(old)), 0, "{old}");
        }
        for new in [Some("boot-a:501"), Some("boot-b:1"), Some("nonsense"), None] {
            assert_eq!(told("xid-48", "0", new), 1, "{new:?}");
        }
        assert_eq!(told("xid-79", "0", Some("boot-a:499")), 1, "another kind");
        assert_eq!(told("xid-48", "1", Some("boot-a:499")), 1, "another part");
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
