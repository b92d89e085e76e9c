//! The site's profiles, as the controller sends them to agents in reply to a report.
//!
//! A report names the digest of the profiles that its agent has. If the controller has others, its reply carries them.
//! The reply names the report that it answers and is signed with the node's key, so that it can be neither forged nor
//! replayed.

use doctor_core::{hex, ids::NodeName};
use sha2::{Digest, Sha256};

use crate::document::RunKey;

/// The size limit of all files together.
pub const MAX_PROFILE_BYTES: usize = 1 << 20;

/// The size limit of a reply. A profile has no control characters but tabs and line breaks, so JSON at most doubles it.
pub const MAX_REPLY_BYTES: usize = 2 * MAX_PROFILE_BYTES + 4096;

/// Domain separation from the signatures of documents.
const HEADER: &str = "doctor-profiles-1 ";

/// The texts of the site's profile files, in the order in which they are merged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SiteProfiles(Vec<String>);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the site's profiles have {bytes} bytes; agents accept at most {MAX_PROFILE_BYTES}")]
pub struct TooManyProfiles {
    bytes: usize,
}

impl SiteProfiles {
    /// # Errors
    /// If the files are too long together.
    pub fn new(files: Vec<String>) -> Result<Self, TooManyProfiles> {
        let bytes = files.iter().map(String::len).sum();
        if bytes > MAX_PROFILE_BYTES { Err(TooManyProfiles { bytes }) } else { Ok(Self(files)) }
    }

    pub fn files(&self) -> &[String] {
        &self.0
    }

    /// Returns a digest by which two sets are compared.
    pub fn digest(&self) -> String {
        let mut hasher = Sha256::new();
        for file in &self.0 {
            hasher.update((file.len() as u64).to_le_bytes());
            hasher.update(file);
        }
        hex::encode(&hasher.finalize()[..16])
    }

    /// Returns the body of the reply to this report of this node.
    ///
    /// # Errors
    /// Never in practice: texts have a JSON form.
    pub fn sign(&self, node: &NodeName, number: u64, key: &RunKey) -> Result<String, serde_json::Error> {
        let body = serde_json::to_string(&self.0)?;
        let signature = key.signature(signed_text(node, number, &body).as_bytes());
        Ok(format!("{HEADER}{signature}\n{body}"))
    }

    /// Returns whether the body of a reply claims to be profiles.
    pub fn is_reply(body: &str) -> bool {
        body.starts_with(HEADER)
    }

    /// Parses the body of a reply. Returns `None` unless it was issued to this node in reply to this report.
    pub fn open(reply: &str, node: &NodeName, number: u64, key: &RunKey) -> Option<Self> {
        if reply.len() > MAX_REPLY_BYTES {
            return None;
        }
        let (signature, body) = reply.strip_prefix(HEADER)?.split_once('\n')?;
        let signed = key.verify(signed_text(node, number, body).as_bytes(), signature);
        let files = signed.then(|| serde_json::from_str(body).ok())??;
        Self::new(files).ok()
    }
}

fn signed_text(node: &NodeName, number: u64, body: &str) -> String {
    format!("{HEADER}{node} {number}\n{body}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RunKey = RunKey::new([7; 32]);

    fn node(name: &str) -> NodeName {
        NodeName::new(name).unwrap()
    }

    #[test]
    fn profiles_are_accepted_only_by_their_node_in_reply_to_its_report() {
        let site = SiteProfiles::new(vec!["sku = \"ours\"\nversion = 1\n".to_owned()]).unwrap();
        let reply = site.sign(&node("n1"), 41, &KEY).unwrap();
        assert!(SiteProfiles::is_reply(&reply) && !SiteProfiles::is_reply("heard\n"));
        assert_eq!(SiteProfiles::open(&reply, &node("n1"), 41, &KEY), Some(site));
        assert_eq!(SiteProfiles::open(&reply, &node("n1"), 42, &KEY), None, "replayed from an older reply");
        assert_eq!(SiteProfiles::open(&reply, &node("n2"), 41, &KEY), None);
        assert_eq!(SiteProfiles::open(&reply, &node("n1"), 41, &RunKey::new([8; 32])), None);
        for index in 0..reply.len() {
            let mut changed = reply.clone().into_bytes();
            changed[index] ^= 1;
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(SiteProfiles::open(&changed, &node("n1"), 41, &KEY), None, "changed at {index}");
            assert_eq!(SiteProfiles::open(&reply[..index], &node("n1"), 41, &KEY), None, "cut at {index}");
        }
    }

    #[test]
    fn the_digest_depends_on_every_file_and_their_limit_is_a_mebibyte() {
        let digest =
            |files: &[&str]| SiteProfiles::new(files.iter().map(|file| (*file).to_owned()).collect()).unwrap().digest();
        assert_eq!(digest(&[]), SiteProfiles::default().digest());
        assert_eq!(digest(&["ab", "c"]), digest(&["ab", "c"]));
        for other in [&["a", "bc"][..], &["c", "ab"], &["abc"], &[]] {
            assert_ne!(digest(&["ab", "c"]), digest(other), "{other:?}");
        }
        let half = || "#".repeat(MAX_PROFILE_BYTES / 2);
        let full = SiteProfiles::new(vec![half(), half()]).unwrap();
        let reply = full.sign(&node("n1"), 1, &KEY).unwrap();
        assert_eq!(SiteProfiles::open(&reply, &node("n1"), 1, &KEY), Some(full));
        let error = SiteProfiles::new(vec![half(), half(), "#".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("1048577"), "{error}");
    }
}
