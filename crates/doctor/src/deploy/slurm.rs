//! The files of a Slurm cluster: lines of slurm.conf, hook scripts, settings and systemd units. Slurm has no API to
//! apply objects to, so these are files, each with the machines it is for.
//!
//! A cluster whose nodes get their configuration from slurmctld ("configless") needs the same files, but slurm.conf
//! changes in only one place. The scripts are always installed locally: a hook that is fetched over the network can be
//! missing when it is needed.

use std::{fmt::Write as _, path::PathBuf};

use doctor_core::time::Span;

use super::{
    files::{DeployFile, TargetHosts},
    systemd::{self, RunMode},
};

const POLICY: &str = "/etc/cluster-doctor/policy.toml";

/// The least HealthCheckInterval: slurmd kills a HealthCheckProgram after one minute.
const SHORTEST_INTERVAL: Span = Span::from_secs(60);

/// The part of the files to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum SlurmPart {
    /// Everything.
    All,
    /// The lines for slurm.conf.
    SlurmConf,
    /// The three scripts that Slurm runs.
    Scripts,
    /// Settings on the nodes: hooks, agent, policy.
    Settings,
    /// systemd units of the agent and the controller.
    Units,
}

/// How agents authenticate the controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AgentTrust {
    /// By the key in their credential.
    Pinned,
    /// By the authority of the site's certificate.
    Authority,
    /// Not at all.
    Plain,
    /// Not at all: nothing leaves this machine.
    Loopback,
}

/// The properties of a site.
#[derive(Debug, Clone)]
pub(crate) struct SlurmSite {
    /// There is no controller.
    pub(crate) standalone: bool,
    pub(crate) block_jobs: bool,
    pub(crate) configless: bool,
    /// The directory of the scripts.
    pub(crate) script_dir: PathBuf,
    /// The path of `doctor-node` on the nodes.
    pub(crate) doctor_node: PathBuf,
    /// The interval of the node's checks.
    pub(crate) check_interval: Span,
    /// The text of the site's policy.
    pub(crate) policy: Option<String>,
    /// The URL of the agent endpoint, and how agents authenticate it.
    pub(crate) url: Option<String>,
    pub(crate) trust: AgentTrust,
    /// The user that the controller runs as.
    pub(crate) user: String,
    /// The controller's configuration file, and the paths it writes.
    pub(crate) config: PathBuf,
    pub(crate) writable_paths: Vec<PathBuf>,
}

impl SlurmSite {
    pub(crate) fn files(&self, part: SlurmPart) -> Vec<DeployFile> {
        let mut files = vec![(SlurmPart::SlurmConf, self.slurm_conf())];
        files.extend(["health", "prolog", "epilog"].map(|moment| (SlurmPart::Scripts, self.script(moment))));
        files.push((SlurmPart::Settings, self.hook_settings()));
        if let Some(policy) = &self.policy {
            files.push((SlurmPart::Settings, DeployFile::new(POLICY, TargetHosts::EveryNode, policy.clone())));
        }
        if !self.standalone {
            files.push((SlurmPart::Settings, self.agent_settings()));
            files.push((SlurmPart::Units, systemd::agent_unit(&self.doctor_node.display().to_string())));
            files.push((SlurmPart::Units, self.controller_unit()));
        }
        files.into_iter().filter(|(of, _)| part == SlurmPart::All || *of == part).map(|(_, file)| file).collect()
    }

    fn slurm_conf(&self) -> DeployFile {
        let folder = self.script_dir.display();
        let mut text = String::from("# Cluster Doctor. See docs/guide/slurm-hooks.md.\n");
        text.push_str(match self.configless {
            true => {
                "# This cluster is configless: change only slurmctld's file; `scontrol reconfigure` distributes it.\n"
            }
            false => "# Add these lines to every copy of slurm.conf, then run `scontrol reconfigure`.\n",
        });
        let _infallible = write!(
            text,
            "HealthCheckProgram={folder}/health\nHealthCheckInterval={}\nHealthCheckNodeState=ANY,CYCLE\n\
             # If the site has its own prolog or epilog, set a pattern, such as Prolog=/etc/slurm/prolog.d/*, and link these scripts there.\n\
             Prolog={folder}/prolog\nEpilog={folder}/epilog\n",
            self.check_interval.max(SHORTEST_INTERVAL).secs()
        );
        if self.block_jobs {
            text.push_str(
                "# A job that the prolog rejects is requeued, not held. Append this to the SchedulerParameters that you have.\n\
                 SchedulerParameters=nohold_on_prolog_fail\n\
                 # The prolog runs on every node at allocation, not only where the first step starts.\n\
                 PrologFlags=Alloc\n",
            );
        }
        DeployFile::new("/etc/slurm/slurm.conf", TargetHosts::Slurmctld, text)
    }

    fn script(&self, moment: &str) -> DeployFile {
        let text = format!(
            "#!/bin/sh\n# Slurm passes no arguments, PATH or SLURM_CONF; doctor-node finds what it needs.\n\
             exec {} hook {moment}\n",
            self.doctor_node.display()
        );
        let path = self.script_dir.join(moment).display().to_string();
        DeployFile { mode: 0o755, ..DeployFile::new(path, TargetHosts::EveryNode, text) }
    }

