//! Test results: evidence from each node, combined and signed as by `doctor-node`, and corrupted if the world is
//! hostile.

use doctor_checks::{
    document::{Document, RunKey, TestEvidence},
    probe::ProbeOutput,
};
use doctor_core::{ids::TestId, time::Timestamp};

use super::World;
use crate::{
    disruptions::JobFault,
    effects::EffectKind,
    fault::{Class, Fault},
    measure,
    random::Purpose,
    shipped_tests,
    simulated_tests::{DL, GPU_HEALTH, NCCL, probe_of},
};

impl World {
    /// Ends the current test of a job and collects its evidence from each node.
    pub(super) fn finish_test(&mut self, number: u32) {
        let run = &self.runs[number as usize];
        let done = run.evidence.first().map_or(0, Vec::len);
        let (test, began) = (run.request.tests[done].clone(), run.test_began);
        // A GPU is hot after a compute test.
        let hot = done > 0 && matches!(self.simulated(&run.request.tests[done - 1]), DL | NCCL);
        for (index, slot) in run.slots.clone().into_iter().enumerate() {
            let evidence = self.test_on(slot, &test, began, hot);
            self.runs[number as usize].evidence[index].push(evidence);
        }
        measure::share(self.runs[number as usize].evidence.iter_mut().filter_map(|tests| tests.last_mut()));
    }

