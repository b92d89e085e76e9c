//! Operator commands: what a command would do, in words, and how it is recorded. The CLI and the API share this module,
//! so that a command means the same in both.
//!
//! Preparing a command reads the facts and changes nothing; the prepared command is then executed or discarded.
//! Executing it writes to the store, and the controller acts on it in its next cycles.

mod cases;
mod nodes;
mod repair;

use doctor_checks::Catalogue;
use doctor_core::{
    alert::Mute,
    case::Repair,
    hostlist::{self, Selector},
    ids::{CaseId, NodeName, PoolName, TestId},
    lifecycle::NodeState,
    node::Hold,
    plan::{self, BreakerAllowance},
    snapshot::{CommandKind, Pause},
    time::{Span, Timestamp},
    view::{self, BreakerState, Facts, StoredStatus, format_time},
};
use doctor_store::{ApiCall, OperatorCommands, Store, StoreError};

/// A command of an operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperatorCommand {
    /// Runs tests before anything that is merely due. No tests: all routine tests.
    Test {
        nodes: Vec<Selector>,
        tests: Vec<TestId>,
    },
    /// One run over all these nodes, with fault localisation if it fails. No test: `collective`.
    MultiNodeTest {
        nodes: Vec<Selector>,
        test: Option<String>,
    },
    /// No tests, no repairs.
    Hold {
        nodes: Vec<Selector>,
        until: Option<Timestamp>,
    },
    /// Ends a hold. A node that was out of service is tested before users get it.
    Release {
        nodes: Vec<Selector>,
    },
    /// Takes nodes out of service by an operator's decision, and examines them.
    Quarantine {
        nodes: Vec<Selector>,
        evict: bool,
    },
    /// Takes nodes out of service, performs this step on each once, and requalifies them.
    Repair {
        nodes: Vec<Selector>,
        step: Repair,
        evict: bool,
    },
    /// No validation starts.
    Pause {
        pool: Option<PoolName>,
        length: Option<Span>,
    },
    Resume {
        pool: Option<PoolName>,
    },
    /// Allows nodes to be taken out again.
    CloseBreaker,
    /// Sends no more notifications about cases until they close.
    Acknowledge {
        cases: Vec<CaseId>,
    },
    /// Sends no notifications about cases until then.
    Snooze {
        cases: Vec<CaseId>,
        until: Timestamp,
    },
}

/// A command that cannot be executed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    #[error("no {what} `{name}`")]
    Unknown { what: &'static str, name: String, known: String },
    #[error("{0}")]
    Usage(String),
    /// The command is valid and is not carried out now; `instead` says what would be accepted.
    #[error("refused: {why}")]
    Refused { why: String, instead: String },
}

/// What a command would do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedCommand {
    /// One sentence in the future tense.
    pub plan: String,
    /// One line for each change.
    pub changes: Vec<String>,
    /// One sentence in the past tense.
    pub done: String,
    /// What to do next.
    pub next: String,
    /// The nodes that it affects; none if it is not about nodes.
    pub nodes: Vec<NodeName>,
    /// If it takes more nodes out than the circuit breaker would: the number that confirms it.
    pub over_limit: Option<OverLimit>,
    writes: Vec<StoreWrite>,
    /// Preconditions: if one no longer holds, the command is not executed.
    preconditions: Vec<Precondition>,
}

/// A command on more nodes than the circuit breaker would allow. The operator has to state their number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverLimit {
    /// The number of nodes that the command names.
    pub nodes: usize,
    /// What the limit is.
    pub text: String,
}

impl OverLimit {
    /// Returns the limit if the command takes nodes out of service, and more than the breaker would. A single command on
    /// one node names it, and a number would add nothing; one of a series is as large as the series.
    fn of(facts: &Facts, nodes: &[NodeName]) -> Option<Self> {
        let BreakerAllowance { in_service, allowed, by_operators, limit } =
            plan::breaker_allowance(&facts.snapshot, nodes);
        let over = in_service > allowed && (nodes.len() > 1 || by_operators > 0);
        let taken = view::plural(in_service, "node");
        let after = match by_operators {
            0 => String::new(),
            more => {
                format!(", after {} that operators took out within the hour or requested", view::plural(more, "node"))
            }
        };
        let text = format!(
            "this takes {taken} out of service{after}; the circuit breaker would allow {allowed} now ({limit})"
        );
        over.then_some(Self { nodes: nodes.len(), text })
    }

