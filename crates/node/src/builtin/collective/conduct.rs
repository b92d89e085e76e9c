//! Coordinates one node of a test: its worker, its messages to other nodes, and its time limits.
//!
//! All events arrive in one queue and are handled in order: messages and log lines of the worker, messages of other
//! nodes, and timeouts. This process itself never hangs.

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

/// Interval at which time limits and signals are tested.
const TICK: Duration = Duration::from_millis(20);
/// Ranks join at step 0 and reduce the smallest message at step 1.
const AFTER_THE_FIRST_SIZE: usize = 2;
/// Time for all nodes to report after a stop: NCCL is aborted, GPUs are released.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// Margin over a rank's own stall limit: the rank reports more precisely what hangs.
const BEYOND_STALL: Duration = Duration::from_secs(15);

/// The result of a test.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) reports: Vec<NodeReport>,
    /// This node's index in them.
    pub(super) own: usize,
    pub(super) paths: Option<Paths>,
    pub(super) nccl: u32,
    /// Why the test ended early.
    pub(super) why: Option<String>,
    /// NCCL's warnings.
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
    /// The first node is gone and will not report the result.
    first_gone: bool,
    began: Instant,
    /// When the stop was requested.
    stopping: Option<Instant>,
    /// Since when a late node is awaited.
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
        let worker = Worker::start(order, &queue)
            .map_err(|error| ProbeFailure::new(FailureKind::Failed, format!("cannot start the worker: {error}")))?;
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

    /// Runs until the result is complete or a limit is reached.
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

    /// Handles an event. Returns the next instruction for this node, if it is the first one.
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
                    ProbeFailure::new(FailureKind::Failed, format!("lost the connection to the first node: {why}"))
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

    /// Returns why the test goes by the wrong transport, which the log shows after the first size. The larger sizes
    /// could then take minutes, for a meaningless result.
    fn astray(&self, step: usize) -> Option<String> {
        let gpus = self.opened.as_ref().map_or(0, |opened| opened.gpus.len());
        let judged = if step < AFTER_THE_FIRST_SIZE { None } else { self.judge(gpus).err() };
        judged.filter(|why| matches!(why, NotAsAsked::OtherWay { .. })).map(|why| why.to_string())
    }

    /// A sum over one GPU needs no communication.
    fn nothing_to_move(&self, gpu: String) -> Down {
        let gpu = GpuReport { rank: 0, gpu, sizes: Vec::new(), exchange: None, broken: None };
        Down::All { reports: vec![NodeReport { node: self.name.clone(), gpus: vec![gpu], other_way: None }], why: None }
    }

    /// Sends a message to the first node, which may be this one.
    fn up(&mut self, up: Up) -> Option<Down> {
        match self.link.up(up) {
            Ok(down) => down,
            Err(error) => self.hear(News::FirstGone(error.to_string())),
        }
    }

    /// Carries out an instruction of the first node. Returns the outcome if that was the last one.
    fn obey(&mut self, down: Down) -> Result<Option<Outcome>, ProbeFailure> {
        match down {
            Down::MakeId => self.worker.tell(&Told::MakeId),
            Down::Begin(begin) => {
                self.begin = Some(begin.clone());
                self.worker.tell(&Told::Begin(begin));
            }
            Down::Go(step) => self.worker.tell(&Told::Go(step)),
            Down::Stop(why) => {
                eprintln!("ending the test: {why}");
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

    /// Reports once the worker has ended: then its log is complete and can be judged.
    fn report_if_done(&mut self) -> Option<Down> {
        if !self.ended || self.reported {
            return None;
        }
        self.reported = true;
        if self.opened.is_none() && self.stopping.is_none() {
            let text = "the worker exited before it reported its GPUs; see the log";
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
            // Sockets may be so slow that the test seems to hang: then this is the cause.
            Err(why @ NotAsAsked::OtherWay { .. }) => Some(why.to_string()),
            // The log of an aborted test is incomplete.
            Err(why) => (!broken).then(|| why.to_string()),
        };
        let text = "its worker exited early".to_owned();
        let report = NodeReport { node: self.name.clone(), gpus, other_way };
        // A node that ends unasked stops the others; an earlier reason stays.
        let stop = if broken { self.up(Up::Broken(text)) } else { None };
        self.up(Up::Report(report)).or(stop)
    }

    /// Adds a report for each GPU that sent none.
    fn complete(&mut self) {
        let crashed = self.worker.crashed();
        let Some(opened) = &self.opened else { return };
        let first = self.begin.as_ref().map_or(0, |begin| begin.first_rank);
        for (index, gpu) in opened.gpus.iter().enumerate() {
            let rank = first + index as u32;
            if self.gpus.iter().all(|report| report.rank != rank) {
                let broken = match (&crashed, self.stopping) {
                    (Some(how), _) => Broken::Failed(format!("its worker was killed by {how}")),
                    (None, Some(_)) => Broken::Stopped,
                    (None, None) => Broken::Failed("its worker exited without a report".to_owned()),
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
            return Err(ProbeFailure::new(FailureKind::Killed, "stopped by a signal"));
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
            Some(format!("the test did not finish within {}; increase `timeout`", self.order.timeout))
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

    /// Returns which nodes are late. Only the first node knows.
    fn who_is_late(&mut self) -> Option<String> {
        let steps = self.link.steps()?;
        let (gather, stall) = (self.order.gather, self.order.stall);
        let missing = steps.missing();
        if !missing.is_empty() {
            let place = self.place?;
            let named: Vec<_> = missing.iter().map(|node| place.words(*node as u32)).collect();
            let came = place.nodes as usize - missing.len();
            return (self.began.elapsed() > gather.to_std()).then(|| {
                format!("{} did not join within {gather}; {came} of {} nodes joined", named.join(", "), place.nodes)
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
            .then(|| format!("{} did not reach the next step within {stall}", named.join(", ")))
    }

    /// Some nodes have not reported. The first node ends the test for the others.
    fn without_last_words(&mut self) -> Result<Option<Outcome>, ProbeFailure> {
        let down = self.link.with_steps(|steps| {
            let silent = steps.silent();
            silent.into_iter().flat_map(|node| steps.gone(node, "no report after the stop request")).collect()
        });
        match down {
            Some(down) => self.obey(down),
            None => Err(self
                .failure
                .take()
                .unwrap_or_else(|| ProbeFailure::new(FailureKind::TimedOut, "the first node sent no result"))),
        }
    }
}
