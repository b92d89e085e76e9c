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
    picture,
    settings::Settings,
    snapshot::{Cluster, ClusterRow},
};
use doctor_store::Store;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use tokio::runtime::{Builder, Runtime};

use super::{WebConfig, WebParts, desk, hall, router, routes::ROUTES, server::Peer, wish::Act, wish::Wish};

/// The API of a cluster of three nodes, for a local client.
#[derive(Debug)]
pub struct ApiOfFew {
    runtime: Runtime,
    service: TowerToHyperService<Router>,
}

impl ApiOfFew {
    /// # Errors
    /// If the store or the server cannot be set up.
    pub fn new() -> io::Result<Self> {
        let settings = Settings::new(Policy::standard(), Catalogue::built_in(), Profiles::default());
        let settings = settings.map_err(io::Error::other)?;
        let store = Store::open_in_memory().map_err(io::Error::other)?;
        let row = |name: &str| {
            let (node, pool) = (NodeName::new(name).ok()?, PoolName::new("gpu").ok()?);
            let (occupancy, marks) = (Occupancy::Free, Marks::default());
            Some(ClusterRow { node, pool, occupancy, marks, sku: None, heard: None })
        };
        let nodes = ["n1", "n2", "n3"].iter().filter_map(|name| row(name)).collect();
        let cluster = Cluster { nodes, ..Cluster::unseen(&settings) };
        let now = Timestamp::from_secs(1_700_000_000);
        let facts = picture::facts(&store, Some(now), cluster, now).map_err(io::Error::other)?;
        let parts = WebParts {
            store,
            clock: Arc::new(SystemClock),
            wake: Arc::default(),
            audience: Arc::default(),
            share: None,
            settings: settings.clone(),
        };
        let config = WebConfig::on((Ipv4Addr::LOCALHOST, 0).into());
        let hall = Arc::new(hall(&config, parts).map_err(io::Error::other)?);
        hall.show(facts, settings, std::collections::BTreeMap::new());
        let runtime = Builder::new_current_thread().enable_time().max_blocking_threads(desk::THREADS).build()?;
        Ok(Self { runtime, service: TowerToHyperService::new(router(&hall)) })
    }

    /// Returns the paths of the route table, with parameter names in braces.
    pub fn places() -> impl Iterator<Item = &'static str> {
        ROUTES.iter().map(|route| route.path)
    }

    /// Requests a path below `/api/v1`. Returns `None` if it is not a valid URI.
    ///
    /// # Errors
    /// If the response body breaks off.
    pub fn ask(&self, place: &str) -> io::Result<Option<(StatusCode, Vec<u8>)>> {
        let asked = Request::get(format!("/api/v1{place}")).header(header::HOST, "localhost");
        let Ok(asked) = asked.extension(Peer(Ipv4Addr::LOCALHOST.into())).body(Body::empty()) else { return Ok(None) };
        self.runtime.block_on(async {
            let Ok(answer) = self.service.call(asked).await;
            let (parts, body) = answer.into_parts();
            let body = to_bytes(body, usize::MAX).await.map_err(io::Error::other)?;
            Ok(Some((parts.status, body.to_vec())))
        })
    }

    /// Parses the body of a command, without a cluster. Returns the error, if any.
    pub fn order(which: usize, body: &[u8]) -> Option<String> {
        let act = Act::ALL[which % Act::ALL.len()];
        let order = Wish::read(act, body).and_then(|wish| wish.order(act, Timestamp::from_secs(1_700_000_000)));
        order.err().map(|refusal| refusal.to_string())
    }
}