    /// Returns whether this number confirms the command.
    pub fn is_confirmed_by(&self, number: Option<u64>) -> bool {
        number.is_some_and(|number| usize::try_from(number).is_ok_and(|number| number == self.nodes))
    }
}

/// A precondition recorded when a command was prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Precondition {
    Node { node: NodeName, life: NodeState, hold: Option<Hold> },
    Pause { pool: Option<PoolName>, pause: Option<Pause> },
    OpenCase(CaseId),
}

impl Precondition {
    fn check(&self, commands: &mut OperatorCommands<'_, '_>, at: Timestamp) -> Result<(), StoreError> {
        let (holds, what) = match self {
            Self::Node { node, life: state, hold } => {
                let (current_state, current_hold) = commands.state_and_hold(node)?;
                (current_state == *state && current_hold == *hold, node.to_string())
            }
            Self::Pause { pool, pause } => {
                let current =
                    commands.pause_of(pool.as_ref())?.filter(|pause| pause.until.is_none_or(|until| at < until));
                (current == *pause, format!("the pause {}", scope_text(pool.as_ref())))
            }
            Self::OpenCase(case) => (commands.is_case_open(*case)?, format!("case {case}")),
        };
        if holds { Ok(()) } else { Err(StoreError::StateChanged { what }) }
    }
}

/// The operator, the reason and the time of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandOrigin {
    pub by: String,
    pub why: String,
    pub at: Timestamp,
}

/// One change to the store.
#[derive(Debug, Clone, PartialEq, Eq)]
enum StoreWrite {
    Request(CommandKind),
    Hold { node: NodeName, until: Option<Timestamp> },
    Unhold(NodeName),
    Pause { pool: Option<PoolName>, until: Option<Timestamp> },
    Resume(Option<PoolName>),
    CloseBreaker,
    Mute { case: CaseId, node: NodeName, until: Option<Timestamp> },
}

impl OperatorCommand {
    /// Returns whether preparing the command requires the catalogue of tests.
    pub const fn needs_catalogue(&self) -> bool {
        matches!(self, Self::Test { .. } | Self::MultiNodeTest { .. })
    }

    /// Returns what the command would do at `facts.now`.
    ///
    /// # Errors
    /// If it names something unknown, or contradicts itself.
    pub fn prepare(&self, facts: &Facts, catalogue: &Catalogue) -> Result<PreparedCommand, CommandError> {
        match self {
            Self::Test { nodes, tests } => nodes::test(facts, catalogue, nodes, tests),
            Self::MultiNodeTest { nodes, test } => nodes::multi_node_test(facts, catalogue, nodes, test.as_deref()),
            Self::Hold { nodes, until } => nodes::hold(facts, nodes, *until),
            Self::Release { nodes } => nodes::release(facts, nodes),
            Self::Quarantine { nodes, evict } => nodes::quarantine(facts, nodes, *evict),
            Self::Repair { nodes, step, evict } => repair::prepare(facts, nodes, *step, *evict),
            Self::Pause { pool, length } => Ok(pause(facts, pool.as_ref(), *length)),
            Self::Resume { pool } => resume(facts, pool.as_ref()),
            Self::CloseBreaker => Ok(close_breaker(facts)),
            Self::Acknowledge { cases } => cases::mute(facts, cases, None),
            Self::Snooze { cases, until } => cases::mute(facts, cases, Some(*until)),
        }
    }
}

impl PreparedCommand {
    /// Records the command for the controller, all of it or nothing.
    ///
    /// # Errors
    /// If the store fails, or a precondition no longer holds ([`StoreError::StateChanged`]).
    pub fn execute(&self, store: &Store, origin: &CommandOrigin) -> Result<(), StoreError> {
        self.write(store, origin, None)
    }

