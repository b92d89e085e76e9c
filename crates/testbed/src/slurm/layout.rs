//! Options of a Slurm cluster, and the configuration files generated from them.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

/// The Slurm release. Messages, flags and JSON differ between releases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Generation {
    /// 22.05, from the packages of Debian 12 installed on this machine.
    #[default]
    Debian12,
    /// 24.11, from a Debian 13 root file system that `scripts/slurm.sh` creates.
    Debian13,
}

impl Generation {
    pub const ALL: [Self; 2] = [Self::Debian12, Self::Debian13];
}

/// Options of a Slurm cluster. [`Layout::default`] has four nodes with eight GPUs each in one partition and nothing else.
#[derive(Debug, Clone)]
pub struct Layout {
    pub generation: Generation,
    /// The number of nodes, named `node1`, `node2`, …
    pub nodes: usize,
    /// Whether slurmd runs on the nodes. Without it, nodes are idle but do not respond, and no job starts.
    pub slurmds: bool,
    /// The number of GPUs per node, declared as `gres/gpu` of type `h100`.
    pub gpus: usize,
    /// The first is the default partition.
    pub partitions: Vec<Partition>,
    pub health_check: Option<HealthCheck>,
    pub prolog: Option<PathBuf>,
    pub epilog: Option<PathBuf>,
    /// Whether jobs of a higher-tier partition preempt those of a lower tier, which are cancelled.
    pub preemption: bool,
    /// Whether completed jobs are recorded in a file, for `sacct -c`.
    pub job_completions: bool,
    pub power_saving: Option<PowerSaving>,
    /// Whether slurmrestd runs, and how it authenticates.
    pub rest: Option<Rest>,
    /// How long a completed job can still be queried.
    pub min_job_age: Duration,
    /// How long a node may be unresponsive before it is down. Slurm checks in steps: any small value takes half a minute.
    pub slurmd_timeout: Duration,
    /// Additional lines for slurm.conf.
    pub extra_lines: Vec<String>,
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            generation: Generation::default(),
            nodes: 4,
            slurmds: true,
            gpus: 8,
            partitions: vec![Partition::new("gpu")],
            health_check: None,
            prolog: None,
            epilog: None,
            preemption: false,
            job_completions: false,
            power_saving: None,
            rest: None,
            min_job_age: Duration::from_mins(5),
            slurmd_timeout: Duration::from_secs(10),
            extra_lines: Vec::new(),
        }
    }
}

/// A partition of all nodes.
#[derive(Debug, Clone)]
pub struct Partition {
    pub name: String,
    /// The priority tier; a higher number goes first.
    pub tier: u32,
    /// Additional settings in slurm.conf syntax: `MaxTime=60 OverSubscribe=NO`.
    pub settings: String,
}

impl Partition {
    /// A partition with default settings.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), tier: 1, settings: String::new() }
    }
}

/// The health check program of slurmd.
#[derive(Debug, Clone)]
pub struct HealthCheck {
    pub program: PathBuf,
    pub interval: Duration,
    /// The node states in which it runs, in slurm.conf syntax: `ANY`, `IDLE`, `ALLOC`, …
    pub states: String,
}

/// The programs that power idle nodes down and up.
#[derive(Debug, Clone)]
pub struct PowerSaving {
    pub suspend: PathBuf,
    pub resume: PathBuf,
    /// How long a node is idle before it is powered down.
    pub after: Duration,
}

/// How slurmrestd authenticates clients. Version 22.05 does not support both ways together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// On a Unix socket, for root.
    Socket,
    /// On loopback TCP, with a token.
    Token,
}

/// The location of this Slurm: the folder of its files and its ports on loopback.
#[derive(Debug, Clone)]
pub(super) struct PathsAndPorts {
    pub(super) folder: PathBuf,
    pub(super) controller_port: u16,
    pub(super) node_ports: Vec<u16>,
    pub(super) rest_port: u16,
}

/// Short intervals for periodic work, because tests wait for it.
const FAST_SETTINGS: &str = "\
SchedulerParameters=sched_interval=2,sched_min_interval=20000,bf_interval=2,batch_sched_delay=0
MessageTimeout=10
KillWait=2
ResumeTimeout=30
SuspendTimeout=5
ReturnToService=1
";

