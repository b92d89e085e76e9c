//! Marks on a node: tells ours from foreign ones, and builds the node updates that set and remove ours. Pure.
//!
//! `unhealthy` and a drain both keep users off by Slurm's own means: the node is drained with a reason that begins with our
//! prefix. The [`Note`] records which of the two, or both, are set. `maintenance` is recorded there too, and is also a
//! reservation of ours: inside one a node is not drained, and is closed to users all the same.
//!
//! A drain is ours if its reason is. A drain that is older than ours, or whose reason an operator replaced, is foreign. Once an
//! operator resumes the node, our marks are gone, whatever the note records.

use doctor_backend::{Change, ChangeReason};
use doctor_core::{
    ids::{CaseId, OpId},
    node::{ForeignMark, MarkKind, Marks, OurMark},
};

use super::{
    config::{OutAs, SlurmConfig},
    drain_reason::{case_in, drain_reason},
    node_comment::{FieldInUse, Note, RecordedMark},
    nodes::SlurmNode,
    states::{Base, Flag},
};

/// Slurm's own reasons for a node that went down by itself, without an operator's decision.
const SLURM_OWN_REASONS: [&str; 5] =
    ["Not responding", "Node unexpectedly rebooted", "reboot timed out", "ResumeTimeout reached", "reboot issued"];

/// Whether a node is out of service, and whose decision it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OutOfService {
    No,
    Ours,
    Foreign,
}

fn out_of_service(node: &SlurmNode, config: &SlurmConfig) -> OutOfService {
    let by_itself = || SLURM_OWN_REASONS.iter().any(|text| node.reason_text().ends_with(text));
    let is_out = node.state.any(&[Flag::Drain, Flag::Fail]).is_some()
        || (node.state.base() == Some(Base::Down) && (is_ours(node, config) || !by_itself()));
    match is_out {
        false => OutOfService::No,
        true if is_ours(node, config) => OutOfService::Ours,
        true => OutOfService::Foreign,
    }
}

fn is_ours(node: &SlurmNode, config: &SlurmConfig) -> bool {
    node.reason_text().starts_with(&config.prefix)
}

/// Returns whether we, and only the node's state, keep users off.
pub(super) fn is_drained_by_us(node: &SlurmNode, config: &SlurmConfig) -> bool {
    out_of_service(node, config) == OutOfService::Ours
}

/// Returns whether an operator took the node out of service, or replaced our reason.
pub(super) fn is_out_by_others(node: &SlurmNode, config: &SlurmConfig) -> bool {
    out_of_service(node, config) == OutOfService::Foreign
}

/// Whether a reservation of ours holds a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum ReservationKind {
    #[default]
    None,
    /// For a repair, which ends it itself.
    Repair,
    /// For a run: it counts as a maintenance mark, so that it is removed when the run is over, even if its controller was killed.
    Run,
}

impl ReservationKind {
    pub(super) const fn exists(self) -> bool {
        !matches!(self, Self::None)
    }
}

/// Returns the marks of a node.
pub(super) fn marks(node: &SlurmNode, reservation: ReservationKind, config: &SlurmConfig) -> Marks {
    let note = valid_note(node, reservation.exists(), config);
    let mut ours: Vec<OurMark> = note.marks.iter().map(|mark| OurMark { kind: mark.kind, case: mark.case }).collect();
    if reservation == ReservationKind::Run && !note.has(MarkKind::Maintenance) {
        ours.push(OurMark { kind: MarkKind::Maintenance, case: None });
    }
    ours.sort();
    let foreign = (out_of_service(node, config) == OutOfService::Foreign).then(|| ForeignMark {
        by: node.reason.as_ref().and_then(|reason| reason.by.clone()).unwrap_or_else(|| "an unknown user".to_owned()),
        text: if node.reason_text().is_empty() { "drained".to_owned() } else { node.reason_text().to_owned() },
        blocks: true,
    });
    Marks { ours, foreign: foreign.into_iter().collect() }
}

