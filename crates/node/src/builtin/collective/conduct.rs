//! One node of a test from beginning to end: its worker, its word with the other nodes, its time limits.
//!
//! Everything that happens comes in by one queue and is dealt with here, one after the other: what the worker says, what it
//! logs, what other nodes say, and that time has passed. Whatever hangs, this does not.

use std::{
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use doctor_checks::{
    collective_order::CollectiveOrder,
    collective_report::{Broken, GpuReport, NodeReport},
    nccl_log::{Asked, NcclLog, NotAsAsked, Paths},
};
use doctor_core::observation::{FailureKind, ProbeFailure};

use super::{
    child::{Shown, Worker},
    events::News,
    launcher::Place,
    link::Link,
    rendezvous::NoRendezvous,
    told::{Begin, Down, Opened, Said, Told, Up},
};
use crate::stop::{Stop, StopWhy};

/// How often the clock and signals are looked at.
const TICK: Duration = Duration::from_millis(20);
/// Ranks join at step 0, and add up the smallest message at step 1.
const AFTER_THE_FIRST_SIZE: usize = 2;
/// How long everybody has for last words once all were told to stop: NCCL is given up, GPUs are let go.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// Beyond what a rank gives itself: it says better what hangs.
const BEYOND_STALL: Duration = Duration::from_secs(15);

/// All that a test brings.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) reports: Vec<NodeReport>,
    /// This node's place among them.
    pub(super) own: usize,
    pub(super) paths: Option<Paths>,
    pub(super) nccl: u32,
    /// Why it ended early.
    pub(super) why: Option<String>,
    /// What NCCL warned of.
    pub(super) warnings: Vec<String>,
}

pub(super) struct Conduct<'a> {
    order: &'a CollectiveOrder,
    stop: &'a Stop,
    place: Option<&'a Place>,
    name: String,
    worker: Worker,
    news: Receiver<News>,
    link: Link,
    log: NcclLog,
    shown: Shown,
    opened: Option<Opened>,
    begin: Option<Begin>,
    gpus: Vec<GpuReport>,
    ended: bool,
    reported: bool,
    paths: Option<Paths>,
    failure: Option<ProbeFailure>,
    /// Nobody will say how it ended.
    first_gone: bool,
    began: Instant,
    /// When somebody said stop.
    stopping: Option<Instant>,
    /// Since when somebody is waited for.
    waiting: Option<Instant>,
}

impl<'a> Conduct<'a> {
    pub(super) fn begin(
        order: &'a CollectiveOrder,
        place: Option<&'a Place>,
        name: String,
        stop: &'a Stop,
    ) -> Result<Self, ProbeFailure> {
        let (queue, news) = mpsc::channel();
        let link = Link::open(order, place, &name, stop, &queue).map_err(|error| {
            let kind = match error {
                NoRendezvous::Stopped => FailureKind::Killed,
                NoRendezvous::NotReached { .. } => FailureKind::TimedOut,
                _ => FailureKind::Failed,
            };
            ProbeFailure::new(kind, error.to_string())
        })?;
        let worker = Worker::start(order, &queue).map_err(|error| {
            ProbeFailure::new(FailureKind::Failed, format!("the worker cannot be started: {error}"))
        })?;
        Ok(Self {
            order,
            stop,
            place,
            name,
            worker,
            news,
            link,
            log: NcclLog::default(),
            shown: Shown::default(),
            opened: None,
            begin: None,
            gpus: Vec::new(),
            ended: false,
            reported: false,
            paths: None,
            failure: None,
            first_gone: false,
            began: Instant::now(),
            stopping: None,
            waiting: None,
        })
    }

