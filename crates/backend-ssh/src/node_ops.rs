//! Node operations on a host: marks, the site's commands that close and open it, GPU reset and reboot.
//!
//! The caller repeats a repair with the same id until it is done. The host itself checks in the same step (`doctor-node host`)
//! that it is not in use: a user may have logged in since the last snapshot.

use std::time::Duration;

use doctor_backend::{
    BackendError, Change, NodeOp,
    site_command::{self, HookParams},
    ssh::{Host, SshConfig, remote_program::RequestError},
};
use doctor_core::{
    ids::{NodeName, OpId},
    time::Span,
};
use doctor_host::{
    protocol::{HostRequest, HostResponse, MarkRequest, RepairKind, RepairProgress, RepairRequest},
    vendor_reports::ReportProgress,
};

use super::{
    SshBackend,
    backend::{permanent_error, retryable_error, unexpected_answer, unknown_effect_error},
};

/// The limit for a site's command that closes or opens a host.
const HOOK_LIMIT: Duration = Duration::from_secs(60);
/// The limit for a command that resets GPUs or starts a reboot. One that hangs in the driver is abandoned.
const REPAIR_LIMIT: Span = Span::minutes(5);

/// The time added to the usual deadline for transferring a report.
const REPORT_TRANSFER_TIME: Duration = Duration::from_secs(20);

/// Returns the host's command for a repair. Empty: there is none.
pub(super) fn command(kind: RepairKind, config: &SshConfig) -> &[String] {
    match kind {
        RepairKind::Reset => &config.reset,
        RepairKind::Reboot => &config.reboot,
    }
}

impl SshBackend {
    pub(super) fn apply_change(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        const APPLY: &str = "change the node";
        let host = self.host(APPLY, node)?;
        match change.what {
            Change::Reset => return self.repair("reset", &host, change.op, RepairKind::Reset),
            Change::Reboot => return self.repair("reboot", &host, change.op, RepairKind::Reboot),
            _ => {}
        }
        let Some(mark) = change.what.as_mark() else {
            return Err(permanent_error(APPLY, format!("the SSH backend does not support {}", change.what.step())));
        };
        self.call_hook(node, change)?;
        let request =
            HostRequest::Mark(MarkRequest { op: change.op, change: mark.clone(), motd: self.config.motd.clone() });
        match self.request(&host, &request, Duration::ZERO) {
            Ok(HostResponse::Done) => {
                self.record_mark(node, &mark);
                Ok(())
            }
            other => Err(unexpected_answer(APPLY, &host, other)),
        }
    }

    /// Runs the site's command that closes or opens a host, if there is one.
    fn call_hook(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        let (operation, command) = match change.what {
            Change::Drain => ("cordon", &self.config.cordon),
            Change::Undrain => ("release", &self.config.release),
            _ => return Ok(()),
        };
        if command.is_empty() {
            return Ok(());
        }
        let params = HookParams { values: vec![("node", node.to_string()), ("op", change.op.to_string())] };
        site_command::run(operation, command, &params, HOOK_LIMIT)
    }

    pub(super) fn collect_report_from(&self, node: &NodeName, op: OpId) -> ReportProgress {
        let host = match self.host("report", node) {
            Ok(host) => host,
            Err(error) => return ReportProgress::Failed { text: error.text },
        };
        match self.request(&host, &HostRequest::Report { op }, REPORT_TRANSFER_TIME) {
            Ok(HostResponse::Report(reported)) => reported,
            // It may answer in the next cycle. The caller waits for some minutes only.
            Err(RequestError::NotSent(_) | RequestError::OutcomeUnknown(_)) => ReportProgress::InProgress,
            other => ReportProgress::Failed { text: unexpected_answer("report", &host, other).text },
        }
    }

    /// Repairs a host. Done when the host reports that it has happened.
    fn repair(&self, operation: &'static str, host: &Host, op: OpId, what: RepairKind) -> Result<(), BackendError> {
        let command = command(what, &self.config).to_vec();
        if command.is_empty() {
            let text = format!("no command for it is configured (`backend.ssh.{}`)", what.as_str());
            return Err(permanent_error(operation, text));
        }
        let (limit, users) = (REPAIR_LIMIT, self.query_params(Vec::new()));
        let max_load_per_core = self.config.max_load_per_core;
        let request = HostRequest::Repair(Box::new(RepairRequest {
            op,
            kind: what,
            command,
            limit,
            status_query: users,
            max_load_per_core,
        }));
        let named = |text: &str| format!("{}: {text}", host.name);
        match self.request(host, &request, Duration::ZERO) {
            Ok(HostResponse::Repair(RepairProgress::Done)) => Ok(()),
            Ok(HostResponse::Repair(RepairProgress::InUse { by })) => Err(retryable_error(operation, named(&by))),
            Ok(HostResponse::Repair(RepairProgress::InProgress { text })) => {
                Err(unknown_effect_error(operation, named(&text)))
            }
            Ok(HostResponse::Repair(RepairProgress::Failed { text })) => Err(permanent_error(operation, named(&text))),
            other => Err(unexpected_answer(operation, host, other)),
        }
    }
}
