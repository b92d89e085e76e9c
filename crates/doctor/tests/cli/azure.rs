//! `doctor fleet provision` and `destroy` with the real `az`: its own parser accepts every call, and a server that
//! imitates Azure's resource manager answers them. This tests the calls and what happens on the machines, which run
//! real sshd; it proves nothing about Azure itself.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use doctor_testbed::fake_azure::{self, FakeAzure};
use serde_json::{Value, json};

use crate::workdir::{CommandOutput, Workdir};

/// The file format of the scripts that this command replaces.
const ENV_FILE: &str = "RESOURCE_GROUP='vmss-rg'\nVMSS_NAME='vmss'\nLOCATION='westus3'\nSKU='Standard_ND96isr_H200_v5'\n\
    IMAGE='microsoft-dsvm:ubuntu-hpc:2204:latest'\nINSTANCE_COUNT='2'\nVM_NAME_PREFIX='vm-'\nADMIN='azureuser'\nORCH_MODE='Flexible'\n\
    SSH_PATH='~/.ssh/id_rsa.pub'\nTAGS=(\n    example-tag-1=value1,\n    example-tag-2=value2,\n)\n";

/// Passes the calls to the CLI's entry point in one process, because it takes seconds to start. Prints the exit code
/// and output of each.
const PARSE: &str = r#"
import json, os, sys, tempfile
from azure.cli.core import get_default_cli
ended = []
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile() as said:
        before = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            code = get_default_cli().invoke(words)
        except SystemExit as end:
            code = end.code
        finally:
            os.dup2(before, 2)
        said.seek(0)
        ended.append([code, said.read().decode()])
json.dump(ended, sys.stdout)
"#;

fn key(workdir: &Workdir) {
    let status =
        Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(workdir.path("id")).status();
    assert!(status.unwrap().success());
}

/// A file with every setting.
fn full(mode: &str) -> String {
    format!(
        "resource_group = \"rg\"\nsubscription = \"a0a0a0a0-0000-0000-0000-000000000000\"\nlocation = \"westus3\"\nscale_set = \"gpu\"\nmode = \"{mode}\"\n\
         sku = \"Standard_ND96isr_H100_v5\"\nimage = \"/subscriptions/s/resourceGroups/r/providers/Microsoft.Compute/images/i\"\ncount = 100\n\
         admin = \"ann\"\nssh_key = \"id.pub\"\nplacement_group = \"near\"\nspot = {{ max_price = 1.5 }}\nsecurity = \"trusted-launch\"\n\
         [network]\nssh_from = [\"203.0.113.0/24\", \"198.51.100.7\"]\nsubnet = \"/subscriptions/s/resourceGroups/r/providers/Microsoft.Network/virtualNetworks/v/subnets/n\"\n\
         [tags]\ncost-centre = \"a:b/c@d.e+f-g_h\"\n"
    )
}

#[test]
fn every_command_of_the_plan_is_accepted_by_the_real_az_parser() {
    let programs = match fake_azure::programs() {
        Ok(programs) => programs,
        Err(why) => return why.skip_tests("az's own parser"),
    };
    let workdir = Workdir::new();
    key(&workdir);
    workdir.write("cluster.env", ENV_FILE);
    workdir.write("flexible.toml", &full("flexible"));
    workdir.write("uniform.toml", &full("uniform"));
    let mut calls: Vec<Value> = Vec::new();
    for file in ["cluster.env", "flexible.toml", "uniform.toml"] {
        // Files that az reads must exist; the other scripts are generated from the answers of earlier calls.
        let args = ["fleet", "provision", file, "--plan", "--fresh", "--files", "files"];
        let plan = workdir.json(&args);
        let steps = plan["steps"].as_array().unwrap();
        assert!(steps.len() >= 13, "{plan:#}");
        calls.extend(steps.iter().flat_map(|step| step["calls"].as_array().unwrap().clone()));
    }
    fs::create_dir(workdir.path("files")).unwrap();
    for file in ["cloud-init.yaml", "head-key.sh", "trust.sh", "head-files.sh"] {
        workdir.write(&format!("files/{file}"), "#!/bin/sh\n");
    }
    calls.sort_by_key(Value::to_string);
    calls.dedup();
    let wrong =
        [json!(["vmss", "create", "--name", "x"]), json!(["network", "lb", "create", "-g", "r", "--naem", "x"])];
    let count = calls.len();
    calls.extend(wrong);

    let mut az = Command::new(programs.join("python"));
    az.args(["-c", PARSE])
        .current_dir(workdir.path(""))
        .env_clear()
        .env("HOME", workdir.path(""))
        .env("PATH", "/usr/bin:/bin");
    fake_azure::isolate(&mut az, &workdir.path(""));
    let mut az = az.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    serde_json::to_writer(az.stdin.take().unwrap(), &calls).unwrap();
    let ended = az.wait_with_output().unwrap();
    let output: Vec<(i32, String)> = serde_json::from_slice(&ended.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&ended.stderr)));
    assert_eq!(output.len(), calls.len());
    for (call, (code, output)) in calls.iter().zip(&output).take(count) {
        assert!(*code == 1 && output.contains("az login"), "{code}: {output}\n{call}");
    }
    // The parser can reject a call.
    assert!(output[count..].iter().all(|(code, _)| *code == 2), "{:?}", &output[count..]);
}

