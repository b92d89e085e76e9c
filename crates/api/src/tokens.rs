//! Agents that authenticate by a cluster token. The cluster reviews the token of each message, and the result is cached
//! briefly: a deleted pod soon loses access, and a busy agent does not load the cluster.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::http::{HeaderMap, header};
use doctor_backend::vouch::{NotVouched, Voucher};
use doctor_checks::document::RunKey;
use doctor_core::{ids::NodeName, time::Span};
use tokio::{sync::Semaphore, time::timeout};

/// Maximum length of a token; a cluster's have about 1 KiB.
const MOST_BYTES: usize = 16 << 10;
/// Concurrent requests to the cluster.
const AT_ONCE: usize = 32;
/// Deadline for one review, including the wait for its turn. The sender then gets a 503 and retries.
const PATIENCE: Duration = Duration::from_secs(5);
/// Cached reviews: more than any cluster has nodes, so that no client can evict them all.
const MOST_KNOWN: usize = 50_000;

/// Token reviews by the cluster, cached.
pub struct Tokens {
    voucher: Arc<dyn Voucher>,
    remember: Duration,
    known: Mutex<Known>,
    turns: Semaphore,
}

/// Keyed by digest: tokens themselves are not stored.
#[derive(Debug)]
struct Known {
    by_key: HashMap<RunKey, (NodeName, Instant)>,
    swept: Instant,
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens").field("remember", &self.remember).finish_non_exhaustive()
    }
}

/// The Authorization header has no valid token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the header Authorization must be `Bearer` and a token of at most {MOST_BYTES} bytes")]
pub(super) struct NoToken;

/// Returns the token of a message, if it has one.
pub(super) fn token_of(headers: &HeaderMap) -> Result<Option<&str>, NoToken> {
    let Some(value) = headers.get(header::AUTHORIZATION) else { return Ok(None) };
    let token = value.to_str().ok().and_then(|text| text.strip_prefix("Bearer ")).ok_or(NoToken)?;
    if token.is_empty() || token.len() > MOST_BYTES { Err(NoToken) } else { Ok(Some(token)) }
}

impl Tokens {
    /// Caches the voucher's reviews for `remember`.
    pub fn new(voucher: Arc<dyn Voucher>, remember: Span) -> Self {
        let known = Known { by_key: HashMap::new(), swept: Instant::now() };
        Self { voucher, remember: remember.to_std(), known: Mutex::new(known), turns: Semaphore::new(AT_ONCE) }
    }

    /// Returns the node that this token belongs to, and the key that its reports are signed with.
    pub(super) async fn whose(&self, token: &str) -> Result<(NodeName, RunKey), NotVouched> {
        let key = RunKey::of_token(token);
        if let Some(node) = self.remembered(&key) {
            return Ok((node, key));
        }
        let late = |_| NotVouched::Unanswered(format!("no answer within {} s", PATIENCE.as_secs()));
        let asked = async {
            let _turn = self.turns.acquire().await.map_err(|error| NotVouched::Unanswered(error.to_string()))?;
            self.voucher.whose(token.to_owned()).await
        };
        let node = timeout(PATIENCE, asked).await.map_err(late)??;
        self.keep(&key, &node);
        Ok((node, key))
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remembered(&self, key: &RunKey) -> Option<NodeName> {
        let known = self.lock();
        let (node, since) = known.by_key.get(key)?;
        (since.elapsed() < self.remember).then(|| node.clone())
    }

    /// Caches successful reviews only: invented tokens fill nothing.
    fn keep(&self, key: &RunKey, node: &NodeName) {
        let mut known = self.lock();
        if known.swept.elapsed() >= self.remember {
            known.by_key.retain(|_, (_, since)| since.elapsed() < self.remember);
            known.swept = Instant::now();
        }
        if known.by_key.len() < MOST_KNOWN {
            known.by_key.insert(key.clone(), (node.clone(), Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use doctor_backend::vouch::Answer;

    /// Accepts only `good`, as a token of n1, and counts requests.
    #[derive(Default)]
    struct Counts(AtomicUsize);

    impl Voucher for Counts {
        fn whose(&self, token: String) -> Answer {
            self.0.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                match token.as_str() {
                    "good" => Ok(NodeName::new("n1").unwrap()),
                    "lost" => std::future::pending().await,
                    _ => Err(NotVouched::Refused("never seen".to_owned())),
                }
            })
        }
    }

    fn ask(tokens: &Tokens, token: &str) -> Result<String, NotVouched> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(tokens.whose(token)).map(|(node, key)| {
            assert_eq!(key, RunKey::of_token(token));
            node.to_string()
        })
    }

    #[test]
    fn accepted_reviews_are_cached_and_rejected_ones_are_not() {
        let cluster = Arc::new(Counts::default());
        let times = || cluster.0.load(Ordering::Relaxed);
        let tokens = Tokens::new(cluster.clone(), Span::hours(1));
        assert_eq!((ask(&tokens, "good").as_deref(), ask(&tokens, "good").as_deref()), (Ok("n1"), Ok("n1")));
        assert_eq!(times(), 1);
        for _ in 0..2 {
            assert_eq!(ask(&tokens, "bad"), Err(NotVouched::Refused("never seen".to_owned())));
        }
        assert_eq!((times(), tokens.lock().by_key.len()), (3, 1));
        let forgetful = Tokens::new(cluster.clone(), Span::ZERO);
        assert!(ask(&forgetful, "good").is_ok() && ask(&forgetful, "good").is_ok());
        assert_eq!((times(), forgetful.lock().by_key.len()), (5, 1));
    }

    #[test]
    fn a_cluster_that_does_not_respond_is_not_a_rejection_and_times_out() {
        let tokens = Tokens::new(Arc::new(Counts::default()), Span::hours(1));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let answer = runtime.block_on(async { timeout(PATIENCE * 4, tokens.whose("lost")).await });
        assert!(matches!(answer, Ok(Err(NotVouched::Unanswered(_)))), "{answer:?}");
    }

    #[test]
    fn only_a_bearer_of_a_token_has_one() {
        let with = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            token_of(&headers).map(|token| token.map(str::to_owned))
        };
        assert_eq!(token_of(&HeaderMap::new()), Ok(None));
        assert_eq!(with("Bearer a.b.c"), Ok(Some("a.b.c".to_owned())));
        for value in ["Bearer ", "Basic YTpi", "a.b.c", &format!("Bearer {}", "x".repeat(MOST_BYTES + 1))] {
            assert_eq!(with(value), Err(NoToken), "{value}");
        }
    }
}
