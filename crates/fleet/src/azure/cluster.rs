//! The desired cluster, read from one file: `cluster.toml`, or the `KEY=value` file of the scripts that this replaces.
//!
//! Every value becomes an argument of a program or a line of a script on a machine, so each is validated against what
//! Azure accepts before any call is made. Errors have a line and a column.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use doctor_core::toml_text::{self, Limit, TomlError};
use toml::Spanned;

use super::{
    cluster_file::{Limits, Mode, RawCluster, RawDownload, RawNetwork, Security, Spot},
    env_file,
    value_formats::{
        ADDRESS_RANGE, ADMIN, GROUP, IMAGE, LOCATION, NAME, NETWORK_BLOCK, PREFIX, SHA256, SKU, SUBSCRIPTION, TAG_NAME,
        TAG_VALUE, URL, ValueFormat, is_id,
    },
};

/// A commented example file.
pub const EXAMPLE: &str = include_str!("../../../../deploy/azure/cluster.toml");

/// A cluster. Paths are resolved against the directory of the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// `None`: the default subscription of `az`.
    pub subscription: Option<String>,
    pub resource_group: String,
    pub location: String,
    pub scale_set: String,
    pub mode: Mode,
    pub sku: String,
    pub image: String,
    pub count: u32,
    pub name_prefix: String,
    pub admin: String,
    /// The public key with which operators log in.
    pub ssh_key: PathBuf,
    pub disk_gb: u32,
    pub accelerated_networking: bool,
    pub placement_group: Option<String>,
    pub spot: Option<Spot>,
    pub security: Security,
    /// The site's cloud-init file. `None`: the generated one.
    pub cloud_init: Option<PathBuf>,
    pub doctor_node: Option<Download>,
    /// Whether the head node gets a public address.
    pub head_address: bool,
    pub network: Network,
    pub tags: BTreeMap<String, String>,
    pub limits: Limits,
}

/// The URL from which machines fetch `doctor-node` on first boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Download {
    pub url: String,
    /// The required digest of the download.
    pub sha256: String,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    pub vnet: String,
    pub subnet: String,
    /// The resource id of an existing subnet; then no network is created.
    pub subnet_id: Option<String>,
    pub addresses: String,
    /// The sources that may reach port 22.
    pub ssh_from: Vec<String>,
}

const LIMITS: [Limit; 4] = [
    Limit { key: &["count"], min: 1.0, max: 1000.0, accepted: "1 to 1000 machines" },
    Limit { key: &["disk_gb"], min: 30.0, max: 4095.0, accepted: "30 to 4095 GB" },
    Limit { key: &["limits", "at_once"], min: 1.0, max: 64.0, accepted: "1 to 64 machines at a time" },
    Limit { key: &["spot", "max_price"], min: 0.000_01, max: 100_000.0, accepted: "dollars an hour, above 0" },
];

impl Cluster {
    /// Reads a file's text. Paths are resolved against the directory of `path`, and `~` against `home`. A name that
    /// ends in `.env` is read in the `KEY=value` format.
    ///
    /// # Errors With the position of the first error.
    pub fn parse(text: &str, path: &Path, home: Option<&Path>) -> Result<Self, TomlError> {
        let written = match path.extension().is_some_and(|extension| extension == "env") {
            true => env_file::read(text)?,
            false => toml_text::read(text, &LIMITS)?,
        };
        let config_dir = path.parent().unwrap_or(Path::new(""));
        written.cluster(text, &|path: &Path| match (path.strip_prefix("~"), home) {
            (Ok(rest), Some(home)) => home.join(rest),
            _ => config_dir.join(path),
        })
    }
}

/// The size of a placement group; InfiniBand does not connect machines of different ones.
const MAX_UNIFORM: u32 = 100;

/// Validates the values of a file.
struct Validator<'a> {
    text: &'a str,
}

