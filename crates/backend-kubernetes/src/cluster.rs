//! Access to one Kubernetes cluster: the client, the watches, and calls that block until the API server responds.

use std::{
    env,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use doctor_backend::{BackendError, Effect, deadline, token_review::TokenReviewer, trusted_file};
use hyper::http::Request;
use kube::{
    Api, Client,
    config::{KubeConfigOptions, Kubeconfig},
    core::{ApiResource, DynamicResourceScope},
};
use serde_json::Value;
use tokio::runtime::Runtime;

use super::{
    KubernetesConfig, Replace,
    failures::{self, Failures},
    job_template::TemplateFile,
    objects::{ApiNode, node_resource},
    result_transport::PodResults,
    token_review::KubernetesTokenReviewer,
    watch::{self, WatchCache},
    webhook,
};

/// The limit for the initial lists, and for new ones after a watch broke.
pub(super) const LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// The limit for one request to the API server.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// How often a patch is retried when another client changed the node in between.
pub(super) const MAX_ATTEMPTS: usize = 5;

pub struct KubernetesBackend {
    pub(super) config: Arc<KubernetesConfig>,
    pub(super) client: Client,
    pub(super) watch_cache: Arc<WatchCache>,
    pub(super) failures: Arc<Failures>,
    pub(super) pod_results: Arc<PodResults>,
    pub(super) templates: TemplateFile,
    pub(super) runtime: Runtime,
}

impl std::fmt::Debug for KubernetesBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KubernetesBackend").field("config", &self.config).finish_non_exhaustive()
    }
}

const OPEN: &str = "open the Kubernetes backend";

