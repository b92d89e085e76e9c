//! Scenarios: a text script drives a session, and its output is reviewed as a diff.
//!
//! One command per line; `#` begins a comment, which is printed too, so that the output can be read by itself. Times
//! are relative to the start. Ids are replaced with small numbers in the order of their appearance.
//!
//! ```text
//! world nodes 4                         a quiet cluster of four nodes (also: pool NAME N PREFIX, seed N, agents off, agents every 5m, repairs, caps replace)
//! policy mode = "act"                   one line of the policy file, before or between runs
//! record node001 storage pass 9d        a result from that long ago
//! fresh                                 every test of every node passed a day ago
//! fault node002 gpu-off-bus             and other incidents, see `incident`
//! run 30m every 1m                      lets time pass; prints every decision
//! show nodes | history | outputs | latest NODE | cases | reasons | breaker | counters | attention
//! stop                                  stops the controller in an orderly way; `run` starts it again
//! ```

mod incidents;

use std::{collections::BTreeMap, fmt::Write as _};

use doctor_core::{
    finding::Verdict,
    hostlist,
    ids::{NodeName, PoolName, TestId},
    node::Hold,
    policy::Policy,
    reason::UnknownCode,
    run::NonEmpty,
    snapshot::{Breaker, CommandKind, Pause},
    time::{Span, Timestamp},
};
use doctor_engine::cycle_report::CycleReport;
use doctor_store::{StoreUrl, records::HistoryFilter};

pub(crate) use self::incidents::incident;
use super::{
    decisions::describe,
    session::{Session, SessionConfig, SessionError, policy},
};
use crate::{
    PoolConfig, WorldConfig,
    config::caps_named,
    invariants::{Tolerances, check_effects},
};

/// A script that is invalid or fails.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    #[error("line {line}: {text}: {why}")]
    Line { line: usize, text: String, why: String },
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// Plays a script and returns the output for review.
///
/// # Errors With the invalid line and what is accepted there.
pub fn play(script: &str) -> Result<String, ScenarioError> {
    play_into(script, None)
}

/// As [`play`], and keeps the store, for commands that read it.
///
/// # Errors
/// As [`play`], and if the store cannot be opened.
pub fn play_into(script: &str, store: Option<StoreUrl>) -> Result<String, ScenarioError> {
    let mut stage = ScenarioRunner { store, ..ScenarioRunner::default() };
    for (number, line) in script.lines().enumerate() {
        let text = line.trim();
        let _ = match text {
            "" => writeln!(stage.out),
            _ if text.starts_with('#') => writeln!(stage.out, "{text}"),
            _ => writeln!(stage.out, "> {text}"),
        };
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        stage.command(text).map_err(|failure| match failure {
            CommandFailure::Invalid(why) => ScenarioError::Line { line: number + 1, text: text.to_owned(), why },
            CommandFailure::Session(error) => error.into(),
        })?;
    }
    stage.close();
    if let Some(session) = &mut stage.session {
        session.save_state()?;
    }
    Ok(stage.out)
}

pub(crate) enum CommandFailure {
    Invalid(String),
    Session(SessionError),
}

impl<E: Into<SessionError>> From<E> for CommandFailure {
    fn from(error: E) -> Self {
        Self::Session(error.into())
    }
}

fn invalid<T>(why: impl Into<String>) -> Result<T, CommandFailure> {
    Err(CommandFailure::Invalid(why.into()))
}

#[derive(Default)]
struct ScenarioRunner {
    out: String,
    world: Option<WorldConfig>,
    policy: Vec<String>,
    session: Option<Session>,
    /// `None`: the store is in memory.
    store: Option<StoreUrl>,
    names: BTreeMap<String, String>,
    counts: BTreeMap<char, u32>,
    problems: Vec<String>,
}

impl ScenarioRunner {
    fn command(&mut self, text: &str) -> Result<(), CommandFailure> {
        let args: Vec<&str> = text.split_whitespace().collect();
        match args[0] {
            "world" => self.make_world(&args[1..]),
            "policy" => self.set_policy(text.trim_start_matches("policy").trim()),
            "run" => self.run(&args[1..]),
            "show" => self.show(&args[1..]),
            "fresh" => self.fresh(),
            "stop" => Ok(self.session()?.stop()?),
            "restart" => {
                let empty = args.get(1) == Some(&"empty");
                Ok(self.session()?.restart(empty)?)
            }
            "record" | "hold" | "unhold" | "release" | "test" | "together" | "quarantine" | "repair" | "pause"
            | "resume" | "close-breaker" => self.operator(&args),
            _ => self.incident(&args),
        }
    }

