//! Determines a node's occupancy from Slurm's state. Pure.
//!
//! A node is free if it responds, is powered up, is neither reserved nor planned for other work, and is idle or used only by our
//! own jobs. An unknown word makes the node's occupancy unknown, because its meaning may be anything.

use doctor_core::{
    node::Occupancy,
    time::{Span, Timestamp},
};

use super::{
    marks::{self, ReservationKind},
    nodes::SlurmNode,
    states::{Base, Flag},
};
use crate::SlurmConfig;

/// For about a second after a resume, Slurm shows a node as not responding.
const RESUME_GRACE: Span = Span::from_secs(5);

/// What is known of a node beyond its own state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodeContext {
    /// Users' jobs on it: `job 12 of alice`.
    pub(super) users: Vec<String>,
    /// A job of ours is on it.
    pub(super) has_our_job: bool,
    /// A job of ours is pending for it.
    pub(super) our_job_pending: bool,
    /// A foreign reservation that holds it now or soon.
    pub(super) foreign_reservation: Option<String>,
    /// A reservation of ours holds it.
    pub(super) our_reservation: ReservationKind,
    /// A user's job is pending for it.
    pub(super) pending_job: Option<String>,
    /// When power saving will power it down if it stays idle.
    pub(super) suspend_at: Option<Timestamp>,
}

pub(super) fn occupancy(node: &SlurmNode, context: &NodeContext, now: Timestamp, config: &SlurmConfig) -> Occupancy {
    let unknown = |why: String| Occupancy::Unknown { why: why.into() };
    let busy = |by: String| Occupancy::Busy { by: by.into() };
    let state = &node.state;
    if let Some(word) = state.unrecognized() {
        return unknown(format!("unrecognised Slurm state {word}"));
    }
    if let Some(user) = context.users.first() {
        return busy(user.clone());
    }
    if let Some(why) = unknown_reason(node, now, config) {
        return unknown(why);
    }
    match state.base() {
        // The queue was read after the nodes: its job has ended or started in between.
        Some(Base::Allocated | Base::Mixed) if !context.has_our_job => return busy("a job".to_owned()),
        _ if state.has(Flag::Completing) && !context.has_our_job => return busy("a completing job".to_owned()),
        _ => {}
    }
    if let Some(name) = &context.foreign_reservation {
        return busy(format!("reservation {name}"));
    }
    if state.any(&[Flag::Reserved, Flag::Maintenance]).is_some() && !context.our_reservation.exists() {
        return busy("a reservation".to_owned());
    }
    // The scheduler may have planned our own pending job for the node.
    if state.has(Flag::Planned) && !context.our_job_pending && !context.has_our_job {
        return busy("a job that is planned for it".to_owned());
    }
    if let Some(mark) = marks::marks(node, context.our_reservation, config).blocking_foreign_mark() {
        return busy(format!("taken out of service by {}: {}", mark.by, mark.text));
    }
    if let Some(job) = &context.pending_job {
        return busy(job.clone());
    }
    let soon = |at: Timestamp| at.since(now) <= config.suspend_margin;
    if !context.has_our_job && !context.our_job_pending && context.suspend_at.is_some_and(soon) {
        return busy("power saving, which will power it down".to_owned());
    }
    Occupancy::Free
}

