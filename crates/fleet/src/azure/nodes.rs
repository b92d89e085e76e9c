//! The scripts that Azure's agent runs as root on the machines, and the parsing of their output.
//!
//! Each script checks before it changes anything, and its last line is a fixed word: a script without it has failed,
//! whatever Azure reports. Azure cuts the output after 4 KiB, so scripts print little.

use std::{fmt::Write as _, net::Ipv4Addr};

use serde_json::Value;

use super::{Cluster, az::shell_quoted, inventory::Node};

/// The prefix of every output line that is parsed.
const OUTPUT_PREFIX: &str = "cluster-doctor";
/// The comment that marks the head node's key in authorized_keys.
const KEY_COMMENT: &str = "cluster-doctor-head";

/// A host and its host key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownHost {
    pub host: String,
    pub address: Ipv4Addr,
    /// Type and key, as in known_hosts.
    pub key: String,
}

/// All hosts in the order of their addresses, and the name of the head node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hosts {
    pub all: Vec<KnownHost>,
    pub head: String,
}

impl Hosts {
    /// Returns the host file: one name per line.
    pub fn hostfile(&self) -> String {
        self.all.iter().fold(String::new(), |text, known| text + &known.host + "\n")
    }

    pub fn hostfile_ip(&self) -> String {
        self.all.iter().fold(String::new(), |text, known| format!("{text}{}\n", known.address))
    }

    pub fn known_hosts(&self) -> String {
        self.all
            .iter()
            .fold(String::new(), |text, known| format!("{text}{},{} {}\n", known.host, known.address, known.key))
    }

    /// Returns known_hosts for use from outside: the head node at its public address, every node behind the load
    /// balancer, and all nodes by their names for connections through the head node.
    pub fn external_known_hosts(&self, head_at: &str, port: u32, balancer: Option<&str>) -> String {
        let mut text = self.known_hosts();
        for known in &self.all {
            let mut names = Vec::new();
            if known.host == self.head {
                names.push(if port == 22 { head_at.to_owned() } else { format!("[{head_at}]:{port}") });
            }
            // Azure assigns the load balancer's ports, so the key is valid for any port.
            names.extend(balancer.map(|balancer| format!("[{balancer}]:*")));
            if !names.is_empty() {
                let _infallible = writeln!(text, "{} {}", names.join(","), known.key);
            }
        }
        text
    }

    /// Returns the file for `ssh -F` from outside: the head node at a reachable address, the other nodes through it.
    pub fn ssh_config(&self, cluster: &Cluster, head_at: &str, port: u32, known_hosts: &str) -> String {
        let mut text = format!(
            "# Made by `doctor fleet provision`.\nHost {}\n    HostName {head_at}\n    Port {port}\n",
            self.head
        );
        let others: Vec<&str> =
            self.all.iter().map(|known| known.host.as_str()).filter(|host| *host != self.head).collect();
        if !others.is_empty() {
            let _infallible = write!(text, "Host {}\n    ProxyJump {}\n", others.join(" "), self.head);
        }
        let key = cluster.ssh_key.with_extension("");
        let _infallible = write!(
            text,
            "Host {} {}\n    User {}\n    IdentityFile {}\n    UserKnownHostsFile {known_hosts}\n    StrictHostKeyChecking yes\n",
            self.head,
            others.join(" "),
            cluster.admin,
            key.display()
        );
        text
    }
}

/// The common beginning of all scripts: finds the login user's home directory and creates its `.ssh`.
fn script_header(cluster: &Cluster) -> String {
    format!(
        "#!/bin/sh\nset -eu\nadmin={}\nhome=$(getent passwd \"$admin\" | cut -d: -f6)\ngroup=$(id -g \"$admin\")\n\
         install -d -m 700 -o \"$admin\" -g \"$group\" \"$home/.ssh\"\n",
        shell_quoted(&cluster.admin)
    )
}

