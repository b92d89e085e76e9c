//! Names a process for people: its program, its user, and the job, pod, container or service that it belongs to.

/// A process that another party owns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessOwner {
    pub pid: u32,
    /// The kernel's short name of the process.
    pub program: String,
    pub uid: Option<u32>,
    /// The user's name, if the machine's password file has it.
    pub user: Option<String>,
    /// From its control group: a job, pod, container or service.
    pub workload: Option<String>,
}

impl ProcessOwner {
    /// Returns `python3 (pid 4711, user ann, Slurm job 17)`.
    pub fn describe(&self) -> String {
        let user = match (&self.user, self.uid) {
            (Some(user), _) => format!("user {user}"),
            (None, Some(uid)) => format!("uid {uid}"),
            (None, None) => "owner unknown".to_owned(),
        };
        let workload = self.workload.as_ref().map_or_else(String::new, |workload| format!(", {workload}"));
        format!("{} (pid {}, {user}{workload})", self.program, self.pid)
    }

    /// Returns program and owner without what differs from run to run: `python3 of uid 1000`.
    pub fn disturber(&self) -> String {
        let owner = self.uid.map_or_else(|| "an unknown owner".to_owned(), |uid| format!("uid {uid}"));
        format!("{} of {owner}", self.program)
    }
}

/// Returns the name of a user from the text of a password file.
pub fn user_name(passwd: &str, uid: u32) -> Option<String> {
    let name = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid) && !name.is_empty()).then(|| name.to_owned())
    };
    passwd.lines().find_map(name)
}

/// Returns the real user id from the text of `/proc/PID/status`.
pub fn uid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// Returns what a process belongs to, from the text of `/proc/PID/cgroup` (version 1 or 2).
pub fn workload(cgroup: &str) -> Option<String> {
    cgroup.lines().filter_map(|line| line.splitn(3, ':').nth(2)).find_map(workload_of_path)
}

fn workload_of_path(path: &str) -> Option<String> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    if path.contains("slurm")
        && let Some(job) = parts.iter().find_map(|part| part.strip_prefix("job_"))
    {
        return Some(format!("Slurm job {job}"));
    }
    let pod = parts.iter().rev().find_map(|part| pod_uid(part));
    let container = parts.iter().rev().find_map(|part| container_id(part));
    match (pod, container) {
        (Some(pod), Some(container)) => Some(format!("pod {pod}, container {container}")),
        (Some(pod), None) => Some(format!("pod {pod}")),
        (None, Some(container)) => Some(format!("container {container}")),
        (None, None) => {
            parts.iter().rev().find(|part| part.ends_with(".service")).map(|part| format!("service {part}"))
        }
    }
}

/// `kubepods-burstable-pod1234_….slice` with systemd, `pod1234-…` without.
fn pod_uid(part: &str) -> Option<String> {
    let (_, uid) = part.strip_suffix(".slice").unwrap_or(part).rsplit_once("pod")?;
    let uid = uid.replace('_', "-");
    let is_uid = uid.len() >= 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    is_uid.then_some(uid)
}

/// The 64 digits at the end of `cri-containerd-….scope`, `docker-….scope` or of the part itself, shortened as the
/// container tools do.
fn container_id(part: &str) -> Option<String> {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    let id = part.rsplit(['-', ':']).next()?;
    (id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| id[..12].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3f4e1c0a9b8d7c6e5f4a3b2c1d0e9f8a7b6c5d4e3f2a1b0c9d8e7f6a5b4c3d2e";
    const POD: &str = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9";

    // Written by hand after the documentation of systemd, Slurm, Kubernetes and Docker.
    #[test]
    fn a_control_group_names_the_job_pod_container_or_service() {
        let slice = POD.replace('-', "_");
        for (cgroup, expected) in [
            (
                "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n".to_owned(),
                Some("Slurm job 4711".to_owned()),
            ),
            (
                "11:memory:/slurm/uid_1000/job_17/step_batch\n1:name=systemd:/system.slice/slurmd.service\n".to_owned(),
                Some("Slurm job 17".to_owned()),
            ),
            (
                format!(
                    "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-containerd-{ID}.scope\n"
                ),
                Some(format!("pod {POD}, container 3f4e1c0a9b8d")),
            ),
            (format!("4:cpu:/kubepods/besteffort/pod{POD}/{ID}\n"), Some(format!("pod {POD}, container 3f4e1c0a9b8d"))),
            (format!("0::/system.slice/docker-{ID}.scope\n"), Some("container 3f4e1c0a9b8d".to_owned())),
            ("0::/system.slice/ollama.service\n".to_owned(), Some("service ollama.service".to_owned())),
            ("0::/user.slice/user-1000.slice/session-3.scope\n".to_owned(), None),
            ("0::/\n".to_owned(), None),
            (String::new(), None),
        ] {
            assert_eq!(workload(&cgroup), expected, "{cgroup}");
        }
    }

    #[test]
    fn a_process_is_described_with_its_owner() {
        let mut owner = ProcessOwner {
            pid: 4711,
            program: "python3".to_owned(),
            uid: Some(1000),
            user: user_name("root:x:0:0::/root:/bin/sh\nann:x:1000:1000:Ann:/home/ann:/bin/sh\n", 1000),
            workload: workload("0::/system.slice/slurmstepd.scope/job_17/step_0\n"),
        };
        assert_eq!(owner.describe(), "python3 (pid 4711, user ann, Slurm job 17)");
        (owner.user, owner.workload) = (None, None);
        assert_eq!(owner.describe(), "python3 (pid 4711, uid 1000)");
        assert_eq!(owner.disturber(), "python3 of uid 1000");
        owner.uid = None;
        assert_eq!(owner.describe(), "python3 (pid 4711, owner unknown)");
        assert_eq!(owner.disturber(), "python3 of an unknown owner");
        assert_eq!(uid("Name:\tpython3\nUid:\t1000\t1000\t1000\t1000\n"), Some(1000));
        assert_eq!((uid(""), user_name("broken\n", 0)), (None, None));
    }
}