    fn hook_settings(&self) -> DeployFile {
        let mut text = String::from(
            "# Settings of the hooks; only root may write this file. All settings: docs/guide/slurm-hooks.md.\n",
        );
        if self.standalone {
            text.push_str("# There is no controller: the hook drains its node, within the limits of the policy's breaker.\nstandalone = true\n");
            if self.policy.is_some() {
                let _infallible = writeln!(text, "policy = {POLICY:?}");
            }
        }
        // A verdict stays valid until it is renewed, plus one minute.
        let fresh = self.check_interval.max(SHORTEST_INTERVAL) + Span::minutes(1);
        let _infallible = writeln!(text, "fresh = \"{fresh}\"");
        if self.block_jobs {
            text.push_str("\n[prolog]\n# Reject jobs on a node with an isolating finding, while the breaker permits.\nblock = true\n");
        }
        DeployFile::new("/etc/cluster-doctor/hook.toml", TargetHosts::EveryNode, text)
    }

    fn agent_settings(&self) -> DeployFile {
        let mut text = String::from(
            "# Settings of the agent. Its credential is /etc/cluster-doctor/agent.key, from `doctor agent enroll`, mode 600.\n",
        );
        if let Some(url) = &self.url {
            let _infallible = writeln!(text, "controller = {url:?}");
        }
        text.push_str(match self.trust {
            AgentTrust::Pinned => "# The credential also holds the fingerprint of the controller's key.\n",
            AgentTrust::Authority => {
                "# The authority of the controller's certificate; copy its certificate to each node.\n\
                 ca_file = \"/etc/cluster-doctor/ca.pem\"\n"
            }
            AgentTrust::Loopback => "",
            AgentTrust::Plain => {
                "# Reports are not encrypted, as `plain` in the controller's configuration says.\nplain = true\n"
            }
        });
        if self.policy.is_some() {
            let _infallible = writeln!(text, "policy = {POLICY:?}");
        }
        DeployFile::new("/etc/cluster-doctor/agent.toml", TargetHosts::EveryNode, text)
    }

    fn controller_unit(&self) -> DeployFile {
        let site = systemd::SystemdSite {
            run_mode: RunMode::Service,
            user: self.user.clone(),
            config: self.config.clone(),
            writable_paths: self.writable_paths.clone(),
            doctor: "/usr/bin/doctor".into(),
            doctor_node: self.doctor_node.clone(),
            jobs_run_locally: false,
            agents: true,
        };
        site.controller_unit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::deploy::files::render;

    fn site() -> SlurmSite {
        SlurmSite {
            standalone: false,
            block_jobs: false,
            configless: false,
            script_dir: "/usr/lib/cluster-doctor/slurm".into(),
            doctor_node: "/usr/bin/doctor-node".into(),
            check_interval: Span::minutes(5),
            policy: Some("version = 7\n".to_owned()),
            url: Some("https://ctl:7443".to_owned()),
            trust: AgentTrust::Pinned,
            user: "slurm".to_owned(),
            config: "/etc/cluster-doctor/doctor.toml".into(),
            writable_paths: vec!["/shared/doctor".into(), "/var/lib/cluster-doctor".into()],
        }
    }

    fn of(site: &SlurmSite, path: &str) -> Option<String> {
        site.files(SlurmPart::All).into_iter().find(|file| file.path == path).map(|file| file.text)
    }

    #[test]
    fn a_site_with_a_controller_gets_agents_and_a_site_without_gets_draining_hooks() {
        let conf = of(&site(), "/etc/slurm/slurm.conf").unwrap();
        assert!(conf.contains("HealthCheckInterval=300\n") && !conf.contains("PrologFlags"), "{conf}");
        let unit = of(&site(), "/etc/systemd/system/doctor.service").unwrap();
        assert!(unit.contains("\nUser=slurm\n"), "{unit}");
        assert!(unit.contains("\nReadWritePaths=/var/lib/cluster-doctor /shared/doctor\n"), "{unit}");
        let agent = |trust| of(&SlurmSite { trust, ..site() }, "/etc/cluster-doctor/agent.toml").unwrap();
        let pinned = agent(AgentTrust::Pinned);
        assert!(pinned.contains("controller = \"https://ctl:7443\"") && !pinned.contains("plain ="), "{pinned}");
        assert!(agent(AgentTrust::Authority).contains("\nca_file = "));
        assert!(agent(AgentTrust::Plain).contains("\nplain = true\n"));
        assert!(!of(&site(), "/etc/cluster-doctor/hook.toml").unwrap().contains("alone ="));

        let alone = SlurmSite { standalone: true, block_jobs: true, configless: true, ..site() };
        assert_eq!(of(&alone, "/etc/systemd/system/doctor.service"), None);
        let hook = of(&alone, "/etc/cluster-doctor/hook.toml").unwrap();
        assert!(
            hook.contains("standalone = true\npolicy = \"/etc/cluster-doctor/policy.toml\"\nfresh = \"6m\"\n"),
            "{hook}"
        );
        assert!(hook.ends_with(
            "[prolog]\n# Reject jobs on a node with an isolating finding, while the breaker permits.\nblock = true\n"
        ));
        let conf = of(&alone, "/etc/slurm/slurm.conf").unwrap();
        assert!(conf.contains("PrologFlags=Alloc") && conf.contains("configless"), "{conf}");
    }

    #[test]
    fn one_part_is_printed_as_is_and_all_parts_with_their_paths() {
        let files = site().files(SlurmPart::SlurmConf);
        assert_eq!(render(&files), files[0].text);
        let all = render(&site().files(SlurmPart::All));
        assert!(
            all.contains("# ---- on every node: /usr/lib/cluster-doctor/slurm/health (mode 755)\n#!/bin/sh\n"),
            "{all}"
        );
    }
}
