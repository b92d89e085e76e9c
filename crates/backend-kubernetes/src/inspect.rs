//! Checks that a cluster has what the settings name: queries the API server with the configured credentials and changes nothing.

use std::{collections::BTreeSet, time::Duration};

use doctor_backend::inspection::{InspectionItem, format_nodes};
use doctor_core::ids::NodeName;
use k8s_openapi::api::{
    authentication::v1::SelfSubjectReview,
    authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, PostParams},
    core::{ApiResource, GroupVersionKind},
};

use super::{
    KubernetesConfig, Share,
    cluster::connect,
    job_template::TemplateFile,
    objects::{CachedNode, PodObject, pod_resource},
    occupancy::{has_gpus, is_gpu, parse_whole},
    rbac::{self, ACCOUNT, Permission},
};

/// The limit for one request to the API server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// How many nodes or pods are listed at a time.
const PAGE: u32 = 500;
const APPLY_RIGHTS: &str = "doctor deploy kubernetes --what rights | kubectl apply -f -";
const APPLY_ALL: &str = "doctor deploy kubernetes | kubectl apply -f -";

/// The findings, and where agents should run and do.
#[derive(Debug, Default)]
pub struct Inspection {
    pub findings: Vec<InspectionItem>,
    /// Nodes with GPUs. `None`: the query failed.
    pub nodes: Option<Vec<NodeName>>,
    /// Nodes with a pod of the agents' account. `None`: the query failed.
    pub agent_pods: Option<BTreeSet<NodeName>>,
}

/// Inspects everything that the settings name. An unreachable cluster is a finding.
pub fn inspect(config: &KubernetesConfig) -> Inspection {
    // A template that cannot be used is reported where the configuration is read.
    let template = TemplateFile::open(config).ok().map(|templates| templates.current(config));
    let image = template.as_ref().and_then(|template| template.image()).unwrap_or(&config.image).to_owned();
    let config = &KubernetesConfig { image, ..config.clone() };
    let unreachable_report = |text: String| {
        let remedy = "check that `kubeconfig` and `context` name the right cluster, and that its API server is reachable from here";
        Inspection { findings: vec![InspectionItem::bad("cluster", text, remedy)], ..Inspection::default() }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return unreachable_report(error.to_string()),
    };
    runtime.block_on(async {
        let client = match connect(config).await {
            Ok(client) => client,
            Err(error) => return unreachable_report(error),
        };
        let mut inspector = Inspector { config, client, inspection: Inspection::default() };
        match inspector.with_timeout(inspector.client.apiserver_version()).await {
            Ok(version) => {
                inspector.add(InspectionItem::good("cluster", format!("Kubernetes {} answers", version.git_version)));
            }
            Err(error) => return unreachable_report(error),
        }
        inspector.account().await;
        inspector.rights().await;
        inspector.namespace().await;
        inspector.share().await;
        inspector.priority_class().await;
        inspector.policy_map().await;
        inspector.nodes().await;
        inspector.agent_pods().await;
        inspector.inspection
    })
}

struct Inspector<'a> {
    config: &'a KubernetesConfig,
    client: Client,
    inspection: Inspection,
}

/// The result of reading an object.
enum Lookup {
    Found(Box<DynamicObject>),
    Missing,
    Failed(String),
}

