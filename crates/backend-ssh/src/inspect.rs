//! `doctor config check --live` on SSH hosts: whether each is reachable, has a known key and accepts the login, whether we are
//! root there, whether our program can be installed, whether the clocks agree, and whether the host has the commands for what the
//! policy permits. Changes nothing on a host, and keeps no connection.

mod facts;

use std::{fs, time::Duration};

use doctor_backend::{
    clock::{Clock as _, SystemClock},
    inspection::{Inspection, InspectionItem, NodeAspect, NodeTrial, format_nodes},
    program,
    ssh::{
        Host, HostKeys, SshConfig,
        remote_program::hash,
        session::{KEY_CHANGED, KEY_UNKNOWN, SshConnector},
    },
};
use doctor_core::{ids::NodeName, time::Timestamp};

use super::query_order::{QueryOrder, each};
use facts::Facts;

/// The most that a host's clock may be off: a larger offset corrupts the history.
const MAX_CLOCK_OFFSET: Duration = Duration::from_secs(30);
/// The free space that our program, runs and their logs need, in KiB.
const MIN_FREE_SPACE: u64 = 256 * 1024;

/// The repairs that the policy permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequiredRepairs {
    pub reset: bool,
    pub reboot: bool,
}

/// The answer of one host.
struct HostFacts {
    name: NodeName,
    facts: Result<Facts, String>,
    /// Seconds between its clock and ours.
    clock_offset: Option<u64>,
}

/// The program that would be installed.
struct LocalProgram {
    hash: String,
    /// The machine architecture it is for; `None`: unknown.
    machine: Option<&'static str>,
}

/// Inspects all hosts, and the first one that answers in detail.
pub fn inspect(config: &SshConfig, repairs: RequiredRepairs) -> Inspection {
    let hosts = match config.read_hosts() {
        Ok(hosts) => hosts,
        Err(error) => {
            return vec![InspectionItem::bad("hosts", error.to_string(), "check `hostfile` or `hosts`")].into();
        }
    };
    let binary = match local_program(config) {
        Ok(binary) => binary,
        Err(why) => {
            return vec![InspectionItem::bad(
                "doctor-node",
                why,
                "set `doctor_node` under [backend.ssh] to the program",
            )]
            .into();
        }
    };
    let programs: Vec<&str> = required_programs(config, repairs);
    let script = facts::script(&config.remote, &config.as_root.join(" "), &binary.hash, &programs);
    let connector = SshConnector::new(config, None);
    let queues = QueryOrder::default().queues(&hosts, config.parallel);
    let host_facts = each(&queues, config.parallel, |host| query_facts(&connector, host, &script, config));
    let host_facts: Vec<HostFacts> = host_facts.into_iter().map(|(_, host_facts)| host_facts).collect();
    let mut items = inspect_reachability(&host_facts, config);
    let reachable: Vec<(&NodeName, &Facts)> =
        host_facts.iter().filter_map(|entry| Some((&entry.name, entry.facts.as_ref().ok()?))).collect();
    if !reachable.is_empty() {
        items.push(root(&reachable, config));
        items.extend(program(&reachable, &binary, config));
        items.push(clocks(&host_facts));
        items.push(inspect_sessions(&reachable));
        items.extend(programs.iter().map(|program| command(&reachable, program)));
    }
    let trial = host_facts.iter().find_map(|entry| Some(try_host(entry, entry.facts.as_ref().ok()?)));
    Inspection { items, trial, ..Inspection::default() }
}

