//! `doctor agent`: enrolls, revokes and lists node agents.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    str::FromStr,
};

use doctor_checks::{credential::Credential, document::RunKey};
use doctor_core::{
    hostlist::{self, HostlistError},
    ids::NodeName,
    time::Timestamp,
};
use doctor_engine::agents::{self, AgentState, AgentView};
use doctor_store::records::AgentAuth;
use serde::Serialize;

use super::{
    confirmation::{Change, ChangeArgs},
    operator_commands::change_time,
};
use crate::{
    config::AgentEndpointConfig,
    context::Context,
    exit::Exit,
    failure::{Failure, Result},
    output::{Page, Table, ago, cell, format_time, plural},
};

/// Enroll, revoke and list node agents.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: AgentCommand,
}

#[derive(Debug, clap::Subcommand)]
enum AgentCommand {
    Enroll(EnrollArgs),
    Revoke(RevokeArgs),
    List(ListArgs),
}

/// Create a credential for each node's agent. It replaces the node's previous credential, which becomes invalid.
///
/// A credential is a secret: install it on its node as /etc/cluster-doctor/agent.key, readable only by root.
#[derive(Debug, clap::Args)]
struct EnrollArgs {
    /// Nodes, by their names in the cluster: node[01-64].
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<NodeList>,
    /// Write DIR/NODE.key for each node. Default: standard output.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// URL that agents report to, such as http://controller:7443. Default: from [agents] in the configuration.
    #[arg(long, value_name = "URL")]
    controller: Option<String>,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT", default_value = "enrolled on the command line")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

/// Revoke nodes' credentials. Later reports of their agents are rejected.
#[derive(Debug, clap::Args)]
struct RevokeArgs {
    /// Nodes: node[01-64].
    #[arg(value_name = "NODE", required = true)]
    nodes: Vec<NodeList>,
    /// Reason, recorded in the audit trail.
    #[arg(long, value_name = "TEXT")]
    why: String,
    #[command(flatten)]
    change_args: ChangeArgs,
}

/// List agents with the time of their last report, their version and their clock skew.
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Nodes: node[01-64]. Default: all.
    #[arg(value_name = "NODE")]
    nodes: Vec<NodeList>,
}

/// Node names, which need not be known to the store yet.
#[derive(Debug, Clone)]
struct NodeList(Vec<NodeName>);

impl FromStr for NodeList {
    type Err = HostlistError;
    fn from_str(text: &str) -> std::result::Result<Self, HostlistError> {
        hostlist::parse(text).map(Self)
    }
}

fn node_names(hosts: &[NodeList]) -> Vec<NodeName> {
    let mut names: Vec<NodeName> = hosts.iter().flat_map(|hosts| hosts.0.iter().cloned()).collect();
    names.sort();
    names.dedup();
    names
}

impl Args {
    /// Whether this only reads.
    pub(crate) const fn reads(&self) -> bool {
        matches!(self.command, AgentCommand::List(_))
    }
}

pub(crate) fn run(context: &Context, args: &Args) -> Result<Exit> {
    match &args.command {
        AgentCommand::Enroll(args) => enroll(context, args),
        AgentCommand::Revoke(args) => revoke(context, args),
        AgentCommand::List(args) => list(context, args),
    }
}