/// The commands of docs/guide/fleet-steps.md that need Azure.
pub(crate) const PROVISION: &str = "doctor fleet provision cluster.toml --yes";
pub(crate) const DESTROY_PLAN: &str = "doctor fleet destroy cluster.toml";
pub(crate) const DESTROY: &str = "doctor fleet destroy cluster.toml --yes";

struct Cluster<'a> {
    azure: &'a FakeAzure,
    workdir: &'a Workdir,
}

impl Cluster<'_> {
    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.azure.command(Path::new(env!("CARGO_BIN_EXE_doctor")), &self.workdir.path(""));
        command.args(args).stdin(Stdio::null());
        command
    }

    #[track_caller]
    fn expect(&self, code: i32, args: &[&str]) -> CommandOutput {
        let output = CommandOutput::from_output(&self.command(args).output().unwrap());
        assert_eq!(output.code, code, "doctor {}\n{}\n{}", args.join(" "), output.out, output.err);
        output
    }

    /// Runs a command line as printed on the page.
    #[track_caller]
    fn run_line(&self, code: i32, line: &str) -> CommandOutput {
        self.expect(code, &line.split(' ').skip(1).collect::<Vec<_>>())
    }

    /// Logs in as a person would: verified host keys, no prompts.
    #[track_caller]
    fn ssh(&self, host: &str, command: &str) -> String {
        let mut ssh = self.azure.command(Path::new("/usr/bin/ssh"), &self.workdir.path(""));
        ssh.args(["-F", "gpu/ssh_config", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, command]);
        let output = CommandOutput::from_output(&ssh.stdin(Stdio::null()).output().unwrap());
        assert_eq!(output.code, 0, "ssh {host} {command}: {}", output.err);
        output.out
    }

    /// Starts provisioning and kills it at this step.
    fn killed_at(&self, step: &str) {
        let mut child =
            self.command(&["fleet", "provision", "cluster.toml", "--yes"]).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let seen: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.contains(step)).collect();
        FakeAzure::kill(&mut child).unwrap();
        assert!(seen.iter().any(|line| line.contains("resource group")), "{seen:?}");
    }
}

