//! The objects of a Kubernetes deployment, printed as manifests or written as a Helm chart. Both are generated from the
//! same trees ([`objects`]) and the same table of settings ([`settings`]), so that they cannot diverge. The files of a
//! Slurm cluster are in [`slurm`], the units of a small site in [`systemd`].

mod chart;
mod error;
pub(crate) mod files;
mod from_config;
mod objects;
mod settings;
pub(crate) mod slurm;
pub(crate) mod systemd;
mod template;
mod yaml;

use serde_json::{Value, json};

use doctor_api::self_made_certificate::{CertificateError, MadeCertificate};
use doctor_backend_kubernetes::{KubernetesConfig, STANDARD_TEMPLATE};

use self::{
    objects::Group,
    template::{SettingValues, Template},
};

pub(crate) use self::{
    chart::{files as chart_files, settings_table as settings_page},
    error::DeployError,
    from_config::deployment_from_config,
    settings::SettingError,
};

/// The part of the deployment to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum DeployPart {
    /// Everything.
    All,
    /// Namespace, accounts, permissions and the priority class: what an administrator has to approve.
    Rights,
    /// The ConfigMaps.
    Configuration,
    /// The persistent volume claims.
    Storage,
    /// The controller, its Service and its PodDisruptionBudget.
    Controller,
    /// The agents.
    Agent,
    /// Not a manifest: the values with which the Helm chart creates the same objects.
    Values,
    /// Not a manifest: the job template in force, as a starting point for your own.
    Template,
    /// A new key and certificate of the agent endpoint, for `kubectl create`, and what the agents trust. Not part of `all`: each call
    /// makes another key.
    Certificate,
}

/// A deployment under construction. Later values override earlier ones: defaults, configuration, command line.
#[derive(Debug)]
pub(crate) struct Deployment {
    config: KubernetesConfig,
    values: SettingValues,
}

impl Deployment {
    /// Creates the deployment of the chart's default values. The permissions follow `config`, including what is no
    /// chart setting.
    pub(crate) fn new(config: KubernetesConfig) -> Self {
        let given = SettingValues { namespace: config.namespace.clone(), values: settings::defaults() };
        Self { config, values: given }
    }

    /// Sets the namespace.
    ///
    /// # Errors If it is not a valid namespace name.
    pub(crate) fn set_namespace(&mut self, namespace: &str) -> Result<(), SettingError> {
        settings::check_namespace(namespace)?;
        self.values.namespace = namespace.to_owned();
        Ok(())
    }

    /// Sets one setting.
    ///
    /// # Errors If the setting does not exist or does not accept the value.
    pub(crate) fn set(&mut self, name: &str, value: Value) -> Result<(), SettingError> {
        let setting = settings::find(name)?;
        setting.check(&value)?;
        settings::set_at_path(&mut self.values.values, setting.name, value);
        Ok(())
    }

    /// Sets one setting from `SETTING=VALUE`.
    ///
    /// # Errors
    /// As [`Self::set`].
    pub(crate) fn set_from_text(&mut self, written: &str) -> Result<(), SettingError> {
        let (name, value) = written.split_once('=').ok_or_else(|| SettingError::Syntax(written.to_owned()))?;
        let setting = settings::find(name.trim())?;
        let value = setting.parse(value)?;
        settings::set_at_path(&mut self.values.values, setting.name, value);
        Ok(())
    }

    fn rendered_objects(&self, what: DeployPart) -> Vec<Template> {
        let is_selected = |group: &Group| match what {
            DeployPart::All => true,
            DeployPart::Rights => *group == Group::Rights,
            DeployPart::Configuration => *group == Group::Configuration,
            DeployPart::Storage => *group == Group::Storage,
            DeployPart::Controller => *group == Group::Controller,
            DeployPart::Agent => *group == Group::Agent,
            DeployPart::Values | DeployPart::Template | DeployPart::Certificate => false,
        };
        let groups = Group::ALL.into_iter().filter(is_selected);
        groups.flat_map(|group| group.objects(&self.config)).filter_map(|tree| tree.render(&self.values)).collect()
    }

    /// Makes a certificate for the agent endpoint, and returns its objects.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(crate) fn certificate(&self) -> Result<Vec<Value>, CertificateError> {
        let made = MadeCertificate::for_names(&objects::service_names(&self.values.namespace))?;
        Ok(objects::certificate(&self.values, &made))
    }

    fn template(&self) -> &str {
        let custom = self.values.values["template"].as_str().filter(|custom| !custom.trim().is_empty());
        custom.unwrap_or(STANDARD_TEMPLATE)
    }

    /// Returns the manifests as YAML, or the values or the template.
    pub(crate) fn yaml(&self, what: DeployPart) -> String {
        match what {
            DeployPart::Values => yaml::file(&Template::from(chart::changed_values(&self.values.values))),
            DeployPart::Template => self.template().to_owned(),
            _ => yaml::documents(&self.rendered_objects(what)),
        }
    }

    /// Returns the same as JSON.
    pub(crate) fn json(&self, what: DeployPart) -> Value {
        match what {
            DeployPart::Values => chart::changed_values(&self.values.values),
            DeployPart::Template => json!({ "template": self.template() }),
            _ => {
                let items: Vec<Value> = self.rendered_objects(what).iter().map(Template::to_json).collect();
                json!({ "apiVersion": "v1", "kind": "List", "items": items })
            }
        }
    }
}

