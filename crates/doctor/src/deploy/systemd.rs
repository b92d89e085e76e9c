//! systemd units: the controller as a service or as a timer that runs single cycles, and the agent on nodes. They are
//! the files of `deploy/systemd` with the site's values filled in.
//!
//! Units are restricted to what they need. If the cluster is this machine, jobs are children of the unit: they read
//! devices, the kernel log and user mounts, and outlive a cycle. The restrictions that prevent this are removed, each
//! by name.

use std::{fmt::Write as _, path::PathBuf};

use doctor_core::time::Span;

use super::files::{DeployFile, TargetHosts};

/// The agent's unit, as in the repository.
const AGENT_UNIT: &str = include_str!("../../../../deploy/systemd/doctor-node-agent.service");
/// The controller's unit, in which the site's values are filled in.
const CONTROLLER_UNIT: &str = include_str!("../../../../deploy/systemd/doctor.service");
const RUN_UNIT: &str = include_str!("../../../../deploy/systemd/doctor-run.service");
const RUN_TIMER: &str = include_str!("../../../../deploy/systemd/doctor-run.timer");

/// The lines and paths that are replaced with the site's values.
const USER_LINE: &str = "User=root";
const CONFIG: &str = "/etc/cluster-doctor/doctor.toml";
const READ_WRITE_PATHS_LINE: &str = "ReadWritePaths=/var/lib/cluster-doctor";
const TIMER_INTERVAL_LINE: &str = "OnUnitInactiveSec=5min";

/// Restrictions that keep jobs on this machine from inspecting it, or end them together with the cycle that started
/// them.
const OMITTED_FOR_LOCAL_JOBS: [&str; 12] = [
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "ProtectClock=yes",
    "ProtectKernelTunables=yes",
    "ProtectKernelLogs=yes",
    "PrivateTmp=yes",
    "PrivateDevices=yes",
    "RestrictNamespaces=yes",
    "SystemCallFilter=@system-service",
    "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
    "ReadWritePaths=/var/lib/cluster-doctor",
    "MemoryMax=2G",
];
const LOCAL_JOBS_COMMENT: &str = "# Jobs run on this machine as children of the unit: they need its devices, mounts and kernel log, and outlive the cycle
# that started them. These restrictions are therefore omitted:";

/// How the controller runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RunMode {
    /// `doctor serve`.
    Service,
    /// `doctor run`, this long after the previous run ended.
    Timer(Span),
}

/// The part of the units to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum SystemdPart {
    /// Everything.
    All,
    /// The controller's unit, and its timer if there is one.
    Controller,
    /// The agent's unit.
    Agent,
}

/// The properties of a site.
#[derive(Debug, Clone)]
pub(crate) struct SystemdSite {
    pub(crate) run_mode: RunMode,
    pub(crate) user: String,
    /// The configuration file, and the paths that the controller writes besides its state.
    pub(crate) config: PathBuf,
    pub(crate) writable_paths: Vec<PathBuf>,
    pub(crate) doctor: PathBuf,
    pub(crate) doctor_node: PathBuf,
    /// The cluster is this machine: jobs are children of the unit.
    pub(crate) jobs_run_locally: bool,
    /// Agents report to the controller, which must therefore run as a service.
    pub(crate) agents: bool,
}

impl SystemdSite {
    pub(crate) fn files(&self, part: SystemdPart) -> Vec<DeployFile> {
        let mut files = Vec::new();
        if part != SystemdPart::Agent {
            files.push(self.controller_unit());
            files.extend(self.timer());
        }
        if part == SystemdPart::Agent || (part == SystemdPart::All && self.agents) {
            files.push(agent_unit(&self.doctor_node.display().to_string()));
        }
        files
    }

    pub(crate) fn controller_unit(&self) -> DeployFile {
        let (name, text) = match self.run_mode {
            RunMode::Service => ("doctor.service", CONTROLLER_UNIT),
            RunMode::Timer(_) => ("doctor-run.service", RUN_UNIT),
        };
        let mut writes = READ_WRITE_PATHS_LINE.to_owned();
        for path in self.writable_paths.iter().filter(|path| !path.starts_with("/var/lib/cluster-doctor")) {
            let _infallible = write!(writes, " {}", path.display());
        }
        let mut text = text.to_owned();
        if self.jobs_run_locally {
            text = relax_for_local_jobs(&text);
        }
        let text = text
            .replace(USER_LINE, &format!("User={}", self.user))
            .replace("/usr/bin/doctor ", &format!("{} ", self.doctor.display()))
            .replace(CONFIG, &self.config.display().to_string())
            .replace(READ_WRITE_PATHS_LINE, &writes);
        DeployFile::new(format!("/etc/systemd/system/{name}"), TargetHosts::Controller, text)
    }

