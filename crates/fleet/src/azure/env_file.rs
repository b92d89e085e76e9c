//! Parses the `KEY=value` file of the shell scripts that this replaces, without executing it.
//!
//! Only quoted and plain values and the list `TAGS=( … )` are accepted; everything else that a shell would interpret is
//! an error with its position. The commas between tags in the example of those scripts are not part of the tags.

use std::{collections::BTreeMap, ops::Range, path::PathBuf};

use doctor_core::toml_text::TomlError;
use toml::Spanned;

use super::cluster_file::{Limits, Mode, RawCluster, RawNetwork, Security};

const KEYS: [&str; 12] = [
    "RESOURCE_GROUP",
    "VMSS_NAME",
    "LOCATION",
    "SKU",
    "IMAGE",
    "INSTANCE_COUNT",
    "VM_NAME_PREFIX",
    "ADMIN",
    "ORCH_MODE",
    "SSH_PATH",
    "CLOUD_INIT",
    "TAGS",
];

pub(super) fn read(text: &str) -> Result<RawCluster, TomlError> {
    let values = Values::parse(text)?;
    let mode = match values.required("ORCH_MODE")? {
        mode if mode.get_ref().eq_ignore_ascii_case("flexible") => Mode::Flexible,
        mode if mode.get_ref().eq_ignore_ascii_case("uniform") => Mode::Uniform,
        other => {
            return Err(values.bad(&other, format!("ORCH_MODE is {:?}, expected Flexible or Uniform", other.get_ref())));
        }
    };
    let count = values.required("INSTANCE_COUNT")?;
    let number = count.get_ref().parse().ok().filter(|number| (1..=1000).contains(number));
    let number = number.ok_or_else(|| {
        values.bad(&count, format!("INSTANCE_COUNT is {:?}, expected 1 to 1000 machines", count.get_ref()))
    })?;
    let path = |word: Spanned<String>| Spanned::new(word.span(), PathBuf::from(word.into_inner()));
    Ok(RawCluster {
        subscription: None,
        resource_group: values.required("RESOURCE_GROUP")?,
        location: values.required("LOCATION")?,
        scale_set: values.required("VMSS_NAME")?,
        mode,
        sku: values.required("SKU")?,
        image: values.required("IMAGE")?,
        count: Spanned::new(count.span(), number),
        name_prefix: values.find("VM_NAME_PREFIX"),
        admin: values.required("ADMIN")?,
        ssh_key: path(values.required("SSH_PATH")?),
        disk_gb: 256,
        accelerated_networking: true,
        placement_group: None,
        spot: None,
        security: Security::Standard,
        cloud_init: values.find("CLOUD_INIT").map(|word| path(word).into_inner()),
        doctor_node: None,
        head_address: None,
        // Those scripts allowed SSH from everywhere.
        network: RawNetwork {
            vnet: None,
            subnet: None,
            addresses: None,
            ssh_from: vec![Spanned::new(0..0, "Internet".to_owned())],
        },
        tags: values.tags()?,
        limits: Limits::default(),
    })
}

struct Values<'a> {
    text: &'a str,
    values: BTreeMap<&'static str, Spanned<String>>,
}

impl<'a> Values<'a> {
    fn parse(text: &'a str) -> Result<Self, TomlError> {
        let mut values = BTreeMap::new();
        let mut rest = 0..text.len();
        while let Some(line) = next_line(text, &mut rest) {
            let written = text[line.clone()].trim();
            if written.is_empty() || written.starts_with('#') {
                continue;
            }
            let bad = |message: String| TomlError::at(text, Some(line.clone()), message);
            let (key, value) = written.split_once('=').ok_or_else(|| bad("expected KEY=value".to_owned()))?;
            let key = KEYS.into_iter().find(|known| *known == key.trim_start_matches("export ").trim());
            let key = key.ok_or_else(|| bad(format!("unknown key, expected one of {}", KEYS.join(", "))))?;
            let value = match value.strip_prefix('(') {
                Some(first) => list(text, first, &line, &mut rest)?,
                None => Spanned::new(
                    line.clone(),
                    unquote(value).ok_or_else(|| {
                        bad(format!(
                            "{key} is neither plain nor in quotes, or would be run by a shell: expected {key}='value'"
                        ))
                    })?,
                ),
            };
            if values.insert(key, value).is_some() {
                return Err(bad(format!("{key} is set twice")));
            }
        }
        Ok(Self { text, values })
    }

    fn bad(&self, of: &Spanned<String>, message: String) -> TomlError {
        TomlError::at(self.text, Some(of.span()), message)
    }

    fn find(&self, key: &str) -> Option<Spanned<String>> {
        self.values.get(key).cloned()
    }

    fn required(&self, key: &str) -> Result<Spanned<String>, TomlError> {
        self.find(key).ok_or_else(|| TomlError::at(self.text, None, format!("{key} is missing")))
    }