    /// Until all is said, or the time is over.
    pub(super) fn run(mut self) -> Result<Outcome, ProbeFailure> {
        loop {
            match self.news.recv_timeout(TICK) {
                Ok(news) => {
                    if let Some(down) = self.hear(news)
                        && let Some(outcome) = self.obey(down)?
                    {
                        return Ok(outcome);
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            if let Some(outcome) = self.look_at_clock()? {
                return Ok(outcome);
            }
        }
    }

    /// Takes in what happened. What this node is to do follows from it at once where it is the first.
    fn hear(&mut self, news: News) -> Option<Down> {
        match news {
            News::Worker(said) => return self.said(said),
            News::Log(line) => {
                self.log.hear(&line);
                self.shown.show(&line);
            }
            News::WorkerEnded => {
                self.ended = true;
                return self.report_if_done();
            }
            News::Came { hello, reading, writing } => self.link.came(&hello, reading, writing),
            News::Up(node, up) => return self.link.with_steps(|steps| steps.hear(node, up)),
            News::PeerGone(node, why) => return self.link.with_steps(|steps| steps.gone(node, &why)),
            News::Down(down) => return Some(down),
            News::FirstGone(why) => {
                self.first_gone = true;
                self.failure.get_or_insert_with(|| {
                    ProbeFailure::new(FailureKind::Failed, format!("the first node went away: {why}"))
                });
                return Some(Down::Stop(why));
            }
        }
        None
    }

    fn said(&mut self, said: Said) -> Option<Down> {
        match said {
            Said::Opened(opened) => {
                let up = Up::Opened { gpus: opened.gpus.len() as u32, room: opened.room };
                let alone = opened.gpus.len() == 1 && self.link.is_only_node();
                let gpu = opened.gpus.first().cloned().unwrap_or_default();
                self.opened = Some(opened);
                if alone { Some(self.nothing_to_move(gpu)) } else { self.up(up) }
            }
            Said::Id(id) => self.up(Up::Id(id)),
            Said::At(step) => {
                let up = self.astray(step).map_or(Up::At(step), Up::Broken);
                self.up(up)
            }
            Said::Report(report) => {
                let broken = report.broken.clone().filter(|broken| *broken != Broken::Stopped);
                let text = format!("GPU {}: {}", report.gpu, broken.as_ref().map_or("", Broken::text));
                self.gpus.push(report);
                broken.and_then(|_| self.up(Up::Broken(text)))
            }
            Said::Cannot(failure) => {
                let text = failure.text.clone();
                self.failure.get_or_insert(failure);
                self.up(Up::Broken(text))
            }
        }
    }

    /// After the first size the log says which way the data goes. By another way than was asked for, the larger sizes could
    /// take minutes, and would be worth nothing.
    fn astray(&self, step: usize) -> Option<String> {
        let gpus = self.opened.as_ref().map_or(0, |opened| opened.gpus.len());
        let judged = if step < AFTER_THE_FIRST_SIZE { None } else { self.judge(gpus).err() };
        judged.filter(|why| matches!(why, NotAsAsked::OtherWay { .. })).map(|why| why.to_string())
    }

    /// A sum over one GPU is what it has already.
    fn nothing_to_move(&self, gpu: String) -> Down {
        let gpu = GpuReport { rank: 0, gpu, sizes: Vec::new(), exchange: None, broken: None };
        Down::All { reports: vec![NodeReport { node: self.name.clone(), gpus: vec![gpu], other_way: None }], why: None }
    }

    /// A word of this node to the first one, which may be this one.
    fn up(&mut self, up: Up) -> Option<Down> {
        match self.link.up(up) {
            Ok(down) => down,
            Err(error) => self.hear(News::FirstGone(error.to_string())),
        }
    }

    /// Does what the first node says. The outcome, if that was the end.
    fn obey(&mut self, down: Down) -> Result<Option<Outcome>, ProbeFailure> {
        match down {
            Down::MakeId => self.worker.tell(&Told::MakeId),
            Down::Begin(begin) => {
                self.begin = Some(begin.clone());
                self.worker.tell(&Told::Begin(begin));
            }
            Down::Go(step) => self.worker.tell(&Told::Go(step)),
            Down::Stop(why) => {
                eprintln!("the test is ended: {why}");
                self.stopping.get_or_insert_with(Instant::now);
                self.worker.tell(&Told::Stop);
            }
            Down::All { reports, why } => return self.outcome(reports, why).map(Some),
        }
        Ok(None)
    }

    fn outcome(&mut self, reports: Vec<NodeReport>, why: Option<String>) -> Result<Outcome, ProbeFailure> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let own = self.place.map_or(0, |place| place.rank as usize);
        let nccl = self.opened.as_ref().map_or(0, |opened| opened.nccl);
        let warnings = self.log.warnings.clone();
        Ok(Outcome { reports, own, paths: self.paths, nccl, why, warnings })
    }

    /// Once the worker has ended, its log is whole and can be judged.
    fn report_if_done(&mut self) -> Option<Down> {
        if !self.ended || self.reported {
            return None;
        }
        self.reported = true;
        if self.opened.is_none() && self.stopping.is_none() {
            let text = "the worker ended before it had looked at the GPUs; its last words are in the log";
            self.failure.get_or_insert_with(|| ProbeFailure::new(FailureKind::Failed, text));
        }
        self.complete();
        let gpus = std::mem::take(&mut self.gpus);
        let broken = self.failure.is_some() || gpus.iter().any(|gpu| gpu.broken.is_some());
        let other_way = match self.judge(gpus.len()) {
            Ok(paths) => {
                self.paths = paths.filter(|_| !broken);
                None
            }
            // Sockets may be so slow that the test seems to hang: then this is why.
            Err(why @ NotAsAsked::OtherWay { .. }) => Some(why.to_string()),
            // The log of a test that broke off is not whole.
            Err(why) => (!broken).then(|| why.to_string()),
        };
        let text = "its worker ended early".to_owned();
        let report = NodeReport { node: self.name.clone(), gpus, other_way };
        // Whoever ends without having been stopped stops the others; who was named before stays the reason.
        let stop = if broken { self.up(Up::Broken(text)) } else { None };
        self.up(Up::Report(report)).or(stop)
    }

    /// A GPU of which nothing was heard.
    fn complete(&mut self) {
        let crashed = self.worker.crashed();
        let Some(opened) = &self.opened else { return };
        let first = self.begin.as_ref().map_or(0, |begin| begin.first_rank);
        for (index, gpu) in opened.gpus.iter().enumerate() {
            let rank = first + index as u32;
            if self.gpus.iter().all(|report| report.rank != rank) {
                let broken = match (&crashed, self.stopping) {
                    (Some(how), _) => Broken::Failed(format!("its worker was ended by {how}")),
                    (None, Some(_)) => Broken::Stopped,
                    (None, None) => Broken::Failed("its worker ended without a word of it".to_owned()),
                };
                self.gpus.push(GpuReport {
                    rank,
                    gpu: gpu.clone(),
                    sizes: Vec::new(),
                    exchange: None,
                    broken: Some(broken),
                });
            }
        }
        self.gpus.sort_by_key(|gpu| gpu.rank);
    }

    fn judge(&self, gpus: usize) -> Result<Option<Paths>, NotAsAsked> {
        let Some(begin) = &self.begin else { return Ok(None) };
        let last = begin.first_rank + gpus as u32;
        let asked = Asked {
            mode: self.order.mode,
            net: &self.order.net,
            shared_memory: self.order.shared_memory,
            ranks: begin.first_rank..last,
        };
        self.log.judge(&asked).map(Some)
    }

    fn look_at_clock(&mut self) -> Result<Option<Outcome>, ProbeFailure> {
        if self.stop.told() == Some(StopWhy::Signal) {
            self.worker.kill();
            return Err(ProbeFailure::new(FailureKind::Killed, "told to stop"));
        }
        if self.stopping.is_some_and(|since| since.elapsed() > LAST_WORDS) && !self.ended {
            // It hangs in a library or in the driver.
            self.worker.kill();
        }
        let is_over = self.first_gone && self.reported;
        if is_over || self.stopping.is_some_and(|since| since.elapsed() > 2 * LAST_WORDS) {
            return self.without_last_words();
        }
        let why = if self.began.elapsed() > self.order.timeout.to_std() {
            Some(format!("the test was not done within {}; give it more `timeout`", self.order.timeout))
        } else {
            self.who_is_late()
        };
        let Some(why) = why.filter(|_| self.stopping.is_none()) else { return Ok(None) };
        self.failure.get_or_insert_with(|| ProbeFailure::new(FailureKind::TimedOut, why.clone()));
        match self.link.stop(why) {
            Some(down) => self.obey(down),
            None => Ok(None),
        }
    }

    /// Only the first node knows who it is that the others wait for.
    fn who_is_late(&mut self) -> Option<String> {
        let steps = self.link.steps()?;
        let (gather, stall) = (self.order.gather, self.order.stall);
        let missing = steps.missing();
        if !missing.is_empty() {
            let place = self.place?;
            let named: Vec<_> = missing.iter().map(|node| place.words(*node as u32)).collect();
            let came = place.nodes as usize - missing.len();
            return (self.began.elapsed() > gather.to_std()).then(|| {
                format!("{} never came within {gather}; {came} of {} nodes were there", named.join(", "), place.nodes)
            });
        }
        let late = steps.late();
        if late.is_empty() {
            self.waiting = None;
            return None;
        }
        let since = *self.waiting.get_or_insert_with(Instant::now);
        let named: Vec<_> = late.iter().map(|node| steps.words(*node)).collect();
        (since.elapsed() > stall.to_std() + BEYOND_STALL)
            .then(|| format!("{} did not come to the next step within {stall}", named.join(", ")))
    }

    /// Some have not even told how it went. The first node ends the test for those that have.
    fn without_last_words(&mut self) -> Result<Option<Outcome>, ProbeFailure> {
        let down = self.link.with_steps(|steps| {
            let silent = steps.silent();
            silent
                .into_iter()
                .flat_map(|node| steps.gone(node, "it said nothing more after it was told to stop"))
                .collect()
        });
        match down {
            Some(down) => self.obey(down),
            None => Err(self.failure.take().unwrap_or_else(|| {
                ProbeFailure::new(FailureKind::TimedOut, "the first node did not say how the test ended")
            })),
        }
    }
}
