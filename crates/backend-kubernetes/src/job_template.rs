//! A site's template of jobs: a `batch/v1` Job in YAML into which each run is filled.
//!
//! Fields that keep a run safe are set by the service: the node and all its GPUs, the command and its key, the priority, the
//! deadlines. A template that sets one of these is rejected rather than overridden, because its author intended something by it.
//! All other fields come from the template.
//!
//! The k8s-openapi types determine which fields exist: a field that does not survive deserialising into them is unknown to
//! Kubernetes.

mod located;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use doctor_backend::trusted_file;
use doctor_core::toml_text::TomlError;
use k8s_openapi::api::batch::v1::Job;
use serde_json::Value;

use self::located::{Located, YamlNode, error_at};
use super::{
    KubernetesConfig, STANDARD_TEMPLATE,
    names::{CONTAINER, KEY_VARIABLE, MOUNT_PATHS, VOLUMES},
    occupancy::is_gpu,
};

/// A template that was parsed and accepted.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Template(Value);

#[derive(Debug, thiserror::Error)]
pub(super) enum TemplateError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}, {error}", path.display())]
    Invalid { path: PathBuf, error: TomlError },
}

/// Maps in which only these keys are accepted.
const ACCEPTED_KEYS: [(&[&str], &[&str]); 5] = [
    (&[], &["apiVersion", "kind", "metadata", "spec"]),
    (&["metadata"], &["labels", "annotations"]),
    (&["spec"], &["template"]),
    (&["spec", "template"], &["metadata", "spec"]),
    (&["spec", "template", "metadata"], &["labels", "annotations"]),
];

const POD: [&str; 3] = ["spec", "template", "spec"];

const NODE_HINT: &str = "the service chooses the node, among those of `node_selector` of [backend.kubernetes]";
const PRIORITY_HINT: &str = "set `priority_class` of [backend.kubernetes]";
const ACCOUNT_HINT: &str = "set `service_account` of [backend.kubernetes]";

/// Fields of the pod that the service sets, and what a site sets instead.
const RESERVED_POD_FIELDS: [(&str, &str); 15] = [
    ("nodeName", NODE_HINT),
    ("nodeSelector", NODE_HINT),
    ("affinity", NODE_HINT),
    ("topologySpreadConstraints", NODE_HINT),
    ("tolerations", "name the taint's key in `usual_taints` of [backend.kubernetes]"),
    ("schedulingGates", "a job is created when its node is free, and must start at once"),
    ("restartPolicy", "Kubernetes must not repeat a run"),
    ("activeDeadlineSeconds", "it follows from the limits of the tests, in the policy"),
    ("terminationGracePeriodSeconds", "set `grace` of [backend.kubernetes]"),
    ("priorityClassName", PRIORITY_HINT),
    ("priority", PRIORITY_HINT),
    ("preemptionPolicy", PRIORITY_HINT),
    ("serviceAccountName", ACCOUNT_HINT),
    ("serviceAccount", ACCOUNT_HINT),
    ("ephemeralContainers", "Kubernetes accepts none in a new pod"),
];

/// The same for our container.
const RESERVED_CONTAINER_FIELDS: [(&str, &str); 3] = [
    ("command", "each run has its own; sidecars go under initContainers"),
    ("args", "each run has its own; sidecars go under initContainers"),
    ("restartPolicy", "Kubernetes must not repeat a run"),
];

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    /// If it is not a Job in YAML, or sets a field that Kubernetes does not have or the service reserves.
    pub(super) fn read(text: &str, config: &KubernetesConfig) -> Result<Self, TomlError> {
        let tree: Located<YamlNode> = located::parse(text)?;
        let reader = TemplateChecker { text, config };
        reader.check_kind(&tree)?;
        let job: Job = located::parse(text)?;
        let job = serde_json::to_value(job).map_err(|error| TomlError::at(text, None, error.to_string()))?;
        reader.check_known_fields(&tree, &job, &mut vec!["job"])?;
        reader.reject_reserved_fields(&tree)?;
        Ok(Self(job))
    }

    /// Merges the template of a run's job: it overrides `usual`, and `ours` overrides both.
    pub(super) fn fill(&self, mut usual: Value, ours: Value) -> Value {
        merge(&mut usual, self.0.clone());
        merge(&mut usual, ours);
        usual
    }

    /// Returns whether the template requests devices of a plugin besides GPUs, such as `rdma/hca`.
    pub(super) fn requests_devices(&self, config: &KubernetesConfig) -> bool {
        let limits = self.0.pointer("/spec/template/spec/containers/0/resources/limits").and_then(Value::as_object);
        limits.is_some_and(|limits| limits.keys().any(|name| name.contains('/') && !is_gpu(name, config)))
    }

    /// Returns the image of our container, if the template sets one.
    pub(super) fn image(&self) -> Option<&str> {
        self.0.pointer("/spec/template/spec/containers/0/image").and_then(Value::as_str)
    }
}