    /// Like [`Self::execute`], and records the API call.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn execute_for_call(&self, call: &ApiCall, store: &Store, origin: &CommandOrigin) -> Result<(), StoreError> {
        self.write(store, origin, Some(call))
    }

    fn write(&self, store: &Store, origin: &CommandOrigin, call: Option<&ApiCall>) -> Result<(), StoreError> {
        store.operator_transaction(|commands| {
            for precondition in &self.preconditions {
                precondition.check(commands, origin.at)?;
            }
            for write in &self.writes {
                write.apply(commands, origin)?;
            }
            call.map_or(Ok(()), |call| commands.record_call(call, origin.at))
        })
    }
}

impl StoreWrite {
    fn apply(&self, commands: &mut OperatorCommands<'_, '_>, origin: &CommandOrigin) -> Result<(), StoreError> {
        let CommandOrigin { by, why, at } = origin;
        match self {
            Self::Request(command) => commands.add_command(command, by, why, *at).map(drop),
            Self::Hold { node, until } => {
                commands.hold(node, &Hold { by: by.clone(), why: why.clone(), since: *at, until: *until })
            }
            Self::Unhold(node) => commands.unhold(node, by, why, *at),
            Self::Pause { pool, until } => {
                let (by, why, pool) = (by.clone(), why.clone(), pool.clone());
                commands.pause(&Pause { pool, by, why, since: *at, until: *until })
            }
            Self::Resume(pool) => commands.resume(pool.as_ref(), by, why, *at),
            Self::CloseBreaker => commands.close_breaker(by, why, *at),
            Self::Mute { case, node, until } => {
                commands.mute(*case, node, &Mute { by: by.clone(), why: why.clone(), at: *at, until: *until })
            }
        }
    }
}

/// Returns the nodes that these selectors match. An unknown name is an error, not an empty result. A state that no node is
/// in is an empty result: the question was a good one.
///
/// # Errors
/// With the first selector that matches nothing, and some of the known names.
pub fn select_nodes(facts: &Facts, selectors: &[Selector]) -> Result<Vec<NodeName>, CommandError> {
    let unknown = |name: String| {
        let mut names = facts.select(&[]);
        let more = names.len().saturating_sub(1000);
        names.truncate(1000);
        let known = match (names.is_empty(), more) {
            (true, _) => "none; the controller has not observed the cluster yet".to_owned(),
            (_, 0) => hostlist::fold(&names),
            (..) => format!("{} and {more} more", hostlist::fold(&names)),
        };
        CommandError::Unknown { what: "node", name, known }
    };
    for selector in selectors {
        match selector {
            Selector::Names(names) => {
                if let Some(name) = names.iter().find(|name| facts.node(name).is_none()) {
                    return Err(unknown(name.to_string()));
                }
            }
            Selector::State(_) => {}
            other if facts.select(std::slice::from_ref(other)).is_empty() => return Err(unknown(other.to_string())),
            _ => {}
        }
    }
    Ok(facts.select(selectors))
}

/// Parses a duration from now, or a time in the future.
///
/// # Errors
/// If it is neither, or in the past.
pub fn parse_deadline(text: &str, now: Timestamp) -> Result<Timestamp, CommandError> {
    let at = text.parse::<Span>().map(|span| now.plus(span)).or_else(|_| text.parse::<Timestamp>());
    let short: String = text.chars().take(64).collect();
    match at {
        Ok(at) if at > now => Ok(at),
        Ok(at) => {
            Err(CommandError::Usage(format!("`{short}` is {} UTC, in the past: give a later time", format_time(at))))
        }
        Err(_) => Err(CommandError::Usage(format!(
            "`{short}` is neither a duration such as \"4h\" nor a time such as \"2026-11-15T08:00:00Z\""
        ))),
    }
}

fn scope_text(pool: Option<&PoolName>) -> String {
    pool.map_or_else(|| "everywhere".to_owned(), |pool| format!("in pool {pool}"))
}