    /// Returns the simulated test that measures for this test.
    fn simulated<'a>(&self, test: &'a TestId) -> &'a str {
        match self.config.shipped_tests {
            true => shipped_tests::stands_for(test).unwrap_or(test.as_str()),
            false => test.as_str(),
        }
    }

    /// Returns the evidence of one test on one node, from `began` until now.
    pub(super) fn test_on(&mut self, slot: u32, test: &TestId, began: Timestamp, hot: bool) -> TestEvidence {
        let (machine, clock) = (self.slot(slot).machine, self.slot(slot).clock(self.now));
        let output = self.measure(machine, test, hot, clock);
        let probe = probe_of(self.simulated(test)).expect("unknown tests are refused when a job is submitted");
        TestEvidence {
            test: test.clone(),
            started: self.slot(slot).clock(began),
            ended: clock,
            probes: vec![(probe, output)],
        }
    }

    fn measure(&mut self, machine: u32, test: &TestId, hot: bool, clock: Timestamp) -> ProbeOutput {
        let present = self.machines[machine as usize].faults.clone();
        let test = self.simulated(test);
        let broken = present.iter().find(|fault| self.faults[**fault as usize].kind.profile().breaks.contains(&test));
        if let Some(&fault) = broken {
            return measure::print_broken(&self.faults[fault as usize]);
        }
        let detected: Vec<u32> = present.into_iter().filter(|fault| self.is_detected(*fault, test, hot)).collect();
        for &fault in &detected {
            self.faults[fault as usize].shown.get_or_insert(self.now);
        }
        let machine = &mut self.machines[machine as usize];
        machine.measured += 1;
        let mut noise = self.seed.stream(Purpose::Noise, machine.number, u64::from(machine.measured));
        let detected: Vec<&Fault> = detected.iter().map(|fault| &self.faults[*fault as usize]).collect();
        measure::print(test, &detected, clock, &mut noise, &self.config.assumptions)
    }

    /// Draws whether this run of this test detects the fault. Each run is an independent draw.
    fn is_detected(&mut self, fault: u32, test: &str, hot: bool) -> bool {
        let assumptions = &self.config.assumptions;
        let fault = &mut self.faults[fault as usize];
        if fault.kind.detecting_test() != test {
            return false;
        }
        let chance = match fault.kind.profile().class {
            Class::Hard => 1.0,
            Class::Gray => assumptions.catch_gray,
            Class::Sdc if hot => assumptions.catch_sdc_hot,
            Class::Sdc => assumptions.catch_sdc_cold,
        };
        fault.detection_draws += 1;
        let machine = self.machines[fault.machine as usize].number;
        let draw = (u64::from(fault.nth) << 32) | u64::from(fault.detection_draws);
        self.seed.stream(Purpose::Catch, machine, draw).chance(chance)
    }

    /// Returns the agent's current readings of a node.
    pub(super) fn passive_evidence(&mut self, slot: u32) -> TestEvidence {
        let test = TestId::new(GPU_HEALTH).expect("a fixed name that the type accepts");
        self.test_on(slot, &test, self.now, false)
    }

    /// Signs and delivers a job's results: one document per node, altered by the job's injected fault.
    pub(super) fn deliver_results(&mut self, number: u32) {
        let job_fault = self.runs[number as usize].trouble;
        if job_fault == Some(JobFault::NoResult) {
            return;
        }
        let evidence = std::mem::take(&mut self.runs[number as usize].evidence);
        for (index, tests) in evidence.into_iter().enumerate() {
            let answers = match job_fault {
                Some(JobFault::Truncated | JobFault::WronglySigned | JobFault::OtherNode) => Vec::new(),
                _ => tests.iter().map(|evidence| evidence.test.clone()).collect(),
            };
            let bytes = self.sign(number, index, tests, job_fault);
            let copies = if job_fault == Some(JobFault::Twice) { 2 } else { 1 };
            for _ in 0..copies {
                self.deliver(number, index, &bytes, &answers);
            }
        }
    }

    fn sign(&self, number: u32, index: usize, tests: Vec<TestEvidence>, job_fault: Option<JobFault>) -> Vec<u8> {
        let run = &self.runs[number as usize];
        let slot = self.slot(run.slots[index]);
        let other = self.by_name.keys().find(|name| **name != slot.seen.node.name);
        let node = match (job_fault, other) {
            (Some(JobFault::OtherNode), Some(other)) => other.clone(),
            _ => slot.seen.node.name.clone(),
        };
        let document = Document {
            run: run.request.run,
            node,
            hardware: self.machines[slot.machine as usize].inside(),
            started: tests.first().map_or(slot.clock(self.now), |test| test.started),
            ended: slot.clock(self.now),
            tests,
            uptime: None,
            machine: None,
        };
        let key = match job_fault {
            Some(JobFault::WronglySigned) => RunKey::new(self.seed.stream(Purpose::Keys, u64::from(number), 1).bytes()),
            _ => run.request.key.clone(),
        };
        let mut bytes = document.sign(&key).expect("finite numbers and plain words have a JSON form");
        if job_fault == Some(JobFault::Truncated) {
            bytes.truncate(bytes.len() / 2);
        }
        bytes
    }

    fn deliver(&mut self, number: u32, index: usize, bytes: &[u8], answers: &[TestId]) {
        let node = self.name(self.runs[number as usize].slots[index]);
        let run = &mut self.runs[number as usize];
        if self.config.carry_documents {
            run.documents.push(bytes.to_vec());
        }
        let id = run.request.run;
        let written = match (&self.share, run.request.outputs.iter().find(|output| output.node == node)) {
            (Some(share), Some(output)) => share.put(&output.document, bytes),
            _ => Ok(()),
        };
        match written {
            Ok(()) => {
                let (bytes, answers) = (bytes.len() as u64, answers.to_vec());
                self.log(EffectKind::Document { run: id, node, bytes, answers });
            }
            Err(error) => self.log(EffectKind::ShareTrouble { run: id, text: error.to_string() }),
        }
    }

    /// Appends one line about the current test to the log of each node of a job.
    pub(super) fn log_lines(&mut self, number: u32, what: &str) {
        let Some(share) = &mut self.share else { return };
        let run = &self.runs[number as usize];
        let done = run.evidence.first().map_or(0, Vec::len);
        let Some(test) = run.request.tests.get(done) else { return };
        let mut error_text = None;
        for output in &run.request.outputs {
            let line = format!("{} {}: {test} {what}", self.now, output.node);
            let Some(log) = output.logs.get(done).or(output.logs.first()) else { continue };
            if let Err(error) = share.append(log, &line) {
                error_text.get_or_insert(error.to_string());
            }
        }
        let id = run.request.run;
        if let Some(text) = error_text {
            self.log(EffectKind::ShareTrouble { run: id, text });
        }
    }
}
