//! Entry point for the fuzzer: API requests and their responses.

use std::{io, net::Ipv4Addr, sync::Arc};

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{Request, StatusCode, header},
};
use doctor_backend::clock::SystemClock;
use doctor_checks::Catalogue;
use doctor_core::{
    ids::{NodeName, PoolName},
    node::{Marks, Occupancy},
    policy::Policy,
    profile::Profiles,
    time::Timestamp,
};
use doctor_engine::{
    cluster_state,
    settings::Settings,
    snapshot::{ClusterStateRow, ObservedCluster},
};
use doctor_store::Store;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use tokio::runtime::{Builder, Runtime};

use super::{
    ApiDeps, Peer, WebConfig, action_request::ActionKind, action_request::ActionRequest, api_state, router,
    routes::ROUTES, worker_pool,
};

/// The API of a cluster of three nodes, for a local client.
#[derive(Debug)]
pub struct FuzzApi {
    runtime: Runtime,
    service: TowerToHyperService<Router>,
}

impl FuzzApi {
    /// # Errors
    /// If the store or the server cannot be set up.
    pub fn new() -> io::Result<Self> {
        let settings = Settings::new(Policy::built_in(), Catalogue::built_in(), Profiles::default());
        let settings = settings.map_err(io::Error::other)?;
        let store = Store::open_in_memory().map_err(io::Error::other)?;
        let row = |name: &str| {
            let (node, pool) = (NodeName::new(name).ok()?, PoolName::new("gpu").ok()?);
            let (occupancy, marks) = (Occupancy::Free, Marks::default());
            Some(ClusterStateRow { node, pool, occupancy, marks, sku: None, declared: None, last_report: None })
        };
        let nodes = ["n1", "n2", "n3"].iter().filter_map(|name| row(name)).collect();
        let cluster = ObservedCluster { nodes, ..ObservedCluster::unobserved(&settings) };
        let now = Timestamp::from_secs(1_700_000_000);
        let facts = cluster_state::facts(&store, Some(now), cluster, now).map_err(io::Error::other)?;
        let deps = ApiDeps {
            store,
            clock: Arc::new(SystemClock),
            cycle_trigger: Arc::default(),
            snapshot_feed: Arc::default(),
            share: None,
            settings: settings.clone(),
            cli: None,
        };
        let config = WebConfig::listening_on((Ipv4Addr::LOCALHOST, 0).into());
        let state = Arc::new(api_state(&config, deps).map_err(io::Error::other)?);
        state.publish(facts, settings, std::collections::BTreeMap::new());
        let runtime = Builder::new_current_thread().enable_time().max_blocking_threads(worker_pool::THREADS).build()?;
        Ok(Self { runtime, service: TowerToHyperService::new(router(&state)) })
    }

    /// Returns the paths of the route table, with parameter names in braces.
    pub fn paths() -> impl Iterator<Item = &'static str> {
        ROUTES.iter().map(|route| route.path)
    }

    /// Requests a path below `/api/v1`. Returns `None` if it is not a valid URI.
    ///
    /// # Errors
    /// If the response body breaks off.
    pub fn get(&self, path: &str) -> io::Result<Option<(StatusCode, Vec<u8>)>> {
        let request = Request::get(format!("/api/v1{path}")).header(header::HOST, "localhost");
        let Ok(request) = request.extension(Peer(Ipv4Addr::LOCALHOST.into())).body(Body::empty()) else {
            return Ok(None);
        };
        self.runtime.block_on(async {
            let Ok(response) = self.service.call(request).await;
            let (parts, body) = response.into_parts();
            let body = to_bytes(body, usize::MAX).await.map_err(io::Error::other)?;
            Ok(Some((parts.status, body.to_vec())))
        })
    }

    /// Parses the body of a command, without a cluster. Returns the error, if any.
    pub fn parse_command(index: usize, body: &[u8]) -> Option<String> {
        let action = ActionKind::ALL[index % ActionKind::ALL.len()];
        let command = ActionRequest::parse(action, body)
            .and_then(|request| request.command(action, Timestamp::from_secs(1_700_000_000)));
        command.err().map(|error| error.to_string())
    }
}