/// Judges one host. Nothing is installed there: the program comes with the first request.
fn try_host(host: &HostFacts, facts: &Facts) -> NodeTrial {
    let mut trial = NodeTrial::new(host.name.clone());
    if facts.program {
        trial.good(NodeAspect::Program, "the program of this controller is installed");
        trial.good(NodeAspect::Version, "the same file as here");
    } else {
        trial.could_not(NodeAspect::Program, "it is not there yet; the first request installs it");
        trial.could_not(NodeAspect::Version, "there is no program yet");
    }
    trial.good(NodeAspect::SharedDirectory, "not needed: results and logs come over SSH");
    match facts.root {
        Some(0) => trial.good(NodeAspect::Rights, "root"),
        _ => trial.bad(NodeAspect::Rights, "no root access", "see `rights` above"),
    }
    match facts.gpu_files {
        Some(count) => trial.devices(count),
        None => trial.could_not(NodeAspect::Devices, "the host did not list /dev"),
    }
    match host.clock_offset {
        Some(offset) if offset <= MAX_CLOCK_OFFSET.as_secs() => {
            trial.good(NodeAspect::Clock, format!("{offset} s from ours"));
        }
        Some(offset) => {
            trial.bad(
                NodeAspect::Clock,
                format!("{offset} s from ours"),
                "run chrony or systemd-timesyncd there and here",
            );
        }
        None => trial.could_not(NodeAspect::Clock, "the host did not report its time"),
    }
    trial
}

fn local_program(config: &SshConfig) -> Result<LocalProgram, String> {
    let path = program::find(config.doctor_node.as_deref())?;
    let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    // `e_machine` of the ELF header.
    let machine = match bytes.get(18..20) {
        Some([62, 0]) => Some("x86_64"),
        Some([183, 0]) => Some("aarch64"),
        _ => None,
    };
    Ok(LocalProgram { hash: hash(&bytes), machine })
}

/// Returns the programs that hosts need for the permitted repairs.
fn required_programs(config: &SshConfig, repairs: RequiredRepairs) -> Vec<&str> {
    let commands = [(repairs.reset, &config.reset), (repairs.reboot, &config.reboot)];
    let programs = commands.into_iter().filter(|(required, _)| *required).filter_map(|(_, command)| command.first());
    programs.map(String::as_str).filter(|program| facts::is_plain(program)).collect()
}

fn query_facts(connector: &SshConnector, host: &Host, script: &str, config: &SshConfig) -> HostFacts {
    let before = SystemClock.now();
    let result = connector
        .open_session(host, script, config.deadline.to_std())
        .and_then(|session| facts::read_facts(|| session.read_line().map_err(|why| why.to_string())));
    let offset = result.as_ref().ok().and_then(|facts| clock_offset(facts.clock?, before, SystemClock.now()));
    HostFacts { name: host.name.clone(), facts: result, clock_offset: offset }
}

/// Returns the least offset of a host's clock, which was read between these two times.
fn clock_offset(clock: i64, before: Timestamp, after: Timestamp) -> Option<u64> {
    let early = before.secs().saturating_sub(clock).max(0);
    let late = clock.saturating_sub(after.secs()).max(0);
    u64::try_from(early.max(late)).ok()
}

/// Why a host cannot be reached, grouped by remedy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionProblem {
    KeyUnknown,
    KeyChanged,
    LoginRefused,
    NameNotResolved,
    Unreachable,
}

impl ConnectionProblem {
    const ALL: [Self; 5] =
        [Self::KeyUnknown, Self::KeyChanged, Self::LoginRefused, Self::NameNotResolved, Self::Unreachable];

    fn classify(error: &str) -> Self {
        let any = |patterns: &[&str]| patterns.iter().any(|pattern| error.contains(pattern));
        match error {
            _ if any(&[KEY_CHANGED]) => Self::KeyChanged,
            _ if any(&[KEY_UNKNOWN]) => Self::KeyUnknown,
            _ if any(&["Permission denied", "Too many authentication failures"]) => Self::LoginRefused,
            _ if any(&["Could not resolve hostname"]) => Self::NameNotResolved,
            _ => Self::Unreachable,
        }
    }

