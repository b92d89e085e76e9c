//! Incidents in the words of a script: faults, failing calls, clocks, and what users and other parties do.

use doctor_core::node::ForeignMark;

use super::{CommandFailure, invalid, list, name, number, span};
use crate::{
    FaultKind, Incident, JobFault,
    disruptions::{Call, CallFailure},
};

pub(crate) fn incident(args: &[&str]) -> Result<Incident, CommandFailure> {
    let secs = |text: &str| {
        text.trim_end_matches('s')
            .parse::<i64>()
            .map_err(|_| CommandFailure::Invalid(format!("`{text}` is not seconds, such as 600s")))
    };
    Ok(match args {
        ["fault", node, kind] => {
            let Some(kind) = FaultKind::from_code(kind) else {
                let known: Vec<_> = FaultKind::ALL.iter().map(|kind| kind.code()).collect();
                return invalid(format!("fault kinds: {}", known.join(", ")));
            };
            Incident::Fault { node: name(node)?, kind }
        }
        ["heal", node] => Incident::Heal { node: name(node)? },
        ["user-job", nodes, length] => Incident::UserJob { nodes: list(nodes)?, length: span(length)? },
        ["user-work-fails", nodes, "of", owner] => {
            Incident::UserWorkFails { nodes: list(nodes)?, owner: (*owner).to_owned() }
        }
        ["calls", call, failure, times] => {
            Incident::Calls { call: word::<Call>(call)?, trouble: word::<CallFailure>(failure)?, times: number(times)? }
        }
        ["jobs", fault, times] => Incident::Jobs { trouble: word::<JobFault>(fault)?, times: number(times)? },
        ["outage", length] => Incident::Outage { length: span(length)? },
        ["unreachable", node, length] => Incident::Unreachable { node: name(node)?, length: span(length)? },
        ["host-hangs", node, length] => Incident::HostHangs { node: name(node)?, length: span(length)? },
        ["vanish", node] => Incident::Vanish { node: name(node)? },
        ["return", node, "as", called] => Incident::Return { node: name(node)?, called: name(called)? },
        ["node-clock", node, ahead] => Incident::NodeClock { node: name(node)?, ahead_secs: secs(ahead)? },
        ["controller-clock", by] => Incident::ControllerClock { by_secs: secs(by)? },
        ["agent-silent", node, length] => Incident::AgentSilent { node: name(node)?, length: span(length)? },
        ["agents-silent", percent, length] => Incident::AgentsSilent {
            percent: percent
                .trim_end_matches('%')
                .parse()
                .map_err(|_| CommandFailure::Invalid("a percentage, such as 50%".into()))?,
            length: span(length)?,
        },
        ["cordon", node, "by", by] => Incident::ForeignMark {
            node: name(node)?,
            mark: ForeignMark { by: (*by).to_owned(), text: "maintenance".to_owned(), blocks: true },
        },
        ["uncordon", node, "by", by] => Incident::ForeignUnmark { node: name(node)?, by: (*by).to_owned() },
        ["our-marks-removed", node] => Incident::OurMarksRemoved { node: name(node)? },
        ["foreign-reboot", node] => Incident::ForeignReboot { node: name(node)? },
        _ => {
            return invalid(
                "accepted: world, policy, fresh, run, stop, show, restart [empty], record, operators' commands (hold, unhold, release, \
                 quarantine, test, together, pause, resume, close-breaker), and incidents (fault, heal, user-job, user-work-fails NODES of OWNER, calls, jobs, outage, \
                 unreachable, host-hangs, vanish, return, node-clock, controller-clock, agent-silent, agents-silent, cordon, uncordon, \
                 our-marks-removed, foreign-reboot)",
            );
        }
    })
}

/// Parses a word of an incident enum, in its spelling in configuration files.
fn word<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, CommandFailure> {
    serde_json::from_value(serde_json::Value::String(text.to_owned()))
        .map_err(|error| CommandFailure::Invalid(error.to_string()))
}
