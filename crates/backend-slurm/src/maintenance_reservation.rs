//! A reservation of ours, inside which a node that we drained can run our jobs and no others.
//!
//! Slurm starts nothing on a drained node. The node is therefore reserved for us, resumed inside the reservation, and drained
//! again before the reservation ends. Each step is derived from Slurm's state, never from memory, and leaves the node closed to
//! users:
//!
//! | reservation | node | who may use it |
//! |---|---|---|
//! | none | drained | none |
//! | ours | drained | none |
//! | ours | resumed | we |
//! | ours | drained again | none |
//! | none | drained | none |
//!
//! A reservation for a run shows as a maintenance mark on its nodes; removing that mark closes the nodes and ends the
//! reservation. The planner thus removes what a killed controller left, as it does with every mark that outlived its run. A
//! reservation for a repair is ended by the repair, which the caller repeats until it is done; one of an abandoned repair, by the
//! next operation on the node. While Slurm reboots a node its reservation always stays, because Slurm opens the node at the end.

use doctor_backend::{BackendError, Effect};
use doctor_core::ids::{NodeName, OpId, RunId};

use super::{
    SlurmBackend,
    config::JOB_PREFIX,
    marks::{self, NewState, NodeUpdate, ReservationKind},
    node_comment::FieldInUse,
    nodes::SlurmNode,
    programs::Access,
    reservations::{self, Reservation},
    states::{Flag, Phase},
};

/// Returns the kind of a reservation: ours are named after a run or an operation.
pub(super) fn reservation_kind(reservation: &Reservation) -> ReservationKind {
    let id = reservation.name.strip_prefix(JOB_PREFIX).unwrap_or_default();
    match (id.parse::<RunId>(), id.parse::<OpId>()) {
        (Ok(_), _) => ReservationKind::Run,
        (_, Ok(_)) => ReservationKind::Repair,
        (Err(_), Err(_)) => ReservationKind::None,
    }
}

impl SlurmBackend {
    pub(super) fn reservations(&self, operation: &'static str) -> Result<Vec<Reservation>, BackendError> {
        Ok(reservations::parse(&self.programs.read(operation, "scontrol", &["show", "reservation", "-o"])?))
    }

    /// Reserves these nodes for us under this name, and resumes those that we had drained.
    pub(super) fn reserve_and_resume(
        &self,
        operation: &'static str,
        name: &str,
        nodes: &[NodeName],
    ) -> Result<(), BackendError> {
        let later = |text: String| BackendError { operation, text, effect: Effect::NotAppliedRetry };
        let field_in_use = |error: FieldInUse| BackendError {
            operation,
            text: error.to_string(),
            effect: Effect::NotAppliedPermanent,
        };
        let outlived = self.reservations(operation)?;
        let repairs = |one: &&Reservation| reservation_kind(one) == ReservationKind::Repair && one.name != name;
        let held = |one: &&Reservation| nodes.iter().any(|node| one.holds(node));
        outlived.iter().filter(repairs).filter(held).try_for_each(|one| self.end_reservation(operation, one))?;
        if !self.reservations(operation)?.iter().any(|one| one.name == name) {
            for node in self.nodes_named(operation, nodes)? {
                if let Some(update) = marks::before_reservation(&node, &self.config).map_err(field_in_use)? {
                    self.write(operation, &node.name, &update)?;
                }
            }
            self.reserve(operation, name, nodes)?;
        }
        // Check what Slurm has now: the reservation may be new, from an earlier attempt, or changed by an operator since.
        let there = self.reservations(operation)?;
        for node in nodes {
            let holding: Vec<&Reservation> = there.iter().filter(|one| one.holds(node)).collect();
            match holding.as_slice() {
                [only] if only.name == name && only.active => {}
                [] => return Err(later(format!("reservation {name} does not hold {node}"))),
                many => {
                    let names = many.iter().map(|one| one.name.as_str()).collect::<Vec<_>>().join(", ");
                    return Err(later(format!("{node} is reserved by {names}")));
                }
            }
        }
        for node in self.nodes_named(operation, nodes)? {
            if marks::is_drained_by_us(&node, &self.config) {
                self.resume_in_reservation(operation, &node)?;
            }
        }
        Ok(())
    }

