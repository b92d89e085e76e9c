//! Tests agents' tokens, issued and reviewed by a real API server.

use serde_json::json;

use doctor_backend::token_review::{TokenReviewError, TokenReviewer};

use crate::{AGENT, AUDIENCE, Cluster, NAMESPACE, cluster, until};

fn whose(voucher: &dyn TokenReviewer, token: &str) -> Result<String, TokenReviewError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(voucher.review(token.to_owned())).map(|node| node.to_string())
}

fn refused(voucher: &dyn TokenReviewer, token: &str) -> String {
    match whose(voucher, token) {
        Err(TokenReviewError::Rejected(why)) => why,
        other => panic!("{other:?}"),
    }
}

fn delete(cluster: &Cluster, pod: &str) {
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}?gracePeriodSeconds=0");
    assert!(cluster.plane.request("DELETE", &path, None).unwrap().is_success());
}

#[test]
fn the_api_server_says_on_which_node_a_tokens_pod_runs_until_the_pod_is_gone() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    let voucher = backend.token_reviewer();
    cluster.agent_pod("agent-1", "gpu-1", AGENT);
    let token = cluster.plane.pod_token(NAMESPACE, AGENT, "agent-1", AUDIENCE).unwrap();
    assert_eq!(whose(&*voucher, &token).as_deref(), Ok("gpu-1"));
    delete(cluster, "agent-1");
    // The API server caches a review for ten seconds.
    until("the token to be invalid", || whose(&*voucher, &token).is_err());
    assert!(refused(&*voucher, &token).contains("TokenReview did not authenticate it"));
    // A new pod of the same name is a different pod.
    cluster.agent_pod("agent-1", "gpu-2", AGENT);
    assert!(refused(&*voucher, &token).contains("TokenReview did not authenticate it"));
    delete(cluster, "agent-1");
}

#[test]
fn a_token_for_another_audience_or_account_or_of_no_pod_is_rejected() {
    let Some(cluster) = cluster() else { return };
    let backend = cluster.backend();
    let voucher = backend.token_reviewer();
    cluster.agent_pod("agent-2", "gpu-2", AGENT);
    cluster.agent_pod("other-2", "gpu-2", "cluster-doctor");
    let plane = &cluster.plane;
    let for_the_server = plane.pod_token(NAMESPACE, AGENT, "agent-2", "https://kubernetes.default.svc").unwrap();
    assert!(refused(&*voucher, &for_the_server).contains("did not authenticate it"));
    let of_another = plane.pod_token(NAMESPACE, "cluster-doctor", "other-2", AUDIENCE).unwrap();
    let why = refused(&*voucher, &of_another);
    assert!(why.contains("its account is `system:serviceaccount:cluster-doctor:cluster-doctor`"), "{why}");
    let spec = json!({ "audiences": [AUDIENCE], "expirationSeconds": 600 });
    let of_no_pod = plane.token(NAMESPACE, AGENT, &spec).unwrap();
    assert!(refused(&*voucher, &of_no_pod).contains("not bound to a pod"));
    let good = plane.pod_token(NAMESPACE, AGENT, "agent-2", AUDIENCE).unwrap();
    let changed = format!("{good}x");
    assert!(refused(&*voucher, &changed).contains("did not authenticate it"));
    assert!(refused(&*voucher, "no token at all").contains("did not authenticate it"));
    assert_eq!(whose(&*voucher, &good).as_deref(), Ok("gpu-2"));
    for pod in ["agent-2", "other-2"] {
        delete(cluster, pod);
    }
}
