//! Creates what is missing in rounds: inspect, plan, do what is possible now, until nothing is missing.
//!
//! Rounds are few because most steps depend only on the order of the others. Completed steps survive a kill: the next
//! run inspects the state and continues. A failed step ends the run with its name; nothing is rolled back, because the
//! next attempt can use what exists.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{
    Az, AzCommand, AzureError, Cluster, Mode,
    inventory::{self, Inventory, ResourceKind},
    nodes::{self, Hosts, ScriptOutput},
    plan::{
        self, AzureStepKind, AzureStepState, DIGEST_TAG, Files, NAT_RULE, Names, OUTBOUND_RULE, Plan, SSH_RULE, Step,
    },
};

/// The interval at which machines that are not ready are inspected again.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Resources, scale, machines, access: four rounds do something, and each may have to wait once more.
const MAX_ROUNDS: usize = 12;

/// Progress, for display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress<'a> {
    Begun { step: &'a Step, number: usize, of: usize },
    Done { step: &'a Step, took: Duration },
    Waiting { why: &'a str },
}

/// How the complete cluster is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provisioned {
    /// The number of steps done; 0: everything existed.
    pub done: usize,
    pub head: String,
    /// The head node's public address and port. `None`: reachable only from inside.
    pub head_at: Option<(String, u32)>,
    pub balancer: Option<String>,
    pub nodes: usize,
    /// Set only if this run exchanged keys.
    pub hosts: Option<Hosts>,
}

/// Returns the call that lists resource groups.
fn group_call(cluster: &Cluster) -> AzCommand {
    // All groups, because Azure's names are case-insensitive and its queries are not.
    plan::with_subscription(AzCommand::new("group list"), cluster)
}

fn in_group(cluster: &Cluster, call: AzCommand) -> AzCommand {
    plan::with_subscription(call.with("--resource-group", &cluster.resource_group), cluster)
}

fn nics_call(cluster: &Cluster) -> AzCommand {
    match cluster.mode {
        Mode::Flexible => in_group(cluster, AzCommand::new("network nic list")),
        Mode::Uniform => in_group(cluster, AzCommand::new("vmss nic list").with("--vmss-name", &cluster.scale_set)),
    }
}

/// Inspects the state in Azure. Single resources are queried only if they exist.
///
/// # Errors If Azure cannot be queried, or its answer cannot be parsed, which never counts as "nothing exists".
pub fn read_inventory(cluster: &Cluster, az: &Az) -> Result<Inventory, AzureError> {
    let names = Names::of(cluster);
    let limit = cluster.limits.call.to_std();
    let query = |step: &str, call: &AzCommand| az.run(step, call, limit);
    let unread = |step: &'static str| move |why: String| AzureError::Unreadable { step: step.to_owned(), why };
    let step = "reading the resource group";
    let group = inventory::group(query(step, &group_call(cluster))?, cluster).map_err(unread(step))?;
    if group.is_none() {
        return Ok(Inventory::default());
    }
    let step = "listing the resource group";
    let listed = query(step, &in_group(cluster, AzCommand::new("resource list")))?;
    let mut seen = Inventory {
        group,
        resources: inventory::resources(listed, cluster).map_err(unread(step))?,
        ..Inventory::default()
    };
    let show = |command: &str, name: &str| in_group(cluster, AzCommand::new(command).with("--name", name));
    if seen.find(&ResourceKind::SecurityGroup, &names.security_group).is_some() {
        let step = "reading the security group";
        let response = query(step, &show("network nsg show", &names.security_group))?;
        seen.ssh_from = inventory::ssh_from(&response, SSH_RULE).map_err(unread(step))?;
    }
    if seen.find(&ResourceKind::Balancer, &names.balancer).is_some() {
        let step = "reading the load balancer";
        let response = query(step, &show("network lb show", &names.balancer))?;
        seen.balancer = inventory::balancer(&response, NAT_RULE, OUTBOUND_RULE).map_err(unread(step))?;
    }
    if seen.find(&ResourceKind::ScaleSet, &cluster.scale_set).is_some() {
        let step = "reading the scale set";
        let response = query(step, &show("vmss show", &cluster.scale_set))?;
        seen.scale_set = Some(inventory::scale_set(&response, DIGEST_TAG).map_err(unread(step))?);
        let step = "reading the machines";
        let (machines, nics) = (query(step, &plan::machines_call(cluster))?, query(step, &nics_call(cluster))?);
        seen.nodes = inventory::nodes(machines, nics, cluster).map_err(unread(step))?;
    }
    Ok(seen)
}

/// Creates the missing parts of the cluster. `cloud_init` is the file that machines get on first boot; files for `az`
/// are written into `files`. With `again`, keys are exchanged even if that was recorded as done.
///
/// # Errors With the failed step and the error of `az`.
pub fn provision(
    cluster: &Cluster,
    az: &Az,
    files: &Files,
    cloud_init: &str,
    again: bool,
    on_progress: &(dyn Fn(&Progress<'_>) + Sync),
) -> Result<Provisioned, AzureError> {
    write_file(&files.folder, Files::CLOUD_INIT, cloud_init)?;
    write_file(&files.folder, Files::HEAD_KEY, &nodes::head_key_script(cluster))?;
    let mut work = Provisioner { cluster, az, files, progress: on_progress, head_key: None, hosts: None, done: 0 };
    let until = Instant::now() + cluster.limits.create.to_std();
    let mut rounds = 0;
    loop {
        let mut seen = read_inventory(cluster, az)?;
        if again && work.hosts.is_none() {
            seen.reset_digest();
        }
        let plan = plan::plan(cluster, &seen, files)?;
        if plan.is_done() {
            return work.finished(&seen);
        }
        rounds += 1;
        let acted = work.round(&plan, &seen)?;
        let waiting = plan.steps.iter().find(|step| step.part == AzureStepKind::Machines && step.need.is_open());
        match waiting {
            Some(step) if !acted && Instant::now() < until => {
                rounds -= 1;
                (work.progress)(&Progress::Waiting { why: &step.need.to_string() });
                std::thread::sleep(POLL_INTERVAL);
            }
            _ if rounds < MAX_ROUNDS && acted => {}
            _ => return Err(AzureError::NotConverged { rounds, left: open_steps(&plan) }),
        }
    }
}

fn open_steps(plan: &Plan) -> String {
    let open = plan.steps.iter().filter(|step| step.need != AzureStepState::Present).map(|step| step.part.label());
    open.collect::<Vec<_>>().join(", ")
}

/// Writes a file for `az`, with mode 0600 although its content is not secret.
fn write_file(folder: &Path, name: &str, text: &str) -> Result<PathBuf, AzureError> {
    let path = folder.join(name);
    let failed = |source| AzureError::Write { path: path.clone(), source };
    fs::create_dir_all(folder).map_err(failed)?;
    fs::write(&path, text).map_err(failed)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(path)
}

struct Provisioner<'a> {
    cluster: &'a Cluster,
    az: &'a Az,
    files: &'a Files,
    progress: &'a (dyn Fn(&Progress<'_>) + Sync),
    head_key: Option<String>,
    hosts: Option<Hosts>,
    done: usize,
}