    fn make_world(&mut self, args: &[&str]) -> Result<(), CommandFailure> {
        if self.session.is_some() {
            return invalid("the world already exists");
        }
        let mut world = WorldConfig::quiet(4);
        let mut pools = Vec::new();
        let mut rest = args;
        while let Some((word, after)) = rest.split_first() {
            rest = match (*word, after) {
                ("nodes", [count, after @ ..]) => {
                    pools.push(
                        PoolConfig::new("gpu", number(count)?, "node")
                            .map_err(|e| CommandFailure::Invalid(e.to_string()))?,
                    );
                    after
                }
                ("pool", [name, count, prefix, after @ ..]) => {
                    pools.push(
                        PoolConfig::new(name, number(count)?, prefix)
                            .map_err(|e| CommandFailure::Invalid(e.to_string()))?,
                    );
                    after
                }
                ("seed", [seed, after @ ..]) => {
                    world.seed = u64::from(number(seed)?);
                    after
                }
                ("agents", ["off", after @ ..]) => {
                    world.agents = false;
                    after
                }
                ("agents", ["every", length, after @ ..]) => {
                    world.agents_every = Some(span(length)?);
                    after
                }
                ("repairs", after) => {
                    world.repairs = true;
                    after
                }
                ("caps", [names, after @ ..]) => {
                    world.caps = caps_named(names).map_err(CommandFailure::Invalid)?;
                    after
                }
                _ => {
                    return invalid(
                        "accepted: nodes N, pool NAME N PREFIX, seed N, agents off, agents every 5m, repairs, caps NAMES",
                    );
                }
            };
        }
        if !pools.is_empty() {
            world.pools = pools;
        }
        self.world = Some(world);
        Ok(())
    }

    fn set_policy(&mut self, line: &str) -> Result<(), CommandFailure> {
        self.policy.push(line.to_owned());
        let policy = merged(&self.policy)?;
        if let Some(session) = &mut self.session {
            session.set_policy(policy)?;
        }
        Ok(())
    }

    fn session(&mut self) -> Result<&mut Session, CommandFailure> {
        if self.session.is_none() {
            let Some(world) = self.world.clone() else { return invalid("first make a world, such as `world nodes 4`") };
            let mut config = SessionConfig::new(world);
            config.policy = merged(&self.policy)?;
            config.every = Span::minutes(1);
            config.store.clone_from(&self.store);
            self.session = Some(Session::new(config)?);
        }
        self.session.as_mut().ok_or_else(|| CommandFailure::Invalid("there is no session".to_owned()))
    }

    fn run(&mut self, args: &[&str]) -> Result<(), CommandFailure> {
        let (length, every) = match args {
            [length] => (span(length)?, Span::minutes(1)),
            [length, "every", every] => (span(length)?, span(every)?),
            _ => return invalid("accepted: run 30m, run 30m every 1m"),
        };
        self.session()?.set_every(every);
        let mut session = self.session.take().expect("it was just made");
        let until = session.backend().world().now().plus(length);
        let outcome = session.run_until(until, |session, report| {
            self.print_cycle(session, report);
            Ok(())
        });
        self.session = Some(session);
        Ok(outcome?)
    }

    /// Prints every decision and every result of a cycle, one line each.
    fn print_cycle(&mut self, session: &Session, report: &CycleReport) {
        let start = session.backend().world().config().start;
        let clock = clock(session.now(), start);
        let mut lines = Vec::new();
        if report.results > 0 {
            lines.push(format!("results accepted: {}", report.results));
        }
        if report.rejected > 0 {
            lines.push(format!("results rejected: {}", report.rejected));
        }
        lines.extend(report.actions.iter().filter_map(|action| {
            let line = describe(&action.value)?;
            Some(format!("{line} [{}] {}", action.code, action.text))
        }));
        // An outage is printed once, not every minute.
        if report.problems != self.problems {
            lines.extend(report.problems.iter().map(|problem| format!("trouble: {problem}")));
            self.problems.clone_from(&report.problems);
        }
        for line in lines {
            let line = self.normalize_ids(&line, start);
            let _ = writeln!(self.out, "{clock}  {line}");
        }
    }

