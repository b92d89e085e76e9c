//! What a check is: its page, its figures, its rules, its probes and its reading of them.

use std::collections::BTreeMap;

use doctor_core::{
    observation::{FailureKind, Observation, ProbeFailure},
    time::Span,
};

use crate::{
    document::TestEvidence,
    probe::{Probe, ProbeOutput},
};

/// Parameters of a check from the policy file, as written there.
pub type Params = BTreeMap<String, toml::Value>;

/// A check, entirely as data and pure functions.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    pub spec: Spec,
    /// The page for operators: what, why it matters, what to do.
    pub page: &'static str,
    /// Default rules, as `[[rules]]` of the policy file's form.
    pub rules: &'static str,
    pub probes: fn(&Params) -> Vec<Probe>,
    /// Outputs stand in the order of the probes. Pure.
    pub interpret: fn(&Params, &[ProbeOutput]) -> Observation,
}

impl Check {
    /// What a node's evidence says. Evidence of other probes than the ones this policy asks for (another list of
    /// mounts, say) would be read as what it is not, so it is refused.
    pub fn observe(&self, params: &Params, evidence: &TestEvidence) -> Observation {
        let wanted = (self.probes)(params);
        if wanted.iter().ne(evidence.probes.iter().map(|(probe, _)| probe)) {
            return Observation::CouldNot(ProbeFailure::new(
                FailureKind::Unparseable,
                "the node ran other probes than this policy asks for; give both the same policy file",
            ));
        }
        let outputs: Vec<_> = evidence.probes.iter().map(|(_, output)| output.clone()).collect();
        (self.interpret)(params, &outputs)
    }

    /// How long a run of it may take: what its file says, and never less than its own probes may. A run that is ended
    /// from outside before the test has given up by itself cannot say what took so long.
    pub fn limit(&self, params: &Params) -> Span {
        let own = |probe: Probe| match probe {
            Probe::Exec { timeout, .. } | Probe::ExecWhere { timeout, .. } | Probe::Builtin { timeout, .. } => timeout,
            _ => Span::ZERO,
        };
        match self.spec.depth {
            Depth::Quick => self.spec.limit,
            Depth::Deep => {
                let probes: Span = (self.probes)(params).into_iter().map(own).sum();
                self.spec.limit.max(probes + AROUND_THE_PROBES)
            }
        }
    }

    /// The operators' page as plain text.
    pub fn page_text(&self) -> String {
        let lines = self.page.lines().map(|line| {
            let text = line.strip_prefix("//!").unwrap_or(line);
            text.strip_prefix(' ').unwrap_or(text)
        });
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// What a job needs beside its tests: to begin, to give up what hangs, and to write its result.
const AROUND_THE_PROBES: Span = Span::minutes(2);

/// The `//!` lines at the top of a check's own file: its page is written once, where the code is.
pub const fn page_of(source: &'static str) -> &'static str {
    let bytes = source.as_bytes();
    let mut end = 0;
    // Each turn takes one line that begins with `//!`.
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

/// The figures of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spec {
    pub id: &'static str,
    /// One line for tables.
    pub title: &'static str,
    pub depth: Depth,
    /// Whether it needs the node to itself.
    pub exclusive: bool,
    /// How often an agent looks. A quick check that starts a program is not so quick and says a longer time.
    pub every: Span,
    /// A conclusive result is good for this long.
    pub cutoff: Span,
    pub limit: Span,
    pub usual: Span,
    /// A parameter that says how long it usually takes: its whole numbers, from 1 on, count these.
    pub usual_by: Option<(&'static str, &'static [Span])>,
    /// Shared things it loads by default.
    pub shares: &'static [&'static str],
    /// The parameter that lists what it loads and what others may share, where there is one.
    pub loads: Option<&'static str>,
    /// Whether it waits for the policy to switch it on: it runs a program of somebody else, which may do more than look.
    pub opt_in: bool,
}

/// A check that nothing else is said of runs at each look of an agent, which is so often by default.
const EACH_LOOK: Span = Span::minutes(5);

impl Spec {
    /// Of a check that only reads, takes milliseconds and may run at any time.
    pub const fn quick(id: &'static str, title: &'static str) -> Self {
        Self {
            id,
            title,
            depth: Depth::Quick,
            exclusive: false,
            every: EACH_LOOK,
            cutoff: Span::days(1),
            limit: Span::minutes(1),
            usual: Span::from_secs(1),
            usual_by: None,
            shares: &[],
            loads: None,
            opt_in: false,
        }
    }

    /// Of a test that loads the node and needs it to itself. It ends by itself well within `limit`.
    pub const fn deep(id: &'static str, title: &'static str, usual: Span, limit: Span) -> Self {
        Self { depth: Depth::Deep, exclusive: true, cutoff: Span::days(7), limit, usual, ..Self::quick(id, title) }
    }

    /// The same, only where the policy says `enabled = true`, or when named.
    #[must_use]
    pub const fn opt_in(mut self) -> Self {
        self.opt_in = true;
        self
    }

    /// The same, which loads what this parameter lists.
    #[must_use]
    pub const fn loads(mut self, parameter: &'static str) -> Self {
        self.loads = Some(parameter);
        self
    }

    /// The same, which takes as long as this parameter says.
    #[must_use]
    pub const fn usual_by(mut self, parameter: &'static str, usual: &'static [Span]) -> Self {
        self.usual_by = Some((parameter, usual));
        self
    }

    pub(crate) fn usually(&self, params: &Params) -> Span {
        let by_parameter = || {
            let (parameter, usual) = self.usual_by?;
            let number = params.get(parameter)?.as_integer()?;
            usual.get(usize::try_from(number).ok()?.checked_sub(1)?).copied()
        };
        by_parameter().unwrap_or(self.usual)
    }

    /// What it loads that others may share, as far as the parameters say.
    pub(crate) fn shared(&self, params: &Params) -> Vec<String> {
        let listed = self.loads.and_then(|name| params.get(name)).and_then(toml::Value::as_array);
        let listed = listed.into_iter().flatten().filter_map(toml::Value::as_str);
        self.shares.iter().copied().chain(listed).map(str::to_owned).collect()
    }

    /// Whether it is part of each look, and has no period of its own.
    pub fn is_fast(&self) -> bool {
        self.every <= EACH_LOOK
    }

    /// The same, looked at less often.
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