    fn remedy(self, config: &SshConfig) -> String {
        match self {
            Self::KeyUnknown => match config.host_keys {
                HostKeys::Known => {
                    "compare the output of `ssh-keyscan HOST` with the host's own key and add it to known_hosts, \
                                    or set host_keys = \"learn\" for one start on a trusted network"
                }
                HostKeys::Learn => "give the user of the service write access to `known_hosts`",
            }
            .to_owned(),
            Self::KeyChanged => "the host was reinstalled, or another machine uses its address; if it was \
                                 reinstalled: ssh-keygen -R HOST, then learn its new key"
                .to_owned(),
            Self::LoginRefused => "make `ssh HOST true` work without a prompt for the user of the service: its key in \
                 authorized_keys there, `user=` and `key=` in the host file, no passphrase without an agent"
                .to_owned(),
            Self::NameNotResolved => "give it an `address=` in the host file, or a HostName in ssh_config".to_owned(),
            Self::Unreachable => format!(
                "check that it is up and that its sshd answers within {}; a jump host is `jump=` in the host file",
                config.connect
            ),
        }
    }
}

fn inspect_reachability(host_facts: &[HostFacts], config: &SshConfig) -> Vec<InspectionItem> {
    const WHAT: &str = "hosts";
    let reachable = host_facts.iter().filter(|entry| entry.facts.is_ok()).count();
    if reachable == host_facts.len() {
        let text = format!("{} reachable, host keys known, login accepted", host_count(reachable));
        return vec![InspectionItem::good(WHAT, text)];
    }
    let mut items = Vec::new();
    for problem in ConnectionProblem::ALL {
        let affected: Vec<(&NodeName, &String)> = host_facts
            .iter()
            .filter_map(|entry| Some((&entry.name, entry.facts.as_ref().err()?)))
            .filter(|(_, error)| ConnectionProblem::classify(error) == problem)
            .collect();
        if let Some((_, error)) = affected.first() {
            let names: Vec<NodeName> = affected.iter().map(|(name, _)| (*name).clone()).collect();
            let text = format!("{} of {}: {}: {error}", names.len(), host_facts.len(), format_nodes(&names));
            items.push(InspectionItem::bad(WHAT, text, problem.remedy(config)));
        }
    }
    items
}

fn host_count(count: usize) -> String {
    format!("{count} host{}", if count == 1 { "" } else { "s" })
}

/// Returns the names of the hosts for which the predicate holds.
fn names_where(reachable: &[(&NodeName, &Facts)], holds: impl Fn(&Facts) -> bool) -> Vec<NodeName> {
    reachable.iter().filter(|(_, facts)| holds(facts)).map(|(name, _)| (*name).clone()).collect()
}

fn root(reachable: &[(&NodeName, &Facts)], config: &SshConfig) -> InspectionItem {
    let others = names_where(reachable, |facts| facts.root != Some(0));
    if others.is_empty() {
        return InspectionItem::good("rights", format!("root access on {}", host_count(reachable.len())));
    }
    let remedy = if config.as_root.is_empty() {
        "log in as root, or set as_root = [\"sudo\", \"-n\"] under [backend.ssh]"
    } else {
        "allow `as_root` to run `doctor-node` without a password (NOPASSWD in sudoers)"
    };
    let text = format!(
        "no root access on {}: GPU processes of other users are not visible, and no GPU can be reset",
        format_nodes(&others)
    );
    InspectionItem::bad("rights", text, remedy)
}

fn program(reachable: &[(&NodeName, &Facts)], binary: &LocalProgram, config: &SshConfig) -> Vec<InspectionItem> {
    const WHAT: &str = "doctor-node";
    let mut items = Vec::new();
    let mut bad = |nodes: &[NodeName], text: &str, remedy: &str| {
        if !nodes.is_empty() {
            items.push(InspectionItem::bad(WHAT, format!("{}: {text}", format_nodes(nodes)), remedy));
        }
    };
    if let Some(machine) = binary.machine {
        let others = names_where(reachable, |facts| !facts.machine.is_empty() && facts.machine != machine);
        let remedy = "set `doctor_node` to a build for these hosts; `make portable` builds both architectures";
        bad(&others, &format!("the program is built for {machine}"), remedy);
    }
    let read_only = names_where(reachable, |facts| !facts.program && !facts.writable);
    bad(&read_only, "the folder is not writable", &format!("check `remote` ({})", config.remote));
    let uncheckable = names_where(reachable, |facts| !facts.program && !facts.sha256sum);
    bad(&uncheckable, "sha256sum is missing", "install coreutils");
    let full =
        names_where(reachable, |facts| !facts.program && facts.space.is_some_and(|space| space < MIN_FREE_SPACE));
    bad(&full, "less than 256 MiB free", "free space there, or set `remote` to another folder");
    if items.is_empty() {
        let installed = names_where(reachable, |facts| facts.program).len();
        let text =
            format!("{installed} of {} hosts have this version; it can be installed on the others", reachable.len());
        items.push(InspectionItem::good(WHAT, text));
    }
    items
}

