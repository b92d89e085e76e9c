//! Determines an instance's occupancy from dstack's state. Pure.
//!
//! An instance is free if it is idle or used only by our own run, dstack reaches it, and dstack does not report its GPUs as
//! failing: on any other it starts nothing. dstack reports `idle` for an instance that it cannot reach, and `healthy` for one
//! that it has not checked, so each field counts only together with the others.

use doctor_core::{
    ids::RunId,
    node::{ForeignMark, Occupancy},
    time::{Span, Timestamp},
};

use super::api_types::{Health, Instance, InstanceStatus};

/// What is known of an instance beyond its own state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct InstanceContext {
    /// Other users' runs on it: `run train of alice`.
    pub(super) users: Vec<String>,
    /// Our runs that are on it, or are pending for it.
    pub(super) our_runs: Vec<RunId>,
    /// A pending run that needs such an instance, and for which there is no other.
    pub(super) waiting_run: Option<String>,
    /// When dstack terminates it if it stays idle.
    pub(super) idle_termination: IdleTermination,
}

/// When dstack terminates an idle instance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum IdleTermination {
    #[default]
    Never,
    At(Timestamp),
    /// At an unknown time.
    Unknown,
}

/// Returns the occupancy. `health_message` has the messages of the newest health check; an instance terminated within the margin
/// counts as busy.
pub(super) fn occupancy(
    instance: &Instance,
    context: &InstanceContext,
    health_message: &str,
    (now, margin): (Timestamp, Span),
) -> Occupancy {
    let busy = |by: String| Occupancy::Busy { by: by.into() };
    if let Some(user) = context.users.first() {
        return busy(user.clone());
    }
    if let Some(why) = unknown_reason(instance, health_message) {
        return Occupancy::Unknown { why: why.into() };
    }
    if matches!(instance.status, InstanceStatus::Terminating | InstanceStatus::Terminated) {
        let reason = instance.termination_reason.as_deref().unwrap_or("no reason given");
        return busy(format!("dstack is terminating it: {reason}"));
    }
    // Runs of other projects are not in this project's list.
    let taken = instance.status == InstanceStatus::Busy || instance.busy_blocks > 0;
    if taken && context.our_runs.is_empty() {
        return busy("a run that is not visible to this project".to_owned());
    }
    if let Some(waiting) = &context.waiting_run {
        return busy(format!("{waiting}, which waits for an instance"));
    }
    let soon = match context.idle_termination {
        IdleTermination::Never => false,
        IdleTermination::At(at) => at.since(now) <= margin,
        IdleTermination::Unknown => true,
    };
    if context.our_runs.is_empty() && soon {
        return busy("dstack is about to terminate it as idle".to_owned());
    }
    Occupancy::Free
}

/// Returns why the occupancy is unknown, or nothing can be started there.
fn unknown_reason(instance: &Instance, health_message: &str) -> Option<String> {
    match &instance.status {
        InstanceStatus::Pending => return Some("dstack has not set it up yet".to_owned()),
        InstanceStatus::Provisioning => return Some("dstack is setting it up".to_owned()),
        InstanceStatus::Strange(word) => return Some(format!("unrecognised dstack status {word}")),
        InstanceStatus::Idle | InstanceStatus::Busy | InstanceStatus::Terminating | InstanceStatus::Terminated => {}
    }
    match instance.unreachable {
        Some(false) => {}
        Some(true) => return Some("dstack cannot reach it".to_owned()),
        None => return Some("dstack does not report whether it is reachable".to_owned()),
    }
    match &instance.health_status {
        Some(Health::Failure) => {
            let colon = if health_message.is_empty() { "" } else { ": " };
            Some(format!("dstack reports failing GPUs and starts nothing there{colon}{health_message}"))
        }
        Some(Health::Strange(word)) => Some(format!("unrecognised dstack health {word}")),
        Some(Health::Healthy | Health::Warning) | None => None,
    }
}

