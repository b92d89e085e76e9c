//! Draws the cluster in a terminal: one cell per node, with recent events below.

use std::{
    collections::{BTreeMap, VecDeque},
    io::{self, Write},
    time::{Duration, Instant},
};

use doctor_core::{
    ids::NodeName,
    lifecycle::Life,
    node::Occupancy,
    plan::Action,
    run::Purpose,
    time::{Span, Timestamp},
};
use doctor_engine::report::CycleReport;

use crate::drive::session::Session;

/// The time between frames; a higher rate is not visible.
const FRAME: Duration = Duration::from_millis(40);
const NEWS: usize = 7;
const PER_ROW: usize = 50;
const WIDTH: usize = 100;

pub(super) struct Picture {
    days: u32,
    at_least: Duration,
    began: Instant,
    last: Option<Instant>,
    drawn: usize,
    lives: BTreeMap<NodeName, Life>,
    testing: BTreeMap<NodeName, Purpose>,
    news: VecDeque<String>,
    counts: Counts,
}

#[derive(Default)]
struct Counts {
    results: usize,
    cases: usize,
    returned: usize,
}

impl Picture {
    pub(super) fn new(days: u32, at_least: Duration) -> Self {
        Self {
            days,
            at_least,
            began: Instant::now(),
            last: None,
            drawn: 0,
            lives: BTreeMap::new(),
            testing: BTreeMap::new(),
            news: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    /// Records a cycle, and draws a frame if one is due.
    pub(super) fn note(
        &mut self,
        session: &Session,
        report: &CycleReport,
        start: Timestamp,
        screen: &mut dyn Write,
    ) -> io::Result<()> {
        let passed = session.now().since(start);
        self.counts.results += report.results;
        for action in &report.actions {
            match &action.what {
                Action::Move { node, to, .. } => {
                    if let Some(line) = self.line(node, to, &action.text) {
                        self.tell(passed, &line);
                    }
                    self.lives.insert(node.clone(), to.clone());
                }
                Action::OpenCase(_) => self.counts.cases += 1,
                Action::OpenBreaker => self.tell(passed, &format!("the breaker opens: {}", action.text)),
                Action::Notice(_) => self.tell(passed, &action.text),
                _ => {}
            }
        }
        let elapsed = self.began.elapsed();
        let share = passed.as_hours() / (f64::from(self.days) * 24.0);
        let pace = self.at_least.mul_f64(share.clamp(0.0, 1.0));
        if pace > elapsed + FRAME {
            std::thread::sleep(FRAME.min(pace - elapsed));
        }
        if self.last.is_none_or(|last| last.elapsed() >= FRAME) {
            self.last = Some(Instant::now());
            self.see_runs(session);
            self.draw(session, share, screen)?;
        }
        Ok(())
    }

    pub(super) fn finish(&mut self, session: &Session, screen: &mut dyn Write) -> io::Result<()> {
        self.testing.clear();
        self.draw(session, 1.0, screen)
    }

    fn see_runs(&mut self, session: &Session) {
        let runs = session.store().active_runs().unwrap_or_default();
        self.testing = runs
            .into_iter()
            .flat_map(|stored| {
                let purpose = stored.run.asked.what;
                stored.run.nodes.iter().cloned().map(move |node| (node, purpose)).collect::<Vec<_>>()
            })
            .collect();
    }

    fn line(&mut self, node: &NodeName, to: &Life, why: &str) -> Option<String> {
        let out = self.lives.get(node).is_some_and(Life::is_out);
        match to {
            Life::Quarantined if !out => Some(format!("{RED}{node} taken out{RESET}: {why}")),
            Life::InService if out => {
                self.counts.returned += 1;
                Some(format!("{GREEN}{node} returned{RESET}: {why}"))
            }
            Life::Suspect => Some(format!("{YELLOW}{node} suspect{RESET}: {why}")),
            _ => None,
        }
    }

    fn tell(&mut self, passed: Span, line: &str) {
        let day = passed.as_hours() / 24.0;
        self.news.push_back(format!("day {day:4.1}  {line}"));
        if self.news.len() > NEWS {
            self.news.pop_front();
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
        lines.extend((0..NEWS).map(|n| self.news.get(n).map(|line| clip(line)).unwrap_or_default()));
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
                    let life = self.lives.get(&seen.node.name).unwrap_or(&Life::InService);
                    let testing = self.testing.contains_key(&seen.node.name);
                    match (life, testing, &seen.node.occupancy) {
                        (Life::Proving { .. }, ..) => format!("{MAGENTA}◆ "),
                        (Life::Held { .. }, ..) => format!("{CYAN}■ "),
                        (Life::Quarantined | Life::Repairing { .. } | Life::Out, ..) => format!("{RED}■ "),
                        (_, true, _) => format!("{BLUE}◆ "),
                        (Life::Suspect, ..) => format!("{YELLOW}■ "),
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
