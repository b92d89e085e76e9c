//! How a job sends its result document: by the HTTP client of the agent.

use doctor_core::ids::{NodeName, RunId};

use crate::{
    agent::http::{self, Address, BadAddress},
    job::{PostReply, ResultPost},
};

/// Returns the post of a run's result on this node to the agent endpoint with this URL.
///
/// # Errors
/// If the URL cannot be used.
pub fn to(url: &str, run: RunId, node: NodeName) -> Result<ResultPost, BadAddress> {
    let address: Address = url.parse()?;
    let shown = address.to_string();
    let send = move |document: &[u8], limit| {
        let reply = http::post_result(&address, run, &node, document, limit)?;
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
        assert!(to("nonsense", RunId::from_number(7), NodeName::new("n1").unwrap()).is_err());
    }
}