/// Merges `over` into `under`. Lists are concatenated, because the template's and ours have no entry in common; `containers` has
/// one entry.
fn merge(under: &mut Value, over: Value) {
    match (under, over) {
        (Value::Object(under), Value::Object(over)) => {
            for (key, value) in over {
                match (under.get_mut(&key), value) {
                    (Some(Value::Array(there)), Value::Array(more)) if key == "containers" => {
                        there.iter_mut().zip(more).for_each(|(one, over)| merge(one, over));
                    }
                    (Some(there), value) => merge(there, value),
                    (None, value) => {
                        under.insert(key, value);
                    }
                }
            }
        }
        (Value::Array(under), Value::Array(over)) => under.extend(over),
        (under, over) => *under = over,
    }
}

/// Validates one template.
#[derive(Clone, Copy)]
struct TemplateChecker<'a> {
    text: &'a str,
    config: &'a KubernetesConfig,
}

impl TemplateChecker<'_> {
    fn check_kind(self, tree: &Located<YamlNode>) -> Result<(), TomlError> {
        for (key, expected) in [("apiVersion", "batch/v1"), ("kind", "Job")] {
            let found = tree.value.get(key);
            if found.and_then(|found| found.value.text()) != Some(expected) {
                let message = format!("a template is a Job: expected `{key}: {expected}`");
                return Err(error_at(self.text, found.unwrap_or(tree), message));
            }
        }
        Ok(())
    }

    /// Checks that every field in the text survived deserialising into the Kubernetes types.
    fn check_known_fields<'a>(
        self,
        tree: &'a Located<YamlNode>,
        accepted: &Value,
        path: &mut Vec<&'a str>,
    ) -> Result<(), TomlError> {
        for (key, value) in tree.value.entries() {
            if value.value == YamlNode::Null {
                continue;
            }
            let Some(accepted) = accepted.get(&key.value) else {
                let message = format!(
                    "Kubernetes has no field `{}` here: `kubectl explain {}` names those that it has",
                    key.value,
                    path.join(".")
                );
                return Err(error_at(self.text, key, message));
            };
            path.push(&key.value);
            self.check_known_fields(value, accepted, path)?;
            path.pop();
        }
        for (index, item) in tree.value.items().iter().enumerate() {
            self.check_known_fields(item, accepted.get(index).unwrap_or(&Value::Null), path)?;
        }
        Ok(())
    }

    fn reject_reserved_fields(self, tree: &Located<YamlNode>) -> Result<(), TomlError> {
        for (path, keys) in ACCEPTED_KEYS {
            let Some(map) = descend(tree, path) else { continue };
            if let Some((key, _)) = map.value.entries().iter().find(|(key, _)| !keys.contains(&key.value.as_str())) {
                let accepted = keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
                return Err(self.reserved_field_error(key, &format!("accepted here: {accepted}")));
            }
            for names in ["labels", "annotations"] {
                self.check_names(map.value.get(names).filter(|_| keys.contains(&names)))?;
            }
        }
        let Some(pod) = descend(tree, &POD) else { return Ok(()) };
        self.check_fields(pod, &RESERVED_POD_FIELDS)?;
        self.check_gpus(pod)?;
        self.check_containers(pod)?;
        for volume in pod.value.get("volumes").map_or(&[][..], |volumes| volumes.value.items()) {
            if let Some((name, text)) = name_of(volume)
                && VOLUMES.contains(&text)
            {
                return Err(
                    self.reserved_field_error(name, &format!("any name but {} is accepted", VOLUMES.join(", ")))
                );
            }
        }
        Ok(())
    }

    fn reserved_field_error<T: DisplayName>(self, at: &Located<T>, instead: &str) -> TomlError {
        error_at(self.text, at, format!("`{}` is set by the service: {instead}", at.value.display_name()))
    }

    fn check_fields(self, map: &Located<YamlNode>, ours: &[(&str, &str)]) -> Result<(), TomlError> {
        for (key, _) in map.value.entries() {
            if let Some((_, instead)) = ours.iter().find(|(name, _)| *name == key.value) {
                return Err(self.reserved_field_error(key, instead));
            }
        }
        Ok(())
    }

    /// Our labels and annotations identify the objects of a run, so a template must not set them.
    fn check_names(self, map: Option<&Located<YamlNode>>) -> Result<(), TomlError> {
        let own = self.config.prefixed("");
        for (key, _) in map.map_or(&[][..], |map| map.value.entries()) {
            if key.value.starts_with(&own) || key.value == "app.kubernetes.io/name" {
                return Err(
                    self.reserved_field_error(key, &format!("any name that does not begin with {own} is accepted"))
                );
            }
        }
        Ok(())
    }

    fn check_containers(self, pod: &Located<YamlNode>) -> Result<(), TomlError> {
        let all = |kind: &str| pod.value.get(kind).map_or(&[][..], |list| list.value.items());
        for (index, container) in all("containers").iter().enumerate() {
            match name_of(container) {
                Some((_, CONTAINER)) if index == 0 => {}
                Some((name, CONTAINER)) => {
                    return Err(error_at(self.text, name, "duplicate container name"));
                }
                other => {
                    let at = other.map_or(container, |(name, _)| name);
                    let message = format!(
                        "the only container is `name: {CONTAINER}`: a job ends when all its containers have ended; \
                         a sidecar goes under initContainers with `restartPolicy: Always`"
                    );
                    return Err(error_at(self.text, at, message));
                }
            }
            self.check_fields(container, &RESERVED_CONTAINER_FIELDS)?;
            self.check_gpus(container)?;
            self.check_container(container)?;
        }
        for container in all("initContainers") {
            self.check_gpus(container)?;
            if let Some((name, CONTAINER)) = name_of(container) {
                return Err(self.reserved_field_error(name, "give an init container another name"));
            }
        }
        Ok(())
    }

    /// Checks the lists inside our container.
    fn check_container(self, container: &Located<YamlNode>) -> Result<(), TomlError> {
        let all = |kind: &str| container.value.get(kind).map_or(&[][..], |list| list.value.items());
        for mount in all("volumeMounts") {
            let at = mount
                .value
                .get("mountPath")
                .filter(|path| path.value.text().is_some_and(|path| MOUNT_PATHS.contains(&path.trim_end_matches('/'))));
            if let Some(at) = at {
                return Err(
                    self.reserved_field_error(at, &format!("any path but {} is accepted", MOUNT_PATHS.join(", ")))
                );
            }
        }
        match all("env").iter().find_map(|one| name_of(one).filter(|(_, name)| *name == KEY_VARIABLE)) {
            Some((name, _)) => Err(self.reserved_field_error(name, "the key of a run comes from its Secret")),
            None => Ok(()),
        }
    }

    /// A run requests all GPUs of its node, so a template must not request any.
    fn check_gpus(self, of: &Located<YamlNode>) -> Result<(), TomlError> {
        for amounts in ["limits", "requests"] {
            let amounts = of.value.get("resources").and_then(|resources| resources.value.get(amounts));
            for (key, _) in amounts.map_or(&[][..], |amounts| amounts.value.entries()) {
                if is_gpu(&key.value, self.config) {
                    return Err(self
                        .reserved_field_error(key, "a run takes all GPUs of its node; other resources are accepted"));
                }
            }
        }
        Ok(())
    }
}

