//! The current nodes and pods of the cluster, kept up to date by watches.
//!
//! Each kind is listed once and then watched. When a watch breaks, its objects count as unknown until they are listed again:
//! queries in between return an error, never outdated state.
//!
//! The list is streamed (`sendInitialEvents`), object by object, so that the peak of memory is not a page of objects of which
//! little is kept. A server that does not stream lists is listed in pages.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use doctor_backend::deadline;
use futures_util::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    runtime::watcher::{self, Event, watcher},
};

use super::{
    config::KubernetesConfig,
    interned_map::Interner,
    names,
    objects::{ApiNode, CachedNode, NodeInterners, PodObject, node_resource, pod_resource},
    occupancy::{PodOnNode, has_gpus, uses_gpus},
    pending_demand::{self, PendingPod},
};

/// The duration of one watch request.
pub(super) const WATCH_SECONDS: u32 = 20;
/// A connection that is silent for this long is dead: longer than a watch without events, plus the client's margin.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// The delay between attempts to list, doubled from the first to the longest.
pub(super) const MIN_BACKOFF: Duration = Duration::from_millis(500);
pub(super) const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Objects per page of a list, as in `kubectl` and client-go: listing 5,000 nodes takes ten requests. A page is in memory as text
/// and as objects until the kept part is extracted. Used only with servers that do not stream lists.
const PAGE: u32 = 500;
/// Pods that have ended use no resources.
const ACTIVE_PODS: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// The part of a pod that is kept.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum CachedPod {
    Placed(PlacedPod),
    /// It requests GPUs and is not scheduled.
    Pending(Box<PendingPod>),
}

/// The node of a pod, assigned or expected, and its use of that node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlacedPod {
    pub(super) node: Arc<str>,
    pub(super) tenant: PodOnNode,
    pub(super) run: Option<doctor_core::ids::RunId>,
}

/// All objects of one kind.
#[derive(Debug)]
struct ObjectCache<T> {
    items: HashMap<Arc<str>, T>,
    /// The objects received so far, during a list.
    listing: Option<HashMap<Arc<str>, T>>,
    /// Why the objects are not current; `None`: they are.
    stale_since: Option<(Instant, String)>,
    /// Whether a known object is newer than the listed one: we may have written it in the meantime.
    is_newer: fn(&T, &T) -> bool,
}

impl<T> ObjectCache<T> {
    fn new(is_newer: fn(&T, &T) -> bool) -> Self {
        let broken = Some((Instant::now(), "not listed yet".to_owned()));
        Self { items: HashMap::new(), listing: None, stale_since: broken, is_newer }
    }

    /// `None` removes the object: it is irrelevant or gone.
    fn apply(&mut self, key: Arc<str>, item: Option<T>) {
        let items = self.listing.as_mut().unwrap_or(&mut self.items);
        match item {
            Some(item) => drop(items.insert(key, item)),
            None => drop(items.remove(&key)),
        }
    }

    fn finish_list(&mut self) {
        let mut listed = self.listing.take().unwrap_or_default();
        for (key, known) in self.items.drain() {
            if let Some(item) = listed.get_mut(&key)
                && (self.is_newer)(&known, item)
            {
                *item = known;
            }
        }
        self.items = listed;
        self.items.shrink_to_fit();
        self.stale_since = None;
    }

    fn fail(&mut self, why: String) {
        self.listing = None;
        self.stale_since.get_or_insert((Instant::now(), why));
    }
}

#[derive(Debug)]
struct CacheState {
    nodes: ObjectCache<Box<CachedNode>>,
    pods: ObjectCache<CachedPod>,
}

#[derive(Debug)]
pub(super) struct WatchCache {
    state: Mutex<CacheState>,
    changed: Condvar,
}