/// Returns the part of the note that still applies.
pub(super) fn valid_note(node: &SlurmNode, in_reservation: bool, config: &SlurmConfig) -> Note {
    let found = Note::read(node, config);
    let read = found.is_present();
    let mut note = found.into_note();
    let out = out_of_service(node, config);
    note.over_foreign &= out == OutOfService::Foreign;
    note.was_open &= out != OutOfService::Ours;
    let holds = out == OutOfService::Ours || in_reservation || note.over_foreign;
    note.marks.retain(|mark| holds || mark.kind == MarkKind::Maintenance);
    // A health hook without a controller drains with our reason and writes no note.
    if out == OutOfService::Ours && !note.keeps_out() {
        note.marks.push(RecordedMark { kind: MarkKind::Unhealthy, case: case_in(node.reason_text()) });
        node.reason_text().clone_into(&mut note.reason);
    }
    // A note preceded our reservation. If it is unreadable now, nothing permits giving the node to users.
    if in_reservation && out == OutOfService::No && !read {
        note.marks.push(RecordedMark { kind: MarkKind::Unhealthy, case: None });
    }
    note
}

/// An update of a node, made in one command.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodeUpdate {
    pub(super) state: Option<NewState>,
    /// For states that need one.
    pub(super) reason: Option<String>,
    /// The complete content of the field with our note.
    pub(super) field: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NewState {
    Drain,
    Fail,
    Down,
    Resume,
}

impl NewState {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Drain => "DRAIN",
            Self::Fail => "FAIL",
            Self::Down => "DOWN",
            Self::Resume => "RESUME",
        }
    }
}

/// Returns the mark that a change concerns, and whether it sets or removes it.
const fn mark_of_change(what: &Change) -> Option<(MarkKind, bool)> {
    match what {
        Change::Mark(mark) => Some((mark.kind, true)),
        Change::Unmark(mark) => Some((mark.kind, false)),
        Change::Drain => Some((MarkKind::Cordon, true)),
        Change::Undrain => Some((MarkKind::Cordon, false)),
        Change::Evict | Change::Reset | Change::Reboot | Change::Replace => None,
    }
}

/// Builds the update for a change; `None` if it was made before, or does not concern marks.
pub(super) fn update(
    node: &SlurmNode,
    in_reservation: bool,
    op: OpId,
    what: &Change,
    reason: Option<&ChangeReason>,
    config: &SlurmConfig,
) -> Result<Option<NodeUpdate>, FieldInUse> {
    let Some((kind, there)) = mark_of_change(what) else { return Ok(None) };
    let mut note = valid_note(node, in_reservation, config);
    // One operation may remove several marks.
    if note.mark_changes.get(op, kind.code()).is_some() {
        return Ok(None);
    }
    // A mark that only a reservation implies is removed with it and needs no record.
    if !there && kind == MarkKind::Maintenance && !note.has(kind) {
        return Ok(None);
    }
    note.mark_changes.record(op, kind.code(), "");
    let before = note.marks.iter().position(|mark| mark.kind == kind).map(|index| note.marks.remove(index));
    let mut update = NodeUpdate::default();
    if there {
        let case = match what {
            Change::Mark(mark) => mark.case,
            _ => reason.and_then(|reason| reason.case).or_else(|| before.and_then(|mark| mark.case)),
        };
        note.marks.push(RecordedMark { kind, case });
        if kind != MarkKind::Maintenance {
            take_out_of_service(node, &mut note, case, reason, &mut update, config);
        }
    } else if kind != MarkKind::Maintenance && !note.keeps_out() {
        // A foreign drain stays, whether it is older or newer than ours.
        update.state = is_drained_by_us(node, config).then_some(NewState::Resume);
        note.over_foreign = false;
        note.reason.clear();
    }
    update.field = Some(note.to_field(node, config)?);
    Ok(Some(update))
}

fn take_out_of_service(
    node: &SlurmNode,
    note: &mut Note,
    case: Option<CaseId>,
    reason: Option<&ChangeReason>,
    update: &mut NodeUpdate,
    config: &SlurmConfig,
) {
    if reason.is_some() || note.reason.is_empty() {
        note.reason = drain_reason(case, reason, config);
    }
    note.was_open = false;
    match out_of_service(node, config) {
        OutOfService::Foreign => note.over_foreign = true,
        OutOfService::Ours if node.reason_text() == note.reason => {}
        OutOfService::Ours | OutOfService::No => {
            update.state = Some(new_state(node, config));
            update.reason = Some(note.reason.clone());
        }
    }
}

