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

use futures_util::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    runtime::watcher::{self, Event, watcher},
};

use super::{
    config::KubernetesConfig,
    names,
    objects::{NodeAnswer, NodeObject, PodObject, SharedByNodes, node_resource, pod_resource},
    occupancy::{Tenant, has_gpus, uses_gpus},
    pairs::Shared,
    wanted::{self, Waiting},
};

/// The duration of one watch request.
pub(super) const WATCH_SECONDS: u32 = 20;
/// A connection that is silent for this long is dead: longer than a watch without events, plus the client's margin.
pub(super) const SILENCE: Duration = Duration::from_secs(30);
/// The delay between attempts to list, doubled from the first to the longest.
pub(super) const FIRST_WAIT: Duration = Duration::from_millis(500);
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Objects per page of a list, as in `kubectl` and client-go: listing 5,000 nodes takes ten requests. A page is in memory as text
/// and as objects until the kept part is extracted. Used only with servers that do not stream lists.
const PAGE: u32 = 500;
/// Pods that have ended use no resources.
const LIVING: &str = "status.phase!=Succeeded,status.phase!=Failed";

/// The part of a pod that is kept.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Kept {
    Placed(Placed),
    /// It requests GPUs and is not scheduled.
    Waiting(Box<Waiting>),
}

/// The node of a pod, assigned or expected, and its use of that node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) node: Arc<str>,
    pub(super) tenant: Tenant,
    pub(super) run: Option<doctor_core::ids::RunId>,
}

/// All objects of one kind.
#[derive(Debug)]
struct Kind<T> {
    items: HashMap<Arc<str>, T>,
    /// The objects received so far, during a list.
    listing: Option<HashMap<Arc<str>, T>>,
    /// Why the objects are not current; `None`: they are.
    broken: Option<(Instant, String)>,
    /// Whether a known object is newer than the listed one: we may have written it in the meantime.
    is_newer: fn(&T, &T) -> bool,
}

impl<T> Kind<T> {
    fn new(is_newer: fn(&T, &T) -> bool) -> Self {
        let broken = Some((Instant::now(), "not listed yet".to_owned()));
        Self { items: HashMap::new(), listing: None, broken, is_newer }
    }

    /// `None` removes the object: it is irrelevant or gone.
    fn take(&mut self, key: Arc<str>, item: Option<T>) {
        let items = self.listing.as_mut().unwrap_or(&mut self.items);
        match item {
            Some(item) => drop(items.insert(key, item)),
            None => drop(items.remove(&key)),
        }
    }

    fn listed(&mut self) {
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
        self.broken = None;
    }

    fn fail(&mut self, why: String) {
        self.listing = None;
        self.broken.get_or_insert((Instant::now(), why));
    }
}

#[derive(Debug)]
struct Inside {
    nodes: Kind<Box<NodeObject>>,
    pods: Kind<Kept>,
}

#[derive(Debug)]
pub(super) struct Watched {
    inside: Mutex<Inside>,
    changed: Condvar,
}

