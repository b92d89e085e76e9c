//! `doctor fleet hosts`: writes and updates `hostfile` and `hostfile-ip` from what the hosts report.

use std::{
    collections::BTreeMap,
    net::{IpAddr, ToSocketAddrs as _},
    path::PathBuf,
    time::Duration,
};

use doctor_backend::ssh::{CommandStatus, Host, RemoteCommand, RootAccess};
use doctor_core::{hostlist, ids::NodeName};
use doctor_fleet::hostfiles::{BadHostFiles, Difference, HostFiles, HostLine};
use serde::Serialize;

use super::{Fleet, HostArgs, failure_text};
use crate::{
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, plural, sanitize},
};

/// Write or update `hostfile` and `hostfile-ip`: names and private addresses, one per line, in the same order.
///
/// Each host is queried for its name and for the address it was reached at. Hosts in the files keep their positions,
/// new ones are appended, and those no longer in the list are removed. A host that does not answer is reported and kept
/// with its last known address. The files hold nothing else, so that mpirun and shell loops can read them. Each file is
/// replaced atomically; while both are being replaced, `.hostfile.next` beside them holds the new content, and the next
/// run completes one that was interrupted. Files that do not match each other are rebuilt.
///
/// Exit codes: 0 the files are correct; 1 they differ or do not match each other (--check), or two hosts report the
/// same name or address; 3 some hosts did not answer.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Directory of the two files.
    #[arg(long, value_name = "DIR", default_value = ".")]
    out: PathBuf,
    /// Print what would change, and write nothing.
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    host_args: HostArgs,
}

/// Prints the host's name, the connection as its sshd sees it, and all its addresses.
const SCRIPT: &str = "hostname; echo \"$SSH_CONNECTION\"; hostname -I 2>/dev/null || true";
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_OUTPUT_BYTES: usize = 4096;

/// The result of querying one host.
#[derive(Debug, Clone, Serialize)]
struct QueriedHost {
    host: NodeName,
    #[serde(flatten)]
    line: HostLine,
    /// Why the host did not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    silent: Option<String>,
}

#[derive(Debug, Serialize)]
struct HostFilesView<'a> {
    hostfile: PathBuf,
    hostfile_ip: PathBuf,
    written: bool,
    hosts: &'a [QueriedHost],
    difference: &'a Difference,
    /// Why the two files do not match each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    unsound: Option<String>,
    remarks: &'a [String],
}

pub(super) fn run(context: &Context, args: &Args) -> Result<Exit> {
    let fleet = args.host_args.open(context)?;
    let files = HostFiles::in_folder(&args.out);
    check_settings_not_lost(&fleet, &files)?;
    let (old, inconsistency) = files.read().map_err(to_failure)?;
    let mut queried = fleet.for_each_host("answered", |host| query(&fleet, host, &old));
    drop_conflicting_addresses(&fleet, &mut queried);
    let remarks = resolve_duplicates(&mut queried);
    let mut lines: Vec<HostLine> = queried.iter().map(|queried| queried.line.clone()).collect();
    // Hosts that were not queried keep their lines.
    lines.extend(fleet.others.iter().filter_map(|host| find_line(&fleet, &old, host)));
    let difference = match args.check {
        true => files.compare(&lines).map(|(_, difference)| difference),
        false => files.write(&lines),
    };
    let difference = difference.map_err(to_failure)?;
    let view = HostFilesView {
        hostfile: files.names,
        hostfile_ip: files.addresses,
        written: !args.check,
        hosts: &queried,
        difference: &difference,
        unsound: inconsistency.map(|why| why.to_string()),
        remarks: &remarks,
    };
    context.out.show(&view, |page| text(page, &view))?;
    let any_silent = queried.iter().any(|queried| queried.silent.is_some());
    let differs = args.check && (!difference.is_empty() || inconsistency.is_some());
    Ok(match (differs || !remarks.is_empty(), any_silent) {
        (true, _) => Exit::ProblemsFound,
        (false, true) => Exit::Unreachable,
        (false, false) => Exit::Ok,
    })
}

fn to_failure(error: BadHostFiles) -> Failure {
    match error {
        BadHostFiles::Read { path, source } => Failure::File { operation: "reading", path, source },
        BadHostFiles::Write { path, source } => Failure::File { operation: "writing", path, source },
        BadHostFiles::Line { .. } => Failure::Usage(error.to_string()),
    }
}

