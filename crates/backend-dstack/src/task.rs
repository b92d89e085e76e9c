//! Builds the dstack task of a run, and derives the run's state from the server's answers. Pure.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use doctor_backend::JobRequest;
use doctor_checks::result_transport::URL_VARIABLE;
use doctor_core::{
    access::Access,
    ids::{JobId, NodeName},
    run::{JobEnd, ObservedJobState},
    time::{Span, Timestamp},
};
use doctor_host::vendor_reports::TOOL_TIMEOUT;
use serde_json::{Value, json};

use super::{
    api_types::{Instance, Resources, run_name, secret_name},
    config::{DstackConfig, KeyDelivery},
    run_types::{JobStatus, JobSubmission, Run},
};

/// How long after a job's limit dstack ends it, as a backstop for the job itself and the controller.
const DEADLINE_MARGIN: Span = Span::minutes(10);
/// dstack keeps no termination message of a container: everything is in the log.
const NO_TERMINATION_MESSAGE: &str = "/dev/null";
const KEY_VARIABLE: &str = "DOCTOR_RUN_KEY";
const POLICY_VARIABLE: &str = "DOCTOR_POLICY";
const ACCESS_VARIABLE: &str = "DOCTOR_ACCESS";
/// A volume of the task that shows the host's file system to the job, and where it does.
const HOST_VOLUME: &str = "/:/host";
const HOST: &str = "/host";
/// In the container, which is deleted with the job.
const POLICY: &str = "/tmp/doctor-policy.toml";
/// An environment variable may have 128 KiB, and base64 makes a policy longer.
pub(super) const MAX_POLICY_BYTES: usize = 90 * 1024;

/// Builds the request that starts the run: on this instance, with all of it, and nowhere else.
pub(super) fn run_plan(
    job: &JobRequest,
    node: &NodeName,
    (fleet, instance): (&str, &Instance),
    policy: Option<&str>,
    config: &DstackConfig,
) -> Value {
    let key = match config.key {
        KeyDelivery::Secret => format!("${{{{ secrets.{} }}}}", secret_name(job.run)),
        KeyDelivery::Environment => job.key.to_hex(),
    };
    let given = given_access(config).iter().map(|access| access.code()).collect::<Vec<_>>().join(",");
    let mut environment = json!({ KEY_VARIABLE: key, ACCESS_VARIABLE: given });
    if let Some(url) = &job.results {
        environment[URL_VARIABLE] = json!(url);
    }
    let mut commands = Vec::new();
    if let Some(policy) = policy {
        // In base64, because the shell and dstack would each interpret some characters.
        environment[POLICY_VARIABLE] = json!(STANDARD.encode(policy));
        commands.push(format!("printf %s \"${POLICY_VARIABLE}\" | base64 -d > {POLICY}"));
    }
    commands.push(command(job, node, policy.is_some(), config));
    let work = Work { name: run_name(job.run), environment, commands, limit: job.limit + DEADLINE_MARGIN };
    plan(work, (fleet, instance), config)
}

/// Builds the request that takes the report of an instance: a task that prints it to its log.
pub(super) fn report_plan(name: &str, place: (&str, &Instance), config: &DstackConfig) -> Value {
    let mut args: Vec<String> = config.task.doctor_node.clone();
    let limit = TOOL_TIMEOUT.to_string();
    args.extend(["report", "--out", "/tmp/doctor-report", "--limit", &limit, "--carry"].map(str::to_owned));
    if has_host(config) {
        args.extend(["--root", HOST].map(str::to_owned));
    }
    let args: Vec<String> = args.iter().map(|arg| quoted(arg)).collect();
    let commands = vec![format!("exec {}", args.join(" "))];
    let limit = TOOL_TIMEOUT + DEADLINE_MARGIN;
    plan(Work { name: name.to_owned(), environment: json!({}), commands, limit }, place, config)
}

/// What a task runs.
struct Work {
    name: String,
    environment: Value,
    commands: Vec<String>,
    limit: Span,
}

