//! Inspects the store right after a kill: was an effect in flight, and had it happened?

use std::collections::BTreeSet;

use doctor_core::{
    case::{StepKind, StepState},
    ids::{OpId, RunId},
    run::RunState,
    time::Timestamp,
};
use doctor_sim::{Effect, EffectKind};
use doctor_store::Store;

/// What the inspections have found so far.
///
/// A few intents are open because the cluster refused them or did not answer, and not because of a kill.
#[derive(Debug, Default)]
pub(crate) struct Inspections {
    pub(crate) count: u32,
    /// The numbers of open intents. Each counts once, however long it stays open.
    open: BTreeSet<u64>,
    /// Inspections that found an intent whose effect was not recorded.
    pub(crate) in_flight: u32,
    /// Such intents whose effect had happened, or had not.
    pub(crate) happened: usize,
    pub(crate) not_happened: usize,
}

impl Inspections {
    /// Inspects the store. Opening it performs the recovery that the next controller would otherwise perform.
    pub(crate) fn inspect(&mut self, store: &Store, effects: &[Effect]) {
        let verified = store.verify().unwrap();
        assert!(verified.is_consistent(), "after a kill: {:#?}", verified.problems);
        let (mut runs, mut ops) = (BTreeSet::<RunId>::new(), BTreeSet::<OpId>::new());
        for effect in effects {
            match &effect.what {
                EffectKind::Submitted { run, .. } => {
                    runs.insert(*run);
                }
                EffectKind::Marked { op, .. }
                | EffectKind::Unmarked { op, .. }
                | EffectKind::Drained { op, .. }
                | EffectKind::Undrained { op, .. }
                | EffectKind::Disturbed { op, .. } => {
                    ops.insert(*op);
                }
                _ => {}
            }
        }
        let planned = store.active_runs().unwrap().into_iter().filter(|active| active.run.state == RunState::Planned);
        let open = store.cases(Timestamp::MAX).unwrap();
        let intended = open
            .iter()
            .flat_map(|case| &case.steps)
            .filter(|step| step.state == StepState::Intended && acts_on_the_cluster(step.what));
        let planned = planned.map(|active| (active.run.id.number(), runs.contains(&active.run.id)));
        let intended = intended.map(|step| (step.op.number(), ops.contains(&step.op)));
        let found = planned.chain(intended).filter(|(number, _)| self.open.insert(*number));
        let seen: Vec<bool> = found.map(|(_, happened)| happened).collect();
        self.count += 1;
        self.in_flight += u32::from(!seen.is_empty());
        self.happened += seen.iter().filter(|happened| **happened).count();
        self.not_happened += seen.iter().filter(|happened| !**happened).count();
    }
}

/// The other steps only change the store.
const fn acts_on_the_cluster(step: StepKind) -> bool {
    !matches!(
        step,
        StepKind::SaveEvidence | StepKind::Requalify | StepKind::HandOver | StepKind::Release | StepKind::RequestRepair
    )
}