    /// Replaces ids with small numbers, and timestamps with the time since the start.
    fn normalize_ids(&mut self, line: &str, start: Timestamp) -> String {
        let mut plain = String::with_capacity(line.len());
        for word in line.split_inclusive(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | ':' | '.'))) {
            let core_len =
                word.trim_end_matches(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | ':' | '.'))).len();
            let (core, tail) = word.split_at(core_len);
            let (core, dot) = core.strip_suffix(['.', ':']).map_or((core, ""), |stem| (stem, &core[stem.len()..]));
            if let Ok(moment) = core.parse::<Timestamp>() {
                plain.push_str(&clock(moment, start));
            } else if is_id(core) {
                plain.push_str(&self.short_id(core));
            } else {
                plain.push_str(core);
            }
            plain.push_str(dot);
            plain.push_str(tail);
        }
        plain
    }

    fn short_id(&mut self, id: &str) -> String {
        if let Some(name) = self.names.get(id) {
            return name.clone();
        }
        let kind = id.chars().next().unwrap_or('?');
        let count = self.counts.entry(kind).or_default();
        *count += 1;
        let word = match kind {
            'r' => "run",
            'c' => "case",
            _ => "op",
        };
        let name = format!("{word}#{count}");
        self.names.insert(id.to_owned(), name.clone());
        name
    }

    /// Records a pass of every test on every node, a day ago.
    fn fresh(&mut self) -> Result<(), CommandFailure> {
        let session = self.session()?;
        let at = session.now().minus(Span::days(1));
        let nodes: Vec<NodeName> = session
            .backend()
            .world()
            .snapshot()
            .unwrap_or_default()
            .into_iter()
            .map(|seen| seen.node.name.clone())
            .collect();
        for test in session.settings().tests.clone().iter() {
            for node in &nodes {
                session.record(node, &test.id, Verdict::Pass, at)?;
            }
        }
        Ok(())
    }

    fn incident(&mut self, args: &[&str]) -> Result<(), CommandFailure> {
        let incident = incident(args)?;
        let session = self.session()?;
        let done = session.backend().world().inject(&incident);
        if done { Ok(()) } else { invalid("not possible: the node does not exist, or is not in the required state") }
    }

    fn operator(&mut self, args: &[&str]) -> Result<(), CommandFailure> {
        let session = self.session()?;
        let now = session.now();
        let (by, why) = ("ann", "because the script says so");
        let store = session.store();
        let ask = |command: CommandKind| store.add_command(&command, by, why, now).map(|_| ());
        match args {
            ["record", nodes, test, verdict, ago] => {
                let (test, ago) = (name::<TestId>(test)?, span(ago)?);
                let Some(verdict) = Verdict::from_code(verdict) else {
                    return invalid("verdicts: pass, fail, inconclusive, not-applicable");
                };
                for node in list(nodes)? {
                    session.record(&node, &test, verdict, now.minus(ago))?;
                }
                return Ok(());
            }
            ["hold", node] => {
                store.hold(&name(node)?, &Hold { by: by.into(), why: why.into(), since: now, until: None })?;
            }
            ["hold", node, "for", length] => {
                let until = Some(now.plus(span(length)?));
                store.hold(&name(node)?, &Hold { by: by.into(), why: why.into(), since: now, until })?;
            }
            ["unhold", node] => store.unhold(&name(node)?, by, why, now)?,
            ["release", node] => ask(CommandKind::Release { node: name(node)? })?,
            ["quarantine", node] => ask(CommandKind::Quarantine { node: name(node)?, evict: false })?,
            ["repair", node, step, rest @ ..] if matches!(rest, [] | ["drain"]) => {
                let step = step.parse().map_err(|error: UnknownCode| CommandFailure::Invalid(error.to_string()))?;
                ask(CommandKind::Repair { node: name(node)?, step, evict: !rest.is_empty() })?;
            }
            ["quarantine", node, "drain"] => ask(CommandKind::Quarantine { node: name(node)?, evict: true })?,
            ["test", node, tests @ ..] => {
                let tests = tests.iter().map(|test| name(test)).collect::<Result<_, _>>()?;
                ask(CommandKind::Test { node: name(node)?, tests, run: None })?;
            }
            ["together", nodes, test] => {
                let Some(nodes) = NonEmpty::new(list(nodes)?) else { return invalid("together needs nodes") };
                ask(CommandKind::MultiNodeTest { nodes, test: name(test)?, trials: Vec::new() })?;
            }
            ["pause", rest @ ..] => {
                let (pool, until) = match rest {
                    [] => (None, None),
                    ["for", length] => (None, Some(now.plus(span(length)?))),
                    [pool] => (Some(name::<PoolName>(pool)?), None),
                    [pool, "for", length] => (Some(name::<PoolName>(pool)?), Some(now.plus(span(length)?))),
                    _ => return invalid("accepted: pause [POOL] [for 4h]"),
                };
                store.pause(&Pause { pool, by: by.into(), why: why.into(), since: now, until })?;
            }
            ["resume"] => store.resume(None, by, why, now)?,
            ["resume", pool] => store.resume(Some(&name(pool)?), by, why, now)?,
            ["close-breaker"] => store.close_breaker(by, why, now)?,
            _ => {
                return invalid(
                    "accepted: record NODES TEST VERDICT AGO, hold NODE [for 2h], unhold NODE, release NODE, quarantine NODE [drain], repair NODE reset|reboot|replace [drain], test NODE [TESTS], together NODES TEST, pause [POOL] [for 4h], resume [POOL], close-breaker",
                );
            }
        }
        Ok(())
    }

    fn show(&mut self, args: &[&str]) -> Result<(), CommandFailure> {
        let session = self.session()?;
        let attention = if args == ["attention"] { session.status()?.attention } else { Vec::new() };
        let start = session.backend().world().config().start;
        let store = session.store();
        let mut lines = Vec::new();
        match args {
            ["attention"] => {
                lines.extend(attention.iter().map(|item| format!("{} {}: {}", item.urgency, item.kind, item.text)));
            }
            ["nodes"] => {
                let mut nodes = store.load_nodes()?;
                let mut well = 0;
                for seen in session.backend().world().snapshot().unwrap_or_default() {
                    let known = nodes.remove(&seen.node.name);
                    let node_state = known.as_ref().map_or("in-service", |node| node.state.as_str());
                    let ours: Vec<_> = seen.node.marks.ours.iter().map(|mark| mark.kind.code()).collect();
                    let foreign: Vec<_> = seen.node.marks.foreign.iter().map(|mark| mark.by.as_str()).collect();
                    let findings = known.map_or(0, |node| node.findings.len());
                    if node_state == "in-service" && findings == 0 && ours.is_empty() && foreign.is_empty() {
                        well += 1;
                        continue;
                    }
                    lines.push(format!(
                        "{} {node_state}, findings {findings}, our marks {ours:?}, foreign {foreign:?}",
                        seen.node.name
                    ));
                }
                lines.push(format!("in service, no findings or marks: {well}"));
            }
            ["history"] | ["history", _] => {
                let node = args.get(1).map(|node| name(node)).transpose()?;
                let rows = store.history(&HistoryFilter { node, limit: Some(200), ..HistoryFilter::default() })?;
                lines.extend(rows.into_iter().rev().map(|row| {
                    let at = clock(row.at, start);
                    let run = row.run.map_or_else(String::new, |run| format!(" {run}"));
                    format!("{at} {} {} {} [{}]{run}", row.node, row.test, row.verdict, row.reason)
                }));
            }
            ["outputs"] => {
                for ended in store.without_result_since(start, 100)?.into_iter().rev() {
                    let quote = ended.output.quote().unwrap_or_default();
                    lines.push(format!("{} {} {quote}", ended.run, ended.output.node));
                }
            }
            ["latest", node] => {
                for row in store.latest_of(&name(node)?)? {
                    let conclusive = row.conclusive.map_or_else(
                        || "never conclusive".to_owned(),
                        |(verdict, at)| format!("{verdict} at {}", clock(at, start)),
                    );
                    lines.push(format!("{} {} {} [{}], {conclusive}", row.node, row.test, row.verdict, row.reason));
                }
            }
            ["cases"] => {
                for case in store.cases_all(100)?.into_iter().rev() {
                    let steps: Vec<String> =
                        case.steps.iter().map(|step| format!("{} {}", step.what, step.state)).collect();
                    let state = match case.state {
                        doctor_core::case::CaseState::Open => "open".to_owned(),
                        doctor_core::case::CaseState::Closed { at, how } => format!("{how} at {}", clock(at, start)),
                    };
                    lines.push(format!(
                        "{} {} {} at repair step {}: {state}; {}",
                        case.id,
                        case.node,
                        case.severity,
                        case.repair_step,
                        steps.join(", ")
                    ));
                }
            }
            ["reasons"] => {
                for row in store.skip_reasons()? {
                    let reason = serde_json::to_string(&row.reason).unwrap_or_default();
                    lines.push(format!("{} {reason}", row.node));
                }
            }
            ["breaker"] => lines.push(match store.breaker()? {
                Breaker::Closed { .. } => "the breaker is closed".to_owned(),
                Breaker::Open { why, .. } => format!("the breaker is open: {why}"),
            }),
            ["counters"] => {
                let counters = store.counters()?;
                lines.push(format!(
                    "kept {}, duplicate {}, rejected {}",
                    counters.results_stored, counters.results_duplicate, counters.documents_rejected
                ));
            }
            _ => {
                return invalid(
                    "accepted: show nodes, history [NODE], outputs, latest NODE, cases, reasons, breaker, counters, attention",
                );
            }
        }
        if lines.is_empty() {
            lines.push("nothing".to_owned());
        }
        for line in lines {
            let line = self.normalize_ids(&line, start);
            let _ = writeln!(self.out, "  {line}");
        }
        Ok(())
    }

    /// Checks the world's record of effects for violated invariants.
    fn close(&mut self) {
        let Some(session) = &self.session else { return };
        let violations = check_effects(session.backend().world().effects().entries(), Tolerances::default());
        let _ = match violations.len() {
            0 => writeln!(self.out, "\neffects: sound"),
            _ => writeln!(self.out, "\neffects: {violations:#?}"),
        };
    }
}