impl Watched {
    pub(super) fn new() -> Self {
        Self {
            inside: Mutex::new(Inside {
                nodes: Kind::new(|node, than| is_newer(node, than)),
                pods: Kind::new(|_, _| false),
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads all nodes and pods. Waits at most `patience` for the initial lists, or for new ones.
    ///
    /// # Errors
    /// Why the state of the cluster is unknown.
    pub(super) fn now<T>(
        &self,
        patience: Duration,
        read: impl FnOnce(&HashMap<Arc<str>, Box<NodeObject>>, &HashMap<Arc<str>, Kept>) -> T,
    ) -> Result<T, String> {
        let broken = |inside: &mut Inside| inside.nodes.broken.is_some() || inside.pods.broken.is_some();
        let (inside, _) =
            self.changed.wait_timeout_while(self.lock(), patience, broken).unwrap_or_else(PoisonError::into_inner);
        for (what, broken) in [("nodes", &inside.nodes.broken), ("pods", &inside.pods.broken)] {
            if let Some((since, why)) = broken {
                return Err(format!("the watch of {what} has been down for {} s: {why}", since.elapsed().as_secs()));
            }
        }
        Ok(read(&inside.nodes.items, &inside.pods.items))
    }

    /// Returns a node, if it is known.
    pub(super) fn node(&self, name: &str) -> Option<NodeObject> {
        self.with_node(name, NodeObject::clone)
    }

    /// Reads a node, if it is known.
    pub(super) fn with_node<T>(&self, name: &str, look: impl FnOnce(&NodeObject) -> T) -> Option<T> {
        self.lock().nodes.items.get(name).map(|node| look(node))
    }

    /// Stores a node that we have just written, before the watch delivers it, including in a list that is being received: state
    /// from before our write does not replace it.
    pub(super) fn written(&self, node: &NodeObject) {
        let mut inside = self.lock();
        let Inside { nodes, .. } = &mut *inside;
        for items in [Some(&mut nodes.items), nodes.listing.as_mut()].into_iter().flatten() {
            // A missing node was deleted meanwhile, or is not managed.
            if let Some(known) = items.get_mut(node.name())
                && is_newer(node, known)
            {
                **known = node.clone();
            }
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut Inside) -> T) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

/// Returns whether a node is at least as new as the other. Resource versions of one kind can be compared.
fn is_newer(node: &NodeObject, than: &NodeObject) -> bool {
    let version = |node: &NodeObject| node.metadata.resource_version.as_ref()?.parse::<u64>().ok();
    version(node) >= version(than)
}

/// Follows the nodes until the process ends.
pub(super) async fn follow_nodes(client: Client, config: Arc<KubernetesConfig>, watched: Arc<Watched>) {
    let api: Api<NodeAnswer> = Api::all_with(client, &node_resource());
    let mut settings = watcher::Config::default().timeout(WATCH_SECONDS).page_size(PAGE);
    settings.label_selector.clone_from(&config.node_selector);
    let mut shared = SharedByNodes::default();
    let keep = |node: NodeAnswer| {
        let node = NodeObject::from(node).sharing(&mut shared, &config.prefix);
        (Arc::clone(&node.metadata.name), Some(node).filter(|node| has_gpus(node, &config)).map(Box::new))
    };
    follow("nodes", api, settings, keep, |change| watched.with(|inside| change(&mut inside.nodes))).await;
}

/// Follows the pods until the process ends.
pub(super) async fn follow_pods(client: Client, config: Arc<KubernetesConfig>, watched: Arc<Watched>) {
    let api: Api<PodObject> = Api::all_with(client, &pod_resource());
    let settings = watcher::Config::default().timeout(WATCH_SECONDS).page_size(PAGE).fields(LIVING);
    let mut nodes: Shared<str> = Shared::default();
    let keep = |pod: PodObject| {
        let name = key(&pod);
        let waits = || wanted::waiting(&pod, &config).map(|waiting| Kept::Waiting(Box::new(waiting)));
        let kept = placed(&pod, &name, &mut nodes, &config).map(Kept::Placed).or_else(waits);
        (name, kept)
    };
    follow("pods", api, settings, keep, |change| watched.with(|inside| change(&mut inside.pods))).await;
}

fn key(pod: &PodObject) -> Arc<str> {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any()).into()
}

/// Returns `None` if the pod is not ours and requests no GPUs, or has no node yet.
fn placed(pod: &PodObject, name: &Arc<str>, nodes: &mut Shared<str>, config: &KubernetesConfig) -> Option<Placed> {
    let run = names::run_of(&pod.metadata, config);
    let ours = run.is_some() && pod.namespace().as_deref() == Some(&config.namespace);
    let uses_gpus = uses_gpus(&pod.spec, config);
    if !uses_gpus && !ours {
        return None;
    }
    let bound = pod.spec.node_name.clone();
    let nominated = pod.status.as_ref().and_then(|status| status.nominated_node_name.clone());
    let meant = || pod.annotations().get(&config.own("node")).filter(|_| ours).cloned();
    let is_nominated = bound.is_none();
    let node = nodes.one(bound.or(nominated).or_else(meant)?.into());
    let tenant = Tenant { name: Arc::clone(name), uses_gpus, nominated: is_nominated, ours };
    Some(Placed { node, tenant, run: run.filter(|_| ours) })
}

/// Returns whether the server rejects streamed lists: its feature gate `WatchList` is off, or it is older than that.
fn is_stream_rejected(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::WatchStartFailed(kube::Error::Api(status)) if matches!(status.code, 400 | 422))
}

/// Lists and watches one kind, and starts again after each failure.
async fn follow<K, T>(
    name: &'static str,
    api: Api<K>,
    settings: watcher::Config,
    mut keep: impl FnMut(K) -> (Arc<str>, Option<T>),
    change: impl Fn(&mut dyn FnMut(&mut Kind<T>)),
) where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let mut wait = FIRST_WAIT;
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
                    let (key, item) = keep(object);
                    let mut item = Some((key, item));
                    change(&mut |kind| {
                        if let Some((key, item)) = item.take() {
                            kind.take(key, item);
                        }
                    });
                }
                Ok(Event::Delete(object)) => {
                    let (key, _) = keep(object);
                    change(&mut |kind| kind.take(key.clone(), None));
                }
                Ok(Event::InitDone) => {
                    (listed, is_listing) = (Some(Instant::now()), false);
                    change(&mut Kind::listed);
                    // Most of each object was dropped: the heap has gaps between what is kept.
                    doctor_host::memory::give_back();
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
        if listed.is_some_and(|at: Instant| at.elapsed() > LONGEST_WAIT) {
            wait = FIRST_WAIT;
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}