impl Validator<'_> {
    fn bad<T>(&self, of: &Spanned<T>, message: String) -> TomlError {
        TomlError::at(self.text, Some(of.span()), message)
    }

    fn required(&self, key: &str, word: &Spanned<String>, form: &ValueFormat) -> Result<String, TomlError> {
        let ValueFormat(fits, accepted) = form;
        match fits(word.get_ref()) {
            true => Ok(word.get_ref().clone()),
            false => Err(self.bad(word, format!("`{key}` is {:?}, expected {accepted}", word.get_ref()))),
        }
    }

    fn optional(
        &self,
        key: &str,
        word: Option<&Spanned<String>>,
        form: &ValueFormat,
    ) -> Result<Option<String>, TomlError> {
        word.map(|word| self.required(key, word, form)).transpose()
    }
}

impl RawCluster {
    fn cluster(self, text: &str, at: &dyn Fn(&Path) -> PathBuf) -> Result<Cluster, TomlError> {
        let validator = Validator { text };
        let scale_set = validator.required("scale_set", &self.scale_set, &NAME)?;
        if let Some(requested) =
            self.head_address.as_ref().filter(|requested| *requested.get_ref() && self.mode == Mode::Uniform)
        {
            let why = "`head_address` is true, expected false: machines of a Uniform scale set have no public address; \
                       the head node is reached through the load balancer";
            return Err(validator.bad(requested, why.to_owned()));
        }
        if self.mode == Mode::Uniform && *self.count.get_ref() > MAX_UNIFORM {
            let why = format!(
                "`count` is {}, expected at most {MAX_UNIFORM}: the machines of a Uniform scale set share one placement group",
                self.count.get_ref()
            );
            return Err(validator.bad(&self.count, why));
        }
        let name_prefix = validator.optional("name_prefix", self.name_prefix.as_ref(), &PREFIX)?;
        let mut tags = BTreeMap::new();
        for (name, value) in &self.tags {
            tags.insert(validator.required("tags", name, &TAG_NAME)?, validator.required("tags", value, &TAG_VALUE)?);
        }
        let download = |written: &RawDownload| -> Result<Download, TomlError> {
            let url = validator.required("doctor_node.url", &written.url, &URL)?;
            Ok(Download { url, sha256: validator.required("doctor_node.sha256", &written.sha256, &SHA256)? })
        };
        Ok(Cluster {
            subscription: validator.optional("subscription", self.subscription.as_ref(), &SUBSCRIPTION)?,
            resource_group: validator.required("resource_group", &self.resource_group, &GROUP)?,
            location: validator.required("location", &self.location, &LOCATION)?,
            mode: self.mode,
            sku: validator.required("sku", &self.sku, &SKU)?,
            image: validator.required("image", &self.image, &IMAGE)?,
            count: self.count.into_inner(),
            name_prefix: name_prefix.unwrap_or_else(|| host_prefix(&scale_set)),
            admin: validator.required("admin", &self.admin, &ADMIN)?,
            ssh_key: at(self.ssh_key.get_ref()),
            disk_gb: self.disk_gb,
            accelerated_networking: self.accelerated_networking,
            placement_group: validator.optional("placement_group", self.placement_group.as_ref(), &NAME)?,
            spot: self.spot,
            security: self.security,
            cloud_init: self.cloud_init.as_deref().map(at),
            doctor_node: self.doctor_node.as_ref().map(download).transpose()?,
            head_address: self.head_address.map_or(self.mode == Mode::Flexible, Spanned::into_inner),
            network: self.network.network(&validator, &scale_set)?,
            tags,
            limits: self.limits,
            scale_set,
        })
    }
}

