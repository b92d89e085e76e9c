//! Identifies agents' tokens through the API server (TokenReview).
//!
//! A token is accepted if it is valid, has our audience, belongs to the agents' account and is bound to a pod; the node is the
//! one on which that pod runs, according to the API server. The API server reports the node since Kubernetes 1.30, in every
//! cluster since 1.32. Without it the token is rejected: looking up the pod by name would need one more permission for
//! unmaintained versions, and would find whichever pod has that name now.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use doctor_backend::token_review::{ReviewFuture, TokenReviewError, TokenReviewer};
use doctor_core::ids::NodeName;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::{Api, Client, api::PostParams};
use tokio::runtime::Handle;

use super::KubernetesConfig;

/// Extra fields that the API server adds to a user whose token is bound to a pod.
const POD: &str = "authentication.kubernetes.io/pod-name";
const NODE: &str = "authentication.kubernetes.io/node-name";

/// The limit for one review. The agent that waits for it retries.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(15);

/// Reviews tokens on the backend's runtime.
pub(super) struct KubernetesTokenReviewer {
    client: Client,
    runtime: Handle,
    config: Arc<KubernetesConfig>,
}

impl KubernetesTokenReviewer {
    pub(super) fn new(client: Client, runtime: Handle, config: Arc<KubernetesConfig>) -> Self {
        Self { client, runtime, config }
    }
}

impl TokenReviewer for KubernetesTokenReviewer {
    fn review(&self, token: String) -> ReviewFuture {
        let (client, config) = (self.client.clone(), Arc::clone(&self.config));
        let task = self.runtime.spawn(async move {
            let audiences = Some(vec![config.agents.audience.clone()]);
            let review =
                TokenReview { spec: TokenReviewSpec { token: Some(token), audiences }, ..TokenReview::default() };
            let reviews = Api::<TokenReview>::all(client);
            let parameters = PostParams::default();
            let answer = tokio::time::timeout(REVIEW_TIMEOUT, reviews.create(&parameters, &review)).await;
            let late = |_| {
                let seconds = REVIEW_TIMEOUT.as_secs();
                TokenReviewError::Unavailable(format!("the API server did not answer within {seconds} s"))
            };
            let answer = answer.map_err(late)?;
            // Also if we lack the permission to review: that says nothing about the token.
            let answer = answer.map_err(|error| TokenReviewError::Unavailable(error.to_string()))?;
            node_of_token(&answer.status.unwrap_or_default(), &config)
        });
        Box::pin(async move { task.await.map_err(|error| TokenReviewError::Unavailable(error.to_string()))? })
    }
}

/// Returns the node that a review identifies.
fn node_of_token(answer: &TokenReviewStatus, config: &KubernetesConfig) -> Result<NodeName, TokenReviewError> {
    let refuse = |why: String| Err(TokenReviewError::Rejected(why));
    if answer.authenticated != Some(true) {
        let why = answer.error.as_deref().unwrap_or("it has expired, its pod is gone, or it is for another audience");
        return refuse(format!("TokenReview did not authenticate it ({why})"));
    }
    let audience = &config.agents.audience;
    if !answer.audiences.as_ref().is_some_and(|all| all.contains(audience)) {
        return refuse(format!("it was not issued for the audience `{audience}`"));
    }
    let user = answer.user.as_ref();
    let (name, expected) = (user.and_then(|user| user.username.as_deref()).unwrap_or_default(), config.agent_user());
    if name != expected {
        return refuse(format!("its account is `{name}`, expected `{expected}`"));
    }
    let none = BTreeMap::new();
    let extra = user.and_then(|user| user.extra.as_ref()).unwrap_or(&none);
    let only = |key: &str| match extra.get(key).map(Vec::as_slice) {
        Some([one]) => Some(one.as_str()),
        _ => None,
    };
    if only(POD).is_none() {
        return refuse("it is not bound to a pod".to_owned());
    }
    match only(NODE).map(NodeName::new) {
        Some(Ok(node)) => Ok(node),
        Some(Err(error)) => refuse(format!("the name of its node is invalid: {error}")),
        None => refuse(
            "the API server does not report the node of its pod; Kubernetes 1.32 and newer do, elsewhere enroll \
             agents (`doctor agent enroll`)"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A response of an API server 1.36, shortened: captured from the testbed's control plane on 2026-11-15.
    fn answer() -> Value {
        json!({
            "authenticated": true,
            "audiences": ["cluster-doctor"],
            "user": {
                "username": "system:serviceaccount:cluster-doctor:cluster-doctor-agent",
                "groups": ["system:serviceaccounts", "system:serviceaccounts:cluster-doctor", "system:authenticated"],
                "extra": {
                    "authentication.kubernetes.io/node-name": ["gpu-1"],
                    "authentication.kubernetes.io/node-uid": ["2fb3a3f2-6c1c-4f3c-9d2b-5f0a3f7a0f10"],
                    "authentication.kubernetes.io/pod-name": ["agent-x7k2p"],
                    "authentication.kubernetes.io/pod-uid": ["7f2d6c56-7a34-4d9e-9b7f-0a6a2f3c9d11"],
                },
            },
        })
    }

    fn review_of(answer: Value) -> Result<String, String> {
        let status = serde_json::from_value(answer).unwrap();
        match node_of_token(&status, &KubernetesConfig::default()) {
            Ok(node) => Ok(node.to_string()),
            Err(TokenReviewError::Rejected(why)) => Err(why),
            Err(TokenReviewError::Unavailable(why)) => panic!("expected a verdict: {why}"),
        }
    }

    fn without(path: &str, instead: Value) -> Value {
        let mut answer = answer();
        *answer.pointer_mut(path).unwrap() = instead;
        answer
    }

    #[test]
    fn a_token_of_the_agent_account_identifies_the_node_of_its_pod() {
        assert_eq!(review_of(answer()), Ok("gpu-1".to_owned()));
    }

    #[test]
    fn every_other_token_is_rejected_with_its_reason() {
        let extra = |key: &str| format!("/user/extra/authentication.kubernetes.io~1{key}");
        for (answer, reason) in [
            (json!({ "error": "token has been invalidated" }), "token has been invalidated"),
            (json!({}), "did not authenticate it"),
            (without("/authenticated", json!(false)), "did not authenticate it"),
            (without("/audiences", json!(["https://kubernetes.default.svc"])), "the audience `cluster-doctor`"),
            // A server without audience support returns none: it would also accept a token for itself.
            (without("/audiences", Value::Null), "the audience `cluster-doctor`"),
            (without("/user/username", json!("system:serviceaccount:default:train")), "expected `system:service"),
            (without("/user", Value::Null), "its account is ``"),
            (without("/user/extra", Value::Null), "not bound to a pod"),
            (without(&extra("pod-name"), json!([])), "not bound to a pod"),
            (without(&extra("node-name"), json!([])), "does not report the node"),
            (without(&extra("node-name"), json!(["gpu-1", "gpu-2"])), "does not report the node"),
            (without(&extra("node-name"), json!(["gpu 1"])), "is invalid"),
        ] {
            let refused = review_of(answer.clone()).unwrap_err();
            assert!(refused.contains(reason), "{refused}: {answer}");
        }
    }
}
