//! Starts a run that outlives the connection.

use std::{
    ffi::OsString,
    fs, io,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use doctor_checks::job_file;
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
pub(super) fn start(state: &Path, jobs: &Jobs, request: &StartRun) -> io::Result<HostResponse> {
    if jobs.state(request.run, now())? == ObservedJobState::Absent {
        let host_status = status::collect_status(state, jobs, &request.status_query)?;
        if let Some(by) = blocked_reason(&host_status, request.max_load_per_core) {
            return Ok(HostResponse::InUse { by });
        }
    }
    begin(state, jobs, request).map(HostResponse::Started)
}

fn begin(state: &Path, jobs: &Jobs, request: &StartRun) -> io::Result<ObservedJobState> {
    jobs.prune(now())?;
    let directory = jobs.run_directory(request.run);
    fs::create_dir_all(&directory)?;
    if let Some(together) = &request.multi_node {
        files::create::<Vec<NodeName>>(&directory.join(NODES), &together.nodes.to_vec())?;
    }
    jobs.start(request.run, command(state, jobs, request)?, now())?;
    let started = Instant::now();
    loop {
        let observed = jobs.state(request.run, now())?;
        if !matches!(observed, ObservedJobState::Pending { .. }) || started.elapsed() > WAIT_FOR_CLAIM {
            return Ok(observed);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn command(state: &Path, jobs: &Jobs, request: &StartRun) -> io::Result<Command> {
    let directory = jobs.run_directory(request.run);
    let tests = request.tests.iter().map(|test| test.as_str()).collect::<Vec<_>>().join(",");
    let mut args: Vec<OsString> = vec![std::env::current_exe()?.into(), "job".into()];
    let mut option = |name: &str, value: OsString| args.extend([format!("--{name}").into(), value]);
    option("run", request.run.to_string().into());
    option("node", request.node.as_str().into());
    option("tests", tests.into());
    match &request.outputs {
        Some(outputs) => {
            outputs.logs.iter().for_each(|log| option("log", log.into()));
            option("document", outputs.document.clone().into());
        }
        None => {
            option("log", directory.join(LOG).into());
            option("document", directory.join(DOCUMENT).into());
        }
    }
    option("job-file", jobs.job_file(request.run).into());
    option("state", state.join("node").into());
    option("limit", request.limit.to_string().into());
    if let Some(policy) = &request.policy {
        let path = directory.join("policy.toml");
        fs::write(&path, policy)?;
        option("policy", path.into());
    }
    let mut command = systemd_scope::command(&args, request.run);
    // Our files may be in the home directory of a login user who is not root.
    let digest = request.policy.as_ref().map(|policy| job_file::policy_digest(policy.as_bytes()));
    command.envs(digest.map(|digest| (job_file::POLICY_DIGEST_VARIABLE, digest)));
    // In the environment, because every user can read arguments. The login's directory is left.
    command.env(KEY_VARIABLE, &request.key).current_dir("/");
    if let Some(together) = &request.multi_node {
        let rank = together.nodes.iter().position(|node| *node == request.node);
        let rank = rank.ok_or_else(|| io::Error::other(format!("{} is not a host of this run", request.node)))?;
        let names = together.nodes.iter().map(NodeName::as_str).collect::<Vec<_>>().join(",");
        command.env("DOCTOR_NODE_NAME", request.node.as_str());
        command.env("DOCTOR_RANK", rank.to_string()).env("DOCTOR_NODES", together.nodes.len().to_string());
        command.env("DOCTOR_NODE_NAMES", names).env("DOCTOR_RENDEZVOUS", &together.rendezvous);
        command.env("DOCTOR_RENDEZVOUS_SECRET", &together.secret);
    }
    Ok(command)
}
