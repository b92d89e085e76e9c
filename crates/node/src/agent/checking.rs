//! One round of checks: runs them, and reports those whose results have changed.

use std::{collections::BTreeSet, sync::Arc};

use doctor_checks::document::{AgentReport, TestEvidence};
use doctor_core::{
    classify::{Baselines, BootGrace, ExpectationSources, apply_boot_grace, classify_with},
    ids::CheckId,
    node::Hardware,
    time::Span,
};

use super::{Agent, config::Config, log_line};
use crate::{
    check,
    clock::now,
    hardware,
    job::{MAX_EVIDENCE_BYTES, truncate_evidence},
    runner::{DriverHelper, LocalRunner, ProbeRunner},
    stop::Stop,
};

fn runner<'a>(config: &Config, stop: &'a Stop, driver_helper: &Arc<DriverHelper>) -> LocalRunner<'a> {
    LocalRunner::new(&config.root, stop).library(config.library.clone()).driver_helper(driver_helper)
}

impl Agent<'_> {
    /// Looks at the machine again: its type decides which counts are expected.
    pub(super) fn refresh_machine(&mut self) {
        let runner = runner(&self.config, self.stop, &self.driver_helper);
        if let Some(line) = self.machine.refresh(&self.config.machine, &runner) {
            log_line(&line);
        }
    }

    /// Runs these checks and reports changed results.
    pub(super) fn run_checks(&mut self, due: &BTreeSet<CheckId>) {
        let config = &self.config;
        let runner = runner(config, self.stop, &self.driver_helper).state(Some(&config.state));
        let probes_of = |check: &CheckId| {
            let check_def = config.catalogue.get(check);
            check_def
                .map_or_else(Vec::new, |check_def| (check_def.probes)(&config.catalogue.params(&config.policy, check)))
        };
        runner.prepare(&due.iter().flat_map(&probes_of).collect::<Vec<_>>());
        let profile = config.profile.as_ref().or_else(|| self.machine.profile());
        let (mut ran, mut changed, mut bytes_left) = (Vec::new(), Vec::new(), MAX_EVIDENCE_BYTES);
        let up = check::uptime(&runner);
        for id in due {
            let Some(check) = config.catalogue.get(id) else { continue };
            let params = config.catalogue.params(&config.policy, id);
            let started = now();
            let (probes, outputs): (Vec<_>, Vec<_>) =
                probes_of(id).into_iter().map(|probe| (probe.clone(), runner.run(&probe))).unzip();
            if self.stop.requested().is_some() {
                return;
            }
            let observation = (check.interpret)(&params, &outputs);
            let rules = config.rules_of(id);
            let baselines = Baselines::at(now());
            let sources = ExpectationSources::of_profile(profile, &baselines);
            let judgement = classify_with(rules, sources, id, &observation);
            // The result changes when the grace ends, and is reported then.
            let boot = BootGrace { up, grace: config.policy.agents.boot_grace, is_deep: false };
            let judgement = apply_boot_grace(judgement, boot);
            self.verdicts.record(id, judgement.verdict, &judgement.findings, &judgement.text, now());
            if self.report_dedup.should_report(id, rules, &observation, &judgement) {
                let probes = probes.into_iter().zip(outputs).collect();
                let mut evidence = TestEvidence { test: id.clone(), started, ended: now(), probes };
                bytes_left = truncate_evidence(bytes_left, &mut evidence);
                changed.push(evidence);
            }
            ran.push(id.clone());
        }
        self.save_verdicts(due);
        if changed.is_empty() {
            self.outbox.confirm(ran);
            return;
        }
        let hardware = hardware::collect(&runner);
        drop(runner);
        self.report(hardware, up, ran, changed);
    }

    fn report(&mut self, hardware: Hardware, up: Option<Span>, ran: Vec<CheckId>, checks: Vec<TestEvidence>) {
        let (route, machine) = (&self.config.route, self.machine.facts());
        let error = self.outbox.add(ran, |number| AgentReport {
            hardware,
            uptime: up,
            checks,
            machine,
            ..AgentReport::heartbeat(route.node.clone(), number, now(), route.versions.clone())
        });
        if let Some(error) = &error
            && self.spool_error.as_ref() != Some(error)
        {
            log_line(&format!("cannot write the spool, reports are in memory only: {error}"));
        }
        self.spool_error = error;
    }

    /// Saves the verdicts for hooks. If that fails, a hook runs the checks itself.
    fn save_verdicts(&mut self, due: &BTreeSet<CheckId>) {
        if self.config.fast_checks().all(|check| due.contains(&check)) {
            self.verdicts.mark_all_checked(now());
        }
        let _saved = self.verdicts.write(&self.config.state);
    }
}