fn pause(facts: &Facts, pool: Option<&PoolName>, length: Option<Span>) -> PreparedCommand {
    let until = length.map(|length| facts.now.plus(length));
    let how_long =
        until.map_or_else(|| "until resumed".to_owned(), |until| format!("until {} UTC", format_time(until)));
    // A duration instead of a time: the operator confirms this text, and needs a while to read it.
    let length = length.map_or_else(|| "until resumed".to_owned(), |length| format!("for {length}"));
    let preconditions = vec![pause_precondition(facts, pool)];
    let replaced = paused(facts, pool)
        .map_or_else(String::new, |pause| format!(", replacing the pause by {} ({})", pause.by, pause.why));
    let scope = scope_text(pool);
    let pool_flag = pool.map_or_else(String::new, |pool| format!(" --pool {pool}"));
    PreparedCommand {
        plan: format!("Would pause validation {scope} {how_long}."),
        changes: vec![format!("validation {scope}: paused {length}{replaced}")],
        done: format!("Paused {scope} {how_long}."),
        next: format!("`doctor resume{pool_flag} --why …` ends the pause"),
        nodes: Vec::new(),
        over_limit: None,
        writes: vec![StoreWrite::Pause { pool: pool.cloned(), until }],
        preconditions,
    }
}

fn paused<'a>(facts: &'a Facts, pool: Option<&PoolName>) -> Option<&'a Pause> {
    facts.snapshot.pauses.iter().find(|pause| pause.pool.as_ref() == pool)
}

fn pause_precondition(facts: &Facts, pool: Option<&PoolName>) -> Precondition {
    Precondition::Pause { pool: pool.cloned(), pause: paused(facts, pool).cloned() }
}

fn resume(facts: &Facts, pool: Option<&PoolName>) -> Result<PreparedCommand, CommandError> {
    let pauses = &facts.snapshot.pauses;
    let name = scope_text(pool);
    let ended = paused(facts, pool).map(|pause| format!("pause {name} by {} ends: {}", pause.by, pause.why));
    let Some(ended) = ended else {
        let others: Vec<String> = pauses.iter().map(|pause| scope_text(pause.pool.as_ref())).collect();
        let known = match others.is_empty() {
            true => "nothing is paused".to_owned(),
            false => format!("paused: {}", others.join(", ")),
        };
        return Err(CommandError::Unknown { what: "pause", name, known });
    };
    Ok(PreparedCommand {
        plan: format!("Would resume validation {name}."),
        changes: vec![ended],
        done: format!("Resumed {name}."),
        next: "`doctor status` shows what starts".to_owned(),
        nodes: Vec::new(),
        over_limit: None,
        writes: vec![StoreWrite::Resume(pool.cloned())],
        preconditions: vec![pause_precondition(facts, pool)],
    })
}

