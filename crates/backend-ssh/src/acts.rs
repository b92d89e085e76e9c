//! What is done to a host: marked, closed and opened by the site's own commands, its GPUs reset, rebooted.
//!
//! A repair is asked for again until it is done, with the same operation. Whether somebody uses the host is looked at there, in the
//! same step (`doctor-node host`): between our last look and now somebody may have logged in.

use std::time::Duration;

use doctor_backend::{
    BackendError, Change, NodeOp,
    hook::{self, Told},
    ssh::{Host, SshConfig},
};
use doctor_core::{
    ids::{NodeName, OpId},
    time::Span,
};
use doctor_host::{
    protocol::{Ask, Mark, Repair, RepairKind, Repaired, Said},
    reports::Reported,
};

use super::{
    SshBackend,
    fleet::{failed, refused, try_again, unknown},
};

/// A command of the site's that closes or opens a host.
const HOOK_LIMIT: Duration = Duration::from_secs(60);
/// A command that resets GPUs or tells a host to reboot. One that hangs in the driver is given up.
const REPAIR_LIMIT: Span = Span::minutes(5);

/// For a report to come over the line, beside what every answer has.
const CARRY: Duration = Duration::from_secs(20);

/// The host's own command for a repair; empty: it has none.
pub(super) fn command(kind: RepairKind, config: &SshConfig) -> &[String] {
    match kind {
        RepairKind::Reset => &config.reset,
        RepairKind::Reboot => &config.reboot,
    }
}

impl SshBackend {
    pub(super) fn change(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        const APPLY: &str = "change the node";
        let host = self.host(APPLY, node)?;
        match change.what {
            Change::Reset => return self.repair("reset", &host, change.op, RepairKind::Reset),
            Change::Reboot => return self.repair("reboot", &host, change.op, RepairKind::Reboot),
            _ => {}
        }
        let Some(mark) = change.what.as_mark() else {
            return Err(refused(APPLY, format!("the SSH backend cannot {}; see its caps", change.what.step())));
        };
        self.call_hook(node, change)?;
        let ask = Ask::Mark(Mark { op: change.op, change: mark.clone(), motd: self.config.motd.clone() });
        match self.asker.ask(&host, &ask, Duration::ZERO) {
            Ok(Said::Done) => {
                self.note(node, &mark);
                Ok(())
            }
            other => Err(failed(APPLY, &host, other)),
        }
    }

    /// The site's own way to close a host or open it, where it has one.
    fn call_hook(&self, node: &NodeName, change: &NodeOp) -> Result<(), BackendError> {
        let (operation, command) = match change.what {
            Change::Drain => ("cordon", &self.config.cordon),
            Change::Undrain => ("release", &self.config.release),
            _ => return Ok(()),
        };
        if command.is_empty() {
            return Ok(());
        }
        let told = Told { words: vec![("node", node.to_string()), ("op", change.op.to_string())] };
        hook::run(operation, command, &told, HOOK_LIMIT)
    }

    pub(super) fn report_of(&self, node: &NodeName, op: OpId) -> Reported {
        let host = match self.host("report", node) {
            Ok(host) => host,
            Err(error) => return Reported::Failed { text: error.text },
        };
        match self.asker.ask(&host, &Ask::Report { op }, CARRY) {
            Ok(Said::Report(reported)) => reported,
            other => Reported::Failed { text: failed("report", &host, other).text },
        }
    }

    /// Done when the host says that it happened.
    fn repair(&self, operation: &'static str, host: &Host, op: OpId, what: RepairKind) -> Result<(), BackendError> {
        let command = command(what, &self.config).to_vec();
        if command.is_empty() {
            let text = format!("no command for it is configured (`backend.ssh.{}`)", what.word());
            return Err(refused(operation, text));
        }
        let (limit, users) = (REPAIR_LIMIT, self.wanted(Vec::new()));
        let max_load_per_core = self.config.max_load_per_core;
        let ask = Ask::Repair(Box::new(Repair { op, what, command, limit, users, max_load_per_core }));
        let named = |text: &str| format!("{}: {text}", host.name);
        match self.asker.ask(host, &ask, Duration::ZERO) {
            Ok(Said::Repair(Repaired::Done)) => Ok(()),
            Ok(Said::Repair(Repaired::InUse { by })) => Err(try_again(operation, named(&by))),
            Ok(Said::Repair(Repaired::UnderWay { text })) => Err(unknown(operation, named(&text))),
            Ok(Said::Repair(Repaired::Failed { text })) => Err(refused(operation, named(&text))),
            other => Err(failed(operation, host, other)),
        }
    }
}