fn enroll(context: &Context, args: &EnrollArgs) -> Result<Exit> {
    let controller = controller_url(args.controller.as_deref(), &context.config()?.agents)?;
    let store = context.open_or_create_store()?;
    let (by, at, nodes) = (args.change_args.operator_name(), change_time(context, &store)?, node_names(&args.nodes));
    let known: Vec<NodeName> =
        store.agents()?.into_iter().filter(|agent| agent.revoked.is_none()).map(|agent| agent.node).collect();
    let outcome =
        |node: &NodeName| if known.contains(node) { "gets a new key; the old one is revoked" } else { "is enrolled" };
    let (count, names) = (plural(nodes.len(), "agent"), hostlist::fold(&nodes));
    let change = Change {
        plan: format!("Would enroll {count} ({names}) to report to {controller}."),
        changes: nodes.iter().map(|node| format!("{node}: {}", outcome(node))).collect(),
        done: format!("Enrolled {count} to report to {controller}."),
        next: match &args.out {
            Some(out) => format!("install {}/NODE.key on each node as /etc/cluster-doctor/agent.key", out.display()),
            None => "install each on its node as /etc/cluster-doctor/agent.key, mode 600".to_owned(),
        },
        why: args.why.clone(),
        by: by.clone(),
        at,
    };
    args.change_args.confirm(&change)?;
    let mut agents_enrolled = Vec::with_capacity(nodes.len());
    for node in nodes {
        let credential = Credential { node, key: new_key()?, controller: Some(controller.clone()) };
        let file = args.out.as_deref().map(|out| write(out, &credential)).transpose()?;
        let enrolled = store.enroll_agent(&credential.node, &credential.key, &by, &args.why, at);
        if let (Err(_), Some(file)) = (&enrolled, &file) {
            // Do not leave a key on disk that the store does not know.
            let _removed = fs::remove_file(file);
        }
        enrolled?;
        agents_enrolled.push(EnrolledAgent { credential, file });
    }
    print_enrolled(context, args, &change, &agents_enrolled)
}

struct EnrolledAgent {
    credential: Credential,
    file: Option<PathBuf>,
}

