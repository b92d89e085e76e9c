//! Tests agents' tokens, issued and reviewed by a real API server.

use serde_json::json;

use doctor_backend::token_review::{TokenReviewError, TokenReviewer};

use crate::{AGENT, AUDIENCE, Cluster, NAMESPACE, cluster, until};

fn reviewed_node(reviewer: &dyn TokenReviewer, token: &str) -> Result<String, TokenReviewError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(reviewer.review(token.to_owned())).map(|node| node.to_string())
}

fn rejection(reviewer: &dyn TokenReviewer, token: &str) -> String {
    match reviewed_node(reviewer, token) {
        Err(TokenReviewError::Rejected(why)) => why,
        other => panic!("{other:?}"),
    }
}

fn delete(cluster: &Cluster, pod: &str) {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}?gracePeriodSeconds=0");
    assert!(cluster.plane.request("DELETE", &path, None).unwrap().is_success());
}

#[test]
fn token_review_returns_the_node_of_the_tokens_pod_until_the_pod_is_deleted() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    let reviewer = backend.token_reviewer();
    cluster.agent_pod("agent-1", "gpu-1", AGENT);
    let token = cluster.plane.pod_token(NAMESPACE, AGENT, "agent-1", AUDIENCE).unwrap();
    assert_eq!(reviewed_node(&*reviewer, &token).as_deref(), Ok("gpu-1"));
    delete(cluster, "agent-1");
    // The API server caches a review for ten seconds.
    until("the token to be invalid", || reviewed_node(&*reviewer, &token).is_err());
    assert!(rejection(&*reviewer, &token).contains("TokenReview did not authenticate it"));
    // A new pod of the same name is a different pod.
    cluster.agent_pod("agent-1", "gpu-2", AGENT);
    assert!(rejection(&*reviewer, &token).contains("TokenReview did not authenticate it"));
    delete(cluster, "agent-1");
}

#[test]
fn a_token_for_another_audience_or_account_or_bound_to_no_pod_is_rejected() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    let reviewer = backend.token_reviewer();
    cluster.agent_pod("agent-2", "gpu-2", AGENT);
    cluster.agent_pod("other-2", "gpu-2", "cluster-doctor");
    let plane = &cluster.plane;
    let for_the_server = plane.pod_token(NAMESPACE, AGENT, "agent-2", "https://kubernetes.default.svc").unwrap();
    assert!(rejection(&*reviewer, &for_the_server).contains("did not authenticate it"));
    let of_another = plane.pod_token(NAMESPACE, "cluster-doctor", "other-2", AUDIENCE).unwrap();
    let why = rejection(&*reviewer, &of_another);
    assert!(why.contains("its account is `system:serviceaccount:cluster-doctor:cluster-doctor`"), "{why}");
    let spec = json!({ "audiences": [AUDIENCE], "expirationSeconds": 600 });
    let of_no_pod = plane.token(NAMESPACE, AGENT, &spec).unwrap();
    assert!(rejection(&*reviewer, &of_no_pod).contains("not bound to a pod"));
    let good = plane.pod_token(NAMESPACE, AGENT, "agent-2", AUDIENCE).unwrap();
    let changed = format!("{good}x");
    assert!(rejection(&*reviewer, &changed).contains("did not authenticate it"));
    assert!(rejection(&*reviewer, "no token at all").contains("did not authenticate it"));
    assert_eq!(reviewed_node(&*reviewer, &good).as_deref(), Ok("gpu-2"));
    for pod in ["agent-2", "other-2"] {
        delete(cluster, pod);
    }
}
