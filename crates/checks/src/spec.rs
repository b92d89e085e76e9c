//! The definition of a check: its page, specification, rules, probes and interpretation.

use std::collections::BTreeMap;

use doctor_core::{
    access::Access,
    observation::{FailureKind, Observation, ProbeFailure},
    time::Span,
};

use crate::{
    document::TestEvidence,
    probe::{Probe, ProbeOutput},
};

/// Parameters of a check, as written in the policy file.
pub type Params = BTreeMap<String, toml::Value>;

/// A check, as data and pure functions.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    pub spec: Spec,
    /// The operators' page: what the check does, why it matters, what to do.
    pub page: &'static str,
    /// Default rules, in the format of the policy file's `[[rules]]`.
    pub rules: &'static str,
    pub probes: fn(&Params) -> Vec<Probe>,
    /// Interprets the outputs, which are in the order of the probes. Pure.
    pub interpret: fn(&Params, &[ProbeOutput]) -> Observation,
}

impl Check {
    /// Interprets a node's evidence. Returns `Failed` if the evidence is of other probes than those that this policy
    /// requests, for example another list of mounts: it would be misinterpreted.
    pub fn observe(&self, params: &Params, evidence: &TestEvidence) -> Observation {
        let expected = (self.probes)(params);
        if expected.iter().ne(evidence.probes.iter().map(|(probe, _)| probe)) {
            return Observation::Failed(ProbeFailure::new(
                FailureKind::Unparseable,
                "the node ran other probes than this policy requests; use the same policy file on node and controller",
            ));
        }
        let outputs: Vec<_> = evidence.probes.iter().map(|(_, output)| output.clone()).collect();
        (self.interpret)(params, &outputs).bounded()
    }

    /// Returns how long a run may take: the limit of its specification and, for a deep test, at least the timeouts of
    /// its probes. A run that is cancelled from outside before the test gives up cannot report what took so long.
    pub fn limit(&self, params: &Params) -> Span {
        let own = |probe: Probe| match probe {
            Probe::Exec { timeout, .. } | Probe::ExecIfExists { timeout, .. } | Probe::Builtin { timeout, .. } => {
                timeout
            }
            _ => Span::ZERO,
        };
        match self.spec.depth {
            Depth::Quick => self.spec.limit,
            Depth::Deep => {
                let probes: Span = (self.probes)(params).into_iter().map(own).sum();
                self.spec.limit.max(probes + PROBE_OVERHEAD)
            }
        }
    }

    /// Returns the operators' page as plain text.
    pub fn page_text(&self) -> String {
        let lines = self.page.lines().map(|line| {
            let text = line.strip_prefix("//!").unwrap_or(line);
            text.strip_prefix(' ').unwrap_or(text)
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// What a job needs besides its probes: to start, to give up on what hangs, and to write its result.
const PROBE_OVERHEAD: Span = Span::minutes(2);

/// Returns the `//!` lines at the top of a check's source file, so that its page is written once, next to the code.
pub const fn page_of(source: &'static str) -> &'static str {
    let bytes = source.as_bytes();
    let mut end = 0;
    // Each iteration consumes one line that begins with `//!`.
    while end + 2 < bytes.len() && bytes[end] == b'/' && bytes[end + 1] == b'/' && bytes[end + 2] == b'!' {
        while end < bytes.len() && bytes[end] != b'\n' {
            end += 1;
        }
        if end < bytes.len() {
            end += 1;
        }
    }
    source.split_at(end).0
}

/// The specification of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    pub id: &'static str,
    /// One line for tables.
    pub title: &'static str,
    pub depth: Depth,
    /// Whether it needs exclusive use of the node.
    pub exclusive: bool,
    /// How often an agent runs it. A quick check that starts a program declares a longer period.
    pub every: Span,
    /// How long a conclusive result stays valid.
    pub cutoff: Span,
    pub limit: Span,
    pub typical_duration: Span,
    /// A parameter that determines the usual duration: its integer value, counted from 1, selects the entry of the
    /// list.
    pub usual_by: Option<(&'static str, &'static [Span])>,
    /// Shared resources that it loads by default.
    pub shares: &'static [&'static str],
    /// The parameter that lists the shared resources that it loads instead, if there is one.
    pub shared_param: Option<&'static str>,
    /// Whether it runs only if the policy enables it: it runs a third-party program, which may do more than read.
    pub opt_in: bool,
    /// Access that it needs besides that of the files and devices that its probes read: see [`Check::access`].
    pub access: &'static [Access],
}

/// An agent's default check interval. A check that declares no period runs at each interval.
const DEFAULT_CHECK_INTERVAL: Span = Span::minutes(5);

impl Spec {
    /// A check that only reads, takes milliseconds and may run at any time.
    pub const fn quick(id: &'static str, title: &'static str) -> Self {
        Self {
            id,
            title,
            depth: Depth::Quick,
            exclusive: false,
            every: DEFAULT_CHECK_INTERVAL,
            cutoff: Span::days(1),
            limit: Span::minutes(1),
            typical_duration: Span::from_secs(1),
            usual_by: None,
            shares: &[],
            shared_param: None,
            opt_in: false,
            access: &[],
        }
    }

    /// A test that loads the node and needs it exclusively. It must end on its own well within `limit`.
    pub const fn deep(id: &'static str, title: &'static str, usual: Span, limit: Span) -> Self {
        Self {
            depth: Depth::Deep,
            exclusive: true,
            cutoff: Span::days(7),
            limit,
            typical_duration: usual,
            ..Self::quick(id, title)
        }
    }

    /// Makes the test run only where the policy sets `enabled = true`, or when it is named.
    #[must_use]
    pub const fn opt_in(mut self) -> Self {
        self.opt_in = true;
        self
    }

    /// Sets the access that a program or a built-in test needs.
    #[must_use]
    pub const fn access(mut self, access: &'static [Access]) -> Self {
        self.access = access;
        self
    }

    /// Takes the shared resources that the test loads from this parameter, where it is set.
    #[must_use]
    pub const fn with_shared_param(mut self, parameter: &'static str) -> Self {
        self.shared_param = Some(parameter);
        self
    }

    /// Takes the usual duration from this parameter's value.
    #[must_use]
    pub const fn usual_by(mut self, parameter: &'static str, usual: &'static [Span]) -> Self {
        self.usual_by = Some((parameter, usual));
        self
    }

    pub(crate) fn usual_duration(&self, params: &Params) -> Span {
        let by_parameter = || {
            let (parameter, usual) = self.usual_by?;
            let number = params.get(parameter)?.as_integer()?;
            usual.get(usize::try_from(number).ok()?.checked_sub(1)?).copied()
        };
        by_parameter().unwrap_or(self.typical_duration)
    }

    /// Returns the shared resources that the test loads under these parameters: those that it lists, otherwise its
    /// default.
    pub(crate) fn shared_resources(&self, params: &Params) -> Vec<String> {
        let listed = self.shared_param.and_then(|name| params.get(name)).and_then(toml::Value::as_array);
        let listed = listed.map(|list| list.iter().filter_map(toml::Value::as_str).map(str::to_owned).collect());
        listed.unwrap_or_else(|| self.shares.iter().copied().map(str::to_owned).collect())
    }

    /// Returns whether the check runs at each of the agent's check intervals and declares no longer period.
    pub fn is_fast(&self) -> bool {
        self.every <= DEFAULT_CHECK_INTERVAL
    }

    /// Sets a longer period.
    #[must_use]
    pub const fn every(mut self, every: Span) -> Self {
        self.every = every;
        self
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Reads only; may run at any time.
    Quick,
    /// Loads the node.
    Deep,
}
