//! How a job sends its result document: by the HTTP client of the agent.

use doctor_checks::{key_fingerprint::BadFingerprint, result_transport::split_keys};
use doctor_core::ids::{NodeName, RunId};

use crate::{
    agent::{
        http::{self, Address, BadAddress},
        tls::{TlsClient, TlsError},
    },
    job::{PostReply, ResultPost},
};

/// Why a result cannot be posted to this URL.
#[derive(Debug, thiserror::Error)]
pub enum ResultPostError {
    #[error(transparent)]
    Address(#[from] BadAddress),
    #[error(transparent)]
    Fingerprint(#[from] BadFingerprint),
    #[error("{0} cannot be authenticated: the fingerprint of its key is missing (`{0}#sha256:…`)")]
    NoTrust(Address),
    #[error("{0} is not encrypted, and a fingerprint of its key is given: use https://")]
    KeyOfPlain(Address),
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Returns the post of a run's result on this node to the agent endpoint with this URL and, if it is encrypted, these keys
/// ([`doctor_checks::result_transport::with_keys`]).
///
/// # Errors
/// If the URL cannot be used, no key of an encrypted endpoint is known, or one of an endpoint that is not encrypted.
pub fn to(url: &str, run: RunId, node: NodeName) -> Result<ResultPost, ResultPostError> {
    let (url, keys) = split_keys(url)?;
    let address: Address = url.parse()?;
    let tls = match (address.is_encrypted(), keys.is_empty()) {
        (false, true) => None,
        (false, false) => return Err(ResultPostError::KeyOfPlain(address)),
        (true, true) => return Err(ResultPostError::NoTrust(address)),
        (true, false) => Some(TlsClient::with_pinned_keys(&keys)?),
    };
    let shown = address.to_string();
    let send = move |document: &[u8], limit| {
        let reply = http::post_result(&address, tls.as_ref(), (run, &node), document, limit)?;
        Ok(PostReply { status: reply.status, retry_after: reply.retry_after, text: reply.text })
    };
    Ok(ResultPost { address: shown, send: Box::new(send) })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
        time::Duration,
    };

    use doctor_checks::key_fingerprint::KeyFingerprint;

    use super::*;

    #[test]
    fn a_result_is_posted_with_its_run_and_node() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/doctor", listener.local_addr().unwrap());
        let controller = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut received, mut buffer) = (Vec::new(), [0; 1024]);
            while !received.ends_with(b"DOCUMENT") {
                let count = stream.read(&mut buffer).unwrap();
                received.extend(&buffer[..count]);
            }
            stream.write_all(b"HTTP/1.1 503 Busy\r\nretry-after: 3\r\ncontent-length: 5\r\n\r\nfull\n").unwrap();
            String::from_utf8(received).unwrap()
        });
        let post = to(&url, RunId::from_number(7), NodeName::new("n1").unwrap()).unwrap();
        let reply = (post.send)(b"DOCUMENT", Duration::from_secs(240)).unwrap();
        let retry_after = Some(Duration::from_secs(3));
        assert_eq!(reply, PostReply { status: 503, retry_after, text: "full".to_owned() });
        let received = controller.join().unwrap();
        assert!(received.starts_with("POST /doctor/api/v1/results HTTP/1.1\r\n"), "{received}");
        assert!(received.contains("\r\nx-doctor-run: r0000000000007\r\nX-Doctor-Node: n1\r\n"), "{received}");
        let refused = |url: &str| to(url, RunId::from_number(7), NodeName::new("n1").unwrap()).unwrap_err();
        assert!(matches!(refused("nonsense"), ResultPostError::Address(_)));
        assert!(matches!(refused("https://ctl:7443"), ResultPostError::NoTrust(_)), "nobody is trusted by default");
        assert!(matches!(refused("https://ctl:7443#sha256:1"), ResultPostError::Fingerprint(_)));
        let key = KeyFingerprint::of(b"key");
        assert!(matches!(refused(&format!("http://ctl:7443#{key}")), ResultPostError::KeyOfPlain(_)));
    }
}