fn clocks(host_facts: &[HostFacts]) -> InspectionItem {
    const WHAT: &str = "clocks";
    let remedy = "run chrony or systemd-timesyncd on the hosts and here";
    let off: Vec<&HostFacts> = host_facts
        .iter()
        .filter(|entry| entry.clock_offset.is_some_and(|off| off > MAX_CLOCK_OFFSET.as_secs()))
        .collect();
    let answered = host_facts.iter().filter(|entry| entry.facts.is_ok()).count();
    let with_clock = host_facts.iter().filter(|entry| entry.clock_offset.is_some()).count();
    match off.iter().max_by_key(|entry| entry.clock_offset) {
        Some(worst) => {
            let names: Vec<NodeName> = off.iter().map(|entry| entry.name.clone()).collect();
            let largest = worst.clock_offset.unwrap_or_default();
            let text = format!("wrong on {}; largest offset {largest} s, on {}", format_nodes(&names), worst.name);
            InspectionItem::bad(WHAT, text, remedy)
        }
        None if with_clock < answered => {
            InspectionItem::unknown(WHAT, format!("unknown on {}", host_count(answered - with_clock)))
                .with_remedy(remedy)
        }
        None => InspectionItem::good(
            WHAT,
            format!("{} within {} s of ours", host_count(with_clock), MAX_CLOCK_OFFSET.as_secs()),
        ),
    }
}

/// Informational: both ways are fine.
fn inspect_sessions(reachable: &[(&NodeName, &Facts)]) -> InspectionItem {
    let scopes = names_where(reachable, |facts| facts.systemd).len();
    let text = match reachable.len() - scopes {
        0 => "in systemd scopes, which outlive logins".to_owned(),
        others => {
            format!("in systemd scopes on {}, in separate sessions on {}", host_count(scopes), host_count(others))
        }
    };
    InspectionItem::good("runs", text)
}

