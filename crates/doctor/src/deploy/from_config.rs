//! The deployment that the site's `doctor.toml` describes. The controller in the cluster gets the same configuration as
//! the operator's, except for paths, which are those of the pod.

use std::{ffi::OsStr, path::Path};

use doctor_backend::trusted_file;
use doctor_backend_kubernetes::{KubernetesConfig, Replace, RunAs, Share};
use doctor_store::StoreUrl;

use serde_json::{Map, Value, json};
use toml::Table;

use super::{
    Deployment,
    error::{DeployError, Result},
};
use crate::{
    backends::BackendChoice,
    config::{Config, profile_files},
};

/// Backend settings that are not copied: they are also settings of the deployment, or apply only to the operator's
/// machine.
const NOT_COPIED: [&str; 11] = [
    "kubeconfig",
    "context",
    "namespace",
    "prefix",
    "image",
    "image_pull_policy",
    "priority_class",
    "share",
    "policy_map",
    "template",
    "write",
];
/// Service settings that are copied unchanged.
const COPIED_SERVICE_KEYS: [&str; 5] = ["cycle", "publish", "lease", "workers", "retention"];

/// Returns the deployment that this configuration describes. For another backend, that is the default deployment.
///
/// # Errors If a file named in the configuration cannot be read, or a name in it is invalid in Kubernetes.
pub(crate) fn deployment_from_config(config: &Config) -> Result<Deployment> {
    let BackendChoice::Kubernetes(backend) = &config.backend else {
        return Ok(Deployment::new(KubernetesConfig::default()));
    };
    let mut deployment = Deployment::new((**backend).clone());
    deployment.set_namespace(&backend.namespace)?;
    let mut set = |name: &str, value: Value| deployment.set(name, value).map_err(DeployError::from);
    set("prefix", json!(backend.prefix))?;
    set("images.node", json!(backend.image))?;
    set("images.pullPolicy", json!(backend.image_pull_policy))?;
    if let Some(class) = &backend.priority_class {
        set("priorityClass.name", json!(class))?;
    }
    match &backend.share {
        Share::None => set("data.kind", json!("none"))?,
        Share::Claim(claim) => set("data.claim", json!(claim))?,
        Share::HostPath(path) => {
            set("data.kind", json!("host-path"))?;
            set("data.hostPath", json!(path))?;
        }
    }
    let write = &backend.write;
    set("write.taint", json!(write.taint))?;
    set("write.label", json!(write.label))?;
    set("write.annotation", json!(write.annotation))?;
    set("write.event", json!(write.event))?;
    set("write.condition", json!(write.condition.as_deref().unwrap_or_default()))?;
    set("volcano", json!(matches!(backend.run_as, RunAs::Volcano(_))))?;
    set("replace", json!(replace_method(&backend.replace)))?;
    if let StoreUrl::Postgres(_) = config.store {
        set("store.kind", json!("postgres"))?;
    }
    if let Some(listen) = config.agents.listen {
        set("port", json!(listen.port()))?;
    }
    if let Some(listen) = config.probes.listen {
        set("probePort", json!(listen.port()))?;
    }
    if config.agents.plain == Some(true) {
        set("tls.kind", json!("none"))?;
    }
    set("settings.service", json!(service_lines(config)?))?;
    set("settings.kubernetes", json!(backend_lines(backend)?))?;
    if let Some(policy) = &config.policy {
        set("policy", json!(read(policy)?))?;
    }
    if let Some(template) = &backend.template {
        set("template", json!(read(template)?))?;
    }
    set("profiles", Value::Object(profiles(&config.profiles)?))?;
    Ok(deployment)
}

/// Returns the chart's word for a replacement method. Methods with parameters are copied verbatim (`own`).
const fn replace_method(replace: &Replace) -> &'static str {
    match replace {
        Replace::None => "none",
        Replace::DeleteNode => "delete-node",
        Replace::Aws => "aws",
        Replace::Command(_) | Replace::Webhook(_) => "own",
    }
}

fn to_toml_table(of: &impl serde::Serialize) -> Result<Table> {
    Table::try_from(of).map_err(|error| DeployError::Other(format!("serialising the settings: {error}")))
}

fn to_toml_text(of: &Table) -> Result<String> {
    toml::to_string(of).map_err(|error| DeployError::Other(format!("serialising the settings: {error}")))
}

/// Returns the settings that differ from the defaults.
fn changed_entries(now: Table, usual: &Table, include: impl Fn(&str) -> bool) -> Table {
    now.into_iter().filter(|(key, value)| include(key) && usual.get(key) != Some(value)).collect()
}

fn service_lines(config: &Config) -> Result<String> {
    let usual = Config::parse("", Path::new("/"))
        .map_err(|error| DeployError::Other(format!("reading the built-in configuration: {error}")))?;
    to_toml_text(&changed_entries(to_toml_table(config)?, &to_toml_table(&usual)?, |key| {
        COPIED_SERVICE_KEYS.contains(&key)
    }))
}

fn backend_lines(backend: &KubernetesConfig) -> Result<String> {
    let own_replace = replace_method(&backend.replace) == "own";
    let here = |key: &str| !NOT_COPIED.contains(&key) && (key != "replace" || own_replace);
    let changed = changed_entries(to_toml_table(backend)?, &to_toml_table(&KubernetesConfig::default())?, here);
    if changed.is_empty() {
        return Ok(String::new());
    }
    // Serialised with the full name, so that subsections have theirs too. The heading itself is in the file already.
    let document = to_toml_table(&json!({ "backend": { "kubernetes": changed } }))?;
    Ok(to_toml_text(&document)?.replacen("[backend.kubernetes]\n", "", 1))
}

