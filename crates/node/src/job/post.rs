//! Posts the result document to the controller, so that no shared directory is needed.
//!
//! A repeated post is harmless: the first one counts. A job that is asked to stop gives up within seconds, because its
//! node is wanted.

use std::time::{Duration, Instant};

use doctor_core::ids::{NodeName, RunId};

use super::log::Log;
use crate::{
    agent::http::{self, Address},
    stop::Stop,
};

/// How long a post is repeated while the document has another way.
const PATIENCE: Duration = Duration::from_secs(20);
/// And after the job was asked to stop or exceeded its limit.
const PATIENCE_AFTER_STOP: Duration = Duration::from_secs(5);
/// Limit of one exchange. The controller answers once the document is durable, for which it allows twenty seconds.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);
const FIRST_WAIT: Duration = Duration::from_secs(1);
const MAX_WAIT: Duration = Duration::from_secs(15);

/// A document and where it is posted.
pub(super) struct ResultPost<'a> {
    pub(super) url: &'a str,
    pub(super) run: RunId,
    pub(super) node: &'a NodeName,
    pub(super) bytes: &'a [u8],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PostOutcome {
    /// The controller has it.
    Accepted,
    /// It will never accept it.
    Rejected,
    /// It did not answer, or could not store it, in time.
    Unanswered,
}

impl ResultPost<'_> {
    /// Posts the document for a while.
    pub(super) fn send_soon(&self, stop: &Stop, log: &Log) -> PostOutcome {
        self.send(PATIENCE, stop, log)
    }

    /// Posts the document until the job's limit.
    pub(super) fn send_until_stopped(&self, stop: &Stop, log: &Log) -> PostOutcome {
        self.send(Duration::MAX, stop, log)
    }

    fn send(&self, patience: Duration, stop: &Stop, log: &Log) -> PostOutcome {
        let address: Address = match self.url.parse() {
            Ok(address) => address,
            Err(error) => {
                log.line("job", &format!("the result cannot be posted: {error}"));
                return PostOutcome::Rejected;
            }
        };
        let began = Instant::now();
        let (mut wait, mut stopped, mut last_failure) = (FIRST_WAIT, None, String::new());
        loop {
            if stopped.is_none() {
                stopped = stop.requested().map(|_| Instant::now());
            }
            let left_after_stop = stopped.map(|at: Instant| PATIENCE_AFTER_STOP.saturating_sub(at.elapsed()));
            let left = patience.saturating_sub(began.elapsed()).min(left_after_stop.unwrap_or(Duration::MAX));
            if left.is_zero() {
                log.line("job", "the result was not posted in time");
                return PostOutcome::Unanswered;
            }
            let failure = match http::post_result(&address, self.run, self.node, self.bytes, left.min(EXCHANGE_TIMEOUT))
            {
                Ok(reply) => match reply.status {
                    200..=299 => {
                        log.line("job", &format!("{address} has the result"));
                        return PostOutcome::Accepted;
                    }
                    408 | 429 | 500..=599 => {
                        wait = wait.max(reply.retry_after.unwrap_or_default()).min(MAX_WAIT);
                        format!("{address} is busy ({}: {})", reply.status, reply.text)
                    }
                    _ => {
                        log.line(
                            "job",
                            &format!("{address} does not accept the result ({}: {})", reply.status, reply.text),
                        );
                        return PostOutcome::Rejected;
                    }
                },
                Err(error) => format!("{address} does not answer: {error}"),
            };
            if failure != last_failure {
                log.line("job", &failure);
                last_failure = failure;
            }
            match stopped {
                // The request was noted; the pause ends with the patience that is left.
                Some(_) => std::thread::sleep(wait.min(left)),
                None => drop(stop.requested_within(wait.min(left))),
            }
            wait = (wait * 2).min(MAX_WAIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::TcpListener,
        thread,
    };

    use super::*;

    /// Answers one connection after the other with these responses. Returns its URL, and what it received.
    fn controller(responses: Vec<&'static str>) -> (String, thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/doctor", listener.local_addr().unwrap());
        let answer = move |response: &str| {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut received, mut buffer) = (Vec::new(), [0; 1024]);
            while !received.ends_with(b"DOCUMENT") {
                let count = stream.read(&mut buffer).unwrap();
                received.extend(&buffer[..count]);
            }
            write!(stream, "HTTP/1.1 {response}\r\ncontent-length: 0\r\n\r\n").unwrap();
            String::from_utf8(received).unwrap()
        };
        (url, thread::spawn(move || responses.into_iter().map(answer).collect()))
    }

    fn send(url: &str, stop: &Stop, patience: Duration) -> PostOutcome {
        let node = NodeName::new("n1").unwrap();
        let post = ResultPost { url, run: RunId::from_number(7), node: &node, bytes: b"DOCUMENT" };
        post.send(patience, stop, &Log::to_output())
    }

    #[test]
    fn a_result_is_posted_again_until_the_controller_has_it() {
        let (url, controller) = controller(vec!["503 Service Unavailable\r\nretry-after: 0", "202 Accepted"]);
        assert_eq!(send(&url, &Stop::never(), Duration::from_secs(240)), PostOutcome::Accepted);
        let received = controller.join().unwrap();
        assert_eq!(received.len(), 2);
        assert!(received[1].starts_with("POST /doctor/api/v1/results HTTP/1.1\r\n"), "{received:?}");
        assert!(received[1].contains("\r\nx-doctor-run: r0000000000007\r\nX-Doctor-Node: n1\r\n"), "{received:?}");
    }

    #[test]
    fn a_result_that_is_never_accepted_is_posted_once() {
        for status in ["410 Gone", "403 Forbidden", "413 Payload Too Large", "404 Not Found"] {
            let (url, controller) = controller(vec![status]);
            assert_eq!(send(&url, &Stop::never(), Duration::from_secs(240)), PostOutcome::Rejected, "{status}");
            controller.join().unwrap();
        }
        assert_eq!(send("nonsense", &Stop::never(), Duration::from_secs(240)), PostOutcome::Rejected);
    }

    #[test]
    fn a_job_at_its_limit_does_not_wait_for_an_absent_controller() {
        let began = Instant::now();
        let stop = Stop::never().after(Duration::ZERO);
        assert_eq!(send("http://127.0.0.1:1", &stop, Duration::MAX), PostOutcome::Unanswered);
        assert!(began.elapsed() < Duration::from_secs(120));
    }
}