fn close_breaker(facts: &Facts) -> PreparedCommand {
    let view = view::status(facts, &StoredStatus::default()).breaker;
    let change = match view.state {
        BreakerState::Open => {
            format!("open -> closed; reason it opened: {}", view.why.as_deref().unwrap_or("not recorded"))
        }
        BreakerState::Closed => "already closed; nodes taken out so far no longer count".to_owned(),
    };
    PreparedCommand {
        plan: "Would close the breaker: nodes may be taken out again.".to_owned(),
        changes: vec![format!("breaker: {change}")],
        done: "Closed the breaker.".to_owned(),
        next: "`doctor status` shows the nodes that are taken out".to_owned(),
        nodes: Vec::new(),
        over_limit: None,
        writes: vec![StoreWrite::CloseBreaker],
        preconditions: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use doctor_core::{
        node::{Marks, Occupancy},
        policy::Policy,
        profile::Profiles,
    };

    use super::*;
    use crate::{
        cluster_state,
        settings::Settings,
        snapshot::{ClusterStateRow, ObservedCluster},
    };

    #[test]
    fn a_deadline_is_a_duration_or_a_time_in_the_future() {
        let now: Timestamp = "2026-11-15T08:00:00Z".parse().unwrap();
        assert_eq!(parse_deadline("4h", now).unwrap(), now.plus(Span::hours(4)));
        assert_eq!(parse_deadline("2026-11-16T08:00:00Z", now).unwrap(), now.plus(Span::days(1)));
        for text in ["yesterday", "2026-11-14T08:00:00Z", "0s", ""] {
            assert!(parse_deadline(text, now).is_err(), "{text}");
        }
    }

    const NOW: Timestamp = Timestamp::from_secs(1_700_000_000);

    fn name(text: &str) -> NodeName {
        NodeName::new(text).unwrap()
    }

    /// A cluster with `here` and `held`, which had `gone`.
    fn store() -> (Store, Settings) {
        let store = Store::open_in_memory().unwrap();
        let settings = Settings::new(Policy::built_in(), Catalogue::built_in(), Profiles::default()).unwrap();
        for node in ["here", "held", "gone"] {
            let why = "known".to_owned();
            store.hold(&name(node), &Hold { by: "eve".to_owned(), why, since: NOW, until: None }).unwrap();
        }
        for node in ["here", "gone"] {
            store.unhold(&name(node), "eve", "over", NOW).unwrap();
        }
        (store, settings)
    }

    fn facts(store: &Store, settings: &Settings) -> Facts {
        let row = |node: &str| ClusterStateRow {
            node: name(node),
            pool: PoolName::new("gpu").unwrap(),
            occupancy: Occupancy::Free,
            marks: Marks::default(),
            sku: None,
            declared: None,
            last_report: None,
        };
        let cluster =
            ObservedCluster { nodes: vec![row("held"), row("here")], ..ObservedCluster::unobserved(settings) };
        cluster_state::facts(store, Some(NOW), cluster, NOW).unwrap()
    }

    #[test]
    fn before_the_cluster_was_observed_no_node_counts_as_gone() {
        let (store, settings) = store();
        let facts = cluster_state::facts(&store, None, ObservedCluster::unobserved(&settings), NOW).unwrap();
        assert!(facts.gone.is_empty(), "{:?}", facts.gone);
        let here = facts.snapshot.nodes.iter().find(|record| record.node.name.as_str() == "here").unwrap();
        assert!(matches!(here.node.occupancy, Occupancy::Unknown { .. }), "{here:?}");
        let command = OperatorCommand::Quarantine { nodes: vec!["here".parse::<Selector>().unwrap()], evict: false };
        let prepared = command.prepare(&facts, &settings.catalogue).unwrap();
        assert!(prepared.writes.iter().any(|write| matches!(write, StoreWrite::Request(_))), "{prepared:?}");
    }

    #[test]
    fn each_node_is_described_with_what_blocks_the_command_there() {
        let (store, settings) = store();
        let facts = facts(&store, &settings);
        let all = || vec!["gone,held,here".parse::<Selector>().unwrap()];
        let memory = TestId::new("memory").unwrap();
        for (command, lines, requests) in [
            (
                OperatorCommand::Hold { nodes: all(), until: None },
                ["gone from the cluster; held if it returns", "already held by eve (known)", "in-service -> held"],
                0,
            ),
            (
                OperatorCommand::Test { nodes: all(), tests: vec![memory] },
                ["gone from the cluster; not tested", "memory, after the hold ends: held by eve (known)", "memory"],
                2,
            ),
            (
                OperatorCommand::Quarantine { nodes: all(), evict: false },
                ["gone from the cluster; nothing changes", "held by eve (known); after", "in-service -> quarantined"],
                2,
            ),
            (
                OperatorCommand::Release { nodes: all() },
                ["gone from the cluster; nothing changes", "the hold ends", "in-service; nothing changes"],
                2,
            ),
        ] {
            let prepared = command.prepare(&facts, &settings.catalogue).unwrap();
            assert_eq!(prepared.nodes, ["gone", "held", "here"].map(name), "{command:?}");
            for (line, part) in prepared.changes.iter().zip(lines) {
                assert!(line.contains(part), "{line}: {part}");
            }
            let request_count = prepared.writes.iter().filter(|write| matches!(write, StoreWrite::Request(_))).count();
            assert_eq!(request_count, requests, "{prepared:?}");
        }
        let gone = || vec!["gone".parse::<Selector>().unwrap()];
        for command in [
            OperatorCommand::Test { nodes: gone(), tests: Vec::new() },
            OperatorCommand::Quarantine { nodes: gone(), evict: true },
            OperatorCommand::Release { nodes: gone() },
        ] {
            let error = command.prepare(&facts, &settings.catalogue).unwrap_err().to_string();
            assert!(error.contains("no longer lists gone"), "{command:?}: {error}");
        }
    }

    fn prepare_repair(facts: &Facts, step: Repair) -> Result<PreparedCommand, CommandError> {
        let nodes = vec!["here".parse::<Selector>().unwrap()];
        OperatorCommand::Repair { nodes, step, evict: false }.prepare(facts, &Catalogue::new([]))
    }

    #[test]
    fn a_repair_is_refused_with_the_reason_and_what_would_be_accepted() {
        let (store, settings) = store();
        let able = |change: fn(&mut Facts)| {
            let mut facts = facts(&store, &settings);
            facts.snapshot.capabilities = doctor_core::snapshot::Capabilities::ALL;
            change(&mut facts);
            facts
        };
        let paused = |pool: Option<&str>| Pause {
            pool: pool.map(|pool| PoolName::new(pool).unwrap()),
            by: "bob".to_owned(),
            why: "upgrade".to_owned(),
            since: NOW,
            until: None,
        };
        let cases: [(Facts, &str, &str); 6] = [
            (able(|facts| facts.observed_at = None), "not observed the cluster", "doctor serve"),
            (
                able(|facts| facts.snapshot.capabilities.reboot = false),
                "cannot reboot",
                "--step reset or --step replace",
            ),
            (
                able(|facts| facts.snapshot.capabilities = doctor_core::snapshot::Capabilities::NONE),
                "cannot reboot",
                "doctor quarantine",
            ),
            (
                able(|facts| {
                    std::sync::Arc::make_mut(&mut facts.snapshot.policy).mode = doctor_core::policy::Mode::Observe;
                }),
                "observe",
                "mode = \"act\"",
            ),
            (
                Facts { snapshot: with_pause(able(|_| {}).snapshot, paused(None)), ..able(|_| {}) },
                "everything is paused by bob (upgrade)",
                "`doctor resume --why …`",
            ),
            (
                Facts { snapshot: with_pause(able(|_| {}).snapshot, paused(Some("gpu"))), ..able(|_| {}) },
                "pool gpu is paused by bob (upgrade)",
                "`doctor resume --pool gpu --why …`",
            ),
        ];
        for (facts, reason, accepted) in cases {
            let error = prepare_repair(&facts, Repair::Reboot).unwrap_err();
            let CommandError::Refused { why, instead } = &error else { panic!("{error:?}") };
            assert!(why.contains(reason) && instead.contains(accepted), "{why}: {instead}");
        }
        let elsewhere = with_pause(able(|_| {}).snapshot, paused(Some("cpu")));
        prepare_repair(&Facts { snapshot: elsewhere, ..able(|_| {}) }, Repair::Reboot).unwrap();
    }

    #[test]
    fn a_repair_of_a_node_that_another_party_keeps_out_is_refused_by_name() {
        let (store, settings) = store();
        let mut facts = facts(&store, &settings);
        facts.snapshot.capabilities = doctor_core::snapshot::Capabilities::ALL;
        let record = facts.snapshot.nodes.iter_mut().find(|record| record.node.name.as_str() == "here").unwrap();
        let mark = doctor_core::node::ForeignMark { by: "the vendor".into(), text: "fans".into(), blocks: true };
        record.node_mut().marks.foreign.push(mark);
        let CommandError::Refused { why, instead } = prepare_repair(&facts, Repair::Reboot).unwrap_err() else {
            panic!("not refused")
        };
        assert_eq!(why, "the vendor keeps here out of service (fans)");
        assert_eq!(instead, "the command again once the vendor has removed that mark");
    }

    #[test]
    fn a_release_ends_the_hold_for_which_a_repair_waits_and_withdraws_it_only_without_a_hold() {
        let (store, settings) = store();
        for node in ["held", "here"] {
            let repair = CommandKind::Repair { node: name(node), step: Repair::Reboot, evict: false };
            store.add_command(&repair, "bob", "hangs", NOW).unwrap();
        }
        let release = |node: &str| {
            let command = OperatorCommand::Release { nodes: vec![node.parse::<Selector>().unwrap()] };
            command.prepare(&facts(&store, &settings), &settings.catalogue).unwrap()
        };
        let origin = CommandOrigin { by: "ann".to_owned(), why: "done".to_owned(), at: NOW };
        let kinds = || store.open_commands().unwrap().into_iter().map(|command| command.kind).collect::<Vec<_>>();

        let held = release("held");
        assert_eq!(
            held.changes,
            ["held: held by eve (known); the hold ends, and the reboot requested by bob (hangs) goes on"]
        );
        held.execute(&store, &origin).unwrap();
        assert!(!kinds().iter().any(|kind| matches!(kind, CommandKind::Release { .. })), "{:?}", kinds());

        for node in ["here", "held"] {
            let withdraws = release(node);
            let text = "in-service; this withdraws the reboot requested by bob (hangs); nothing else changes";
            assert_eq!(withdraws.changes, [format!("{node}: {text}")]);
            withdraws.execute(&store, &origin).unwrap();
            assert!(kinds().contains(&CommandKind::Release { node: name(node) }));
        }
    }

    #[test]
    fn many_small_commands_want_a_number_as_one_large_command_does() {
        let (store, settings) = store();
        let prepared = |node: &str| {
            let command = OperatorCommand::Quarantine { nodes: vec![node.parse::<Selector>().unwrap()], evict: false };
            command.prepare(&facts(&store, &settings), &settings.catalogue).unwrap()
        };
        let origin = CommandOrigin { by: "ann".to_owned(), why: "smoke".to_owned(), at: NOW };
        let first = prepared("here");
        assert_eq!(first.over_limit, None, "one node is named");
        first.execute(&store, &origin).unwrap();
        assert_eq!(prepared("here").over_limit, None, "the same node again");
        let limit = prepared("held").over_limit.expect("a number");
        assert_eq!(limit.nodes, 1);
        assert!(limit.text.contains("after 1 node that operators took out within the hour or requested"), "{limit:?}");
        assert!(limit.text.contains("the circuit breaker would allow 0 now"), "{limit:?}");
    }

    fn with_pause(mut snapshot: doctor_core::snapshot::Snapshot, pause: Pause) -> doctor_core::snapshot::Snapshot {
        snapshot.pauses.push(pause);
        snapshot
    }

    #[test]
    fn a_pause_that_begins_after_the_plan_prevents_a_repair() {
        let (store, settings) = store();
        let mut facts = facts(&store, &settings);
        facts.snapshot.capabilities = doctor_core::snapshot::Capabilities::ALL;
        let prepared = prepare_repair(&facts, Repair::Reset).unwrap();
        assert!(prepared.changes[0].contains("here: in-service -> out of service, reset"), "{prepared:?}");
        let origin = CommandOrigin { by: "ann".to_owned(), why: "fan".to_owned(), at: NOW };
        let pause = OperatorCommand::Pause { pool: Some(PoolName::new("gpu").unwrap()), length: None };
        pause.prepare(&facts, &settings.catalogue).unwrap().execute(&store, &origin).unwrap();
        assert!(matches!(prepared.execute(&store, &origin), Err(StoreError::StateChanged { .. })));
    }

    #[test]
    fn a_command_whose_preconditions_have_changed_is_not_executed() {
        let (store, settings) = store();
        let origin = CommandOrigin { by: "ann".to_owned(), why: "fan".to_owned(), at: NOW };
        let nodes = || vec!["held,here".parse::<Selector>().unwrap()];
        let command = OperatorCommand::Hold { nodes: nodes(), until: None };
        let prepared = command.prepare(&facts(&store, &settings), &settings.catalogue).unwrap();
        let hold = Hold { by: "bob".to_owned(), why: "noise".to_owned(), since: NOW, until: None };
        store.hold(&name("here"), &hold).unwrap();
        let lines = store.audit(100, None).unwrap().len();
        let error = prepared.execute(&store, &origin).unwrap_err();
        assert!(matches!(&error, StoreError::StateChanged { what } if what == "here"), "{error}");
        assert_eq!(store.audit(100, None).unwrap().len(), lines, "nothing was changed");
        let current = command.prepare(&facts(&store, &settings), &settings.catalogue).unwrap();
        assert!(current.changes[1].contains("already held by bob (noise)"), "{current:?}");
        current.execute(&store, &origin).unwrap();

        let pause = OperatorCommand::Pause { pool: None, length: Some(Span::hours(1)) };
        let prepared = pause.prepare(&facts(&store, &settings), &settings.catalogue).unwrap();
        prepared.execute(&store, &origin).unwrap();
        assert!(
            matches!(prepared.execute(&store, &origin), Err(StoreError::StateChanged { .. })),
            "it is paused by now"
        );
        let again = pause.prepare(&facts(&store, &settings), &settings.catalogue).unwrap();
        assert!(again.changes[0].contains("replacing the pause by ann (fan)"), "{again:?}");
    }
}
