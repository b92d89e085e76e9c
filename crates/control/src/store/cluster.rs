//! The cluster as the leader last saw it, for processes that do not lead.

use doctor_core::time::Timestamp;

use super::{
    Store,
    db::Access,
    error::{Result, StoreError},
    lease::Lease,
    operators::{meta, set_meta},
};

const AT: &str = "cluster-at";
const CLUSTER: &str = "cluster";

impl Store {
    /// Replaces the picture that others see. It is one text, replaced as a whole.
    pub fn save_cluster(&self, lease: &Lease, at: Timestamp, picture: &[u8]) -> Result<()> {
        let unreadable = |why: String| StoreError::Unreadable { what: "picture of the cluster", why };
        let text = std::str::from_utf8(picture).map_err(|error| unreadable(error.to_string()))?;
        self.write(lease, |tx| {
            set_meta(tx, AT, &at.millis().to_string())?;
            set_meta(tx, CLUSTER, text)
        })
    }

    /// When a cycle last looked at the cluster and left a picture.
    pub fn cluster_seen(&self) -> Result<Option<Timestamp>> {
        self.transaction(Access::Read, &mut |tx| {
            Ok(meta(tx, AT)?.and_then(|text| text.parse().ok()).map(Timestamp::from_millis))
        })
    }

    /// The last picture, and when it was made.
    pub fn cluster(&self) -> Result<Option<(Timestamp, Vec<u8>)>> {
        self.read(|tx| {
            let at = meta(tx, AT)?.and_then(|text| text.parse().ok()).map(Timestamp::from_millis);
            let picture = meta(tx, CLUSTER)?.map(String::into_bytes);
            Ok(at.zip(picture))
        })
    }
}