impl Inspector<'_> {
    fn add(&mut self, found: InspectionItem) {
        self.inspection.findings.push(found);
    }

    async fn with_timeout<T>(&self, request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, String> {
        match tokio::time::timeout(REQUEST_TIMEOUT, request).await {
            Ok(answer) => answer.map_err(|error| match error {
                kube::Error::Api(status) => status.message,
                other => other.to_string(),
            }),
            Err(_) => Err(format!("no answer within {} s", REQUEST_TIMEOUT.as_secs())),
        }
    }

    async fn get(&self, (group, version, kind): (&str, &str, &str), namespace: Option<&str>, name: &str) -> Lookup {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let api: Api<DynamicObject> = match namespace {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
            None => Api::all_with(self.client.clone(), &resource),
        };
        match self.with_timeout(api.get_opt(name)).await {
            Ok(Some(found)) => Lookup::Found(Box::new(found)),
            Ok(None) => Lookup::Missing,
            Err(error) => Lookup::Failed(error),
        }
    }

    /// Reports the user of these requests, whose permissions the other findings describe.
    async fn account(&mut self) {
        let reviews: Api<SelfSubjectReview> = Api::all(self.client.clone());
        let response = self.with_timeout(reviews.create(&PostParams::default(), &SelfSubjectReview::default())).await;
        let name = response.map(|review| {
            review.status.and_then(|status| status.user_info).and_then(|user| user.username).unwrap_or_default()
        });
        let service = format!("system:serviceaccount:{}:{ACCOUNT}", self.config.namespace);
        self.add(match name {
            Ok(name) if name == service => InspectionItem::good("account", format!("checked as {name}")),
            Ok(name) => {
                InspectionItem::unknown("account", format!("checked as {name}: its rights are not those of {service}"))
                    .with_remedy(format!(
                        "run it in the pod: kubectl -n {} exec deploy/cluster-doctor -- doctor config check --live",
                        self.config.namespace
                    ))
            }
            Err(error) => InspectionItem::unknown("account", format!("SelfSubjectReview failed: {error}")),
        });
    }

    async fn rights(&mut self) {
        let reviews: Api<SelfSubjectAccessReview> = Api::all(self.client.clone());
        let (mut there, before) = (0, self.inspection.findings.len());
        for right in rbac::permissions(self.config) {
            let attributes = ResourceAttributes {
                group: Some(right.group.to_owned()),
                resource: Some(right.resource().to_owned()),
                subresource: right.subresource().map(str::to_owned),
                verb: Some(right.verb.to_owned()),
                namespace: right.namespaced.then(|| self.config.namespace.clone()),
                ..ResourceAttributes::default()
            };
            let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() };
            let review = SelfSubjectAccessReview { spec, ..Default::default() };
            let what = format!("right to {right}");
            match self.with_timeout(reviews.create(&PostParams::default(), &review)).await {
                Ok(answer) if answer.status.as_ref().is_some_and(|status| status.allowed) => there += 1,
                Ok(_) => self.add(InspectionItem::bad(what, self.not_granted(&right), APPLY_RIGHTS)),
                Err(error) => {
                    self.add(InspectionItem::unknown(what, format!("SelfSubjectAccessReview failed: {error}")));
                }
            }
        }
        if self.inspection.findings.len() == before {
            self.add(InspectionItem::good("rights", format!("all {there} that the service uses are granted")));
        }
    }

    fn not_granted(&self, right: &Permission) -> String {
        let scope = if right.namespaced {
            format!("in the namespace {}", self.config.namespace)
        } else {
            "in the whole cluster".to_owned()
        };
        format!("not granted {scope}")
    }

    async fn namespace(&mut self) {
        let name = &self.config.namespace;
        let found = match self.get(("", "v1", "Namespace"), None, name).await {
            Lookup::Found(_) => InspectionItem::good("namespace", format!("{name} exists")),
            Lookup::Missing => InspectionItem::bad("namespace", format!("{name} does not exist"), APPLY_RIGHTS),
            Lookup::Failed(error) => InspectionItem::unknown("namespace", error),
        };
        self.add(found);
    }

    async fn share(&mut self) {
        let config = self.config;
        let name = match &config.share {
            Share::Claim(name) => name,
            Share::HostPath(_) => {
                return self.add(InspectionItem::unknown(
                    "shared directory",
                    "a path on every node; only the nodes can tell whether it is the same directory everywhere",
                ));
            }
            Share::None => {
                return self
                    .add(InspectionItem::good("shared directory", "none: results and logs are read from the pods"));
            }
        };
        let what = format!("volume claim {name}");
        let found = match self.get(("", "v1", "PersistentVolumeClaim"), Some(&config.namespace), name).await {
            Lookup::Found(claim) => inspect_claim(&what, &claim),
            Lookup::Missing => InspectionItem::bad(
                what,
                format!("not found in namespace {}", config.namespace),
                format!("create it for a volume that every node can mount, or set another in `share`; or: {APPLY_ALL}"),
            ),
            Lookup::Failed(error) => InspectionItem::unknown(what, error),
        };
        self.add(found);
    }

    async fn priority_class(&mut self) {
        let Some(name) = &self.config.priority_class else {
            return self.add(InspectionItem::good(
                "priority class",
                "not set: jobs have the cluster's default priority, and user pods do not preempt them",
            ));
        };
        let what = format!("priority class {name}");
        let found = match self.get(("scheduling.k8s.io", "v1", "PriorityClass"), None, name).await {
            Lookup::Found(class) => match class.data["value"].as_i64() {
                Some(value) if value < 0 => InspectionItem::good(what, format!("its value is {value}")),
                value => InspectionItem::bad(
                    what,
                    format!("its value is {}, expected below 0, the usual value of user pods", value.unwrap_or(0)),
                    format!("kubectl delete priorityclass {name}; {APPLY_RIGHTS}"),
                ),
            },
            Lookup::Missing => InspectionItem::bad(what, "not found: no job can be created", APPLY_RIGHTS),
            Lookup::Failed(error) => InspectionItem::unknown(what, error),
        };
        self.add(found);
    }

    async fn policy_map(&mut self) {
        let config = self.config;
        let Some(name) = &config.policy_map else {
            return self.add(InspectionItem::good("policy", "not set: jobs use the built-in parameters"));
        };
        let what = format!("policy in ConfigMap {name}");
        let make = format!("kubectl -n {} create configmap {name} --from-file=policy.toml", config.namespace);
        let found = match self.get(("", "v1", "ConfigMap"), Some(&config.namespace), name).await {
            Lookup::Found(map) if map.data["data"]["policy.toml"].is_string() => InspectionItem::good(what, "exists"),
            Lookup::Found(_) => InspectionItem::bad(what, "it has no key policy.toml", make),
            Lookup::Missing => InspectionItem::bad(what, format!("not found in namespace {}", config.namespace), make),
            Lookup::Failed(error) => InspectionItem::unknown(what, error),
        };
        self.add(found);
    }

    async fn nodes(&mut self) {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Node"));
        let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
        let mut selected = ListParams::default().limit(PAGE);
        selected.label_selector.clone_from(&self.config.node_selector);
        let mut seen = NodeSurvey::default();
        loop {
            let page = match self.with_timeout(api.list(&selected)).await {
                Ok(page) => page,
                Err(error) => {
                    return self.add(InspectionItem::unknown("nodes", format!("listing failed: {error}")));
                }
            };
            for node in page.items {
                seen.add(node, self.config);
            }
            match page.metadata.continue_.filter(|next| !next.is_empty()) {
                Some(next) => selected.continue_token = Some(next),
                None => break,
            }
        }
        let findings = seen.findings(self.config);
        self.inspection.findings.extend(findings);
        self.inspection.nodes = Some(seen.with_gpus);
    }

    async fn agent_pods(&mut self) {
        let api: Api<PodObject> =
            Api::namespaced_with(self.client.clone(), self.config.agent_namespace(), &pod_resource());
        let of_agents =
            ListParams::default().fields(&format!("spec.serviceAccountName={}", self.config.agents.account));
        match self.with_timeout(api.list(&of_agents)).await {
            Ok(pods) => {
                let placed = pods.items.iter().filter_map(|pod| NodeName::new(pod.spec.node_name.as_ref()?).ok());
                self.inspection.agent_pods = Some(placed.collect());
            }
            Err(error) => {
                self.add(InspectionItem::unknown("agents' pods", format!("listing failed: {error}")));
            }
        }
    }
}