    /// Creates a reservation, and adds the maintenance flag in a second step. Without the flag, Slurm refuses to overlap with a
    /// foreign reservation; with it, users see why the node is unavailable.
    fn reserve(&self, operation: &'static str, name: &str, nodes: &[NodeName]) -> Result<(), BackendError> {
        let listed = nodes.iter().map(NodeName::as_str).collect::<Vec<_>>().join(",");
        let create_args = [
            "create".to_owned(),
            "reservation".to_owned(),
            format!("reservationname={name}"),
            "starttime=now".to_owned(),
            // It must not end by itself, however long no controller runs.
            "duration=infinite".to_owned(),
            format!("nodes={listed}"),
            format!("users={}", self.user),
        ];
        self.programs.run(operation, "scontrol", &create_args, "", Access::Write)?;
        let update_args = ["update".to_owned(), format!("reservationname={name}"), "flags+=maint".to_owned()];
        self.programs.run(operation, "scontrol", &update_args, "", Access::Write).map(drop)
    }

    /// Writes the note together with the resume: it records the state to restore.
    fn resume_in_reservation(&self, operation: &'static str, node: &SlurmNode) -> Result<(), BackendError> {
        let note = marks::valid_note(node, true, &self.config);
        let field_in_use = |error: FieldInUse| BackendError {
            operation,
            text: error.to_string(),
            effect: Effect::NotAppliedPermanent,
        };
        let field = note.to_field(node, &self.config).map_err(field_in_use)?;
        let update = NodeUpdate { state: Some(NewState::Resume), reason: None, field: Some(field) };
        self.write(operation, &node.name, &update)
    }

    /// Ends every reservation of ours that holds this node, after closing its nodes to users.
    pub(super) fn end_our_reservations(&self, operation: &'static str, node: &NodeName) -> Result<(), BackendError> {
        let there = self.reservations(operation)?;
        let mut ours = there.iter().filter(|one| reservation_kind(one).exists() && one.holds(node));
        ours.try_for_each(|reservation| self.end_reservation(operation, reservation))
    }

    /// Ends the reservations of abandoned repairs. One whose job is still active stays: marks may change meanwhile.
    pub(super) fn end_abandoned_repairs(&self, operation: &'static str, node: &NodeName) -> Result<(), BackendError> {
        for reservation in self.reservations(operation)? {
            let alive = || {
                let jobs = self.job_named(operation, &reservation.name)?;
                Ok::<_, BackendError>(jobs.iter().any(|job| job.phase() != Phase::Ended))
            };
            if reservation_kind(&reservation) == ReservationKind::Repair && reservation.holds(node) && !alive()? {
                self.end_reservation(operation, &reservation)?;
            }
        }
        Ok(())
    }

    /// Cancels the job of a repair, if there is one.
    pub(super) fn cancel_repair(&self, operation: &'static str, name: &str) -> Result<(), BackendError> {
        let args = [format!("--name={name}"), format!("--user={}", self.user)];
        match self.programs.run(operation, "scancel", &args, "", Access::Write) {
            Err(error) if error.text.contains("already completing or completed") => Ok(()),
            other => other.map(drop),
        }
    }

    pub(super) fn end_reservation(
        &self,
        operation: &'static str,
        reservation: &Reservation,
    ) -> Result<(), BackendError> {
        let refuse = |text: String| BackendError { operation, text, effect: Effect::NotAppliedRetry };
        if reservation.unreadable {
            return Err(refuse(format!("the nodes of reservation {} cannot be read", reservation.name)));
        }
        if reservation_kind(reservation) == ReservationKind::Repair {
            // A repair must not start after its reservation has ended.
            self.cancel_repair(operation, &reservation.name)?;
        }
        if !reservation.nodes.is_empty() {
            let nodes = self.nodes_named(operation, &reservation.nodes)?;
            let rebooting = |node: &&SlurmNode| node.state.any(&[Flag::RebootRequested, Flag::RebootIssued]).is_some();
            if let Some(node) = nodes.iter().find(rebooting) {
                // Slurm resumes the node after the reboot, drained or not: until then only the reservation closes it.
                return Err(refuse(format!("{} is being rebooted", node.name)));
            }
            for node in nodes {
                if let Some(closing) = marks::closing_update(&node, &self.config) {
                    self.write(operation, &node.name, &closing)?;
                }
            }
        }
        let args = ["delete".to_owned(), format!("reservationname={}", reservation.name)];
        match self.programs.run(operation, "scontrol", &args, "", Access::Write) {
            // It was deleted concurrently.
            Err(error) if error.text.contains("reservation is invalid") => Ok(()),
            other => other.map(drop),
        }
    }
}