/// Refuses to overwrite a host file that has connection settings, because the new file would not have them.
fn check_settings_not_lost(fleet: &Fleet, files: &HostFiles) -> Result<()> {
    let same = |path: &PathBuf| {
        let (one, other) = (path.canonicalize(), files.names.canonicalize());
        one.is_ok_and(|one| other.is_ok_and(|other| one == other))
    };
    let says_more = |host: &&Host| {
        let Host { address, user, port, jump, key, name: _ } = host;
        address.is_some() || user.is_some() || port.is_some() || jump.is_some() || key.is_some()
    };
    let configured = fleet.hosts.iter().chain(&fleet.others).find(says_more);
    match (fleet.config.hostfile.as_ref().filter(|path| same(path)), configured) {
        (Some(path), Some(host)) => Err(Failure::Usage(format!(
            "{} has connection settings for {}, which would be lost; choose another directory with --out",
            path.display(),
            host.name
        ))),
        _ => Ok(()),
    }
}

fn query(fleet: &Fleet, host: &Host, old: &[HostLine]) -> QueriedHost {
    let command = RemoteCommand {
        script: SCRIPT,
        input: b"",
        limit: QUERY_TIMEOUT,
        max_output: MAX_OUTPUT_BYTES,
        root: RootAccess::No,
    };
    let result = fleet.run(host, &command);
    let error = match &result.status {
        CommandStatus::Exited(0) => match parse_answer(&String::from_utf8_lossy(&result.stdout)) {
            Some((name, address)) => {
                let name = name.unwrap_or_else(|| host.name.clone());
                let address =
                    address.map_or_else(|| last_known(fleet, host, old).address, |address| address.to_string());
                return QueriedHost { host: host.name.clone(), line: HostLine { name, address }, silent: None };
            }
            None => "its answer could not be parsed".to_owned(),
        },
        how => failure_text(how).unwrap_or_default(),
    };
    QueriedHost { host: host.name.clone(), line: last_known(fleet, host, old), silent: Some(sanitize(&error)) }
}

/// Parses name and address from the answer. Loopback addresses are ignored, because other hosts cannot reach them.
fn parse_answer(text: &str) -> Option<(Option<NodeName>, Option<IpAddr>)> {
    let mut lines = text.lines();
    let name = NodeName::new(lines.next()?.trim()).ok().filter(|name| name.as_str() != "localhost");
    let connection = lines.next()?.split_ascii_whitespace().nth(2).and_then(|word| word.parse::<IpAddr>().ok());
    let loopback = ["127.0.0.1", "::1"].map(|text| text.parse::<IpAddr>().ok());
    let all = lines.next().unwrap_or_default().split_ascii_whitespace().filter_map(|word| word.parse::<IpAddr>().ok());
    let address = connection.filter(|address| !loopback.contains(&Some(*address))).or_else(|| all.clone().next());
    Some((name, address))
}

/// Finds a host's line in the files: by its listed name, else by its address, because the files hold the host's own
/// name.
fn find_line(fleet: &Fleet, old: &[HostLine], host: &Host) -> Option<HostLine> {
    let by = |fits: &dyn Fn(&HostLine) -> bool| old.iter().find(|line| fits(line)).cloned();
    by(&|line| line.name == host.name).or_else(|| {
        let (listed, address) = resolve_address(fleet, host);
        by(&|line| line.address == listed || address.is_some_and(|address| line.address == address.to_string()))
    })
}

/// Returns the host name that OpenSSH would use, and its address if it can be resolved without contacting the host.
fn resolve_address(fleet: &Fleet, host: &Host) -> (String, Option<IpAddr>) {
    let listed = fleet.client.address(host).unwrap_or_else(|| host.name.to_string());
    let resolved = || (listed.as_str(), 22).to_socket_addrs().ok()?.next().map(|address| address.ip());
    let address = listed.parse::<IpAddr>().ok().or_else(resolved);
    (listed, address)
}

/// Returns the last known line of a host that did not answer.
fn last_known(fleet: &Fleet, host: &Host, old: &[HostLine]) -> HostLine {
    let line = find_line(fleet, old, host);
    // A name in place of the address is not an address.
    match line.filter(|line| line.address != line.name.as_str()) {
        Some(line) => line,
        None => {
            let (listed, address) = resolve_address(fleet, host);
            let name = find_line(fleet, old, host).map_or_else(|| host.name.clone(), |line| line.name);
            HostLine { name, address: address.map_or(listed, |ip| ip.to_string()) }
        }
    }
}

/// Drops a silent host's recorded address if another host reports it: the two files did not match.
fn drop_conflicting_addresses(fleet: &Fleet, queried: &mut [QueriedHost]) {
    let taken: Vec<String> =
        queried.iter().filter(|entry| entry.silent.is_none()).map(|entry| entry.line.address.clone()).collect();
    for (entry, host) in queried.iter_mut().zip(&fleet.hosts) {
        if entry.silent.is_some() && taken.contains(&entry.line.address) {
            let (listed, address) = resolve_address(fleet, host);
            entry.line.address = address.map_or(listed, |ip| ip.to_string());
        }
    }
}