fn inspect_claim(what: &str, claim: &DynamicObject) -> InspectionItem {
    let phase = claim.data["status"]["phase"].as_str().unwrap_or("without a phase");
    let modes = claim.data["spec"]["accessModes"].as_array().cloned().unwrap_or_default();
    if phase != "Bound" {
        let remedy = "see kubectl describe pvc: no volume fits, or its class waits for the first pod that mounts it (WaitForFirstConsumer)";
        return InspectionItem::bad(what, format!("it is {phase}, not Bound"), remedy);
    }
    if !modes.iter().any(|mode| mode == "ReadWriteMany") {
        let remedy = "create one with the access mode ReadWriteMany: jobs run on every node, and the service reads it";
        return InspectionItem::bad(what, "only one node at a time can mount it", remedy);
    }
    InspectionItem::good(what, "it is bound, and every node can mount it")
}

/// A summary of all nodes.
#[derive(Debug, Default)]
struct NodeSurvey {
    all: usize,
    /// Nodes that could not be parsed.
    unparsed: usize,
    with_gpus: Vec<NodeName>,
    /// Nodes with GPUs of which none is allocatable now.
    without_allocatable: Vec<NodeName>,
    /// Nodes with GPUs that have our image.
    with_image: usize,
}

impl NodeSurvey {
    fn add(&mut self, node: DynamicObject, config: &KubernetesConfig) {
        self.all += 1;
        let Ok(name) = NodeName::new(&node.name_any()) else { return };
        let images = node.data["status"]["images"].as_array().cloned().unwrap_or_default();
        let names = images.iter().filter_map(|image| image["names"].as_array()).flatten();
        let has_image = names.filter_map(|name| name.as_str()).any(|name| is_image(name, &config.image));
        let Ok(node) = serde_json::to_value(node).and_then(serde_json::from_value::<CachedNode>) else {
            self.unparsed += 1;
            return;
        };
        if !has_gpus(&node, config) {
            return;
        }
        let there = |(name, amount): (&str, &str)| is_gpu(name, config) && parse_whole(amount) != Some(0);
        if !node.status.as_ref().is_some_and(|status| status.allocatable.iter().any(there)) {
            self.without_allocatable.push(name.clone());
        }
        self.with_image += usize::from(has_image);
        self.with_gpus.push(name);
    }

