//! Starts a run that outlives the connection.

use std::{
    ffi::OsString,
    fs, io,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use doctor_core::{ids::NodeName, run::ObservedJobState};
use doctor_host::{
    files,
    jobs::Jobs,
    occupancy::blocked_reason,
    protocol::{HostResponse, StartRun},
};

use super::{
    state_files::{DOCUMENT, LOG, NODES},
    status, systemd_scope,
};
use crate::{clock::now, runner::KEY_VARIABLE};

/// Usually a job has claimed its run by then. If not, a later request sees it.
const WAIT_FOR_CLAIM: Duration = Duration::from_secs(2);

/// Starts a run, unless the host is in use: users may have come since the controller's last query.
pub(super) fn start(state: &Path, jobs: &Jobs, order: &StartRun) -> io::Result<HostResponse> {
    if jobs.state(order.run, now())? == ObservedJobState::Absent {
        let look = status::collect_status(state, jobs, &order.users)?;
        if let Some(by) = blocked_reason(&look, order.max_load_per_core) {
            return Ok(HostResponse::InUse { by });
        }
    }
    begin(state, jobs, order).map(HostResponse::Started)
}

fn begin(state: &Path, jobs: &Jobs, order: &StartRun) -> io::Result<ObservedJobState> {
    jobs.prune(now())?;
    let place = jobs.run_directory(order.run);
    fs::create_dir_all(&place)?;
    if let Some(together) = &order.together {
        files::create::<Vec<NodeName>>(&place.join(NODES), &together.nodes.to_vec())?;
    }
    jobs.start(order.run, command(state, jobs, order)?, now())?;
    let began = Instant::now();
    loop {
        let seen = jobs.state(order.run, now())?;
        if !matches!(seen, ObservedJobState::Pending { .. }) || began.elapsed() > WAIT_FOR_CLAIM {
            return Ok(seen);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn command(state: &Path, jobs: &Jobs, order: &StartRun) -> io::Result<Command> {
    let place = jobs.run_directory(order.run);
    let tests = order.tests.iter().map(|test| test.as_str()).collect::<Vec<_>>().join(",");
    let mut words: Vec<OsString> = vec![std::env::current_exe()?.into(), "job".into()];
    let mut option = |name: &str, value: OsString| words.extend([format!("--{name}").into(), value]);
    option("run", order.run.to_string().into());
    option("node", order.node.as_str().into());
    option("tests", tests.into());
    match &order.outputs {
        Some(outputs) => {
            outputs.logs.iter().for_each(|log| option("log", log.into()));
            option("document", outputs.document.clone().into());
        }
        None => {
            option("log", place.join(LOG).into());
            option("document", place.join(DOCUMENT).into());
        }
    }
    option("job-file", jobs.job_file(order.run).into());
    option("state", state.join("node").into());
    option("limit", order.limit.to_string().into());
    if let Some(policy) = &order.policy {
        let path = place.join("policy.toml");
        fs::write(&path, policy)?;
        option("policy", path.into());
    }
    let mut command = systemd_scope::command(&words, order.run);
    // In the environment, because every user can read arguments. The login's directory is left.
    command.env(KEY_VARIABLE, &order.key).current_dir("/");
    if let Some(together) = &order.together {
        let rank = together.nodes.iter().position(|node| *node == order.node);
        let rank = rank.ok_or_else(|| io::Error::other(format!("{} is not a host of this run", order.node)))?;
        let names = together.nodes.iter().map(NodeName::as_str).collect::<Vec<_>>().join(",");
        command.env("DOCTOR_NODE_NAME", order.node.as_str());
        command.env("DOCTOR_RANK", rank.to_string()).env("DOCTOR_NODES", together.nodes.len().to_string());
        command.env("DOCTOR_NODE_NAMES", names).env("DOCTOR_RENDEZVOUS", &together.rendezvous);
        command.env("DOCTOR_RENDEZVOUS_SECRET", &together.secret);
    }
    Ok(command)
}