impl Provisioner<'_> {
    /// Does what is possible now. Returns whether anything was done.
    fn round(&mut self, plan: &Plan, seen: &Inventory) -> Result<bool, AzureError> {
        // The caller waits for machines by inspecting again; all later steps wait for them.
        let now = plan.steps.iter().take_while(|step| {
            step.need != AzureStepState::AfterMachines && !(step.part == AzureStepKind::Machines && step.need.is_open())
        });
        let open: Vec<&Step> = now.filter(|step| step.need.is_open()).collect();
        for (index, step) in open.iter().enumerate() {
            (self.progress)(&Progress::Begun { step, number: index + 1, of: open.len() });
            let began = Instant::now();
            self.run_step(step, seen)?;
            self.done += 1;
            (self.progress)(&Progress::Done { step, took: began.elapsed() });
        }
        Ok(!open.is_empty())
    }

    fn run_step(&mut self, step: &Step, seen: &Inventory) -> Result<(), AzureError> {
        match step.part {
            AzureStepKind::HeadKey => {
                let output = self.script(step, &step.calls[0], &step.name)?;
                self.head_key =
                    Some(output.key("key").ok_or_else(|| missing_output(step, &step.name, "its public key"))?);
                Ok(())
            }
            AzureStepKind::Trust => self.trust(step, seen),
            AzureStepKind::HeadFiles => {
                let hosts = self.hosts.as_ref().ok_or_else(|| missing_output(step, &step.name, "the hosts' keys"))?;
                write_file(&self.files.folder, Files::HEAD_FILES, &nodes::head_files_script(self.cluster, hosts))?;
                let unreached = self.script(step, &step.calls[0], &step.name)?.unreachable();
                if unreached.is_empty() { Ok(()) } else { Err(AzureError::Unreachable { nodes: unreached }) }
            }
            _ => step.calls.iter().try_for_each(|call| self.call(step, call).map(drop)),
        }
    }

    fn call(&self, step: &Step, call: &AzCommand) -> Result<Value, AzureError> {
        let limits = &self.cluster.limits;
        let limit = if step.part == AzureStepKind::ScaleSet { limits.create } else { limits.call };
        self.az.run(&format!("{} {}", step.part.label(), step.name), call, limit.to_std())
    }

    fn script(&self, step: &Step, call: &AzCommand, node: &str) -> Result<ScriptOutput, AzureError> {
        let output = ScriptOutput::parse(&self.call(step, call)?);
        match output.complete {
            true => Ok(output),
            false => Err(AzureError::Script {
                step: step.part.label().to_owned(),
                node: node.to_owned(),
                said: output.last_line,
            }),
        }
    }

    /// Authorises the head node's key on every node and reads their host keys; in parallel, because each call takes
    /// half a minute.
    fn trust(&mut self, step: &Step, seen: &Inventory) -> Result<(), AzureError> {
        let key = self.head_key.as_ref().ok_or_else(|| missing_output(step, "the head node", "its public key"))?;
        write_file(&self.files.folder, Files::TRUST, &nodes::trust_script(self.cluster, key))?;
        let next = Mutex::new(seen.nodes.iter().zip(&step.calls));
        let keys = Mutex::new(Vec::new());
        let work = || {
            while let Some((node, call)) = next.lock().ok().and_then(|mut next| next.next()) {
                let output = self.script(step, call, &node.host);
                let key = output.and_then(|output| {
                    output.key("host").ok_or_else(|| missing_output(step, &node.host, "its host key"))
                });
                let Ok(mut keys) = keys.lock() else { return };
                keys.push(key.map(|key| nodes::known(node, key)));
            }
        };
        let at_once = self.cluster.limits.max_concurrent.min(seen.nodes.len());
        std::thread::scope(|scope| (0..at_once).for_each(|_| drop(scope.spawn(work))));
        let keys = keys.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut all = keys.into_iter().collect::<Result<Vec<_>, _>>()?;
        all.sort_by_key(|known| known.address);
        let head = plan::head_node(seen, &Names::of(self.cluster)).map(|head| head.host.clone());
        self.hosts =
            Some(Hosts { all, head: head.ok_or_else(|| missing_output(step, "the scale set", "any machine"))? });
        Ok(())
    }

    fn finished(&self, seen: &Inventory) -> Result<Provisioned, AzureError> {
        let (cluster, names) = (self.cluster, Names::of(self.cluster));
        let limit = cluster.limits.call.to_std();
        let address = |name: &str| -> Result<Option<String>, AzureError> {
            let call = in_group(cluster, AzCommand::new("network public-ip show").with("--name", name));
            let response = self.az.run("reading the address", &call, limit)?;
            Ok(response["ipAddress"].as_str().map(str::to_owned))
        };
        let balancer = address(&names.balancer_address)?;
        let head_at = match cluster.head_address {
            true => address(&names.head_address)?.map(|at| (at, 22)),
            false => self.through_balancer(seen)?,
        };
        let head = plan::head_node(seen, &names).map(|head| head.host.clone()).unwrap_or_default();
        Ok(Provisioned { done: self.done, head, head_at, balancer, nodes: seen.nodes.len(), hosts: self.hosts.clone() })
    }

    /// Returns the head node's address and port at the load balancer; Azure assigns the ports of a Uniform scale set.
    fn through_balancer(&self, seen: &Inventory) -> Result<Option<(String, u32)>, AzureError> {
        let cluster = self.cluster;
        if cluster.mode != Mode::Uniform {
            return Ok(None);
        }
        let call =
            in_group(cluster, AzCommand::new("vmss list-instance-connection-info").with("--name", &cluster.scale_set));
        let response = self.az.run("reading the ports of the load balancer", &call, cluster.limits.call.to_std());
        // A new scale set may not have ports yet; the cluster is complete nevertheless.
        let response = match response {
            Err(AzureError::CommandFailed { .. }) => return Ok(None),
            other => other?,
        };
        let head = plan::head_node(seen, &Names::of(cluster)).map(|head| head.machine.clone()).unwrap_or_default();
        Ok(inventory::connection(&response, &head))
    }
}

fn missing_output(step: &Step, node: &str, what: &str) -> AzureError {
    let text = format!("its output does not contain {what}");
    AzureError::Script { step: step.part.label().to_owned(), node: node.to_owned(), said: text }
}