/// The JSON output of `doctor agent enroll`: `key` is set if there is no `file`.
#[derive(Debug, Serialize)]
struct EnrolledAgentView {
    node: NodeName,
    controller: Option<String>,
    /// The file that holds the credential.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

fn print_enrolled(context: &Context, args: &EnrollArgs, change: &Change, enrolled: &[EnrolledAgent]) -> Result<Exit> {
    let views: Vec<EnrolledAgentView> = enrolled
        .iter()
        .map(|enrolled| EnrolledAgentView {
            node: enrolled.credential.node.clone(),
            controller: enrolled.credential.controller.clone(),
            file: enrolled.file.clone(),
            key: enrolled.file.is_none().then(|| enrolled.credential.key.to_hex()),
        })
        .collect();
    context.out.show(&views, |page| {
        if args.out.is_none() {
            for enrolled in enrolled {
                page.line(enrolled.credential.text().trim_end());
                page.blank();
            }
        } else {
            page.line(&change.done);
            page.line(format!("Next: {}", change.next));
        }
    })?;
    Ok(Exit::Ok)
}

/// Returns the URL that agents report to.
fn controller_url(requested: Option<&str>, agents: &AgentEndpointConfig) -> Result<String> {
    let usage = |text: String| Err(Failure::Usage(text));
    let url = match (requested, &agents.url, agents.listen) {
        (Some(url), _, _) => url.to_owned(),
        (None, Some(url), _) => url.clone(),
        (None, None, Some(listen)) if !listen.ip().is_unspecified() => format!("http://{listen}"),
        _ => {
            return usage(
                "the URL for agents is not known: set `url` under [agents] in the configuration, or pass --controller \
                 http://HOST:PORT"
                    .to_owned(),
            );
        }
    };
    match url.strip_prefix("http://") {
        Some(rest) if !rest.is_empty() => Ok(url),
        _ => usage(format!("`{url}` is not a URL such as http://controller:7443 (https is not supported)")),
    }
}

fn new_key() -> Result<RunKey> {
    let mut key = [0; 32];
    getrandom::fill(&mut key).map_err(|error| Failure::Other(format!("reading random bytes: {error}")))?;
    Ok(RunKey::new(key))
}

/// Writes a credential atomically, with mode 0600 from its creation.
fn write(out: &Path, credential: &Credential) -> Result<PathBuf> {
    let path = out.join(format!("{}.key", credential.node));
    let temporary = out.join(format!(".{}.key.tmp", credential.node));
    let done = fs::create_dir_all(out).and_then(|()| {
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(credential.text().as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, &path)
    });
    done.map_err(|source| Failure::File { operation: "writing", path: path.clone(), source })?;
    Ok(path)
}

fn revoke(context: &Context, args: &RevokeArgs) -> Result<Exit> {
    let store = context.store_for_changes()?;
    let (by, at, nodes) = (args.change_args.operator_name(), change_time(context, &store)?, node_names(&args.nodes));
    let known: Vec<NodeName> =
        store.agents()?.into_iter().filter(|agent| agent.revoked.is_none()).map(|agent| agent.node).collect();
    if let Some(name) = nodes.iter().find(|node| !known.contains(node)) {
        let known = if known.is_empty() { "none".to_owned() } else { hostlist::fold(&known) };
        return Err(Failure::Unknown { what: "enrolled agent", name: name.to_string(), known });
    }
    let (count, names) = (plural(nodes.len(), "agent"), hostlist::fold(&nodes));
    let change = Change {
        plan: format!("Would reject further reports of {count} ({names})."),
        changes: nodes.iter().map(|node| format!("{node}: its credential is revoked")).collect(),
        done: format!("Revoked {count}."),
        next: format!("`doctor agent enroll {}` enrolls it again", nodes[0]),
        why: args.why.clone(),
        by: by.clone(),
        at,
    };
    args.change_args.apply(context, &change, || {
        for node in &nodes {
            store.revoke_agent(node, &by, &args.why, at)?;
        }
        Ok(())
    })
}

pub(super) fn list(context: &Context, args: &ListArgs) -> Result<Exit> {
    let store = context.store()?;
    let facts = context.facts(&store)?;
    let mut agents = agents::views(&store, &facts)?;
    let names = node_names(&args.nodes);
    if let Some(name) = names.iter().find(|name| agents.iter().all(|agent| agent.node != **name)) {
        let all: Vec<NodeName> = agents.into_iter().map(|agent| agent.node).collect();
        let known = if all.is_empty() { "none".to_owned() } else { hostlist::fold(&all) };
        return Err(Failure::Unknown { what: "agent", name: name.to_string(), known });
    }
    agents.retain(|agent| names.is_empty() || names.contains(&agent.node));
    context.out.show(&agents, |page| table(page, &agents, facts.now))?;
    Ok(Exit::Ok)
}

/// Returns the remark about an agent for the list of nodes, if there is one.
pub(crate) fn remark(agent: &AgentView) -> Option<String> {
    match (agent.state, agent.last_contact) {
        (AgentState::Silent, Some(last_contact)) => Some(format!("no report since {} UTC", format_time(last_contact))),
        (AgentState::NeverReported, _) => Some("agent never reported".to_owned()),
        (AgentState::Reports, _) if !agent.skew.is_empty() => Some(format!("agent: {}", agent.skew.join(", "))),
        _ => None,
    }
}

/// Describes an agent in one line.
pub(crate) fn describe(agent: &AgentView, now: Timestamp) -> String {
    let mut parts = vec![match (agent.state, agent.last_contact, agent.revoked) {
        (AgentState::Revoked, _, Some(at)) => format!("revoked {}", ago(now, at)),
        (AgentState::Silent, Some(last_contact), _) => {
            format!("no report since {} UTC ({})", format_time(last_contact), ago(now, last_contact))
        }
        (_, Some(last_contact), _) => format!("last report {}", ago(now, last_contact)),
        _ => format!("never reported; enrolled {}", ago(now, agent.enrolled)),
    }];
    parts.extend(agent.program.as_ref().map(|program| format!("doctor-node {program}")));
    parts.extend(agent.skew.iter().cloned());
    parts.join("; ")
}

fn table(page: &mut Page, agents: &[AgentView], now: Timestamp) {
    if agents.is_empty() {
        page.line("No agents: `doctor agent enroll NODE` creates a credential for one.");
        return;
    }
    let mut table = Table::new(["NODE", "STATE", "BY", "LAST REPORT", "PROGRAM", "SCHEMA", "POLICY", "DIFFERS"]);
    for agent in agents {
        let state = match agent.state {
            AgentState::Reports => cell("reporting").good(),
            AgentState::Silent => cell("silent").warn(),
            AgentState::NeverReported => cell("never reported").warn(),
            AgentState::Revoked => cell("revoked").faint(),
        };
        let or_dash = |text: Option<String>| cell(text.unwrap_or_else(|| "-".to_owned()));
        table.row([
            cell(agent.node.as_str()),
            state,
            cell(match agent.authenticated_by {
                AgentAuth::Key => "key",
                AgentAuth::Token => "token",
            }),
            or_dash(agent.last_contact.map(|last_contact| ago(now, last_contact))),
            or_dash(agent.program.clone()),
            or_dash(agent.schema.clone()),
            or_dash(agent.policy.map(|policy| policy.to_string())),
            cell(agent.skew.join(", ")),
        ]);
    }
    page.table(&table);
    let silent_count = agents.iter().filter(|agent| agent.state == AgentState::Silent).count();
    page.line(format!("{}; {silent_count} silent", plural(agents.len(), "agent")));
}

#[cfg(test)]
mod tests {
    use super::*;
    use doctor_checks::document::{Schema, Versions};
    use doctor_core::time::Span;
    use doctor_store::records::{AgentContact, AgentRow};

