//! Opens a case: its first escalation level, given what was tried on the machine before, and the marks already present.

use super::builder::PlanBuilder;
use crate::{
    case::{Case, CaseOutcome, CaseState, RepairStep, Step, StepKind, StepState},
    finding::{Finding, Severity},
    ids::HardwareId,
    node::MarkKind,
    policy::Policy,
    snapshot::NodeRecord,
};

pub(super) fn new_case(
    builder: &mut PlanBuilder<'_>,
    record: &NodeRecord,
    severity: Severity,
    findings: Vec<Finding>,
) -> Case {
    let hardware = hardware_id_of(record);
    let first = Policy::first_repair_step(severity);
    let rung = next_untried_step(builder, &hardware).map_or(first, |tried| tried.max(first));
    let steps = steps_of_present_marks(builder, record, rung);
    Case {
        id: builder.ids.case(),
        hardware,
        node: record.node.name.clone(),
        opened: builder.snapshot.at,
        severity,
        findings,
        repair_step: rung,
        steps,
        state: CaseState::Open,
        boot_id: record.node.hardware.as_ref().and_then(|hardware| hardware.boot_id.clone()),
        advice: None,
        job_failures: record.job_failures.as_ref().map_or_else(Vec::new, |failed| failed.failures.clone()),
        request: None,
    }
}

/// Records marks of ours that are already present as completed steps, so that their removal by another party is
/// noticed.
fn steps_of_present_marks(builder: &mut PlanBuilder<'_>, record: &NodeRecord, rung: RepairStep) -> Vec<Step> {
    let kinds = [(MarkKind::Unhealthy, StepKind::Mark), (MarkKind::Cordon, StepKind::Drain)];
    let present = kinds.into_iter().filter(|(mark, _)| record.node.marks.has_ours(*mark));
    present
        .map(|(_, what)| Step {
            op: builder.ids.op(),
            what,
            repair_step: rung,
            state: StepState::Done,
            at: builder.snapshot.at,
            attempts: 1,
            text: "already present".to_owned(),
        })
        .collect()
}

/// Returns the level after the highest one tried on this machine within `repair.memory`.
fn next_untried_step(builder: &PlanBuilder<'_>, hardware: &HardwareId) -> Option<RepairStep> {
    let since = builder.snapshot.at.minus(builder.snapshot.policy.repair.memory);
    let tried = builder
        .snapshot
        .cases
        .iter()
        .filter(|case| case.hardware == *hardware)
        .filter(|case| matches!(case.state, CaseState::Closed { at, how: CaseOutcome::Returned } if at > since));
    tried
        .filter(|case| case.ever_done(StepKind::Reset) || case.ever_done(StepKind::Reboot))
        .map(|case| case.repair_step.next().unwrap_or(RepairStep::Replace))
        .max()
}

/// Returns the hardware id, or the node name if the machine reported none.
fn hardware_id_of(record: &NodeRecord) -> HardwareId {
    let reported = record.node.hardware.as_ref().and_then(|hardware| hardware.id());
    reported.or_else(|| record.hardware.clone()).unwrap_or_else(|| {
        HardwareId::new(record.node.name.as_str()).expect("a valid node name is a valid hardware id")
    })
}