impl WatchCache {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(CacheState {
                nodes: ObjectCache::new(|node, than| is_newer(node, than)),
                pods: ObjectCache::new(|_, _| false),
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, CacheState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads all nodes and pods. Waits at most `patience` for the initial lists, or for new ones.
    ///
    /// # Errors
    /// Why the state of the cluster is unknown.
    pub(super) fn read<T>(
        &self,
        timeout: Duration,
        read: impl FnOnce(&HashMap<Arc<str>, Box<CachedNode>>, &HashMap<Arc<str>, CachedPod>) -> T,
    ) -> Result<T, String> {
        let broken = |state: &mut CacheState| state.nodes.stale_since.is_some() || state.pods.stale_since.is_some();
        let timeout = deadline::time_left(timeout);
        let (state, _) =
            self.changed.wait_timeout_while(self.lock(), timeout, broken).unwrap_or_else(PoisonError::into_inner);
        for (what, broken) in [("nodes", &state.nodes.stale_since), ("pods", &state.pods.stale_since)] {
            if let Some((since, why)) = broken {
                return Err(format!("the watch of {what} has been down for {} s: {why}", since.elapsed().as_secs()));
            }
        }
        Ok(read(&state.nodes.items, &state.pods.items))
    }

    /// Returns a node, if it is known.
    pub(super) fn node(&self, name: &str) -> Option<CachedNode> {
        self.with_node(name, CachedNode::clone)
    }

    /// Reads a node, if it is known.
    pub(super) fn with_node<T>(&self, name: &str, read: impl FnOnce(&CachedNode) -> T) -> Option<T> {
        self.lock().nodes.items.get(name).map(|node| read(node))
    }

    /// Stores a node that we have just written, before the watch delivers it, including in a list that is being received: state
    /// from before our write does not replace it.
    pub(super) fn store_written(&self, node: &CachedNode) {
        let mut state = self.lock();
        let CacheState { nodes, .. } = &mut *state;
        for items in [Some(&mut nodes.items), nodes.listing.as_mut()].into_iter().flatten() {
            // A missing node was deleted meanwhile, or is not managed.
            if let Some(known) = items.get_mut(node.name())
                && is_newer(node, known)
            {
                **known = node.clone();
            }
        }
    }

    fn update<T>(&self, change: impl FnOnce(&mut CacheState) -> T) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

/// Returns whether a node is at least as new as the other. Resource versions of one kind can be compared.
fn is_newer(node: &CachedNode, than: &CachedNode) -> bool {
    let version = |node: &CachedNode| node.metadata.resource_version.as_ref()?.parse::<u64>().ok();
    version(node) >= version(than)
}

/// Follows the nodes until the process ends.
pub(super) async fn watch_nodes(client: Client, config: Arc<KubernetesConfig>, watched: Arc<WatchCache>) {
    let api: Api<ApiNode> = Api::all_with(client, &node_resource());
    let mut settings = watcher::Config::default().timeout(WATCH_SECONDS).page_size(PAGE);
    settings.label_selector.clone_from(&config.node_selector);
    let mut shared = NodeInterners::default();
    let to_cached = |node: ApiNode| {
        let node = CachedNode::from(node).interned(&mut shared, &config.prefix);
        (Arc::clone(&node.metadata.name), Some(node).filter(|node| has_gpus(node, &config)).map(Box::new))
    };
    watch_kind("nodes", api, settings, to_cached, |change| watched.update(|state| change(&mut state.nodes))).await;
}

/// Follows the pods until the process ends.
pub(super) async fn watch_pods(client: Client, config: Arc<KubernetesConfig>, watched: Arc<WatchCache>) {
    let api: Api<PodObject> = Api::all_with(client, &pod_resource());
    let settings = watcher::Config::default().timeout(WATCH_SECONDS).page_size(PAGE).fields(ACTIVE_PODS);
    let mut nodes: Interner<str> = Interner::default();
    let to_cached = |pod: PodObject| {
        let name = key(&pod);
        let pending =
            || pending_demand::pending_pod(&pod, &config).map(|waiting| CachedPod::Pending(Box::new(waiting)));
        let cached = placed_pod(&pod, &name, &mut nodes, &config).map(CachedPod::Placed).or_else(pending);
        (name, cached)
    };
    watch_kind("pods", api, settings, to_cached, |change| watched.update(|state| change(&mut state.pods))).await;
}

fn key(pod: &PodObject) -> Arc<str> {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()).into()
}

/// Returns `None` if the pod is not ours and requests no GPUs, or has no node yet.
fn placed_pod(
    pod: &PodObject,
    name: &Arc<str>,
    nodes: &mut Interner<str>,
    config: &KubernetesConfig,
) -> Option<PlacedPod> {
    let run = names::run_of(&pod.metadata, config);
    let ours = run.is_some() && pod.namespace().as_deref() == Some(&config.namespace);
    let uses_gpus = uses_gpus(&pod.spec, config);
    if !uses_gpus && !ours {
        return None;
    }
    let bound = pod.spec.node_name.clone();
    let nominated = pod.status.as_ref().and_then(|status| status.nominated_node_name.clone());
    let intended = || pod.annotations().get(&config.prefixed("node")).filter(|_| ours).cloned();
    let is_nominated = bound.is_none();
    let node = nodes.intern(bound.or(nominated).or_else(intended)?.into());
    let tenant = PodOnNode { name: Arc::clone(name), uses_gpus, nominated: is_nominated, ours };
    Some(PlacedPod { node, tenant, run: run.filter(|_| ours) })
}

/// Returns whether the server rejects streamed lists: its feature gate `WatchList` is off, or it is older than that.
fn is_stream_rejected(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if matches!(status.code, 400 | 422))
}

/// Lists and watches one kind, and starts again after each failure.
async fn watch_kind<K, T>(
    name: &'static str,
    api: Api<K>,
    settings: watcher::Config,
    mut to_cached: impl FnMut(K) -> (Arc<str>, Option<T>),
    change: impl Fn(&mut dyn FnMut(&mut ObjectCache<T>)),
) where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let mut backoff = MIN_BACKOFF;
    let mut streams = true;
    'list: loop {
        let (mut listed, mut is_listing) = (None, false);
        let settings = if streams { settings.clone().streaming_lists() } else { settings.clone() };
        let mut events = std::pin::pin!(watcher(api.clone(), settings));
        while let Some(event) = events.next().await {
            match event {
                // The stream ended before the whole list was sent, and would do so again: `WATCH_SECONDS` limits it, and a proxy
                // may drop the bookmark at its end. Pages have no such limit.
                Ok(Event::Init) if streams && is_listing => {
                    tracing::info!(kind = name, "streamed list did not end in time; listing in pages");
                    streams = false;
                    continue 'list;
                }
                Ok(Event::Init) => {
                    is_listing = true;
                    change(&mut |kind| kind.listing = Some(HashMap::new()));
                }
                Ok(Event::InitApply(object) | Event::Apply(object)) => {
                    let (key, item) = to_cached(object);
                    let mut item = Some((key, item));
                    change(&mut |kind| {
                        if let Some((key, item)) = item.take() {
                            kind.apply(key, item);
                        }
                    });
                }
                Ok(Event::Delete(object)) => {
                    let (key, _) = to_cached(object);
                    change(&mut |kind| kind.apply(key.clone(), None));
                }
                Ok(Event::InitDone) => {
                    (listed, is_listing) = (Some(Instant::now()), false);
                    change(&mut ObjectCache::finish_list);
                    // Most of each object was dropped: the heap has gaps between what is kept.
                    doctor_host::heap::give_back();
                }
                Err(error) if streams && is_stream_rejected(&error) => {
                    tracing::info!(kind = name, "API server does not stream lists; listing in pages");
                    streams = false;
                    continue 'list;
                }
                Err(error) => {
                    let why = error.to_string();
                    tracing::warn!(kind = name, error = %why, "watch failed; restarting it");
                    change(&mut |kind| kind.fail(why.clone()));
                    break;
                }
            }
        }
        // Reset the delay only after a stable watch: a kind that can be listed but not watched would otherwise be listed
        // continuously.
        if listed.is_some_and(|at: Instant| at.elapsed() > MAX_BACKOFF) {
            backoff = MIN_BACKOFF;
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}
