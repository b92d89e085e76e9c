//! Coordinates one node of a test: its worker, its messages to other nodes, and its time limits.
//!
//! All events arrive in one queue and are handled in order: messages and log lines of the worker, messages of other
//! nodes, and timeouts. This process itself never hangs.

use std::{
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use doctor_checks::{
    collective_params::CollectiveParams,
    collective_report::{GpuReport, NodeReport, RankFailure},
    nccl_log::{NcclLog, PathCounts, PathError, RequestedPath},
};
use doctor_core::observation::{FailureKind, ProbeFailure};

use super::{
    events::CoordinatorEvent,
    launcher::JobPosition,
    link::Link,
    messages::{FromFirst, OpenedGpus, StartParams, ToFirst, WorkerCommand, WorkerMessage},
    rendezvous::RendezvousError,
    worker_process::{LogPrinter, Worker},
};
use crate::{
    builtin::disturbance::Watch,
    stop::{Stop, StopReason},
};

/// Interval at which time limits and signals are tested.
const TICK: Duration = Duration::from_millis(20);
/// Ranks join at step 0 and reduce the smallest message at step 1.
const STEP_AFTER_FIRST_SIZE: usize = 2;
/// Time for all nodes to report after a stop: NCCL is aborted, GPUs are released.
const REPORT_GRACE: Duration = Duration::from_secs(10);
/// Margin over a rank's own stall limit: the rank reports more precisely what hangs.
const STALL_MARGIN: Duration = Duration::from_secs(15);

/// The result of a test.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) reports: Vec<NodeReport>,
    /// This node's index in them.
    pub(super) own: usize,
    pub(super) paths: Option<PathCounts>,
    pub(super) nccl: u32,
    /// Why the test ended early.
    pub(super) stop_reason: Option<String>,
    /// NCCL's warnings.
    pub(super) warnings: Vec<String>,
}

pub(super) struct Coordinator<'a> {
    params: &'a CollectiveParams,
    stop: &'a Stop,
    position: Option<&'a JobPosition>,
    watch: &'a Watch,
    name: String,
    worker: Worker,
    events: Receiver<CoordinatorEvent>,
    link: Link,
    log: NcclLog,
    log_printer: LogPrinter,
    opened: Option<OpenedGpus>,
    begin: Option<StartParams>,
    gpus: Vec<GpuReport>,
    ended: bool,
    reported: bool,
    paths: Option<PathCounts>,
    failure: Option<ProbeFailure>,
    /// The first node is gone and will not report the result.
    first_node_lost: bool,
    began: Instant,
    /// When the stop was requested.
    stop_requested_at: Option<Instant>,
    /// Since when a late node is awaited.
    late_since: Option<Instant>,
}

impl<'a> Coordinator<'a> {
    pub(super) fn begin(
        params: &'a CollectiveParams,
        position: Option<&'a JobPosition>,
        name: String,
        watch: &'a Watch,
        stop: &'a Stop,
    ) -> Result<Self, ProbeFailure> {
        let (queue, events) = mpsc::channel();
        let link = Link::open(params, position, &name, stop, &queue).map_err(|error| {
            let kind = match error {
                RendezvousError::Stopped => FailureKind::Killed,
                RendezvousError::NotReached { .. } => FailureKind::TimedOut,
                _ => FailureKind::Failed,
            };
            ProbeFailure::new(kind, error.to_string())
        })?;
        let worker = Worker::start(params, &queue)
            .map_err(|error| ProbeFailure::new(FailureKind::Failed, format!("cannot start the worker: {error}")))?;
        Ok(Self {
            params,
            stop,
            position,
            watch,
            name,
            worker,
            events,
            link,
            log: NcclLog::default(),
            log_printer: LogPrinter::default(),
            opened: None,
            begin: None,
            gpus: Vec::new(),
            ended: false,
            reported: false,
            paths: None,
            failure: None,
            first_node_lost: false,
            began: Instant::now(),
            stop_requested_at: None,
            late_since: None,
        })
    }

