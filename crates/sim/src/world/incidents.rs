//! The hostile side of the world: calls and jobs that go wrong, by script or by chance, and incidents.

use std::collections::{BTreeMap, VecDeque};

use doctor_backend::{BackendError, Effect as After};
use doctor_core::{
    ids::NodeName,
    time::{Span, Timestamp},
};

use super::{World, event_queue::Event};
use crate::{
    disruptions::{Call, CallFailure, Incident, JobFault},
    effects::{Disturbance, EffectKind},
    fault::Cure,
    machine::scaled,
    random::{Purpose, Seed, Stream},
};

/// Pending hostile behaviour.
#[derive(Debug)]
pub(super) struct PendingDisruptions {
    calls: BTreeMap<Call, VecDeque<CallFailure>>,
    jobs: VecDeque<JobFault>,
    outage_until: Timestamp,
    stream: Stream,
}

impl PendingDisruptions {
    pub(super) fn new(seed: Seed) -> Self {
        Self {
            calls: BTreeMap::new(),
            jobs: VecDeque::new(),
            outage_until: Timestamp::MIN,
            stream: seed.stream(Purpose::Hostile, 0, 0),
        }
    }
}

/// Returns the error of a call that took effect, but whose answer is lost.
pub(super) fn unanswered(operation: &'static str) -> BackendError {
    BackendError { operation, text: "no answer within 30 s".to_owned(), effect: After::Unknown }
}

impl World {
    /// Fails while the cluster does not answer.
    pub(super) fn check_reachable(&self, operation: &'static str) -> Result<(), BackendError> {
        if self.disruptions.outage_until <= self.now {
            return Ok(());
        }
        let text = "the cluster does not answer: connection refused".to_owned();
        Err(BackendError { operation, text, effect: After::NotAppliedRetry })
    }

    /// Draws the trouble of a call. Returns an error if the call is refused.
    pub(super) fn check_refused(
        &mut self,
        operation: &'static str,
        call: Call,
    ) -> Result<Option<CallFailure>, BackendError> {
        let failure = self.call_trouble(call);
        let refused = |text: &str, effect| Err(BackendError { operation, text: text.to_owned(), effect });
        match failure {
            Some(CallFailure::Refused) => refused("the cluster is too busy", After::NotAppliedRetry),
            Some(CallFailure::RefusedForGood) => refused("the cluster does not allow this", After::NotAppliedPermanent),
            Some(CallFailure::Unanswered) | None => Ok(failure),
        }
    }

    fn call_trouble(&mut self, call: Call) -> Option<CallFailure> {
        if let Some(scripted) = self.disruptions.calls.get_mut(&call).and_then(VecDeque::pop_front) {
            return Some(scripted);
        }
        let chances = match call {
            Call::Submit => self.config.disruptions.submits,
            Call::Cancel => self.config.disruptions.cancels,
            Call::Change => self.config.disruptions.changes,
        };
        let draw = self.disruptions.stream.unit();
        if draw < chances.refused {
            Some(CallFailure::Refused)
        } else if draw < chances.refused + chances.unanswered {
            Some(CallFailure::Unanswered)
        } else {
            None
        }
    }

    pub(super) fn job_trouble(&mut self) -> Option<JobFault> {
        if let Some(scripted) = self.disruptions.jobs.pop_front() {
            return Some(scripted);
        }
        let mut draw = self.disruptions.stream.unit();
        for (fault, chance) in &self.config.disruptions.jobs {
            draw -= chance;
            if draw < 0.0 {
                return Some(*fault);
            }
        }
        None
    }

    pub(super) fn schedule_outage(&mut self) {
        let a_day = self.config.disruptions.outages_per_day;
        if a_day > 0.0 {
            let gap = scaled(Span::days(1), self.disruptions.stream.exponential() / a_day);
            self.queue.push(self.now.plus(gap), Event::OutageBegins);
        }
    }

    pub(super) fn begin_outage(&mut self) {
        self.inject(&Incident::Outage { length: self.config.disruptions.outage });
        self.schedule_outage();
    }

    pub(super) fn scripted(&mut self, number: u32) {
        let incident = self.script[number as usize].clone();
        self.inject(&incident);
    }

    /// Makes an incident happen now. Returns false, and nothing happens, if it names an absent node or one that is not
    /// available.
    pub fn inject(&mut self, incident: &Incident) -> bool {
        let done = self.apply_incident(incident).is_some();
        // Faults stay out of the record, because the controller has to find them.
        if !matches!(incident, Incident::Fault { .. } | Incident::Heal { .. }) {
            self.log(EffectKind::Incident { text: incident.to_string(), done });
        }
        self.settle();
        done
    }