#[test]
fn a_cluster_is_provisioned_resumed_after_a_kill_and_destroyed_with_fake_azure() {
    let azure = match FakeAzure::start() {
        Ok(azure) => azure,
        Err(why) => return why.skip_tests("provisioning with the real az"),
    };
    let workdir = Workdir::new();
    key(&workdir);
    workdir.write(
        "cluster.toml",
        "resource_group = \"rg\"\nlocation = \"westus3\"\nscale_set = \"gpu\"\nsku = \"Standard_ND96isr_H200_v5\"\n\
         image = \"microsoft-dsvm:ubuntu-hpc:2204:latest\"\ncount = 2\nadmin = \"azureuser\"\nssh_key = \"id.pub\"\n\
         [network]\nssh_from = [\"203.0.113.0/24\"]\n[tags]\nowner = \"ann\"\n[limits]\ncreate = \"10m\"\n",
    );
    let cluster = Cluster { azure: &azure, workdir: &workdir };
    cluster.expect(6, &["fleet", "provision", "cluster.toml"]).stdout_contains("az vmss create");
    assert_eq!(azure.changes(), [""; 0]);

    cluster.killed_at("load balancer");
    let provisioned = cluster.run_line(0, PROVISION);
    provisioned.stdout_contains("2 nodes ready").stdout_contains("ssh -p 50000 azureuser@");
    assert!(!provisioned.err.contains("resource group rg"), "it was there already: {}", provisioned.err);

    // No host key was trusted on first use: all came through Azure.
    let hosts: Vec<String> = workdir.read("gpu/hostfile").lines().map(str::to_owned).collect();
    assert_eq!(hosts.len(), 2);
    let head = &hosts[0];
    assert_eq!(
        cluster.ssh(head, "cat hostfile hostfile-ip"),
        format!("{}{}", workdir.read("gpu/hostfile"), workdir.read("gpu/hostfile-ip"))
    );
    assert_eq!(cluster.ssh(&hosts[1], "hostname").trim(), hosts[1]);
    for host in &hosts {
        let inside = format!("ssh -o BatchMode=yes -o StrictHostKeyChecking=yes {host} hostname");
        assert_eq!(cluster.ssh(head, &inside).trim(), host);
    }
    let first = fs::read_to_string(azure.path(&format!("vm-{head}/custom-data"))).unwrap();
    assert!(first.starts_with("#cloud-config\n") && first.contains("/opt/run-health-checks.sh"), "{first}");

    let before = azure.changes();
    cluster.expect(0, &["fleet", "provision", "cluster.toml", "--yes"]).stdout_contains("nothing was changed");
    assert_eq!(azure.changes(), before);

    create_foreign_group(&azure, "strangers", "{}");
    // Like a policy that copies a group's tags to every resource in it.
    create_foreign_group(&azure, "heirs", r#"{"cluster-doctor": "gpu"}"#);
    cluster.run_line(6, DESTROY_PLAN).stdout_contains("az vmss delete");
    let destroyed = cluster.run_line(0, DESTROY);
    destroyed
        .stdout_contains("kept: security group strangers: it does not have our tag")
        .stdout_contains("kept: security group heirs: it has our tag, but this file does not define it")
        .stdout_contains("kept: resource group rg: it contains resources of others");
    let after = azure.changes();
    let deleted: Vec<&str> = after
        .iter()
        .filter_map(|line| line.strip_prefix("DELETE "))
        .filter_map(|line| line.split('/').next_back())
        .collect();
    assert_eq!(
        deleted,
        ["gpu 200", "gpu-lb 200", "gpu-lb-ip 200", "gpu-head-ip 200", "gpu-vnet 200", "gpu-nsg 200"],
        "{after:#?}"
    );
}

/// Creates a resource in the group that does not belong to the cluster.
fn create_foreign_group(azure: &FakeAzure, name: &str, tags: &str) {
    let put = "import ssl, sys, urllib.request\n\
        url = 'https://127.0.0.1:5991/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/rg/providers/Microsoft.Network/networkSecurityGroups/' + sys.argv[2]\n\
        body = '{\"location\": \"westus3\", \"tags\": ' + sys.argv[3] + '}'\n\
        request = urllib.request.Request(url, body.encode(), method='PUT')\n\
        urllib.request.urlopen(request, context=ssl.create_default_context(cafile=sys.argv[1]))";
    let mut python = azure.command(Path::new("python"), &azure.path(""));
    let output = python.args(["-c", put]).arg(azure.path("cert.pem")).args([name, tags]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_error_in_the_cluster_file_is_shown_with_its_position_and_azure_is_not_called() {
    let workdir = Workdir::new();
    workdir.write("cluster.toml", "resource_group = \"rg\"\nlocation = \"West US 3\"\nscale_sett = \"gpu\"\n");
    workdir
        .expect(4, &["fleet", "provision", "cluster.toml"])
        .stderr_contains("line 3, column 1")
        .stderr_contains("--example");
    workdir.write(
        "cluster.toml",
        &workdir.expect(0, &["fleet", "provision", "--example"]).out.replace("westus3", "West US 3"),
    );
    workdir.expect(4, &["fleet", "destroy", "cluster.toml"]).stderr_contains("a region");
    workdir.write(
        "cluster.toml",
        &workdir.expect(0, &["fleet", "provision", "--example"]).out.replace("~/.ssh/id_ed25519.pub", "no.pub"),
    );
    workdir.expect(2, &["fleet", "provision", "cluster.toml"]).stderr_contains("ssh-keygen");
    workdir.write("no.pub", "ssh-ed25519 AAAA\n");
    workdir
        .expect(3, &["fleet", "provision", "cluster.toml", "--az", "/no/such/az"])
        .stderr_contains("install the Azure CLI");
}