/// Allows many slurmds on one machine that declare more than it has. Jobs are not placed in cgroups.
const SINGLE_HOST_SETTINGS: &str = "\
ClusterName=bed
SlurmctldHost=localhost(127.0.0.1)
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
";

/// The resources that each node declares.
const NODE_SETTINGS: &str = "CPUs=96 Sockets=2 CoresPerSocket=48 ThreadsPerCore=1 RealMemory=1900000 Feature=h100,ib";

impl PathsAndPorts {
    pub(super) fn conf(&self) -> PathBuf {
        self.folder.join("slurm.conf")
    }

    pub(super) fn munge(&self, file: &str) -> PathBuf {
        self.folder.join("munge").join(file)
    }

    pub(super) fn gpus(&self, node: &str) -> PathBuf {
        self.folder.join("gpu").join(node)
    }

    /// The key that signs tokens.
    pub(super) fn token_key(&self) -> PathBuf {
        self.folder.join("state/jwt.key")
    }

    pub(super) fn rest_socket(&self) -> PathBuf {
        self.folder.join("rest.socket")
    }
}

impl Layout {
    /// Returns the names of the nodes.
    pub fn node_names(&self) -> impl Iterator<Item = String> + use<> {
        (1..=self.nodes).map(|number| format!("node{number}"))
    }

    /// Returns the text of slurm.conf.
    pub(super) fn conf(&self, paths_and_ports: &PathsAndPorts) -> String {
        let mut conf = format!("{SINGLE_HOST_SETTINGS}{FAST_SETTINGS}");
        let mut say = |line: &str| {
            conf.push_str(line);
            conf.push('\n');
        };
        say(&paths(&paths_and_ports.folder));
        say(&format!("SlurmctldPort={}", paths_and_ports.controller_port));
        // 0: a node never becomes down, however long it does not respond.
        let timeout = if self.slurmds { self.slurmd_timeout.as_secs() } else { 0 };
        say(&format!("SlurmdTimeout={timeout}"));
        say(&format!("MinJobAge={}", self.min_job_age.as_secs()));
        if self.rest == Some(Rest::Token) {
            say(&format!("AuthAltTypes=auth/jwt\nAuthAltParameters=jwt_key={}", paths_and_ports.token_key().display()));
        }
        self.programs().iter().for_each(|line| say(line));
        self.extra_lines.iter().for_each(|line| say(line));
        let gpus = if self.gpus == 0 { String::new() } else { format!(" Gres=gpu:h100:{}", self.gpus) };
        let node = |name: &str, port: u16| {
            format!("NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} {NODE_SETTINGS}{gpus}")
        };
        if self.slurmds {
            self.node_names().zip(&paths_and_ports.node_ports).for_each(|(name, port)| say(&node(&name, *port)));
        } else {
            // No daemon listens on that port, and one line parses faster than thousands.
            say(&node(&format!("node[1-{}]", self.nodes), 1));
        }
        for (at, Partition { name, tier, settings }) in self.partitions.iter().enumerate() {
            let default = if at == 0 { "YES" } else { "NO" };
            say(&format!("PartitionName={name} Nodes=ALL Default={default} PriorityTier={tier} State=UP {settings}"));
        }
        conf
    }

    /// Returns the lines for the programs and features that the layout enables.
    fn programs(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if let Some(HealthCheck { program, interval, states }) = &self.health_check {
            lines.push(format!("HealthCheckProgram={}", program.display()));
            lines.push(format!("HealthCheckInterval={}", interval.as_secs()));
            lines.push(format!("HealthCheckNodeState={states}"));
        }
        for (name, program) in [("Prolog", &self.prolog), ("Epilog", &self.epilog)] {
            lines.extend(program.as_ref().map(|program| format!("{name}={}", program.display())));
        }
        if self.preemption {
            lines.extend(["PreemptType=preempt/partition_prio".to_owned(), "PreemptMode=CANCEL".to_owned()]);
        }
        if let Some(PowerSaving { suspend, resume, after }) = &self.power_saving {
            lines.push(format!("SuspendProgram={}", suspend.display()));
            lines.push(format!("ResumeProgram={}", resume.display()));
            lines.push(format!("SuspendTime={}", after.as_secs()));
        }
        let completions = if self.job_completions { "jobcomp/filetxt" } else { "jobcomp/none" };
        lines.push(format!("JobCompType={completions}"));
        lines
    }

