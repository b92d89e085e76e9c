//! Agents that authenticate by a cluster token. The cluster reviews the token of each message, and the result is cached
//! briefly: a deleted pod soon loses access, and a busy agent does not load the cluster.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::http::{HeaderMap, header};
use doctor_backend::token_review::{TokenReviewError, TokenReviewer};
use doctor_checks::document::RunKey;
use doctor_core::{ids::NodeName, time::Span};
use tokio::{sync::Semaphore, time::timeout};

/// Maximum length of a token; a cluster's have about 1 KiB.
const MAX_TOKEN_BYTES: usize = 16 << 10;
/// Concurrent requests to the cluster.
const MAX_CONCURRENT_REVIEWS: usize = 32;
/// Deadline for one review, including the wait for its turn. The sender then gets a 503 and retries.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(5);
/// Cached reviews: more than any cluster has nodes, so that no client can evict them all.
const MAX_CACHED: usize = 50_000;

/// Token reviews by the cluster, cached.
pub struct TokenReviewCache {
    reviewer: Arc<dyn TokenReviewer>,
    ttl: Duration,
    cached: Mutex<CachedReviews>,
    review_permits: Semaphore,
}

/// Keyed by digest: tokens themselves are not stored.
#[derive(Debug)]
struct CachedReviews {
    by_key: HashMap<RunKey, (NodeName, Instant)>,
    last_sweep: Instant,
}

impl std::fmt::Debug for TokenReviewCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenReviewCache").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

/// The Authorization header has no valid token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the header Authorization must be `Bearer` and a token of at most {MAX_TOKEN_BYTES} bytes")]
pub(super) struct BadAuthorization;

/// Returns the token of a message, if it has one.
pub(super) fn bearer_token(headers: &HeaderMap) -> Result<Option<&str>, BadAuthorization> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let token = value.to_str().ok().and_then(|text| text.strip_prefix("Bearer ")).ok_or(BadAuthorization)?;
    if token.is_empty() || token.len() > MAX_TOKEN_BYTES { Err(BadAuthorization) } else { Ok(Some(token)) }
}

impl TokenReviewCache {
    /// Caches the reviewer's results for `ttl`.
    pub fn new(reviewer: Arc<dyn TokenReviewer>, ttl: Span) -> Self {
        let cached = CachedReviews { by_key: HashMap::new(), last_sweep: Instant::now() };
        Self {
            reviewer,
            ttl: ttl.to_std(),
            cached: Mutex::new(cached),
            review_permits: Semaphore::new(MAX_CONCURRENT_REVIEWS),
        }
    }

    /// Returns the node that this token belongs to, and the key that its reports are signed with.
    pub(super) async fn node_of_token(&self, token: &str) -> Result<(NodeName, RunKey), TokenReviewError> {
        let key = RunKey::from_token(token);
        if let Some(node) = self.cached_node(&key) {
            return Ok((node, key));
        }
        let late = |_| TokenReviewError::Unavailable(format!("no answer within {} s", REVIEW_TIMEOUT.as_secs()));
        let review = async {
            let _permit = self
                .review_permits
                .acquire()
                .await
                .map_err(|error| TokenReviewError::Unavailable(error.to_string()))?;
            self.reviewer.review(token.to_owned()).await
        };
        let node = timeout(REVIEW_TIMEOUT, review).await.map_err(late)??;
        self.cache(&key, &node);
        Ok((node, key))
    }

    fn lock(&self) -> MutexGuard<'_, CachedReviews> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cached_node(&self, key: &RunKey) -> Option<NodeName> {
        let cached = self.lock();
        let (node, since) = cached.by_key.get(key)?;
        (since.elapsed() < self.ttl).then(|| node.clone())
    }

    /// Caches successful reviews only: invented tokens fill nothing.
    fn cache(&self, key: &RunKey, node: &NodeName) {
        let mut cached = self.lock();
        if cached.last_sweep.elapsed() >= self.ttl {
            cached.by_key.retain(|_, (_, since)| since.elapsed() < self.ttl);
            cached.last_sweep = Instant::now();
        }
        if cached.by_key.len() < MAX_CACHED {
            cached.by_key.insert(key.clone(), (node.clone(), Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use doctor_backend::token_review::ReviewFuture;

    /// Accepts only `good`, as a token of n1, and counts requests.
    #[derive(Default)]
    struct Counts(AtomicUsize);

    impl TokenReviewer for Counts {
        fn review(&self, token: String) -> ReviewFuture {
            self.0.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                match token.as_str() {
                    "good" => Ok(NodeName::new("n1").unwrap()),
                    "lost" => std::future::pending().await,
                    _ => Err(TokenReviewError::Rejected("never seen".to_owned())),
                }
            })
        }
    }

    fn node_of(tokens: &TokenReviewCache, token: &str) -> Result<String, TokenReviewError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(tokens.node_of_token(token)).map(|(node, key)| {
            assert_eq!(key, RunKey::from_token(token));
            node.to_string()
        })
    }

    #[test]
    fn accepted_reviews_are_cached_and_rejected_ones_are_not() {
        let cluster = Arc::new(Counts::default());
        let times = || cluster.0.load(Ordering::Relaxed);
        let tokens = TokenReviewCache::new(cluster.clone(), Span::hours(1));
        assert_eq!((node_of(&tokens, "good").as_deref(), node_of(&tokens, "good").as_deref()), (Ok("n1"), Ok("n1")));
        assert_eq!(times(), 1);
        for _ in 0..2 {
            assert_eq!(node_of(&tokens, "bad"), Err(TokenReviewError::Rejected("never seen".to_owned())));
        }
        assert_eq!((times(), tokens.lock().by_key.len()), (3, 1));
        let uncached = TokenReviewCache::new(cluster.clone(), Span::ZERO);
        assert!(node_of(&uncached, "good").is_ok() && node_of(&uncached, "good").is_ok());
        assert_eq!((times(), uncached.lock().by_key.len()), (5, 1));
    }

    #[test]
    fn a_cluster_that_does_not_respond_is_not_a_rejection_and_times_out() {
        let tokens = TokenReviewCache::new(Arc::new(Counts::default()), Span::hours(1));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let result = runtime.block_on(async { timeout(REVIEW_TIMEOUT * 4, tokens.node_of_token("lost")).await });
        assert!(matches!(result, Ok(Err(TokenReviewError::Unavailable(_)))), "{result:?}");
    }

    #[test]
    fn only_a_valid_bearer_header_has_a_token() {
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            bearer_token(&headers).map(|token| token.map(str::to_owned))
        };
        assert_eq!(bearer_token(&HeaderMap::new()), Ok(None));
        assert_eq!(with("Bearer a.b.c"), Ok(Some("a.b.c".to_owned())));
        for value in ["Bearer ", "Basic YTpi", "a.b.c", &format!("Bearer {}", "x".repeat(MAX_TOKEN_BYTES + 1))] {
            assert_eq!(with(value), Err(BadAuthorization), "{value}");
        }
    }
}