    fn timer(&self) -> Option<DeployFile> {
        let RunMode::Timer(every) = self.run_mode else { return None };
        let text = RUN_TIMER.replace(TIMER_INTERVAL_LINE, &format!("OnUnitInactiveSec={}s", every.secs().max(1)));
        Some(DeployFile::new("/etc/systemd/system/doctor-run.timer", TargetHosts::Controller, text))
    }
}

pub(crate) fn agent_unit(doctor_node: &str) -> DeployFile {
    let text = AGENT_UNIT.replace("/usr/bin/doctor-node", doctor_node);
    DeployFile::new("/etc/systemd/system/doctor-node-agent.service", TargetHosts::EveryNode, text)
}

fn relax_for_local_jobs(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines().filter(|line| !OMITTED_FOR_LOCAL_JOBS.contains(line)) {
        if line == "NoNewPrivileges=yes" {
            let names =
                OMITTED_FOR_LOCAL_JOBS.iter().filter_map(|line| line.split('=').next()).collect::<Vec<_>>().join(", ");
            let _infallible = writeln!(out, "{LOCAL_JOBS_COMMENT}\n# {names}.\nKillMode=process");
        }
        out.push_str(line);
        out.push('\n');
    }
    out.replace("# The store, and the directory that jobs share with it.\n", "")
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn site(runs: RunMode) -> SystemdSite {
        SystemdSite {
            run_mode: runs,
            user: "doctor".to_owned(),
            config: "/srv/doctor.toml".into(),
            writable_paths: vec!["/shared/doctor".into(), "/var/lib/cluster-doctor/data".into()],
            doctor: "/opt/bin/doctor".into(),
            doctor_node: "/opt/bin/doctor-node".into(),
            jobs_run_locally: false,
            agents: true,
        }
    }

    #[test]
    fn units_contain_every_placeholder_that_is_replaced() {
        for unit in [CONTROLLER_UNIT, RUN_UNIT] {
            for line in
                [USER_LINE, READ_WRITE_PATHS_LINE, "NoNewPrivileges=yes"].into_iter().chain(OMITTED_FOR_LOCAL_JOBS)
            {
                assert!(unit.lines().any(|found| found == line), "{line}");
            }
            assert!(unit.contains("ExecStart=/usr/bin/doctor ") && unit.contains(CONFIG));
        }
        assert!(RUN_TIMER.lines().any(|line| line == TIMER_INTERVAL_LINE));
        assert!(AGENT_UNIT.contains("ExecStart=/usr/bin/doctor-node agent"));
    }

    #[test]
    fn service_timer_and_agent_units_are_filled_with_the_sites_values() {
        let files = site(RunMode::Service).files(SystemdPart::All);
        let names: Vec<&str> = files.iter().filter_map(|file| file.path.rsplit('/').next()).collect();
        assert_eq!(names, ["doctor.service", "doctor-node-agent.service"]);
        let unit = &files[0].text;
        assert!(unit.contains("\nUser=doctor\n"), "{unit}");
        assert!(unit.contains("\nExecStart=/opt/bin/doctor serve --config /srv/doctor.toml\n"), "{unit}");
        assert!(unit.contains("\nConditionPathExists=/srv/doctor.toml\n"), "{unit}");
        assert!(unit.contains("\nReadWritePaths=/var/lib/cluster-doctor /shared/doctor\n"), "{unit}");
        assert!(files[1].text.contains("\nExecStart=/opt/bin/doctor-node agent\n"));

        let files = site(RunMode::Timer(Span::minutes(10))).files(SystemdPart::Controller);
        assert!(
            files[0].text.contains("\nExecStart=/opt/bin/doctor run --config /srv/doctor.toml\n"),
            "{}",
            files[0].text
        );
        assert!(files[1].text.contains("\nOnUnitInactiveSec=600s\n"), "{}", files[1].text);
    }

    #[test]
    fn jobs_on_the_controllers_machine_have_access_and_outlive_a_cycle() {
        let site = SystemdSite { jobs_run_locally: true, ..site(RunMode::Timer(Span::minutes(5))) };
        let unit = &site.files(SystemdPart::Controller)[0].text;
        assert!(unit.contains("\nKillMode=process\n"), "{unit}");
        for line in OMITTED_FOR_LOCAL_JOBS {
            assert!(!unit.lines().any(|found| found.starts_with(line)), "{line}");
        }
        assert!(unit.contains("\nNoNewPrivileges=yes\n") && unit.contains("\nProtectKernelModules=yes\n"));
    }
}