/// Generates the head node's key pair unless it exists, and prints the public key.
pub(super) fn head_key_script(cluster: &Cluster) -> String {
    format!(
        "{}key=$home/.ssh/id_ed25519\n\
         if [ ! -e \"$key\" ]; then\n  \
         runuser -u \"$admin\" -- ssh-keygen -q -t ed25519 -N '' -C {KEY_COMMENT} -f \"$key\"\n\
         fi\n\
         [ -e \"$key.pub\" ] || runuser -u \"$admin\" -- ssh-keygen -y -f \"$key\" >\"$key.pub\"\n\
         echo \"{OUTPUT_PREFIX} key $(cut -d ' ' -f 1,2 \"$key.pub\")\"\n\
         echo '{OUTPUT_PREFIX} done'\n",
        script_header(cluster)
    )
}

/// Authorises the head node's key, which replaces that of an earlier head node, and prints the machine's host key.
pub(super) fn trust_script(cluster: &Cluster, head_key: &str) -> String {
    format!(
        "{}line={}\n\
         keys=$home/.ssh/authorized_keys\n\
         touch \"$keys\"\n\
         if ! grep -qxF \"$line\" \"$keys\"; then\n  \
         # An earlier head node has nothing to do here any more; all other lines stay.\n  \
         {{ grep -v ' {KEY_COMMENT}$' \"$keys\" || true; echo \"$line\"; }} >\"$keys.new\"\n  \
         mv \"$keys.new\" \"$keys\"\n\
         fi\n\
         chown \"$admin:$group\" \"$keys\"\n\
         chmod 600 \"$keys\"\n\
         echo \"{OUTPUT_PREFIX} host $(cut -d ' ' -f 1,2 /etc/ssh/ssh_host_ed25519_key.pub)\"\n\
         echo '{OUTPUT_PREFIX} done'\n",
        script_header(cluster),
        shell_quoted(&format!("{head_key} {KEY_COMMENT}"))
    )
}

/// Writes host files and host keys on the head node, and tries to log in to every node.
pub(super) fn head_files_script(cluster: &Cluster, hosts: &Hosts) -> String {
    format!(
        "{}put() {{ cat >\"$1.new\"; chown \"$admin:$group\" \"$1.new\"; mv \"$1.new\" \"$1\"; }}\n\
         put \"$home/hostfile\" <<'END'\n{}END\n\
         put \"$home/hostfile-ip\" <<'END'\n{}END\n\
         known=/etc/ssh/ssh_known_hosts\n\
         touch \"$known\"\n\
         {{ sed '/^# {OUTPUT_PREFIX} begin$/,/^# {OUTPUT_PREFIX} end$/d' \"$known\"; cat <<'END'\n# {OUTPUT_PREFIX} begin\n{}# {OUTPUT_PREFIX} end\nEND\n}} >\"$known.new\"\n\
         chmod 644 \"$known.new\"\n\
         mv \"$known.new\" \"$known\"\n\
         try() {{\n  \
         said=$(runuser -u \"$admin\" -- ssh -n -o BatchMode=yes -o StrictHostKeyChecking=yes -o ConnectTimeout=10 -- \"$1\" true 2>&1) ||\n    \
         echo \"{OUTPUT_PREFIX} unreached $1 $(echo \"$said\" | tail -n 1 | cut -c 1-100)\"\n\
         }}\n\
         while read -r host; do try \"$host\" & done <\"$home/hostfile\"\n\
         while read -r host; do try \"$host\" & done <\"$home/hostfile-ip\"\n\
         wait\n\
         echo '{OUTPUT_PREFIX} done'\n",
        script_header(cluster),
        hosts.hostfile(),
        hosts.hostfile_ip(),
        hosts.known_hosts()
    )
}

/// The output of a script, and whether the script completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ScriptOutput {
    lines: Vec<String>,
    pub(super) complete: bool,
    /// The message for people if the script did not complete.
    pub(super) last_line: String,
}

impl ScriptOutput {
    /// Parses the output of run-command: one message with the script's standard output, then its standard error.
    pub(super) fn parse(response: &Value) -> Self {
        let messages = response["value"].as_array().into_iter().flatten().filter_map(|part| part["message"].as_str());
        let message: String = messages.collect::<Vec<_>>().join("\n");
        let (output, stderr) = message.split_once("[stderr]").unwrap_or((&message, ""));
        let lines =
            output.lines().filter_map(|line| line.strip_prefix(OUTPUT_PREFIX)?.strip_prefix(' ')).map(str::trim);
        let lines: Vec<String> = lines.map(str::to_owned).collect();
        let last =
            stderr.lines().chain(output.lines()).map(str::trim).find(|line| !line.is_empty() && !line.starts_with('['));
        let clean = |line: &str| line.chars().filter(|c| !c.is_control()).take(300).collect();
        Self {
            complete: lines.last().is_some_and(|line| line == "done"),
            lines,
            last_line: clean(last.unwrap_or("no output")),
        }
    }