impl RawNetwork {
    fn network(&self, validator: &Validator<'_>, scale_set: &str) -> Result<Network, TomlError> {
        let id = self.subnet.as_ref().filter(|subnet| subnet.get_ref().starts_with('/'));
        if let Some(id) = id.filter(|id| !is_id(id.get_ref())) {
            return Err(
                validator.bad(id, "`network.subnet` must be a resource id: /subscriptions/…/subnets/NAME".to_owned())
            );
        }
        let named = self.subnet.as_ref().filter(|_| id.is_none());
        let subnet = validator.optional("network.subnet", named, &NAME)?.unwrap_or_else(|| "nodes".to_owned());
        let vnet = validator.optional("network.vnet", self.vnet.as_ref(), &NAME)?;
        let addresses = validator.optional("network.addresses", self.addresses.as_ref(), &NETWORK_BLOCK)?;
        let from = self.ssh_from.iter().map(|from| validator.required("network.ssh_from", from, &ADDRESS_RANGE));
        Ok(Network {
            vnet: vnet.unwrap_or_else(|| format!("{scale_set}-vnet")),
            subnet,
            subnet_id: id.map(|id| id.get_ref().clone()),
            addresses: addresses.unwrap_or_else(|| "10.0.0.0/16".to_owned()),
            ssh_from: from.collect::<Result<_, _>>()?,
        })
    }
}

/// Derives a host name prefix from the scale set's name: invalid characters are dropped and the length is limited.
fn host_prefix(scale_set: &str) -> String {
    let prefix = scale_set.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(39);
    prefix.collect::<String>().to_ascii_lowercase() + "-"
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::azure) const SMALL: &str = r#"
resource_group = "vmss-rg"
location = "westus3"
scale_set = "vmss"
sku = "Standard_ND96isr_H200_v5"
image = "microsoft-dsvm:ubuntu-hpc:2204:latest"
count = 2
admin = "azureuser"
ssh_key = "~/.ssh/id_ed25519.pub"
[network]
ssh_from = ["203.0.113.0/24"]
"#;

    pub(in crate::azure) fn read(text: &str) -> Result<Cluster, TomlError> {
        Cluster::parse(text, Path::new("site/cluster.toml"), Some(Path::new("/home/ann")))
    }

    #[test]
    fn the_example_parses_and_paths_are_relative_to_the_file_or_home() {
        let cluster = read(SMALL).unwrap();
        assert_eq!(cluster.ssh_key, Path::new("/home/ann/.ssh/id_ed25519.pub"));
        assert!(cluster.head_address && cluster.network.vnet == "vmss-vnet" && cluster.name_prefix == "vmss-");
        let cluster =
            read(&SMALL.replace("~/.ssh/", "keys/").replace("admin", "cloud_init = \"own.yaml\"\nadmin")).unwrap();
        assert_eq!(cluster.ssh_key, Path::new("site/keys/id_ed25519.pub"));
        assert_eq!(cluster.cloud_init.unwrap(), Path::new("site/own.yaml"));
        read(EXAMPLE).unwrap();
    }

    #[test]
    fn errors_show_the_position_and_the_accepted_values() {
        for (from, to, line, part) in [
            ("count = 2", "count = 0", 7, "1 to 1000 machines"),
            ("count = 2", "mode = \"uniform\"\ncount = 101", 8, "at most 100"),
            ("count = 2", "cuont = 2", 7, "unknown field `cuont`"),
            ("\"westus3\"", "\"--output\"", 3, "a region"),
            ("\"vmss\"", "\"vm ss\"", 4, "a name: up to 60"),
            ("\"azureuser\"", "\"root\"", 8, "not root or admin"),
            ("\"azureuser\"", "\"x; reboot\"", 8, "lower-case letters"),
            ("203.0.113.0/24", "my-office", 11, "a block such as"),
            ("ubuntu-hpc:2204:latest", "ubuntu hpc", 6, "publisher:offer:sku:version"),
            ("[network]", "mode = \"uniform\"\nhead_address = true\n[network]", 11, "load balancer"),
            ("[network]", "tags = { cluster-doctor = \"x\" }\n[network]", 10, "which is reserved"),
            ("[network]", "doctor_node = { url = \"http://x\", sha256 = \"0\" }\n[network]", 10, "https://"),
            ("[network]", "[network]\nsubnet = \"/x/y\"", 11, "/subscriptions/"),
        ] {
            let text = SMALL.replace(from, to);
            let error = read(&text).unwrap_err();
            assert_eq!(error.line(), Some(line), "{to}: {error}");
            assert!(error.to_string().contains(part), "{to}: {error}");
        }
    }
}