/// Returns dstack's own verdict on an instance as a mark; `details` are the messages of its newest check. It is a report and does
/// not block: the occupancy already shows that dstack starts nothing on a failing instance.
pub(super) fn foreign_marks(instance: &Instance, details: &str) -> Vec<ForeignMark> {
    let word = match instance.health_status {
        Some(Health::Warning) => "warning",
        Some(Health::Failure) => "failure",
        Some(Health::Healthy | Health::Strange(_)) | None => return Vec::new(),
    };
    let text = if details.is_empty() { format!("health {word}") } else { format!("health {word}: {details}") };
    vec![ForeignMark { by: "dstack".to_owned(), text, blocks: false }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api_types::tests::instance;

    const NOW: Timestamp = Timestamp::from_secs(1_794_703_000);

    fn describe(instance: &Instance, context: &InstanceContext) -> String {
        match occupancy(instance, context, "", (NOW, Span::minutes(15))) {
            Occupancy::Free => "free".to_owned(),
            Occupancy::Busy { by } => format!("busy: {by}"),
            Occupancy::Unknown { why } => format!("unknown: {why}"),
        }
    }

    #[test]
    fn only_an_idle_reachable_healthy_instance_is_free() {
        let with = |change: &dyn Fn(&mut Instance)| {
            let mut instance = instance();
            change(&mut instance);
            describe(&instance, &InstanceContext::default())
        };
        assert_eq!(with(&|_| {}), "free");
        assert_eq!(with(&|one| one.health_status = Some(Health::Warning)), "free");
        assert_eq!(with(&|one| one.health_status = None), "free");
        let failing = "unknown: dstack reports failing GPUs and starts nothing there";
        assert_eq!(with(&|one| one.health_status = Some(Health::Failure)), failing);
        assert_eq!(with(&|one| one.unreachable = Some(true)), "unknown: dstack cannot reach it");
        assert_eq!(with(&|one| one.unreachable = None), "unknown: dstack does not report whether it is reachable");
        for (status, expected) in [
            (InstanceStatus::Pending, "unknown: dstack has not set it up yet"),
            (InstanceStatus::Provisioning, "unknown: dstack is setting it up"),
            (InstanceStatus::Busy, "busy: a run that is not visible to this project"),
            (InstanceStatus::Terminating, "busy: dstack is terminating it: no reason given"),
            (InstanceStatus::Strange("odd".into()), "unknown: unrecognised dstack status odd"),
        ] {
            assert_eq!(with(&|one| one.status = status.clone()), expected);
        }
        // One block of an instance may be taken while the others are idle.
        assert_eq!(with(&|one| one.busy_blocks = 1), "busy: a run that is not visible to this project");
    }

    #[test]
    fn only_runs_of_others_make_an_instance_busy() {
        let mut busy = instance();
        busy.status = InstanceStatus::Busy;
        busy.busy_blocks = 1;
        let ours = InstanceContext { our_runs: vec![RunId::from_number(7)], ..InstanceContext::default() };
        assert_eq!(describe(&busy, &ours), "free");
        let user = InstanceContext { users: vec!["run train of alice".to_owned()], ..ours.clone() };
        assert_eq!(describe(&busy, &user), "busy: run train of alice");
        let demanded = InstanceContext { waiting_run: Some("run train of alice".to_owned()), ..ours };
        assert_eq!(describe(&busy, &demanded), "busy: run train of alice, which waits for an instance");
    }

    #[test]
    fn an_unused_instance_about_to_be_terminated_is_busy() {
        let at = |minutes| InstanceContext {
            idle_termination: IdleTermination::At(NOW.plus(Span::minutes(minutes))),
            ..InstanceContext::default()
        };
        let leaving = "busy: dstack is about to terminate it as idle";
        assert_eq!(describe(&instance(), &at(16)), "free");
        assert_eq!(describe(&instance(), &at(15)), leaving);
        assert_eq!(
            describe(
                &instance(),
                &InstanceContext { idle_termination: IdleTermination::Unknown, ..InstanceContext::default() }
            ),
            leaving
        );
        assert_eq!(describe(&instance(), &InstanceContext { our_runs: vec![RunId::from_number(1)], ..at(1) }), "free");
    }

    #[test]
    fn a_bad_health_report_of_dstack_is_a_foreign_mark() {
        let marks = |health| foreign_marks(&Instance { health_status: health, ..instance() }, "GPU 5 has a DBE");
        assert_eq!(marks(Some(Health::Healthy)), []);
        let [warning] = &marks(Some(Health::Warning))[..] else { panic!("one mark") };
        assert_eq!((warning.text.as_str(), warning.blocks), ("health warning: GPU 5 has a DBE", false));
        let [failure] = &marks(Some(Health::Failure))[..] else { panic!("one mark") };
        assert_eq!((failure.text.as_str(), failure.blocks), ("health failure: GPU 5 has a DBE", false));
    }
}