/// Builds the request for a task on this instance, with all of it, and nowhere else.
fn plan(work: Work, (fleet, instance): (&str, &Instance), config: &DstackConfig) -> Value {
    let Work { name, environment, commands, limit } = work;
    let task = json!({
        "type": "task", "name": name,
        "image": config.task.image, "user": config.task.user, "privileged": config.task.privileged,
        "env": environment, "commands": commands, "volumes": config.task.volumes,
        "fleets": [fleet], "instances": [instance.name],
        // Never a new instance, and the lowest priority.
        "creation_policy": "reuse", "priority": 0,
        "resources": instance.instance_type.as_ref().map(|kind| whole_instance(&kind.resources)),
        "max_duration": limit.secs(),
    });
    let spec = json!({ "run_name": name, "configuration": task, "profile": { "name": "default" } });
    json!({ "plan": { "run_spec": spec, "current_resource": null }, "force": false })
}

/// Requests all resources of the instance: if it is divided into blocks, every block.
fn whole_instance(resources: &Resources) -> Value {
    let mut cpu = json!({ "count": { "min": resources.cpus, "max": null } });
    if let Some(arch) = &resources.cpu_arch {
        cpu["arch"] = json!(arch);
    }
    let count = resources.gpus.len();
    let mut gpu = json!({ "count": { "min": count, "max": count } });
    if let Some(first) = resources.gpus.first() {
        gpu["name"] = json!([first.name]);
        if let Some(vendor) = &first.vendor {
            gpu["vendor"] = json!(vendor);
        }
    }
    // The default request may exceed a small instance.
    let any = json!({ "min": 0, "max": null });
    json!({ "cpu": cpu, "gpu": gpu, "memory": any, "disk": { "size": any } })
}

/// Builds the command. It replaces the shell, because dstack interrupts only the first process of a job.
fn command(job: &JobRequest, node: &NodeName, with_policy: bool, config: &DstackConfig) -> String {
    let tests = job.tests.iter().map(|test| test.as_str()).collect::<Vec<_>>().join(",");
    let (run, limit, node) = (job.run.to_string(), job.limit.to_string(), node.to_string());
    let mut args: Vec<String> = config.task.doctor_node.clone();
    args.extend(["job", "--run", &run, "--tests", &tests, "--limit", &limit].map(str::to_owned));
    args.extend(["--node", &node, "--carry", NO_TERMINATION_MESSAGE].map(str::to_owned));
    if with_policy {
        args.extend(["--policy", POLICY].map(str::to_owned));
    }
    if has_host(config) {
        args.extend(["--root", HOST].map(str::to_owned));
    }
    if let Some(state) = &config.task.state {
        args.extend(["--state".to_owned(), state.display().to_string()]);
    }
    let args: Vec<String> = args.iter().map(|arg| quoted(arg)).collect();
    format!("exec {}", args.join(" "))
}

fn has_host(config: &DstackConfig) -> bool {
    config.task.volumes.iter().any(|volume| volume == HOST_VOLUME)
}

/// Returns the access to the host that the task's container has. dstack has no setting for the host's process ids.
fn given_access(config: &DstackConfig) -> Vec<Access> {
    let (has_host, privileged) = (has_host(config), config.task.privileged);
    let is_given = |access: &Access| match access {
        Access::Gpu => true,
        Access::Rdma => privileged,
        Access::HostRoot | Access::KernelLog => has_host && privileged,
        Access::Mounts => has_host,
        Access::HostPid => false,
    };
    Access::ALL.iter().copied().filter(is_given).collect()
}

/// Quotes a word for the shell, if needed.
fn quoted(arg: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "._-=/,:@".contains(c);
    if !arg.is_empty() && arg.chars().all(harmless) {
        return arg.to_owned();
    }
    format!("'{}'", arg.replace('\'', "'\\''"))
}