/// Returns objects as YAML.
pub(crate) fn objects_yaml(objects: Vec<Value>) -> String {
    let trees: Vec<Template> = objects.into_iter().map(Template::from).collect();
    yaml::documents(&trees)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_gets_the_certificate_and_never_the_key() {
        let deployment = Deployment::new(KubernetesConfig::default());
        let [secret, authority]: [Value; 2] = deployment.certificate().unwrap().try_into().unwrap();
        assert_eq!((&secret["kind"], &authority["kind"]), (&json!("Secret"), &json!("ConfigMap")));
        assert!(secret["stringData"]["tls.key"].as_str().unwrap().contains("PRIVATE KEY"));
        assert!(!authority.to_string().contains("PRIVATE KEY"));
        assert_eq!(authority["data"]["ca.crt"], secret["stringData"]["tls.crt"]);
        let items = deployment.json(DeployPart::All);
        let pod = |kind: &str| {
            let all = items["items"].as_array().unwrap();
            all.iter().find(|item| item["kind"] == kind).unwrap()["spec"]["template"]["spec"].to_string()
        };
        assert!(
            pod("Deployment").contains("\"cluster-doctor-tls\"") && pod("DaemonSet").contains("\"cluster-doctor-ca\"")
        );
        assert!(!pod("DaemonSet").contains("cluster-doctor-tls\""), "a kubelet reads the Secrets of its pods");
        assert_eq!(
            serde_saphyr::from_multiple::<Value>(&objects_yaml(vec![secret.clone(), authority.clone()])).unwrap(),
            [secret, authority]
        );
    }

    #[test]
    fn without_tls_both_sides_say_so() {
        let mut deployment = Deployment::new(KubernetesConfig::default());
        deployment.set("tls.kind", json!("none")).unwrap();
        let printed = deployment.json(DeployPart::All).to_string();
        for part in ["plain = true", "\"--plain\"", "http://cluster-doctor.cluster-doctor.svc:7443"] {
            assert!(printed.contains(part), "{part}");
        }
        for part in ["https://cluster-doctor", "HTTPS", "ca-file", "cluster-doctor-tls"] {
            assert!(!printed.contains(part), "{part}");
        }
    }

    #[test]
    fn every_setting_is_used_and_every_used_setting_is_documented() {
        let trees = Group::ALL.into_iter().flat_map(|group| group.objects(&KubernetesConfig::default()));
        let mut used: Vec<&str> =
            trees.flat_map(|tree| tree.setting_names()).filter(|name| *name != template::NAMESPACE).collect();
        used.sort_unstable();
        used.dedup();
        let mut known: Vec<&str> = settings::ALL.iter().map(|setting| setting.name).collect();
        known.sort_unstable();
        assert_eq!(used, known);
    }

    #[test]
    fn yaml_and_json_output_are_equal() {
        let mut deployment = Deployment::new(KubernetesConfig::default());
        deployment.set_from_text("policy=version = 7\n").unwrap();
        deployment.set("namespace.create", json!(true)).unwrap();
        let yaml: Vec<Value> = serde_saphyr::from_multiple(&deployment.yaml(DeployPart::All)).unwrap();
        let json = deployment.json(DeployPart::All);
        assert_eq!(json["items"].as_array().unwrap(), &yaml);
        assert!(yaml.len() > 15, "{}", yaml.len());
        assert_eq!(
            deployment.json(DeployPart::Values),
            json!({ "namespace": { "create": true }, "policy": "version = 7\n" })
        );
    }

    #[test]
    fn pods_get_only_the_privileges_they_need() {
        let deployment = Deployment::new(KubernetesConfig::default());
        let items = deployment.json(DeployPart::All)["items"].as_array().unwrap().clone();
        let pod = |kind: &str| {
            let found = items.iter().find(|item| item["kind"] == kind).unwrap();
            found["spec"]["template"]["spec"].clone()
        };
        let controller = pod("Deployment");
        assert_eq!(controller["securityContext"]["runAsNonRoot"], true);
        let inside = &controller["containers"][0]["securityContext"];
        assert_eq!(inside["readOnlyRootFilesystem"], true);
        assert_eq!(inside["allowPrivilegeEscalation"], false);
        assert_eq!(inside["capabilities"]["drop"], json!(["ALL"]));

        let agent = pod("DaemonSet");
        assert_eq!(agent["automountServiceAccountToken"], false);
        assert_eq!(agent["hostNetwork"], Value::Null);
        assert!(!agent["containers"][0]["resources"].to_string().contains("gpu"), "{agent}");
        let mounts = agent["containers"][0]["volumeMounts"].as_array().unwrap();
        let writable: Vec<&Value> =
            mounts.iter().filter(|mount| mount["readOnly"] != true).map(|mount| &mount["name"]).collect();
        assert_eq!(writable, ["state"]);
        let bound = items.iter().filter(|item| item["kind"].as_str().unwrap().ends_with("Binding"));
        for binding in bound {
            assert!(!binding["subjects"].to_string().contains("agent"), "{binding}");
        }
    }
}