/// The text that an error quotes.
trait DisplayName {
    fn display_name(&self) -> &str;
}

impl DisplayName for String {
    fn display_name(&self) -> &str {
        self
    }
}

impl DisplayName for YamlNode {
    fn display_name(&self) -> &str {
        self.text().unwrap_or_default()
    }
}

fn descend<'a>(tree: &'a Located<YamlNode>, path: &[&str]) -> Option<&'a Located<YamlNode>> {
    path.iter().try_fold(tree, |tree, key| tree.value.get(key))
}

/// Returns the name of a list entry.
fn name_of(item: &Located<YamlNode>) -> Option<(&Located<YamlNode>, &str)> {
    let name = item.value.get("name")?;
    Some((name, name.value.text()?))
}

/// Checks a template. It is read again for each job; errors are reported where the configuration is read.
///
/// # Errors
/// As [`Template::read`].
pub(crate) fn check_template(text: &str, config: &KubernetesConfig) -> Result<(), TomlError> {
    Template::read(text, config).map(|_| ())
}

/// The current template. If the file changes and is invalid, the last valid one stays in use; the configuration watches the same
/// file and reports the error.
#[derive(Debug)]
pub(super) struct TemplateFile {
    path: Option<PathBuf>,
    last: Mutex<(String, Template)>,
}