fn is_id(word: &str) -> bool {
    word.len() == 14
        && (word.parse::<doctor_core::ids::RunId>().is_ok()
            || word.parse::<doctor_core::ids::CaseId>().is_ok()
            || word.parse::<doctor_core::ids::OpId>().is_ok())
}

/// Returns the script's policy: the simulation's default overlaid with these lines.
fn merged(lines: &[String]) -> Result<Policy, CommandFailure> {
    let mut table = toml::Table::try_from(policy()).map_err(|error| CommandFailure::Invalid(error.to_string()))?;
    for line in lines {
        let more: toml::Table =
            line.parse().map_err(|error: toml::de::Error| CommandFailure::Invalid(error.to_string()))?;
        merge(&mut table, more);
    }
    table.try_into().map_err(|error: toml::de::Error| CommandFailure::Invalid(error.to_string()))
}

fn merge(table: &mut toml::Table, more: toml::Table) {
    for (key, value) in more {
        match (table.get_mut(&key), value) {
            (Some(toml::Value::Table(below)), toml::Value::Table(above)) => merge(below, above),
            (_, value) => {
                table.insert(key, value);
            }
        }
    }
}

fn name<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T, CommandFailure> {
    text.parse().map_err(|error: T::Err| CommandFailure::Invalid(error.to_string()))
}

fn list(text: &str) -> Result<Vec<NodeName>, CommandFailure> {
    hostlist::parse(text).map_err(|error| CommandFailure::Invalid(error.to_string()))
}

fn span(text: &str) -> Result<Span, CommandFailure> {
    name(text)
}

fn number(text: &str) -> Result<u32, CommandFailure> {
    text.parse().map_err(|_| CommandFailure::Invalid(format!("`{text}` is not a number such as 4")))
}

/// Formats the time since the start as `+0d01:05:00`; `-` for a time before it.
fn clock(at: Timestamp, start: Timestamp) -> String {
    let millis = at.millis().saturating_sub(start.millis());
    let (sign, secs) = if millis < 0 { ('-', -millis / 1000) } else { ('+', millis / 1000) };
    format!("{sign}{}d{:02}:{:02}:{:02}", secs / 86_400, secs / 3600 % 24, secs / 60 % 60, secs % 60)
}