/// Builds the update that closes a node to users again which was open inside a reservation. A node that Slurm itself set down is
/// closed too: it would return with its slurmd.
pub(super) fn closing_update(node: &SlurmNode, config: &SlurmConfig) -> Option<NodeUpdate> {
    let note = valid_note(node, true, config);
    let drained = node.state.any(&[Flag::Drain, Flag::Fail]).is_some();
    let closed = drained || out_of_service(node, config) == OutOfService::Foreign || !note.keeps_out();
    (!closed).then(|| NodeUpdate {
        state: Some(NewState::Drain),
        reason: Some(if note.reason.is_empty() { drain_reason(None, None, config) } else { note.reason }),
        field: None,
    })
}

/// Builds the update of a node before it is reserved. Marks that an operator removed would apply again inside the reservation, so
/// they are dropped; and it records that users had the node, because without a record the node is closed at the end.
pub(super) fn before_reservation(node: &SlurmNode, config: &SlurmConfig) -> Result<Option<NodeUpdate>, FieldInUse> {
    let open = out_of_service(node, config) == OutOfService::No;
    let note = Note { was_open: open, ..valid_note(node, false, config) };
    if note == Note::read(node, config).into_note() {
        return Ok(None);
    }
    Ok(Some(NodeUpdate { field: Some(note.to_field(node, config)?), ..NodeUpdate::default() }))
}