    fn findings(&self, config: &KubernetesConfig) -> Vec<InspectionItem> {
        let total = self.with_gpus.len();
        let mut found = Vec::new();
        found.push(if total == 0 {
            InspectionItem::bad(
                "GPU nodes",
                format!("none of {} nodes has {}=true or a resource of {:?}", self.all, config.gpu_present_label, config.gpu_resources),
                "install the device plugin and GPU feature discovery, or set `gpu_present_label`, `gpu_resources` and `node_selector` to what this cluster has",
            )
        } else {
            InspectionItem::good("GPU nodes", format!("{total} of {} nodes", self.all))
        });
        if self.unparsed > 0 {
            found.push(InspectionItem::unknown(
                "nodes",
                format!("{} of {} could not be parsed", self.unparsed, self.all),
            ));
        }
        if !self.without_allocatable.is_empty() {
            let text = format!("no GPU is allocatable on {}", format_nodes(&self.without_allocatable));
            found.push(InspectionItem::bad(
                "device plugin",
                text,
                "check that the device plugin's pod runs on them: kubectl describe node",
            ));
        }
        // Only running a pod can prove that the image can be pulled.
        found.push(match self.with_image {
            0 => InspectionItem::unknown("image", format!("not verified: no GPU node has {} yet", config.image))
                .with_remedy(
                    "it is pulled with the first job; `doctor log RUN` and kubectl describe pod say if that fails",
                ),
            some => InspectionItem::good("image", format!("{} is on {some} of {total} GPU nodes", config.image)),
        });
        found
    }
}

/// Nodes report the full name: `docker.io/library/x:1` for `x:1`.
fn is_image(on_node: &str, image: &str) -> bool {
    on_node == image || on_node.strip_suffix(image).is_some_and(|before| before.ends_with('/'))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use doctor_backend::inspection::InspectionStatus;

    fn claim(phase: &str, mode: &str) -> InspectionStatus {
        let object = json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "c" },
            "spec": { "accessModes": [mode] }, "status": { "phase": phase } });
        inspect_claim("claim", &serde_json::from_value(object).unwrap()).status
    }

    #[test]
    fn a_volume_claim_is_good_when_it_is_bound_and_every_node_can_mount_it() {
        assert_eq!(claim("Bound", "ReadWriteMany"), InspectionStatus::Good);
        assert_eq!(claim("Pending", "ReadWriteMany"), InspectionStatus::Bad);
        assert_eq!(claim("Bound", "ReadWriteOnce"), InspectionStatus::Bad);
    }

    #[test]
    fn nodes_without_gpus_and_images_absent_from_all_nodes_are_reported() {
        let node = |name: &str, gpus: &str, image: &str| -> DynamicObject {
            serde_json::from_value(json!({
                "apiVersion": "v1", "kind": "Node", "spec": {},
                "metadata": { "name": name, "labels": { "nvidia.com/gpu.present": "true" } },
                "status": {
                    "allocatable": { "nvidia.com/gpu": gpus },
                    "images": [{ "names": [format!("example.com/{image}")] }],
                },
            }))
            .unwrap()
        };
        let statuses = |nodes: Vec<DynamicObject>| {
            let config = KubernetesConfig { image: "doctor:1".to_owned(), ..KubernetesConfig::default() };
            let mut seen = NodeSurvey::default();
            nodes.into_iter().for_each(|node| seen.add(node, &config));
            seen.findings(&config).into_iter().map(|one| (one.subject, one.status)).collect::<Vec<_>>()
        };
        let (good, bad, unknown) = (InspectionStatus::Good, InspectionStatus::Bad, InspectionStatus::Unknown);
        assert_eq!(statuses(vec![]), [("GPU nodes".to_owned(), bad), ("image".to_owned(), unknown)]);
        assert_eq!(
            statuses(vec![node("a", "8", "doctor:1"), node("b", "0", "notdoctor:1")]),
            [("GPU nodes".to_owned(), good), ("device plugin".to_owned(), bad), ("image".to_owned(), good)]
        );
        assert_eq!(
            statuses(vec![node("a", "8", "xdoctor:1")]),
            [("GPU nodes".to_owned(), good), ("image".to_owned(), unknown)]
        );
    }
}