impl TemplateFile {
    pub(super) fn open(config: &KubernetesConfig) -> Result<Self, TemplateError> {
        let path = config.template.clone();
        let text = match &path {
            Some(path) => trusted_file::read_to_string(path)
                .map_err(|source| TemplateError::Read { path: path.clone(), source })?,
            None => STANDARD_TEMPLATE.to_owned(),
        };
        let bad = |error| TemplateError::Invalid {
            path: path.clone().unwrap_or_else(|| "the built-in template".into()),
            error,
        };
        let template = Template::read(&text, config).map_err(bad)?;
        Ok(Self { path, last: Mutex::new((text, template)) })
    }

    pub(super) fn current(&self, config: &KubernetesConfig) -> Template {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(text) = self.path.as_deref().and_then(|path: &Path| trusted_file::read_to_string(path).ok())
            && text != last.0
            && let Ok(template) = Template::read(&text, config)
        {
            *last = (text, template);
        }
        last.1.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    fn read(text: &str) -> Result<Template, TomlError> {
        Template::read(text, &KubernetesConfig::default())
    }

    fn pod(lines: &str) -> String {
        let lines: String = lines.lines().map(|line| format!("      {line}\n")).collect();
        format!("apiVersion: batch/v1\nkind: Job\nspec:\n  template:\n    spec:\n{lines}")
    }

    #[test]
    fn the_built_in_template_is_valid_and_mounts_dev_shm_from_memory() {
        let template = read(STANDARD_TEMPLATE).unwrap();
        let job = template.fill(json!({}), json!({}));
        assert_eq!(job["spec"]["template"]["spec"]["volumes"][0]["emptyDir"]["medium"], "Memory");
        assert_eq!(template.image(), None);
    }

    #[test]
    fn our_fields_are_merged_over_the_template_and_its_other_fields_stay() {
        let text = "apiVersion: batch/v1\nkind: Job\nmetadata: { annotations: { team: ml }, labels: { containers: many } }\nspec:\n  \
            template:\n    spec:\n      hostNetwork: true\n      containers:\n      - name: doctor-node\n        image: ours:1\n        \
            env: [{ name: NCCL_DEBUG, value: 1 }]\n        resources: { limits: { rdma/hca: 8 } }\n";
        let container = |more: Value| json!({ "spec": { "template": { "spec": { "containers": [more] } } } });
        let usual = container(json!({ "name": "doctor-node", "image": "usual", "imagePullPolicy": "Always" }));
        let mut ours =
            container(json!({ "name": "doctor-node", "command": ["doctor-node", "job"], "env": [{ "name": "KEY" }],
            "resources": { "limits": { "nvidia.com/gpu": "8" } } }));
        ours["metadata"] = json!({ "labels": { "run": "1" } });
        let filled = read(text).unwrap().fill(usual, ours);
        let expected = json!({ "name": "doctor-node", "image": "ours:1", "imagePullPolicy": "Always", "command": ["doctor-node", "job"],
            "env": [{ "name": "NCCL_DEBUG", "value": "1" }, { "name": "KEY" }],
            "resources": { "limits": { "rdma/hca": "8", "nvidia.com/gpu": "8" } } });
        assert_eq!(filled["spec"]["template"]["spec"]["containers"], json!([expected]));
        assert_eq!(filled["spec"]["template"]["spec"]["hostNetwork"], true);
        assert_eq!(filled["metadata"]["annotations"], json!({ "team": "ml" }));
        assert_eq!(filled["metadata"]["labels"], json!({ "run": "1", "containers": "many" }));
    }

    #[test]
    fn a_template_without_containers_gets_our_container() {
        let usual = json!({ "spec": { "template": { "spec": { "containers": [{ "name": "doctor-node" }] } } } });
        let filled = read(&pod("hostPID: true")).unwrap().fill(usual, json!({}));
        assert_eq!(filled["spec"]["template"]["spec"]["containers"][0]["name"], "doctor-node");
    }

    #[test]
    fn a_template_that_requests_rdma_devices_is_recognised() {
        let requests = |limits: &str| {
            let text = pod(&format!("containers:\n- name: doctor-node\n  resources:\n    limits: {limits}"));
            read(&text).unwrap().requests_devices(&KubernetesConfig::default())
        };
        assert!(requests("{ rdma/hca: 8 }") && requests("{ vpc.amazonaws.com/efa: 32 }"));
        assert!(!requests("{ memory: 1Gi, hugepages-2Mi: 5Gi }"));
        assert!(!read(STANDARD_TEMPLATE).unwrap().requests_devices(&KubernetesConfig::default()));
    }

    #[test]
    fn a_template_error_names_the_line_the_column_and_the_accepted_values() {
        let container = |lines: &str| {
            let lines: String = lines.lines().map(|line| format!("  {line}\n")).collect();
            pod(&format!("containers:\n- name: doctor-node\n{lines}"))
        };
        let mut mismatches = Vec::new();
        for (text, line, column, part) in [
            ("spec: [".to_owned(), 1, 7, "unclosed bracket '['\n"),
            ("kind: Job\n".to_owned(), 1, 1, "expected `apiVersion: batch/v1`"),
            ("apiVersion: batch/v1\nkind: Pod\n".to_owned(), 2, 7, "expected `kind: Job`"),
            ("apiVersion: batch/v1\nkind: Job\nkind: Job\n".to_owned(), 3, 1, "kind"),
            (
                "apiVersion: batch/v1\nkind: Job\nmetadata: { name: a }\n".to_owned(),
                3,
                13,
                "accepted here: `labels`, `annotations`",
            ),
            (
                "apiVersion: batch/v1\nkind: Job\nspec:\n  backoffLimit: 3\n".to_owned(),
                4,
                3,
                "accepted here: `template`",
            ),
            ("apiVersion: batch/v1\nkind: Job\nspec:\n  templat: {}\n".to_owned(), 4, 3, "kubectl explain job.spec`"),
            (
                "apiVersion: batch/v1\nkind: Job\nmetadata:\n  labels: { cluster-doctor.io/run: a }\n".to_owned(),
                4,
                13,
                "does not begin with cluster-doctor.io/",
            ),
            (pod("nodeName: gpu-1"), 6, 7, "the service chooses the node"),
            (pod("activeDeadlineSeconds: 5"), 6, 7, "limits of the tests"),
            (pod("tolerations: [{ operator: Exists }]"), 6, 7, "usual_taints"),
            (pod("hostNetwork: maybe"), 6, 20, ""),
            (
                pod("volumes:\n- name: shm\n  emptyDir:\n    mediun: Memory"),
                9,
                11,
                "job.spec.template.spec.volumes.emptyDir`",
            ),
            (pod("volumes: [{ name: data }]"), 6, 25, "any name but data"),
            (pod("containers:\n- name: exporter"), 7, 15, "initContainers with `restartPolicy: Always`"),
            (pod("containers:\n- name: doctor-node\n- name: doctor-node"), 8, 15, "duplicate container"),
            (pod("initContainers: [{ name: doctor-node }]"), 6, 32, "another name"),
            (container("command: [sh]"), 8, 9, "each run has its own"),
            (container("env: [{ name: DOCTOR_RUN_KEY, value: a }]"), 8, 23, "its Secret"),
            (container("volumeMounts: [{ name: a, mountPath: /data/ }]"), 8, 46, "any path but /data"),
            (container("resources:\n  limits:\n    nvidia.com/gpu: 4"), 10, 13, "takes all GPUs"),
        ] {
            let error = read(&text).unwrap_err();
            if (error.line(), error.column()) != (Some(line), Some(column)) || !error.to_string().contains(part) {
                mismatches.push(format!("expected {part:?} in line {line}, column {column}: {error}"));
            }
        }
        assert!(mismatches.is_empty(), "{}", mismatches.join("\n\n"));
    }

    #[test]
    fn a_changed_file_is_reloaded_and_an_invalid_change_keeps_the_last_valid_template() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("job.yaml");
        let image = |image: &str| pod(&format!("containers:\n- name: doctor-node\n  image: {image}"));
        fs::write(&path, image("a:1")).unwrap();
        let config = KubernetesConfig { template: Some(path.clone()), ..KubernetesConfig::default() };
        let templates = TemplateFile::open(&config).unwrap();
        for (text, expected) in [(image("b:2"), "b:2"), (pod("nodeName: gpu-1"), "b:2"), (image("c:3"), "c:3")] {
            fs::write(&path, text).unwrap();
            assert_eq!(templates.current(&config).image(), Some(expected));
        }
        fs::remove_file(&path).unwrap();
        assert_eq!(templates.current(&config).image(), Some("c:3"));
        let error = TemplateFile::open(&config).unwrap_err().to_string();
        assert!(error.contains("job.yaml"), "{error}");
    }
}