    /// Returns the text of gres.conf, which assigns device files to the GPUs of each node.
    pub(super) fn gres(&self, paths_and_ports: &PathsAndPorts) -> String {
        let Some(last) = self.gpus.checked_sub(1).filter(|_| self.slurmds) else { return String::new() };
        self.node_names().fold(String::new(), |mut text, node| {
            let devices = paths_and_ports.gpus(&node);
            let line = writeln!(text, "NodeName={node} Name=gpu Type=h100 File={}/nvidia[0-{last}]", devices.display());
            line.expect("writing to a string cannot fail");
            text
        })
    }

    /// Returns the text of cgroup.conf, which disables cgroups in the syntax of this release.
    pub(super) fn cgroup(&self) -> &'static str {
        match self.generation {
            Generation::Debian12 => "CgroupAutomount=no\n",
            Generation::Debian13 => "CgroupPlugin=disabled\n",
        }
    }
}

fn paths(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        "AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
RebootProgram={folder}/reboot.sh
JobCompLoc={folder}/completions"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_contains_exactly_what_the_layout_names() {
        let paths_and_ports = PathsAndPorts {
            folder: PathBuf::from("/bed"),
            controller_port: 6817,
            node_ports: vec![7001, 7002, 7003, 7004],
            rest_port: 6820,
        };
        let plain = Layout::default();
        let conf = plain.conf(&paths_and_ports);
        assert!(conf.contains("NodeName=node4 NodeHostname=localhost NodeAddr=127.0.0.1 Port=7004 CPUs=96"), "{conf}");
        for absent in ["HealthCheck", "Prolog", "Epilog", "Preempt", "SuspendProgram", "filetxt", "AuthAlt"] {
            assert!(!conf.contains(absent), "{absent} in {conf}");
        }
        assert!(
            plain
                .gres(&paths_and_ports)
                .contains("NodeName=node2 Name=gpu Type=h100 File=/bed/gpu/node2/nvidia[0-7]\n")
        );

        let low = Partition { tier: 0, settings: "MaxTime=60".to_owned(), ..Partition::new("doctor") };
        let full = Layout {
            nodes: 1,
            gpus: 0,
            partitions: vec![Partition::new("gpu"), low],
            health_check: Some(HealthCheck {
                program: "/hook".into(),
                interval: Duration::from_secs(5),
                states: "ANY".to_owned(),
            }),
            prolog: Some("/prolog".into()),
            preemption: true,
            job_completions: true,
            rest: Some(Rest::Token),
            ..plain
        };
        let conf = full.conf(&paths_and_ports);
        let lines: Vec<&str> = conf.lines().collect();
        for line in [
            "HealthCheckProgram=/hook",
            "HealthCheckInterval=5",
            "HealthCheckNodeState=ANY",
            "Prolog=/prolog",
            "PreemptType=preempt/partition_prio",
            "JobCompType=jobcomp/filetxt",
            "AuthAltParameters=jwt_key=/bed/state/jwt.key",
            "PartitionName=gpu Nodes=ALL Default=YES PriorityTier=1 State=UP ",
            "PartitionName=doctor Nodes=ALL Default=NO PriorityTier=0 State=UP MaxTime=60",
        ] {
            assert!(lines.contains(&line), "{line} in {conf}");
        }
        assert!(!conf.contains("Gres="), "{conf}");
        assert_eq!(full.gres(&paths_and_ports), "");

        let silent = Layout { nodes: 10_000, slurmds: false, ..Layout::default() };
        let conf = silent.conf(&paths_and_ports);
        assert!(conf.contains("SlurmdTimeout=0\n") && conf.contains("\nNodeName=node[1-10000] "), "{conf}");
    }
}