    fn tags(&self) -> Result<BTreeMap<Spanned<String>, Spanned<String>>, TomlError> {
        let Some(list) = self.find("TAGS") else { return Ok(BTreeMap::new()) };
        let mut tags = BTreeMap::new();
        for word in list.get_ref().split_whitespace() {
            let word = word.trim_end_matches(',');
            let tag = unquote(word)
                .and_then(|word| word.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())));
            let (name, value) =
                tag.ok_or_else(|| self.bad(&list, format!("{word:?} is not a tag, expected name=value")))?;
            tags.insert(Spanned::new(list.span(), name), Spanned::new(list.span(), value));
        }
        Ok(tags)
    }
}

/// Reads the lines of a list up to its end.
fn list(text: &str, first: &str, line: &Range<usize>, rest: &mut Range<usize>) -> Result<Spanned<String>, TomlError> {
    let mut value = String::new();
    let mut part = first;
    loop {
        if let Some((last, after)) = part.split_once(')') {
            value.push_str(last);
            return match after.trim() {
                "" => Ok(Spanned::new(line.clone(), value)),
                _ => Err(TomlError::at(text, Some(line.clone()), "unexpected text after the list's `)`")),
            };
        }
        value.push_str(part);
        value.push(' ');
        let Some(next) = next_line(text, rest) else {
            return Err(TomlError::at(text, Some(line.clone()), "the list is not closed, expected `)`"));
        };
        part = text[next].split('#').next().unwrap_or_default();
    }
}

fn next_line(text: &str, rest: &mut Range<usize>) -> Option<Range<usize>> {
    if rest.start >= rest.end {
        return None;
    }
    let end = text[rest.clone()].find('\n').map_or(rest.end, |at| rest.start + at);
    let line = rest.start..end;
    rest.start = (end + 1).min(rest.end);
    Some(line)
}

/// Returns a value as a shell would read it; `None` if a shell would expand or execute a part of it.
fn unquote(value: &str) -> Option<String> {
    let value = value.trim();
    let inside = |quote: char| {
        value.strip_prefix(quote).and_then(|rest| rest.strip_suffix(quote)).filter(|inside| !inside.contains(quote))
    };
    if let Some(literal) = inside('\'') {
        return Some(literal.to_owned());
    }
    let plain = |text: &str| !text.contains(['$', '`', '\\', '\'', '"']);
    match inside('"') {
        Some(quoted) => plain(quoted).then(|| quoted.to_owned()),
        None => (plain(value) && !value.contains([' ', '\t', ';', '&', '|', '<', '>', '(', ')', '#']))
            .then(|| value.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::azure::{Cluster, Mode};

    use super::*;

    /// Made by hand in the form of the original's example.
    const FILE: &str = "# ours\nRESOURCE_GROUP='vmss-rg'\nVMSS_NAME=vmss\nLOCATION=\"westus3\"\nSKU='Standard_ND96isr_H200_v5'\n\
        IMAGE='microsoft-dsvm:ubuntu-hpc:2204:latest'\nINSTANCE_COUNT='2'\nVM_NAME_PREFIX='vm-'\nADMIN='azureuser'\nORCH_MODE='Flexible'\n\
        SSH_PATH='~/.ssh/id_rsa.pub'\nCLOUD_INIT='cloud-init.yaml'\nTAGS=(\n    owner=ann,\n    use=test,  # why\n)\n";

    fn read(text: &str) -> Result<Cluster, TomlError> {
        Cluster::parse(text, Path::new("/site/cluster-config.env"), Some(Path::new("/home/ann")))
    }

    #[test]
    fn the_old_env_file_gives_the_same_cluster() {
        let cluster = read(FILE).unwrap();
        assert_eq!((cluster.mode, cluster.count, cluster.scale_set.as_str()), (Mode::Flexible, 2, "vmss"));
        assert_eq!(cluster.ssh_key, Path::new("/home/ann/.ssh/id_rsa.pub"));
        assert_eq!(cluster.cloud_init.unwrap(), Path::new("/site/cloud-init.yaml"));
        assert_eq!(cluster.tags["owner"], "ann");
        assert_eq!(cluster.tags["use"], "test");
        assert_eq!(cluster.network.ssh_from, ["Internet"]);
    }

    #[test]
    fn shell_code_and_unknown_settings_are_errors_with_their_line() {
        for (from, to, line, part) in [
            ("vmss\n", "$(reboot)\n", Some(3), "would be run by a shell"),
            ("vmss\n", "vmss; reboot\n", Some(3), "would be run by a shell"),
            ("VMSS_NAME", "VMSS_NAEM", Some(3), "unknown key"),
            ("LOCATION=\"westus3\"", "LOCATION='<region>'", Some(4), "a region"),
            ("'2'", "'two'", Some(7), "1 to 1000"),
            ("'Flexible'", "'flex'", Some(10), "expected Flexible or Uniform"),
            (")\n", "\n", Some(13), "not closed"),
            ("SSH_PATH='~/.ssh/id_rsa.pub'\n", "", None, "SSH_PATH is missing"),
            ("ADMIN=", "LOCATION=", Some(9), "twice"),
        ] {
            let error = read(&FILE.replacen(from, to, 1)).unwrap_err();
            assert_eq!(error.line(), line, "{to}: {error}");
            assert!(error.to_string().contains(part), "{to}: {error}");
        }
    }
}