fn read(path: &Path) -> Result<String> {
    trusted_file::read_to_string(path).map_err(|source| DeployError::File {
        operation: "reading",
        path: path.to_owned(),
        source,
    })
}

fn profiles(paths: &[std::path::PathBuf]) -> Result<Map<String, Value>> {
    let mut texts = Map::new();
    for path in paths {
        let listed = if path.is_dir() {
            profile_files(path).map_err(|source| DeployError::File {
                operation: "listing",
                path: path.clone(),
                source,
            })?
        } else {
            vec![path.clone()]
        };
        for file in listed {
            let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default().to_owned();
            let text = read(&file)?;
            if texts.insert(name.clone(), Value::String(text)).is_some() {
                let file_path = file.display();
                return Err(DeployError::Other(format!(
                    "{file_path}: there are two profiles {name}; a ConfigMap can hold only one"
                )));
            }
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use doctor_backend_kubernetes::STANDARD_TEMPLATE;

    use std::fs;

    use super::{super::DeployPart, *};

    /// The controller in the cluster gets the operator's configuration.
    #[test]
    fn the_deployed_configuration_equals_the_sites_configuration() {
        let site = tempfile::tempdir().unwrap();
        let at = |name: &str| site.path().join(name);
        fs::create_dir(at("types")).unwrap();
        fs::write(at("types/ours.toml"), "sku = \"ours\"\nversion = 1\nlike = \"hgx-h100\"\n").unwrap();
        fs::write(at("policy.toml"), "version = 7\n\n# ours\n").unwrap();
        fs::write(at("job.yaml"), STANDARD_TEMPLATE).unwrap();
        let text = "store = \"postgres://ann:secret@db/doctor\"\npolicy = \"policy.toml\"\nprofiles = [\"types\"]\n\
            cycle = \"20s\"\n[retention]\nlogs = \"3d\"\n[agents]\nlisten = \"10.0.0.5:9000\"\n\
            [backend.kubernetes]\nkubeconfig = \"admin\"\nnamespace = \"gpu-health\"\nprefix = \"gpu-healthcheck.aws-samples.io\"\n\
            image = \"registry.example.com/node:1\"\nshare = { host-path = \"/fsx/doctor\" }\n\
            template = \"job.yaml\"\npool_label = \"pool\"\nusual_taints = [\"dedicated\"]\nrun_as = { volcano = { queue = \"gpu\", plugins = { svc = [] } } }\nkeep = \"2h\"\n\
            write = { label = false, condition = \"GpuHealthy\" }\n\
            [backend.kubernetes.replace.webhook]\nurl = \"http://fleet:8080/replace\"\n";
        let config = Config::parse(text, site.path()).unwrap();
        let deployment = deployment_from_config(&config).unwrap();
        let printed = deployment.json(DeployPart::All);
        let map = |name: &str| {
            let items = printed["items"].as_array().unwrap().iter();
            let found = items.clone().find(|item| item["kind"] == "ConfigMap" && item["metadata"]["name"] == name);
            found.unwrap()["data"].clone()
        };
        assert!(!printed.to_string().contains("secret@"), "a password is in what was printed");
        assert_eq!(map("cluster-doctor-policy")["policy.toml"], "version = 7\n\n# ours\n");
        assert!(map("cluster-doctor-profiles")["ours.toml"].as_str().unwrap().contains("hgx-h100"));

        let doctor = map("cluster-doctor")["doctor.toml"].as_str().unwrap().to_owned();
        let parsed = Config::parse(&doctor, Path::new("/etc/cluster-doctor")).unwrap();
        assert_eq!((parsed.cycle, &parsed.retention), (config.cycle, &config.retention), "{doctor}");
        assert_eq!(parsed.agents.listen.unwrap().port(), 9000);
        assert_eq!(parsed.agents.url.as_deref(), Some("https://cluster-doctor.gpu-health.svc:9000"));
        assert!(parsed.agents.tls.is_some(), "{doctor}");
        let backend = |config: &Config| match &config.backend {
            BackendChoice::Kubernetes(backend) => (**backend).clone(),
            other => panic!("{other:?}"),
        };
        let policy_map = Some("cluster-doctor-policy".to_owned());
        let template = Some("/etc/cluster-doctor/template.yaml".into());
        let expected = KubernetesConfig { kubeconfig: None, policy_map, template, ..backend(&config) };
        assert_eq!(map("cluster-doctor")["template.yaml"], STANDARD_TEMPLATE);
        assert_eq!(backend(&parsed), expected, "{doctor}");

        let deployed = printed["items"].as_array().unwrap().iter().find(|item| item["kind"] == "Deployment").unwrap();
        assert_eq!(deployed["spec"]["replicas"], 2);
        assert_eq!(deployed["metadata"]["namespace"], "gpu-health");
    }

    #[test]
    fn a_configuration_for_another_cluster_describes_the_defaults() {
        let config = Config::parse("cycle = \"20s\"\n", Path::new("/")).unwrap();
        assert_eq!(deployment_from_config(&config).unwrap().json(DeployPart::Values), json!({}));
        let rendered = deployment_from_config(&config).unwrap().json(DeployPart::Configuration);
        let doctor = rendered["items"][0]["data"]["doctor.toml"].as_str().unwrap();
        let read = Config::parse(doctor, Path::new("/etc/cluster-doctor")).unwrap();
        assert!(matches!(read.backend, BackendChoice::Kubernetes(_)), "{doctor}");
    }
}
