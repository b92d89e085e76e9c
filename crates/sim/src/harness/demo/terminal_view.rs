//! Draws the cluster in a terminal: one cell per node, with recent events below.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Write},
    time::{Duration, Instant},
};

use doctor_core::{
    ids::NodeName,
    lifecycle::NodeState,
    node::Occupancy,
    plan::Action,
    run::Purpose,
    time::{Span, Timestamp},
};
use doctor_engine::cycle_report::CycleReport;

use crate::harness::session::Session;

/// The time between frames; a higher rate is not visible.
const FRAME: Duration = Duration::from_millis(40);
const MAX_NEWS: usize = 7;
const PER_ROW: usize = 50;
const WIDTH: usize = 100;

pub(super) struct TerminalView {
    days: u32,
    min_duration: Duration,
    began: Instant,
    last: Option<Instant>,
    drawn: usize,
    states: BTreeMap<NodeName, NodeState>,
    testing: BTreeMap<NodeName, Purpose>,
    recent_events: VecDeque<String>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    results: usize,
    cases: usize,
    returned: usize,
}

impl TerminalView {
    pub(super) fn new(days: u32, at_least: Duration) -> Self {
        Self {
            days,
            min_duration: at_least,
            began: Instant::now(),
            last: None,
            drawn: 0,
            states: BTreeMap::new(),
            testing: BTreeMap::new(),
            recent_events: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    /// Records a cycle, and draws a frame if one is due.
    pub(super) fn update(
        &mut self,
        session: &Session,
        report: &CycleReport,
        start: Timestamp,
        screen: &mut dyn Write,
    ) -> io::Result<()> {
        let passed = session.now().since(start);
        self.counts.results += report.results;
        for action in &report.actions {
            match &action.value {
                Action::SetState { node, to, .. } => {
                    if let Some(line) = self.event_line(node, to, &action.text) {
                        self.add_event(passed, &line);
                    }
                    self.states.insert(node.clone(), to.clone());
                }
                Action::OpenCase(_) => self.counts.cases += 1,
                Action::OpenBreaker => self.add_event(passed, &format!("the breaker opens: {}", action.text)),
                Action::Notice(_) => self.add_event(passed, &action.text),
                _ => {}
            }
        }
        let elapsed = self.began.elapsed();
        let share = passed.as_hours() / (f64::from(self.days) * 24.0);
        let pace = self.min_duration.mul_f64(share.clamp(0.0, 1.0));
        if pace > elapsed + FRAME {
            std::thread::sleep(FRAME.min(pace - elapsed));
        }
        if self.last.is_none_or(|last| last.elapsed() >= FRAME) {
            self.last = Some(Instant::now());
            self.update_runs(session);
            self.draw(session, share, screen)?;
        }
        Ok(())
    }

    pub(super) fn finish(&mut self, session: &Session, screen: &mut dyn Write) -> io::Result<()> {
        self.testing.clear();
        self.draw(session, 1.0, screen)
    }

    fn update_runs(&mut self, session: &Session) {
        let runs = session.store().active_runs().unwrap_or_default();
        self.testing = runs
            .into_iter()
            .flat_map(|stored| {
                let purpose = stored.run.purpose.value;
                stored.run.nodes.iter().cloned().map(move |node| (node, purpose)).collect::<Vec<_>>()
            })
            .collect();
    }

    fn event_line(&mut self, node: &NodeName, to: &NodeState, why: &str) -> Option<String> {
        let out = self.states.get(node).is_some_and(NodeState::is_out_of_service);
        match to {
            NodeState::Quarantined if !out => Some(format!("{RED}{node} taken out{RESET}: {why}")),
            NodeState::InService if out => {
                self.counts.returned += 1;
                Some(format!("{GREEN}{node} returned{RESET}: {why}"))
            }
            NodeState::Suspect => Some(format!("{YELLOW}{node} suspect{RESET}: {why}")),
            _ => None,
        }
    }

    fn add_event(&mut self, passed: Span, line: &str) {
        let day = passed.as_hours() / 24.0;
        self.recent_events.push_back(format!("day {day:4.1}  {line}"));
        if self.recent_events.len() > MAX_NEWS {
            self.recent_events.pop_front();
        }
    }

    fn draw(&mut self, session: &Session, share: f64, screen: &mut dyn Write) -> io::Result<()> {
        let mut frame = Vec::new();
        if self.drawn > 0 {
            frame.push(format!("\x1b[{}A", self.drawn));
        }
        let mut lines = vec![self.header(share), String::new()];
        lines.extend(self.cells(session));
        lines.push(String::new());
        lines.push(legend());
        lines.push(format!(
            "results {:<6} cases opened {:<4} nodes returned {:<4}",
            self.counts.results, self.counts.cases, self.counts.returned
        ));
        lines.push(String::new());
        lines.extend((0..MAX_NEWS).map(|n| self.recent_events.get(n).map(|line| clip(line)).unwrap_or_default()));
        self.drawn = lines.len();
        // Each line is cleared to its end, so that a shorter line leaves nothing of a longer one.
        frame.extend(lines.into_iter().map(|line| format!("{line}{RESET}\x1b[K\n")));
        screen.write_all(frame.concat().as_bytes())?;
        screen.flush()
    }

    fn header(&self, share: f64) -> String {
        const BAR: usize = 40;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of forty cells")]
        let done = (share.clamp(0.0, 1.0) * BAR as f64).round() as usize;
        let day = share * f64::from(self.days);
        format!("Cluster Doctor  day {day:4.1} of {}  {}{}", self.days, "━".repeat(done), "─".repeat(BAR - done))
    }

    fn cells(&self, session: &Session) -> Vec<String> {
        let seen = session.backend().world().snapshot().unwrap_or_default();
        seen.chunks(PER_ROW)
            .map(|row| {
                let cells = row.iter().map(|seen| {
                    let state = self.states.get(&seen.node.name).unwrap_or(&NodeState::InService);
                    let testing = self.testing.contains_key(&seen.node.name);
                    match (state, testing, &seen.node.occupancy) {
                        (NodeState::Requalifying { .. }, ..) => format!("{MAGENTA}◆ "),
                        (NodeState::Held { .. }, ..) => format!("{CYAN}■ "),
                        (NodeState::Quarantined | NodeState::Repairing { .. } | NodeState::Out, ..) => {
                            format!("{RED}■ ")
                        }
                        (_, true, _) => format!("{BLUE}◆ "),
                        (NodeState::Suspect, ..) => format!("{YELLOW}■ "),
                        (_, _, Occupancy::Free) => format!("{GREEN}□ "),
                        (_, _, Occupancy::Busy { .. }) => format!("{DIM}{GREEN}■ "),
                        (_, _, Occupancy::Unknown { .. }) => format!("{DIM}? "),
                    }
                });
                cells.map(|cell| cell + RESET).collect::<String>()
            })
            .collect()
    }
}

fn legend() -> String {
    format!(
        "{GREEN}□{RESET} free  {DIM}{GREEN}■{RESET} in use  {BLUE}◆{RESET} being tested  {YELLOW}■{RESET} suspect  \
         {RED}■{RESET} out of service  {MAGENTA}◆{RESET} being proved"
    )
}

/// Clips a line to the width of the page, not counting colour codes.
fn clip(line: &str) -> String {
    let (mut out, mut width, mut escape) = (String::new(), 0, false);
    for c in line.chars() {
        match c {
            '\x1b' => escape = true,
            'm' if escape => escape = false,
            _ if escape => {}
            _ => width += 1,
        }
        if width > WIDTH && !escape {
            break;
        }
        out.push(c);
    }
    out
}

const RESET: &str = "\x1b[0m";
const DIM: &str = "\x1b[2m";
const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";
const BLUE: &str = "\x1b[34m";
const MAGENTA: &str = "\x1b[35m";
const CYAN: &str = "\x1b[36m";