impl KubernetesBackend {
    /// Checks what [`Self::open`] would refuse. Asks no API server and changes nothing.
    ///
    /// # Errors
    /// If no cluster is configured, or its configuration cannot be read.
    pub fn verify(config: &KubernetesConfig) -> Result<(), BackendError> {
        let refuse = |text: String| BackendError { operation: OPEN, text, effect: Effect::NotAppliedPermanent };
        if let Replace::Webhook(webhook) = &config.replace {
            webhook::check(&webhook.url).map_err(refuse)?;
        }
        TemplateFile::open(config).map_err(|error| refuse(error.to_string()))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| refuse(error.to_string()))?;
        // Reads the credentials; the client connects with its first request.
        runtime.block_on(connect(config)).map(drop).map_err(refuse)
    }

    /// Starts to watch the cluster. The first snapshot reports whether it is reachable.
    ///
    /// # Errors
    /// If no cluster is configured, or its configuration cannot be read.
    pub fn open(config: KubernetesConfig) -> Result<Self, BackendError> {
        let refuse = |text: String| BackendError { operation: OPEN, text, effect: Effect::NotAppliedPermanent };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("doctor-kube")
            .enable_all()
            .build()
            .map_err(|error| refuse(error.to_string()))?;
        if let Replace::Webhook(webhook) = &config.replace {
            webhook::check(&webhook.url).map_err(refuse)?;
        }
        let templates = TemplateFile::open(&config).map_err(|error| refuse(error.to_string()))?;
        let client = runtime.block_on(connect(&config)).map_err(refuse)?;
        let (config, watched) = (Arc::new(config), Arc::new(WatchCache::new()));
        runtime.spawn(watch::watch_nodes(client.clone(), Arc::clone(&config), Arc::clone(&watched)));
        runtime.spawn(watch::watch_pods(client.clone(), Arc::clone(&config), Arc::clone(&watched)));
        let (failures, pod_results) = (Arc::new(Failures::default()), Arc::new(PodResults::default()));
        let (to, nodes, along) = (Arc::clone(&failures), Arc::clone(&watched), Arc::clone(&pod_results));
        runtime.spawn(failures::watch_failures(client.clone(), Arc::clone(&config), to, nodes, along));
        Ok(Self { config, client, watch_cache: watched, failures, pod_results, templates, runtime })
    }

    /// Returns the reviewer of this cluster's tokens.
    pub fn token_reviewer(&self) -> Arc<dyn TokenReviewer> {
        Arc::new(KubernetesTokenReviewer::new(
            self.client.clone(),
            self.runtime.handle().clone(),
            Arc::clone(&self.config),
        ))
    }

    /// Awaits a request to the API server, with the default limit.
    pub(super) fn request<T>(
        &self,
        operation: &'static str,
        question: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, KubeRequestError> {
        self.request_within(operation, REQUEST_TIMEOUT, question)
    }

    /// Awaits a request, with a given limit. It ends with the call to the backend that needs it.
    pub(super) fn request_within<T>(
        &self,
        operation: &'static str,
        limit: Duration,
        question: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, KubeRequestError> {
        let failed = |text: String, effect| {
            let error = BackendError { operation, text, effect };
            Err(KubeRequestError { code: None, already_exists: false, error })
        };
        if deadline::is_over() {
            return failed(deadline::TIME_IS_UP.to_owned(), Effect::NotAppliedRetry);
        }
        let limit = deadline::time_left(limit);
        self.runtime.block_on(async {
            match tokio::time::timeout(limit, question).await {
                Ok(answer) => answer.map_err(|error| KubeRequestError::from_kube(operation, &error)),
                Err(_) => {
                    failed(format!("the API server did not answer within {} s", limit.as_secs()), Effect::Unknown)
                }
            }
        })
    }

    /// Posts an object for which there is no typed call.
    pub(super) fn post(&self, operation: &'static str, path: &str, body: &Value) -> Result<Value, KubeRequestError> {
        self.request(operation, async {
            let request = Request::post(path).header("content-type", "application/json");
            let request = request.body(body.to_string().into_bytes()).map_err(kube::Error::HttpError)?;
            self.client.request::<Value>(request).await
        })
    }

    pub(super) fn nodes(&self) -> Api<ApiNode> {
        Api::all_with(self.client.clone(), &node_resource())
    }

    pub(super) fn jobs<K: DynamicResource>(&self, of: &ApiResource) -> Api<K> {
        Api::namespaced_with(self.client.clone(), &self.config.namespace, of)
    }
}

pub(super) async fn connect(config: &KubernetesConfig) -> Result<Client, String> {
    let options = KubeConfigOptions { context: config.context.clone(), ..KubeConfigOptions::default() };
    let settings = match &config.kubeconfig {
        Some(path) => {
            check_kubeconfig(path)?;
            let file = Kubeconfig::read_from(path).map_err(|error| format!("{}: {error}", path.display()))?;
            kube::Config::from_custom_kubeconfig(file, &options).await.map_err(|error| error.to_string())
        }
        None if config.context.is_some() => {
            default_kubeconfigs().iter().try_for_each(|path| check_kubeconfig(path))?;
            kube::Config::from_kubeconfig(&options).await.map_err(|error| error.to_string())
        }
        None => {
            default_kubeconfigs().iter().try_for_each(|path| check_kubeconfig(path))?;
            kube::Config::infer().await.map_err(|error| error.to_string())
        }
    };
    let mut settings = settings?;
    // A silent or overloaded server must fail soon, because an error makes the state unknown. A client that waits or retries by
    // itself would leave outdated state in use.
    settings.read_timeout = Some(watch::READ_TIMEOUT);
    settings.reset_reader_on_write = true;
    settings.default_retry = false;
    Client::try_from(settings).map_err(|error| error.to_string())
}

/// Refuses a kubeconfig that another user could change: it names the server that gets our credentials, and programs to run. The
/// client reads the file again by its path, whose directories others cannot change either.
fn check_kubeconfig(path: &Path) -> Result<(), String> {
    trusted_file::open(path).map(drop).map_err(|error| format!("{}: {error}", path.display()))
}

/// Returns the kubeconfigs that the client would read by itself, as far as they exist.
fn default_kubeconfigs() -> Vec<PathBuf> {
    let paths = match env::var_os("KUBECONFIG").filter(|paths| !paths.is_empty()) {
        Some(paths) => env::split_paths(&paths).collect(),
        None => env::var_os("HOME").map(|home| Path::new(&home).join(".kube/config")).into_iter().collect::<Vec<_>>(),
    };
    paths.into_iter().filter(|path| path.exists()).collect()
}

/// An object whose kind is given at run time.
pub(super) trait DynamicResource:
    kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>
{
}

impl<K: kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>> DynamicResource for K {}

/// A failed request, with the server's status code if it responded.
pub(super) struct KubeRequestError {
    pub(super) code: Option<u16>,
    /// The object to be created exists already.
    pub(super) already_exists: bool,
    pub(super) error: BackendError,
}

impl KubeRequestError {
    fn from_kube(operation: &'static str, error: &kube::Error) -> Self {
        let (code, text, effect) = match error {
            kube::Error::Api(status) => {
                let effect = match status.code {
                    // A conflict, throttling, a server that starts or stops; or permissions and quotas, which an operator may
                    // change in the meantime.
                    401 | 403 | 409 | 429 | 503 => Effect::NotAppliedRetry,
                    408 => Effect::Unknown,
                    400..=499 => Effect::NotAppliedPermanent,
                    _ => Effect::Unknown,
                };
                (Some(status.code), status.message.clone(), effect)
            }
            other => (None, other.to_string(), Effect::Unknown),
        };
        let exists = matches!(error, kube::Error::Api(status) if status.reason == "AlreadyExists");
        Self { code, already_exists: exists, error: BackendError { operation, text, effect } }
    }
}

impl From<KubeRequestError> for BackendError {
    fn from(failed: KubeRequestError) -> Self {
        failed.error
    }
}