/// Returns the state of a run; `began` is when its job started to run, if known.
pub(super) fn job_state(run: &Run, job: JobId, began: Option<Timestamp>) -> ObservedJobState {
    let Some(newest) = run.latest_submission() else {
        let since = run.submitted_at.parse();
        return since.map_or(ObservedJobState::Unknown { why: "dstack lists no job of the run".to_owned() }, |since| {
            ObservedJobState::Pending { job, since }
        });
    };
    let pending = |job| ObservedJobState::Pending { job, since: newest.submitted_at };
    let running = |job, since| ObservedJobState::Running { job, since };
    match &newest.status {
        JobStatus::Submitted | JobStatus::Provisioning | JobStatus::Pulling => pending(job),
        JobStatus::Running => running(job, began.unwrap_or(newest.submitted_at)),
        JobStatus::Terminating => began.map_or_else(|| pending(job.clone()), |since| running(job.clone(), since)),
        JobStatus::Terminated | JobStatus::Aborted | JobStatus::Failed | JobStatus::Done => {
            // A job with an exit status has run, even if its events are gone.
            let started = began.or(newest.exit_status.map(|_| newest.submitted_at));
            let at = newest.finished_at.unwrap_or(newest.submitted_at);
            ObservedJobState::Ended {
                job,
                started,
                at: started.map_or(at, |started| at.max(started)),
                how: job_end(newest),
            }
        }
        JobStatus::Strange(word) => ObservedJobState::Unknown { why: format!("unrecognised dstack job status {word}") },
    }
}