    fn apply_incident(&mut self, incident: &Incident) -> Option<()> {
        match incident {
            Incident::Fault { node, kind } => {
                let slot = self.slot_index(node)?;
                let machine = self.slot(slot).machine as usize;
                let coming = self.machines[machine].fault_now(self.seed, *kind, self.now);
                self.begin_fault(slot, coming);
            }
            Incident::Heal { node } => {
                let slot = self.slot_index(node)?;
                self.cure(slot, Cure::Repair);
            }
            Incident::UserJob { nodes, length } => {
                let slots = nodes.iter().map(|node| self.slot_index(node)).collect::<Option<Vec<_>>>()?;
                return self.pinned_job(&slots, *length).then_some(());
            }
            Incident::UserWorkFails { nodes, owner } => {
                nodes.iter().map(|node| self.slot_index(node)).collect::<Option<Vec<_>>>()?;
                self.scripted_failure(nodes, owner);
            }
            Incident::Calls { call, trouble: failure, times } => {
                let waiting = self.disruptions.calls.entry(*call).or_default();
                waiting.extend((0..*times).map(|_| *failure));
            }
            Incident::Jobs { trouble: fault, times } => self.disruptions.jobs.extend((0..*times).map(|_| *fault)),
            Incident::Outage { length } => {
                self.disruptions.outage_until = self.disruptions.outage_until.max(self.now.plus(*length));
            }
            Incident::ControllerClock { by_secs } => {
                self.controller_ahead = self.controller_ahead.saturating_add(by_secs.saturating_mul(1000));
            }
            Incident::AgentsSilent { percent, length } => self.silence_many(*percent, *length),
            Incident::Vanish { node } => return self.vanish(node),
            Incident::Return { node, called } => return self.return_node(node, called),
            Incident::JobLost { run } => {
                let number = *self.by_run.get(run)?;
                self.lose_run(number);
            }
            Incident::Unreachable { node, .. }
            | Incident::HostHangs { node, .. }
            | Incident::NodeClock { node, .. }
            | Incident::AgentSilent { node, .. }
            | Incident::ForeignMark { node, .. }
            | Incident::ForeignUnmark { node, .. }
            | Incident::OurMarksRemoved { node }
            | Incident::ForeignReboot { node }
            | Incident::Clear { node } => {
                let slot = self.slot_index(node)?;
                self.apply_node_incident(slot, incident);
            }
        }
        Some(())
    }

    fn apply_node_incident(&mut self, slot: u32, incident: &Incident) {
        match incident {
            Incident::Unreachable { length, .. } | Incident::HostHangs { length, .. } => {
                self.freeze_last_heartbeat(slot);
                let until = self.now.plus(*length);
                let hangs = matches!(incident, Incident::HostHangs { .. });
                let slot_state = self.slot_mut(slot);
                slot_state.unreachable_until = until;
                slot_state.hangs_until = if hangs { until } else { Timestamp::MIN };
                self.queue.push(until, Event::NodeReachable(slot));
                self.schedule_agent_report(slot);
            }
            Incident::NodeClock { ahead_secs, .. } => {
                self.slot_mut(slot).clock_ahead = ahead_secs.saturating_mul(1000);
            }
            Incident::AgentSilent { length, .. } => self.silence(slot, *length),
            Incident::ForeignMark { mark, .. } => {
                let foreign = &mut self.slot_mut(slot).node_mut().marks.foreign;
                foreign.retain(|there| there.by != mark.by || there.text != mark.text);
                foreign.push(mark.clone());
                foreign.sort();
            }
            Incident::ForeignUnmark { by, .. } => {
                self.slot_mut(slot).node_mut().marks.foreign.retain(|mark| mark.by != *by);
            }
            Incident::OurMarksRemoved { .. } => self.slot_mut(slot).node_mut().marks.ours.clear(),
            Incident::ForeignReboot { .. } => self.take_down(slot, Disturbance::Reboot, false),
            Incident::Clear { .. } => {
                self.end_user_of(slot);
                let here = self.slot_mut(slot);
                here.unreachable_until = Timestamp::MIN;
                here.hangs_until = Timestamp::MIN;
                here.silent_until = Timestamp::MIN;
            }
            _ => {}
        }
        self.update_slot(slot);
    }

    fn slot_index(&self, node: &NodeName) -> Option<u32> {
        self.by_name.get(node).copied()
    }

    fn silence(&mut self, slot: u32, length: Span) {
        self.freeze_last_heartbeat(slot);
        self.slot_mut(slot).silent_until = self.now.plus(length);
        self.schedule_agent_report(slot);
    }

    fn silence_many(&mut self, percent: f64, length: Span) {
        let slots: Vec<u32> = self.by_name.values().copied().collect();
        for slot in slots {
            if self.disruptions.stream.chance(percent / 100.0) {
                self.silence(slot, length);
                self.update_slot(slot);
            }
        }
    }

    fn vanish(&mut self, node: &NodeName) -> Option<()> {
        let slot = self.by_name.remove(node)?;
        self.freeze_last_heartbeat(slot);
        self.slot_mut(slot).present = false;
        self.vanished.insert(node.clone(), slot);
        self.drop_user(slot);
        // Pending jobs too: a job is created for a name, and the name is gone.
        for run in self.slot(slot).runs.clone() {
            self.lose_run(run);
        }
        self.update_slot(slot);
        self.gone.push((self.version, node.clone()));
        Some(())
    }

    /// Brings back the same machine, rebooted, under this name. Marks belonged to the old name.
    fn return_node(&mut self, node: &NodeName, called: &NodeName) -> Option<()> {
        if self.by_name.contains_key(called) {
            return None;
        }
        let slot = self.vanished.remove(node)?;
        self.by_name.insert(called.clone(), slot);
        self.reboot(slot);
        let here = self.slot_mut(slot);
        here.present = true;
        if here.seen.node.name != *called {
            here.node_mut().marks = Default::default();
            here.node_mut().name = called.clone();
        }
        here.reported.clear();
        self.update_slot(slot);
        self.queue.push(self.now, Event::AgentReports(slot));
        Some(())
    }
}