/// Returns why the occupancy is unknown, or the node is unavailable.
fn unknown_reason(node: &SlurmNode, now: Timestamp, config: &SlurmConfig) -> Option<String> {
    let state = &node.state;
    let flagged = |flag: Flag| match flag {
        Flag::InvalidReg => "it reports less than its configuration says".to_owned(),
        Flag::PoweredDown => "it is powered down".to_owned(),
        Flag::PowerDown | Flag::PoweringDown | Flag::PowerDrain => "it is being powered down".to_owned(),
        Flag::PowerUp | Flag::PoweringUp => "it is being powered up".to_owned(),
        Flag::RebootIssued | Flag::RebootRequested => "it is being rebooted".to_owned(),
        Flag::Blocked => "its switch is allocated exclusively to another job".to_owned(),
        other => format!("Slurm state {}", other.word()),
    };
    const KEEPS: [Flag; 12] = [
        Flag::InvalidReg,
        Flag::PoweredDown,
        Flag::PowerDown,
        Flag::PoweringDown,
        Flag::PowerDrain,
        Flag::PowerUp,
        Flag::PoweringUp,
        Flag::RebootIssued,
        Flag::RebootRequested,
        Flag::Blocked,
        Flag::External,
        Flag::PerfCtrs,
    ];
    if let Some(flag) = state.any(&KEEPS) {
        return Some(flagged(flag));
    }
    if state.has(Flag::NotResponding) {
        let resumed = node.last_busy.filter(|at| now.distance(*at) <= RESUME_GRACE);
        return Some(match resumed {
            Some(_) => "resumed a moment ago, not responding yet".to_owned(),
            None => "it does not respond".to_owned(),
        });
    }
    match state.base() {
        None => Some("Slurm reports no state".to_owned()),
        // Down only because we set it down: it responds.
        Some(Base::Down) if marks::is_drained_by_us(node, config) && !node.reason_text().contains(" : reboot") => None,
        Some(Base::Down) => Some(format!("it is down: {}", node.reason_text())),
        Some(base @ Base::Error) => Some(format!("Slurm state {}", base.word())),
        Some(Base::Future) => Some("defined for future use".to_owned()),
        Some(Base::Unregistered) => Some("it has not registered with slurmctld yet".to_owned()),
        Some(Base::Idle | Base::Allocated | Base::Mixed) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        json,
        nodes::{self, Reason},
        states::SlurmNodeState,
    };

    const NOW: Timestamp = Timestamp::from_secs(1_794_703_000);

    fn of(node: &SlurmNode, context: &NodeContext) -> String {
        match occupancy(node, context, NOW, &SlurmConfig::default()) {
            Occupancy::Free => "free".to_owned(),
            Occupancy::Busy { by } => format!("busy: {by}"),
            Occupancy::Unknown { why } => format!("unknown: {why}"),
        }
    }

    fn plain(state: &str) -> String {
        of(&SlurmNode { state: SlurmNodeState::parse(state), ..SlurmNode::default() }, &NodeContext::default())
    }

    #[test]
    fn only_a_responding_powered_up_unreserved_unplanned_idle_node_is_free() {
        for free in ["IDLE", "IDLE+CLOUD", "IDLE+DYNAMIC_NORM", "IDLE+DYNAMIC_FUTURE", "IDLE+REBOOT_CANCEL"] {
            assert_eq!(plain(free), "free", "{free}");
        }
        // Every other state and flag.
        for base in Base::ALL.iter().filter(|base| **base != Base::Idle) {
            assert_ne!(plain(base.word()), "free", "{base:?}");
        }
        let harmless =
            [Flag::Cloud, Flag::DynamicNorm, Flag::DynamicFuture, Flag::RebootCanceled, Flag::Resume, Flag::Undrain];
        for flag in Flag::ALL.iter().filter(|flag| !harmless.contains(flag)) {
            assert_ne!(plain(&format!("IDLE+{}", flag.word())), "free", "{flag:?}");
        }
    }

    #[test]
    fn powered_down_and_future_nodes_are_not_free_and_an_unrecognised_state_is_named() {
        for (state, expected) in [
            ("IDLE+CLOUD+POWERED_DOWN", "unknown: it is powered down"),
            ("IDLE+POWERING_UP", "unknown: it is being powered up"),
            ("FUTURE", "unknown: defined for future use"),
            ("IDLE+NOT_RESPONDING", "unknown: it does not respond"),
            ("IDLE+DRAIN+INVALID_REG", "unknown: it reports less than its configuration says"),
            ("IDLE+QUANTUM", "unknown: unrecognised Slurm state QUANTUM"),
            ("UNKNOWN", "unknown: it has not registered with slurmctld yet"),
            ("DOWN+DRAIN+REBOOT_ISSUED", "unknown: it is being rebooted"),
            ("MIXED", "busy: a job"),
            ("IDLE+COMPLETING", "busy: a completing job"),
            ("IDLE+PLANNED", "busy: a job that is planned for it"),
            ("IDLE+MAINTENANCE+RESERVED", "busy: a reservation"),
            ("", "unknown: Slurm reports no state"),
        ] {
            assert_eq!(plain(state), expected, "{state}");
        }
    }

    #[test]
    fn a_node_that_was_just_resumed_is_not_called_unreachable() {
        let node = |seconds: i64| SlurmNode {
            state: SlurmNodeState::parse("IDLE+NOT_RESPONDING"),
            last_busy: Some(NOW.minus(Span::from_secs(seconds))),
            ..SlurmNode::default()
        };
        let none = NodeContext::default();
        assert_eq!(of(&node(1), &none), "unknown: resumed a moment ago, not responding yet");
        assert_eq!(of(&node(60), &none), "unknown: it does not respond");
    }

    #[test]
    fn our_jobs_do_not_make_a_node_busy_and_user_jobs_do() {
        let node = |state: &str| SlurmNode { state: SlurmNodeState::parse(state), ..SlurmNode::default() };
        let ours = NodeContext { has_our_job: true, ..NodeContext::default() };
        assert_eq!(of(&node("ALLOCATED"), &ours), "free");
        assert_eq!(of(&node("ALLOCATED+COMPLETING"), &ours), "free");
        let pending = NodeContext { our_job_pending: true, ..NodeContext::default() };
        assert_eq!(of(&node("IDLE+PLANNED"), &pending), "free");
        let users =
            NodeContext { has_our_job: true, users: vec!["job 12 of alice".to_owned()], ..NodeContext::default() };
        assert_eq!(of(&node("ALLOCATED"), &users), "busy: job 12 of alice");
        let demanded = NodeContext {
            has_our_job: true,
            pending_job: Some("job 13 of bob, which waits for it".to_owned()),
            ..ours
        };
        assert_eq!(of(&node("ALLOCATED"), &demanded), "busy: job 13 of bob, which waits for it");
        let in_reservation = NodeContext { our_reservation: ReservationKind::Run, ..NodeContext::default() };
        assert_eq!(of(&node("IDLE+MAINTENANCE+RESERVED"), &in_reservation), "free");
        let both = NodeContext { foreign_reservation: Some("monday".to_owned()), ..in_reservation };
        assert_eq!(of(&node("IDLE+MAINTENANCE+RESERVED"), &both), "busy: reservation monday");
    }

    #[test]
    fn a_node_that_is_about_to_be_powered_down_is_not_free() {
        let node = SlurmNode { state: SlurmNodeState::parse("IDLE"), ..SlurmNode::default() };
        let context = |seconds: i64| NodeContext {
            suspend_at: Some(NOW.plus(Span::from_secs(seconds))),
            ..NodeContext::default()
        };
        assert_eq!(of(&node, &context(3600)), "free");
        assert!(of(&node, &context(200)).starts_with("busy: power saving"));
        assert!(of(&node, &context(-5)).starts_with("busy: power saving"));
        assert_eq!(of(&node, &NodeContext { has_our_job: true, ..context(-5) }), "free", "a job of ours is on it");
    }

    #[test]
    fn our_drain_leaves_a_node_free_for_us_and_a_foreign_drain_does_not() {
        let node = |state: &str, reason: &str| SlurmNode {
            state: SlurmNodeState::parse(state),
            reason: Some(Reason { text: reason.to_owned(), by: Some("root".to_owned()) }),
            ..SlurmNode::default()
        };
        let none = NodeContext::default();
        assert_eq!(of(&node("IDLE+DRAIN", "doctor: xid-79 [c1]"), &none), "free");
        assert_eq!(of(&node("IDLE+DRAIN", "fan"), &none), "busy: taken out of service by root: fan");
        assert_eq!(of(&node("MIXED+DRAIN", "doctor: x"), &none), "busy: a job");
        assert_eq!(of(&node("DOWN", "doctor: x"), &none), "free");
        assert!(of(&node("DOWN", "doctor: x : reboot issued : reboot timed out"), &none).starts_with("unknown"));
        assert!(of(&node("DOWN", "moved"), &none).starts_with("unknown"));
    }

    macro_rules! sample {
        ($path:literal) => {
            ($path, include_bytes!(concat!("fixtures/", $path)).as_slice())
        };
    }

    #[test]
    fn every_captured_state_maps_to_its_occupancy() {
        let alone = NodeContext::default();
        let all = |nodes: Vec<SlurmNode>| {
            nodes.iter().map(|node| format!("{} {}", node.name, of(node, &alone))).collect::<Vec<_>>().join("; ")
        };
        let text = |bytes: &[u8]| nodes::parse(std::str::from_utf8(bytes).unwrap()).unwrap();
        let mut out = String::new();
        for (path, bytes) in
            [sample!("22.05/scontrol-show-node-down.txt"), sample!("22.05/scontrol-show-node-drained.txt")]
        {
            out += &format!("{path}: {}\n", all(text(bytes)));
        }
        for (path, bytes) in [
            sample!("22.05/sinfo.json"),
            sample!("22.05/sinfo-alloc.json"),
            sample!("22.05/sinfo-down.json"),
            sample!("22.05/sinfo-drained.json"),
            sample!("22.05/sinfo-draining.json"),
            sample!("22.05/sinfo-maint-resv.json"),
            sample!("22.05/sinfo-reboot.json"),
            sample!("22.05/sinfo-reboot-issued.json"),
            sample!("22.05/slurmrestd-v0.0.38-nodes.json"),
            sample!("24.11/scontrol-show-node.json"),
            sample!("24.11/scontrol-show-node-maint.json"),
            sample!("24.11/scontrol-show-node-mix.json"),
            sample!("24.11/slurmrestd-v0.0.42-nodes.json"),
            sample!("26.05/scontrol-show-node.json"),
            sample!("26.05/scontrol-show-node-mix.json"),
            sample!("26.05/slurmrestd-v0.0.45-nodes.json"),
        ] {
            out += &format!("{path}: {}\n", all(json::parse(bytes).unwrap()));
        }
        assert_eq!(out, include_str!("fixtures/occupancy.txt"));
    }

    #[test]
    fn the_grouped_output_of_sinfo_is_rejected() {
        for (path, bytes) in [
            sample!("24.11/sinfo.json"),
            sample!("24.11/sinfo-mix.json"),
            sample!("26.05/sinfo.json"),
            sample!("26.05/sinfo-mix.json"),
        ] {
            assert!(json::parse(bytes).unwrap_err().to_string().contains("by groups"), "{path}");
        }
    }
}