/// Sets down only an idle node: Slurm ends the jobs of a node that is set down.
fn new_state(node: &SlurmNode, config: &SlurmConfig) -> NewState {
    let empty = node.state.base() == Some(Base::Idle) && !node.state.has(Flag::Completing);
    match config.out_as {
        OutAs::Down if empty => NewState::Down,
        OutAs::Drain | OutAs::Down => NewState::Drain,
        OutAs::Fail => NewState::Fail,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{nodes::Reason, states::SlurmNodeState};
    use doctor_core::{ids::IdSource, time::Timestamp};

    /// Emulates Slurm's handling of updates.
    struct Cluster {
        node: SlurmNode,
        ids: IdSource,
        in_reservation: bool,
        config: SlurmConfig,
    }

    impl Cluster {
        fn new() -> Self {
            let mut ids = IdSource::new(9);
            ids.set_time(Timestamp::from_secs(1_794_700_800));
            let node =
                SlurmNode { name: "n1".to_owned(), state: SlurmNodeState::parse("IDLE"), ..SlurmNode::default() };
            Self { node, ids, in_reservation: false, config: SlurmConfig::default() }
        }

        fn write(&mut self, update: NodeUpdate) {
            if let Some(state) = update.state {
                let (text, reason) = match state {
                    NewState::Drain => ("IDLE+DRAIN", update.reason),
                    NewState::Fail => ("IDLE+FAIL", update.reason),
                    NewState::Down => ("DOWN+DRAIN", update.reason),
                    NewState::Resume => ("IDLE", None),
                };
                self.node.state = SlurmNodeState::parse(text);
                self.node.reason = reason.map(|text| Reason { text, by: Some("root".to_owned()) });
            }
            if let Some(field) = update.field {
                self.node.extra = field;
            }
        }

        fn drained_by(&mut self, who: &str, why: &str) {
            self.node.state = SlurmNodeState::parse("IDLE+DRAIN");
            self.node.reason = Some(Reason { text: why.to_owned(), by: Some(who.to_owned()) });
        }

        fn apply(&mut self, what: &Change) -> OpId {
            let op = self.ids.op();
            let node_update = update(&self.node, self.in_reservation, op, what, None, &self.config).unwrap().unwrap();
            self.write(node_update);
            let again = update(&self.node, self.in_reservation, op, what, None, &self.config).unwrap();
            assert_eq!(again, None, "it was done");
            op
        }

        fn marks(&self) -> Marks {
            let reservation = if self.in_reservation { ReservationKind::Run } else { ReservationKind::None };
            marks(&self.node, reservation, &self.config)
        }

        fn has(&self, kind: MarkKind) -> bool {
            self.marks().has_ours(kind)
        }
    }

    fn mark(kind: MarkKind) -> OurMark {
        OurMark { kind, case: None }
    }

    #[test]
    fn two_marks_are_one_drain_that_ends_with_the_last_mark() {
        let mut cluster = Cluster::new();
        let case = cluster.ids.case();
        cluster.apply(&Change::Mark(OurMark { kind: MarkKind::Unhealthy, case: Some(case) }));
        assert_eq!(cluster.node.reason_text(), format!("doctor: unhealthy [{case}]"));
        cluster.apply(&Change::Drain);
        assert_eq!(cluster.node.reason_text(), format!("doctor: unhealthy [{case}]"), "the words stay");
        assert!(cluster.has(MarkKind::Unhealthy) && cluster.has(MarkKind::Cordon));
        cluster.apply(&Change::Undrain);
        assert!(cluster.node.state.has(Flag::Drain), "the other mark still keeps it out");
        assert!(cluster.has(MarkKind::Unhealthy) && !cluster.has(MarkKind::Cordon));
        cluster.apply(&Change::Unmark(mark(MarkKind::Unhealthy)));
        assert!(!cluster.node.state.has(Flag::Drain));
        assert_eq!(cluster.marks(), Marks::default());
    }

    #[test]
    fn a_foreign_drain_remains_when_ours_is_removed() {
        let mut cluster = Cluster::new();
        cluster.drained_by("alice", "fan noise");
        let foreign = cluster.marks().foreign;
        assert_eq!(foreign, [ForeignMark { by: "alice".to_owned(), text: "fan noise".to_owned(), blocks: true }]);
        cluster.apply(&Change::Mark(mark(MarkKind::Unhealthy)));
        cluster.apply(&Change::Drain);
        assert_eq!(cluster.node.reason_text(), "fan noise");
        assert!(cluster.has(MarkKind::Unhealthy) && cluster.has(MarkKind::Cordon));
        cluster.apply(&Change::Undrain);
        cluster.apply(&Change::Unmark(mark(MarkKind::Unhealthy)));
        assert_eq!(cluster.marks(), Marks { ours: Vec::new(), foreign });
        assert!(cluster.node.state.has(Flag::Drain));
    }

    #[test]
    fn a_drain_that_an_operator_resumed_or_overwrote_is_no_longer_ours() {
        let mut cluster = Cluster::new();
        cluster.apply(&Change::Drain);
        cluster.node.state = SlurmNodeState::parse("IDLE");
        cluster.node.reason = None;
        assert_eq!(cluster.marks(), Marks::default());
        cluster.apply(&Change::Drain);
        cluster.drained_by("bob", "mine now");
        assert_eq!(cluster.marks().ours, []);
        cluster.apply(&Change::Undrain);
        assert!(cluster.node.state.has(Flag::Drain));
        assert_eq!(cluster.node.reason_text(), "mine now");
    }

    #[test]
    fn a_node_resumed_inside_our_reservation_is_still_ours_and_is_drained_again() {
        let mut cluster = Cluster::new();
        let case = cluster.ids.case();
        cluster.apply(&Change::Mark(OurMark { kind: MarkKind::Unhealthy, case: Some(case) }));
        cluster.apply(&Change::Drain);
        let why = cluster.node.reason_text().to_owned();
        cluster.in_reservation = true;
        assert_eq!(closing_update(&cluster.node, &cluster.config), None, "it is closed");
        cluster.node.state = SlurmNodeState::parse("IDLE+MAINTENANCE+RESERVED");
        cluster.node.reason = None;
        assert_eq!(cluster.marks().ours.len(), 3, "with the reservation as a mark of maintenance");
        let closing = closing_update(&cluster.node, &cluster.config).unwrap();
        assert_eq!((closing.state, &closing.reason), (Some(NewState::Drain), &Some(why)));
        cluster.write(closing);
        cluster.in_reservation = false;
        assert!(cluster.has(MarkKind::Unhealthy) && cluster.has(MarkKind::Cordon));
        // A node that is returned inside the reservation stays open when the reservation ends.
        cluster.in_reservation = true;
        cluster.apply(&Change::Undrain);
        cluster.apply(&Change::Unmark(mark(MarkKind::Unhealthy)));
        assert_eq!(closing_update(&cluster.node, &cluster.config), None);
        assert!(!cluster.node.state.has(Flag::Drain));
    }

    #[test]
    fn a_mark_that_an_operator_removed_does_not_come_back_with_a_reservation() {
        let mut cluster = Cluster::new();
        cluster.apply(&Change::Drain);
        assert_eq!(before_reservation(&cluster.node, &cluster.config), Ok(None));
        cluster.node.state = SlurmNodeState::parse("IDLE");
        cluster.node.reason = None;
        let forgotten = before_reservation(&cluster.node, &cluster.config).unwrap().unwrap();
        cluster.write(forgotten);
        cluster.in_reservation = true;
        assert_eq!(closing_update(&cluster.node, &cluster.config), None);
        assert!(!cluster.has(MarkKind::Cordon));
    }

    #[test]
    fn a_node_without_a_readable_note_is_drained_unless_users_had_it() {
        let mut cluster = Cluster::new();
        let written = before_reservation(&cluster.node, &cluster.config).unwrap().unwrap();
        cluster.write(written);
        cluster.in_reservation = true;
        assert_eq!(closing_update(&cluster.node, &cluster.config), None, "users had it");
        for lost in ["", "mine", "{\"doctor\":7}", "{\"rack\":7}"] {
            lost.clone_into(&mut cluster.node.extra);
            assert!(cluster.has(MarkKind::Unhealthy), "{lost}");
            let closing = closing_update(&cluster.node, &cluster.config).unwrap();
            assert_eq!((closing.state, closing.reason.as_deref()), (Some(NewState::Drain), Some("doctor: unhealthy")));
        }
        "mine".clone_into(&mut cluster.node.extra);
        before_reservation(&cluster.node, &cluster.config).unwrap_err();
    }

    #[test]
    fn removing_an_absent_maintenance_mark_is_not_recorded() {
        let mut cluster = Cluster::new();
        let (op, unmark) = (cluster.ids.op(), Change::Unmark(mark(MarkKind::Maintenance)));
        assert_eq!(update(&cluster.node, true, op, &unmark, None, &cluster.config), Ok(None));
        cluster.apply(&Change::Mark(mark(MarkKind::Maintenance)));
        cluster.apply(&unmark);
        assert!(!cluster.has(MarkKind::Maintenance));
    }

    #[test]
    fn a_node_that_is_only_down_is_not_drained_because_slurm_returns_it_to_service() {
        let mut cluster = Cluster::new();
        cluster.config.out_as = OutAs::Down;
        cluster.apply(&Change::Drain);
        assert_eq!(closing_update(&cluster.node, &cluster.config), None);
        cluster.node.state = SlurmNodeState::parse("DOWN");
        assert_eq!(closing_update(&cluster.node, &cluster.config).unwrap().state, Some(NewState::Drain));
    }

    #[test]
    fn a_node_that_did_not_return_is_drained_before_it_does() {
        let mut cluster = Cluster::new();
        cluster.apply(&Change::Drain);
        cluster.node.state = SlurmNodeState::parse("DOWN");
        cluster.node.reason.as_mut().unwrap().text += " : reboot issued : reboot timed out";
        let closing = closing_update(&cluster.node, &cluster.config).unwrap();
        assert_eq!((closing.state, closing.reason.as_deref()), (Some(NewState::Drain), Some("doctor: unhealthy")));
    }

    #[test]
    fn a_drain_by_a_hook_with_our_prefix_is_ours_and_keeps_its_case() {
        let mut cluster = Cluster::new();
        let case = cluster.ids.case();
        cluster.drained_by("root", &format!("doctor: gpu-lost GPU 3 is gone [{case}] : reboot issued"));
        assert_eq!(cluster.marks().ours, [OurMark { kind: MarkKind::Unhealthy, case: Some(case) }]);
        cluster.apply(&Change::Unmark(mark(MarkKind::Unhealthy)));
        assert_eq!((cluster.marks(), cluster.node.state.has(Flag::Drain)), (Marks::default(), false));
    }

    #[test]
    fn only_a_node_without_jobs_is_set_down() {
        let config = SlurmConfig { out_as: OutAs::Down, ..SlurmConfig::default() };
        let state = |text: &str| SlurmNode { state: SlurmNodeState::parse(text), ..SlurmNode::default() };
        assert_eq!(new_state(&state("IDLE"), &config), NewState::Down);
        for busy in ["MIXED", "ALLOCATED", "IDLE+COMPLETING", "UNKNOWN"] {
            assert_eq!(new_state(&state(busy), &config), NewState::Drain, "{busy}");
        }
    }

    #[test]
    fn a_node_that_slurm_set_down_has_no_mark() {
        let mut cluster = Cluster::new();
        cluster.node.state = SlurmNodeState::parse("DOWN+NOT_RESPONDING");
        cluster.node.reason = Some(Reason { text: "Not responding".to_owned(), by: Some("slurm".to_owned()) });
        assert_eq!(cluster.marks(), Marks::default());
        cluster.node.reason = Some(Reason { text: "moved".to_owned(), by: Some("alice".to_owned()) });
        assert_eq!(cluster.marks().foreign.len(), 1);
    }
}