    /// Returns type and key of a line `what KIND KEY`. They are validated, because they become lines of other files.
    pub(super) fn key(&self, what: &str) -> Option<String> {
        let line = self.lines.iter().find_map(|line| line.strip_prefix(what)?.strip_prefix(' '))?;
        let (kind, key) = line.split_once(' ')?;
        let plain =
            |text: &str, extra: &[u8]| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || extra.contains(&byte));
        (plain(kind, b"-@.") && plain(key, b"+/=") && key.len() > 40 && kind.len() > 4).then(|| format!("{kind} {key}"))
    }

    pub(super) fn unreachable(&self) -> Vec<String> {
        let clean = |line: &str| line.chars().filter(|c| !c.is_control()).collect();
        self.lines.iter().filter_map(|line| line.strip_prefix("unreached ")).map(clean).collect()
    }
}

/// Combines a node with its host key.
pub(super) fn known(node: &Node, key: String) -> KnownHost {
    KnownHost { host: node.host.clone(), address: node.address, key }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use serde_json::json;

    use super::*;
    use crate::azure::cluster::tests::{SMALL, read};

    const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFh";

    fn hosts() -> Hosts {
        let known = |number: u8| KnownHost {
            host: format!("vmss-{number}"),
            address: Ipv4Addr::new(10, 0, 0, number),
            key: KEY.to_owned(),
        };
        Hosts { all: vec![known(4), known(5)], head: "vmss-4".to_owned() }
    }

    #[test]
    fn scripts_run_in_a_posix_shell() {
        let cluster = read(SMALL).unwrap();
        for script in [head_key_script(&cluster), trust_script(&cluster, KEY), head_files_script(&cluster, &hosts())] {
            let checked = Command::new("sh").args(["-n", "-c", &script]).output().unwrap();
            assert!(checked.status.success(), "{}\n{script}", String::from_utf8_lossy(&checked.stderr));
        }
    }

    #[test]
    fn only_the_output_of_a_completed_script_is_used() {
        // The format of Azure's RunShellScript, written by hand from its documentation.
        let response =
            |message: &str| json!({ "value": [{ "code": "ProvisioningState/succeeded", "message": message }] });
        let complete_output = ScriptOutput::parse(&response(&format!(
            "Enable succeeded: \n[stdout]\ncluster-doctor host {KEY}\ncluster-doctor done\n\n[stderr]\n"
        )));
        assert!(complete_output.complete);
        assert_eq!(complete_output.key("host").as_deref(), Some(KEY));
        let cut =
            ScriptOutput::parse(&response("Enable succeeded: \n[stdout]\n\n[stderr]\nsh: 4: getent: not found\n"));
        assert!(!cut.complete && cut.last_line == "sh: 4: getent: not found", "{cut:?}");
        assert!(!ScriptOutput::parse(&json!({})).complete);
        for forged in
            ["host ssh-ed25519 short", "host x y z", &format!("host {KEY} command=reboot"), "host ssh-ed25519\tAAAA"]
        {
            assert_eq!(
                ScriptOutput::parse(&response(&format!("[stdout]\ncluster-doctor {forged}\ncluster-doctor done\n")))
                    .key("host"),
                None
            );
        }
    }

    #[test]
    fn from_outside_only_the_head_node_is_reached_directly() {
        let text = hosts().ssh_config(&read(SMALL).unwrap(), "20.1.2.3", 22, "known_hosts");
        assert!(
            text.contains("Host vmss-4\n    HostName 20.1.2.3\n    Port 22\nHost vmss-5\n    ProxyJump vmss-4\n"),
            "{text}"
        );
        assert!(text.contains("IdentityFile /home/ann/.ssh/id_ed25519\n"), "{text}");
    }
}