/// Hosts that report the same name keep their listed names, with a remark; a shared address gets a remark too.
fn resolve_duplicates(queried: &mut [QueriedHost]) -> Vec<String> {
    let mut remarks = Vec::new();
    let twice = |key: &dyn Fn(&QueriedHost) -> String, queried: &[QueriedHost]| {
        let mut all: BTreeMap<String, Vec<NodeName>> = BTreeMap::new();
        for entry in queried {
            all.entry(key(entry)).or_default().push(entry.host.clone());
        }
        all.retain(|_, hosts| hosts.len() > 1);
        all
    };
    for (name, hosts) in twice(&|entry| entry.line.name.to_string(), queried) {
        remarks
            .push(format!("{} all report the name {name}; they keep their names in the list", hostlist::fold(&hosts)));
        for entry in queried.iter_mut().filter(|entry| hosts.contains(&entry.host)) {
            entry.line.name = entry.host.clone();
        }
    }
    for (address, hosts) in twice(&|entry| entry.line.address.clone(), queried) {
        remarks.push(format!("{} have the same address {address}: are they one machine?", hostlist::fold(&hosts)));
    }
    remarks
}

fn text(page: &mut Page, view: &HostFilesView<'_>) {
    let Difference { added, removed, moved } = view.difference;
    for line in added {
        page.line(format!("+ {} {}", line.name, line.address));
    }
    for line in removed {
        page.line(format!("- {} {}", line.name, line.address));
    }
    for line in moved {
        page.line(format!("~ {} {} -> {}", line.name, line.from, line.to));
    }
    let silent: Vec<&QueriedHost> = view.hosts.iter().filter(|queried| queried.silent.is_some()).collect();
    for queried in &silent {
        let why = queried.silent.as_deref().unwrap_or_default();
        page.line(format!("! {} stays as {} {}: {why}", queried.host, queried.line.name, queried.line.address));
    }
    if let Some(why) = &view.unsound {
        let done = if view.written { "rebuilt" } else { "would be rebuilt" };
        page.line(format!("! {why}; {done}"));
    }
    for remark in view.remarks {
        page.line(format!("! {remark}"));
    }
    let state = match (view.difference.is_empty() && view.unsound.is_none(), view.written) {
        (true, _) => "are up to date",
        (false, true) => "were written",
        (false, false) => "would change",
    };
    let count = plural(view.hosts.len(), "host");
    page.line(format!(
        "{} and {} {state}: {count} queried, {} without an answer",
        view.hostfile.display(),
        view.hostfile_ip.display(),
        silent.len()
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_the_one_used_to_connect() {
        let read = |text: &str| {
            parse_answer(text)
                .map(|(name, address)| (name.map(|name| name.to_string()), address.map(|ip| ip.to_string())))
        };
        let some = |name: &str, address: &str| Some((Some(name.to_owned()), Some(address.to_owned())));
        assert_eq!(read("n1\n10.0.0.9 50000 10.0.0.4 22\n172.17.0.1 10.0.0.4 \n"), some("n1", "10.0.0.4"));
        assert_eq!(read("n1\n127.0.0.1 5 127.0.0.1 22\n10.0.0.4 172.17.0.1\n"), some("n1", "10.0.0.4"), "from itself");
        assert_eq!(read("n1\n\n\n"), Some((Some("n1".to_owned()), None)));
        assert_eq!(read("localhost\nx\n\n"), Some((None, None)));
        assert_eq!(read("\x1b[2J\n\n"), Some((None, None)), "a name is a name");
        assert_eq!(read(""), None);
    }

    #[test]
    fn duplicate_names_and_addresses_are_resolved() {
        let queried = |host: &str, name: &str, address: &str| QueriedHost {
            host: NodeName::new(host).unwrap(),
            line: HostLine { name: NodeName::new(name).unwrap(), address: address.to_owned() },
            silent: None,
        };
        let mut all =
            [queried("a", "image", "10.0.0.1"), queried("b", "image", "10.0.0.2"), queried("c", "c", "10.0.0.2")];
        let remarks = resolve_duplicates(&mut all);
        assert_eq!((all[0].line.name.as_str(), all[1].line.name.as_str()), ("a", "b"));
        assert!(
            remarks[0].contains("a,b all report the name image") && remarks[1].contains("b,c have the same address"),
            "{remarks:?}"
        );
    }
}