fn command(reachable: &[(&NodeName, &Facts)], program: &str) -> InspectionItem {
    let without = names_where(reachable, |facts| facts.has.iter().all(|has| has != program));
    if without.is_empty() {
        return InspectionItem::good("repair", format!("{program} is on {}", host_count(reachable.len())));
    }
    let remedy = "install it there, set another command under [backend.ssh], or forbid it (`[allow]` in the policy)";
    InspectionItem::bad("repair", format!("no {program} on {}", format_nodes(&without)), remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_backend::inspection::InspectionStatus;

    fn host(name: &str, facts: Result<Facts, String>, offset: u64) -> HostFacts {
        HostFacts { name: NodeName::new(name).unwrap(), clock_offset: facts.as_ref().ok().map(|_| offset), facts }
    }

    fn good() -> Facts {
        let machine = "x86_64".to_owned();
        Facts {
            root: Some(0),
            machine,
            sha256sum: true,
            writable: true,
            space: Some(MIN_FREE_SPACE),
            ..Facts::default()
        }
    }

    #[test]
    fn connection_problems_are_grouped_with_their_hosts_and_a_remedy() {
        let config = SshConfig::default();
        let unreachable = |name: &str, error: &str| host(name, Err(error.to_owned()), 0);
        let host_facts = [
            host("n1", Ok(good()), 0),
            unreachable("n2", &format!("{KEY_UNKNOWN}: Host key verification failed.")),
            unreachable("n3", &format!("{KEY_CHANGED}: Host key verification failed.")),
            unreachable("n4", "root@n4: Permission denied (publickey)."),
            unreachable("n5", "ssh: Could not resolve hostname n5: Name or service not known"),
            unreachable("n6", "ssh: connect to host n6 port 22: Connection timed out"),
            unreachable("n7", "it does not answer"),
        ];
        let items = inspect_reachability(&host_facts, &config);
        let lines: Vec<(&str, &str)> =
            items.iter().map(|item| (item.text.as_str(), item.remedy.as_deref().unwrap_or_default())).collect();
        for ((text, remedy), (host, word)) in lines.iter().zip([
            ("n2", "ssh-keyscan"),
            ("n3", "ssh-keygen -R"),
            ("n4", "authorized_keys"),
            ("n5", "address="),
            ("n[6-7]", "its sshd answers"),
        ]) {
            assert!(text.contains(host) && remedy.contains(word), "{text}: {remedy}");
        }
        assert_eq!(items.len(), ConnectionProblem::ALL.len());
        assert_eq!(inspect_reachability(&host_facts[..1], &config)[0].status, InspectionStatus::Good);
    }

    #[test]
    fn hosts_that_fail_a_requirement_are_named() {
        let name = NodeName::new("n1").unwrap();
        let binary = LocalProgram { hash: String::new(), machine: Some("x86_64") };
        let config = SshConfig::default();
        let problems = |facts: Facts| {
            let reachable = [(&name, &facts)];
            let mut items = program(&reachable, &binary, &config);
            items.push(root(&reachable, &config));
            items.push(command(&reachable, "nvidia-smi"));
            items
                .into_iter()
                .filter(|item| item.status == InspectionStatus::Bad)
                .map(|item| item.text)
                .collect::<Vec<_>>()
                .join("|")
        };
        let complete = || Facts { has: vec!["nvidia-smi".to_owned()], ..good() };
        assert_eq!(problems(complete()), "");
        for (facts, word) in [
            (Facts { machine: "aarch64".to_owned(), ..complete() }, "built for x86_64"),
            (Facts { writable: false, ..complete() }, "not writable"),
            (Facts { sha256sum: false, ..complete() }, "sha256sum is missing"),
            (Facts { space: Some(1), ..complete() }, "less than 256 MiB"),
            (Facts { root: Some(1000), ..complete() }, "no root access on n1"),
            (Facts { root: None, ..complete() }, "no root access on n1"),
            (Facts { has: Vec::new(), ..complete() }, "no nvidia-smi"),
        ] {
            assert!(problems(facts).contains(word), "{word}");
        }
    }

    #[test]
    fn one_host_is_tried_in_every_aspect() {
        let statuses = |facts: Facts, offset: u64| {
            let tried = try_host(&host("n1", Ok(facts.clone()), offset), &facts);
            assert_eq!(tried.found.len(), NodeAspect::ALL.len());
            NodeAspect::ALL.map(|aspect| tried.found[&aspect].status)
        };
        let (yes, unknown, bad) = (InspectionStatus::Good, InspectionStatus::Unknown, InspectionStatus::Bad);
        let complete = Facts { program: true, gpu_files: Some(8), ..good() };
        assert_eq!(statuses(complete.clone(), 3), [yes; 6]);
        let poor = Facts { program: false, root: Some(1000), gpu_files: Some(0), ..complete };
        assert_eq!(statuses(poor, 31), [unknown, unknown, yes, bad, unknown, bad]);
    }

    #[test]
    fn clock_offset_excludes_the_round_trip_time() {
        let at = Timestamp::from_secs;
        assert_eq!(clock_offset(100, at(90), at(110)), Some(0));
        assert_eq!(clock_offset(100, at(150), at(160)), Some(50));
        assert_eq!(clock_offset(100, at(10), at(20)), Some(80));
        let skewed = [host("n1", Ok(good()), 31), host("n2", Ok(good()), 0)];
        assert!(clocks(&skewed).text.contains("31 s, on n1"));
        assert_eq!(clocks(&skewed[1..]).status, InspectionStatus::Good);
        let without_clock = HostFacts { clock_offset: None, ..host("n3", Ok(good()), 0) };
        assert_eq!(clocks(&[without_clock]).status, InspectionStatus::Unknown);
    }
}