fn job_end(submission: &JobSubmission) -> JobEnd {
    match (submission.termination_reason.as_deref(), &submission.status) {
        // The instance was taken or gone before the job had it, or the cloud reclaimed it.
        (Some("failed_to_start_due_to_no_capacity" | "interrupted_by_no_capacity"), _) => JobEnd::Preempted,
        (Some("instance_unreachable" | "instance_access_revoked"), _) => JobEnd::Lost,
        (_, JobStatus::Done) => JobEnd::Exited,
        (_, JobStatus::Failed) => JobEnd::Failed,
        _ => JobEnd::Killed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api_types::tests::{DONE, FAILED, NO_CAPACITY, RUNNING, STOPPED, instance, run};
    use doctor_backend::JobOutput;
    use doctor_checks::document::RunKey;
    use doctor_core::{
        ids::{RunId, TestId},
        run::NonEmpty,
    };

    fn request() -> JobRequest {
        let node = NodeName::new("bed-0").unwrap();
        JobRequest {
            run: RunId::from_number(7),
            nodes: NonEmpty::one(node.clone()),
            tests: NonEmpty::new(vec![TestId::new("memory").unwrap(), TestId::new("dl").unwrap()]).unwrap(),
            access: Vec::new(),
            limit: Span::minutes(90),
            key: RunKey::new([7; 32]),
            results: None,
            outputs: vec![JobOutput { node, logs: Vec::new(), document: "x.json".into() }],
        }
    }

    fn planned(policy: Option<&str>, config: &DstackConfig) -> Value {
        let job = request();
        run_plan(&job, job.nodes.first(), ("bed", &instance()), policy, config)["plan"]["run_spec"].take()
    }

    #[test]
    fn a_run_becomes_a_task_pinned_to_its_whole_instance() {
        let spec = planned(None, &DstackConfig::default());
        let task = &spec["configuration"];
        assert_eq!(spec["run_name"], "doctor-r0000000000007");
        assert_eq!((&task["instances"], &task["fleets"]), (&json!(["bed-0"]), &json!(["bed"])));
        assert_eq!((&task["creation_policy"], &task["priority"]), (&json!("reuse"), &json!(0)));
        assert_eq!(
            task["resources"]["gpu"],
            json!({ "name": ["H100"], "vendor": "nvidia", "count": { "min": 8, "max": 8 } })
        );
        assert_eq!(task["resources"]["cpu"], json!({ "arch": "x86", "count": { "min": 96, "max": null } }));
        assert_eq!(task["max_duration"], 100 * 60);
        let command_line = "exec doctor-node job --run r0000000000007 --tests memory,dl --limit '1h 30m' --node bed-0 --carry /dev/null";
        assert_eq!(task["commands"], json!([command_line]));
        let environment = json!({ "DOCTOR_RUN_KEY": "${{ secrets.doctor_r0000000000007 }}", "DOCTOR_ACCESS": "gpu" });
        assert_eq!(task["env"], environment);
        let posting = JobRequest { results: Some("http://controller:7443".to_owned()), ..request() };
        let plan = run_plan(&posting, posting.nodes.first(), ("bed", &instance()), None, &DstackConfig::default());
        let environment = &plan["plan"]["run_spec"]["configuration"]["env"];
        assert_eq!(environment["DOCTOR_RESULTS_URL"], "http://controller:7443");
    }

    #[test]
    fn a_report_is_a_task_on_the_same_instance_that_prints_it() {
        let mut config = DstackConfig::default();
        config.task.volumes.push("/:/host".to_owned());
        let plan = report_plan("doctor-report-x", ("bed", &instance()), &config);
        let spec = &plan["plan"]["run_spec"];
        let task = &spec["configuration"];
        assert_eq!((&spec["run_name"], &task["instances"]), (&json!("doctor-report-x"), &json!(["bed-0"])));
        let command = "exec doctor-node report --out /tmp/doctor-report --limit 3m --carry --root /host";
        assert_eq!((&task["commands"], &task["env"]), (&json!([command]), &json!({})));
        assert_eq!((&task["creation_policy"], &task["max_duration"]), (&json!("reuse"), &json!(13 * 60)));
    }

    #[test]
    fn a_job_that_sees_the_host_is_told_so() {
        let mut config = DstackConfig::default();
        config.task.volumes.push("/:/host".to_owned());
        let task = planned(None, &config)["configuration"].take();
        assert_eq!(task["env"]["DOCTOR_ACCESS"], "gpu,mounts");
        assert!(task["commands"][0].as_str().unwrap().ends_with(" --root /host"));
        config.task.privileged = true;
        let task = planned(None, &config)["configuration"].take();
        assert_eq!(task["env"]["DOCTOR_ACCESS"], "host-root,gpu,rdma,kernel-log,mounts");
    }

    #[test]
    fn policy_state_and_key_follow_the_configuration() {
        let mut config = DstackConfig { key: KeyDelivery::Environment, ..DstackConfig::default() };
        config.task.state = Some("/var/lib/it's".into());
        let task = planned(Some("a = \"${{ x }}\"\n"), &config)["configuration"].take();
        assert_eq!(task["env"]["DOCTOR_RUN_KEY"], RunKey::new([7; 32]).to_hex());
        assert_eq!(task["env"]["DOCTOR_POLICY"], STANDARD.encode("a = \"${{ x }}\"\n"));
        assert_eq!(task["commands"][0], "printf %s \"$DOCTOR_POLICY\" | base64 -d > /tmp/doctor-policy.toml");
        let last = task["commands"][1].as_str().unwrap();
        assert!(last.ends_with(" --policy /tmp/doctor-policy.toml --state '/var/lib/it'\\''s'"), "{last}");
    }

    #[test]
    fn the_recorded_runs_map_to_distinct_states() {
        let job = JobId("main/x".to_owned());
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let since = at("2026-11-15T01:20:55Z");
        let began = Some(since);
        let ended = |text, began| match job_state(&run(text), job.clone(), began) {
            ObservedJobState::Ended { started, how, .. } => (started.is_some(), how),
            other => panic!("{other:?}"),
        };
        assert_eq!(job_state(&run(RUNNING), job.clone(), began), ObservedJobState::Running { job: job.clone(), since });
        assert_eq!(ended(DONE, None), (true, JobEnd::Exited));
        assert_eq!(ended(FAILED, None), (true, JobEnd::Failed));
        assert_eq!(ended(STOPPED, began), (true, JobEnd::Killed));
        assert_eq!(ended(STOPPED, None), (false, JobEnd::Killed), "it never ran");
        assert_eq!(ended(NO_CAPACITY, None), (false, JobEnd::Preempted));
        let ending = |text| run(text).latest_submission().unwrap().ending();
        let no_capacity = "dstack: no capacity, failed_to_start_due_to_no_capacity, Failed to use specified instances";
        assert_eq!(ending(NO_CAPACITY), no_capacity);
        assert!(ending(FAILED).contains("exit code "), "{}", ending(FAILED));
        let lost = STOPPED.replace("terminated_by_user", "instance_unreachable");
        assert_eq!(ended(&lost, began), (true, JobEnd::Lost));
        let unknown_status = RUNNING.replace("\"running\"", "\"hovering\"");
        assert!(
            matches!(job_state(&run(&unknown_status), job.clone(), None), ObservedJobState::Unknown { why } if why.contains("hovering"))
        );
        let ObservedJobState::Ended { started, at, .. } = job_state(&run(DONE), job, Some(at("2030-01-01T00:00:00Z")))
        else {
            panic!()
        };
        assert!(started.unwrap() <= at, "clocks of two machines differ, and no job ends before it begins");
    }
}