    const NOW: Timestamp = Timestamp::from_secs(1_800_000_000);

    fn agent(heard_ago: Option<Span>, policy: u32) -> AgentView {
        let contact = |ago: Span| AgentContact {
            at: NOW.minus(ago),
            number: 4,
            sent: NOW.minus(ago).minus(Span::minutes(2)),
            versions: Versions {
                program: env!("CARGO_PKG_VERSION").to_owned(),
                schema: Schema::CURRENT,
                policy,
                queued: 0,
            },
        };
        let row = AgentRow {
            node: NodeName::new("n1").unwrap(),
            auth: AgentAuth::Key,
            created: NOW.minus(Span::days(2)),
            revoked: None,
            last_contact: heard_ago.map(contact),
        };
        AgentView::from_row(row, NOW, Span::minutes(15), 1)
    }

    #[test]
    fn a_silent_agent_is_never_shown_as_healthy() {
        assert_eq!(agent(Some(Span::minutes(14)), 1).state, AgentState::Reports);
        let silent = agent(Some(Span::minutes(16)), 1);
        assert_eq!(silent.state, AgentState::Silent);
        assert!(remark(&silent).unwrap().starts_with("no report since "), "{silent:?}");
        assert_eq!(remark(&agent(None, 1)).as_deref(), Some("agent never reported"));
    }

    #[test]
    fn differences_from_the_controller_are_shown() {
        let text = describe(&agent(Some(Span::minutes(1)), 7), NOW);
        assert!(text.contains("policy 7, controller 1") && text.contains("clock 2m behind"), "{text}");
    }

    #[test]
    fn agents_get_a_reachable_controller_url() {
        let agents = |listen: Option<&str>, url: Option<&str>| AgentEndpointConfig {
            listen: listen.map(|listen| listen.parse().unwrap()),
            url: url.map(str::to_owned),
            results: None,
        };
        let url_for = |requested: Option<&str>, agents: &AgentEndpointConfig| controller_url(requested, agents).ok();
        assert_eq!(url_for(None, &agents(Some("10.0.0.1:7443"), None)).as_deref(), Some("http://10.0.0.1:7443"));
        assert_eq!(url_for(None, &agents(Some("0.0.0.0:7443"), None)), None, "an unspecified address is not reachable");
        assert_eq!(url_for(None, &agents(Some("0.0.0.0:1"), Some("http://ctl:1"))).as_deref(), Some("http://ctl:1"));
        assert_eq!(url_for(Some("http://x:1"), &agents(None, None)).as_deref(), Some("http://x:1"));
        assert_eq!(url_for(Some("https://x:1"), &agents(None, None)), None);
    }
}