    /// Runs until the result is complete or a limit is reached.
    pub(super) fn run(mut self) -> Result<Outcome, ProbeFailure> {
        loop {
            match self.events.recv_timeout(TICK) {
                Ok(event) => {
                    if let Some(down) = self.handle_event(event)
                        && let Some(outcome) = self.handle_command(down)?
                    {
                        return Ok(outcome);
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            if let Some(outcome) = self.check_limits()? {
                return Ok(outcome);
            }
        }
    }

    /// Handles an event. Returns the next instruction for this node, if it is the first one.
    fn handle_event(&mut self, event: CoordinatorEvent) -> Option<FromFirst> {
        match event {
            CoordinatorEvent::Worker(message) => return self.handle_worker_message(message),
            CoordinatorEvent::Log(line) => {
                self.log.add_line(&line);
                self.log_printer.show(&line);
            }
            CoordinatorEvent::WorkerEnded => {
                self.ended = true;
                return self.report_if_done();
            }
            CoordinatorEvent::Joined { hello, reading, writing } => self.link.node_joined(&hello, reading, writing),
            CoordinatorEvent::FromPeer(node, up) => return self.link.with_barrier(|steps| steps.handle(node, up)),
            CoordinatorEvent::PeerLost(node, reason) => {
                return self.link.with_barrier(|steps| steps.node_lost(node, &reason));
            }
            CoordinatorEvent::FromFirst(down) => return Some(down),
            CoordinatorEvent::FirstLost(reason) => {
                self.first_node_lost = true;
                self.failure.get_or_insert_with(|| {
                    ProbeFailure::new(FailureKind::Failed, format!("lost the connection to the first node: {reason}"))
                });
                return Some(FromFirst::Stop(reason));
            }
        }
        None
    }

    fn handle_worker_message(&mut self, message: WorkerMessage) -> Option<FromFirst> {
        match message {
            WorkerMessage::Opened(opened) => {
                let up = ToFirst::Opened { gpus: opened.gpus.len() as u32, free_bytes: opened.free_bytes };
                let is_single_gpu = opened.gpus.len() == 1 && self.link.is_only_node();
                let gpu = opened.gpus.first().cloned().unwrap_or_default();
                self.opened = Some(opened);
                if is_single_gpu { Some(self.single_gpu_result(gpu)) } else { self.send_to_first(up) }
            }
            WorkerMessage::Id(id) => self.send_to_first(ToFirst::Id(id)),
            WorkerMessage::AtStep(step) => {
                let up = self.wrong_transport(step).map_or(ToFirst::AtStep(step), ToFirst::Failed);
                self.send_to_first(up)
            }
            WorkerMessage::Report(report) => {
                let rank_failure = report.failure.clone().filter(|rank_failure| *rank_failure != RankFailure::Stopped);
                let text = format!("GPU {}: {}", report.gpu, rank_failure.as_ref().map_or("", RankFailure::text));
                self.gpus.push(report);
                rank_failure.and_then(|_| self.send_to_first(ToFirst::Failed(text)))
            }
            WorkerMessage::Failed(failure) => {
                let text = failure.text.clone();
                self.failure.get_or_insert(failure);
                self.send_to_first(ToFirst::Failed(text))
            }
        }
    }

    /// Returns why the test goes by the wrong transport, which the log shows after the first size. The larger sizes
    /// could then take minutes, for a meaningless result.
    fn wrong_transport(&self, step: usize) -> Option<String> {
        let gpus = self.opened.as_ref().map_or(0, |opened| opened.gpus.len());
        let path_error = if step < STEP_AFTER_FIRST_SIZE { None } else { self.classify_paths(gpus).err() };
        path_error.filter(|error| matches!(error, PathError::OtherTransport { .. })).map(|error| error.to_string())
    }

    /// A sum over one GPU needs no communication.
    fn single_gpu_result(&self, gpu: String) -> FromFirst {
        let gpu = GpuReport { rank: 0, gpu, sizes: Vec::new(), exchange: None, failure: None };
        FromFirst::Finished {
            reports: vec![NodeReport {
                node: self.name.clone(),
                gpus: vec![gpu],
                path_mismatch: None,
                disturbances: Vec::new(),
            }],
            why: None,
        }
    }

    /// Sends a message to the first node, which may be this one.
    fn send_to_first(&mut self, up: ToFirst) -> Option<FromFirst> {
        match self.link.send_up(up) {
            Ok(down) => down,
            Err(error) => self.handle_event(CoordinatorEvent::FirstLost(error.to_string())),
        }
    }

    /// Carries out an instruction of the first node. Returns the outcome if that was the last one.
    fn handle_command(&mut self, down: FromFirst) -> Result<Option<Outcome>, ProbeFailure> {
        match down {
            FromFirst::MakeId => self.worker.send(&WorkerCommand::MakeId),
            FromFirst::Begin(begin) => {
                self.begin = Some(begin.clone());
                self.worker.send(&WorkerCommand::Begin(begin));
            }
            FromFirst::GoToStep(step) => self.worker.send(&WorkerCommand::GoToStep(step)),
            FromFirst::Stop(reason) => {
                eprintln!("ending the test: {reason}");
                self.stop_requested_at.get_or_insert_with(Instant::now);
                self.worker.send(&WorkerCommand::Stop);
            }
            FromFirst::Finished { reports, why: reason } => return self.outcome(reports, reason).map(Some),
        }
        Ok(None)
    }

    fn outcome(&mut self, reports: Vec<NodeReport>, stop_reason: Option<String>) -> Result<Outcome, ProbeFailure> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let own = self.position.map_or(0, |position| position.rank as usize);
        let nccl = self.opened.as_ref().map_or(0, |opened| opened.nccl);
        let warnings = self.log.warnings.clone();
        Ok(Outcome { reports, own, paths: self.paths, nccl, stop_reason, warnings })
    }

    /// Reports once the worker has ended: then its log is complete and can be judged.
    fn report_if_done(&mut self) -> Option<FromFirst> {
        if !self.ended || self.reported {
            return None;
        }
        self.reported = true;
        if self.opened.is_none() && self.stop_requested_at.is_none() {
            let text = "the worker exited before it reported its GPUs; see the log";
            self.failure.get_or_insert_with(|| ProbeFailure::new(FailureKind::Failed, text));
        }
        self.complete();
        let gpus = std::mem::take(&mut self.gpus);
        let has_failed = self.failure.is_some() || gpus.iter().any(|gpu| gpu.failure.is_some());
        let other_way = match self.classify_paths(gpus.len()) {
            Ok(paths) => {
                self.paths = paths.filter(|_| !has_failed);
                None
            }
            // Sockets may be so slow that the test seems to hang: then this is the cause.
            Err(error @ PathError::OtherTransport { .. }) => Some(error.to_string()),
            // The log of an aborted test is incomplete.
            Err(error) => (!has_failed).then(|| error.to_string()),
        };
        let text = "its worker exited early".to_owned();
        let disturbances = self.watch.disturbances_of(|bus| gpus.iter().any(|gpu| gpu.gpu == bus));
        let report = NodeReport { node: self.name.clone(), gpus, path_mismatch: other_way, disturbances };
        // A node that ends unasked stops the others; an earlier reason stays.
        let stop = if has_failed { self.send_to_first(ToFirst::Failed(text)) } else { None };
        self.send_to_first(ToFirst::Report(report)).or(stop)
    }

    /// Adds a report for each GPU that sent none.
    fn complete(&mut self) {
        let crashed = self.worker.crashed();
        let Some(opened) = &self.opened else { return };
        let first = self.begin.as_ref().map_or(0, |begin| begin.first_rank);
        for (index, gpu) in opened.gpus.iter().enumerate() {
            let rank = first + index as u32;
            if self.gpus.iter().all(|report| report.rank != rank) {
                let failure = match (&crashed, self.stop_requested_at) {
                    (Some(how), _) => RankFailure::Failed(format!("its worker was killed by {how}")),
                    (None, Some(_)) => RankFailure::Stopped,
                    (None, None) => RankFailure::Failed("its worker exited without a report".to_owned()),
                };
                self.gpus.push(GpuReport {
                    rank,
                    gpu: gpu.clone(),
                    sizes: Vec::new(),
                    exchange: None,
                    failure: Some(failure),
                });
            }
        }
        self.gpus.sort_by_key(|gpu| gpu.rank);
    }

    fn classify_paths(&self, gpus: usize) -> Result<Option<PathCounts>, PathError> {
        let Some(begin) = &self.begin else { return Ok(None) };
        let last = begin.first_rank + gpus as u32;
        let requested = RequestedPath {
            mode: self.params.mode,
            net: &self.params.net,
            shared_memory: self.params.shared_memory,
            ranks: begin.first_rank..last,
        };
        self.log.check_path(&requested).map(Some)
    }

    fn check_limits(&mut self) -> Result<Option<Outcome>, ProbeFailure> {
        if self.stop.requested() == Some(StopReason::Signal) {
            self.worker.kill();
            return Err(ProbeFailure::new(FailureKind::Killed, "stopped by a signal"));
        }
        if self.stop_requested_at.is_some_and(|since| since.elapsed() > REPORT_GRACE) && !self.ended {
            // It hangs in a library or in the driver.
            self.worker.kill();
        }
        let is_over = self.first_node_lost && self.reported;
        if is_over || self.stop_requested_at.is_some_and(|since| since.elapsed() > 2 * REPORT_GRACE) {
            return self.end_without_reports();
        }
        let reason = if self.began.elapsed() > self.params.timeout.to_std() {
            Some(format!("the test did not finish within {}; increase `timeout`", self.params.timeout))
        } else {
            self.late_nodes_text()
        };
        let Some(reason) = reason.filter(|_| self.stop_requested_at.is_none()) else { return Ok(None) };
        self.failure.get_or_insert_with(|| ProbeFailure::new(FailureKind::TimedOut, reason.clone()));
        match self.link.stop(reason) {
            Some(down) => self.handle_command(down),
            None => Ok(None),
        }
    }

    /// Returns which nodes are late. Only the first node knows.
    fn late_nodes_text(&mut self) -> Option<String> {
        let barrier = self.link.barrier()?;
        let (gather, stall) = (self.params.gather, self.params.stall);
        let missing = barrier.missing();
        if !missing.is_empty() {
            let position = self.position?;
            let named: Vec<_> = missing.iter().map(|node| position.describe_rank(*node as u32)).collect();
            let joined = position.nodes as usize - missing.len();
            return (self.began.elapsed() > gather.to_std()).then(|| {
                format!(
                    "{} did not join within {gather}; {joined} of {} nodes joined",
                    named.join(", "),
                    position.nodes
                )
            });
        }
        let late = barrier.late();
        if late.is_empty() {
            self.late_since = None;
            return None;
        }
        let since = *self.late_since.get_or_insert_with(Instant::now);
        let named: Vec<_> = late.iter().map(|node| barrier.describe_node(*node)).collect();
        (since.elapsed() > stall.to_std() + STALL_MARGIN)
            .then(|| format!("{} did not reach the next step within {stall}", named.join(", ")))
    }

    /// Some nodes have not reported. The first node ends the test for the others.
    fn end_without_reports(&mut self) -> Result<Option<Outcome>, ProbeFailure> {
        let down = self.link.with_barrier(|steps| {
            let silent = steps.without_report();
            silent.into_iter().flat_map(|node| steps.node_lost(node, "no report after the stop request")).collect()
        });
        match down {
            Some(down) => self.handle_command(down),
            None => Err(self
                .failure
                .take()
                .unwrap_or_else(|| ProbeFailure::new(FailureKind::TimedOut, "the first node sent no result"))),
        }
    }
}
