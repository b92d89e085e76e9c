//! An object as this backend reads it, without `managedFields`.
//!
//! The API server writes one entry of `managedFields` for each party that ever wrote the object. Parsed as JSON values they take
//! more memory than everything that is read of a pod or a job, and each cycle reads hundreds of them.

use std::{borrow::Cow, collections::BTreeMap};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::{
    Resource,
    core::{ApiResource, DynamicResourceScope, ObjectMeta},
};
use serde::{Deserialize, Deserializer};

/// An object of any kind, in whose specification and status few fields are read.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct ReadObject<P, U> {
    #[serde(deserialize_with = "metadata")]
    pub(super) metadata: ObjectMeta,
    pub(super) spec: P,
    pub(super) status: Option<U>,
}

/// The metadata that is read.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ReadMetadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    creation_timestamp: Option<Time>,
    deletion_timestamp: Option<Time>,
    owner_references: Option<Vec<OwnerReference>>,
}

fn metadata<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ObjectMeta, D::Error> {
    let read = ReadMetadata::deserialize(deserializer)?;
    Ok(ObjectMeta {
        name: read.name,
        namespace: read.namespace,
        uid: read.uid,
        resource_version: read.resource_version,
        labels: read.labels,
        annotations: read.annotations,
        creation_timestamp: read.creation_timestamp,
        deletion_timestamp: read.deletion_timestamp,
        owner_references: read.owner_references,
        ..ObjectMeta::default()
    })
}

impl<P, U> Resource for ReadObject<P, U> {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn group(kind: &ApiResource) -> Cow<'_, str> {
        kind.group.as_str().into()
    }

    fn version(kind: &ApiResource) -> Cow<'_, str> {
        kind.version.as_str().into()
    }

    fn kind(kind: &ApiResource) -> Cow<'_, str> {
        kind.kind.as_str().into()
    }

    fn plural(kind: &ApiResource) -> Cow<'_, str> {
        kind.plural.as_str().into()
    }

    fn api_version(kind: &ApiResource) -> Cow<'_, str> {
        kind.api_version.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[derive(Debug, Clone, Default, Deserialize)]
    struct Anything {}

    #[test]
    fn all_metadata_but_managed_fields_is_read() {
        let mut meta = json!({
            "name": "run", "namespace": "doctor", "uid": "u-1", "resourceVersion": "17",
            "labels": { "a": "b" }, "annotations": { "c": "d" },
            "creationTimestamp": "2026-11-19T10:00:00Z", "deletionTimestamp": "2026-11-19T11:00:00Z",
            "ownerReferences": [{ "apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": "u-2" }],
        });
        let expected: ObjectMeta = serde_json::from_value(meta.clone()).unwrap();
        meta["managedFields"] = json!([{ "manager": "kubelet", "fieldsV1": { "f:status": {} } }]);
        let object: ReadObject<Anything, Anything> =
            serde_json::from_value(json!({ "kind": "Pod", "metadata": meta, "spec": {}, "status": {} })).unwrap();
        assert_eq!(object.metadata, expected);
    }
}
